from __future__ import annotations

import errno
import logging
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.kernel import CPUFREQ, Kernel, policy
from fakes.policy import Desk

from torchtuned.errors import Failed, NoSuchKnob, Unreadable
from torchtuned.policy import DEGRADING, Outcome
from torchtuned.tunables.cpu import CpuFamily

FILES = {
    "/proc/sys/vm/swappiness": "60",
    "/proc/sys/net/core/somaxconn": "128",
    "/proc/sys/kernel/numa_balancing": "1",
    **policy(0, "acpi-cpufreq", "ondemand"),
    **policy(1, "acpi-cpufreq", "schedutil"),
}
TEXT = """
[cpu]
governor = performance
[sysctl]
vm.swappiness = <=10
net.core.somaxconn = >=4096
kernel.numa_balancing = 0 @jobs
"""
SWAP = "sysctl/vm.swappiness"


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(Kernel(FILES), tmp_path)


def test_a_plan_changes_nothing_and_says_what_apply_will_do(desk: Desk) -> None:
    planned = desk.plan(TEXT)
    assert desk.kernel.files == FILES
    assert desk.ledger() == []
    applied = desk.apply(TEXT, jobs=False)
    assert {knob: row.outcome for knob, row in planned.items()} == {knob: row.outcome for knob, row in applied.items()}
    row = planned[SWAP]
    assert (row.current, row.wanted, row.reason, row.source) == ("60", "<=10", "would become 10", "/etc/test.conf:5")
    assert applied[SWAP].reason == "set by torchtuned, was 60"
    again = desk.plan(TEXT)
    assert {row.outcome for row in again.values()} == {Outcome.KEPT}
    assert again[SWAP].reason == "set by torchtuned, was 60"


def test_apply_twice_writes_once_and_undo_brings_all_back_in_reverse(desk: Desk) -> None:
    desk.apply(TEXT)
    writes = len(desk.kernel.writes)
    assert {row.outcome for row in desk.apply(TEXT).values()} == {Outcome.APPLIED}
    assert len(desk.kernel.writes) == writes == 5
    rows = desk.undo()
    assert desk.kernel.files == FILES
    assert [path for path, _ in desk.kernel.writes[5:]] == [path for path, _ in reversed(desk.kernel.writes[:5])]
    assert rows[SWAP].reason == "given back, torchtuned had set 10"
    assert (rows[SWAP].current, rows[SWAP].wanted, rows[SWAP].outcome) == ("60", "60", Outcome.APPLIED)
    assert desk.ledger() == []
    assert desk.undo() == {}


@pytest.mark.parametrize(("wish", "outcome"), [("keep", Outcome.KEPT), ("10", Outcome.DENIED)])
def test_only_a_wish_can_be_denied(desk: Desk, wish: str, outcome: Outcome) -> None:
    """An ordinary user may not read every file; what is left as it is needs no reading."""

    def refuse(path: str) -> None:
        if path == "/proc/sys/vm/swappiness":
            raise Unreadable("permission denied", where=path, errno=errno.EACCES)

    desk.kernel.read_step = refuse
    row = desk.plan(f"[sysctl]\nvm.swappiness = {wish}\n")[SWAP]
    assert (row.current, row.outcome) == ("?", outcome)
    assert "permission denied" in row.reason


def test_verify_tells_ours_from_not_in_force(desk: Desk) -> None:
    before = desk.verify(TEXT)
    assert (before[SWAP].outcome, before[SWAP].reason) == (Outcome.FAILED, "not in force: apply sets it")
    desk.apply(TEXT)
    desk.restart()
    assert {row.outcome for row in desk.verify(TEXT).values()} == {Outcome.APPLIED}


def test_a_restart_does_not_take_our_values_for_originals(desk: Desk) -> None:
    for _ in range(3):
        desk.apply(TEXT)
        desk.restart()
    desk.undo()
    assert desk.kernel.files == FILES


def test_after_a_reboot_what_the_machine_has_is_original(desk: Desk) -> None:
    boot = "/proc/sys/kernel/random/boot_id"
    desk.kernel.files[boot] = "one"
    desk.restart()
    desk.apply(TEXT)
    desk.kernel.files.update({**FILES, "/proc/sys/vm/swappiness": "40", boot: "two"})
    desk.restart()
    desk.apply(TEXT)
    desk.undo()
    assert desk.kernel.files["/proc/sys/vm/swappiness"] == "40"


