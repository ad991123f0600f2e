"""What `torchtuned jobs --threads` says of real processes, and how jobs and GPUs become documents."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from torchtuned.cli import jobs as cli_jobs
from torchtuned.cpuset import format_list
from torchtuned.environment import RANKS
from torchtuned.host import Host

MINE = sorted(os.sched_getaffinity(0))
CHILD = "import os, sys; os.sched_setaffinity(0, eval(sys.argv[1])); print(flush=True); sys.stdin.read()"


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process on the CPUs of the test's parameter: (CPUs, environment)."""
    cpus, variables = request.param
    words = [sys.executable, "-c", CHILD, repr(set(cpus))]
    env = {**os.environ, **variables}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout
        process.stdout.readline()
        yield process
        assert process.stdin
        process.stdin.close()


def job(pid: int, cpus: list[int], **values: object) -> cli_jobs.Properties:
    usual = {"pid": pid, "cpus": format_list(cpus), "state": "running", "confinement": "affinity", "scope": ""}
    return {**usual, **values}


def verdicts(found: cli_jobs.Properties) -> list[tuple[object, object, object]]:
    listed = cli_jobs._processes(Host(), found)
    return [(process["wanted"], process["cpus"], process["verdict"]) for process in listed]


@pytest.mark.parametrize("child", [(MINE, {})], indirect=True)
def test_a_process_on_its_share_is_ok(child: subprocess.Popen[str]) -> None:
    assert verdicts(job(child.pid, MINE)) == [(format_list(MINE), format_list(MINE), "ok")]


@pytest.mark.skipif(len(MINE) < 2, reason="one CPU cannot be shrunk")
@pytest.mark.parametrize("child", [(MINE[:1], {})], indirect=True)
def test_a_process_on_less_is_shrunk(child: subprocess.Popen[str]) -> None:
    assert verdicts(job(child.pid, MINE)) == [(format_list(MINE), format_list(MINE[:1]), "shrunk")]
    assert verdicts(job(child.pid, MINE, confinement="none"))[0][2] == "ok"


@pytest.mark.parametrize("child", [(MINE, {})], indirect=True)
def test_a_process_elsewhere_is_outside(child: subprocess.Popen[str]) -> None:
    assert verdicts(job(child.pid, [9999]))[0][2] == "outside"


@pytest.mark.skipif(len(MINE) < 2, reason="one CPU cannot be divided among ranks")
@pytest.mark.parametrize("child", [(MINE[1:2], {RANKS: f"{MINE[0]}//0;{MINE[1]}//1"})], indirect=True)
def test_a_rank_is_held_against_its_own_share(child: subprocess.Popen[str]) -> None:
    assert verdicts(job(child.pid, MINE[:2])) == [(str(MINE[1]), str(MINE[1]), "ok")]


def test_a_process_that_has_ended_is_left_out() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert verdicts(job(gone.pid, MINE)) == []


def test_documents_have_the_properties_in_lower_case_and_in_order() -> None:
    objects = {
        f"/org/torchtuned1/jobs/{number}": {"org.torchtuned1.Job": {"Id": str(number), "MemoryNodes": "0"}}
        for number in (10, 9)
    } | {"/org/torchtuned1": {"org.torchtuned1.Manager": {"State": "ready"}}}
    assert [entry["id"] for entry in cli_jobs.of_kind(objects, cli_jobs.JOB)] == ["9", "10"]
    assert cli_jobs.of_kind(objects, cli_jobs.JOB)[0] == {
        "schema": 1,
        "path": "/org/torchtuned1/jobs/9",
        "id": "9",
        "memorynodes": "0",
    }
