"""Tables of jobs that placed themselves, as any user may write them: what the daemon believes of them."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.tree import machine, make_tree

from torchtuned import discover
from torchtuned.cpuset import format_list
from torchtuned.host import Host
from torchtuned.jobs import Job
from torchtuned.placement import Grant, grant_to_json
from torchtuned.processes import start_time
from torchtuned.selfplaced import Tables

USER, OTHER = pwd.getpwnam("nobody").pw_uid, pwd.getpwnam("daemon").pw_uid
MINE = frozenset(os.sched_getaffinity(0))
ONE = frozenset({min(MINE)})
GPU = "0000:01:00.0"
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="takes processes of two users")


@pytest.fixture
def begin() -> Iterator[Callable[..., int]]:
    """begin(uid) starts a sleeping process of a user, on one CPU; returns its pid."""
    running = []

    def start(uid: int, cpus: frozenset[int] = ONE) -> int:
        switch = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        process = subprocess.Popen([*switch, "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE)
        running.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        os.sched_setaffinity(process.pid, cpus)
        return process.pid

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    files = machine(cores=[str(cpu) for cpu in range(8)], gpus={GPU: {"vendor": "0x10de", "class": "0x030200"}})
    return Host(make_tree(tmp_path / "machine", files))


def entry(pid: int, cpus: frozenset[int] = ONE, **changes: Any) -> dict[str, Any]:
    grant = {**grant_to_json(Grant(cpus=cpus, threads=1, gpus=(GPU,))), **changes.pop("grant", {})}
    return {"pid": pid, "start": start_time(pid), "since": 1000, "grant": grant, **changes}


def publish(host: Host, uid: int, text: str | list[Any], owner: int | None = None) -> Path:
    folder = host.root / f"run/lock/torchtuned-{uid}"
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "jobs.json"
    table.write_text(text if isinstance(text, str) else json.dumps({"schema": 1, "jobs": text}))
    for path in (folder, table):
        os.chown(path, uid if owner is None else owner, -1)
    return folder


def found(host: Host) -> list[Job]:
    before = len(os.listdir("/proc/self/fd"))
    jobs = Tables(host).read(discover.topology(host))
    assert len(os.listdir("/proc/self/fd")) == before
    return jobs


def test_what_is_true_is_believed(host: Host, begin: Callable[..., int]) -> None:
    pid = begin(USER)
    publish(host, USER, [entry(pid)])
    [job] = found(host)
    assert job.grant is not None
    assert (job.process.pid, job.process.uid, job.since, job.confinement) == (pid, USER, 1000, "affinity")
    assert (job.grant.cpus, job.grant.gpus) == (ONE, (GPU,))


def test_root_without_power_over_files_reads_it_too(host: Host, begin: Callable[..., int]) -> None:
    """As the unit has it: the folder lets others through, and not list it."""
    nobody = pwd.getpwnam("nobody").pw_uid
    folder = publish(host, nobody, [entry(begin(nobody))])
    folder.chmod(0o711)
    (folder / "jobs.json").chmod(0o644)
    code = (
        "import sys; from torchtuned import discover, host, selfplaced; h = host.Host(sys.argv[1]);"
        "print(len(selfplaced.Tables(h).read(discover.topology(h))))"
    )
    power = "-dac_override,-dac_read_search"
    powerless = ["setpriv", f"--bounding-set={power}", f"--inh-caps={power}"]
    top = Path(__file__).resolve().parents[1]
    words = [*powerless, sys.executable, "-c", code, str(host.root)]
    done = subprocess.run(words, cwd=top, capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr


def test_nobody_claims_another_users_process(host: Host, begin: Callable[..., int]) -> None:
    theirs = begin(OTHER)
    publish(host, USER, [entry(theirs), entry(os.getpid()), {**entry(theirs), "uid": USER}])
    assert found(host) == []


def test_nobody_claims_more_than_the_process_may_use(host: Host, begin: Callable[..., int]) -> None:
    pid, outside = begin(USER), begin(USER)
    wide = frozenset(range(8))
    publish(host, USER, [entry(pid, wide), entry(outside, wide - ONE)])
    narrowed, nowhere = found(host)
    assert narrowed.grant is not None
    assert nowhere.grant is not None
    assert (narrowed.grant.cpus, narrowed.grant.bound) == (ONE, True)
    assert (nowhere.grant.cpus, nowhere.grant.bound, nowhere.confinement) == (ONE, False, "none")


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": -1},
        {"pid": "1"},
        {"pid": 2**40},
        {"start": 1},
        {"start": None},
        {"grant": {"cpus": "0-99999999999"}},
        {"grant": {"cpus": 7}},
        {"grant": {"ranks": [1]}},
    ],
)
def test_what_makes_no_sense_is_left(host: Host, begin: Callable[..., int], changes: dict[str, Any]) -> None:
    publish(host, USER, [{**entry(begin(USER), grant=changes.pop("grant", {})), **changes}])
    assert found(host) == []


def test_numbers_and_texts_are_made_harmless(host: Host, begin: Callable[..., int]) -> None:
    wild = {"threads": -5, "memory_nodes": "0-7", "gpus": [GPU, "../../x", GPU], "warnings": ["\x1b[2J"],
            "ranks": [{"cpus": "0-7"}, {"cpus": format_list(ONE), "omp_num_threads": 10**30}]}  # fmt: skip
    publish(host, USER, [entry(begin(USER), grant=wild, since=2**70)])
    [job] = found(host)
    assert job.grant is not None
    assert 0 < job.since < 2**63
    assert (job.grant.threads, job.grant.gpus, job.grant.warnings) == (1, (GPU,), ())
    assert [(rank.cpus, rank.omp_num_threads) for rank in job.grant.ranks] == [(ONE, 1)]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"jobs": 1}', '{"jobs": [null, 1, []]}', "[" * 60000, "x" * (2 << 20)]
)
def test_what_is_no_table_is_none(host: Host, text: str) -> None:
    publish(host, USER, text)
    assert found(host) == []


def test_folders_and_files_of_others_and_links_are_not_read(host: Host, begin: Callable[..., int]) -> None:
    pid = begin(USER)
    folder = publish(host, USER, [entry(pid)], owner=OTHER)
    assert found(host) == []
    publish(host, USER, [entry(pid)])
    folder.chmod(0o777)
    assert found(host) == []
    folder.chmod(0o711)
    assert len(found(host)) == 1
    table = folder / "jobs.json"
    table.rename(folder / "other")
    table.symlink_to("other")
    assert found(host) == []
    table.unlink()
    os.mkfifo(table)
    os.chown(table, USER, -1)
    assert found(host) == []
    (host.root / f"run/lock/torchtuned-{OTHER}").symlink_to(folder)
    (host.root / "run/lock/torchtuned-x").mkdir()
    assert found(host) == []


def test_a_table_is_read_again_when_it_was_replaced(host: Host, begin: Callable[..., int]) -> None:
    machine, tables, pids = discover.topology(host), Tables(host), [begin(USER), begin(USER)]
    folder = publish(host, USER, [entry(pids[0])])
    assert [job.process.pid for job in tables.read(machine)] == pids[:1]
    assert (tables.changed(), tables.read(machine)) == ([], [])
    with open(folder / "jobs.new", "w") as file:
        json.dump({"schema": 1, "jobs": [entry(pid) for pid in pids]}, file)
    os.chown(folder / "jobs.new", USER, -1)
    os.replace(folder / "jobs.new", folder / "jobs.json")
    assert tables.changed() == [USER]
    assert {job.process.pid for job in tables.read(machine)} == set(pids)
    tables.forget(USER)
    assert tables.changed() == [USER]


HUGE = "0-65535"


@pytest.mark.parametrize(
    "grant",
    [
        {"cpus": f"{HUGE}," * 120_000},
        {"memory_nodes": f"{HUGE}," * 120_000},
        {"ranks": [{"cpus": HUGE, "memory_nodes": HUGE}] * 20_000},
        {"ranks": [{"cpus": f"{HUGE}," * 2000}] * 50},
    ],
)
def test_a_table_that_is_meant_to_take_long_does_not(
    host: Host, begin: Callable[..., int], grant: dict[str, Any]
) -> None:
    pid = begin(USER)
    publish(host, USER, [entry(pid, grant=grant)])
    started, cpu = time.monotonic(), time.process_time()
    found(host)
    assert time.process_time() - cpu < 2
    many = [entry(pid, grant={"memory_nodes": HUGE, "ranks": [{"cpus": HUGE}] * 10})] * 1000
    publish(host, USER, many)
    cpu = time.process_time()
    found(host)
    assert time.process_time() - cpu < 2
    assert time.monotonic() - started < 60


def test_those_whose_tables_take_long_do_not_keep_others_from_their_turn(
    host: Host, begin: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by touching them all the time, nor by another spelling of the same number."""
    monkeypatch.setattr("torchtuned.selfplaced.ALL_S", 0.05)  # one table each time, none where this was held up
    slow, other = begin(USER), begin(OTHER)
    machine, tables = discover.topology(host), Tables(host)
    for uid, pid in ((USER, slow), (OTHER, other)):
        publish(host, uid, [entry(pid, grant={"ranks": [{"cpus": HUGE}] * 32})])
    for zeros in ("0", "00"):
        folder = host.root / f"run/lock/torchtuned-{zeros}{USER}"
        folder.mkdir()
        os.chown(folder, USER, -1)
        os.utime(folder, (1, 1))
    assert tables.changed().count(USER) == 1
    told: set[int] = set()
    for turn in range(10):
        told |= {job.process.pid for job in tables.read(machine)}
        for uid in (USER, OTHER):
            os.utime(host.root / f"run/lock/torchtuned-{uid}", (turn, turn))
        if len(told) == 2:
            break
    assert told == {slow, other}
