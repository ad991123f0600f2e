"""The commands about who has what: jobs, gpus, map.

Jobs are the daemon's to tell. Without it they say what they can find by themselves: the jobs that placed themselves,
the user's own, and for root everybody's.
"""

from __future__ import annotations

import argparse
import os
import pwd
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from torchtuned import discover, processes
from torchtuned.cli import machine_map, render
from torchtuned.cli.command import FINDINGS, FINE, SCHEMA, note, print_json, shortened, without
from torchtuned.cli.machine import host_of, rules_of, watched
from torchtuned.client import Client, printable
from torchtuned.cpuset import CpuSet, format_list, parse_list
from torchtuned.environment import RANKS
from torchtuned.errors import DaemonUnreachable, HostError
from torchtuned.gpus import Gpus
from torchtuned.host import Host
from torchtuned.jobs import job_properties
from torchtuned.placement.documents import gpu_properties, topology_document
from torchtuned.selfplaced import NOTE, Tables
from torchtuned.topology import GpuFacts
from torchtuned.wording import size

WATCH_S = 2.0
ONLY, NONE = "only jobs that placed themselves are shown", "no job that placed itself is known"
JOB, GPU = "org.torchtuned1.Job", "org.torchtuned1.Gpu"
Properties = dict[str, object]
Objects = Mapping[str, Mapping[str, Mapping[str, object]]]


def of_kind(objects: Objects, interface: str) -> list[Properties]:
    """The objects that have an interface: its properties by their names in lower case, as --json has them."""
    found = []
    for path, interfaces in sorted(objects.items(), key=lambda item: _natural(item[0])):
        if interface in interfaces:
            found.append({"schema": SCHEMA, "path": path} | _lower(interfaces[interface]))
    return found


def _lower(properties: Mapping[str, object]) -> Properties:
    return {name.lower(): value for name, value in properties.items()}


def _natural(path: str) -> tuple[str, int, str]:
    """Sorts job 9 before job 10."""
    head, _, last = path.rpartition("/")
    return head, int(last) if last.isdigit() else 0, last


# jobs


def jobs_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", action="store_true", help="the CPUs each process should have and really has")


def jobs(args: argparse.Namespace) -> int:
    unreachable: DaemonUnreachable | None = None
    try:
        with Client() as daemon:
            found = of_kind(daemon.objects(), JOB)
    except DaemonUnreachable as error:
        found = self_placed(Host())
        unreachable = without(error, ONLY if found else NONE)
    strays = False
    if args.threads:
        for job in found:
            listed = _processes(Host(), job)
            job["processes"] = listed
            strays = strays or any(process["verdict"] != "ok" for process in listed)
    if args.json:
        print_json(_named(found))
    elif found:
        (_print_threads if args.threads else _print_jobs)(found)
    elif not unreachable:
        print("No jobs. Start one with: torchtuned-run COMMAND")
    if unreachable:
        raise unreachable
    return FINDINGS if strays else FINE


def self_placed(host: Host) -> list[Properties]:
    """Those jobs that placed themselves and run, as this user may see them, like the daemon's but marked."""
    machine = discover.topology(host, watch=watched(host))
    return [
        {"schema": SCHEMA, "path": "", **_lower(job_properties(job)), "findings": [], "selfplaced": True}
        | {"id": f"self-{job.process.pid}"}
        for job in Tables(host).seen_by(os.getuid(), machine)
    ]


def _named(found: Sequence[Properties]) -> list[Properties]:
    """The jobs as documents, with what a person is shown as well: whose, and what runs."""
    return [{**job, "user": user_name(job.get("uid")), "command": command_of(job.get("pid"))} for job in found]


def _print_jobs(found: Sequence[Properties]) -> None:
    rows = []
    for job in found:
        rows.append(
            (
                str(job.get("id")),
                user_name(job.get("uid")),
                command_of(job.get("pid")),
                str(job.get("state")),
                f"{job.get('cpus')}",
                ", ".join(texts(job.get("gpus"))) or "none",
                str(job.get("confinement")),
                since(job.get("since")),
            )
        )
    render.table(("Job", "User", "Command", "State", "CPUs", "GPUs", "Held by", "Since"), rows, styles=("bold",))
    told = [
        (f"job {job.get('id')}", text)
        for job in found
        for text in (*texts(job.get("warnings")), *texts(job.get("findings")))
        if not (job.get("selfplaced") and text == NOTE)  # the last line says it of all of them
    ]
    if told:
        render.facts("", told)
    if any(texts(job.get("findings")) for job in found):
        print("More on what was found: torchtuned report JOB")


