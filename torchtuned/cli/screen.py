"""The screen of `torchtuned top` as lines of text, made for 80 columns and 24 lines.

Nothing is said by colour alone: what is worth a look has a "!" behind it, and is bold too. Two lines a job.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchtuned.cli.watch import Row, View
from torchtuned.reports.usage import duration
from torchtuned.wording import count

if TYPE_CHECKING:
    from rich.text import Text

HEAD, FOOT = 3, 3  # lines around the jobs
BAR = 8
HELD, WAIT_CPU, WAIT_MEMORY, WAIT_IO = 5, 20, 5, 20  # per cent from which on a job suffers
NEAR = 80  # per cent of memory on its own nodes below which it is told
ALERT = "bold yellow"
COLUMNS = (("Job", 5), ("User", 8), ("CPUs", 12), ("Busy", BAR + 5), ("Memory", 7), ("Quota", 6), ("cpu", 5),
           ("mem", 5), ("io", 5), ("Near", 4))  # fmt: skip
LEGEND = (
    "Busy: of its CPUs. Quota: time a CPU quota held it up. cpu mem io: % of the last",
    "10 s in which it waited for them. Near: CPUs next to its GPUs. -: not known.",
)


def screen(view: View, *, width: int, height: int, first: int, unicode: bool, keys: bool) -> Text:
    """All lines, no wider than `width`; jobs from number `first` on as far as `height` goes (0: all)."""
    from rich.text import Text

    room = max(1, (height - HEAD - FOOT) // 2) if height else len(view.rows)
    shown = view.rows[first : first + room]
    lines = [_title(view), Text(""), _headings()]
    for row in shown:
        lines += [_figures(row, unicode=unicode), _second(row, width)]
    if not view.rows:
        lines.append(Text("     No jobs. Start one with: torchtuned-run COMMAND", style="dim"))
    foot = [view.note] if view.note else list(LEGEND)
    if len(shown) < len(view.rows):
        foot[-1:] = [f"jobs {first + 1} to {first + len(shown)} of {len(view.rows)}; arrows show the others"]
    if keys:
        foot.append("q leaves")
    if height:
        lines += [Text("")] * max(0, height - len(lines) - len(foot))
    lines += [Text(text, style="dim") for text in foot]
    for line in lines:
        line.truncate(width, overflow="ellipsis" if unicode else "crop")
    return Text("\n", no_wrap=True, end="").join(lines[:height] if height else lines)


def _title(view: View) -> Text:
    from rich.text import Text

    running = sum(row.state == "running" for row in view.rows)
    waiting = len(view.rows) - running
    text = Text("torchtuned top", style="bold")
    busy = "" if view.busy is None else f", {view.busy:.0f} % busy"
    text.append(
        f"   {running} running, {waiting} waiting   {view.cpus} CPUs{busy}   {time.strftime('%H:%M:%S')}", "none"
    )
    return text


def _headings() -> Text:
    from rich.text import Text

    return Text(" ".join(_fit(name, size, right=name not in ("Job", "User", "CPUs", "Busy")) for name, size in COLUMNS),
                style="bold underline")  # fmt: skip


def _figures(row: Row, *, unicode: bool) -> Text:
    from rich.text import Text

    text = Text()
    sizes = dict(COLUMNS)
    for name, word in (("Job", row.job), ("User", row.user), ("CPUs", row.cpus or "none")):
        text.append(_fit(word, sizes[name], right=False) + " ", "bold" if name == "Job" else "")
    if row.state != "running":
        text.append({"queued": "waits for a place", "granted": "is being started"}.get(row.state, row.state))
        return text
    text.append(_bar(row.busy, unicode=unicode) + " ")
    text.append(_fit("-" if row.memory is None else _bytes(row.memory), sizes["Memory"]))
    limits = {"Quota": (row.held, HELD), "cpu": (row.waits[0], WAIT_CPU), "mem": (row.waits[1], WAIT_MEMORY),
              "io": (row.waits[2], WAIT_IO)}  # fmt: skip
    for name, (value, limit) in limits.items():
        much = value is not None and value >= limit
        text.append(" " + _fit("-" if value is None else f"{value:.0f}{'!' if much else ''}", sizes[name]),
                    ALERT if much else "")  # fmt: skip
    text.append(" " + _fit("no!" if row.near == "no" else row.near, sizes["Near"]), ALERT if row.near == "no" else "")
    return text


def _second(row: Row, width: int) -> Text:
    """What runs, on which GPUs, where its memory is, and for how long."""
    from rich.text import Text

    facts = [_gpus(row.gpus)] if row.gpus else []
    if row.memory_near is not None and row.memory_near < NEAR:
        facts.append(f"memory {row.memory_near:.0f} % near!")
    if row.confinement == "none" and row.state == "running":
        facts.append("not held to its CPUs!")
    if row.findings:
        facts.append(f"{count(row.findings, 'finding')}!")
    facts.append("for " + duration(max(0.0, time.time() - row.since / 1e6)))  # it stands below "Near"
    right = "  ".join(facts)
    room = max(8, width - 6 - len(right) - 2)
    text = Text("      " + _fit(row.command, room, right=False) + "  ", style="dim")
    for fact in facts:
        text.append(fact, ALERT if fact.endswith("!") else "none")
        text.append("  ")
    text.rstrip()
    return text


def _gpus(gpus: Mapping[str, float | None]) -> str:
    known = [use for use in gpus.values() if use is not None]
    if len(gpus) <= 2:
        names = (
            f"{address.removeprefix('0000:')}{'' if use is None else f' {use:.0f}%'}" for address, use in gpus.items()
        )
        return "GPU " + ", ".join(names)
    use = f" {min(known):.0f}-{max(known):.0f}%" if known else ""
    return f"{len(gpus)} GPUs{use}"


def _bar(busy: float | None, *, unicode: bool) -> str:
    if busy is None:
        return _fit("-", BAR + 5)
    full, empty = ("█", "·") if unicode else ("#", ".")
    cells = min(BAR, round(busy / 100 * BAR))
    return full * cells + empty * (BAR - cells) + f"{busy:>4.0f}%"


def _bytes(number: float) -> str:
    """Five columns at most: "12.3G", "950M"."""
    unit = next((i for i in range(1, 5) if number < 1000 * 1024**i), 4)
    scaled = number / 1024**unit
    return f"{scaled:.{1 if scaled < 100 else 0}f}{'KMGT'[unit - 1]}"


def _fit(text: str, size: int, *, right: bool = True) -> str:
    """Exactly so many columns; what is cut off ends in "+"."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) > size:
        return set_cell_size(text, size - 1) + "+"
    return " " * (size - cell_len(text)) + text if right else set_cell_size(text, size)
