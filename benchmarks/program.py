"""What the settings inside a training program are worth on this machine's CPU: one pair per claim of the README.

    python3 benchmarks/program.py [--rounds 15] [--quick] [--json]

Each pair is the same work done two ways that take turns (A B A B …), so that whatever else the machine does hits both.
The times are medians of the rounds; the ratio is the median of the rounds' own ratios, with its quartiles, and compares
nothing but this one run. The loaders decode the pictures of examples/slow_train.py; the first row is that script
against fast_train.py, each in a process of its own, by its own clock, in a third of the rounds. Needs torch, and
nothing else of the package than torchtuned.torch. Run it on an idle machine: others' load blurs threads most. Takes
about three minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import slow_train
from rounds import Bar
from slow_train import Pictures

from torchtuned.torch import here, loader_args

EXAMPLES = Path(slow_train.__file__).parent
Way = Callable[[], Any]
WHOLE = "whole script"


class Uneven(Pictures):  # type: ignore[misc,valid-type]
    """One picture in 64 is twenty times as large as the others, as photographs among thumbnails are."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        for _ in range(19 if index % 64 == 0 else 0):
            super().__getitem__(index)
        found: tuple[torch.Tensor, int] = super().__getitem__(index)
        return found


def model(width: int = 512) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def training(dataset: Dataset[Any], *, threads: int = 1, **options: Any) -> Way:
    """One epoch of the examples' network over decoded pictures, with DataLoader's options."""
    loader: DataLoader[Any] = DataLoader(dataset, **options)
    net = slow_train.build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def way() -> None:
        torch.set_num_threads(threads)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(net(inputs), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        torch.set_num_threads(1)

    return way


def example(name: str) -> Way:
    """A whole example in a process of its own; returns the seconds it measured itself, without the imports."""
    words = [sys.executable, str(EXAMPLES / name), "--epochs", "2", "--samples", "512"]
    environ = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}

    def way() -> float:
        run = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
        return float(run.stdout.split()[-2])

    return way


def waiting(*, each_step: bool) -> Way:
    """A loop of small steps that takes the loss out as a number in each, or adds tensors up and does it once."""
    net, inputs = model(64), torch.randn(16, 64)
    labels = torch.randint(10, (16,))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def way() -> float:
        total, number = torch.zeros(()), 0.0
        for _ in range(150):
            loss = nn.functional.cross_entropy(net(inputs), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if each_step:
                number += loss.item()
            else:
                total += loss.detach()
        return number + total.item()

    return way


def threaded(threads: int) -> Way:
    left, right = torch.randn(512, 512), torch.randn(512, 512)

    def way() -> None:
        torch.set_num_threads(threads)
        for _ in range(8):
            torch.relu(left @ right)
        torch.set_num_threads(1)

    return way


def stepping(**options: Any) -> Way:
    """Optimizer steps over many small parameters, where the overhead per parameter counts."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(64, 64)) for _ in range(100)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, **options)

    def way() -> None:
        for _ in range(10):
            optimizer.step()

    return way


def evaluating(*, graph: bool) -> Way:
    net, inputs = model(512), torch.randn(256, 64)
    net.eval()

    def way() -> None:
        with torch.set_grad_enabled(graph):
            for _ in range(20):
                net(inputs)

    return way


def pairs() -> list[tuple[str, str, Way, str, Way]]:
    """(what, faulty way, mended way), both described."""
    args = loader_args()
    cores = here().cores
    left = max(1, cores - args["num_workers"])
    one: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    found = [
        (WHOLE, "slow_train.py", example("slow_train.py"), "fast_train.py", example("fast_train.py")),
        (
            "workers",
            f"num_workers=0, {cores} threads",
            training(Pictures(256), batch_size=32, threads=cores),
            "loader_args(): " + ", ".join(f"{name}={value}" for name, value in args.items()) + f"; {left} threads",
            training(Pictures(256), batch_size=32, threads=left, **args),
        ),
        (
            "persistent workers",
            "started each epoch",
            training(Pictures(128), batch_size=32, num_workers=1),
            "persistent_workers=True",
            training(Pictures(128), batch_size=32, **one),
        ),
        (
            "prefetch",
            "prefetch_factor=1, uneven pictures",
            training(Uneven(256), batch_size=16, prefetch_factor=1, **one),
            "prefetch_factor=4",
            training(Uneven(256), batch_size=16, prefetch_factor=4, **one),
        ),
        (
            "synchronisation",
            ".item() in each step",
            waiting(each_step=True),
            "once per epoch",
            waiting(each_step=False),
        ),
        ("threads", "1 (torchrun's default)", threaded(1), f"{cores} (cores)", threaded(cores)),
        ("threads, too many", f"{4 * cores} on {cores} cores", threaded(4 * cores), f"{cores}", threaded(cores)),
        ("optimizer", "AdamW, a loop over parameters", stepping(foreach=False), "foreach=True", stepping(foreach=True)),
        ("evaluation", "autograd on", evaluating(graph=True), "no_grad", evaluating(graph=False)),
    ]
    try:
        found.append(("optimizer, fused", "AdamW", stepping(foreach=False), "fused=True", stepping(fused=True)))
    except (RuntimeError, TypeError):
        pass  # before 2.4 there is no fused optimizer for the CPU
    return found


def measure(one: Way, other: Way, rounds: int, tick: Callable[[], None], *, own_clock: bool) -> dict[str, float]:
    """Median seconds of two ways that take turns, after one unmeasured turn each, and the quartiles of their ratio."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for way, kept in ((one, times[0]), (other, times[1])):
            tick()
            start = time.perf_counter()
            measured = way()
            if number:
                kept.append(measured if own_clock else time.perf_counter() - start)
    low, middle, high = statistics.quantiles([a / b for a, b in zip(*times, strict=True)], n=4)
    return {
        "faulty_s": statistics.median(times[0]),
        "mended_s": statistics.median(times[1]),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
    }


def machine() -> str:
    name = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    return f"{name}, {len(os.sched_getaffinity(0))} CPUs, torch {torch.__version__}, Python {platform.python_version()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds per pair (default 15)")
    parser.add_argument("--quick", action="store_true", help="three rounds: to see that it runs, not to quote")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    if rounds < 2:
        parser.error("--rounds: 2 or more, a spread needs two")
    torch.set_num_threads(1)  # but for the pairs about threads: two settings at once would measure neither
    everything = pairs()
    wanted = [max(2, rounds // 3) if row[0] == WHOLE else rounds for row in everything]
    rows: list[dict[str, Any]] = []
    with Bar(sum(2 * (count + 1) for count in wanted)) as bar:
        for (what, faulty, one, mended, other), count in zip(everything, wanted, strict=True):
            figures = measure(one, other, count, partial(bar.start, what), own_clock=what == WHOLE)
            rows.append({"what": what, "faulty": faulty, "mended": mended, **figures})
    if options.json:
        print(json.dumps({"schema": 1, "machine": machine(), "rounds": rounds, "rows": rows}, indent=2))
        return 0
    print(f"{machine()}; medians of {rounds} interleaved rounds")
    for row in rows:
        times = f"{row['faulty_s'] * 1000:7.1f} ms -> {row['mended_s'] * 1000:7.1f} ms"
        ratio = f"{row['ratio']:5.2f}x ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
        print(f"{row['what']:20} {times}  {ratio}  {row['faulty']} -> {row['mended']}")
    print(
        "GPU: not measured here" if not torch.cuda.is_available() else "GPU: there is one, not used by this benchmark"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
