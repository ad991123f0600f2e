"""A place without a daemon: the same placement, and a table of this user's own jobs (table.py).

In a container, or where torchtunedd does not run, nobody sees all jobs. What can be kept apart are the jobs of one
user. What a daemon has placed, before it ended or stopped to answer, it has written down for all to read, and that is
kept clear of, too, whosever it is (jobtables.py).
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

from torchtuned import cpulimits, cuda, discover
from torchtuned.errors import Busy, HostError, Missing, TorchtunedError
from torchtuned.host import Host
from torchtuned.jobtables import SCHEMA
from torchtuned.placement import Grant, Request, Rules, grant_from_json, grant_to_json, place, request_from_json
from torchtuned.run import table
from torchtuned.topology import Topology

TYPE_CHECKING = False  # `typing` would be imported before every job that places itself
if TYPE_CHECKING:
    from typing import Any

MAIN = "/etc/torchtuned/torchtuned.conf"
FOLDERS = (
    *("/etc/torchtuned/conf.d", "/run/torchtuned/conf.d", "/usr/lib/torchtuned/conf.d"),
    *("/etc/torchtuned/profiles", "/usr/share/torchtuned/profiles"),
)
RETRY_S = 1.0


def place_self(
    wishes: Mapping[str, Any],
    *,
    pid: int,
    dry: bool = False,
    ranks: Callable[[int], int | None] | None = None,
    waits: Callable[[str], None] = lambda why: None,
    host: Host | None = None,
) -> dict[str, Any]:
    """A grant document for the process `pid`, written to the table unless `dry`.

    `wishes` is a request document; `ranks` tells from the number of GPUs how many ranks the command starts; `waits` is
    told why it waits, when the request says so. Raises what place() raises. Without /proc (a bare chroot) no job can be
    told from another, so it is neither kept to CPUs nor written down: "apart" says whose jobs it was kept apart from.
    """
    host = host or Host()
    warnings: list[str] = []
    said = settings(host, warnings)
    rules = said.rules
    limits = cpulimits.limits(host, pid)
    machine = _machine(host, said.watch, wishes, pid)
    request = replace(request_from_json(dict(wishes)), affinity=limits.affinity or None, cpu_max=limits.cpu_max)
    gpus_here = len(cuda.counted(machine.gpus))
    if ranks is not None:
        request = replace(request, ranks=ranks(gpus_here))
    if request.wait is not None and not request.shared:
        rules = replace(rules, when_full="wait")
    wait = request.wait if request.wait is not None else 0.0 if rules.when_full == "wait" else None
    deadline = None if not wait else time.monotonic() + wait
    apart = host.exists(f"/proc/{pid}/stat")
    waited = False
    while True:
        notes: list[str] = []
        try:
            with table.locked(notes) if apart else nullcontext(table.Table(-1)) as own:
                jobs, placed = own.live(host, pid), table.placed(host, pid) if apart else []
                known = not notes
                grant = place(machine, _in_force(host, pid, machine, request, [*placed, *jobs]), request, rules)
                bound = apart and grant.bound and request.confine != "none"
                if apart and not dry:
                    own.write([*jobs, table.entry(host, pid, wishes, grant, bound=bound)], notes)
            break
        except Busy as error:
            if wait is None or dry:
                raise
            if deadline is not None and time.monotonic() >= deadline:
                from torchtuned.run import waiting

                raise waiting.in_vain(wait, error.what, _holders(host, pid, request, [*placed, *jobs])) from None
            if not waited:
                waited = True
                waits(error.what)
        time.sleep(RETRY_S if deadline is None else min(RETRY_S, max(0.0, deadline - time.monotonic())))
    warnings += notes
    if request.confine == "cpuset":
        warnings.append("--confine=cpuset needs torchtunedd; the job is kept on its CPUs by affinity")
    return {
        **grant_to_json(grant),
        **cuda.names(machine.gpus, grant.gpus),
        "schema": SCHEMA,
        "job": f"self-{pid}",
        "state": "running",
        "confinement": "affinity" if bound else "none",
        "apart": _apart_from(mine=known, daemons=bool(placed)) if apart else "",
        "sharers": _sharers(host, pid, grant, [*placed, *jobs]) if bound and grant.shared else [],
        "scope": "",
        "cpu_max": limits.cpu_max,
        "omp_max_gpu": rules.omp_max_gpu,
        "limits": dict(said.limits),
        "env_profiles": list(said.env_profiles),
        "gpus_here": gpus_here,
        "warnings": [*grant.warnings, *warnings],
    }


def forget(pid: int) -> None:
    """Take a job out of the table: its command could not be started."""
    host = Host()
    with table.locked([]) as own:
        own.write(own.live(host, pid), [])


class Settings:
    """The administrator's word about jobs: placement's rules, limits by name, profiles of variables, and further PCI
    devices that count as GPUs. The defaults are those of a configuration that says nothing.
    """

    def __init__(self) -> None:
        self.rules = Rules()
        self.limits: Mapping[str, str] = {}
        self.env_profiles: Sequence[str] = ()
        self.watch: Collection[tuple[str, str]] = ()


def settings(host: Host, warnings: list[str]) -> Settings:
    """The settings hold without the daemon too; a file with faults must not keep a job from starting.

    Reading a configuration takes longer than placing, so it is done only where one of the files speaks of jobs.
    """
    found = Settings()
    try:
        if not _speaks_of_jobs(host):
            return found
        from torchtuned.configfiles import read_config

        config = read_config(host, None)
    except TorchtunedError as error:
        private = isinstance(error, HostError) and error.errno == errno.EACCES
        way = f"; all must be able to read it: sudo chmod a+rX {error.where}" if private else ""
        warnings.append(f"the configuration is not used: {str(error).splitlines()[0]}{way}")
        return found
    found.rules, found.watch = config.rules(), config.gpu.watch
    found.limits, found.env_profiles = dict(config.jobs.limits), config.env.profiles
    return found


def _speaks_of_jobs(host: Host) -> bool:
    """Whether any file of the configuration has a key in a section that matters here. HostError for one that may."""
    paths = [f"{folder}/{name}" for folder in FOLDERS for name in host.list(folder) if name.endswith(".conf")]
    for path in [MAIN, *paths]:
        section = ""
        try:
            text = host.read(path)
        except Missing:
            continue
        for line in map(str.strip, text.splitlines()):
            if line.startswith("["):
                section = line
            elif "=" in line and line[0] not in "#;" and (section in ("[jobs]", "[env]") or line.startswith("watch")):
                return True
    return False


def _machine(host: Host, watch: Collection[tuple[str, str]], wishes: Mapping[str, Any], pid: int) -> Topology:
    """The topology with the GPUs that this process can open. NVML is asked only where the job speaks of UUIDs."""
    machine = discover.topology(host, caller=pid, watch=watch)
    names = wishes["gpus"] if isinstance(wishes["gpus"], list) else []
    words = [*names, *str(wishes["cuda_visible_devices"] or "").split(",")]
    if machine.gpus and any(word.strip().startswith(("GPU-", "MIG-")) for word in words):
        from torchtuned.gpus import Gpus  # seldom needed, and what is imported here delays the job

        machine = discover.topology(host, caller=pid, watch=watch, gpus=Gpus(host).facts())
    return replace(machine, gpus=tuple(gpu for gpu in machine.gpus if _reachable(host, gpu.address)))


def _in_force(
    host: Host, pid: int, machine: Topology, request: Request, jobs: Sequence[Mapping[str, Any]]
) -> list[Grant]:
    """What this job must keep away from: the other jobs, and the GPUs on which somebody else computes.

    A job inside a job does not compete with it: it may use what its ancestors have. NVML is asked only for a job that
    takes GPUs by number.
    """
    ancestors = _ancestors(host, pid)
    grants = {job["pid"]: grant_from_json(job["grant"]) for job in jobs}
    others = [grant for owner, grant in grants.items() if owner not in ancestors]
    if not isinstance(request.gpus, int) or not request.gpus or not machine.gpus:
        return others
    from torchtuned.gpus import Gpus

    inherited = {gpu for owner, grant in grants.items() if owner in ancestors for gpu in grant.gpus}
    busy = {address for address, users in Gpus(host).busy().items() if users}
    return [*others, Grant(cpus=frozenset(), gpus=tuple(sorted(busy - inherited)), bound=False)]


def _holders(host: Host, pid: int, request: Request, jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Who has what a job waited for, in words."""
    from torchtuned.run.waiting import holder

    ancestors, found = _ancestors(host, pid), []
    for job in jobs:
        grant = grant_from_json(job["grant"])
        cpus = grant.cpus if grant.bound and not request.gpus else frozenset[int]()
        cpus &= request.affinity or cpus
        gpus = grant.gpus if request.gpus else ()
        uid = job.get("uid")
        if (cpus or gpus) and job["pid"] not in ancestors and type(uid) is int:
            found.append(holder(f"process {job['pid']}", uid, cpus, gpus))
    return found


