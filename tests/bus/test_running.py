"""torchtuned-run with the real daemon: real masks of real threads, jobs that come and go, and two users."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from fakes.tree import make_tree
from harness import JOB, MANAGER, REPOSITORY, ROOT, USER, Daemon, PrivateBus

from torchtuned.cpuset import format_list, parse_list

# what places itself is written down for this test's daemon, not for the machine's
OWN_LOCKS = f"""
import os, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from torchtuned import jobtables
jobtables.LOCKS = os.environ["LOCKS"]
"""
ENTRY = f"{OWN_LOCKS}from torchtuned.run.main import main; sys.exit(main())"
RUN = ["/usr/bin/python3", "-I", "-c", ENTRY]
MINE = frozenset(os.sched_getaffinity(0))
HOLD = ["sh", "-c", "echo $$; read x"]
MASKS = """
import os, re, subprocess, sys, threading
for _ in range(4):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
def masks(pid):
    for thread in os.listdir(f"/proc/{pid}/task"):
        yield re.search("Cpus_allowed_list:\\t(.*)", open(f"/proc/{pid}/task/{thread}/status").read())[1]
print(" ".join([*masks(os.getpid()), *masks(child.pid)]), flush=True)
sys.stdin.read()
child.kill()
"""
Running = subprocess.Popen[str]
pytestmark = pytest.mark.skipif(len(MINE) < 2, reason="jobs can only be told apart on two CPUs")


@pytest.fixture(autouse=True)
def started(bus: PrivateBus, daemon: Callable[..., Daemon]) -> Daemon:
    """The daemon on this very machine's CPUs, with a policy that changes nothing."""
    root = make_tree(
        bus.folder / "here",
        {
            "sys": "-> /sys",
            "proc": "-> /proc",
            "dev": "-> /dev",
            "usr/share/torchtuned/profiles/training.conf": "[policy]\ndescription = changes nothing\n",
        },
    )
    locks = root / "run/lock"
    locks.mkdir(parents=True)
    locks.chmod(0o1777)
    return daemon("--sysroot", root)


