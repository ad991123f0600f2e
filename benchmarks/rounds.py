"""Clocks, turns and a progress bar for the benchmarks beside it. Nothing here needs to be installed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

TOP = Path(__file__).resolve().parents[1]
ENTRY = f"import sys; sys.path.insert(0, {str(TOP)!r}); from torchtuned.run.main import main; sys.exit(main())"
RUN = ["/usr/bin/python3", "-I", "-c", ENTRY, "--quiet"]  # this source tree's, started as the installed one is
REFRESH_S = 0.1


def call_ms(call: Callable[[], object], rounds: int) -> list[float]:
    """Milliseconds of each of so many calls."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1000)
    return times


def process_ms(words: list[str], environ: Mapping[str, str]) -> float:
    """Milliseconds from fork to end of one process, which must succeed."""
    start = time.perf_counter()
    pid = os.posix_spawn(words[0], words, environ)
    status = os.waitpid(pid, 0)[1]
    taken = (time.perf_counter() - start) * 1000
    if status:
        sys.exit(f"{' '.join(words)[:200]}: ended with {os.waitstatus_to_exitcode(status)}")
    return taken


def quantile(times: Sequence[float], share: float) -> float:
    """The measured time that so large a share of them does not exceed."""
    return sorted(times)[int(share * (len(times) - 1))]


def turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Every name once in each round, in an order that moves on."""
    for number in range(rounds):
        for step in range(len(names)):
            yield names[(number + step) % len(names)]


class Bar:
    """How far it is, and about how long the rest takes: one line on a terminal's standard error, gone afterwards."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, -1
        self._begun, self._shown = time.monotonic(), 0.0

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def start(self, what: str = "") -> None:
        """Another part begins, so the one before it is done."""
        self._done += 1
        now = time.monotonic()
        if now < self._shown + REFRESH_S or not sys.stderr.isatty():
            return
        self._shown = now
        filled = 40 * self._done // self._total
        left = f", {(now - self._begun) / self._done * (self._total - self._done):.0f} s" if self._done else ""
        line = f"[{'#' * filled}{'.' * (40 - filled)}] {self._done}/{self._total}{left} {what}"
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
