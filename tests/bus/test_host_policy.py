"""Host policy through the daemon: applied, looked at, given back, and who may say so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import MANAGER, OTHER, REPOSITORY, ROOT, USER, Daemon, PrivateBus, Service

from torchtuned.bus import CallFailed

Start = Callable[..., Daemon]
Fake = Callable[..., Service]
GOVERNOR = "sys/devices/system/cpu/cpufreq/policy{}/scaling_governor"


def governors(tree: Path) -> list[str]:
    return [(tree / GOVERNOR.format(number)).read_text().strip() for number in (0, 1)]


def sysctl(tree: Path, name: str) -> str:
    return (tree / "proc/sys" / name.replace(".", "/")).read_text().strip()


def rows(bus: PrivateBus, member: str, *rest: Any) -> dict[str, list[str]]:
    return {row[0]: row for row in bus.call(ROOT, MANAGER, member, *rest)[0]}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_applied_after_the_name_is_taken_and_shown(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    one = daemon("--sysroot", tree)
    assert "ready, profile training, 0 jobs" in one.wait_for("STATUS=ready")
    assert governors(tree) == ["performance", "performance"]
    assert (sysctl(tree, "vm.swappiness"), sysctl(tree, "net.core.somaxconn")) == ("10", "4096")
    assert bus.get(ROOT, MANAGER, "State") == "ready"
    assert bus.get(ROOT, MANAGER, "Profile") == "training"
    assert abs(bus.get(ROOT, MANAGER, "LastApplied") / 1e6 - time.time()) < 60
    found = rows(bus, "Verify")
    assert found["cpu/policy0/governor"][1:4] == ["performance", "performance", "applied"]
    assert found["sysctl/vm.swappiness"][5].endswith("training.conf:4")


@pytest.mark.parametrize("why", ["stop", "restart"])
def test_values_are_given_back_on_stop_and_stay_on_restart(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path, why: str
) -> None:
    pid1 = services("systemd1")
    one = daemon("--sysroot", tree)
    one.wait_for("STATUS=ready")
    pid1.set("job", why)
    assert one.stop() == 0
    if why == "stop":
        assert governors(tree) == ["powersave", "schedutil"]
        assert sysctl(tree, "vm.swappiness") == "60"
        return
    assert governors(tree) == ["performance", "performance"]
    second = daemon("--sysroot", tree)
    second.wait_for("STATUS=ready")
    pid1.set("job", "stop")
    second.stop()
    assert governors(tree) == ["powersave", "schedutil"]  # of before the first


def test_values_stay_when_pid1_does_not_say_why(bus: PrivateBus, services: Fake, daemon: Start, tree: Path) -> None:
    pid1 = services("systemd1")
    one = daemon("--sysroot", tree)
    one.wait_for("STATUS=ready")
    pid1.set("fail", {"GetUnitByPID": "org.freedesktop.DBus.Error.NoReply"})
    assert one.stop() == 0
    assert governors(tree) == ["performance", "performance"]


def test_a_tuner_that_comes_gets_its_knobs_and_when_it_goes_the_policy_is_back(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path
) -> None:
    pid1 = services("systemd1")
    one = daemon("--sysroot", tree)
    one.wait_for("STATUS=ready")

    def move(active: list[str], outcome: str) -> list[str]:
        pid1.set("active", active)
        pid1.set("moved", "tuned.service")
        until(lambda: rows(bus, "Verify")["cpu/policy0/governor"][3] == outcome)
        return rows(bus, "Plan")["cpu/policy0/governor"]

    row = move(["tuned.service"], "foreign")
    assert row[4:] == ["left to TuneD while it runs; it was powersave before torchtuned", "tuned.service"]
    (tree / GOVERNOR.format(0)).write_text("schedutil\n")
    bus.call(ROOT, MANAGER, "Apply")
    assert governors(tree) == ["schedutil", "performance"]
    (tree / GOVERNOR.format(0)).write_text("performance\n")  # TuneD gives back what it found
    assert move([], "applied")[4] == "set by torchtuned, was powersave"
    (tree / GOVERNOR.format(0)).write_text("ondemand\n")
    move(["tuned.service"], "foreign")
    move([], "applied")  # it ended without giving anything back
    pid1.set("job", "stop")
    one.stop()
    assert governors(tree) == ["ondemand", "schedutil"]


def test_a_tuner_started_by_hand_is_known_by_its_name_on_the_bus(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path
) -> None:
    daemon("--sysroot", tree).wait_for("STATUS=ready")
    tuned = services("tuned")
    until(lambda: rows(bus, "Verify")["cpu/policy0/governor"][3:] == [
        "foreign", "left to TuneD while it runs; it was powersave before torchtuned", "tuned.service",
    ])  # fmt: skip
    tuned.stop()
    until(lambda: rows(bus, "Verify")["cpu/policy0/governor"][3] == "applied")


def test_originals_survive_sigkill(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    first = daemon("--sysroot", tree)
    first.wait_for("STATUS=ready")
    first.stop(signal.SIGKILL)
    second = daemon("--sysroot", tree)
    second.wait_for("STATUS=ready")
    assert second.stop() == 0  # without PID 1 there is no restart to stay for
    assert governors(tree) == ["powersave", "schedutil"]


def test_changes_need_polkit_and_refusals_say_what_is_missing(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path
) -> None:
    one = daemon("--sysroot", tree)
    one.wait_for("STATUS=ready")
    verbs = [("Apply", "", [], "apply"), ("Undo", "as", [[]], "undo"), ("Reload", "", [], "configure"),
             ("SetProfile", "s", ["observe"], "configure")]  # fmt: skip
    with bus.user(USER) as user:
        for member, signature, arguments, _ in verbs:
            with pytest.raises(RuntimeError, match="NotAuthorized: only root may do this, as polkit is not installed"):
                user.do("call", ROOT, MANAGER, member, signature, *arguments)
        polkit = services("polkit")
        for member, signature, arguments, verb in verbs:
            with pytest.raises(RuntimeError, match=rf"uid {USER} is not allowed org\.torchtuned1\.{verb}"):
                user.do("call", ROOT, MANAGER, member, signature, *arguments)
        polkit.set("challenge", 1)
        with pytest.raises(RuntimeError, match="needs an administrator's password"):
            user.do("call", ROOT, MANAGER, "Apply")
        assert governors(tree) == ["performance", "performance"]
        polkit.set("allowed", [f"org.torchtuned1.{verb}" for *_, verb in verbs])
        for member, signature, arguments, _ in verbs:
            user.do("interactive", member, signature, *arguments)
        flags = [call[3] for call in polkit.calls("CheckAuthorization")]
        assert flags == [0] * 5 + [1] * 4  # only those who say so have their person asked
        user.do("call", ROOT, MANAGER, "Plan")
        user.do("call", ROOT, MANAGER, "Verify")
        user.do("call", ROOT, MANAGER, "Check")
        assert len(polkit.calls("CheckAuthorization")) == 9


def test_a_polkit_that_hangs_holds_up_nobody_and_means_no(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path
) -> None:
    polkit = services("polkit")
    daemon("--sysroot", tree).wait_for("STATUS=ready")
    polkit.set("hang", ["CheckAuthorization"])
    with bus.user(USER) as user, bus.user(USER) as other:
        assert user.process.stdin is not None
        assert user.process.stdout is not None
        user.process.stdin.write(f'["patient", "{ROOT}", "{MANAGER}", "Apply"]\n')
        user.process.stdin.flush()
        until(lambda: bool(polkit.calls("CheckAuthorization")))
        other.do("call", ROOT, MANAGER, "Plan")
        bus.call(ROOT, MANAGER, "Apply")  # root is not asked about
        assert "polkit gave no answer" in user.process.stdout.readline()
        assert len(polkit.calls("CancelCheckAuthorization")) == 1


def test_questions_to_polkit_leave_room_for_the_jobs_of_others(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path
) -> None:
    """The bus lets a connection wait for 128 answers; one user's open questions took them all, and PID 1 was asked for
    no scope any more.
    """
    polkit, pid1 = services("polkit"), services("systemd1")
    daemon("--sysroot", tree).wait_for("STATUS=ready")
    polkit.set("hang", ["CheckAuthorization"])
    with bus.user(USER) as user, bus.user(OTHER) as other:
        user.do("crowd", "Apply", 150)
        until(lambda: user.do("answered") == 146)
        other.do("crowd", "Apply", 1)
        assert other.start()[1]["scope"] in pid1.get("scopes")
        assert (user.do("answered"), other.do("answered")) == (146, 0)
    until(lambda: len(polkit.calls("CancelCheckAuthorization")) == 5)
    polkit.set("hang", [])
    with bus.user(USER) as user, pytest.raises(RuntimeError, match="NotAuthorized"):
        user.do("call", ROOT, MANAGER, "Apply")


def test_undo_one_and_all(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree).wait_for("STATUS=ready")
    assert "sysctl/vm.swappiness" in rows(bus, "Undo", "as", ["sysctl/vm.swappiness"])
    assert sysctl(tree, "vm.swappiness") == "60"
    assert governors(tree) == ["performance", "performance"]
    rows(bus, "Undo", "as", [])
    assert governors(tree) == ["powersave", "schedutil"]
    assert bus.get(ROOT, MANAGER, "State") == "stopped"
    assert [row for row in bus.call(ROOT, MANAGER, "Check")[0] if "governor" in row["title"]] == []
    rows(bus, "Apply")
    assert bus.get(ROOT, MANAGER, "State") == "ready"
    assert governors(tree) == ["performance", "performance"]


def test_what_was_undone_by_name_stays_undone_until_all_is_applied(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree).wait_for("STATUS=ready")
    rows(bus, "Undo", "as", ["sysctl/vm.swappiness"])
    with bus.user(USER) as job:
        job.start({"cpus": "1"})
        until(lambda: sysctl(tree, "kernel.numa_balancing") == "0")
        assert sysctl(tree, "vm.swappiness") == "60"
    until(lambda: sysctl(tree, "kernel.numa_balancing") == "1")
    assert sysctl(tree, "vm.swappiness") == "60"
    assert bus.get(ROOT, MANAGER, "State") == "ready"
    rows(bus, "Apply")
    assert sysctl(tree, "vm.swappiness") == "10"


def test_a_grant_that_is_only_looked_at_changes_nothing(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    one = daemon("--sysroot", tree)
    one.wait_for("STATUS=ready")
    with bus.user(USER) as looking, bus.user(USER) as job:
        looking.register({"cpus": "1"})
        time.sleep(0.5)
        assert sysctl(tree, "kernel.numa_balancing") == "1"
        job.start({"cpus": "1"})
        until(lambda: sysctl(tree, "kernel.numa_balancing") == "0")


def test_a_profile_is_chosen_and_kept(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    one = daemon("--sysroot", tree)
    one.wait_for("STATUS=ready")
    bus.call(ROOT, MANAGER, "SetProfile", "s", "observe")
    assert governors(tree) == ["powersave", "schedutil"]
    assert (one.state_dir / "profile").read_text() == "observe\n"
    assert (one.state_dir / "profile").stat().st_mode & 0o777 == 0o644  # whoever reads the configuration reads it
    one.stop()
    two = daemon("--sysroot", tree)
    assert "profile observe" in two.wait_for("STATUS=ready")
    bus.call(ROOT, MANAGER, "SetProfile", "s", "")
    assert bus.get(ROOT, MANAGER, "Profile") == "training"
    assert not (two.state_dir / "profile").exists()
    assert governors(tree) == ["performance", "performance"]


def test_a_chosen_profile_that_is_gone_can_be_put_away(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    one = daemon("--sysroot", tree)
    one.wait_for("STATUS=ready")
    bus.call(ROOT, MANAGER, "SetProfile", "s", "observe")
    (tree / "usr/share/torchtuned/profiles/observe.conf").unlink()
    with pytest.raises(CallFailed, match="unknown profile 'observe'"):
        bus.call(ROOT, MANAGER, "Reload")
    bus.call(ROOT, MANAGER, "SetProfile", "s", "")
    assert bus.get(ROOT, MANAGER, "Profile") == "training"
    assert not (one.state_dir / "profile").exists()
    assert governors(tree) == ["performance", "performance"]


def configure(tree: Path, text: str) -> None:
    (tree / "etc/torchtuned").mkdir(parents=True, exist_ok=True)
    (tree / "etc/torchtuned/torchtuned.conf").write_text(text)


@pytest.mark.parametrize("how", ["call", "SIGHUP"])
def test_a_bad_file_leaves_the_old_policy_in_force(bus: PrivateBus, daemon: Start, tree: Path, how: str) -> None:
    one = daemon("--sysroot", tree)
    one.wait_for("STATUS=ready")
    configure(tree, "[sysctl]\nvm.swappiness = 1\nnonsense\n")
    if how == "call":
        with pytest.raises(CallFailed, match=r"torchtuned\.conf:3") as refused:
            bus.call(ROOT, MANAGER, "Reload")
        assert refused.value.dbus_name == "org.torchtuned1.Error.InvalidConfig"
    else:
        one.process.send_signal(signal.SIGHUP)
    assert "torchtuned.conf:3" in one.wait_for("STATUS=degraded")
    assert sysctl(tree, "vm.swappiness") == "10"
    assert "torchtuned.conf:3" in bus.get(ROOT, MANAGER, "Degraded")[0]
    configure(tree, "[sysctl]\nvm.swappiness = 1\n")
    one.process.send_signal(signal.SIGHUP)
    one.wait_for("STATUS=ready")
    assert sysctl(tree, "vm.swappiness") == "1"


@pytest.mark.parametrize("how", ["link", "pipe"])
def test_what_is_no_file_is_a_bad_file(bus: PrivateBus, daemon: Start, tree: Path, how: str) -> None:
    configure(tree, "[sysctl]\nvm.swappiness = keep\n")
    one = daemon("--sysroot", tree)
    one.wait_for("STATUS=ready")
    path = tree / "etc/torchtuned/torchtuned.conf"
    path.unlink()
    path.symlink_to("moved.conf") if how == "link" else os.mkfifo(path)
    with pytest.raises(CallFailed, match=r"torchtuned\.conf: a (link that leads nowhere|pipe)"):
        bus.call(ROOT, MANAGER, "Reload")
    bus.call(ROOT, MANAGER, "Apply")
    assert sysctl(tree, "vm.swappiness") == "60"


def test_a_bad_file_at_start_changes_nothing_and_says_so(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    configure(tree, "[cpu]\ngovernor = perfomance\n[jobs]\nslots = many\n")
    one = daemon("--sysroot", tree)
    assert "degraded, profile observe" in one.wait_for("STATUS=degraded")
    [reason] = bus.get(ROOT, MANAGER, "Degraded")
    assert "torchtuned.conf:2" in reason
    assert "torchtuned.conf:4" in reason
    assert governors(tree) == ["powersave", "schedutil"]
    with bus.user(USER) as job:
        assert job.start()[1]["state"] == "running"
    [findings] = bus.call(ROOT, MANAGER, "Check")
    assert [finding["title"] for finding in findings if finding["code"] == "degraded"] == [reason]


def test_knobs_for_jobs_are_set_while_one_has_a_grant(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    one = daemon("--sysroot", tree)
    one.wait_for("STATUS=ready")
    assert sysctl(tree, "kernel.numa_balancing") == "1"
    with bus.user(USER) as first, bus.user(USER) as second:
        first.start({"cpus": "1"})
        until(lambda: sysctl(tree, "kernel.numa_balancing") == "0")
        second.start({"cpus": "1"})
        first.kill()
        one.wait_for("1 job")
        assert sysctl(tree, "kernel.numa_balancing") == "0"
    until(lambda: sysctl(tree, "kernel.numa_balancing") == "1")


def test_other_tuners_keep_their_knobs(bus: PrivateBus, services: Fake, daemon: Start, tree: Path) -> None:
    pid1 = services("systemd1")
    pid1.set("active", ["cpupower.service"])
    daemon("--sysroot", tree).wait_for("STATUS=ready")
    assert governors(tree) == ["powersave", "schedutil"]
    row = rows(bus, "Verify")["cpu/policy0/governor"]
    assert row[3] == "foreign"
    assert "cpupower" in row[4] + row[5]


def test_a_tuner_that_was_purged_keeps_nothing(bus: PrivateBus, services: Fake, daemon: Start, tree: Path) -> None:
    services("systemd1").set("purged", ["tlp.service"])
    daemon("--sysroot", tree).wait_for("STATUS=ready")
    assert governors(tree) == ["performance", "performance"]


def test_a_refused_value_degrades_and_is_found(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    swappiness = tree / "proc/sys/vm/swappiness"
    swappiness.unlink()
    swappiness.symlink_to("/proc/version")  # nobody can write that one
    one = daemon("--sysroot", tree)
    assert one.wait_for("STATUS=degraded")
    findings = bus.call(ROOT, MANAGER, "Check")[0]
    assert any("vm.swappiness" in finding["title"] for finding in findings), findings


@pytest.mark.parametrize("obstacle", ["ledger.lock", "ledger.json", "ledger.new"])  # the last: only writing fails
def test_what_could_not_be_recorded_is_applied_once_it_can_be(
    bus: PrivateBus, daemon: Start, tree: Path, obstacle: str
) -> None:
    """As when /run was full, and nobody says Apply when it has room again."""
    obstruct = bus.folder / "run" / obstacle
    obstruct.mkdir(parents=True)
    one = daemon("--sysroot", tree)
    one.wait_for("STATUS=degraded")
    assert governors(tree) == ["powersave", "schedutil"]
    (why,) = bus.get(ROOT, MANAGER, "Degraded")
    assert "cpu/policy0/governor (failed: left alone until its original can be recorded: " in why
    if obstacle == "ledger.new":  # nothing to record, so nothing fails: no sign that it can be recorded again
        rows(bus, "Undo", "as", ["sysctl/vm.swappiness"])
        time.sleep(2)
    obstruct.rmdir()
    one.wait_for("STATUS=ready")
    assert governors(tree) == ["performance", "performance"]
    assert sysctl(tree, "net.core.somaxconn") == "4096"
    assert sysctl(tree, "vm.swappiness") == ("60" if obstacle == "ledger.new" else "10")  # undone by name stays undone


def test_what_hangs_on_a_knob_that_waited_is_applied_with_it(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    """A preference counts as implied while the governor is performance, and the governor was to become another."""
    policies = [tree / f"sys/devices/system/cpu/cpufreq/policy{number}" for number in (0, 1)]
    for policy in policies:
        (policy / "scaling_driver").write_text("intel_pstate\n")
        (policy / "scaling_governor").write_text("performance\n")
        (policy / "energy_performance_preference").write_text("performance\n")
        (policy / "energy_performance_available_preferences").write_text("default performance balance_performance\n")
    text = "[cpu]\ngovernor = powersave\nenergy_performance_preference = balance_performance\n"
    (tree / "usr/share/torchtuned/profiles/training.conf").write_text(text)
    obstruct = bus.folder / "run/ledger.new"
    obstruct.mkdir(parents=True)
    one = daemon("--sysroot", tree)
    one.wait_for("STATUS=degraded")
    obstruct.rmdir()
    one.wait_for("STATUS=ready")
    assert governors(tree) == ["powersave", "powersave"]
    found = [(policy / "energy_performance_preference").read_text().strip() for policy in policies]
    assert found == ["balance_performance", "balance_performance"]
    assert {row[3] for row in rows(bus, "Verify").values()} <= {"applied", "kept"}


def test_idle_it_makes_no_wakeups(bus: PrivateBus, services: Fake, daemon: Start) -> None:
    services("systemd1")
    one = daemon()  # the real machine, with its hotplug monitor
    while one.wait_for("STATUS=").startswith("STATUS=starting"):
        pass
    status = Path(f"/proc/{one.process.pid}/task")

    def switches() -> int:
        return sum(
            int(line.split()[1])
            for task in os.listdir(status)
            for line in (status / task / "status").read_text().splitlines()
            if line.startswith("voluntary_ctxt_switches")
        )

    time.sleep(7)  # what comes after the name is done, the second look for jobs that placed themselves too
    before = switches()
    time.sleep(3)
    assert switches() - before == 0


def test_help_and_bad_options() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "torchtuned.daemon"]
    assert subprocess.run([*command, "--colour"], env=environment, capture_output=True, check=False).returncode == 2
    shown = subprocess.run([*command, "--help"], env=environment, capture_output=True, check=False, text=True)
    assert shown.returncode == 0
    assert "--sysroot DIR" in shown.stdout


def test_a_file_where_its_folder_should_be(bus: PrivateBus, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    for place in ("run", "run/below"):
        command = [sys.executable, "-m", "torchtuned.daemon", f"--run-dir={tmp_path / place}"]
        done = subprocess.run(command, env=bus.environment, capture_output=True, check=False, text=True, cwd=REPOSITORY)
        assert done.returncode == 1
        assert done.stderr == f"ERROR: {tmp_path / place}: a file is in the way of this folder (move the file away)\n"
