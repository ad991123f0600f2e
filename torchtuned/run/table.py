"""The table of a user's own jobs, as a job that places itself (selfplace.py) keeps it, and which entries still count.

It is written in a folder that only the user can write, under a lock, each job as process id and start time, so that
one that has ended needs nobody to say so.

The table is `jobs.json` in /run/lock/torchtuned-UID, where a daemon that comes later finds it and adopts the jobs
(selfplaced.py): a folder that every Debian system has with or without a daemon, and one that the daemon, which may
not read what is private to a user, can read. So others can read it, too, and it holds no command. Where there is no
such folder, or somebody else has taken that name in it, it is /run/user/UID/torchtuned, else /tmp/torchtuned-UID. A
folder of the user that XDG_RUNTIME_DIR names goes before all of these, unless it is the usual one. There jobs are
kept apart, and not adopted.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from contextlib import contextmanager
from dataclasses import replace

from torchtuned.errors import Failed, HostError, TorchtunedError
from torchtuned.files import replace_file
from torchtuned.host import Host, stat_fields
from torchtuned.jobtables import (
    LOCKS,
    MAX_BYTES,
    PLACED,
    PLACED_FOLDER,
    SCHEMA,
    TABLE,
    entries,
    folder_path,
    read_table,
)
from torchtuned.placement import Grant, grant_from_json, grant_to_json

TYPE_CHECKING = False  # `typing` would be imported before every job that places itself
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

LOCK = "lock"
LOCK_S = 5.0


class Table:
    """The table while its lock is held; without a folder (-1) it is empty and writes go nowhere."""

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self._mode = 0o644 if folder >= 0 and os.fstat(folder).st_mode & 0o001 else 0o600

    def live(self, host: Host, pid: int) -> list[dict[str, Any]]:
        """The entries of processes that are still there, without any older one of `pid`."""
        jobs = read_table(self._folder, os.getuid()) if self._folder >= 0 else []
        return [job for job in jobs if _plausible(job) and job["pid"] != pid and _lives(host, job)]

    def write(self, jobs: list[dict[str, Any]], warnings: list[str]) -> None:
        """Replace the table. A full disk costs a warning, not the job."""
        if self._folder < 0:
            return
        text = json.dumps({"schema": SCHEMA, "jobs": jobs})
        try:
            if len(text) > MAX_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            replace_file(TABLE, text, mode=self._mode, sync=False, folder=self._folder)
        except OSError as error:
            where = f"{folder_path()}/{TABLE}"
            warnings.append(f"{where} cannot be written ({error.strerror}), so your next jobs may get these CPUs too")


@contextmanager
def locked(warnings: list[str]) -> Iterator[Table]:
    """The locked table. Where there can be none, jobs are still placed, with a warning that they are not kept apart."""
    folder = lock = -1
    umask = os.umask(0o022)  # one that takes all would lock this user out of what is made here for good
    try:
        try:
            folder = _open_folder()
            lock = _take_lock(folder)
            os.close(os.dup(lock))  # the rest takes one more
        except (OSError, Failed) as error:
            text = str(error) if isinstance(error, Failed) else _why(error)
            warnings.append(f"your other jobs are not known ({text}), so their CPUs may be these")
            for fd in (lock, folder):
                if fd >= 0:
                    os.close(fd)
            folder = lock = -1
        yield Table(folder)
    finally:
        os.umask(umask)
        for fd in (lock, folder):
            if fd >= 0:
                os.close(fd)


def entry(host: Host, pid: int, wishes: Mapping[str, Any], grant: Grant, *, bound: bool) -> dict[str, Any]:
    """A job for the table, without its command."""
    return {
        "pid": pid,
        "start": stat_of(host, pid)[1],
        "uid": os.getuid(),
        "since": int(time.time() * 1e6),
        "request": {**wishes, "command": []},
        "grant": grant_to_json(replace(grant, warnings=(), reasons=())),
        "confinement": "affinity" if bound else "none",
    }


def placed(host: Host, pid: int) -> list[dict[str, Any]]:
    """What a daemon has placed and said so, as far as it still runs. A job that has lost its first process is not
    seen any more: only PID 1 and the daemon know of the rest.
    """
    try:
        made = host.stat(PLACED_FOLDER)
        text = host.read_bytes(f"{PLACED_FOLDER}/{PLACED}")
    except HostError:
        return []
    if made.st_uid or made.st_mode & 0o022:
        return []
    return [job for job in entries(text) if _plausible(job) and job["pid"] != pid and _lives(host, job)]


def stat_of(host: Host, pid: int) -> tuple[int, int, str]:
    """(parent, start time in clock ticks after boot, state) of a process. Missing, Unreadable."""
    fields = stat_fields(host.read(f"/proc/{pid}/stat"))
    return int(fields[1]), int(fields[19]), fields[0]


def _plausible(job: Any) -> bool:
    try:
        grant_from_json(job["grant"])
    except (TorchtunedError, TypeError, KeyError):
        return False
    return all(type(job.get(key)) is int for key in ("pid", "start"))


def _lives(host: Host, job: Mapping[str, Any]) -> bool:
    try:
        _, start, state = stat_of(host, job["pid"])
    except (HostError, ValueError, IndexError):
        return False
    return start == job["start"] and state not in "ZX"


def _why(error: OSError) -> str:
    where = folder_path() if error.filename in (None, LOCK) else error.filename
    way = f" (chmod -R u+rwX {folder_path()})" if error.errno == errno.EACCES else ""
    return f"{where}: {str(error.strerror).lower()}{way}"


def _open_folder() -> int:
    """A descriptor of the folder, which must be a real one, this user's, and writable for nobody else."""
    path = folder_path()
    mode = 0o711 if path.startswith(f"{LOCKS}/") else 0o700
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        pass
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise Failed("not a folder, or a link", where=path) from None
        raise
    found = os.fstat(fd)
    if found.st_uid != os.getuid() or found.st_mode & 0o077 & ~mode:
        os.close(fd)
        what = f"owned by user {found.st_uid}" if found.st_uid != os.getuid() else "open to other users"
        raise Failed(what, where=path, hint=f"remove it, or chmod it to {mode:o}")
    if found.st_mode & 0o777 != mode:  # nobody else may pass through: then no daemon can read the table
        os.fchmod(fd, mode)
    return fd


def _take_lock(folder: int) -> int:
    fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(fd)
                raise Failed(f"locked for more than {LOCK_S:.0f} s", where=f"{folder_path()}/{LOCK}") from None
            time.sleep(0.005)
        except OSError:
            os.close(fd)
            raise
