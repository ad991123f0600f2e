"""What a job has used and waited for: from its own cgroup, or, where it has none, from its processes.

A cgroup's counters include processes that have ended; a process tree's are what its living members and the children
they have waited for say, so they are a lower bound and are marked as such ("of": "processes").
"""

from __future__ import annotations

from torchtuned import cpulimits
from torchtuned.host import Host
from torchtuned.reports import proctree, usage
from torchtuned.reports.usage import Figures
from torchtuned.scopes import MOUNT


def cgroup_of(host: Host, pid: int, scope: str) -> str:
    """The cgroup of a job's scope, by its leader; "" when it has none of its own, or it cannot be found."""
    if not scope:
        return ""
    parts = cpulimits.cgroup(host, pid).strip("/").split("/")
    for depth in range(len(parts), -1, -1):
        path = "/".join(["", *filter(None, parts[:depth])])
        if path.endswith(f"/{scope}"):
            return path
        if host.exists(f"{MOUNT}{path}/{scope}"):
            return f"{path}/{scope}"
    return ""


def of_cgroup(host: Host, cgroup: str) -> Figures:
    """The figures of a cgroup (path in the unified hierarchy); empty when it is gone."""
    folder = f"{MOUNT}{cgroup}"
    cpu = usage.cpu_stat(host.text(f"{folder}/cpu.stat"))
    if not cpu:
        return {}
    memory: Figures = {}
    for name, file in (("current", "memory.current"), ("peak", "memory.peak"), ("swap", "memory.swap.current")):
        if (text := host.text(f"{folder}/{file}")).isdecimal():
            memory[name] = int(text)
    if text := host.text(f"{folder}/memory.events"):
        memory["events"] = usage.keyed(text)
    if nodes := usage.by_node(host.text(f"{folder}/memory.numa_stat")):
        memory["nodes"] = {str(node): number for node, number in nodes.items()}
    found: Figures = {"of": "cgroup", "cpu": cpu, "memory": memory}
    if host.exists(f"{folder}/io.stat"):
        found["io"] = usage.io_stat(host.text(f"{folder}/io.stat"))
    waits = {what: usage.pressure(host.text(f"{folder}/{what}.pressure")) for what in ("cpu", "memory", "io")}
    if any(waits.values()):
        found["pressure"] = {what: wait for what, wait in waits.items() if wait}
    if (text := host.text(f"{folder}/pids.current")).isdecimal():
        found["tasks"] = int(text)
    return found


def of_job(host: Host, pid: int, cgroup: str) -> Figures:
    """The figures of its cgroup, or those of the tree of its leader; empty when both are gone."""
    if cgroup:
        return of_cgroup(host, cgroup)
    tree = proctree.usage(pid)
    if not tree.pids:
        return {}
    return {
        "of": "processes",
        "cpu": {"usage_s": tree.cpu_s},
        "memory": {"current": tree.memory, "largest_peak": tree.largest},
        "pids": list(tree.pids),
    }


def oom_kills(host: Host, cgroup: str) -> dict[str, int]:
    """How many processes the kernel has killed for want of memory, in a cgroup and in each above it, nearest first."""
    parts = [part for part in cgroup.split("/") if part]
    found = {}
    for depth in range(len(parts), 0, -1):
        path = "/" + "/".join(parts[:depth])
        events = usage.keyed(host.text(f"{MOUNT}{path}/memory.events"))
        if "oom_kill" in events:
            found[path] = events["oom_kill"]
    return found
