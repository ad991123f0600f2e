"""Host policy under test: a machine in memory, an engine on it, and rows by knob."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fakes.kernel import Kernel
from torchtuned.config import Config, load
from torchtuned.engine import Engine
from torchtuned.ledger import Ledger
from torchtuned.policy import Entry, Row


class Desk:
    """A kernel and an engine with its ledger; `restart` is what a new process would have."""

    def __init__(self, kernel: Kernel, folder: Path, **options: Any) -> None:
        self.kernel, self.path, self.options = kernel, folder / "ledger.json", options
        self.restart()

    def restart(self) -> None:
        ledger = WatchedLedger(self.path, self.kernel)
        self.engine = Engine(self.kernel, ledger, **{"deadline_s": 5.0, **self.options})

    def apply(self, text: str, *, jobs: bool = True, **options: Any) -> dict[str, Row]:
        return by_knob(self.engine.apply(config(text), jobs_active=jobs, **options))

    def plan(self, text: str, **options: Any) -> dict[str, Row]:
        return by_knob(self.engine.plan(config(text), **options))

    def verify(self, text: str, *, jobs: bool = True, **options: Any) -> dict[str, Row]:
        return by_knob(self.engine.verify(config(text), jobs_active=jobs, **options))

    def undo(self, *knobs: str) -> dict[str, Row]:
        return by_knob(self.engine.undo(knobs))

    def ledger(self) -> list[str]:
        """The knobs in the ledger on disk."""
        ledger = Ledger(self.path)
        ledger.peek()
        return [*ledger.entries]


class WatchedLedger(Ledger):
    """Calls the kernel's `step` before and after each write of the file, so that a test can fail it or kill there."""

    def __init__(self, path: Path, kernel: Kernel) -> None:
        super().__init__(path)
        self.kernel = kernel

    def save(self, entries: Mapping[str, Entry]) -> None:
        if dict(entries) == dict(self.entries) and not self._behind:
            return
        try:
            self.kernel.step("before", "ledger")
        except OSError as error:
            raise self._failed("cannot write the ledger", error) from error
        super().save(entries)
        self.kernel.step("after", "ledger")


def config(text: str) -> Config:
    return load([("/etc/test.conf", text)])


def by_knob(rows: Iterable[Row]) -> dict[str, Row]:
    rows = list(rows)
    found = {row.knob: row for row in rows}
    assert len(found) == len(rows), "two rows for one knob"
    return found
