"""Being told when a file of the kernel's changes: cgroups report a new memory.events so.

The standard library has no inotify. Poll would do for the kernel's files, but not for those of a folder that stands
for a machine, where a changed file is a written one.
"""

from __future__ import annotations

import ctypes
import os
import struct

from torchtuned.errors import Missing
from torchtuned.host import Host

MODIFY = 0x2
EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows
_libc = ctypes.CDLL(None, use_errno=True)


class Inotify:
    """Watched files by a name of the caller's. `fd` is readable when one has changed."""

    def __init__(self) -> None:
        self.fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "inotify cannot be had (fs.inotify.max_user_instances)")
        self._names: dict[int, str] = {}
        self._watches: dict[str, int] = {}

    def add(self, host: Host, path: str, name: str) -> None:
        """Watch a file. Missing when it is not there, or no more can be watched."""
        at = path if host.real else f"{host.root}{path}"
        watch = _libc.inotify_add_watch(self.fd, os.fsencode(at), MODIFY)
        if watch < 0:
            number = ctypes.get_errno()
            raise Missing(os.strerror(number).lower(), where=path, errno=number)
        self._names[watch], self._watches[name] = name, watch

    def remove(self, name: str) -> None:
        watch = self._watches.pop(name, None)
        if watch is not None:
            self._names.pop(watch, None)
            _libc.inotify_rm_watch(self.fd, watch)  # fails when the file is gone, and the watch with it

    def changed(self) -> set[str]:
        """The names of the files that have changed since the last call."""
        found = set()
        try:
            while data := os.read(self.fd, 4096):
                at = 0
                while at < len(data):
                    watch, mask, _, length = EVENT.unpack_from(data, at)
                    at += EVENT.size + length
                    if mask & MODIFY and watch in self._names:
                        found.add(self._names[watch])
        except BlockingIOError:
            pass
        return found

    def close(self) -> None:
        os.close(self.fd)
