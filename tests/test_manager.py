"""The use cases, with real processes and a PID 1 that fails, hangs or dies at every step."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.tree import machine, make_tree

from torchtuned import adopting, discover, manager, scopes
from torchtuned.config import builtin, load
from torchtuned.cpuset import CpuSet
from torchtuned.errors import Busy, Failed, InvalidRequest, NoSuchJob, NotAuthorized
from torchtuned.files import replace_file
from torchtuned.host import Host
from torchtuned.jobs import Job, Jobs, State
from torchtuned.manager import Manager
from torchtuned.placement import Grant, grant_to_json
from torchtuned.processes import start_time
from torchtuned.topology import Topology

UID = os.getuid()
two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
GPU = "0000:01:00.0"
SESSION = "/user.slice/user-1000.slice/session-3.scope"


class Pid1:
    """Makes every scope, unless told what to do when asked for one."""

    version = 252

    def __init__(self) -> None:
        self.made: list[scopes.Scope] = []
        self.live: set[str] = set()
        self.members: list[int] = []
        self.watching = False
        self.before: Callable[[scopes.Scope], Awaitable[None]] | None = None
        self.freed: list[tuple[str, CpuSet]] = []

    async def start_scope(self, scope: scopes.Scope) -> None:
        if self.before is not None:
            await self.before(scope)
        self.made.append(scope)
        self.live.add(scope.name)

    async def set_cpus(self, name: str, cpus: CpuSet) -> None:
        self.freed.append((name, cpus))

    async def has_scope(self, name: str) -> bool:
        return name in self.live

    async def scopes(self) -> set[str]:
        return self.live

    async def processes(self, name: str) -> list[int]:
        return self.members

    def watch_scopes(self, *, wanted: bool) -> None:
        self.watching = wanted


class Lent:
    """GPUs that strangers hold: `next` are the answers to come."""

    def __init__(self) -> None:
        self.held: frozenset[str] = frozenset()
        self.next: list[set[str]] = []

    async def look(self, jobs: Any) -> frozenset[str]:
        if self.next:
            self.held = frozenset(self.next.pop(0))
        return self.held


class View:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def note(self, what: str, job: Job) -> None:
        self.told.append((what, job.id))

    def job_added(self, job: Job) -> None:
        self.note("added", job)

    def job_changed(self, job: Job) -> None:
        self.note("changed", job)

    def job_removed(self, job: Job) -> None:
        self.note("removed", job)

    def leader_ended(self, job: Job) -> None:
        self.note("ended", job)

    def granted(self, job: Job, document: dict[str, Any]) -> None:
        self.note("granted", job)


class Bench:
    """A manager on a small machine in a folder, and sleeping processes to register."""

    def __init__(self, folder: Path, config: str = "") -> None:
        files: dict[str, Any] = {
            **machine(cores=["0", "1", "2", "3"], gpus={GPU: {"vendor": "0x10de", "class": "0x030200"}}),
            "proc/self/cgroup": f"0::{SESSION}\n",
            "proc/sys/kernel/osrelease": "6.12.0\n",
            "sys/fs/cgroup/cgroup.controllers": "cpuset cpu memory pids\n",
        }
        self.host = Host(make_tree(folder / "machine", files))
        self.policy: Any = SimpleNamespace(config=load([("test.conf", config)]) if config else builtin())
        self.pid1, self.view, self.active = Pid1(), View(), [False]
        self.table = Jobs(folder / "jobs.json")
        self.lent = Lent()
        parts = (self.host, self.table, self.policy, self.pid1, self.view)
        self.manager = Manager(*parts, lent=self.lent, jobs_active=self.active.append)
        self.manager.topology = discover.topology(self.host)
        self.children: list[subprocess.Popen[bytes]] = []

    def process(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(["sleep", "600"])
        self.children.append(child)
        return child

    async def register(self, child: subprocess.Popen[bytes] | None = None, uid: int = UID, **request: Any) -> Job:
        child = child or self.process()
        document = json.dumps({"schema": 1, **request})
        job, _ = await self.manager.register(uid, os.pidfd_open(child.pid), document)
        return job

    async def settle(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    def state(self, job: Job) -> State | None:
        found = self.table.get(job.id)
        return found.state if found else None


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(config: str = "") -> Bench:
        made.append(Bench(tmp_path, config))
        return made[-1]

    before = len(os.listdir("/proc/self/fd"))
    yield make
    for one in made:
        for child in one.children:
            child.kill()
            child.wait()
    assert len(os.listdir("/proc/self/fd")) == before


def play(one: Bench, story: Callable[[], Awaitable[None]]) -> None:
    async def told() -> None:
        try:
            await story()
        finally:
            await one.manager.close()

    asyncio.run(told())


def test_a_life(bench: Callable[..., Bench]) -> None:
    one = bench()

    async def story() -> None:
        child = one.process()
        job = await one.register(child, cpus="2")
        assert job.state is State.GRANTED
        assert True not in one.active
        document = await one.manager.commit(UID, job.id)
        assert one.active[-1] is True
        assert (document["state"], document["scope"]) == ("running", "torchtuned-job-1.scope")
        assert one.pid1.made[0].cpus == frozenset({0, 1})
        assert one.pid1.watching
        child.kill()
        one.pid1.live.clear()
        await one.settle(lambda: len(one.table) == 0)
        assert not one.pid1.watching
        assert one.active[-1] is False
        assert one.view.told == [("added", "1"), ("changed", "1"), ("ended", "1"), ("removed", "1")]

    play(one, story)


def test_a_grant_that_is_not_committed_expires(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "COMMIT_S", 0.05)
    one = bench()

    async def story() -> None:
        job = await one.register()
        await one.settle(lambda: one.state(job) is None)
        with pytest.raises(NoSuchJob):
            await one.manager.commit(UID, job.id)
        kept = await one.register()
        await one.manager.commit(UID, kept.id)
        await asyncio.sleep(0.1)
        assert one.state(kept) is State.RUNNING

    play(one, story)


def test_a_granted_waiter_that_does_not_commit_makes_room(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "COMMIT_S", 1.0)
    one = bench("[jobs]\nwhen_full = wait\n")

    async def story() -> None:
        first = await one.register(cpus="all")
        second = await one.register(cpus="all")
        third = await one.register(cpus="all")
        assert [one.state(job) for job in (first, second, third)] == [State.GRANTED, State.QUEUED, State.QUEUED]
        await one.settle(lambda: one.state(third) is State.GRANTED)
        assert one.state(first) is one.state(second) is None
        assert [what for what in one.view.told if what[0] == "granted"] == [("granted", "2"), ("granted", "3")]

    play(one, story)


@pytest.mark.parametrize("what", ["dies", "releases", "expires", "is refused"])
def test_whatever_happens_while_pid1_makes_the_scope(bench: Callable[..., Bench], what: str) -> None:
    one = bench()

    async def story() -> None:
        child = one.process()
        job = await one.register(child)

        async def meanwhile(scope: scopes.Scope) -> None:
            assert one.pid1.watching  # before it is made, so that its end is heard
            if what == "dies":
                child.kill()
                await one.settle(lambda: one.state(job) is None)
            elif what == "releases":
                await one.manager.release(UID, job.id)
            elif what == "expires":
                await asyncio.sleep(0.05)
                with pytest.raises(InvalidRequest):  # a second commit, meanwhile
                    await one.manager.commit(UID, job.id)
            else:
                raise Failed("no")

        one.pid1.before = meanwhile
        if what in ("dies", "releases"):
            with pytest.raises(NoSuchJob):
                await one.manager.commit(UID, job.id)
            assert not one.pid1.watching
            assert one.state(job) is None
        else:
            document = await one.manager.commit(UID, job.id)
            assert document["confinement"] == ("cpuset" if what == "expires" else "affinity")
            assert one.pid1.watching == (what == "expires")
            assert one.state(job) is State.RUNNING

    play(one, story)


def test_a_job_that_cannot_be_recorded_as_running_is_none(bench: Callable[..., Bench]) -> None:
    one = bench()

    async def story() -> None:
        job = await one.register()
        blocked = one.table.path.with_suffix(".new")
        blocked.mkdir()
        with pytest.raises(Failed, match="cannot be recorded"):
            await one.manager.commit(UID, job.id)
        blocked.rmdir()
        assert one.state(job) is None
        assert not one.pid1.watching
        with pytest.raises(NoSuchJob):
            await one.manager.release(UID, job.id)

    play(one, story)


def test_one_user_cannot_fill_the_table(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "JOBS_PER_USER", 3)
    one = bench()

    async def story() -> None:
        for _ in range(3):
            await one.register(shared=True)
        with pytest.raises(Busy, match="3 jobs already"):
            await one.register(shared=True)

    play(one, story)


def test_one_user_cannot_make_the_table_large(bench: Callable[..., Bench]) -> None:
    """It is written on every change: with a thousand jobs of 4,096 ranks each that were 770 MB."""
    one = bench()

    async def story() -> None:
        for _ in range(6):
            await one.register(shared=True, ranks=4096)
        with pytest.raises(Busy, match="too many words or ranks"):
            await one.register(shared=True, ranks=4096)
        assert 4 << 20 <= one.table.path.stat().st_size < 6 << 20

    play(one, story)


def test_strangers(bench: Callable[..., Bench]) -> None:
    one = bench()

    async def story() -> None:
        child = one.process()
        with pytest.raises(NotAuthorized):
            await one.register(child, uid=UID + 1)
        job = await one.register(child)
        for act in (one.manager.commit, one.manager.release):
            with pytest.raises(NotAuthorized):
                await act(UID + 1, job.id)

    play(one, story)


def test_adoption(bench: Callable[..., Bench]) -> None:
    one = bench()

    async def first() -> None:
        for _ in range(3):
            job = await one.register(cpus="1")
            await one.manager.commit(UID, job.id)

    play(one, first)
    gone, orphan, _ = one.children
    for child in (gone, orphan):
        child.kill()
        child.wait()
    one.pid1.live = {"torchtuned-job-2.scope", "torchtuned-job-3.scope", "torchtuned-job-9.scope"}
    one.pid1.watching = False
    second = Jobs(one.table.path)
    again = Manager(one.host, second, one.policy, one.pid1, one.view, lent=one.lent, jobs_active=lambda active: None)
    again.topology = one.manager.topology

    async def story() -> None:
        await again.adopt()
        assert [job.id for job in second] == ["2", "3"]
        assert one.pid1.watching
        assert second.new_id() == "10"
        one.pid1.live = {"torchtuned-job-3.scope"}
        again.scope_ended("torchtuned-job-2.scope")
        await one.settle(lambda: [job.id for job in second] == ["3"])
        await again.close()

    asyncio.run(story())


def test_jobs_that_ended_while_no_daemon_ran_are_written_off_at_once(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, written = bench(), []

    async def first() -> None:
        for _ in range(5):
            await one.register(cpus="1", shared=True)

    play(one, first)
    for child in one.children:
        child.kill()
        child.wait()
    second = Jobs(one.table.path)
    again = Manager(one.host, second, one.policy, one.pid1, one.view, lent=one.lent, jobs_active=lambda active: None)
    again.topology = one.manager.topology
    save = second._save
    monkeypatch.setattr(second, "_save", lambda: written.append(len(second)) or save())

    async def story() -> None:
        await again.adopt()
        await asyncio.sleep(0)
        assert written == [0]
        await again.close()

    asyncio.run(story())
    assert json.loads(second.path.read_text())["jobs"] == []


def test_pid1_that_does_not_answer_is_asked_again(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "RETRY_S", 0.01)
    one = bench()
    answers: list[Any] = [Failed("silence"), Failed("silence"), False]

    async def has_scope(name: str) -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Failed):
            raise answer
        return bool(answer)

    async def story() -> None:
        child = one.process()
        job = await one.register(child)
        await one.manager.commit(UID, job.id)
        monkeypatch.setattr(one.pid1, "has_scope", has_scope)
        child.send_signal(signal.SIGKILL)
        await one.settle(lambda: one.state(job) is None)
        assert answers == []

    play(one, story)


def test_a_gpu_that_is_gone_is_leased_to_nobody(bench: Callable[..., Bench]) -> None:
    """Its job goes on where it is, and who gets the GPU after it has come back is open again."""
    one = bench()

    async def story() -> None:
        child, whole = one.process(), one.manager.topology
        job = await one.register(child, gpus=1)
        await one.manager.commit(UID, job.id)
        waiting = await one.register(gpus=1, wait=0)
        mask, grant = os.sched_getaffinity(child.pid), job.grant
        one.manager.topology_changed(replace(whole, gpus=()))
        found = one.table.get(job.id)
        assert found is not None
        assert found.grant is not None
        assert grant is not None
        assert (found.grant.gpus, found.warnings[-1]) == ((), f"GPU {GPU} is gone")
        assert (found.grant.cpus, os.sched_getaffinity(child.pid)) == (grant.cpus, mask)
        assert one.view.told[-1] != ("granted", waiting.id)
        one.manager.topology_changed(whole)
        assert one.table.get(job.id) == found

    play(one, story)


@pytest.mark.parametrize("when", ["while its scope is made", "while it is asked whether that is empty"])
def test_a_gpu_that_goes_while_pid_1_is_asked_stays_gone(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    one = bench()

    async def story() -> None:
        job = await one.register(gpus=1)

        async def unplug(*_: object) -> bool:
            one.manager.topology_changed(replace(one.manager.topology, gpus=()))
            return False

        if "made" in when:
            monkeypatch.setattr(one.pid1, "before", unplug)
            await one.manager.commit(UID, job.id)
        else:
            await one.manager.commit(UID, job.id)
            monkeypatch.setattr(one.pid1, "has_scope", unplug)
            one.manager.scope_ended(f"torchtuned-job-{job.id}.scope")
            await one.settle(lambda: one.table.get(job.id).scope == "")
        found = one.table.get(job.id)
        assert found is not None
        assert found.grant is not None
        assert (found.state, found.grant.gpus) == (State.RUNNING, ())
        assert f"GPU {GPU} is gone" in found.warnings

    play(one, story)


def test_a_job_that_placed_itself_meanwhile_keeps_its_cpus(bench: Callable[..., Bench]) -> None:
    """While the daemon is stopped (SIGSTOP), say: nothing tells it, but the table has changed when it deals again."""
    one = bench()
    folder = one.host.root / f"run/lock/torchtuned-{UID}"
    folder.mkdir(parents=True, mode=0o711)
    alone = min(os.sched_getaffinity(0))

    def placed(*children: subprocess.Popen[bytes]) -> None:
        grant = grant_to_json(Grant(cpus=frozenset({alone}), threads=1))
        jobs = [{"pid": child.pid, "start": start_time(child.pid), "grant": grant} for child in children]
        replace_file(folder / "jobs.json", json.dumps({"schema": 1, "jobs": jobs}), mode=0o644, sync=False)

    async def story() -> None:
        await one.manager.adopt()
        child, late = one.process(), one.process()
        os.sched_setaffinity(child.pid, {alone})
        placed(child)
        job = await one.register(cpus="1")
        assert job.grant is not None
        assert alone not in job.grant.cpus
        assert [other.process.pid for other in one.table if other.state is State.RUNNING] == [child.pid]
        granted = await one.register(late, cpus="1")
        placed(child, late)  # it did not wait for the answer
        await one.register(cpus="1")
        assert one.table.get(granted.id) is None
        assert [other.process.pid for other in one.table if other.state is State.RUNNING] == [child.pid, late.pid]

    play(one, story)


def test_jobs_that_end_together_are_written_off_at_once(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user may have a thousand, and each write is of all jobs that there are."""
    monkeypatch.setattr(adopting, "BATCH", 2)
    one, written = bench(), []
    folder = one.host.root / f"run/lock/torchtuned-{UID}"
    folder.mkdir(parents=True, mode=0o711)
    grant = grant_to_json(Grant(cpus=frozenset({0}), threads=1))

    async def story() -> None:
        children = [one.process() for _ in range(5)]
        jobs = [{"pid": child.pid, "start": start_time(child.pid), "grant": grant} for child in children]
        (folder / "jobs.json").write_text(json.dumps({"schema": 1, "jobs": jobs}))
        await one.manager.adopt()
        assert len(one.table) == 5
        save = one.table._save
        monkeypatch.setattr(one.table, "_save", lambda: written.append(len(one.table)) or save())
        for child in children:
            child.kill()
            child.wait()
        await one.settle(lambda: json.loads(one.table.path.read_text())["jobs"] == [])
        assert written == [0]

    play(one, story)


