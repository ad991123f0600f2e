"""Jobs of two users in real login sessions; what they got is read from the kernel's masks, not from our table."""

from __future__ import annotations

import pytest
from inside import (
    GOVERNOR,
    INSTALL,
    JOB,
    STATE,
    changed,
    cpus,
    cpus_of,
    cpus_of_process,
    listed,
    masks,
    show,
    start,
    start_service,
    stop,
    wait_for,
)
from machine import SHARE, Machine

EVERY_CPU = set(range(8))


def test_two_users_get_disjoint_whole_cores_and_nobody_else_is_touched(ready: Machine, suite: str) -> None:
    ready.check("systemd-run -q --unit bystander -p CPUAffinity='3 4' sleep infinity")
    ready.check("ssh bob@localhost 'taskset -c 5 sleep infinity' >/dev/null 2>&1 <>/dev/null &")
    before = masks(ready)
    # The first in a session with a process that has a mask of its own.
    alice = start(ready, "a", f"taskset -c 1 sleep 1000 & exec torchtuned-run --cpus 2 {JOB}", user="alice")
    bob = start(ready, "b", f"exec torchtuned-run --cpus 3 {JOB}", user="bob")
    a, b = cpus_of(ready, alice), cpus_of(ready, bob)
    assert (len(a), len(b)) == (2, 3)
    assert not a & b
    assert (alice.omp_num_threads, bob.omp_num_threads) == ("2", "3")
    during = masks(ready)
    assert changed(before, during) == {}
    sibling = [mask for mask, name in during.values() if name == "sleep"]
    assert sorted(sibling) == ["1", "3-4", "5"]
    for job, got in ((alice, a), (bob, b)):
        allowed = show(ready, job.scope, "AllowedCPUs")["AllowedCPUs"]
        assert cpus(allowed.replace(" ", ",")) == (got if suite == "trixie" else set())
    stop(ready, alice, bob)
    assert changed(during, masks(ready)) == {}
    ready.check("systemctl stop bystander; pkill -x sleep")


def test_a_job_alone_gets_the_machine(ready: Machine) -> None:
    job = start(ready, "a", f"exec torchtuned-run {JOB}", user="alice")
    assert cpus_of(ready, job) == EVERY_CPU
    assert job.omp_num_threads == "8"
    stop(ready, job)


def test_the_scope_keeps_what_the_session_had(ready: Machine) -> None:
    job = start(ready, "a", f"exec torchtuned-run --cpus 1 {JOB}", user="alice")
    names = ("Slice", "TasksMax", "OOMPolicy", "SendSIGHUP", "CollectMode", "After")
    unit = show(ready, job.scope, *names)
    assert job.cgroup == f"/user.slice/user-1000.slice/{job.scope}"
    assert unit["Slice"] == "user-1000.slice"
    assert unit["TasksMax"] == "infinity"
    assert unit["OOMPolicy"] == "continue"
    assert unit["SendSIGHUP"] == "yes"
    assert unit["CollectMode"] == "inactive-or-failed"
    assert "systemd-user-sessions.service" in unit["After"]
    stop(ready, job)
    wait_for(ready, f"test $(systemctl show {job.scope} -p LoadState --value) = not-found")


def test_under_sudo_the_job_stays_in_the_users_slice(ready: Machine) -> None:
    job = start(ready, "a", f"sudo torchtuned-run --cpus 1 {JOB}", user="alice")
    assert job.cgroup.startswith("/user.slice/user-1000.slice/torchtuned-job-"), job.cgroup
    stop(ready, job)


def test_an_app_scope_of_the_user_manager_is_moved(ready: Machine) -> None:
    job = start(ready, "a", f"systemd-run -q --user --scope torchtuned-run --cpus 2 {JOB}", user="alice")
    assert len(cpus_of(ready, job)) == 2
    assert job.cgroup.startswith("/user.slice/user-1000.slice/"), job.cgroup
    assert job.scope.startswith("torchtuned-job-")
    stop(ready, job)


def test_a_service_is_not_moved_only_pinned(ready: Machine) -> None:
    row = start_service(ready, "svc", f"torchtuned-run --cpus 2 {JOB}")
    assert (row["confinement"], row["scope"]) == ("affinity", "")
    assert ready.check(f"cat /proc/{row['pid']}/cgroup").strip() == "0::/system.slice/svc.service"
    got = cpus_of_process(ready, row["pid"])
    assert got == cpus(str(row["cpus"]))
    assert len(got) == 2
    ready.check("systemctl stop svc")


def test_a_narrower_mask_is_kept(ready: Machine) -> None:
    job = start(ready, "a", f"exec taskset -c 2,5 torchtuned-run {JOB}", user="alice")
    assert cpus_of(ready, job) == {2, 5}
    assert job.omp_num_threads == "2"
    stop(ready, job)


AS_IF_BARE = {
    "torchtuned-run sh -c 'exit 7'; echo $?": "7",
    "torchtuned-run sh -c 'kill -KILL $$'; echo $?": "137",
    "echo words | torchtuned-run cat": "words",
    "sh -c 'echo $$; exec torchtuned-run sh -c \"echo \\$\\$\"' | uniq | wc -l": "1",
    "torchtuned-run no-such-command; echo $?": "127",
    "torchtuned-run /etc/passwd; echo $?": "126",
    "torchtuned-run --no-such-option true; echo $?": "125",
    "for run in '' torchtuned-run; do $run grep SigIgn /proc/self/status; done | uniq | wc -l": "1",
    "OMP_NUM_THREADS=3 torchtuned-run sh -c 'echo $OMP_NUM_THREADS'": "3",
}


