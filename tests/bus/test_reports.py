"""Reports of jobs against the real daemon: three ways to be killed, told apart, and what was used and waited for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.schema import fits, schema
from fakes.tree import make_tree
from harness import MANAGER, OTHER, REPOSITORY, ROOT, USER, Daemon, PrivateBus, Puppet, Service

from torchtuned import processes

Start = Callable[..., Daemon]
Fake = Callable[..., Service]
SLICE = "/user.slice/user-1000.slice"
SCOPE = f"{SLICE}/torchtuned-job-1.scope"
PID1 = {"_PID": "1", "UNIT": "torchtuned-job-1.scope"}
OOM_LINE = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,oom_memcg={limited},"
    "task_memcg={of},task=python,pid={pid},uid=1000"
)


@pytest.fixture
def ready(services: Fake, daemon: Start, tree: Path) -> Daemon:
    """A daemon on a machine where the first job's scope exists, with figures in it."""
    services("systemd1")
    cgroup(tree)
    write_journal(tree)
    return daemon("--sysroot", tree)


def cgroup(tree: Path, *, oom_kill: int = 0, usage: float = 6.0) -> None:
    base = f"sys/fs/cgroup{SCOPE}"
    make_tree(
        tree,
        {
            "proc/sys/kernel/random/boot_id": "b1\n",
            f"sys/fs/cgroup{SLICE}/memory.events": f"oom 3\noom_kill {3 + oom_kill}\n",
            f"{base}/cpu.stat": f"usage_usec {usage * 1e6:.0f}\nuser_usec 5\nsystem_usec 1\nnr_periods 90\n"
            "nr_throttled 4\nthrottled_usec 1500000\n",
            f"{base}/memory.current": "1073741824\n",
            f"{base}/memory.peak": "3221225472\n",
            f"{base}/memory.events": f"low 0\nhigh 0\nmax 0\noom 0\noom_kill {oom_kill}\n",
            f"{base}/io.stat": "8:0 rbytes=1048576 wbytes=512 rios=1\n259:0 rbytes=1048576 wbytes=512\n",
            f"{base}/cpu.pressure": "some avg10=12.00 avg60=1.00 avg300=0.00 total=2500000\n",
            f"{base}/io.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=40\nfull avg10=0.00 total=30\n",
        },
    )


def write_journal(tree: Path, *entries: dict[str, str]) -> None:
    """What `journalctl -o json` would print."""
    now = str(time.time_ns() // 1000)
    lines = [json.dumps({"__REALTIME_TIMESTAMP": now, **entry}) for entry in entries]
    make_tree(tree, {"var/log/journal.json": "\n".join(lines)})


def torchtuned(bus: PrivateBus, *words: str, uid: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchtuned", *words]
    if uid:
        command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *command]
    env = {**bus.environment, "COLUMNS": "80", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=60, cwd=REPOSITORY, check=False)


def report(bus: PrivateBus, job: str = "1") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bus.call(ROOT, MANAGER, "Report", "s", job)[0])
    return found


def final(bus: PrivateBus, job: str = "1") -> dict[str, Any]:
    """The report when the daemon is through with the job."""
    for _ in range(400):
        found = report(bus, job)
        if found["end"]:
            return found
        time.sleep(0.05)
    pytest.fail(f"no end: {found}")


