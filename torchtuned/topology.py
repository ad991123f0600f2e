"""The machine as placement sees it: CPUs, cores, caches, packages, NUMA nodes and GPUs. Immutable."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from collections.abc import Mapping

from torchtuned.cpuset import CpuSet

EMPTY: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Core:
    """One physical core: its online SMT siblings. `kind` groups like cores, fastest kind first (0)."""

    cpus: CpuSet
    package: int = 0
    kind: int = 0


@dataclass(frozen=True, kw_only=True)
class Node:
    """One NUMA node; `cpus` is empty for memory-only nodes. `distances` by node id, 10 is local."""

    id: int
    cpus: CpuSet
    distances: Mapping[int, int] = field(default=EMPTY)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, keyed by PCI address. `local_cpus` is empty when its locality is unknown.

    `locality` says how the CPUs were found: "numa_node", "local_cpulist", "parent", "nvml",
    "single-node", "nearest-node" or "unknown".
    """

    address: str
    vendor: str
    device: str
    numa_node: int | None = None
    local_cpus: CpuSet = frozenset()
    locality: str = "unknown"
    driver: str = ""
    uuid: str = ""
    name: str = ""
    mig: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Everything placement may know. `allowed` is what this process's cgroup and mask leave of `online`."""

    online: CpuSet
    allowed: CpuSet
    isolated: CpuSet = frozenset()
    cores: tuple[Core, ...] = ()
    packages: tuple[CpuSet, ...] = ()
    l3: tuple[CpuSet, ...] = ()
    nodes: tuple[Node, ...] = ()
    gpus: tuple[Gpu, ...] = ()