def test_the_program_is_as_if_started_bare(ready: Machine) -> None:
    """Exit statuses, signals, standard input, process id and what the user has set, in one session for all."""
    script = "\n".join(["exec 2>/dev/null", *AS_IF_BARE])
    assert dict(zip(AS_IF_BARE, ready.login("alice", script).splitlines(), strict=True)) == AS_IF_BARE


def test_the_terminal_stays(ready: Machine) -> None:
    assert "/dev/pts/" in ready.check("ssh -tt alice@localhost torchtuned-run tty")


def test_a_job_outlives_its_session(ready: Machine) -> None:
    ready.login("alice", f"nohup torchtuned-run --cpus 2 {JOB} >/tmp/outlives 2>&1 <>/dev/null & sleep 8")
    wait_for(ready, "grep -q '}' /tmp/outlives && ! loginctl list-sessions --no-legend | grep -q alice")
    (row,) = listed(ready)
    assert len(cpus_of_process(ready, row["pid"])) == 2
    ready.check(f"kill {row['pid']}")


@pytest.mark.parametrize("how", ["systemctl kill -s KILL torchtuned", "systemctl restart torchtuned"])
def test_a_new_daemon_adopts_running_jobs(ready: Machine, how: str) -> None:
    alice = start(ready, "a", f"exec torchtuned-run --cpus 3 {JOB}", user="alice")
    a, before = cpus_of(ready, alice), masks(ready)
    old = show(ready, "torchtuned", "MainPID")["MainPID"]
    ready.check(how)
    wait_for(ready, f"systemctl is-active torchtuned && ! systemctl show torchtuned -p MainPID --value | grep -x {old}")
    wait_for(ready, f"{STATE} | grep ready")
    bob = start(ready, "b", f"exec torchtuned-run --cpus 3 {JOB}", user="bob")
    assert cpus_of(ready, alice) == a
    assert not a & cpus_of(ready, bob)
    assert {row["pid"] for row in listed(ready)} == {alice.pid, bob.pid}
    assert changed(before, masks(ready)) == {}
    stop(ready, alice, bob)


def test_a_killed_job_gives_its_cpus_back(ready: Machine) -> None:
    stop(ready, start(ready, "a", f"exec torchtuned-run --cpus 8 {JOB}", user="alice"), signal="KILL")
    job = start(ready, "b", f"exec torchtuned-run --cpus 8 {JOB}", user="bob")
    assert cpus_of(ready, job) == EVERY_CPU
    stop(ready, job)


def test_without_a_daemon_jobs_place_themselves(ready: Machine) -> None:
    ready.check("systemctl stop torchtuned")
    one = start(ready, "a", f"exec torchtuned-run --cpus 3 {JOB}", user="alice")
    two = start(ready, "b", f"exec torchtuned-run --cpus 3 {JOB}", user="alice")
    a, b = cpus_of(ready, one), cpus_of(ready, two)
    assert (len(a), len(b)) == (3, 3)
    assert not a & b
    assert one.notes.count("placed without torchtunedd") == 1, one.notes
    assert ready.sh("ssh alice@localhost torchtuned-run --require true")[0] == 125
    ready.check("systemctl start torchtuned")
    stop(ready, one, two)


def test_a_silent_daemon_does_not_cost_the_job(ready: Machine) -> None:
    ready.check("systemctl kill -s STOP torchtuned")
    try:
        job = start(ready, "a", f"exec torchtuned-run --cpus 2 {JOB}", user="alice")
        assert len(cpus_of(ready, job)) == 2
        assert job.notes.count("placed without torchtunedd") == 1, job.notes
    finally:
        ready.check("systemctl kill -s CONT torchtuned")
    stop(ready, job)


def test_upgrade_with_a_job_running(ready: Machine) -> None:
    ready.check(f"{INSTALL} {SHARE}/older.deb")
    wait_for(ready, f"{STATE} | grep ready")
    job = start(ready, "a", f"exec torchtuned-run --cpus 3 {JOB}", user="alice")
    got, before = cpus_of(ready, job), masks(ready)
    ready.check(
        f"(while [ ! -e /root/enough ]; do cat {GOVERNOR.format(0)}; sleep 0.05; done | sort -u >/root/flaps;"
        " touch /root/flaps.done) >/dev/null 2>&1 &"
    )
    ready.check(f"{INSTALL} {SHARE}/torchtuned.deb; sleep 2; touch /root/enough")
    wait_for(ready, "test -e /root/flaps.done")
    assert len(ready.check("cat /root/flaps; rm -f /root/enough /root/flaps*").split()) == 1
    wait_for(ready, f"{STATE} | grep ready")
    assert [row["pid"] for row in listed(ready)] == [job.pid]
    assert cpus_of(ready, job) == got
    assert changed(before, masks(ready)) == {}
    stop(ready, job)