def test_what_a_job_feels_is_told_at_the_job(bus: PrivateBus, ready: Daemon, tree: Path) -> None:
    stalled = "some avg10=9 avg60=50.00 avg300=9 total=9\nfull avg10=9 avg60=40.00 avg300=9 total=9\n"
    make_tree(
        tree,
        {
            "proc/pressure/memory": stalled,
            "proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 90 kB\n",
            "proc/sys/kernel/numa_balancing": "0\n",
        },
    )
    line = "TT027 warning: tasks wait for memory"
    with bus.user(USER) as job:
        path, _ = job.start()
        found = report(bus)["findings"]
        assert [(one["code"], one["about"]) for one in found] == [("TT027", "memory")]
        assert "40.00 % of the last minute" in found[0]["evidence"]
        assert bus.get(path, "org.torchtuned1.Job", "Findings") == [line]
        [shown] = json.loads(torchtuned(bus, "jobs", "--threads", "--json").stdout)
        assert fits(shown, schema("jobs"))
        assert shown["findings"] == [line]
        assert line in " ".join(torchtuned(bus, "jobs").stdout.split())
        page = " ".join(torchtuned(bus, "report", "1", uid=USER).stdout.split())
        assert "TT027 warning, tasks wait for memory (seen" in page
        assert json.loads(torchtuned(bus, "report", "1", "--json").stdout)["findings"][0]["code"] == "TT027"
        whole = json.loads(torchtuned(bus, "top", "--json").stdout)
        assert fits(whole, schema("top"))
        [row] = whole["jobs"]
        assert row["findings"] == 1
        assert fits(report(bus), schema("report"))
    ended = final(bus)
    assert fits(ended, schema("report"))
    assert [one["code"] for one in ended["findings"]] == ["TT027"]


def kill_minus_nine(bus: PrivateBus, job: Puppet, *, told: bool) -> None:
    """Kill it, and say so as torchtuned-run --report would."""
    start = processes.start_time(job.pid)
    job.kill()
    if told:
        bus.call(ROOT, MANAGER, "Ended", "uti", job.pid, start, -signal.SIGKILL)


# T30: three causes of one exit status


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("told", [True, False])
def test_killed_by_the_kernel_for_want_of_memory(bus: PrivateBus, tree: Path, told: bool) -> None:  # noqa: FBT001
    with bus.user(USER) as job:
        job.start({"command": ["python", "train.py"]})
        cgroup(tree, oom_kill=1)
        line = OOM_LINE.format(limited=SLICE, of=SCOPE, pid=job.pid)
        write_journal(tree, {"_TRANSPORT": "kernel", "MESSAGE": line})
        kill_minus_nine(bus, job, told=told)
    end = final(bus)["end"]
    assert end["cause"] == "oom"
    assert end["sentence"] == (
        f"The kernel's out-of-memory killer killed it (python, process {job.pid}): "
        f"the memory limit of {SLICE} was reached."
    )


@pytest.mark.usefixtures("ready")
def test_the_count_alone_proves_it(bus: PrivateBus, tree: Path) -> None:
    with bus.user(USER) as job:
        job.start()
        cgroup(tree, oom_kill=1)
    end = final(bus)["end"]
    assert end["sentence"] == "The kernel's out-of-memory killer killed one of its processes."
    assert end["evidence"] == ["memory.events of its cgroup: oom_kill 1"]


@pytest.mark.usefixtures("ready")
def test_a_cgroup_that_went_with_its_job_was_read_before(bus: PrivateBus, tree: Path) -> None:
    """memory.events is watched: what it said is known though the folder is gone when the job has ended."""
    with bus.user(USER) as job:
        job.start()
        events = tree / f"sys/fs/cgroup{SCOPE}/memory.events"
        events.write_text("oom_kill 2\n")
        while bus.call(ROOT, MANAGER, "Reports") and not known_kills(bus):
            time.sleep(0.05)
        for path in events.parent.iterdir():
            path.unlink()
    found = final(bus)
    assert found["end"]["sentence"] == "The kernel's out-of-memory killer killed 2 of its processes."
    assert not found["measured"]["complete"]


def known_kills(bus: PrivateBus) -> int:
    """What the daemon has read already; Reports reads nothing anew."""
    [one] = json.loads(bus.call(ROOT, MANAGER, "Reports")[0])
    return int(one["measured"].get("memory", {}).get("events", {}).get("oom_kill", 0))


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (
            {
                "_SYSTEMD_UNIT": "systemd-oomd.service",
                "MESSAGE": f"Killed {SCOPE} due to memory pressure for {SLICE} being 60.0% > 50.0% for > 20s",
            },
            f"memory pressure for {SLICE} being 60.0% > 50.0% for > 20s",
        ),
        ({**PID1, "MESSAGE_ID": "d989611b15e44c9dbf31e3c81256e4ed"}, "it was short of memory"),
    ],
    ids=["oomd", "pid1"],
)
def test_killed_by_systemd_oomd(bus: PrivateBus, tree: Path, entry: dict[str, str], why: str) -> None:
    with bus.user(USER) as job:
        job.start()
        write_journal(tree, entry)
        kill_minus_nine(bus, job, told=True)
    end = final(bus)["end"]
    assert (end["cause"], end["sentence"]) == ("oomd", f"systemd-oomd killed it: {why}.")


