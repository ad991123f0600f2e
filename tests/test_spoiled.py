"""Whatever a file of the machine says, the readers of sysfs, procfs and cgroups come to an answer or name the file."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import pytest
from fakes.fuzz import SPOILINGS, Spoiled, Spoiling, often
from fakes.sound import SCOPE, SESSION, build
from hypothesis import given
from hypothesis import strategies as st

from torchtuned import discover, scopes
from torchtuned.checks import run_checks
from torchtuned.config import load
from torchtuned.cpulimits import limits
from torchtuned.engine import Engine
from torchtuned.errors import TorchtunedError
from torchtuned.gpus import Gpus
from torchtuned.ledger import Ledger
from torchtuned.placement import Request, place
from torchtuned.policy import DEGRADING, Outcome

GPUS: list[int | tuple[()] | None] = [None, 1, 2, ()]
CGROUPS = [f"/{SESSION}", f"/{SCOPE}", "/", "", "/../..", "/a.slice/session-1.scope/\n"]
EVERYTHING = """\
[cpu]
governor = performance|schedutil
energy_performance_preference = performance
boost = on
min_perf_pct = >=50
[memory]
transparent_hugepage = madvise
[sysctl]
vm.swappiness = <=10
net.core.somaxconn = >=4096
vm.dirty_bytes = 500000000
[block:data]
device = nvme*
read_ahead_kb = >=4096
scheduler = none|mq-deadline
[gpu]
power_control = on
"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("sound"), {}).root


@often(60)
@given(SPOILINGS, st.sampled_from(GPUS))
def test_topology_and_places(sound: Path, spoiling: Spoiling, gpus: int | tuple[()] | None) -> None:
    host = Spoiled(sound, spoiling)
    machine = discover.topology(host)
    assert machine.allowed <= machine.online
    assert sorted(cpu for core in machine.cores for cpu in core.cpus) == sorted(machine.online)
    assert all(node.cpus <= machine.online for node in machine.nodes)
    found = limits(host, 4000)
    assert found.cpu_max is None or found.cpu_max >= 1
    request = Request(gpus=gpus, affinity=found.affinity or None)
    with contextlib.suppress(TorchtunedError):
        grant = place(machine, [], request)
        assert grant.cpus <= machine.online
        assert grant.threads >= 1


@often(40)
@given(SPOILINGS)
def test_policy(sound: Path, tmp_path_factory: pytest.TempPathFactory, spoiling: Spoiling) -> None:
    """Every knob of every family has a row; none is said to be in force that cannot be read."""
    host = Spoiled(sound, spoiling)
    engine = Engine(host, Ledger(tmp_path_factory.getbasetemp() / "no-ledger.json"))
    config = load([("/etc/fuzz.conf", EVERYTHING)])
    for rows in (engine.plan(config), engine.verify(config, jobs_active=True)):
        assert rows
        assert all(row.reason for row in rows if row.outcome in DEGRADING or row.outcome is Outcome.UNSUPPORTED)


@often(25)
@given(SPOILINGS)
def test_checks(sound: Path, spoiling: Spoiling) -> None:
    host = Spoiled(sound, spoiling)
    found, _ = run_checks(host, Gpus(host), data="/data")
    assert all(finding.title and finding.evidence for finding in found)


@often(100)
@given(SPOILINGS, st.sampled_from(["auto", "cpuset", "affinity", "none"]), st.sampled_from(CGROUPS))
def test_confinement(sound: Path, spoiling: Spoiling, admin: str, cgroup: str) -> None:
    """A limit that cannot be read is none that could be left: whoever is moved was under no limit that is told."""
    host = Spoiled(sound, spoiling)
    how = scopes.confinement(host, cgroup, admin=admin, asked=None)
    if how.move is not None:
        path = partial("{}/{}/{}".format, scopes.MOUNT, cgroup.strip("/"))
        for name, free in scopes.LIMITS.items():
            assert host.text(path(name), free) == free
