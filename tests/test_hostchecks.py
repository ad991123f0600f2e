"""The checks as the daemon runs them, on this machine: what its sandbox hides is said, not judged."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from fakes.tree import make_tree

from torchtuned import hostchecks
from torchtuned.checks import REGISTRY, Running
from torchtuned.findings import Finding, Unchecked
from torchtuned.gpus import Gpus
from torchtuned.host import Host
from torchtuned.hostchecks import HIDDEN, HostChecks
from torchtuned.jobs import Job, State
from torchtuned.placement import Request
from torchtuned.processes import Process


def looked(host: Host) -> tuple[list[Finding], list[Unchecked]]:
    async def ask() -> tuple[list[Finding], list[Unchecked]]:
        checks = HostChecks(host, Gpus(host), jobs=list, ours=frozenset)
        return await checks.look()

    return asyncio.run(ask())


def test_what_the_sandbox_hides_is_unchecked() -> None:
    found, unchecked = looked(Host())
    assert not {finding.code for finding in found} & HIDDEN.keys()
    said = {item.code: item.because for item in unchecked}
    assert said["TT032"] == "the daemon does not see /home: torchtuned check does"
    assert HIDDEN.keys() <= said.keys() & REGISTRY.keys()


def test_an_answer_is_shared_until_a_job_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[list[str]] = []
    jobs: list[Job] = []

    def look(*_: object, jobs: list[Running], **__: object) -> tuple[list[Finding], list[Unchecked]]:
        looks.append([job.id for job in jobs])
        return [], []

    async def ask() -> None:
        checks = HostChecks(Host(), Gpus(Host()), jobs=lambda: jobs, ours=frozenset)
        await checks.look()
        await checks.look()
        process = Process(pid=os.getpid(), uid=0, start=1)
        jobs.append(Job(id="1", process=process, request=Request(), since=1, state=State.RUNNING))
        await checks.look()
        await checks.look()

    monkeypatch.setattr(hostchecks, "run_checks", look)
    asyncio.run(ask())
    assert looks == [[], ["1"]]


def test_in_a_folder_nothing_is_hidden(tmp_path: Path) -> None:
    pipes = {"tmp/nvidia-mps/control": "", "proc/1/comm": "systemd\n", "proc/1/stat": "1 (systemd) S 0 1\n"}
    found, _ = looked(Host(make_tree(tmp_path, pipes)))
    assert "TT069" in {finding.code for finding in found}
