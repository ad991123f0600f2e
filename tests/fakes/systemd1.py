"""PID 1 for tests: the part of org.freedesktop.systemd1 that torchtuned talks to, as strict as the real one.

It takes only the properties that systemd has for scopes, each with systemd's own signature, only processes that exist,
and emits signals only to who subscribed. A scope holds its processes (and their children) until the last has ended,
and goes away then, as with CollectMode=inactive-or-failed. Run it beside a private bus:

    python tests/fakes/systemd1.py ADDRESS [--version 252]

It prints "ready" when it owns its name. org.torchtuned1.Test.Set(key, JSON) on /test steers it and Get reads:
`hang` (members that are never answered), `fail` (member -> D-Bus error name), `job` (our unit's job type),
`active` and `purged` (unit names), `result` (how start jobs end), `linger` (scopes outlive their processes), `vanish`
(they end when they have been listed), `reload` (units are removed and there again), `calls` (all (member, arguments)
so far), `scopes`. Remove(scope) ends one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from functools import partial
from typing import Any

import psutil
from dbus_next import Message, MessageType, Variant
from dbus_next.aio import MessageBus

SERVICE = "org.freedesktop.systemd1"
PATH = "/org/freedesktop/systemd1"
MANAGER = f"{SERVICE}.Manager"
UNIT_JOB = f"{PATH}/job/77"
SCOPE_PROPERTIES = {  # from systemd's bus_unit_set_transient_property, bus_cgroup_set_property, bus_scope_…
    "Description": "s",
    "Slice": "s",
    "After": "as",
    "CollectMode": "s",
    "TasksMax": "t",
    "AllowedCPUs": "ay",
    "AllowedMemoryNodes": "ay",
    "OOMPolicy": "s",
    "SendSIGHUP": "b",
    "PIDs": "au",
    "PIDFDs": "ah",
}


class Refused(Exception):
    """(D-Bus error name, text)"""


def plain(value: Any) -> Any:
    if isinstance(value, Variant):
        return plain(value.value)
    if isinstance(value, bytes):
        return list(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


class Pid1:
    def __init__(self, bus: MessageBus, version: int) -> None:
        self.bus, self.version = bus, version
        self.subscribers: set[str] = set()
        self.knobs: dict[str, Any] = {"hang": [], "fail": {}, "job": "", "active": [], "purged": [], "result": "done"}
        self.calls: list[Any] = []
        self.scopes: dict[str, dict[str, Any]] = {}
        self.members: dict[str, list[int]] = {}
        self.units: dict[int, str] = {}  # pid -> its unit, for GetUnitByPID
        self.jobs = 0

    def receive(self, message: Message) -> bool:
        if message.message_type is not MessageType.METHOD_CALL:
            return False
        try:
            if message.interface == "org.torchtuned1.Test":
                answer = self.test(message)
            else:
                self.calls.append([message.member, plain(message.body)])
                if message.member in self.knobs["hang"]:
                    return True
                if message.member in self.knobs["fail"]:
                    raise Refused(self.knobs["fail"][message.member], "as the test wanted")
                answer = self.answer(message)
        except Refused as e:
            self.bus.send(Message.new_error(message, e.args[0], e.args[1]))
        else:
            self.bus.send(Message.new_method_return(message, *answer[:2]))
            for later in answer[2:]:
                later()
        for fd in message.unix_fds:
            os.close(fd)
        return True

    def test(self, message: Message) -> tuple[Any, ...]:
        if message.member == "Set":
            key, text = message.body
            self.knobs[key] = json.loads(text)
            if key == "reload":  # what daemon-reload does: every unit is removed, and is there again
                for name in self.scopes:
                    self.signal("UnitRemoved", "so", [name, self.unit_path(name)])
            if key == "moved":  # a unit was started or stopped
                self.signal("JobRemoved", "uoss", [1, f"{PATH}/job/1", self.knobs[key], "done"])
            return "", []
        if message.member == "Remove":
            self.remove(message.body[0])
            return "", []
        values = {**self.knobs, "calls": self.calls, "scopes": self.scopes}
        return "s", [json.dumps(values[message.body[0]])]

    def answer(self, message: Message) -> tuple[Any, ...]:
        member, body = message.member, message.body
        if message.interface == "org.freedesktop.DBus.Properties":
            return self.get(message.path, *body)
        if message.interface != MANAGER or message.path != PATH:
            raise Refused("org.freedesktop.DBus.Error.UnknownMethod", f"no {message.interface}.{member}")
        signature, handler = {
            "Subscribe": ("", self.subscribe),
            "StartTransientUnit": ("ssa(sv)a(sa(sv))", self.start),
            "SetUnitProperties": ("sba(sv)", self.set_properties),
            "GetUnit": ("s", self.get_unit),
            "GetUnitProcesses": ("s", self.get_processes),
            "GetUnitByPID": ("u", lambda pid: ("o", [f"{PATH}/unit/torchtuned_2eservice"])),
            "ListUnitsByPatterns": ("asas", self.list_by_patterns),
            "ListUnitsByNames": ("as", self.list_by_names),
        }[member]
        if message.signature != signature:
            raise Refused("org.freedesktop.DBus.Error.InvalidArgs", f"{member} takes {signature}")
        if member == "StartTransientUnit":
            return handler(*body, fds=message.unix_fds)
        if member == "Subscribe":
            return self.subscribe(message.sender)
        return handler(*body)

    def subscribe(self, sender: str) -> tuple[Any, ...]:
        if sender in self.subscribers:
            raise Refused(f"{SERVICE}.AlreadySubscribed", "Client is already subscribed.")
        self.subscribers.add(sender)
        return "", []

    def start(self, name: str, mode: str, properties: list[Any], aux: list[Any], *, fds: list[int]) -> tuple[Any, ...]:
        if mode not in ("replace", "fail", "isolate", "ignore-dependencies", "ignore-requirements"):
            raise Refused("org.freedesktop.DBus.Error.InvalidArgs", f"Job mode {mode} invalid")
        if not name.endswith(".scope") or aux:
            raise Refused("org.freedesktop.DBus.Error.InvalidArgs", "only scopes here")
        if name in self.scopes:
            raise Refused(f"{SERVICE}.UnitExists", f"Unit {name} was already loaded or has a fragment file.")
        found = self.checked(properties)
        if "PIDFDs" in found and self.version < 255:
            raise Refused("org.freedesktop.DBus.Error.PropertyReadOnly", "Cannot set property PIDFDs, or unknown")
        pidfds = [os.dup(fds[i]) for i in found.get("PIDFDs", [])]
        for pid in found.get("PIDs", []):
            if pid <= 1:
                raise Refused("org.freedesktop.DBus.Error.InvalidArgs", "PID is invalid")
            try:
                pidfds.append(os.pidfd_open(pid))
            except OSError:
                raise Refused("org.freedesktop.DBus.Error.UnixProcessIdUnknown", f"no process {pid}") from None
        if not pidfds:
            raise Refused(f"{SERVICE}.BadUnitSetting", "a scope needs processes")
        if not str(found.get("Slice", "")).endswith(".slice"):
            raise Refused("org.freedesktop.DBus.Error.InvalidArgs", "Slice is not a slice")
        self.jobs += 1
        job = f"{PATH}/job/{self.jobs}"
        result = self.knobs["result"]
        if result == "done":
            self.scopes[name] = {key: plain(value) for key, value in found.items()}
            self.members[name] = found.get("PIDs", [])
            loop = asyncio.get_running_loop()
            left = set(pidfds)
            for pidfd in pidfds:
                loop.add_reader(pidfd, self.ended, name, pidfd, left)
        removed = [self.jobs, job, name, result]
        return "o", [job], lambda: self.signal("JobRemoved", "uoss", removed)

    def ended(self, name: str, pidfd: int, left: set[int]) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        left.discard(pidfd)
        if not left and not self.knobs.get("linger"):
            self.remove(name)

    def remove(self, name: str) -> None:
        if self.scopes.pop(name, None) is None:
            return
        self.signal("UnitRemoved", "so", [name, self.unit_path(name)])

    def set_properties(self, name: str, _runtime: object, properties: list[Any]) -> tuple[Any, ...]:
        if name not in self.scopes:
            raise Refused(f"{SERVICE}.NoSuchUnit", f"Unit {name} not loaded.")
        self.scopes[name].update({key: plain(value) for key, value in self.checked(properties).items()})
        return "", []

    def checked(self, properties: list[Any]) -> dict[str, Any]:
        found = {}
        for name, value in properties:
            if SCOPE_PROPERTIES.get(name) != value.signature:
                raise Refused("org.freedesktop.DBus.Error.InvalidArgs", f"{name} of type {value.signature}")
            text = value.value if value.signature == "s" else ""
            if any(sign < " " or "\x7f" <= sign <= "\x9f" for sign in text):
                raise Refused("org.freedesktop.DBus.Error.InvalidArgs", f"{name} has control characters")
            found[name] = value.value
        if found.get("CollectMode", "inactive") not in ("inactive", "inactive-or-failed"):
            raise Refused("org.freedesktop.DBus.Error.InvalidArgs", "CollectMode")
        if found.get("OOMPolicy", "stop") not in ("stop", "continue", "kill"):
            raise Refused("org.freedesktop.DBus.Error.InvalidArgs", "OOMPolicy")
        return found

    def get_unit(self, name: str) -> tuple[Any, ...]:
        if name not in self.scopes:
            raise Refused(f"{SERVICE}.NoSuchUnit", f"Unit {name} not loaded.")
        return "o", [self.unit_path(name)]

    def get_processes(self, name: str) -> tuple[Any, ...]:
        if name not in self.scopes:
            raise Refused(f"{SERVICE}.NoSuchUnit", f"Unit {name} not loaded.")
        pids = [psutil.Process(pid) for pid in self.members[name] if psutil.pid_exists(pid)]
        family = [child.pid for process in pids for child in (process, *process.children(recursive=True))]
        return "a(sus)", [[[f"/{name}", pid, "python"] for pid in family]]

    def unit_path(self, name: str) -> str:
        escaped = "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):02x}" for c in name)
        return f"{PATH}/unit/{escaped}"

    def list_by_patterns(self, states: list[str], patterns: list[str]) -> tuple[Any, ...]:
        found = [self.unit(name, "active") for name in self.scopes]
        gone = list(self.scopes) if self.knobs.get("vanish") else []
        return "a(ssssssouso)", [found], *(partial(self.remove, name) for name in gone)

    def list_by_names(self, names: list[str]) -> tuple[Any, ...]:
        active, purged = self.knobs["active"], self.knobs["purged"]
        units = [self.unit(name, "active" if name in (*active, *purged) else "inactive") for name in names]
        for unit in units:
            if unit[0] in purged:
                unit[2], unit[4] = "not-found", "exited"
        return "a(ssssssouso)", [units]

    def unit(self, name: str, state: str) -> list[Any]:
        description = self.scopes.get(name, {}).get("Description", name) * self.knobs.get("wordy", 1)
        return [name, description, "loaded", state, "running", "", self.unit_path(name), 0, "", "/"]

    def get(self, path: str, interface: str, name: str) -> tuple[Any, ...]:
        job = self.knobs["job"]
        if (path, name) == (PATH, "Version"):
            return "v", [Variant("s", f"{self.version}.38-1~deb12u1")]
        if name == "Job" and interface == f"{SERVICE}.Unit":
            return "v", [Variant("(uo)", [77, UNIT_JOB] if job else [0, "/"])]
        if (path, name) == (UNIT_JOB, "JobType"):
            return "v", [Variant("s", job)]
        if name == "ActiveState" and path in map(self.unit_path, self.scopes):
            return "v", [Variant("s", "active")]
        raise Refused("org.freedesktop.DBus.Error.UnknownObject", f"Unknown object '{path}'.")

    def signal(self, member: str, signature: str, body: list[Any]) -> None:
        if self.subscribers:
            self.bus.send(Message.new_signal(PATH, MANAGER, member, signature, body))


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--version", type=int, default=252)
    options = parser.parse_args()
    bus = await MessageBus(options.address, negotiate_unix_fd=True).connect()
    pid1 = Pid1(bus, options.version)
    bus.add_message_handler(pid1.receive)
    await bus.request_name(SERVICE)
    print("ready", flush=True)
    await bus.wait_for_disconnect()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except EOFError:
        pass  # the bus went first
