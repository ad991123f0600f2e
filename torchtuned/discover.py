"""Reading the machine out of sysfs: CPUs, cores, caches, packages, nodes and GPUs, whatever the kernel leaves out.

Every fact has more than one file (masks and lists, old and new names) and any of them may be missing, empty, end in a
NUL byte or still name CPUs that are offline; so everything is cut down to the online CPUs, and what no file tells
falls back to the plainest answer: a CPU is a core of its own, all cores are one package, no NUMA.

Masks are read before lists, as lscpu and hwloc do: where a snapshot was edited by hand the two differ, and then the
answers of all three should still be the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from torchtuned.cpulimits import cpuset_of_folder, limits
from torchtuned.cpuset import CpuSet, parse_list, parse_mask
from torchtuned.errors import HostError
from torchtuned.host import Host
from torchtuned.pci import find_gpus
from torchtuned.topology import Core, GpuFacts, Node, Topology

CPUS = "/sys/devices/system/cpu"
NODES = "/sys/devices/system/node"
APART = 1.15  # clocks or capacities this far apart make cores of another kind; boost of favoured cores stays below


def topology(
    host: Host,
    *,
    gpus: Mapping[str, GpuFacts] | None = None,
    caller: int | None = None,
    watch: Collection[tuple[str, str]] = (),
) -> Topology:
    """Read the machine. `gpus` are facts from the driver by PCI address; `watch` adds (vendor, class) pairs to the
    devices that count as GPUs. `allowed` is what the process `caller` may use; without one, all online CPUs, and on a
    folder what its cpuset files allow.
    """
    allowed, allowed_nodes = _allowed(host, caller)
    online = _online(host) or sorted(allowed or ())  # without /sys only the caller can tell
    everything = frozenset(online)
    cores = _cores(host, everything)
    nodes = _nodes(host, everything)
    l3, llc = _caches(host, online)
    machine = Topology(
        online=everything,
        allowed=everything if allowed is None else allowed & everything,
        allowed_nodes=frozenset(node.id for node in nodes if allowed_nodes is None or node.id in allowed_nodes),
        isolated=_list(host, f"{CPUS}/isolated") & everything,
        cores=cores,
        packages=_packages(host, online),
        l3=l3,
        llc=llc,
        nodes=nodes,
    )
    return replace(machine, gpus=find_gpus(host, machine, gpus or {}, watch))


def _allowed(host: Host, caller: int | None) -> tuple[CpuSet | None, CpuSet | None]:
    if caller is None:
        return (None, None) if host.real else cpuset_of_folder(host)
    found = limits(host, caller)
    return found.affinity or None, found.memory_nodes or None


def _online(host: Host) -> list[int]:
    """The online CPUs in order: from cpu/online, else from each CPU's own folder."""
    if found := _list(host, f"{CPUS}/online"):
        return sorted(found)
    numbers = [int(name[3:]) for name in host.list(CPUS) if re.fullmatch(r"cpu\d+", name)]
    told = any(host.exists(f"{CPUS}/cpu{number}/topology") for number in numbers)
    offline = _list(host, f"{CPUS}/offline")
    return sorted(
        number
        for number in numbers
        if number not in offline
        and host.text(f"{CPUS}/cpu{number}/online") != "0"
        and (not told or host.exists(f"{CPUS}/cpu{number}/topology"))
    )


def _group(online: Iterable[int], members: Callable[[int], CpuSet]) -> list[CpuSet]:
    """Groups of CPUs, by asking only one CPU of each; a CPU named by two groups stays in the first."""
    groups: list[CpuSet] = []
    seen: set[int] = set()
    for cpu in online:
        if cpu not in seen:
            group = (members(cpu) | {cpu}) - seen
            seen |= group
            groups.append(group)
    return groups


def _cores(host: Host, online: CpuSet) -> tuple[Core, ...]:
    def siblings(cpu: int) -> CpuSet:
        return _either(host, f"{CPUS}/cpu{cpu}/topology/", "core_cpus", "thread_siblings") & online

    groups = _group(sorted(online), siblings)
    kinds = _kinds(host, [min(group) for group in groups])
    packages = {cpu: i for i, package in enumerate(_packages(host, sorted(online))) for cpu in package}
    return tuple(
        Core(cpus=group, package=packages[min(group)], kind=kind) for group, kind in zip(groups, kinds, strict=True)
    )


