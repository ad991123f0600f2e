"""`torchtuned check`: what is wrong here for training, what it costs, and the command that mends it.

It runs as its user, who can see most; the daemon, where it answers, adds what only root sees and tells which jobs run.
Without it those are looked into that placed themselves.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchtuned import checks, discover
from torchtuned.checks import Running, dataset, reading
from torchtuned.checks.files import memory
from torchtuned.checks.registry import Check, Machine
from torchtuned.cli import render
from torchtuned.cli.command import FINDINGS, FINE, SCHEMA, print_json
from torchtuned.cli.jobs import JOB
from torchtuned.cli.machine import host_of, sysroot_option, watched
from torchtuned.client import MANAGER, ROOT, Client
from torchtuned.configfiles import read_config
from torchtuned.cpuset import parse_list
from torchtuned.errors import HostError, InvalidRequest, TorchtunedError
from torchtuned.findings import UNCHECKED, Action, Finding, Severity
from torchtuned.gpus import Gpus
from torchtuned.policy import Outcome
from torchtuned.selfplaced import Tables
from torchtuned.wording import count, size

if TYPE_CHECKING:
    from torchtuned.host import Host

Document = dict[str, str]

LOOK_S = 30.0
ORDER = [str(severity) for severity in Severity]
STYLES = {"error": "bold red", "warning": "bold yellow", "notice": "bold cyan"}
MARGIN = len("  costs  ")
SET = (str(Outcome.APPLIED), str(Outcome.KEPT))
CLASSES = {
    "AUTO": "torchtuned can do it by itself",
    "JOB": "torchtuned does it while jobs run",
    "ASK": "for you to decide",
    "TELL": "for you to look at",
}


def check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--explain",
        metavar="CODE",
        nargs="?",
        const=True,
        help="what one check looks at and why, and what it finds here; without CODE all codes",
    )
    parser.add_argument(
        "--python", metavar="PATH", help="an interpreter, or its folder, whose torch is to fit the driver"
    )
    parser.add_argument("--data", metavar="PATH", help="a data set: what it lies on, and a few seconds of reading it")
    sysroot_option(parser)


def check(args: argparse.Namespace) -> int:
    if args.explain is True:
        return _list(as_json=args.json)
    host = host_of(args)
    args.python, args.data = _found(host, "--python", args.python), _found(host, "--data", args.data)
    one = checks.find(args.explain) if args.explain else None
    jobs, ours, theirs = _ask_daemon() if host.real else ([], frozenset[str](), list[Document]())
    if faults := _configuration(host):
        theirs = [*faults, *(document for document in theirs if not document["title"].startswith("configuration: "))]
    options = {"python": args.python, "data": args.data, "watch": watched(host)}
    if jobs is not None:
        machine = Machine(host, Gpus(host), ours, jobs=jobs, **options)
    else:
        placed = _self_placed(host)
        mine = [job for job in placed if os.getuid() in (0, job.uid)]
        others = [job for job in placed if job not in mine]
        machine = Machine(host, Gpus(host), ours, jobs=mine, some_jobs=True, others=others, **options)
    found, unchecked = _run(machine, theirs, one.code if one else None)
    if one:
        return _explain(one, found, unchecked, as_json=args.json)
    data = _data(machine, args.data, quiet=args.json) if args.data else None
    if args.json:
        document: dict[str, object] = {"schema": SCHEMA, "findings": found, "unchecked": unchecked}
        print_json(document | ({"data": data} if data else {}))
    else:
        if data:
            render.facts(f"{data['path']}", _data_facts(data))
        _print(found, unchecked)
    return FINDINGS if found else FINE


def _found(host: Host, option: str, path: str | None) -> str | None:
    """A path that an option names, absolute. InvalidRequest."""
    if path is None:
        return None
    place = os.path.abspath(path) if host.real else path
    if not host.exists(place):
        raise InvalidRequest("no such file or folder", where=f"{option} {path}")
    return place


def _run(machine: Machine, theirs: Sequence[Document], only: str | None) -> tuple[list[Document], list[Document]]:
    """Findings, worst first, and what could not be looked at."""
    findings, unseen = checks.look(machine, [only] if only else None)
    mine = {job.id for job in machine.jobs if os.getuid() in (0, job.uid)}  # the rest is for their users, as on the bus
    found = [finding.document() for finding in findings if not finding.job or finding.job in mine]
    told = {(document["code"], document["evidence"]) for document in found}
    unsure = {item.code for item in unseen}
    for document in theirs:
        # what was looked at here is fresher, and in the user's own words; the rest only the daemon could see or knows
        wanted = document["code"] in unsure or (only is None and document["code"] not in checks.REGISTRY)
        if wanted and (document["code"], document["evidence"]) not in told:
            found.append(document)
    found.sort(key=lambda document: (_rank(document), document["code"]))
    return found, [item.document() for item in unseen]


def _rank(document: Document) -> int:
    return ORDER.index(document["severity"]) if document["severity"] in ORDER else len(ORDER)


def _ask_daemon() -> tuple[list[Running] | None, frozenset[str], list[Document]]:
    """Its running jobs, the knobs that it set, and what it finds itself. Without a daemon nobody knows of all jobs, and
    each check that needs them says so."""
    try:
        with Client(timeout_s=LOOK_S) as daemon:
            jobs = running(daemon.objects())
            [rows] = daemon.call(ROOT, MANAGER, "Verify")
            [found] = daemon.call(ROOT, MANAGER, "Check")
    except TorchtunedError:
        return None, frozenset(), []
    ours = frozenset(str(row[0]) for row in rows if row[3] in SET) if isinstance(rows, list) else frozenset[str]()
    documents = [
        {"cost": "", **{key: str(value) for key, value in item.items()}}
        for item in (found if isinstance(found, list) else [])
        if item.get("severity") != UNCHECKED  # what neither could look at is told in this command's own words
    ]
    return jobs, ours, documents


def _configuration(host: Host) -> list[Document]:
    """What is wrong with the files as they are now: the daemon goes on with those that it read before, and without it
    nobody else would say.
    """
    try:
        read_config(host)
    except TorchtunedError as faults:
        if not host.exists("/etc/torchtuned"):
            return []  # not installed
        if os.geteuid() != 0 and "permission denied" in str(faults):
            return []  # not for everybody to read, which is no fault
        finding = Finding(
            code="configuration",
            severity=Severity.ERROR,
            action=Action.TELL,
            title="the configuration has faults",
            evidence=str(faults),
            cost="a daemon that runs goes on with what it read before; one that starts changes nothing",
            fix="mend the lines named, then: torchtuned config && systemctl reload torchtuned",
            source="",
        )
        return [finding.document()]
    return []


def _self_placed(host: Host) -> list[Running]:
    """The jobs that placed themselves: everybody's, whose CPUs are theirs, and of the caller also those that others do
    not find."""
    tables, machine = Tables(host), discover.topology(host, watch=watched(host))
    found = {job.process: job for uid in (0, os.getuid()) for job in tables.seen_by(uid, machine)}
    return [
        Running(
            id=f"self-{process.pid}",
            pid=process.pid,
            uid=process.uid,
            cpus=job.grant.cpus if job.grant else frozenset(),
            gpus=job.grant.gpus if job.grant else (),
        )
        for process, job in found.items()
    ]


def running(objects: Mapping[str, Mapping[str, Mapping[str, object]]]) -> list[Running]:
    """The running jobs among the daemon's objects."""
    found = []
    for interfaces in objects.values():
        job = interfaces.get(JOB)
        if job and job.get("State") == "running":
            gpus = job.get("Gpus")
            found.append(
                Running(
                    id=str(job["Id"]),
                    pid=int(str(job["Pid"])),
                    uid=int(str(job["Uid"])),
                    cpus=parse_list(str(job.get("Cpus", ""))),
                    gpus=tuple(map(str, gpus)) if isinstance(gpus, list) else (),
                    scope=str(job.get("Scope", "")),
                )
            )
    return found