def test_for_jobs_means_while_they_run(desk: Desk) -> None:
    knob = "/proc/sys/kernel/numa_balancing"
    assert desk.apply(TEXT, jobs=False)["sysctl/kernel.numa_balancing"].reason == "0 while a job runs"
    for end in ("apply", "killed"):
        desk.apply(TEXT, jobs=True)
        assert desk.kernel.files[knob] == "0"
        if end == "killed":
            desk.restart()
        desk.apply(TEXT, jobs=False)
        assert desk.kernel.files[knob] == "1"
        assert desk.kernel.files["/proc/sys/vm/swappiness"] == "10"


def test_for_jobs_may_become_for_always(desk: Desk) -> None:
    desk.apply("[sysctl]\nvm.swappiness = 10 @jobs\n")
    desk.apply("[sysctl]\nvm.swappiness = 10\n")
    desk.apply("[sysctl]\nvm.swappiness = 10\n", jobs=False)
    assert desk.kernel.files["/proc/sys/vm/swappiness"] == "10"


def test_another_policy_gives_back_what_it_does_not_want(desk: Desk) -> None:
    desk.apply(TEXT)
    other = "[sysctl]\nvm.swappiness = 20\n"
    planned = desk.plan(other)
    assert planned[SWAP].reason == "would become 20"
    assert planned["cpu/policy0/governor"].reason == "would be given back: no longer in the policy"
    rows = desk.apply(other)
    assert rows["cpu/policy0/governor"].outcome is Outcome.APPLIED
    assert desk.kernel.files == {**FILES, "/proc/sys/vm/swappiness": "20"}
    desk.restart()
    desk.undo()
    assert desk.kernel.files == FILES


def test_floors_are_held_against_the_original(desk: Desk) -> None:
    desk.apply("[sysctl]\nnet.core.somaxconn = >=4096\n")
    desk.apply("[sysctl]\nnet.core.somaxconn = >=1024\n")
    assert desk.kernel.files["/proc/sys/net/core/somaxconn"] == "1024"
    row = desk.apply("[sysctl]\nnet.core.somaxconn = >=64\n")["sysctl/net.core.somaxconn"]
    assert (row.outcome, row.reason, row.current) == (Outcome.KEPT, "already higher", "128")
    assert desk.ledger() == []


