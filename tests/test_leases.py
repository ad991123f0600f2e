"""Whose process computes on a GPU: one of a job's, or a stranger's."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.tree import make_tree

from torchtuned import leases
from torchtuned.gpus import Gpus, Process
from torchtuned.host import Host
from torchtuned.jobs import Job
from torchtuned.leases import Leases
from torchtuned.placement import Request
from torchtuned.processes import Process as Registered
from torchtuned.processes import start_time


class Asked(Gpus):
    """Answers with `users` in NVML's place."""

    users: dict[str, list[int]]
    hang: threading.Event | None = None

    def busy(self, addresses: object = None) -> dict[str, tuple[Process, ...]]:
        if self.hang is not None:
            self.hang.wait()
        return {gpu: tuple(Process(pid=pid, memory=1) for pid in pids) for gpu, pids in self.users.items()}


@pytest.fixture
def parent() -> Iterator[tuple[int, int]]:
    """A process and its child."""
    script = "import os, time; r = os.fork(); os.write(1, b'%d\\n' % r) if r else None; time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process.pid, child
    os.kill(child, 9)
    process.kill()
    process.communicate()


def job(pid: int, scope: str = "", start: int = 0) -> Job:
    return Job(
        id="1",
        process=Registered(pid=pid, start=start or start_time(pid), uid=0),
        request=Request(),
        since=0,
        scope=scope,
    )


def look(gpus: Asked, host: Host, *jobs: Job) -> frozenset[str]:
    return asyncio.run(Leases(host, gpus).look(jobs))


def test_only_strangers_hold(parent: tuple[int, int], tmp_path: Path) -> None:
    leader, worker = parent
    host = Host(make_tree(tmp_path, {f"proc/{os.getpid()}/cgroup": "0::/user.slice/torchtuned-job-1.scope\n"}))
    gpus = Asked(host)
    gpus.users = {"a": [], "b": [worker], "c": [leader], "d": [os.getpid()]}
    assert look(gpus, host) == {"b", "c", "d"}
    assert look(gpus, host, job(leader)) == {"d"}
    assert look(gpus, host, job(leader, "torchtuned-job-1.scope")) == frozenset()
    assert look(gpus, host, job(worker, "torchtuned-job-11.scope")) == {"c", "d"}
    assert look(gpus, host, job(leader, start=1)) == {"b", "c", "d"}  # that PID is another process's by now
    forged = {f"proc/{os.getpid()}/cgroup": "0::/user.slice/user@1.service/torchtuned-job-1.scope\n"}
    make_tree(tmp_path, forged)
    assert look(gpus, host, job(leader, "torchtuned-job-1.scope")) == {"d"}
    gpus.users = {"a": [worker, 2**22 + 1]}  # the second has ended since
    assert look(gpus, host, job(leader)) == {"a"}


def test_those_who_ask_together_share_the_answer(tmp_path: Path) -> None:
    """Each question is a child process, and anybody may ask a hundred times."""
    asked, go = Asked(Host(make_tree(tmp_path, {}))), threading.Event()
    asked.users, asked.hang, times = {}, go, []
    busy = asked.busy

    def counted(addresses: object = None) -> dict[str, tuple[Process, ...]]:
        times.append(1)
        return busy(addresses)

    asked.busy = counted  # type: ignore[method-assign]
    lent = Leases(asked.host, asked)

    async def story() -> None:
        looks = [asyncio.ensure_future(lent.look([])) for _ in range(20)]
        await asyncio.sleep(0.1)
        go.set()
        await asyncio.gather(*looks)
        assert len(times) == 1
        await lent.look([])
        assert len(times) == 2

    asyncio.run(story())


def test_a_driver_that_hangs_costs_little_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: tuple[int, int]
) -> None:
    monkeypatch.setattr(leases, "PATIENCE_S", 0.05)
    host = Host(tmp_path)
    gpus = Asked(host)
    gpus.users = {"a": [parent[0]]}

    async def story() -> None:
        lent = Leases(host, gpus)
        assert await lent.look([]) == {"a"}
        gpus.hang = threading.Event()
        assert await lent.look([job(parent[0])]) == {"a"}
        gpus.hang.set()
        gpus.hang = None
        assert await lent.look([job(parent[0])]) == frozenset()

    asyncio.run(story())
