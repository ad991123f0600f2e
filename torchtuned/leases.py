"""GPUs that somebody computes on who is no job of ours: they are not lent out as long as that lasts.

Only NVML knows, and asking takes a child process, so it is asked when a job wants GPUs, with little patience: a job
that would wait longer than its wrapper does places itself. While somebody waits for such a GPU, it is asked again now
and then, as no event tells of the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from torchtuned import cpulimits, processes
from torchtuned.gpus import Gpus
from torchtuned.host import Host
from torchtuned.jobs import Job
from torchtuned.scopes import holds

PATIENCE_S = 1.0

log = logging.getLogger(__name__)


class Leases:
    """`held` are the addresses that were taken when NVML was asked last."""

    def __init__(self, host: Host, gpus: Gpus) -> None:
        self.held: frozenset[str] = frozenset()
        self._host, self._gpus = host, gpus
        self._look: asyncio.Task[None] | None = None

    async def look(self, jobs: Sequence[Job]) -> frozenset[str]:
        """Ask, and return `held`; what was known before when there is no answer within PATIENCE_S. Those who want to
        know meanwhile share the answer.
        """
        if self._look is None or self._look.done():
            self._look = asyncio.ensure_future(self._ask(jobs))
        await asyncio.shield(self._look)
        return self.held

    async def _ask(self, jobs: Sequence[Job]) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                busy = await asyncio.to_thread(self._busy)
                self.held = await asyncio.to_thread(self._strangers, busy, jobs) if any(busy.values()) else frozenset()
        except TimeoutError:
            log.warning("NVML does not say within %g s who computes on the GPUs", PATIENCE_S)

    def _busy(self) -> dict[str, list[int]]:
        return {address: [process.pid for process in users] for address, users in self._gpus.busy().items()}

    def _strangers(self, busy: Mapping[str, Sequence[int]], jobs: Sequence[Job]) -> frozenset[str]:
        """Addresses with a process that belongs to no job: not in a scope of one, and not below its first process."""
        leaders = {job.process.pid for job in jobs if processes.lives(job.process)}
        scopes = {job.scope for job in jobs if job.scope}
        return frozenset(
            address for address, pids in busy.items() if any(not self._is_ours(pid, leaders, scopes) for pid in pids)
        )

    def _is_ours(self, pid: int, leaders: set[int], scopes: set[str]) -> bool:
        cgroup = cpulimits.cgroup(self._host, pid)
        return any(holds(scope, cgroup) for scope in scopes) or bool(leaders & {pid, *processes.ancestors(pid)})
