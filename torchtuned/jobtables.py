"""Files that list jobs, as those read them who did not write them: where they lie, and what of them counts.

A user's own (run/table.py writes it): the jobs that placed themselves. The daemon's (jobs.py writes it): whatever
it has placed, for all to read, so that jobs which find no daemon, or one that does not answer, keep clear of those.
{"schema": 1, "jobs": [{"pid", "start", "uid", "grant", ...}, ...]}; pid and start time name a process for good, so
nobody needs to take a job that has ended out of it.

This is imported before every job that places itself: nothing that costs.
"""

from __future__ import annotations

import json
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

SCHEMA = 1
LOCKS, PREFIX = "/run/lock", "torchtuned-"  # and the user's number: the folder of a user's own table
TABLE = "jobs.json"
PLACED_FOLDER, PLACED = "/run/torchtuned", "placed.json"
MAX_BYTES = 1 << 20


def folder_path(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> str:
    """Where the table of a user is."""
    uid = os.getuid() if uid is None else uid
    named, usual = environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{uid}"
    if named.startswith("/") and named != usual and _is_own_folder(named, uid):
        return f"{named}/torchtuned"
    if _is_free(LOCKS, f"{PREFIX}{uid}", uid):
        return f"{LOCKS}/{PREFIX}{uid}"
    return f"{usual}/torchtuned" if _is_own_folder(usual, uid) else f"/tmp/{PREFIX}{uid}"


def _is_free(folder: str, name: str, uid: int) -> bool:
    """Whether a user may have that name in a folder of root's where everybody makes files and nobody takes others'."""
    try:
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid or found.st_mode & 0o1777 != 0o1777:
            return False
        return os.lstat(f"{folder}/{name}").st_uid == uid
    except FileNotFoundError as error:
        return bool(error.filename != folder)
    except OSError:
        return False


def _is_own_folder(path: str, uid: int) -> bool:
    """Under sudo XDG_RUNTIME_DIR may be that of another user, whom we do not trust with our names."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o022


def open_folder(path: str) -> int:
    """A descriptor for read_table(). OSError, also for a link.

    O_PATH: a folder may let others pass and not list it, and root without CAP_DAC_READ_SEARCH is one of them.
    """
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def read_table(folder: int, uid: int) -> list[dict[str, Any]]:
    """The entries of the table that nobody but this user can have written; none where there is no such table."""
    try:
        made = os.fstat(folder)
        if made.st_uid != uid or made.st_mode & 0o022:
            return []
        fd = os.open(TABLE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return []
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != uid:
            return []
        return entries(file.read(MAX_BYTES + 1))


def entries(text: bytes) -> list[dict[str, Any]]:
    """Those of a table's text. It is certain that they are JSON objects, and nothing else."""
    if len(text) > MAX_BYTES:
        return []
    try:
        document = json.loads(text)
        jobs = document["jobs"] if document["schema"] == SCHEMA else []
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    return [job for job in jobs if isinstance(job, dict)] if isinstance(jobs, list) else []
