"""How a family of checks adds itself, and what its checks get to look at.

A family is a module of this folder whose functions carry @rule(CODE, TITLE, ...); checks/__init__.py imports it, and
that is all. A rule takes the Machine and yields Seen and Unseen, nothing when all is well. What it cannot read it may
let rise: a HostError becomes an Unchecked. Its docstring is what `--explain CODE` shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps

from torchtuned import discover
from torchtuned.checks.activity import Activity, activity
from torchtuned.checks.walk import Files, walk
from torchtuned.cpuset import CpuSet
from torchtuned.errors import HostError, Missing
from torchtuned.findings import Action, Finding, Severity, Unchecked
from torchtuned.gpus import Gpus, Reading
from torchtuned.host import Host
from torchtuned.nvidia import Function, functions
from torchtuned.topology import NVIDIA, Topology

HEALTH = (
    "name",
    "persistence_mode",
    "utilization",
    "throttle",
    "power_limit",
    "power_default",
    "power_enforced",
    "temperature",
    "sm_clock",
    "sm_clock_max",
    "application_clock",
    "compute_mode",
    "mig",
    "rows",
    "retired_pending",
    "link",
    "link_max",
    "fabric",
    "compute_capability",
    "processes",
    "memory",
)
Result = Iterable[Finding | Unchecked]


@dataclass(frozen=True, kw_only=True)
class Running:
    """A job that runs: its leader's process and user ids, and what it was given."""

    id: str
    pid: int
    uid: int
    cpus: CpuSet = frozenset()
    gpus: tuple[str, ...] = ()
    scope: str = ""


class Machine:
    """What checks look at. `ours`: ids of knobs that torchtuned has set itself, which are no leftovers.

    `caller`: the process that asks, /proc/self, is a user's own, whose limits and place are worth a look; the daemon's
    are not. `jobs` are torchtuned's, None where nobody could say; `some_jobs`, that those which placed themselves are
    all that could be found, and `others` further jobs, of which nothing is told but that their CPUs are theirs.
    `python` and `data` are paths that a person named. `watch`: further PCI devices that count as GPUs, as (vendor,
    class).
    """

    def __init__(
        self,
        host: Host,
        gpus: Gpus,
        ours: Collection[str] = (),
        *,
        caller: bool = True,
        jobs: Sequence[Running] | None = (),
        some_jobs: bool = False,
        others: Sequence[Running] = (),
        python: str | None = None,
        data: str | None = None,
        watch: Collection[tuple[str, str]] = (),
    ) -> None:
        self.host, self.gpus, self.ours, self.watch = host, gpus, ours, watch
        self.caller, self.python, self.data = caller, python, data
        self.jobs, self.jobs_known = tuple(jobs or ()), jobs is not None and not some_jobs
        self.all_jobs = (*self.jobs, *others)
        self._looks: list[Activity] = []

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        """NVIDIA's PCI functions."""
        return functions(self.host)

    @cached_property
    def cards(self) -> tuple[Function, ...]:
        """NVIDIA GPUs, whatever driver they have."""
        watched = {kind for vendor, kind in self.watch if vendor == NVIDIA}
        return tuple(function for function in self.functions if function.is_gpu or function.kind in watched)

    @cached_property
    def readings(self) -> Mapping[str, Reading]:
        """What NVML says of every GPU that runs on the nvidia driver, asked once."""
        return self.gpus.read([card.address for card in self.cards if card.driver == "nvidia"], HEALTH)

    @cached_property
    def topology(self) -> Topology:
        """CPUs, nodes, and GPUs with what the driver knows of them."""
        return discover.topology(self.host, gpus=self.gpus.facts(), watch=self.watch)

    @property
    def activity(self) -> Activity:
        """What ran when the checks began to look at processes."""
        return self.look(0, 0.0)

    def look(self, number: int, seconds: float) -> Activity:
        """What ran at that look, made so many seconds after the one before, or more; all checks share it."""
        while len(self._looks) <= number:
            if self._looks and self.host.real:
                time.sleep(max(0.0, self._looks[-1].at + seconds - time.monotonic()))
            self._looks.append(activity(self.host))
        return self._looks[number]

    @cached_property
    def data_files(self) -> Files:
        """The files of the data set that a person named; none without one."""
        if self.data is None:
            return Files(paths=(), sizes=(), whole=True)
        return walk(os.path.join(self.host.root, self.data.lstrip("/")))

    @property
    def parents(self) -> Mapping[int, int]:
        """The parent of every process that can be seen."""
        return self.activity.parents

    def family(self, pid: int) -> list[int]:
        """A process and all that descend from it, itself first."""
        found = [pid] if pid in self.parents else []
        for member in found:
            found += [child for child, parent in self.parents.items() if parent == member]
        return found

    def workers(self) -> Iterator[tuple[int, str]]:
        """The processes that train, as far as anybody can tell, each with its job's id or "": those of torchtuned's
        jobs, and those that compute on a GPU. The daemon, which sees into all of them and answers everybody, keeps to
        jobs, whose user it can tell from others.
        """
        seen = set()
        for job in self.jobs:
            for pid in self.family(job.pid):
                seen.add(pid)
                yield pid, job.id
        for reading in self.readings.values() if self.caller else ():
            for pid, _ in reading.values.get("processes", ()):
                if pid not in seen and pid in self.parents:
                    seen.add(pid)
                    yield pid, ""

    def text(self, path: str) -> str:
        """A file's text, "" where there is none. Unreadable."""
        try:
            return self.host.read(path)
        except Missing:
            return ""

    def number(self, path: str) -> int | None:
        """A file's number, None where there is no such file. Unreadable."""
        try:
            return self.host.read_int(path)
        except Missing:
            return None


