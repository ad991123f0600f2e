"""What `torchtuned top` shows: readings of the jobs' cgroups, and what changed between two of them.

The readings are this process's own, of files that everybody may read, so watching costs the daemon nothing but a list
of its jobs now and then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchtuned.cli.command import without
from torchtuned.cli.jobs import GPU, JOB, Properties, command_of, of_kind, texts, user_name, whole
from torchtuned.client import Client
from torchtuned.cpuset import CpuSet, parse_list
from torchtuned.errors import DaemonUnreachable, HostError
from torchtuned.gpus import Gpus
from torchtuned.host import Host
from torchtuned.reports import accounting
from torchtuned.reports.usage import Figures, within

LIST_S = 10.0  # between two lists of jobs from the daemon
GPU_S = 5.0  # between two questions to NVML
NODES = "/sys/devices/system/node"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One job now. Per cent: `busy` of its CPUs, `held` of the time by a quota, `waits` for CPU, memory and storage in
    the last 10 s, `memory_near` of its memory on its own nodes, `gpus` by address. Bytes: `memory`. None: not known.
    """

    job: str
    user: str
    command: str
    state: str
    cpus: str
    busy: float | None = None
    held: float | None = None
    memory: float | None = None
    memory_near: float | None = None
    waits: tuple[float | None, float | None, float | None] = (None, None, None)
    gpus: Mapping[str, float | None] = field(default_factory=dict)
    near: str = ""  # whether its CPUs are those next to its GPUs: yes, no, ?, or "" without GPUs
    confinement: str = ""
    findings: int = 0
    since: int = 0


@dataclass(frozen=True, kw_only=True)
class View:
    """All there is to show. `busy` of the machine's `cpus`, in per cent; `note` is what went wrong, if anything."""

    rows: tuple[Row, ...]
    cpus: int
    busy: float | None
    note: str = ""


@dataclass(kw_only=True)
class _Reading:
    at: float
    figures: Figures


