"""Fixtures for tests on a private bus.

    def test_x(bus, daemon):            # `bus`: a PrivateBus; `daemon`: starts torchtunedd on it, ready when it returns
        daemon("--sysroot", tree)
        with bus.user(USER) as job:     # a real process of a real second user, which does as it is told
            path, grant = job.register({"schema": 1, "cpus": "1"})

Every test fails that leaves a process, a thread or a descriptor behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from harness import FAKES, Daemon, PrivateBus, Service, small_machine


@pytest.fixture
def bus() -> Iterator[PrivateBus]:
    if not shutil.which("dbus-daemon"):
        pytest.skip("dbus-daemon is not installed")
    folder = Path(tempfile.mkdtemp(prefix="torchtuned-", dir="/tmp"))
    folder.chmod(0o755)
    private = PrivateBus(folder)
    try:
        yield private
    finally:
        private.stop()
        shutil.rmtree(folder)


@pytest.fixture
def services(bus: PrivateBus) -> Iterator[Callable[..., Service]]:
    """services("systemd1", "--version", "257") or services("polkit", "logind") puts a fake on the bus."""
    started: list[Service] = []

    def start(*what: str) -> Service:
        if what[0] == "systemd1":
            service = Service(bus, "org.freedesktop.systemd1", str(FAKES / "systemd1.py"), bus.address, *what[1:])
        else:
            name = {"polkit": "org.freedesktop.PolicyKit1", "logind": "org.freedesktop.login1",
                    "ppd": "net.hadess.PowerProfiles", "tuned": "com.redhat.tuned"}[what[0]]  # fmt: skip
            service = Service(bus, name, str(FAKES / "desktop.py"), bus.address, *what)
        started.append(service)
        return service

    yield start
    for service in started:
        service.stop()


@pytest.fixture
def daemons() -> list[Daemon]:
    """Those that the test has started."""
    return []


@pytest.fixture
def daemon(bus: PrivateBus, daemons: list[Daemon]) -> Iterator[Callable[..., Daemon]]:
    """daemon(arguments…) starts torchtunedd and waits until it has its name; wait_for("ready") for its policy, too."""
    started = daemons

    def start(*arguments: object, ready: bool = True, keep: Mapping[str, int] | None = None) -> Daemon:
        one = Daemon(bus, *map(str, arguments), keep=keep)
        started.append(one)
        if ready:
            one.wait_for("READY=1")
        return one

    yield start
    for one in started:
        if one.process.returncode is None:
            one.stop(signal.SIGKILL)
        one.close()
    for one in started:
        text = one.log.read_text()
        assert "Traceback" not in text, text


@pytest.fixture
def tree(bus: PrivateBus) -> Path:
    """A small machine in a folder, for daemon("--sysroot", tree)."""
    return small_machine(bus.folder)


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    """A test leaves nothing behind: no child process, no thread, no descriptor."""
    fds = set(os.listdir("/proc/self/fd"))
    yield
    assert not psutil.Process().children(), "a child process is left"
    assert threading.active_count() == 1, f"threads are left: {threading.enumerate()}"
    left = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
            if fd not in fds and os.path.lexists(f"/proc/self/fd/{fd}")}  # fmt: skip
    assert not left, f"descriptors are left: {left}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the daemons' logs beside a failure."""
    report = yield
    if report.failed and report.when == "call":
        for one in getattr(item, "funcargs", {}).get("daemons", ()):
            report.sections.append(("torchtunedd", one.log.read_text()))
    return report
