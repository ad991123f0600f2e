"""What anybody sees of torchtuned on the bus: names, objects, properties, signals, errors."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from harness import GPU, JOB, MANAGER, OTHER, PROPERTIES, ROOT, USER, Daemon, PrivateBus, run

from torchtuned.bus import CallFailed

Start = Callable[..., Daemon]
INTROSPECTABLE = "org.freedesktop.DBus.Introspectable"
METHODS = {  # DESIGN "D-Bus"
    "Plan": ("", "a(ssssss)"),
    "Apply": ("", "a(ssssss)"),
    "Verify": ("", "a(ssssss)"),
    "Undo": ("as", "a(ssssss)"),
    "Reload": ("", ""),
    "SetProfile": ("s", ""),
    "Check": ("", "aa{sv}"),
    "Register": ("hs", "os"),
    "Commit": ("o", "s"),
    "Release": ("o", ""),
}


def interface(bus: PrivateBus, path: str, name: str) -> ElementTree.Element:
    [xml] = bus.call(path, INTROSPECTABLE, "Introspect")
    found = ElementTree.fromstring(xml).find(f"interface[@name='{name}']")
    assert found is not None, xml
    return found


def args(element: ElementTree.Element, direction: str) -> str:
    return "".join(arg.get("type", "") for arg in element.findall(f"arg[@direction='{direction}']"))


def properties(element: ElementTree.Element) -> dict[str, str]:
    return {p.get("name", ""): p.get("type", "") for p in element.findall("property")}


def test_introspection_is_the_documented_interface(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree)
    manager = interface(bus, ROOT, MANAGER)
    shown = {m.get("name"): (args(m, "in"), args(m, "out")) for m in manager.findall("method")}
    assert METHODS.items() <= shown.items()
    assert all(arg.get("name") for arg in manager.iter("arg"))
    assert properties(manager) == {
        "Version": "s", "State": "s", "Profile": "s", "Degraded": "as", "Jobs": "u", "Gpus": "u", "LastApplied": "t",
    }  # fmt: skip
    assert [s.get("name") for s in manager.findall("signal")] == ["Granted"]
    assert properties(interface(bus, f"{ROOT}/gpus/0000_01_00_0", GPU)) == {
        "Address": "s", "Uuid": "s", "Name": "s", "Driver": "s", "NumaNode": "i", "Cpus": "s", "Locality": "s",
        "PersistenceMode": "s", "Job": "o",
    }  # fmt: skip
    with bus.user(USER) as job:
        path, _ = job.start()
        assert properties(interface(bus, path, JOB)) == {
            "Id": "s", "Pid": "u", "Uid": "u", "State": "s", "Cpus": "s", "MemoryNodes": "s", "Gpus": "as",
            "Confinement": "s", "Scope": "s", "Since": "t", "Threads": "u", "Warnings": "as",
            "Findings": "as",
        }  # fmt: skip


def busctl(bus: PrivateBus, *arguments: str) -> str:
    command = ["busctl", "--no-pager", *arguments]
    return subprocess.run(command, env=bus.environment, check=True, capture_output=True, text=True).stdout


def test_busctl_understands_all_of_it(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree)
    with bus.user(USER) as job:
        path, _ = job.start({"gpus": 1})
        tree_text = busctl(bus, "tree", "--list", "org.torchtuned1").split()
        assert {ROOT, f"{ROOT}/jobs", path, f"{ROOT}/gpus", f"{ROOT}/gpus/0000_81_00_0"} <= set(tree_text)
        assert ".Plan" in busctl(bus, "introspect", "org.torchtuned1", ROOT)
        assert busctl(bus, "get-property", "org.torchtuned1", ROOT, MANAGER, "State") == 's "ready"\n'
        assert busctl(bus, "get-property", "org.torchtuned1", path, JOB, "Gpus") == 'as 1 "0000:01:00.0"\n'
        assert busctl(bus, "call", "org.torchtuned1", ROOT, MANAGER, "Plan").startswith("a(ssssss) ")
        job.release(path)
        tree_text = busctl(bus, "tree", "--list", "org.torchtuned1").split()  # fails if a node is there in name only
        assert f"{ROOT}/jobs" not in tree_text
        assert f"{ROOT}/gpus/0000_81_00_0" in tree_text
        path, _ = job.start()
        assert path in busctl(bus, "tree", "--list", "org.torchtuned1").split()


def test_objects_hold_every_property_with_the_job_on_its_gpu(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree)
    with bus.user(USER) as job:
        path, grant = job.start({"gpus": ["0000:81:00.0"], "command": ["python", "train.py"]})
        objects = bus.managed()
        mine = objects[path][JOB]
        assert mine["Pid"] == job.pid
        assert mine["Uid"] == USER
        assert mine["State"] == "running"
        assert mine["Cpus"] == grant["cpus"] == "4-7"
        assert mine["MemoryNodes"] == "1"
        assert mine["Threads"] == 4
        assert objects[f"{ROOT}/gpus/0000_81_00_0"][GPU] == {
            "Address": "0000:81:00.0", "Uuid": "", "Name": "", "Driver": "", "NumaNode": 1, "Cpus": "4-7",
            "Locality": "numa_node", "PersistenceMode": "", "Job": path,
        }  # fmt: skip
        assert objects[f"{ROOT}/gpus/0000_01_00_0"][GPU]["Job"] == "/"
        assert bus.get(ROOT, MANAGER, "Jobs") == 1
        assert bus.get(ROOT, MANAGER, "Gpus") == 2


def test_changes_are_announced_once_and_together(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    one = daemon("--sysroot", tree)
    one.wait_for("ready")
    with bus.user(OTHER) as watcher, bus.user(USER) as job:

        def changed(what: str) -> Any:
            """The next change of an interface, but for the times at which knobs for jobs were set."""
            while True:
                name, values, _ = watcher.do("wait_signal", "PropertiesChanged")
                if name == what and set(values) != {"LastApplied"}:
                    return values

        watcher.do("call", ROOT, PROPERTIES, "GetAll", "s", MANAGER)  # joins, and hears from here on
        path, _ = job.register()
        added, interfaces = watcher.do("wait_signal", "InterfacesAdded")
        assert (added, interfaces[JOB]["State"]) == (path, "granted")
        assert changed(MANAGER)["Jobs"] == 1
        job.commit(path)
        assert changed(JOB)["State"] == "running"
        job.release(path)
        assert watcher.do("wait_signal", "InterfacesRemoved") == [path, [JOB]]
        assert changed(MANAGER)["Jobs"] == 0


REFUSALS = [
    ((ROOT, MANAGER, "Nothing"), "org.freedesktop.DBus.Error.UnknownMethod"),
    ((ROOT, MANAGER, "Plan", "s", "x"), "org.freedesktop.DBus.Error.InvalidArgs"),
    ((ROOT, "org.freedesktop.DBus.Peer", "Pong"), "org.freedesktop.DBus.Error.UnknownInterface"),
    ((f"{ROOT}/jobs/77", PROPERTIES, "GetAll", "s", JOB), "org.freedesktop.DBus.Error.UnknownObject"),
    ((f"{ROOT}/nothing", INTROSPECTABLE, "Introspect"), "org.freedesktop.DBus.Error.UnknownObject"),
    ((ROOT, PROPERTIES, "Get", "ss", MANAGER, "Colour"), "org.freedesktop.DBus.Error.UnknownProperty"),
    ((ROOT, PROPERTIES, "Get", "ss", JOB, "State"), "org.freedesktop.DBus.Error.UnknownProperty"),
    ((ROOT, PROPERTIES, "GetAll", "s", JOB), "org.freedesktop.DBus.Error.UnknownInterface"),
    ((ROOT, MANAGER, "Commit", "o", f"{ROOT}/jobs/77"), "org.torchtuned1.Error.NoSuchJob"),
    ((ROOT, MANAGER, "Release", "o", "/etc/passwd"), "org.torchtuned1.Error.NoSuchJob"),
    ((ROOT, MANAGER, "Undo", "as", ["no/such/knob"]), "org.torchtuned1.Error.NoSuchKnob"),
    ((ROOT, MANAGER, "SetProfile", "s", "../../etc/shadow"), "org.torchtuned1.Error.InvalidRequest"),
    ((ROOT, MANAGER, "SetProfile", "s", "nothing"), "org.torchtuned1.Error.InvalidConfig"),
]


def test_refusals_have_the_right_name(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree)
    for (path, name, member, *rest), error in REFUSALS:
        with pytest.raises(CallFailed) as refused:
            bus.call(path, name, member, *rest)
        assert refused.value.dbus_name == error, (member, rest, refused.value)
        assert "Traceback" not in refused.value.what
        assert ".py" not in refused.value.what


def test_properties_cannot_be_set(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree)
    with pytest.raises(subprocess.CalledProcessError) as refused:
        busctl(bus, "set-property", "org.torchtuned1", ROOT, MANAGER, "State", "s", "ready")
    assert "read-only" in refused.value.stderr


def test_descriptors_come_in_with_register_only_and_none_stays(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    one = daemon("--sysroot", tree)
    one.wait_for("ready")
    folder = f"/proc/{one.process.pid}/fd"
    before = len(os.listdir(folder))
    with bus.user(USER) as stranger:
        for member, count, error in [
            ("Register", 1, "InvalidRequest"),
            ("Register", 2, "AccessDenied"),
            ("Nothing", 1, "AccessDenied"),
            ("Commit", 1, "AccessDenied"),
            ("Register", 0, "InvalidArgs"),
        ] * 3:
            with pytest.raises(RuntimeError, match=error):
                stranger.do("fds", member, count)
        assert len(os.listdir(folder)) <= before


def test_a_second_daemon_does_not_start(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree)
    second = daemon("--sysroot", tree, ready=False)
    assert second.process.wait(20) == 1
    assert "already has an owner" in second.log.read_text()


def test_the_bus_going_away_ends_it_with_an_error(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    one = daemon("--sysroot", tree)
    bus.stop()
    assert one.process.wait(20) == 1
    assert "the message bus went away" in one.log.read_text()


def test_no_bus_is_said_in_one_line(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    bus.stop()
    one = daemon("--sysroot", tree, ready=False)
    assert one.process.wait(20) == 1
    assert "cannot reach the message bus" in one.log.read_text()


def test_many_readers_at_once(bus: PrivateBus, daemon: Start, tree: Path) -> None:
    daemon("--sysroot", tree)

    async def read() -> list[Any]:
        import asyncio

        connections = [await bus.connect() for _ in range(20)]
        reads = [
            one.call("org.torchtuned1", ROOT, MANAGER, "Verify") for one in connections for _ in range(10)
        ] + [one.call("org.torchtuned1", ROOT, PROPERTIES, "GetAll", "s", [MANAGER]) for one in connections]
        answers = await asyncio.gather(*reads)
        for one in connections:
            await one.close()
        return answers

    assert len(run(read())) == 220
