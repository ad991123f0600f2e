"""A stand-in for torchtunedd on the bus that answers what a test tells it, good or hostile.

usage: manager.py SCRIPT LOG — SCRIPT is a JSON object: "register" and "commit" are the grant documents (or texts) to
answer with, "error" an error name for Register, "silent" the members that get no answer, "late" a grant that is sent
as the Granted signal after Register. LOG gets a line of JSON per call: the member and the caller's CPUs at that moment.
"""

# dbus-next reads D-Bus signatures out of string annotations
# ruff: noqa: F821, UP037
# mypy: ignore-errors

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from dbus_next import BusType, DBusError
from dbus_next.aio import MessageBus
from dbus_next.constants import PropertyAccess
from dbus_next.service import ServiceInterface, dbus_property, method, signal

script: dict[str, Any] = json.loads(sys.argv[1])
caller = 0


def log(member: str, **more: object) -> None:
    cpus = "gone"
    try:
        with open(f"/proc/{caller}/status") as status:
            cpus = next(line.split()[1] for line in status if line.startswith("Cpus_allowed_list"))
    except OSError:
        pass
    with open(sys.argv[2], "a") as file:
        file.write(json.dumps({"member": member, "cpus": cpus, **more}) + "\n")


def text(key: str) -> str:
    document = script[key]
    return document if isinstance(document, str) else json.dumps(document)


class Manager(ServiceInterface):
    def __init__(self) -> None:
        super().__init__("org.torchtuned1.Manager")

    @dbus_property(access=PropertyAccess.READ)
    def Gpus(self) -> "u":
        return int(script.get("gpus", 0))

    @method()
    async def Register(self, pidfd: "h", request: "s") -> "os":
        global caller
        with open(f"/proc/self/fdinfo/{pidfd}") as info:
            caller = next(int(line.split()[1]) for line in info if line.startswith("Pid:"))
        log("Register", request=json.loads(request), pid=caller)
        if "Register" in script.get("silent", ()):
            await asyncio.sleep(3600)
        if "error" in script:
            raise DBusError(f"org.torchtuned1.Error.{script['error']}", "because the test says so")
        if "late" in script:
            asyncio.get_running_loop().call_later(0.3, self.grant_late)
        return ["/org/torchtuned1/jobs/7", text("register")]

    def grant_late(self) -> None:
        self.Granted("/org/torchtuned1/jobs/8", text("register"))
        self.Granted("/org/torchtuned1/jobs/7", text("late"))

    @method()
    async def Commit(self, job: "o") -> "s":
        log("Commit", job=job)
        if "Commit" in script.get("silent", ()):
            await asyncio.sleep(3600)
        return text("commit" if "commit" in script else "register")

    @method()
    def Release(self, job: "o"):
        log("Release", job=job)

    @signal()
    def Granted(self, job: str, grant: str) -> "os":
        return [job, grant]


class Job(ServiceInterface):
    def __init__(self) -> None:
        super().__init__("org.torchtuned1.Job")

    @dbus_property(access=PropertyAccess.READ)
    def State(self) -> "s":
        return "queued"


async def main() -> None:
    bus = await MessageBus(bus_type=BusType.SYSTEM, negotiate_unix_fd=True).connect()
    bus.export("/org/torchtuned1", Manager())
    bus.export("/org/torchtuned1/jobs/7", Job())
    await bus.request_name("org.torchtuned1")
    print("ready", flush=True)
    await bus.wait_for_disconnect()


if __name__ == "__main__":
    asyncio.run(main())
