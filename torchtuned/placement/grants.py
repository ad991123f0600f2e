"""What a job asks for and what it gets: the values that placement turns one into the other. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from torchtuned.cpuset import CpuSet


@dataclass(frozen=True, kw_only=True)
class Request:
    """A job's wishes, and what already limits it.

    `gpus`: PCI addresses or UUIDs; a number of free ones; () for none; None when the command line does not say, and
    then the two CUDA variables may. `cpus`: "N", "N%", "node" or "all". `affinity` and `cpu_max` (whole CPUs) are the
    caller's own limits, None for none. Without `insist` the named GPUs are only a default: those that other jobs have
    are left out, or shared when there are no others. `command`, `confine` and `wait` (seconds, 0 for ever) travel
    along for others.
    """

    gpus: tuple[str, ...] | int | None = None
    cuda_visible_devices: str | None = None
    cuda_device_order: str | None = None
    ranks: int | None = None
    policy: str = "exclusive"
    cpus: str | None = None
    shared: bool = False
    memory: str = "local"
    affinity: CpuSet | None = None
    cpu_max: int | None = None
    insist: bool = True
    command: tuple[str, ...] = ()
    confine: str | None = None
    wait: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The administrator's say: CPUs no job gets, how many CPU jobs the machine is cut for (0: one takes all that is
    free), what to do when nothing is free, and the most OpenMP threads of a GPU rank.
    """

    reserved: CpuSet = frozenset()
    slots: int = 0
    when_full: str = "share"
    omp_max_gpu: int = 8


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One process of a job: its GPU (PCI address), CPUs and OpenMP threads, and why."""

    rank: int
    gpu: str | None = None
    cpus: CpuSet
    memory_nodes: CpuSet = frozenset()
    omp_num_threads: int = 1
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Grant:
    """What a job got. `cpus` is the union of its ranks'.

    `bound` is False when the job may run wherever it was allowed before: then it holds no CPUs against others.
    `gpus` are leased to it; `gpus_chosen` tells that they were picked for it, so it has yet to hear which.
    """

    cpus: CpuSet
    memory_nodes: CpuSet = frozenset()
    gpus: tuple[str, ...] = ()
    shared: bool = False
    threads: int = 1
    ranks: tuple[Rank, ...] = ()
    warnings: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    bound: bool = True
    gpus_chosen: bool = False
