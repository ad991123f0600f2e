"""Sleep, battery and the knobs for jobs: what comes and goes while the policy stands, with the kernel's own drivers."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from inside import (
    GOVERNOR,
    JOB,
    MANAGER,
    ORIGINALS,
    STATE,
    WANTED,
    cpus_of,
    governors,
    is_original,
    knobs,
    listed,
    start,
    stop,
    wait_for,
)
from machine import SHARE, Machine

JOURNAL = "journalctl -u torchtuned --no-pager -o cat"

# The 9p driver does not survive a sleep, so its device is without a driver meanwhile; nobody can ask the machine then.
NAP = f"""#!/bin/bash
exec >/root/nap.log 2>&1 </dev/null
cd /
driver=/sys/bus/virtio/drivers/9pnet_virtio
device=$(cd $driver; echo virtio*)
for i in $(seq 20); do umount {SHARE} && break; sleep 0.5; done
echo "$device" >$driver/unbind
echo "$1" >/sys/power/pm_test
cat /sys/power/mem_sleep
since=$(date '+%Y-%m-%d %H:%M:%S')
timeout 90 busctl monitor --match "member='PrepareForSleep'" >/root/nap.signals &
monitor=$!
sleep 2
timeout 30 systemctl suspend -i
for i in $(seq 120); do
  [ "$(grep -c BOOLEAN /root/nap.signals)" -ge 2 ] && break
  sleep 1
done
kill $monitor
echo none >/sys/power/pm_test
echo "$device" >$driver/bind
mount {SHARE}
journalctl -k --no-pager -o cat --since "$since" | grep -E 'PM:|CPU.*(up|down|offline)|smpboot'
cp /root/nap.log {SHARE}/nap.done
"""
# A firmware that sets a governor of its own when it wakes up.
FIRMWARE = f"""#!/bin/sh
[ "$1" = post ] && echo ondemand >{GOVERNOR.format(1)} && echo 44 >/proc/sys/vm/swappiness
exit 0
"""


def nap(machine: Machine, level: str) -> str:
    """Have logind put the machine to sleep, as far as the kernel's test level goes, and wait until it is back."""
    done = machine.share / "nap.done"
    done.unlink(missing_ok=True)
    (machine.share / "nap").write_text(NAP)
    machine.check(f"install {SHARE}/nap /root/nap; systemd-run -q sh -c 'sleep 2; exec /root/nap {level}'")
    deadline = time.monotonic() + 240
    while not done.exists():
        assert time.monotonic() < deadline, f"the machine does not come back from {level}"
        time.sleep(1)
    time.sleep(1)
    return done.read_text()


def test_after_sleep_the_policy_is_there_again_once_and_jobs_are_pinned(ready: Machine) -> None:
    """The kernel freezes all and wakes up: emulated, devices and CPUs take minutes to stop, and journald is killed."""
    (ready.share / "firmware").write_text(FIRMWARE)
    ready.check(f"install -D {SHARE}/firmware /usr/lib/systemd/system-sleep/firmware; torchtuned apply >/dev/null")
    job = start(ready, "a", f"exec torchtuned-run --cpus 3 {JOB}", user="alice")
    got = cpus_of(ready, job)
    print(nap(ready, "freezer"))
    assert ready.check("grep BOOLEAN /root/nap.signals | tr -d ' ;\\n'") == "BOOLEANtrueBOOLEANfalse"
    wait_for(ready, f"{JOURNAL} | grep 'back from sleep'")
    wait_for(ready, f"grep -qx performance {GOVERNOR.format(1)}")
    assert governors(ready) == [WANTED] * len(ORIGINALS)
    told = ready.check(JOURNAL).rpartition(f"process {job.pid}, granted")[2]
    print(told)
    assert told.count("cpu/policy1/governor: ondemand -> performance") == 1
    assert told.count("sysctl/vm.swappiness: 44 -> 10") == 1
    assert told.count("back from sleep") == 1
    assert cpus_of(ready, job) == got
    assert [row["pid"] for row in listed(ready)] == [job.pid]
    stop(ready, job)
    ready.check("rm /usr/lib/systemd/system-sleep/firmware; systemctl stop torchtuned")
    assert is_original(ready)


@pytest.fixture
def quiet(ready: Machine) -> Iterator[Machine]:
    """The machine with profile quiet, in which every knob is for jobs."""
    ready.check(f"busctl call {MANAGER} SetProfile s quiet")
    assert is_original(ready)
    yield ready
    mains(ready, on=True)
    ready.check(f"systemctl start torchtuned; busctl call {MANAGER} SetProfile s ''")


