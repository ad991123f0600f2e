"""The connection to the message bus, and the only importer of dbus_next.

dbus_next 0.2.3 is used for what it does well (the wire) and kept from what it does badly. Its high-level service
objects hide the sender, leak descriptors of calls they do not know and send tracebacks to callers; its `call()` waits
for ever. So everything here goes through messages: calls have a deadline, every incoming descriptor has one owner,
signals count only when they come from the service that owns the name (anybody may send us one), and a caller sees an
error name and a sentence, never a traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dbus_next.constants import MessageFlag, MessageType, NameFlag, RequestNameReply
from dbus_next.message import Message
from dbus_next.signature import Variant

from torchtuned.bus.wire import MAX_ARRAY, Connection, has_oversize, limit_signatures
from torchtuned.errors import DaemonUnreachable, Failed, TorchtunedError

__all__ = ["Answer", "Bus", "Call", "CallFailed", "Rejected", "Variant"]

log = logging.getLogger(__name__)

DBUS = "org.freedesktop.DBus"
DBUS_PATH = "/org/freedesktop/DBus"
DEADLINE_S = 10.0
ERRORS = "org.torchtuned1.Error."
MAX_CALLS = 64  # calls of one connection that may be in progress
MAX_ASKED = 96  # calls of ours that wait for an answer; the system bus takes 128, and forgets none that timed out
MAX_ERROR = 4096  # characters of an error's text

Answer = tuple[str, list[Any]]  # signature, body
Handler = Callable[["Call"], "Answer | Awaitable[Answer]"]


class CallFailed(Failed):
    """A call to another service was answered by an error, or by nothing within the deadline (`dbus_name` NoReply)."""

    def __init__(self, what: str, *, where: str, dbus_name: str) -> None:
        super().__init__(what, where=where)
        self.dbus_name = dbus_name

    @property
    def absent(self) -> bool:
        """Nobody answers to that name: the service is not installed or not running."""
        return self.dbus_name.rpartition(".")[2] in {"ServiceUnknown", "NameHasNoOwner", "Spawn.ExecFailed"} or (
            ".Spawn." in self.dbus_name
        )


class Rejected(Exception):
    """An incoming call that does not fit our objects; `name` is one of org.freedesktop.DBus.Error."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = f"{DBUS}.Error.{name}"


@dataclass(kw_only=True)
class Call:
    """One incoming method call. Its descriptors are closed when it has been answered, except those taken."""

    sender: str
    path: str
    interface: str
    member: str
    signature: str
    body: list[Any]
    interactive: bool = False
    fds: list[int] = field(default_factory=list)

    def take_fd(self, index: int) -> int:
        """The descriptor that an argument of type h stands for; the taker closes it."""
        if not 0 <= index < len(self.fds) or self.fds[index] < 0:
            raise Rejected("InvalidArgs", "the call names a file descriptor that did not come with it")
        fd, self.fds[index] = self.fds[index], -1
        return fd

    def close(self) -> None:
        for fd in self.fds:
            if fd >= 0:
                os.close(fd)
        self.fds.clear()


