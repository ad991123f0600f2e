"""The journal, as far as it tells how jobs end: what PID 1, systemd-oomd and the kernel say, and nobody else.

Anybody may write an entry with any MESSAGE_ID and UNIT, so only what journald itself attests (the fields with a leading
underscore) says who spoke. A machine that is a folder has its journal in a file, as `journalctl -o json` writes it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from systemd import journal  # type: ignore[attr-defined]
from torchtuned.errors import Unreadable
from torchtuned.host import Host

FILE = "/var/log/journal.json"
OOMD_KILL = "d989611b15e44c9dbf31e3c81256e4ed"  # PID 1: systemd-oomd killed processes of UNIT
RESOURCES = "ae8f7b866b0347b9af31fe1c80b127c0"  # PID 1, when UNIT has ended: CPU_USAGE_NSEC, MEMORY_PEAK
OOMD = "systemd-oomd.service"
MOST = 20_000  # entries looked at, from the end


@dataclass(frozen=True, kw_only=True)
class Entry:
    """`by`: "pid1", "oomd" or "kernel". `time` in microseconds after 1970; numbers in `fields` are texts."""

    time: int
    by: str
    message: str
    kind: str = ""
    unit: str = ""
    fields: Mapping[str, str]


def read(host: Host, since: int) -> list[Entry]:
    """Their entries since a time, oldest first. Missing or Unreadable when there is no journal to read."""
    entries = _of_machine(since) if host.real else _of_folder(host, since)
    return [entry for raw in entries if (entry := _entry(raw)) is not None]


def _of_machine(since: int) -> Iterable[Mapping[str, Any]]:
    try:
        with journal.Reader() as reader:
            reader.add_match(_PID="1")
            for kind in (OOMD_KILL, RESOURCES):
                reader.add_match(MESSAGE_ID=kind)
            reader.add_disjunction()
            reader.add_match(_SYSTEMD_UNIT=OOMD)
            reader.add_disjunction()
            reader.add_match(_TRANSPORT="kernel")
            reader.seek_tail()
            return tail(reader.get_previous, since)
    except OSError as e:
        raise Unreadable(str(e.strerror or e).lower(), where="journal", errno=e.errno or 0) from None


def _of_folder(host: Host, since: int) -> Iterable[Mapping[str, Any]]:
    try:
        lines = [json.loads(line) for line in host.read(FILE).splitlines() if line]
    except ValueError as e:
        raise Unreadable(f"not JSON lines: {e}", where=FILE) from None
    return tail(lambda: lines.pop() if lines else {}, since)


def tail(previous: Callable[[], Mapping[str, Any]], since: int) -> list[Mapping[str, Any]]:
    """The last entries since a time, oldest first, of a journal that is read from its end (`previous` gives {} when
    there is no more). The end is where an end is explained: of a flood the beginning is what is left out.
    """
    found: list[Mapping[str, Any]] = []
    while len(found) < MOST and (raw := previous()) and _time(raw) >= since:
        found.append(raw)
    return found[::-1]


def _entry(raw: Mapping[str, Any]) -> Entry | None:
    """An entry of one of the three, from what the journal library or journalctl made of it."""
    fields = {name: _text(value) for name, value in raw.items()}
    if fields.get("_TRANSPORT") == "kernel":
        by = "kernel"
    elif fields.get("_PID") == "1":
        by = "pid1"
    elif fields.get("_SYSTEMD_UNIT") == OOMD:
        by = "oomd"
    else:
        return None
    return Entry(
        time=_time(raw),
        by=by,
        message=fields.get("MESSAGE", ""),
        kind=fields.get("MESSAGE_ID", ""),
        unit=fields.get("UNIT", ""),
        fields=fields,
    )


def _time(raw: Mapping[str, Any]) -> int:
    return int(_text(raw.get("__REALTIME_TIMESTAMP", "0")))


def _text(value: object) -> str:
    if isinstance(value, datetime):
        return str(round(value.timestamp() * 1e6))
    if isinstance(value, uuid.UUID):
        return value.hex
    return value if isinstance(value, str) else str(value)
