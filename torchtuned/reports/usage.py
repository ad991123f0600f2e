"""What the kernel's accounting files say, as numbers. Pure: texts in, figures out.

A figure that a kernel, or a cgroup without the controller, does not have is left out, so that nobody takes it for 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Figures = dict[str, Any]  # {"cpu": {"usage_s": 1.5, …}, "memory": {…}, …}; seconds and bytes

CPU_STAT = {
    "usage_usec": "usage_s",
    "user_usec": "user_s",
    "system_usec": "system_s",
    "throttled_usec": "throttled_s",
}
MICRO = 1_000_000


def keyed(text: str) -> dict[str, int]:
    """Lines of "NAME NUMBER", as in memory.events and cpu.stat."""
    pairs = (line.split() for line in text.splitlines())
    return {words[0]: int(words[1]) for words in pairs if len(words) == 2 and words[1].isdecimal()}


def cpu_stat(text: str) -> dict[str, Any]:
    """cpu.stat: CPU time in seconds, and how often and how long a quota held it up."""
    found = keyed(text)
    figures: dict[str, Any] = {ours: found[name] / MICRO for name, ours in CPU_STAT.items() if name in found}
    figures |= {name: found[f"nr_{name}"] for name in ("periods", "throttled") if f"nr_{name}" in found}
    return figures


def io_stat(text: str) -> dict[str, int]:
    """io.stat: bytes read and written, of all devices together."""
    sums = {"rbytes": 0, "wbytes": 0}
    for line in text.splitlines():
        for name, _, number in (word.partition("=") for word in line.split()[1:]):
            if name in sums and number.isdecimal():
                sums[name] += int(number)
    return {"read_bytes": sums["rbytes"], "write_bytes": sums["wbytes"]}


def pressure(text: str) -> dict[str, float]:
    """A pressure file: seconds in which some, or all, tasks waited, and the same over the last 10 s in per cent."""
    figures: dict[str, float] = {}
    for line in text.splitlines():
        kind, *words = line.split()
        values = dict(word.partition("=")[::2] for word in words)
        if kind in ("some", "full") and values.get("total", "").isdecimal():
            figures[f"{kind}_s"] = int(values["total"]) / MICRO
            figures[f"{kind}_10"] = float(values.get("avg10", 0))
    return figures


def by_node(text: str) -> dict[int, int]:
    """memory.numa_stat: bytes of the program's own and of cached files, by NUMA node."""
    found: dict[int, int] = {}
    for name, *words in (line.split() for line in text.splitlines() if line):
        for node, _, number in (word.partition("=") for word in words if name in ("anon", "file")):
            if node[:1] == "N" and node[1:].isdecimal() and number.isdecimal():
                found[int(node[1:])] = found.get(int(node[1:]), 0) + int(number)
    return found


def within(figures: Mapping[str, Any], *names: str) -> float | None:
    """One number of the figures ("cpu", "usage_s"); None when it is not known."""
    value: Any = figures
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, int | float) else None


class GpuFigures:
    """What samples of one GPU add up to. Means of what was seen at moments a minute apart; peaks in between pass
    unseen."""

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        self._sums: dict[str, float] = {"samples": 0, **(kept or {})}

    def add(self, utilization: int | None, memory: int | None, power: float | None, temperature: int | None) -> None:
        """Per cent, bytes, watts, degrees Celsius; None for what was not to be had."""
        sums = self._sums
        sums["samples"] += 1
        if utilization is not None:
            count = sums.get("utilization_samples", 0)
            sums["utilization_mean"] = (sums.get("utilization_mean", 0) * count + utilization) / (count + 1)
            sums["utilization_samples"] = count + 1
        for name, value in (("memory_max", memory), ("power_max", power), ("temperature_max", temperature)):
            if value is not None:
                sums[name] = max(sums.get(name, value), value)

    def figures(self) -> dict[str, float]:
        return {name: round(value, 1) for name, value in self._sums.items()}


def duration(seconds: float) -> str:
    """Seconds for people: "4.2 s", "12 min 3 s", "3 h 12 min", "2 d 3 h"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for big, small, unit in ((86400, 3600, "d h"), (3600, 60, "h min"), (60, 1, "min s")):
        if whole >= big:
            long, short = unit.split()
            return f"{whole // big} {long} {whole % big // small} {short}"
    return f"{whole} s"


def together(parts: Iterable[str]) -> str:
    return ", ".join(part for part in parts if part)
