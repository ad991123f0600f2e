"""Threads, cuDNN's autotuner and the precision of matrix products, set where the user has not set them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .place import Place, count_cores, cpu_quota, here

Precision = Literal["highest", "high", "medium"]
# A rank that drives a GPU gains little from more threads, and on large machines loses to synchronising them.
MAX_GPU_THREADS = 8
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Change:
    """One setting that was changed, with its values before and after."""

    before: object
    after: object


@dataclass(frozen=True)
class Tuned:
    """What `tune` did. `changed` and `kept` have the names of its arguments as keys; `kept` says why."""

    changed: dict[str, Change] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


def tune(
    *,
    threads: int | Literal["auto"] | None = "auto",
    interop_threads: int | Literal["auto"] | None = "auto",
    cudnn_benchmark: bool | None = None,
    matmul_precision: Precision | None = None,
    loader_workers: int = 0,
    place: Place | None = None,
) -> Tuned:
    """Set up torch for the CPUs and GPUs of this process; call it once, before the first tensor is made.

    threads           threads of one operation (torch.set_num_threads). "auto": the cores of this rank (not its
                      hardware threads, which share what matters), less `loader_workers` when it trains on
                      the CPU, at most 8 where it drives a GPU. Left alone where OMP_NUM_THREADS or
                      MKL_NUM_THREADS is set, except to torchrun's own default of 1, and where the number in force is
                      not one that torch chooses by itself, so that somebody has called set_num_threads.
    interop_threads   threads that run operations side by side (torch.set_num_interop_threads). "auto": 2, or 1 with a
                      single core; torch's default is one per core, and training does not use them. torch takes this
                      only once and only before any parallel work: later it is kept.
    cudnn_benchmark   True lets cuDNN measure its convolution algorithms for each input shape. Kept as it is where
                      deterministic algorithms were asked for, or torch has no cuDNN.
    matmul_precision  of float32 matrix products on GPUs and some CPUs: "high" is TF32, "medium" bfloat16. Kept where
                      it was lowered already, or an environment variable decides.
    loader_workers    worker processes of the DataLoader that a trainer on the CPU should leave cores to, for example
                      loader_args()["num_workers"]. Workers set themselves to one thread each.

    None leaves a setting alone. A number of threads is set as asked; "auto" yields to what the user set. Nothing here
    initialises CUDA, and all of it may still be set after CUDA was initialised. Raises ValueError for a number of
    threads below 1 and for an unknown precision.
    Sources: torch.set_num_threads, set_num_interop_threads, set_float32_matmul_precision and torch.backends in the
    PyTorch documentation; its notes on CPU threading; the performance tuning guide.
    """
    for name, value in (("threads", threads), ("interop_threads", interop_threads)):
        if isinstance(value, bool) or (isinstance(value, int) and value < 1):
            raise ValueError(f"{name}={value}: a number of threads, 1 or more")
    if matmul_precision not in (None, "highest", "high", "medium"):
        raise ValueError(f"matmul_precision={matmul_precision!r}: highest, high or medium")
    import torch  # on first use: importing this package must stay cheap

    place = here() if place is None else place
    tuned = Tuned()
    if interop_threads is not None:
        _interop(torch, tuned, interop_threads, place)
    if threads is not None:
        _intraop(torch, tuned, threads, place, loader_workers)
    if cudnn_benchmark is not None:
        _cudnn(torch, tuned, wanted=cudnn_benchmark)
    if matmul_precision is not None:
        _matmul(torch, tuned, matmul_precision)
    return tuned


def auto_threads(place: Place, *, gpu: bool, loader_workers: int = 0) -> int:
    """Threads of one operation for a rank at this place."""
    if gpu:
        return min(place.cores, MAX_GPU_THREADS)
    return max(1, place.cores - loader_workers)


def _intraop(torch: Any, tuned: Tuned, asked: int | str, place: Place, loader_workers: int) -> None:
    now = torch.get_num_threads()
    if isinstance(asked, int):
        wanted = asked
    else:
        owner = _set_by_user(os.environ, now, place)
        if owner:
            tuned.kept["threads"] = owner
            return
        gpu = place.gpu and bool(torch.version.cuda or getattr(torch.version, "hip", None))
        wanted = auto_threads(place, gpu=gpu, loader_workers=loader_workers)
    if wanted == now:
        tuned.kept["threads"] = f"{now} already"
        return
    torch.set_num_threads(wanted)
    tuned.changed["threads"] = Change(now, torch.get_num_threads())


def _set_by_user(environ: Mapping[str, str], now: int, place: Place) -> str:
    """Who decided the number of threads before us, "" for torch itself."""
    for name in _THREAD_VARIABLES:
        value = environ.get(name)
        if value and not (name == "OMP_NUM_THREADS" and value == "1" and _torchrun_chose(environ)):
            return f"{name}={value}"
    chosen = {1} if environ.get("OMP_NUM_THREADS") else _own_choices(place)
    return "" if now in chosen else f"{now}, which is not torch's own choice"


def _own_choices(place: Place) -> set[int]:
    """The numbers that torch and its OpenMP choose by themselves: CPUs or cores, of the mask or of the machine, or half
    of the CPUs, as Debian 12's torch does.
    """
    machine = range(os.cpu_count() or 1)
    quota = cpu_quota(Path("/"))
    limited = {max(1, int(quota))} if quota is not None else set()
    half = max(1, len(machine) // 2)
    return {len(place.cpus), count_cores(place.cpus), len(machine), count_cores(machine), half} | limited


def _torchrun_chose(environ: Mapping[str, str]) -> bool:
    """torchrun sets OMP_NUM_THREADS=1 for its ranks where nobody did. What it was started with itself tells: the kernel
    shows a process' environment as it was at its start."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return False
    try:
        started = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return not any(item.startswith(b"OMP_NUM_THREADS=") for item in started)


