"""What one command of `torchtuned` is: a row of the table in cli.py.

It stands apart so that the modules that carry commands out need not import the table that lists them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

SCHEMA = 1  # of every --json document; raised when a key changes its meaning or goes away
FINE, FINDINGS, USAGE, UNREACHABLE = 0, 1, 2, 69


@dataclass(frozen=True, kw_only=True)
class Command:
    """`run` gets the parsed arguments and returns the exit status; `options` adds the command's own arguments.

    `json`: the command reads only, and takes --json. `examples` are command lines, shown by --help.
    """

    name: str
    summary: str
    run: Callable[[argparse.Namespace], int]
    options: Callable[[argparse.ArgumentParser], None] | None = None
    json: bool = True
    examples: tuple[str, ...] = ()


def print_json(document: object) -> None:
    """Print one document of a reading command, readable by people too."""
    json.dump(document, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def note(text: str) -> None:
    """Say something beside the answer, so that a pipe still gets the answer alone."""
    print(f"torchtuned: {text}", file=sys.stderr)
