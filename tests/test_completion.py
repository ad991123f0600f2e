"""Completion as a person meets it: an interactive bash on a terminal, words half typed, and the Tab key."""

from __future__ import annotations

import os
import pty
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.tree import make_tree

TOP = Path(__file__).resolve().parent.parent
COMPLETION = TOP / "share/bash-completion/completions/torchtuned"
READY = "ready>"
Typed = Callable[[str], str]


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[Typed]:
    """Types a line and Tab, and tells how the line looks then. `torchtuned` is ours, on a machine in a folder."""
    root = make_tree(
        tmp_path / "root",
        {
            "proc/sys/vm/swappiness": "60\n",
            "proc/sys/vm/zone_reclaim_mode": "0\n",
            "proc/sys/kernel/numa_balancing": "1\n",
            "proc/sys/net/core/somaxconn": "4096\n",
            "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
            "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
            "sys/bus/pci/devices/0000:01:00.0/device": "0x20b0\n",
            "sys/bus/pci/devices/0000:01:00.0/power/control": "auto\n",
        },
    )
    (root / "usr/share").mkdir(parents=True)
    (root / "usr/share/torchtuned").symlink_to(TOP / "share/torchtuned")
    reports = '[\\n  {\\n    "job": "12",\\n    "report": "12-1"\\n  }\\n]'
    program = tmp_path / "torchtuned"
    program.write_text(
        f"#!/bin/sh\n[ $1 = report ] && {{ printf '{reports}'; exit; }}\n"
        f'cd {shlex.quote(str(TOP))} && exec {sys.executable} -m torchtuned "$@" --sysroot {root}\n'
    )
    program.chmod(0o755)
    rc = tmp_path / "rc"
    rc.write_text(
        "source /usr/share/bash-completion/bash_completion\n"
        f"source {COMPLETION}\nbind 'set bell-style none'\nPS1='{READY}'\n"
        """bind -x '"\\C-t": printf "<<%s>>" "$READLINE_LINE"; READLINE_LINE='\n"""
    )
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TERM": "dumb", "HOME": str(tmp_path), "COLUMNS": "200"}
    master, slave = pty.openpty()
    bash = subprocess.Popen(["bash", "--noprofile", "--rcfile", rc, "-i"], stdin=slave, stdout=slave, stderr=slave,
                            env=environment, start_new_session=True, cwd=tmp_path)  # fmt: skip
    os.close(slave)
    until(master, READY)

    def line(words: str) -> str:
        os.write(master, f"{words}\t\x14".encode())
        return until(master, ">>").rpartition("<<")[2].partition(">>")[0]

    yield line
    bash.kill()
    bash.wait(10)
    os.close(master)


def until(master: int, text: str) -> str:
    said = ""
    end = time.monotonic() + 60
    while text not in said:
        ready, _, _ = select.select([master], [], [], max(0.0, end - time.monotonic()))
        assert ready, said
        said += os.read(master, 65536).decode(errors="replace")
    return said


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("torchtuned wh", "torchtuned why "),
        ("torchtuned why sysctl/vm.sw", "torchtuned why sysctl/vm.swappiness "),
        ("torchtuned why vm.sw", "torchtuned why sysctl/vm.swappiness "),
        ("torchtuned undo vm.", "torchtuned undo sysctl/vm."),
        ("torchtuned undo somax", "torchtuned undo sysctl/net.core.somaxconn "),
        ("torchtuned why gpu/0000:01:00.0/power_", "torchtuned why gpu/0000:01:00.0/power_control "),
        ("torchtuned why power_c", "torchtuned why gpu/0000:01:00.0/power_control "),
        ("torchtuned why nothing_like_it", "torchtuned why nothing_like_it"),
        ("torchtuned report 1", "torchtuned report 12 "),
        ("torchtuned check --js", "torchtuned check --json "),
    ],
)
def test_half_a_word_and_tab(typed: Typed, words: str, completed: str) -> None:
    assert typed(words) == completed
