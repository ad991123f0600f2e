"""One sentence on how a job ended, as far as it can be known. Pure.

Three different hands kill a job with the same signal: the kernel when memory runs out, systemd-oomd before it does, and
a person. The first leaves a count in memory.events and a line of the kernel's, the second an entry in the journal, the
third nothing: it is what is left when the exit status says SIGKILL and the other two say no. A job's exit status is
its parent's to know, so without one that tells (torchtuned-run --report) "unknown" is said.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchtuned.reports.usage import together

# oom-kill:constraint=CONSTRAINT_MEMCG,…,oom_memcg=/a,task_memcg=/a/b.scope,task=python,pid=42,uid=1000
OOM_LINE = re.compile(r"oom-kill:constraint=(\w+),.*task=(.*),pid=(\d+),uid=(\d+)")
# Linux's numbers, the same wherever PyTorch runs
SIGNALS = dict(
    enumerate("HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT".split(), start=1)
) | {24: "XCPU", 25: "XFSZ", 31: "SYS"}
OOMD_LINE = re.compile(r"Killed (/\S*) due to (.*)")


@dataclass(frozen=True, kw_only=True)
class OomKill:
    """The kernel's line about one process that it killed for want of memory. Cgroups as paths; "" where not said."""

    constraint: str
    task: str
    pid: int
    of: str
    limited: str

    @property
    def why(self) -> str:
        if self.constraint == "CONSTRAINT_NONE":
            return "the machine was out of memory"
        if self.constraint == "CONSTRAINT_MEMCG":
            return f"the memory limit of {self.limited or 'its cgroup'} was reached"
        return "the memory nodes that it may use were full"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of an end.

    `status`: exit status, or -SIGNAL; None without a parent that told. `oom_kills` is the count of its own cgroup,
    `kills` what the kernel said about its processes, `around` the nearest cgroup above it whose count rose, and by how
    much. `oomd`: why systemd-oomd killed it. `xids`: what the NVIDIA driver said of its GPUs meanwhile.
    """

    status: int | None = None
    leader: int = 0
    oom_kills: int = 0
    kills: tuple[OomKill, ...] = ()
    around: tuple[str, int] = ("", 0)
    oomd: str = ""
    xids: tuple[str, ...] = ()
    journal: bool = True
    released: bool = False
    missed: bool = False
    rebooted: bool = False


@dataclass(frozen=True, kw_only=True)
class Ending:
    """`cause`: oom, oomd, killed, crashed, exited, released, down, or unknown. `evidence` is what it rests on."""

    cause: str
    sentence: str
    evidence: tuple[str, ...] = ()


def oom_kill(text: str) -> OomKill | None:
    """Read the kernel's "oom-kill:" line."""
    found = OOM_LINE.search(text)
    if not found:
        return None
    said = re.findall(r"(oom_memcg|task_memcg)=([^,]*)", text[: found.start(2)])  # the name may hold anything
    if len(said) != len(dict(said)):  # so may that of a cgroup, "x,task_memcg=" and another's, if it is a user's own
        return None
    groups = dict(said)
    return OomKill(
        constraint=found[1],
        task=found[2],
        pid=int(found[3]),
        of=groups.get("task_memcg", ""),
        limited=groups.get("oom_memcg", ""),
    )


def ending(facts: Facts) -> Ending:
    """Weigh the facts: what is proven first, then what the parent told, then what is only likely."""
    if facts.released:
        return Ending(cause="released", sentence="It gave its place back and went on outside of it, or never started.")
    oom = _by_oom(facts)
    oomd = "" if facts.status == 0 else facts.oomd
    if oomd:
        sentence = f"systemd-oomd killed it: {oomd.rstrip('.')}."
        return Ending(cause="oomd", sentence=sentence, evidence=(f"systemd-oomd: {oomd}", *oom.evidence))
    if oom.sentence and facts.status != 0:
        return oom
    if facts.status is not None:
        told = _by_status(facts)
        before = f" Before that: {oom.sentence[0].lower()}{oom.sentence[1:]}" if oom.sentence else ""
        return Ending(cause=told.cause, sentence=told.sentence + before, evidence=(*told.evidence, *oom.evidence))
    return _unknown(facts)


