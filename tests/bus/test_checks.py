"""Checks over the bus: what root sees, told to those it concerns."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import MANAGER, OTHER, ROOT, USER, Daemon, PrivateBus

Start = Callable[..., Daemon]
TOP = Path(__file__).resolve().parents[2]


def put(tree: Path, path: str, text: str) -> None:
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(text)


def codes(found: list[dict[str, Any]]) -> set[str]:
    return {item["code"] for item in found}


def test_findings_of_the_host_are_for_all(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    put(tree, "proc/sys/vm/overcommit_memory", "2\n")
    put(tree, "proc/meminfo", "MemTotal: 1000 kB\n")
    daemon("--sysroot", tree)
    [found] = bus.call(ROOT, MANAGER, "Check")
    [finding] = [item for item in found if item["code"] == "TT025"]
    assert set(finding) == {"code", "severity", "class", "title", "evidence", "cost", "fix", "source"}
    assert (finding["severity"], finding["class"]) == ("warning", "ASK")
    with bus.user(OTHER) as other:
        assert "TT025" in codes(other.do("call", ROOT, MANAGER, "Check")[0])


def test_what_could_not_be_looked_at_is_said(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    (tree / "proc/sys/vm/max_map_count").unlink(missing_ok=True)
    daemon("--sysroot", tree)
    [found] = bus.call(ROOT, MANAGER, "Check")
    [row] = [item for item in found if item["code"] == "TT024"]
    assert set(row) == {"code", "severity", "class", "title", "evidence", "cost", "fix", "source"}
    assert (row["severity"], row["title"]) == ("unchecked", "could not be checked")
    assert "/proc/sys/vm/max_map_count" in row["evidence"]


def test_findings_of_a_job_are_for_its_user(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    put(tree, "sys/bus/pci/devices/0000:01:00.0/power/control", "auto\n")
    daemon("--sysroot", tree)
    with bus.user(USER) as job, bus.user(OTHER) as other:
        path, _ = job.start({"gpus": ["0000:01:00.0"]})
        [mine] = job.do("call", ROOT, MANAGER, "Check")
        [finding] = [item for item in mine if item["code"] == "TT045"]
        assert finding["job"] == path.rpartition("/")[2]
        assert "TT045" not in codes(other.do("call", ROOT, MANAGER, "Check")[0])
        assert "TT045" in codes(bus.call(ROOT, MANAGER, "Check")[0])


def test_the_command_adds_what_only_the_daemon_knows(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    """What the command looked at itself is fresher than the daemon's answer, which keeps for some seconds."""
    put(tree, "proc/sys/vm/overcommit_memory", "2\n")
    put(tree, "proc/meminfo", "MemTotal: 1000 kB\n")
    put(tree, "etc/torchtuned/torchtuned.conf", "[cpu]\ngovernor = perfomance\n")
    daemon("--sysroot", tree)
    environment = {**bus.environment, "COLUMNS": "80"}
    command = [sys.executable, "-m", "torchtuned", "check", "--json"]
    done = subprocess.run(command, env=environment, cwd=TOP, capture_output=True, text=True, timeout=60, check=False)
    found = {item["code"] for item in json.loads(done.stdout)["findings"]}
    assert "degraded" in found  # the daemon's own
    assert "TT025" not in found  # this machine, which the command sees, has it not
