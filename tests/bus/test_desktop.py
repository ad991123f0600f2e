"""What logind, power-profiles-daemon and PID 1's FD store see of running jobs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import MANAGER, ROOT, USER, Daemon, PrivateBus, Service

Start = Callable[..., Daemon]
Fake = Callable[..., Service]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def session(bus: PrivateBus) -> dict[str, tuple[str, ...]]:
    """The rows of verify about the desktop, without their names and sources."""
    found = bus.call(ROOT, MANAGER, "Verify")[0]
    return {row[0].removeprefix("session/"): tuple(row[1:5]) for row in found if row[0].startswith("session/")}


def test_no_sleep_and_the_performance_profile_while_jobs_run(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path
) -> None:
    desktop = services("logind", "ppd")
    one = daemon("--sysroot", tree)
    one.wait_for("STATUS=ready")
    assert desktop.get("inhibitors") == []
    assert session(bus) == {
        "inhibit": ("", "sleep idle", "kept", "sleep idle while a job runs"),
        "power_profile": ("", "performance", "kept", "performance while a job runs"),
    }
    with bus.user(USER) as job:
        job.start()
        until(lambda: desktop.get("inhibitors") == ["sleep:idle"])
        until(lambda: [hold[0] for hold in desktop.get("holds")] == ["performance"])
        until(lambda: {row[2:] for row in session(bus).values()} == {("applied", "held by torchtuned while jobs run")})
        one.wait_for("FDSTORE=1")
        assert list(one.kept) == ["inhibitor"]
        assert desktop.calls("Inhibit") == [["sleep:idle", "torchtuned", "a training job runs", "block-weak"]]
    one.wait_for("FDSTOREREMOVE=1")
    until(lambda: desktop.get("inhibitors") == [])
    until(lambda: desktop.get("holds") == [])


def test_a_logind_without_weak_inhibitors_is_asked_for_the_other(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path
) -> None:
    desktop = services("logind")
    desktop.set("modes", ["block", "delay"])
    daemon("--sysroot", tree).wait_for("STATUS=ready")
    with bus.user(USER) as job:
        job.start()
        until(lambda: desktop.get("inhibitors") == ["sleep:idle"])
        assert [call[-1] for call in desktop.calls("Inhibit")] == ["block-weak", "block"]


def test_the_session_section_decides(bus: PrivateBus, services: Fake, daemon: Start, tree: Path) -> None:
    desktop = services("logind", "ppd")
    (tree / "etc/torchtuned").mkdir(parents=True)
    (tree / "etc/torchtuned/torchtuned.conf").write_text("[session]\ninhibit = none\npower_profile = keep\n")
    daemon("--sysroot", tree).wait_for("STATUS=ready")
    with bus.user(USER) as job:
        path, _ = job.start()
        job.release(path)
    assert desktop.calls("Inhibit") == desktop.calls("HoldProfile") == []
    assert {row[1:] for row in session(bus).values()} == {("keep", "kept", "keep")}


def test_a_machine_without_a_desktop_says_so(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree).wait_for("STATUS=ready")
    with bus.user(USER) as job:
        job.start()
        until(lambda: {row[2] for row in session(bus).values()} == {"unsupported"})
        assert session(bus)["inhibit"][3] == "org.freedesktop.login1 does not run"


def test_a_restart_keeps_the_inhibitor(bus: PrivateBus, services: Fake, daemon: Start, tree: Path) -> None:
    desktop = services("logind")
    first = daemon("--sysroot", tree)
    with bus.user(USER) as job:
        job.start()
        first.wait_for("FDSTORE=1")
        kept = os.dup(first.kept["inhibitor"])
        first.stop(signal.SIGKILL)
        assert desktop.get("inhibitors") == ["sleep:idle"]  # as systemd still has it
        second = daemon("--sysroot", tree, keep={"inhibitor": kept})
        os.close(kept)
        second.wait_for("STATUS=ready")
        assert desktop.get("inhibitors") == ["sleep:idle"]
        assert len(desktop.calls("Inhibit")) == 1
    second.wait_for("FDSTOREREMOVE=1")
    until(lambda: desktop.get("inhibitors") == [])


def test_a_descriptor_kept_for_jobs_that_are_gone_is_given_back(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path
) -> None:
    desktop = services("logind")
    first = daemon("--sysroot", tree)
    job = bus.user(USER)
    job.start()
    first.wait_for("FDSTORE=1")
    kept = os.dup(first.kept["inhibitor"])
    first.stop(signal.SIGKILL)
    job.kill()
    second = daemon("--sysroot", tree, keep={"inhibitor": kept})
    os.close(kept)
    second.wait_for("FDSTOREREMOVE=1")
    until(lambda: desktop.get("inhibitors") == [])


def test_power_profiles_daemon_that_starts_anew_is_asked_anew(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path
) -> None:
    daemon("--sysroot", tree).wait_for("STATUS=ready")
    with bus.user(USER) as job:
        job.start()
        for _ in range(2):
            profiles = services("ppd")
            until(lambda asked=profiles: asked.get("holds") == [["performance", "a training job runs", "torchtuned"]])
            profiles.stop()


@pytest.mark.parametrize("member", ["Inhibit", "HoldProfile"])
def test_a_desktop_that_hangs_holds_up_no_job(
    bus: PrivateBus, services: Fake, daemon: Start, tree: Path, member: str
) -> None:
    services("logind", "ppd").set("hang", [member])
    daemon("--sysroot", tree)
    with bus.user(USER) as job:
        before = time.monotonic()
        assert job.start()[1]["state"] == "running"
        assert time.monotonic() - before < 2
