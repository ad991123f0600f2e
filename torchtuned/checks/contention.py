"""Who else computes: where a job should have the CPUs for itself, and on a machine that somebody wants to train on."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchtuned.checks.activity import Activity
from torchtuned.checks.files import affinity, process_name, uid, unit_of, user_name
from torchtuned.checks.registry import UNMEASURED, Machine, Seen, Unseen, rule
from torchtuned.cpulimits import folders
from torchtuned.cpuset import CpuSet, format_list
from torchtuned.findings import Action, Severity
from torchtuned.host import stat_fields
from torchtuned.units import job_of

HIDDEN = "/proc hides the processes of others here (hidepid): sudo"
LOOK_S = 0.15  # between the first two looks, at least
SURE_S = 0.3  # to the third, by which a login or a cron job of a moment is over
SLIGHT = 0.05  # of one CPU's time; what takes less is not looked at
TAKEN, PART = 0.5, 0.05  # CPUs' worth of time, and part of the job's CPUs, from which on the others are told of
WAITED = 10.0  # per cent of the last 10 s in which some task of the job waited for a CPU
BUSY = 0.5  # of the CPUs: the part from which on others keep a machine busy
NAMED = 3  # processes, at most
YIELDS, SCHED_IDLE = 19, "5"  # the niceness and the scheduling policy (sched(7)) of what leaves the CPUs to others
THREADS = 256  # of one process that are looked at, at most
IDLE = 0.1  # where the kernel does not tell that: the share of idle time below which CPUs are full


@dataclass(frozen=True, kw_only=True)
class Taker:
    """One that computes outside of all jobs: the CPUs' worth of time that it took, and the CPUs of its threads that
    run or want to. `yields`: to whatever else wants to run."""

    pid: int
    uid: int | None
    share: float
    places: tuple[int, ...]
    yields: bool

    def share_of(self, cpus: CpuSet) -> float:
        """How much it took of these CPUs."""
        return self.share * sum(place in cpus for place in self.places) / len(self.places) if self.places else 0.0


@dataclass(frozen=True)
class Victim:
    """A job of torchtuned's, or what the caller runs without it (`job` is ""): what should have these CPUs, and `kept`,
    where nobody should be moved for its sake either."""

    pid: int
    job: str
    cpus: CpuSet
    kept: CpuSet = frozenset()


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
    if _hidden(machine):
        yield Unseen(HIDDEN)
        return
    now = machine.look(1, LOOK_S)
    found = dict(_suffering(machine, machine.activity, now, least=TAKEN / 2))  # in so short a time it varies
    if found:
        still = dict(_suffering(machine, now, machine.look(2, SURE_S), least=TAKEN))
        yield from (seen for job, seen in still.items() if job in found)


@rule(
    "TT079",
    "the CPUs are busy with other programs",
    severity=Severity.NOTICE,
    action=Action.TELL,
    cost=UNMEASURED,
    source="facebookarchive/fb.resnet.torch#200; man7.org: proc_pid_stat(5)",
)
def busy(machine: Machine) -> Iterator[Seen | Unseen]:
    """Processes of other users, outside of torchtuned's jobs, that take half of the CPUs or more where the caller
    computes nothing yet, by two looks at /proc, and a third before anything is said. What yields to others (nice 19,
    SCHED_IDLE) is no finding, and neither is what the caller's own programs have started. While a program of the
    caller computes, TT078 says whether others keep it waiting."""
    me = _caller(machine) if machine.caller else None
    if me is None or any(job.uid == me for job in machine.jobs):
        return
    if _hidden(machine):
        yield Unseen(HIDDEN)
        return
    online = machine.topology.online
    cpus = (affinity(machine, "self") & online) or online
    takers: list[Taker] = []
    for number, seconds in ((1, LOOK_S), (2, SURE_S)):
        before, now = machine.look(number - 1, 0.0), machine.look(number, seconds)
        found = list(_outside(machine, before, now))
        own = [process for process in found if _is_own(machine, now, process, me)]
        takers = [process for process in found if process not in own and not process.yields]
        taken = sum(process.share_of(cpus) for process in takers)
        if sum(process.share for process in own) >= TAKEN or taken < max(TAKEN, BUSY * len(cpus)):
            return
    yield Seen(
        evidence=f"programs of others take {_part(taken, cpus)}{_names(machine, takers, cpus)}",
        fix="wait until they end, or ask who runs them: what is started with nice -n 19 leaves the CPUs to others",
    )


def _hidden(machine: Machine) -> bool:
    """Whether /proc keeps other users' processes from this one: hidepid, but for root and the members of gid= (by
    default the group root), whom only ptraceable leaves out as well."""
    found = re.findall(r"^\d+ \d+ \S+ / /proc .* - proc \S+ (\S+)", machine.text("/proc/self/mountinfo"), re.MULTILINE)
    options = dict(option.partition("=")[::2] for text in found[-1:] for option in text.split(","))
    how = options.get("hidepid", "off")
    if how in ("off", "0") or uid(machine) == 0:
        return False
    status = machine.text("/proc/self/status")
    groups = " ".join(re.findall(r"^(?:Gid|Groups):(.*)", status, re.MULTILINE)).split()
    return how in ("ptraceable", "4") or options.get("gid", "0") not in groups


def _suffering(machine: Machine, before: Activity, now: Activity, *, least: float) -> Iterator[tuple[str, Seen]]:
    """The jobs (and the caller's own, "") that had to wait between two looks while others took `least` CPUs of
    theirs."""
    found = list(_outside(machine, before, now))
    victims = [Victim(job.pid, job.id, job.cpus) for job in machine.jobs]
    me = _caller(machine) if machine.caller else None
    mine = [process for process in found if me is not None and process.uid == me]
    if sum(process.share for process in mine) >= least:
        largest = max(mine, key=lambda process: process.share)
        places = {process.pid: affinity(machine, process.pid) for process in mine}
        victims.append(Victim(largest.pid, "", places[largest.pid], frozenset[int]().union(*places.values())))
    for victim in victims:
        takers = [process for process in found if victim.job or process.uid != me]
        taken = sum(process.share_of(victim.cpus) for process in takers)
        if taken >= max(least, PART * len(victim.cpus)) and (waited := _waited(machine, victim, before, now)):
            free = _free(machine, now).difference(victim.cpus, victim.kept)
            yield victim.job, _seen(machine, victim, takers, taken, waited, free)


def _caller(machine: Machine) -> int | None:
    """Whose processes are the caller's: with sudo, those of who called it."""
    found = re.search(r"(?:^|\0)SUDO_UID=(\d+)", machine.text("/proc/self/environ"))
    return int(found[1]) if found else uid(machine)


def _outside(machine: Machine, before: Activity, now: Activity) -> Iterator[Taker]:
    """What computes outside of all jobs, apart from this look itself."""
    ticks = max((total - before.cpus.get(cpu, (total, 0))[0] for cpu, (total, _) in now.cpus.items()), default=0)
    inside = {job.pid for job in machine.all_jobs} | ({os.getpid()} if machine.host.real else set())
    for pid, used in now.used.items():
        share = (used - before.used.get(pid, 0)) / ticks if ticks else 0.0
        if share < SLIGHT or _above(now.parents, pid) & inside or _in_job(machine, pid):
            continue
        fields = stat_fields(machine.text(f"/proc/{pid}/stat"))
        yields = fields[38:39] == [SCHED_IDLE] or int(next(iter(fields[16:17]), 0)) >= YIELDS
        who, places = uid(machine, str(pid)), tuple(_places(machine, pid))
        yield Taker(pid=pid, uid=who, share=share, places=places, yields=yields)


def _in_job(machine: Machine, pid: int) -> bool:
    """Whether a process is in the scope of a job, or has outlived its parent in a job without one: what is left then
    is whose it is and the job's CPUs, which it may not leave."""
    if job_of(unit_of(machine, str(pid))):
        return True
    bound = [job for job in machine.all_jobs if not job.scope and job.cpus < machine.topology.online]
    if not bound:
        return False
    who, cpus = uid(machine, str(pid)), affinity(machine, pid)
    return bool(cpus) and any(job.uid == who and cpus <= job.cpus for job in bound)


def _is_own(machine: Machine, now: Activity, process: Taker, me: int) -> bool:
    """Whether a process is a user's, or something that a process of the user's has started (sudo, a container)."""
    if process.uid == me or me == 0:  # everything descends from root's
        return process.uid == me
    return any(uid(machine, str(pid)) == me for pid in _above(now.parents, process.pid))


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


def _seen(
    machine: Machine, victim: Victim, takers: Sequence[Taker], taken: float, waited: tuple[str, str], free: CpuSet
) -> Seen:
    evidence, cost = waited
    whose = "what they run" if victim.job else "yours and theirs"
    return Seen(
        title="" if victim.job else "others take the CPUs that you compute on",
        evidence=f"processes outside of torchtuned's jobs take {_part(taken, victim.cpus)}"
        f"{_names(machine, takers, victim.cpus)}; {evidence}",
        cost=cost,
        fix=f"start {whose} with torchtuned-run, so that each has CPUs of its own"
        f"{_aside(machine, victim, _largest(takers, victim.cpus)[:NAMED], free)}",
        job=victim.job,
    )


def _part(taken: float, cpus: CpuSet) -> str:
    """How much of some CPUs: "1.9 of 2 CPUs (0-1)"."""
    which = f"{len(cpus)} CPUs ({format_list(cpus)})" if len(cpus) > 1 else f"CPU {format_list(cpus)}"
    return f"{taken:.1f} of {which}"


def _largest(takers: Sequence[Taker], cpus: CpuSet) -> list[Taker]:
    """Those that take some of these CPUs, the largest first."""
    found = [process for process in takers if process.share_of(cpus) >= SLIGHT]
    return sorted(found, key=lambda process: process.share_of(cpus), reverse=True)


def _names(machine: Machine, takers: Sequence[Taker], cpus: CpuSet) -> str:
    """Who they are, the largest first: ": 42 (cc1) of bob, 43 (make) of root". The daemon may see more than those whom
    it tells, and names nobody."""
    found = [(process.pid, process.uid) for process in _largest(takers, cpus) if process.uid is not None]
    if not machine.caller or not found:
        return ""
    names = [f"{process_name(machine, pid)} of {user_name(machine, who)}" for pid, who in found[:NAMED]]
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f": {', '.join(names)}{more}"


def _free(machine: Machine, now: Activity) -> CpuSet:
    """The CPUs that no job has: none of those that are known, nor what runs in a scope of the daemon's while that does
    not answer."""
    taken = [job.cpus for job in machine.all_jobs]
    if not machine.jobs_known:
        taken += [affinity(machine, pid) for pid in now.used if job_of(unit_of(machine, str(pid)))]
    return machine.topology.online.difference(*taken)


def _aside(machine: Machine, victim: Victim, takers: Sequence[Taker], free: CpuSet) -> str:
    """How an administrator moves them to CPUs that are free, "" where there are none. A unit is moved as a whole where
    no job is in it."""
    if not free:
        return ""
    shared = {"", *(unit_of(machine, str(pid)) for pid in (victim.pid, *(job.pid for job in machine.all_jobs)))}
    whole = machine.host.exists("/sys/fs/cgroup/cgroup.controllers")  # AllowedCPUs= is nothing to cgroup v1
    commands = []
    for process in takers:
        unit = unit_of(machine, str(process.pid))
        if unit in shared or not whole:
            commands.append(f"sudo taskset -acp {format_list(free)} {process.pid}")
        else:
            name = shlex.quote(unit)
            commands.append(f"sudo systemctl set-property --runtime {name} AllowedCPUs={format_list(free)}")
    return "; or: " + "; ".join(dict.fromkeys(commands))
