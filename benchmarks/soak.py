"""Whether torchtunedd grows: many registrations and releases, many times apply and undo, over a real bus.

usage: .venv/bin/python benchmarks/soak.py [--jobs 100000] [--applies 10000] [--json]

The daemon is the real one, on a private bus, and its machine a folder of files, so that apply and undo write. One
client registers itself and gives the place back; every tenth grant is committed before, as a job that runs. The first
tenth of each kind is warm-up: what a process takes once is no growth. Exit status 1 when, between the end of the
warm-up and the end, descriptors rise at all or private memory by more than --mib, or there are ever more threads than
the pools may hold. The PSS is shown and not judged: it moves with how many other processes share Python's pages.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from daemon import daemon_on  # which also puts the tests' folders on sys.path
from rounds import Bar

from harness import small_machine  # isort: skip

from torchtuned.client import MANAGER, ROOT, Client

SAMPLES = 20
SETTLE_S = 2.0
POOLS = min(32, (os.cpu_count() or 1) + 4) + 2  # asyncio's own pool, the policy's thread, and the loop


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The daemon at one moment, after `done` rounds; memory in KiB."""

    done: int
    pss: int
    private: int
    descriptors: int
    threads: int


def look(pid: int, done: int) -> Sample:
    """Read the daemon's files in /proc."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return Sample(
        done=done,
        pss=kib["Pss"],
        private=kib["Private_Dirty"],
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=len(os.listdir(f"/proc/{pid}/task")),
    )


def register_and_release(client: Client, number: int) -> None:
    """One place taken and given back."""
    me = os.pidfd_open(os.getpid())
    try:
        request = json.dumps({"schema": 1, "cpus": str(1 + number % 4), "command": ["python3", f"train-{number}.py"]})
        job, _ = client.call(ROOT, MANAGER, "Register", "hs", me, request)
    finally:
        os.close(me)
    if number % 10 == 0:
        client.call(ROOT, MANAGER, "Commit", "o", job)
    client.call(ROOT, MANAGER, "Release", "o", job)


def apply_and_undo(client: Client, number: int) -> None:
    """The whole policy set, and all of it given back."""
    client.call(ROOT, MANAGER, "Apply")
    client.call(ROOT, MANAGER, "Undo", "as", [])


def soak(pid: int, rounds: int, work: Callable[[Client, int], None], tick: Callable[[], None]) -> list[Sample]:
    """Do the work so many times; samples from the end of the warm-up on."""
    warm, samples = rounds // 10, []
    every = max(1, (rounds - warm) // SAMPLES)
    with Client(timeout_s=60) as client:
        for number in range(rounds):
            if number >= warm and (number - warm) % every == 0:
                if number == warm:
                    time.sleep(SETTLE_S)
                samples.append(look(pid, number))
            tick()
            work(client, number)
    time.sleep(SETTLE_S)
    return [*samples, look(pid, rounds)]


def grown(samples: list[Sample], mib: float) -> list[str]:
    """What rose, in words."""
    first, last = samples[0], samples[-1]
    judged = {
        "descriptors": last.descriptors > first.descriptors,
        "private memory": last.private > first.private + mib * 1024,
        "threads": max(sample.threads for sample in samples) > POOLS,
    }
    return [name for name, grew in judged.items() if grew]


def main() -> int:
    parser = argparse.ArgumentParser(description="whether torchtunedd grows over many jobs and applies")
    parser.add_argument("--jobs", type=int, default=100_000, help="register and release so often")
    parser.add_argument("--applies", type=int, default=10_000, help="apply and undo so often")
    parser.add_argument("--mib", type=float, default=1.0, help="more memory than this is growth")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    options = parser.parse_args()
    found: dict[str, list[Sample]] = {}
    took: dict[str, float] = {}
    with daemon_on(small_machine) as daemon:
        for name, rounds, work in (
            ("register and release", options.jobs, register_and_release),
            ("apply and undo", options.applies, apply_and_undo),
        ):
            start = time.monotonic()
            with Bar(rounds) as bar:
                found[name] = soak(daemon.pid, rounds, work, partial(bar.start, name))
            took[name] = time.monotonic() - start
    growth = {name: grown(samples, options.mib) for name, samples in found.items()}
    if options.json:
        rows = {name: [asdict(sample) for sample in samples] for name, samples in found.items()}
        print(json.dumps({"schema": 1, "samples": rows, "seconds": took, "grown": growth}, indent=2))
        return int(any(growth.values()))
    print(f"{'':24}{'rounds':>9}{'PSS KiB':>9}{'private':>9}{'descriptors':>12}{'threads':>8}")
    for name, samples in found.items():
        for sample in (samples[0], samples[len(samples) // 2], samples[-1]):
            figures = f"{sample.done:9}{sample.pss:9}{sample.private:9}{sample.descriptors:12}{sample.threads:8}"
            print(f"{name:24}{figures}")
        print(f"{'':24}in {took[name]:.0f} s: " + (f"{', '.join(growth[name])} grew" if growth[name] else "flat"))
    return int(any(growth.values()))


if __name__ == "__main__":
    sys.exit(main())
