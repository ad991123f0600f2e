"""Puts jobs back on their CPUs after CPUs have gone and come.

When the last CPU of a thread's mask goes, the kernel lets it run anywhere, and older kernels (Debian 12's) never take
that back. Nobody says whose mask it was, so masks are looked at. What a program has set itself is left alone: a mask
that is narrower than the job's, or lies elsewhere. Only one that holds the job's CPUs and more is the kernel's work.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from torchtuned import processes
from torchtuned.confining import Pid1
from torchtuned.cpulimits import cgroup
from torchtuned.cpuset import CpuSet, format_list
from torchtuned.errors import TorchtunedError
from torchtuned.host import Host
from torchtuned.jobs import Job
from torchtuned.placement import Grant
from torchtuned.scopes import holds

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Online:
    """The CPUs that were online when masks were right, and those that are now."""

    before: CpuSet
    now: CpuSet


async def pin_again(host: Host, pid1: Pid1, job: Job, cpus: Online, pidfd: int | None) -> None:
    """Put a job back on its CPUs; `pidfd` of its first process is ours, None when that has ended.

    Only what surely is the job's is touched: what is in its scope by PID 1's word and the kernel's, and what is below
    the first process while that lives. Its PID alone means nothing: it may be another process's by now.
    """
    try:
        pids: list[int] = []
        if job.scope:
            try:
                pids = await pid1.processes(job.scope)
            except TorchtunedError as e:
                log.warning("PID 1 does not say what is in %s: %s", job.scope, e)
        await asyncio.to_thread(_pin_job, host, job, pids, cpus, pidfd)
    finally:
        if pidfd is not None:
            os.close(pidfd)


def _pin_job(host: Host, job: Job, pids: Iterable[int], cpus: Online, pidfd: int | None) -> None:
    leader = job.process.pid

    def is_ours(pid: int) -> bool:
        if job.scope and holds(job.scope, cgroup(host, pid)):
            return True
        below = pid == leader or leader in processes.ancestors(pid)
        return below and pidfd is not None and not processes.ended(pidfd)

    family = processes.family(leader) if pidfd is not None else []
    assert job.grant is not None
    pin(sorted({*family, *pids}), job.grant, cpus, leader=leader, is_ours=is_ours)


def pin(pids: Iterable[int], grant: Grant, cpus: Online, *, leader: int, is_ours: Callable[[int], bool]) -> None:
    """Give the threads of a job's processes their CPUs back. `is_ours` tells of a PID, while a descriptor of it is
    open, whether it is the job's: a PID may have been given to another process since it was found.
    """
    held: dict[int, int] = {}
    try:
        for pid in pids:
            try:
                held[pid] = os.pidfd_open(pid)
            except OSError:
                continue  # it has ended
        masks = {pid: processes.masks(pid) for pid in held if is_ours(pid)}
        missing = _missing_rank({pid: set(found.values()) for pid, found in masks.items() if pid != leader}, grant)
        for pid, found in masks.items():
            share = grant.cpus if pid == leader else missing
            for thread, mask in found.items():
                wanted = _wanted(mask, share, grant, cpus)
                if wanted and not processes.ended(held[pid]):
                    _pin(pid, thread, wanted)
    finally:
        for pidfd in held.values():
            os.close(pidfd)


def _wanted(mask: CpuSet, share: CpuSet, grant: Grant, cpus: Online) -> CpuSet | None:
    """What a thread should have that has `mask` now; None where it is right, or its program's own business."""
    if mask <= grant.cpus:
        for whole in (grant.cpus, *(rank.cpus for rank in grant.ranks)):
            if mask == whole & cpus.before < whole & cpus.now:
                return whole & cpus.now  # what was left of its share, and now there is more of it again
        return None
    widened = share & cpus.now < mask or not share & cpus.before
    return share & cpus.now if widened else None


def _missing_rank(masks: Mapping[int, Collection[CpuSet]], grant: Grant) -> CpuSet:
    """The share of those who have lost theirs: the rank's that is on no process, if that is one of several, else all
    of the job's. Which rank a process is only its environment tells, which is not for us to read.
    """
    lost = [
        rank for rank in grant.ranks
        if not any(found and all(mask <= rank.cpus for mask in found) for found in masks.values())
    ]  # fmt: skip
    return lost[0].cpus if len(lost) == 1 else grant.cpus


def _pin(pid: int, thread: int, cpus: CpuSet) -> None:
    try:
        os.sched_setaffinity(thread, cpus)
        log.info("thread %d of process %d is pinned to %s", thread, pid, format_list(cpus))
    except OSError as e:
        log.warning("thread %d of process %d cannot be pinned again: %s", thread, pid, e.strerror)