class Watcher:
    """Reads again with each look(). Raises DaemonUnreachable only while it has never had a list of jobs."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._jobs: list[Properties] = []
        self._near: dict[str, CpuSet] = {}  # the CPUs near each GPU; empty: not known
        self._listed = float("-inf")
        self._cgroups: dict[str, str] = {}
        self._before: dict[str, _Reading] = {}
        self._ticks: tuple[int, int] | None = None
        self._note = ""
        self._nodes = _nodes(host)
        self._gpus = _GpuUse(host)

    def look(self) -> View:
        now = time.monotonic()
        if now - self._listed >= LIST_S:
            self._list(now)
        rows, after = [], {}
        for job in self._jobs:
            key = str(job.get("id"))
            reading = _Reading(at=now, figures=self._read(job))
            if not reading.figures and job.get("state") == "running":
                self._listed = float("-inf")  # it has ended, or has just got its scope
                self._cgroups.pop(key, None)
            after[key] = reading
            rows.append(self._row(job, reading, self._before.get(key)))
        self._before = after
        self._gpus.want(sorted({address for row in rows for address in row.gpus}))
        return View(rows=tuple(rows), cpus=sum(map(len, self._nodes.values())), busy=self._busy(), note=self._note)

    def _list(self, now: float) -> None:
        try:
            with Client() as daemon:
                objects = daemon.objects()
        except DaemonUnreachable as error:
            if self._listed == float("-inf") and not self._jobs and not self._note:
                raise
            self._note = str(without(error, "jobs are those of before"))
        else:
            self._jobs, self._note = of_kind(objects, JOB), ""
            self._near = {str(gpu["address"]): parse_list(str(gpu["cpus"])) for gpu in of_kind(objects, GPU)}
        self._listed = now

    def _read(self, job: Properties) -> Figures:
        if job.get("state") != "running":
            return {}
        key, pid = str(job.get("id")), whole(job.get("pid"))
        if key not in self._cgroups:
            self._cgroups[key] = accounting.cgroup_of(self._host, pid, str(job.get("scope", "")))
        return accounting.of_job(self._host, pid, self._cgroups[key])

    def _row(self, job: Properties, reading: _Reading, before: _Reading | None) -> Row:
        cpus = parse_list(str(job.get("cpus", "")))
        figures, gpus = reading.figures, texts(job.get("gpus"))
        used, held = (_rate(reading, before, "cpu", name) for name in ("usage_s", "throttled_s"))
        cpu, memory, io = (within(figures, "pressure", what, "some_10") for what in ("cpu", "memory", "io"))
        return Row(
            job=str(job.get("id")),
            user=user_name(job.get("uid")),
            command=command_of(job.get("pid")),
            state=str(job.get("state")),
            cpus=str(job.get("cpus")),
            busy=None if used is None or not cpus else 100 * used / len(cpus),
            held=None if held is None else 100 * held,
            memory=within(figures, "memory", "current"),
            memory_near=self._memory_near(figures, cpus),
            waits=(cpu, memory, io),
            gpus={address: self._gpus.now.get(address) for address in gpus},
            near=self._nearness(gpus, cpus),
            confinement=str(job.get("confinement")),
            findings=len(texts(job.get("findings"))),
            since=whole(job.get("since")),
        )

    def _nearness(self, gpus: tuple[str, ...], cpus: CpuSet) -> str:
        if not gpus:
            return ""
        near = [self._near.get(address, frozenset()) for address in gpus]
        return "?" if not all(near) or not cpus else "yes" if cpus <= frozenset().union(*near) else "no"

    def _memory_near(self, figures: Figures, cpus: CpuSet) -> float | None:
        """How much of a cgroup's memory is on the nodes of its CPUs; nothing to say on a machine with one node."""
        nodes = figures.get("memory", {}).get("nodes", {})
        total = sum(nodes.values())
        if len(self._nodes) < 2 or not total:
            return None
        own = sum(number for node, number in nodes.items() if self._nodes.get(int(node), frozenset()) & cpus)
        return 100 * float(own) / float(total)

    def _busy(self) -> float | None:
        """Of all CPUs, from the first line of /proc/stat: user nice system idle iowait irq softirq steal."""
        try:
            words = [int(word) for word in self._host.read("/proc/stat").splitlines()[0].split()[1:9]]
        except (HostError, ValueError, IndexError):
            return None
        before, self._ticks = self._ticks, (sum(words), sum(words[3:5]))
        if before is None or self._ticks[0] <= before[0]:
            return None
        return 100 * (1 - (self._ticks[1] - before[1]) / (self._ticks[0] - before[0]))


class _GpuUse:
    """Asks NVML every few seconds, in a thread of its own: a GPU that hangs must not hold up the screen."""

    def __init__(self, host: Host) -> None:
        self.now: dict[str, float | None] = {}
        self._host = host
        self._wanted: list[str] = []
        self._thread: threading.Thread | None = None

    def want(self, addresses: list[str]) -> None:
        self._wanted = addresses
        if addresses and self._thread is None and self._host.real:
            self._thread = threading.Thread(target=self._ask, daemon=True)
            self._thread.start()

    def _ask(self) -> None:
        nvml = Gpus(self._host)
        while True:
            if self._wanted:
                self.now = {address: sample.utilization for address, sample in nvml.sample(self._wanted).items()}
            time.sleep(GPU_S)


def _rate(reading: _Reading, before: _Reading | None, *names: str) -> float | None:
    """How much a counter of seconds grew in a second; None where it is not known, or another job's."""
    if before is None or reading.at <= before.at:
        return None
    new, old = within(reading.figures, *names), within(before.figures, *names)
    return None if new is None or old is None else max(0.0, new - old) / (reading.at - before.at)


def _nodes(host: Host) -> dict[int, CpuSet]:
    """The CPUs of each NUMA node, or of the whole machine as one."""
    found: dict[int, CpuSet] = {}
    try:
        for name in host.list(NODES):
            if name.startswith("node") and name[4:].isdecimal():
                found[int(name[4:])] = host.cpus(f"{NODES}/{name}/cpulist")
        return found or {0: host.cpus("/sys/devices/system/cpu/online")}
    except HostError:
        return found
