"""Which findings are told at a running job: by what suffers, not by their codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fakes.sound import CG, JOB, LIMITS, MOUNTS, A, B, build, interrupts, process

from torchtuned.checks import run_checks
from torchtuned.findings import MEMORY, Action, Finding, Severity, about_cpus, about_gpu, about_job
from torchtuned.gpus import Gpus
from torchtuned.host import Host

OTHER = replace(JOB, id="8", pid=5000, cpus=frozenset(range(8, 16)), gpus=(B,), scope="torchtuned-job-8.scope")
PLAIN = Finding(
    code="TT999", severity=Severity.NOTICE, action=Action.TELL, title="t", evidence="e", cost="c", fix="f", source="s"
)


def told(finding: Finding) -> set[str]:
    return {job.id for job in (JOB, OTHER) if finding.concerns(job.id, cpus=job.cpus, gpus=job.gpus)}


def test_what_a_finding_is_about() -> None:
    assert told(PLAIN) == set()
    assert told(replace(PLAIN, job="8")) == {"8"}
    assert told(replace(PLAIN, job="8", about=(MEMORY,))) == {"8"}
    assert told(replace(PLAIN, about=(about_gpu(A),))) == {"7"}
    assert told(replace(PLAIN, about=(about_gpu(A), about_gpu(B)))) == {"7", "8"}
    assert told(replace(PLAIN, about=(about_cpus(frozenset({7, 20})),))) == {"7"}
    assert told(replace(PLAIN, about=(about_cpus(frozenset({20})),))) == set()
    assert told(replace(PLAIN, about=(about_job("7"),))) == {"7"}
    assert told(replace(PLAIN, about=(MEMORY,))) == {"7", "8"}


def test_the_document_says_it() -> None:
    document = replace(PLAIN, about=(about_gpu(A), about_cpus(frozenset({1, 2})))).document()
    assert document["about"] == f"gpu/{A} cpus/1-2"
    assert "job" not in document


def findings(folder: Path, changes: dict[str, str], codes: list[str]) -> dict[str, set[str]]:
    """At which of the two jobs each code is told; the second runs on the other node."""
    tree = {**process("5000", place="user.slice/user-1000.slice/torchtuned-job-8.scope"), **changes}
    folder.mkdir(exist_ok=True)
    host = Host(build(folder, tree).root)
    found, _ = run_checks(host, Gpus(host), codes, caller=False, jobs=(JOB, OTHER))
    return {finding.code: told(finding) for finding in found}


def test_shared_memory_is_told_at_the_jobs_that_have_it(tmp_path: Path) -> None:
    small = MOUNTS.replace("size=67108864k", "size=65536k")
    own = small.replace("0:25", "0:99")
    common = {"proc/1/mountinfo": small, "proc/4000/mountinfo": small, "proc/5000/mountinfo": MOUNTS}
    assert findings(tmp_path / "a", common, ["TT022"]) == {"TT022": {"7"}}
    apart = {"proc/1/mountinfo": MOUNTS, "proc/4000/mountinfo": MOUNTS, "proc/5000/mountinfo": own}
    assert findings(tmp_path / "b", apart, ["TT022"]) == {"TT022": {"8"}}


def test_pressure_is_told_at_all_and_one_busy_cpu_at_its_own(tmp_path: Path) -> None:
    changes = {
        "proc/1/mountinfo": MOUNTS,
        "proc/pressure/memory": "some avg60=50.00 total=1\nfull avg10=9 avg60=40.00 avg300=9 total=1\n",
        "proc/interrupts": interrupts([10_000] * 9 + [5_000_000] + [10_000] * 6),
        "run/reboot-required": "",
    }
    assert findings(tmp_path, changes, ["TT027", "TT054", "TT062"]) == {
        "TT027": {"7", "8"},
        "TT054": set(),
        "TT062": {"8"},
    }


def test_what_is_seen_in_a_job_is_told_there(tmp_path: Path) -> None:
    quota = f"{CG}/user.slice/user-1000.slice/torchtuned-job-8.scope"
    changes = {
        f"{quota}/cpu.max": "200000 100000\n",
        f"{quota}/cpu.stat": "nr_periods 1000\nnr_throttled 800\n",
        "proc/5000/limits": LIMITS,
    }
    assert findings(tmp_path, changes, ["TT050"]) == {"TT050": {"8"}}
