"""What PID 1 is told of us: ready, status, descriptors to keep over a restart.

Sending waits while PID 1 does not read (it reloads, say, and ten messages are before ours), so a thread does it; and
not with python3-systemd's notify(), which keeps the interpreter locked meanwhile. Without NOTIFY_SOCKET nothing is
sent and no thread is made.
"""

from __future__ import annotations

import array
import logging
import os
import socket
import threading
from queue import Empty, SimpleQueue

from systemd.daemon import listen_fds_with_names  # type: ignore[import-untyped]

log = logging.getLogger(__name__)


class Notifier:
    """Messages to PID 1, in order; of statuses that wait only the last is sent."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[str, int | None] | None] = SimpleQueue()
        self._status: SimpleQueue[str] = SimpleQueue()
        self._thread: threading.Thread | None = None
        address = os.environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        if address:
            self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
            self._thread.start()

    def send(self, text: str, fd: int | None = None) -> None:
        """Send assignments, with a descriptor that stays the caller's."""
        if self._thread is not None:
            self._queue.put((text, None if fd is None else os.dup(fd)))

    def status(self, text: str) -> None:
        """Say in one line how we are."""
        if self._thread is not None:
            self._status.put(text)
            self._queue.put(("", None))

    def keep(self, name: str, fd: int) -> None:
        """Have a descriptor kept for the next daemon under a name. FDPOLL=0: a hang-up does not make it worthless."""
        self.send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", fd)

    def forget(self, name: str) -> None:
        """Keep it no longer."""
        self.send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def close(self) -> None:
        """Wait for what was sent, but not for ever."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(1.0)

    def _work(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            while (message := self._queue.get()) is not None:
                text, fd = message
                text = text or self._last_status()
                try:
                    if text:
                        fds = array.array("i", [] if fd is None else [fd])
                        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []
                        sender.sendmsg([text.encode()], rights, 0, self._address)
                except OSError as e:
                    log.warning("PID 1 cannot be told %r: %s", text, e.strerror)
                finally:
                    if fd is not None:
                        os.close(fd)

    def _last_status(self) -> str:
        text = ""
        try:
            while True:
                text = f"STATUS={self._status.get_nowait()}"
        except Empty:
            return text


def kept() -> dict[str, int]:
    """The descriptors that PID 1 kept for us, by name. Of two with one name the later counts."""
    found: dict[str, int] = {}
    for fd, name in listen_fds_with_names().items():
        if name in found:
            os.close(found[name])
        found[name] = fd
    return found
