"""Who takes the CPUs of a job: a machine looked at again and again."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from fakes.sound import CG, JOB, MOUNTS, SCOPE, SESSION, STATUS, build, process

from torchtuned.checks import Running, run_checks
from torchtuned.checks.activity import activity
from torchtuned.findings import Finding
from torchtuned.gpus import Gpus
from torchtuned.host import Host

Files = Mapping[str, str | bytes | None]
BOB = "user.slice/user-1001.slice/session-9.scope"
TICKS = 20  # between two looks
LOOKS = range(3)


class Moving(Host):
    """A machine that has moved on when it is looked at once more."""

    def __init__(self, roots: list[Path]) -> None:
        super().__init__(roots[0])
        self.roots, self.looks = roots, 0

    def read_bytes(self, path: str) -> bytes:
        if path == "/proc/stat":
            self._prefix, self.looks = str(self.roots[self.looks]), self.looks + 1
        return super().read_bytes(path)


def stat(name: str, *, used: int, cpu: int, state: str, parent: int) -> str:
    return f"1 ({name}) {state} {parent} {'0 ' * 9}{used} 0 {'0 ' * 23}{cpu} 0\n"


def computes(
    pid: str,
    *,
    ticks: int,
    cpus: tuple[int, ...],
    uid: int = 1001,
    place: str = BOB,
    parent: int = 1,
    name: str = "cc1",
) -> dict[int, dict[str, str]]:
    """A process at each look, with a thread on each of these CPUs."""
    found = {}
    for later in LOOKS:
        files = process(pid, name=name, place=place, cpus="0-15")
        files[f"proc/{pid}/status"] = STATUS.format("0-15").replace("1000", str(uid))
        files[f"proc/{pid}/stat"] = stat(name, used=500 + later * ticks, cpu=cpus[0], state="R", parent=parent)
        for i, cpu in enumerate(cpus):
            thread = stat(name, used=0, cpu=cpu, state="R", parent=parent)
            files[f"proc/{pid}/task/{int(pid) + i}/stat"] = thread
        files[f"proc/{pid}/task/{pid}9/stat"] = stat(name, used=0, cpu=0, state="S", parent=parent)
        found[later] = files
    return found


def times(*, idle: int) -> dict[int, str]:
    """/proc/stat of 16 CPUs that are idle for so many of the ticks."""
    found = {}
    for later in LOOKS:
        ticks = f"{900 + later * (TICKS - idle)} 0 0 {100 + later * idle} 0 0 0 0 0 0"
        found[later] = "cpu 1 0 0 1\n" + "".join(f"cpu{cpu} {ticks}\n" for cpu in range(16))
    return found


def pressure(share: float, place: str = SCOPE) -> dict[str, str]:
    return {f"{CG}/{place}/cpu.pressure": f"some avg10={share:.2f} avg60=0 avg300=0 total=1\nfull avg10=0 total=1\n"}


def look(
    folder: Path,
    *programs: Mapping[int, Mapping[str, str]],
    files: Files = {},  # noqa: B006  never changed
    idle: int = 10,
    jobs: tuple[Running, ...] = (JOB,),
    caller: bool = True,
) -> tuple[list[Finding], list[str]]:
    roots = []
    for later in LOOKS:
        (folder / str(later)).mkdir(parents=True)
        tree: dict[str, str | bytes | None] = {"proc/stat": times(idle=idle)[later], **files}
        for program in programs:
            tree |= program[later]
        passwd = "ann:x:1000:1000::/home/ann:/bin/bash\nbob:x:1001:1001::/home/bob:/bin/bash\n"
        roots.append(build(folder / str(later), {"etc/passwd": passwd, **tree}).root)
    host = Moving(roots)
    findings, unchecked = run_checks(host, Gpus(host), ["TT078"], jobs=jobs, caller=caller)
    return findings, [item.because for item in unchecked]


def test_tt078_a_compiler_on_a_jobs_cpus(tmp_path: Path) -> None:
    [finding], unchecked = look(
        tmp_path,
        computes("4200", ticks=2 * TICKS, cpus=(1, 2)),
        computes("4300", ticks=TICKS, cpus=(7, 12), name="make"),
        files=pressure(37),
    )
    assert unchecked == []
    assert (finding.code, finding.job) == ("TT078", "7")
    assert "take 2.5 of CPUs 0-7, most of it 4200 (cc1) of bob;" in finding.evidence
    assert finding.evidence.endswith(f"/{CG}/{SCOPE}/cpu.pressure: some avg10=37.00")
    assert finding.cost == "in 37.00 % of the last 10 s some task of it waited for a CPU"
    assert finding.fix == (
        "start what they run with torchtuned-run, so that each has CPUs of its own;"
        " or: sudo systemctl set-property --runtime session-9.scope AllowedCPUs=8-15"
    )


@pytest.mark.parametrize(
    ("other", "waited"),
    [
        (computes("4200", ticks=2 * TICKS, cpus=(1, 2)), 2),  # there is room for both
        (computes("4200", ticks=2 * TICKS, cpus=(12, 13)), 37),  # elsewhere
        (computes("4200", ticks=TICKS // 4, cpus=(1,)), 37),  # slight
        (computes("4200", ticks=2 * TICKS, cpus=(1, 2), parent=4001), 37),  # the job's own
        (computes("4200", ticks=2 * TICKS, cpus=(1, 2), place=SCOPE), 37),  # the job's own, its parent has ended
        (computes("4200", ticks=2 * TICKS, cpus=(1, 2), place="user.slice/torchtuned-job-8.scope"), 37),
        (computes("4200", ticks=2 * TICKS, cpus=(1, 2), parent=2, name="kworker/1:2"), 37),
    ],
)
def test_a_job_that_nobody_disturbs(tmp_path: Path, other: dict[int, dict[str, str]], waited: float) -> None:
    busy = computes("4001", ticks=8 * TICKS, cpus=tuple(range(8)), uid=1000, place=SCOPE, parent=4000)
    assert look(tmp_path, busy, other, files=pressure(waited)) == ([], [])


def test_a_process_that_has_just_begun_counts(tmp_path: Path) -> None:
    new = computes("4200", ticks=(2 * TICKS - 500) // 2, cpus=(1, 2))  # 2 * TICKS at the third look
    steady = computes("4300", ticks=TICKS, cpus=(3,))
    new[1] = {}
    [finding], _ = look(tmp_path, new, steady, files=pressure(37))
    assert "take 3.0 of CPUs 0-7" in finding.evidence


def test_what_is_over_in_a_moment_is_not_told(tmp_path: Path) -> None:
    login = computes("4200", ticks=2 * TICKS, cpus=(1, 2))
    login[2] = login[1]
    assert look(tmp_path / "a", login, files=pressure(37)) == ([], [])
    login[2] = {}
    assert look(tmp_path / "b", login, files=pressure(37)) == ([], [])


@pytest.mark.parametrize(("idle", "told"), [(0, True), (10, False)])
def test_without_pressure_full_cpus_tell(tmp_path: Path, idle: int, *, told: bool) -> None:
    findings, _ = look(tmp_path, computes("4200", ticks=2 * TICKS, cpus=(1, 2)), idle=idle)
    assert [finding.cost for finding in findings] == (["unmeasured"] if told else [])
    assert all(finding.evidence.endswith("/proc/stat: CPUs 0-7 are 0% idle") for finding in findings)


def test_what_shares_the_jobs_unit_is_moved_by_itself(tmp_path: Path) -> None:
    own = computes("4200", ticks=2 * TICKS, cpus=(1, 2), uid=1000, place=SESSION)
    [finding], _ = look(tmp_path, own, files={**process("4000", place=SESSION), **pressure(37, SESSION)})
    assert finding.fix.endswith("; or: sudo taskset -acp 8-15 4200")


def test_the_daemon_names_nobody(tmp_path: Path) -> None:
    [finding], _ = look(tmp_path, computes("4200", ticks=40, cpus=(1, 2)), files=pressure(37), caller=False)
    assert "bob" not in finding.evidence
    assert "cc1" not in finding.evidence


@pytest.mark.parametrize(
    ("mine", "waited", "environ", "told"),
    [
        (4, 50, "", True),
        (4, 2, "", False),  # nothing waits
        (0, 50, "", False),  # a machine that others use well
        (4, 50, "SUDO_UID=1001\0", True),  # bob has asked, and ann is the other
        (4, 50, "SUDO_UID=1002\0", False),
    ],
)
def test_what_runs_without_torchtuned(tmp_path: Path, mine: int, waited: float, environ: str, *, told: bool) -> None:
    training = computes("4100", ticks=mine * TICKS, cpus=(0, 1, 2, 3), uid=1000, place=SESSION, name="python")
    theirs = computes("4200", ticks=12 * TICKS, cpus=tuple(range(4, 16)))
    files = {**pressure(waited, SESSION), **pressure(waited, BOB), "proc/self/environ": f"A=b\0{environ}"}
    findings, _ = look(tmp_path, training, theirs, files=files, jobs=())
    assert [finding.title for finding in findings] == ["others take the CPUs that you compute on"] * told
    for finding in findings:
        assert f"take {4 if environ else 12}.0 of CPUs 0-15, most of it" in finding.evidence
        assert finding.fix == "start yours and theirs with torchtuned-run, so that each has CPUs of its own"


def test_two_of_ones_own_are_no_strangers(tmp_path: Path) -> None:
    both = [computes(pid, ticks=8 * TICKS, cpus=(1, 2), uid=1000, place=SESSION) for pid in ("4100", "4200")]
    assert look(tmp_path, *both, files=pressure(50, SESSION), jobs=()) == ([], [])


def test_others_that_are_hidden_are_unchecked(tmp_path: Path) -> None:
    hidden = {"proc/self/mountinfo": MOUNTS.replace("proc proc rw", "proc proc rw,hidepid=invisible")}
    assert look(tmp_path, files=hidden) == ([], ["/proc hides the processes of others here (hidepid): sudo"])


def test_this_process_computes() -> None:
    before = activity(Host())
    until = time.process_time() + 5
    while (now := activity(Host())).used[os.getpid()] == before.used[os.getpid()] and time.process_time() < until:
        pass
    assert now.used[os.getpid()] > before.used[os.getpid()]
    assert before.parents[os.getpid()] == os.getppid()
    assert before.cpus.keys() == now.cpus.keys()
    assert all(now.cpus[cpu] >= before.cpus[cpu] for cpu in now.cpus)


def test_processes_that_are_hidden_do_not_hide_the_others(tmp_path: Path) -> None:
    """With hidepid=1 their names are there, and nothing else can be read."""
    root = build(tmp_path, computes("9", ticks=0, cpus=(1,))[0]).root
    (root / "proc/8/stat").mkdir(parents=True)
    seen = activity(Host(root))
    assert (8 in seen.parents, seen.parents[9]) == (False, 1)
