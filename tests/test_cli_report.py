"""`torchtuned report` of a running job: what only its own user sees is looked at by the command itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from torchtuned.cli import main as cli
from torchtuned.cli import report as cli_report

GREEDY = """\
import os, resource, sys
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(56)]
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def job() -> Iterator[dict[str, Any]]:
    """The report of a running job whose process holds nearly all the descriptors that it may."""
    child = subprocess.Popen([sys.executable, "-c", GREEDY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    yield {
        "schema": 1,
        "job": "7",
        "pid": child.pid,
        "uid": os.getuid(),
        "state": "running",
        "started": 1,
        "granted": {"cpus": "0", "gpus": [], "threads": 1, "scope": "", "confinement": "none"},
        "end": None,
    }
    child.communicate()


def test_what_the_daemon_may_not_see_is_in_the_report(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_report, "_one", lambda _: job)
    assert cli.main(["report", "7"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "TT018 warning, a job is near its limit of open files (seen at" in told
    assert f"/proc/{job['pid']}/fd: 59 descriptors, the soft limit is 64" in told


def test_a_job_that_has_just_ended_does_not_run(job: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """How it ended is explained a second later."""
    ended = {**job, "state": "ended", "ended": 2_000_000, "command": ["python3", "train.py", "--epochs", "15"]}
    cli_report._print_list([ended, job], more=0)
    first, second = capsys.readouterr().out.splitlines()[2:4]
    assert first.rstrip().endswith("ending")
    assert second.rstrip().endswith("running")
    rows = dict(cli_report.page(ended)[1][:1])
    assert rows["End"] == "It has just ended; ask again in a few seconds how."
    assert dict(cli_report.page(job)[1][:1])["End"] == "It is running."


def test_an_ended_job_is_not_looked_into(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = {**job, "state": "ended", "findings": []}
    monkeypatch.setattr(cli_report, "_one", lambda _: ended)
    assert cli.main(["report", "7"]) == 0
    assert "TT018" not in capsys.readouterr().out
