"""Prints the CPU mask of every thread in the machine, from the kernel: {"PID/TID/START": [mask, command]} as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path

found = {}
for status in Path("/proc").glob("[0-9]*/task/[0-9]*/status"):
    try:
        fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        start = status.with_name("stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, ValueError):
        continue  # it ended while we looked
    pid, tid = status.parts[2], status.parts[4]
    if int(pid) != os.getpid():
        found[f"{pid}/{tid}/{start}"] = [fields["Cpus_allowed_list"], fields["Name"]]
print(json.dumps(found))
