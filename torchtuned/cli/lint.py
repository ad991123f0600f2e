"""`torchtuned lint`: the linter as one of the commands. It is read only when asked for: the other commands need none
of it, and it none of them.
"""

from __future__ import annotations

import argparse


def lint_options(parser: argparse.ArgumentParser) -> None:
    from torchtuned.lint import command

    command.options(parser)


def lint(args: argparse.Namespace) -> int:
    from torchtuned.lint import command

    return command.run(args)
