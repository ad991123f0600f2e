"""What an administrator sees with busctl."""

from __future__ import annotations

import pytest
from inside import JOB, MANAGER, STATE, start, stop, wait_for
from machine import Machine


def test_the_package_came_up_by_itself(machine: Machine) -> None:
    """Nothing but installing the package was done so far."""
    wait_for(machine, f"{STATE} | grep -x 's \"ready\"'")
    assert machine.check("systemctl is-enabled torchtuned").strip() == "enabled"


def test_tree_and_introspect(ready: Machine) -> None:
    job = start(ready, "a", f"exec torchtuned-run --cpus 1 {JOB}", user="alice")
    tree = ready.check("busctl tree --list org.torchtuned1")
    assert "/org/torchtuned1/jobs/" in tree, tree
    members = ready.check("busctl introspect org.torchtuned1 /org/torchtuned1 org.torchtuned1.Manager")
    for name in ("Plan", "Apply", "Verify", "Undo", "Reload", "SetProfile", "Check", "Register", "Commit", "Release"):
        assert f".{name} " in members, name
    for name in ("Version", "State", "Profile", "Degraded", "Jobs", "Gpus", "LastApplied"):
        assert f".{name} " in members, name
    path = next(line for line in ready.check("busctl tree --list org.torchtuned1").split() if "/jobs/" in line)
    shown = ready.check(f"busctl introspect org.torchtuned1 {path} org.torchtuned1.Job")
    assert f" u {job.pid} " in " ".join(shown.split())
    stop(ready, job)


def test_plan_for_everybody(ready: Machine) -> None:
    rows = ready.login("alice", f"busctl call {MANAGER} Plan")
    assert rows.startswith("a(ssssss) "), rows
    assert '"cpu/policy0/governor"' in rows


@pytest.mark.parametrize("call", ["Apply", "Reload", "Undo as 0", "SetProfile s observe"])
def test_a_user_may_change_nothing(ready: Machine, call: str) -> None:
    status, output = ready.sh(f"ssh alice@localhost busctl call {MANAGER} {call}")
    assert status != 0
    assert "org.torchtuned1." in output
    assert "administrator" in output


def test_monitor_shows_jobs_coming_and_going(ready: Machine) -> None:
    ready.check("timeout 300 busctl monitor org.torchtuned1 >/root/monitor 2>&1 & sleep 3")
    stop(ready, start(ready, "a", f"exec torchtuned-run --cpus 1 {JOB}", user="alice"))
    wait_for(ready, "grep -q InterfacesRemoved /root/monitor")
    ready.check("pkill -x busctl")
    seen = ready.check("cat /root/monitor")
    assert "Member=PropertiesChanged" in seen
    assert "Member=InterfacesAdded" in seen


def test_a_user_cannot_release_the_job_of_another(ready: Machine) -> None:
    job = start(ready, "a", f"exec torchtuned-run --cpus 1 {JOB}", user="alice")
    path = next(word for word in ready.check("busctl tree --list org.torchtuned1").split() if "/jobs/" in word)
    status, output = ready.sh(f"ssh bob@localhost busctl call {MANAGER} Release o {path}")
    assert status != 0, output
    assert path in ready.check("busctl tree org.torchtuned1")
    stop(ready, job)
