"""org.torchtuned1 on the bus: decode, authorise, call, encode.

Looking is free for everybody. A process may be registered by its own user and by root. What changes the machine asks
polkit. Errors leave as org.torchtuned1.Error.NAME with a sentence; what is not foreseen leaves as "internal error".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtuned import __version__, cuda
from torchtuned.bus import Bus, Call, Variant
from torchtuned.errors import InvalidRequest, NoSuchJob
from torchtuned.findings import Action, Finding, Severity
from torchtuned.gpus import Sample
from torchtuned.hostchecks import HostChecks
from torchtuned.hostpolicy import HostPolicy
from torchtuned.jobs import Job, job_properties
from torchtuned.manager import Manager
from torchtuned.objects import Interface, Method, Objects
from torchtuned.placement.documents import gpu_properties
from torchtuned.policy import Outcome, Row
from torchtuned.polkit import Polkit, uid
from torchtuned.reports.keeper import Reports
from torchtuned.topology import Topology

NAME = "org.torchtuned1"
ROOT = "/org/torchtuned1"
JOBS, GPUS = f"{ROOT}/jobs", f"{ROOT}/gpus"
NOBODY = "/"  # the job of a GPU that is free
ROWS = (("rows", "a(ssssss)"),)
FINDINGS = {Outcome.FAILED: Severity.ERROR, Outcome.DENIED: Severity.ERROR, Outcome.DRIFTED: Severity.WARNING}

JOB = Interface(
    name=f"{NAME}.Job",
    properties={
        "Id": "s", "Pid": "u", "Uid": "u", "State": "s", "Cpus": "s", "MemoryNodes": "s", "Gpus": "as",
        "Confinement": "s", "Scope": "s", "Since": "t", "Threads": "u", "Warnings": "as",
        "Findings": "as",
    },
    constant=frozenset({"Id", "Pid", "Uid", "Since"}),
)  # fmt: skip
GPU = Interface(
    name=f"{NAME}.Gpu",
    properties={
        "Address": "s", "Uuid": "s", "Name": "s", "Driver": "s", "NumaNode": "i", "Cpus": "s", "Locality": "s",
        "PersistenceMode": "s", "Job": "o",
    },
    constant=frozenset({"Address"}),
)  # fmt: skip


class Api:
    """The objects, kept up to date by what the manager and the policy report (it is the manager's View)."""

    def __init__(self, bus: Bus, polkit: Polkit) -> None:
        self._bus, self._polkit = bus, polkit
        self._objects = Objects(bus, ROOT)
        self._samples: Mapping[str, Sample] = {}
        self._manager: Manager
        self._policy: HostPolicy
        self.host_checks: HostChecks
        self._reports: Reports

    def start(self, manager: Manager, policy: HostPolicy, reports: Reports, changed: Callable[[], None]) -> None:
        """Show the manager object; jobs and GPUs follow as they are reported. `changed`: its properties may have."""
        self._manager, self._policy, self._reports, self._changed = manager, policy, reports, changed
        self._objects.add(ROOT, self._interface(), self._state())
        policy.changed = self.state_changed
        self.gpus_changed(manager.topology, {})

    def serve(self) -> None:
        """Answer calls from here on."""
        self._bus.serve(self._objects.dispatch)

    # -- what there is -----------------------------------------------------------------------------------------------

    def _interface(self) -> Interface:
        return Interface(
            name=f"{NAME}.Manager",
            properties={
                "Version": "s", "State": "s", "Profile": "s", "Degraded": "as", "Jobs": "u", "Gpus": "u",
                "LastApplied": "t",
            },
            constant=frozenset({"Version"}),
            methods={
                "Plan": Method(gives=ROWS, run=self._plan),
                "Apply": Method(gives=ROWS, run=self._apply),
                "Verify": Method(gives=ROWS, run=self._verify),
                "Undo": Method(takes=(("knobs", "as"),), gives=ROWS, run=self._undo),
                "Reload": Method(run=self._reload),
                "SetProfile": Method(takes=(("profile", "s"),), run=self._set_profile),
                "Check": Method(gives=(("findings", "aa{sv}"),), run=self._check),
                "Register": Method(
                    takes=(("pidfd", "h"), ("request", "s")), gives=(("job", "o"), ("grant", "s")), run=self._register
                ),
                "Commit": Method(takes=(("job", "o"),), gives=(("grant", "s"),), run=self._commit),
                "Release": Method(takes=(("job", "o"),), run=self._release),
                "Ended": Method(takes=(("pid", "u"), ("start", "t"), ("status", "i")), run=self._ended),
                "Report": Method(takes=(("job", "s"),), gives=(("report", "s"),), run=self._report),
                "Reports": Method(gives=(("reports", "s"),), run=self._list_reports),
            },
            signals={"Granted": (("job", "o"), ("grant", "s"))},
        )  # fmt: skip

    def _state(self) -> dict[str, Any]:
        return {
            "Version": __version__,
            "State": self._policy.state,
            "Profile": self._policy.config.profile,
            "Degraded": self._policy.degraded,
            "Jobs": len(self._manager.jobs),
            "Gpus": len(cuda.counted(self._manager.topology.gpus)),
            "LastApplied": self._policy.last_applied,
        }

    def state_changed(self) -> None:
        self._objects.update(ROOT, **self._state())
        self._changed()

    def job_added(self, job: Job) -> None:
        self._objects.add(job_path(job.id), JOB, {**job_properties(job), "Findings": []})
        self._leases_changed()

    def job_changed(self, job: Job) -> None:
        self._objects.update(job_path(job.id), **job_properties(job))
        self._leases_changed()

    def job_removed(self, job: Job) -> None:
        self._objects.remove(job_path(job.id))
        self._leases_changed()

    def findings_changed(self, job: Job, lines: list[str]) -> None:
        """Show what is wrong where a job runs."""
        self._objects.update(job_path(job.id), Findings=lines)

    def leader_ended(self, job: Job) -> None:
        """Nothing changes on the bus until the job has ended."""

    def granted(self, job: Job, document: dict[str, Any]) -> None:
        self._objects.emit(ROOT, "Granted", job_path(job.id), json.dumps(document))

    def _leases_changed(self) -> None:
        self.gpus_changed(self._manager.topology, self._samples)

    def gpus_changed(self, topology: Topology, samples: Mapping[str, Sample]) -> None:
        """Show these GPUs and no others; `samples` are what NVML said last."""
        self._samples = samples
        self.state_changed()
        holders = {
            address: job_path(job.id)
            for job in self._manager.jobs
            if job.grant is not None
            for address in job.grant.gpus
        }
        persistence = {address: sample.persistence for address, sample in samples.items()}
        wanted = {
            gpu_path(gpu.address): gpu_properties(
                gpu, persistence=persistence.get(gpu.address), job=holders.get(gpu.address, NOBODY)
            )
            for gpu in topology.gpus
        }
        for path in [path for path in self._objects.paths() if path.startswith(GPUS) and path not in wanted]:
            self._objects.remove(path)
        for path, values in wanted.items():
            if path in self._objects.paths():
                self._objects.update(path, **values)
            else:
                self._objects.add(path, GPU, values)

    # -- host policy -------------------------------------------------------------------------------------------------

    async def _plan(self, call: Call) -> list[Any]:
        return [_rows(await self._policy.plan())]

    async def _verify(self, call: Call) -> list[Any]:
        return [_rows(await self._policy.verify())]

    async def _apply(self, call: Call) -> list[Any]:
        await self._allow(call, "apply")
        return [_rows(await self._policy.apply())]

    async def _undo(self, call: Call) -> list[Any]:
        await self._allow(call, "undo")
        return [_rows(await self._policy.undo(call.body[0]))]

    async def _reload(self, call: Call) -> list[Any]:
        await self._allow(call, "configure")
        await self._policy.reload()
        return []

    async def _set_profile(self, call: Call) -> list[Any]:
        await self._allow(call, "configure")
        [profile] = call.body
        if profile and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", profile):
            raise InvalidRequest("not the name of a profile", where=profile[:64])
        await self._policy.set_profile(profile)
        return []

    async def _check(self, call: Call) -> list[Any]:
        """What the daemon itself knows to be amiss, what it finds, and where it could not look. `torchtuned check` adds
        what it finds as its user. What concerns a job is for its user and for root.
        """
        found = [_degraded(reason) for reason in self._policy.degraded]
        for row in await self._policy.verify():
            if row.outcome in FINDINGS and self._policy.state != "stopped":  # then they were given back on purpose
                found.append(_not_in_force(row))
        caller = await uid(self._bus, call.sender)
        mine = {job.id for job in self._manager.jobs if caller in (0, job.process.uid)}
        seen, unseen = await self.host_checks.look()
        found += [finding for finding in seen if not finding.job or finding.job in mine]
        documents = [*(finding.document() for finding in found), *(item.row() for item in unseen)]
        return [[{key: Variant("s", value) for key, value in document.items()} for document in documents]]

    async def _allow(self, call: Call, verb: str) -> None:
        await self._polkit.check(call.sender, f"{NAME}.{verb}", interactive=call.interactive)

    # -- jobs --------------------------------------------------------------------------------------------------------

    async def _register(self, call: Call) -> list[Any]:
        index, request = call.body
        caller = await uid(self._bus, call.sender)
        job, grant = await self._manager.register(caller, call.take_fd(index), request)
        return [job_path(job.id), json.dumps(grant)]

    async def _commit(self, call: Call) -> list[Any]:
        return [json.dumps(await self._manager.commit(*await self._caller_and_job(call)))]

    async def _release(self, call: Call) -> list[Any]:
        await self._manager.release(*await self._caller_and_job(call))
        return []

    async def _ended(self, call: Call) -> list[Any]:
        self._reports.told(await uid(self._bus, call.sender), *call.body)
        return []

    async def _report(self, call: Call) -> list[Any]:
        return [json.dumps(await self._reports.report(await uid(self._bus, call.sender), *call.body))]

    async def _list_reports(self, call: Call) -> list[Any]:
        return [json.dumps(await self._reports.reports(await uid(self._bus, call.sender)))]

    async def _caller_and_job(self, call: Call) -> tuple[int, str]:
        [path] = call.body
        parent, _, job_id = path.rpartition("/")
        if parent != JOBS:
            raise NoSuchJob(f"{path[:100]} is no job")
        return await uid(self._bus, call.sender), job_id


def job_path(job_id: str) -> str:
    return f"{JOBS}/{job_id}"


def gpu_path(address: str) -> str:
    """ "0000:01:00.0" is /org/torchtuned1/gpus/0000_01_00_0: a path may hold no other sign."""
    return f"{GPUS}/{re.sub('[^0-9A-Za-z]', '_', address)}"


def _rows(rows: Sequence[Row]) -> list[list[str]]:
    return [[row.knob, row.current, row.wanted, str(row.outcome), row.reason, row.source] for row in rows]


def _degraded(reason: str) -> Finding:
    return Finding(
        code="degraded",
        severity=Severity.ERROR,
        action=Action.TELL,
        title=reason,
        evidence="",
        cost="",
        fix="see journalctl -u torchtuned",
        source="",
    )


def _not_in_force(row: Row) -> Finding:
    return Finding(
        code="knob",
        severity=FINDINGS[row.outcome],
        action=Action.ASK,
        title=f"{row.knob} {row.outcome}",
        evidence=f"{row.knob} is {row.current}, wanted is {row.wanted}: {row.reason}",
        cost="",
        fix="torchtuned apply",
        source=row.source,
    )
