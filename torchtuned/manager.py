"""What the daemon does with jobs: place them, confine them, notice their end, lend their place to the next.

Every change of the job table is made between two awaits, so on one loop it is atomic; what takes time (PID 1 making a
scope, a process being looked at) happens outside of it, and looks afterwards whether the job is still there.
Nothing here knows D-Bus: PID 1 comes in as a protocol, and what happened goes out through a View.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from torchtuned import processes, units
from torchtuned.adopting import Adopting
from torchtuned.confining import Confiner, Pid1
from torchtuned.cpulimits import limits
from torchtuned.errors import Busy, Failed, InvalidRequest, NoSuchJob, NotAuthorized, TorchtunedError
from torchtuned.host import Host
from torchtuned.hostpolicy import HostPolicy
from torchtuned.jobs import Job, Jobs, State, document, parse_request, without_gpus
from torchtuned.pinning import Online, pin_again
from torchtuned.placement import Request
from torchtuned.places import Lent, Places, Seen, look, wants_gpus
from torchtuned.processes import Process
from torchtuned.tasks import Tasks
from torchtuned.topology import Topology
from torchtuned.turns import Rest, Turns
from torchtuned.watches import Watches

COMMIT_S = 10.0  # how long a grant waits for its Commit
POLL_S = 5.0  # between looks at GPUs that strangers hold, while somebody waits for one
RETRY_S = 5.0  # until PID 1 is asked again whether a scope is empty
LATE_S = 5.0  # after the start, until jobs that had just given the last daemon up are looked for once more
SERVE_S = 0.02  # what serving the queue may take, before others come first
JOBS_PER_USER = 1024
BYTES_PER_USER = 4 << 20  # of the table of jobs, which is written on every change: a grant of 4,096 ranks has 750 KB

log = logging.getLogger(__name__)


class View(Protocol):
    """Who shows it to the world."""

    def job_added(self, job: Job) -> None: ...
    def job_changed(self, job: Job) -> None: ...
    def leader_ended(self, job: Job) -> None: ...
    def job_removed(self, job: Job) -> None: ...
    def granted(self, job: Job, document: dict[str, Any]) -> None: ...


class Manager:
    """The use cases. `topology` is the machine to place by: set before `adopt`, afterwards through `topology_changed`.

    `jobs_active` is told whether a job runs, whenever that may have changed.
    """

    def __init__(
        self,
        host: Host,
        jobs: Jobs,
        policy: HostPolicy,
        pid1: Pid1,
        view: View,
        *,
        lent: Lent,
        jobs_active: Callable[[bool], None],
    ) -> None:
        self.jobs, self.topology = jobs, Topology(online=frozenset(), allowed=frozenset())
        self._host, self._policy, self._pid1, self._view = host, policy, pid1, view
        self._lent, self._jobs_active = lent, jobs_active
        self._confiner = Confiner(host, policy, pid1)
        self._watches = Watches(self._leader_ended)
        self._places = Places(jobs, policy, self._confiner, lent, lives=self._watches.lives)
        self._polling = False
        self._serving, self._rest = False, Rest(SERVE_S)  # whether the queue is to be served later
        self._committing: set[str] = set()
        self._adopting = Adopting(host, jobs, self._adopt_one)
        self._turns, self._tasks = Turns(JOBS_PER_USER), Tasks()

    # -- the life of a job -------------------------------------------------------------------------------------------

    async def register(self, uid: int, pidfd: int, text: str) -> tuple[Job, dict[str, Any]]:
        """Place the process that `pidfd` stands for; the descriptor is ours from here on. Returns the job and its
        grant document.

        NotAuthorized unless it is the caller's process (root: anybody's). InvalidRequest, Unplaceable, NoSuchGpu, Busy;
        Failed when the job cannot be recorded.
        """
        try:
            request = parse_request(text)
            if request.gpus and self.topology.gpus:
                await self._lent.look(list(self.jobs))
            async with self._turns.of(uid):
                seen = await asyncio.to_thread(lambda: look(self._host, processes.identify(pidfd)))
                if uid not in (0, seen.process.uid):
                    raise NotAuthorized(f"process {seen.process.pid} belongs to uid {seen.process.uid}, not {uid}")
                await self._adopting.look(self.topology)  # this daemon was stopped, or the machine too busy, for some
                if full := self._full(seen.process.uid):
                    raise Busy(full, hint="wait until some end")
                self._replace_earlier(seen.process)
                job = self._new(request, seen)
                self.jobs.put(job)
        except BaseException:
            os.close(pidfd)
            raise
        log.info("job %s of uid %d: process %d, %s", job.id, job.process.uid, job.process.pid, job.state)
        self._watches.process(job.id, pidfd)
        self._view.job_added(job)
        self._set_timer(job)
        if job.state is State.QUEUED and self._lent.held and not self._polling:
            self._polling = True
            self._tasks.spawn(self._poll())
        return job, self._document(job)

    async def commit(self, uid: int, job_id: str) -> dict[str, Any]:
        """Make a grant a job: with a scope where it gets one. Returns the grant as it came out in the end."""
        job = self._own(uid, job_id)
        if job.state is not State.GRANTED or job_id in self._committing:
            raise InvalidRequest(f"job {job_id} is {job.state}", hint="a grant is committed once, after it was given")
        pidfd = self._watches.pidfd(job_id)  # ours alone, should the process end meanwhile
        if pidfd is None:
            raise NoSuchJob(f"job {job_id} has just ended")
        self._watches.stop_timer(job_id)
        self._committing.add(job_id)
        self._followed()
        try:
            confined = await self._confiner.confine(job, pidfd)
        except BaseException:
            self._committing.discard(job_id)
            if (left := self.jobs.get(job_id)) is not None:
                self._set_timer(left)
            self._followed()
            raise
        finally:
            os.close(pidfd)
            self._committing.discard(job_id)
        now = self.jobs.get(job_id)
        if now is None:
            raise NoSuchJob(f"job {job_id} ended meanwhile")
        warnings = (*now.warnings, *confined.warnings[len(job.warnings) :])  # a GPU may have gone meanwhile
        job = replace(confined, state=State.RUNNING, grant=now.grant, warnings=warnings)
        try:
            self.jobs.put(job)
        except TorchtunedError:
            self._end(job_id, "it cannot be recorded")
            raise
        self._followed()
        self._view.job_changed(job)
        return self._document(job)

    async def release(self, uid: int, job_id: str) -> None:
        """Give a grant back. A process that goes on is not confined any longer."""
        job = self._own(uid, job_id)
        self._end(job_id, "released")
        if job.scope and job.confinement == "cpuset":
            try:
                await self._pid1.set_cpus(job.scope, self.topology.online)
            except TorchtunedError as e:
                log.warning("%s keeps its cpuset: %s", job.scope, e)

    def scope_ended(self, name: str) -> None:
        """PID 1 removed a scope, or says so while it reloads."""
        for job in self.jobs:
            if job.scope == name:
                self._tasks.spawn(self._check_scope(job.id))

    def topology_changed(self, topology: Topology, *, cpus_moved: bool = False) -> None:
        """Place by this machine from now on, and pin again what the kernel let go when a CPU went. `cpus_moved`: some
        may have gone and be back already.
        """
        cpus = Online(before=self.topology.online, now=topology.online)
        self.topology = topology
        self._end_leases()
        self._serve_queue()
        for job in self.jobs if cpus_moved or cpus.before != cpus.now else ():
            if job.state is State.RUNNING and job.confinement == "affinity" and job.grant is not None:
                self._tasks.spawn(pin_again(self._host, self._pid1, job, cpus, self._watches.pidfd(job.id)))

    def _end_leases(self) -> None:
        """A GPU that is gone is nobody's, when it comes back neither: what its job had there is lost."""
        here = {gpu.address for gpu in self.topology.gpus}
        for job in self.jobs:
            left = without_gpus(job, here)
            if left is job:
                continue
            try:
                self.jobs.put(left)
            except Failed as e:
                log.warning("%s", e)
            else:
                self._view.job_changed(left)

    # -- start and end -----------------------------------------------------------------------------------------------

    async def adopt(self) -> None:
        """Take over the jobs of an earlier daemon: those whose process, or scope, is still there."""
        self.jobs.load()
        self._pid1.watch_scopes(wanted=True)  # before asking, so that no end falls between
        live: set[str] | None = None
        try:
            live = await self._pid1.scopes()
        except TorchtunedError as e:
            log.info("scopes are not known: %s", e)
        for job_id in map(units.job_of, live or ()):
            if job_id.isdecimal():
                self.jobs.skip_to(int(job_id) + 1)
        for job in self.jobs:
            pidfd = processes.reopen(job.process)
            there = bool(job.scope) and (live is None or job.scope in live)
            if pidfd is None and not there:
                self.jobs.drop(job.id, soon=asyncio.get_running_loop().call_soon)
                log.info("job %s ended while no daemon ran", job.id)
                continue
            if pidfd is not None:
                self._watches.process(job.id, pidfd)
            self._view.job_added(job)
            self._set_timer(job)
            if job.scope and (live is None or not there):
                self._tasks.spawn(self._check_scope(job.id))
        await self._adopting.look(self.topology)
        for job in self.jobs:
            if job.state is State.QUEUED:
                self._places.waits(job.id, await asyncio.to_thread(look, self._host, job.process))
        for name in (live or set()) - {job.scope for job in self.jobs}:
            log.warning("%s belongs to no job that is known", name)
        self._serve_queue()
        self._followed()
        self._tasks.spawn(self._adopt_late())

    async def _adopt_late(self) -> None:
        await asyncio.sleep(LATE_S)
        await self._adopting.look(self.topology)

    def _adopt_one(self, found: Job) -> bool:
        """One that placed itself; what earlier jobs have already stays theirs. False when it is to be tried again."""
        known = [job for job in self.jobs if job.process == found.process]
        if any(job.state is State.RUNNING or job.id in self._committing for job in known):
            return True
        room = not self._full(found.process.uid)
        pidfd = processes.reopen(found.process) if room and found.grant is not None else None
        if pidfd is None or found.grant is None:
            return True
        taken = {gpu for job in self.jobs if job.grant and job not in known for gpu in job.grant.gpus}
        grant = replace(found.grant, gpus=tuple(gpu for gpu in found.grant.gpus if gpu not in taken))
        job = replace(found, id=self.jobs.new_id(), grant=grant)
        try:
            self.jobs.put(job)
        except Failed as e:
            os.close(pidfd)
            log.warning("%s", e)
            return False
        log.info("job %s of uid %d: process %d placed itself", job.id, job.process.uid, job.process.pid)
        self._watches.process(job.id, pidfd)
        self._view.job_added(job)
        for earlier in known:  # a grant that came too late for it
            self._end(earlier.id, "placed itself")
        self._followed()
        return True

    async def close(self) -> None:
        """Let go of everything in memory; the table stays for the next daemon."""
        await self._tasks.close()
        self._watches.close()
        self.jobs.flush()

    # -- the queue ---------------------------------------------------------------------------------------------------

    def _document(self, job: Job) -> dict[str, Any]:
        return document(job, self.topology, self._policy.config)

    def _new(self, request: Request, seen: Seen) -> Job:
        job = Job(
            id=self.jobs.new_id(),
            process=seen.process,
            request=request,
            since=time.time_ns() // 1000,
            cpu_max=seen.limits.cpu_max,
        )
        return self._places.grant_or_queue(job, self.topology, seen)

    def _serve_queue(self) -> None:
        """Give what is free to those who wait: now, or, when that took long the last time, after a rest. A user may
        have a thousand wait inside of a job, each of which is tried, and start and end others all the time.
        """
        if self._serving:
            return
        if rest := self._rest.left():
            self._serving = True
            self._tasks.spawn(self._serve_after(rest))
            return
        begun = time.thread_time()
        self._serve()
        self._rest.after(time.thread_time() - begun)

    async def _serve_after(self, rest: float) -> None:
        await asyncio.sleep(rest)
        self._serving = False
        self._serve_queue()

    def _serve(self) -> None:
        """First come first served in each of the two queues."""
        full: set[bool] = set()
        for waiting in [job for job in self.jobs if job.state is State.QUEUED]:
            job, around = self.jobs.get(waiting.id), self._places.around(waiting.id)
            lane = wants_gpus(waiting.request)
            if job is None or job.state is not State.QUEUED or (lane in full and not around):
                continue
            try:
                job = self._places.grant(job, self.topology, limits(self._host, job.process.pid), around)
                self.jobs.put(job)
            except Busy:
                if not around:
                    full.add(lane)
            except TorchtunedError as e:
                self._end(job.id, f"it has no place any more: {e}")
            else:
                self._places.forget(job.id)
                self._set_timer(job)
                self._view.job_changed(job)
                self._view.granted(job, self._document(job))

    async def _poll(self) -> None:
        """While somebody waits and strangers hold GPUs, look now and then whether they still do."""
        try:
            while self._lent.held and any(job.state is State.QUEUED and job.request.gpus for job in self.jobs):
                await asyncio.sleep(POLL_S)
                await self._lent.look(list(self.jobs))
                self._serve_queue()
        finally:
            self._polling = False

    # -- noticing ----------------------------------------------------------------------------------------------------

    def _leader_ended(self, job_id: str) -> None:
        job = self.jobs.get(job_id)
        if job is not None:
            self._view.leader_ended(job)
        if job is not None and job.scope:
            self._tasks.spawn(self._check_scope(job_id))
        elif job is not None:
            self._end(job_id, "its process ended", soon=asyncio.get_running_loop().call_soon)

    async def _check_scope(self, job_id: str) -> None:
        """End a job whose process and scope are gone. A process that left its scope is a job still, but unconfined."""
        while (job := self.jobs.get(job_id)) is not None and job.scope:
            try:
                if await self._pid1.has_scope(job.scope):
                    return
                break
            except TorchtunedError as e:
                log.warning("PID 1 does not say whether %s is empty: %s", job.scope, e)
                await asyncio.sleep(RETRY_S)
        job = self.jobs.get(job_id)  # it may have changed while PID 1 was asked
        if job is None or not job.scope:
            return
        if job_id not in self._watches:
            self._end(job_id, "its last process ended")
            return
        lost = "none" if job.confinement == "cpuset" else job.confinement
        job = replace(job, scope="", confinement=lost, warnings=(*job.warnings, f"its process left {job.scope}"))
        self.jobs.put(job)
        self._followed()
        self._view.job_changed(job)

    def _end(self, job_id: str, why: str, *, soon: Callable[..., object] | None = None) -> None:
        job = self.jobs.get(job_id)
        if job is None:
            return
        log.info("job %s of uid %d: %s", job_id, job.process.uid, why)
        self._watches.forget(job_id)
        self._places.forget(job_id)
        self.jobs.drop(job_id, soon=soon)
        self._view.job_removed(job)
        self._serve_queue()
        self._followed()

    def _followed(self) -> None:
        """Knobs for jobs are for those that run or are about to: a grant may be asked for only to be looked at. Scopes
        are watched from before the first is made.
        """
        starting = any(job.id in self._committing for job in self.jobs)
        self._jobs_active(starting or any(job.state is State.RUNNING for job in self.jobs))
        self._pid1.watch_scopes(wanted=starting or any(job.scope for job in self.jobs))

    def _full(self, uid: int) -> str:
        """Why a user can have no further job, "" while there is room."""
        if self.jobs.of_user(uid) >= JOBS_PER_USER:
            return f"uid {uid} has {JOBS_PER_USER} jobs already"
        large = self.jobs.bytes_of(uid) >= BYTES_PER_USER
        return f"uid {uid} has jobs of too many words or ranks already" if large else ""

    def _replace_earlier(self, process: Process) -> None:
        """A wrapper that asks again did not hear our answer; its first grant must not stand beside the second."""
        for job in self.jobs:
            if job.process == process:
                if job.state is State.RUNNING or job.id in self._committing:
                    raise InvalidRequest(f"process {process.pid} is job {job.id} already")
                self._end(job.id, "registered anew")

    def _own(self, uid: int, job_id: str) -> Job:
        job = self.jobs.get(job_id)
        if job is None:
            raise NoSuchJob(f"there is no job {job_id}")
        if uid not in (0, job.process.uid):
            raise NotAuthorized(f"job {job_id} belongs to uid {job.process.uid}, not {uid}")
        return job

    def _set_timer(self, job: Job) -> None:
        if job.state is State.GRANTED:
            self._watches.after(job.id, COMMIT_S, self._end, job.id, "its grant was not committed")
        elif job.state is State.QUEUED and job.request.wait:
            self._watches.after(job.id, job.request.wait, self._end, job.id, "it waited long enough")
        else:
            self._watches.stop_timer(job.id)
