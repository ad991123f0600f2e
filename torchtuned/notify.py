"""What PID 1 is told of us: ready, status, descriptors to keep over a restart.

sd_notify waits while PID 1 does not read (it reloads, say, and ten messages are before ours), so it runs in a thread.
Without NOTIFY_SOCKET nothing is sent and no thread is made.
"""

from __future__ import annotations

import os
import threading
from queue import Empty, SimpleQueue

from systemd import daemon as sd  # type: ignore[attr-defined]


class Notifier:
    """Messages to PID 1, in order; of statuses that wait only the last is sent."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[str, int | None] | None] = SimpleQueue()
        self._status: SimpleQueue[str] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if "NOTIFY_SOCKET" in os.environ:
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
        while (message := self._queue.get()) is not None:
            text, fd = message
            if not text:
                text = self._last_status()
            if text:
                sd.notify(text, fds=[] if fd is None else [fd])
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
    for fd, name in sd.listen_fds_with_names().items():
        if name in found:
            os.close(found[name])
        found[name] = fd
    return found
