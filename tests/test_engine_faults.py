"""What host policy does when a step fails, hangs, or is the last one of the process."""

from __future__ import annotations

import errno
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.kernel import CPUFREQ, EPP, Kernel, policy
from fakes.policy import Desk, by_knob
from fakes.tree import make_tree
from test_ledger import no_space

from torchtuned.engine import Engine
from torchtuned.errors import HostError, Missing, Refused, Unreadable
from torchtuned.host import Host
from torchtuned.ledger import Ledger
from torchtuned.policy import Outcome, Row

SWAPPINESS = "/proc/sys/vm/swappiness"
FILES = {
    SWAPPINESS: "60",
    "/proc/sys/vm/dirty_bytes": "0",
    "/proc/sys/vm/dirty_ratio": "20",
    **policy(0, "amd-pstate-epp", "powersave", governors="performance powersave", epp="balance_power"),
    **policy(1, "acpi-cpufreq", "ondemand"),
    **policy(2, "acpi-cpufreq", "userspace"),
    f"{CPUFREQ}/boost": "1",
    f"{CPUFREQ}/policy1/boost": "0",
    f"{CPUFREQ}/policy2/boost": "1",
}
TEXT = """
[cpu]
governor = performance
boost = off
[sysctl]
vm.swappiness = 10
vm.dirty_bytes = 500000000 @jobs
"""
SWAP = "sysctl/vm.swappiness"
GOVERNOR = f"{CPUFREQ}/policy1/scaling_governor"


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(Kernel(FILES), tmp_path, deadline_s=0.3)


def kill_at(desk: Desk, number: int) -> None:
    """Let the step of that number be the last one."""
    left = iter(range(number))

    def step(moment: str, path: str) -> None:
        if next(left, None) is None:
            raise Killed

    desk.kernel.step = step


def survives(desk: Desk, doing: Callable[[], object]) -> bool:
    """Whether it came to its end before it was killed; then a new process takes over."""
    try:
        doing()
    except Killed:
        return False
    finally:
        desk.kernel.step = lambda moment, path: None
        desk.restart()
    return True


def kills(desk: Desk, before: Callable[[], object], doing: Callable[[], object]) -> Iterator[int]:
    """Kill what is done at each of its steps in turn, each time from the state that `before` makes."""
    for number in range(100):
        desk.kernel.files = dict(FILES)
        desk.path.unlink(missing_ok=True)
        desk.restart()
        before()
        kill_at(desk, number)
        if survives(desk, doing):
            assert number > 10
            return
        yield number
    raise AssertionError("no end")


@pytest.mark.parametrize("then", ["undo", "apply, undo", "verify, no job, undo"])
def test_killed_at_any_step_of_apply(desk: Desk, then: str) -> None:
    for _ in kills(desk, lambda: None, lambda: desk.apply(TEXT)):
        if "apply" in then:
            assert {row.outcome for row in desk.apply(TEXT).values()} == {Outcome.APPLIED}
            assert desk.kernel.files[SWAPPINESS] == "10"
        if "no job" in then:
            desk.verify(TEXT)
            desk.apply(TEXT, jobs=False)
            assert desk.kernel.files["/proc/sys/vm/dirty_ratio"] == "20"
        rows = desk.undo()
        assert desk.kernel.files == FILES
        assert {row.outcome for row in rows.values()} <= {Outcome.APPLIED, Outcome.KEPT}
        assert desk.ledger() == []


@pytest.mark.parametrize("then", ["undo", "apply, undo", "another tuner comes and goes, undo"])
def test_killed_at_any_step_of_undo(desk: Desk, then: str) -> None:
    for _ in kills(desk, lambda: desk.apply(TEXT), lambda: desk.undo()):
        if "tuner" in then:
            desk.engine.undo(tuners=["tuned"])
            desk.restart()
        if "apply" in then:
            assert {row.outcome for row in desk.apply(TEXT).values()} == {Outcome.APPLIED}
            assert desk.kernel.files[SWAPPINESS] == "10"
            assert desk.kernel.files[GOVERNOR] == "performance"
        desk.undo()
        assert desk.kernel.files == FILES
        assert desk.ledger() == []


