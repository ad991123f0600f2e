"""What `torchtuned jobs --threads` says of real processes, and how jobs and GPUs become documents."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.schema import fits, schema

from torchtuned import jobtables, selfplaced
from torchtuned.cli import jobs as cli_jobs
from torchtuned.cli.command import shortened
from torchtuned.cli.main import main
from torchtuned.cpuset import format_list
from torchtuned.environment import RANKS
from torchtuned.host import Host
from torchtuned.placement import Grant, grant_to_json
from torchtuned.processes import start_time

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


# without a daemon


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all users' tables, and no daemon."""
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/nonexistent/bus")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    for module in (jobtables, selfplaced):
        monkeypatch.setattr(module, "LOCKS", str(tmp_path / "lock"))
    (tmp_path / "lock").mkdir()
    (tmp_path / "lock").chmod(0o1777)
    return tmp_path / "lock"


def publish(tables: Path, uid: int, *jobs: dict[str, object]) -> None:
    folder = tables / f"torchtuned-{uid}"
    folder.mkdir(mode=0o711)
    (folder / "jobs.json").write_text(json.dumps({"schema": 1, "jobs": jobs}))
    for path in (folder, folder / "jobs.json"):
        os.chown(path, uid, -1)


def entry(pid: int, **changes: object) -> dict[str, object]:
    grant = grant_to_json(Grant(cpus=frozenset(MINE), threads=len(MINE)))
    return {"pid": pid, "start": start_time(pid), "uid": os.getuid(), "since": 1000, "grant": grant, **changes}


@pytest.mark.parametrize("child", [(MINE, {})], indirect=True)
def test_what_placed_itself_is_shown_and_marked(
    child: subprocess.Popen[str], tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tables, os.getuid(), entry(child.pid), entry(os.getpid(), start=1), entry(os.getpid()) | {"pid": 2**22 - 1})
    assert main(["jobs", "--threads", "--json"]) == 69
    captured = capsys.readouterr()
    [job] = json.loads(captured.out)
    assert fits(job, schema("jobs"))
    assert (job["id"], job["selfplaced"], job["cpus"]) == (f"self-{child.pid}", True, format_list(MINE))
    assert [process["verdict"] for process in job["processes"]] == ["ok"]
    assert job["user"] == pwd.getpwuid(os.getuid()).pw_name
    assert job["command"].startswith(Path(sys.executable).name)
    assert captured.err.startswith("torchtuned: no system bus; only jobs that placed themselves are shown")
    assert captured.err.count("\n") == 1
    assert main(["jobs"]) == 69
    told = capsys.readouterr()
    assert f"self-{child.pid}" in told.out
    assert "placed itself" not in told.out  # of each, when the one line says it of all
    assert "needs systemd" not in told.err
    assert main(["map", "--json"]) == 0
    assert [job["id"] for job in json.loads(capsys.readouterr().out)["jobs"]] == [f"self-{child.pid}"]
    assert main(["map"]) == 0
    assert f"A job self-{child.pid}, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "width", "said"),
    [
        ("train.py --epochs 15", 20, "train.py --epochs 15"),
        ("train.py --epochs 15", 19, "train.py --epochs …"),
        ("train.py --epochs 15", 18, "train.py …"),
        ("train.py --epochs 150 x", 22, "train.py --epochs …"),
        ("a-very-long-program --x", 10, "a-very-lo…"),
    ],
)
def test_no_number_is_cut(text: str, width: int, said: str) -> None:
    assert shortened(text, width) == said
    assert len(said) <= width


def test_where_nothing_is_known_nothing_is_claimed(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs"]) == 69
    assert capsys.readouterr().out == ""
    assert main(["jobs", "--json"]) == 69
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.skipif(os.getuid() != 0, reason="makes another user's table")
@pytest.mark.parametrize("child", [(MINE, {})], indirect=True)
def test_a_strangers_table_is_believed_in_nothing_of_mine(
    child: subprocess.Popen[str], tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger = pwd.getpwnam("nobody").pw_uid
    publish(tables, stranger, entry(child.pid), entry(child.pid, uid=stranger))
    assert main(["jobs", "--json"]) == 69
    assert json.loads(capsys.readouterr().out) == []


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
