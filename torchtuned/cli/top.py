"""`torchtuned top`: the jobs live on one screen, until q.

The terminal gets its settings and its screen back however this ends, SIGKILL apart: signals only wake the loop, and
the loop leaves through the same door as q does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable
from dataclasses import asdict
from types import FrameType, TracebackType
from typing import Self

from torchtuned.cli import render
from torchtuned.cli.command import FINE, SCHEMA, print_json, print_unreachable
from torchtuned.cli.machine import host_of, sysroot_option
from torchtuned.cli.screen import FOOT, HEAD, screen
from torchtuned.cli.watch import View, Watcher
from torchtuned.errors import DaemonUnreachable

ONCE_S = 1.0  # between the two readings of --once
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGWINCH)
KEYS = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
ESCAPE_S = 0.2  # in which the rest of a key's letters comes, also over a slow line
UP, DOWN = ("k", "\x1b[A", "\x1bOA"), ("j", "\x1b[B", "\x1bOB")


def top_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="print one screen and end; so it is without a terminal")
    parser.add_argument("--interval", type=_seconds, default=2.0, metavar="S", help="seconds between two looks; 2")
    sysroot_option(parser)


def top(args: argparse.Namespace) -> int:
    watcher = Watcher(host_of(args))
    if args.json or args.once or not _is_screen():
        try:
            watcher.look()
        except DaemonUnreachable as error:
            print_unreachable(args, error)
            raise
        time.sleep(min(args.interval, ONCE_S))
        _print(watcher.look(), as_json=args.json)
        return FINE
    while _live(watcher, args.interval) == signal.SIGTSTP:
        os.kill(os.getpid(), signal.SIGSTOP)  # with the terminal as it was; fg starts the next round
    return FINE


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.2 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.2 to 3600")
    return value


def _is_screen() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def _print(view: View, *, as_json: bool) -> None:
    if as_json:
        document = asdict(view)
        print_json({"schema": SCHEMA, "jobs": document.pop("rows"), **document})
    else:
        out = render.console()
        out.print(screen(view, width=out.width, height=0, first=0, unicode=_unicode(), keys=False))


def _unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def _live(watcher: Watcher, interval: float) -> int:
    """Until a key or a signal ends it: 0 for q, SIGTSTP when it is to stop for a while. Other signals end the program
    with the status a shell would give."""
    from rich.live import Live

    out = render.console()
    view, first, due = watcher.look(), 0, time.monotonic() + interval  # what grows is known from the second look on
    with Terminal() as terminal, Live(console=out, screen=True, auto_refresh=False, redirect_stdout=False) as live:
        while True:
            if time.monotonic() >= due:
                view, due = watcher.look(), time.monotonic() + interval
            room = max(1, (out.height - HEAD - FOOT) // 2)
            first = max(0, min(first, len(view.rows) - room))
            text = screen(view, width=out.width, height=out.height, first=first, unicode=_unicode(), keys=True)
            live.update(text, refresh=True)
            key = terminal.wait(max(0.0, due - time.monotonic()))
            if signal.SIGTSTP in terminal.signals:
                return signal.SIGTSTP
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                if number in terminal.signals:
                    raise SystemExit(128 + number)
            terminal.signals.clear()
            if key in ("q", "Q", "\x04", "\x1b"):
                return 0
            if key in ("r", "\x0c"):
                due = 0.0
            first += (key in DOWN) - (key in UP)


class Terminal:
    """Standard input without echo and line by line reading, and signals that only wake the one who waits for keys."""

    def __init__(self) -> None:
        self.signals: set[int] = set()
        self._fd = sys.stdin.fileno()
        self._keys: list[str] = []  # typed, and not asked for yet

    def __enter__(self) -> Self:
        self._settings = termios.tcgetattr(self._fd)
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        try:
            for number in SIGNALS:
                self._handlers[number] = signal.signal(number, self._came)
            signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
            tty.setcbreak(self._fd, termios.TCSANOW)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(termios.error):  # a terminal that is gone has no settings
            termios.tcsetattr(self._fd, termios.TCSANOW, self._settings)
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._wake)
        os.close(self._woken)

    def wait(self, seconds: float) -> str:
        """The next key, "" when the time is up or a signal came. A terminal that is gone is a q."""
        if self.signals:
            return ""
        if self._keys:
            return self._keys.pop(0)
        ready, _, _ = select.select([self._fd, self._wake], [], [], seconds)
        if self._wake in ready:
            os.read(self._wake, 512)
        if self._fd not in ready:
            return ""
        try:
            text = os.read(self._fd, 512)
            if text.endswith((b"\x1b", b"\x1b[", b"\x1bO")) and select.select([self._fd], [], [], ESCAPE_S)[0]:
                text += os.read(self._fd, 512)
        except OSError:
            return "q"
        self._keys = KEYS.findall(text.decode("utf-8", "replace")) or ["q"]
        return self._keys.pop(0)

    def _came(self, number: int, frame: FrameType | None) -> None:
        self.signals.add(number)
