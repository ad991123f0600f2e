"""Jobs that placed themselves while no daemon ran (run/selfplace.py), to be adopted by one that comes.

Their tables lie in /run/lock/torchtuned-UID, which any user may make there with or without a daemon, and which this
daemon can read: /tmp and /run/user are hidden from it, and it may not read what only its owner may. So each table is
what a stranger says. It counts for the user's own processes only, which the kernel must know by their start time, and
for no CPU that such a process may not run on, nor a GPU that somebody else has: that is what the user could have had
from Register as well. All that is taken are numbers, checked; no text of it is shown.

A table elsewhere (a private XDG_RUNTIME_DIR, a container, a system without /run/lock) is not found, and its jobs stay
by themselves.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtuned import processes
from torchtuned.errors import TorchtunedError
from torchtuned.host import Host
from torchtuned.jobs import Job, State
from torchtuned.placement import Grant, Rank, Request, grant_from_json
from torchtuned.processes import Process
from torchtuned.topology import Topology

FOLDER, PREFIX, TABLE = "/run/lock", "torchtuned-", "jobs.json"
MAX_TABLE = 1 << 20  # bytes
MAX_JOBS = 256  # of a user
NOTE = "it placed itself while torchtunedd did not run"


def self_placed(host: Host, machine: Topology) -> list[Job]:
    """What can be believed, as running jobs without an id, the oldest process first."""
    found: dict[Process, Job] = {}
    for name in host.list(FOLDER):
        uid = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and uid.isascii() and uid.isdecimal() and len(uid) < 11:
            for entry in _entries(host.root / FOLDER.lstrip("/") / name, int(uid)):
                job = _believed(entry, int(uid), machine)
                if job is not None:
                    found[job.process] = job
    return sorted(found.values(), key=lambda job: job.process.start)


def _entries(folder: Path, uid: int) -> Iterator[dict[str, Any]]:
    """The entries of a table that is nobody's but this user's."""
    try:
        # O_PATH: others may pass through the folder and not list it, and this root is one of them
        there = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        made = os.fstat(there)
        if made.st_uid != uid or made.st_mode & 0o022:
            return
        file = os.open(TABLE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=there)
    except OSError:
        return
    finally:
        os.close(there)
    with os.fdopen(file, "rb") as opened:
        written = os.fstat(file)
        if not stat.S_ISREG(written.st_mode) or written.st_uid != uid:
            return
        text = opened.read(MAX_TABLE + 1)
    try:
        jobs = json.loads(text)["jobs"] if len(text) <= MAX_TABLE else []
    except (ValueError, TypeError, KeyError, RecursionError):
        return
    yield from (entry for entry in jobs[:MAX_JOBS] if isinstance(entry, dict)) if isinstance(jobs, list) else ()


def _believed(entry: dict[str, Any], uid: int, machine: Topology) -> Job | None:
    pid, start, since = (entry.get(key) for key in ("pid", "start", "since"))
    if type(pid) is not int or type(start) is not int or not 0 < pid < 2**31:
        return None
    process = Process(pid=pid, start=start, uid=uid)
    pidfd = processes.reopen(process)
    if pidfd is None:
        return None
    try:
        claimed = grant_from_json(entry.get("grant"))
        if processes.identify(pidfd) != process:
            return None
        mask = processes.masks(pid).get(pid, frozenset())
    except TorchtunedError:
        return None
    finally:
        os.close(pidfd)
    now = time.time_ns() // 1000
    grant = _within(claimed, mask & machine.online, machine)
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


def _within(claimed: Grant, mask: frozenset[int], machine: Topology) -> Grant:
    """As much of a grant as the process can really use."""
    cpus = claimed.cpus & mask
    ranks = [rank.cpus for rank in claimed.ranks if rank.cpus and rank.cpus <= cpus]
    return Grant(
        cpus=cpus or mask,
        memory_nodes=claimed.memory_nodes & {node.id for node in machine.nodes},
        gpus=tuple(gpu.address for gpu in machine.gpus if gpu.address in claimed.gpus),
        shared=claimed.shared,
        threads=max(1, min(claimed.threads, len(cpus))),
        ranks=tuple(Rank(rank=i, cpus=share) for i, share in enumerate(ranks)),
        bound=claimed.bound and bool(cpus),
    )
