"""Who gets a place now and who waits: the queue in front of placement.

There are two queues, for GPUs and for CPUs, each first come first served. They hold for those who would wait, and for
GPUs, which somebody else would then not get. A job that shares when nothing is free is not held up by one that waits
for cores of its own.

A job inside of a job (a script that starts torchtuned-run) has its part of the outer one's place. It never waits
behind a stranger for that: the stranger may wait for the outer job, and the outer job for this one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torchtuned import processes, scopes
from torchtuned.confining import Confiner
from torchtuned.cpulimits import Limits, limits
from torchtuned.errors import Busy, Unplaceable
from torchtuned.host import Host
from torchtuned.hostpolicy import HostPolicy
from torchtuned.jobs import Job, Jobs, State
from torchtuned.placement import Grant, Request, Rules, place
from torchtuned.processes import Process
from torchtuned.topology import Topology


class Lent(Protocol):
    """GPUs that strangers compute on: `held` as of the last `look`."""

    held: frozenset[str]

    async def look(self, jobs: Sequence[Job]) -> frozenset[str]: ...


@dataclass(frozen=True)
class Seen:
    """What was read about a process that has or wants a place."""

    process: Process
    limits: Limits
    ancestors: frozenset[int]


def look(host: Host, process: Process) -> Seen:
    """Read it. Whether the process is still the same is for its pidfd to say."""
    return Seen(process, limits(host, process.pid), frozenset(processes.ancestors(process.pid)))


class Places:
    """Finds places for jobs of the table. `lives` tells whether a job's first process is still there."""

    def __init__(
        self, table: Jobs, policy: HostPolicy, confiner: Confiner, lent: Lent, *, lives: Callable[[str], bool]
    ) -> None:
        self._table, self._policy, self._confiner, self._lent, self._lives = table, policy, confiner, lent, lives
        self._around: dict[str, frozenset[str]] = {}  # by those who wait

    def grant_or_queue(self, job: Job, machine: Topology, seen: Seen) -> Job:
        """A new job with a grant, or as one that waits and says for what. Busy for one that would not wait."""
        around = self._outer(seen)
        try:
            return self.grant(job, machine, seen.limits, around)
        except Busy as e:
            if not self._would_wait(job.request):
                raise
            self._around[job.id] = around
            return replace(job, warnings=(e.what,))

    def waits(self, job_id: str, seen: Seen) -> None:
        """A job that waited already when the daemon came."""
        self._around[job_id] = self._outer(seen)

    def around(self, job_id: str) -> frozenset[str]:
        """The jobs that one who waits runs inside of."""
        return self._around.get(job_id, frozenset())

    def forget(self, job_id: str) -> None:
        """It does not wait any more."""
        self._around.pop(job_id, None)

    def _outer(self, seen: Seen) -> frozenset[str]:
        """The jobs that a process runs inside of: below the first process of one, or in the scope that PID 1 made
        for a job of its user (root: of anybody).
        """
        uid, cgroup = seen.process.uid, seen.limits.cgroup
        return frozenset(
            job.id
            for job in self._table
            if (job.process.pid in seen.ancestors and self._lives(job.id))
            or (uid in (0, job.process.uid) and scopes.holds(job.scope, cgroup))
        )

    def _would_wait(self, request: Request) -> bool:
        """Whether a job is queued when it cannot have what it wants."""
        return request.wait is not None or self._policy.config.jobs.when_full == "wait"

    def grant(self, job: Job, machine: Topology, found: Limits, around: Collection[str]) -> Job:
        """The job with a grant. `around` are the jobs that it runs inside of, whose place it shares. Busy."""
        rules = self._policy.config.rules()
        if job.request.wait is not None and not job.request.shared:
            rules = replace(rules, when_full="wait")
        request = replace(job.request, affinity=found.affinity or None, cpu_max=found.cpu_max)
        outer = [other for other in self._table if other.id in around]
        taken = [other.grant for other in self._table if other.grant is not None and other.id not in around]
        if request.gpus:
            taken.append(Grant(cpus=frozenset(), gpus=tuple(self._lent.held), bound=False))
        first = self._before(job)
        if first and not outer:
            raise Busy(first, hint="wait with --wait")
        if first:
            grant = _within(outer, machine, taken, request, rules, first)
        else:
            grant = place(machine, taken, request, rules)
        how = self._confiner.how(job, found)
        return replace(
            job,
            state=State.GRANTED,
            grant=grant,
            confinement=how.mode if grant.bound else "none",
            warnings=(how.warning,) if how.warning and grant.bound else (),
        )

    def _before(self, job: Job) -> str:
        """Who comes before a job, in words; "" when nobody does, or when it need not queue."""
        request = job.request
        if not request.gpus and (request.shared or not self._would_wait(request)):
            return ""
        lane = wants_gpus(request)
        waiting = [
            other
            for other in self._table
            if other.state is State.QUEUED and wants_gpus(other.request) == lane and int(other.id) < int(job.id)
        ]
        if not waiting:
            return ""
        return f"{len(waiting)} waiting before it (job {waiting[0].id} of uid {waiting[0].process.uid} is next)"


def _within(
    outer: Collection[Job], machine: Topology, taken: Collection[Grant], request: Request, rules: Rules, first: str
) -> Grant:
    """A place in nothing but the outer jobs' own: the rest is for those who waited before. Busy."""
    own = [job.grant for job in outer if job.grant is not None]
    allowed = machine.allowed if request.affinity is None else request.affinity
    allowed &= frozenset[int]().union(*(grant.cpus for grant in own))
    gpus = {address for grant in own for address in grant.gpus}
    others = tuple(gpu.address for gpu in machine.gpus if gpu.address not in gpus)
    rest = Grant(cpus=frozenset(), gpus=others, bound=False)
    try:
        return place(machine, [*taken, rest], replace(request, affinity=allowed), rules)
    except Unplaceable:
        place(machine, [], request, rules)  # what never fits is told so
        raise Busy(first, hint="wait with --wait") from None


def wants_gpus(request: Request) -> bool:
    """Whether a job stands in the queue for GPUs, or in the one for CPUs."""
    return bool(request.gpus) or (request.gpus is None and bool(request.cuda_visible_devices))