def _processes(host: Host, job: Properties) -> list[dict[str, object]]:
    """Every process of a job with the CPUs its threads may run on, as the kernel says, and what to think of that.

    A process is "outside" when a thread may run where the job has nothing, and "shrunk" when all its threads together
    may use less than it was given: libraries do that (OMP_PROC_BIND, KMP_AFFINITY), and so does the program itself.
    """
    given = parse_list(str(job.get("cpus", "")))
    leader = whole(job.get("pid"))
    shares = _shares(host, leader)
    held = job.get("state") == "running" and job.get("confinement") != "none"
    found: list[dict[str, object]] = []
    for pid in _scope_pids(host, str(job.get("scope", ""))) or processes.family(leader):
        masks = processes.masks(pid)
        if not masks:
            continue  # it ended meanwhile
        has = frozenset[int]().union(*masks.values())
        wanted = next((share for share in shares if has <= share), given)
        verdict = "ok" if not held or has == wanted else "shrunk" if has <= given else "outside"
        found.append(
            {
                "pid": pid,
                "command": command_of(pid),
                "threads": len(masks),
                "wanted": format_list(wanted),
                "cpus": format_list(has),
                "masks": sorted({format_list(mask) for mask in masks.values()}),
                "verdict": verdict,
            }
        )
    return found


def _shares(host: Host, leader: int) -> list[CpuSet]:
    """The CPUs of each rank of a job, as torchtuned-run told its launcher (CPUS/THREADS/GPU;...). Other users' jobs
    keep that to themselves."""
    variables = host.text(f"/proc/{leader}/environ").split("\0")
    told = next((text.partition("=")[2] for text in variables if text.startswith(f"{RANKS}=")), "")
    try:
        return [parse_list(row.partition("/")[0]) for row in told.split(";") if row]
    except ValueError:
        return []


def _scope_pids(host: Host, scope: str) -> list[int]:
    """The processes in a job's scope. Empty where there is none, or this user may not see it."""
    if not scope:
        return []
    base = "/sys/fs/cgroup/user.slice"
    for path in [
        f"{base}/{scope}",
        *(f"{base}/{slice}/{scope}" for slice in host.list(base) if slice.endswith(".slice")),
    ]:
        try:
            return [int(pid) for pid in host.read(f"{path}/cgroup.procs").split()]
        except (HostError, ValueError):
            continue
    return []


def _print_threads(found: Sequence[Properties]) -> None:
    rows = []
    for job in found:
        listed = job.get("processes")
        for process in listed if isinstance(listed, list) else ():
            rows.append(
                (
                    str(job.get("id")),
                    str(process["pid"]),
                    str(process["command"]),
                    str(process["threads"]),
                    str(process["wanted"]),
                    str(process["cpus"]),
                    str(process["verdict"]),
                )
            )
    render.table(("Job", "PID", "Command", "Threads", "Wanted", "Has", "Verdict"), rows, styles=("bold",))
    verdicts = {row[-1] for row in rows}
    if "outside" in verdicts:
        render.paragraph(
            "outside: a thread may run on CPUs that the job was not given; something has widened its affinity."
        )
    if "shrunk" in verdicts:
        render.paragraph(
            "shrunk: a process keeps itself to fewer CPUs than it was given; look for OMP_PROC_BIND, KMP_AFFINITY,"
            " GOMP_CPU_AFFINITY, numactl or taskset in it."
        )


# gpus


def gpus_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--watch", action="store_true", help="show it again every two seconds, until interrupted")


def gpus(args: argparse.Namespace) -> int:
    nvml = Gpus(Host())
    if not args.watch:
        _show_gpus(_gpus(nvml), as_json=args.json)
        if nvml.status.state not in ("ok", "no-gpu"):
            note(f"power, temperature, use and memory are not known: {nvml.status.text}")
        return FINE
    while True:
        listed = _gpus(nvml)
        if not args.json:
            render.clear()
        _show_gpus(listed, as_json=args.json)
        sys.stdout.flush()  # into a pipe it would come by the 8 KiB
        time.sleep(WATCH_S)


