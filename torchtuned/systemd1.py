"""PID 1 over the bus: scopes for jobs, which units run, and why we are being stopped.

PID 1 is never introspected, and its signals are only asked for while they can say something about a job of ours, so an
idle daemon is not woken by what goes on in the machine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from torchtuned import cpuset, units
from torchtuned.bus import Bus, CallFailed, Variant
from torchtuned.cpuset import CpuSet
from torchtuned.errors import Failed
from torchtuned.scopes import Scope

SERVICE = "org.freedesktop.systemd1"
PATH = "/org/freedesktop/systemd1"
MANAGER = f"{SERVICE}.Manager"
PROPERTIES = "org.freedesktop.DBus.Properties"
PIDFDS_SINCE = 255
DEADLINE_S = 5.0
SCOPES = units.scope_of("*")

log = logging.getLogger(__name__)


class Systemd:
    """The system's service manager. `version` is 0 while it is not there; then every method raises CallFailed."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.version = 0
        self._removed: Callable[[str], None] = lambda scope: None
        self._starting: dict[str, asyncio.Future[str]] = {}
        self._watching = False
        self._followed: dict[str, Callable[[str], None]] = {}

    async def start(self, removed: Callable[[str], None]) -> None:
        """Find PID 1. While scopes are watched, `removed` is called with the name of each that may have ended."""
        self._removed = removed
        self._bus.on_signal(SERVICE, MANAGER, "JobRemoved", self._job_removed)
        self._bus.on_signal(SERVICE, MANAGER, "UnitRemoved", self._unit_removed)
        if await self._bus.follow(SERVICE, self._owner_changed):
            await self._subscribe()

    def _owner_changed(self, owner: str) -> None:
        """PID 1 joins the bus anew when it re-executes itself."""
        if owner:
            task = asyncio.ensure_future(self._subscribe())
            task.add_done_callback(lambda t: t.cancelled() or t.exception())

    async def _subscribe(self) -> None:
        try:
            await self._call("Subscribe")
        except CallFailed as e:
            if not e.dbus_name.endswith("AlreadySubscribed"):
                log.warning("systemd does not let us follow its units: %s", e)
                return
        text = str(await self._get(PATH, MANAGER, "Version"))
        found = re.match(r"\D*(\d+)", text)
        self.version = int(found[1]) if found else 0

    # -- scopes ------------------------------------------------------------------------------------------------------

    async def start_scope(self, scope: Scope) -> None:
        """Have PID 1 move the process into a new scope, and wait until it has. Raises Failed with PID 1's reason."""
        if self.version >= PIDFDS_SINCE:
            processes, fds = ["PIDFDs", Variant("ah", [0])], [scope.pidfd]
        else:
            processes, fds = ["PIDs", Variant("au", [scope.pid])], []
        properties = [
            ["Description", Variant("s", scope.description)],
            ["Slice", Variant("s", scope.slice)],
            processes,
            ["After", Variant("as", ["systemd-user-sessions.service"])],
            ["CollectMode", Variant("s", "inactive-or-failed")],
            ["TasksMax", Variant("t", scope.tasks_max)],
            ["OOMPolicy", Variant("s", "continue")],
            ["SendSIGHUP", Variant("b", True)],  # noqa: FBT003
        ]
        if scope.cpus:
            properties.append(["AllowedCPUs", Variant("ay", cpuset.to_bytes(scope.cpus))])
        if scope.memory_nodes:
            properties.append(["AllowedMemoryNodes", Variant("ay", cpuset.to_bytes(scope.memory_nodes))])
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._starting[scope.name] = done
        rule = _rule("JobRemoved", f",arg2='{scope.name}'")
        self._bus.match(rule)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._call(
                    "StartTransientUnit", "ssa(sv)a(sa(sv))", [scope.name, "fail", properties, []], fds=fds
                )
                result = await done
        except TimeoutError:
            raise Failed(f"systemd did not start {scope.name} within {DEADLINE_S:g} s") from None
        finally:
            self._bus.unmatch(rule)
            del self._starting[scope.name]
        if result != "done":
            raise Failed(f"systemd could not start {scope.name}: {result}")

    async def set_cpus(self, name: str, cpus: CpuSet) -> None:
        """Give a running scope another cpuset, until it ends."""
        properties = [["AllowedCPUs", Variant("ay", cpuset.to_bytes(cpus))]]
        await self._call("SetUnitProperties", "sba(sv)", [name, True, properties])

    def watch_scopes(self, *, wanted: bool) -> None:
        """Whether to be told of scopes that end; what is asked of PID 1 after this is asked with it in force."""
        if wanted != self._watching:
            self._watching = wanted
            (self._bus.match if wanted else self._bus.unmatch)(_rule("UnitRemoved"))

    async def has_scope(self, name: str) -> bool:
        """Whether a scope still has processes. UnitRemoved alone does not tell: daemon-reload removes and adds all."""
        try:
            [path] = await self._call("GetUnit", "s", [name])
            return await self._get(path, f"{SERVICE}.Unit", "ActiveState") not in ("inactive", "failed")
        except CallFailed as e:
            if e.dbus_name.rpartition(".")[2] in ("NoSuchUnit", "UnknownObject"):
                return False
            raise

    async def scopes(self) -> set[str]:
        """Names of the job scopes that exist."""
        [units] = await self._call("ListUnitsByPatterns", "asas", [[], [SCOPES]])
        return {unit[0] for unit in units if unit[3] not in ("inactive", "failed")}

    async def processes(self, name: str) -> list[int]:
        """The processes in a scope and below it."""
        [found] = await self._call("GetUnitProcesses", "s", [name])
        return [int(pid) for _, pid, _ in found]

    def _job_removed(self, values: list[Any]) -> None:
        _, _, unit, result = values
        future = self._starting.get(unit)
        if future is not None and not future.done():
            future.set_result(result)
        if unit in self._followed:
            self._followed[unit](unit)

    def _unit_removed(self, values: list[Any]) -> None:
        name = values[0]
        if units.job_of(name):
            self._removed(name)

    # -- units -------------------------------------------------------------------------------------------------------

    async def active(self, units: Sequence[str]) -> frozenset[str]:
        """Those of `units` that are active or being started. One that has set its values and ended stays active after
        its package was purged: Debian's TLP does.
        """
        [found] = await self._call("ListUnitsByNames", "as", [list(units)])
        return frozenset(
            name
            for name, _, load, active, how, *_ in found
            if active in ("active", "activating", "reloading") and (load, how) != ("not-found", "exited")
        )

    def follow_units(self, units: Sequence[str], moved: Callable[[str], None]) -> None:
        """Have `moved` called with the name of each of `units` that PID 1 has started or stopped."""
        for unit in units:
            self._followed[unit] = moved
            self._bus.match(_rule("JobRemoved", f",arg2='{unit}'"))

    async def own_job(self) -> str:
        """What PID 1 is doing with our own unit: "stop", "restart", … or "" when nothing, as when we are in no unit.

        "unknown" when it does not say.
        """
        try:
            [path] = await self._call("GetUnitByPID", "u", [os.getpid()])
            number, job = await self._get(path, f"{SERVICE}.Unit", "Job")
            return str(await self._get(job, f"{SERVICE}.Job", "JobType")) if number else ""
        except CallFailed as e:
            if e.absent or e.dbus_name.endswith("NoUnitForPID"):
                return ""
            log.warning("systemd does not say why we stop: %s", e)
            return "unknown"

    async def _call(self, member: str, signature: str = "", body: Sequence[Any] = (), fds: Sequence[int] = ()) -> Any:
        return await self._bus.call(SERVICE, PATH, MANAGER, member, signature, body, fds=fds, timeout_s=DEADLINE_S)

    async def _get(self, path: str, interface: str, name: str) -> Any:
        [value] = await self._bus.call(SERVICE, path, PROPERTIES, "Get", "ss", [interface, name], timeout_s=DEADLINE_S)
        return value


def _rule(member: str, more: str = "") -> str:
    return f"type='signal',sender='{SERVICE}',interface='{MANAGER}',member='{member}'{more}"
