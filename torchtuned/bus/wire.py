"""dbus_next's connection, mended where one caller could stop the daemon for all.

Three things are replaced, in the classes that do the work, because no public door leads there: a writer that takes a
full socket for the loss of the connection, a reader that does not let go while messages come, and the unpacking of
arrays of any length (32 MiB of "as" take seconds) that strangers send.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import socket
from typing import Any

from dbus_next.aio.message_bus import MessageBus, _MessageWriter
from dbus_next.constants import BusType, MessageType
from dbus_next.signature import SignatureTree, Variant

MAX_ARRAY = 256 * 1024  # bytes that a message's arrays have together; nothing we accept is longer
MAX_BATCH = 64  # messages until the loop gets its turn
MAX_SIGNATURES = 1024
HEADER_FIELDS = 12  # where in a message the array of header fields starts


class Oversize(list[Any]):
    """Stands for an array that was too long to unpack, alone or after those before it."""


class OversizeDict(dict[Any, Any]):
    """The same for an array of dictionary entries."""


class Writer(_MessageWriter):
    """dbus_next's takes a full socket (the bus is slow, or we have much to say) for the loss of the connection."""

    fut: asyncio.Future[None]

    def write_callback(self) -> None:
        try:
            while True:
                if self.buf is None:
                    if self.messages.empty():
                        self.loop.remove_writer(self.fd)
                        return
                    message, self.unix_fds, self.fut = self.messages.get_nowait()
                    self.buf, self.offset = memoryview(message), 0
                rest = self.buf[self.offset :]
                if self.unix_fds and self.negotiate_unix_fd:
                    fds = array.array("i", self.unix_fds)
                    self.offset += self.sock.sendmsg([rest], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
                    self.unix_fds = None
                else:
                    self.offset += self.sock.send(rest)
                if self.offset >= len(self.buf):
                    self.buf = None
                    if not self.fut.done():
                        self.fut.set_result(None)
        except BlockingIOError:
            return  # called again when there is room
        except OSError as e:
            if not self.fut.done():
                self.fut.set_exception(e)
            self.bus._finalize(e)


class Connection(MessageBus):
    """A MessageBus that no caller can stop for the others. What the arrays of a call or signal have above MAX_ARRAY
    arrives as Oversize.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address, bus_type=BusType.SYSTEM, negotiate_unix_fd=True)
        self._writer = Writer(self)  # type: ignore[no-untyped-call]

    def _message_reader(self) -> None:
        try:
            for _ in range(MAX_BATCH):
                if not self._unmarshaller.unmarshall():
                    return
                self._on_message(self._unmarshaller.message)  # type: ignore[no-untyped-call]
                self._unmarshaller = self._create_unmarshaller()
        except Exception as e:
            self._finalize(e)  # type: ignore[no-untyped-call]

    def _create_unmarshaller(self) -> Any:
        unmarshaller: Any = super()._create_unmarshaller()  # type: ignore[no-untyped-call]
        read_array = unmarshaller.read_array
        left, inside = MAX_ARRAY, False  # of the message's arrays together; those in an array are part of it

        def bounded(type_: Any) -> Any:
            nonlocal left, inside
            header = unmarshaller.offset == HEADER_FIELDS
            unmarshaller.align(4)
            length = unmarshaller.read_uint32()
            token = type_.children[0].token
            asked = unmarshaller.buf[1] == MessageType.METHOD_RETURN.value  # by us: a list of PID 1's may be long
            if inside or length <= left or token == "y" or header or asked:
                unmarshaller.offset -= 4
                if inside or header or asked:
                    return read_array(type_)
                left -= 0 if token == "y" else length
                inside = True
                try:
                    return read_array(type_)
                finally:
                    inside = False
            if token in "xtd{(":
                unmarshaller.align(8)
            unmarshaller.read(length)
            return OversizeDict() if token == "{" else Oversize()

        unmarshaller.readers["a"] = bounded
        return unmarshaller

    def close(self) -> None:
        """Close the socket, which dbus_next only shuts down."""
        with contextlib.suppress(OSError):
            self._stream.close()
        self._sock.close()


def has_oversize(value: Any) -> bool:
    """Whether an array in it was too long to be unpacked."""
    if isinstance(value, Variant):
        return has_oversize(value.value)
    if isinstance(value, Oversize | OversizeDict):
        return True
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(has_oversize(item) for item in items)


def limit_signatures() -> None:
    """dbus_next keeps every signature that anybody ever sent; forget them when they are many."""
    if len(SignatureTree._cache) > MAX_SIGNATURES:
        SignatureTree._cache.clear()