def _gpus(nvml: Gpus) -> list[Properties]:
    """The GPUs as the daemon shows them, or as they are found here, with what NVML measures now."""
    try:
        with Client() as daemon:
            found = of_kind(daemon.objects(), GPU)
    except DaemonUnreachable as error:
        note(str(without(error, "which job has a GPU is not known")))
        found = [
            {"schema": SCHEMA} | _lower(gpu_properties(gpu))
            for gpu in discover.topology(nvml.host, gpus=nvml.facts(), watch=watched(nvml.host)).gpus
        ]
    samples = nvml.sample()
    for gpu in found:
        sample = samples.get(str(gpu["address"]))
        if sample is None:
            continue
        for name in ("power", "power_limit", "temperature", "utilization", "memory_used", "memory_total"):
            gpu[name] = getattr(sample, name)
        if sample.persistence is not None:
            gpu["persistencemode"] = "on" if sample.persistence else "off"
    return found


def _show_gpus(found: Sequence[Properties], *, as_json: bool) -> None:
    if as_json:
        print_json(list(found))
        return
    if not found:
        print("No GPUs found (NVIDIA and AMD are looked for).")
        return
    rows = []
    for gpu in found:
        node = "unknown" if gpu.get("numanode") == -1 else str(gpu.get("numanode"))
        job = str(gpu.get("job", "/"))
        power = f"{_measure(gpu.get('power'), 'W')} of {_measure(gpu.get('power_limit'), 'W')}"
        memory = f"{_size(gpu.get('memory_used'))} of {_size(gpu.get('memory_total'))}"
        rows.append(
            (
                "\n".join(filter(None, (str(gpu["address"]), str(gpu.get("name") or ""), str(gpu.get("uuid") or "")))),
                f"{node}\n{gpu.get('locality')}",
                f"{gpu.get('driver') or 'none'}\n{_persists(gpu.get('persistencemode'))}",
                f"{power}\n{_measure(gpu.get('temperature'), '°C')}",
                f"{_measure(gpu.get('utilization'), '%')}\n{memory}",
                "free" if job == "/" else f"job {job.rpartition('/')[2]}",
            )
        )
    render.table(("GPU", "Node", "Driver", "Power", "Use", "For"), rows, styles=("bold",))


def _persists(mode: object) -> str:
    return {"on": "persistent", "off": "not persistent"}.get(str(mode), "")


def _measure(value: object, unit: str) -> str:
    return f"{value:.0f} {unit}" if isinstance(value, int | float) else "?"


def _size(value: object) -> str:
    return size(value) if isinstance(value, int | float) else "?"


# map


def draw_map(args: argparse.Namespace) -> int:
    host = host_of(args)
    objects: Objects = {}
    found: list[Properties] = []
    if host.real:
        try:
            with Client() as daemon:
                objects = daemon.objects()
            found = of_kind(objects, JOB)
        except DaemonUnreachable as error:
            found = self_placed(host)
            note(str(without(error, ONLY if found else NONE)))
    names = {str(gpu["address"]): GpuFacts(name=str(gpu.get("name") or "")) for gpu in of_kind(objects, GPU)}
    topology = discover.topology(host, gpus=names, watch=watched(host))
    if args.json:
        print_json(topology_document(topology) | {"jobs": _named(found)})
        return FINE
    owners = [
        machine_map.Owner(
            label=f"job {job.get('id')}, {user_name(job.get('uid'))}: {command_of(job.get('pid'), 40)}",
            cpus=parse_list(str(job.get("cpus", ""))),
            gpus=texts(job.get("gpus")),
        )
        for job in found
        if job.get("state") != "queued"
    ]
    reserved = rules_of(host).reserved
    render.drawing(machine_map.draw(topology, owners, reserved=reserved, width=max(40, render.width())))
    return FINE


# words


def user_name(uid: object) -> str:
    try:
        return pwd.getpwuid(whole(uid)).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def since(microseconds: object) -> str:
    """A time of today as a time, another one as a date with the time."""
    when = datetime.fromtimestamp(whole(microseconds) / 1e6, tz=UTC).astimezone()
    today = datetime.now(tz=UTC).astimezone().date()
    return f"{when:%H:%M:%S}" if when.date() == today else f"{when:%Y-%m-%d %H:%M}"


def command_of(pid: object, width: int = 60) -> str:
    """The command line of a process, as a person would have typed it, shortened; its PID when it is gone."""
    words = Host().text(f"/proc/{whole(pid)}/cmdline", f"process {pid}").split("\0")
    words[0] = os.path.basename(words[0])
    return shortened(printable(" ".join(words).replace("\n", "?")), width)


def texts(value: object) -> tuple[str, ...]:
    """A list from the bus as texts; none for anything else."""
    return tuple(map(str, value)) if isinstance(value, list) else ()


def whole(value: object) -> int:
    """A number from the bus; 0 for anything else."""
    return value if isinstance(value, int) else 0
