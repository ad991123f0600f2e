"""A user who becomes a job keeps the limits of the session, and gets no more of the daemon than everybody: tried by
a real second user, with a PID 1 that would do as it is told.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from fakes.tree import make_tree
from harness import GPU, MANAGER, OTHER, ROOT, USER, Daemon, PrivateBus, Service, small_machine

from torchtuned.processes import start_time

Start = Callable[..., Daemon]
Fake = Callable[..., Service]
CROWD = ("daemon", "bin", "sys", "games", "man")  # Debian has them everywhere
SESSION = "/user.slice/user-1000.slice/session-3.scope"
MINE = f"sys/fs/cgroup{SESSION}"
LIMITS = {
    "MemoryMax": ("memory.max", "1073741824"),
    "TasksMax": ("pids.max", "50"),
    "CPUQuota": ("cpu.max", "150000 100000"),
    "AllowedCPUs": ("cpuset.cpus", "0-1"),
    "IOMax": ("io.max", "8:0 rbps=1048576 wbps=max riops=max wiops=max"),
    "CPUWeight": ("cpu.weight", "10"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_nobody_leaves_the_limits_of_a_session(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path, name: str
) -> None:
    file, value = LIMITS[name]
    make_tree(tree, {f"{MINE}/{file}": f"{value}\n"})
    pid1 = services("systemd1", "--version", "257")
    daemon("--sysroot", tree)
    with bus.user(USER) as job:
        for confine in (None, "cpuset", "affinity"):
            path, grant = job.start({"gpus": [], "cpus": "1", "confine": confine})
            assert (grant["scope"], grant["confinement"]) == ("", "affinity")
            job.release(path)
    assert pid1.calls("StartTransientUnit") == []
    assert pid1.calls("SetUnitProperties") == []


def test_a_limit_that_comes_between_register_and_commit_holds(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path
) -> None:
    pid1 = services("systemd1", "--version", "257")
    daemon("--sysroot", tree)
    with bus.user(USER) as job:
        path, grant = job.register({"gpus": []})
        assert grant["confinement"] == "cpuset"
        (tree / MINE / "memory.max").write_text("4096\n")
        assert job.commit(path)["scope"] == ""
    assert pid1.calls("StartTransientUnit") == []


def test_the_slice_stays_above_the_job(bus: PrivateBus, services: Fake, daemon: Start, tree: Path) -> None:
    """What limits user-1000.slice, and user.slice above it, limits the scope: it is made in that very slice."""
    make_tree(
        tree,
        {
            "sys/fs/cgroup/user.slice/user-1000.slice/memory.max": "4096\n",
            "sys/fs/cgroup/user.slice/pids.max": "100\n",
            "sys/fs/cgroup/user.slice/user-1000.slice/cpu.max": "200000 100000\n",
        },
    )
    pid1 = services("systemd1", "--version", "257")
    daemon("--sysroot", tree)
    with bus.user(USER) as job:
        _, grant = job.start({"gpus": []})
        assert grant["threads"] == 2  # the slice's quota
        assert pid1.get("scopes")[grant["scope"]]["Slice"] == "user-1000.slice"


def test_a_job_within_a_job_leaves_nothing(bus: PrivateBus, services: Fake, daemon: Start) -> None:
    pid1 = services("systemd1", "--version", "257")
    inner = "/user.slice/user-1000.slice/torchtuned-job-1.scope"
    daemon("--sysroot", small_machine(bus.folder, session=inner))
    with bus.user(USER) as job:
        assert job.start({"gpus": []})[1]["scope"] == ""
    assert pid1.calls("StartTransientUnit") == []


def test_gpus_of_another_cannot_be_had(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree)
    with bus.user(USER) as mine, bus.user(OTHER) as thief:
        path, grant = mine.start({"gpus": 1})
        [address] = grant["gpus"]
        for gpus in ([address], 2):
            with pytest.raises(RuntimeError, match="Busy"):
                thief.register({"gpus": gpus})
        with pytest.raises(RuntimeError, match="NotAuthorized"):
            thief.release(path)
        with pytest.raises(RuntimeError, match="NotAuthorized"):
            thief.do("call", ROOT, MANAGER, "Commit", "o", path)
        with pytest.raises(RuntimeError, match="NotAuthorized"):
            thief.register({"gpus": 1}, pid=mine.pid)
        assert bus.get(f"{ROOT}/gpus/{address.translate(str.maketrans(':.', '__'))}", GPU, "Job") == path


def test_a_thousand_connections(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    """All of them ask at once, a job starts among them, and the daemon keeps nothing of them.

    Of five users, because the bus gives 256 connections to each.
    """
    one = daemon("--sysroot", tree)
    one.wait_for("ready")
    process = psutil.Process(one.process.pid)
    before = process.num_fds()
    with contextlib.ExitStack() as stack:
        crowds = [stack.enter_context(bus.user(pwd.getpwnam(name).pw_uid)) for name in CROWD]
        job = stack.enter_context(bus.user(USER))
        assert [crowd.do("open", 200) for crowd in crowds] == [200] * len(CROWD)
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(crowd.do, "everyone", ROOT, MANAGER, "Plan") for crowd in crowds]
            assert job.start({"cpus": "1"})[1]["state"] == "running"
            assert [answer.result() for answer in asked] == [200] * len(CROWD)
    one.wait_for("0 jobs")
    assert process.num_fds() == before


def test_who_registers_a_lot_waits_for_himself(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    """And not all others for him: a hundred calls of one user took eight seconds, and the next came after them."""
    daemon("--sysroot", tree).wait_for("ready")
    with bus.user(USER) as crowd, bus.user(OTHER) as job:
        crowd.do("crowd", "Register", 120)
        job.register({"shared": True})
        assert crowd.do("answered") < 100
        while crowd.do("answered") < 120:
            time.sleep(0.05)
        assert bus.get(ROOT, MANAGER, "Jobs") == 2


def test_who_reads_reports_a_lot_waits_for_himself(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    """Each time all of them are read from the disk, by the threads that look at whoever registers."""
    one = daemon("--sysroot", tree)
    one.wait_for("ready")
    (one.state_dir / "reports").mkdir(parents=True)
    for number in range(1, 201):
        report = {"job": str(number), "started": number, "ended": 1, "words": ["x" * 100] * 50}
        (one.state_dir / f"reports/{number:016d}-{number}-{USER}.json").write_text(json.dumps(report))
    with bus.user(USER) as crowd, bus.user(OTHER) as job:
        crowd.do("crowd", "Reports", 120)
        job.register({"shared": True})
        assert crowd.do("answered") < 100


def test_a_table_that_takes_long_keeps_nobody_from_an_answer(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    """It is read before a place is given, in turn. With one that changes all the time, and a hundred calls of the same
    user, nobody else had an answer within ten seconds.
    """
    one = daemon("--sysroot", tree)
    one.wait_for("ready")
    process = psutil.Process(one.process.pid)
    with bus.user(USER) as slow, bus.user(OTHER) as job:
        folder = tree / f"run/lock/torchtuned-{USER}"
        folder.mkdir(parents=True)
        claim = {"pid": slow.pid, "start": start_time(slow.pid), "grant": {"cpus": "0"}}
        (folder / "jobs.json").write_text(json.dumps({"schema": 1, "jobs": [claim] * 8000}))
        for path in (folder, folder / "jobs.json"):
            os.chown(path, USER, USER)
        costs = []
        for turn in range(9):
            os.utime(folder, (turn, turn))
            before = sum(process.cpu_times()[:2])
            job.register({"shared": True})
            costs.append(sum(process.cpu_times()[:2]) - before)
        assert sorted(costs)[4] < max(costs) / 3, costs
        assert bus.get(ROOT, MANAGER, "Jobs") == 2  # what could be read is known all the same


@pytest.mark.parametrize("knob", ["sysctl/../../etc/passwd", "cpu/../../x", "../../etc/shadow", "\n", "sysctl/a\0b"])
def test_nothing_outside_of_the_knobs_is_written(bus: PrivateBus, daemon: Start, tree: Path, knob: str) -> None:
    """Not even by root, who alone may undo here: a name of a knob is looked up, never made a path."""
    daemon("--sysroot", tree).wait_for("ready")
    make_tree(tree, {"etc/passwd": "root\n"})
    with bus.user(0) as root, pytest.raises(RuntimeError, match=r"Error\.(NoSuchKnob|InvalidRequest)"):
        root.do("call", ROOT, MANAGER, "Undo", "as", [knob])
    assert (tree / "etc/passwd").read_text() == "root\n"