def _apart_from(*, mine: bool, daemons: bool) -> str:
    """Whose jobs a place was kept apart from, in words: those of the user's own that are known, and the daemon's."""
    if mine and daemons:
        return "your own jobs and those of torchtunedd"
    return "your own jobs only" if mine else "those of torchtunedd only" if daemons else "nobody"


def _sharers(host: Host, pid: int, grant: Grant, jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The other jobs on the CPUs of this one, in words."""
    from torchtuned.run import waiting

    ancestors = _ancestors(host, pid)
    others = [job for job in jobs if job["pid"] not in ancestors and type(job.get("uid")) is int]
    grants = [(job, grant_from_json(job["grant"])) for job in others]
    on = [job for job, other in grants if other.bound and other.cpus & grant.cpus]
    return [waiting.whose(f"process {job['pid']}", job["uid"]) for job in on]


def _reachable(host: Host, address: str) -> bool:
    """False for a GPU whose driver says which device file it has, when that file is not here: a container sees all
    GPUs of the machine in /sys, but CUDA counts only those it can open.
    """
    folder = "/proc/driver/nvidia/gpus"
    if address not in host.list(folder):
        return not host.list(folder)
    lines = host.text(f"{folder}/{address}/information").splitlines()
    minors = [line.partition(":")[2].strip() for line in lines if line.startswith("Device Minor")]
    return not minors or host.exists(f"/dev/nvidia{minors[0]}")


def _ancestors(host: Host, pid: int) -> set[int]:
    found: set[int] = set()
    with suppress(HostError):
        while (pid := table.stat_of(host, pid)[0]) > 1 and pid not in found:
            found.add(pid)
    return found
