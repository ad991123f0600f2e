"""The commands about what is wanted, and why: profile, config, why; and the page that is made from the profiles."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase

from torchtuned.cli import render
from torchtuned.cli.changes_page import page
from torchtuned.cli.command import FINDINGS, FINE, SCHEMA, print_json, say
from torchtuned.cli.machine import host_of, sysroot_option
from torchtuned.cli.policy import CHANGE_S, local_ledger, look, tuners_of
from torchtuned.client import MANAGER, ROOT, Client
from torchtuned.config import Config, Setting
from torchtuned.configfiles import Profile, profiles, read_config
from torchtuned.effects import effect
from torchtuned.errors import InvalidRequest, NoSuchKnob
from torchtuned.host import Host
from torchtuned.policy import Entry, Wish, setter
from torchtuned.tunables.owners import Owners
from torchtuned.wording import named, nearest

# profile

ACTIONS = ("list", "show", "set")


def profile_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", type=_action, choices=ACTIONS, default="list", help="default: list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a profile; show: default the one in force")
    parser.add_argument("--markdown", action="store_true", help="show: the page of what changes and how to undo it")
    sysroot_option(parser)


def _action(word: str) -> str:
    if word in ACTIONS:
        return word
    near = nearest(word, ACTIONS)
    hint = f"did you mean {near}?" if near else f"to choose a profile: torchtuned profile set {word}"
    raise argparse.ArgumentTypeError(f"invalid choice: {word!r} ({hint})")


def profile(args: argparse.Namespace) -> int:
    if args.markdown and args.action != "show":
        raise InvalidRequest("--markdown goes with show", hint="torchtuned profile show --markdown")
    if args.action == "set":
        return _set_profile(args.name)
    host = host_of(args)
    if args.action == "list":
        if args.name is not None:
            raise InvalidRequest(f"list takes no name, got {args.name}", hint=f"torchtuned profile show {args.name}")
        return _list_profiles(host, as_json=args.json)
    if args.markdown:
        names = [known.name for known in profiles(host)] if args.name is None else [args.name]
        print(page(host, names), end="")
        return FINE
    return _show_profile(host, args.name, as_json=args.json)


def _list_profiles(host: Host, *, as_json: bool) -> int:
    known: Sequence[Profile] = profiles(host)
    config = read_config(host)
    if as_json:
        print_json(
            {
                "schema": SCHEMA,
                "profile": config.profile,
                "source": config.profile_source,
                "profiles": [{"name": one.name, "description": one.description, "file": one.file} for one in known],
            }
        )
        return FINE
    rows = [("*" if one.name == config.profile else "", one.name, one.description) for one in known]
    render.table(("", "Profile", "For"), rows, styles=("green", "bold"))
    say(f"* is chosen by {config.profile_source}")
    return FINE


def _show_profile(host: Host, name: str | None, *, as_json: bool) -> int:
    config = read_config(host, name)
    if as_json:
        print_json(
            {
                "schema": SCHEMA,
                "profile": config.profile,
                "source": config.profile_source,
                "knobs": [
                    {
                        "knob": wish.knob,
                        "wanted": str(wish.value),
                        "when": wish.when,
                        "keep_on_battery": wish.keep_on_battery,
                        "source": wish.source,
                        "comment": comment_of(host, wish.source),
                    }
                    for wish in config.wishes
                ],
            }
        )
        return FINE
    rows = [
        {
            "knob": wish.knob,
            "when": moment(wish),
            "wanted": str(wish.value),
            "reason": comment_of(host, wish.source),
        }
        for wish in config.wishes
    ]
    say(f"profile {config.profile}, chosen by {config.profile_source}")
    render.wishes(rows)
    return FINE


def moment(wish: Wish) -> str:
    """When a wish holds, in words."""
    text = "while jobs run" if wish.when == "jobs" else "always"
    return text + (", not on battery" if wish.keep_on_battery else "")


def _set_profile(name: str | None) -> int:
    if name is None:
        raise InvalidRequest("set needs the name of a profile", hint="torchtuned profile lists them")
    with Client(timeout_s=CHANGE_S, interactive=True) as daemon:
        daemon.call(ROOT, MANAGER, "SetProfile", "s", name)
        properties = daemon.properties(ROOT, MANAGER)
    print(f"{properties.get('State')}, profile {properties.get('Profile')}")
    return FINDINGS if properties.get("State") == "degraded" else FINE


def comment_of(host: Host, source: str) -> str:
    """The comment above the line that a value comes from (FILE:LINE), in one line; empty where there is none."""
    file, _, number = source.rpartition(":")
    if not number.isdigit():
        return ""
    lines = host.text(file).splitlines()[: int(number) - 1]
    comment: list[str] = []
    while lines and lines[-1].lstrip().startswith("#"):
        comment.insert(0, lines.pop().lstrip("# ").strip())
    return " ".join(comment)


# config


def config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", metavar="NAME", help="as it would be with this profile")
    sysroot_option(parser)


def config(args: argparse.Namespace) -> int:
    merged = read_config(host_of(args), args.profile)
    if args.json:
        print_json(
            {
                "schema": SCHEMA,
                "profile": merged.profile,
                "source": merged.profile_source,
                "settings": [
                    {
                        "section": setting.section,
                        "key": setting.key,
                        "value": setting.value,
                        "when": setting.when,
                        "source": setting.source,
                        "overrides": [{"value": value, "source": source} for value, source in setting.overrides],
                    }
                    for setting in merged.settings
                ],
            }
        )
    else:
        say("\n".join(_lines(merged)))
    return FINE


def _lines(merged: Config) -> Iterator[str]:
    """The merged configuration in the form of a file: comments say where a value is from, defaults are comments."""
    yield f"# profile {merged.profile}, chosen by {merged.profile_source}"
    section = ""
    for setting in merged.settings:
        if setting.section != section:
            section = setting.section
            yield f"\n[{section}]"
        value = f"{setting.value} @{setting.when}" if setting.when else setting.value
        if setting.source == "default":
            yield f"# {setting.key} = {value}".rstrip()
            continue
        yield f"# {_origin(setting)}".replace("\n", "?")  # in a file's name
        yield f"{setting.key} = {value}"


def _origin(setting: Setting) -> str:
    over = ", ".join(f"{value} ({source})" for value, source in setting.overrides)
    return setting.source + (f", over {over}" if over else "")


# why


def why_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("knob", metavar="KNOB", help="a name or pattern; the family may be left off (vm.swappiness)")
    sysroot_option(parser)
    parser.set_defaults(profile=None)


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What is known about one knob, or several alike under one name. `entry` is the ledger's; `mentions` are lines of
    sysctl.d (FILE:LINE) that give it a value, whoever has the last word."""

    name: str
    row: render.Row
    wish: Wish | None
    entry: Entry | None
    owner: str
    mentions: tuple[str, ...]
    comment: str