def mains(machine: Machine, *, on: bool) -> None:
    """Plug the machine in, or pull the plug, and look at the adapter, which tells the kernel."""
    byte = "0" if on else "1"
    machine.check(
        f'python3 -c \'import os; port = os.open("/dev/port", os.O_RDWR); os.pwrite(port, b"\\x7f", 0x70);'
        f" os.pwrite(port, bytes([{byte}]), 0x71)'; cat /sys/class/power_supply/ADP1/online"
    )
    wait_for(machine, f"grep -qx {1 - int(byte)} /sys/class/power_supply/ADP1/online")


def tuned(machine: Machine) -> None:
    wait_for(machine, f"! cat {GOVERNOR.format('*')} | grep -qvx performance")


def original(machine: Machine) -> None:
    wait_for(machine, f"grep -qx {ORIGINALS[0]} {GOVERNOR.format(0)}")
    wait_for(machine, "grep -qx 61 /proc/sys/vm/swappiness")
    assert is_original(machine)


def test_quiet_leaves_the_machine_alone_on_battery(quiet: Machine) -> None:
    job = start(quiet, "a", f"exec torchtuned-run --cpus 2 {JOB}", user="alice")
    tuned(quiet)
    mains(quiet, on=False)
    wait_for(quiet, "grep -qx Discharging /sys/class/power_supply/BAT0/status")
    original(quiet)
    assert "the machine runs on battery now" in quiet.check(JOURNAL)
    row = knobs(quiet)["cpu/policy0/governor"]
    assert (row["outcome"], row["reason"]) == ("kept", "left alone while on battery")
    mains(quiet, on=True)
    tuned(quiet)
    stop(quiet, job)
    original(quiet)


@pytest.mark.parametrize("killed", ["job", "daemon", "both", "wrapper"])
def test_knobs_for_jobs_are_given_back_whoever_is_killed(quiet: Machine, killed: str) -> None:
    report = "--report" if killed == "wrapper" else ""
    job = start(quiet, "a", f"exec torchtuned-run {report} --cpus 2 {JOB}", user="alice")
    tuned(quiet)
    inhibited = "systemd-inhibit --list --no-pager | grep torchtuned"
    wait_for(quiet, f"{inhibited} | grep sleep:idle | grep block")
    wrapper = quiet.check(f"cut -d' ' -f4 /proc/{job.pid}/stat").strip()
    if killed == "both":
        quiet.check(f"kill -KILL {job.pid}; systemctl kill -s KILL torchtuned")
    elif killed == "daemon":
        quiet.check("systemctl kill -s KILL torchtuned; sleep 1")
        wait_for(quiet, f"{STATE} | grep ready")
        tuned(quiet)
        assert quiet.check(inhibited).count("torchtuned") == 1
        quiet.check(f"kill -KILL {job.pid}")
    elif killed == "wrapper":
        assert "torchtuned-run" in quiet.check(f"tr '\\0' ' ' </proc/{wrapper}/cmdline")
        quiet.check(f"kill -KILL {wrapper}; sleep 2; kill -KILL {job.pid} || true")
    else:
        quiet.check(f"kill -KILL {job.pid}")
    wait_for(quiet, f"! {inhibited}")
    original(quiet)
    wait_for(quiet, f"{STATE} | grep ready")


def test_a_stopped_daemon_keeps_the_machine_from_nothing(quiet: Machine) -> None:
    job = start(quiet, "a", f"exec torchtuned-run --cpus 2 {JOB}", user="alice")
    tuned(quiet)
    wait_for(quiet, "systemd-inhibit --list --no-pager | grep torchtuned")
    quiet.check("systemctl kill -s KILL torchtuned; systemctl stop torchtuned")
    wait_for(quiet, "! systemd-inhibit --list --no-pager | grep torchtuned")
    quiet.check("torchtuned undo")
    assert is_original(quiet)
    quiet.check(f"kill {job.pid}; systemctl start torchtuned")


def test_jobs_are_pinned_again_when_their_cpu_was_away(ready: Machine) -> None:
    """Kernels before 6.2 forget the affinity of a thread when its last CPU goes."""
    jobs = [start(ready, "a", f"exec torchtuned-run --cpus 1 {JOB}", user="alice")]
    if cpus_of(ready, jobs[0]) == {0}:  # cannot go
        jobs.append(start(ready, "b", f"exec torchtuned-run --cpus 1 {JOB}", user="bob"))
    job = jobs[-1]
    (cpu,) = got = cpus_of(ready, job)
    online = f"/sys/devices/system/cpu/cpu{cpu}/online"
    ready.check(f"echo 0 >{online}; sleep 2; echo 1 >{online}")
    wait_for(ready, f"[ $(grep -h Cpus_allowed_list /proc/{job.pid}/task/*/status | cut -f 2 | sort -u) = {cpu} ]")
    wait_for(ready, f"grep -qx performance {GOVERNOR.format(cpu)}")
    assert cpus_of(ready, job) == got
    stop(ready, *jobs)
