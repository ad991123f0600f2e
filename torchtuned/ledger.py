"""The write-ahead record of original values, in /run: what undo works from, whatever killed the daemon.

An entry is on disk before its knob is touched and leaves the disk after its knob has been given back.
/run is empty after a reboot, as the kernel's values are; the boot id covers a ledger kept elsewhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torchtuned.errors import Failed
from torchtuned.files import replace_file, way_out
from torchtuned.policy import Companion, Entry, State

VERSION = 1
PATIENCE_S = 10.0
ASK_AGAIN_S = 0.02
NO_TEXT = re.compile("[\0\ud800-\udfff]")  # what JSON can hold, and neither a path nor the bus


class Ledger:
    """The file of entries, in the order in which the knobs were first changed.

    Use it inside `locked()`, which keeps out every other process and re-reads what one may have changed, and waits for
    it for at most `patience_s` seconds.
    """

    def __init__(self, path: str | os.PathLike[str], *, boot_id: str = "", patience_s: float = PATIENCE_S) -> None:
        self.path = Path(path)
        self.lock = self.path.with_suffix(".lock")
        self.boot_id = boot_id
        self._patience_s = patience_s
        self._entries: dict[str, Entry] = {}
        self._seen: tuple[int, int, int] | None = None
        self._behind = False

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self._entries

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the ledger for one operation. Failed when it cannot be had or cannot be read.

        The lock is on a file that only root can open: who may open a file may lock it, for ever. It is empty and stays
        once it is made, before the first change, so that a full /run does not keep anybody from undoing.
        """
        try:
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            lock = os.open(self.lock, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._failed("cannot use the lock of the ledger", error, self.lock) from error
        try:
            self._wait_for(lock)
            self._load()
            yield
        finally:
            os.close(lock)

    def _wait_for(self, lock: int) -> None:
        until = time.monotonic() + self._patience_s
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise Failed(
                        f"another process has been changing knobs for {self._patience_s:g} s, and holds this file",
                        where=str(self.lock),
                        hint=f"lslocks | grep {self.lock.name} names it; try again when it has ended",
                    ) from None
            except OSError as error:
                raise self._failed("cannot lock the ledger", error, self.lock) from error
            time.sleep(ASK_AGAIN_S)

    def peek(self) -> None:
        """Read the entries without the lock, to look only. Who may not read the file sees none."""
        try:
            self._load()
        except Failed as failed:
            if not isinstance(failed.__cause__, PermissionError):
                raise

    def save(self, entries: Mapping[str, Entry]) -> None:
        """Replace all entries, on disk first. On Failed nothing has changed, in memory or on disk."""
        if dict(entries) == self._entries and not self._behind:
            return
        try:
            if entries:
                self._write(entries)
            else:
                self.path.unlink(missing_ok=True)  # works on a full disk, too
        except OSError as error:
            raise self._failed("cannot write the ledger", error) from error
        self._seen = self._stamp()
        self._entries, self._behind = dict(entries), False

    def remember(self, entries: Mapping[str, Entry]) -> None:
        """Replace all entries in memory, when the disk would not take what has been done already. The next save
        takes them along; a process that starts before that has to make out from the machine what was done.
        """
        self._entries, self._behind = dict(entries), True

    def _write(self, entries: Mapping[str, Entry]) -> None:
        document = {"version": VERSION, "boot_id": self.boot_id, "entries": [asdict(e) for e in entries.values()]}
        replace_file(self.path, json.dumps(document, indent=1), mode=0o600, sync=True)

    def _load(self) -> None:
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._behind = False
        if stamp is None:
            self._entries, self._seen = {}, None
            return
        try:
            entries = _decode(json.loads(self.path.read_text(encoding="utf-8")), self.boot_id)
        except OSError as error:
            raise self._failed("cannot read the ledger", error) from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise Failed(
                f"the ledger cannot be read ({error}), so the original values are not known",
                where=str(self.path),
                hint="nothing is changed until you remove that file; what the machine has then counts as original",
            ) from error
        self._entries, self._seen = entries, stamp

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed("cannot read the ledger", error) from error
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _failed(self, what: str, error: OSError, where: Path | None = None) -> Failed:
        hint = way_out(error, self.path.parent)
        return Failed(f"{what}: {error.strerror or error}", where=str(where or self.path), hint=hint)


def _decode(document: Any, boot_id: str) -> dict[str, Entry]:
    if document["version"] != VERSION:
        raise ValueError(f"version {document['version']}, this torchtuned knows {VERSION}")
    if boot_id and document["boot_id"] and document["boot_id"] != boot_id:
        return {}  # another boot's values went with it
    entries = {}
    for fields in document["entries"]:
        companions = tuple(Companion(**companion) for companion in fields["companions"])
        entry = replace(Entry(**fields), companions=companions, state=State(fields["state"]))
        texts = [entry.knob, entry.original, entry.written, entry.asked, entry.when, entry.source]
        texts += [text for one in companions for text in (one.path, one.original)]
        maybe = (entry.previous, *(text for one in companions for text in (one.after, one.saved)))
        texts += [text for text in maybe if text is not None]
        if not all(isinstance(text, str) and not NO_TEXT.search(text) for text in texts):
            raise ValueError(f"entry of {entry.knob!r} is not text")
        if not (type(entry.since) in (int, float) and 0 <= entry.since < 2**40 and type(entry.refused) is int):
            raise ValueError(f"entry of {entry.knob!r} has odd numbers")
        entries[entry.knob] = entry
    return entries
