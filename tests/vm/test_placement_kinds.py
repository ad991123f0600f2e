"""Jobs from every kind of place on a machine with systemd, and what becomes of those beside them.

Read from the kernel: masks, cgroup files and limits, not what torchtuned says of itself.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

import pytest
from inside import (
    JOB,
    Job,
    changed,
    cpus_of,
    cpus_of_process,
    listed,
    masks,
    start,
    start_service,
    stop,
    wait_for,
)
from machine import Machine

CONF = "/etc/torchtuned/conf.d/50-limits.conf"


def cpusets(machine: Machine) -> dict[str, str]:
    """What the cpuset files of every cgroup but jobs' own say. Above a job they come into being, empty (as good as
    none) and with a partition of "member" (no partition).
    """
    names = "-name cpuset.cpus -o -name cpuset.mems -o -name cpuset.cpus.partition"
    found = f"find . {names} | grep -v torchtuned-job- | xargs grep -H . | grep -v ':member$'"
    lines = machine.check(f"cd /sys/fs/cgroup; {found} || true")
    return dict(line.split(":", 1) for line in lines.splitlines())


def background(machine: Machine, session: str, command: str) -> None:
    """Run something in a login session that goes on."""
    machine.check(f"ssh {session}@localhost {shlex.quote(command)} >/dev/null 2>&1 <>/dev/null &")


@pytest.fixture
def neighbours(ready: Machine) -> Iterator[Machine]:
    """Those who chose CPUs of their own: a service, a process within one, and processes of both users' sessions."""
    # The cpuset first: on Debian 12 it wipes all masks when it comes, as nothing of torchtuned does.
    ready.check("systemd-run -q --unit fenced -p AllowedCPUs=0-6 taskset -c 2-5 sleep 10004; sleep 1")
    ready.check("systemd-run -q --unit bystander -p CPUAffinity='3 4' sleep 10001")
    ready.check("systemd-run -q --unit inner sh -c 'taskset -c 6 sleep 10002 & exec sleep 10003'")
    background(ready, "bob", "taskset -c 5 sleep 10005")
    wait_for(ready, "test $(pgrep -xc sleep) -ge 5")
    yield ready
    ready.check("systemctl stop bystander inner fenced; pkill -x sleep")


def test_nobody_beside_a_job_is_touched(neighbours: Machine, suite: str) -> None:
    machine = neighbours
    before, files = masks(machine), cpusets(machine)
    assert "0-6" in files.values(), files
    alice = start(machine, "a", f"taskset -c 1 sleep 10006 & exec torchtuned-run --cpus 2 {JOB}", user="alice")
    bob = start(machine, "b", f"exec torchtuned-run --cpus 3 {JOB}", user="bob")
    assert not cpus_of(machine, alice) & cpus_of(machine, bob)
    during = masks(machine)
    assert changed(before, during) == {}
    sleeps = sorted(mask for mask, name in during.values() if name == "sleep")
    assert sleeps == ["0-7", "1", "2-5", "3-4", "5", "6"]
    assert cpusets(machine) == files
    stop(machine, alice, bob)
    assert changed(during, masks(machine)) == {}
    assert cpusets(machine) == files


SAME = ("TasksMax", "OOMPolicy", "SendSIGHUP", "SendSIGKILL", "KillMode", "KillSignal", "MemoryMax", "ManagedOOMSwap")


def test_a_job_has_what_its_session_has(ready: Machine) -> None:
    look = (
        "place=$(cut -d: -f3 /proc/self/cgroup); basename $place; cat /proc/self/limits /proc/self/oom_score_adj;"
        " cd /sys/fs/cgroup$place; grep . pids.max memory.max memory.high memory.oom.group cpu.max cpu.weight;"
        f" systemctl show {' '.join(f'-p {name}' for name in SAME)} $(basename $place)"
    )
    both = ready.login(
        "alice", f"ulimit -Sn hard; {look}; echo /; exec torchtuned-run --quiet --cpus 1 bash -c {shlex.quote(look)}"
    )
    session, job = (part.split("\n", 1) for part in both.split("/\n"))
    assert session[0].startswith("session-")
    assert job[0].startswith("torchtuned-job-")
    assert len(session[1].splitlines()) > 25, session
    assert job[1] == session[1]


