"""A walk through a data set: how many files, how large. It takes seconds, so Machine keeps what it found."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

LOOK_S, MOST_FILES = 3.0, 50_000


@dataclass(frozen=True, kw_only=True)
class Files:
    """A look at the files: all of them when `whole`, else the first ones. `sizes` in bytes, sorted."""

    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    whole: bool

    @property
    def median(self) -> int:
        return self.sizes[len(self.sizes) // 2] if self.sizes else 0


def walk(root: str) -> Files:
    """A file, or those of a folder, for at most LOOK_S seconds and MOST_FILES files. A folder that cannot be read is
    passed over, and what was found is not the whole."""
    if os.path.isfile(root):
        return Files(paths=(root,), sizes=(os.path.getsize(root),), whole=True)
    found: list[tuple[int, str]] = []
    unread: list[str] = []
    until, whole = time.monotonic() + LOOK_S, True
    for entry in _entries(root, unread):
        with suppress(OSError):  # it is gone
            if entry.is_file():
                found.append((entry.stat().st_size, entry.path))
        if len(found) >= MOST_FILES or time.monotonic() > until:
            whole = False
            break
    return Files(
        paths=tuple(name for _, name in found),
        sizes=tuple(sorted(number for number, _ in found)),
        whole=whole and not unread,
    )


def _entries(root: str, unread: list[str]) -> Iterator[os.DirEntry[str]]:
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    yield entry
        except OSError:
            unread.append(folder)
