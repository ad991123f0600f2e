"""The job of the tests in the machine: a program with a few threads that says what it got and goes on until a signal.

It prints one JSON line: {"pid", "threads", "omp_num_threads", "cgroup", "cuda_visible_devices"}.
"""

from __future__ import annotations

import json
import os
import threading
import time


def work() -> None:
    """Be busy now and then, as a thread that the kernel may move."""
    while True:
        sum(range(1000))
        time.sleep(0.5)


for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
with open("/proc/self/cgroup") as cgroup:
    place = cgroup.read().strip().removeprefix("0::")
said = {
    "pid": os.getpid(),
    "threads": threading.active_count(),
    "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    "cgroup": place,
}
print(json.dumps(said), flush=True)
while True:
    time.sleep(3600)
