"""How long reading a topology and placing a job take, from 64 to 4,096 CPUs with 256 jobs in force.

usage: python3 benchmarks/placement.py

The machines are folders of files made for the purpose: two threads a core, 16 nodes, 16 GPUs. On 1,024 CPUs the aim is
a topology in under 300 ms and, for 99 of 100 jobs, a place in under 10 ms. Real sysfs is slower to open than these
files, by the kernel's formatting of each list.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

from rounds import TOP, call_ms, quantile

sys.path[:0] = [str(TOP), str(TOP / "tests")]

from fakes.tree import machine_of, make_tree  # noqa: E402

from torchtuned import discover  # noqa: E402
from torchtuned.host import Host  # noqa: E402
from torchtuned.placement import place  # noqa: E402
from torchtuned.placement.grants import Grant, Request  # noqa: E402

ROUNDS, JOBS = 200, 256


def main() -> None:
    print(f"{'CPUs':>5}  {'what':24}  {'median ms':>9}  {'p99 ms':>7}")
    for cpus in (64, 256, 1024, 4096):
        with tempfile.TemporaryDirectory() as folder:
            host = Host(make_tree(Path(folder), machine_of(cpus)))
            rows = [("topology", call_ms(partial(discover.topology, host), 10))]
            found = discover.topology(host)
        jobs: list[Grant] = []
        for i in range(JOBS):
            jobs.append(place(found, jobs, Request(gpus=(), cpus="1" if i % 2 else "2")))
        for name, request in (
            ("place --cpus 1", Request(gpus=(), cpus="1")),
            ("place, all that is free", Request(gpus=())),
            ("place, 64 ranks", Request(gpus=(), ranks=64)),
            ("place --gpus 1", Request(gpus=1)),
            ("place --gpus 16", Request(gpus=16)),
            ("place --gpus 16, socket", Request(gpus=16, policy="socket")),
        ):
            rows.append((name, call_ms(partial(place, found, jobs, request), ROUNDS)))
        for name, times in rows:
            print(f"{cpus:5}  {name:24}  {statistics.median(times):9.2f}  {quantile(times, 0.99):7.2f}")


if __name__ == "__main__":
    main()
