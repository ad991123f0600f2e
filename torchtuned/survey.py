"""Finds the knobs that a configuration means on this machine, and judges each. Reads, never writes."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from torchtuned.config import Config
from torchtuned.deadline import Deadline, Hung
from torchtuned.errors import HostError, Missing
from torchtuned.host import Host
from torchtuned.policy import Entry, Kind, Outcome, Row, Situation, Verdict, Wish, judge
from torchtuned.tunables import Family, Held, Knob
from torchtuned.tunables.cpu import on_battery
from torchtuned.tunables.owners import Owners

Wanted = list[tuple[Knob, Wish]]
UNKNOWN = "?"
FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
NOT_OFFERED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP})


@dataclass(frozen=True)
class Case:
    """One wanted knob, its value now, and what is to be done about it."""

    knob: Knob
    wish: Wish
    current: str
    verdict: Verdict

    def row(self, outcome: Outcome | None = None, reason: str | None = None) -> Row:
        return Row(
            knob=self.knob.id,
            current=self.current,
            wanted=str(self.wish.value),
            outcome=outcome or self.verdict.outcome,
            reason=self.verdict.reason if reason is None else reason,
            source=self.verdict.source or self.wish.source,
            passing=self.verdict.passing,
        )


class Hanging:
    """The kinds of knobs of which one hung in this operation: each more of them would take the whole deadline."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def __contains__(self, knob: Knob) -> bool:
        return self._kind(knob) in self._kinds

    def add(self, knob: Knob) -> None:
        self._kinds.add(self._kind(knob))

    @staticmethod
    def _kind(knob: Knob) -> str:
        return f"{knob.id.partition('/')[0]} {knob.stage}"


@dataclass
class Survey:
    """The knobs of one operation. `pending` holds what the operation writes, as far as it has come."""

    host: Host
    deadline: Deadline
    families: Mapping[str, Family]
    entries: Mapping[str, Entry]
    held: Mapping[str, str]
    jobs_active: bool
    reassert: bool = False
    tuners: Iterable[str] = ()
    pending: dict[str, str] = field(default_factory=dict)
    hanging: Hanging = field(default_factory=Hanging)

    def __post_init__(self) -> None:
        self.owners = Owners(self.host, self.tuners)
        self.on_battery = on_battery(self.host)

    def renew(self, entries: Mapping[str, Entry], held: Mapping[str, str]) -> None:
        """Take in what has been given back since, before the knobs are judged again."""
        self.entries, self.held, self.pending = entries, held, {}

    def wanted(self, config: Config, only: Sequence[str] | None = None) -> tuple[Wanted, list[Row]]:
        """The wanted knobs in the order of their writes, and rows for wishes that mean no knob here.

        Of two wishes for one knob the later counts.
        """
        found: dict[str, tuple[Knob, Wish]] = {}
        absent: list[Row] = []
        for wish in config.wishes:
            family = self.families.get(wish.knob.partition("/")[0])
            try:
                knobs = family.expand(self.host, wish) if family else []
                reason = family.absent(self.host, wish) if family and not knobs else "nothing here can set it"
                outcome = Outcome.UNSUPPORTED
            except HostError as error:
                knobs, reason, outcome = [], str(error), _outcome(error)
                if wish.value.kind is Kind.KEEP and outcome is Outcome.DENIED:
                    outcome = Outcome.KEPT
            for knob in knobs:
                if matches(knob.id, only):
                    found.pop(knob.id, None)
                    found[knob.id] = (knob, wish)
            if not knobs and only is None:
                absent.append(
                    Row(
                        knob=wish.knob,
                        current="",
                        wanted=str(wish.value),
                        outcome=outcome,
                        reason=reason,
                        source=wish.source,
                    )
                )
        return sorted(found.values(), key=lambda pair: pair[0].stage), absent

    def judge(self, knob: Knob, wish: Wish) -> Case:
        """Read one knob and decide. Whatever goes wrong becomes the verdict."""
        if knob in self.hanging:
            return Case(knob, wish, UNKNOWN, _hung("not tried: one like it hangs"))

        def look() -> tuple[str, str, Sequence[str] | None, str]:
            current = knob.read(self.host)
            base = knob.unheld(self.host) if isinstance(knob, Held) and knob.id in self.held else current
            return current, base, knob.choices(self.host), knob.implied(self.host, self.pending)

        try:
            current, base, choices, implied = self.deadline.run(knob.id, look, knob.patience)
        except Hung as hung:
            self.hanging.add(knob)
            return Case(knob, wish, UNKNOWN, _hung(hung.what))
        except HostError as error:
            if wish.value.kind is Kind.KEEP and error.errno in FORBIDDEN:  # nothing would be done, so nothing is denied
                return Case(knob, wish, UNKNOWN, Verdict(outcome=Outcome.KEPT, reason=f"keep; {error.what}"))
            gone = isinstance(error, Missing)
            return Case(knob, wish, UNKNOWN, Verdict(outcome=_outcome(error), reason=error.what, gone=gone))
        situation = Situation(
            owner=self.owners.owner(knob.id, knob.path),
            on_battery=self.on_battery,
            jobs_active=self.jobs_active,
            reassert=self.reassert,
        )
        entry = self.entries.get(knob.id)
        verdict = judge(wish, base, entry, situation, choices=choices, capacity=knob.capacity, implied=implied)
        if isinstance(knob, Held):
            verdict = self._held(knob, verdict)
        if verdict.targets:
            self.pending[knob.id] = verdict.targets[0]
        return Case(knob, wish, current, verdict)

    def _held(self, knob: Held, verdict: Verdict) -> Verdict:
        """What is to be done about a value that may be held: keep it, or let it go (and hold another one)."""
        held = self.held.get(knob.id)
        if held is None:
            return verdict
        if held in verdict.targets:
            return replace(verdict, targets=(), ours=True, reason=f"held by torchtuned, at {held}")
        return replace(verdict, release=True)


def matches(knob: str, patterns: Sequence[str] | None) -> bool:
    """Whether a knob is one of those named: by its id, a pattern, or the folder it is in. None names all."""
    if patterns is None:
        return True
    return any(fnmatchcase(knob, pattern) or knob.startswith(pattern.rstrip("/") + "/") for pattern in patterns)


def _hung(reason: str) -> Verdict:
    return Verdict(outcome=Outcome.FAILED, reason=reason, passing=True)


def _outcome(error: HostError) -> Outcome:
    if isinstance(error, Missing) or error.errno in NOT_OFFERED or error.errno == errno.EBUSY:
        return Outcome.UNSUPPORTED
    return Outcome.DENIED if error.errno in FORBIDDEN else Outcome.FAILED
