"""Whether a process may be moved into a scope of its own, where to, and what it must take along.

Becoming a job must not be a way out: out of a service that somebody watches, a container, a Slurm step, or the limits
that somebody put on a scope. So only what a login session or a desktop's user manager started is moved, and only when
nothing between where it is and the slice it goes to limits it. The slice stays above it and goes on limiting.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchtuned.cpuset import CpuSet
from torchtuned.host import Host

MOUNT = "/sys/fs/cgroup"
UNLIMITED = 2**64 - 1  # systemd's "infinity"
CPUSET_KERNEL = (6, 2)  # older ones wipe every task's affinity when the first cpuset appears
# What the leaf and the cgroups above it say that have no limit; files that the kernel or the controller lacks are none
LIMITS = {
    "memory.max": "max",
    "memory.high": "max",
    "memory.swap.max": "max",
    "memory.swap.high": "max",
    "memory.zswap.max": "max",
    "cpuset.cpus": "",
    "cpuset.mems": "",
    "io.max": "",
    "io.latency": "",
    "io.prio.class": "no-change",
    "cpu.uclamp.max": "max",
    "cpu.idle": "0",
}
HUGE = re.compile(r"hugetlb\.[^.]+\.(rsvd\.)?max")
KEYED = ("rdma.max", "misc.max")  # lines of KEY VALUE or KEY NAME=VALUE…, "max" where nothing is limited
WEIGHTS = {"cpu.weight": 100, "io.weight": 100, "io.bfq.weight": 100}  # less than their defaults is a limit among peers
# What systemd enforces by programs in the kernel, which no file of the cgroup tells: only the administrator's own words
PROGRAMS = re.compile(
    r"^\s*(IPAddress(?:Allow|Deny)|IP(?:In|E)gressFilterPath|Device(?:Allow|Policy)|RestrictNetworkInterfaces"
    r"|SocketBind(?:Allow|Deny)|BPFProgram|NFTSet)\s*=",
    re.MULTILINE,
)
ADMINS = ("/etc/systemd/system", "/run/systemd/system", "/etc/systemd/system.control", "/run/systemd/system.control")


@dataclass(frozen=True, kw_only=True)
class Move:
    """Where to: the slice for the new scope, and the task limit (TasksMax=) that goes along."""

    slice: str
    tasks_max: int = UNLIMITED


@dataclass(frozen=True, kw_only=True)
class Scope:
    """A scope to make around one process. Empty `cpus` and `memory_nodes` set no cpuset."""

    name: str
    description: str
    slice: str
    pid: int
    pidfd: int
    tasks_max: int = UNLIMITED
    cpus: CpuSet = frozenset()
    memory_nodes: CpuSet = frozenset()


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """How a job is kept to its CPUs: `mode` is "cpuset", "affinity" or "none"; `move` when it gets a scope."""

    mode: str
    move: Move | None = None
    warning: str = ""


def confinement(host: Host, cgroup: str, *, admin: str, asked: str | None, hindrance: str = "") -> Confinement:
    """Choose for a process in `cgroup`. `admin` is [jobs] confine (auto, cpuset, affinity, none), `asked` the user's
    wish, which goes first; only where it would need a cpuset that wipes affinities does the admin have the last word.
    `hindrance` says why there can be no scope, whatever the cgroup.
    """
    mode = asked or admin
    if mode == "none":
        return Confinement(mode="none")
    place = hindrance or move(host, cgroup)
    if isinstance(place, str):
        warning = f"no cpuset: {place}" if mode == "cpuset" else ""
        return Confinement(mode="affinity", warning=warning)
    if mode == "affinity":
        return Confinement(mode="affinity", move=place)
    if not has_cpuset(host):
        warning = "no cpuset: the kernel's cgroups have no cpuset controller" if mode == "cpuset" else ""
        return Confinement(mode="affinity", move=place, warning=warning)
    if kernel(host) < CPUSET_KERNEL and admin != "cpuset":
        warning = ""
        if mode == "cpuset":
            warning = "no cpuset: on kernels before 6.2 the first one wipes every CPU affinity on the machine"
        return Confinement(mode="affinity", move=place, warning=warning)
    return Confinement(mode="cpuset", move=place)


def move(host: Host, cgroup: str) -> Move | str:
    """Whether a process in `cgroup` (path of the unified hierarchy) may be moved; a text says why it may not."""
    parts = cgroup.strip("/").split("/")
    slices = [i for i, part in enumerate(parts) if part.endswith(".slice")]
    leaf = parts[-1]
    manager = next((i for i, part in enumerate(parts) if re.fullmatch(r"user@\d+\.service", part)), None)
    if not host.exists(f"{MOUNT}/cgroup.controllers"):
        return "there is no unified cgroup hierarchy"
    if manager is not None:
        slices = [i for i in slices if i < manager]  # slices below belong to the user's own manager
        if not leaf.endswith(".scope"):
            return f"it is in {leaf}, a service of its user"
    elif not re.fullmatch(r"session-[^/]+\.scope", leaf):
        return f"it is in {leaf}, which is not a login session" if leaf else "it is in no unit"
    if not slices:
        return "it is in no slice"
    home = slices[-1]
    above = [part for part in parts[:home] if not part.endswith(".slice")]
    if above:  # a whole system of its own, with slices of its own
        return f"it is inside of {above[0]}"
    tasks = UNLIMITED
    for depth in range(len(parts), home + 1, -1):
        path = f"{MOUNT}/{'/'.join(parts[:depth])}"
        if limit := _limit(host, path) or _program(host, parts[depth - 1]):
            return f"{parts[depth - 1]} has a limit, {limit}"
        pids = host.text(f"{path}/pids.max")
        if pids.isdecimal():
            if manager is None:  # logind sets none, and several jobs would have it several times
                return f"{parts[depth - 1]} has a limit, pids.max = {pids}"
            tasks = min(tasks, int(pids))
    return Move(slice=parts[home], tasks_max=tasks)


def holds(scope: str, cgroup: str) -> bool:
    """Whether a cgroup is PID 1's scope of that name, or below it. PID 1 makes scopes right below slices; below their
    user@.service users give cgroups any name they like.
    """
    parts = cgroup.strip("/").split("/")
    return bool(scope) and scope in parts and all(part.endswith(".slice") for part in parts[: parts.index(scope)])


def kernel(host: Host) -> tuple[int, int]:
    """Version of the running kernel, (0, 0) when it is not known."""
    found = re.match(r"(\d+)\.(\d+)", host.text("/proc/sys/kernel/osrelease"))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def has_cpuset(host: Host) -> bool:
    """Whether units can have AllowedCPUs=: the cpuset controller is one of the unified hierarchy's."""
    return "cpuset" in host.text(f"{MOUNT}/cgroup.controllers").split()


