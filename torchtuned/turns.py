"""Who is next: one call of each user at a time, so that who calls a lot waits for himself, and nobody else does; and
others before work that takes long and that anybody can ask for all the time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from torchtuned.errors import Busy

REST = 4  # times what was spent


class Rest:
    """The pause after work that took more than `free_s` of CPU time."""

    def __init__(self, free_s: float) -> None:
        self._free_s, self._until = free_s, 0.0

    def left(self) -> float:
        """Seconds; 0 when it is over."""
        return max(0.0, self._until - time.monotonic())

    def after(self, cost_s: float) -> None:
        """It begins, after so much CPU time."""
        self._until = time.monotonic() + REST * max(0.0, cost_s - self._free_s)


class Turns:
    """Of calls that take a while. `most` of one user may be in progress, all but one of them waiting."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._here: Counter[int] = Counter()
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def of(self, uid: int) -> AsyncIterator[None]:
        """The turn of a user. Busy when too many wait for it."""
        if self._here[uid] >= self._most:
            raise Busy(f"{self._most} calls of uid {uid} wait for an answer already", hint="wait until some have one")
        lock = self._locks.setdefault(uid, asyncio.Lock())
        self._here[uid] += 1
        try:
            async with lock:
                yield
        finally:
            self._here[uid] -= 1
            if not self._here[uid]:
                del self._here[uid]
