"""What a process and its descendants have used, from /proc: for jobs without a cgroup of their own.

Only files that everybody may read: stat and status. The time of children that were waited for is in their parent's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from torchtuned import processes

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True, kw_only=True)
class TreeUsage:
    """CPU time in seconds; memory resident now, shared pages counted for each process; the largest peak of one."""

    pids: tuple[int, ...] = ()
    cpu_s: float = 0.0
    memory: int = 0
    largest: int = 0


def usage(pid: int) -> TreeUsage:
    """The figures of a tree. One that has ended has no pids; a leader that nobody has waited for still has its time."""
    ticks = memory = largest = 0
    found = []
    for member in [pid] if _exited(pid) else processes.family(pid) or [pid]:
        try:
            fields = processes.stat(member)
            with open(f"/proc/{member}/status", "rb") as file:
                peak = next((line.split()[1] for line in file if line.startswith(b"VmHWM:")), b"0")
        except OSError:
            continue  # it ended meanwhile
        found.append(member)
        ticks += sum(map(int, fields[11:15]))  # utime, stime, and those of children that were waited for
        memory += int(fields[21]) * PAGE
        largest = max(largest, int(peak) * 1024)
    return TreeUsage(pids=tuple(found), cpu_s=ticks / TICKS, memory=memory, largest=largest)


def _exited(pid: int) -> bool:
    """Whether the process has: then its children are another's already, and looking for them among all processes of the
    machine would be for nothing. A first thread that has ended before the others looks the same, but for their number.
    """
    try:
        fields = processes.stat(pid)
    except OSError:
        return True
    return fields[0] in "ZX" and int(fields[17]) <= 1
