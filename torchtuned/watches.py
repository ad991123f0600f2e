"""What the daemon waits for on behalf of each job: the end of its first process, and its next deadline.

Waiting costs nothing: a pidfd turns readable, a timer fires, both in the loop. Descriptors given to `process` belong to
this object; one is lent to others only as a copy, for the number of a closed one is soon another's.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torchtuned import processes

TURN_S = 0.05  # of ends in one turn of the loop: a thousand jobs may end together, and others wait for an answer


class Watches:
    """By job id. `ended` is called with the id once the first process has ended; its pidfd is closed by then."""

    def __init__(self, ended: Callable[[str], None]) -> None:
        self._ended = ended
        self._pidfds: dict[str, int] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._untold: deque[str] = deque()

    def process(self, job_id: str, pidfd: int) -> None:
        """Follow the process that a pidfd stands for."""
        self._pidfds[job_id] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._readable, job_id)

    def __contains__(self, job_id: str) -> bool:
        """Whether its end has not been noticed yet."""
        return job_id in self._pidfds

    def lives(self, job_id: str) -> bool:
        """Whether the process is there at this moment."""
        pidfd = self._pidfds.get(job_id)
        return pidfd is not None and not processes.ended(pidfd)

    def pidfd(self, job_id: str) -> int | None:
        """A copy, for the caller to close; None when its end was noticed."""
        pidfd = self._pidfds.get(job_id)
        return None if pidfd is None else os.dup(pidfd)

    def after(self, job_id: str, seconds: float, call: Callable[..., object], *arguments: Any) -> None:
        """Set the job's only timer; one set before is stopped."""
        self.stop_timer(job_id)
        self._timers[job_id] = asyncio.get_running_loop().call_later(seconds, call, *arguments)

    def stop_timer(self, job_id: str) -> None:
        timer = self._timers.pop(job_id, None)
        if timer is not None:
            timer.cancel()

    def forget(self, job_id: str) -> None:
        """Wait for nothing more of this job."""
        self.stop_timer(job_id)
        self._close(job_id)

    def close(self) -> None:
        for job_id in [*self._timers, *self._pidfds]:
            self.forget(job_id)
        self._untold.clear()

    def _readable(self, job_id: str) -> None:
        self._close(job_id)
        if not self._untold:
            asyncio.get_running_loop().call_soon(self._tell)
        self._untold.append(job_id)

    def _tell(self) -> None:
        until = time.monotonic() + TURN_S
        try:
            while self._untold and time.monotonic() < until:
                self._ended(self._untold.popleft())
        finally:
            if self._untold:
                asyncio.get_running_loop().call_soon(self._tell)

    def _close(self, job_id: str) -> None:
        pidfd = self._pidfds.pop(job_id, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
