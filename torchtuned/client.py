"""A light D-Bus client for the wrapper and the command line, over libsystemd's sd-bus.

Importing a D-Bus library costs more than all the rest of the wrapper together; libsystemd is on every Debian
machine and loads in a few milliseconds. Only `ctypes` is imported here: no dataclasses, typing or enum, because this
module runs before every job. Nothing that arrives is trusted further than its D-Bus type; callers check the rest.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from ctypes import byref, c_char, c_char_p, c_int, c_uint64, c_void_p

from torchtuned import errors

TYPE_CHECKING = False  # `typing` takes longer to import than this module
if TYPE_CHECKING:
    from typing import Any

SERVICE = "org.torchtuned1"
ROOT = "/org/torchtuned1"
MANAGER = "org.torchtuned1.Manager"
ERROR_PREFIX = "org.torchtuned1.Error."
LIBRARY = "libsystemd.so.0"
CONNECT_S = 5.0  # a bus that is well takes milliseconds, however long a call may last
_FEW = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # what the process, or the machine, has run out of
_BASIC: dict[str, type[ctypes._SimpleCData[Any]]] = {
    "y": ctypes.c_uint8,
    "b": c_int,
    "n": ctypes.c_int16,
    "q": ctypes.c_uint16,
    "i": ctypes.c_int32,
    "u": ctypes.c_uint32,
    "x": ctypes.c_int64,
    "t": c_uint64,
    "d": ctypes.c_double,
    "h": c_int,
}
_STRINGS = "sog"
_SILENT = ("NoReply", "Timeout", "TimedOut")
_ABSENT = {
    "ServiceUnknown": "no torchtunedd is running",
    "NameHasNoOwner": "no torchtunedd is running",
    "Disconnected": "the system bus closed the connection",
}


class _BusError(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("message", c_char_p), ("need_free", c_int))


def _load() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise errors.DaemonUnreachable(f"cannot load {LIBRARY}: {error}", hint="install libsystemd0") from None
    # Only what takes more than pointers and ints needs its types named; every pointer here is a c_void_p object.
    library.sd_bus_call.argtypes = [c_void_p, c_void_p, c_uint64, c_void_p, c_void_p]
    library.sd_bus_wait.argtypes = [c_void_p, c_uint64]
    library.sd_bus_message_append_basic.argtypes = [c_void_p, c_char, c_void_p]
    library.sd_bus_message_open_container.argtypes = [c_void_p, c_char, c_char_p]
    library.sd_bus_message_enter_container.argtypes = [c_void_p, c_char, c_char_p]
    library.sd_bus_message_read_basic.argtypes = [c_void_p, c_char, c_void_p]
    library.sd_bus_message_get_member.restype = c_char_p
    for name in ("sd_bus_message_unref", "sd_bus_close_unref"):
        getattr(library, name).restype = c_void_p
    return library


class Client:
    """One connection to the system bus (DBUS_SYSTEM_BUS_ADDRESS is honoured), talking to torchtunedd.

    timeout_s bounds each call, unless it says otherwise, and the connection where that is less than CONNECT_S.
    `interactive` lets polkit ask the person for a password. Raises DaemonUnreachable when there is no bus, no daemon,
    or no answer in time.
    """

    def __init__(self, *, timeout_s: float = 2.0, interactive: bool = False) -> None:
        self.timeout_s = timeout_s
        self._interactive = interactive
        self._lib = _load()
        self._bus = c_void_p()
        self._signals: list[tuple[str, list[object]]] = []
        result = self._lib.sd_bus_open_system(byref(self._bus))
        if result < 0:
            why = "" if result == -errno.ENOENT else f": {os.strerror(-result).lower()}"
            raise errors.DaemonUnreachable(f"no system bus{why}", hint=way_out())
        try:
            self._wait_ready(time.monotonic() + min(timeout_s, CONNECT_S))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Without a flush: calls have been sent by the time they return, and a flush waits 90 s for a silent bus."""
        if self._bus:
            self._lib.sd_bus_close_unref(self._bus)
            self._bus = c_void_p()

    def call(
        self,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        *args: object,
        timeout_s: float | None = None,
        service: str = SERVICE,
    ) -> list[object]:
        """Call a method; the reply's values, decoded (array: list, dictionary: dict, struct: tuple).

        `signature` may hold basic types and arrays of them. Raises DaemonUnreachable, the class of errors.BY_NAME that
        an org.torchtuned1.Error names, NotAuthorized when the bus forbids the call, Failed for any other error.
        """
        if not self._bus:
            raise errors.DaemonUnreachable("the connection to the system bus is closed")
        lib, message, reply, error = self._lib, c_void_p(), c_void_p(), _BusError()
        target = (part.encode() for part in (service, path, interface, member))
        try:
            if lib.sd_bus_message_new_method_call(self._bus, byref(message), *target) < 0:
                raise errors.InvalidRequest(f"not a D-Bus call: {path} {interface}.{member}")
            lib.sd_bus_message_set_auto_start(message, 0)
            if self._interactive:
                lib.sd_bus_message_set_allow_interactive_authorization(message, 1)
            self._append(message, signature, args)
            wait = self.timeout_s if timeout_s is None else timeout_s
            result = lib.sd_bus_call(self._bus, message, max(1, int(wait * 1e6)), byref(error), byref(reply))
            if result < 0:
                raise _translate(error, -result)
            return self._read_all(reply)
        finally:
            lib.sd_bus_error_free(byref(error))
            lib.sd_bus_message_unref(reply)
            lib.sd_bus_message_unref(message)

    def properties(self, path: str, interface: str) -> dict[str, object]:
        """All properties of one interface of one object."""
        return _dict(self.call(path, "org.freedesktop.DBus.Properties", "GetAll", "s", interface)[0])

    def objects(self) -> dict[str, dict[str, dict[str, object]]]:
        """Every object of the daemon: path -> interface -> properties (GetManagedObjects of the root)."""
        found = self.call(ROOT, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects")[0]
        return {
            path: {interface: _dict(values) for interface, values in _dict(interfaces).items()}
            for path, interfaces in _dict(found).items()
        }

    def watch(self, member: str) -> None:
        """Start to collect a signal of the Manager, for wait_signal()."""
        rule = f"type='signal',sender='{SERVICE}',path='{ROOT}',interface='{MANAGER}',member='{member}'"
        bus = "org.freedesktop.DBus"
        self.call("/org/freedesktop/DBus", bus, "AddMatch", "s", rule, service=bus)

    def wait_signal(self, member: str, timeout_s: float) -> list[object] | None:
        """The values of the next watched signal of that name, or None when none came in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            for index, (name, values) in enumerate(self._signals):
                if name == member:
                    del self._signals[index]
                    return values
            if not self._process(deadline):
                return None

    # -- below: sd-bus ------------------------------------------------------------------------------------------

    def _wait_ready(self, deadline: float) -> None:
        """sd_bus_call alone would wait 90 s for a bus that takes the connection and then says nothing."""
        while self._lib.sd_bus_is_ready(self._bus) <= 0:
            if not self._process(deadline):
                raise errors.DaemonUnreachable("the system bus does not answer", hint="see: systemctl status dbus")

    def _process(self, deadline: float) -> bool:
        """Handle what has arrived, else wait for more; False when the deadline has passed."""
        message = c_void_p()
        result = self._lib.sd_bus_process(self._bus, byref(message))
        if result < 0:
            raise errors.DaemonUnreachable(f"the system bus is gone: {os.strerror(-result)}")
        if message:
            try:
                self._keep_signal(message)
            finally:
                self._lib.sd_bus_message_unref(message)
        if result > 0:
            return True
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        result = self._lib.sd_bus_wait(self._bus, int(left * 1e6) + 1)
        if result < 0 and result != -4:  # EINTR: look again
            raise errors.DaemonUnreachable(f"the system bus is gone: {os.strerror(-result)}")
        return True

    def _keep_signal(self, message: c_void_p) -> None:
        if self._lib.sd_bus_message_is_signal(message, MANAGER.encode(), None) > 0:
            member = self._lib.sd_bus_message_get_member(message) or b""
            self._signals.append((member.decode(), self._read_all(message)))

    def _append(self, message: c_void_p, signature: str, args: tuple[object, ...]) -> None:
        kinds = signature.replace("a", "")
        if len(kinds) != len(args):
            raise errors.InvalidRequest(f"signature {signature!r} does not fit {len(args)} arguments")
        array = False
        values = iter(args)
        for kind in signature:
            if kind == "a":
                array = True
                continue
            value = next(values)
            if array:
                self._check(self._lib.sd_bus_message_open_container(message, b"a", kind.encode()))
                for item in value if isinstance(value, (list, tuple)) else ():
                    self._append_basic(message, kind, item)
                self._check(self._lib.sd_bus_message_close_container(message))
                array = False
            else:
                self._append_basic(message, kind, value)

    def _append_basic(self, message: c_void_p, kind: str, value: object) -> None:
        if kind in _STRINGS:
            text = str(value).encode("utf-8", "replace")
            if b"\0" in text:
                raise errors.InvalidRequest("a NUL byte cannot be sent over D-Bus")
            self._check(self._lib.sd_bus_message_append_basic(message, kind.encode(), c_char_p(text)))
        else:
            self._check(self._lib.sd_bus_message_append_basic(message, kind.encode(), byref(_BASIC[kind](value))))

    def _check(self, result: int) -> int:
        if -result in _FEW:
            raise errors.DaemonUnreachable(f"torchtunedd cannot be asked: {os.strerror(-result).lower()}")
        if result < 0:
            raise errors.InvalidRequest(f"not sendable over D-Bus: {os.strerror(-result)}")
        return result

    def _read_all(self, message: c_void_p) -> list[object]:
        values: list[object] = []
        kind, contents = c_char(), c_char_p()
        while True:
            result = self._lib.sd_bus_message_peek_type(message, byref(kind), byref(contents))
            if self._check_read(result) == 0:
                return values
            values.append(self._read_one(message, kind.value.decode(), contents.value or b""))

    def _read_one(self, message: c_void_p, kind: str, contents: bytes) -> object:
        if kind in _STRINGS:
            text = c_char_p()
            self._check_read(self._lib.sd_bus_message_read_basic(message, kind.encode(), byref(text)))
            return (text.value or b"").decode("utf-8", "replace")
        if kind in _BASIC:
            number = _BASIC[kind]()
            self._check_read(self._lib.sd_bus_message_read_basic(message, kind.encode(), byref(number)))
            return bool(number.value) if kind == "b" else number.value
        self._check_read(self._lib.sd_bus_message_enter_container(message, kind.encode(), contents))
        values = self._read_all(message)
        self._check_read(self._lib.sd_bus_message_exit_container(message))
        if kind == "a":
            return dict(value for value in values if isinstance(value, tuple)) if contents[:1] == b"{" else values
        return values[0] if kind == "v" else tuple(values)

    def _check_read(self, result: int) -> int:
        if result < 0:
            raise errors.Failed(f"unreadable D-Bus message: {os.strerror(-result)}")
        return result


def _dict(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise errors.Failed("torchtunedd answered something else than a dictionary")
    return value


def has_systemd() -> bool:
    """Whether systemd is PID 1, as sd_booted(3) finds out."""
    return os.path.isdir("/run/systemd/system")


def way_out() -> str:
    """What to do where no torchtunedd is to be asked."""
    if has_systemd():
        return "start it: sudo systemctl start torchtuned"
    return "torchtunedd needs systemd; torchtuned-run does without"


def _translate(error: _BusError, number: int) -> errors.TorchtunedError:
    name = (error.name or b"").decode("ascii", "replace")
    text = printable((error.message or b"").decode("utf-8", "replace"))
    if name.startswith(ERROR_PREFIX):
        return errors.BY_NAME.get(name[len(ERROR_PREFIX) :], errors.Failed)(text or name)
    short = name.rpartition(".")[2]
    if short in _SILENT:
        return errors.NoAnswer("torchtunedd did not answer", hint=way_out())
    if short in _ABSENT or not name:
        return errors.DaemonUnreachable(_ABSENT.get(short, os.strerror(number)), hint=way_out())
    if short in ("AccessDenied", "InteractiveAuthorizationRequired"):
        return errors.NotAuthorized(text or "the bus does not allow this")
    return errors.Failed(f"{text} [{name}]")


def printable(text: str, limit: int = 2000) -> str:
    """Text from elsewhere, fit for a terminal: control characters (escape sequences) replaced, lines kept, cut."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text[:limit])
