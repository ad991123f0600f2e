#!/usr/bin/env python3
"""Trains a small classifier on the CPU and says how fast: the job of examples/demo, and something to try the tool on.

The data is made here (a random teacher network labels random points), so nothing is downloaded, the loss has a known
way down, and it runs with any PyTorch since 1.13. The last line is meant for scripts:

    samples/s 51234.5 loss 0.512 threads 4 cpus 0-3
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from torch import nn

FEATURES, CLASSES, WIDTH = 64, 10, 512


def cpu_list() -> str:
    """Return the CPUs this process may run on, as the kernel writes them: "0-3,8"."""
    with open("/proc/self/status") as status:
        return next(line.split()[1] for line in status if line.startswith("Cpus_allowed_list:"))


def train(seconds: float, batch: int) -> tuple[float, float]:
    """Train for some seconds after a warm-up of one; return samples per second and the mean loss at the end."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(FEATURES, 128), nn.Tanh(), nn.Linear(128, CLASSES))
    student = nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )
    optimiser = torch.optim.Adam(student.parameters(), lr=1e-3)
    loss_of = nn.CrossEntropyLoss()
    steps, mean_loss = 0, 0.0
    measured_from, measured_steps = time.monotonic() + 1.0, 0
    while (now := time.monotonic()) < measured_from + seconds:
        if now < measured_from:
            measured_steps = steps + 1
        points = torch.randn(batch, FEATURES)
        with torch.no_grad():
            labels = teacher(points).argmax(dim=1)
        loss = loss_of(student(points), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        steps += 1
        mean_loss += (loss.item() - mean_loss) * (0.05 if steps > 1 else 1.0)
    return (steps - measured_steps) * batch / (time.monotonic() - measured_from), mean_loss


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description="train a small classifier on the CPU")
    parser.add_argument("--seconds", type=float, default=10.0, help="time to train after a second of warm-up")
    parser.add_argument("--batch", type=int, default=256, help="samples per step")
    options = parser.parse_args()
    print(f"pid {os.getpid()}, PyTorch {torch.__version__}, training for {options.seconds:g} s", flush=True)
    rate, loss = train(options.seconds, options.batch)
    print(f"samples/s {rate:.1f} loss {loss:.3f} threads {torch.get_num_threads()} cpus {cpu_list()}", flush=True)


if __name__ == "__main__":
    main()
