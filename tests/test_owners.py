from __future__ import annotations

from pathlib import Path

import pytest
from fakes.kernel import EPP, Kernel, policy
from fakes.policy import Desk

from torchtuned.policy import Outcome
from torchtuned.tunables.owners import PPD, UNITS, Owners

KNOBS = (
    "cpu/policy0/governor", f"cpu/policy0/{EPP}", "cpu/boost", "cpu/min_perf_pct", "cpu/platform_profile",
    "latency/cpu_dma_latency", "sysctl/vm.swappiness", "memory/transparent_hugepage", "block/sda/scheduler",
    "gpu/0000:01:00.0/power_control", "gpu/0000:01:00.0/persistence_mode",
)  # fmt: skip
OWNED = {
    "tuned.service": KNOBS[:9],
    "tlp.service": (*KNOBS[:5], "block/sda/scheduler", "gpu/0000:01:00.0/power_control"),
    "auto-cpufreq.service": KNOBS[:5],
    "cpupower.service": KNOBS[:5],
    "cpufrequtils.service": KNOBS[:1],
    "system76-power.service": KNOBS[:5],
    PPD: (f"cpu/policy0/{EPP}", "cpu/platform_profile"),
}


def test_every_tuner_is_in_the_table_here() -> None:
    assert set(UNITS) == set(OWNED)


@pytest.mark.parametrize("unit", OWNED)
def test_an_active_tuner_owns_its_family_and_nothing_else(unit: str) -> None:
    for name in (unit, unit.removesuffix(".service")):
        owners = Owners(Kernel({}), [name])
        assert [knob for knob in KNOBS if owners.owner(knob)] == [*OWNED[unit]]
    assert not [knob for knob in KNOBS if Owners(Kernel({}), ["cron.service"]).owner(knob)]


def test_power_profiles_daemon_owns_the_governor_only_where_it_drives_the_cpu() -> None:
    def owned(kernel: Kernel) -> list[str]:
        return [knob for knob in KNOBS[:4] if Owners(kernel, [PPD]).owner(knob)]

    assert owned(Kernel(policy(0, "acpi-cpufreq"))) == [f"cpu/policy0/{EPP}"]
    assert owned(Kernel(policy(0, "intel_pstate", epp="power"))) == [*KNOBS[:4]]


def test_tuned_is_named_and_left_alone_and_the_rest_still_works(tmp_path: Path) -> None:
    files = {"/proc/sys/vm/swappiness": "60", "/sys/bus/pci/devices/0000:01:00.0/power/control": "auto"}
    files |= {
        f"/sys/bus/pci/devices/0000:01:00.0/{name}": text
        for name, text in (("vendor", "0x10de"), ("class", "0x030200"))
    }
    made = Desk(Kernel({**files, **policy(0, "acpi-cpufreq")}), tmp_path)
    text = "[cpu]\ngovernor = performance\n[sysctl]\nvm.swappiness = 10\n[gpu]\npower_control = on\n"
    rows = made.apply(text, tuners=["tuned.service"])
    for knob in ("cpu/policy0/governor", "sysctl/vm.swappiness"):
        assert (rows[knob].outcome, rows[knob].reason, rows[knob].source) == (
            Outcome.FOREIGN, "left to TuneD", "tuned.service",
        )  # fmt: skip
    assert rows["gpu/0000:01:00.0/power_control"].outcome is Outcome.APPLIED
    assert [path for path, _ in made.kernel.writes] == ["/sys/bus/pci/devices/0000:01:00.0/power/control"]


SWAP, SWAP_FILE = "sysctl/vm.swappiness", "/proc/sys/vm/swappiness"
TEN = "[sysctl]\nvm.swappiness = 10\n"


@pytest.fixture
def taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Desk:
    """A machine on which TuneD has come after us, found our value, and has it in its hands."""
    made = Desk(Kernel({SWAP_FILE: "60"}), tmp_path)
    made.apply(TEN)
    caplog.set_level("INFO")
    for _ in range(2):
        row = made.apply(TEN, tuners=["tuned"])[SWAP]
        assert (row.outcome, row.reason) == (
            Outcome.FOREIGN, "left to TuneD while it runs; it was 60 before torchtuned",
        )  # fmt: skip
    assert caplog.text.count("left to TuneD while it runs; it was 60 before torchtuned") == 1
    made.kernel.writes.clear()
    return made


@pytest.mark.parametrize("text", [TEN, ""])
def test_after_another_tuner_gave_back_what_it_found_the_original_is_still_known(taken: Desk, text: str) -> None:
    taken.kernel.files[SWAP_FILE] = "30"
    taken.apply(text, tuners=["tuned"])
    taken.restart()
    assert taken.plan(text, tuners=["tuned"])[SWAP].outcome is Outcome.FOREIGN
    taken.kernel.files[SWAP_FILE] = "10"
    row = taken.apply(text)[SWAP]
    if text:
        assert (row.outcome, row.reason) == (Outcome.APPLIED, "set by torchtuned, was 60")
        taken.undo()
    assert taken.kernel.files[SWAP_FILE] == "60"
    assert taken.ledger() == []


