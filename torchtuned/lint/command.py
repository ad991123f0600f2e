"""The command line of the linter: which files, which findings, in which form."""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import hints, leftovers, loaders, loops, precision, syncs
from .names import Module, Project, package_root
from .program import Program
from .rules import HINT, RULES, Finding
from .source import Unparsed, identity, python_files

SCHEMA = 1
_SIBLINGS = 300  # files beside a single FILE that are searched for its importers
Check = Callable[[Program, Module], Iterator[Finding | None]]
_CHECKS: tuple[Check, ...] = (loaders.check, precision.check, syncs.check, leftovers.check, loops.check)


@dataclass(frozen=True)
class Result:
    findings: list[Finding]
    errors: list[Unparsed]
    files: int


def main(argv: Sequence[str] | None) -> int:
    """The linter by itself, where the package's commands are not installed."""
    parser = argparse.ArgumentParser(
        prog="torchtuned lint",
        description="Find what keeps a PyTorch training script waiting. Reads the code, never runs it.",
        epilog="Exit status: 0 nothing found, 1 findings or files that cannot be read as Python, 2 usage or "
        "nothing to read. "
        "`# noqa: TL007` on a line silences a rule there, a bare `# noqa` all.",
    )
    options(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    try:
        args = parser.parse_args(argv)
    except SystemExit as error:  # argparse has said what is wrong, or printed the help
        return int(error.code or 0)
    if isinstance(sys.stdout, io.TextIOWrapper):  # tests put something else there
        sys.stdout.reconfigure(errors="replace")  # a terminal in Latin-1 does not know all signs
    try:
        return run(args)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def options(parser: argparse.ArgumentParser) -> None:
    """The arguments, but for --json."""
    parser.add_argument(
        "paths", nargs="*", metavar="FILE|DIR", help="Python files, or folders that are searched for them"
    )
    parser.add_argument(
        "--hints", action="store_true", help="also report what often helps but is no fault (TL101 and up)"
    )
    parser.add_argument("--rules", action="store_true", help="list the rules and exit")


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say; the exit status."""
    if args.rules:
        print(_rules_as_json() if args.json else _rules_as_text())
        return 0
    if not args.paths:
        print("torchtuned lint: name a file or a folder (see --help)", file=sys.stderr)
        return 2
    missing = [path for path in args.paths if not os.path.exists(path)]
    if missing:
        print(f"torchtuned lint: {missing[0] or repr('')}: no such file or folder", file=sys.stderr)
        return 2
    gc.disable()  # trees are many small objects that all live to the end: collecting takes a fifth of the time
    try:
        result = lint([Path(path) for path in args.paths], hinted=args.hints)
    finally:
        gc.enable()
    if not result.files:
        print(
            f"torchtuned lint: {' '.join(args.paths)}: no Python file to read (of a notebook,"
            " `jupyter nbconvert --to script` makes one)",
            file=sys.stderr,
        )
        return 2
    print(as_json(result) if args.json else as_text(result))
    return 1 if result.findings or result.errors else 0


def lint(paths: Sequence[Path], *, hinted: bool = False) -> Result:
    """Check files and folders. Findings come sorted by file, line and column; what they import is read, not checked."""
    files: dict[Path, str] = {}
    roots: list[Path] = []
    for path in paths:
        if path.is_dir():
            roots.append(path.resolve())
            files |= {one.resolve(): str(one) for one in python_files(path) if one.resolve() not in files}
        else:
            roots.append(identity(path).parent)
            files.setdefault(identity(path), str(path))
    project = Project(dict.fromkeys(roots))
    checked = [module for path, shown in files.items() if (module := project.load(path, shown)) is not None]
    for path in paths:
        if not path.is_dir():
            _load_importers(project, identity(path))
    program = Program(project)
    checks = (*_CHECKS, hints.check) if hinted else _CHECKS
    errors = [error for path, error in project.errors.items() if path in files]
    found: set[Finding] = set()
    for module in checked:
        try:
            found |= {one for check in checks for one in check(program, module) if one is not None}
        except RecursionError:
            errors.append(Unparsed(module.source.shown, 1, 1, "nested too deeply to be checked"))
    if not hinted:
        found = {one for one in found if one.certainty != HINT}
    return Result(
        sorted(found, key=lambda f: (f.file, f.line, f.column, f.rule.code)),
        sorted(errors, key=lambda e: e.file),
        len(files),
    )


def _load_importers(project: Project, path: Path) -> None:
    """Load those neighbours of a single file that may import it: they tell whether its loaders are trained with."""
    root = package_root(path.parent)
    inside = (root / "__init__.py").is_file()
    neighbours = python_files(root) if inside else (one for one in sorted(root.glob("*.py")) if one.is_file())
    for number, other in enumerate(neighbours):
        if number >= _SIBLINGS:
            break
        try:
            text = other.read_text(errors="replace")
        except OSError:
            continue
        if path.stem in text and "import" in text:
            project.load(other, str(other))


def as_json(result: Result) -> str:
    document = {
        "schema": SCHEMA,
        "files": result.files,
        "findings": [one.document() for one in result.findings],
        "errors": [{"file": e.file, "line": e.line, "column": e.column, "message": e.message} for e in result.errors],
    }
    return json.dumps(document, indent=2)  # in ASCII: a file's name may hold anything, also what is no text


def as_text(result: Result) -> str:
    """One line per finding; the reasons once per rule, at its first finding."""
    lines: list[str] = []
    explained: set[str] = set()
    for error in result.errors:
        place = f"{error.file}:{error.line}:{error.column}" if error.line else error.file
        lines.append(_line(f"{place}: {error.message}"))
    for one in result.findings:
        place = f"{one.file}:{one.line}:{one.column}"
        lines.append(_line(f"{place}: {one.rule.code} {one.certainty}: {one.message}"))
        if one.rule.code not in explained:
            explained.add(one.rule.code)
            lines += [f"    why: {one.rule.why}", f"    instead: {one.rule.instead}"]
    number, files = len(result.findings), result.files - len({error.file for error in result.errors})
    read = f"{files} file{'s' * (files != 1)}"
    lines.append(f"{number} finding{'s' * (number != 1)} in {read}" if number else f"nothing found in {read}")
    if result.errors:
        lines[-1] += f", {len(result.errors)} not readable"
    return "\n".join(lines)


def _line(text: str) -> str:
    """One line, and nothing in it that a terminal takes for a command: files come from others, with their names."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _rules_as_text() -> str:
    blocks = []
    for rule in RULES.values():
        body = textwrap.indent(f"why: {rule.why}\ninstead: {rule.instead}", "    ")
        blocks.append(f"{rule.code} {rule.name} ({rule.certainty})\n{body}")
    return "\n".join(blocks)


def _rules_as_json() -> str:
    return json.dumps({"schema": SCHEMA, "rules": [vars(rule) for rule in RULES.values()]}, indent=2)
