"""The objects we show on the bus, as data: interfaces are tables, an object is its property values.

Reading a property looks into a dictionary and nothing else, so anybody may do it as often as they like. A flurry of
changes makes one PropertiesChanged per object, with what differs from what was said last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, KeysView, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtuned.bus import Answer, Bus, Call, Rejected, Variant

COALESCE_S = 0.02
PROPERTIES = "org.freedesktop.DBus.Properties"
INTROSPECTABLE = "org.freedesktop.DBus.Introspectable"
PEER = "org.freedesktop.DBus.Peer"
OBJECT_MANAGER = "org.freedesktop.DBus.ObjectManager"
DOCTYPE = (
    '<!DOCTYPE node PUBLIC "-//freedesktop//DTD D-BUS Object Introspection 1.0//EN"\n'
    ' "http://www.freedesktop.org/standards/dbus/1.0/introspect.dtd">\n'
)
STANDARD_XML = f"""\
 <interface name="{PEER}">
  <method name="Ping"/>
  <method name="GetMachineId"><arg name="id" type="s" direction="out"/></method>
 </interface>
 <interface name="{INTROSPECTABLE}">
  <method name="Introspect"><arg name="xml" type="s" direction="out"/></method>
 </interface>
"""
PROPERTIES_XML = f"""\
 <interface name="{PROPERTIES}">
  <method name="Get">
   <arg name="interface" type="s" direction="in"/>
   <arg name="name" type="s" direction="in"/>
   <arg name="value" type="v" direction="out"/>
  </method>
  <method name="GetAll">
   <arg name="interface" type="s" direction="in"/>
   <arg name="values" type="a{{sv}}" direction="out"/>
  </method>
  <signal name="PropertiesChanged">
   <arg name="interface" type="s"/><arg name="changed" type="a{{sv}}"/><arg name="invalidated" type="as"/>
  </signal>
 </interface>
"""
OBJECT_MANAGER_XML = f"""\
 <interface name="{OBJECT_MANAGER}">
  <method name="GetManagedObjects"><arg name="objects" type="a{{oa{{sa{{sv}}}}}}" direction="out"/></method>
  <signal name="InterfacesAdded">
   <arg name="object" type="o"/><arg name="interfaces" type="a{{sa{{sv}}}}"/>
  </signal>
  <signal name="InterfacesRemoved"><arg name="object" type="o"/><arg name="interfaces" type="as"/></signal>
 </interface>
"""
Args = tuple[tuple[str, str], ...]  # (name, signature)


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method: what it takes and gives, and the coroutine function that gets the Call and returns the values."""

    takes: Args = ()
    gives: Args = ()
    run: Callable[[Call], Awaitable[list[Any]]]


@dataclass(frozen=True, kw_only=True)
class Interface:
    """What objects of one kind can do. Properties (name -> signature) are read-only: setting one has no place for an
    authorisation. `constant` ones never change."""

    name: str
    properties: Mapping[str, str]
    constant: frozenset[str] = frozenset()
    methods: Mapping[str, Method] = field(default_factory=dict)
    signals: Mapping[str, Args] = field(default_factory=dict)

    def variants(self, values: Mapping[str, Any]) -> dict[str, Variant]:
        return {name: Variant(self.properties[name], value) for name, value in values.items()}

    def xml(self) -> str:
        lines = [f' <interface name="{self.name}">']
        for name, method in self.methods.items():
            lines.append(f'  <method name="{name}">')
            for direction, args in (("in", method.takes), ("out", method.gives)):
                lines += [f'   <arg name="{a}" type="{t}" direction="{direction}"/>' for a, t in args]
            lines.append("  </method>")
        for name, args in self.signals.items():
            lines.append(f'  <signal name="{name}">')
            lines += [f'   <arg name="{a}" type="{t}"/>' for a, t in args]
            lines.append("  </signal>")
        for name, signature in self.properties.items():
            lines.append(f'  <property name="{name}" type="{signature}" access="read">')
            if name in self.constant:
                lines.append('   <annotation name="org.freedesktop.DBus.Property.EmitsChangedSignal" value="const"/>')
            lines.append("  </property>")
        return "\n".join([*lines, " </interface>\n"])


@dataclass(kw_only=True)
class _Object:
    interface: Interface
    values: dict[str, Any]
    said: dict[str, Any]