OTHER = "[cpu]\ngovernor = powersave\n[sysctl]\nvm.swappiness = 20\nvm.dirty_ratio = 40\n"


def test_killed_at_any_step_from_one_policy_to_another(desk: Desk) -> None:
    for number in kills(desk, lambda: desk.apply(TEXT), lambda: desk.apply(OTHER)):
        if number % 2:
            desk.apply(OTHER)
            assert desk.kernel.files[SWAPPINESS] == "20"
            desk.restart()
        desk.undo()
        assert desk.kernel.files == FILES
        assert desk.ledger() == []


def test_killed_at_any_step_from_one_value_to_another(tmp_path: Path) -> None:
    """The second one has a side effect that the first had not: only the ledger tells that it is ours."""
    files = policy(0, "amd-pstate-epp", "schedutil", governors="performance powersave schedutil", epp="balance_power")
    for number in range(12):
        desk = Desk(Kernel(files), tmp_path)
        desk.apply("[cpu]\ngovernor = powersave\n")
        kill_at(desk, number)
        survived = survives(desk, lambda desk=desk: desk.apply("[cpu]\ngovernor = performance\n"))  # type: ignore[misc]
        desk.undo()
        assert desk.kernel.files == files
        assert desk.ledger() == []
    assert survived


def test_what_somebody_made_of_a_side_effect_between_two_values_of_ours_is_theirs(tmp_path: Path) -> None:
    files = policy(0, "amd-pstate-epp", "schedutil", governors="performance powersave schedutil", epp="balance_power")
    desk = Desk(Kernel(files), tmp_path)
    desk.apply("[cpu]\ngovernor = powersave\n")
    desk.kernel.set(f"{CPUFREQ}/policy0/{EPP}", "power")
    desk.apply("[cpu]\ngovernor = performance\n")
    desk.restart()
    desk.undo()
    assert desk.kernel.files == {**files, f"{CPUFREQ}/policy0/{EPP}": "power"}


def test_a_side_effect_that_cannot_be_ours_is_somebodys(tmp_path: Path) -> None:
    """Only `performance` means a preference; under another governor nobody but its user has changed that."""
    files = policy(0, "amd-pstate-epp", "schedutil", governors="performance powersave schedutil", epp="balance_power")
    desk = Desk(Kernel(files), tmp_path)
    kill_at(desk, 3)
    assert not survives(desk, lambda: desk.apply("[cpu]\ngovernor = powersave\n"))
    assert desk.kernel.files[f"{CPUFREQ}/policy0/scaling_governor"] == "powersave"
    desk.kernel.set(f"{CPUFREQ}/policy0/{EPP}", "power")
    desk.undo()
    assert desk.kernel.files == {**files, f"{CPUFREQ}/policy0/{EPP}": "power"}


REFUSALS = {
    errno.EPERM: Outcome.DENIED,
    errno.EACCES: Outcome.DENIED,
    errno.EROFS: Outcome.DENIED,
    errno.EBUSY: Outcome.FAILED,
    errno.EINVAL: Outcome.FAILED,
    errno.EIO: Outcome.FAILED,
    errno.EOPNOTSUPP: Outcome.UNSUPPORTED,
}


def refuse(desk: Desk, path: str, number: int, *, times: int = 1_000) -> None:
    left = iter(range(times))

    def step(moment: str, where: str) -> None:
        if (moment, where) == ("before", path) and next(left, None) is not None:
            raise Refused("no", where=path, errno=number)

    desk.kernel.step = step


