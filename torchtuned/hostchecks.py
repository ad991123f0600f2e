"""The checks as the daemon runs them: as root, in a thread, for whoever asks, and not once for each who asks.

Looking is free for everybody and takes a second or two, so those who ask meanwhile share the answer, and it stays good
for a few seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable

from torchtuned.checks import Running, run_checks
from torchtuned.findings import Finding
from torchtuned.gpus import Gpus
from torchtuned.host import Host
from torchtuned.jobs import Job, State

FRESH_S = 10.0


def running(job: Job) -> Running:
    """A job as checks look at it."""
    return Running(
        id=job.id,
        pid=job.process.pid,
        uid=job.process.uid,
        cpus=job.grant.cpus if job.grant else frozenset(),
        gpus=job.grant.gpus if job.grant else (),
        scope=job.scope,
    )


class HostChecks:
    """`jobs` and `ours` are asked when a look begins: the table of jobs, and the knobs that torchtuned has set."""

    def __init__(
        self, host: Host, gpus: Gpus, *, jobs: Callable[[], Iterable[Job]], ours: Callable[[], Collection[str]]
    ) -> None:
        self._host, self._gpus, self._jobs, self._ours = host, gpus, jobs, ours
        self._look: asyncio.Future[list[Finding]] | None = None
        self._ended = 0.0

    async def findings(self) -> list[Finding]:
        """What is wrong with the host and its running jobs."""
        look = self._look
        if look is None or (look.done() and (look.cancelled() or look.exception() or self._stale())):
            self._look = look = asyncio.ensure_future(self._ask())
        return await asyncio.shield(look)

    def _stale(self) -> bool:
        return time.monotonic() - self._ended > FRESH_S

    async def _ask(self) -> list[Finding]:
        jobs = [running(job) for job in self._jobs() if job.state is State.RUNNING]
        ours = frozenset(self._ours())
        found, _ = await asyncio.to_thread(
            lambda: run_checks(self._host, self._gpus, ours=ours, caller=False, jobs=jobs)
        )
        self._ended = time.monotonic()
        return found