def _print(found: Sequence[Document], unchecked: Sequence[Document]) -> None:
    out = render.console()
    for alike in _alike(found):
        document = alike[0]
        about = f", job {document['job']}" if document.get("job") else ""
        head = render.text(f"{document['code']} {document['severity']}", STYLES.get(document["severity"], "bold"))
        out.print(head.append(render.text(f"  {document['title']}{about}", "bold default")))
        fix = f"{document['fix']}  [{CLASSES.get(document['class'], document['class'])}]"
        fix = render.fold_commands(fix, max(20, out.width - MARGIN))
        rows = [*(("seen", one["evidence"]) for one in alike), ("costs", document.get("cost", "")), ("mend", fix)]
        render.facts("", [(word, text) for word, text in rows if text])
    reasons: dict[str, list[str]] = {}
    for document in unchecked:
        reasons.setdefault(document["because"], []).append(document["code"])
    if reasons:
        out.print(render.text("could not be checked", "bold"))
        render.facts("", [(_codes(codes), f"because {reason}") for reason, codes in reasons.items()])
    parts = [count(number, word) for word in ORDER if (number := sum(one["severity"] == word for one in found))]
    parts = [", ".join(parts) or "nothing is wrong"]
    if unchecked:
        parts.append(f"{len({document['code'] for document in unchecked})} checks could not look everywhere")
    print("; ".join(parts) + ".")
    if found:
        print("More on one: torchtuned check --explain CODE")


