"""The checks as the daemon runs them, on this machine: what its sandbox hides is said, not judged."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fakes.tree import make_tree

from torchtuned.checks import REGISTRY
from torchtuned.findings import Finding, Unchecked
from torchtuned.gpus import Gpus
from torchtuned.host import Host
from torchtuned.hostchecks import HIDDEN, HostChecks


def looked(host: Host) -> tuple[list[Finding], list[Unchecked]]:
    async def ask() -> tuple[list[Finding], list[Unchecked]]:
        checks = HostChecks(host, Gpus(host), jobs=list, ours=frozenset)
        return await checks.look()

    return asyncio.run(ask())


def test_what_the_sandbox_hides_is_unchecked() -> None:
    found, unchecked = looked(Host())
    assert not {finding.code for finding in found} & HIDDEN.keys()
    said = {item.code: item.because for item in unchecked}
    assert said["TT032"] == "the daemon does not see /home: torchtuned check does"
    assert HIDDEN.keys() <= said.keys() & REGISTRY.keys()


def test_in_a_folder_nothing_is_hidden(tmp_path: Path) -> None:
    pipes = {"tmp/nvidia-mps/control": "", "proc/1/comm": "systemd\n", "proc/1/stat": "1 (systemd) S 0 1\n"}
    found, _ = looked(Host(make_tree(tmp_path, pipes)))
    assert "TT069" in {finding.code for finding in found}
