"""What the journal and the counters that outlive a job say about its end, put together for ending.py to weigh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchtuned.checks import xid
from torchtuned.reports import journal
from torchtuned.reports.ending import OOMD_LINE, OomKill, kills_of, oom_kill
from torchtuned.reports.journal import Entry
from torchtuned.topology import pci_key

LOOK_BACK = 600_000_000  # microseconds before its end, or its first out-of-memory kill, that may explain a job's end
BEFORE = 5_000_000  # the kernel counts a kill and logs it; which comes first is not said
# PID 1's fields about a scope that has ended, and which of our figures each is
RESOURCES = (
    ("CPU_USAGE_NSEC", "cpu", "usage_s", 1e-9),
    ("MEMORY_PEAK", "memory", "peak", 1),
    ("IO_METRIC_READ_BYTES", "io", "read_bytes", 1),
    ("IO_METRIC_WRITE_BYTES", "io", "write_bytes", 1),
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """`kills`: the kernel's lines about processes of the job; `oomd`: why systemd-oomd killed it, "" when it did not;
    `resources`: (group, name, number) of figures that PID 1 read last.
    """

    kills: tuple[OomKill, ...] = ()
    oomd: str = ""
    resources: tuple[tuple[str, str, float], ...] = ()


def since(started: int, ended: int, oom_at: int) -> int:
    """From when on the journal may explain an end; all in microseconds after 1970, `oom_at` 0 when there was none. A
    clock that was set back may have it end before its start."""
    return max(min(started, ended), min(ended, oom_at or ended) - LOOK_BACK) - BEFORE


def look(entries: Iterable[Entry], *, cgroup: str, scope: str, pids: frozenset[int], since: int) -> Found:
    """What entries since a time say of one job, which has a cgroup and scope of its own, or only processes."""
    kills: list[OomKill] = []
    oomd = ""
    resources: list[tuple[str, str, float]] = []
    for entry in entries:
        if entry.time < since:
            continue
        if entry.by == "kernel" and (kill := oom_kill(entry.message)) is not None:
            kills += kills_of([kill], cgroup, pids)
        elif entry.by == "oomd" and (found := OOMD_LINE.match(entry.message)) and cgroup:
            if f"{cgroup}/".startswith(f"{found[1].rstrip('/')}/"):
                oomd = found[2]
        elif entry.by == "pid1" and scope and entry.unit == scope:
            if entry.kind == journal.OOMD_KILL:
                oomd = oomd or "it was short of memory"
            elif entry.kind == journal.RESOURCES:
                resources = [
                    (group, name, int(number) * scale)
                    for field, group, name, scale in RESOURCES
                    if (number := entry.fields.get(field, "")).isdecimal() and int(number) < 1 << 63
                ]
    return Found(kills=tuple(kills), oomd=oomd, resources=tuple(resources))


def xids(entries: Iterable[Entry], gpus: Sequence[str], since: int) -> tuple[str, ...]:
    """What the NVIDIA driver reported of these GPUs. Those that every killed job makes are left out."""
    found: dict[str, None] = {}
    for entry in entries:
        line = xid.LINE.search(entry.message) if entry.by == "kernel" and entry.time >= since else None
        if line is None or pci_key(xid.address(line[1])) not in map(pci_key, gpus):  # NVML writes longer domains
            continue
        meaning = xid.XIDS.get(int(line[2]), xid.UNKNOWN)
        if meaning.side is not xid.Side.AFTER:
            found[f"Xid {line[2]} of GPU {xid.address(line[1])}: {meaning.what} ({meaning.side})"] = None
    return tuple(found)