def _limit(host: Host, path: str) -> str:
    """The first limit that a cgroup's own files tell, as "FILE = VALUE"; "" without one."""
    huge = dict.fromkeys((name for name in host.list(path) if HUGE.fullmatch(name)), "max")
    for name, free in {**LIMITS, **huge}.items():
        value = host.text(f"{path}/{name}", free)
        if value != free:
            return f"{name} = {value.partition(chr(10))[0]}"
    quota = host.text(f"{path}/cpu.max", "max")
    if not quota.startswith("max"):
        return f"cpu.max = {quota}"
    for name in KEYED:
        for line in host.text(f"{path}/{name}").splitlines():
            if any(word.rpartition("=")[2] != "max" for word in line.split()[1:]):
                return f"{name} = {line}"
    for name, usual in WEIGHTS.items():
        weight = host.text(f"{path}/{name}").removeprefix("default ").partition("\n")[0]
        if weight.isdecimal() and len(weight) < 9 and int(weight) < usual:
            return f"{name} = {weight}"
    return ""


def _program(host: Host, unit: str) -> str:
    """The first line in a drop-in of the administrator's for a unit, or for all of its kind, that systemd enforces by a
    program; "" without one.
    """
    stem, _, kind = unit.rpartition(".")
    dashes = [stem[: i + 1] for i, sign in enumerate(stem) if sign == "-"]
    template = [stem[: stem.index("@") + 1]] if "@" in stem else []
    for folder in ADMINS:
        for name in (*(f"{start}.{kind}.d" for start in (stem, *template, *dashes)), f"{kind}.d"):
            for file in host.list(f"{folder}/{name}"):
                found = PROGRAMS.search(host.text(f"{folder}/{name}/{file}")) if file.endswith(".conf") else None
                if found:
                    return f"{found[1]}= in {folder}/{name}/{file}"
    return ""