@pytest.mark.usefixtures("ready")
def test_killed_by_somebody(bus: PrivateBus) -> None:
    with bus.user(USER) as job:
        job.start()
        kill_minus_nine(bus, job, told=True)
    end = final(bus)["end"]
    assert (end["cause"], end["status"]) == ("killed", -9)
    assert end["sentence"] == (
        "Somebody killed it with SIGKILL (kill -9); neither the kernel's out-of-memory killer nor systemd-oomd did."
    )


@pytest.mark.usefixtures("ready")
def test_unknown_is_said(bus: PrivateBus) -> None:
    with bus.user(USER) as job:
        job.start()
    end = final(bus)["end"]
    assert (end["cause"], end["status"]) == ("unknown", None)
    assert end["sentence"].startswith("How it ended is unknown: ")


@pytest.mark.usefixtures("ready")
def test_a_kill_of_the_neighbours_is_only_a_perhaps(bus: PrivateBus, tree: Path) -> None:
    with bus.user(USER) as job:
        job.start()
        (tree / f"sys/fs/cgroup{SLICE}/memory.events").write_text("oom_kill 4\n")
        write_journal(tree, {"_TRANSPORT": "kernel", "MESSAGE": OOM_LINE.format(limited=SLICE, of=SLICE, pid=1)})
    end = final(bus)["end"]
    assert end["cause"] == "unknown"
    assert f"perhaps the kernel's out-of-memory killer, which killed 1 in {SLICE}" in end["sentence"]


@pytest.mark.usefixtures("ready")
def test_a_forged_entry_is_nobodys_word(bus: PrivateBus, tree: Path) -> None:
    """Anybody may write MESSAGE_ID and UNIT; who wrote is what journald says."""
    forged = {**PID1, "_PID": "4711", "MESSAGE_ID": "d989611b15e44c9dbf31e3c81256e4ed"}
    with bus.user(USER) as job:
        job.start()
        write_journal(tree, forged, {"_TRANSPORT": "stdout", "MESSAGE": f"Killed {SCOPE} due to spite"})
    assert final(bus)["end"]["cause"] == "unknown"


# what was used


@pytest.mark.usefixtures("ready")
def test_what_it_got_used_and_waited_for(bus: PrivateBus, tree: Path) -> None:
    with bus.user(USER) as job:
        _, grant = job.start({"gpus": 1, "command": ["/usr/bin/python", "train.py"]})
        running = report(bus)
        assert (running["state"], running["end"], running["ended"]) == ("running", None, None)
        cgroup(tree, usage=8.0)
    found = final(bus)
    assert found["granted"]["cpus"] == grant["cpus"] == "0-3"
    assert (found["granted"]["gpus"], found["granted"]["scope"]) == (["0000:01:00.0"], "torchtuned-job-1.scope")
    measured = found["measured"]
    assert (measured["of"], measured["complete"]) == ("cgroup", True)
    assert measured["cpu"] == {"usage_s": 8.0, "user_s": 5e-6, "system_s": 1e-6, "throttled_s": 1.5, "periods": 90,
                               "throttled": 4}  # fmt: skip
    assert measured["memory"]["peak"] == 3 << 30
    assert measured["io"] == {"read_bytes": 2 << 20, "write_bytes": 1024}
    assert measured["pressure"]["cpu"]["some_s"] == 2.5
    text = torchtuned(bus, "report", "1", uid=USER).stdout
    assert text.startswith("Job 1, nobody: python train.py\n")
    assert "held up by a quota 4 times" in text
    assert "3 GiB at most" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.usefixtures("ready")
