"""What the settings inside a training program are worth on this machine's CPU: one pair per claim of the README.

    python3 benchmarks/program.py [--rounds 15] [--json]

Each pair is the same work done two ways that take turns (A B A B …), so that whatever else the machine does hits both.
The times are medians of the rounds; the ratio is the median of the rounds' own ratios, with its quartiles, and compares
nothing but this one run. Data is made up; the loaders read samples whose decoding costs real CPU time. Needs torch,
nothing else of the package than torchtuned.torch. Run it on an idle machine: others' load blurs threads most.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torchtuned.torch import here, loader_args

Way = Callable[[], Any]


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Samples that must be decoded, here by plain Python over bytes, as text and many image formats are. `slow_every`
    makes each n-th one ten times as long, as files on a disk are."""

    def __init__(self, count: int, *, slow_every: int = 0) -> None:
        self.count, self.slow_every = count, slow_every

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        rounds = 10 if self.slow_every and index % self.slow_every == 0 else 1
        value = index
        for _ in range(rounds * 2_000):
            value = (value * 1103515245 + 12345) & 0x7FFFFFFF
        return torch.full((64,), value % 97 / 97), value % 10


def model(width: int = 512) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def epoch(loader: DataLoader[Any], net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(net(inputs), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def training(**options: Any) -> Way:
    """One epoch over decoded samples with DataLoader's options."""
    slow_every = options.pop("slow_every", 0)
    loader: DataLoader[Any] = DataLoader(Samples(512, slow_every=slow_every), batch_size=32, **options)
    net = model(1024)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    return lambda: epoch(loader, net, optimizer)


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
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        for _ in range(8):
            torch.relu(left @ right)
        torch.set_num_threads(before)

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
    found = [
        (
            "workers",
            "num_workers=0",
            training(),
            "loader_args(): " + ", ".join(f"{name}={value}" for name, value in args.items()),
            training(**args),
        ),
        (
            "persistent workers",
            "started each epoch",
            training(num_workers=1),
            "persistent_workers=True",
            training(num_workers=1, persistent_workers=True),
        ),
        (
            "prefetch",
            "prefetch_factor=1, uneven samples",
            training(num_workers=1, persistent_workers=True, prefetch_factor=1, slow_every=64),
            "prefetch_factor=4",
            training(num_workers=1, persistent_workers=True, prefetch_factor=4, slow_every=64),
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


def measure(one: Way, other: Way, rounds: int, tick: Callable[[], None]) -> dict[str, float]:
    """Median seconds of two ways that take turns, after one unmeasured turn each, and the quartiles of their ratio."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for way, kept in ((one, times[0]), (other, times[1])):
            start = time.perf_counter()
            way()
            if number:
                kept.append(time.perf_counter() - start)
            tick()
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
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    options = parser.parse_args()
    torch.set_num_threads(1)  # but for the pairs about threads: two settings at once would measure neither
    everything = pairs()
    total, done = len(everything) * 2 * (options.rounds + 1), 0

    def tick() -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            filled = 40 * done // total
            print(f"\r[{'#' * filled}{'.' * (40 - filled)}] {done}/{total}", end="", file=sys.stderr, flush=True)

    rows: list[dict[str, Any]] = []
    for what, faulty, one, mended, other in everything:
        figures = measure(one, other, options.rounds, tick)
        rows.append({"what": what, "faulty": faulty, "mended": mended, **figures})
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if options.json:
        print(json.dumps({"schema": 1, "machine": machine(), "rounds": options.rounds, "rows": rows}, indent=2))
        return 0
    print(f"{machine()}; medians of {options.rounds} interleaved rounds")
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
