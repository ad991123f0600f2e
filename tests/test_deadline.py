from __future__ import annotations

import threading
import time

import pytest

from torchtuned.deadline import LEAST_S, Deadline, Hung


def test_what_a_call_returns_or_raises_comes_through() -> None:
    deadline = Deadline(5)
    assert deadline.run("a", lambda: 1) == 1
    with pytest.raises(ZeroDivisionError):
        deadline.run("a", lambda: 1 // 0)
    with pytest.raises(SystemExit):
        deadline.run("a", lambda: exec("raise SystemExit"))
    with pytest.raises(TimeoutError, match="its own"):
        deadline.run("a", lambda: exec("raise TimeoutError('its own')"))


def test_calls_share_one_thread() -> None:
    deadline = Deadline(5)
    assert len({deadline.run("a", threading.get_ident) for _ in range(100)}) == 1


def test_the_thread_ends_with_its_owner() -> None:
    deadline = Deadline(5)
    thread = deadline.run("a", threading.current_thread)
    del deadline
    thread.join(10)
    assert not thread.is_alive()


def test_a_call_that_hangs_is_left_behind_until_it_comes_back() -> None:
    deadline, release = Deadline(0.1), threading.Event()
    others = set(threading.enumerate())  # those of earlier tests may end meanwhile
    with pytest.raises(Hung, match=r"^a: no answer from the kernel within 0.1 s$"):
        deadline.run("a", release.wait)
    assert deadline.run("b", lambda: 2) == 2
    started = time.monotonic()
    with pytest.raises(Hung, match="an earlier access to it still hangs"):
        deadline.run("a", lambda: 3)
    assert time.monotonic() - started < 0.1
    release.set()
    until = time.monotonic() + 10
    while len(set(threading.enumerate()) - others) > 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(set(threading.enumerate()) - others) == 1  # the thread that hung has ended, the new one serves
    assert deadline.run("a", lambda: 3) == 3


def test_who_needs_more_time_gets_it() -> None:
    deadline = Deadline(0.05)
    assert deadline.run("a", lambda: time.sleep(0.3) or 1, patience=5.0) == 1
    with pytest.raises(Hung, match=r"within 0\.05 s"):
        deadline.run("b", lambda: time.sleep(0.3), patience=0.01)


def test_many_calls_that_hang_leave_time_for_one_that_does_not() -> None:
    deadline, release = Deadline(1.0), threading.Event()
    started = time.monotonic()
    with deadline.within(0.8):
        for number in range(6):
            with pytest.raises(Hung):
                deadline.run(f"hangs {number}", release.wait, patience=5.0)
        assert deadline.run("well", lambda: 1) == 1
    assert time.monotonic() - started < 0.8 + 6 * LEAST_S
    assert deadline.run("slow", lambda: time.sleep(0.5) or 1) == 1
    release.set()
