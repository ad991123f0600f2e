"""Checks of the host: what is wrong here for training, with evidence, and what could not be looked at."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from torchtuned.checks import driver, gpu, xid  # each registers its checks
from torchtuned.checks.registry import REGISTRY, Check, Machine, run_all
from torchtuned.errors import InvalidRequest
from torchtuned.findings import Finding, Unchecked
from torchtuned.gpus import Gpus
from torchtuned.host import Host

__all__ = ["REGISTRY", "Check", "Machine", "driver", "gpu", "run_checks", "xid"]


def run_checks(
    host: Host, gpus: Gpus, only: Sequence[str] | None = None, *, ours: Collection[str] = ()
) -> tuple[list[Finding], list[Unchecked]]:
    """Run all checks, or `only` those codes. `ours` are the knobs that torchtuned has set itself.

    Blocks (files, NVML, the journal): keep it off an event loop. InvalidRequest for a code that there is not.
    """
    for code in only or ():
        if code not in REGISTRY:
            near = difflib.get_close_matches(code, REGISTRY, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {min(REGISTRY)} to {max(REGISTRY)}"
            raise InvalidRequest(f"no check {code}", hint=hint)
    return run_all(Machine(host, gpus, ours), REGISTRY if only is None else set(only))
