"""Removal gives every value back, purge leaves nothing; both can be followed by a new installation."""

from __future__ import annotations

from inside import INSTALL, JOB, ORIGINALS, STATE, cpus_of, governors, start, wait_for
from machine import SHARE, Machine

REMOVE = "DEBIAN_FRONTEND=noninteractive apt-get -q -y"


def test_removal_gives_values_back_and_spares_the_jobs(ready: Machine) -> None:
    job = start(ready, "a", f"exec torchtuned-run --cpus 2 --gpus none {JOB}", user="alice")
    got = cpus_of(ready, job)
    ready.check(f"{REMOVE} remove torchtuned")
    assert governors(ready) == ORIGINALS
    assert cpus_of(ready, job) == got
    ready.check(f"{INSTALL} {SHARE}/torchtuned.deb")
    wait_for(ready, f"{STATE} | grep ready")
    assert cpus_of(ready, job) == got
    assert set(governors(ready)) == {"performance"}
    ready.check(f"kill {job.pid}")


def test_removal_gives_values_back_when_the_daemon_is_dead(ready: Machine) -> None:
    ready.check("systemctl mask --runtime torchtuned; systemctl kill -s KILL torchtuned; sleep 1")
    assert set(governors(ready)) == {"performance"}
    ready.check(f"{REMOVE} remove torchtuned; systemctl unmask --runtime torchtuned")
    assert governors(ready) == ORIGINALS


def test_purge_leaves_nothing_behind(machine: Machine) -> None:
    machine.check(f"{INSTALL} {SHARE}/torchtuned.deb")
    wait_for(machine, f"{STATE} | grep ready")
    machine.check(f"{REMOVE} purge torchtuned")
    assert governors(machine) == ORIGINALS
    assert machine.check("find / -xdev \\( -path /mnt -o -path /tmp \\) -prune -o -name '*torchtuned*' -print") == ""
    assert machine.check("find /run /sys/fs/cgroup -name '*torchtuned*'") == ""
    assert "torchtuned" not in machine.check("systemctl list-units --all --no-legend; systemctl list-unit-files")
