"""Hotplug on real events of the kernel (a CPU's uevent file makes them) and, for GPUs, on those of umockdev."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtuned import hotplug
from torchtuned.host import Host
from torchtuned.hotplug import Batch, Change, Hotplug

TOP = Path(__file__).resolve().parent.parent
UEVENT = Path("/sys/devices/system/cpu/cpu0/uevent")
OVERFLOW = Change(subsystem="cpu", name="cpu0", actions=("change",))


def poke(times: int = 1) -> None:
    for _ in range(times):
        UEVENT.write_text("change")


async def listen(seconds: float, *pokes: tuple[float, int]) -> tuple[list[Batch], int]:
    """Batches that came, and how often the socket woke the loop, while `pokes` (delay, events) happen."""
    batches: list[Batch] = []
    monitor = Hotplug(Host(), batches.append)
    wakings = 0
    take = monitor._readable

    def counted() -> None:
        nonlocal wakings
        wakings += 1
        take()

    monitor._readable = counted  # type: ignore[method-assign]
    monitor.start()
    try:
        for delay, times in pokes:
            await asyncio.sleep(delay)
            poke(times)
        await asyncio.sleep(seconds)
    finally:
        monitor.stop()
    return batches, wakings


def test_a_burst_is_one_call() -> None:
    batches, _ = asyncio.run(listen(0.5, (0.0, 1000)))
    assert batches == [Batch(changes=(OVERFLOW,))]


def test_a_storm_without_end_is_handed_on_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotplug, "LIMIT_S", 0.4)
    batches, _ = asyncio.run(listen(0.3, *[(0.05, 5)] * 20))
    assert 2 <= len(batches) < 20


def test_an_overflow_means_rescan_and_no_busy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotplug, "BUFFER", 4096)
    batches, wakings = asyncio.run(listen(0.5, (0.0, 500)))
    assert [batch.rescan for batch in batches] == [True]
    assert wakings < 20
    batches, _ = asyncio.run(listen(0.5, (0.0, 500), (0.5, 1)))
    assert [batch.rescan for batch in batches] == [True, False]  # and it goes on after


def test_nothing_wakes_the_loop_in_between() -> None:
    start = time.process_time()
    batches, wakings = asyncio.run(listen(1.0))
    assert (batches, wakings) == ([], 0)
    assert time.process_time() - start < 0.2


def test_stop_drops_what_is_collected() -> None:
    async def run() -> list[Batch]:
        batches: list[Batch] = []
        monitor = Hotplug(Host(), batches.append)
        monitor.start()
        poke()
        await asyncio.sleep(0.05)
        monitor.stop()
        monitor.stop()
        await asyncio.sleep(0.3)
        return batches

    assert asyncio.run(run()) == []


@pytest.mark.parametrize(
    ("actions", "gone", "renewed"),
    [
        (("add", "bind"), False, True),
        (("bind",), False, True),
        (("remove",), True, False),
        (("remove", "add"), False, True),
        (("unbind", "bind"), False, True),
        (("unbind",), True, False),
        (("change",), False, False),
        (("offline", "online"), False, False),
        (("offline",), True, False),
    ],
)
def test_what_a_change_means(actions: tuple[str, ...], *, gone: bool, renewed: bool) -> None:
    change = Change(subsystem="pci", name="0000:01:00.0", actions=actions)
    assert (change.gone, change.renewed) == (gone, renewed)


SCENE = """
import asyncio, json, sys
import gi
gi.require_version("UMockdev", "1.0")
from gi.repository import UMockdev
from torchtuned.hotplug import Hotplug
from torchtuned.host import Host

bed = UMockdev.Testbed.new()

def plug(address, ids, kind):
    return bed.add_device("pci", address, None, [], ["PCI_ID", ids, "PCI_CLASS", kind, "PCI_SLOT_NAME", address])

async def main():
    batches = []
    monitor = Hotplug(Host(sys.argv[1]), batches.append, watch=[("0x1234", "0x0380")])
    nvidia = plug("0000:01:00.0", "10DE:20B2", "30200")
    audio = plug("0000:01:00.1", "10DE:22BA", "40300")
    switch = plug("0000:c3:00.0", "10DE:1AF1", "68000")
    amd = plug("0000:02:00.0", "1002:74A1", "120000")
    bmc = plug("0000:53:00.0", "1A03:2000", "30000")
    watched = plug("0000:04:00.0", "1234:1111", "38000")
    card = bed.add_device("drm", "card1", None, [], [])
    connector = bed.add_device("drm", "card1-HDMI-A-1", None, [], [])
    mains = bed.add_device("power_supply", "AC", None, [], ["POWER_SUPPLY_TYPE", "Mains"])
    mouse = bed.add_device("power_supply", "hid-1", None, [], ["POWER_SUPPLY_SCOPE", "Device"])
    nic = bed.add_device("net", "eth9", None, [], [])
    driver = bed.add_device("module", "acpi_cpufreq", None, [], [])
    module = bed.add_device("module", "snd_hda", None, [], [])
    disk = bed.add_device("block", "nvme9n1", None, [], ["DEVTYPE", "disk"])
    part = bed.add_device("block", "nvme9n1p1", None, [], ["DEVTYPE", "partition"])
    loop = bed.add_device("block", "loop9", None, [], ["DEVTYPE", "disk"])
    monitor.start()
    graphics = (nvidia, audio, switch, amd, bmc, watched, card, connector)
    for device in (*graphics, mains, mouse, nic, driver, module, disk, part, loop):
        bed.uevent(device, "add")
        await asyncio.sleep(0)  # its queue is short
    await asyncio.sleep(0.5)
    for _ in range(500):
        bed.uevent(nvidia, "unbind")
        bed.uevent(nvidia, "bind")
        await asyncio.sleep(0)
    await asyncio.sleep(1.5)
    bed.uevent(nvidia, "remove")
    await asyncio.sleep(0.5)
    monitor.stop()
    print(json.dumps([[[c.subsystem, c.name, c.actions] for c in b.changes] for b in batches]))

asyncio.run(main())
"""


def test_gpus_and_what_is_none(tmp_path: Path) -> None:
    control = tmp_path / "run/udev/control"
    control.parent.mkdir(parents=True)
    control.touch()
    command = ["umockdev-wrapper", sys.executable, "-c", SCENE, str(tmp_path)]
    scene = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=30)
    assert scene.returncode == 0, scene.stderr
    first, *storm, last = json.loads(scene.stdout)
    assert sorted(first) == [
        ["block", "nvme9n1", ["add"]],
        ["drm", "card1", ["add"]],
        ["module", "acpi_cpufreq", ["add"]],
        ["pci", "0000:01:00.0", ["add"]],
        ["pci", "0000:02:00.0", ["add"]],
        ["pci", "0000:04:00.0", ["add"]],
        ["power_supply", "AC", ["add"]],
    ]
    assert last == [["pci", "0000:01:00.0", ["remove"]]]
    assert 1 <= len(storm) < 50
    ((subsystem, name, actions),) = storm[-1]
    assert (subsystem, name, actions[-1]) == ("pci", "0000:01:00.0", "bind")