def test_a_terminal_that_hangs_up_ends_the_job_as_it_ends_others(ready: Machine) -> None:
    ready.check(f"(ssh -tt alice@localhost torchtuned-run --cpus 1 {JOB} >/root/t.out 2>&1 & echo $! >/root/t.pid)")
    wait_for(ready, "grep -q '}' /root/t.out")
    (row,) = listed(ready)
    ready.check("kill -KILL $(cat /root/t.pid)")
    wait_for(ready, f"! test -e /proc/{row['pid']}", 30)


def placed(machine: Machine, job: Job) -> tuple[str, str]:
    """Where a job is and how it is kept."""
    (row,) = listed(machine)
    assert row["pid"] == job.pid
    return job.cgroup, str(row["confinement"])


def test_a_scope_with_a_limit_of_its_own_keeps_its_job(ready: Machine) -> None:
    job = start(
        ready, "a", f"systemd-run -q --user --scope -p MemoryMax=300M torchtuned-run --cpus 2 {JOB}", user="alice"
    )
    assert placed(ready, job)[1] == "affinity"
    assert job.cgroup.startswith("/user.slice/user-1000.slice/user@1000.service/")
    assert job.scope.endswith(".scope")
    assert len(cpus_of(ready, job)) == 2
    assert ready.check(f"cat /sys/fs/cgroup{job.cgroup}/memory.max").strip() == str(300 << 20)
    stop(ready, job)


def test_a_terminal_of_a_desktop_gives_its_job_a_scope(ready: Machine, suite: str) -> None:
    """As gnome-terminal does it: a scope of the user's manager for each window, with a shell in it."""
    name = "app-org.gnome.Terminal-vte.scope"
    shell = f"systemd-run -q --user --scope --slice=app.slice --unit={name} bash -c"
    job = start(ready, "a", f"{shell} {shlex.quote(f'torchtuned-run --cpus 2 {JOB}; true')}", user="alice")
    assert placed(ready, job)[1] == ("cpuset" if suite == "trixie" else "affinity")
    assert job.cgroup == f"/user.slice/user-1000.slice/{job.scope}"
    assert len(cpus_of(ready, job)) == 2
    stop(ready, job)


def test_what_cron_starts_stays_in_crons_service(ready: Machine) -> None:
    """cron's children are the user's, in cron's own cgroup: pam_systemd is not in its stack on Debian."""
    row = start_service(
        ready, "cron", "setpriv --reuid=1000 --regid=1000 --init-groups", f"torchtuned-run --cpus 2 {JOB}"
    )
    assert (row["uid"], row["confinement"], row["scope"]) == (1000, "affinity", "")
    assert ready.check(f"cat /proc/{row['pid']}/cgroup").strip() == "0::/system.slice/cron.service"
    assert len(cpus_of_process(ready, row["pid"])) == 2
    ready.check("systemctl stop cron")


def test_a_step_of_a_batch_system_keeps_its_cpus_and_its_place(ready: Machine) -> None:
    """As slurmstepd does it: a delegated scope with a cgroup for each task, and a mask on the task."""
    step = "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0/task_0"
    script = (
        f"mkdir -p {step} && echo $$ >{step}/cgroup.procs && SLURM_JOB_ID=7 exec taskset -c 2-5 torchtuned-run {JOB}"
    )
    command = (
        f"systemd-run -q --scope --slice=system.slice --unit=slurmstepd -p Delegate=yes sh -c {shlex.quote(script)}"
    )
    ready.check(f"rm -f /root/s.out; ({command}) >/root/s.out 2>&1 <>/dev/null &")
    wait_for(ready, "grep -q '}' /root/s.out")
    (row,) = listed(ready)
    assert (row["confinement"], row["scope"], row["cpus"]) == ("affinity", "", "2-5")
    place = step.removeprefix("/sys/fs/cgroup")
    assert ready.check(f"cat /proc/{row['pid']}/cgroup").strip() == f"0::{place}"
    assert cpus_of_process(ready, row["pid"]) == {2, 3, 4, 5}
    said = json.loads(ready.check("grep '}' /root/s.out"))
    assert said["omp_num_threads"] == "4"
    ready.check(f"kill {row['pid']}")


