"""A private bus, the real daemon on it, and the services that it talks to.

    def test_x(bus, daemon):            # `bus`: a PrivateBus; `daemon`: starts torchtunedd on it, ready when it returns
        daemon("--sysroot", tree)
        with bus.user(1000) as job:     # a real process of a real second user, which does as it is told
            path, grant = job.register({"schema": 1, "cpus": "1"})

`run(coroutine)` gives a test an event loop of its own. Every test fails that leaves a process, a thread or a
descriptor behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from torchtuned.bus import Bus

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
POLICY = REPOSITORY / "share/dbus-1/system.d/org.torchtuned1.conf"
FAKES = REPOSITORY / "tests/fakes"
MANAGER = "org.torchtuned1.Manager"
ROOT = "/org/torchtuned1"
PROPERTIES = "org.freedesktop.DBus.Properties"
CONFIG = """\
<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/>
    <deny own="*"/>
    <deny send_type="method_call"/>
    <allow send_type="signal"/>
    <allow send_requested_reply="true" send_type="method_return"/>
    <allow send_requested_reply="true" send_type="error"/>
    <allow receive_type="method_call"/>
    <allow receive_type="method_return"/>
    <allow receive_type="error"/>
    <allow receive_type="signal"/>
    <allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus"/>
    <allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus.Introspectable"/>
    <allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus.Properties"/>
  </policy>
  <policy user="root">
    <allow own_prefix="org.freedesktop"/>
    <allow own_prefix="net.hadess"/>
    <allow send_destination_prefix="org.freedesktop"/>
    <allow send_destination="net.hadess.PowerProfiles"/>
    <allow send_interface="org.torchtuned1.Test"/>
  </policy>
  <include>{policy}</include>
</busconfig>
"""


def run(work: Any) -> Any:
    return asyncio.run(work)


class PrivateBus:
    """A dbus-daemon of system type with the packaged policy, in a folder that every user can reach."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"unix:path={folder}/bus"
        self.environment = {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": self.address, "PYTHONPATH": str(REPOSITORY)}
        self.environment.pop("JOURNAL_STREAM", None)
        config = folder / "bus.conf"
        config.write_text(CONFIG.format(socket=folder / "bus", policy=POLICY))
        command = ["dbus-daemon", f"--config-file={config}", "--nofork", "--nopidfile", "--print-address=1"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=(folder / "bus.log").open("wb"))
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), (folder / "bus.log").read_text()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    async def connect(self) -> Bus:
        return await Bus.connect(self.address)

    def call(self, path: str, interface: str, member: str, signature: str = "", *body: Any, to: str = "") -> list[Any]:
        """One call as root, from a connection of its own."""

        async def once() -> list[Any]:
            bus = await self.connect()
            try:
                return await bus.call(to or "org.torchtuned1", path, interface, member, signature, list(body))
            finally:
                await bus.close()

        return list(run(once()))

    def get(self, path: str, interface: str, name: str) -> Any:
        return self.call(path, PROPERTIES, "Get", "ss", interface, name)[0]

    def managed(self) -> dict[str, Any]:
        found: dict[str, Any] = self.call(ROOT, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects")[0]
        return found

    def user(self, uid: int = 0) -> Puppet:
        return Puppet(self, uid)


class Service:
    """A fake service beside the bus, steered through org.torchtuned1.Test."""

    def __init__(self, bus: PrivateBus, name: str, *command: str) -> None:
        self.bus, self.name = bus, name
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, env=bus.environment, cwd=REPOSITORY
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def set(self, key: str, value: Any) -> None:
        self.bus.call("/test", "org.torchtuned1.Test", "Set", "ss", key, json.dumps(value), to=self.name)

    def get(self, key: str) -> Any:
        return json.loads(self.bus.call("/test", "org.torchtuned1.Test", "Get", "s", key, to=self.name)[0])

    def calls(self, member: str) -> list[Any]:
        return [arguments for name, arguments in self.get("calls") if name == member]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Puppet:
    """A process of some user that does as it is told (puppet.py); its own pidfd is what it registers."""

    def __init__(self, bus: PrivateBus, uid: int) -> None:
        command = [sys.executable, "-I", str(HERE / "puppet.py"), str(REPOSITORY)]
        if uid:
            command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *command]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=bus.environment, text=True
        )
        self.pid = self.do("pid")

    def __enter__(self) -> Puppet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def do(self, what: str, *arguments: Any) -> Any:
        """Have it do one thing and return the answer; errors of the bus are raised as RuntimeError("NAME: text")."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def register(self, request: dict[str, Any] | str | None = None, pid: int | None = None) -> tuple[str, dict[str, Any]]:
        text = request if isinstance(request, str) else json.dumps({"schema": 1, **(request or {})})
        path, grant = self.do("register", pid or self.pid, text)
        return path, json.loads(grant)

    def commit(self, path: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.do("call", ROOT, MANAGER, "Commit", "o", path)[0])
        return document

    def start(self, request: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """What torchtuned-run does: register, confine itself, commit."""
        path, grant = self.register(request)
        if grant["confinement"] == "affinity":
            self.do("pin", grant["cpus"])
        return path, self.commit(path)

    def release(self, path: str) -> None:
        self.do("call", ROOT, MANAGER, "Release", "o", path)

    def kill(self) -> None:
        """SIGKILL, reaped; its children of `fork` too."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


