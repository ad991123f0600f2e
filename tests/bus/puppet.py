"""A process that does what a test tells it, one JSON line each: it stands for torchtuned-run and for a user's program.

    ["pid"]  ["register", pid, request]  ["call", path, interface, member, signature, arguments…]
    ["pin", "0-3"]  ["mask"]  ["fork"] (a child that sleeps; its pid)  ["open", n] (n more connections)
    ["everyone", path, interface, member] (the same call over each of those)
    ["crowd", member, n] (the same call n times at once, to Register for itself, waiting for none)
    ["answered"] (how many of those were)
    ["fds", member, n] (a call with n descriptors)  ["wait_signal", member, seconds]
    ["lie", member, signature, arguments] (a signal as if from PID 1)

Answers {"value": …} or {"error": "NAME: text"}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

sys.path.insert(0, sys.argv[1])

from torchtuned.bus import Bus, CallFailed
from torchtuned.client import Client
from torchtuned.cpuset import format_list, parse_list
from torchtuned.errors import DaemonUnreachable

MANAGER = "org.torchtuned1.Manager"
ROOT = "/org/torchtuned1"


class Puppet:
    def __init__(self) -> None:
        self.buses: list[Bus] = []
        self.signals: list[Any] = []
        self.asked: list[asyncio.Future[Any]] = []
        self.arrived = asyncio.Event()

    async def bus(self) -> Bus:
        if not self.buses:
            bus = await Bus.connect()
            self.buses.append(bus)
            await bus.follow("org.torchtuned1")
            bus.match("type='signal',sender='org.torchtuned1'")
            for member in ("Granted",):
                bus.on_signal("org.torchtuned1", MANAGER, member, lambda values, m=member: self.note(m, values))
            for member in ("InterfacesAdded", "InterfacesRemoved"):
                bus.on_signal("org.torchtuned1", "org.freedesktop.DBus.ObjectManager", member,
                              lambda values, m=member: self.note(m, values))  # fmt: skip
            bus.on_signal("org.torchtuned1", "org.freedesktop.DBus.Properties", "PropertiesChanged",
                          lambda values: self.note("PropertiesChanged", values))  # fmt: skip
        return self.buses[0]

    def note(self, member: str, values: list[Any]) -> None:
        self.signals.append([member, values])
        self.arrived.set()

    async def pid(self) -> int:
        return os.getpid()

    async def register(self, pid: int, request: str) -> Any:
        pidfd = os.pidfd_open(pid)
        try:
            bus = await self.bus()
            return await bus.call("org.torchtuned1", ROOT, MANAGER, "Register", "hs", [0, request], fds=[pidfd])
        finally:
            os.close(pidfd)

    async def call(self, path: str, interface: str, member: str, signature: str = "", *body: Any) -> Any:
        return await (await self.bus()).call("org.torchtuned1", path, interface, member, signature, list(body))

    async def with_fds(self, path: str, interface: str, member: str, signature: str, body: list[Any]) -> Any:
        """A call with two descriptors: this process's own pidfd and /dev/null."""
        fds = [os.pidfd_open(os.getpid()), os.open("/dev/null", os.O_RDONLY)]
        try:
            return await (await self.bus()).call("org.torchtuned1", path, interface, member, signature, body, fds=fds)
        finally:
            for fd in fds:
                os.close(fd)

    async def patient(self, path: str, interface: str, member: str) -> Any:
        return await (await self.bus()).call("org.torchtuned1", path, interface, member, timeout_s=60)

    async def interactive(self, member: str, signature: str = "", *body: Any) -> Any:
        with Client(timeout_s=60, interactive=True) as client:
            return client.call(ROOT, MANAGER, member, signature, *body)

    async def fds(self, member: str, count: int) -> Any:
        fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
        try:
            return await (await self.bus()).call("org.torchtuned1", ROOT, MANAGER, member, "hs", [0, "{}"], fds=fds)
        finally:
            for fd in fds:
                os.close(fd)

    async def lie(self, member: str, signature: str, body: list[Any]) -> None:
        """Send a signal of PID 1 to the daemon, as anybody may."""
        from dbus_next import Message

        bus = await self.bus()
        pid1 = "org.freedesktop.systemd1"
        message = Message.new_signal("/org/freedesktop/systemd1", f"{pid1}.Manager", member, signature, body)
        message.destination = bus.owner("org.torchtuned1")
        await bus._bus.send(message)

    async def open(self, count: int) -> int:
        """So many more connections, or as many as the bus gives to one user."""
        for _ in range(count):
            try:
                self.buses.append(await Bus.connect())
            except DaemonUnreachable:
                break
        return len(self.buses)

    async def everyone(self, path: str, interface: str, member: str) -> int:
        """The same call over all connections at once; how many were answered."""
        calls = (bus.call("org.torchtuned1", path, interface, member, timeout_s=60) for bus in self.buses)
        return len(await asyncio.gather(*calls))

    async def crowd(self, member: str, count: int) -> None:
        pidfd = os.pidfd_open(os.getpid())
        buses = [await Bus.connect() for _ in range(-(-count // 64))]  # that is what one may have open
        self.buses += buses
        request = json.dumps({"schema": 1, "shared": True})
        what: dict[str, Any] = {"signature": "hs", "body": [0, request], "fds": [pidfd]} if member == "Register" else {}
        self.asked = [
            asyncio.ensure_future(buses[i // 64].call("org.torchtuned1", ROOT, MANAGER, member, **what, timeout_s=60))
            for i in range(count)
        ]
        await asyncio.sleep(0.1)
        os.close(pidfd)

    async def answered(self) -> int:
        return sum(one.done() for one in self.asked)

    async def pin(self, cpus: str) -> str:
        wanted = parse_list(cpus) & os.sched_getaffinity(0)  # a machine in a folder may have more than there are here
        for thread in os.listdir("/proc/self/task") if wanted else ():
            os.sched_setaffinity(int(thread), wanted)
        return await self.mask()

    async def mask(self) -> str:
        return format_list(os.sched_getaffinity(0))

    async def fork(self) -> int:
        pid = os.fork()
        if pid == 0:
            os.close(0)
            os.close(1)
            time.sleep(600)
            os._exit(0)
        return pid

    async def wait_signal(self, member: str, seconds: float = 10) -> Any:
        async with asyncio.timeout(seconds):
            while True:
                for i, (name, values) in enumerate(self.signals):
                    if name == member:
                        del self.signals[i]
                        return values
                self.arrived.clear()
                await self.arrived.wait()


async def main() -> None:
    puppet = Puppet()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        what, *arguments = json.loads(line)
        try:
            answer = {"value": await getattr(puppet, what)(*arguments)}
        except CallFailed as e:
            answer = {"error": f"{e.dbus_name}: {e.what}"}
        except TimeoutError:
            answer = {"error": "TimeoutError: nothing came"}
        print(json.dumps(answer), flush=True)
    os._exit(0)


asyncio.run(main())