@pytest.fixture
def start(bus: PrivateBus) -> Iterator[Callable[..., Running]]:
    """start("--cpus=1", "command", …) runs torchtuned-run; user=UID as somebody else; run=WORDS another one."""
    running: list[Running] = []

    def begin(*words: str, user: int = 0, run: Sequence[str] = RUN) -> Running:
        switch = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
        environ = {**bus.environment, "XDG_RUNTIME_DIR": str(bus.folder / "nowhere")}
        environ["LOCKS"] = str(bus.folder / "here/run/lock")
        environ.pop("OMP_NUM_THREADS", None)
        process = subprocess.Popen(
            [*switch, *run, *words],
            env=environ,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def line(process: Running) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def finish(process: Running) -> tuple[str, str, int]:
    out, err = process.communicate("\n", timeout=30)
    return out, err, process.returncode


def jobs(bus: PrivateBus) -> list[dict[str, Any]]:
    found = [interfaces[JOB] for interfaces in bus.managed().values() if JOB in interfaces]
    return sorted(found, key=lambda job: int(job["Id"]))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def mask(process: Running) -> frozenset[int]:
    return frozenset(os.sched_getaffinity(process.pid))


def test_two_jobs_are_disjoint_in_every_thread(bus: PrivateBus, start: Callable[..., Running]) -> None:
    neighbour = subprocess.Popen(["sleep", "60"])
    pair = [start("--cpus=1", sys.executable, "-c", MASKS) for _ in range(2)]
    found = [set(line(job).split()) for job in pair]
    assert [len(masks) for masks in found] == [1, 1], "every thread and child of a job has one mask"
    first, second = (parse_list(masks.pop()) for masks in found)
    assert first
    assert second
    assert not first & second
    assert frozenset(os.sched_getaffinity(neighbour.pid)) == frozenset(os.sched_getaffinity(0)) == MINE
    neighbour.kill()
    neighbour.wait()
    told = jobs(bus)
    assert {(job["Pid"], job["Cpus"]) for job in told} == {(job.pid, format_list(mask(job))) for job in pair}
    assert [(job["State"], job["Uid"], job["Threads"]) for job in told] == [("running", 0, 1)] * 2
    for job in pair:
        assert finish(job)[1:] == ("", 0)
    wait_until(lambda: not jobs(bus))


def test_another_user_gets_a_place_too(bus: PrivateBus, start: Callable[..., Running]) -> None:
    job = start("--cpus=1", *HOLD, user=USER)
    assert line(job) == str(job.pid)
    assert [(told["Uid"], told["Pid"]) for told in jobs(bus)] == [(USER, job.pid)]
    assert len(mask(job)) < len(MINE)
    assert finish(job)[1:] == ("", 0)


def test_a_killed_job_gives_its_place_back(bus: PrivateBus, start: Callable[..., Running]) -> None:
    job = start(*HOLD)
    line(job)
    job.kill()
    wait_until(lambda: not jobs(bus))
    again = start("sh", "-c", "grep Cpus_allowed_list /proc/self/status; echo $OMP_NUM_THREADS")
    out, err, _ = finish(again)
    assert (frozenset(parse_list(out.split()[1])), err) == (MINE, "")


def test_waiting_for_a_place(bus: PrivateBus, start: Callable[..., Running]) -> None:
    holder = start(*HOLD)
    line(holder)
    waiting = start("--wait", "grep", "Cpus_allowed_list", "/proc/self/status")
    assert waiting.stderr is not None
    assert waiting.stderr.readline().startswith("torchtuned-run: waiting: ")
    assert [job["State"] for job in jobs(bus)] == ["running", "queued"]
    assert waiting.poll() is None
    finish(holder)
    out, err, status = finish(waiting)
    assert (frozenset(parse_list(out.split()[1])), err, status) == (MINE, "", 0)


def test_waiting_that_was_in_vain(bus: PrivateBus, start: Callable[..., Running]) -> None:
    holder = start(*HOLD)
    line(holder)
    _, err, status = finish(start("--wait=0.3", "--quiet", "true"))
    assert (status, err.count("\n")) == (125, 1)
    said = rf"waited 0\.[3-9] s, no place: no core is free; job 1 of \w+ has CPUs {format_list(MINE)}"
    assert re.fullmatch(f"torchtuned-run: {said}\n", err)
    assert len(jobs(bus)) == 1


def test_explain_leaves_nothing(bus: PrivateBus, start: Callable[..., Running]) -> None:
    answer = json.loads(finish(start("--explain", "--json", "--cpus=1", "true"))[0])
    assert answer["by"] == "torchtunedd"
    assert len(parse_list(answer["cpus"])) < len(MINE)
    assert answer["environment"]["OMP_NUM_THREADS"]["value"] == "1"
    assert jobs(bus) == []


def test_a_command_that_cannot_run_leaves_nothing(bus: PrivateBus, start: Callable[..., Running]) -> None:
    script = bus.folder / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    assert finish(start(str(script)))[2] == 127
    assert finish(start("no-such-command"))[2] == 127
    assert jobs(bus) == []


def test_within_its_own_job_it_stays_there(bus: PrivateBus, start: Callable[..., Running]) -> None:
    job = start("--cpus=1", *RUN, *HOLD)
    assert line(job) == str(job.pid)
    assert len(mask(job)) < len(MINE)
    assert len(jobs(bus)) == 1
    assert "is a job of torchtunedd already" in finish(job)[1]


def test_jobs_outlive_the_daemon_and_the_next_knows_them(
    bus: PrivateBus, start: Callable[..., Running], started: Daemon, daemon: Callable[..., Daemon]
) -> None:
    job = start("--cpus=1", *HOLD)
    line(job)
    before = mask(job)
    started.stop(signal.SIGKILL)
    unserved = start("--require", "true")
    assert finish(unserved)[2] == 125
    daemon("--sysroot", bus.folder / "here")
    other = start("--cpus=1", *HOLD)
    line(other)
    assert mask(job) == before
    assert not mask(other) & before
    assert [finish(one)[2] for one in (job, other)] == [0, 0]


def test_jobs_that_placed_themselves_are_adopted(
    bus: PrivateBus, start: Callable[..., Running], started: Daemon, daemon: Callable[..., Daemon]
) -> None:
    started.stop()
    alone = start("--cpus=1", *HOLD, user=USER)
    line(alone)
    first = daemon("--sysroot", bus.folder / "here")
    told = next(job for job in jobs(bus) if job["Pid"] == alone.pid)
    assert (told["Uid"], told["State"], told["Cpus"]) == (USER, "running", format_list(mask(alone)))
    other = start("--cpus=1", *HOLD)
    line(other)
    assert not mask(other) & mask(alone)
    first.stop(signal.SIGKILL)
    daemon("--sysroot", bus.folder / "here")
    assert [job["Id"] for job in jobs(bus) if job["Pid"] == alone.pid] == [told["Id"]], "once"
    finish(alone)
    wait_until(lambda: all(job["Pid"] != alone.pid for job in jobs(bus)))


def test_a_daemon_that_was_stopped_does_not_deal_what_others_have_taken(
    bus: PrivateBus, start: Callable[..., Running], started: Daemon
) -> None:
    started.process.send_signal(signal.SIGSTOP)
    alone = start("--cpus=1", *HOLD, user=USER)
    line(alone)
    started.process.send_signal(signal.SIGCONT)
    other = start("--cpus=1", *HOLD)
    line(other)
    assert not mask(other) & mask(alone)
    assert [job["State"] for job in jobs(bus) if job["Pid"] == alone.pid] == ["running"]


@pytest.mark.parametrize("table", ["kept", "lost"])
def test_a_job_that_waits_sits_out_a_restart(
    bus: PrivateBus, start: Callable[..., Running], started: Daemon, daemon: Callable[..., Daemon], table: str
) -> None:
    holder = start(*HOLD)
    line(holder)
    waiting = start("--wait", "echo", "ran")
    assert waiting.stderr is not None
    assert waiting.stderr.readline().startswith("torchtuned-run: waiting: ")
    started.stop(signal.SIGKILL)
    if table == "lost":
        (started.run_dir / "jobs.json").unlink()
    time.sleep(1)
    assert waiting.poll() is None, "it did not go ahead without the daemon"
    daemon("--sysroot", bus.folder / "here")
    if table == "kept":
        time.sleep(0.5)
        assert [job["State"] for job in jobs(bus)] == ["running", "queued"]
        finish(holder)
    assert finish(waiting) == ("ran\n", "", 0)


def test_a_daemon_that_does_not_come_back_is_not_waited_for_long(
    bus: PrivateBus, start: Callable[..., Running], started: Daemon
) -> None:
    holder = start(*HOLD)
    line(holder)
    waiting, short = start("--wait", "echo", "ran"), start("--wait=3", "true")
    for job in (waiting, short):
        assert job.stderr is not None
        assert "waiting: " in job.stderr.readline()
    begin = time.monotonic()
    started.stop(signal.SIGKILL)
    assert finish(short)[2] == 125
    assert time.monotonic() - begin < 6
    out, err, status = finish(waiting)
    assert (out, status) == ("ran\n", 0)
    assert "placed without torchtunedd" in err


def test_a_daemon_that_hangs_is_not_waited_for(start: Callable[..., Running], started: Daemon) -> None:
    started.process.send_signal(signal.SIGSTOP)
    try:
        begin = time.monotonic()
        out, err, status = finish(start("echo", "ran"))
        assert (out, status) == ("ran\n", 0)
        assert "torchtunedd did not answer; placed without torchtunedd" in err
        assert time.monotonic() - begin < 10
    finally:
        started.process.send_signal(signal.SIGCONT)


# torchtuned-run that stops for a line of input when it has its grant, before it commits
PAUSED = f"""{OWN_LOCKS}
from torchtuned.run import main, place
move = place.confine
def paused(grant):
    place.confine = move
    print("granted", flush=True)
    sys.stdin.readline()
    return move(grant)
place.confine = paused
sys.exit(main.main())
"""
PAUSED_RUN = ["/usr/bin/python3", "-I", "-c", PAUSED]


@pytest.mark.parametrize("table", ["kept", "lost"])
def test_a_restart_between_grant_and_commit_costs_nothing(
    bus: PrivateBus, start: Callable[..., Running], started: Daemon, daemon: Callable[..., Daemon], table: str
) -> None:
    """Placing itself then would put the job on CPUs that the new daemon gives to others."""
    job = start("--cpus=1", *HOLD, run=PAUSED_RUN)
    assert line(job) == "granted"
    started.stop(signal.SIGKILL)
    if table == "lost":
        (started.run_dir / "jobs.json").unlink()
    assert job.stdin is not None
    job.stdin.write("\n")
    job.stdin.flush()
    time.sleep(0.5)
    daemon("--sysroot", bus.folder / "here")
    assert line(job) == str(job.pid)
    assert [(found["Pid"], found["State"]) for found in jobs(bus)] == [(job.pid, "running")]
    other = start("--cpus=1", *HOLD)
    line(other)
    assert not mask(other) & mask(job)
    assert [finish(one) for one in (job, other)] == [("", "", 0), ("", "", 0)]


def test_a_daemon_that_does_not_come_back_after_its_grant(start: Callable[..., Running], started: Daemon) -> None:
    job = start("--cpus=1", "echo", "ran", run=PAUSED_RUN)
    assert line(job) == "granted"
    started.stop(signal.SIGKILL)
    begin = time.monotonic()
    out, err, status = finish(job)
    assert (out, status) == ("ran\n", 0)
    assert "no torchtunedd is running; placed without torchtunedd on CPUs" in err
    assert time.monotonic() - begin < 10


def test_report(bus: PrivateBus, start: Callable[..., Running]) -> None:
    parent = start("--report", "--cpus=1", *HOLD)
    child = int(line(parent))
    assert [job["Pid"] for job in jobs(bus)] == [child]
    assert mask(parent) == MINE, "only the command moves"
    _, err, status = finish(parent)
    assert status == 0
    assert "ended with exit status 0" in err


def test_the_bus_shows_who_asked(bus: PrivateBus, start: Callable[..., Running]) -> None:
    job = start(*HOLD)
    line(job)
    assert bus.get(ROOT, MANAGER, "Jobs") == 1
    finish(job)
