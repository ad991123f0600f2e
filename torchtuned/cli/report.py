"""`torchtuned report`: what a job got, used and waited for, and how it ended.

The daemon keeps the reports and shows users their own. Where it does not run root reads the files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtuned.checks import REGISTRY, Running, run_checks
from torchtuned.cli import render
from torchtuned.cli.command import FINE, note, print_json, print_unreachable, shortened, without
from torchtuned.cli.jobs import since, user_name
from torchtuned.client import MANAGER, ROOT, Client
from torchtuned.cpuset import parse_list
from torchtuned.errors import DaemonUnreachable, Failed, NoSuchJob
from torchtuned.gpus import Gpus
from torchtuned.host import Host
from torchtuned.reports import store as reportstore
from torchtuned.reports.usage import duration, together, within
from torchtuned.wording import count, size

FOLDER = Path("/var/lib/torchtuned") / reportstore.FOLDER
LEAST_S = 0.05  # less is shown as 0.0 s
SHOWN = 20  # of the list
ENDING = "It has just ended; ask again in a few seconds how."
TORN = "its file was torn or edited"
WAITS = {"cpu": "for CPU", "memory": "for memory", "io": "for storage"}
Report = dict[str, Any]


def report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", metavar="JOB", help="a job's number, or a report's name; none: list them")
    parser.add_argument("--all", action="store_true", help=f"list all that are kept, not the last {SHOWN}")


def report(args: argparse.Namespace) -> int:
    try:
        return _report(args)
    except DaemonUnreachable as error:
        print_unreachable(args, error)
        raise


def _report(args: argparse.Namespace) -> int:
    if args.job is None:
        found = _list()
        if args.json:
            print_json(found)
        else:
            _print_list(found if args.all else found[:SHOWN], more=len(found) - SHOWN if not args.all else 0)
        return FINE
    one = _one(args.job)
    if args.json:
        with contextlib.suppress(*reportstore.UNFIT):
            _look_inside(one)
        print_json(one)
        return FINE
    try:
        _look_inside(one)
        shown = page(one)
    except reportstore.UNFIT as e:
        raise Failed(TORN, where=f"report {args.job}", hint="--json shows what is there") from e
    render.facts(*shown)
    return FINE


def _list() -> list[Report]:
    try:
        with Client() as daemon:
            found: list[Report] = json.loads(str(daemon.call(ROOT, MANAGER, "Reports")[0]))
            return found
    except DaemonUnreachable as error:
        store = _files(error)
        return [one for name in reversed(store.names()) if (one := store.read(name)) is not None]


def _one(asked: str) -> Report:
    try:
        with Client() as daemon:
            found: Report = json.loads(str(daemon.call(ROOT, MANAGER, "Report", "s", asked)[0]))
            return found
    except DaemonUnreachable as error:
        store = _files(error)
        name = reportstore.find(store.names(), asked)
        one = store.read(name) if name else None
        if one is None:
            raise NoSuchJob(f"there is no report of job {asked}", where=str(FOLDER)) from None
        return one


def _look_inside(one: Report) -> None:
    """Add what only the job's own user, and root, sees in its processes: descriptors, mappings, variables. The daemon
    may not look there."""
    if one.get("state") != "running":
        return
    granted = one["granted"]
    job = Running(
        id=str(one["job"]),
        pid=int(one["pid"]),
        uid=int(one["uid"]),
        cpus=parse_list(granted["cpus"]),
        gpus=tuple(granted["gpus"]),
        scope=granted["scope"],
    )
    host, when = Host(), time.time_ns() // 1000
    codes = [code for code, check in REGISTRY.items() if check.jobs]
    found, _ = run_checks(host, Gpus(host, deadline_s=1.0), codes, caller=False, jobs=[job])
    listed = one.setdefault("findings", [])
    known = {(finding["code"], finding["title"]) for finding in listed}
    for finding in found:
        if (finding.code, finding.title) not in known and finding.concerns(job.id, cpus=job.cpus, gpus=job.gpus):
            listed.append({**finding.document(), "first": when, "last": when})


def _files(error: DaemonUnreachable) -> reportstore.Store:
    if os.geteuid() != 0:
        raise error
    note(str(without(error, "these are the reports of before")))
    return reportstore.Store(FOLDER)


def _print_list(found: Sequence[Report], *, more: int) -> None:
    if not found:
        print("No reports. torchtunedd keeps one of each job that torchtuned-run starts.")
        return
    newest: set[str] = set()
    rows = []
    for one in found:
        number = str(one.get("job"))
        name = str(one.get("report")) if number in newest else number
        newest.add(number)
        try:
            rows.append((name, *_row(one)))
        except reportstore.UNFIT:
            rows.append((name, "?", TORN, "?", "?", "?"))
    render.table(("Report", "User", "Command", "Started", "Took", "End"), rows, styles=("bold",))
    if more > 0:
        print(f"and {more} older: torchtuned report --all")


def _row(one: Report) -> tuple[str, ...]:
    took = one.get("seconds")
    return (
        user_name(one.get("uid")),
        shortened(_command(one), 60),
        since(one.get("started")),
        duration(took) if isinstance(took, int | float) else "?",
        _short_end(one),
    )


def _short_end(one: Report) -> str:
    end = one.get("end") or {}
    if not end:  # how it ended is known a second later, when others have written about it
        return "ending" if one.get("state") == "ended" else "running"
    words = {"oom": "out of memory", "oomd": "killed by systemd-oomd", "down": "machine went down"}
    cause, status = str(end.get("cause")), end.get("status")
    if isinstance(status, int) and cause in ("exited", "killed", "crashed"):
        return f"exit status {status}" if status >= 0 else f"{cause}, signal {-status}"
    return words.get(cause, cause)


# one report


def page(one: Report) -> tuple[str, list[tuple[str, str]]]:
    """What a person is shown of a report: a title, and rows of a word and a text."""
    end = one.get("end") or {}
    title = f"Job {one['job']}, {user_name(one.get('uid'))}: {shortened(_command(one), 100)}"
    without_end = ENDING if one.get("state") == "ended" else "It is running."
    rows = [("End", str(end.get("sentence") or without_end))]
    rows += [("", str(text)) for text in end.get("evidence", ())]
    took = one.get("seconds")
    when = since(one.get("started")) + (f" to {since(one['ended'])}" if one.get("ended") else "")
    rows.append(("Time", together((when, duration(took) if isinstance(took, int | float) else ""))))
    rows += _granted(one["granted"])
    measured = one.get("measured") or {}
    if not measured:
        rows.append(("Used", "not known: it ended before it was looked at"))
    else:
        rows += [row for row in _used(one, measured) if row[1]]
    rows += [("GPU", _gpu(address, figures)) for address, figures in one.get("gpus", {}).items()]
    rows += [("Found", _found(finding)) for finding in one.get("findings", ())]
    if one.get("findings"):
        rows.append(("", "torchtuned check --explain CODE says more, and how to mend it"))
    return title, rows


def _found(finding: dict[str, Any]) -> str:
    first, last = (since(finding.get(name)) for name in ("first", "last"))
    when = f"seen at {last}" if first == last else f"seen from {first} to {last}"
    return f"{finding['code']} {finding['severity']}, {finding['title']} ({when}): {finding['evidence']}"


def _granted(granted: dict[str, Any]) -> list[tuple[str, str]]:
    by = {"cpuset": "held there by a cpuset", "affinity": "held there by its affinity", "none": "not held there"}
    nodes = granted.get("memory_nodes")
    got = [
        f"CPUs {granted['cpus'] or 'none'}" + (", shared with other jobs" if granted.get("shared") else ""),
        f"memory node {nodes}" if nodes else "",
        count(granted["threads"], "thread"),
        f"a CPU quota of {granted['cpu_max']}" if granted.get("cpu_max") else "",
        by.get(str(granted.get("confinement")), ""),
    ]
    rows = [("Got", together(got)), ("", f"GPUs {', '.join(granted['gpus'])}" if granted.get("gpus") else "no GPUs")]
    return rows + [("Warning", str(text)) for text in granted.get("warnings", ())]


def _used(one: Report, measured: dict[str, Any]) -> list[tuple[str, str]]:
    seconds = one.get("seconds") or 0
    cpus = len(parse_list(one["granted"]["cpus"]))
    rows = [("CPU", _cpu(measured, seconds, cpus)), ("Memory", _memory(measured))]
    read, written = within(measured, "io", "read_bytes"), within(measured, "io", "write_bytes")
    rows.append(("Storage", together((_of(read, "read"), _of(written, "written")))))
    waits = []
    for what, words in WAITS.items():
        some, full = within(measured, "pressure", what, "some_s"), within(measured, "pressure", what, "full_s")
        if some is not None:
            whole = f", {duration(full)} of it in full" if full and full >= LEAST_S and what != "cpu" else ""
            waits.append(f"{words} {_share(some, seconds)}{whole}")
    rows.append(("Waited", together(waits)))
    if measured["of"] == "processes":
        only = "No cgroup of its own: these are only figures of its processes, as far as they were there to be seen;"
        rows.append(("", f"{only} throttling, waiting and storage are not known."))
    elif one.get("end") and not measured.get("complete"):
        at = measured.get("at")
        last = f"The last reading was at {since(at)}" if at else "No reading came off"
        rows.append(("", f"{last}, before the end; what systemd read later is in."))
    return rows


def _cpu(measured: dict[str, Any], seconds: float, cpus: int) -> str:
    usage = within(measured, "cpu", "usage_s")
    if usage is None:
        return ""
    busy = f"{100 * usage / seconds / cpus:.0f} % of its {count(cpus, 'CPU')}" if seconds > 0 and cpus else ""
    throttled, times = within(measured, "cpu", "throttled_s"), within(measured, "cpu", "throttled")
    held = ""
    if times is not None:
        held = (
            f"held up by a quota {count(int(times), 'time')}, {duration(throttled or 0)}"
            if times
            else "no quota held it up"
        )
    return together((f"{duration(usage)} of CPU time", busy, held))


def _memory(measured: dict[str, Any]) -> str:
    events = (measured.get("memory") or {}).get("events") or {}
    return together(
        (
            _of(within(measured, "memory", "peak"), "at most"),
            _of(within(measured, "memory", "largest_peak"), "at most in one process"),
            _of(within(measured, "memory", "current"), "at the last reading"),
            f"the kernel killed {events['oom_kill']} of its processes" if events.get("oom_kill") else "",
        )
    )


def _of(number: float | None, what: str) -> str:
    return "" if number is None else f"{size(number)} {what}"


def _share(part: float, whole: float) -> str:
    return f"{duration(part)} ({100 * part / whole:.0f} %)" if whole > 0 else duration(part)


def _gpu(address: str, figures: dict[str, Any]) -> str:
    mean, memory = figures.get("utilization_mean"), figures.get("memory_max")
    return f"{address}: " + together(
        (
            f"a kernel resident {mean:.0f} % of {figures['samples']:.0f} moments" if mean is not None else "",
            f"{size(memory)} of memory at most" if memory is not None else "",
            f"{figures['power_max']:.0f} W at most" if "power_max" in figures else "",
            f"{figures['temperature_max']:.0f} °C at most" if "temperature_max" in figures else "",
        )
    )


def _command(one: Report) -> str:
    """The command as the job was registered with it."""
    words = [str(word) for word in one.get("command", ())]
    if words:
        words[0] = os.path.basename(words[0])
    text = "".join(letter if letter.isprintable() else "?" for letter in " ".join(words))
    return text or f"process {one.get('pid')}"