def _packages(host: Host, online: list[int]) -> tuple[CpuSet, ...]:
    everything = frozenset(online)
    by_id: dict[str, set[int]] = {}

    def members(cpu: int) -> CpuSet:
        folder = f"{CPUS}/cpu{cpu}/topology/"
        found = _either(host, folder, "package_cpus", "core_siblings") & everything
        if found:
            return found
        if not by_id:
            for other in online:
                by_id.setdefault(host.text(f"{CPUS}/cpu{other}/topology/physical_package_id"), set()).add(other)
        return frozenset(by_id[host.text(f"{folder}physical_package_id")])

    return tuple(_group(online, members))


def _caches(host: Host, online: list[int]) -> tuple[tuple[CpuSet, ...], tuple[CpuSet, ...]]:
    """The groups that share a level 3 cache, and those that share their last level of cache."""
    everything = frozenset(online)
    l3: list[CpuSet] = []

    def members(cpu: int) -> CpuSet:
        folder = f"{CPUS}/cpu{cpu}/cache"
        highest, last = 0, frozenset({cpu})
        for name in host.list(folder):
            if not name.startswith("index") or host.text(f"{folder}/{name}/type") == "Instruction":
                continue
            level = _number(host.text(f"{folder}/{name}/level"))
            if level < 3 and level <= highest:
                continue
            shared = _either(host, f"{folder}/{name}/", "shared_cpu_map", lists="shared_cpu_list") & everything
            if level == 3 and shared:
                l3.append(shared)
            if level > highest and shared:
                highest, last = level, shared
        return last

    llc = tuple(_group(online, members))
    return tuple(sorted(set(l3), key=min)), llc


def _nodes(host: Host, online: CpuSet) -> tuple[Node, ...]:
    ids = sorted(int(name[4:]) for name in host.list(NODES) if re.fullmatch(r"node\d+", name))
    columns = sorted(_list(host, f"{NODES}/online")) or ids
    nodes = []
    for node in ids:
        folder = f"{NODES}/node{node}/"
        if host.exists(f"{folder}cpumap") or host.exists(f"{folder}cpulist"):
            cpus = _either(host, folder, "cpumap", lists="cpulist")
        else:
            cpus = frozenset(int(name[3:]) for name in host.list(folder) if re.fullmatch(r"cpu\d+", name))
        row = host.text(f"{folder}distance").split()
        told = len(row) == len(columns) and all(word.isdecimal() and len(word) <= 9 for word in row)
        distances = dict(zip(columns, map(int, row), strict=True)) if told else {}
        nodes.append(Node(id=node, cpus=cpus & online, distances=distances))
    return tuple(nodes)


def _kinds(host: Host, cpus: list[int]) -> list[int]:
    """The kind of each core, told by its first CPU, fastest kind first: the two PMUs of hybrid Intel parts, and
    within each the capacities, or where those are all the same the clocks, that lie apart.
    """
    atoms = _list(host, "/sys/devices/cpu_atom/cpus")
    performance = _list(host, "/sys/devices/cpu_core/cpus")
    sides = [int(cpu in atoms or (bool(performance) and cpu not in performance)) for cpu in cpus]
    capacities = _bands(host, cpus, sides, "cpu_capacity")
    clocks = _bands(host, cpus, sides, "cpufreq/cpuinfo_max_freq")
    split = {side for side, band in zip(sides, capacities, strict=True) if band}
    ranks = [
        (side, capacity if side in split else clock)
        for side, capacity, clock in zip(sides, capacities, clocks, strict=True)
    ]
    order = {rank: kind for kind, rank in enumerate(sorted(set(ranks)))}
    return [order[rank] for rank in ranks]


def _bands(host: Host, cpus: list[int], sides: list[int], file: str) -> list[int]:
    """Band 0 for the highest values of each side, 1 after the first gap of 15 %, and so on; 0 where not told."""
    values = [_number(host.text(f"{CPUS}/cpu{cpu}/{file}")) for cpu in cpus]
    bands: dict[tuple[int, int], int] = {}
    for side in set(sides):
        band, above = 0, 0
        for value in sorted({v for v, s in zip(values, sides, strict=True) if v and s == side}, reverse=True):
            band += above >= value * APART
            bands[side, value] = band
            above = value
    return [bands.get((side, value), 0) for side, value in zip(sides, values, strict=True)]


def _either(host: Host, prefix: str, *masks: str, lists: str = "") -> CpuSet:
    """The first file with CPUs in it: of each name the mask, then the list (NAME_list, or `lists`)."""
    for mask in masks:
        for name, parse in ((mask, parse_mask), (lists or f"{mask}_list", parse_list)):
            try:
                if found := parse(host.read(prefix + name)):
                    return found
            except (HostError, ValueError):
                continue
    return frozenset()


def _list(host: Host, path: str) -> CpuSet:
    try:
        return host.cpus(path)
    except HostError:
        return frozenset()


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= 20 else 0