def _interop(torch: Any, tuned: Tuned, asked: int | str, place: Place) -> None:
    now = torch.get_num_interop_threads()
    wanted = asked if isinstance(asked, int) else min(2, place.cores)
    if wanted == now:
        tuned.kept["interop_threads"] = f"{now} already"
        return
    try:
        torch.set_num_interop_threads(wanted)
    except RuntimeError:
        tuned.kept["interop_threads"] = f"{now}: set before, or parallel work has started"
        return
    tuned.changed["interop_threads"] = Change(now, wanted)


def _cudnn(torch: Any, tuned: Tuned, *, wanted: bool) -> None:
    cudnn = torch.backends.cudnn
    now = bool(cudnn.benchmark)
    if now == wanted:
        tuned.kept["cudnn_benchmark"] = f"{now} already"
    elif wanted and (cudnn.deterministic or torch.are_deterministic_algorithms_enabled()):
        tuned.kept["cudnn_benchmark"] = "deterministic algorithms were asked for"
    elif not torch.backends.cuda.is_built():
        tuned.kept["cudnn_benchmark"] = "this torch has no cuDNN"
    else:
        cudnn.benchmark = wanted
        tuned.changed["cudnn_benchmark"] = Change(now, wanted)


def _matmul(torch: Any, tuned: Tuned, wanted: Precision) -> None:
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        if os.environ.get(name):
            tuned.kept["matmul_precision"] = f"{name}={os.environ[name]}"
            return
    try:
        now = torch.get_float32_matmul_precision()
    except RuntimeError:  # since 2.9 there is a second way to say it, and the two do not mix
        tuned.kept["matmul_precision"] = "set through fp32_precision"
        return
    if now == wanted:
        tuned.kept["matmul_precision"] = f"{now} already"
    elif now != "highest":
        tuned.kept["matmul_precision"] = f"{now}, which is not torch's own choice"
    else:
        torch.set_float32_matmul_precision(wanted)
        tuned.changed["matmul_precision"] = Change(now, torch.get_float32_matmul_precision())