def why(args: argparse.Namespace) -> int:
    host = host_of(args)
    _, _, knobs = look(args, "Verify")
    chosen = [row for row in knobs if means(args.knob, row["knob"])]
    if not chosen:
        raise NoSuchKnob(f"the policy wants no knob {named(args.knob)}", hint=_way_out(args.knob, knobs))
    ledger = local_ledger(host)
    ledger.peek()
    merged, owners = read_config(host), Owners(host, tuners_of(host))
    answers = []
    for name, alike in render.gather(chosen) if not args.json else [(row["knob"], [row]) for row in chosen]:
        first = alike[0]["knob"]
        wish = next((wish for wish in reversed(merged.wishes) if fnmatchcase(first, wish.knob)), None)
        owner, said = owners.owner(first), alike[0]
        others = f"{owner.name} ({owner.source})" if owner else ""
        if not others and said["outcome"] == "foreign":  # a file of /sys has its own owners, which verify knows
            others = f"{setter(said['reason'])} ({said['source']})"
        answers.append(
            _Answer(
                name=name,
                row=alike[0],
                wish=wish,
                entry=ledger.entries.get(first),
                owner=others,
                mentions=_mentions(owners, first),
                comment=comment_of(host, wish.source if wish else alike[0]["source"]),
            )
        )
    if args.json:
        print_json({"schema": SCHEMA, "knobs": [_document(answer) for answer in answers]})
        return FINE
    secret = ledger.path.exists() and not os.access(ledger.path, os.R_OK)
    for number, answer in enumerate(answers):
        if number:
            print()
        render.facts(answer.name, list(_facts(answer, secret=secret)))
    return FINE


def _mentions(owners: Owners, knob: str) -> tuple[str, ...]:
    family, _, key = knob.partition("/")
    return tuple(owners.assignments.mentions(key)) if family == "sysctl" else ()


def means(text: str, knob: str) -> bool:
    """Whether a person who types this means that knob: its name or last words, or a pattern, with or without family."""
    return any(fnmatchcase(name, text) for name in (knob, knob.partition("/")[2])) or knob.endswith(
        (f"/{text}", f".{text}")
    )


def _way_out(text: str, knobs: Sequence[render.Row]) -> str:
    names = {row["knob"] for row in knobs} | {row["knob"].partition("/")[2] for row in knobs}
    near = nearest(text, sorted(names))
    return f"did you mean {near}?" if near else "torchtuned plan lists those that it wants"


def _document(answer: _Answer) -> dict[str, object]:
    known = effect(answer.row["knob"])
    return {
        **answer.row,
        "when": answer.wish.when if answer.wish else None,
        "comment": answer.comment,
        "before": answer.entry.original if answer.entry else None,
        "since": answer.entry.since if answer.entry else None,
        "owner": answer.owner or None,
        "mentions": list(answer.mentions),
        "purpose": known.purpose,
        "effect": known.effect,
        "effect_source": known.source or None,
    }


def _facts(answer: _Answer, *, secret: bool) -> Iterator[tuple[str, str]]:
    row, wish, entry, known = answer.row, answer.wish, answer.entry, effect(answer.row["knob"])
    yield "now", row["current"] or "not on this machine"
    yield "wanted", f"{row['wanted']}, {moment(wish)}" if wish else row["wanted"]
    yield "by", wish.source if wish else row["source"]
    if answer.comment:
        yield "because", answer.comment
    yield "outcome", f"{row['outcome']}: {row['reason']}" if row["reason"] else row["outcome"]
    if entry:
        when = datetime.fromtimestamp(entry.since, tz=UTC).astimezone()
        yield "before", f"{entry.original}; changed {when:%Y-%m-%d %H:%M:%S}"
    elif secret:
        yield "before", "ask as root; the ledger is for root only"
    else:  # a daemon started with another --run-dir keeps its own
        yield "before", "no change of it by torchtuned is in the ledger in /run/torchtuned"
    yield "others", answer.owner or "nobody else is known to set it"
    if answer.mentions:
        yield "set in", ", ".join(answer.mentions)
    if known.purpose:
        yield "is", known.purpose
    yield "effect", known.effect + (f" [{known.source}]" if known.source else "")
    if entry:
        yield "undo", f"sudo torchtuned undo {row['knob']}"
