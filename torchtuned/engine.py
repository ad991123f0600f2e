"""Brings knobs to where the configuration wants them, and back: plan, apply, verify, undo."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from torchtuned.changes import Changes, refusal, row_of, tell, unrecorded
from torchtuned.config import Config
from torchtuned.deadline import Deadline, Hung
from torchtuned.errors import Failed, HostError, Missing, NoSuchKnob
from torchtuned.host import BOOT_ID, Host
from torchtuned.ledger import Ledger
from torchtuned.policy import DEGRADING, Outcome, Row, State, left_to
from torchtuned.survey import UNKNOWN, Case, Hanging, Survey, Wanted, matches
from torchtuned.tunables import Family, Held, find_knob
from torchtuned.tunables.block import BlockFamily
from torchtuned.tunables.cpu import CpuFamily
from torchtuned.tunables.gpu import GpuFamily
from torchtuned.tunables.latency import LatencyFamily
from torchtuned.tunables.memory import Memory
from torchtuned.tunables.owners import Owners
from torchtuned.tunables.sysctl import GLOB, SysctlFamily
from torchtuned.wording import nearest

NOT_WANTED = "given back: no longer in the policy"
UNDO_S = 100.0  # a person waits for it, and the command gives up after 120


def all_families() -> tuple[Family, ...]:
    return SysctlFamily(), CpuFamily(), Memory(), BlockFamily(), GpuFamily(), LatencyFamily()


class Engine:
    """Host policy on one machine. Thread-safe by one lock; calls block, so keep them off an event loop.

    One access to a knob blocks for at most `deadline_s` seconds, or the knob's own `patience` where that is more, and a
    kind of knob that hung is not tried again in the same call. `tuners` in the calls are the active units of
    `tunables.owners.UNITS`. `on_hold` and `on_release` tell of descriptors that stay open while a value is held (knob,
    descriptor), to be kept across a restart.
    """

    def __init__(
        self,
        host: Host,
        ledger: Ledger,
        *,
        families: Sequence[Family] | None = None,
        deadline_s: float = 5.0,
        clock: Callable[[], float] = time.time,
        on_hold: Callable[[str, int], None] | None = None,
        on_release: Callable[[str], None] | None = None,
    ) -> None:
        self.host, self.ledger = host, ledger
        self.families = {family.name: family for family in families or all_families()}
        self._deadline = Deadline(deadline_s)
        self._changes = Changes(host, ledger, self._deadline, self.families, clock)
        self._on_hold, self._on_release = on_hold, on_release
        self._lock = threading.Lock()
        self._held: dict[str, tuple[int, str]] = {}
        self._failures: dict[str, Row] = {}
        self._told: set[str] = set()
        self._undone: set[str] = set()  # by name, on purpose
        with contextlib.suppress(HostError):
            ledger.boot_id = ledger.boot_id or host.read(BOOT_ID)

    def plan(self, config: Config, *, jobs_active: bool = False, tuners: Iterable[str] = ()) -> list[Row]:
        """What `apply` would change now. `applied` means it would be written, `kept` that nothing would be done.

        Failed when the ledger cannot be read.
        """
        with self._lock:
            self.ledger.peek()
            survey = self._survey(config, jobs_active=jobs_active, tuners=tuners)
            wanted, absent = survey.wanted(config)
            rows = []
            for knob, wish in wanted:
                case = survey.judge(knob, wish)
                if case.verdict.targets:
                    reason = f"would become {case.verdict.targets[0]}"
                    rows.append(case.row(reason="; ".join(filter(None, (reason, case.verdict.reason)))))
                else:
                    rows.append(case.row(Outcome.KEPT if case.verdict.ours else None))
            ids = {knob.id for knob, _ in wanted}
            for entry in (entry for knob, entry in self.ledger.entries.items() if knob not in ids):
                owner = survey.owners.owner(entry.knob)
                if owner and owner.active:
                    rows.append(row_of(entry, entry.written, Outcome.FOREIGN, left_to(owner, entry)))
                else:
                    rows.append(row_of(entry, entry.written, Outcome.APPLIED, f"would be {NOT_WANTED}"))
            return [*rows, *absent]

    def verify(self, config: Config, *, jobs_active: bool, tuners: Iterable[str] = ()) -> list[Row]:
        """What is in force. `applied` means the value is ours, `drifted` that somebody changed it since, and `failed`
        that nobody else decided about it and still it is not as wanted.

        Failed when the ledger cannot be read.
        """
        with self._lock:
            self.ledger.peek()
            survey = self._survey(config, jobs_active=jobs_active, tuners=tuners)
            wanted, absent = survey.wanted(config)
            rows = []
            for knob, wish in wanted:
                case = survey.judge(knob, wish)
                self._tell_drift(case)
                if case.verdict.targets:
                    untried = replace(case.row(Outcome.FAILED, "not in force: apply sets it"), untried=True)
                    rows.append(self._failures.get(knob.id) or untried)
                else:
                    rows.append(case.row())
            return [*rows, *absent]

    def apply(
        self,
        config: Config,
        *,
        jobs_active: bool,
        only: Sequence[str] | None = None,
        tuners: Iterable[str] = (),
        reassert: bool = False,
    ) -> list[Row]:
        """Bring every knob to where the configuration wants it, and give back what it no longer wants.

        `only`: knobs, patterns or folders such as "cpu/policy3", for a device that has just come. `reassert`: the
        kernel, not a person, may have reset values (resume, hotplug), so write ours again. What somebody undid by name
        stays undone until all is applied. Nothing is raised for a knob: each has its row, also when the ledger cannot
        be used.
        """
        with self._lock, contextlib.ExitStack() as stack:
            fault: Failed | None = None
            try:
                stack.enter_context(self.ledger.locked())
            except Failed as failed:
                fault = failed
            survey = self._survey(config, jobs_active=jobs_active, tuners=tuners, reassert=reassert)
            wanted, absent = survey.wanted(config, only)
            if only is None:
                self._undone.clear()
            wanted = [(knob, wish) for knob, wish in wanted if knob.id not in self._undone]
            rows: dict[str, Row] = {}
            if not fault:
                rows = self._release(survey, wanted, only)
                survey.renew(self.ledger.entries, self._held_values())
            for _, group in groupby(wanted, key=lambda pair: pair[0].stage):
                cases = [survey.judge(knob, wish) for knob, wish in group]
                free = [case for case in cases if not _stuck(rows.get(case.knob.id))]
                rows |= {case.knob.id: case.row() for case in free}
                todo = [case for case in free if case.verdict.targets]
                if fault:
                    changed = [unrecorded(case, fault) for case in todo]
                else:
                    self._note(cases)
                    changed = self._hold([case for case in todo if isinstance(case.knob, Held)])
                    changed += self._changes.make([case for case in todo if not isinstance(case.knob, Held)], survey)
                rows |= {row.knob: row for row in changed}
                survey.pending.clear()  # what came of it shows in the knobs themselves
            for row in rows.values():
                self._failures.pop(row.knob, None)
                if row.outcome in DEGRADING:
                    self._failures[row.knob] = row
            return [*rows.values(), *absent]

    def undo(self, knobs: Sequence[str] = (), *, tuners: Iterable[str] = (), seconds: float = UNDO_S) -> list[Row]:
        """Give back what torchtuned has set: the knobs named (ids, also without their family, patterns, folders), or
        all.

        What another tuner has now stays, and in the ledger, too: once that has ended and given back what it found, the
        next undo can. All takes about `seconds` at the most: what hangs for too long is left to the next undo, and its
        row says so.
        Failed when the ledger cannot be had; NoSuchKnob for a name that means no knob, before anything is done.
        """
        with self._lock, self.ledger.locked(), self._deadline.within(seconds):
            knobs = [self._whole(name) for name in knobs]
            chosen = [knob for knob in self.ledger.entries if matches(knob, knobs or None)]
            held = [knob for knob in self._held if matches(knob, knobs or None)]
            untouched = [name for name in knobs if not any(matches(knob, [name]) for knob in (*chosen, *held))]
            rows = [row for name in untouched for row in self._not_ours(name)]
            rows += self._let_go(held)
            self._undone.update((*chosen, *held, *untouched) if knobs else ())
            left = self._left(chosen, Owners(self.host, tuners)) if chosen else []
            self._changes.hand_over({row.knob: row.reason for row in left})
            theirs = {row.knob for row in left}
            rows += [*left, *self._changes.give_back([knob for knob in chosen if knob not in theirs], Hanging())]
            for row in rows:
                self._failures.pop(row.knob, None)
                self._told.discard(row.knob)
            return rows

    def adopt(self, knob: str, fd: int) -> None:
        """Take over a descriptor that an earlier process held for a knob. The next `apply` renews or closes it."""
        with self._lock:
            self._held[knob] = (fd, "")

    def _survey(self, config: Config, *, jobs_active: bool, tuners: Iterable[str], reassert: bool = False) -> Survey:
        gpus = self.families.get("gpu")
        if isinstance(gpus, GpuFamily):
            gpus.watch = config.gpu.watch
        return Survey(
            host=self.host,
            deadline=self._deadline,
            families=self.families,
            entries=self.ledger.entries,
            held=self._held_values(),
            jobs_active=jobs_active,
            reassert=reassert,
            tuners=tuners,
        )

    def _held_values(self) -> dict[str, str]:
        return {knob: value for knob, (_, value) in self._held.items()}

    def _release(self, survey: Survey, wanted: Wanted, only: Sequence[str] | None) -> dict[str, Row]:
        """Give back what is wanted no longer, and forget what another tuner has now, or went away."""
        verdicts = {knob.id: survey.judge(knob, wish).verdict for knob, wish in wanted}
        self._changes.forget({knob: verdict.reason for knob, verdict in verdicts.items() if verdict.gone})
        idle = {knob for knob in (*self.ledger.entries, *self._held) if matches(knob, only)} - verdicts.keys()
        left = {row.knob: row.reason for row in self._left(idle, survey.owners)}
        left |= {knob: verdict.reason for knob, verdict in verdicts.items() if verdict.hand_over}
        self._changes.hand_over(left)
        idle -= left.keys()
        idle |= {knob for knob, verdict in verdicts.items() if verdict.release}
        rows = self._changes.give_back(idle, survey.hanging)
        rows += self._let_go([knob for knob in self._held if knob in idle])
        return {row.knob: row for row in rows}

    def _left(self, knobs: Iterable[str], owners: Owners) -> list[Row]:
        """The rows of those changed knobs that another tuner has now."""
        rows = []
        for entry in (self.ledger.entries[knob] for knob in knobs if knob in self.ledger.entries):
            owner = owners.owner(entry.knob)
            if owner and owner.active:
                row = row_of(entry, self._look(entry.knob), Outcome.FOREIGN, left_to(owner, entry))
                rows.append(replace(row, source=owner.source))
        return rows

    def _look(self, id: str) -> str:
        """The value of a knob that may have gone."""
        knob = find_knob(self.families, self.host, id)
        with contextlib.suppress(HostError, Hung):
            if knob:
                return self._deadline.run(id, partial(knob.read, self.host), knob.patience)
        return UNKNOWN

    def _note(self, cases: Sequence[Case]) -> None:
        """Record who turned out to have the last word on a knob, and say so the first time."""
        entries = dict(self.ledger.entries)
        for case in cases:
            entry = entries.get(case.knob.id)
            if entry:
                self._tell_drift(case)
                if case.verdict.outcome is Outcome.DRIFTED:
                    entries[entry.knob] = replace(entry, state=State.DRIFTED)
                elif case.verdict.ours:
                    entries[entry.knob] = replace(
                        entry, state=State.WRITTEN, when=case.wish.when, source=case.wish.source
                    )
        self._changes.settle(entries)

    def _tell_drift(self, case: Case) -> None:
        knob, entry = case.knob.id, self.ledger.entries.get(case.knob.id)
        if case.verdict.outcome is not Outcome.DRIFTED:
            self._told.discard(knob)
        elif entry and entry.state is not State.DRIFTED and knob not in self._told:
            self._told.add(knob)
            tell(knob, entry.written, case.current, case.verdict.reason, level=logging.WARNING)

    def _hold(self, cases: Iterable[Case]) -> list[Row]:
        rows = []
        for case in cases:
            knob, value = case.knob, case.verdict.targets[0]
            if not isinstance(knob, Held):
                continue
            try:
                fd = self._deadline.run(knob.id, partial(knob.hold, self.host, value))
            except (HostError, Hung) as error:
                rows.append(refusal(case, error))
                continue
            self._held[knob.id] = (fd, value)
            if self._on_hold:
                self._on_hold(knob.id, fd)
            try:
                now = self._deadline.run(knob.id, partial(knob.read, self.host))
            except (HostError, Hung):
                now = UNKNOWN
            tell(knob.id, case.current, now, case.wish.source)
            row = case.row(reason=f"held by torchtuned, at {value}; was {case.current}")
            rows.append(replace(row, current=now))
        return rows

    def _let_go(self, knobs: Iterable[str]) -> list[Row]:
        rows = []
        for knob in list(knobs):
            fd, value = self._held.pop(knob)
            if self._on_release:
                self._on_release(knob)
            os.close(fd)
            tell(knob, value, "", "let go")
            rows.append(Row(knob=knob, current="", wanted="", outcome=Outcome.APPLIED, reason="let go", source=""))
        return rows

    def _whole(self, name: str) -> str:
        """The id of a knob of which the family may have been left off (vm.swappiness); else the name as it is."""
        if name.partition("/")[0] in self.families:
            return name
        ids = [f"{family}/{name}" for family in self.families]
        knobs = [knob for id in ids if (knob := find_knob(self.families, self.host, id))]
        return next((knob.id for knob in knobs if knob.id in self.ledger.entries or self.host.exists(knob.path)), name)

    def _not_ours(self, name: str) -> Iterator[Row]:
        """The row of a knob that undo finds untouched."""
        if name.partition("/")[0] in self.families and (name in self.families or GLOB & set(name)):
            return  # all of a kind, and none of them touched
        knob = find_knob(self.families, self.host, name)
        if knob is None:
            near = nearest(name, self.ledger.entries)
            hint = f"did you mean {near}?" if near else "torchtuned plan lists those there are"
            raise NoSuchKnob(f"there is no knob {name!r}", hint=hint)
        try:
            current = self._deadline.run(knob.id, partial(knob.read, self.host), knob.patience)
        except Missing as missing:
            raise NoSuchKnob(f"there is no knob {name!r} here: {missing.what}") from None
        except (HostError, Hung):
            current = UNKNOWN
        reason = "not changed by torchtuned"
        yield Row(knob=knob.id, current=current, wanted=current, outcome=Outcome.KEPT, reason=reason, source="")


def _stuck(row: Row | None) -> bool:
    """Whether a knob could not be given back, which then matters more than what is wanted of it."""
    return row is not None and row.outcome in DEGRADING
