"""What one command of `torchtuned` is: a row of the table in main.py.

It stands apart so that the modules that carry commands out need not import the table that lists them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from torchtuned.client import has_systemd, printable
from torchtuned.errors import DaemonUnreachable

SCHEMA = 1  # of every --json document; raised when a key changes its meaning or goes away
FINE, FINDINGS, USAGE, UNREACHABLE = 0, 1, 2, 69


@dataclass(frozen=True, kw_only=True)
class Command:
    """`run` gets the parsed arguments and returns the exit status; `options` adds the command's own arguments.

    `json`: the command has an answer, and takes --json. `examples` are command lines, shown by --help.
    """

    name: str
    summary: str
    run: Callable[[argparse.Namespace], int]
    options: Callable[[argparse.ArgumentParser], None] | None = None
    json: bool = True
    examples: tuple[str, ...] = ()


def print_json(document: object) -> None:
    """Print one document, readable by people too."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    # JSON lets DEL and the control characters above it stand, some terminals take them for commands
    sys.stdout.write(re.sub("[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")


def say(text: str) -> None:
    """Print words that may hold names of files and other things of other people's."""
    print(printable(text, len(text)))


def note(text: str) -> None:
    """Say something beside the answer, so that a pipe still gets the answer alone."""
    print(f"torchtuned: {printable(text)}", file=sys.stderr)


def print_unreachable(args: argparse.Namespace, error: DaemonUnreachable) -> None:
    """The document of a command that got no answer; nothing without --json."""
    if args.json:
        print_json({"schema": SCHEMA, "state": "unreachable", "profile": "", "knobs": [], "error": str(error)})


def without(error: DaemonUnreachable, instead: str) -> DaemonUnreachable:
    """The same trouble, in a line that also says what is done without the daemon. How to start it helps here; that it
    cannot run here does not."""
    return DaemonUnreachable(f"{error.what}; {instead}", hint=error.hint if has_systemd() else "")


def shortened(text: str, width: int) -> str:
    """A command line of at most `width` characters, cut between words: half a number would pass for another one."""
    if len(text) <= width:
        return text
    kept = text[: width - 2]  # room for a blank and the sign
    kept = kept if text[width - 2] == " " else kept.rpartition(" ")[0]
    return f"{kept.rstrip()} …" if kept.strip() else f"{text[: width - 1]}…"
