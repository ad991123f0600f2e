"""The account of one job: what it got, what was read of it last, and the report that is made of both.

Times are microseconds after 1970; 0 stands for not yet. What comes after what, and how long it took, is told by ticks,
the microseconds since the boot: an administrator or NTP may set the clock back.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torchtuned.cpuset import format_list
from torchtuned.findings import Finding
from torchtuned.host import Host
from torchtuned.jobs import Job
from torchtuned.reports import accounting, postmortem
from torchtuned.reports.ending import Facts, ending
from torchtuned.reports.journal import Entry
from torchtuned.reports.store import Name
from torchtuned.reports.usage import Figures, GpuFigures

SCHEMA = 1
TEXTS = ("code", "title", "severity")  # of a finding
MOST_FINDINGS = 40  # of one job: the newest are kept


@dataclass(kw_only=True)
class Record:
    """One job: `around` are the out-of-memory counts of the cgroups above it when it started, `figures` the last
    reading and `read_at` when that was. `left_at`: when its first process had exited. `exit` is what its parent told.
    Ticks: `begun`, of the job; `read`, when the last reading was begun; `left` as `left_at`; `over`, its end; `seen`.
    """

    job: Job
    name: Name
    cgroup: str = ""
    around: dict[str, int] = field(default_factory=dict)
    figures: Figures = field(default_factory=dict)
    gpus: dict[str, GpuFigures] = field(default_factory=dict)
    read_at: int = 0
    left_at: int = 0
    oom_at: int = 0
    ended: int = 0
    exit: int | None = None
    released: bool = False
    pids: set[int] = field(default_factory=set)
    findings: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    looked_at: int = 0
    begun: int = 0
    read: int = 0
    left: int = 0
    over: int = 0
    seen: int = 0

    def see(self, found: Iterable[Finding], when: int) -> None:
        """Keep what is wrong with the host, or with the job itself, and felt by this job: since when, and until when
        it was seen. Call it on the loop."""
        grant = self.job.grant
        if self.ended or grant is None:
            return
        self.looked_at, self.seen = when, ticks()
        for finding in found:
            if finding.concerns(self.job.id, cpus=grant.cpus, gpus=grant.gpus):
                key = (finding.code, finding.title, " ".join(finding.about))
                first = self.findings.pop(key, {}).get("first", when)
                self.findings[key] = {**finding.document(), "first": first, "last": when}
        while len(self.findings) > MOST_FINDINGS:
            del self.findings[next(iter(self.findings))]

    def resume(self, left: Left) -> None:
        """Go on from what an earlier daemon has seen."""
        self.around, self.gpus = left.around, left.gpus
        self.findings = {(one["code"], one["title"], str(one.get("about", ""))): one for one in left.findings}

    @property
    def now_wrong(self) -> list[str]:
        """What the last look found, a line each: "TT007 error: a GPU is throttled"."""
        return [
            f"{one['code']} {one['severity']}: {one['title']}"
            for one in self.findings.values()
            if one["last"] == self.looked_at
        ]

    def take(self, figures: Figures, begun: int) -> None:
        """Keep a reading, unless there was nothing left to read, or a later one is here already: readings are made
        in threads, and the last one, when the leader has exited, is not. Call it on the loop.
        """
        if not figures or self.ended or begun < max(self.read, self.left):
            return
        if oom_kills(figures) > oom_kills(self.figures):
            self.oom_at = self.oom_at or now()
        if figures["of"] == "processes":
            self.pids |= set(figures.pop("pids"))
            for group, name in (("cpu", "usage_s"), ("memory", "largest_peak")):  # who ended took theirs along
                figures[group][name] = max(figures[group][name], self.figures.get(group, {}).get(name, 0))
        self.figures, self.read, self.read_at = figures, begun, now()

    def document(self, boot: str) -> dict[str, Any]:
        """The report as it stands. `boot` is the id of this boot of the machine."""
        job, grant = self.job, self.job.grant
        return {
            "schema": SCHEMA,
            "job": job.id,
            "report": self.name.report,
            "uid": job.process.uid,
            "pid": job.process.pid,
            "start": job.process.start,
            "command": list(job.request.command),
            "state": "ended" if self.ended else "running",
            "started": self.name.started,
            "ended": self.ended or None,
            "seconds": round(((self.over or ticks()) - self.begun) / 1e6, 3),
            "cgroup": self.cgroup,
            "granted": {
                "cpus": format_list(grant.cpus) if grant else "",
                "memory_nodes": format_list(grant.memory_nodes) if grant else "",
                "gpus": list(grant.gpus) if grant else [],
                "threads": grant.threads if grant else 0,
                "shared": bool(grant and grant.shared),
                "cpu_max": job.cpu_max,
                "confinement": job.confinement,
                "scope": job.scope,
                "warnings": [*(grant.warnings if grant else ()), *job.warnings],
            },
            "measured": self._measured(),
            "gpus": {address: figures.figures() for address, figures in self.gpus.items()},
            "findings": list(self.findings.values()),
            "oom_kills_around": self.around,
            "boot": boot,
            "end": None,
        }

    def _measured(self) -> dict[str, Any]:
        """The last reading, and whether it saw the whole of the job."""
        if not self.figures:
            return {}
        whole = bool(self.ended) and bool(self.left) and self.read >= self.left
        return {**self.figures, "at": self.read_at, "complete": whole}

    def explained(self, host: Host, entries: list[Entry] | None, boot: str) -> dict[str, Any]:
        """The final report: how it ended, and with what PID 1 read later than we did. `entries` are the journal's,
        None when that cannot be read.
        """
        job = self.job
        since = postmortem.since(self.name.started, self.ended, self.oom_at)
        pids = frozenset({job.process.pid, *self.pids})
        found = postmortem.look(entries or (), cgroup=self.cgroup, scope=job.scope, pids=pids, since=since)
        after = accounting.oom_kills(host, next(iter(self.around), ""))
        risen = {path: after.get(path, count) - count for path, count in self.around.items()}
        facts = Facts(
            status=self.exit,
            leader=job.process.pid,
            oom_kills=oom_kills(self.figures),
            kills=found.kills,
            around=next(((path, count) for path, count in risen.items() if count > 0), ("", 0)),
            oomd=found.oomd,
            xids=postmortem.xids(entries or (), job.grant.gpus if job.grant else (), since),
            journal=entries is not None,
            released=self.released,
        )
        document = self.document(boot)
        return document | {"measured": _with(document["measured"], found), "end": _end(facts)}


@dataclass(frozen=True, kw_only=True)
class Left:
    """What an earlier daemon wrote down of a job that it did not see end. `since`: from when on the journal may explain
    that; the job still ran at its last reading.
    """

    pid: int
    start: int
    name: Name
    since: int
    around: dict[str, int]
    gpus: dict[str, GpuFigures]
    findings: list[dict[str, Any]]
    document: dict[str, Any]

    @classmethod
    def parse(cls, name: Name, document: dict[str, Any]) -> Left:
        """One of store.UNFIT where the file was torn or edited."""
        measured = document["measured"]
        gpus = {address: GpuFigures(kept) for address, kept in document["gpus"].items()}
        for figures in gpus.values():
            figures.figures()
        return cls(
            pid=int(document["pid"]),
            start=int(document["start"]),
            name=name,
            since=int(measured.get("at") or name.started) - postmortem.BEFORE,
            around={path: int(count) for path, count in document["oom_kills_around"].items()},
            gpus=gpus,
            findings=[{"last": 0, **one, **{key: str(one[key]) for key in TEXTS}} for one in document["findings"]],
            document=document,
        )

    def missed(self, entries: list[Entry] | None, *, boot: str) -> dict[str, Any]:
        """The final report of one that ended while no daemon ran."""
        measured, granted = self.document["measured"], self.document["granted"]
        own = {"cgroup": str(self.document.get("cgroup", "")), "scope": str(granted.get("scope", ""))}
        found = postmortem.look(entries or (), **own, pids=frozenset({self.pid}), since=self.since)
        facts = Facts(
            leader=self.pid,
            oom_kills=oom_kills(measured),
            kills=found.kills,
            oomd=found.oomd,
            journal=entries is not None,
            missed=True,
            rebooted=self.document.get("boot") != boot,
        )
        ended = {"state": "ended", "ended": now(), "seconds": None, "end": _end(facts)}
        return self.document | ended | {"measured": _with(measured, found)}


def oom_kills(figures: Figures) -> int:
    """How many processes of its own cgroup the kernel has killed for want of memory."""
    return int(figures.get("memory", {}).get("events", {}).get("oom_kill", 0))


def now() -> int:
    """Microseconds after 1970."""
    return time.time_ns() // 1000


def ticks() -> int:
    """Microseconds since the boot, those asleep among them."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def _with(measured: dict[str, Any], found: postmortem.Found) -> dict[str, Any]:
    """The figures, with what PID 1 read of the scope after our last reading."""
    if found.resources:
        measured = {"of": "cgroup", "complete": False, **measured}
    for group, name, number in found.resources:
        known = measured.get(group, {})
        measured[group] = {**known, name: max(number, known.get(name, 0))}
    return measured


def _end(facts: Facts) -> dict[str, Any]:
    weighed = ending(facts)
    return {
        "cause": weighed.cause,
        "sentence": weighed.sentence,
        "evidence": list(weighed.evidence),
        "status": facts.status,
    }
