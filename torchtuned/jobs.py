"""The table of jobs: who has what, who waits, and the copy of it in /run that a restarted daemon adopts.

The copy is written on every change (temporary file, rename; no fsync, /run is memory), with each job's line made once,
so that a thousand jobs cost a thousand short texts joined and not a thousand objects serialised. Beside it lies what
all may read, for jobs that get no answer from this daemon: who has which CPUs and GPUs (jobtables.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from torchtuned import cuda
from torchtuned.config import Config
from torchtuned.cpuset import format_list
from torchtuned.errors import Failed, InvalidRequest, TorchtunedError
from torchtuned.files import replace_file, way_out
from torchtuned.jobtables import PLACED
from torchtuned.placement import Grant, Request, grant_from_json, grant_to_json, request_from_json, request_to_json
from torchtuned.processes import Process
from torchtuned.topology import Topology

SCHEMA = 1
MAX_REQUEST = 64 * 1024  # bytes

log = logging.getLogger(__name__)


class State(StrEnum):
    QUEUED = "queued"
    GRANTED = "granted"
    RUNNING = "running"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One registered process and what it got. `since` in microseconds after 1970; `cpu_max` is its quota in CPUs.

    `warnings` are those of the daemon, beside the grant's.
    """

    id: str
    process: Process
    request: Request
    since: int
    state: State = State.QUEUED
    grant: Grant | None = None
    confinement: str = "none"
    scope: str = ""
    cpu_max: int | None = None
    warnings: tuple[str, ...] = ()


def without_gpus(job: Job, here: Collection[str]) -> Job:
    """The job without those of its GPUs that are not here, and with a word about it; itself where it has no such."""
    gone = [address for address in job.grant.gpus if address not in here] if job.grant else []
    if job.grant is None or not gone:
        return job
    left = replace(job.grant, gpus=tuple(address for address in job.grant.gpus if address in here))
    return replace(job, grant=left, warnings=(*job.warnings, f"GPU {', '.join(gone)} is gone"))


def parse_request(text: str) -> Request:
    """Read a request document (share/torchtuned/schemas/request.json). InvalidRequest names the field."""
    if len(text) > MAX_REQUEST or len(text.encode("utf-8", "replace")) > MAX_REQUEST:
        raise InvalidRequest(f"the request is longer than {MAX_REQUEST} bytes")
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise InvalidRequest(f"the request is not JSON: {e}") from None
    return request_from_json(document)


def document(job: Job, machine: Topology, config: Config) -> dict[str, Any]:
    """The grant document of a job (share/torchtuned/schemas/grant.json)."""
    grant = job.grant or Grant(cpus=frozenset(), threads=0)
    return {
        **grant_to_json(grant),
        "schema": SCHEMA,
        **cuda.names(machine.gpus, grant.gpus),
        "job": job.id,
        "state": str(job.state),
        "cpu_max": job.cpu_max,
        "confinement": job.confinement,
        "scope": job.scope,
        "warnings": [*grant.warnings, *job.warnings],
        "omp_max_gpu": config.env.omp_max_gpu,
        "env_profiles": list(config.env.profiles),
        "limits": dict(config.jobs.limits),
    }


def job_properties(job: Job) -> dict[str, Any]:
    """The properties of org.torchtuned1.Job, but for what was found where it runs."""
    grant = job.grant
    return {
        "Id": job.id,
        "Pid": job.process.pid,
        "Uid": job.process.uid,
        "State": str(job.state),
        "Cpus": format_list(grant.cpus) if grant else "",
        "MemoryNodes": format_list(grant.memory_nodes) if grant else "",
        "Gpus": list(grant.gpus) if grant else [],
        "Confinement": job.confinement,
        "Scope": job.scope,
        "Since": job.since,
        "Threads": grant.threads if grant else 0,
        "Warnings": [*(grant.warnings if grant else ()), *job.warnings],
    }


