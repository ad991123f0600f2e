"""Which process a descriptor means, and what the processes of a job really have.

A PID is only a name, and names are given again. A pidfd is the process itself: while it is open and unreadable the
PID cannot have passed to another, so facts read from /proc in between are that process's. A restarted daemon has lost
its pidfds; there the start time tells whether the PID still means the same process.
"""

from __future__ import annotations

import os
import select
from collections.abc import Mapping
from dataclasses import dataclass

from torchtuned.cpuset import CpuSet, parse_list
from torchtuned.errors import InvalidRequest
from torchtuned.host import stat_fields

DEEPEST = 256  # ancestors that are looked at
PIDFD_LINK = "anon_inode:[pidfd]"


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process: `start` is field 22 of /proc/PID/stat, in clock ticks after boot."""

    pid: int
    start: int
    uid: int


def identify(pidfd: int) -> Process:
    """The live process that a pidfd from a stranger stands for. InvalidRequest says what is wrong with it.

    All four of its user ids must be the same: a program that is half root is nobody's to register.
    """
    try:
        link = os.readlink(f"/proc/self/fd/{pidfd}")
    except OSError as e:
        raise InvalidRequest(f"the file descriptor cannot be looked at: {e.strerror}") from None
    if link != PIDFD_LINK:
        raise InvalidRequest("the file descriptor is not a pidfd", hint="make one with pidfd_open(2)")
    pid = int(_fields(f"/proc/self/fdinfo/{pidfd}").get("Pid", "-1"))
    if pid <= 0 or ended(pidfd):
        raise InvalidRequest("the process has ended, or is not visible from here")
    try:
        status = _fields(f"/proc/{pid}/status")
        start = start_time(pid)
    except OSError:
        raise InvalidRequest("the process has ended") from None
    if ended(pidfd):
        raise InvalidRequest("the process has ended")
    if int(status["Tgid"]) != pid:
        raise InvalidRequest("the pidfd is of a thread", hint="register the process")
    uids = {int(uid) for uid in status["Uid"].split()}
    if len(uids) != 1:
        raise InvalidRequest(f"process {pid} changes its user (user ids {status['Uid']})")
    return Process(pid=pid, start=start, uid=uids.pop())


def reopen(process: Process) -> int | None:
    """A new pidfd of a process known from before, or None when it has ended. The caller closes it."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return None
    try:
        same = start_time(process.pid) == process.start and not ended(pidfd)
    except OSError:
        same = False
    if not same:
        os.close(pidfd)
        return None
    return pidfd


def ended(pidfd: int) -> bool:
    """Whether the process has exited; a zombie has."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def in_container(pid: int) -> bool:
    """Whether the process is in a PID namespace below ours. False for one that has ended."""
    try:
        return len(_fields(f"/proc/{pid}/status").get("NSpid", "").split()) > 1
    except OSError:
        return False


def lives(process: Process) -> bool:
    """Whether the PID means that very process still, if perhaps as a zombie."""
    try:
        return start_time(process.pid) == process.start
    except OSError:
        return False


def start_time(pid: int) -> int:
    """Clock ticks after boot at which the process started. OSError when there is none."""
    return int(stat(pid)[19])


def stat(pid: int) -> list[str]:
    """What host.stat_fields() has of the process. OSError when there is none."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return stat_fields(file.read())


def family(pid: int) -> list[int]:
    """The process and all that descend from it now, itself first; nothing when it has ended."""
    import psutil  # type: ignore[import-untyped]  # it prints a traceback when it is loaded without /proc

    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.Error:
        return []


def ancestors(pid: int) -> list[int]:
    """The parent of a process, its parent, and so on; at most DEEPEST, for anybody may be the last of thousands."""
    import psutil

    found: list[int] = []
    try:
        process = psutil.Process(pid)
        while len(found) < DEEPEST and (process := process.parent()) is not None:
            found.append(process.pid)
    except psutil.Error:
        pass
    return found


def mask(pid: int) -> CpuSet:
    """What the kernel lets the first thread of a process run on; nothing when it has ended."""
    try:
        return parse_list(_fields(f"/proc/{pid}/status")["Cpus_allowed_list"])
    except OSError:
        return frozenset()


def masks(pid: int) -> Mapping[int, CpuSet]:
    """What the kernel lets each thread of a process run on (Cpus_allowed_list), by thread id."""
    found: dict[int, CpuSet] = {}
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            found[int(thread)] = parse_list(_fields(f"/proc/{pid}/task/{thread}/status")["Cpus_allowed_list"])
        except OSError:
            continue  # it ended meanwhile
    return found


def _fields(path: str) -> dict[str, str]:
    with open(path, encoding="utf-8", errors="replace") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
