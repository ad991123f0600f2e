"""What keeping account costs: nothing while no job runs, and NVML only for jobs that have GPUs."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fakes.tree import make_tree

from torchtuned.findings import MEMORY, Action, Finding, Severity, about_gpu
from torchtuned.gpus import Sample
from torchtuned.host import Host
from torchtuned.jobs import Job, State
from torchtuned.placement import Grant, Request
from torchtuned.processes import Process
from torchtuned.reports import keeper as reports
from torchtuned.reports.keeper import Reports
from torchtuned.reports.store import Store

GPU = "0000:01:00.0"
SCOPE = "torchtuned-job-1.scope"
BASE = f"sys/fs/cgroup/user.slice/{SCOPE}"


class Shown:
    """The next View: counts what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def job_added(self, job: Job) -> None:
        self.heard.append("added")

    def job_changed(self, job: Job) -> None:
        self.heard.append("changed")

    def leader_ended(self, job: Job) -> None:
        self.heard.append("leader")

    def job_removed(self, job: Job) -> None:
        self.heard.append("removed")

    def granted(self, job: Job, document: dict[str, Any]) -> None:
        self.heard.append("granted")

    def findings_changed(self, job: Job, lines: list[str]) -> None:
        self.heard.append("; ".join(lines))


class Setting:
    def __init__(self, folder: Path) -> None:
        self.tree = make_tree(
            folder / "machine",
            {
                "proc/self/cgroup": "0::/user.slice/session-1.scope\n",
                f"{BASE}/cpu.stat": "usage_usec 1000000\n",
                f"{BASE}/memory.events": "oom_kill 0\n",
            },
        )
        self.asked: list[list[str]] = []
        self.shown = Shown()
        self.store = Store(folder / "reports")
        self.found: list[Finding] = []
        self.checks = 0
        self.reports = Reports(Host(self.tree), self.store, self.shown, self.sample, self.check)

    async def check(self) -> list[Finding]:
        self.checks += 1
        return self.found

    def sample(self, addresses: list[str]) -> dict[str, Sample]:
        self.asked.append(addresses)
        return {address: Sample(address=address, state="ok", utilization=50, memory_used=7) for address in addresses}


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr(reports, "SETTLE_S", 0.0)
    return Setting(tmp_path)


def job(*gpus: str, state: State = State.RUNNING) -> Job:
    grant = Grant(cpus=frozenset({0, 1}), gpus=gpus, threads=2)
    process = Process(pid=2**22 + 1, start=5, uid=1000)  # a pid that no process has
    return Job(id="1", process=process, request=Request(), since=1, state=state, grant=grant, scope=SCOPE)


async def written(setting: Setting) -> dict[str, Any]:
    """The report on disk when the daemon is through with it."""
    async with asyncio.timeout(20):
        while not any((found := setting.store.read(name)) and found["end"] for name in setting.store.names()):
            await asyncio.sleep(0.01)
    assert found
    return found


def test_no_timer_and_no_watch_without_a_running_job(setting: Setting) -> None:
    async def live() -> None:
        setting.reports.job_added(job(state=State.QUEUED))
        assert (setting.reports._timers, setting.reports._inotify) == ({}, None)
        setting.reports.job_changed(job())
        assert list(setting.reports._timers) == ["read"]
        setting.reports.leader_ended(job())
        setting.reports.job_removed(job())
        await written(setting)
        assert setting.reports._timers == {}
        await setting.reports.close()

    asyncio.run(live())
    assert setting.shown.heard == ["added", "changed", "leader", "removed"]
    assert setting.asked == []
    assert setting.checks == 0


def test_one_timer_for_all_jobs(setting: Setting) -> None:
    async def live() -> None:
        for number in range(1, 5):
            one = job()
            setting.reports.job_added(Job(**{**vars(one), "id": str(number), "scope": ""}))
        assert list(setting.reports._timers) == ["read"]
        await setting.reports.close()

    asyncio.run(live())


