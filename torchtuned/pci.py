"""Which PCI devices are GPUs, and which CPUs are near each.

The device's own node comes first, then the CPUs that it or a bridge above it names when they are fewer than all,
then what its driver says. A kernel that does not know (numa_node -1) names all CPUs: on a machine with one node that
is the answer, on others it is none, and guessing node 0 would bind half of the GPUs to the wrong side.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torchtuned.cpuset import CpuSet, parse_list, parse_mask
from torchtuned.errors import HostError
from torchtuned.host import Host
from torchtuned.topology import NVIDIA, Gpu, GpuFacts, Node, Topology, pci_key

# Vendor and class: VGA and 3D controllers of NVIDIA; VGA, display controllers and processing accelerators (MI300) of
# AMD. The VGA of a server's management chip has another vendor, NVSwitches and audio functions another class.
AMD = "0x1002"
WATCHED = frozenset({(NVIDIA, "0x0300"), (NVIDIA, "0x0302"), (AMD, "0x0300"), (AMD, "0x0380"), (AMD, "0x1200")})
DEVICES = "/sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def find_gpus(
    host: Host, machine: Topology, facts: Mapping[str, GpuFacts], watch: Collection[tuple[str, str]] = ()
) -> tuple[Gpu, ...]:
    """The GPUs in PCI order. `machine` has CPUs and nodes; `watch` adds (vendor, class) pairs such as
    ("0x8086", "0x0b40"). Virtual functions of a GPU that is here itself do not count.
    """
    wanted = WATCHED.union(watch)
    vendors = {vendor for vendor, _ in wanted}
    found = []
    for address in host.list(DEVICES):
        device = f"{DEVICES}/{address}"
        vendor = host.text(f"{device}/vendor").lower()
        if vendor not in vendors or (vendor, host.text(f"{device}/class")[:6].lower()) not in wanted:
            continue
        if host.exists(f"{device}/physfn"):
            continue
        known = facts.get(address, GpuFacts())
        cpus, locality = _near(host, machine, address, known)
        found.append(
            Gpu(
                address=address,
                vendor=vendor,
                device=host.text(f"{device}/device").lower(),
                numa_node=_node(host, device),
                local_cpus=cpus,
                locality=locality,
                driver=driver(host, address),
                uuid=known.uuid,
                name=known.name,
                mig=known.mig,
            )
        )
    return tuple(sorted(found, key=lambda gpu: pci_key(gpu.address)))


def _near(host: Host, machine: Topology, address: str, known: GpuFacts) -> tuple[CpuSet, str]:
    """The near CPUs and how they are known."""
    for i, device in enumerate([f"{DEVICES}/{address}", *_parents(host, address)]):
        node = _node(host, device)
        if node is not None and any(node == other.id for other in machine.nodes):
            nearest = machine.nearest_nodes(node)
            if nearest:
                how = "numa_node" if nearest[0].id == node else "nearest-node"
                return nearest[0].cpus, "parent" if i else how
        cpus = _local_cpus(host, device) & machine.online
        if cpus and cpus < machine.online:
            return cpus, "parent" if i else "local_cpulist"
    cpus = known.cpus & machine.online
    if cpus and cpus < machine.online:
        return cpus, "nvml"
    if len(_distinct(machine.nodes)) <= 1:
        return machine.online, "single-node"
    return frozenset(), "unknown"


def _distinct(nodes: tuple[Node, ...]) -> set[CpuSet]:
    """The CPU sets of the nodes that have CPUs; nodes that overlap fully are one."""
    return {node.cpus for node in nodes if node.cpus}


def _parents(host: Host, address: str) -> list[str]:
    """The bridges above a device, nearest first, read from where its link leads."""
    try:
        steps = host.link(f"{DEVICES}/{address}").split("/")[:-1]
    except HostError:
        return []
    return [f"{DEVICES}/{step}" for step in reversed(steps) if _ADDRESS.fullmatch(step)]


def _node(host: Host, device: str) -> int | None:
    try:
        node = host.read_int(f"{device}/numa_node")
    except HostError:
        return None
    return node if node >= 0 else None


def _local_cpus(host: Host, device: str) -> CpuSet:
    for name, parse in (("local_cpulist", parse_list), ("local_cpus", parse_mask)):
        try:
            if cpus := parse(host.read(f"{device}/{name}")):
                return cpus
        except (HostError, ValueError):
            continue
    return frozenset()


def driver(host: Host, address: str) -> str:
    """The kernel driver bound to a PCI function, or ""."""
    try:
        return host.link(f"{DEVICES}/{address}/driver").rsplit("/", 1)[-1]
    except HostError:
        return ""