def test_t10_a_logout_takes_shared_memory_and_linger_keeps_it(ready: Machine) -> None:
    """What the warning says is so: logind deletes what lies in /dev/shm when the last session ends."""
    job = "sh -c 'echo here >/dev/shm/batch; exec sleep 10007'"
    gone = "while loginctl list-users --no-legend | grep alice; do sleep 0.5; done"
    for option, there in (("", False), ("--linger", True)):
        run = f"nohup torchtuned-run {option} --cpus 1 {job} 2>/tmp/said >/dev/null <>/dev/null &"
        here = "for i in $(seq 200); do [ -e /dev/shm/batch ] && break; sleep 0.2; done; cat /tmp/said"
        ready.check(f"loginctl terminate-user alice; {gone}", 60)
        try:
            said = ready.check(f"ssh alice@localhost {shlex.quote(f'{run} {here}')} <>/dev/null", 100)
            ready.check("pgrep -f 'sleep 10007'")
            if there:
                assert said == ""
                ready.check("sleep 15; cat /dev/shm/batch")
            else:
                assert "logind deletes the shared memory" in said
                ready.check(f"{gone}; ! test -e /dev/shm/batch", 60)
            ready.check("pgrep -f 'sleep 10007'")
        finally:
            ready.check("loginctl disable-linger alice; pkill -f 'sleep 10007'; rm -f /dev/shm/batch")


@pytest.fixture
def limited(ready: Machine) -> Iterator[Machine]:
    """An administrator who wants more for jobs than a session has."""
    lines = "[jobs]\nlimit_memlock = infinity\nlimit_nofile = 600000\nlimit_core = 0\nlimit_oom_score_adj = 300\n"
    ready.check(f"mkdir -p {CONF.rpartition('/')[0]}; printf '{lines}' >{CONF}; systemctl reload torchtuned")
    yield ready
    ready.check(f"rm {CONF}; systemctl reload torchtuned")


def limits(machine: Machine, pid: object) -> dict[str, list[str]]:
    """Soft and hard limits of a process, and its oom_score_adj."""
    lines = machine.check(f"grep -E 'open files|locked memory|core file' /proc/{pid}/limits").splitlines()
    found = {line[:25].strip(): line[25:].split()[:2] for line in lines}
    return {**found, "oom": machine.check(f"cat /proc/{pid}/oom_score_adj").split()}


def test_limits_of_the_configuration_reach_a_users_job(limited: Machine) -> None:
    """Also those that are above the hard limits of the session."""
    job = start(limited, "a", f"ulimit -Hl >&2; exec torchtuned-run --cpus 1 {JOB}", user="alice")
    found = limits(limited, job.pid)
    assert job.notes.split()[0].isdecimal(), f"locked memory has no limit in a session: {job.notes}"
    assert found["Max locked memory"] == ["unlimited", "unlimited"]
    assert (found["Max core file size"][0], found["Max open files"][0], found["oom"]) == ("0", "600000", ["300"])
    assert "the limit" not in job.notes, job.notes
    stop(limited, job)


def test_a_service_keeps_its_hard_limits_and_hears_what_to_edit(limited: Machine) -> None:
    row = start_service(
        limited,
        "small",
        "-p LimitNOFILE=5000 -p LimitMEMLOCK=1M -p User=alice -p StandardError=file:/root/small.err",
        f"torchtuned-run --cpus 1 {JOB}",
    )
    found = limits(limited, row["pid"])
    assert found["Max open files"] == ["5000", "5000"]
    assert found["Max locked memory"] == ["1048576", "1048576"]
    notes = limited.check("cat /root/small.err")
    assert "systemctl edit small.service: LimitMEMLOCK=infinity below [Service]" in notes
    assert "systemctl edit small.service: LimitNOFILE=600000 below [Service]" in notes
    limited.check("systemctl stop small")


def test_p17_and_t03_are_said_before_they_happen(ready: Machine) -> None:
    """Too few tasks for the threads of the job, and too little shared memory for its workers; it runs all the same."""
    small = "-p TasksMax=40 -p TemporaryFileSystem=/dev/shm:size=64M,mode=1777"
    job = "torchtuned-run python3 /tmp/train.py --workers 8 --batch-size 512"
    said = ready.check(f"echo 'print(42)' >/tmp/train.py; systemd-run -q --wait --pipe {small} {job} 2>&1")
    assert "will not fit: " in said
    assert "TasksMax=infinity" in said
    assert "/dev/shm has 64 MiB" in said
    assert "bus error" in said
    assert said.endswith("\n42\n")
