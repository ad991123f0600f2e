"""Limits that end a job: open files, processes and threads, locked memory, core dumps."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from torchtuned import units
from torchtuned.checks.files import UNLIMITED, limit, settings_lines, uid, user_name
from torchtuned.checks.registry import Machine, Seen, Unseen, rule
from torchtuned.cpulimits import folders
from torchtuned.errors import HostError, Missing
from torchtuned.findings import Action, Severity
from torchtuned.wording import size

FILES = 65536  # one descriptor a shared tensor; eight workers with 100 tensors in flight each are far below
TASKS, TASKS_PER_CPU = 4096, 128  # threads: eight ranks with eight workers of 32 threads are 2,300
NEAR = 0.8
RDMA = "/sys/class/infiniband"
LIMITS_D = "/etc/security/limits.d"


@rule(
    "TT017",
    "the hard limit on open files is low",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="DataLoader ends with 'Too many open files' or 'received 0 items of ancdata'",
    source="pytorch/pytorch#973",
)
def open_files(machine: Machine) -> Iterator[Seen | Unseen]:
    """Tensors that workers share take a descriptor each. torchtuned-run raises the soft limit to the hard one, so only
    a low hard limit is a finding; it comes from limits.conf, from the unit, or from systemd's default."""
    if not machine.caller:
        return
    soft, hard = limit(machine, "self", "open files")
    if hard < FILES:
        yield Seen(
            evidence=f"/proc/self/limits: open files {soft}, at most {hard}",
            fix=_where(machine, "nofile", "LimitNOFILE", "524288"),
        )


@rule(
    "TT018",
    "a job is near its limit of open files",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="the next open fails with 'Too many open files' and ends the job",
    source="pytorch/pytorch#11201",
    jobs=True,
)
def near_the_limit(machine: Machine) -> Iterator[Seen | Unseen]:
    """The descriptors that each process of a job holds, against its own soft limit: the shell in which the check runs
    has another one."""
    for pid, job in machine.workers():
        try:
            soft, hard = limit(machine, str(pid), "open files")
            count = len(machine.host.list(f"/proc/{pid}/fd"))
        except Missing:
            continue  # it ended meanwhile
        except HostError as error:
            yield Unseen(str(error))
            continue
        if count >= NEAR * soft:
            yield Seen(
                evidence=f"/proc/{pid}/fd: {count} descriptors, the soft limit is {soft}, the hard one {hard}",
                fix=f"prlimit --pid {pid} --nofile={hard}:{hard}",
                job=job,
            )


@rule(
    "TT019",
    "few processes and threads are allowed",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="pthread_create fails (EAGAIN, 'can't start new thread') and ends the job",
    source="vast-ai/base-image#214",
)
def tasks(machine: Machine) -> Iterator[Seen | Unseen]:
    """pids.max of the caller's cgroup and of all above it, and the limit on the user's processes. Threads count as
    processes here: each rank and each DataLoader worker brings its thread pools."""
    if machine.caller:
        yield from _tasks(machine, "self", "")
        _, hard = limit(machine, "self", "processes")
        if hard < _least_tasks(machine) and uid(machine) != 0:
            yield Seen(
                evidence=f"/proc/self/limits: at most {hard} processes and threads for this user",
                fix=_where(machine, "nproc", "LimitNPROC", "infinity"),
            )
    for job in machine.jobs:
        yield from _tasks(machine, str(job.pid), job.id)


def _least_tasks(machine: Machine) -> int:
    """Pools are sized by the CPUs that they see; a small host needs, and by default allows, fewer."""
    return min(TASKS, TASKS_PER_CPU * max(1, len(machine.topology.online)))


def _tasks(machine: Machine, process: str, job: str) -> Iterator[Seen]:
    for folder in folders(machine.host, f"/proc/{process}", "pids"):
        most, now = machine.text(f"{folder}/pids.max"), machine.number(f"{folder}/pids.current") or 0
        if most.isdecimal() and (int(most) < _least_tasks(machine) or now >= NEAR * int(most)):
            unit = folder.rpartition("/")[2]
            is_unit = unit.endswith((".slice", ".service", ".scope"))
            yield Seen(
                evidence=f"{folder}/pids.max is {most}, {now} are in use",
                fix=f"sudo systemctl set-property {shlex.quote(unit)} TasksMax=infinity"
                if is_unit
                else "raise the container's pids limit",
                job=job,
            )


@rule(
    "TT020",
    "little memory may be locked, and the host has RDMA",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="NCCL over InfiniBand or RoCE fails to register memory, or falls back to TCP",
    source="NVIDIA/nccl-tests#206",
)
def locked_memory(machine: Machine) -> Iterator[Seen | Unseen]:
    """RDMA pins the buffers that it sends from; Debian's limit is 8 MiB. Looked at where it counts: in the caller's
    shell and in the processes that train, not in an administrator's."""
    if not machine.host.list(RDMA):
        return
    processes = ([("self", "")] if machine.caller else []) + [(str(pid), job) for pid, job in machine.workers()]
    for process, job in processes:
        try:
            _, hard = limit(machine, process, "locked memory")
        except Missing:
            continue
        if hard < UNLIMITED and hard < 1 << 30:
            yield Seen(
                evidence=f"/proc/{process}/limits: locked memory at most {size(hard)};"
                f" {RDMA} has {', '.join(machine.host.list(RDMA))}",
                fix=_where(machine, "memlock", "LimitMEMLOCK", "infinity"),
                job=job,
            )


@rule(
    "TT021",
    "a crash leaves a core dump in the job's folder",
    severity=Severity.NOTICE,
    action=Action.JOB,
    cost="a dump is as large as the job's memory, over 100 GB in one report; with many ranks the disk is full",
    source="pytorch/pytorch#116510",
)
def core_dumps(machine: Machine) -> Iterator[Seen | Unseen]:
    """A core_pattern that is a plain file name, and a soft limit that lets cores be written. A handler (a pattern that
    begins with |) keeps its own limits and is fine."""
    if not machine.caller:
        return
    pattern = machine.host.read("/proc/sys/kernel/core_pattern")
    soft, _ = limit(machine, "self", "core file size")
    if soft > 0 and not pattern.startswith("|"):
        yield Seen(
            evidence=f"/proc/sys/kernel/core_pattern is {pattern!r}, /proc/self/limits allows"
            f" {'any size' if soft == UNLIMITED else size(soft)}",
            fix="ulimit -S -c 0 (torchtuned-run can do it for each job), or: sudo apt install systemd-coredump",
        )


def _where(machine: Machine, item: str, directive: str, value: str) -> str:
    """The file to edit: where pam_limits sets it, else the unit, else limits.conf."""
    paths = ["/etc/security/limits.conf"]
    paths += [f"{LIMITS_D}/{name}" for name in machine.host.list(LIMITS_D) if name.endswith(".conf")]
    set_by = list(settings_lines(machine, paths, rf"^\s*[^#\s]\S*\s+(hard|-)\s+{item}\s"))
    if set_by:
        return f"change {set_by[-1][0]} ({set_by[-1][1]!r}), then log in again"
    if unit := units.service(machine.text("/proc/self/cgroup")):
        return f"sudo systemctl edit {unit}: [Service] {directive}={value}; then sudo systemctl restart {unit}"
    who = user_name(machine, uid(machine) or 0)
    limit_value = "unlimited" if value == "infinity" else value
    file = f"{LIMITS_D}/torchtuned-{item}-{who}.conf"
    return f"echo '{who} - {item} {limit_value}' | sudo tee {file}  # then log in again"
