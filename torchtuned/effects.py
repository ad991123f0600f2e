"""What is published about the effect of each kind of knob on training, for `torchtuned why` and the generated page.

Data with sources, not advice. Most of it is one person's figure on one machine, and for many a well-known knob nobody
has published one for training at all; then this says "unmeasured". Sources read in 2026.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, kw_only=True)
class Effect:
    """`knobs` are patterns of knob names; `source` is empty when nothing was found."""

    knobs: tuple[str, ...]
    purpose: str
    effect: str
    source: str = ""


UNMEASURED = "unmeasured: no published figure for training was found"

EFFECTS: Sequence[Effect] = (
    Effect(
        knobs=("cpu/*governor", "cpu/*energy_performance_preference", "cpu/*boost", "cpu/*min_perf_pct"),
        purpose="how eagerly the CPU raises its clock",
        effect=UNMEASURED,
    ),
    Effect(
        knobs=("cpu/platform_profile",),
        purpose="what the firmware trades of speed for heat and noise",
        effect=UNMEASURED,
    ),
    Effect(
        knobs=("latency/*",),
        purpose="how deeply an idle CPU may sleep, and so how long it takes to wake",
        effect="vLLM in gVisor sandboxes started 4 to 8 times slower on Intel Xeons that take 150 to 230 microseconds"
        " to wake; unmeasured for training",
        source="google/gvisor#14526",
    ),
    Effect(
        knobs=("sysctl/vm.swappiness",),
        purpose="how readily memory of programs is swapped out to make room for cached files",
        effect=UNMEASURED,
    ),
    Effect(
        knobs=("sysctl/net.core.somaxconn",),
        purpose="how many connections may wait at a listening socket; a training job has few, and kernels since 5.4"
        " allow 4096",
        effect=UNMEASURED,
    ),
    Effect(
        knobs=("sysctl/vm.zone_reclaim_mode",),
        purpose="whether a full NUMA node is emptied before memory of another one is used",
        effect=UNMEASURED,
    ),
    Effect(
        knobs=("sysctl/vm.dirty_*",),
        purpose="how much written data may wait in memory before it goes to the disk",
        effect=UNMEASURED,
    ),
    Effect(
        knobs=("sysctl/kernel.numa_balancing",),
        purpose="whether the kernel moves memory towards the CPUs that use it, by making programs fault on it",
        effect="stalls of 5 ms on average and up to 31 ms, 139 of them in 60 s (one serving program, kernel 5.15);"
        " unmeasured for training",
        source="deepseek-ai/DeepEP#624",
    ),
    Effect(
        knobs=("sysctl/vm.max_map_count",),
        purpose="how many memory mappings a process may have; each tensor shared between processes takes one",
        effect='none on speed; at the limit a program fails with "Cannot allocate memory" while memory is free',
        source="pytorch/pytorch#60626, vllm-project/compressed-tensors#798",
    ),
    Effect(
        knobs=("memory/transparent_hugepage*",),
        purpose="whether the kernel backs large allocations with 2 MB pages",
        effect="CPU tensors only: 15 % for one program; filling a 5000 by 5000 tensor 22 to 63 times a second."
        " It can cost memory and time where memory is short; unmeasured for training",
        source="huggingface/candle#2149",
    ),
    Effect(
        knobs=("block/*",),
        purpose="how far ahead of a program the kernel reads, and in which order it serves requests",
        effect=UNMEASURED,
    ),
    Effect(
        knobs=("gpu/*/persistence_mode",),
        purpose="whether the NVIDIA driver keeps a GPU initialised while no program uses it",
        effect="the start of a program only: several seconds where the driver had let go of the GPU; none once it runs",
        source="dmlc/cxxnet#108",
    ),
    Effect(
        knobs=("gpu/*/power_control",),
        purpose="whether the kernel may put an idle GPU to sleep",
        effect=UNMEASURED,
    ),
    Effect(
        knobs=("gpu/*/power_limit_w", "gpu/*/clocks_mhz"),
        purpose="how much power a GPU may draw, or how fast it may run",
        effect="a cap saves energy and costs speed; how much depends on GPU and program. Set only when asked for",
    ),
    Effect(
        knobs=("gpu/*/compute_mode",),
        purpose="how many programs may use a GPU at once",
        effect="none on speed",
    ),
    Effect(
        knobs=("session/power_profile",),
        purpose="whether power-profiles-daemon is asked for its profile performance while a job runs",
        effect=UNMEASURED,
    ),
    Effect(
        knobs=("session/*",),
        purpose="whether the machine may go to sleep while a job runs",
        effect="none on speed; a suspended machine does not train",
    ),
)


def effect(knob: str) -> Effect:
    """What is known about a knob; for one that nothing is known about, "unmeasured"."""
    for known in EFFECTS:
        if any(fnmatchcase(knob, pattern) for pattern in known.knobs):
            return known
    return Effect(knobs=(knob,), purpose="", effect=UNMEASURED)
