"""Two training jobs side by side on this machine: by default, under torchtuned-run, and split by hand with taskset.

usage: python3 benchmarks/two_jobs.py --python PYTHON-WITH-TORCH [--rounds N] [--seconds S] [--run TORCHTUNED-RUN]

Every round runs each way once, in an order that moves on, and sums the samples/s of its jobs; figures are medians of
one run, and ratios of them. By hand means: half of the cores each and as many threads, which is what somebody who knows
their machine would type. Aims: torchtuned at least 0.95 of by hand, a lone job at least 0.98 of a bare one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
ENTRY = f"import sys; sys.path.insert(0, {str(TOP)!r}); from torchtuned.run.main import main; sys.exit(main())"
TRAIN = TOP / "examples/train.py"


def cores() -> list[str]:
    """The cores this process may use, as CPU lists."""
    found = []
    mine = os.sched_getaffinity(0)
    for cpu in sorted(mine):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings = topology.read_text().strip() if topology.exists() else str(cpu)
        if siblings not in found:
            found.append(siblings)
    return found


def samples(commands: list[list[str]], environ: dict[str, str], threads: str) -> float:
    """Run the commands at the same time; the sum of their samples/s."""
    environ = {**environ, **({"OMP_NUM_THREADS": threads} if threads else {})}
    jobs = [subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) for words in commands]
    total = 0.0
    for job in jobs:
        out = job.communicate()[0]
        if job.returncode:
            sys.exit(f"{job.args!r} ended with {job.returncode}")
        total += float(out.splitlines()[-1].split()[1])
    return total


def progress(done: int, of: int, what: str) -> None:
    if sys.stderr.isatty():
        filled = 40 * done // of
        sys.stderr.write(f"\r\x1b[K[{'#' * filled}{'.' * (40 - filled)}] {done}/{of} {what}")
        sys.stderr.write("\r\x1b[K" if done == of else "")
        sys.stderr.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="two training jobs: default, torchtuned-run, taskset")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch")
    parser.add_argument("--run", default="", help="the torchtuned-run to use instead of this source tree's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8)
    options = parser.parse_args()
    job = [options.python, str(TRAIN), "--seconds", str(options.seconds)]
    run = [options.run] if options.run else ["/usr/bin/python3", "-I", "-c", ENTRY]
    every = cores()
    if len(every) < 2:
        sys.exit("two jobs need two cores")
    half = len(every) // 2
    first, second = ",".join(every[:half]), ",".join(every[half : 2 * half])
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "XDG_RUNTIME_DIR": folder}
        for name in list(environ):
            if name.startswith(("OMP_", "MKL_", "KMP_", "GOMP_")):
                del environ[name]
        ways: dict[str, tuple[list[list[str]], str]] = {
            "one job, bare": ([job], ""),
            "one job, torchtuned-run": ([[*run, "--quiet", *job]], ""),
            "two jobs, default": ([job, job], ""),
            "two jobs, torchtuned-run": ([[*run, "--quiet", f"--cpus={half}", *job]] * 2, ""),
            "two jobs, taskset by hand": ([["taskset", "-c", cpus, *job] for cpus in (first, second)], str(half)),
        }
        rates: dict[str, list[float]] = {way: [] for way in ways}
        names = list(ways)
        for number in range(options.rounds):
            for step in range(len(names)):
                way = names[(number + step) % len(names)]
                progress(number * len(names) + step, options.rounds * len(names), way)
                rates[way].append(samples(ways[way][0], environ, ways[way][1]))
        progress(options.rounds * len(names), options.rounds * len(names), "")
    medians = {way: statistics.median(found) for way, found in rates.items()}
    print(f"{len(every)} cores, {half} for each of two jobs, {options.rounds} rounds of {options.seconds:g} s")
    print(f"{'':28}{'samples/s':>10}{'least':>9}{'most':>9}")
    for way, found in rates.items():
        print(f"{way:28}{medians[way]:10.0f}{min(found):9.0f}{max(found):9.0f}")
    two = medians["two jobs, torchtuned-run"]
    print(f"\ntwo jobs, torchtuned-run / default: {two / medians['two jobs, default']:.2f}")
    print(f"two jobs, torchtuned-run / by hand: {two / medians['two jobs, taskset by hand']:.3f}  (aim 0.95)")
    lone = medians["one job, torchtuned-run"] / medians["one job, bare"]
    print(f"one job,  torchtuned-run / bare:    {lone:.3f}  (aim 0.98)")


if __name__ == "__main__":
    main()