def _alike(found: Sequence[Document]) -> list[list[Document]]:
    """Findings that differ in nothing but what was seen, put together: eight GPUs with one fault."""
    groups: dict[tuple[str, ...], list[Document]] = {}
    for document in found:
        key = tuple(document.get(name, "") for name in ("code", "severity", "title", "job", "cost", "fix", "class"))
        groups.setdefault(key, []).append(document)
    return list(groups.values())


def _codes(codes: Sequence[str]) -> str:
    """Some checks for people: by their codes, or of many what they have in common."""
    unique = list(dict.fromkeys(codes))
    if len(unique) <= 2:
        return ", ".join(unique)
    if all(code in checks.REGISTRY and checks.REGISTRY[code].jobs for code in unique):
        return f"{len(unique)} checks of running jobs"
    return f"{', '.join(unique[:2])} and {len(unique) - 2} more"


def _list(*, as_json: bool) -> int:
    """All checks there are."""
    known = [(code, checks.REGISTRY[code].title) for code in sorted(checks.REGISTRY)]
    if as_json:
        print_json({"schema": SCHEMA, "checks": [{"code": code, "title": title} for code, title in known]})
    else:
        render.table(("Code", "Looks for"), known, styles=("bold",))
    return FINE


def _explain(one: Check, found: Sequence[Document], unchecked: Sequence[Document], *, as_json: bool) -> int:
    facts = {"code": one.code, "title": one.title, "explanation": one.explanation}
    facts |= {name: text for name, text in (("cost", one.cost), ("source", one.source)) if text}
    if as_json:
        print_json({"schema": SCHEMA, **facts, "findings": found, "unchecked": unchecked})
        return FINE
    rows = [("looks at", one.explanation)]
    rows += [(word, facts[name]) for word, name in (("costs", "cost"), ("source", "source")) if name in facts]
    for document in found:
        fix = render.fold_commands(document["fix"], max(20, render.width() - MARGIN - 3))
        rows += [("here", document["evidence"]), ("mend", fix)]
    rows += [("here", f"could not be checked, because {document['because']}") for document in unchecked]
    if not found and not unchecked:
        rows.append(("here", "nothing is wrong"))
    render.facts(f"{one.code} {one.title}", rows)
    return FINE


# the data set


