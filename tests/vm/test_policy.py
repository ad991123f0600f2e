"""Host policy: every value is set, kept over restarts, applied again at boot, and given back to what it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from inside import (
    GOVERNOR,
    MANAGER,
    ORIGINAL_SYSCTLS,
    ORIGINALS,
    STATE,
    WANTED,
    governors,
    is_original,
    is_tuned,
    knobs,
    sysctls,
    wait_for,
)
from machine import Machine

FINE = {"applied", "kept", "unsupported"}


def test_verify_is_clean_and_the_kernel_agrees(ready: Machine) -> None:
    rows = knobs(ready)
    assert {row["outcome"] for row in rows.values()} <= FINE, rows
    assert ready.sh("torchtuned verify")[0] == 0
    assert is_tuned(ready)
    now = sysctls(ready)
    for name in ORIGINAL_SYSCTLS:
        assert rows[f"sysctl/{name}"]["current"] == now[name]


def test_stop_gives_each_policy_its_own_governor_back(ready: Machine) -> None:
    ready.check("systemctl stop torchtuned")
    assert is_original(ready)
    ready.check("systemctl start torchtuned")
    wait_for(ready, f"{STATE} | grep ready")
    assert is_tuned(ready)


def test_undo_gives_everything_back_and_apply_sets_it_again(ready: Machine) -> None:
    ready.check("torchtuned undo")
    assert is_original(ready)
    ready.check(f"busctl call {MANAGER} Apply")
    assert is_tuned(ready)


def test_restart_does_not_flap(ready: Machine) -> None:
    ready.check("systemctl restart torchtuned")
    assert governors(ready) == [WANTED] * len(ORIGINALS)
    wait_for(ready, f"{STATE} | grep ready")
    ready.check("systemctl stop torchtuned")
    assert is_original(ready)


def test_a_killed_daemon_does_not_take_its_own_values_for_originals(ready: Machine) -> None:
    ready.check("systemctl kill -s KILL torchtuned; sleep 1")
    wait_for(ready, f"{STATE} | grep ready")
    assert is_tuned(ready)
    ready.check("systemctl stop torchtuned")
    assert is_original(ready)


def test_undo_works_when_the_daemon_is_dead(ready: Machine) -> None:
    ready.check("systemctl kill -s KILL torchtuned; systemctl stop torchtuned")
    ready.check("torchtuned undo")
    assert is_original(ready)


def test_what_somebody_else_changed_is_left_alone(ready: Machine) -> None:
    ready.check(f"echo ondemand >{GOVERNOR.format(1)}")
    assert knobs(ready)["cpu/policy1/governor"]["outcome"] == "drifted"
    assert ready.sh("torchtuned verify")[0] == 1
    ready.check("systemctl stop torchtuned")
    assert governors(ready) == [ORIGINALS[0], "ondemand", *ORIGINALS[2:]]
    ready.check(f"echo {ORIGINALS[1]} >{GOVERNOR.format(1)}")


@pytest.fixture
def admin_file(ready: Machine) -> Iterator[Machine]:
    """The machine; files that the administrator writes are gone after the test."""
    yield ready
    ready.check("rm -f /etc/sysctl.d/50-admin.conf /etc/torchtuned/conf.d/50-admin.conf; systemctl restart torchtuned")
    wait_for(ready, f"{STATE} | grep ready")


def test_the_administrators_sysctl_files_win(admin_file: Machine) -> None:
    admin_file.check("echo 'vm.swappiness = 33' >/etc/sysctl.d/50-admin.conf; torchtuned undo")
    admin_file.check(f"busctl call {MANAGER} Apply")
    row = knobs(admin_file)["sysctl/vm.swappiness"]
    assert row["outcome"] == "foreign"
    assert "/etc/sysctl.d/50-admin.conf:1" in row["reason"] + row["source"]
    assert sysctls(admin_file)["vm.swappiness"] == ORIGINAL_SYSCTLS["vm.swappiness"]


def test_a_bad_file_names_its_line_and_leaves_the_policy_in_force(admin_file: Machine) -> None:
    admin_file.check("printf '[cpu]\\ngovernr = powersave\\n' >/etc/torchtuned/conf.d/50-admin.conf")
    status, output = admin_file.sh(f"busctl call {MANAGER} Reload")
    assert status != 0
    assert "50-admin.conf:2" in output, output
    assert "governor" in output
    assert is_tuned(admin_file)
    admin_file.check("systemctl restart torchtuned")
    wait_for(admin_file, f"{STATE} | grep degraded")


def test_cpus_that_go_and_come_get_the_policy_again(ready: Machine) -> None:
    ready.check("echo 0 >/sys/devices/system/cpu/cpu7/online; sleep 1; echo 1 >/sys/devices/system/cpu/cpu7/online")
    wait_for(ready, f"grep -x {WANTED} {GOVERNOR.format(7)}")


def test_a_driver_that_comes_late_gets_the_policy(ready: Machine) -> None:
    ready.check("rmmod acpi_cpufreq && test ! -e /sys/devices/system/cpu/cpufreq/policy0 && modprobe acpi_cpufreq")
    wait_for(ready, f"test $(cat {GOVERNOR.format('?')} | grep -cx {WANTED}) = 8")


def test_applied_again_after_a_reboot(ready: Machine) -> None:
    ready.reboot()
    wait_for(ready, f"{STATE} | grep ready")
    assert is_tuned(ready)
    ready.check("systemctl stop torchtuned")
    assert is_original(ready)
