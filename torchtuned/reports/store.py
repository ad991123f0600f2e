"""The reports of the last jobs, one file each under /var/lib/torchtuned/reports.

A file's name says whose it is (START-JOB-UID.json), so whether somebody may read one is decided without opening it.
All are root's and 0600: the daemon may not give files away (it has no CAP_CHOWN), and gives users their own over D-Bus.
Job numbers begin anew with each boot, so a report's own name is JOB-START.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtuned.files import replace_file

FOLDER = "reports"
KEEP = 200
NAME = re.compile(r"(\d{1,20})-(\d{1,20})-(\d{1,10})\.json")
UNFIT = (TypeError, ValueError, KeyError, AttributeError, OverflowError)  # of one that was torn or edited
MAX_SIZE = 1 << 20  # bytes; a report has a few thousand

log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class Name:
    """Which report: when the job started (microseconds after 1970), its number, its user."""

    started: int
    job: int
    uid: int

    @property
    def file(self) -> str:
        return f"{self.started:016d}-{self.job}-{self.uid}.json"

    @property
    def report(self) -> str:
        return f"{self.job}-{self.started // 1_000_000}"


class Store:
    """Blocking: called off the loop. Never fails: a report that cannot be written is logged and lost."""

    def __init__(self, folder: Path, keep: int = KEEP) -> None:
        self.folder, self._keep = folder, keep

    def names(self) -> list[Name]:
        """All reports, the oldest first."""
        try:
            found = [NAME.fullmatch(name) for name in os.listdir(self.folder)]
        except OSError:
            return []
        return sorted(Name(*map(int, match.groups())) for match in found if match)

    def read(self, name: Name) -> dict[str, Any] | None:
        """One report; None when it is gone, or nothing that can be read."""
        try:
            with (self.folder / name.file).open(encoding="utf-8") as file:
                document = json.loads(file.read(MAX_SIZE))
        except (OSError, ValueError, RecursionError):
            return None
        return document if isinstance(document, dict) else None

    def write(self, name: Name, document: dict[str, Any]) -> None:
        """Put one in place whole, or leave what was there."""
        path = self.folder / name.file
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, json.dumps(document, separators=(",", ":")), mode=0o600, sync=True)
        except OSError as e:
            log.warning("%s: the report cannot be written: %s", path, e.strerror)

    def prune(self, running: set[Name]) -> None:
        """Keep to the number: who has most loses the oldest, so that nobody's many short jobs cost another a report.
        Those of jobs that run stay.
        """
        of: dict[int, deque[Name]] = {}
        for name in self.names():
            if name not in running:
                of.setdefault(name.uid, deque()).append(name)
        for _ in range(sum(map(len, of.values())) - self._keep):
            oldest = max(of.values(), key=lambda names: (len(names), -names[0].started)).popleft()
            with contextlib.suppress(OSError):
                (self.folder / oldest.file).unlink()


def find(names: list[Name], asked: str) -> Name | None:
    """The report of a job, the newest of that number, or the one named JOB-START."""
    return next((name for name in reversed(names) if asked in (str(name.job), name.report)), None)
