"""How a family of checks adds itself, and what its checks get to look at.

A family is a module of this folder whose functions carry @check(CODE, TITLE); checks/__init__.py imports it, and that
is all. A check takes the Machine and yields Findings and Unchecked, nothing when all is well. What it cannot read it
may let rise: a HostError becomes an Unchecked. Its docstring is what `--explain CODE` shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torchtuned.errors import HostError, Missing
from torchtuned.findings import Finding, Unchecked
from torchtuned.gpus import Gpus, Reading
from torchtuned.host import Host
from torchtuned.nvidia import Function, functions

HEALTH = (
    "name",
    "persistence_mode",
    "utilization",
    "pstate",
    "throttle",
    "power_limit",
    "power_default",
    "power_enforced",
    "temperature",
    "sm_clock",
    "sm_clock_max",
    "application_clock",
    "compute_mode",
    "mig",
    "rows",
    "retired_pending",
    "link",
    "link_max",
    "fabric",
)
Result = Iterable[Finding | Unchecked]


class Machine:
    """What checks look at. `ours`: ids of knobs that torchtuned has set itself, which are no leftovers."""

    def __init__(self, host: Host, gpus: Gpus, ours: Collection[str] = ()) -> None:
        self.host, self.gpus, self.ours = host, gpus, ours

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        """NVIDIA's PCI functions."""
        return functions(self.host)

    @cached_property
    def cards(self) -> tuple[Function, ...]:
        """NVIDIA GPUs, whatever driver they have."""
        return tuple(function for function in self.functions if function.is_gpu)

    @cached_property
    def readings(self) -> Mapping[str, Reading]:
        """What NVML says of every GPU that runs on the nvidia driver, asked once."""
        return self.gpus.read([card.address for card in self.cards if card.driver == "nvidia"], HEALTH)

    def text(self, path: str) -> str:
        """A file's text, "" where there is none. Unreadable."""
        try:
            return self.host.read(path)
        except Missing:
            return ""


@dataclass(frozen=True)
class Check:
    """One check. `run` may yield any number of findings, all with this code."""

    code: str
    title: str
    run: Callable[[Machine], Result]

    @property
    def explanation(self) -> str:
        """What it looks at, and why."""
        return " ".join((self.run.__doc__ or "").split())


REGISTRY: dict[str, Check] = {}


def check(code: str, title: str) -> Callable[[Callable[[Machine], Result]], Callable[[Machine], Result]]:
    """Register the function as the check of that code (TT and three digits)."""

    def add(run: Callable[[Machine], Result]) -> Callable[[Machine], Result]:
        if code in REGISTRY:
            raise ValueError(f"{code} is taken by {REGISTRY[code].title!r}")
        REGISTRY[code] = Check(code, title, run)
        return run

    return add


def run_all(machine: Machine, codes: Iterable[str]) -> tuple[list[Finding], list[Unchecked]]:
    """Run these checks in the order of their codes."""
    findings: list[Finding] = []
    unchecked: list[Unchecked] = []
    for code in sorted(codes):
        try:
            for result in REGISTRY[code].run(machine):
                if isinstance(result, Finding):
                    findings.append(result)
                else:
                    unchecked.append(result)
        except HostError as error:
            unchecked.append(Unchecked(code=code, because=str(error)))
    return findings, unchecked