class Daemon:
    """torchtunedd on a private bus. `ready` and `status` come through its NOTIFY_SOCKET, as systemd has them."""

    def __init__(self, bus: PrivateBus, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        self.bus, self.folder = bus, bus.folder
        self.run_dir, self.state_dir = bus.folder / "run", bus.folder / "state"
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.settimeout(20)
        name = str(bus.folder / f"notify-{len(list(bus.folder.iterdir()))}")
        self.notify.bind(name)
        self.log = bus.folder / "daemon.log"
        self.kept: dict[str, int] = {}
        self.said: list[str] = []
        command = [sys.executable, "-m", "torchtuned.daemon", f"--run-dir={self.run_dir}", f"--state-dir={self.state_dir}"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *arguments], env={**bus.environment, **environment, "NOTIFY_SOCKET": name}, stderr=log
            )

    def wait_for(self, text: str) -> str:
        """The next notification that holds `text`."""
        while True:
            if self.process.poll() is not None:
                pytest.fail(f"torchtunedd ended with {self.process.returncode}:\n{self.log.read_text()}")
            message = self._receive()
            if text in message:
                return message

    def _receive(self) -> str:
        data, fds, _, _ = socket.recv_fds(self.notify, 4096, 4)
        message = data.decode()
        self.said.append(message)
        fields = dict(line.split("=", 1) for line in message.splitlines())
        for fd in fds:
            self.kept[fields.get("FDNAME", "")] = fd
        if "FDSTOREREMOVE" in fields and fields["FDNAME"] in self.kept:
            os.close(self.kept.pop(fields["FDNAME"]))
        return message

    def drain(self) -> list[str]:
        """All notifications that have arrived."""
        self.notify.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._receive()
        self.notify.settimeout(20)
        return self.said

    def stop(self, how: int = signal.SIGTERM) -> int:
        """End it, and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"torchtunedd did not end:\n{self.log.read_text()}")
        finally:
            with contextlib.suppress(OSError):
                self.drain()
            self.notify.close()
            for fd in self.kept.values():
                os.close(fd)
            self.kept.clear()


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
                    "ppd": "net.hadess.PowerProfiles"}[what[0]]  # fmt: skip
            service = Service(bus, name, str(FAKES / "desktop.py"), bus.address, *what)
        started.append(service)
        return service

    yield start
    for service in started:
        service.stop()


@pytest.fixture
def daemon(bus: PrivateBus) -> Iterator[Callable[..., Daemon]]:
    """daemon(arguments…) starts torchtunedd; it has its name, and has applied its policy, when this returns."""
    started: list[Daemon] = []

    def start(*arguments: object, ready: bool = True, **environment: str) -> Daemon:
        one = Daemon(bus, tuple(map(str, arguments)), environment)
        started.append(one)
        if ready:
            one.wait_for("READY=1")
        return one

    yield start
    for one in started:
        if one.process.returncode is None:
            one.stop(signal.SIGKILL)
    for one in started:
        text = one.log.read_text()
        assert "Traceback" not in text, text


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
