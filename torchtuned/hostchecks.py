"""The checks as the daemon runs them: in a thread, for whoever asks, and not once for each who asks.

Its unit gives it a /tmp of its own, no /home, and not the capabilities to look into the processes of users, so what is
to be judged by these is left out here and said to be: `torchtuned check` looks as the user who runs it, whose they are.

Looking is free for everybody and takes a second or two, so those who ask meanwhile share the answer, and it stays good
for a few seconds, as long as no job starts or ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable

from torchtuned.checks import REGISTRY, Running, run_checks
from torchtuned.findings import Finding, Unchecked
from torchtuned.gpus import Gpus
from torchtuned.host import Host
from torchtuned.jobs import Job, State

FRESH_S = 10.0

PROCESSES = "the daemon may not look into the processes of users"
HIDDEN = {
    "TT018": PROCESSES,  # /proc/PID/fd
    "TT023": PROCESSES,  # /proc/PID/maps
    "TT032": "the daemon does not see /home",
    "TT034": "the daemon does not see the /tmp of others",
    "TT065": PROCESSES,  # /proc/PID/fd
    "TT069": "the daemon does not see the /tmp of others",
    "TT071": PROCESSES,  # /proc/PID/environ
    "TT077": "the daemon does not start CUDA",
}
"""Checks that would judge the daemon's own sandbox (systemd/torchtuned.service) instead of the machine, and why."""


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
    """What is asked when a look begins: `jobs`, the table of them; `ours`, the knobs that torchtuned has set; `watch`,
    what else counts as a GPU.

    In a machine that is a folder nothing is hidden.
    """

    def __init__(
        self,
        host: Host,
        gpus: Gpus,
        *,
        jobs: Callable[[], Iterable[Job]],
        ours: Callable[[], Collection[str]],
        watch: Callable[[], Collection[tuple[str, str]]] = tuple,
    ) -> None:
        self._host, self._gpus, self._jobs, self._ours, self._watch = host, gpus, jobs, ours, watch
        self._look: asyncio.Future[tuple[list[Finding], list[Unchecked]]] | None = None
        self._ended = 0.0
        self._seen: list[Running] = []

    async def look(self) -> tuple[list[Finding], list[Unchecked]]:
        """What is wrong with the host and its running jobs, as far as the daemon sees, and where it could not look."""
        look = self._look
        if look is None or (look.done() and (look.cancelled() or look.exception() or self._stale())):
            self._look = look = asyncio.ensure_future(self._ask())
        return await asyncio.shield(look)

    def _stale(self) -> bool:
        return time.monotonic() - self._ended > FRESH_S or self._seen != self._running()

    def _running(self) -> list[Running]:
        return [running(job) for job in self._jobs() if job.state is State.RUNNING]

    async def _ask(self) -> tuple[list[Finding], list[Unchecked]]:
        self._seen = jobs = self._running()
        ours, watch = frozenset(self._ours()), self._watch()
        hidden = HIDDEN if self._host.real else {}
        codes = [code for code in REGISTRY if code not in hidden]
        found, unchecked = await asyncio.to_thread(
            lambda: run_checks(self._host, self._gpus, codes, ours=ours, caller=False, jobs=jobs, watch=watch)
        )
        self._ended = time.monotonic()
        left_out = [Unchecked(code=code, because=f"{why}: torchtuned check does") for code, why in hidden.items()]
        return found, sorted([*unchecked, *left_out], key=lambda item: item.code)