class Jobs:
    """The table. Every change is on disk when the call returns, but for a drop that may come later; one that cannot be
    recorded does not happen."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._jobs: dict[str, Job] = {}
        self._lines: dict[str, str] = {}
        self._public: dict[str, str] = {}  # of those that have a grant
        self._placed = ""  # what lies there for all to read
        self._next = 1
        self._behind = False  # the file has jobs that were dropped

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        """In the order of registration."""
        return iter(list(self._jobs.values()))

    def get(self, job_id: str) -> Job | None:
        return self._jobs.get(job_id)

    def of_user(self, uid: int) -> int:
        return sum(job.process.uid == uid for job in self._jobs.values())

    def bytes_of(self, uid: int) -> int:
        """How much of the file a user's jobs are."""
        return sum(len(self._lines[job.id]) for job in self._jobs.values() if job.process.uid == uid)

    def new_id(self) -> str:
        job_id, self._next = str(self._next), self._next + 1
        return job_id

    def skip_to(self, number: int) -> None:
        """Never give an id below `number`: something of an earlier job with it is still about."""
        self._next = max(self._next, number)

    def put(self, job: Job) -> None:
        """Add a job, or take its new state. Failed, with the table as it was, when it cannot be recorded."""
        before = self._jobs.get(job.id)
        self._set(job)
        try:
            self._save()
        except OSError as e:
            if before is None:
                self._forget(job.id)
            else:
                self._set(before)
            hint = way_out(e, self.path.parent)
            raise Failed(f"the job cannot be recorded: {e.strerror}", where=str(self.path), hint=hint) from e

    def drop(self, job_id: str, *, soon: Callable[[Callable[[], None]], object] | None = None) -> None:
        """Forget a job. Its line may stay in the file when that cannot be written; the process is gone all the same.

        `soon` (call_soon of a loop) has the file written once for all that are dropped before it calls back: when a
        thousand jobs end together, the loop would do nothing else for half a second.
        """
        self._forget(job_id)
        waits, self._behind = self._behind, True
        if soon is None:
            self.flush()
        elif not waits:
            soon(self.flush)

    def flush(self) -> None:
        """Write the file, if jobs were dropped that are in it."""
        if not self._behind:
            return
        self._behind = False
        try:
            self._save()
        except OSError as e:
            log.warning("%s: cannot be written: %s", self.path, e.strerror)

    def load(self) -> None:
        """Take over what an earlier daemon left. A file that cannot be read is put aside and said."""
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            if document["schema"] != SCHEMA:
                raise ValueError(f"schema {document['schema']}, this torchtuned knows {SCHEMA}")
            following = _whole(document, "next", least=1)
            jobs = {job.id: job for job in map(_from_json, document["jobs"])}
            if len(jobs) != len(document["jobs"]):
                raise ValueError("one id stands for several jobs")
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, TorchtunedError) as e:
            aside = self.path.with_suffix(".bad")
            log.error("%s cannot be read (%s); jobs of before are not known. It is kept as %s", self.path, e, aside)
            with contextlib.suppress(OSError):
                self.path.rename(aside)
            return
        self._next = max(following, *(int(job_id) + 1 for job_id in jobs), 1)
        for job in jobs.values():
            self._set(job)

    def _set(self, job: Job) -> None:
        self._jobs[job.id] = job
        self._lines[job.id] = json.dumps(_to_json(job), separators=(",", ":"))
        if job.grant is None:
            self._public.pop(job.id, None)
        else:
            self._public[job.id] = json.dumps(_public(job, job.grant), separators=(",", ":"))

    def _forget(self, job_id: str) -> None:
        del self._jobs[job_id], self._lines[job_id]
        self._public.pop(job_id, None)

    def _save(self) -> None:
        text = ",\n".join(self._lines.values())
        table = f'{{"schema":{SCHEMA},"next":{self._next},"jobs":[\n{text}\n]}}\n'
        replace_file(self.path, table, mode=0o600, sync=False)
        self._behind = False
        lines = ",\n".join(self._public.values())
        public = f'{{"schema":{SCHEMA},"jobs":[\n{lines}\n]}}\n'
        if public == self._placed:  # a job changes more often than its place
            return
        try:
            replace_file(self.path.with_name(PLACED), public, mode=0o644, sync=False)
            self._placed = public
        except OSError as e:  # no reason to refuse a job
            log.warning("%s: cannot be written: %s", PLACED, e.strerror)


def _to_json(job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "pid": job.process.pid,
        "start": job.process.start,
        "uid": job.process.uid,
        "state": job.state,
        "since": job.since,
        "request": request_to_json(job.request),
        "grant": None if job.grant is None else grant_to_json(job.grant),
        "confinement": job.confinement,
        "scope": job.scope,
        "cpu_max": job.cpu_max,
        "warnings": list(job.warnings),
    }


def _public(job: Job, grant: Grant) -> dict[str, Any]:
    """What others need to know to keep clear of a job, and no more."""
    whole = grant_to_json(grant)
    kept = {name: whole[name] for name in ("cpus", "gpus", "shared", "bound", "threads")}
    return {"pid": job.process.pid, "start": job.process.start, "uid": job.process.uid, "grant": kept}


def _from_json(entry: Mapping[str, Any]) -> Job:
    """One line of the file. It may have been spoiled, and what it says goes to the kernel and onto the bus, which take
    no other numbers and texts than these.
    """
    if not re.fullmatch(r"[1-9][0-9]{0,17}", _text(entry["id"])):
        raise ValueError(f"{entry['id']!r} is no id of a job")
    grant = None if entry["grant"] is None else grant_from_json(entry["grant"])
    if grant and not 0 <= grant.threads < 2**32:
        raise ValueError(f"{grant.threads} threads")
    for text in (*grant.gpus, *grant.warnings) if grant else ():
        _text(text)
    return Job(
        id=entry["id"],
        process=Process(
            pid=_whole(entry, "pid", least=1, most=2**22),
            start=_whole(entry, "start"),
            uid=_whole(entry, "uid", most=2**32 - 2),
        ),
        request=request_from_json(entry["request"]),
        since=_whole(entry, "since"),
        state=State(entry["state"]),
        grant=grant,
        confinement=_text(entry["confinement"]),
        scope=_text(entry["scope"]),
        cpu_max=None if entry["cpu_max"] is None else _whole(entry, "cpu_max", least=1),
        warnings=tuple(map(_text, entry["warnings"])),
    )


def _whole(entry: Mapping[str, Any], name: str, *, least: int = 0, most: int = 2**63 - 1) -> int:
    value = entry[name]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or re.search("[\0\ud800-\udfff]", value):
        raise ValueError(f"{value!r} is no text")
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")
