"""Keeps a job on its CPUs: by a scope that PID 1 makes for it, or by its own affinity, and by PID 1's word only.

Whatever PID 1 says or fails to say, the job runs: without a scope of its own it is on its CPUs by affinity.

A job with a scope of its own also gets the hard limits that the configuration wants above those of its login session,
as scopes have no Limit...=. Services and containers keep theirs: becoming a job must not be a way out of them.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from torchtuned import processes, scopes, units
from torchtuned.cpulimits import Limits, limits
from torchtuned.cpuset import CpuSet
from torchtuned.errors import TorchtunedError
from torchtuned.host import Host
from torchtuned.hostpolicy import HostPolicy
from torchtuned.jobs import Job

LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "core": resource.RLIMIT_CORE}

log = logging.getLogger(__name__)


class Pid1(Protocol):
    """The service manager, as far as jobs need it. Every coroutine may raise TorchtunedError. Version 0: not there."""

    version: int

    async def start_scope(self, scope: scopes.Scope) -> None: ...
    async def set_cpus(self, name: str, cpus: CpuSet) -> None: ...
    async def has_scope(self, name: str) -> bool: ...
    async def scopes(self) -> set[str]: ...
    async def processes(self, name: str) -> list[int]: ...
    def watch_scopes(self, *, wanted: bool) -> None: ...


class Confiner:
    """Chooses how a job is confined, and has PID 1 do it."""

    def __init__(self, host: Host, policy: HostPolicy, pid1: Pid1) -> None:
        self._host, self._policy, self._pid1 = host, policy, pid1

    def how(self, job: Job, found: Limits) -> scopes.Confinement:
        """How the job can be kept to its CPUs from where it is now."""
        hindrance = "" if self._pid1.version else "there is no systemd to make a scope"
        if processes.in_container(job.process.pid):
            hindrance = "it is in a container"
        admin, asked = self._policy.config.jobs.confine, job.request.confine
        return scopes.confinement(self._host, found.cgroup, admin=admin, asked=asked, hindrance=hindrance)

    async def confine(self, job: Job, pidfd: int) -> Job:
        """The job as it came out. `pidfd` is the caller's."""
        assert job.grant is not None
        found = await asyncio.to_thread(limits, self._host, job.process.pid)
        how = self.how(job, found)
        if how.move is None or not job.grant.bound or processes.ended(pidfd):
            return job if job.confinement != "cpuset" else replace(job, confinement="affinity")
        cpuset = job.confinement == "cpuset" and how.mode == "cpuset"
        scope = scopes.Scope(
            name=units.scope_of(job.id),
            description=f"torchtuned job {job.id}" + (f": {job.request.command[0]}" if job.request.command else ""),
            slice=how.move.slice,
            pid=job.process.pid,
            pidfd=pidfd,
            tasks_max=how.move.tasks_max,
            cpus=job.grant.cpus if cpuset else frozenset(),
            memory_nodes=job.grant.memory_nodes if cpuset and job.request.memory == "bind" else frozenset(),
        )
        try:
            await self._pid1.start_scope(scope)
        except TorchtunedError as e:
            log.warning("job %s has no scope: %s", job.id, e)
            mode = "affinity" if cpuset else job.confinement
            return replace(job, confinement=mode, warnings=(*job.warnings, f"no scope of its own: {e}"))
        if not processes.ended(pidfd):
            raise_limits(job.process.pid, self._policy.config.jobs.limits)
        return replace(job, scope=scope.name, confinement="cpuset" if cpuset else job.confinement)


def raise_limits(pid: int, wanted: Mapping[str, str]) -> None:
    """Raise the hard limits of a process to what is wanted; soft ones are its own to raise. What cannot be had it sees
    and says itself.
    """
    for name, kind in LIMITS.items():
        word = wanted.get(name, "keep")
        if word != "infinity" and not word.isdecimal():
            continue
        goal = resource.RLIM_INFINITY if word == "infinity" else int(word)
        try:
            soft, hard = resource.prlimit(pid, kind)
            if hard != resource.RLIM_INFINITY and (goal == resource.RLIM_INFINITY or goal > hard):
                resource.prlimit(pid, kind, (soft, goal))
        except (OSError, ValueError, OverflowError) as e:
            log.info("the limit %s of process %d is not raised to %s: %s", name, pid, word, e)
