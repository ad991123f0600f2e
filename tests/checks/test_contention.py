"""Who takes the CPUs of a job: a machine looked at again and again."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.sound import CG, JOB, MOUNTS, SCOPE, SESSION, STATUS, build, process

from torchtuned.checks import Machine, Running
from torchtuned.checks.activity import activity
from torchtuned.checks.registry import run_all
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


def stat(name: str, *, used: int, cpu: int, state: str, parent: int, nice: int = 0, policy: int = 0) -> str:
    return f"1 ({name}) {state} {parent} {'0 ' * 9}{used} 0 0 0 0 {nice} {'0 ' * 19}{cpu} 0 {policy}\n"


def computes(
    pid: str,
    *,
    ticks: int,
    cpus: tuple[int, ...],
    uid: int = 1001,
    place: str = BOB,
    parent: int = 1,
    name: str = "cc1",
    allowed: str = "0-15",
    nice: int = 0,
    policy: int = 0,
) -> dict[int, dict[str, str]]:
    """A process at each look, with a thread on each of these CPUs."""
    found = {}
    for later in LOOKS:
        files = process(pid, name=name, place=place)
        files[f"proc/{pid}/status"] = STATUS.format(allowed).replace("1000", str(uid))
        used, how = 500 + later * ticks, {"nice": nice, "policy": policy}
        files[f"proc/{pid}/stat"] = stat(name, used=used, cpu=cpus[0], state="R", parent=parent, **how)
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
    code: str = "TT078",
    jobs: tuple[Running, ...] = (JOB,),
    **options: Any,
) -> tuple[list[Finding], list[str]]:
    roots = []
    for later in LOOKS:
        (folder / str(later)).mkdir(parents=True)
        tree: dict[str, str | bytes | None] = {"proc/stat": times(idle=idle)[later], **files}
        for program in programs:
            tree |= program[later]
        passwd = (
            "root:x:0:0::/root:/bin/bash\nann:x:1000:1000::/home/ann:/bin/bash\nbob:x:1001:1001::/home/bob:/bin/bash\n"
        )
        roots.append(build(folder / str(later), {"etc/passwd": passwd, **tree}).root)
    host = Moving(roots)
    findings, unchecked = run_all(Machine(host, Gpus(host), jobs=jobs, **options), [code])
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
    assert "take 2.5 of 8 CPUs (0-7): 4200 (cc1) of bob, 4300 (make) of bob;" in finding.evidence
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
    assert "take 3.0 of 8 CPUs (0-7)" in finding.evidence


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
        assert f"take {4 if environ else 12}.0 of 16 CPUs (0-15): 4" in finding.evidence
        assert finding.fix == "start yours and theirs with torchtuned-run, so that each has CPUs of its own"


def test_two_of_ones_own_are_no_strangers(tmp_path: Path) -> None:
    both = [computes(pid, ticks=8 * TICKS, cpus=(1, 2), uid=1000, place=SESSION) for pid in ("4100", "4200")]
    assert look(tmp_path, *both, files=pressure(50, SESSION), jobs=()) == ([], [])


PLACED = replace(JOB, id="self-4000", cpus=frozenset({1}), scope="")
ALICE = replace(PLACED, id="self-5000", pid=5000, cpus=frozenset({0, *range(2, 16)}))


@pytest.mark.parametrize(
    ("options", "aside"),
    [
        ({}, "; or: sudo systemctl set-property --runtime session-9.scope AllowedCPUs=0,2-15"),
        ({"jobs": (PLACED, ALICE)}, ""),  # onto one's other job
        ({"others": (ALICE,)}, ""),  # onto that of somebody else
        ({"some_jobs": True}, "; or: sudo systemctl set-property --runtime session-9.scope AllowedCPUs=0,2-7"),
        ({"files": {f"{CG}/cgroup.controllers": None}}, "; or: sudo taskset -acp 0,2-15 4200"),
        ({"others": (replace(ALICE, pid=4200, cpus=frozenset({0})),)}, None),
        ({"others": (replace(ALICE, pid=4500, cpus=frozenset({0})),)}, "; or: sudo taskset -acp 2-15 4200"),
    ],
)
def test_nobody_is_moved_onto_a_job(tmp_path: Path, options: dict[str, Any], aside: str | None) -> None:
    """Not onto one that only its scope tells of either, and no job is moved with the unit that it shares."""
    loop = computes("4200", ticks=TICKS, cpus=(1,))
    scope = computes("4400", ticks=0, cpus=(9,), place="user.slice/torchtuned-job-8.scope", allowed="8-15")
    shell = computes("4500", ticks=0, cpus=(0,))
    session = process("4000", place=SESSION) | process("4001", place=SESSION, parent=4000)
    files = {**session, **pressure(50, SESSION), **options.get("files", {})}
    found, _ = look(tmp_path, loop, scope, shell, **{"jobs": (PLACED,), **options, "files": files})
    fix = "start what they run with torchtuned-run, so that each has CPUs of its own"
    assert [finding.fix for finding in found] == ([] if aside is None else [fix + aside])


def test_nobody_is_moved_onto_what_else_one_runs(tmp_path: Path) -> None:
    mine = [
        computes(pid, ticks=TICKS, cpus=(cpu,), uid=1000, place=SESSION, allowed=str(cpu))
        for pid, cpu in (("4100", 0), ("4101", 1))
    ]
    loop = computes("4200", ticks=TICKS, cpus=(0,), allowed="0-1")
    [finding], _ = look(tmp_path, *mine, loop, files=pressure(50, SESSION), jobs=())
    assert "take 1.0 of CPU 0: 4200 (cc1) of bob" in finding.evidence
    assert finding.fix.endswith("; or: sudo systemctl set-property --runtime session-9.scope AllowedCPUs=2-15")


def test_a_job_that_placed_itself_is_no_stranger(tmp_path: Path) -> None:
    """Neither are the processes of it that have outlived their parents."""
    jobs = (PLACED, replace(PLACED, id="self-4600", pid=4600))
    own = {"uid": 1000, "place": SESSION, "cpus": (1,), "ticks": TICKS}
    leader = computes("4600", **own, allowed="1")
    left = computes("4700", **own, allowed="1")
    assert look(tmp_path / "a", leader, left, files=pressure(50), jobs=jobs) == ([], [])
    assert look(tmp_path / "b", leader, left, files=pressure(50), jobs=jobs[:1], others=jobs[1:]) == ([], [])
    loop = computes("4700", **own)  # it may run elsewhere
    found, _ = look(tmp_path / "c", leader, loop, files=pressure(50), jobs=jobs)
    assert {"4700 (cc1) of ann" in finding.evidence for finding in found} == {True}
    assert not any("4600" in finding.evidence for finding in found)


def test_three_are_named_and_moved(tmp_path: Path) -> None:
    loops = [computes(f"{4200 + i}", ticks=4 + i, cpus=(1,), place="", name=f"loop{i}") for i in range(5)]
    [finding], _ = look(tmp_path, *loops, files=pressure(50), jobs=(PLACED,))
    named = "4204 (loop4) of bob, 4203 (loop3) of bob, 4202 (loop2) of bob and 2 more;"
    assert f"take 1.5 of CPU 1: {named}" in finding.evidence
    moved = [f"sudo taskset -acp 0,2-15 {pid}" for pid in (4204, 4203, 4202)]
    assert finding.fix.endswith(f"; or: {'; '.join(moved)}")


@pytest.mark.parametrize("name", ["a\nTT001 error", "a\u202eb", "a\x1b[2J"])
def test_the_name_of_a_process_is_one_line_of_plain_text(tmp_path: Path, name: str) -> None:
    [finding], _ = look(tmp_path, computes("4200", ticks=TICKS, cpus=(1,), name=name), files=pressure(50))
    assert finding.evidence.isprintable()
    assert "4200 (a?" in finding.evidence


# the machine as a whole


def test_tt079_others_keep_the_machine_busy(tmp_path: Path) -> None:
    qemu = computes("4200", ticks=8 * TICKS, cpus=(1, 2), uid=0, place="", name="qemu-system-x86")
    loop = computes("4300", ticks=TICKS, cpus=(3,))
    [finding], unchecked = look(tmp_path, qemu, loop, code="TT079", jobs=())
    assert unchecked == []
    assert (finding.severity, finding.action, finding.job) == ("notice", "TELL", "")
    assert finding.evidence == (
        "programs of others take 9.0 of 16 CPUs (0-15): 4200 (qemu-system-x86) of root, 4300 (cc1) of bob"
    )


@pytest.mark.parametrize(
    ("other", "options"),
    [
        ({"uid": 1000}, {}),  # the caller's own
        ({"parent": 4000}, {}),  # what the caller has started
        ({"ticks": 7 * TICKS}, {}),  # less than half
        ({"nice": 19}, {}),
        ({"policy": 5}, {}),  # SCHED_IDLE
        ({"place": "user.slice/torchtuned-job-8.scope"}, {}),
        ({}, {"others": (replace(JOB, pid=4200, uid=1001, scope=""),)}),
        ({}, {"jobs": (JOB,)}),  # what that has to suffer, TT078 tells
        ({}, {"caller": False}),
    ],
)
def test_a_machine_that_is_not_busy_with_others(tmp_path: Path, other: dict[str, Any], options: dict[str, Any]) -> None:
    program = computes("4200", **{"ticks": 16 * TICKS, "cpus": (1, 2), "nice": 18, **other})
    assert look(tmp_path, program, code="TT079", **{"jobs": (), **options}) == ([], [])


def test_one_is_not_told_of_others_while_one_computes_oneself(tmp_path: Path) -> None:
    mine = computes("4100", ticks=TICKS, cpus=(0,), uid=1000, place=SESSION)
    theirs = computes("4200", ticks=15 * TICKS, cpus=tuple(range(1, 16)))
    assert look(tmp_path, mine, theirs, code="TT079", jobs=()) == ([], [])


@pytest.mark.parametrize("later", [1, 2])
def test_a_machine_that_is_busy_for_a_moment(tmp_path: Path, later: int) -> None:
    program = computes("4200", ticks=16 * TICKS, cpus=(1, 2))
    program[later] = program[later - 1]
    assert look(tmp_path, program, code="TT079", jobs=()) == ([], [])


def test_only_the_callers_own_cpus_count(tmp_path: Path) -> None:
    """Those of a container, for one."""
    self = {"proc/self/status": STATUS.format("0-1")}
    far = computes("4200", ticks=16 * TICKS, cpus=(8, 9))
    assert look(tmp_path / "far", far, files=self, code="TT079", jobs=()) == ([], [])
    near = computes("4200", ticks=TICKS, cpus=(1,))
    [finding], _ = look(tmp_path / "near", near, files=self, code="TT079", jobs=())
    assert "take 1.0 of 2 CPUs (0-1): 4200" in finding.evidence


# what is hidden


@pytest.mark.parametrize("code", ["TT078", "TT079"])
@pytest.mark.parametrize(
    ("how", "groups", "hidden"),
    [
        ("hidepid=invisible", "1000", True),
        ("hidepid=2,gid=1005", "1000 1006", True),
        ("hidepid=2,gid=1005", "1000 1005", False),
        ("hidepid=noaccess", "0 1000", False),
        ("hidepid=ptraceable,gid=1005", "1005", True),
        ("hidepid=off", "1000", False),
    ],
)
def test_others_that_are_hidden_are_unchecked(
    tmp_path: Path, code: str, how: str, groups: str, *, hidden: bool
) -> None:
    files = {
        "proc/self/mountinfo": MOUNTS.replace("proc proc rw", f"proc proc rw,{how}"),
        "proc/self/status": STATUS.format("0-15") + f"Gid:\t1000\t1000\t1000\t1000\nGroups:\t{groups} \n",
    }
    told = ["/proc hides the processes of others here (hidepid): sudo"]
    assert look(tmp_path, files=files, code=code, jobs=(JOB,) if code == "TT078" else ()) == ([], told * hidden)


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
