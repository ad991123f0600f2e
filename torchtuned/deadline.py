"""Runs one call at a time beside the caller, and gives up waiting after a while; many calls together, too.

A write to /sys can hang in the kernel for ever (a driver that waits for its hardware). The thread that hangs cannot be
ended, so it is left behind with its call, and the next call gets a new one.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimedOut
from queue import SimpleQueue
from typing import Any, TypeVar

from torchtuned.errors import Failed

LEAST_S = 0.05  # enough for a call that does not hang

T = TypeVar("T")
_Inbox = SimpleQueue[tuple[Callable[[], Any], "Future[Any]"] | None]


class Hung(Failed):
    """The kernel did not come back from a call in time."""


class StillHung(Hung):
    """It has not come back yet from an earlier call; asking took no time."""


class Deadline:
    """Calls with a time limit. Not thread-safe: the owner makes one call at a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._inbox: _Inbox | None = None
        self._hanging: dict[str, Future[Any]] = {}
        self._until: float | None = None

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """All calls made inside of this take about so many seconds together at most.

        Each may take half of what is left, so however many hang, those that do not are still tried.
        """
        self._until = time.monotonic() + seconds
        try:
            yield
        finally:
            self._until = None

    def run(self, key: str, call: Callable[[], T], patience: float = 0.0) -> T:
        """Return what the call returns, or raise what it raises. Hung when it takes longer, or for longer than
        `patience` seconds where these are more; StillHung for a key whose last call is still out.
        """
        seconds = max(self.seconds, patience)
        if self._until is not None:
            seconds = min(seconds, max(LEAST_S, (self._until - time.monotonic()) / 2))
        earlier = self._hanging.get(key)
        if earlier:
            if not earlier.done():
                raise StillHung("an earlier access to it still hangs in the kernel", where=key)
            del self._hanging[key]
        if self._inbox is None:
            self._inbox = SimpleQueue()
            weakref.finalize(self, self._inbox.put, None)  # the thread ends with its owner
            threading.Thread(target=_work, args=(self._inbox,), name="knobs", daemon=True).start()
        future: Future[T] = Future()
        self._inbox.put((call, future))
        try:
            return future.result(seconds)
        except TimedOut:
            if future.done():
                raise
            self._hanging[key] = future
            self._inbox.put(None)  # should the call ever come back, its thread ends
            self._inbox = None
            raise Hung(f"no answer from the kernel within {seconds:.2g} s", where=key) from None


def _work(inbox: _Inbox) -> None:
    while (job := inbox.get()) is not None:
        call, future = job
        try:
            future.set_result(call())
        except BaseException as error:  # whatever it is, it belongs to the caller
            future.set_exception(error)
        del job, call, future
