"""Work beside the loop's calls: held until it ends, since asyncio holds tasks only weakly, and its errors are told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from torchtuned.errors import TorchtunedError

log = logging.getLogger(__name__)


class Tasks:
    """The running tasks of one owner."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start it. What it raises goes to the journal: one line where it was foreseen, else with a traceback."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self, *, within: float = 0.0) -> None:
        """Wait up to `within` seconds for what runs, and cancel the rest."""
        if self._running and within:
            await asyncio.wait(self._running, timeout=within)
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, TorchtunedError):
            log.error("%s", error)
        elif error is not None:
            log.error("unexpected", exc_info=error)
