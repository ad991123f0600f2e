"""The torchtuned command against the real daemon on a private bus."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import REPOSITORY, USER, Daemon, PrivateBus

Start = Callable[..., Daemon]


def torchtuned(bus: PrivateBus, *words: str, uid: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchtuned", *words]
    if uid:
        command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *command]
    env = {**bus.environment, "COLUMNS": "80", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=60, cwd=REPOSITORY, check=False)


def document(bus: PrivateBus, *words: str) -> Any:
    return json.loads(torchtuned(bus, *words, "--json").stdout)


@pytest.fixture
def ready(daemon: Start, tree: Path) -> Daemon:
    one = daemon("--sysroot", tree)
    one.wait_for("ready")
    return one


@pytest.mark.usefixtures("ready")
def test_status(bus: PrivateBus) -> None:
    done = torchtuned(bus, "status", uid=USER)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("torchtuned 0.1.0: ready, profile training\n  0 jobs, 2 GPUs\n")
    answer = document(bus, "status")
    assert (answer["schema"], answer["state"], answer["profile"]) == (1, "ready", "training")
    assert answer["knobs"][0].keys() == {"knob", "current", "wanted", "outcome", "reason", "source"}


def test_drift_is_told_and_left(bus: PrivateBus, ready: Daemon, tree: Path) -> None:
    swappiness = tree / "proc/sys/vm/swappiness"
    assert swappiness.read_text().strip() == "10"
    assert torchtuned(bus, "verify").returncode == 0
    swappiness.write_text("33\n")
    done = torchtuned(bus, "verify")
    assert done.returncode == 1
    assert "drifted" in done.stdout
    assert "sysctl/vm.swappiness" in torchtuned(bus, "status").stdout
    assert torchtuned(bus, "status").returncode == 1
    assert swappiness.read_text() == "33\n"


def test_status_without_the_knobs(bus: PrivateBus, ready: Daemon) -> None:
    (ready.run_dir / "ledger.json").write_text("[" * 200_000)
    done = torchtuned(bus, "status")
    assert done.returncode == 1
    assert done.stdout.startswith("torchtuned 0.1.0: ready, profile training\n  0 jobs, 2 GPUs\n")
    assert "; knobs: " in done.stdout
    assert "ledger.json: the ledger cannot be read" in done.stdout
    answer = document(bus, "status")
    assert (answer["state"], answer["knobs"]) == ("ready", [])
    assert "remove that file" in answer["error"]


def test_names_of_files_are_no_commands_to_the_terminal(bus: PrivateBus, ready: Daemon, tree: Path) -> None:
    (tree / "etc/torchtuned/conf.d").mkdir(parents=True)
    (tree / "etc/torchtuned/conf.d/a\x1b[2J\nb.conf").write_text("[cpu]\ngovernor = performance\n")
    assert torchtuned(bus, "reload").returncode == 0
    for words in (("config", "--sysroot", str(tree)), ("plan",), ("why", "cpu/policy0/governor")):
        assert "\x1b" not in torchtuned(bus, *words).stdout
    assert "\nb.conf" not in torchtuned(bus, "config", "--sysroot", str(tree)).stdout
    (tree / "etc/torchtuned/conf.d/a\x1b[2J\nb.conf").write_text("[cpu]\ngovernorr = performance\n")
    assert torchtuned(bus, "reload").returncode == 2
    status = torchtuned(bus, "status").stdout
    assert "degraded: configuration: " in status
    assert "\x1b" not in status


def test_undo_and_apply(bus: PrivateBus, ready: Daemon, tree: Path) -> None:
    swappiness = tree / "proc/sys/vm/swappiness"
    done = torchtuned(bus, "undo", "sysctl/vm.swappiness", "--json")
    assert (done.returncode, swappiness.read_text().strip()) == (0, "60")
    answer = json.loads(done.stdout)
    assert (answer["schema"], answer["state"], answer["profile"]) == (1, "ready", "training")
    assert [(row["knob"], row["outcome"]) for row in answer["knobs"]] == [("sysctl/vm.swappiness", "applied")]
    assert torchtuned(bus, "undo").returncode == 0
    status = torchtuned(bus, "status")
    assert "stopped" in status.stdout
    assert "torchtuned apply" in status.stdout
    assert "; given back by undo since\n" in status.stdout
    assert "failed" not in status.stdout
    assert status.returncode == 0
    done = torchtuned(bus, "apply", "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["schema"], answer["state"]) == (0, 1, "ready")
    assert {row["knob"]: row["outcome"] for row in answer["knobs"]}["sysctl/vm.swappiness"] == "applied"
    assert swappiness.read_text().strip() == "10"


@pytest.mark.usefixtures("ready")
def test_no_such_knob(bus: PrivateBus) -> None:
    done = torchtuned(bus, "undo", "sysctl/vm.swapiness")
    assert done.returncode == 1
    assert "sysctl/vm.swapiness" in done.stderr


@pytest.mark.parametrize("words", [("apply",), ("undo",), ("reload",), ("profile", "set", "observe")], ids=" ".join)
def test_a_user_may_not(bus: PrivateBus, ready: Daemon, tree: Path, words: tuple[str, ...]) -> None:
    done = torchtuned(bus, *words, uid=USER)
    assert (done.returncode, done.stdout) == (77, "")
    assert done.stderr.startswith("torchtuned: ")
    assert (tree / "proc/sys/vm/swappiness").read_text().strip() == "10"


@pytest.mark.usefixtures("ready")
def test_profile_set(bus: PrivateBus) -> None:
    assert torchtuned(bus, "profile", "set", "observe").stdout == "ready, profile observe\n"
    assert document(bus, "status")["profile"] == "observe"
    done = torchtuned(bus, "profile", "set", "obsrve")
    assert done.returncode == 2
    assert "did you mean 'observe'?" in done.stderr


def test_reload_with_a_mistake(bus: PrivateBus, ready: Daemon, tree: Path) -> None:
    (tree / "etc/torchtuned/conf.d").mkdir(parents=True)
    (tree / "etc/torchtuned/conf.d/50.conf").write_text("[cpu]\ngovernorr = performance\n")
    done = torchtuned(bus, "reload")
    assert done.returncode == 2
    assert "/etc/torchtuned/conf.d/50.conf:2" in done.stderr
    assert torchtuned(bus, "status").returncode == 1


@pytest.mark.usefixtures("ready")
def test_jobs_and_gpus(bus: PrivateBus) -> None:
    assert document(bus, "jobs") == []
    with bus.user(USER) as process:
        path, _ = process.start({"gpus": 1, "command": ["train.py"]})
        [job] = document(bus, "jobs")
        assert (job["path"], job["pid"], job["uid"], job["state"]) == (path, process.pid, USER, "running")
        assert job["gpus"] == ["0000:01:00.0"]
        table = torchtuned(bus, "jobs").stdout
        assert max(map(len, table.splitlines())) <= 80
        assert "nobody" in table
        gpus = {gpu["address"]: gpu for gpu in document(bus, "gpus")}
        assert (gpus["0000:01:00.0"]["job"], gpus["0000:81:00.0"]["job"]) == (path, "/")
        assert gpus["0000:01:00.0"]["numanode"] == 0
        table = torchtuned(bus, "gpus").stdout
        assert max(map(len, table.splitlines())) <= 80
        assert "free" in table


def test_a_daemon_that_hangs(bus: PrivateBus, ready: Daemon) -> None:
    import signal

    ready.process.send_signal(signal.SIGSTOP)
    try:
        done = torchtuned(bus, "jobs")
    finally:
        ready.process.send_signal(signal.SIGCONT)
    assert (done.returncode, done.stdout) == (69, "")
    assert "did not answer" in done.stderr


def test_a_daemon_that_is_not_there(bus: PrivateBus) -> None:
    done = torchtuned(bus, "status")
    assert done.returncode == 69
    way_out = "systemctl start torchtuned" if Path("/run/systemd/system").is_dir() else "torchtunedd needs systemd"
    assert way_out in done.stderr
