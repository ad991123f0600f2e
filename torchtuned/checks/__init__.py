"""Checks of the host: what is wrong here for training, with evidence, and what could not be looked at."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torchtuned.checks import (  # noqa: F401  each registers its checks
    cgroups,
    container,
    contention,
    cudastart,
    cudause,
    dataset,
    desktop,
    driver,
    gpu,
    kernel,
    limits,
    memory,
    network,
    power,
    storage,
    upgrades,
    wheel,
    xid,
)
from torchtuned.checks.registry import REGISTRY, Check, Machine, Running, run_all
from torchtuned.errors import InvalidRequest
from torchtuned.findings import Finding, Unchecked
from torchtuned.gpus import Gpus
from torchtuned.host import Host
from torchtuned.wording import nearest

__all__ = [
    "REGISTRY",
    "Check",
    "Machine",
    "Running",
    "cudastart",
    "driver",
    "find",
    "gpu",
    "look",
    "run_checks",
    "xid",
]


def find(code: str) -> Check:
    """The check of a code, in either case. InvalidRequest with the nearest one when there is none."""
    found = REGISTRY.get(code.upper())
    if found is None:
        near = nearest(code.upper(), REGISTRY)
        hint = f"did you mean {near}?" if near else f"there are {min(REGISTRY)} to {max(REGISTRY)}"
        raise InvalidRequest(f"no check {code}", hint=hint)
    return found


def run_checks(
    host: Host,
    gpus: Gpus,
    only: Sequence[str] | None = None,
    *,
    ours: Collection[str] = (),
    caller: bool = True,
    jobs: Sequence[Running] | None = (),
    python: str | None = None,
    data: str | None = None,
    watch: Collection[tuple[str, str]] = (),
) -> tuple[list[Finding], list[Unchecked]]:
    """Run all checks, or `only` those codes. The arguments after it are those of Machine.

    Blocks (files, NVML, the journal): keep it off an event loop. InvalidRequest for a code that there is not.
    """
    return look(Machine(host, gpus, ours, caller=caller, jobs=jobs, python=python, data=data, watch=watch), only)


def look(machine: Machine, only: Sequence[str] | None = None) -> tuple[list[Finding], list[Unchecked]]:
    """As run_checks(), for a caller who goes on looking at the same machine."""
    return run_all(machine, REGISTRY if only is None else {find(code).code for code in only})
