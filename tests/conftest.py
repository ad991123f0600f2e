"""Snapshots of real machines lie outside of the repository; tests that take the fixture `snapshot` run on each.

Without the folder those tests are not collected, and one line says so.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ.get("TORCHTUNED_TOPOLOGIES") or Path(__file__).resolve().parents[2] / "shared/topologies")
NAMES = sorted(path.name.removesuffix(".tar.gz") for path in FOLDER.glob("*.tar.gz"))


@dataclass(frozen=True)
class Snapshot:
    """One machine: its files at `root`, and what tools that are not ours `agreed` on about it."""

    name: str
    root: Path
    agreed: dict[str, Any]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "snapshot" in metafunc.fixturenames:
        metafunc.parametrize("snapshot", NAMES, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if NAMES:
        return
    needing = [item for item in items if "snapshot" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=needing)
    items[:] = [item for item in items if item not in needing]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not NAMES:
        terminalreporter.write_line(f"no machine snapshots in {FOLDER}: the tests on them were not collected")


@pytest.fixture(scope="session")
def snapshot(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    name = request.param
    folder = tmp_path_factory.mktemp("snapshot")
    subprocess.run(["tar", "xzf", FOLDER / f"{name}.tar.gz", "-C", folder], check=True)
    document = json.loads((FOLDER / f"{name}.json").read_text())
    return Snapshot(name=name, root=folder / name, agreed=document["agreed"])
