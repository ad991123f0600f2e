from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from fakes.kernel import NO_LIMIT, Kernel
from fakes.policy import Desk

from torchtuned.policy import Outcome

DEVICE = "/dev/cpu_dma_latency"
ID = "latency/cpu_dma_latency"
SKYLAKE = [("POLL", 0), ("C1", 1), ("C1E", 2), ("C6", 170)]
EPYC = [("POLL", 0), ("C1", 1), ("C2", 5), ("C1E", 10)]
TEXT = "[cpu]\nlatency_us = 20\n"


def machine(states: list[tuple[str, int]], cpu: int = 0) -> dict[str, str]:
    files = {"/sys/devices/system/cpu/online": "0-7"}
    for number, (name, latency) in enumerate(states):
        folder = f"/sys/devices/system/cpu/cpu{cpu}/cpuidle/state{number}"
        files |= {f"{folder}/name": name, f"{folder}/latency": str(latency), f"{folder}/disable": "0"}
    return files


class Told:
    """What the engine says about descriptors, as the daemon hears it."""

    def __init__(self) -> None:
        self.open: dict[str, int] = {}

    def hold(self, knob: str, fd: int) -> None:
        assert knob not in self.open
        self.open[knob] = fd

    def release(self, knob: str) -> None:
        os.fstat(self.open.pop(knob))  # told before it is closed


@pytest.fixture
def told() -> Told:
    return Told()


def desk(tmp_path: Path, told: Told, files: dict[str, str]) -> Desk:
    kernel = Kernel(files)
    kernel.holders[DEVICE] = []
    return Desk(kernel, tmp_path, on_hold=told.hold, on_release=told.release)


def test_states_are_chosen_by_latency_not_by_number(tmp_path: Path, told: Told) -> None:
    made = desk(tmp_path, told, machine(SKYLAKE))
    row = made.apply(TEXT)[ID]
    assert (row.outcome, row.current) == (Outcome.APPLIED, "2")
    assert row.reason == "held by torchtuned, at 20; was 170"
    assert made.kernel.held(DEVICE) == 20
    other = desk(tmp_path / "other", told, machine(EPYC))
    row = other.apply(TEXT)[ID]
    assert (row.outcome, row.reason, row.current) == (Outcome.KEPT, "already lower", "10")
    assert other.kernel.held(DEVICE) == NO_LIMIT


def test_held_while_jobs_run_and_let_go_after(tmp_path: Path, told: Told) -> None:
    made = desk(tmp_path, told, machine(SKYLAKE))
    assert made.apply(TEXT, jobs=False)[ID].reason == "20 while a job runs"
    assert not told.open
    made.apply(TEXT)
    fd = told.open[ID]
    assert made.apply(TEXT)[ID].outcome is Outcome.APPLIED
    assert made.verify(TEXT)[ID].outcome is Outcome.APPLIED
    assert told.open == {ID: fd}
    made.apply(TEXT, jobs=False)
    assert not told.open
    assert made.kernel.held(DEVICE) == NO_LIMIT
    assert made.ledger() == []  # the kernel itself gives it back when its holder dies


@pytest.mark.parametrize("how", ["undo all", "undo it", "no job", "other profile", "other value"])
def test_every_way_of_letting_go(tmp_path: Path, told: Told, how: str) -> None:
    made = desk(tmp_path, told, machine(SKYLAKE))
    made.apply(TEXT)
    match how:
        case "undo all":
            assert made.undo()[ID].outcome is Outcome.APPLIED
        case "undo it":
            made.undo(ID)
        case "no job":
            made.apply(TEXT, jobs=False)
        case "other profile":
            made.apply("[cpu]\nboost = keep\n")
        case "other value":
            made.apply("[cpu]\nlatency_us = 1\n")
    assert (ID in told.open) is (how == "other value")
    assert made.kernel.held(DEVICE) == (1 if how == "other value" else NO_LIMIT)


def test_a_descriptor_kept_over_a_restart_is_adopted_and_renewed(tmp_path: Path, told: Told) -> None:
    made = desk(tmp_path, told, machine(SKYLAKE))
    made.apply(TEXT)
    kept = os.dup(told.open[ID])
    os.close(told.open[ID])  # as SIGKILL does
    made.restart()
    assert made.kernel.held(DEVICE) == 20
    made.engine.adopt(ID, kept)
    made.apply(TEXT)
    assert (made.kernel.held(DEVICE), [*told.open]) == (20, [ID])
    made.apply(TEXT, jobs=False)
    assert (made.kernel.held(DEVICE), told.open) == (NO_LIMIT, {})


def test_adopted_with_no_job_left_it_is_let_go(tmp_path: Path, told: Told) -> None:
    made = desk(tmp_path, told, machine(SKYLAKE))
    made.apply(TEXT)
    made.restart()
    made.engine.adopt(ID, told.open[ID])
    made.apply(TEXT, jobs=False)
    assert (made.kernel.held(DEVICE), told.open) == (NO_LIMIT, {})


def test_unlike_cores_count_both_kinds(tmp_path: Path, told: Told) -> None:
    files = machine(EPYC) | machine([("C1E", 2), ("C8", 300)], cpu=6) | {"/sys/devices/cpu_atom/cpus": "6-7"}
    files["/sys/devices/system/cpu/online"] = "0-7"
    assert desk(tmp_path, told, files).apply(TEXT)[ID].outcome is Outcome.APPLIED


def test_a_state_that_is_disabled_does_not_count(tmp_path: Path, told: Told) -> None:
    files = machine(SKYLAKE) | {"/sys/devices/system/cpu/cpu0/cpuidle/state3/disable": "1"}
    assert desk(tmp_path, told, files).apply(TEXT)[ID].outcome is Outcome.KEPT


def test_without_idle_states_it_is_unsupported(tmp_path: Path, told: Told) -> None:
    row = desk(tmp_path, told, {"/sys/devices/system/cpu/online": "0"}).apply(TEXT)[ID]
    assert (row.outcome, row.reason) == (
        Outcome.UNSUPPORTED, "no idle states are known here, as in most virtual machines",
    )  # fmt: skip


def test_the_device_of_this_machine_takes_it_and_gives_it_back(tmp_path: Path) -> None:
    """The real file, on a machine whose idle states are made up."""
    from torchtuned.host import Host
    from torchtuned.tunables.latency import Latency

    def now() -> int:
        value: int = struct.unpack("=i", Path(DEVICE).read_bytes())[0]
        return value

    before = now()
    fd = Latency().hold(Host("/"), "33")
    try:
        assert now() == min(33, before)
    finally:
        os.close(fd)
    assert now() == before
