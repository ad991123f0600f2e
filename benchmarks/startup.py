"""What torchtuned-run adds before a program starts: with torchtunedd, without it, and beside what else takes time.

usage: .venv/bin/python benchmarks/startup.py [--rounds N] [--python PYTHON-WITH-TORCH]

Each round starts every kind once, in turn, so that whatever else the machine does hits all of them alike; figures are
medians of one run. "adds" is against the bare program. The daemon runs on a bus of its own; there is no systemd on that
bus, so on a real system the time in which PID 1 makes the job's scope comes on top. Aim: 40 ms.
"""

from __future__ import annotations

import argparse
import statistics

from daemon import Daemon, daemon_on, this_machine
from rounds import RUN, Bar, process_ms, quantile

PYTHON = RUN[0]
PROGRAM = "/bin/true"
AIM_MS = 40


def measure(daemon: Daemon, rounds: int, torch: str) -> dict[str, list[float]]:
    """Milliseconds of each kind of start."""
    there = daemon.environment()
    nowhere = daemon.environment(DBUS_SYSTEM_BUS_ADDRESS=f"unix:path={daemon.bus.folder}/none")
    kinds: dict[str, tuple[list[str], dict[str, str]]] = {
        "the bare program": ([PROGRAM], nowhere),
        "torchtuned-run, torchtunedd there": ([*RUN, "--require", PROGRAM], there),
        "torchtuned-run, no torchtunedd": ([*RUN, PROGRAM], nowhere),
        "python3 that does nothing": ([PYTHON, "-I", "-c", "pass"], nowhere),
        "python3, import dbus_next": ([PYTHON, "-I", "-c", "import dbus_next"], nowhere),
    }
    if torch:
        kinds["python, import torch"] = ([torch, "-c", "import torch"], nowhere)
    for words, environ in kinds.values():  # once for the disk's cache and for the bytecode
        process_ms(words, environ)
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    with Bar(rounds) as bar:
        for number in range(rounds):
            bar.start()
            for kind, (words, environ) in kinds.items():
                if "torch" not in kind.split()[-1] or number < max(3, rounds // 10):
                    taken[kind].append(process_ms(words, environ))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description="what torchtuned-run adds before a program starts")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--python", default="", help="an interpreter with torch, to compare with its import")
    options = parser.parse_args()
    with daemon_on(this_machine) as daemon:
        taken = measure(daemon, options.rounds, options.python)
    medians = {kind: statistics.median(times) for kind, times in taken.items()}
    bare = medians["the bare program"]
    print(f"{'':36}{'median ms':>10}{'p90 ms':>9}{'adds ms':>9}")
    for kind, times in taken.items():
        print(f"{kind:36}{medians[kind]:10.1f}{quantile(times, 0.9):9.1f}{medians[kind] - bare:9.1f}")
    added = medians["torchtuned-run, torchtunedd there"] - bare
    print(f"\nadded with torchtunedd: {added / AIM_MS:.2f} of the aim of {AIM_MS} ms")
    if options.python:
        print(f"added with torchtunedd: {added / medians['python, import torch']:.3f} of import torch")


if __name__ == "__main__":
    main()
