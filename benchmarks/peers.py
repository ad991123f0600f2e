"""One, two or four training jobs at once on this machine: placed by nobody, torch's own tools, torchtuned, and by hand.

usage: python3 benchmarks/peers.py --python PYTHON-WITH-TORCH [--quick] [--rounds N] [--seconds S] [--jobs 2,4] [--json]

Every round runs each way once, in an order that moves on, and sums the samples/s of its jobs. Figures are medians of
the rounds; the ratios are the medians of the rounds' own ratios, with the least and the most, all of this one run. A
way that does not work here (torchrun's --numa-binding needs GPUs and numactl, run_cpu a lscpu that it can read) is
named with the reason and left out. By hand: the cores divided with taskset, and as many threads. Fewer cores than jobs
are dealt round and round. On two idle cores it takes about five minutes; --quick, which only tries every way, one.
Aims: torchtuned at least the best peer, and at least 0.95 of by hand; with --jobs 1 at least 0.98 of a bare job.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rounds import RUN, TOP, Bar, turns

TRAIN = TOP / "examples/train.py"
OURS, DEFAULT, HAND = "torchtuned-run", "default", "taskset by hand"
TORCHRUN, RUN_CPU = "torchrun --numa-binding", "torch.backends.xeon.run_cpu"
PEERS = (DEFAULT, TORCHRUN, RUN_CPU)
Way = tuple[list[list[str]], str]


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


def parts(every: list[str], jobs: int) -> list[list[str]]:
    """The cores for each of so many jobs; with fewer cores than jobs they are dealt round and round."""
    each = max(1, len(every) // jobs)
    return [[every[(job * each + i) % len(every)] for i in range(each)] for job in range(jobs)]


def ways(python: str, run: list[str], jobs: int, seconds: float) -> dict[str, Way]:
    """Command lines and OMP_NUM_THREADS ("": not set) of each way, for so many jobs at once."""
    every = cores()
    shares = parts(every, jobs)
    each = len(shares[0])
    train = [str(TRAIN), "--seconds", str(seconds)]
    job = [python, *train]
    # what run_cpu offers for several jobs: one after the other is told its rank
    rank = [python, "-m", "torch.backends.xeon.run_cpu", "--use-default-allocator", "--disable-iomp"]
    rank += ["--ninstances", str(jobs), "--ncores-per-instance", str(each)]
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--numa-binding=exclusive"]
    return {
        DEFAULT: ([job] * jobs, ""),
        TORCHRUN: ([[*torchrun, *train]] * jobs, ""),
        RUN_CPU: ([[*rank, "--rank", str(number), *train] for number in range(jobs)], ""),
        OURS: ([[*run, f"--cpus={each}", *job]] * jobs, ""),
        HAND: ([["taskset", "-c", ",".join(share), *job] for share in shares], str(each)),
    }


def why_not(way: Way, environ: dict[str, str]) -> str:
    """Why a way does not work here, by starting the first of its jobs for a moment; "" when it does."""
    words = way[0][0]
    words = [*words[: words.index("--seconds") + 1], "0.1"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 0 and "samples/s" in done.stdout:
        return ""
    said = [line.strip() for line in done.stderr.splitlines() if "Error" in line]
    return said[-1] if said else f"it ended with {done.returncode}"


def measure(options: argparse.Namespace, environ: dict[str, str]) -> list[dict[str, Any]]:
    """One document for each number of jobs."""
    run = [options.run, "--quiet"] if options.run else RUN
    plans: dict[int, dict[str, Way]] = {n: ways(options.python, run, n, options.seconds) for n in options.jobs}
    documents = []
    for number, plan in plans.items():
        missing: dict[str, str] = {}
        with Bar(len(plan)) as bar:
            for name, way in plan.items():
                bar.start(f"{number} jobs: does it work? {name}")
                if reason := why_not(way, environ):
                    missing[name] = reason
        names = [name for name in plan if name not in missing]
        rates: dict[str, list[float]] = {name: [] for name in names}
        with Bar(options.rounds * len(names)) as bar:
            for name in turns(names, options.rounds):
                bar.start(f"{number} jobs: {name}")
                rate = samples(plan[name][0], environ, plan[name][1])
                if not rate:
                    sys.exit(f"{name}: not one step in {options.seconds:g} s; give it more --seconds")
                rates[name].append(rate)
        documents.append({"jobs": number, "samples_per_s": rates, "missing": missing, **ratios(rates)})
    return documents


def ratios(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Medians by way, and torchtuned's rates by another way's in the same round: their median, least and most."""
    by = {}
    for name, found in rates.items():
        if name != OURS and OURS in rates:
            each = sorted(ours / theirs for ours, theirs in zip(rates[OURS], found, strict=True))
            by[name] = {"median": statistics.median(each), "least": each[0], "most": each[-1]}
    return {"medians": {name: statistics.median(found) for name, found in rates.items()}, "torchtuned_by": by}


def show(document: dict[str, Any], every: list[str]) -> None:
    """A table for people."""
    print(f"\n{document['jobs']} jobs at once on {len(every)} cores")
    print(f"{'':30}{'samples/s':>10}{'least':>9}{'most':>9}   torchtuned by it")
    by = document["torchtuned_by"]
    for name, found in document["samples_per_s"].items():
        ratio = f"   {by[name]['median']:.3f} ({by[name]['least']:.3f} to {by[name]['most']:.3f})" if name in by else ""
        print(f"{name:30}{document['medians'][name]:10.0f}{min(found):9.0f}{max(found):9.0f}{ratio}")
    for name, why in document["missing"].items():
        print(f"{name:30}does not work here: {why[:160]}")
    found = [by[name]["median"] for name in PEERS if name in by]
    if found:
        print(f"torchtuned / best peer: {min(found):.3f}  (aim 1)")
    if document["jobs"] == 1 and DEFAULT in by:
        print(f"torchtuned / bare:      {by[DEFAULT]['median']:.3f}  (aim 0.98)")
    if HAND in by:
        print(f"torchtuned / by hand:   {by[HAND]['median']:.3f}  (aim 0.95)")


def main() -> int:
    parser = argparse.ArgumentParser(description="several training jobs at once, placed by torchtuned and its peers")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch")
    parser.add_argument("--run", default="", help="the torchtuned-run to use instead of this source tree's")
    parser.add_argument("--quick", action="store_true", help="one short round: whether every way runs, no figures")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3, help="of training in each job, after one of warm-up")
    parser.add_argument("--jobs", default="2,4", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, 1.0
    every, begun = cores(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{Path(options.python).absolute().parent}:{os.environ.get('PATH', os.defpath)}"  # run_cpu asks PATH
        environ = {**os.environ, "XDG_RUNTIME_DIR": folder, "PATH": path}
        for name in list(environ):
            if name.startswith(("OMP_", "MKL_", "KMP_", "GOMP_")):
                del environ[name]
        documents = measure(options, environ)
    if options.json:
        run: dict[str, Any] = {
            "schema": 1,
            "cores": every,
            "rounds": options.rounds,
            "seconds": options.seconds,
            "runs": documents,
        }
        run["took_s"] = round(time.monotonic() - begun)
        print(json.dumps(run, indent=2))
        return 0
    took = time.monotonic() - begun
    print(
        f"{len(every)} cores, {options.rounds} interleaved rounds of {options.seconds:g} s, in {took:.0f} s altogether"
    )
    for document in documents:
        show(document, every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
