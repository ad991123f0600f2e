"""CPU knobs on the shapes that cpufreq drivers give them; every test brings the machine back to where it was."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.kernel import CPUFREQ, EPP, Kernel, policy
from fakes.policy import Desk

from torchtuned.policy import Outcome
from torchtuned.tunables.cpu import on_battery

INTEL = "/sys/devices/system/cpu/intel_pstate"
TWO = "performance powersave"
FAST = "[cpu]\ngovernor = performance|schedutil\nenergy_performance_preference = performance|balance_performance\n"


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    """Makes a machine; at the end of the test everything is undone, and has to be as it was."""
    desks = []

    def make(*files: dict[str, str]) -> Desk:
        kernel = Kernel({name: text for part in files for name, text in part.items()})
        desks.append((Desk(kernel, tmp_path), dict(kernel.files)))
        return desks[-1][0]

    yield make
    for made, before in desks:
        made.restart()
        made.undo()
        assert made.kernel.files == before
        assert made.ledger() == []


def governors(desk: Desk) -> dict[str, str]:
    return {
        posixpath.basename(posixpath.dirname(path)): text
        for path, text in desk.kernel.files.items()
        if path.endswith("/scaling_governor")
    }


def preferences(desk: Desk) -> list[str]:
    return [text for path, text in sorted(desk.kernel.files.items()) if path.endswith(f"/{EPP}")]


def test_acpi_cpufreq_each_policy_gets_its_own_back(desk: Callable[..., Desk]) -> None:
    made = desk(
        policy(0, "acpi-cpufreq", "ondemand"), policy(1, "acpi-cpufreq", "schedutil"),
        policy(2, "acpi-cpufreq", "userspace"), policy(10, "acpi-cpufreq", "performance"),
    )  # fmt: skip
    rows = made.apply(FAST)
    assert set(governors(made).values()) == {"performance"}
    assert [knob for knob in rows if knob.endswith("/governor")] == [
        f"cpu/policy{number}/governor" for number in (0, 1, 2, 10)
    ]
    assert rows["cpu/policy10/governor"].outcome is Outcome.KEPT
    assert rows["cpu/*/energy_performance_preference"].outcome is Outcome.UNSUPPORTED
    assert rows["cpu/*/energy_performance_preference"].reason == "acpi-cpufreq does not have it"
    made.undo()
    assert governors(made)["policy2"] == "userspace"
    assert made.kernel.files[f"{CPUFREQ}/policy2/scaling_setspeed"] == "2000000"


def test_intel_pstate_active_locks_the_preference(desk: Callable[..., Desk]) -> None:
    made = desk(
        policy(0, "intel_pstate", "powersave", governors=TWO, epp="balance_performance"),
        policy(1, "intel_pstate", "powersave", governors=TWO, epp="power"),
    )
    planned = made.plan(FAST)
    assert planned["cpu/policy0/governor"].reason == "would become performance"
    assert planned[f"cpu/policy0/{EPP}"].reason == "implied by governor performance"
    rows = made.apply(FAST)
    assert rows["cpu/policy0/governor"].outcome is Outcome.APPLIED
    assert (rows[f"cpu/policy0/{EPP}"].outcome, rows[f"cpu/policy0/{EPP}"].reason) == (
        Outcome.KEPT, "implied by governor performance",
    )  # fmt: skip
    assert preferences(made) == ["performance", "performance"]
    assert not [path for path, _ in made.kernel.writes if path.endswith(EPP)]
    made.undo()
    assert preferences(made) == ["balance_performance", "power"]


def test_amd_pstate_leaves_the_preference_behind_and_we_do_not(desk: Callable[..., Desk]) -> None:
    made = desk(policy(0, "amd-pstate-epp", "powersave", governors=TWO, epp="balance_power"))
    made.apply("[cpu]\ngovernor = performance\n")
    made.restart()  # as after SIGKILL
    made.undo()
    assert preferences(made) == ["balance_power"]


@pytest.mark.parametrize("driver", ["intel_pstate", "amd-pstate-epp"])
def test_preference_then_governor_then_back_in_any_order(desk: Callable[..., Desk], driver: str) -> None:
    made = desk(policy(0, driver, "powersave", governors=TWO, epp="balance_power"))
    made.apply("[cpu]\nenergy_performance_preference = balance_performance\n")
    assert preferences(made) == ["balance_performance"]
    made.apply("[cpu]\nenergy_performance_preference = balance_performance\ngovernor = performance\n")
    assert preferences(made) == ["performance"]
    made.undo("cpu/policy0/governor")
    assert preferences(made) == ["balance_performance"]
    made.undo(f"cpu/policy0/{EPP}")
    assert preferences(made) == ["balance_power"]


@pytest.mark.parametrize("driver", ["intel_pstate", "amd-pstate-epp"])
def test_governor_then_preference_the_true_original_is_passed_on(desk: Callable[..., Desk], driver: str) -> None:
    made = desk(policy(0, driver, "powersave", governors=f"{TWO} schedutil", epp="balance_power"))
    made.apply("[cpu]\ngovernor = performance\n")
    both = "[cpu]\ngovernor = schedutil\nenergy_performance_preference = power\n"
    made.apply(both)
    assert preferences(made) == ["power"]
    made.undo("cpu/policy0/governor")
    made.undo()
    assert preferences(made) == ["balance_power"]


def test_a_preference_given_back_although_somebody_took_the_governor(desk: Callable[..., Desk]) -> None:
    made = desk(policy(0, "amd-pstate-epp", "powersave", governors=f"{TWO} schedutil", epp="balance_power"))
    made.apply("[cpu]\ngovernor = performance\n")
    made.kernel.set(f"{CPUFREQ}/policy0/scaling_governor", "schedutil")
    rows = made.undo()
    assert rows["cpu/policy0/governor"].outcome is Outcome.DRIFTED
    assert preferences(made) == ["balance_power"]
    made.kernel.set(f"{CPUFREQ}/policy0/scaling_governor", "powersave")


def test_intel_pstate_passive_and_amd_pstate_guided_are_like_any_driver(desk: Callable[..., Desk]) -> None:
    made = desk(policy(0, "intel_cpufreq", "schedutil"), policy(1, "amd-pstate", "schedutil", governors="schedutil"))
    rows = made.apply("[cpu]\ngovernor = performance|schedutil\n")
    assert governors(made) == {"policy0": "performance", "policy1": "schedutil"}
    assert rows["cpu/policy1/governor"].outcome is Outcome.KEPT
    rows = made.apply("[cpu]\ngovernor = performance\n")
    assert rows["cpu/policy1/governor"].outcome is Outcome.UNSUPPORTED
    assert rows["cpu/policy1/governor"].reason == "not offered here; the kernel offers schedutil"


def test_intel_cpufreq_with_hwp_takes_a_preference_beside_its_governor(desk: Callable[..., Desk]) -> None:
    made = desk(policy(0, "intel_cpufreq", "performance", epp="balance_power"))
    made.kernel.files[f"{CPUFREQ}/policy0/scaling_governor"] = "schedutil"
    rows = made.apply("[cpu]\nenergy_performance_preference = performance\n")
    assert rows[f"cpu/policy0/{EPP}"].outcome is Outcome.APPLIED
    made.undo()
    made.kernel.files[f"{CPUFREQ}/policy0/scaling_governor"] = "performance"


def test_busy_is_an_excuse_for_a_driver_nobody_has_heard_of(desk: Callable[..., Desk]) -> None:
    made = desk(policy(0, "new_pstate", "performance", governors=TWO, epp="performance"))
    row = made.apply("[cpu]\nenergy_performance_preference = power\n")[f"cpu/policy0/{EPP}"]
    assert (row.outcome, row.reason) == (Outcome.KEPT, "implied by governor")
    assert made.ledger() == []


def test_performance_and_efficiency_cores_share_one_wish(desk: Callable[..., Desk]) -> None:
    made = desk(
        policy(0, "intel_pstate", "powersave", governors=TWO, epp="balance_performance", cpus="0 1"),
        policy(16, "intel_pstate", "performance", governors=TWO, epp="performance", cpus="16"),
    )
    rows = made.apply("[cpu]\ngovernor = powersave\nenergy_performance_preference = power\n")
    assert governors(made) == {"policy0": "powersave", "policy16": "powersave"}
    assert preferences(made) == ["power", "power"]
    assert rows["cpu/policy0/governor"].outcome is Outcome.KEPT


def test_no_cpufreq_as_in_most_virtual_machines(desk: Callable[..., Desk]) -> None:
    made = desk({"/sys/devices/system/cpu/online": "0-1"})
    rows = made.apply(FAST + "boost = on\nmin_perf_pct = 50\nplatform_profile = performance\n")
    assert {row.outcome for row in rows.values()} == {Outcome.UNSUPPORTED}
    assert rows["cpu/*/governor"].reason == "no cpufreq driver, as in most virtual machines"
    assert rows["cpu/platform_profile"].reason == "the firmware offers no platform profile"


def test_a_policy_whose_cpus_are_offline_waits_and_is_given_back_later(desk: Callable[..., Desk]) -> None:
    made = desk(policy(0, "acpi-cpufreq", "ondemand"), policy(1, "acpi-cpufreq", "schedutil"))
    made.kernel.files[f"{CPUFREQ}/policy1/affected_cpus"] = ""
    rows = made.apply("[cpu]\ngovernor = performance\n")
    row = rows["cpu/policy1/governor"]
    assert (row.outcome, row.reason, row.current) == (Outcome.UNSUPPORTED, "its CPUs are offline", "?")
    made.kernel.files[f"{CPUFREQ}/policy1/affected_cpus"] = "1"
    rows = made.apply("[cpu]\ngovernor = performance\n", only=["cpu/policy1"])
    assert [*rows] == ["cpu/policy1/governor"]
    assert governors(made) == {"policy0": "performance", "policy1": "performance"}
    made.kernel.files[f"{CPUFREQ}/policy1/affected_cpus"] = ""
    assert made.apply("[cpu]\ngovernor = performance\n")["cpu/policy1/governor"].outcome is Outcome.UNSUPPORTED
    row = made.undo()["cpu/policy1/governor"]
    assert (row.outcome, row.wanted) == (Outcome.FAILED, "schedutil")
    assert row.reason == "cannot give back schedutil: its CPUs are offline; undo again later"
    assert made.ledger() == ["cpu/policy1/governor"]
    made.kernel.files[f"{CPUFREQ}/policy1/affected_cpus"] = "1"


def test_reassert_writes_again_what_hotplug_or_resume_lost(desk: Callable[..., Desk]) -> None:
    made = desk(policy(0, "acpi-cpufreq", "ondemand"))
    made.apply("[cpu]\ngovernor = performance\n")
    made.kernel.set(f"{CPUFREQ}/policy0/scaling_governor", "schedutil")  # the kernel's default, not the original
    assert made.apply("[cpu]\ngovernor = performance\n", only=["cpu/policy0"], reassert=True)
    assert governors(made) == {"policy0": "performance"}
    made.undo()
    assert governors(made) == {"policy0": "ondemand"}


def test_what_is_offline_is_given_back_when_it_is_there_again(desk: Callable[..., Desk]) -> None:
    """However often others that come and go have it tried meanwhile, as while CPUs are switched off and on."""
    made = desk(policy(0, "acpi-cpufreq", "ondemand"), policy(1, "acpi-cpufreq", "schedutil"))
    made.apply("[cpu]\ngovernor = performance\n")
    made.kernel.online(1, back=False)
    for _ in range(5):
        row = made.apply("")["cpu/policy1/governor"]
        assert row.reason == "cannot give back schedutil: its CPUs are offline; undo again later"
    made.restart()
    made.kernel.online(1, back=True)
    made.apply("", only=["cpu"], reassert=True)
    assert governors(made) == {"policy0": "ondemand", "policy1": "schedutil"}
    assert made.ledger() == []


BOOST = f"{CPUFREQ}/boost"


def test_boost_of_all_takes_each_policys_own_along(desk: Callable[..., Desk]) -> None:
    made = desk(
        policy(0, "amd-pstate"), policy(1, "amd-pstate"), {BOOST: "1"},
        {f"{CPUFREQ}/policy0/boost": "0", f"{CPUFREQ}/policy1/boost": "1"},
    )  # fmt: skip
    before = dict(made.kernel.files)
    row = made.apply("[cpu]\nboost = off\n")["cpu/boost"]
    assert (row.current, row.outcome) == ("off", Outcome.APPLIED)
    assert made.kernel.files[f"{CPUFREQ}/policy1/boost"] == "0"
    made.undo()
    assert made.kernel.files == before


@pytest.mark.parametrize("when", ["before", "after"])
def test_boost_with_cpus_offline(desk: Callable[..., Desk], when: str) -> None:
    """A policy without CPUs answers EBUSY (simultaneous multithreading switched off, say); the others go on."""
    made = desk(
        *(policy(number, "acpi-cpufreq") for number in range(3)), {BOOST: "1"},
        {f"{CPUFREQ}/policy{number}/boost": on for number, on in enumerate("101")},
    )  # fmt: skip
    if when == "before":
        made.kernel.online(2, back=False)
    assert made.apply("[cpu]\nboost = off\n")["cpu/boost"].outcome is Outcome.APPLIED
    if when == "after":
        made.kernel.online(2, back=False)
    made.restart()
    assert made.undo()["cpu/boost"].outcome is Outcome.APPLIED
    made.kernel.online(2, back=True)
    assert [made.kernel.files[f"{CPUFREQ}/policy{number}/boost"] for number in range(3)] == ["1", "0", "1"]
    assert made.ledger() == []


def test_boost_of_each_policy_where_there_is_no_other(desk: Callable[..., Desk]) -> None:
    made = desk(policy(0, "amd-pstate-epp"), policy(1, "amd-pstate-epp"), {f"{CPUFREQ}/policy1/boost": "1"})
    rows = made.apply("[cpu]\nboost = off\n")
    assert [*rows] == ["cpu/policy1/boost"]
    assert made.kernel.files[f"{CPUFREQ}/policy1/boost"] == "0"


def test_intel_says_boost_the_other_way_round(desk: Callable[..., Desk]) -> None:
    made = desk(policy(0, "intel_pstate", "powersave", governors=TWO), {f"{INTEL}/no_turbo": "1"})
    row = made.apply("[cpu]\nboost = on\n")["cpu/boost"]
    assert (row.current, row.wanted, row.outcome) == ("on", "on", Outcome.APPLIED)
    assert made.kernel.files[f"{INTEL}/no_turbo"] == "0"


def test_min_perf_pct_stops_at_the_maximum(desk: Callable[..., Desk]) -> None:
    made = desk({f"{INTEL}/min_perf_pct": "20", f"{INTEL}/max_perf_pct": "60"})
    real = made.kernel.set

    def clamp(path: str, value: str) -> None:
        real(path, str(min(int(value), 60)))

    made.kernel.set = clamp  # type: ignore[method-assign]
    row = made.apply("[cpu]\nmin_perf_pct = >=80\n")["cpu/min_perf_pct"]
    assert (row.current, row.outcome) == ("60", Outcome.APPLIED)
    assert made.apply("[cpu]\nmin_perf_pct = >=80\n")["cpu/min_perf_pct"].outcome is Outcome.APPLIED
    assert len(made.kernel.writes) == 1


PLATFORM = "/sys/firmware/acpi/platform_profile"


def test_platform_profile_goes_before_the_governor(desk: Callable[..., Desk]) -> None:
    made = desk(
        policy(0, "acpi-cpufreq"), {PLATFORM: "balanced", f"{PLATFORM}_choices": "low-power balanced performance"}
    )
    made.apply("[cpu]\ngovernor = performance\nplatform_profile = max-power|performance\n")
    assert [path for path, _ in made.kernel.writes] == [PLATFORM, f"{CPUFREQ}/policy0/scaling_governor"]
    made.undo()
    assert [path for path, _ in made.kernel.writes[2:]] == [f"{CPUFREQ}/policy0/scaling_governor", PLATFORM]


def test_a_platform_profile_that_could_not_be_given_back_is_left(desk: Callable[..., Desk]) -> None:
    made = desk({PLATFORM: "custom", f"{PLATFORM}_choices": "low-power balanced performance"})
    row = made.apply("[cpu]\nplatform_profile = performance\n")["cpu/platform_profile"]
    assert (row.outcome, row.reason) == (Outcome.KEPT, "'custom' could not be given back")


SUPPLY = "/sys/class/power_supply"
BATTERY = {f"{SUPPLY}/BAT0/type": "Battery", f"{SUPPLY}/BAT0/status": "Discharging"}


@pytest.mark.parametrize(
    ("files", "answer"),
    [
        ({}, False),
        (BATTERY, True),
        ({**BATTERY, f"{SUPPLY}/AC/type": "Mains", f"{SUPPLY}/AC/online": "1"}, False),
        ({**BATTERY, f"{SUPPLY}/AC/type": "Mains", f"{SUPPLY}/AC/online": "0"}, True),
        ({**BATTERY, f"{SUPPLY}/BAT0/scope": "Device"}, False),
        ({**BATTERY, f"{SUPPLY}/BAT0/status": "Full"}, False),
    ],
)
def test_on_battery(files: dict[str, str], answer: bool) -> None:  # noqa: FBT001 - a table
    assert on_battery(Kernel(files)) is answer


def test_the_cpu_is_left_alone_on_battery_and_given_back_when_it_begins(desk: Callable[..., Desk]) -> None:
    plugged = {f"{SUPPLY}/AC/type": "Mains", f"{SUPPLY}/AC/online": "1"}
    made = desk(policy(0, "acpi-cpufreq"), {"/proc/sys/vm/swappiness": "60"}, BATTERY, plugged)
    text = "[cpu]\ngovernor = performance\n[sysctl]\nvm.swappiness = 10\n"
    made.apply(text)
    assert governors(made) == {"policy0": "performance"}
    made.kernel.files[f"{SUPPLY}/AC/online"] = "0"
    row = made.apply(text)["cpu/policy0/governor"]
    assert (row.outcome, row.reason, row.current) == (Outcome.KEPT, "left alone while on battery", "schedutil")
    assert made.kernel.files["/proc/sys/vm/swappiness"] == "10"
    made.kernel.files[f"{SUPPLY}/AC/online"] = "1"
