"""What a process may use: its affinity, the cpuset of its cgroup, and CPU quotas all the way up the tree.

The kernel keeps a task's affinity inside its cpuset, so on the real machine /proc/PID/status says both at once. A
folder that stands for a machine has no tasks: there its cpuset files speak, found as hwloc finds them (/proc/mounts
names the hierarchy, /proc/self/cgroup or /proc/self/cpuset the place in it).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torchtuned import units
from torchtuned.cpuset import CpuSet, parse_list
from torchtuned.errors import HostError
from torchtuned.host import Host

_WHAT = ("cpus", "mems")
# ID, parent, device, root, mount point, options, optional fields, "-", type, source, super options
_MOUNTINFO = re.compile(r"^\d+ \d+ \S+ (\S+) (\S+) .*? - (cgroup2?|cpuset) \S+ (\S+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`affinity` (empty: not known), `cpu_max` in whole CPUs, and the path of the v2 cgroup ("" without one)."""

    affinity: CpuSet
    memory_nodes: CpuSet = frozenset()
    cpu_max: int | None = None
    cgroup: str = ""


@dataclass(frozen=True)
class _Mount:
    kind: str
    point: str
    root: str
    controllers: frozenset[str]


def limits(host: Host, pid: int) -> Limits:
    """The limits of one process; on a folder without such a process, what its cgroup files say. Never fails:
    a process that is gone has no limits that anybody could tell.
    """
    status, mounts, places = _status(host, f"/proc/{pid}"), _mounts(host), _places(host, _process(host, pid))
    affinity, nodes = status.get("Cpus_allowed_list"), status.get("Mems_allowed_list")
    if affinity is None and host.real:
        affinity = _asked(pid)  # a chroot without /proc
    if affinity is None:
        affinity, nodes = _cpuset(host, mounts, places)
    return Limits(
        affinity=affinity or frozenset(),
        memory_nodes=nodes or frozenset(),
        cpu_max=_quota(host, mounts, places),
        cgroup=places.get("", ""),
    )


def cgroup(host: Host, pid: int) -> str:
    """The path of a process's v2 cgroup as limits() has it; "" without one, and for a process that is gone."""
    return _places(host, _process(host, pid)).get("", "")


def cpuset_of_folder(host: Host) -> tuple[CpuSet | None, CpuSet | None]:
    """The CPUs and memory nodes that the cpuset files of a folder allow; None for what they do not say."""
    return _cpuset(host, _mounts(host), _places(host, "/proc/self"))


def folders(host: Host, process: str, controller: str) -> list[str]:
    """The cgroup folders of a process ("/proc/self"), its own first and the root last, in the hierarchy that has the
    controller; none where that is not mounted.
    """
    places = _places(host, process)
    for mount in sorted(_mounts(host), key=lambda mount: mount.kind == "cgroup2"):
        if mount.kind == "cgroup2" or controller in mount.controllers:
            place = places.get("" if mount.kind == "cgroup2" else controller)
            return list(_climb(mount, place)) if place else []
    return []


def _process(host: Host, pid: int) -> str:
    """Where a process is in /proc; a folder may know of none but itself."""
    return f"/proc/{pid}" if host.real or host.exists(f"/proc/{pid}/cgroup") else "/proc/self"


def _asked(pid: int) -> CpuSet | None:
    """A process's affinity from the kernel itself, None when it is gone."""
    try:
        return frozenset(os.sched_getaffinity(pid))
    except OSError:
        return None


def _status(host: Host, process: str) -> dict[str, CpuSet]:
    status = host.text(f"{process}/status")
    found = re.findall(r"^(Cpus_allowed_list|Mems_allowed_list):[ \t]*([0-9,-]*)$", status, re.MULTILINE)
    return {key: parse_list(value) for key, value in found}


def _mounts(host: Host) -> list[_Mount]:
    """The cgroup hierarchies. mountinfo also tells which part of one is mounted, which matters in containers."""
    found = _MOUNTINFO.findall(host.text("/proc/self/mountinfo"))
    if found:
        return [
            _Mount(kind, _octal(point), _octal(root), frozenset(opts.split(","))) for root, point, kind, opts in found
        ]
    entries = [line.split() for line in host.text("/proc/mounts").splitlines()]
    mounts = [
        _Mount(words[2], _octal(words[1]), "/", frozenset(words[3].split(",")))
        for words in entries
        if len(words) > 3 and words[2] in ("cgroup", "cgroup2", "cpuset")
    ]
    return mounts or [_Mount("cgroup2", "/sys/fs/cgroup", "/", frozenset())]


def _octal(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _places(host: Host, process: str) -> dict[str, str]:
    """The process's place by controller; "" is the v2 hierarchy."""
    places = units.cgroups(host.text(f"{process}/cgroup"))
    if "cpuset" not in places and (place := host.text(f"{process}/cpuset")):
        places["cpuset"] = place
        places.setdefault("", place)
    return places


def _climb(mount: _Mount, path: str) -> Iterator[str]:
    """The folders of a cgroup and its ancestors. A path outside of what is mounted means that the mount itself is
    ours, as in a container without a cgroup namespace.
    """
    if mount.root != "/":
        path = path.removeprefix(mount.root) if path.startswith(mount.root) else "/"
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        parts = []
    for length in range(len(parts), -1, -1):
        yield "/".join([mount.point, *parts[:length]])


def _cpuset(host: Host, mounts: list[_Mount], places: dict[str, str]) -> tuple[CpuSet | None, CpuSet | None]:
    for mount in sorted(mounts, key=lambda mount: mount.kind == "cgroup2"):  # a v1 cpuset hierarchy has the controller
        if mount.kind == "cgroup2":
            place, names = places.get("", "/"), ["cpuset.{}.effective"]
        elif mount.kind == "cpuset":
            place, names = places.get("cpuset", "/"), ["effective_{}", "{}"]
        elif "cpuset" in mount.controllers:
            place, names = places.get("cpuset", "/"), ["cpuset.effective_{}", "cpuset.{}"]
        else:
            continue
        cpus, nodes = (_first_list(host, mount, place, [name.format(what) for name in names]) for what in _WHAT)
        return cpus, nodes
    return None, None


def _first_list(host: Host, mount: _Mount, place: str, names: list[str]) -> CpuSet | None:
    for folder in _climb(mount, place):
        for name in names:
            try:
                if found := host.cpus(f"{folder}/{name}"):
                    return found
            except HostError:
                continue
    return None


def _quota(host: Host, mounts: list[_Mount], places: dict[str, str]) -> int | None:
    """The smallest quota between the process and the root, in whole CPUs, at least 1."""
    found: list[int] = []
    for mount in mounts:
        if mount.kind == "cgroup2":
            for folder in _climb(mount, places.get("", "/")):
                found += _quotient(host.text(f"{folder}/cpu.max"))
        elif "cpu" in mount.controllers:
            for folder in _climb(mount, places.get("cpu", "/")):
                quota, period = (host.text(f"{folder}/cpu.cfs_{word}_us") for word in ("quota", "period"))
                found += _quotient(f"{quota} {period}")
    return min(found, default=None)


def _quotient(text: str) -> list[int]:
    """The quota of "200000 100000"; none for "max 100000" and "-1 100000"."""
    words = text.split()
    if not words or not words[0].isdecimal() or len(words[0]) > 20:
        return []
    period = int(words[1]) if len(words) > 1 and words[1].isdecimal() and len(words[1]) <= 20 else 100000
    return [max(1, int(words[0]) // max(1, period))]
