"""Jobs that placed themselves while no daemon ran (run/selfplace.py), to be adopted by one that comes, or just shown.

Their tables lie in /run/lock/torchtuned-UID, which any user may make there with or without a daemon, and which this
daemon can read: /tmp and /run/user are hidden from it, and it may not read what only its owner may. So each table is
what a stranger says. It counts for the user's own processes only, which the kernel must know by their start time, and
for no CPU that such a process may not run on, nor a GPU that somebody else has: that is what the user could have had
from Register as well. All that is taken are numbers, checked; no text of it is shown. Nobody's table takes more time
than USER_S.

A table elsewhere (a private XDG_RUNTIME_DIR, a container, a system without /run/lock) is found by nobody but its user,
and its jobs stay by themselves.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtuned import processes
from torchtuned.cpuset import parse_list
from torchtuned.errors import InvalidRequest, TorchtunedError
from torchtuned.host import Host
from torchtuned.jobs import Job, State
from torchtuned.jobtables import LOCKS, PREFIX, folder_path, open_folder, read_table
from torchtuned.placement import Grant, Rank, Request, grant_from_json
from torchtuned.processes import Process
from torchtuned.topology import Topology

MAX_RANKS = 64  # of a job, as far as they are taken over
USER_S = 0.25  # and one entry more
ALL_S = 0.5  # who registers waits for it, and gives up after 2 s
NOTE = "it placed itself while torchtunedd did not answer"

log = logging.getLogger(__name__)


class Tables:
    """The tables below a host's /run/lock, which are read again when they have changed. `cost_s` is the CPU time that
    the last read() took.
    """

    def __init__(self, host: Host) -> None:
        self._host, self.cost_s = host, 0.0
        self._folder = host.root / LOCKS.lstrip("/")
        self._seen: dict[int, int] = {}  # by user, last read last: when the folder of the table was changed

    def changed(self) -> list[int]:
        """The users whose table is new or another than when it was read, those who had to wait longest first. A table
        is replaced, never written to, so its folder tells.
        """
        found = []
        for name in self._host.list(LOCKS):
            try:
                made = os.lstat(self._folder / name)
            except OSError:
                continue
            uid = made.st_uid
            if name == f"{PREFIX}{uid}" and self._seen.get(uid) != made.st_mtime_ns:
                found.append(uid)
        read = {uid: turn for turn, uid in enumerate(self._seen)}
        return sorted(found, key=lambda uid: read.get(uid, -1))

    def read(self, machine: Topology) -> list[Job]:
        """What can be believed of those that have changed, as running jobs without an id, the oldest process first.

        What is left when ALL_S is over is for the next time.
        """
        found: dict[Process, Job] = {}
        begun, until = time.thread_time(), time.monotonic() + ALL_S
        for uid in self.changed():
            if time.monotonic() > until:
                log.warning("the tables in %s take too long", LOCKS)
                break
            for job in self._of_user(uid, self._folder / f"{PREFIX}{uid}", machine):
                found[job.process] = job
        self.cost_s = time.thread_time() - begun
        return _oldest_first(found)

    def seen_by(self, uid: int, machine: Topology) -> list[Job]:
        """What can be believed, for a user who looks without a daemon: the user's own jobs, and for root everybody's.

        The user's own table may lie elsewhere, too, where a daemon would not find it.
        """
        found = {job.process: job for job in self.read(machine)} if uid == 0 else {}
        found |= {job.process: job for job in self._of_user(uid, Path(folder_path(uid=uid)), machine)}
        return _oldest_first(found)

    def forget(self, uid: int) -> None:
        """Read a user's table the next time, changed or not."""
        self._seen.pop(uid, None)

    def _of_user(self, uid: int, path: Path, machine: Topology) -> list[Job]:
        try:
            folder = open_folder(str(path))
        except OSError:
            return []
        try:
            self.forget(uid)
            self._seen[uid] = os.fstat(folder).st_mtime_ns  # before it is read: what comes after is another time
            entries = read_table(folder, uid)
        finally:
            os.close(folder)
        jobs = []
        until = time.monotonic() + USER_S
        for entry in entries:
            if time.monotonic() > until:
                log.warning("the rest of the table in %s takes too long to read", path)
                break
            job = _believed(entry, uid, machine)
            if job is not None:
                jobs.append(job)
        return jobs


def _oldest_first(jobs: Mapping[Process, Job]) -> list[Job]:
    return sorted(jobs.values(), key=lambda job: job.process.start)


def _believed(entry: dict[str, Any], uid: int, machine: Topology) -> Job | None:
    pid, start, since = (entry.get(key) for key in ("pid", "start", "since"))
    if type(pid) is not int or type(start) is not int or not 0 < pid < 2**31:
        return None
    process = Process(pid=pid, start=start, uid=uid)
    pidfd = processes.reopen(process)
    if pidfd is None:
        return None
    try:
        listed = entry.get("grant")
        ranks = listed.get("ranks", []) if isinstance(listed, dict) else []
        claimed = grant_from_json({**listed, "ranks": []} if isinstance(listed, dict) else listed)
        if processes.identify(pidfd) != process:
            return None
        mask = processes.mask(pid)
        grant = replace(_within(claimed, mask & machine.online, machine), ranks=_ranks(ranks, claimed.cpus & mask))
    except TorchtunedError:
        return None
    finally:
        os.close(pidfd)
    now = time.time_ns() // 1000
    return Job(
        id="",
        process=process,
        request=Request(),
        since=since if type(since) is int and 0 < since <= now else now,
        state=State.RUNNING,
        grant=grant,
        confinement="affinity" if grant.bound and mask <= grant.cpus else "none",
        warnings=(NOTE,),
    )


def _ranks(listed: object, within: frozenset[int]) -> tuple[Rank, ...]:
    """The CPUs of ranks, read one by one: in a stranger's table each may list 65,536. InvalidRequest."""
    if not isinstance(listed, list):
        raise InvalidRequest("ranks: not a list")
    ranks: list[Rank] = []
    for rank in listed[:MAX_RANKS]:
        try:
            cpus = parse_list(rank["cpus"])
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InvalidRequest("ranks: not a CPU list") from None
        if cpus and cpus <= within:
            ranks.append(Rank(rank=len(ranks), cpus=cpus))
    return tuple(ranks)


def _within(claimed: Grant, mask: frozenset[int], machine: Topology) -> Grant:
    """As much of a grant, but for its ranks, as the process can really use."""
    cpus = claimed.cpus & mask
    return Grant(
        cpus=cpus or mask,
        memory_nodes=claimed.memory_nodes & {node.id for node in machine.nodes},
        gpus=tuple(gpu.address for gpu in machine.gpus if gpu.address in claimed.gpus),
        shared=claimed.shared,
        threads=max(1, min(claimed.threads, len(cpus))),
        bound=claimed.bound and bool(cpus),
    )
