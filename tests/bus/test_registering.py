"""Jobs on the real machine: real processes of two users, their real masks, and every way to go wrong."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import JOB, MANAGER, OTHER, ROOT, USER, Daemon, PrivateBus

from torchtuned import processes
from torchtuned.cpuset import parse_list

Start = Callable[..., Daemon]
two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")


def masks(pid: int) -> set[frozenset[int]]:
    return set(processes.masks(pid).values())


@two_cpus
def test_two_jobs_get_cpus_of_their_own_and_nobody_else_is_touched(bus: PrivateBus, daemon: Start) -> None:
    one = daemon()
    with bus.user(USER) as first, bus.user(OTHER) as second, bus.user(USER) as neighbour:
        before = masks(neighbour.pid), masks(one.process.pid)
        _, grant = first.start({"cpus": "1"})
        _, other = second.start({"cpus": "1"})
        assert masks(first.pid) == {parse_list(grant["cpus"])}
        assert masks(second.pid) == {parse_list(other["cpus"])}
        assert not parse_list(grant["cpus"]) & parse_list(other["cpus"])
        assert (masks(neighbour.pid), masks(one.process.pid)) == before


def test_a_cpu_is_found_again_when_its_job_ends_however_it_ends(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    one = daemon("--sysroot", tree)
    places = set()
    for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV):
        with bus.user(USER) as job:
            _, grant = job.start({"gpus": 1})
            places.add((grant["cpus"], *grant["gpus"]))
            os.kill(job.pid, how)
            one.wait_for("0 jobs")
    assert places == {("0-3", "0000:01:00.0")}


def test_only_the_user_of_a_process_and_root_may_register_it(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree)
    with bus.user(USER) as mine, bus.user(OTHER) as stranger, bus.user(0) as root:
        with pytest.raises(RuntimeError, match=f"NotAuthorized: process {mine.pid} belongs to uid {USER}"):
            stranger.register(pid=mine.pid)
        with pytest.raises(RuntimeError, match="NotAuthorized"):
            stranger.register(pid=root.pid)
        path, _ = mine.register()
        for member in ("Commit", "Release"):
            with pytest.raises(RuntimeError, match="NotAuthorized"):
                stranger.do("call", ROOT, MANAGER, member, "o", path)
        root.release(path)
        path, _ = root.register(pid=mine.pid)
        assert bus.get(path, JOB, "Uid") == USER
        assert mine.commit(path)["state"] == "running"


def test_what_is_no_process_is_refused(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree)
    with bus.user(USER) as job:
        child = job.do("fork")
        fd = os.pidfd_open(child)
        os.kill(child, signal.SIGKILL)
        assert processes.ended(fd) or signal.sigtimedwait([], 0.2) is None
        os.close(fd)
        with pytest.raises(RuntimeError, match="InvalidRequest: the process has ended"):
            job.register(pid=child)  # a zombie: its parent has not waited for it
        with pytest.raises(RuntimeError, match="InvalidRequest: the file descriptor is not a pidfd"):
            job.do("fds", "Register", 1)


BAD_REQUESTS = [
    "",
    "null",
    "[]",
    "{",
    '{"schema": 2}',
    '{"schema": 1, "colour": "red"}',
    '{"schema": 1, "cpus": "many"}',
    '{"schema": 1, "cpus": NaN}',
    '{"schema": 1, "cpus": "../../x\\u0000"}',
    '{"schema": 1, "command": ["\\ud800"], "policy": "\\ud800"}',
    '{"schema": 1, "gpus": ["../.."]}',
    '{"schema": 1, "gpus": -1}',
    '{"schema": 1, "wait": -1}',
    '{"schema": 1, "ranks": 1e999}',
    '{"schema": 1, "command": ' + json.dumps(["x" * 300]) + "}",
    '{"schema": 1, "command": "' + "x" * 70000 + '"}',
    "[" * 60000,
    '{"schema": ' + "9" * 5000 + "}",
]


def test_bad_requests_are_answered_and_survived(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree)
    with bus.user(USER) as job:
        for text in BAD_REQUESTS:
            with pytest.raises(RuntimeError, match=r"Error\.(InvalidRequest|NoSuchGpu)"):
                job.register(text)
        with pytest.raises(RuntimeError, match="NoSuchGpu"):
            job.register({"gpus": ["0000:ff:00.0"]})
        with pytest.raises(RuntimeError, match="Unplaceable"):
            job.register({"gpus": 3})
        assert job.start()[1]["state"] == "running"


def test_the_two_phases(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    one = daemon("--sysroot", tree)
    with bus.user(USER) as job:
        path, grant = job.register({"cpus": "2"})
        assert grant["state"] == "granted"
        again, grant = job.register({"cpus": "3"})  # the first answer came too late: it must not stand beside this one
        assert again != path
        assert [p for p in bus.managed() if "/jobs/" in p] == [again]
        assert job.commit(again)["state"] == "running"
        with pytest.raises(RuntimeError, match=r"InvalidRequest: job .* is running"):
            job.commit(again)
        with pytest.raises(RuntimeError, match=r"InvalidRequest: process .* is job .* already"):
            job.register()
        job.release(again)
        one.wait_for("0 jobs")
        with pytest.raises(RuntimeError, match="NoSuchJob"):
            job.release(again)


def test_a_gpu_lent_to_a_virtual_machine_is_none_of_those_that_count(
    bus: PrivateBus, daemon: Start, tree: Path
) -> None:
    """torchrun --nproc-per-node=gpu starts a rank for each GPU that CUDA sees, and asks here for how many that are."""
    (tree / "sys/bus/pci/devices/0000:01:00.0/driver").symlink_to("../../../../bus/pci/drivers/vfio-pci")
    daemon("--sysroot", tree)
    assert bus.get(ROOT, MANAGER, "Gpus") == 1
    assert {f"{ROOT}/gpus/0000_01_00_0", f"{ROOT}/gpus/0000_81_00_0"} <= bus.managed().keys()


def test_leases_are_served_first_come_first_served(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree)
    with bus.user(USER) as holder, bus.user(OTHER) as first, bus.user(USER) as second, bus.user(USER) as third:
        held, grant = holder.start({"gpus": 2})
        assert grant["gpus"] == ["0000:01:00.0", "0000:81:00.0"]
        with pytest.raises(RuntimeError, match=r"Error\.Busy"):
            third.register({"gpus": 1})
        one, grant = first.register({"gpus": 1, "wait": 0})
        assert (grant["state"], grant["cpus"], grant["gpus"]) == ("queued", "", [])
        assert "0 of 2 GPUs are free" in grant["warnings"][0]
        two, _ = second.register({"gpus": 2, "wait": 0})
        holder.release(held)
        path, text = first.do("wait_signal", "Granted")
        assert path == one
        assert json.loads(text)["gpus"] == ["0000:01:00.0"]
        next_ = two.rpartition("/")[2]
        with pytest.raises(RuntimeError, match=rf"Busy: 1 waiting before it \(job {next_} of uid {USER} is next"):
            third.register({"gpus": 1})  # one GPU is free, and somebody waits for it
        inside, _ = third.start({"gpus": []})  # who wants no GPU does not stand in that queue
        third.release(inside)
        assert bus.get(two, JOB, "State") == "queued"
        first.commit(one)
        first.kill()
        assert second.do("wait_signal", "Granted")[0] == one
        assert second.do("wait_signal", "Granted")[0] == two
        assert second.commit(two)["gpus"] == ["0000:01:00.0", "0000:81:00.0"]


def test_a_killed_waiter_leaves_the_queue_and_a_wait_ends(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree)
    with bus.user(USER) as holder, bus.user(USER) as next_, bus.user(USER) as last:
        held, _ = holder.start({"gpus": 2})
        killed = bus.user(USER)
        killed.register({"gpus": 1, "wait": 0})
        short, _ = last.register({"gpus": 1, "wait": 0.05})
        waiting, _ = next_.register({"gpus": 1, "wait": 0})
        killed.kill()
        while last.do("wait_signal", "InterfacesRemoved")[0] != short:
            pass
        holder.release(held)
        assert next_.do("wait_signal", "Granted")[0] == waiting


def test_a_job_inside_of_a_job_shares_its_place(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree)
    with bus.user(USER) as outer:
        _, grant = outer.start({"cpus": "all"})
        child = outer.do("fork")
        _, inner = outer.register({"cpus": "4"}, pid=child)
        assert inner["shared"] is False
        assert parse_list(inner["cpus"]) <= parse_list(grant["cpus"])


def test_a_job_inside_of_a_job_waits_for_nobody_else(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    """A stranger waits for the outer job, which waits for the inner one: that must have its place."""
    daemon("--sysroot", tree)
    with bus.user(USER) as outer, bus.user(OTHER) as stranger:
        _, grant = outer.start({"gpus": 2, "cpus": "all"})
        waiting, told = stranger.register({"gpus": 1, "wait": 0})
        assert told["state"] == "queued"
        for_cpus, told = stranger.register({"cpus": "4", "gpus": [], "wait": 0}, pid=stranger.do("fork"))
        assert told["state"] == "queued"
        children = [outer.do("fork") for _ in range(3)]
        third, inner = outer.register({"cpus": "4", "gpus": [], "wait": 0}, pid=children[0])
        assert (inner["state"], parse_list(inner["cpus"]) <= parse_list(grant["cpus"])) == ("granted", True)
        outer.release(third)
        first, inner = outer.register({"gpus": 2, "wait": 0}, pid=children[1])
        assert (inner["state"], inner["gpus"]) == ("granted", grant["gpus"])
        second, inner = outer.register({"gpus": 1, "wait": 0}, pid=children[2])
        assert inner["state"] == "queued"
        outer.release(first)
        assert outer.do("wait_signal", "Granted")[0] == second
        assert {bus.get(path, JOB, "State") for path in (waiting, for_cpus)} == {"queued"}


def test_who_waits_for_cpus_holds_up_only_who_would_wait(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree)
    with bus.user(USER) as holder, bus.user(OTHER) as waiter, bus.user(USER) as plain, bus.user(USER) as sharing:
        holder.start({"gpus": [], "cpus": "all"})
        path, grant = waiter.register({"gpus": [], "cpus": "4", "wait": 0})
        assert grant["state"] == "queued"
        _, grant = plain.start({"gpus": []})
        assert (grant["state"], grant["shared"]) == ("running", True)
        assert sharing.start({"gpus": [], "shared": True})[1]["state"] == "running"
        assert bus.get(path, JOB, "State") == "queued"


def test_the_daemon_killed_and_started_again_knows_its_jobs(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    first = daemon("--sysroot", tree)
    with bus.user(USER) as job, bus.user(USER) as waiter:
        path, _ = job.start({"gpus": 2})
        queued, _ = waiter.register({"gpus": 1, "wait": 0})
        ended = bus.user(OTHER)
        ended.start()
        before = bus.managed()
        first.stop(signal.SIGKILL)
        ended.kill()
        second = daemon("--sysroot", tree)
        after = bus.managed()
        assert after[path] == before[path]
        assert after[queued] == before[queued]
        assert len([p for p in after if "/jobs/" in p]) == 2
        with bus.user(USER) as late, pytest.raises(RuntimeError, match=r"Error\.Busy"):
            late.register({"gpus": 1})
        job.kill()
        assert waiter.do("wait_signal", "Granted")[0] == queued
        assert waiter.commit(queued)["gpus"] == ["0000:01:00.0"]
        waiter.kill()
        second.wait_for("0 jobs")
        with bus.user(USER) as new:
            assert int(new.start()[0].rpartition("/")[2]) > 3  # ids are not given again


def test_a_pid_that_is_another_process_now_is_not_adopted(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    first = daemon("--sysroot", tree)
    with bus.user(USER) as job:
        job.start()
        first.stop(signal.SIGKILL)
        table = first.run_dir / "jobs.json"
        document = json.loads(table.read_text())
        document["jobs"][0]["start"] += 1
        table.write_text(json.dumps(document))
        daemon("--sysroot", tree)
        assert not [path for path in bus.managed() if "/jobs/" in path]


def test_a_table_that_cannot_be_read_is_put_aside(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    run_dir = bus.folder / "run"
    run_dir.mkdir()
    (run_dir / "jobs.json").write_text('{"schema": 1, "next": 5, "jobs": [{"id"')
    one = daemon("--sysroot", tree)
    assert (run_dir / "jobs.bad").exists()
    assert "cannot be read" in one.log.read_text()
    with bus.user(USER) as job:
        assert job.start()[1]["state"] == "running"


def test_a_table_that_cannot_be_written_grants_nothing(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    one = daemon("--sysroot", tree)
    one.wait_for("ready")
    with bus.user(USER) as job:
        (one.run_dir / "jobs.new").mkdir()  # in the way of every write
        with pytest.raises(RuntimeError, match=r"Failed: .*jobs\.json: the job cannot be recorded"):
            job.register({"gpus": 2})
        assert not [path for path in bus.managed() if "/jobs/" in path]
        (one.run_dir / "jobs.new").rmdir()
        assert job.start({"gpus": 2})[1]["state"] == "running"


def test_many_jobs_leave_nothing(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    one = daemon("--sysroot", tree)
    one.wait_for("ready")
    folder = f"/proc/{one.process.pid}/fd"
    with bus.user(USER) as job:
        for _ in range(20):
            job.release(job.start()[0])
        one.wait_for("0 jobs")
        before = len(os.listdir(folder))
        for _ in range(200):
            job.release(job.register()[0])
        assert len(os.listdir(folder)) <= before
    assert json.loads((one.run_dir / "jobs.json").read_text())["jobs"] == []
    assert (one.run_dir / "jobs.json").stat().st_mode & 0o777 == 0o600
