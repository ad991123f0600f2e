"""Other tuners from Debian beside torchtuned: each keeps its own, nobody fights, and the way back stays open."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from inside import (
    GOVERNOR,
    INSTALL,
    JOB,
    MANAGER,
    ORIGINALS,
    STATE,
    cpus_of,
    governors,
    is_original,
    knobs,
    start,
    stop,
    wait_for,
)
from machine import Machine

SHELF = "/srv/neighbours"
PURGE = "DEBIAN_FRONTEND=noninteractive apt-get purge -q -y"
ALL_GOVERNORS = GOVERNOR.format("[0-9]")
SWAPPINESS = "/proc/sys/vm/swappiness"
FIRST, SWAP = "cpu/policy0/governor", "sysctl/vm.swappiness"
PROFILE = "[main]\\nsummary=x\\n[cpu]\\ngovernor=conservative\\n[sysctl]\\nvm.swappiness=33\\n"
PPD = "net.hadess.PowerProfiles /net/hadess/PowerProfiles net.hadess.PowerProfiles"
FAKE_PPD = "[Service]\\nEnvironment=POWER_PROFILE_DAEMON_FAKE_DRIVER=1\\n"
CPUPOWER = (
    "[Service]\\nType=oneshot\\nRemainAfterExit=yes\\nExecStart=/usr/bin/cpupower frequency-set -g conservative\\n"
)


def all_are(machine: Machine, governor: str, swappiness: int) -> None:
    """Wait until every governor and the sysctl are so."""
    wait_for(machine, f"! cat {ALL_GOVERNORS} | grep -vx {governor} && grep -qx {swappiness} {SWAPPINESS}")


def ours(machine: Machine) -> None:
    all_are(machine, "performance", 10)


def theirs(machine: Machine) -> None:
    all_are(machine, "conservative", 33)


def outcome(machine: Machine, knob: str, wanted: str) -> dict[str, str]:
    """Wait until verify says that of a knob, and return its row."""
    deadline = time.monotonic() + 60
    while (row := knobs(machine)[knob])["outcome"] != wanted:
        assert time.monotonic() < deadline, f"not {wanted}: {row}"
    return row


@pytest.fixture
def cpupower(ready: Machine) -> Iterator[Machine]:
    """The machine with a cpupower.service such as other distributions have; Debian's package comes without."""
    ready.check(f"printf '{CPUPOWER}' >/etc/systemd/system/cpupower.service; systemctl daemon-reload")
    yield ready
    ready.check(
        "systemctl stop cpupower torchtuned; rm /etc/systemd/system/cpupower.service; systemctl daemon-reload;"
        " systemctl restart originals"
    )


def test_cpupower_has_the_cpus_and_what_it_leaves_behind_is_the_original(cpupower: Machine) -> None:
    cpupower.check("systemctl start cpupower")
    assert outcome(cpupower, FIRST, "foreign")["reason"].startswith("left to cpupower")
    all_are(cpupower, "conservative", 10)
    cpupower.check("systemctl stop cpupower")
    ours(cpupower)
    cpupower.check("systemctl stop torchtuned")
    assert governors(cpupower) == ["conservative"] * len(ORIGINALS)


def test_power_profiles_daemon_is_held_at_performance_while_a_job_runs(ready: Machine) -> None:
    folder = "/etc/systemd/system/power-profiles-daemon.service.d"
    ready.check(f"mkdir -p {folder}; printf '{FAKE_PPD}' >{folder}/fake.conf")
    ready.check(f"{INSTALL} {SHELF}/power-profiles-daemon/*.deb; systemctl start power-profiles-daemon")
    held = f"busctl get-property {PPD} ActiveProfileHolds | grep torchtuned"
    active = f"busctl get-property {PPD} ActiveProfile | grep -x 's \"{{}}\"'"
    wait_for(ready, active.format("balanced"))
    job = start(ready, "a", f"exec torchtuned-run --cpus 2 {JOB}", user="alice")
    wait_for(ready, held)
    print(ready.check(f"busctl get-property {PPD} ActiveProfileHolds"))
    wait_for(ready, active.format("performance"))
    ready.check("systemctl restart power-profiles-daemon")
    wait_for(ready, held)
    old = ready.check("systemctl show torchtuned -p MainPID --value").strip()
    ready.check("systemctl kill -s KILL torchtuned")
    wait_for(ready, f"! systemctl show torchtuned -p MainPID --value | grep -x {old} && {STATE} | grep ready")
    wait_for(ready, held)
    ready.check(f"kill -KILL {job.pid}")
    wait_for(ready, f"! {held}")
    wait_for(ready, active.format("balanced"))
    ready.check(f"{PURGE} power-profiles-daemon; rm -r {folder}; systemctl daemon-reload")


def test_tlp_and_irqbalance_are_named(ready: Machine) -> None:
    ready.check(f"{INSTALL} {SHELF}/tlp/*.deb {SHELF}/irqbalance/*.deb; systemctl start tlp; systemctl is-active tlp")
    row = outcome(ready, FIRST, "foreign")
    assert (row["reason"].partition(" while")[0], row["source"]) == ("left to TLP", "tlp.service")
    assert outcome(ready, SWAP, "applied")
    ready.check("systemctl is-active irqbalance")
    assert "irqbalance (irqbalance.service) runs" in ready.sh("torchtuned verify")[1]
    ready.check(f"{PURGE} tlp irqbalance")
    wait_for(ready, f"! cat {ALL_GOVERNORS} | grep -vx performance")
    ready.check("systemctl stop torchtuned")
    assert is_original(ready)