def _by_oom(facts: Facts) -> Ending:
    """Whether the kernel's killer took processes of the job; an empty sentence when nothing proves it."""
    kills = max(facts.oom_kills, len(facts.kills))
    if not kills:
        return Ending(cause="unknown", sentence="")
    victims = "one of its processes" if kills == 1 else f"{kills} of its processes"
    evidence = [f"memory.events of its cgroup: oom_kill {facts.oom_kills}"] if facts.oom_kills else []
    why = ""
    if facts.kills:
        last = facts.kills[-1]
        if last.pid == facts.leader and kills == 1:
            victims = "it"
        why = f" ({last.task}, process {last.pid}): {last.why}"
        evidence += [f"kernel: killed process {kill.pid} ({kill.task}) of {kill.of}" for kill in facts.kills[-3:]]
    sentence = f"The kernel's out-of-memory killer killed {victims}{why}."
    return Ending(cause="oom", sentence=sentence, evidence=tuple(evidence))


def _by_status(facts: Facts) -> Ending:
    status = facts.status or 0
    evidence = (
        f"torchtuned-run --report: {f'signal {-status}' if status < 0 else f'exit status {status}'}",
        *facts.xids,
    )
    if status >= 0:
        sentence = f"It ended by itself with exit status {status}{'' if status else ', which means success'}."
        if status > 128 and (name := SIGNALS.get(status - 128)):
            sentence = f"It ended with exit status {status}, as a shell does whose command was killed by SIG{name}"
            sentence += f"; {_innocent(facts)}." if name == "KILL" else "."
        return Ending(cause="exited", sentence=sentence + _xid(facts), evidence=evidence)
    name = f"SIG{SIGNALS[-status]}" if -status in SIGNALS else f"signal {-status}"
    if name == "SIGKILL":
        sentence = f"Somebody killed it with SIGKILL (kill -9); {_innocent(facts)}."
        return Ending(cause="killed", sentence=sentence, evidence=evidence)
    if name == "SIGBUS":
        sentence = "It crashed with SIGBUS: often /dev/shm was full (df -h /dev/shm)."
        return Ending(cause="crashed", sentence=sentence, evidence=evidence)
    if name in ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS"):
        return Ending(cause="crashed", sentence=f"It crashed with {name}.{_xid(facts)}", evidence=evidence)
    who = {
        "SIGINT": "somebody interrupted it (Ctrl-C)",
        "SIGHUP": "its terminal or session was closed",
        "SIGTERM": "somebody asked it to end (kill, logout or shutdown)",
        "SIGXCPU": "it reached its limit of CPU time (ulimit -t)",
    }.get(name, "somebody sent it")
    return Ending(cause="killed", sentence=f"It was ended by {name}: {who}.", evidence=evidence)


def _innocent(facts: Facts) -> str:
    """Who did not send a SIGKILL, as far as it was looked at."""
    place, count = facts.around
    if count:
        return f"perhaps the kernel's out-of-memory killer did, which killed {count} in {place} meanwhile"
    if facts.journal:
        return "neither the kernel's out-of-memory killer nor systemd-oomd did"
    return "the kernel's out-of-memory killer did not, and the journal, where systemd-oomd would say so, cannot be read"


def _xid(facts: Facts) -> str:
    return f" The NVIDIA driver reported meanwhile: {'; '.join(facts.xids)}." if facts.xids else ""


def _unknown(facts: Facts) -> Ending:
    place, count = facts.around
    if facts.rebooted:
        return Ending(cause="down", sentence="The machine went down or was restarted while it ran.")
    if count:
        sentence = f"Unknown; perhaps the kernel's out-of-memory killer, which killed {count} in {place} while it ran."
        return Ending(
            cause="unknown", sentence=sentence, evidence=(f"memory.events of {place}: oom_kill rose by {count}",)
        )
    when = "It ended while torchtunedd did not run, and how is" if facts.missed else "How it ended is"
    no = together(("no out-of-memory kill was seen", "" if facts.journal else "the journal cannot be read"))
    sentence = f"{when} unknown: {no}, and its exit status is its parent's to know (torchtuned-run --report tells it)."
    return Ending(cause="unknown", sentence=sentence + _xid(facts), evidence=facts.xids)


def kills_of(entries: Sequence[OomKill], cgroup: str, pids: frozenset[int]) -> list[OomKill]:
    """Those that are of a job: in its own cgroup, or, without one, of its processes."""
    own = cgroup.rstrip("/")
    return [kill for kill in entries if (kill.of == own or kill.of.startswith(f"{own}/") if own else kill.pid in pids)]
