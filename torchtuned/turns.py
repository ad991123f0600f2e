"""Whose call is next: one of each user's at a time, so that who calls a lot waits for himself, and nobody else does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from torchtuned.errors import Busy


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
