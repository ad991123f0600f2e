"""What breaks a daemon, many times over, with jobs of two users and a service running: tally.py does and counts it.

TORCHTUNED_MOMENTS (default 4) is how often the daemon is killed; the rest is in proportion. A table says what was
done, and how long the machine took at most to be all right again, by itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest
from inside import JOB, MANAGER, NO_JOBS, STATE, is_original, is_tuned, listed, start, wait_for
from machine import SHARE, Machine

MOMENTS = int(os.environ.get("TORCHTUNED_MOMENTS", "4"))
SEED = 7
FEW = max(1, MOMENTS // 10)
Tell = Callable[[str], None]
HEADING = f"{'':24}{'moments':>8}{'failed':>8}{'slowest s':>10}{'jobs':>6}{'took s':>8}  notes"


@pytest.fixture(scope="module")
def tell(request: pytest.FixtureRequest, suite: str) -> Tell:
    """Print a line of the tally, as it comes: a run that is cut short has told what it counted so far."""
    terminal = request.config.pluginmanager.getplugin("terminalreporter")
    terminal.write_line(f"\n{suite}: {HEADING}")
    return lambda line: terminal.write_line(f"\n{suite}: {line}")


def start_jobs(machine: Machine) -> None:
    """A job of alice, one of bob with a GPU, and a service that is one."""
    start(machine, "a", f"exec torchtuned-run --cpus 2 --gpus none {JOB}", user="alice")
    start(machine, "b", f"exec torchtuned-run --gpus 1 {JOB}", user="bob")
    machine.check(f"systemd-run -q --collect --unit svc torchtuned-run --cpus 1 --gpus none {JOB}")
    wait_for(machine, f"busctl get-property {MANAGER} Jobs | grep -x 'u 3'")


@pytest.fixture
def busy(ready: Machine) -> Machine:
    """The machine with jobs, which `ready` ends."""
    start_jobs(ready)
    return ready


def play(machine: Machine, tell: Tell, what: str, scenario: str, count: int) -> None:
    """One scenario in the machine; nothing may have failed."""
    out = machine.check(f"python3 -B {SHARE}/tally.py {scenario} {count} {SEED}", 600 + 60 * count)
    row = json.loads(out.splitlines()[-1])
    notes = ", ".join(f"{note} {times}" for note, times in row["notes"].items())
    figures = f"{row['moments']:8}{len(row['failed']):8}{row['slowest_s']:10}{row['jobs']:6}{row['seconds']:8}"
    tell(f"{what:24}{figures}  {notes}")
    for line in row["failed"]:
        tell(f"    {line}")
    assert row["failed"] == []


def test_power_cut_with_jobs(ready: Machine, tell: Tell) -> None:
    """What ran is gone, and nothing of it is left on record."""
    if not ready.gpus:
        start(ready, "a", f"exec torchtuned-run --cpus 2 {JOB}", user="alice")
    else:
        start_jobs(ready)
    ready.check("sync")
    ready.power_cut()
    ready.gpus = (1, 3)
    ready.boot()
    wait_for(ready, f"{STATE} | grep ready")
    assert is_tuned(ready)
    assert listed(ready) == []
    play(ready, tell, "power cut", "look", 1)


def test_killed_at_random_moments(busy: Machine, tell: Tell) -> None:
    play(busy, tell, "SIGKILL", "kills", MOMENTS)


def test_the_bus_dies(busy: Machine, tell: Tell) -> None:
    play(busy, tell, "bus killed", "bus", FEW)


def test_run_is_full(busy: Machine, tell: Tell) -> None:
    play(busy, tell, "/run full", "full", FEW)


def test_cpus_go_and_come(busy: Machine, tell: Tell) -> None:
    play(busy, tell, "CPUs off and on", "storm", MOMENTS // 2)


def test_upgrade_removal_and_back_with_jobs(busy: Machine, tell: Tell) -> None:
    play(busy, tell, "upgrade, remove, again", "dpkg", FEW)


def test_purge_and_back(ready: Machine, tell: Tell) -> None:
    wait_for(ready, NO_JOBS)
    play(ready, tell, "purge, again", "purge", FEW)
    ready.check("systemctl stop torchtuned")
    assert is_original(ready)
