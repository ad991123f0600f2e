"""What debian/tests asks of the installed package, and how much of the machine is left to its unit."""

from __future__ import annotations

from pathlib import Path

from machine import SHARE, Machine

SMOKE = Path(__file__).resolve().parents[2] / "debian/tests/smoke"
MOST_EXPOSED = 2.5  # TuneD 9.6, power-profiles-daemon 1.2


def test_smoke(ready: Machine) -> None:
    """As autopkgtest runs it: as root, in a folder of its own, with nothing of the source but the script."""
    ready.put(SMOKE)
    print(ready.check(f"export AUTOPKGTEST_TMP=$(mktemp -d); cd $AUTOPKGTEST_TMP; {SHARE}/smoke"))


def test_little_of_the_machine_is_left_to_the_unit(ready: Machine) -> None:
    told = ready.check("systemd-analyze security --no-pager torchtuned.service").splitlines()
    overall = next(line for line in told if "exposure level" in line)
    print("\n".join([*(line for line in told if line.startswith("✗")), overall]))
    assert float(overall.split(":")[1].split()[0]) <= MOST_EXPOSED
