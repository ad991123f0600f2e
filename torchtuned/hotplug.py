"""GPUs, CPUs, disks and cpufreq drivers that come, and the mains: udev events, collected, handed on in one piece.

One device makes a dozen events and a power cycle of a PCI switch makes thousands, so events are collected until none
came for QUIET_S, at the longest for LIMIT_S, and end as one call with one Change per device. When the kernel's queue
overflows (ENOBUFS) events are lost and nobody can say which: then the call says `rescan`, and the caller looks at the
whole machine. Between events nothing wakes up.

    monitor = Hotplug(host, changed, watch=[("0x1234", "0x0380")])
    monitor.start()      # inside a running loop; changed(Batch) is called on it
    monitor.stop()
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import pyudev  # type: ignore[import-untyped]

from torchtuned.host import Host
from torchtuned.pci import WATCHED

log = logging.getLogger("torchtuned.hotplug")

QUIET_S = 0.15
LIMIT_S = 1.0
AT_ONCE = 200  # events taken per turn of the loop, so that a storm does not keep others from it
KEPT = 8  # actions of a device that flaps: the end of the story is enough
BUFFER = 16 << 20  # bytes of the socket; the default holds a few hundred events
SUBSYSTEMS = ("pci", "drm", "cpu", "module", "block", "power_supply")
CPUFREQ = re.compile(r"cpufreq|pstate")  # drivers and governors among the modules: a new policy itself has no event
NO_DISK = re.compile(r"loop|ram|zram|zd|fd|sr")


@dataclass(frozen=True, kw_only=True)
class Change:
    """What happened to one device, in order ("remove", "add", "bind").

    `name` is the kernel's: a PCI address, "card0", "cpu3", "acpi_cpufreq", "sda", "AC".
    """

    subsystem: str
    name: str
    actions: tuple[str, ...]

    @property
    def gone(self) -> bool:
        """It is not there, or its driver let go of it, at the end of all this."""
        return self.actions[-1] in ("remove", "unbind", "offline")

    @property
    def renewed(self) -> bool:
        """What its driver knew is lost: it came anew, or is held by a driver that started anew."""
        return not self.gone and any(action in ("add", "bind", "remove", "unbind") for action in self.actions)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Everything since the last call. `rescan`: events were lost, so look at everything."""

    changes: tuple[Change, ...]
    rescan: bool = False

    def of(self, subsystem: str) -> tuple[Change, ...]:
        """The changes of one of SUBSYSTEMS."""
        return tuple(change for change in self.changes if change.subsystem == subsystem)

    def and_then(self, later: Batch) -> Batch:
        """Both as one."""
        joined = {(change.subsystem, change.name): change for change in self.changes}
        for change in later.changes:
            earlier = joined.pop((change.subsystem, change.name), None)
            actions = (*earlier.actions, *change.actions)[-KEPT:] if earlier else change.actions
            joined[change.subsystem, change.name] = replace(change, actions=actions)
        return Batch(changes=tuple(joined.values()), rescan=self.rescan or later.rescan)


class Hotplug:
    """Watches GPUs (those of pci.WATCHED and `watch` pairs of vendor and class as
    in "0x1234", "0x0380"), DRM cards, CPUs, cpufreq drivers, disks, and mains and batteries. `changed` runs on the loop
    and must not block.
    """

    def __init__(
        self, host: Host, changed: Callable[[Batch], object], *, watch: Collection[tuple[str, str]] = ()
    ) -> None:
        self._changed = changed
        self._watch = WATCHED.union(watch)
        # without udevd (a small container) only the kernel's own events come
        self._source = "udev" if host.exists("/run/udev/control") else "kernel"
        self._monitor: Any = None
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._actions: dict[tuple[str, str], list[str]] = {}
        self._rescan = False
        self._timer: asyncio.TimerHandle | None = None
        self._first = 0.0

    def start(self) -> None:
        """Begin to listen. OSError when the kernel gives no socket."""
        self._loop = asyncio.get_running_loop()
        self._monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source=self._source)
        for subsystem in SUBSYSTEMS:
            self._monitor.filter_by(subsystem)
        try:
            self._monitor.set_receive_buffer_size(BUFFER)
        except OSError as error:  # needs CAP_NET_ADMIN; an overflow is survived too
            log.debug("the default queue of udev events must do: %s", error)
        self._monitor.start()
        self._socket = socket.socket(fileno=os.dup(self._monitor.fileno()))
        self._loop.add_reader(self._socket, self._readable)

    def stop(self) -> None:
        """Listen no longer; what was not handed on is dropped."""
        if self._socket is not None and self._loop is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = self._monitor = None
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _readable(self) -> None:
        assert self._socket is not None
        # pyudev sees that the socket has an error but never takes it off, and would be called again at once for ever
        lost = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            for _ in range(AT_ONCE):
                device = self._monitor.poll(timeout=0)
                if device is None:
                    break
                self._take(device)
        except OSError as error:  # the queue overflowed meanwhile, or a message that libudev cannot read
            lost = error.errno or errno.ENOBUFS
        if lost:
            log.info("udev events were lost (%s): everything is looked at anew", os.strerror(lost))
            self._rescan = True
            self._schedule()

    def _take(self, device: Any) -> None:
        properties = device.properties
        subsystem, name, action = device.subsystem, os.path.basename(device.device_path), device.action
        if subsystem == "pci" and not self._wanted(properties):
            return
        if subsystem == "drm" and not re.fullmatch(r"card\d+|renderD\d+", name):
            return  # connectors of a card say "change" whenever a screen is plugged
        if subsystem == "module" and (action != "add" or not CPUFREQ.search(name)):
            return
        if subsystem == "block" and (action != "add" or device.device_type != "disk" or NO_DISK.match(name)):
            return
        if subsystem == "power_supply" and properties.get("POWER_SUPPLY_SCOPE") == "Device":
            return  # a mouse's battery
        actions = self._actions.setdefault((subsystem, name), [])
        if not actions or actions[-1] != action:
            actions.append(action)
            del actions[:-KEPT]
        self._schedule()

    def _wanted(self, properties: Any) -> bool:
        vendor = properties.get("PCI_ID", "").partition(":")[0].lower()
        kind = properties.get("PCI_CLASS", "").zfill(6)[:4].lower()  # without the leading zero of "30200"
        return (f"0x{vendor}", f"0x{kind}") in self._watch

    def _schedule(self) -> None:
        assert self._loop is not None
        now = self._loop.time()
        if self._timer:
            self._timer.cancel()
        else:
            self._first = now
        self._timer = self._loop.call_at(min(now + QUIET_S, self._first + LIMIT_S), self._deliver)

    def _deliver(self) -> None:
        changes = tuple(
            Change(subsystem=subsystem, name=name, actions=tuple(actions))
            for (subsystem, name), actions in self._actions.items()
        )
        batch = Batch(changes=changes, rescan=self._rescan)
        self._actions, self._rescan, self._timer = {}, False, None
        self._changed(batch)
