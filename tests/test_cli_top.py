"""The screen of `torchtuned top` in lines and columns, and the terminal it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import termios
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self, cast

import pytest
from fakes.tree import machine, make_tree
from rich.cells import cell_len

from torchtuned.cli import top as cli_top
from torchtuned.cli import watch as cli_watch
from torchtuned.cli.screen import screen
from torchtuned.cli.top import SIGNALS, Terminal
from torchtuned.cli.watch import Row, View, Watcher
from torchtuned.host import Host

QUIET = Row(
    job="7",
    user="ada",
    command="python train.py",
    state="running",
    cpus="0-7",
    busy=50.0,
    held=0.0,
    memory=12.34 * 2**30,
    memory_near=100.0,
    waits=(1.0, 0.0, 2.0),
    gpus={"0000:01:00.0": 97.0},
    near="yes",
    confinement="cpuset",
)
NOISY = replace(
    QUIET, job="8", held=25.0, waits=(40.0, 6.0, 70.0), near="no", memory_near=30.0, confinement="none", busy=250.0
)


def lines(*rows: Row, width: int = 80, height: int = 24, first: int = 0, unicode: bool = True) -> list[str]:
    view = View(rows=rows, cpus=64, busy=12.0)
    return screen(view, width=width, height=height, first=first, unicode=unicode, keys=True).plain.split("\n")


def test_a_job_in_two_lines() -> None:
    text = lines(QUIET)
    assert text[3].split() == ["7", "ada", "0-7", "████····", "50%", "12.3G", "0", "1", "0", "2", "yes"]
    assert text[4].startswith("      python train.py ")
    assert re.search(r"GPU 01:00.0 97%  for \d", text[4])  # a bare time would stand under "Near"
    assert "!" not in text[3] + text[4]
    assert text[-1] == "q leaves"


def test_what_suffers_has_a_mark_that_is_no_colour() -> None:
    text = lines(NOISY)
    assert text[3].split()[5:] == ["12.3G", "25!", "40!", "6!", "70!", "no!"]
    assert "memory 30 % near!" in text[4]
    assert "not held to its CPUs!" in text[4]


@pytest.mark.parametrize("width", [40, 80, 132])
@pytest.mark.parametrize("height", [8, 24, 50])
@pytest.mark.parametrize("unicode", [True, False])
def test_any_terminal_is_filled_and_never_overrun(width: int, height: int, unicode: bool) -> None:  # noqa: FBT001
    wide = replace(NOISY, command="日本語" * 40, user="a-very-long-name", cpus="0-63,128-191,256-319")
    text = lines(*[wide] * 30, width=width, height=height, unicode=unicode)
    assert len(text) == height
    assert max(map(cell_len, text)) <= width
    if not unicode:
        assert "█" not in "".join(text)


def test_jobs_that_do_not_fit_are_a_key_away() -> None:
    rows = [replace(QUIET, job=str(number)) for number in range(1, 31)]
    text = lines(*rows, first=9)
    assert [line.split()[0] for line in text[3:-3:2] if line] == [str(number) for number in range(10, 19)]
    assert "jobs 10 to 18 of 30; arrows show the others" in text


def test_the_waiting_and_the_unknown() -> None:
    text = lines(Row(job="9", user="ada", command="x", state="queued", cpus=""), replace(QUIET, busy=None, memory=None))
    assert text[0].startswith("torchtuned top   1 running, 1 waiting   64 CPUs, 12 % busy")
    assert text[3].split() == ["9", "ada", "none", "waits", "for", "a", "place"]
    assert text[5].split()[3:5] == ["-", "-"]
    assert "     No jobs. Start one with: torchtuned-run COMMAND" in lines()


def test_many_gpus_are_a_range() -> None:
    row = replace(QUIET, gpus={f"0000:{number:02x}:00.0": 90.0 + number for number in range(8)})
    assert "8 GPUs 90-97%" in lines(row)[4]
    assert "8 GPUs  " in lines(replace(row, gpus=dict.fromkeys(row.gpus)))[4]


# what is measured


def test_rates_are_of_the_time_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = "torchtuned-job-7.scope"
    base = f"sys/fs/cgroup/user.slice/{scope}"
    files = machine(cores=["0", "1", "2", "3"], nodes={0: "0-1", 1: "2-3"}) | {
        "proc/self/cgroup": "0::/user.slice/session-1.scope\n",
        "proc/stat": "cpu 100 0 0 100 0 0 0 0 0 0\n",
        f"{base}/cpu.stat": "usage_usec 1000000\nnr_throttled 0\nthrottled_usec 0\n",
        f"{base}/memory.numa_stat": "anon N0=300 N1=100\n",
        f"{base}/io.pressure": "some avg10=33.00 avg60=0 avg300=0 total=1\n",
    }
    tree = make_tree(tmp_path, files)
    found = {"Id": "7", "Pid": os.getpid(), "Uid": 0, "State": "running", "Cpus": "0-1", "Gpus": ["g"], "Scope": scope}
    objects = {"/j/7": {cli_watch.JOB: found}, "/g": {cli_watch.GPU: {"Address": "g", "Cpus": "0-3"}}}

    class Daemon:
        def __enter__(self) -> Daemon:
            return self

        def __exit__(self, *exc: object) -> None:
            pass

        def objects(self) -> object:
            return objects

    monkeypatch.setattr(cli_watch, "Client", Daemon)
    clock = iter((100.0, 102.0, 104.0))
    monkeypatch.setattr(cli_watch.time, "monotonic", lambda: next(clock))
    watcher = Watcher(Host(tree))
    [first] = watcher.look().rows
    assert (first.busy, first.held, first.near, first.memory_near) == (None, None, "yes", 75.0)
    (tree / base / "cpu.stat").write_text("usage_usec 3000000\nnr_throttled 1\nthrottled_usec 500000\n")
    (tree / "proc/stat").write_text("cpu 130 0 0 110 0 0 0 0 0 0\n")
    view = watcher.look()
    assert (view.rows[0].busy, view.rows[0].held, view.rows[0].waits) == (50.0, 25.0, (None, None, 33.0))
    assert (view.cpus, view.busy) == (4, 75.0)
    (tree / base / "cpu.stat").unlink()
    [gone] = watcher.look().rows
    assert (gone.busy, gone.memory) == (None, None)


# the terminal


@pytest.fixture
def tty(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Standard input is a terminal; its other end."""
    master, slave = os.openpty()
    with os.fdopen(slave, "r") as file:
        monkeypatch.setattr("sys.stdin", file)
        yield master
    os.close(master)


