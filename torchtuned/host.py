"""The only door to /sys, /proc and /dev.

Everything that reads or writes the machine goes through `Host(root)`, so a test, `--sysroot` or the replay of a bug
report can put a folder in the machine's place. Missing, unreadable and refused are three different errors, because
they mean three different outcomes: the feature is not there, it is kept from us, or the value was not taken.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from torchtuned.cpuset import CpuSet, parse_list
from torchtuned.errors import HostError, Missing, Refused, Unreadable

TYPE_CHECKING = False  # `typing` and `pathlib` would be imported before every job that places itself
if TYPE_CHECKING:
    from pathlib import Path

# ESRCH and ENODEV: the process or device went away between open and read, which is the same as not being there
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESRCH, errno.ENODEV, errno.ENXIO, errno.ELOOP})
_CHUNK, MOST_BYTES = 65536, 64 << 20  # of a file; some lie in users' folders, and may be links to /dev/zero
BOOT_ID = "/proc/sys/kernel/random/boot_id"
SPACE = (
    "/.torchtuned/space"  # in a folder: what statvfs(3) said, a line for each file system: PATH TOTAL FREE INODES FREE
)


@dataclass(frozen=True)
class Space:
    """Room on a file system, in bytes and in files; `free` is what users may still take, `files` 0 where unlimited."""

    total: int
    free: int
    files: int = 0
    files_free: int = 0


class Host:
    """A machine: the real one, or a folder that stands for one. `real` tells which.

    Paths are absolute, as on the machine ("/sys/devices/system/cpu/online").
    """

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self._root = root
        self.real = os.path.realpath(root) == "/"
        self._prefix = "" if self.real else os.fspath(root).rstrip("/")

    @property
    def root(self) -> Path:
        """The folder; "/" for the machine itself."""
        from pathlib import Path

        return Path(self._root)

    def read(self, path: str) -> str:
        """The file's text without trailing white space and NUL bytes. Missing, Unreadable."""
        return self.read_bytes(path).decode("utf-8", "replace").rstrip(" \t\r\n\0")

    def text(self, path: str, default: str = "") -> str:
        """As read(), but `default` where there is no such file, or none that can be read."""
        try:
            return self.read(path)
        except HostError:
            return default

    def read_bytes(self, path: str) -> bytes:
        """The file as it is, for the few that hold a binary number. Missing; Unreadable, also for one without an end.
        A pipe is not waited for.
        """
        data = bytearray()
        try:
            fd = os.open(self._prefix + path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                while more := os.read(fd, _CHUNK):
                    data += more
                    if len(data) > MOST_BYTES:
                        raise Unreadable(f"larger than {MOST_BYTES >> 20} MiB", where=path)
            finally:
                os.close(fd)
        except OSError as error:
            raise self._unread(path, error) from None
        return bytes(data)

    def read_int(self, path: str) -> int:
        """The file's content as a decimal number. Missing; Unreadable also when it is not a number."""
        text = self.read(path)
        try:
            return int(text)
        except ValueError:
            raise Unreadable(f"not a number: {text[:40]!r}", where=path) from None

    def cpus(self, path: str) -> CpuSet:
        """The file's content as a CPU list ("0-3,8"). Missing; Unreadable also when it is not a list."""
        try:
            return parse_list(self.read(path))
        except ValueError as error:
            raise Unreadable(str(error), where=path) from None

    def exists(self, path: str) -> bool:
        """Whether the path leads to something (a dangling link does not)."""
        return os.path.exists(self._prefix + path)

    def present(self, path: str) -> bool:
        """Whether something has this name, also a link that leads nowhere. Missing where a folder above it is none,
        Unreadable.
        """
        try:
            os.lstat(self._prefix + path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._unread(path, error) from None
        return True

    def list(self, path: str) -> list[str]:
        """The sorted names in a directory; none if it is not there. Unreadable."""
        try:
            return sorted(os.listdir(self._prefix + path))
        except OSError as error:
            if error.errno in _GONE:
                return []
            raise self._unread(path, error) from None

    def stat(self, path: str) -> os.stat_result:
        """Mode and owner of what the path leads to. Missing, Unreadable."""
        try:
            return os.stat(self._prefix + path)
        except OSError as error:
            raise self._unread(path, error) from None

    def space(self, path: str) -> Space:
        """The room on the file system of a path. In a folder only what its file SPACE says of exactly that path.
        Missing, Unreadable.
        """
        if self.real:
            try:
                told = os.statvfs(path)
            except OSError as error:
                raise self._unread(path, error) from None
            return Space(told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize, told.f_files, told.f_favail)
        lines = (line.rsplit(" ", 4) for line in self.read(SPACE).splitlines())
        found = next((Space(*map(int, numbers)) for name, *numbers in lines if name == path), None)
        if found is None:
            raise Missing("no such file system", where=path)
        return found

    def link(self, path: str) -> str:
        """What a symbolic link says, unresolved. Missing (also when it is no link), Unreadable."""
        try:
            return os.readlink(self._prefix + path)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise Missing("not a link", where=path, errno=errno.EINVAL) from None
            raise self._unread(path, error) from None

    def write(self, path: str, value: str) -> None:
        """Give the file a value with one write(2); the file is never created or truncated. Missing, Refused.

        A second write for the rest of a value would be a second value to the kernel, so a short write is a refusal.
        """
        data = value.encode()
        try:
            fd = os.open(self._prefix + path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                written = os.write(fd, data)
                if not self.real and stat.S_ISREG(os.fstat(fd).st_mode):
                    os.ftruncate(fd, written)  # a plain file keeps the tail of a longer value, a kernel file does not
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in _GONE:
                raise Missing(_words(error), where=path, errno=error.errno or 0) from None
            raise Refused(f"{_words(error)} on writing {value!r}", where=path, errno=error.errno or 0) from None
        if written != len(data):
            raise Refused(f"only {written} of {len(data)} bytes of {value!r} were taken", where=path)

    def hold(self, path: str, data: bytes) -> int:
        """Open a file whose setting lasts as long as it stays open (/dev/cpu_dma_latency), write, and return the
        descriptor. Missing, Refused.
        """
        try:
            fd = os.open(self._prefix + path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, data)
            except OSError:
                os.close(fd)
                raise
        except OSError as error:
            kind = Missing if error.errno in _GONE else Refused
            raise kind(_words(error), where=path, errno=error.errno or 0) from None
        return fd

    @staticmethod
    def _unread(path: str, error: OSError) -> Missing | Unreadable:
        kind = Missing if error.errno in _GONE else Unreadable
        return kind(_words(error), where=path, errno=error.errno or 0)


def stat_fields(text: str) -> list[str]:
    """The fields of a /proc/PID/stat from the state on (0: state, 1: parent, 19: start in clock ticks after boot). The
    name before it stands in brackets and may hold anything.
    """
    return text.rpartition(")")[2].split()


def _words(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
