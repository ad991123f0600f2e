"""Wanted knob values, and what should happen to a knob that has another value. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Outcome(StrEnum):
    APPLIED = "applied"
    KEPT = "kept"
    UNSUPPORTED = "unsupported"
    DENIED = "denied"
    FOREIGN = "foreign"
    FAILED = "failed"
    DRIFTED = "drifted"


DEGRADING = frozenset({Outcome.DENIED, Outcome.FAILED})
"""Outcomes that mean the policy is not in force although nobody else decided so."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a plan: what a knob is, what it should be, and what became (or would become) of it.

    `source` is where the wish comes from: FILE:LINE, or the profile's. For a foreign knob it is the owner's FILE:LINE.
    `untried`: it is not as wanted because nothing has been applied, by all that is known here. `passing`: it
    failed because of what may pass by itself: its original could not be recorded, or the kernel did not answer in time.
    The bus tells neither.
    """

    knob: str
    current: str
    wanted: str
    outcome: Outcome
    reason: str
    source: str
    untried: bool = False
    passing: bool = False


def set_by(owner: str) -> str:
    """The reason of a foreign row whose value somebody else's file sets."""
    return f"set by {owner}"


def setter(reason: str) -> str:
    """Who that is. Over the bus a row has nothing but its reason to tell."""
    return reason.removeprefix(set_by(""))


class Kind(StrEnum):
    EXACT = "exact"
    FLOOR = "floor"
    CEILING = "ceiling"
    PREFER = "prefer"
    KEEP = "keep"


@dataclass(frozen=True)
class Value:
    """A wanted value as the configuration writes it: `10`, `>=4096`, `<=10`, `performance|schedutil`, `keep`."""

    kind: Kind
    choices: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return self.choices[0] if self.choices else ""

    def __str__(self) -> str:
        if self.kind is Kind.KEEP:
            return "keep"
        return {Kind.FLOOR: ">=", Kind.CEILING: "<="}.get(self.kind, "") + "|".join(self.choices)


KEEP = Value(Kind.KEEP)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the configuration wants of one knob, or of all knobs that a pattern names ("cpu/*/governor").

    `when` is "boot" (always) or "jobs" (while a job runs, then given back); `match` narrows block devices;
    `keep_on_battery` means leave the knob alone while the machine runs on battery.
    """

    knob: str
    value: Value
    when: str = "boot"
    source: str = ""
    keep_on_battery: bool = False
    match: Mapping[str, str] = field(default_factory=dict)


def parse_value(text: str) -> Value:
    """Read a wanted value. ValueError says what is wrong with it."""
    text = " ".join(text.split())
    if not text:
        raise ValueError("no value given; write 'keep' to leave the knob alone")
    if text == "keep":
        return KEEP
    for sign, kind in ((">=", Kind.FLOOR), ("<=", Kind.CEILING)):
        if text.startswith(sign):
            numbers = text[2:].split()
            if not numbers or not all(_is_number(number) for number in numbers):
                raise ValueError(f"{sign} needs a whole number, not {text[2:].strip()!r}")
            return Value(kind, (" ".join(numbers),))
    if text[0] in "<>=":
        raise ValueError(f"cannot read {text!r}; a floor is written >=N, a ceiling <=N")
    choices = tuple(choice.strip() for choice in text.split("|"))
    if not all(choices):
        raise ValueError(f"empty choice in {text!r}")
    if "keep" in choices:
        raise ValueError("'keep' stands alone; it cannot be one of several choices")
    return Value(Kind.PREFER if len(choices) > 1 else Kind.EXACT, choices)


@dataclass(frozen=True)
class Decision:
    """What to write, in order of preference; empty `targets` means leave it, for `reason`."""

    targets: tuple[str, ...]
    reason: str
    outcome: Outcome = Outcome.KEPT


def decide(value: Value, current: str, choices: Sequence[str] | None = None, *, capacity: bool = False) -> Decision:
    """Say what a knob that is now `current` should become.

    `choices` are the values this machine offers, None when the kernel does not list them. A `capacity`
    is a limit that only ever goes up: an exact number for it is read as a floor.
    """
    kind = value.kind
    if kind is Kind.KEEP:
        return Decision((), "keep")
    if capacity and kind is Kind.EXACT and all(map(_is_number, f"{value.text} {current}".split())):
        kind = Kind.FLOOR
    if kind in (Kind.FLOOR, Kind.CEILING):
        return _bound(value.text, current, kind)
    if choices is None:
        offered = value.choices
    else:
        offered = tuple(choice for choice in value.choices if choice in choices)
    if not offered:
        listed = " ".join(choices or ()) or "nothing"
        return Decision((), f"not offered here; the kernel offers {listed}", Outcome.UNSUPPORTED)
    if current == offered[0]:
        return Decision((), "already so")
    return Decision(offered, "" if offered[0] == value.choices[0] else f"{value.choices[0]} is not offered here")


def _bound(text: str, current: str, kind: Kind) -> Decision:
    asked, have = text.split(), current.split()
    if len(asked) != len(have) or not all(map(_is_number, have)):
        return Decision((), f"cannot compare {current!r} with {text!r}", Outcome.FAILED)
    better = max if kind is Kind.FLOOR else min
    result = [better(int(a), int(b)) for a, b in zip(asked, have, strict=True)]
    if result == [int(number) for number in have]:
        if asked == have:
            return Decision((), "already so")
        return Decision((), f"already {'higher' if kind is Kind.FLOOR else 'lower'}")
    return Decision((" ".join(map(str, result)),), "")


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]{1,20}", text) is not None


class State(StrEnum):
    """How far the change of a knob has come. Each is in the ledger on disk before the step that it names.

    LEFT: another tuner that runs has the knob now. When it ends it gives back what it found, which was ours.
    """

    PENDING = "pending"
    WRITTEN = "written"
    UNDOING = "undoing"
    DRIFTED = "drifted"
    LEFT = "left"


@dataclass(frozen=True, kw_only=True)
class Companion:
    """Another file that the kernel changes along with a knob, such as vm.dirty_ratio with vm.dirty_bytes.

    `after` is its value once the knob was written; None when that is not known. `apart`: it goes back to its original
    even when somebody else has changed the knob itself. `fades`: the kernel makes up a value when the knob goes back,
    so that there is nothing to compare with. `saved`: an earlier value of ours that the kernel may bring back.
    """

    path: str
    original: str
    after: str | None = None
    apart: bool = False
    fades: bool = False
    saved: str | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One knob that we changed: what it was, what we wrote, why, and since when (seconds since 1970).

    `asked` differs from `written` where the kernel made something else of it; `previous` is an earlier value of ours,
    in force until `written` is. `refused` counts how often the kernel would not take the original back.
    """

    knob: str
    original: str
    written: str
    asked: str = ""
    previous: str | None = None
    when: str = "boot"
    source: str = ""
    since: float = 0.0
    state: State = State.PENDING
    companions: tuple[Companion, ...] = ()
    refused: int = 0

    def ours(self, current: str) -> bool:
        """Whether a value can only be one that we wrote."""
        return current != self.original and current in (self.written, self.previous)

    def stale(self, current: str) -> bool:
        """Whether another tuner had the knob and ended without giving it back: what it left is the machine's now."""
        return self.state is State.LEFT and current not in (self.original, self.written, self.previous)


