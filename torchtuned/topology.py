"""The machine as placement sees it: CPUs, cores, caches, packages, NUMA nodes and GPUs. Immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from torchtuned.cpuset import CpuSet

EMPTY: Mapping[int, int] = MappingProxyType({})
NVIDIA = "0x10de"  # PCI vendor, as sysfs has it
FAR = 255  # the kernel's own "unreachable", for a node whose distance is not told


def pci_key(address: str) -> tuple[int, ...]:
    """Sort key for PCI order: domains may have more than four digits, so text order would be wrong."""
    return tuple(int(part, 16) for part in address.replace(".", ":").split(":"))


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
    distances: Mapping[int, int] = field(default_factory=lambda: EMPTY)


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
class GpuFacts:
    """What only a GPU's driver knows (through NVML). `cpus` are those it calls near; empty if it does not say."""

    uuid: str = ""
    name: str = ""
    cpus: CpuSet = frozenset()
    mig: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Everything placement may know. `allowed` is what this process's cgroup and mask leave of `online`.

    `allowed_nodes` are the nodes whose memory the cgroup allows. `llc` groups CPUs by their last level of cache,
    which is not L3 everywhere; `l3` holds level 3 alone. Nodes are sorted by id, GPUs by PCI address, all the
    others by their lowest CPU.
    """

    online: CpuSet
    allowed: CpuSet
    allowed_nodes: CpuSet = frozenset()
    isolated: CpuSet = frozenset()
    cores: tuple[Core, ...] = ()
    packages: tuple[CpuSet, ...] = ()
    l3: tuple[CpuSet, ...] = ()
    llc: tuple[CpuSet, ...] = ()
    nodes: tuple[Node, ...] = ()
    gpus: tuple[Gpu, ...] = ()

    @cached_property
    def node_of(self) -> Mapping[int, int]:
        """The node id of each CPU that has one; the lowest where nodes overlap."""
        return {cpu: node.id for node in reversed(self.nodes) for cpu in node.cpus}

    def nearest_nodes(self, node_id: int) -> list[Node]:
        """The nodes that have CPUs, nearest to this node first (by its distances, then by id)."""
        distances = next((node.distances for node in self.nodes if node.id == node_id), EMPTY)
        return sorted(
            (node for node in self.nodes if node.cpus),
            key=lambda node: (node.id != node_id, distances.get(node.id, FAR), node.id),
        )