@pytest.mark.parametrize("number", REFUSALS, ids=errno.errorcode.get)
@pytest.mark.parametrize("path", [SWAPPINESS, GOVERNOR, "/proc/sys/vm/dirty_bytes"])
def test_a_refused_write_spoils_no_other_knob_and_leaves_no_entry(desk: Desk, path: str, number: int) -> None:
    refuse(desk, path, number)
    rows = desk.apply(TEXT)
    (bad,) = [row for row in rows.values() if row.outcome is not Outcome.APPLIED]
    assert bad.outcome is REFUSALS[number]
    assert bad.knob not in desk.ledger()
    assert len(desk.ledger()) == len(rows) - 1
    if bad.outcome is not Outcome.UNSUPPORTED:
        assert bad.reason == "the kernel refused: no"
        assert desk.verify(TEXT)[bad.knob] == bad
    desk.kernel.step = lambda moment, where: None
    assert desk.apply(TEXT)[bad.knob].outcome is Outcome.APPLIED
    desk.undo()
    assert desk.kernel.files == FILES


def test_the_next_preference_is_tried_when_the_first_is_refused(desk: Desk) -> None:
    real = desk.kernel.set

    def set_(path: str, value: str) -> None:
        if value == "performance":
            raise Refused("no", where=path, errno=errno.EINVAL)
        real(path, value)

    desk.kernel.set = set_  # type: ignore[method-assign]
    text = "[cpu]\ngovernor = performance|schedutil\n"
    row = desk.apply(text)["cpu/policy1/governor"]
    assert (row.outcome, row.current) == (Outcome.APPLIED, "schedutil")
    desk.restart()
    assert desk.apply(text)["cpu/policy1/governor"].outcome is Outcome.APPLIED
    desk.undo()
    assert desk.kernel.files == FILES


def test_a_write_without_effect_is_no_success(desk: Desk) -> None:
    desk.kernel.set = lambda path, value: None  # type: ignore[method-assign]
    row = desk.apply("[sysctl]\nvm.swappiness = 10\n")[SWAP]
    assert (row.outcome, row.reason, row.current) == (Outcome.FAILED, "the kernel took it without effect", "60")
    assert desk.ledger() == []


def test_what_the_kernel_makes_of_a_value_is_what_undo_compares_with(desk: Desk) -> None:
    real = desk.kernel.set
    desk.kernel.set = lambda path, value: real(path, "12" if value == "10" else value)  # type: ignore[method-assign]
    text = "[sysctl]\nvm.swappiness = 10\n"
    row = desk.apply(text)[SWAP]
    assert (row.outcome, row.reason) == (Outcome.APPLIED, "set by torchtuned, was 60; the kernel made 12 of 10")
    desk.restart()
    assert desk.apply(text)[SWAP].outcome is Outcome.APPLIED
    desk.undo()
    assert desk.kernel.files == FILES


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Unreadable("permission denied", where="x", errno=errno.EACCES), Outcome.DENIED),
        (Unreadable("input/output error", where="x", errno=errno.EIO), Outcome.FAILED),
        (Unreadable("device or resource busy", where="x", errno=errno.EBUSY), Outcome.UNSUPPORTED),
        (Missing("no such file or directory", where="x", errno=errno.ENOENT), Outcome.UNSUPPORTED),
    ],
)
def test_what_cannot_be_read_is_not_written(desk: Desk, error: HostError, outcome: Outcome) -> None:
    def read(path: str) -> None:
        if path == SWAPPINESS:
            raise error

    desk.kernel.read_step = read
    row = desk.apply(TEXT)[SWAP]
    assert (row.outcome, row.reason, row.current) == (outcome, error.what, "?")
    assert SWAPPINESS not in [path for path, _ in desk.kernel.writes]


def test_a_full_run_keeps_every_knob_as_it_is(desk: Desk) -> None:
    with no_space():
        rows = desk.apply(TEXT)
    assert {row.outcome for row in rows.values()} == {Outcome.FAILED}
    assert "until its original can be recorded" in rows[SWAP].reason
    assert desk.kernel.files == FILES
    assert desk.kernel.writes == []
    assert {row.outcome for row in desk.apply(TEXT).values()} == {Outcome.APPLIED}