def test_what_pid_1_read_last_is_in(bus: PrivateBus, tree: Path) -> None:
    with bus.user(USER) as job:
        job.start()
        last = {**PID1, "MESSAGE_ID": "ae8f7b866b0347b9af31fe1c80b127c0", "CPU_USAGE_NSEC": "9500000000"}
        write_journal(tree, last | {"MEMORY_PEAK": str(5 << 30)})
    measured = final(bus)["measured"]
    assert (measured["cpu"]["usage_s"], measured["memory"]["peak"]) == (9.5, 5 << 30)


def test_without_a_cgroup_the_processes_are_looked_at(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    write_journal(tree)
    daemon("--sysroot", tree)  # no PID 1, so no scope
    with bus.user(USER) as job:
        job.start()
        measured = report(bus)["measured"]
        assert measured["of"] == "processes"
        assert measured["memory"]["largest_peak"] > 1 << 20
        assert "pressure" not in measured
    final(bus)
    text = " ".join(torchtuned(bus, "report", "1").stdout.split())
    assert "No cgroup of its own: these are only figures of its processes" in text


# who may see and say what


@pytest.mark.usefixtures("ready")
def test_users_see_their_own(bus: PrivateBus) -> None:
    with bus.user(USER) as job, bus.user(OTHER) as other:
        path, _ = job.start({"cpus": "1"})
        for number in ("1", "2"):
            with pytest.raises(RuntimeError, match=f"NoSuchJob: there is no report of job {number}"):
                other.do("call", ROOT, MANAGER, "Report", "s", number)
        assert other.do("call", ROOT, MANAGER, "Reports") == ["[]"]
        start = processes.start_time(job.pid)
        with pytest.raises(RuntimeError, match="NoSuchJob"):
            other.do("call", ROOT, MANAGER, "Ended", "uti", job.pid, start, 0)
        with pytest.raises(RuntimeError, match="InvalidRequest"):
            job.do("call", ROOT, MANAGER, "Ended", "uti", job.pid, start, 256)
        [mine] = json.loads(job.do("call", ROOT, MANAGER, "Reports")[0])
        assert path.endswith(f"/{mine['job']}")
    final(bus)
    assert torchtuned(bus, "report", "1", uid=USER).returncode == 0
    stranger = torchtuned(bus, "report", "1", uid=OTHER)
    assert (stranger.returncode, stranger.stdout) == (1, "")
    assert torchtuned(bus, "report", uid=OTHER).stdout.startswith("No reports.")


def test_reports_are_root_s_files(bus: PrivateBus, ready: Daemon) -> None:
    with bus.user(USER) as job:
        job.start()
    final(bus)
    [path] = (ready.state_dir / "reports").iterdir()
    assert path.stat().st_mode & 0o7777 == 0o600
    assert path.parent.stat().st_mode & 0o7777 == 0o700
    assert json.loads(path.read_text())["job"] == "1"


@pytest.mark.usefixtures("ready")
def test_a_place_given_back_is_no_end(bus: PrivateBus) -> None:
    with bus.user(USER) as job:
        path, _ = job.start()
        job.release(path)
        assert final(bus)["end"]["cause"] == "released"


# over the life of the daemon


def test_a_restarted_daemon_goes_on_with_the_account(bus: PrivateBus, ready: Daemon, daemon: Start, tree: Path) -> None:
    with bus.user(USER) as job:
        job.start()
        started = report(bus)["started"]
        while not list((ready.state_dir / "reports").glob("*.json")):
            time.sleep(0.05)
        ready.stop(signal.SIGKILL)
        (tree / f"sys/fs/cgroup{SLICE}/memory.events").write_text("oom_kill 5\n")
        daemon("--sysroot", tree)
        assert report(bus)["started"] == started
    found = final(bus)
    assert f"killed 2 in {SLICE}" in found["end"]["sentence"]  # counted from the job's start, not the daemon's
    assert found["started"] == started


@pytest.mark.parametrize("boot", ["b1", "b2"])
def test_a_job_that_ended_while_no_daemon_ran(
    bus: PrivateBus, ready: Daemon, daemon: Start, tree: Path, boot: str
) -> None:
    with bus.user(USER) as job:
        job.start()
        ready.stop()
    make_tree(tree, {"proc/sys/kernel/random/boot_id": f"{boot}\n"})
    daemon("--sysroot", tree)
    end = final(bus)["end"]
    if boot == "b1":
        assert "It ended while torchtunedd did not run, and how is unknown" in end["sentence"]
    else:
        assert end["sentence"] == "The machine went down or was restarted while it ran."


def left_unfinished(daemon: Daemon, *jobs: Puppet) -> list[Path]:
    """The reports of jobs that run while their daemon is killed, in the order of the jobs."""
    for job in jobs:
        job.start()
    folder = daemon.state_dir / "reports"
    while len(files := sorted(folder.glob("*.json"))) < len(jobs):
        time.sleep(0.05)
    daemon.stop(signal.SIGKILL)
    return files


def test_a_report_that_was_torn_or_edited_stops_nobody(
    bus: PrivateBus, ready: Daemon, daemon: Start, tree: Path
) -> None:
    """Neither the daemon's start, nor the end of another job's account, nor the list of all."""
    with bus.user(USER) as goes, bus.user(USER) as stays:
        files = left_unfinished(ready, goes, stays)
        goes.kill()
        broken: dict[str, object] = {"pid": [], "started": "x", "measured": [], "gpus": {"0": 5}, "findings": [1]}
        broken |= {"granted": 0, "end": [1]}
        for number, (name, value) in enumerate((*broken.items(), *broken.items())):
            whole = json.loads(files[number % 2].read_text())
            (files[0].parent / f"{number:016d}-{number}-0.json").write_text(json.dumps(whole | {name: value}))
        again = daemon("--sysroot", tree)
        assert final(bus, "1")["end"]["cause"] == "unknown"
        assert "cannot be gone on with: TypeError" in again.log.read_text()
        shown = torchtuned(bus, "report", "--json")
        assert (shown.returncode, len(json.loads(shown.stdout))) == (0, 16)
        listed = torchtuned(bus, "report")
        assert (listed.returncode, listed.stderr, listed.stdout.count("torn")) == (0, "", 2)
        one = torchtuned(bus, "report", "5")
        assert (one.returncode, one.stderr.count("\n")) == (1, 1)
        assert one.stderr.startswith("torchtuned: report 5: its file was torn or edited (--json shows")


def test_a_torn_report_of_a_job_that_runs_is_replaced_by_a_new_one(
    bus: PrivateBus, ready: Daemon, daemon: Start, tree: Path
) -> None:
    """Another name beside it would be found second. What passes and breaks later keeps nobody from the values."""
    with bus.user(USER) as one, bus.user(USER) as other:
        first, second = left_unfinished(ready, one, other)
        first.write_text(first.read_text()[:200])
        whole = json.loads(second.read_text())
        second.write_text(json.dumps(whole | {"oom_kills_around": {"/a\0b": 0}, "gpus": {"0": {"power_max": 5}}}))
        again = daemon("--sysroot", tree)
        again.wait_for("STATUS=ready")
        other.kill()
        one.kill()
        assert final(bus, "1")["end"]
        assert sorted(first.parent.glob("*-1-*.json")) == [first]
        assert torchtuned(bus, "report").returncode == 0
        again.stop()
        assert (tree / "sys/devices/system/cpu/cpufreq/policy0/scaling_governor").read_text().strip() == "powersave"


# the wrapper tells


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["sh", "-c", "exit 3"], "It ended by itself with exit status 3."),
        (["sh", "-c", "kill -9 $$"], "Somebody killed it with SIGKILL (kill -9); "),
        (["sh", "-c", "kill -11 $$"], "It crashed with SIGSEGV."),
    ],
    ids=["exit", "kill", "crash"],
)
def test_the_wrapper_tells_how_its_command_ended(
    bus: PrivateBus, daemon: Start, command: list[str], sentence: str
) -> None:
    daemon()
    words = [sys.executable, "-m", "torchtuned.run", "--report", "--confine", "none", *command]
    done = subprocess.run(words, env=bus.environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert "torchtuned-run: sh " in done.stderr
    assert final(bus)["end"]["sentence"].startswith(sentence)
    assert os.path.basename(final(bus)["command"][0]) == "sh"
