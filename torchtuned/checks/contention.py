"""Who else computes where a job should have the CPUs for itself."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchtuned.checks.activity import Activity, activity
from torchtuned.checks.files import affinity, process_name, uid, unit_of, user_name
from torchtuned.checks.registry import UNMEASURED, Machine, Seen, Unseen, rule
from torchtuned.cpulimits import folders
from torchtuned.cpuset import CpuSet, format_list
from torchtuned.findings import Action, Severity
from torchtuned.host import stat_fields
from torchtuned.units import job_of

LOOK_S = 0.15  # between the first two looks, at least
SURE_S = 0.4  # to the third, by which a login or a cron job of a moment is over
SLIGHT = 0.05  # of one CPU's time; what takes less is not looked at
TAKEN, PART = 0.5, 0.05  # CPUs' worth of time, and part of the job's CPUs, from which on the others are told of
WAITED = 10.0  # per cent of the last 10 s in which some task of the job waited for a CPU
THREADS = 256  # of one process that are looked at, at most
IDLE = 0.1  # where the kernel does not tell that: the share of idle time below which CPUs are full


@dataclass(frozen=True, kw_only=True)
class Taker:
    """One that computes outside of all jobs: the CPUs' worth of time that it took, and the CPUs of its threads that
    run or want to."""

    pid: int
    uid: int | None
    share: float
    places: tuple[int, ...]

    def share_of(self, cpus: CpuSet) -> float:
        """How much it took of these CPUs."""
        return self.share * sum(place in cpus for place in self.places) / len(self.places) if self.places else 0.0


@dataclass(frozen=True)
class Victim:
    """A job of torchtuned's, or what the caller runs without it (`job` is ""): what should have these CPUs."""

    pid: int
    job: str
    cpus: CpuSet


@rule(
    "TT078",
    "others take the CPUs of a job",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost=UNMEASURED,
    source="facebookarchive/fb.resnet.torch#200; docs.kernel.org/accounting/psi",
    jobs=True,
)
def others(machine: Machine) -> Iterator[Seen | Unseen]:
    """Processes outside of torchtuned's jobs that compute on a job's CPUs while the job waits for CPUs (cpu.pressure),
    by two looks at /proc, and a third before anything is said; and the same for what the caller runs without
    torchtuned, against other users' processes. Others that leave enough idle time, or compute elsewhere, are no
    finding."""
    if not machine.jobs and not machine.caller:
        return
    hidden = re.search(r" - proc \S* \S*\bhidepid=(?!0|off)", machine.text("/proc/self/mountinfo"))
    if hidden and uid(machine) != 0:
        yield Unseen("/proc hides the processes of others here (hidepid): sudo")
        return
    now = _later(machine, machine.activity, LOOK_S)
    found = dict(_suffering(machine, machine.activity, now, least=TAKEN / 2))  # in so short a time it varies
    if found:
        still = dict(_suffering(machine, now, _later(machine, now, SURE_S), least=TAKEN))
        yield from (seen for job, seen in still.items() if job in found)


def _later(machine: Machine, before: Activity, seconds: float) -> Activity:
    """A look, so many seconds after another or more."""
    if machine.host.real:
        time.sleep(max(0.0, before.at + seconds - time.monotonic()))
    return activity(machine.host)


def _suffering(machine: Machine, before: Activity, now: Activity, *, least: float) -> Iterator[tuple[str, Seen]]:
    """The jobs (and the caller's own, "") that had to wait between two looks while others took `least` CPUs of
    theirs."""
    found = list(_outside(machine, before, now))
    victims = [Victim(job.pid, job.id, job.cpus) for job in machine.jobs]
    me = _caller(machine) if machine.caller else None
    mine = [process for process in found if me is not None and process.uid == me]
    if sum(process.share for process in mine) >= least:
        largest = max(mine, key=lambda process: process.share)
        victims.append(Victim(largest.pid, "", affinity(machine, largest.pid)))
    for victim in victims:
        takers = [process for process in found if victim.job or process.uid != me]
        taken = sum(process.share_of(victim.cpus) for process in takers)
        if taken >= max(least, PART * len(victim.cpus)) and (waited := _waited(machine, victim, before, now)):
            yield victim.job, _seen(machine, victim, takers, taken, waited)


