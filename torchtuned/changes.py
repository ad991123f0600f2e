"""Writes knobs and gives them back, with the ledger a step ahead of each write.

The order is: original into the ledger on disk, knob, confirmation into the ledger. Undo marks its entries, compares,
restores in the reverse order, and takes the entries out. Whatever dies in between, an entry on disk tells the machine's
values from ours.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torchtuned.deadline import Deadline, Hung, StillHung
from torchtuned.errors import Failed, HostError, Missing, Refused, Unreadable
from torchtuned.host import Host
from torchtuned.ledger import Ledger
from torchtuned.policy import Companion, Entry, Outcome, Row, State
from torchtuned.survey import FORBIDDEN, NOT_OFFERED, UNKNOWN, Case, Hanging, Survey
from torchtuned.tunables import Family, Knob, find_knob

log = logging.getLogger("torchtuned.policy")

TRIES = 3  # how often the kernel may refuse an original before undo says so for the last time and forgets it


@dataclass
class Changes:
    """What may write. Call it inside `ledger.locked()`."""

    host: Host
    ledger: Ledger
    deadline: Deadline
    families: Mapping[str, Family]
    clock: Callable[[], float]
    _knobs: dict[str, str] = field(default_factory=dict, init=False)  # by their files, those that make() knows of

    def make(self, cases: Sequence[Case], survey: Survey) -> list[Row]:
        """Write the targets of all cases: one write of the ledger before them, one after."""
        before, stale = dict(self.ledger.entries), dict[str, Entry]()
        if cases:
            self._knobs = {self._path(entry): knob for knob, entry in before.items()}
            self._knobs |= {case.knob.path: case.knob.id for case in cases}
        for case in cases:
            if case.knob.id in before and before[case.knob.id].stale(case.current):
                stale[case.knob.id] = before.pop(case.knob.id)  # what is there now is the original
        entries, rows = dict(before), []
        ready: list[Case] = []
        for case in cases:
            try:
                new = self._entry(case, case.verdict.targets[0], before.get(case.knob.id))
                if case.knob.id in stale:
                    new = replace(new, companions=_inherited(new.companions, stale[case.knob.id].companions))
                entries[case.knob.id] = new
                ready.append(case)
            except (HostError, Hung) as error:
                rows.append(case.row(Outcome.FAILED, f"cannot read what it would change: {error}"))
        try:
            self.ledger.save(entries)
        except Failed as failed:
            return [*rows, *(unrecorded(case, failed) for case in ready)]
        for case in ready:
            row, entry = self._write(case, before.get(case.knob.id), survey)
            rows.append(row)
            if entry:
                entries[case.knob.id] = entry
            else:
                del entries[case.knob.id]
        self.settle(entries)
        return rows

    def give_back(self, knobs: Iterable[str], hanging: Hanging) -> list[Row]:
        """Restore the originals of these knobs, last change first, unless somebody else has changed them since.

        Those of a kind that hangs are left for the next time, so that the others are given back before PID 1 loses
        its patience with a daemon that it stops.
        """
        wanted = set(knobs)
        chosen = [entry for knob, entry in reversed([*self.ledger.entries.items()]) if knob in wanted]
        if not chosen:
            return []
        self.settle({knob: _begun(entry) if knob in wanted else entry for knob, entry in self.ledger.entries.items()})
        rows, left = [], dict(self.ledger.entries)
        place = {knob: (number, self._path(entry)) for number, (knob, entry) in enumerate(left.items())}
        for entry in chosen:
            cover = self._covered(entry, left, place)
            row, kept = (cover, None) if cover else self._restore(entry, hanging)
            rows.append(row)
            if kept:
                left[entry.knob] = kept
                continue
            del left[entry.knob]
            if row.outcome in (Outcome.APPLIED, Outcome.KEPT, Outcome.DRIFTED):
                self._pass_on(entry, row.outcome, left, place)
        self.settle(left)
        return rows

    def hand_over(self, knobs: Mapping[str, str]) -> None:
        """Leave knobs to another tuner, {knob: why}, for as long as it runs."""
        entries = dict(self.ledger.entries)
        for knob, why in knobs.items():
            entry = entries.get(knob)
            if entry is None or entry.state is State.LEFT:
                continue
            if entry.state is State.DRIFTED:  # it was somebody else's before, and so it is afterwards
                if not any(companion.apart for companion in entry.companions):
                    tell(knob, entry.written, entry.written, why)
                    del entries[knob]
                    path, ours = self._path(entry), (entry.written, entry.previous)
                    for other in [*entries.values()]:
                        companions = [
                            _handed_on(companion, entry)
                            if companion.path == path and companion.original in ours
                            else companion
                            for companion in other.companions
                        ]
                        entries[other.knob] = replace(other, companions=tuple(companions))
                continue
            tell(knob, entry.written, entry.written, why)
            entries[knob] = replace(entry, state=State.LEFT)
        self.settle(entries)

    def forget(self, knobs: Mapping[str, str]) -> None:
        """Forget knobs that went away with their values, {knob: why}."""
        for knob, why in knobs.items():
            entry = self.ledger.entries.get(knob)
            if entry:
                tell(knob, entry.written, "", f"{why}; it was {entry.original} before torchtuned")
        self.settle({knob: entry for knob, entry in self.ledger.entries.items() if knob not in knobs})

    def _entry(self, case: Case, target: str, earlier: Entry | None) -> Entry:
        knob, written = case.knob, case.knob.predict(self.host, target)
        companions = self.deadline.run(knob.id, lambda: knob.companions(self.host, target), knob.patience)
        if earlier:
            previous = case.current if earlier.ours(case.current) else earlier.previous
            return replace(
                earlier,
                written=written,
                asked=target,
                previous=previous,
                state=State.PENDING,
                when=case.wish.when,
                source=case.wish.source,
                companions=self._once_again(earlier.companions, companions),
            )
        return Entry(
            knob=knob.id,
            original=case.current,
            written=written,
            asked=target,
            when=case.wish.when,
            source=case.wish.source,
            since=self.clock(),
            companions=companions,
        )

    def _once_again(self, earlier: Iterable[Companion], now: Iterable[Companion]) -> tuple[Companion, ...]:
        """The side effects of a knob that gets a second value of ours, as they are `now`: what is still ours has the
        original from the first time, and is ours too until the knob is written; what somebody made of it since is
        theirs.
        """
        found = {companion.path: companion for companion in now}
        companions = []
        for companion in earlier:
            new = found.get(companion.path)
            if new and not companion.fades:
                if companion.after is None or new.original in (companion.after, companion.saved):
                    companion = replace(new, original=companion.original, saved=new.original)
                elif not self._is_knobs(new.path, new.original):
                    companion = new
            companions.append(companion)
        return tuple(companions)

    def _write(self, case: Case, earlier: Entry | None, survey: Survey) -> tuple[Row, Entry | None]:
        """Try the targets in turn. Returns the row, and the entry to keep (None: the knob is as it was)."""
        knob, entry = case.knob, self.ledger.entries[case.knob.id]
        if knob in survey.hanging:
            return passing(case, "not tried: one like it hangs"), earlier
        row = case.row(Outcome.FAILED, "the kernel took it without effect")
        for number, target in enumerate(case.verdict.targets):
            try:
                if number:
                    entry = self._entry(case, target, entry)
                    self.ledger.save({**self.ledger.entries, knob.id: entry})
                now = self.deadline.run(knob.id, partial(self._set, knob, target), knob.patience)
            except Hung as hung:
                survey.hanging.add(knob)
                return passing(case, hung.what), entry
            except HostError as error:
                row = refusal(case, error)
                try:
                    now = self.deadline.run(knob.id, lambda: knob.read(self.host), knob.patience)
                except (HostError, Hung) as unread:  # gone: nothing to give back; otherwise nobody can tell yet
                    return row, earlier if isinstance(unread, Missing) else entry
            except Failed as failed:
                return unrecorded(case, failed), earlier
            expected = now in (target, entry.written)
            if now == case.current and not expected:
                continue
            if now == entry.original:
                return replace(row, current=now), None
            entry = replace(entry, written=now, previous=None, state=State.WRITTEN, companions=self._afterwards(entry))
            reason = f"set by torchtuned, was {entry.original}"
            if not expected:
                reason += f"; the kernel made {now} of {target}"
            elif case.verdict.reason:
                reason += f"; {case.verdict.reason}"
            tell(knob.id, case.current, now, case.wish.source)
            return replace(case.row(Outcome.APPLIED, reason), current=now), entry
        return row, earlier

    def _set(self, knob: Knob, target: str) -> str:
        knob.write(self.host, target)
        return knob.read(self.host)

    def _afterwards(self, entry: Entry) -> tuple[Companion, ...]:
        def look() -> tuple[Companion, ...]:
            found = [(companion, self.host.read(companion.path)) for companion in entry.companions]
            return tuple(
                one if one.fades or self._is_knobs(one.path, now) else replace(one, after=now) for one, now in found
            )

        try:
            return self.deadline.run(entry.knob, look) if entry.companions else ()
        except (HostError, Hung):
            return entry.companions

    def _is_knobs(self, path: str, now: str) -> bool:
        """Whether a side effect has a value that another knob of ours, of that very file, was given."""
        entry = self.ledger.entries.get(self._knobs.get(path, ""))
        return entry is not None and entry.ours(now)

    def _restore(self, entry: Entry, hanging: Hanging) -> tuple[Row, Entry | None]:
        """Give one knob back. Returns the row, and the entry if it has to be tried again."""
        knob = find_knob(self.families, self.host, entry.knob)
        if knob is None:
            reason = f"this torchtuned cannot give it back; it was {entry.original}"
            return row_of(entry, UNKNOWN, Outcome.FAILED, reason), None
        if knob in hanging:
            reason = "not tried: one like it hangs; undo again later"
            return row_of(entry, UNKNOWN, Outcome.FAILED, reason), _begun(entry)
        try:
            before, after = self.deadline.run(knob.id, lambda: self._compare_and_restore(knob, entry), knob.patience)
        except Hung as hung:
            if not isinstance(hung, StillHung):  # that took no time, and says nothing of the others
                hanging.add(knob)
            return row_of(entry, UNKNOWN, Outcome.FAILED, f"{hung.what}; undo again later"), _begun(entry)
        except Missing as missing:
            reason = f"nothing to give back, the device went away with its value: {missing.what}"
            return row_of(entry, UNKNOWN, Outcome.UNSUPPORTED, reason), None
        except HostError as error:
            if isinstance(error, Unreadable) and error.errno == errno.EBUSY:  # offline or asleep: yet to be tried
                reason = f"cannot give back {entry.original}: {error.what}; undo again later"
                return row_of(entry, UNKNOWN, Outcome.FAILED, reason), _begun(entry)
            outcome = Outcome.DENIED if error.errno in FORBIDDEN else Outcome.FAILED
            return self._once_more(entry, knob, UNKNOWN, outcome, error.what)
        if after == entry.original:
            if before == after:
                return row_of(entry, after, Outcome.KEPT, "already as it was"), None
            tell(entry.knob, before, after, "given back")
            return row_of(entry, after, Outcome.APPLIED, f"given back, torchtuned had set {before}"), None
        if entry.ours(before):
            return self._once_more(entry, knob, after, Outcome.FAILED, f"the kernel made {after} of it")
        reason = f"left: somebody changed it after torchtuned had set {entry.written}; it was {entry.original}"
        tell(entry.knob, entry.written, after, reason)
        return row_of(entry, after, Outcome.DRIFTED, reason), None

    def _compare_and_restore(self, knob: Knob, entry: Entry) -> tuple[str, str]:
        """The value before and after. What is neither ours nor the original stays."""
        before = knob.read(self.host)
        ours = []
        for companion in entry.companions:
            if companion.fades:
                half_way = entry.state in (State.UNDOING, State.LEFT)  # it may have been, when another tuner came
                mine = entry.ours(before) or (before == entry.original and half_way)
            else:
                known = (companion.after, companion.saved)
                mine = self.host.exists(companion.path) and (
                    companion.after is None or self.host.read(companion.path) in known
                )
            if mine:
                ours.append(companion)
        if before == entry.original or entry.ours(before):
            knob.restore(self.host, entry, ours)
        else:
            for companion in ours:
                if companion.apart:
                    try:
                        self.host.write(companion.path, companion.original)
                    except Refused as refused:
                        if refused.errno != errno.EBUSY:  # ruled out by what the other has chosen
                            raise
        return before, knob.read(self.host)

    def _once_more(self, entry: Entry, knob: Knob, now: str, outcome: Outcome, what: str) -> tuple[Row, Entry | None]:
        entry = replace(_begun(entry), refused=entry.refused + 1)
        if entry.refused < TRIES:
            return row_of(entry, now, outcome, f"cannot give back {entry.original}: {what}; undo again later"), entry
        reason = f"gave up after {TRIES} tries to give back {entry.original}: {what}; it is in {knob.path}"
        tell(entry.knob, entry.written, now, reason, level=logging.ERROR)
        return row_of(entry, now, outcome, reason), None

    def _covered(self, entry: Entry, left: dict[str, Entry], place: Mapping[str, tuple[int, str]]) -> Row | None:
        """The row of a knob that a later change of another one covers up: it goes back with that one.

        Such as the preference under a governor: what the machine has now is the governor's doing, not somebody's.
        `place`: when a knob was changed, as a number, and its file.
        """
        number, path = place[entry.knob]
        for later in left.values():
            for index, companion in enumerate(later.companions):
                if companion.path != path or place[later.knob][0] < number:
                    continue
                if companion.original not in (entry.original, entry.written, entry.previous):
                    continue
                companions = list(later.companions)
                companions[index] = _handed_on(companion, entry)
                left[later.knob] = replace(later, companions=tuple(companions))
                try:
                    now = self.deadline.run(entry.knob, lambda: self.host.read(path))
                except (HostError, Hung):
                    return None
                if now == companion.after or (companion.after is None and not entry.ours(now)):
                    return row_of(entry, now, Outcome.APPLIED, f"goes back to {entry.original} with {later.knob}")
        return None

    def _pass_on(
        self, entry: Entry, outcome: Outcome, left: dict[str, Entry], place: Mapping[str, tuple[int, str]]
    ) -> None:
        """A knob changed later, whose original was a side effect of this one, gets the true original.

        When this one is somebody else's now, only those of its side effects count that go back all the same.
        """
        mine = [companion for companion in entry.companions if companion.apart or outcome is not Outcome.DRIFTED]
        companions = {companion.path: companion for companion in mine}
        for later in list(left.values()):
            number, path = place[later.knob]
            companion = companions.get(path)
            if companion is None or number < place[entry.knob][0]:
                continue
            if outcome is Outcome.APPLIED or later.original == companion.after:
                left[later.knob] = replace(later, original=companion.original)

    def _path(self, entry: Entry) -> str:
        knob = find_knob(self.families, self.host, entry.knob)
        return knob.path if knob else ""

    def settle(self, entries: Mapping[str, Entry]) -> None:
        """Record what has been done already. If that fails the ledger is behind, which the next start makes out."""
        try:
            self.ledger.save(entries)
        except Failed as failed:
            self.ledger.remember(entries)
            log.error("%s", failed)


def unrecorded(case: Case, failed: Failed) -> Row:
    """The row of a knob that is left alone because it could not be given back."""
    return passing(case, f"left alone until its original can be recorded: {failed}")


def passing(case: Case, reason: str) -> Row:
    """The row of a knob that failed because of what may pass by itself."""
    return replace(case.row(Outcome.FAILED, reason), passing=True)


def _begun(entry: Entry) -> Entry:
    """The entry of a knob that may have been given back, in part or while nobody was looking."""
    return entry if entry.state is State.DRIFTED else replace(entry, state=State.UNDOING)


def row_of(entry: Entry, current: str, outcome: Outcome, reason: str) -> Row:
    """The row of a knob that is given back: wanted is what it was."""
    return Row(
        knob=entry.knob, current=current, wanted=entry.original, outcome=outcome, reason=reason, source=entry.source
    )


def tell(knob: str, old: str, new: str, why: str, *, level: int = logging.INFO) -> None:
    """One line in the journal for one change, with its parts as fields of their own."""
    fields = {"TORCHTUNED_KNOB": knob, "TORCHTUNED_OLD": old, "TORCHTUNED_NEW": new, "TORCHTUNED_WHY": why}
    log.log(level, "%s: %s -> %s (%s)", knob, old, new, why, extra=fields)


def refusal(case: Case, error: HostError | Hung) -> Row:
    """The row of a knob that the kernel would not have."""
    if isinstance(error, Hung):
        return passing(case, error.what)
    excuse = case.knob.excuse(error)
    if excuse:
        return case.row(Outcome.KEPT, excuse)
    if isinstance(error, Missing) or error.errno in NOT_OFFERED:
        return case.row(Outcome.UNSUPPORTED, error.what)
    return case.row(Outcome.DENIED if error.errno in FORBIDDEN else Outcome.FAILED, f"the kernel refused: {error.what}")


def _handed_on(companion: Companion, entry: Entry) -> Companion:
    """The side effect of a later change on a knob that is forgotten: it has the true original from there."""
    if companion.original == entry.original:
        return companion
    return replace(companion, original=entry.original, saved=companion.original)


def _inherited(companions: Iterable[Companion], earlier: Iterable[Companion]) -> tuple[Companion, ...]:
    """Side effects of ours that nobody touched since have the original that they had then."""
    left = {(companion.path, companion.after): companion.original for companion in earlier if companion.apart}
    return tuple(replace(c, original=left.get((c.path, c.original), c.original)) for c in companions)
