"""The commands about host policy: status, plan, verify, apply, undo, reload, version.

The daemon is asked first. Where it does not answer, plan and verify work it out here and say so, and undo, as root,
works from the ledger that the daemon left; the others need it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from torchtuned import __version__
from torchtuned.cli import render
from torchtuned.cli.command import FINDINGS, FINE, SCHEMA, note, print_json, print_unreachable, say, without
from torchtuned.cli.machine import host_of, sysroot_option
from torchtuned.client import MANAGER, ROOT, Client, has_systemd
from torchtuned.configfiles import read_config
from torchtuned.engine import Engine
from torchtuned.errors import DaemonUnreachable, Failed, HostError, NotAuthorized, TorchtunedError
from torchtuned.host import Host
from torchtuned.ledger import Ledger
from torchtuned.policy import Row
from torchtuned.tunables.owners import UNITS
from torchtuned.wording import count

CHANGE_S = 120.0  # several knobs may each take their 5 s before they are given up, and polkit may ask a person
LOOK_S = 10.0
TO_DO, NOT_HERE = "not yet applied", "not applied here"
NOTHING_TO_UNDO = "Nothing to give back."
AMISS = ("drifted", "denied", "failed")  # outcomes that want a look; the others are as they should be
SERVICES = ("/sys/fs/cgroup/system.slice", "/sys/fs/cgroup/systemd/system.slice")  # cgroup v2, v1
INVOCATIONS = "/run/systemd/units/invocation"  # a link for each unit that is not inactive
UNIT_FILES = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
COLUMNS = ("knob", "current", "wanted", "outcome", "reason", "source")
IRQBALANCE = "irqbalance.service"  # owns no knob, so no row can name it


# status


def status(args: argparse.Namespace) -> int:
    knobs: list[render.Row] = []
    fault = ""
    try:
        with Client(timeout_s=LOOK_S) as daemon:
            properties = daemon.properties(ROOT, MANAGER)
            try:
                knobs = _ask(daemon, "Verify")
            except TorchtunedError as error:  # the ledger cannot be read, or a knob hangs: the rest is known
                fault = str(error)
    except DaemonUnreachable as error:
        print_unreachable(args, error)
        raise
    stopped = properties.get("State") == "stopped"  # given back on purpose, so nothing has drifted
    amiss = [row for row in knobs if row["outcome"] in AMISS and not stopped]
    result = FINDINGS if amiss or fault or properties.get("State") == "degraded" else FINE
    if args.json:
        known = {name.lower(): value for name, value in properties.items()}
        print_json({"schema": SCHEMA, **known, "knobs": knobs} | ({"error": fault} if fault else {}))
        return result
    say(f"torchtuned {properties.get('Version')}: {properties.get('State')}, profile {properties.get('Profile')}")
    print(f"  {count(properties.get('Jobs'), 'job')}, {count(properties.get('Gpus'), 'GPU')}")
    knobs_are = f"knobs: {fault}" if fault else "given back by undo since" if stopped else tally(knobs)
    say(f"  policy {_applied(properties.get('LastApplied'))}; {knobs_are}")
    if stopped:
        print("  sudo torchtuned apply sets it again")
    degraded = properties.get("Degraded")
    for reason in degraded if isinstance(degraded, list) else ():
        say(f"  degraded: {reason}")
    if amiss:
        print()
        render.plan(amiss)
    return result


def tally(knobs: Sequence[render.Row]) -> str:
    """How many knobs came out how, in one line."""
    counts = Counter(row["outcome"] for row in knobs)
    if not counts:
        return "no knob is wanted"
    return f"{count(len(knobs), 'knob')}: " + ", ".join(
        f"{number} {outcome}" for outcome, number in counts.most_common()
    )


def _applied(microseconds: object) -> str:
    if not isinstance(microseconds, int) or not microseconds:
        return "not applied yet"
    when = datetime.fromtimestamp(microseconds / 1e6, tz=UTC).astimezone()
    return f"applied {when:%Y-%m-%d %H:%M:%S}"


# plan and verify


def plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", metavar="NAME", help="for this profile, not the one in force")
    sysroot_option(parser)


def plan(args: argparse.Namespace) -> int:
    state, profile, knobs = look(args, "Plan")
    if not args.json:  # a program knows that it is a plan, a person may read a row by itself
        to_do = NOT_HERE if state == "unreachable" else TO_DO
        knobs = [{**row, "outcome": to_do} if row["outcome"] == "applied" else row for row in knobs]
    _show(args, state, profile, knobs)
    return FINE


def verify(args: argparse.Namespace) -> int:
    state, profile, knobs = look(args, "Verify")
    _show(args, state, profile, knobs)
    return FINDINGS if any(row["outcome"] in (*AMISS, NOT_HERE) for row in knobs) else FINE


def look(args: argparse.Namespace, what: str) -> tuple[str, str, list[render.Row]]:
    """State, profile and rows from the daemon; worked out here where it does not answer or cannot know."""
    host = host_of(args)
    if host.real and args.profile is None:
        try:
            with Client(timeout_s=LOOK_S) as daemon:
                properties = daemon.properties(ROOT, MANAGER)
                return str(properties.get("State")), str(properties.get("Profile")), _ask(daemon, what)
        except DaemonUnreachable as error:
            note(str(without(error, "worked out here, as without jobs")))
    config = read_config(host, args.profile)
    engine, tuners = Engine(host, local_ledger(host)), tuners_of(host)
    if what == "Plan":
        rows = engine.plan(config, tuners=tuners)
    else:
        rows = engine.verify(config, jobs_active=False, tuners=tuners)
    if not host.real:
        return "none", config.profile, [row_document(row) for row in rows]
    return "unreachable", config.profile, [without_daemon(row, in_words=not args.json) for row in rows]


def without_daemon(row: Row, *, in_words: bool) -> render.Row:
    """A row of this machine: `apply` would ask the daemon, so it is no way out. To a person what nobody is there to
    apply has not failed, and plan says the same.
    """
    document = row_document(row)
    if not row.untried:
        return document
    way = "systemctl start torchtuned does it" if has_systemd() else "there is no daemon"
    told = {"outcome": NOT_HERE, "reason": way} if in_words else {"reason": f"{NOT_HERE}: {way}"}
    return {**document, **told}


def _show(args: argparse.Namespace, state: str, profile: str, knobs: Sequence[render.Row]) -> None:
    if args.json:
        print_json({"schema": SCHEMA, "state": state, "profile": profile, "knobs": knobs})
        return
    if knobs:
        render.plan(knobs)
    say(f"profile {profile}; {tally(knobs)}")
    if _runs(host_of(args), IRQBALANCE):
        print(f"irqbalance ({IRQBALANCE}) runs: interrupts are left to it")


def local_ledger(host: Host) -> Ledger:
    """The ledger of the machine, or of the folder that stands for it."""
    return Ledger(host.root / "run/torchtuned/ledger.json")


def tuners_of(host: Host) -> list[str]:
    """The other tuners that run, by what PID 1 leaves in files; the daemon asks it."""
    return [unit for unit in UNITS if _runs(host, unit)]


def _runs(host: Host, unit: str) -> bool:
    """One that sets its values and ends, such as TLP, is active all the same, but has no cgroup any more. It is so even
    after its package was purged, when nobody has those values in mind any longer.
    """
    if any(host.exists(f"{folder}/{unit}") for folder in SERVICES):
        return True
    with contextlib.suppress(HostError):
        host.link(f"{INVOCATIONS}:{unit}")
        return any(host.exists(f"{folder}/{unit}") for folder in UNIT_FILES)
    return False


def row_document(row: Row) -> render.Row:
    """A row of a plan as --json has it."""
    return {name: str(getattr(row, name)) for name in COLUMNS}


def _ask(daemon: Client, method: str, signature: str = "", *values: object) -> list[render.Row]:
    """Call a method of the manager that answers with rows."""
    rows = daemon.call(ROOT, MANAGER, method, signature, *values)[0]
    if not isinstance(rows, list):
        raise Failed(f"torchtunedd answered {method} with something else than rows")
    return [dict(zip(COLUMNS, map(str, row), strict=True)) for row in rows]


# apply, undo, reload


def apply(args: argparse.Namespace) -> int:
    try:
        return _changed(args, *_have("Apply"))
    except DaemonUnreachable as error:
        print_unreachable(args, error)
        raise


def undo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("knobs", metavar="KNOB", nargs="*", help="a knob to give back; none: all of them")


def undo(args: argparse.Namespace) -> int:
    try:
        return _changed(args, *_have("Undo", "as", args.knobs), nothing=NOTHING_TO_UNDO)
    except DaemonUnreachable as error:
        if os.geteuid() != 0:
            raise NotAuthorized(
                f"{error.what}; without it only root can give values back", hint="sudo torchtuned undo"
            ) from None
        lost = error
    host = Host()
    ledger = local_ledger(host)
    left = "given back by the ledger that it left" if ledger.path.exists() else "it has left no ledger"
    note(str(without(lost, left)))
    rows = Engine(host, ledger).undo(args.knobs, tuners=tuners_of(host))
    return _changed(args, "unreachable", "", [row_document(row) for row in rows], nothing=NOTHING_TO_UNDO)


def _have(method: str, signature: str = "", *values: object) -> tuple[str, str, list[render.Row]]:
    """Have the daemon change something: its state and profile afterwards, and the rows."""
    properties: dict[str, object] = {"State": "unreachable", "Profile": ""}
    with Client(timeout_s=CHANGE_S, interactive=True) as daemon:
        rows = _ask(daemon, method, signature, *values)
        with contextlib.suppress(TorchtunedError):  # what has been done is told all the same
            properties = daemon.properties(ROOT, MANAGER)
    return str(properties.get("State")), str(properties.get("Profile")), rows


def _changed(
    args: argparse.Namespace, state: str, profile: str, knobs: Sequence[render.Row], *, nothing: str = "Nothing to do."
) -> int:
    if args.json:
        print_json({"schema": SCHEMA, "state": state, "profile": profile, "knobs": knobs})
    elif knobs:
        render.plan(knobs)
    else:
        print(nothing)
    return FINDINGS if any(row["outcome"] in AMISS for row in knobs) else FINE


def reload(args: argparse.Namespace) -> int:
    with Client(timeout_s=CHANGE_S, interactive=True) as daemon:
        daemon.call(ROOT, MANAGER, "Reload")
        properties = daemon.properties(ROOT, MANAGER)
    print(f"{properties.get('State')}, profile {properties.get('Profile')}")
    return FINDINGS if properties.get("State") == "degraded" else FINE


# version


def version(args: argparse.Namespace) -> int:
    daemon_version: str | None = None
    try:
        with Client() as daemon:
            daemon_version = str(daemon.properties(ROOT, MANAGER).get("Version"))
    except DaemonUnreachable:
        pass  # that it does not run is part of the answer
    if args.json:
        print_json({"schema": SCHEMA, "version": __version__, "daemon": daemon_version})
    else:
        print(f"torchtuned {__version__}")
        print(f"torchtunedd {daemon_version}" if daemon_version else "torchtunedd does not answer")
    return FINE