def _caller(machine: Machine) -> int | None:
    """Whose processes are the caller's: with sudo, those of who called it."""
    found = re.search(r"(?:^|\0)SUDO_UID=(\d+)", machine.text("/proc/self/environ"))
    return int(found[1]) if found else uid(machine)


def _outside(machine: Machine, before: Activity, now: Activity) -> Iterator[Taker]:
    """What computes outside of all jobs, apart from this look itself."""
    ticks = max((total - before.cpus.get(cpu, (total, 0))[0] for cpu, (total, _) in now.cpus.items()), default=0)
    inside = {job.pid for job in machine.jobs} | ({os.getpid()} if machine.host.real else set())
    for pid, used in now.used.items():
        share = (used - before.used.get(pid, 0)) / ticks if ticks else 0.0
        if share < SLIGHT or _above(now.parents, pid) & inside or job_of(unit_of(machine, str(pid))):
            continue
        yield Taker(pid=pid, uid=uid(machine, str(pid)), share=share, places=tuple(_places(machine, pid)))


def _above(parents: Mapping[int, int], pid: int) -> set[int]:
    """A process with all that it descends from."""
    found: set[int] = set()
    while pid in parents and pid not in found:
        found.add(pid)
        pid = parents[pid]
    return found


def _places(machine: Machine, pid: int) -> Iterator[int]:
    """Where the threads of a process are that run or want to; of a great many, those of some."""
    threads = machine.host.list(f"/proc/{pid}/task")
    for thread in threads[:: len(threads) // THREADS + 1]:
        fields = stat_fields(machine.text(f"/proc/{pid}/task/{thread}/stat"))
        if fields[:1] == ["R"]:
            yield int(fields[36])


def _waited(machine: Machine, victim: Victim, before: Activity, now: Activity) -> tuple[str, str] | None:
    """That the job did not get the CPUs that it wanted: where that is seen, and what is known of its cost."""
    for folder in folders(machine.host, f"/proc/{victim.pid}", "cpu")[:1]:
        told = re.search(r"^some avg10=([\d.]+)", machine.text(f"{folder}/cpu.pressure"), re.MULTILINE)
        if told and float(told[1]) < WAITED:
            return None
        if told:
            cost = f"in {told[1]} % of the last 10 s some task of it waited for a CPU"
            return f"{folder}/cpu.pressure: some avg10={told[1]}", cost
    known = victim.cpus & now.cpus.keys() & before.cpus.keys()
    total, idle = (sum(now.cpus[cpu][i] - before.cpus[cpu][i] for cpu in known) for i in (0, 1))
    if idle >= IDLE * total:
        return None
    return f"/proc/stat: CPUs {format_list(known)} are {idle / total:.0%} idle", UNMEASURED


def _seen(machine: Machine, victim: Victim, takers: list[Taker], taken: float, waited: tuple[str, str]) -> Seen:
    first = max(takers, key=lambda process: process.share_of(victim.cpus))
    who = ""
    if machine.caller and first.uid is not None:  # the daemon may see more than those whom it tells
        who = f", most of it {process_name(machine, first.pid)} of {user_name(machine, first.uid)}"
    evidence, cost = waited
    whose = "what they run" if victim.job else "yours and theirs"
    return Seen(
        title="" if victim.job else "others take the CPUs that you compute on",
        evidence=f"processes outside of torchtuned's jobs take {taken:.1f} of CPUs {format_list(victim.cpus)}{who};"
        f" {evidence}",
        cost=cost,
        fix=f"start {whose} with torchtuned-run, so that each has CPUs of its own{_aside(machine, victim, first)}",
        job=victim.job,
    )


def _aside(machine: Machine, victim: Victim, first: Taker) -> str:
    """How an administrator moves them to CPUs that no job has, "" where there are none."""
    rest = machine.topology.online.difference(victim.cpus, *(job.cpus for job in machine.jobs))
    unit = unit_of(machine, str(first.pid))
    if not rest:
        return ""
    if unit in ("", unit_of(machine, str(victim.pid))):
        return f"; or: sudo taskset -acp {format_list(rest)} {first.pid}"
    name = shlex.quote(unit)
    return f"; or: sudo systemctl set-property --runtime {name} AllowedCPUs={format_list(rest)}"