def test_what_another_tuner_left_behind_is_the_original_from_then_on(taken: Desk) -> None:
    taken.kernel.files[SWAP_FILE] = "30"
    assert taken.apply(TEN)[SWAP].reason == "set by torchtuned, was 30"
    taken.undo()
    assert (taken.kernel.files[SWAP_FILE], taken.ledger()) == ("30", [])


def test_another_tuner_that_gave_back_what_was_there_before_us_is_no_reason_to_call_it_drifted(taken: Desk) -> None:
    taken.kernel.files[SWAP_FILE] = "60"
    assert taken.apply(TEN)[SWAP].outcome is Outcome.APPLIED
    taken.undo()
    assert taken.kernel.files[SWAP_FILE] == "60"


@pytest.mark.parametrize("seen", [True, False])
def test_undo_leaves_what_another_tuner_has_and_the_next_one_gives_it_back(taken: Desk, *, seen: bool) -> None:
    if not seen:  # it came a moment ago
        taken.kernel.files[SWAP_FILE] = "10"
        taken.apply(TEN)
        taken.kernel.writes.clear()
    [row] = taken.engine.undo(tuners=["tuned.service"])
    assert (row.outcome, row.current, row.source) == (Outcome.FOREIGN, "10", "tuned.service")
    assert taken.kernel.writes == []
    [row] = taken.engine.undo()
    assert (row.outcome, taken.kernel.files[SWAP_FILE], taken.ledger()) == (Outcome.APPLIED, "60", [])


def test_what_is_kept_is_not_called_foreign_for_the_administrators_sake(tmp_path: Path) -> None:
    made = Desk(Kernel({"/proc/sys/vm/swappiness": "60", "/etc/sysctl.d/a.conf": "vm.swappiness=60"}), tmp_path)
    assert made.plan("[sysctl]\nvm.swappiness = keep\n")["sysctl/vm.swappiness"].outcome is Outcome.KEPT


THP = "/sys/kernel/mm/transparent_hugepage/enabled"
GOVERNOR = "/sys/devices/system/cpu/cpufreq/policy1/scaling_governor"
SYSFS = {
    "a w line": ({"/etc/tmpfiles.d/a.conf": f"# x\nw {THP} - - - - never\n"}, THP, "/etc/tmpfiles.d/a.conf:2"),
    "with modifiers": ({"/run/tmpfiles.d/a.conf": f"w+!- {THP} - - - - never\n"}, THP, "/run/tmpfiles.d/a.conf:1"),
    "a pattern": (
        {"/etc/tmpfiles.d/a.conf": "w /sys/devices/system/cpu/cpufreq/policy*/scaling_governor - - - - powersave\n"},
        GOVERNOR, "/etc/tmpfiles.d/a.conf:1",
    ),
    "another file": ({"/etc/tmpfiles.d/a.conf": f"w {THP} - - - - never\n"}, GOVERNOR, ""),
    "no value": ({"/etc/tmpfiles.d/a.conf": f"z {THP} 0640\n"}, THP, ""),
    "a vendor's": ({"/usr/lib/tmpfiles.d/a.conf": f"w {THP} - - - - never\n"}, THP, ""),
    "masked": (
        {"/etc/tmpfiles.d/a.conf": "", "/run/tmpfiles.d/a.conf": f"w {THP} - - - - never\n"}, THP, "",
    ),
    "sysfsutils": (
        {"/etc/init.d/sysfsutils": "", "/etc/sysfs.conf": "kernel/mm/transparent_hugepage/enabled = never\n"},
        THP, "/etc/sysfs.conf:1",
    ),
    "sysfsutils, not a value": (
        {"/etc/init.d/sysfsutils": "", "/etc/sysfs.d/a.conf": "mode kernel/mm/transparent_hugepage/enabled = 0640\n"},
        THP, "",
    ),
    "sysfsutils, not there": ({"/etc/sysfs.conf": "kernel/mm/transparent_hugepage/enabled = never\n"}, THP, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", SYSFS)
def test_what_the_administrator_sets_in_sys_at_boot(case: str) -> None:
    files, path, source = SYSFS[case]
    owner = Owners(Kernel(files)).owner("some/knob", path)
    assert (owner.source if owner else "") == source


def test_a_tmpfiles_line_beats_the_policy(tmp_path: Path) -> None:
    line = {"/etc/tmpfiles.d/cpu.conf": f"w {GOVERNOR} - - - - schedutil"}
    made = Desk(Kernel({**policy(0, "acpi-cpufreq"), **policy(1, "acpi-cpufreq"), **line}), tmp_path)
    rows = made.apply("[cpu]\ngovernor = performance\n")
    assert rows["cpu/policy0/governor"].outcome is Outcome.APPLIED
    row = rows["cpu/policy1/governor"]
    assert (row.outcome, row.source) == (Outcome.FOREIGN, "/etc/tmpfiles.d/cpu.conf:1")


def test_every_line_that_gives_a_sysctl_a_value_is_mentioned() -> None:
    files = {
        "/etc/sysctl.d/a.conf": "vm.swappiness = 1\n-vm.swappiness\n",
        "/usr/lib/sysctl.d/b.conf": "vm.swap* = 2\n",
    }
    mentions = Owners(Kernel(files)).assignments.mentions("vm.swappiness")
    assert mentions == ["/etc/sysctl.d/a.conf:1", "/usr/lib/sysctl.d/b.conf:1"]