def test_a_run_that_fills_up_between_knob_and_confirmation(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    def step(moment: str, path: str) -> None:
        if (moment, path) == ("before", "ledger") and desk.kernel.writes:
            raise OSError(errno.ENOSPC, "No space left on device")

    desk.kernel.step = step
    text = "[sysctl]\nvm.swappiness = 10\n"
    assert desk.apply(text)[SWAP].outcome is Outcome.APPLIED
    assert "cannot write the ledger: No space left on device (free some space there" in caplog.text
    desk.kernel.step = lambda moment, path: None
    desk.restart()
    assert desk.verify(text)[SWAP].outcome is Outcome.APPLIED
    desk.undo()
    assert desk.kernel.files == FILES


def test_undo_needs_no_space(desk: Desk) -> None:
    desk.apply(TEXT)
    desk.restart()
    with no_space():
        rows = desk.undo()
    assert {row.outcome for row in rows.values()} == {Outcome.APPLIED}
    assert desk.kernel.files == FILES
    assert desk.ledger() == []


def test_undo_of_some_on_a_full_run_is_not_undone_by_the_next_start(desk: Desk) -> None:
    desk.apply(TEXT)
    with no_space():
        desk.undo(SWAP)
    assert desk.kernel.files[SWAPPINESS] == "60"
    desk.restart()
    desk.kernel.files[SWAPPINESS] = "33"
    desk.undo()
    assert desk.kernel.files == {**FILES, SWAPPINESS: "33"}
    assert desk.ledger() == []


def test_an_original_refused_once_is_given_back_the_next_time(desk: Desk) -> None:
    desk.apply(TEXT)
    refuse(desk, SWAPPINESS, errno.EPERM, times=2)
    for _ in range(2):
        row = desk.undo()[SWAP]
        assert (row.outcome, row.reason) == (Outcome.DENIED, "cannot give back 60: no; undo again later")
        assert desk.ledger() == [SWAP]
        desk.restart()
    assert desk.undo()[SWAP].outcome is Outcome.APPLIED
    assert desk.kernel.files == FILES


def test_an_original_refused_for_good_ends_in_a_word_not_in_the_ledger(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.apply(TEXT)
    refuse(desk, SWAPPINESS, errno.EINVAL)
    desk.undo()
    desk.undo()
    row = desk.undo()[SWAP]
    assert row.reason == f"gave up after 3 tries to give back 60: no; it is in {SWAPPINESS}"
    assert row.outcome is Outcome.FAILED
    assert desk.ledger() == []
    assert "gave up after 3 tries to give back 60" in caplog.text


def test_an_original_that_the_kernel_changes_counts_as_refused(desk: Desk) -> None:
    desk.apply("[sysctl]\nvm.swappiness = 10\n")
    real = desk.kernel.set
    desk.kernel.set = lambda path, value: real(path, "10")  # type: ignore[method-assign]
    row = desk.undo()[SWAP]
    assert (row.outcome, row.reason) == (
        Outcome.FAILED,
        "cannot give back 60: the kernel made 10 of it; undo again later",
    )
    desk.kernel.set = real  # type: ignore[method-assign]
    assert desk.undo()[SWAP].outcome is Outcome.APPLIED


class Hang:
    """Writes to a path hang until `over`."""

    def __init__(self, desk: Desk, *paths: str) -> None:
        self.over = threading.Event()
        self.count = 0

        def step(moment: str, path: str) -> None:
            if moment == "before" and path in paths:
                self.count += 1
                self.over.wait()

        desk.kernel.step = step


def test_a_write_that_hangs_costs_one_deadline_and_is_settled_when_it_comes_back(desk: Desk) -> None:
    hang = Hang(desk, GOVERNOR, f"{CPUFREQ}/policy2/scaling_governor")
    started = time.monotonic()
    rows = desk.apply(TEXT)
    assert time.monotonic() - started < 2 * 0.3 + 1
    assert rows["cpu/policy1/governor"].reason == "no answer from the kernel within 0.3 s"
    assert rows["cpu/policy2/governor"].reason == "not tried: one like it hangs"
    assert {knob for knob, row in rows.items() if row.passing} == {"cpu/policy1/governor", "cpu/policy2/governor"}
    assert {rows[f"cpu/policy{number}/governor"].outcome for number in (1, 2)} == {Outcome.FAILED}
    assert rows[SWAP].outcome is Outcome.APPLIED
    assert hang.count == 1
    started = time.monotonic()
    row = desk.verify(TEXT)["cpu/policy1/governor"]
    assert (row.outcome, row.reason) == (Outcome.FAILED, "an earlier access to it still hangs in the kernel")
    row = desk.undo()["cpu/policy1/governor"]
    assert row.reason == "an earlier access to it still hangs in the kernel; undo again later"
    assert time.monotonic() - started < 0.3
    assert desk.ledger() == ["cpu/policy1/governor"]
    hang.over.set()
    _until(lambda: desk.kernel.files[GOVERNOR] == "performance")
    _until(lambda: desk.undo().get("cpu/policy1/governor") is None)
    assert desk.kernel.files == FILES


def test_an_undo_that_hangs_is_done_by_the_next_one(desk: Desk) -> None:
    desk.apply(TEXT)
    hang = Hang(desk, SWAPPINESS)
    assert desk.undo()[SWAP].reason == "no answer from the kernel within 0.3 s; undo again later"
    assert desk.ledger() == [SWAP]
    hang.over.set()
    _until(lambda: not desk.ledger() or desk.undo() == {})
    assert desk.kernel.files == FILES


def test_an_undo_tries_one_of_a_kind_that_hangs_and_gives_the_rest_back(tmp_path: Path) -> None:
    """PID 1 waits for 30 seconds when it stops the daemon; each knob that hangs would take five."""
    files = {SWAPPINESS: "60"}
    for number in range(8):
        files |= policy(number, "acpi-cpufreq", "ondemand")
    desk = Desk(Kernel(files), tmp_path, deadline_s=0.3)
    desk.apply("[cpu]\ngovernor = performance\n[sysctl]\nvm.swappiness = 10\n")
    hang = Hang(desk, *(f"{CPUFREQ}/policy{number}/scaling_governor" for number in range(8)))
    started = time.monotonic()
    rows = desk.undo()
    assert time.monotonic() - started < 2 * 0.3
    assert hang.count == 1
    assert desk.kernel.files[SWAPPINESS] == "60"
    assert rows["cpu/policy7/governor"].reason == "no answer from the kernel within 0.3 s; undo again later"
    assert rows["cpu/policy0/governor"].reason == "not tried: one like it hangs; undo again later"
    assert len(desk.ledger()) == 8
    hang.over.set()
    _until(lambda: not desk.ledger() or desk.undo() == {})
    assert desk.kernel.files == files


def test_an_undo_of_many_that_hang_ends_in_time_and_gives_the_others_back(tmp_path: Path) -> None:
    """Each kind of knob hangs, and the one that does not was changed first, so it is the last to be given back."""
    files = {
        SWAPPINESS: "60",
        **policy(0, "intel_pstate", "powersave", epp="power"),
        **{f"/sys/block/sda/queue/{name}": text for name, text in (("read_ahead_kb", "128"), ("rotational", "1"))},
        "/sys/block/sda/queue/scheduler": "[none] mq-deadline",
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    }
    desk = Desk(Kernel(files), tmp_path, deadline_s=5.0)
    text = (
        "[cpu]\ngovernor = performance\n[sysctl]\nvm.swappiness = 10\n[memory]\ntransparent_hugepage = never\n"
        "[block:a]\ndevice = sda\nread_ahead_kb = 4096\nscheduler = mq-deadline\n"
    )
    assert {row.outcome for row in desk.apply(text).values()} == {Outcome.APPLIED}
    hang = Hang(desk, *(path for path in files if path != SWAPPINESS))
    started = time.monotonic()
    rows = by_knob(desk.engine.undo(seconds=1.0))
    assert time.monotonic() - started < 1.5
    assert hang.count == 4
    assert desk.kernel.files[SWAPPINESS] == "60"
    left = {row.knob for row in rows.values() if row.outcome is Outcome.FAILED and "undo again later" in row.reason}
    assert left == {*rows} - {SWAP} == {*desk.ledger()}
    hang.over.set()
    _until(lambda: not desk.ledger() or desk.undo() == {})
    assert desk.kernel.files == files


def test_what_hung_before_keeps_no_other_from_being_given_back(desk: Desk) -> None:
    text = "[cpu]\ngovernor = performance\n"
    desk.apply(text)
    hang = Hang(desk, f"{CPUFREQ}/policy2/scaling_governor")
    desk.undo("cpu/policy2")
    rows = desk.undo()
    assert "still hangs" in rows["cpu/policy2/governor"].reason
    assert rows["cpu/policy1/governor"].outcome is Outcome.APPLIED
    assert desk.kernel.files[GOVERNOR] == "ondemand"
    hang.over.set()
    _until(lambda: not desk.ledger() or desk.undo() == {})


def test_a_read_that_hangs(desk: Desk) -> None:
    over = threading.Event()

    def read(path: str) -> None:
        if path == SWAPPINESS:
            over.wait()

    desk.kernel.read_step = read
    rows = desk.apply(TEXT)
    assert (rows[SWAP].outcome, rows[SWAP].reason) == (Outcome.FAILED, "not tried: one like it hangs")
    assert rows["cpu/policy1/governor"].outcome is Outcome.APPLIED
    over.set()


def _until(done: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_preference_behind_a_governor_that_is_refused(desk: Desk) -> None:
    governor = f"{CPUFREQ}/policy0/scaling_governor"
    refuse(desk, governor, errno.EIO)
    rows = desk.apply("[cpu]\ngovernor = performance\nenergy_performance_preference = performance\n")
    assert rows["cpu/policy0/governor"].outcome is Outcome.FAILED
    assert rows[f"cpu/policy0/{EPP}"].outcome is Outcome.APPLIED
    desk.undo()
    assert desk.kernel.files == FILES


SCRIPT = """
import sys
from torchtuned import config, engine, host, ledger
made = engine.Engine(host.Host(sys.argv[1]), ledger.Ledger(sys.argv[2]))
wanted = config.load([("a", sys.argv[3])])
print("go", flush=True)
while True:
    made.apply(wanted, jobs_active=True)
    made.undo()
"""


def test_sigkill_of_a_real_process_at_any_moment(tmp_path: Path) -> None:
    files = {
        "proc/sys/vm/swappiness": "60\n", "proc/sys/net/core/somaxconn": "128\n",
        f"{CPUFREQ}/policy0/scaling_governor": "ondemand\n", f"{CPUFREQ}/policy0/affected_cpus": "0\n",
    }  # fmt: skip
    root, path = make_tree(tmp_path / "root", files), tmp_path / "run/ledger.json"
    text = "[sysctl]\nvm.swappiness = 10\nnet.core.somaxconn = 4096\n[cpu]\ngovernor = performance\n"
    wait = random.Random(3)
    found: list[Row] = []
    for _ in range(12):
        child = subprocess.Popen([sys.executable, "-c", SCRIPT, root, path, text], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(wait.uniform(0, 0.03))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        rows = by_knob(Engine(Host(root), Ledger(path)).undo())
        found += rows.values()
        assert {name: (root / name.lstrip("/")).read_text().strip() for name in files} == {
            name: value.strip() for name, value in files.items()
        }
        assert not path.exists()
    assert found, "no kill hit a change"
