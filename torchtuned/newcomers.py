"""What is done when devices come, go, wake up or change: newcomers get the policy, and the machine is looked at again.

The policy first: asking a GPU takes seconds until persistence mode is on. A driver that has just been bound may not
answer yet, so it is asked again for a while. When the mains come or go, what the configuration leaves alone on battery
is set or given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from torchtuned.errors import HostError
from torchtuned.gpus import Gpus
from torchtuned.host import Host
from torchtuned.hostpolicy import HostPolicy
from torchtuned.hotplug import Batch
from torchtuned.nvidia import UNLOCKED, asleep, functions
from torchtuned.policy import Outcome, Row
from torchtuned.tunables.cpu import on_battery

log = logging.getLogger(__name__)

BIND_S, ASK_S = 10.0, 1.0  # how long a driver is waited for, and how often it is asked
ALL = ("cpu", "gpu", "sysctl")  # folders of knobs that a sleep may have reset
NOBODY_TO_ASK = ("off", "no-pynvml", "no-library")  # states of NVML that no waiting mends


class LookAgain(Protocol):
    """Looks at the machine again. `cpus_moved`: masks of processes may have been lost."""

    async def __call__(self, *, cpus_moved: bool) -> None: ...


class Newcomers:
    """Follows what hotplug and logind tell. Its coroutines may run beside each other: the policy orders its changes."""

    def __init__(self, host: Host, gpus: Gpus, policy: HostPolicy, look_again: LookAgain) -> None:
        self._host, self._gpus, self._policy, self._look_again = host, gpus, policy, look_again
        self._on_battery = on_battery(host)
        self._busy = asyncio.Lock()
        self._next = Batch(changes=())

    async def changed(self, batch: Batch) -> None:
        """Devices came or went. Looking at the machine may take longer than the next batch does to come, so what comes
        meanwhile is taken in one piece: else a storm would be followed for long after its end.
        """
        self._next = self._next.and_then(batch)
        async with self._busy:
            batch, self._next = self._next, Batch(changes=())
            if batch.rescan or batch.of("power_supply"):
                await self._power()
            if batch.rescan:
                self._gpus.forget()
                rows = await self._renew(("cpu", "gpu"))
            elif any(change.subsystem != "power_supply" for change in batch.changes):
                await self._forget([change.name for change in batch.of("pci") if change.renewed or change.gone])
                rows = await self._renew(_knobs(batch))
            else:
                return
        await self._wait_for_drivers(rows)

    async def woke(self) -> None:
        """The machine comes back from sleep; the kernel or the firmware may have reset anything."""
        log.info("the machine is back from sleep: what it has lost of the policy is set again")
        await self._power()
        await self._wait_for_drivers(await self._renew(ALL))

    async def tuner_moved(self, unit: str) -> None:
        """Another tuner was started or stopped: what it sets is left to it, or the policy's again."""
        log.info("%s was started or stopped", unit)
        await self._policy.apply(only=("*",))  # all, but for what was undone by name

    async def _power(self) -> None:
        before, self._on_battery = self._on_battery, await asyncio.to_thread(on_battery, self._host)
        families = sorted({w.knob.partition("/")[0] for w in self._policy.config.wishes if w.keep_on_battery})
        if self._on_battery != before and families:
            log.info("the machine runs on %s now", "battery" if self._on_battery else "mains power")
            await self._policy.apply(only=families)

    async def _forget(self, gpus: Sequence[str]) -> None:
        """Drop what was known of these: a driver that lets go of a GPU and takes it again unlocks its clocks."""
        self._gpus.forget()
        for address in gpus:
            try:
                await asyncio.to_thread(self._gpus.locked.put, address, UNLOCKED)
            except HostError as e:
                log.warning("%s", e)

    async def _renew(self, knobs: Sequence[str]) -> list[Row] | None:
        """Let these knobs have the policy, where the kernel may have reset them, and look at the machine, unless there
        are only new disks. Returns the rows when some are of GPUs.
        """
        rows = await self._policy.apply(only=knobs, reassert=True) if knobs else []
        if not knobs or not all(knob.startswith("block/") for knob in knobs):
            await self._look_again(cpus_moved="cpu" in knobs)
        return rows if any(knob.startswith("gpu") for knob in knobs) else None

    async def _wait_for_drivers(self, rows: Sequence[Row] | None) -> None:
        """Ask again until every GPU with the nvidia driver is known. Those that were not, and those of which knobs
        could not be set before, get the policy then. None: no GPU came.
        """
        if rows is None:
            return
        unset = frozenset(row.knob.split("/")[1] for row in rows if _came_to_nothing(row))
        loop = asyncio.get_running_loop()
        until = loop.time() + BIND_S
        silent = await asyncio.to_thread(self._silent)
        waiting = silent | unset
        while silent and loop.time() < until:
            await asyncio.sleep(ASK_S)
            silent = await asyncio.to_thread(self._silent)
        if late := waiting - silent:
            await self._policy.apply(only=sorted(f"gpu/{address}" for address in late), reassert=True)
            await self._look_again(cpus_moved=False)
        if silent:
            log.warning("the nvidia driver says nothing of %s: %s", ", ".join(sorted(silent)), self._gpus.status.text)

    def _silent(self) -> frozenset[str]:
        """The GPUs that should answer and do not."""
        awake = [gpu.address for gpu in functions(self._host) if gpu.is_gpu and gpu.driver == "nvidia"]
        awake = [address for address in awake if not asleep(self._host, address)]
        known = self._gpus.facts(awake) if awake else {}
        return frozenset() if self._gpus.status.state in NOBODY_TO_ASK else frozenset(awake) - known.keys()


def _came_to_nothing(row: Row) -> bool:
    """Whether a knob of a GPU is not in force, as when its driver does not answer yet."""
    return row.knob.startswith("gpu/") and row.outcome in (Outcome.FAILED, Outcome.UNSUPPORTED)


def _knobs(batch: Batch) -> list[str]:
    """The folders of knobs that the newcomers of a batch have."""
    gpus = [f"gpu/{change.name}" for change in batch.of("pci") if change.renewed]
    disks = [f"block/{change.name}" for change in batch.of("block")]
    cpus = batch.of("module") or any(not change.gone for change in batch.of("cpu"))
    return [*(["cpu"] if cpus else []), *gpus, *disks]