def test_a_clock_that_is_set_back_spoils_no_report(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour, say: what is read afterwards is newer than what was read before, and no job ends before its start."""
    real = time.time_ns

    async def live() -> None:
        setting.reports.job_added(Job(**{**vars(job()), "since": real() // 1000}))
        await setting.reports._read_all()
        monkeypatch.setattr(time, "time_ns", lambda: real() - 3600 * 10**9)
        (setting.tree / BASE / "cpu.stat").write_text("usage_usec 7000000\n")
        await setting.reports._read_all()
        (setting.tree / BASE / "cpu.stat").write_text("usage_usec 9000000\n")
        setting.reports.leader_ended(job())
        setting.reports.job_removed(job())
        found = await written(setting)
        assert found["measured"]["cpu"]["usage_s"] == 9.0
        assert found["measured"]["complete"]
        assert 0 <= found["seconds"] < 60
        await setting.reports.close()

    asyncio.run(live())


def test_nvml_is_asked_for_held_gpus_only(setting: Setting) -> None:
    async def live() -> None:
        setting.reports.job_added(job())
        await setting.reports._read_all()
        assert setting.asked == []
        setting.reports.job_changed(job(GPU))
        await setting.reports._read_all()
        await setting.reports._read_all()
        setting.reports.job_removed(job(GPU))
        found = await written(setting)
        assert found["gpus"] == {GPU: {"samples": 2, "utilization_mean": 50, "utilization_samples": 2, "memory_max": 7}}
        await setting.reports.close()

    asyncio.run(live())
    assert setting.asked == [[GPU], [GPU]]


def finding(title: str, *about: str, evidence: str = "seen") -> Finding:
    return Finding(
        code="TT900", severity=Severity.ERROR, action=Action.TELL, title=title, evidence=evidence, cost="c", fix="f",
        source="s", about=about,
    )  # fmt: skip


def test_findings_are_kept_with_the_jobs_that_feel_them(setting: Setting) -> None:
    async def live() -> None:
        setting.found = [
            finding("hot", about_gpu(GPU), evidence="80 °C"),
            finding("far", about_gpu("0000:99:00.0")),
            finding("tight", MEMORY),
            finding("old"),
        ]
        setting.reports.job_added(job(GPU))
        await setting.reports._read_all()
        await setting.reports._read_all()
        assert setting.checks == 1  # and no more until the next is due
        assert setting.shown.heard == ["added", "TT900 error: hot; TT900 error: tight"]
        setting.found = [finding("hot", about_gpu(GPU), evidence="90 °C")]
        first = {one["title"]: one["first"] for one in (await setting.reports.report(0, "1"))["findings"]}
        assert setting.shown.heard[2:] == ["TT900 error: hot"]  # asked for, it is looked at anew
        setting.reports.job_removed(job(GPU))
        kept = {one["title"]: one for one in (await written(setting))["findings"]}
        assert kept.keys() == {"hot", "tight"}
        assert kept["hot"]["evidence"] == "90 °C"
        assert (kept["hot"]["first"], kept["tight"]["last"]) == (first["hot"], kept["tight"]["first"])
        assert kept["hot"]["last"] > kept["hot"]["first"]
        await setting.reports.close()

    asyncio.run(live())


def test_a_report_does_not_wait_for_a_gpu_that_hangs(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang() -> list[Finding]:
        await asyncio.sleep(30)
        return []

    async def live() -> None:
        monkeypatch.setattr(reports, "ASKED_S", 0.05)
        monkeypatch.setattr(reports, "CLOSE_S", 0.05)
        monkeypatch.setattr(setting.reports, "_check", hang)
        setting.reports.job_added(job())
        async with asyncio.timeout(10):
            assert (await setting.reports.report(0, "1"))["findings"] == []
            await setting.reports.close()  # nor does the end of the daemon

    asyncio.run(live())


def test_a_flood_of_events_is_read_twice_a_second_at_most(setting: Setting) -> None:
    async def live() -> None:
        reads: list[int] = []
        read = setting.reports._read
        setting.reports._read = lambda record: (reads.append(1), read(record))[1]  # type: ignore[method-assign]
        setting.reports.job_added(job())
        for number in range(50):
            (setting.tree / BASE / "memory.events").write_text(f"oom_kill {number}\n")
            await asyncio.sleep(0)
        assert len(reads) == 1
        assert sorted(setting.reports._timers) == ["1", "read"]  # the second one comes when the burst is over
        await setting.reports.close()

    asyncio.run(live())


def test_what_is_known_at_the_stop_is_written(setting: Setting) -> None:
    async def live() -> None:
        setting.reports.job_added(job())
        await setting.reports._read_all()
        await setting.reports.close()

    asyncio.run(live())
    [name] = setting.store.names()
    found = setting.store.read(name)
    assert found is not None
    assert (found["state"], found["measured"]["cpu"]["usage_s"]) == ("running", 1.0)


class Slow(Host):
    """Threads read a job's CPU time from it, and then wait until `go`, as with a cgroup of many processes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reading, self.go = threading.Event(), threading.Event()

    def read(self, path: str) -> str:
        found = super().read(path)
        if path.endswith("cpu.stat") and threading.current_thread() is not threading.main_thread():
            self.reading.set()
            self.go.wait(20)
        return found


@pytest.mark.parametrize("removed", [False, True])
def test_a_reading_that_comes_late_does_not_replace_the_last_one(setting: Setting, *, removed: bool) -> None:
    async def live() -> None:
        host = Slow(setting.tree)
        setting.reports = Reports(host, setting.store, setting.shown, setting.sample, setting.check)
        setting.reports.job_added(job())
        asked = asyncio.ensure_future(setting.reports.report(0, "1"))
        await asyncio.to_thread(host.reading.wait, 20)
        (setting.tree / f"{BASE}/cpu.stat").write_text("usage_usec 9000000\n")
        setting.reports.leader_ended(job())
        if removed:
            setting.reports.job_removed(job())
        host.go.set()
        measured = (await asked)["measured"]
        assert (measured["cpu"], measured["complete"]) == ({"usage_s": 9.0}, removed)
        setting.reports.job_removed(job())
        measured = (await written(setting))["measured"]
        assert (measured["cpu"], measured["complete"]) == ({"usage_s": 9.0}, True)
        await setting.reports.close()

    asyncio.run(live())