@pytest.fixture(scope="module")
def tuned(machine: Machine) -> Iterator[Machine]:
    """The machine with Debian's TuneD and a profile of which every value differs from ours and from the originals."""
    machine.check("systemctl start torchtuned")
    wait_for(machine, f"{STATE} | grep ready")
    print(machine.check(f"{INSTALL} {SHELF}/tuned/*.deb | tail -n 3; tuned --version; systemctl is-active tuned"))
    for folder in ("/etc/tuned/theirs", "/etc/tuned/profiles/theirs"):
        machine.check(f"mkdir -p {folder}; printf '{PROFILE}' >{folder}/tuned.conf")
    machine.check("tuned-adm profile theirs; systemctl stop tuned; systemctl restart torchtuned")
    yield machine
    machine.check(f"if dpkg -s tuned; then {PURGE} tuned; fi >/dev/null 2>&1")


@pytest.fixture
def both(tuned: Machine) -> Machine:
    """The machine with both running; TuneD came later."""
    tuned.check("systemctl stop tuned; systemctl start torchtuned; torchtuned apply >/dev/null")
    ours(tuned)
    tuned.check("systemctl start tuned")
    theirs(tuned)
    outcome(tuned, FIRST, "foreign")
    return tuned


def test_tuned_is_named_and_nobody_fights(both: Machine) -> None:
    for command in ("plan", "verify"):
        row = knobs(both, command)[FIRST]
        reason = f"left to TuneD while it runs; it was {ORIGINALS[0]} before torchtuned"
        assert (row["outcome"], row["reason"], row["source"]) == ("foreign", reason, "tuned.service")
    said = both.check(f"torchtuned why {FIRST}")
    print(said)
    assert "TuneD (tuned.service)" in said
    assert both.sh("torchtuned verify")[0] == 0
    both.check(
        f"(while [ ! -e /root/enough ]; do cat {ALL_GOVERNORS} {SWAPPINESS}; sleep 0.1; done | sort | uniq -c"
        " >/root/seen; touch /root/seen.done) >/dev/null 2>&1 &"
    )
    job = start(both, "a", f"exec torchtuned-run --cpus 3 {JOB}", user="alice")
    assert len(cpus_of(both, job)) == 3
    both.check(
        f"for i in 1 2 3 4; do busctl call {MANAGER} Apply >/dev/null; sleep 2; tuned-adm verify; sleep 2; done;"
        " tuned-adm profile theirs; torchtuned apply; systemctl restart torchtuned; sleep 3"
    )
    theirs(both)
    stop(both, job)
    both.check("touch /root/enough")
    wait_for(both, "test -e /root/seen.done")
    seen = both.check("cat /root/seen; rm -f /root/enough /root/seen*")
    print(seen)
    assert {line.split()[1] for line in seen.splitlines()} <= {"conservative", "33"} | {"10", "performance"}
    told = both.check("journalctl -u torchtuned --no-pager -o cat -n 200")
    assert told.count(f"{FIRST}: performance -> performance (left to TuneD") >= 1


def test_when_tuned_stops_the_policy_is_back_and_the_originals_are_known(both: Machine) -> None:
    both.check("systemctl stop tuned")
    ours(both)
    assert outcome(both, FIRST, "applied")["reason"] == f"set by torchtuned, was {ORIGINALS[0]}"
    both.check("systemctl stop torchtuned")
    assert is_original(both)


def test_undo_beside_tuned_takes_nothing_from_it(both: Machine) -> None:
    said = both.check("COLUMNS=200 torchtuned undo")
    assert "left to TuneD while it runs" in " ".join(said.split())
    theirs(both)
    both.check("systemctl stop tuned")
    ours(both)  # is what TuneD found
    both.check("torchtuned undo")
    assert is_original(both)


def test_stopped_beside_tuned_torchtuned_can_still_undo_later(both: Machine) -> None:
    both.check("systemctl stop torchtuned")
    theirs(both)
    both.check("systemctl stop tuned")
    ours(both)
    both.check("torchtuned undo")
    assert is_original(both)


def test_tuned_that_was_there_first_and_is_removed(tuned: Machine) -> None:
    tuned.check("systemctl stop tuned torchtuned; torchtuned undo")
    assert is_original(tuned)
    tuned.check("systemctl start tuned")
    theirs(tuned)
    tuned.check("systemctl start torchtuned")
    wait_for(tuned, f"{STATE} | grep ready")
    row = outcome(tuned, FIRST, "foreign")
    assert (row["current"], row["reason"]) == ("conservative", "left to TuneD")
    theirs(tuned)
    tuned.check(f"{PURGE} tuned")
    ours(tuned)
    assert outcome(tuned, FIRST, "applied")["reason"] == f"set by torchtuned, was {ORIGINALS[0]}"
    tuned.check("systemctl stop torchtuned")
    assert is_original(tuned)
