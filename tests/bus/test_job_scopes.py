"""Scopes: what PID 1 is asked for, and what happens when it refuses, hangs, reloads, or the job ends in parts."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.tree import make_tree
from harness import JOB, MANAGER, OTHER, ROOT, USER, Daemon, PrivateBus, Service, small_machine

from torchtuned import cpuset
from torchtuned.bus.wire import MAX_ARRAY

Start = Callable[..., Daemon]
Fake = Callable[..., Service]
START = "StartTransientUnit"
INFINITY = 2**64 - 1


@pytest.mark.parametrize(("version", "key"), [("252", "PIDs"), ("257", "PIDFDs")])
def test_a_job_gets_a_scope_that_keeps_what_its_session_had(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path, version: str, key: str
) -> None:
    pid1 = services("systemd1", "--version", version)
    daemon("--sysroot", tree)
    with bus.user(USER) as job:
        path, grant = job.register({"gpus": 1, "command": ["python", "train.py"]})
        assert (grant["confinement"], grant["scope"]) == ("cpuset", "")
        grant = job.commit(path)
        number = path.rpartition("/")[2]
        assert (grant["confinement"], grant["scope"]) == ("cpuset", f"torchtuned-job-{number}.scope")
        assert grant["warnings"] == []
        made = pid1.get("scopes")[grant["scope"]]
        assert made.pop(key) == ([job.pid] if key == "PIDs" else [0])
        assert made == {
            "Description": f"torchtuned job {number}: python",
            "Slice": "user-1000.slice",
            "After": ["systemd-user-sessions.service"],
            "CollectMode": "inactive-or-failed",
            "TasksMax": INFINITY,
            "OOMPolicy": "continue",
            "SendSIGHUP": True,
            "AllowedCPUs": list(cpuset.to_bytes(range(4))),
        }
        assert bus.get(path, JOB, "Scope") == grant["scope"]
        assert pid1.calls("StartTransientUnit")[0][:2] == [grant["scope"], "fail"]


def test_memory_nodes_only_when_bound(bus: PrivateBus, services: Fake, daemon: Start, tree: Path) -> None:
    pid1 = services("systemd1")
    daemon("--sysroot", tree)
    with bus.user(USER) as job:
        _, grant = job.start({"gpus": ["0000:81:00.0"], "memory": "bind"})
        assert pid1.get("scopes")[grant["scope"]]["AllowedMemoryNodes"] == [2]


def may_raise_limits() -> bool:
    """Whether this process has CAP_SYS_RESOURCE, which some containers leave out."""
    capabilities = re.search(r"^CapEff:\t(.*)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return capabilities is not None and bool(int(capabilities[1], 16) >> 24 & 1)


@pytest.mark.parametrize("where", ["session", "service"])
def test_hard_limits_are_raised_where_the_job_came_from_a_session(
    bus: PrivateBus, services: Fake, daemon: Start, where: str
) -> None:
    """A service has limits of its own, which becoming a job must not undo."""
    place = {"session": "/user.slice/user-1000.slice/session-3.scope", "service": "/system.slice/a.service"}[where]
    tree = small_machine(bus.folder, session=place)
    limits = {"memlock": "infinity", "nofile": "5000", "core": "hard"}
    text = "".join(f"limit_{name} = {word}\n" for name, word in limits.items())
    make_tree(tree, {"etc/torchtuned/torchtuned.conf": f"[policy]\nprofile = observe\n[jobs]\n{text}"})
    services("systemd1")
    daemon("--sysroot", tree)
    kinds = (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)
    with bus.user() as job:
        for kind in kinds:
            resource.prlimit(job.pid, kind, (1024, 4096))
        _, grant = job.start()
        raised = where == "session" and may_raise_limits()
        hard = (resource.RLIM_INFINITY, 5000, 4096) if raised else (4096, 4096, 4096)
        assert bool(grant["scope"]) == (where == "session")
        assert [resource.prlimit(job.pid, kind) for kind in kinds] == [(1024, most) for most in hard]


def test_an_old_kernel_gets_no_cpuset(bus: PrivateBus, services: Fake, daemon: Start, tree: Path) -> None:
    pid1 = services("systemd1")
    (tree / "proc/sys/kernel/osrelease").write_text("6.1.0-37-amd64\n")
    daemon("--sysroot", tree)
    with bus.user(USER) as job:
        path, grant = job.register()
        assert grant["confinement"] == "affinity"
        grant = job.commit(path)
        assert (grant["confinement"], grant["warnings"]) == ("affinity", [])
        assert "AllowedCPUs" not in pid1.get("scopes")[grant["scope"]]
        job.release(path)
        path, grant = job.register({"confine": "cpuset"})
        assert grant["confinement"] == "affinity"
        assert "kernels before 6.2" in grant["warnings"][0]


def test_what_is_not_a_session_stays_where_it_is(bus: PrivateBus, services: Fake, daemon: Start) -> None:
    pid1 = services("systemd1")
    daemon("--sysroot", small_machine(bus.folder, session="/system.slice/slurmstepd.scope/job_1/step_0/user/task_0"))
    with bus.user(USER) as job:
        _, grant = job.start({"gpus": [], "confine": "cpuset"})
        assert (grant["confinement"], grant["scope"]) == ("affinity", "")
        assert grant["warnings"] == ["no cpuset: it is in task_0, which is not a login session"]
    assert pid1.calls("StartTransientUnit") == []


@pytest.mark.parametrize("how", ["hang", "fail", "result"])
def test_a_job_runs_by_affinity_when_pid1_does_not_make_its_scope(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path, how: str
) -> None:
    pid1 = services("systemd1")
    daemon("--sysroot", tree)
    bad = {"hang": [START], "fail": {START: "org.freedesktop.systemd1.UnitExists"}, "result": "failed"}
    pid1.set(how, bad[how])
    with bus.user(USER) as job:
        path, grant = job.register()
        assert grant["confinement"] == "cpuset"
        grant = job.commit(path)
        assert (grant["state"], grant["confinement"], grant["scope"]) == ("running", "affinity", "")
        assert grant["warnings"][0].startswith("no scope of its own: ")
    with bus.user(USER) as other:
        other.register()  # the daemon answers others meanwhile and afterwards


@pytest.mark.parametrize("sign", ["\0", "\ud800", "\n", "\x1b[31m", "\u202e", "\u2028"])
def test_a_command_that_the_bus_would_not_carry_is_refused(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path, sign: str
) -> None:
    """It would be the description of the scope, and dbus-daemon hangs up on whoever sends it a NUL."""
    services("systemd1")
    one = daemon("--sysroot", tree)
    with bus.user(USER) as job, bus.user(OTHER) as other:
        with pytest.raises(RuntimeError, match=r"InvalidRequest: request\.command"):
            job.register({"command": [f"py{sign}thon"]})
        assert other.start({"cpus": "1"})[1]["state"] == "running"
        assert one.process.poll() is None


def test_a_scope_that_hangs_holds_up_nobody_else(bus: PrivateBus, services: Fake, daemon: Start, tree: Path) -> None:
    pid1 = services("systemd1")
    daemon("--sysroot", tree)
    pid1.set("hang", ["StartTransientUnit"])
    with bus.user(USER) as slow, bus.user(USER) as quick:
        path, _ = slow.register({"cpus": "1"})
        assert slow.process.stdin is not None
        slow.process.stdin.write(f'["call", "/org/torchtuned1", "org.torchtuned1.Manager", "Commit", "o", "{path}"]\n')
        slow.process.stdin.flush()
        for _ in range(20):
            quick.release(quick.register({"cpus": "1"})[0])
        assert bus.get(path, JOB, "State") == "granted"  # all that while it was not answered


def test_a_job_ends_with_its_scope(bus: PrivateBus, services: Fake, daemon: Start, tree: Path) -> None:
    pid1 = services("systemd1")
    one = daemon("--sysroot", tree)
    pid1.set("linger", 1)  # something else stays in the scope
    job = bus.user(USER)
    path, grant = job.start()
    one.wait_for("1 job")
    job.kill()
    while not pid1.calls("GetUnit"):
        pass
    assert bus.get(path, JOB, "State") == "running"
    pid1.call_remove(grant["scope"])
    one.wait_for("0 jobs")


def test_a_reload_of_pid1_ends_no_job(bus: PrivateBus, services: Fake, daemon: Start, tree: Path) -> None:
    pid1 = services("systemd1")
    daemon("--sysroot", tree)
    with bus.user(USER) as job:
        path, grant = job.start()
        pid1.set("reload", 1)
        while not pid1.calls("GetUnit"):
            pass
        assert bus.get(path, JOB, "Scope") == grant["scope"]


def test_a_process_that_left_its_scope_is_a_job_without_cpuset(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path
) -> None:
    pid1 = services("systemd1")
    daemon("--sysroot", tree)
    with bus.user(USER) as job, bus.user(USER) as watcher:
        watcher.do("call", ROOT, "org.freedesktop.DBus.Properties", "GetAll", "s", MANAGER)
        path, grant = job.start()
        while "Scope" not in watcher.do("wait_signal", "PropertiesChanged")[1]:
            pass
        pid1.call_remove(grant["scope"])
        while "Scope" not in watcher.do("wait_signal", "PropertiesChanged")[1]:
            pass
        assert bus.get(path, JOB, "Scope") == ""
        assert bus.get(path, JOB, "Confinement") == "none"
        assert "left" in bus.get(path, JOB, "Warnings")[0]


def test_signals_that_are_not_from_pid1_count_for_nothing(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path
) -> None:
    pid1 = services("systemd1")
    daemon("--sysroot", tree)
    with bus.user(USER) as job, bus.user(USER) as liar:
        path, grant = job.start()
        liar.do("lie", "UnitRemoved", "so", [grant["scope"], "/x"])
        liar.do("call", "/org/torchtuned1", "org.torchtuned1.Manager", "Verify")  # after the lie
        assert pid1.calls("GetUnit") == []
        assert bus.get(path, JOB, "Scope") == grant["scope"]


def test_a_released_job_that_goes_on_is_let_out(bus: PrivateBus, services: Fake, daemon: Start, tree: Path) -> None:
    pid1 = services("systemd1")
    daemon("--sysroot", tree)
    with bus.user(USER) as job:
        path, grant = job.start({"gpus": 1})
        job.release(path)
        assert pid1.get("scopes")[grant["scope"]]["AllowedCPUs"] == list(cpuset.to_bytes(range(8)))


def test_a_new_daemon_knows_scopes_whose_first_process_has_ended(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path
) -> None:
    pid1 = services("systemd1")
    first = daemon("--sysroot", tree)
    pid1.set("linger", 1)
    job = bus.user(USER)
    path, grant = job.start()
    first.stop(signal.SIGKILL)
    job.kill()
    second = daemon("--sysroot", tree)
    assert bus.get(path, JOB, "State") == "running"
    pid1.call_remove(grant["scope"])
    second.wait_for("0 jobs")


def test_numbers_of_scopes_that_are_about_are_not_given_again(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path
) -> None:
    pid1 = services("systemd1")
    first = daemon("--sysroot", tree)
    with bus.user(USER) as job:
        job.start()
        first.stop(signal.SIGKILL)
        os.unlink(first.run_dir / "jobs.json")
        second = daemon("--sysroot", tree)
        assert "belongs to no job that is known" in second.log.read_text()
        with bus.user(USER) as new:
            assert new.start()[1]["scope"] == "torchtuned-job-2.scope"
    assert pid1.calls("Subscribe") == [[]] * 2


PLACES = [
    (USER, "user.slice/user-1000.slice/torchtuned-job-1.scope", True),
    (USER, "user.slice/user-1000.slice/torchtuned-job-1.scope/inner", True),
    (0, "user.slice/user-1000.slice/torchtuned-job-1.scope", True),  # by sudo
    (OTHER, "user.slice/user-1000.slice/torchtuned-job-1.scope", False),
    (OTHER, "user.slice/user-2.slice/user@2.service/app.slice/torchtuned-job-1.scope", False),
    (USER, "user.slice/user-1000.slice/user@1000.service/torchtuned-job-1.scope", False),
    (USER, "user.slice/user-1000.slice/torchtuned-job-11.scope", False),
    (OTHER, "user.slice/user-2.slice/session-1.scope/user.slice/torchtuned-job-1.scope", False),
]


def test_a_cgroup_that_a_user_named_opens_no_job(bus: PrivateBus, services: Fake, daemon: Start, tree: Path) -> None:
    services("systemd1")
    daemon("--sysroot", tree)
    with bus.user(USER) as job:
        _, grant = job.start({"gpus": 2})
        assert grant["scope"] == "torchtuned-job-1.scope"
        for uid, place, inside in PLACES:
            with bus.user(uid) as other:
                status = "Name:\tx\nCpus_allowed_list:\t0-7\nMems_allowed_list:\t0-1\n"
                make_tree(tree, {f"proc/{other.pid}/status": status, f"proc/{other.pid}/cgroup": f"0::/{place}\n"})
                if inside:
                    assert other.register({"gpus": 2})[1]["gpus"] == grant["gpus"]
                else:
                    with pytest.raises(RuntimeError, match=r"Error\.Busy"):
                        other.register({"gpus": 1})


@pytest.mark.parametrize(
    ("knob", "value"),
    [("fail", {"ListUnitsByPatterns": "org.freedesktop.DBus.Error.Failed"}), ("wordy", MAX_ARRAY // 8)],
    ids=["no answer", "a long one"],
)
def test_jobs_whose_scopes_are_hard_to_learn_are_kept(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path, knob: str, value: object
) -> None:
    """PID 1 does not tell, or in a list longer than the arrays of a call may be: users choose the first word of a
    description. Such a list was taken for empty, and everybody's scopes without a first process for ended.
    """
    pid1 = services("systemd1")
    first = daemon("--sysroot", tree)
    pid1.set("linger", 1)
    job = bus.user(USER)
    path, grant = job.start({"gpus": 2})
    first.stop(signal.SIGKILL)
    job.kill()
    pid1.set(knob, value)
    second = daemon("--sysroot", tree)
    assert bus.get(path, JOB, "State") == "running"
    pid1.call_remove(grant["scope"])
    second.wait_for("0 jobs")


def test_a_scope_that_ends_while_the_daemon_asks_is_noticed(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path
) -> None:
    pid1 = services("systemd1")
    first = daemon("--sysroot", tree)
    pid1.set("linger", 1)
    job = bus.user(USER)
    job.start()
    first.stop(signal.SIGKILL)
    job.kill()
    pid1.set("vanish", 1)  # right after the list
    second = daemon("--sysroot", tree, ready=False)
    second.wait_for("0 jobs")