@dataclass(frozen=True)
class Owner:
    """Who else decides about a knob, and where: FILE:LINE, or the unit. `active` tuners keep rewriting it."""

    name: str
    source: str
    active: bool = False


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What decides about a knob besides its value and the wish."""

    owner: Owner | None = None
    on_battery: bool = False
    jobs_active: bool = False
    reassert: bool = False


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is to be done about one knob.

    `targets`: values to write, the first one that the kernel takes; none means leave it. `ours`: the value in force is
    ours. `release`: give back what we wrote, before anything else is written. `hand_over`: another tuner has it now.
    `gone`: nobody has it any more. `passing`: as in Row.
    """

    outcome: Outcome
    reason: str
    source: str = ""
    targets: tuple[str, ...] = ()
    ours: bool = False
    release: bool = False
    hand_over: bool = False
    gone: bool = False
    passing: bool = False


def judge(
    wish: Wish,
    current: str,
    entry: Entry | None,
    situation: Situation,
    *,
    choices: Sequence[str] | None = None,
    capacity: bool = False,
    implied: str = "",
) -> Verdict:
    """Decide about one knob. Pure: everything that plan, apply and verify say comes from here.

    Floors and ceilings are held against the original, so what we wrote earlier never counts as the machine's own.
    """
    owner, known = situation.owner, entry is not None
    if entry and entry.stale(current) and not (owner and owner.active):
        entry = None
    base = entry.original if entry else current
    decision = decide(wish.value, base, choices, capacity=capacity)
    wanted = Verdict(
        outcome=decision.outcome,
        reason=decision.reason,
        source=wish.source,
        targets=decision.targets,
        release=known,
    )
    if owner and owner.active:
        reason = left_to(owner, entry)
        return Verdict(outcome=Outcome.FOREIGN, reason=reason, source=owner.source, hand_over=True)
    if wish.value.kind is Kind.KEEP:
        return wanted
    if owner:
        return Verdict(outcome=Outcome.FOREIGN, reason=set_by(owner.name), source=owner.source, release=True)
    if wish.keep_on_battery and situation.on_battery:
        return replace(wanted, targets=(), outcome=Outcome.KEPT, reason="left alone while on battery")
    if wish.when == "jobs" and not situation.jobs_active:
        if not decision.targets:
            return wanted
        return replace(wanted, targets=(), outcome=Outcome.KEPT, reason=f"{decision.targets[0]} while a job runs")
    if implied:
        return replace(wanted, targets=(), outcome=Outcome.KEPT, reason=implied, release=False)
    if not decision.targets:
        return wanted
    if entry:
        return _judge_changed(wanted, current, entry, reassert=situation.reassert)
    return replace(wanted, outcome=Outcome.APPLIED)


def left_to(owner: Owner, entry: Entry | None) -> str:
    """Why a knob is left to another tuner that runs, and what it was if we had changed it."""
    text = f"left to {owner.name}"
    return f"{text} while it runs; it was {entry.original} before torchtuned" if entry else text


def _judge_changed(wanted: Verdict, current: str, entry: Entry, *, reassert: bool) -> Verdict:
    wanted = replace(wanted, release=False)
    if entry.ours(current):
        if entry.written == current and {entry.asked, entry.written} & {*wanted.targets}:
            reason = f"set by torchtuned, was {entry.original}"
            return replace(wanted, outcome=Outcome.APPLIED, reason=reason, targets=(), ours=True)
        return replace(wanted, outcome=Outcome.APPLIED)
    unfinished = entry.state in (State.PENDING, State.UNDOING, State.LEFT) and current == entry.original
    if unfinished or (reassert and entry.state is not State.DRIFTED):
        # what is not in force is given back to the end: its side effects may be somebody else's by now
        return replace(wanted, outcome=Outcome.APPLIED, release=unfinished)
    if current == entry.original:
        reason = f"it is {current} again, as before torchtuned set {entry.written}"
    else:
        reason = f"somebody changed it after torchtuned had set {entry.written} (it was {entry.original})"
    reason += "; left alone: undo it to forget, then apply to set it again"
    return replace(wanted, outcome=Outcome.DRIFTED, reason=reason, targets=())
