"""`torchtuned top` in a terminal of 80 by 24, with a real daemon and real jobs."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.tree import make_tree
from harness import REPOSITORY, USER, Daemon, PrivateBus, Service

Start = Callable[..., Daemon]
SCOPE = "sys/fs/cgroup/user.slice/user-1000.slice/torchtuned-job-1.scope"
FIGURES = {
    f"{SCOPE}/cpu.stat": "usage_usec 1000000\nnr_throttled 0\nthrottled_usec 0\n",
    f"{SCOPE}/memory.current": "1073741824\n",
    f"{SCOPE}/cpu.pressure": "some avg10=44.00 avg60=0 avg300=0 total=1\n",
}
ALTERNATE_ON, ALTERNATE_OFF, CURSOR_ON = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


class Screen:
    """torchtuned top in a terminal of its own."""

    def __init__(self, bus: PrivateBus, *words: str, **environment: str) -> None:
        self.master, self.slave = os.openpty()
        self.resize(24, 80)
        self.before = termios.tcgetattr(self.slave)
        env = {**bus.environment, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **environment}
        for name in ("COLUMNS", "LINES"):
            env.pop(name, None)
        command = [sys.executable, "-m", "torchtuned", "top", *words]
        self.process = subprocess.Popen(
            command, stdin=self.slave, stdout=self.slave, stderr=self.slave, env=env, cwd=REPOSITORY
        )
        self.seen = ""

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, text: str) -> str:
        """What is shown up to and with `text`, and forget it."""
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], 30)
            assert ready, f"no {text!r} in {self.seen!r}"
            self.seen += os.read(self.master, 65536).decode()
        shown, self.seen = self.seen[: self.seen.index(text) + len(text)], self.seen.partition(text)[2]
        return shown

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def end(self) -> int:
        """The exit status; the terminal must be as it was."""
        assert CURSOR_ON in self.until(ALTERNATE_OFF)
        status = self.process.wait(30)
        assert termios.tcgetattr(self.slave) == self.before
        return status

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def screen(
    bus: PrivateBus, services: Callable[..., Service], daemon: Start, tree: Path
) -> Iterator[Callable[..., Screen]]:
    services("systemd1")
    make_tree(tree, FIGURES)
    daemon("--sysroot", tree)
    opened: list[Screen] = []

    def start(*words: str, **environment: str) -> Screen:
        opened.append(Screen(bus, "--sysroot", str(tree), "--interval", "0.2", *words, **environment))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_q_leaves(bus: PrivateBus, screen: Callable[..., Screen]) -> None:
    with bus.user(USER) as job:
        job.start({"gpus": 1})
        top = screen()
        assert ALTERNATE_ON in top.until("q leaves")
        shown = top.until("q leaves")
        assert "nobody" in shown
        assert "1.0G" in shown
        assert "44!" in shown
        assert "GPU 01:00.0" in shown
        top.type("q")
        assert top.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_leaves_the_terminal_in_order(screen: Callable[..., Screen], number: signal.Signals) -> None:
    top = screen()
    top.until("q leaves")
    top.process.send_signal(number)
    assert top.end() == 128 + number


def test_ctrl_c_does_too(screen: Callable[..., Screen]) -> None:
    top = screen()
    top.until("q leaves")
    top.process.send_signal(signal.SIGINT)
    assert top.end() == 130


def test_it_stops_and_goes_on(screen: Callable[..., Screen]) -> None:
    top = screen()
    top.until("q leaves")
    top.process.send_signal(signal.SIGTSTP)
    top.until(ALTERNATE_OFF)
    _, status = os.waitpid(top.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert termios.tcgetattr(top.slave) == top.before
    top.process.send_signal(signal.SIGCONT)
    assert ALTERNATE_ON in top.until("q leaves")
    top.type("q")
    assert top.end() == 0


def test_it_fits_the_terminal_that_it_is_in_now(screen: Callable[..., Screen]) -> None:
    top = screen()
    top.until("q leaves")
    top.resize(10, 50)
    top.process.send_signal(signal.SIGWINCH)
    top.until("…")  # 80 columns do not need one
    top.type("q")
    assert top.end() == 0


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {}], ids=["plain", "colours"])
def test_colours_are_left_out_when_asked(
    bus: PrivateBus, screen: Callable[..., Screen], environment: dict[str, str]
) -> None:
    with bus.user(USER) as job:
        job.start()
        top = screen(**environment)
        top.until("q leaves")
        shown = top.until("44!")
        assert ("\x1b[1;33m" in shown) == (not environment)
        top.type("q")
        assert top.end() == 0


def test_without_a_terminal_it_is_printed_once(
    bus: PrivateBus, services: Callable[..., Service], daemon: Start, tree: Path
) -> None:
    services("systemd1")
    make_tree(tree, FIGURES)
    daemon("--sysroot", tree)
    command = [sys.executable, "-m", "torchtuned", "top", "--sysroot", str(tree), "--interval", "0.2"]
    options = {"env": {**bus.environment, "COLUMNS": "80"}, "cwd": REPOSITORY, "stdin": subprocess.DEVNULL}
    with bus.user(USER) as job:
        job.start()
        text = subprocess.check_output(command, text=True, **options)
        document = json.loads(subprocess.check_output([*command, "--json"], text=True, **options))
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    [row] = document["jobs"]
    assert (row["job"], row["cpus"], row["waits"], row["memory"]) == ("1", "0-3", [44.0, None, None], 1 << 30)
    assert document["schema"] == 1


def test_no_daemon_is_an_error(bus: PrivateBus) -> None:
    command = [sys.executable, "-m", "torchtuned", "top", "--once"]
    done = subprocess.run(command, env=bus.environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (69, "")