def test_a_changed_machine_serves_the_queue_and_ends_what_never_fits(bench: Callable[..., Bench]) -> None:
    one = bench()

    async def story() -> None:
        await one.register(cpus="all")
        waiting = await one.register(cpus="all", wait=0)
        assert waiting.state is State.QUEUED
        more = Host(make_tree(one.host.root.parent / "more", machine(cores=[str(cpu) for cpu in range(8)])))
        one.manager.topology_changed(discover.topology(more))
        assert one.state(waiting) is State.GRANTED

    play(one, story)


def test_a_queue_that_takes_long_is_not_tried_at_every_end(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two hundred jobs that wait inside of another, each end of a job took the daemon a fifth of a second."""
    monkeypatch.setattr(manager, "SERVE_S", -0.125)  # as if it had taken so much more: half a second of rest
    one, tried = bench(), []

    async def story() -> None:
        holder = await one.register(cpus="all")
        waiting = await one.register(cpus="all", wait=0)
        grant = one.manager._places.grant
        monkeypatch.setattr(one.manager._places, "grant", lambda job, *rest: tried.append(job.id) or grant(job, *rest))
        for _ in range(10):
            job = await one.register(shared=True)
            await one.manager.release(UID, job.id)
        assert tried.count(waiting.id) <= 2
        await one.manager.release(UID, holder.id)
        await one.settle(lambda: one.state(waiting) is State.GRANTED)

    play(one, story)


def test_a_gpu_that_a_stranger_computes_on_is_waited_for(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "POLL_S", 0.01)
    one = bench()

    async def story() -> None:
        one.lent.next = [{GPU}]
        with pytest.raises(Busy):
            await one.register(gpus=1)
        waiting = await one.register(gpus=1, wait=0)
        assert waiting.state is State.QUEUED
        one.lent.next = [{GPU}, {GPU}, set()]
        await one.settle(lambda: one.state(waiting) is State.GRANTED)
        assert one.lent.next == []
        assert (await one.register(gpus=[], shared=True)).state is State.GRANTED

    play(one, story)


def away(machine: Topology, *cpus: int) -> Topology:
    return replace(machine, online=machine.online - set(cpus))


@two_cpus
def test_a_job_is_pinned_again_after_its_cpu_had_gone(bench: Callable[..., Bench]) -> None:
    one = bench()

    async def story() -> None:
        child, whole = one.process(), one.manager.topology
        job = await one.register(child, cpus="1", confine="affinity")
        await one.manager.commit(UID, job.id)
        one.manager.topology_changed(away(whole, 0))
        os.sched_setaffinity(child.pid, {0, 1})  # what the kernel does when the last CPU of a mask goes
        one.manager.topology_changed(away(whole, 0))  # a look for another reason
        await asyncio.sleep(0.05)
        assert os.sched_getaffinity(child.pid) == {0, 1}
        one.manager.topology_changed(whole)
        await one.settle(lambda: os.sched_getaffinity(child.pid) == {0})
        os.sched_setaffinity(child.pid, {0, 1})
        one.manager.topology_changed(whole, cpus_moved=True)  # gone and come between two looks
        await one.settle(lambda: os.sched_getaffinity(child.pid) == {0})

    play(one, story)


@two_cpus
def test_a_pid_that_another_process_has_now_is_not_pinned(bench: Callable[..., Bench]) -> None:
    """A job whose first process has ended goes on in its scope; what is there is moved, and nothing else."""
    one = bench()

    async def story() -> None:
        leader, worker, stranger, runaway = (one.process() for _ in range(4))
        job = await one.register(leader, cpus="1", confine="affinity")
        await one.manager.commit(UID, job.id)
        places = {worker: "user-1000.slice/torchtuned-job-1.scope", runaway: "user-1000.slice/session-3.scope"}
        for process, place in places.items():
            status = "Name:\tx\nCpus_allowed_list:\t0-3\n"
            files = {f"proc/{process.pid}/status": status, f"proc/{process.pid}/cgroup": f"0::/user.slice/{place}\n"}
            make_tree(one.host.root, files)
        leader.kill()
        await one.settle(lambda: ("ended", job.id) in one.view.told)
        one.table.put(replace(one.table.get(job.id) or job, process=replace(job.process, pid=stranger.pid)))
        one.pid1.members = [worker.pid, runaway.pid]  # the second has left since PID 1 said so
        one.manager.topology_changed(one.manager.topology, cpus_moved=True)
        await one.settle(lambda: os.sched_getaffinity(worker.pid) == {0})
        assert os.sched_getaffinity(stranger.pid) == os.sched_getaffinity(runaway.pid) == os.sched_getaffinity(0)

    play(one, story)


def test_a_commit_that_fails_unexpectedly_leaves_the_grant_as_it_was(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "COMMIT_S", 1.0)
    one = bench()

    async def story() -> None:
        job = await one.register()

        async def burst(scope: scopes.Scope) -> None:
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

        one.pid1.before = burst
        with pytest.raises(UnicodeEncodeError):
            await one.manager.commit(UID, job.id)
        assert not one.pid1.watching
        assert one.state(job) is State.GRANTED
        await one.settle(lambda: one.state(job) is None)  # it expires as any grant does

    play(one, story)


def test_scopes_are_watched_before_they_are_asked_for(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "RETRY_S", 0.01)
    one = bench()

    async def first() -> None:
        for _ in range(3):
            job = await one.register(cpus="1")
            await one.manager.commit(UID, job.id)

    play(one, first)
    for child in one.children[:2]:
        child.kill()
        child.wait()
    one.pid1.live = {"torchtuned-job-2.scope", "torchtuned-job-3.scope"}
    one.pid1.watching = False
    watched: list[bool] = []

    async def unknown() -> set[str]:
        watched.append(one.pid1.watching)
        raise Failed("silence")

    may_say = asyncio.Event()

    async def has_scope(name: str) -> bool:
        await may_say.wait()
        return name in one.pid1.live

    monkeypatch.setattr(one.pid1, "scopes", unknown)
    monkeypatch.setattr(one.pid1, "has_scope", has_scope)
    table = Jobs(one.table.path)
    again = Manager(one.host, table, one.policy, one.pid1, one.view, lent=one.lent, jobs_active=lambda active: None)
    again.topology = one.manager.topology

    async def story() -> None:
        await again.adopt()
        assert watched == [True]
        assert [job.id for job in table] == ["1", "2", "3"]  # kept until PID 1 says that they are gone
        may_say.set()
        await one.settle(lambda: [job.id for job in table] == ["2", "3"])
        assert one.pid1.watching
        await again.close()

    asyncio.run(story())


def test_a_share_is_not_held_up_by_who_waits(bench: Callable[..., Bench]) -> None:
    one = bench()

    async def story() -> None:
        await one.register(cpus="all")
        waiting = await one.register(cpus="all", wait=0)
        plain = await one.register()
        asked = await one.register(shared=True)
        assert [one.state(job) for job in (waiting, plain, asked)] == [State.QUEUED, State.GRANTED, State.GRANTED]
        later = await one.register(cpus="1", wait=0)
        assert later.warnings == (f"1 waiting before it (job 2 of uid {UID} is next)",)

    play(one, story)