def test_the_terminal_is_as_it_was_after_an_exception(tty: int) -> None:
    before = termios.tcgetattr(tty)
    handlers = [signal.getsignal(number) for number in SIGNALS]

    def fail() -> None:
        with Terminal():
            assert termios.tcgetattr(tty) != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert termios.tcgetattr(tty) == before
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert signal.set_wakeup_fd(-1) == -1


def test_a_terminal_that_is_gone_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its window was closed, or the line broke."""
    handlers = [signal.getsignal(number) for number in SIGNALS]
    master, slave = os.openpty()
    with os.fdopen(slave, "r") as file:
        monkeypatch.setattr("sys.stdin", file)
        with Terminal() as terminal:
            os.close(master)
            assert terminal.wait(20) == "q"
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert signal.set_wakeup_fd(-1) == -1


def test_keys_and_signals_end_the_wait(tty: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal() as terminal:
        os.write(tty, b"\x1b[A")
        assert terminal.wait(20) == "\x1b[A"
        assert terminal.wait(0) == ""
        os.write(tty, "jj\x1b[B\x1bOAé\x1b[6~q".encode())
        assert [terminal.wait(0) for _ in range(8)] == ["j", "j", "\x1b[B", "\x1bOA", "é", "\x1b[6~", "q", ""]
        monkeypatch.setattr(cli_top, "ESCAPE_S", 20)
        os.write(tty, b"j\x1b")
        threading.Timer(0.1, os.write, (tty, b"[B")).start()
        assert [terminal.wait(20), terminal.wait(0)] == ["j", "\x1b[B"]
        monkeypatch.setattr(cli_top, "ESCAPE_S", 0)
        os.write(tty, b"\x1b")
        assert terminal.wait(20) == "\x1b"
        for number in (signal.SIGWINCH, signal.SIGTERM):
            os.kill(os.getpid(), number)
            assert terminal.wait(20) == ""
            assert number in terminal.signals
            terminal.signals.clear()


def test_the_second_look_waits_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of the first screen would be over the milliseconds that its drawing takes."""
    waited: list[float] = []
    looks: list[View] = []

    class Keys:
        signals: ClassVar[set[int]] = set()

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def wait(self, seconds: float) -> str:
            waited.append(seconds)
            return "q"

    class Looks:
        def look(self) -> View:
            looks.append(View(rows=(), cpus=1, busy=None))
            return looks[-1]

    monkeypatch.setattr(cli_top, "Terminal", Keys)
    assert cli_top._live(cast("Watcher", Looks()), 30.0) == 0
    assert (len(looks), len(waited)) == (1, 1)
    assert waited[0] > 20
