"""systemd's settings, as the two that ask for them read them: the checks, and torchtuned-run before a job."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.tree import make_tree

from torchtuned.checks.files import setting
from torchtuned.checks.registry import Machine
from torchtuned.gpus import Gpus
from torchtuned.host import Host
from torchtuned.run import foresee
from torchtuned.systemdconf import is_yes

VENDOR, OWN, RUN = "usr/lib/systemd/logind.conf", "etc/systemd/logind.conf", "run/systemd/logind.conf"


@pytest.mark.parametrize(
    ("files", "value", "where"),
    [
        ({}, "", ""),
        ({VENDOR: "[Login]\nRemoveIPC=no\n"}, "no", VENDOR),
        ({VENDOR: "RemoveIPC=no\n", OWN: "[Login]\n#RemoveIPC=yes\n"}, "", ""),
        ({VENDOR: "RemoveIPC=no\n", OWN: "-> /dev/null"}, "", ""),
        ({VENDOR: "RemoveIPC=no\n", RUN: "RemoveIPC = t\n"}, "t", RUN),
        (
            {f"{VENDOR}.d/50-a.conf": "RemoveIPC=no\n", f"{OWN}.d/50-a.conf": "RemoveIPC=yes\n"},
            "yes",
            f"{OWN}.d/50-a.conf",
        ),
        (
            {f"{VENDOR}.d/60-b.conf": "RemoveIPC=no\n", f"{OWN}.d/50-a.conf": "RemoveIPC=yes\n"},
            "no",
            f"{VENDOR}.d/60-b.conf",
        ),
        (
            {OWN: "RemoveIPC=no\n", f"{RUN}.d/a.conf": "RemoveIPC=1\n", f"{OWN}.d/README": "RemoveIPC=0"},
            "1",
            f"{RUN}.d/a.conf",
        ),
    ],
)
def test_both_read_the_same(tmp_path: Path, files: dict[str, str], value: str, where: str) -> None:
    root = make_tree(tmp_path, {"x": "", **files})
    host = Host(root)
    found = setting(Machine(host, Gpus(host)), "logind.conf", "RemoveIPC")
    assert found == (value, f"/{where}" if where else "")
    assert foresee._logind(str(root)).get("RemoveIPC", "") == value


def test_truth() -> None:
    assert all(map(is_yes, ("1", "yes", "y", "true", "t", "on", " YES ")))
    assert not any(map(is_yes, ("", "0", "no", "n", "false", "f", "off", "maybe")))