def test_somebody_else_has_the_last_word_and_is_told_once(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torchtuned.policy")
    desk.apply(TEXT)
    desk.kernel.files["/proc/sys/vm/swappiness"] = "33"
    caplog.clear()
    for _ in range(3):
        for row in (desk.verify(TEXT)[SWAP], desk.apply(TEXT)[SWAP], desk.plan(TEXT)[SWAP]):
            assert row.outcome is Outcome.DRIFTED
            assert row.reason.startswith("somebody changed it after torchtuned had set 10 (it was 60)")
        desk.restart()
    assert desk.kernel.files["/proc/sys/vm/swappiness"] == "33"
    assert len([record for record in caplog.records if "33" in record.getMessage()]) == 1
    assert desk.undo(SWAP)[SWAP].outcome is Outcome.DRIFTED
    assert desk.kernel.files["/proc/sys/vm/swappiness"] == "33"
    desk.apply(TEXT)  # told to forget, it starts afresh
    assert desk.kernel.files["/proc/sys/vm/swappiness"] == "10"
    desk.undo()
    assert desk.kernel.files["/proc/sys/vm/swappiness"] == "33"


def test_who_puts_our_value_back_gives_it_back_to_us(desk: Desk) -> None:
    desk.apply(TEXT)
    desk.kernel.files["/proc/sys/vm/swappiness"] = "33"
    desk.apply(TEXT)
    desk.kernel.files["/proc/sys/vm/swappiness"] = "10"
    assert desk.apply(TEXT)[SWAP].outcome is Outcome.APPLIED
    desk.undo()
    assert desk.kernel.files == FILES


def test_each_change_is_one_line_with_its_parts(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torchtuned.policy")
    desk.apply("[sysctl]\nvm.swappiness = 10\n")
    desk.undo()
    parts = [
        (record.TORCHTUNED_KNOB, record.TORCHTUNED_OLD, record.TORCHTUNED_NEW, record.TORCHTUNED_WHY)  # type: ignore[attr-defined]
        for record in caplog.records
    ]
    assert parts == [(SWAP, "60", "10", "/etc/test.conf:2"), (SWAP, "10", "60", "given back")]
    assert caplog.records[0].getMessage() == "sysctl/vm.swappiness: 60 -> 10 (/etc/test.conf:2)"


def test_undo_of_some(desk: Desk) -> None:
    desk.apply(TEXT)
    assert [*desk.undo("cpu")] == ["cpu/policy1/governor", "cpu/policy0/governor"]
    assert [*desk.undo("sysctl/vm.*")] == [SWAP]
    assert desk.undo(SWAP)[SWAP].reason == "not changed by torchtuned"
    assert desk.ledger() == ["sysctl/net.core.somaxconn", "sysctl/kernel.numa_balancing"]


@pytest.mark.parametrize("name", ["nonsense", "cpu/policy0/governer", "sysctl/vm.swapiness", "block/sda"])
def test_undo_of_what_is_no_knob(desk: Desk, name: str) -> None:
    desk.apply(TEXT)
    with pytest.raises(NoSuchKnob, match=f"no knob {name!r}"):
        desk.undo(SWAP, name)
    assert SWAP in desk.ledger()


def test_undo_takes_a_knob_without_its_family(desk: Desk) -> None:
    desk.apply(TEXT)
    assert [*desk.undo("vm.swappiness", "policy0/governor")] == ["cpu/policy0/governor", SWAP]
    assert desk.undo("vm/swappiness")[SWAP].reason == "not changed by torchtuned"
    desk.apply(TEXT)
    with pytest.raises(NoSuchKnob, match=r"no knob 'vm.swapiness' \(did you mean sysctl/vm.swappiness\?\)"):
        desk.undo("vm.swapiness")


def test_only_what_has_just_come(desk: Desk) -> None:
    rows = desk.apply(TEXT, only=["cpu/policy1"])
    assert [*rows] == ["cpu/policy1/governor"]
    assert desk.kernel.files[f"{CPUFREQ}/policy0/scaling_governor"] == "ondemand"


def test_a_device_that_went_away_for_good_leaves_the_ledger(desk: Desk) -> None:
    desk.apply(TEXT)
    for path in [path for path in desk.kernel.files if "/policy1/" in path]:
        del desk.kernel.files[path]
    desk.apply(TEXT)
    assert "cpu/policy1/governor" not in desk.ledger()


def test_a_damaged_ledger_stops_changes_and_nothing_else(desk: Desk) -> None:
    desk.apply(TEXT)
    desk.path.write_text("{")
    desk.restart()
    rows = desk.apply("[sysctl]\nvm.swappiness = 5\nnet.core.somaxconn = keep\n")
    assert rows[SWAP].outcome in DEGRADING
    assert "until you remove that file" in rows[SWAP].reason
    assert rows["sysctl/net.core.somaxconn"].outcome is Outcome.KEPT
    looks: list[Callable[[], object]] = [desk.undo, lambda: desk.plan(TEXT), lambda: desk.verify(TEXT)]
    for look in looks:
        with pytest.raises(Failed, match="original values are not known"):
            look()
    assert desk.kernel.files["/proc/sys/vm/swappiness"] == "10"


def test_two_at_a_time_take_turns(desk: Desk) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(20):
                desk.apply(TEXT if number % 2 else "[sysctl]\nvm.swappiness = 20\n")
                desk.verify(TEXT)
                desk.undo()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert desk.kernel.files == FILES


def test_thousands_of_cycles_leave_memory_descriptors_and_threads_flat(desk: Desk) -> None:
    others = set(threading.enumerate())  # those of earlier tests may end meanwhile

    def size() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(set(threading.enumerate()) - others)

    def cycles(count: int) -> None:
        for _ in range(count):
            desk.apply(TEXT)
            desk.undo()
            desk.kernel.writes.clear()

    cycles(200)
    before, memory = size(), _memory_kb()
    cycles(800)
    assert size() == before
    assert _memory_kb() - memory < 2000
    assert desk.kernel.files == FILES
    assert os.listdir(desk.path.parent) == ["ledger.lock"]


def _memory_kb() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


def test_a_ledger_of_another_version_names_knobs_that_are_unknown_here(desk: Desk) -> None:
    desk.apply(TEXT)
    desk.path.write_text(desk.path.read_text().replace(SWAP, "future/knob"))
    desk.restart()
    row = desk.undo()["future/knob"]
    assert (row.outcome, row.reason) == (Outcome.FAILED, "this torchtuned cannot give it back; it was 60")
    assert desk.ledger() == []


def test_the_work_grows_with_the_knobs_and_not_with_their_square(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each governor takes a preference along, which may be another knob's: there are thousands on a large machine."""
    find, asked = CpuFamily.find, list[str]()
    monkeypatch.setattr(CpuFamily, "find", lambda self, host, id: asked.append(id) or find(self, host, id))

    def lookups(policies: int) -> int:
        files: dict[str, str] = {}
        for number in range(policies):
            files |= policy(number, "amd-pstate-epp", "powersave", governors="performance powersave", epp="power")
        (tmp_path / str(policies)).mkdir()
        made = Desk(Kernel(files), tmp_path / str(policies))
        asked.clear()
        made.apply("[cpu]\ngovernor = performance\nenergy_performance_preference = performance\n")
        made.undo()
        assert made.kernel.files == files
        return len(asked)

    assert lookups(40) <= 10 * lookups(4)
