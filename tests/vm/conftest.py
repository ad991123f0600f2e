"""One machine for all tests of this folder, in the order of ORDER: each boot costs a minute or two.

TORCHTUNED_DEB is the package to try, TORCHTUNED_SUITE the Debian release; tests/run sets both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import image
import pytest
from fakes.deb import with_version
from inside import INSTALL, NO_JOBS, ORIGINALS, ORIGINALS_UNIT, STATE, governors, wait_for
from machine import SHARE, Machine

if "TORCHTUNED_DEB" not in os.environ:
    collect_ignore_glob = ["test_*.py"]

HERE = Path(__file__).parent
ORDER = (
    "test_bus",
    "test_check",
    "test_jobs",
    "test_placement_kinds",
    "test_sleep",
    "test_neighbours",
    "test_policy",
    "test_autopkgtest",
    "test_gpus",
    "test_tally",
    "test_removal",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the files in their order; what is removed stays removed."""
    items.sort(key=lambda item: ORDER.index(item.path.stem) if item.path.stem in ORDER else -1)


def pytest_report_header() -> str | None:
    """Say that the machine is not tried."""
    return None if "TORCHTUNED_DEB" in os.environ else "emulated machines: not tried, they need tests/run vm"


@pytest.fixture(scope="session")
def suite() -> str:
    """The Debian release in the machine."""
    return os.environ["TORCHTUNED_SUITE"]


@pytest.fixture(scope="session")
def machine(suite: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """The machine, up, with the package installed by its administrator."""
    deb = Path(os.environ["TORCHTUNED_DEB"])
    older = with_version(deb, "0.0.1", tmp_path_factory.mktemp("deb") / "older.deb")
    with Machine(image.build(suite)) as machine:
        (machine.share / "torchtuned.deb").write_bytes(deb.read_bytes())
        machine.put(older, HERE / "job.py", HERE / "masks.py", HERE / "tally.py")
        (machine.share / "originals.service").write_text(ORIGINALS_UNIT)
        machine.check(f"cp {SHARE}/originals.service /etc/systemd/system/ && systemctl enable --now originals.service")
        assert governors(machine) == ORIGINALS
        machine.check("rm -f /var/lib/man-db/auto-update")  # indexing all manual pages takes a minute each time
        print(machine.check(f"{INSTALL} {SHARE}/torchtuned.deb"))
        yield machine


@pytest.fixture
def ready(machine: Machine) -> Iterator[Machine]:
    """The machine with the daemon ready and no jobs, before the test and after it.

    A machine that stood still in the test before is started again; tests/parts.py has that test run once more.
    """
    if machine.stands_still:
        machine.power_cut()
        machine.boot()
    machine.check("systemctl is-active -q torchtuned || systemctl start torchtuned")
    wait_for(machine, f"{STATE} | grep ready")
    yield machine
    if machine.stands_still:
        return
    machine.sh("systemctl kill -s CONT torchtuned")
    machine.check(f"pkill -KILL -f {SHARE}/job.py || true")
    wait_for(machine, NO_JOBS)