class Bus:
    """One connection. Made by `connect`, ended by `close`; `closed()` tells when and why it ended by itself."""

    def __init__(self, bus: Connection) -> None:
        self._bus = bus
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._room = asyncio.Semaphore(MAX_ASKED)
        self._owners: dict[str, str] = {}
        self._watches: dict[str, list[Callable[[str], None]]] = {}
        self._signals: dict[tuple[str, str], list[tuple[str, Callable[[list[Any]], object]]]] = {}
        self._matches: dict[str, int] = {}
        self._handler: Handler | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[str, int] = {}
        self._gone = asyncio.ensure_future(bus.wait_for_disconnect())  # type: ignore[no-untyped-call]
        self._gone.add_done_callback(self._disconnected)
        bus.add_message_handler(self._receive)

    @classmethod
    async def connect(cls, address: str | None = None) -> Bus:
        """Join the system bus (DBUS_SYSTEM_BUS_ADDRESS is honoured), or the one at `address`. DaemonUnreachable."""
        try:
            bus = Connection(address or "")
        except Exception as e:
            raise DaemonUnreachable(f"cannot reach the message bus: {e}", hint="is dbus.service running?") from e
        try:
            async with asyncio.timeout(DEADLINE_S):
                await bus.connect()
        except Exception as e:
            bus.close()
            raise DaemonUnreachable(f"the message bus refused us: {e or type(e).__name__}") from e
        return cls(bus)

    @property
    def unique_name(self) -> str:
        return str(self._bus.unique_name)

    # -- calls to others ---------------------------------------------------------------------------------------------

    async def call(
        self,
        destination: str,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        body: Sequence[Any] = (),
        *,
        timeout_s: float = DEADLINE_S,
        fds: Sequence[int] = (),
        start: bool = False,
    ) -> list[Any]:
        """Call a method and return its values, variants unpacked, descriptors (type h) as numbers the caller owns.

        `start` lets the bus start the service. `fds` stay the caller's. Texts that the bus would not carry are mended:
        what they hold may come from anybody.
        Raises CallFailed, for silence too.
        """
        where = f"{destination} {interface}.{member}"
        if not self._bus.connected:
            raise CallFailed("not connected to the bus", where=where, dbus_name=f"{DBUS}.Error.Disconnected")
        flags = MessageFlag.NONE if start else MessageFlag.NO_AUTOSTART
        message = Message(
            destination=destination, path=path, interface=interface, member=member, signature=signature,
            body=_clean(body), unix_fds=list(fds), flags=flags, serial=self._bus.next_serial(),
        )  # fmt: skip
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pending[message.serial] = reply
        room = contextlib.nullcontext() if destination == DBUS else self._room  # the bus itself answers at once
        try:
            async with asyncio.timeout(timeout_s), room:
                self._send(message)
                answer = await reply
        except TimeoutError:
            text = f"no answer within {timeout_s:g} s"
            raise CallFailed(text, where=where, dbus_name=f"{DBUS}.Error.NoReply") from None
        finally:
            self._pending.pop(message.serial, None)
        if answer.message_type is MessageType.ERROR:
            text = str(answer.body[0]) if answer.body else str(answer.error_name)
            raise CallFailed(text, where=where, dbus_name=str(answer.error_name))
        values = [_plain(value) for value in answer.body]
        if "h" in answer.signature:
            for i, type_ in enumerate(answer.signature_tree.types):
                if type_.token == "h":
                    values[i] = answer.unix_fds[values[i]]
        return values

    # -- names and signals of others ---------------------------------------------------------------------------------

    async def follow(self, name: str, changed: Callable[[str], None] | None = None) -> str:
        """Know from now on who owns `name`; returns the owner's unique name, "" while there is none.

        `changed` is called with the new owner. Signals of that name (see `on_signal`) are heard from here on.
        """
        watches = self._watches.setdefault(name, [])
        if changed is not None:
            watches.append(changed)
        self.match(f"type='signal',sender='{DBUS}',interface='{DBUS}',member='NameOwnerChanged',arg0='{name}'")
        try:
            [owner] = await self.call(DBUS, DBUS_PATH, DBUS, "GetNameOwner", "s", [name])
        except CallFailed as e:
            if not e.absent:
                raise
            owner = ""
        self._owners[name] = owner
        return str(owner)

    def owner(self, name: str) -> str:
        """Unique name of the owner of a followed name, or ""."""
        return self._owners.get(name, "")

    def on_signal(self, service: str, interface: str, member: str, callback: Callable[[list[Any]], object]) -> None:
        """Hand signals of a followed service to `callback`. Which ones the bus sends us is `match`'s business."""
        self._signals.setdefault((interface, member), []).append((service, callback))

    def match(self, rule: str) -> None:
        """Ask the bus for signals. Counted: as many `unmatch` end it. Takes effect before any later call does."""
        self._matches[rule] = self._matches.get(rule, 0) + 1
        if self._matches[rule] == 1:
            self._tell_bus("AddMatch", rule)

    def unmatch(self, rule: str) -> None:
        self._matches[rule] -= 1
        if not self._matches[rule]:
            del self._matches[rule]
            self._tell_bus("RemoveMatch", rule)

    def _tell_bus(self, member: str, rule: str) -> None:
        flags = MessageFlag.NO_REPLY_EXPECTED
        self._send(Message(destination=DBUS, path=DBUS_PATH, interface=DBUS, member=member, signature="s",
                           body=[rule], flags=flags, serial=self._bus.next_serial()))  # fmt: skip

    # -- what we offer -----------------------------------------------------------------------------------------------

    def serve(self, handler: Handler) -> None:
        """Let `handler` answer every method call that arrives."""
        self._handler = handler

    async def request_name(self, name: str) -> None:
        """Own `name`; raises Failed when somebody else does (a queued owner would look started and be deaf)."""
        reply = await self._bus.request_name(name, NameFlag.DO_NOT_QUEUE)
        if reply not in (RequestNameReply.PRIMARY_OWNER, RequestNameReply.ALREADY_OWNER):
            raise Failed(f"{name} already has an owner on the bus", hint="another torchtunedd is running")

    def emit(self, path: str, interface: str, member: str, signature: str, body: list[Any]) -> None:
        """Broadcast a signal; quietly nothing once the connection is gone."""
        if self._bus.connected:
            self._send(Message.new_signal(path, interface, member, signature, _clean(body)))

    # -- the end -----------------------------------------------------------------------------------------------------

    async def closed(self) -> str:
        """Wait until the connection is lost, and return why."""
        try:
            await asyncio.shield(self._gone)
        except (EOFError, OSError) as e:
            return f"the message bus went away ({type(e).__name__})"
        except Exception as e:
            log.exception("the message bus sent what we cannot read")
            return f"the message bus sent what we cannot read ({e})"
        return "disconnected"

    async def close(self) -> None:
        """Leave the bus, after what was sent has been written. Calls in progress are cancelled."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._bus.connected:
            with contextlib.suppress(CallFailed):  # a round trip: everything before it has left
                await self.call(DBUS, DBUS_PATH, DBUS, "GetId", timeout_s=2.0)
        if self._bus.connected:
            self._bus.disconnect()  # type: ignore[no-untyped-call]
        with contextlib.suppress(Exception):
            await self._gone
        self._bus.close()

    def _disconnected(self, gone: asyncio.Future[None]) -> None:
        if not gone.cancelled():
            gone.exception()  # seen; closed() reports it
        for future in self._pending.values():
            if not future.done():
                future.set_result(Message(message_type=MessageType.ERROR, error_name=f"{DBUS}.Error.Disconnected",
                                          reply_serial=1, signature="s", body=["the bus went away"]))  # fmt: skip

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        sent = self._bus.send(message)
        sent.add_done_callback(lambda f: f.cancelled() or f.exception())  # a lost bus is reported by closed()

    def _receive(self, message: Message) -> bool:
        limit_signatures()
        kind = message.message_type
        if kind is MessageType.METHOD_CALL:
            self._incoming(message)
            return True
        if kind is MessageType.SIGNAL:
            self._signal(message)
            _close_all(message.unix_fds)
            return False
        future = self._pending.get(message.reply_serial)
        if future is None or future.done():
            _close_all(message.unix_fds)
            return False
        future.set_result(message)
        return True

    def _signal(self, message: Message) -> None:
        if message.sender == DBUS and message.member == "NameOwnerChanged" and message.signature == "sss":
            name, _, owner = message.body
            if name in self._watches:
                self._owners[name] = owner
                for changed in self._watches[name]:
                    changed(owner)
        for service, callback in self._signals.get((message.interface, message.member), ()):
            if message.sender == self._owners.get(service):
                callback([_plain(value) for value in message.body])

    def _incoming(self, message: Message) -> None:
        call = Call(
            sender=message.sender or "", path=message.path, interface=message.interface or "", member=message.member,
            signature=message.signature, body=message.body, fds=list(message.unix_fds),
            interactive=bool(message.flags & MessageFlag.ALLOW_INTERACTIVE_AUTHORIZATION),
        )  # fmt: skip
        try:
            if self._handler is None:
                raise Rejected("UnknownMethod", "nothing is offered here")
            if has_oversize(call.body):
                raise Rejected("LimitsExceeded", f"an argument is longer than {MAX_ARRAY} bytes")
            answer = self._handler(call)
            if isinstance(answer, tuple):
                self._reply(message, answer)
                call.close()
                return
            if self._calls.get(call.sender, 0) >= MAX_CALLS:
                answer.close() if hasattr(answer, "close") else None
                raise Rejected("LimitsExceeded", f"{MAX_CALLS} calls of this connection are in progress already")
        except Exception as e:
            self._refuse(message, call, e)
            call.close()
            return
        self._calls[call.sender] = self._calls.get(call.sender, 0) + 1
        task = asyncio.ensure_future(self._answer_later(message, call, answer))
        self._tasks.add(task)  # asyncio holds tasks only weakly
        task.add_done_callback(self._tasks.discard)

    async def _answer_later(self, message: Message, call: Call, answer: Awaitable[Answer]) -> None:
        try:
            self._reply(message, await answer)
        except Exception as e:
            self._refuse(message, call, e)
        finally:
            call.close()
            self._calls[call.sender] -= 1
            if not self._calls[call.sender]:
                del self._calls[call.sender]

    def _reply(self, message: Message, answer: Answer) -> None:
        signature, body = answer
        if not message.flags & MessageFlag.NO_REPLY_EXPECTED and self._bus.connected:
            self._send(Message.new_method_return(message, signature, _clean(body)))

    def _refuse(self, message: Message, call: Call, error: Exception) -> None:
        if isinstance(error, TorchtunedError):
            name, text = ERRORS + error.name, str(error)
        elif isinstance(error, Rejected):
            name, text = error.name, str(error)
        else:
            log.error("%s.%s failed unexpectedly", call.interface, call.member, exc_info=error)
            name, text = ERRORS + "Failed", "internal error, see the journal of torchtuned.service"
        if not message.flags & MessageFlag.NO_REPLY_EXPECTED and self._bus.connected:
            self._send(Message.new_error(message, name, _clean(text)[:MAX_ERROR]))


def _plain(value: Any) -> Any:
    """A value without variants."""
    if isinstance(value, Variant):
        return _plain(value.value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _clean(value: Any) -> Any:
    """A value that the bus accepts: a NUL or a half surrogate in one string would cost us the connection."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    if isinstance(value, Variant):
        return Variant(value.signature, _clean(value.value)) if isinstance(value.value, str | list | dict) else value
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
