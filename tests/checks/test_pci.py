"""The PCI switches between GPUs, whose registers only root may read."""

from __future__ import annotations

import struct
from pathlib import Path

from fakes.tree import PCI, machine, make_tree

from torchtuned.checks import run_checks
from torchtuned.findings import Finding, Unchecked
from torchtuned.gpus import Gpus
from torchtuned.host import Host

ROOT_PORT, UPSTREAM, DOWN_A, DOWN_B = "0000:00:01.0", "0000:01:00.0", "0000:02:08.0", "0000:02:10.0"
A, B = "0000:03:00.0", "0000:04:00.0"


def config(control: int) -> bytes:
    """A configuration space with two extended capabilities: a serial number at 0x100, ACS at 0x148."""
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x0003 | 1 << 16 | 0x148 << 20)
    struct.pack_into("<IHH", space, 0x148, 0x000D | 1 << 16, 0x5F, control)
    return bytes(space)


def look(folder: Path, *, space: bytes) -> tuple[list[Finding], list[Unchecked]]:
    gpus = {
        A: {"numa_node": "0", "parents": f"{ROOT_PORT} {UPSTREAM} {DOWN_A}"},
        B: {"numa_node": "0", "parents": f"{ROOT_PORT} {UPSTREAM} {DOWN_B}"},
    }
    files = machine(cores=["0", "1"], gpus=gpus)
    for bridge in (UPSTREAM, DOWN_A, DOWN_B):
        files[f"{PCI}/{bridge}/config"] = space if bridge != UPSTREAM else config(0)
    make_tree(folder, files)
    host = Host(folder)
    return run_checks(host, Gpus(host), ["TT064"])


def test_tt064_redirects_between_gpus(tmp_path: Path) -> None:
    [finding], _ = look(tmp_path, space=config(0x1D))
    assert f"ACS redirects on {DOWN_A}, {DOWN_B}" in finding.evidence


def test_tt064_off_is_fine(tmp_path: Path) -> None:
    assert look(tmp_path, space=config(0x01)) == ([], [])


def test_tt064_is_unchecked_for_others_than_root(tmp_path: Path) -> None:
    findings, [unchecked] = look(tmp_path, space=config(0x1D)[:64])
    assert findings == []
    assert "root" in unchecked.because


def test_tt064_a_damaged_list_of_capabilities_ends(tmp_path: Path) -> None:
    space = bytearray(config(0x1D))
    struct.pack_into("<I", space, 0x100, 0x0003 | 1 << 16 | 0x100 << 20)
    assert look(tmp_path, space=bytes(space)) == ([], [])
