"""CPU quotas, masks and thread counts: what makes a job compute on less than it thinks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from torchtuned.checks.files import affinity, environment, process_name
from torchtuned.checks.registry import Machine, Seen, Unseen, rule
from torchtuned.cpulimits import folders, limits
from torchtuned.cpuset import CpuSet, format_list
from torchtuned.errors import HostError
from torchtuned.findings import Action, Severity
from torchtuned.host import stat_fields

THROTTLED = 0.05  # of the periods since the cgroup was made
BINDERS = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")
OFF = ("", "false", "none", "disabled", "0")


@rule(
    "TT050",
    "a CPU quota throttles",
    severity=Severity.WARNING,
    action=Action.TELL,
    cost="all threads stand still for the rest of each 0.1 s period; 45 times slower in the worst report",
    source="ollama/ollama#17916",
)
def quota(machine: Machine) -> Iterator[Seen | Unseen]:
    """cpu.max (or the cgroup v1 quota) up the tree, with the share of periods in which it was hit. Programs see all
    CPUs of the host and start that many threads; torchtuned-run counts the quota."""
    places = [("self", "")] if machine.caller else []
    places += [(str(job.pid), job.id) for job in machine.jobs]
    told = set()
    for process, job in places:
        for folder in folders(machine.host, f"/proc/{process}", "cpu"):
            stat = dict(re.findall(r"^(nr_periods|nr_throttled) (\d+)", machine.text(f"{folder}/cpu.stat"), re.M))
            periods, hit = (int(stat.get(name, "0")) for name in ("nr_periods", "nr_throttled"))
            if folder in told or periods < 100 or hit < THROTTLED * periods:
                continue
            told.add(folder)
            most = machine.text(f"{folder}/cpu.max") or machine.text(f"{folder}/cpu.cfs_quota_us")
            yield Seen(
                evidence=f"{folder}/cpu.stat: throttled in {hit} of {periods} periods; the quota is {most}",
                fix=f"start it with torchtuned-run (threads within the quota), or raise the quota: {_raise(folder)}",
                job=job,
            )


def _raise(folder: str) -> str:
    unit = folder.rpartition("/")[2]
    if unit.endswith((".slice", ".service", ".scope")):
        return f"sudo systemctl set-property {shlex.quote(unit)} CPUQuota="
    return "of a container, docker update --cpus N"


@rule(
    "TT051",
    "more threads than CPUs to run them",
    severity=Severity.WARNING,
    action=Action.JOB,
    cost="1.3 to 1.75 times slower on a host with 368 cores; more where a quota throttles",
    source="pytorch/torchtitan#4031",
    jobs=True,
)
def threads(machine: Machine) -> Iterator[Seen | Unseen]:
    """Threads of a training process that run or want to (state R) against the CPUs that it may use. Sleeping threads
    are normal and not counted."""
    for pid, job in machine.workers():
        runnable = 0
        for thread in machine.host.list(f"/proc/{pid}/task"):
            runnable += stat_fields(machine.text(f"/proc/{pid}/task/{thread}/stat"))[:1] == ["R"]
        found = limits(machine.host, pid)
        cpus = min(len(found.affinity) or runnable, found.cpu_max or runnable)
        if cpus and runnable > 2 * cpus:
            yield Seen(
                evidence=f"process {process_name(machine, pid)}: {runnable} threads want to run on {cpus} CPUs",
                fix=f"OMP_NUM_THREADS={max(1, cpus)} and torch.set_num_threads; torchtuned-run sets it if you do not",
                job=job,
            )


@rule(
    "TT067",
    "a training process is confined to one core",
    severity=Severity.WARNING,
    action=Action.TELL,
    cost="the process and all its DataLoader workers share one core",
    source="pytorch/pytorch#101850",
    jobs=True,
)
def one_core(machine: Machine) -> Iterator[Seen | Unseen]:
    """OMP_PROC_BIND, KMP_AFFINITY and their like shrink the process that imports torch, and its workers inherit that.
    Also any mask of one core for a process of which others have more. As many ranks as cores have one each, as they
    should."""
    found: dict[tuple[str, CpuSet], list[int]] = {}
    for pid, job in machine.workers():
        found.setdefault((job, affinity(machine, pid)), []).append(pid)
    cores = [core.cpus for core in machine.topology.cores]
    for (job, mask), (pid, *others) in found.items():
        given = next((running.cpus for running in machine.jobs if running.id == job), machine.topology.online)
        # a rank each, whose workers have its mask
        parts = sum(whose == job and frozenset() < part < given for whose, part in found)
        share = sum(bool(core & given) for core in cores) // max(1, parts)
        if not mask or share <= 1 or not any(mask <= core for core in cores):
            continue
        try:
            env = environment(machine, str(pid))
        except HostError:
            env = {}  # another user's; the mask is evidence enough
        bound = [f"{name}={env[name]}" for name in BINDERS if env.get(name, "").lower() not in OFF]
        yield Seen(
            evidence=f"process {process_name(machine, pid)}{f' and {len(others)} more' if others else ''} may use CPU"
            f" {format_list(mask)} of {format_list(given)}"
            + (f"; its environment has {', '.join(bound)}" if bound else ""),
            fix=f"unset {' '.join(entry.partition('=')[0] for entry in bound)}"
            if bound
            else "look for taskset, numactl, Slurm's --cpu-bind or os.sched_setaffinity in what starts it",
            job=job,
        )


@rule(
    "TT066",
    "a process computes far from its GPU",
    severity=Severity.WARNING,
    action=Action.JOB,
    cost="1389 instead of 1065 ms a step with loaders on the wrong node in one report, nothing in others",
    source="pytorch/pytorch#197868",
    jobs=True,
)
def far_from_gpu(machine: Machine) -> Iterator[Seen | Unseen]:
    """Processes that compute on a GPU and may use CPUs, none of which is near it. A process that may run anywhere is
    no finding here; what it is bound to is not moved later, as its memory stays behind."""
    near = {gpu.address: gpu.local_cpus for gpu in machine.topology.gpus}
    jobs = dict(machine.workers())
    for address, reading in machine.readings.items():
        for pid, _ in reading.values.get("processes", ()):
            mask = affinity(machine, pid)
            if mask and near.get(address) and not mask & near[address]:
                yield Seen(
                    evidence=f"process {process_name(machine, pid)} is bound to CPUs {format_list(mask)}; GPU {address}"
                    f" is near {format_list(near[address])}",
                    fix="start it with torchtuned-run, or:"
                    f" numactl --cpunodebind={_node(machine, near[address])} COMMAND",
                    job=jobs.get(pid, ""),
                )


def _node(machine: Machine, cpus: CpuSet) -> int:
    return machine.topology.node_of.get(min(cpus), 0)
