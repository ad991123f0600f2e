"""Keeps account of jobs while they run, and says in the end what they used, waited for, and how they ended.

Nothing is polled while no job runs. A job's cgroup goes the moment its last process does, PID 1 sees to that, so what
must be known of it is read before, at the cost of few wake-ups:
- memory.events is watched (inotify), as an out-of-memory kill is the one figure that cannot be got afterwards;
- all figures are read once a minute for all jobs together, first 10 s after a job's start, GPUs too;
- with every fifth of these readings the host is checked, and what a job feels of the findings is kept with it;
- and when the job's leader has exited, at once, before anything else: often that comes before PID 1.
What the last reading missed is made up from PID 1's own entry about the ended scope (CPU time, newer ones also peak
memory), and from the counters of the slices above, which stay. The journal is read once, a second after the end, for
all jobs that ended meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from torchtuned import cpulimits, processes
from torchtuned.errors import HostError, InvalidRequest, NoSuchJob
from torchtuned.findings import Finding
from torchtuned.gpus import Sample
from torchtuned.host import BOOT_ID, Host
from torchtuned.jobs import Job, State
from torchtuned.manager import View
from torchtuned.reports import accounting, journal, postmortem
from torchtuned.reports.inotify import Inotify
from torchtuned.reports.jobrecord import Left, Record, now, ticks
from torchtuned.reports.store import UNFIT, Name, Store, find
from torchtuned.reports.usage import Figures, GpuFigures
from torchtuned.scopes import MOUNT
from torchtuned.tasks import Tasks
from torchtuned.turns import Turns

FIRST_S, EVERY_S = 10.0, 60.0  # the first reading of a job, and those after it
CHECK_S = 290.0  # between two checks of the host while jobs run, of which none is newer
ASKED_S = 3.0  # how long a report waits for a check of the host: a GPU that hangs takes longer
SETTLE_S = 1.0  # from a job's end until the journal is read: PID 1 and systemd-oomd write after the fact
CLOSE_S = 2.0  # at the end, for what is being looked at: a GPU may hang, and giving all values back comes after this
WAITING = 128  # of one user's questions about reports, each of which reads up to all of them
BURST_S = 1.0  # changes of memory.events within this are read once

log = logging.getLogger(__name__)


class Shown(View, Protocol):
    """The next View, which also shows what is wrong where a job runs."""

    def findings_changed(self, job: Job, lines: list[str]) -> None: ...


class Reports:
    """The manager's View: it keeps account of what it is told, and hands it on to `shown`, the next View.

    `sample` asks NVML, off the loop; `check` looks at the host and tells its findings.
    """

    def __init__(
        self,
        host: Host,
        store: Store,
        shown: Shown,
        sample: Callable[[list[str]], dict[str, Sample]],
        check: Callable[[], Awaitable[Iterable[Finding]]],
    ) -> None:
        self._host, self._store, self._shown, self._sample, self._check = host, store, shown, sample, check
        self._running: dict[str, Record] = {}
        self._ending: list[Record] = []
        self._open: dict[tuple[int, int], Left] = {}  # by process and its start: what an earlier daemon left unfinished
        self._torn: dict[tuple[int, int], Name] = {}  # by job and uid: the last that cannot be gone on with
        self._inotify: Inotify | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._turns, self._tasks = Turns(WAITING), Tasks()
        self._writing = asyncio.Lock()
        self._boot = host.text(BOOT_ID)

    async def load(self) -> None:
        """Find what an earlier daemon left unfinished: before jobs are adopted."""

        def unfinished() -> Iterator[tuple[Name, Left | None]]:
            for name in self._store.names():
                document = self._store.read(name)
                if document is None or not document.get("ended"):
                    yield name, _left(name, document)

        for name, left in await asyncio.to_thread(lambda: list(unfinished())):
            if left:
                self._open[left.pid, left.start] = left
            else:
                self._torn[name.job, name.uid] = name

    def recover(self) -> None:
        """After jobs were adopted: what is left ended while no daemon ran."""
        left, self._open = self._open, {}
        if left:
            self._tasks.spawn(self._finish_missed(list(left.values())))

    # -- what the manager tells --------------------------------------------------------------------------------------

    def job_added(self, job: Job) -> None:
        self._shown.job_added(job)
        self._account(job, started=job.since)  # one that runs already is adopted

    def job_changed(self, job: Job) -> None:
        self._shown.job_changed(job)
        self._account(job, started=now())

    def granted(self, job: Job, document: dict[str, Any]) -> None:
        self._shown.granted(job, document)

    def _account(self, job: Job, *, started: int) -> None:
        """From the moment a job runs there is an account of it."""
        record = self._running.get(job.id)
        if record is not None:
            record.job = job
        elif job.state is State.RUNNING:
            self._follow(job, started)

    def leader_ended(self, job: Job) -> None:
        """The first process of a job has exited: its cgroup may go any moment, so no thread is waited for."""
        self._shown.leader_ended(job)
        record = self._running.get(job.id)
        if record is not None:
            record.left_at, record.left = now(), ticks()
            self._read(record)

    def job_removed(self, job: Job) -> None:
        self._shown.job_removed(job)
        record = self._running.pop(job.id, None)
        if record is None:
            return
        record.job, record.ended, record.over = job, now(), ticks()
        if record.left_at and not record.cgroup:
            record.ended, record.over = record.left_at, record.left
        record.released = not record.left_at and processes.lives(job.process)
        if self._inotify is not None:
            self._inotify.remove(job.id)
        self._cancel(job.id)
        self._ending.append(record)
        if "settle" not in self._timers:
            self._later("settle", SETTLE_S, lambda: self._tasks.spawn(self._finish()))
        if not self._running:
            self._cancel("read")

    # -- what others ask ---------------------------------------------------------------------------------------------

    def told(self, uid: int, pid: int, start: int, status: int) -> None:
        """The parent of a job's first process says how that ended: its exit status, or -SIGNAL. NoSuchJob,
        InvalidRequest.
        """
        if not -128 <= status <= 255:
            raise InvalidRequest(f"{status} is neither an exit status nor the negative of a signal")
        for record in (*self._running.values(), *self._ending):
            process = record.job.process
            if (process.pid, process.start) == (pid, start) and uid in (0, process.uid):
                record.exit = status
                return
        raise NoSuchJob(f"process {pid} is no job of yours that has just ended")

    async def report(self, uid: int, asked: str) -> dict[str, Any]:
        """The report of a job, running or ended, by its number or the report's name. NoSuchJob; of another user's
        jobs only root learns that there are any. Busy.
        """
        async with self._turns.of(uid):
            return await self._report(uid, asked)

    async def _report(self, uid: int, asked: str) -> dict[str, Any]:
        record = self._running.get(asked) or next((one for one in self._ending if one.job.id == asked), None)
        if record is not None and uid in (0, record.job.process.uid):
            if not record.ended:
                await self._read_off_loop([record])
                await asyncio.wait([self._tasks.spawn(self._see([record]))], timeout=ASKED_S)
            return record.document(self._boot)
        names = [name for name in await asyncio.to_thread(self._store.names) if uid in (0, name.uid)]
        name = find(names, asked)
        document = await asyncio.to_thread(self._store.read, name) if name else None
        if document is None:
            raise NoSuchJob(
                f"there is no report of job {asked[:40]}", hint="torchtuned report lists those that are kept"
            )
        return document

    async def reports(self, uid: int) -> list[dict[str, Any]]:
        """All that a user may see, the newest first. Busy."""
        async with self._turns.of(uid):
            return await self._reports(uid)

    async def _reports(self, uid: int) -> list[dict[str, Any]]:
        def kept(names: Iterable[Name]) -> dict[Name, dict[str, Any]]:
            return {name: document for name in names if (document := self._store.read(name)) is not None}

        known = (*self._running.values(), *self._ending)
        current = {one.name: one.document(self._boot) for one in known if uid in (0, one.job.process.uid)}
        names = await asyncio.to_thread(self._store.names)
        found = current | await asyncio.to_thread(kept, [n for n in names if uid in (0, n.uid) and n not in current])
        return [found[name] for name in sorted(found, reverse=True)]

    async def close(self) -> None:
        """Write down what is known; the next daemon goes on from there."""
        for name in list(self._timers):
            self._cancel(name)
        await self._tasks.close(within=CLOSE_S)
        await self._finish()
        for record in self._running.values():
            await asyncio.to_thread(self._store.write, record.name, record.document(self._boot))
        if self._inotify is not None:
            asyncio.get_running_loop().remove_reader(self._inotify.fd)
            self._inotify.close()
            self._inotify = None

    # -- while it runs -----------------------------------------------------------------------------------------------

    def _follow(self, job: Job, started: int) -> None:
        process = job.process
        left = self._open.pop((process.pid, process.start), None)
        torn = self._torn.pop((int(job.id), process.uid), None)
        name = Name(started, int(job.id), process.uid)
        if left:
            name = left.name
        elif torn and torn.started >= job.since:  # this job's, not of an earlier boot: the new account replaces it
            name = torn
        record = Record(job=job, name=name)
        if left:
            record.resume(left)
        record.begun = ticks() - max(0, now() - name.started)
        record.cgroup = accounting.cgroup_of(self._host, process.pid, job.scope)
        if not record.around:
            place = record.cgroup or cpulimits.cgroup(self._host, process.pid)
            record.around = accounting.oom_kills(self._host, place)
            record.around.pop(record.cgroup, None)
        self._running[job.id] = record
        if record.cgroup:
            self._watch(record)
        self._tasks.spawn(self._write(record))
        if self._due() > FIRST_S:
            self._later("read", FIRST_S, self._tick)

    def _watch(self, record: Record) -> None:
        try:
            if self._inotify is None:
                self._inotify = Inotify()
                asyncio.get_running_loop().add_reader(self._inotify.fd, self._changed)
            self._inotify.add(self._host, f"{MOUNT}{record.cgroup}/memory.events", record.job.id)
        except (OSError, HostError) as e:
            log.info("memory.events of job %s is not watched: %s", record.job.id, e)

    def _changed(self) -> None:
        assert self._inotify is not None
        for job_id in self._inotify.changed():
            record = self._running.get(job_id)
            if record is not None and job_id not in self._timers:
                self._read(record)
                self._later(job_id, BURST_S, lambda record=record: self._read(record))  # type: ignore[misc]

    def _tick(self) -> None:
        self._tasks.spawn(self._read_all())
        if self._running:
            self._later("read", EVERY_S, self._tick)

    async def _read_all(self) -> None:
        records = list(self._running.values())
        await self._read_off_loop(records)
        held = sorted({gpu for record in records if record.job.grant for gpu in record.job.grant.gpus})
        samples = await asyncio.to_thread(self._sample, held) if held else {}
        for record in records:
            for address in record.job.grant.gpus if record.job.grant and not record.ended else ():
                one = samples.get(address)
                if one is not None and one.state == "ok":
                    figures = record.gpus.setdefault(address, GpuFigures())
                    figures.add(one.utilization, one.memory_used, one.power, one.temperature)
        if any(not record.seen or ticks() - record.seen > CHECK_S * 1e6 for record in records):
            await self._see(records)

    async def _see(self, records: Sequence[Record]) -> None:
        """Check the host, and keep with each job what it feels of that."""
        found = list(await self._check())
        when = now()
        for record in records:
            before = record.now_wrong
            record.see(found, when)
            if record.now_wrong != before and not record.ended:
                self._shown.findings_changed(record.job, record.now_wrong)

    async def _read_off_loop(self, records: Sequence[Record]) -> None:
        """A cgroup with many processes takes a while to read. What was read is taken on the loop, where the end is."""
        for record in records:
            record.take(*await asyncio.to_thread(self._reading, record))

    def _read(self, record: Record) -> None:
        """At once, as what there is to read may go any moment."""
        record.take(*self._reading(record))

    def _reading(self, record: Record) -> tuple[Figures, int]:
        begun = ticks()
        return accounting.of_job(self._host, record.job.process.pid, record.cgroup), begun

    # -- the end -----------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """Explain and write all jobs that have ended since the last time."""
        async with self._writing:
            records = list(self._ending)
            if not records:
                return
            entries = await asyncio.to_thread(self._journal, min(map(_since, records)))
            for record in records:
                try:
                    document = await asyncio.to_thread(record.explained, self._host, entries, self._boot)
                except UNFIT as e:  # of what an earlier daemon left; the others' ends are told all the same
                    log.warning("how job %s ended cannot be told: %.200s", record.job.id, repr(e))
                else:
                    await asyncio.to_thread(self._store.write, record.name, document)
                    log.info("job %s: %s", record.job.id, document["end"]["sentence"])
                self._ending.remove(record)
            running = {record.name for record in (*self._running.values(), *self._ending)}
            await asyncio.to_thread(self._store.prune, running)

    async def _finish_missed(self, missed: list[Left]) -> None:
        """Explain those that ended while no daemon ran, by what the last one wrote down."""
        async with self._writing:
            entries = await asyncio.to_thread(self._journal, min(left.since for left in missed))
            for left in missed:
                try:
                    whole = left.missed(entries, boot=self._boot)
                except UNFIT as e:
                    log.warning("the report %s cannot be ended: %.200s", left.name.file, repr(e))
                else:
                    await asyncio.to_thread(self._store.write, left.name, whole)
            await asyncio.to_thread(self._store.prune, {record.name for record in self._running.values()})

    def _journal(self, since: int) -> list[journal.Entry] | None:
        try:
            return journal.read(self._host, since)
        except HostError as e:
            log.info("how jobs ended is known in part only: %s", e)
            return None

    # -- small things ------------------------------------------------------------------------------------------------

    async def _write(self, record: Record) -> None:
        async with self._writing:
            if not record.ended:
                await asyncio.to_thread(self._store.write, record.name, record.document(self._boot))

    def _later(self, name: str, seconds: float, work: Callable[[], object]) -> None:
        def due() -> None:
            self._timers.pop(name, None)
            work()

        self._cancel(name)
        self._timers[name] = asyncio.get_running_loop().call_later(seconds, due)

    def _cancel(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _due(self) -> float:
        """Seconds until the next reading."""
        timer = self._timers.get("read")
        return float("inf") if timer is None else timer.when() - asyncio.get_running_loop().time()


def _since(record: Record) -> int:
    return postmortem.since(record.name.started, record.ended, record.oom_at)


def _left(name: Name, document: dict[str, Any] | None) -> Left | None:
    try:
        if document is not None:
            return Left.parse(name, document)
        log.warning("the report %s cannot be read", name.file)
    except UNFIT as e:
        log.warning("the report %s cannot be gone on with: %.200s", name.file, repr(e))
    return None