class Objects:
    """A tree of objects below `root`, each with one interface of ours. `root` itself is also their ObjectManager."""

    def __init__(self, bus: Bus, root: str) -> None:
        self._bus, self._root = bus, root
        self._objects: dict[str, _Object] = {}
        self._children: dict[str, dict[str, None]] = {}  # in order, without duplicates
        self._dirty: dict[str, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._machine_id = ""

    def add(self, path: str, interface: Interface, values: Mapping[str, Any]) -> None:
        """Show an object, with a value for every property of its interface."""
        entry = _Object(interface=interface, values=dict(values), said=dict(values))
        body = [path, {interface.name: interface.variants(entry.values)}]
        self._objects[path] = entry
        while path != "/":
            parent, _, name = path.rpartition("/")
            path = parent or "/"
            self._children.setdefault(path, {})[name] = None
        if body[0] != self._root:
            self._bus.emit(self._root, OBJECT_MANAGER, "InterfacesAdded", "oa{sa{sv}}", body)

    def paths(self) -> KeysView[str]:
        return self._objects.keys()

    def remove(self, path: str) -> None:
        """Show it no more, nor the empty nodes above it that had it for their last."""
        gone = path
        entry = self._objects.pop(path)
        self._dirty.pop(path, None)
        while path != "/" and path not in self._objects and not self._children.get(path):
            self._children.pop(path, None)
            parent, _, name = path.rpartition("/")
            path = parent or "/"
            self._children[path].pop(name)
        self._bus.emit(self._root, OBJECT_MANAGER, "InterfacesRemoved", "oas", [gone, [entry.interface.name]])

    def update(self, path: str, **values: Any) -> None:
        """Set property values; PropertiesChanged follows within COALESCE_S, with those that changed."""
        self._objects[path].values.update(values)
        self._dirty[path] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COALESCE_S, self.flush)

    def flush(self) -> None:
        """Say now what changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        dirty, self._dirty = self._dirty, {}
        for path in dirty:
            entry = self._objects[path]
            changed = {name: value for name, value in entry.values.items() if entry.said[name] != value}
            if changed:
                entry.said.update(changed)
                body = [entry.interface.name, entry.interface.variants(changed), []]
                self._bus.emit(path, PROPERTIES, "PropertiesChanged", "sa{sv}as", body)

    def emit(self, path: str, member: str, *values: Any) -> None:
        """Send one of the signals that the object's interface declares."""
        interface = self._objects[path].interface
        signature = "".join(t for _, t in interface.signals[member])
        self._bus.emit(path, interface.name, member, signature, list(values))

    # -- answering ---------------------------------------------------------------------------------------------------

    def dispatch(self, call: Call) -> Answer | Awaitable[Answer]:
        """Answer a method call, or return the coroutine that will. Raises Rejected for calls that fit nothing here."""
        if call.interface == INTROSPECTABLE and call.member == "Introspect":
            return "s", [self.introspect(call.path)]
        if call.interface == PEER and call.member == "Ping":
            return "", []
        if call.interface == PEER and call.member == "GetMachineId":
            return self._get_machine_id()
        entry = self._objects.get(call.path)
        if entry is None:
            raise Rejected("UnknownObject", f"there is no object {call.path}")
        if call.interface == OBJECT_MANAGER and call.path == self._root and call.member == "GetManagedObjects":
            return "a{oa{sa{sv}}}", [self._managed()]
        if call.interface == PROPERTIES:
            return self._properties(entry, call)
        if call.interface not in ("", entry.interface.name):
            raise Rejected("UnknownInterface", f"{call.path} has no interface {call.interface}")
        method = entry.interface.methods.get(call.member)
        if method is None:
            raise Rejected("UnknownMethod", f"{entry.interface.name} has no method {call.member}")
        expected = "".join(signature for _, signature in method.takes)
        if call.signature != expected:
            raise Rejected("InvalidArgs", f"{call.member} takes ({expected}), not ({call.signature})")
        return self._run(method, call)

    async def _run(self, method: Method, call: Call) -> Answer:
        return "".join(signature for _, signature in method.gives), await method.run(call)

    def introspect(self, path: str) -> str:
        entry, children = self._objects.get(path), self._children.get(path, {})
        if entry is None and not children:
            raise Rejected("UnknownObject", f"there is no object {path}")
        text = DOCTYPE + "<node>\n" + STANDARD_XML
        if entry is not None:
            text += PROPERTIES_XML + (OBJECT_MANAGER_XML if path == self._root else "") + entry.interface.xml()
        return text + "".join(f' <node name="{name}"/>\n' for name in children) + "</node>\n"

    def _managed(self) -> dict[str, dict[str, dict[str, Variant]]]:
        return {
            path: {entry.interface.name: entry.interface.variants(entry.values)}
            for path, entry in self._objects.items()
            if path != self._root
        }

    def _properties(self, entry: _Object, call: Call) -> Answer:
        wanted = {"Get": "ss", "GetAll": "s", "Set": "ssv"}.get(call.member)
        if wanted is None:
            raise Rejected("UnknownMethod", f"{PROPERTIES} has no method {call.member}")
        if call.signature != wanted:
            raise Rejected("InvalidArgs", f"{call.member} takes ({wanted}), not ({call.signature})")
        ours = call.body[0] in ("", entry.interface.name)
        if call.member == "GetAll":
            if not ours and call.body[0] not in (PROPERTIES, INTROSPECTABLE, PEER, OBJECT_MANAGER):
                raise Rejected("UnknownInterface", f"{call.path} has no interface {call.body[0]}")
            return "a{sv}", [entry.interface.variants(entry.values) if ours else {}]
        name = call.body[1]
        if not ours or name not in entry.interface.properties:
            raise Rejected("UnknownProperty", f"{call.path} has no property {call.body[0]}.{name}")
        if call.member == "Set":
            raise Rejected("PropertyReadOnly", f"{name} is read-only")
        return "v", [Variant(entry.interface.properties[name], entry.values[name])]

    async def _get_machine_id(self) -> Answer:
        if not self._machine_id:
            [self._machine_id] = await self._bus.call(
                "org.freedesktop.DBus", "/org/freedesktop/DBus", PEER, "GetMachineId"
            )
        return "s", [self._machine_id]