@dataclass(frozen=True)
class Check:
    """One check. `run` may yield any number of findings, all with this code. `jobs`: it looks into running jobs."""

    code: str
    title: str
    run: Callable[[Machine], Result]
    source: str
    cost: str
    jobs: bool

    @property
    def explanation(self) -> str:
        """What it looks at, and why."""
        return " ".join((self.run.__doc__ or "").split())


REGISTRY: dict[str, Check] = {}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a rule saw, and the way out. The rest is the rule's own where it is left empty."""

    evidence: str
    fix: str
    title: str = ""
    cost: str = ""
    severity: Severity | None = None
    action: Action | None = None
    job: str = ""
    about: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unseen:
    """A rule that could not look, and why."""

    because: str


Rule = Callable[[Machine], Iterable[Seen | Unseen]]
UNMEASURED = "unmeasured"


def rule(
    code: str, title: str, *, severity: Severity, action: Action, cost: str, source: str, jobs: bool = False
) -> Callable[[Rule], Rule]:
    """Register the function as the check of that code (TT and three digits). It says only what it saw; severity,
    class, cost and source are the rule's.

    `jobs`: it looks at running jobs, so it is unchecked where those are not known.
    """

    def add(look: Rule) -> Rule:
        @wraps(look)
        def run(machine: Machine) -> Result:
            if jobs and not machine.jobs_known:
                placed = "no jobs are known but those that placed themselves"
                because = placed if machine.jobs else "its jobs are not known"
                yield Unchecked(code=code, because=f"torchtunedd does not answer, so {because}")
            for item in look(machine):
                if isinstance(item, Unseen):
                    yield Unchecked(code=code, because=item.because)
                    continue
                yield Finding(
                    code=code,
                    severity=item.severity or severity,
                    action=item.action or action,
                    title=item.title or title,
                    evidence=item.evidence,
                    cost=item.cost or cost,
                    fix=item.fix,
                    source=source,
                    job=item.job,
                    about=item.about,
                )

        if code in REGISTRY:
            raise ValueError(f"{code} is taken by {REGISTRY[code].title!r}")
        REGISTRY[code] = Check(code, title, run, source, cost, jobs)
        return look

    return add


def run_all(machine: Machine, codes: Iterable[str]) -> tuple[list[Finding], list[Unchecked]]:
    """Run these checks in the order of their codes."""
    findings: list[Finding] = []
    unchecked: list[Unchecked] = []
    for code in sorted(codes):
        try:
            for result in REGISTRY[code].run(machine):
                if isinstance(result, Finding):
                    findings.append(result)
                else:
                    unchecked.append(result)
        except HostError as error:
            unchecked.append(Unchecked(code=code, because=str(error)))
        except Exception as error:  # one check that stumbles over an odd machine must not take the others with it
            unchecked.append(
                Unchecked(code=code, because=f"a fault of torchtuned's own: {type(error).__name__}: {error}")
            )
    return findings, unchecked
