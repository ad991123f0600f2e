"""What runs, at one moment: who has used how much CPU time, and how much of each CPU's time was idle. Two of them say
who takes which CPUs. Read from /proc/stat and /proc/PID/stat, which everybody may read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from torchtuned.errors import HostError
from torchtuned.host import Host, stat_fields

KTHREADD = 2


@dataclass(frozen=True, kw_only=True)
class Activity:
    """`parents` of all processes that can be seen; `used`, the CPU time of those that are not the kernel's; `cpus`, of
    each CPU all time and idle time. Times in clock ticks, `at` by the monotonic clock."""

    at: float
    parents: Mapping[int, int]
    used: Mapping[int, int]
    cpus: Mapping[int, tuple[int, int]]


def activity(host: Host) -> Activity:
    """A look at all processes. Unreadable."""
    parents, used = {}, {}
    at, cpus = time.monotonic(), _cpus(host)
    for name in host.list("/proc"):
        if not name.isdigit():
            continue
        try:
            fields = stat_fields(host.read(f"/proc/{name}/stat"))
        except HostError:
            continue  # it ended meanwhile, or hidepid keeps it from us
        if fields:
            pid, parent = int(name), int(fields[1])
            parents[pid] = parent
            if KTHREADD not in (pid, parent):
                used[pid] = sum(map(int, fields[11:13]))
    return Activity(at=at, parents=parents, used=used, cpus=cpus)


def _cpus(host: Host) -> dict[int, tuple[int, int]]:
    """From lines such as "cpu3 user nice system idle iowait irq softirq steal …"; none where there is no such file."""
    found = {}
    for line in host.text("/proc/stat").splitlines():
        name, *words = line.split()
        if name[:3] == "cpu" and name[3:].isdecimal():
            ticks = list(map(int, words[:8]))
            found[int(name[3:])] = sum(ticks), sum(ticks[3:5])
    return found
