"""Tables and drawings for people, by rich, which is imported only when something is printed.

No colour where it does not belong (not a terminal, NO_COLOR, TERM=dumb: rich sees to it), nothing cut off, and no
line longer than the terminal or, in a pipe, than COLUMNS or 80.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torchtuned.cli.machine_map import Line
from torchtuned.client import printable
from torchtuned.cpuset import format_list

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

OUTCOME_STYLES = {
    "applied": "green",
    "kept": "green",
    "unsupported": "dim",
    "foreign": "cyan",
    "drifted": "yellow",
    "denied": "red",
    "failed": "red",
}

Row = dict[str, str]  # one row of a plan, as --json has it
NUMBERED = re.compile(r"(?<=[a-z])\d+(?=/)")  # cpu/policy12/governor
READABLE, GAP = 8, 3  # columns of the screen: a table column that can be read, and what lies between two
COMMAND = re.compile(r"(#|sudo|echo|printf|export|ulimit|numactl|nvidia-smi|docker|torchtuned|prlimit|du|rsync) ")
ADDRESSED = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](?=/)")  # gpu/0000:01:00.0/persistence_mode


def console() -> Console:
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False)


def text(words: str, style: str = "") -> Text:
    """Words for the terminal. They may come from other users (variables, names of processes and files), and what a
    terminal would take for a command is replaced: everything that is printed goes through here.
    """
    from rich.text import Text

    return Text(printable(words, len(words)), style=style)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, styles: Sequence[str] = ()) -> None:
    """Print rows under headings. A cell too long for its column goes on below, whole; `styles` is one per column.
    Where columns would be too narrow to read, each row is printed as facts."""
    rows = list(rows)
    out = console()
    widest = [max(map(_widest, (heading, *cells))) for heading, *cells in zip(headings, *rows, strict=True)]
    if sum(min(READABLE, width) for width in widest) + GAP * (len(widest) - 1) > out.width:
        for row in rows:
            facts(f"{headings[0]} {row[0]}", list(zip(headings[1:], row[1:], strict=True)))
        return
    grid = _grid()
    for index, heading in enumerate(headings):
        grid.add_column(heading, style=styles[index] if index < len(styles) else "", overflow="fold")
    for row in rows:
        grid.add_row(*map(text, row))
    out.print(grid)


def _widest(cell: str) -> int:
    return max(map(len, cell.splitlines()), default=0)


def paragraph(words: str) -> None:
    """Print a sentence, folded at blanks."""
    console().print(text(words))


def plan(rows: Sequence[Row]) -> None:
    """Print the rows of a plan, alike ones as one. What the machine does not have is named in a line at the end."""
    out = console()
    wide = out.width >= 110
    grid = _grid()
    for heading in ("Knob", "Now", "Wanted"):
        grid.add_column(heading, style="bold" if heading == "Knob" else "", no_wrap=True)
    grid.add_column("Outcome", ratio=1, overflow="fold")
    absent = []
    for name, alike in gather(rows):
        row = alike[0]
        if row["outcome"] == "unsupported" and not row["current"]:
            absent.append(name)
            continue
        why = ", ".join(filter(None, (row["reason"], row["source"] if row["outcome"] == "foreign" else "")))
        outcome = text(fold(f"{row['outcome']}: {why}" if why else row["outcome"], 60 if wide else 20))
        outcome.stylize(OUTCOME_STYLES.get(row["outcome"], ""), 0, len(row["outcome"]))
        cells = (fold(name, 48 if wide else 28), *(fold(row[key], 28 if wide else 12) for key in ("current", "wanted")))
        grid.add_row(*map(text, cells), outcome)
    if grid.row_count:
        out.print(grid)
    if absent:
        out.print(text(f"not on this machine: {', '.join(absent)}", "dim"))


def fold(words: str, width: int) -> str:
    """Break a text into lines at blanks and after the signs that names and values are made of."""
    lines = [""]
    for word in re.split(r"(?<= )|(?<=[^ /][/|_.,;:])", words):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines[-1] = lines[-1].rstrip()
            lines.append("")
        lines[-1] += word
    return "\n".join(lines)


def fold_commands(words: str, width: int) -> str:
    """Break a text with commands in it so that a command stays on one line where it fits, else ends a line after | or
    && where the shell goes on reading: what is copied off the screen still runs."""
    lines = [""]
    for part in re.split(r"(?<=[;|:,]) |(?<=&&) | (?=[#\[(])", words):
        pieces = [part] if COMMAND.match(part) and len(part) <= width else part.split(" ")
        for piece in pieces:
            if lines[-1] and len(lines[-1]) + 1 + len(piece) > width:
                lines.append(piece)
            else:
                lines[-1] = f"{lines[-1]} {piece}".lstrip()
    return "\n".join(lines)


def gather(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Put together rows alike but for a number in the knob's name, under one name: cpu/policy0-3/governor."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        pattern = ADDRESSED.sub("*", NUMBERED.sub("#", row["knob"]))
        key = (pattern, *(row[name] for name in ("current", "wanted", "outcome", "reason", "source")))
        groups.setdefault(key, []).append(row)
    result = []
    for (pattern, *_), alike in groups.items():
        name = alike[0]["knob"]
        if len(alike) > 1:
            numbers = [NUMBERED.findall(row["knob"]) for row in alike]
            if all(len(found) == 1 for found in numbers):
                name = pattern.replace("#", format_list(int(found[0]) for found in numbers))
            else:
                name = f"{pattern.replace('#', '*')} ({len(alike)} of them)"
        result.append((name, alike))
    return result


def facts(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print what is known of one thing, under its name if it has one: a word, and beside it the text, folded."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    for word, words in rows:
        grid.add_row(text("  " + word), text(words))
    out = console()
    if title:
        out.print(text(title, "bold"))
    out.print(grid)


def wishes(rows: Sequence[Row]) -> None:
    """Print what a profile wants, and below each value why."""
    from rich.padding import Padding

    out = console()
    for row in rows:
        kept = row["wanted"] == "keep"
        line = text(row["knob"], "dim" if kept else "bold")
        out.print(line.append(text(" is left as it is" if kept else f" = {row['wanted']}, {row['when']}", "default")))
        if row["reason"]:
            out.print(Padding(text(row["reason"]), (0, 0, 0, 4)))


def _grid() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, safe_box=True)


def drawing(lines: Iterable[Line]) -> None:
    """Print what machine_map drew."""
    from rich.text import Text

    out = console()
    for line in lines:
        out.print(Text().join(text(words, style) for words, style in line), soft_wrap=True)


def clear() -> None:
    """Empty the terminal's screen; nothing where the output is not a terminal."""
    console().clear()


def width() -> int:
    """Columns of the terminal; in a pipe COLUMNS or 80."""
    return console().width
