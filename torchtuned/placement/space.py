"""The cores one placement can hand out, what it has handed out so far, and what it has to say about that. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torchtuned.cpuset import CpuSet, format_list
from torchtuned.errors import Busy, InvalidRequest, Unplaceable
from torchtuned.placement.dealing import Piece, cpus_of, pieces
from torchtuned.placement.grants import Grant, Request, Rules
from torchtuned.topology import Topology
from torchtuned.wording import count
from torchtuned.words import FULL

REMEDY = "for cores of its own: start jobs with --cpus N, set slots in the configuration, or wait with --wait"
NOTHING: CpuSet = frozenset()


@dataclass(kw_only=True)
class Space:
    """`cores` are the usable pieces in CPU order; `taken` names, by first CPU, those this job has already."""

    machine: Topology
    in_force: Sequence[Grant]
    request: Request
    rules: Rules
    allowed: CpuSet
    cores: list[Piece]
    shared: bool
    taken: set[int] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    _near: dict[CpuSet, list[Piece]] = field(default_factory=dict)

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def free(self, cores: Iterable[Piece]) -> list[Piece]:
        return [piece for piece in cores if piece.free and piece.first not in self.taken]

    def near(self, local: CpuSet) -> list[Piece]:
        """The usable cores among a GPU's local CPUs."""
        if local not in self._near:
            self._near[local] = [piece for piece in self.cores if piece.first in local]
        return self._near[local]

    def take(self, cores: Iterable[Piece]) -> list[Piece]:
        chosen = list(cores)
        self.taken.update(piece.first for piece in chosen)
        return chosen

    @cached_property
    def kept(self) -> CpuSet:
        """CPUs that jobs do not get unless they are allowed nothing else."""
        return _whole(self.machine, self.rules.reserved | self.machine.isolated)

    @cached_property
    def total(self) -> int:
        """How many cores of the machine jobs may have at all."""
        return max(1, sum(1 for core in self.machine.cores if core.cpus.isdisjoint(self.kept)))

    @cached_property
    def _holders(self) -> dict[int, set[int]]:
        """The jobs on each CPU, by their place in `in_force`."""
        holders: dict[int, set[int]] = {}
        for i, grant in enumerate(self.in_force):
            if grant.bound:
                for cpu in grant.cpus:
                    holders.setdefault(cpu, set()).add(i)
        return holders

    def left_out(self) -> tuple[str, ...]:
        """Why the CPUs that this job cannot have are not for it."""
        online, allowed = self.machine.online, self.machine.allowed
        held = frozenset(self._holders)
        return tuple(
            f"CPUs {format_list(cpus)} {words}"
            for cpus, words in (
                (online - allowed, "are not allowed by the cgroup or affinity"),
                (allowed - self.allowed, "are outside of the affinity it was started with"),
                (self.allowed & self.machine.isolated, "are isolated from the scheduler"),
                (self.allowed & self.rules.reserved, "are reserved by the administrator"),
                (self.allowed & held, "are held by other jobs"),
            )
            if cpus
        )

    def jobs_on(self, cores: Iterable[Piece]) -> int:
        """How many other jobs these cores have."""
        return len(set[int]().union(*(self._holders.get(cpu, ()) for cpu in cpus_of(cores))))

    def share(self, cores: Sequence[Piece], whose: str = "") -> None:
        """Nothing is free: say that these cores are shared, or refuse where the administrator wants that. Busy."""
        if self.rules.when_full != "share":
            raise Busy(FULL, where="CPUs", hint=REMEDY)
        self.shared = True
        jobs = self.jobs_on(cores)
        threads = max(1, len(cores) // (jobs + 1))
        self.warn(
            f"{whose}{FULL}: CPUs {format_list(cpus_of(cores))} are shared with {jobs} other "
            f"job{'' if jobs == 1 else 's'}, {threads} thread{'' if threads == 1 else 's'} for this one; {REMEDY}"
        )

    def counted(self, free: Sequence[Piece]) -> tuple[str, int]:
        """What `--cpus` asks for: ("", 0) when nothing is said, ("node", 0), or ("cores", number). "all" is as many
        as are free. InvalidRequest, Unplaceable.
        """
        kind, number = cpus_wish(self.request.cpus)
        if kind == "all":
            return "cores", len(free)
        if kind == "percent":
            return "cores", min(len(self.cores), max(1, self.total * number // 100))
        if kind == "cores" and number > len(self.cores):
            raise Unplaceable(
                f"this job may have {count(len(self.cores), 'core')} at most",
                where=f"--cpus {number}",
                hint="ask for fewer, or start it with a wider affinity" if number <= self.total else "ask for fewer",
            )
        return kind, number

    def short(self, have: int, wish: int, whose: str = "") -> None:
        """Fewer cores than wished for are free: say so, or refuse where the administrator wants that. Busy."""
        if self.request.cpus is not None and self.rules.when_full != "share":
            raise Busy(f"{have} of {wish} cores are free", where=f"--cpus {self.request.cpus}", hint="wait with --wait")
        self.warn(f"{whose}only {have} of {wish} cores are free; --wait waits for more, --shared shares them")


def cpus_wish(text: str | None) -> tuple[str, int]:
    """Read `--cpus`: ("", 0) for None, ("cores", 4), ("percent", 50), ("node", 0), ("all", 0). InvalidRequest."""
    if text is None:
        return "", 0
    if text in ("node", "all"):
        return text, 0
    number = text.removesuffix("%")
    if number.isascii() and number.isdigit() and len(number) < 7 and int(number) > 0:
        if number == text:
            return "cores", int(number)
        if int(number) <= 100:
            return "percent", int(number)
    raise InvalidRequest("not an amount of CPUs", where=f"--cpus {text}", hint="cores as in 4, 50%, node or all")


def space_for(machine: Topology, in_force: Sequence[Grant], request: Request, rules: Rules) -> Space:
    """What a job may be given. Reserved and isolated cores come last: who is allowed nothing else was put there.

    Unplaceable when not one CPU is left.
    """
    allowed = machine.allowed if request.affinity is None else machine.allowed & request.affinity
    if not allowed:
        asked = machine.allowed if request.affinity is None else request.affinity
        raise Unplaceable(
            f"none of the CPUs {format_list(asked) or 'allowed here'} can be used",
            where="affinity",
            hint=f"allowed and online are {format_list(machine.allowed) or 'none'}",
        )
    busy = NOTHING if request.shared else NOTHING.union(*(grant.cpus for grant in in_force if grant.bound))
    space = Space(
        machine=machine,
        in_force=in_force,
        request=request,
        rules=rules,
        allowed=allowed,
        cores=[],
        shared=request.shared,
    )
    for kept, words in (
        (space.kept, ""),
        (_whole(machine, rules.reserved), "only isolated CPUs are allowed here, so the job gets those"),
        (NOTHING, "only reserved CPUs are allowed here, so the job gets those"),
    ):
        space.cores = pieces(machine, allowed - kept, busy)
        if space.cores:
            if words:
                space.warn(words)
            break
    return space


def _whole(machine: Topology, cpus: CpuSet) -> CpuSet:
    """With their siblings: a job on one half of a core would disturb what the other half is kept for."""
    if not cpus:
        return NOTHING
    return frozenset(sibling for core in machine.cores if not core.cpus.isdisjoint(cpus) for sibling in core.cpus)
