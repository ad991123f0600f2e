"""The sd-bus client against a real dbus-daemon, with a small dbus-next service as its peer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtuned import errors
from torchtuned.client import MANAGER, ROOT, Client, printable

SERVICE = """
import asyncio
from dbus_next import BusType, DBusError, Variant
from dbus_next.aio import MessageBus
from dbus_next.service import ServiceInterface, dbus_property, method, signal
from dbus_next.constants import PropertyAccess

class Manager(ServiceInterface):
    def __init__(self):
        super().__init__("org.torchtuned1.Manager")
    @dbus_property(access=PropertyAccess.READ)
    def State(self) -> "s":
        return "ready"
    @dbus_property(access=PropertyAccess.READ)
    def Degraded(self) -> "as":
        return ["a", "b"]
    @dbus_property(access=PropertyAccess.READ)
    def LastApplied(self) -> "t":
        return 2**63
    @dbus_property(access=PropertyAccess.READ)
    def Jobs(self) -> "u":
        return 7
    @method()
    def Plan(self) -> "a(ssssss)":
        return [["k", "c", "w", "applied", "r\\u00e9", "s"]]
    @method()
    def Undo(self, knobs: "as") -> "a(ssssss)":
        return [[knob, "", "", "", "", ""] for knob in knobs]
    @method()
    def Check(self) -> "aa{sv}":
        return [{"code": Variant("s", "T01"), "n": Variant("i", -3), "yes": Variant("b", True)}]
    @method()
    def Register(self, pidfd: "h", request: "s") -> "os":
        with open(f"/proc/self/fdinfo/{pidfd}") as info:
            pid = next(line.split()[1] for line in info if line.startswith("Pid:"))
        return ["/org/torchtuned1/jobs/" + pid, request]
    @method()
    def Reload(self):
        raise DBusError("org.torchtuned1.Error.NotAuthorized", "not \\x1b[31mallowed")
    @method()
    def Apply(self):
        raise DBusError("org.example.Odd", "odd")
    @method()
    async def Verify(self):
        await asyncio.sleep(60)
    @method()
    def Release(self, job: "o"):
        self.Granted(job, "{}")
    @signal()
    def Granted(self, job, grant) -> "os":
        return [job, grant]

async def main():
    bus = await MessageBus(bus_type=BusType.SYSTEM, negotiate_unix_fd=True).connect()
    bus.export("/org/torchtuned1", Manager())
    await bus.request_name("org.torchtuned1")
    print("ready", flush=True)
    await bus.wait_for_disconnect()
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def bus() -> Iterator[str]:
    daemon = subprocess.Popen(
        ["dbus-daemon", "--session", "--nofork", "--print-address"], stdout=subprocess.PIPE, text=True
    )
    assert daemon.stdout is not None
    yield daemon.stdout.readline().strip()
    daemon.terminate()
    daemon.wait()


@pytest.fixture
def empty_bus(bus: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", bus)
    return bus


@pytest.fixture
def service(empty_bus: str) -> Iterator[subprocess.Popen[str]]:
    peer = subprocess.Popen([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, text=True)
    assert peer.stdout is not None
    assert peer.stdout.readline() == "ready\n"
    yield peer
    peer.kill()
    peer.wait()


@pytest.mark.usefixtures("service")
def test_values_of_every_reply_type() -> None:
    with Client() as client:
        assert client.call(ROOT, MANAGER, "Plan") == [[("k", "c", "w", "applied", "ré", "s")]]
        assert client.call(ROOT, MANAGER, "Undo", "as", ["x", "y"]) == [
            [("x", "", "", "", "", ""), ("y", "", "", "", "", "")]
        ]
        assert client.call(ROOT, MANAGER, "Undo", "as", []) == [[]]
        assert client.call(ROOT, MANAGER, "Check") == [[{"code": "T01", "n": -3, "yes": True}]]
        assert client.properties(ROOT, MANAGER) == {
            "State": "ready",
            "Degraded": ["a", "b"],
            "LastApplied": 2**63,
            "Jobs": 7,
        }
        assert client.objects() == {}


@pytest.mark.usefixtures("service")
def test_a_pidfd_arrives_as_the_process_it_names() -> None:
    pidfd = os.pidfd_open(os.getpid())
    with Client() as client:
        path, request = client.call(ROOT, MANAGER, "Register", "hs", pidfd, '{"é": 1}')
    os.close(pidfd)
    assert (path, request) == (f"/org/torchtuned1/jobs/{os.getpid()}", '{"é": 1}')


@pytest.mark.usefixtures("service")
def test_errors_come_as_their_types_without_escape_sequences() -> None:
    with Client() as client:
        with pytest.raises(errors.NotAuthorized, match=r"not \?\[31mallowed"):
            client.call(ROOT, MANAGER, "Reload")
        with pytest.raises(errors.Failed, match=r"odd \[org\.example\.Odd\]"):
            client.call(ROOT, MANAGER, "Apply")
        with pytest.raises(errors.Failed, match="UnknownMethod"):
            client.call(ROOT, MANAGER, "Nonsense")
        with pytest.raises(errors.InvalidRequest):
            client.call("not a path", MANAGER, "Plan")
        with pytest.raises(errors.InvalidRequest, match="NUL"):
            client.call(ROOT, MANAGER, "Undo", "as", ["a\0b"])
        assert client.call(ROOT, MANAGER, "Undo", "as", []) == [[]], "the connection outlives errors"


@pytest.mark.usefixtures("service")
def test_signals_are_collected() -> None:
    with Client() as client:
        client.watch("Granted")
        assert client.wait_signal("Granted", 0.05) is None
        client.call(ROOT, MANAGER, "Release", "o", "/org/torchtuned1/jobs/3")
        assert client.wait_signal("Granted", 5) == ["/org/torchtuned1/jobs/3", "{}"]


@pytest.mark.usefixtures("service")
def test_a_silent_method_ends_after_its_time() -> None:
    with Client() as client, pytest.raises(errors.DaemonUnreachable, match="did not answer"):
        client.call(ROOT, MANAGER, "Verify", timeout_s=0.1)


@pytest.mark.usefixtures("empty_bus")
def test_nobody_owns_the_name() -> None:
    with Client() as client, pytest.raises(errors.DaemonUnreachable, match="no torchtunedd is running"):
        client.call(ROOT, MANAGER, "Plan")


def test_a_peer_that_dies_during_the_call(service: subprocess.Popen[str]) -> None:
    with Client() as client:
        threading.Timer(0.2, service.kill).start()
        with pytest.raises(errors.DaemonUnreachable):
            client.call(ROOT, MANAGER, "Verify", timeout_s=20)


def test_no_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/none")
    with pytest.raises(errors.DaemonUnreachable, match="no system bus"):
        Client()


def test_a_bus_that_says_nothing_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "silent"))
        listener.listen()
        monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/silent")
        start = time.monotonic()
        with pytest.raises(errors.DaemonUnreachable, match="does not answer"):
            Client(timeout_s=0.2)
        assert time.monotonic() - start < 10
        monkeypatch.setattr("torchtuned.client.CONNECT_S", 0.2)  # whatever time the calls have
        with pytest.raises(errors.DaemonUnreachable, match=r"does not answer .*systemctl status dbus"):
            Client(timeout_s=120)
        assert time.monotonic() - start < 20


def test_printable_keeps_text_and_lines() -> None:
    assert printable("a\nb\x1b[0m\x07é") == "a\nb?[0m?é"
    assert len(printable("x" * 5000)) == 2000