def _data(machine: Machine, path: str, *, quiet: bool) -> dict[str, object] | None:
    """What there is to say of the data set, and how fast it reads. None where it cannot be located."""
    try:
        place = dataset.locate(machine, path)
    except HostError:
        return None
    host, files = machine.host, machine.data_files
    told: dict[str, object] = {
        "path": place.path,
        "mount": place.mount.point,
        "file_system": place.mount.kind,
        "source": place.mount.source,
        "kind": place.kind,
        "devices": [dataset.describe(machine, name) for name in place.layers],
        "via": list(place.via),
        "rotational": place.rotational,
        "read_ahead_kb": place.read_ahead_kb,
        "free_bytes": place.space.free if place.space else None,
        "files": len(files.sizes),
        "bytes": sum(files.sizes),
        "all_seen": files.whole,
        "median_bytes": files.median,
        "staging_target": dataset.staging_target(machine),
        "memory_bytes": memory(machine).get("MemAvailable") if host.exists("/proc/meminfo") else None,
    }
    if host.real and files.paths:
        told |= _rates(files.paths, quiet=quiet)
        told["staging_seconds"] = _staging(told)
    return told


def _rates(paths: Sequence[str], *, quiet: bool) -> dict[str, object]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    screen = Console(stderr=True, quiet=quiet or not sys.stderr.isatty())
    with Progress(TextColumn("reading"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), console=screen,
                  transient=True) as bar:  # fmt: skip
        task = bar.add_task("reading", total=1.0)
        found = reading.measure(paths, lambda share: bar.update(task, completed=share))
    if found is None:
        return {"cold_bytes_per_s": None, "warm_bytes_per_s": None, "not_measured": "no file can be read"}
    cold = found.cold
    return {
        "cold_bytes_per_s": round(cold.per_second) if cold else None,
        "cold_files_per_s": round(cold.files / cold.seconds, 1) if cold else None,
        "warm_bytes_per_s": round(found.warm.per_second),
        "warm_files_per_s": round(found.warm.files / found.warm.seconds, 1),
        "not_measured": found.because,
    }


def _staging(told: Mapping[str, object]) -> float | None:
    """Seconds to read all of it once, cold, which a copy takes at least; None where size or rate is not known."""
    rate, total = told.get("cold_bytes_per_s"), told["bytes"]
    if not isinstance(rate, int) or not isinstance(total, int) or not rate or not told["all_seen"]:
        return None
    return round(total / rate, 1)


def _data_facts(told: Mapping[str, object]) -> list[tuple[str, str]]:
    def number(name: str) -> float:
        value = told.get(name)
        return float(value) if isinstance(value, int | float) else 0.0

    devices = told["devices"] if isinstance(told["devices"], list) else []
    via = told["via"] if isinstance(told["via"], list) else []
    turns = {True: "a disk that turns", False: "flash", None: f"{told['kind']}, the medium is not known"}
    rows = [
        ("lies on", f"{told['mount']}: {told['file_system']} from {told['source']}"),
        ("devices", " on ".join(map(str, [*via, *devices])) or "none that the kernel names"),
    ]
    if told["kind"] in ("disk", "unknown"):
        rows.append(("medium", turns[told["rotational"] if isinstance(told["rotational"], bool) else None]))
    if told["read_ahead_kb"] is not None:
        rows.append(("read-ahead", f"{told['read_ahead_kb']} KiB"))
    if told["free_bytes"] is not None:
        rows.append(("free", size(number("free_bytes"))))
    some = "" if told["all_seen"] else "at least "
    rows.append(
        (
            "files",
            f"{some}{told['files']} with {some}{size(number('bytes'))}, median {size(number('median_bytes'))}",
        )
    )
    if told["all_seen"] and told["memory_bytes"] and number("bytes"):
        fits = number("bytes") < number("memory_bytes")
        after = "from the second epoch on it may come from there" if fits else "too little: each epoch reads the disk"
        rows.append(("memory", f"{size(number('memory_bytes'))} for the page cache: {after}"))
    for name, word in (("cold", "from disk"), ("warm", "from cache")):
        if told.get(f"{name}_bytes_per_s"):
            rows.append(
                (word, f"{size(number(f'{name}_bytes_per_s'))} and {number(f'{name}_files_per_s'):g} files a second")
            )
    if told.get("not_measured"):
        rows.append(("from disk", f"not measured: {told['not_measured']}"))
    if told.get("staging_seconds") is not None and told["staging_target"] and told["rotational"] is not False:
        target = told["staging_target"]
        rows.append(("staging", f"a copy to {target} takes {number('staging_seconds'):g} s or more, at that rate"))
    return rows
