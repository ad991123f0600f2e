"""Devices that come, machines that wake, mains that go: the real policy on a machine that is a folder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fakes import nvml
from fakes.nvml import FakeGpus
from fakes.tree import make_tree

from torchtuned import hostpolicy, newcomers
from torchtuned.config import load
from torchtuned.engine import Engine
from torchtuned.gpus import Gpus
from torchtuned.host import Host
from torchtuned.hostpolicy import HostPolicy
from torchtuned.hotplug import Batch, Change
from torchtuned.ledger import Ledger
from torchtuned.newcomers import Newcomers
from torchtuned.tunables.block import BlockFamily
from torchtuned.tunables.cpu import CpuFamily
from torchtuned.tunables.gpu import GpuFamily
from torchtuned.tunables.sysctl import SysctlFamily

CPUFREQ = "sys/devices/system/cpu/cpufreq/policy0"
SUPPLY = "sys/class/power_supply"
LAPTOP = {
    f"{CPUFREQ}/scaling_governor": "powersave\n",
    f"{CPUFREQ}/scaling_available_governors": "performance powersave\n",
    f"{CPUFREQ}/scaling_driver": "acpi-cpufreq\n",
    f"{CPUFREQ}/affected_cpus": "0\n",
    "proc/sys/vm/swappiness": "60\n",
    f"{SUPPLY}/AC/type": "Mains\n",
    f"{SUPPLY}/AC/online": "1\n",
    f"{SUPPLY}/BAT0/type": "Battery\n",
    f"{SUPPLY}/BAT0/status": "Charging\n",
}
TEXT = "[cpu]\ngovernor = performance\non_battery = keep\n[sysctl]\nvm.swappiness = 10\n"
A = FakeGpus.address(0)
DISK = {"dev": "8:0\n", "size": "1000\n", "queue/read_ahead_kb": "128\n", "queue/rotational": "0\n"}


class Scene:
    def __init__(self, root: Path, text: str, gpus: Gpus) -> None:
        self.root, self.gpus, self.surveys = root, gpus, list[bool]()
        families = [CpuFamily(), SysctlFamily(), BlockFamily(), GpuFamily(gpus)]
        engine = Engine(Host(root), Ledger(root.parent / "run/ledger.json"), families=families)

        async def tuners() -> frozenset[str]:
            return frozenset()

        config = load([("test.conf", text)])
        self.policy = HostPolicy(engine, read=lambda _: config, choice=root / "profile", tuners=tuners)
        self.newcomers = Newcomers(Host(root), gpus, self.policy, self.survey)

    async def survey(self, *, cpus_moved: bool) -> None:
        self.surveys.append(cpus_moved)

    def read(self, path: str) -> str:
        return (self.root / path).read_text().strip()

    def play(self, story: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            await self.policy.start()
            await self.policy.apply()
            try:
                await story()
            finally:
                await self.policy.stop(give_back=False)

        asyncio.run(whole())

    async def mains(self, *, online: bool) -> None:
        (self.root / SUPPLY / "AC/online").write_text("1\n" if online else "0\n")
        (self.root / SUPPLY / "BAT0/status").write_text("Charging\n" if online else "Discharging\n")
        await self.newcomers.changed(batch("power_supply", "AC", "change"))


def batch(subsystem: str, name: str, *actions: str) -> Batch:
    return Batch(changes=(Change(subsystem=subsystem, name=name, actions=actions),))


@pytest.fixture
def laptop(tmp_path: Path) -> Scene:
    root = make_tree(tmp_path / "root", LAPTOP)
    return Scene(root, TEXT, Gpus(Host(root)))


@pytest.mark.parametrize("active", [True, False])
def test_a_job_that_starts_or_ends_as_a_device_comes(tmp_path: Path, active: bool) -> None:  # noqa: FBT001
    """Only the device's knobs are seen to with it; those for jobs have their turn afterwards."""
    root = make_tree(tmp_path / "root", LAPTOP)
    scene = Scene(root, "[sysctl]\nvm.swappiness = 10 @jobs\n", Gpus(Host(root)))

    async def story() -> None:
        if not active:
            scene.policy.jobs(active=True)
            while scene.read("proc/sys/vm/swappiness") != "10":
                await asyncio.sleep(0.005)
        came = asyncio.ensure_future(scene.policy.apply(only=("block/sda",)))
        scene.policy.jobs(active=active)
        await came

    scene.play(story)
    assert scene.read("proc/sys/vm/swappiness") == ("10" if active else "60")


def test_on_battery_the_cpus_are_left_alone_and_set_when_the_mains_are_back(laptop: Scene) -> None:
    async def story() -> None:
        assert laptop.read(f"{CPUFREQ}/scaling_governor") == "performance"
        await laptop.mains(online=False)
        assert laptop.read(f"{CPUFREQ}/scaling_governor") == "powersave"
        assert laptop.read("proc/sys/vm/swappiness") == "10"
        (laptop.root / f"{CPUFREQ}/scaling_available_governors").write_text("performance powersave schedutil\n")
        (laptop.root / f"{CPUFREQ}/scaling_governor").write_text("schedutil\n")
        await laptop.newcomers.changed(batch("power_supply", "BAT0", "change"))  # one per cent less: nothing to do
        assert laptop.read(f"{CPUFREQ}/scaling_governor") == "schedutil"
        await laptop.mains(online=True)
        assert laptop.read(f"{CPUFREQ}/scaling_governor") == "performance"
        assert laptop.surveys == []  # no GPU and no CPU has moved

    laptop.play(story)


def test_what_comes_while_the_machine_is_looked_at_is_taken_in_one_piece(laptop: Scene) -> None:
    """A storm of a batch each second, where a driver takes three to answer, is over when it is over."""

    async def story() -> None:
        go = asyncio.Event()

        async def slow(*, cpus_moved: bool) -> None:
            laptop.surveys.append(cpus_moved)
            await go.wait()

        laptop.newcomers = Newcomers(Host(laptop.root), laptop.gpus, laptop.policy, slow)
        storm = [("pci", A, "remove"), ("cpu", "cpu1", "online"), *[("pci", A, "add"), ("pci", A, "remove")] * 20]
        tasks = [asyncio.create_task(laptop.newcomers.changed(batch(*words))) for words in storm]
        while not laptop.surveys:
            await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*tasks)
        assert laptop.surveys == [False, True]  # of the first one, and of all the others

    laptop.play(story)


def test_what_was_undone_on_purpose_stays_so_when_the_mains_come(laptop: Scene) -> None:
    async def story() -> None:
        await laptop.mains(online=False)
        await laptop.policy.undo(())
        await laptop.mains(online=True)
        assert laptop.read(f"{CPUFREQ}/scaling_governor") == "powersave"

    laptop.play(story)


def test_a_driver_and_a_disk_that_come_late_get_the_policy(tmp_path: Path) -> None:
    late = {path: LAPTOP[path] for path in LAPTOP if path.startswith(CPUFREQ)}
    root = make_tree(tmp_path / "root", {path: text for path, text in LAPTOP.items() if path not in late})
    scene = Scene(root, TEXT + "[block:all]\ndevice = *\nread_ahead_kb = 4096\n", Gpus(Host(root)))

    async def story() -> None:
        make_tree(root, late)
        await scene.newcomers.changed(batch("module", "acpi_cpufreq", "add"))
        assert scene.read(f"{CPUFREQ}/scaling_governor") == "performance"
        assert scene.surveys == [True]
        make_tree(root, {f"sys/block/sda/{name}": text for name, text in DISK.items()})
        await scene.newcomers.changed(batch("block", "sda", "add"))
        assert scene.read("sys/block/sda/queue/read_ahead_kb") == "4096"
        assert scene.surveys == [True]  # nobody is placed by a disk

    scene.play(story)


@pytest.mark.parametrize("how", ["woke", "online", "rescan"])
def test_what_the_kernel_reset_is_set_again(laptop: Scene, how: str) -> None:
    async def story() -> None:
        (laptop.root / f"{CPUFREQ}/scaling_governor").write_text("powersave\n")  # the default of a CPU that comes up
        if how == "woke":
            await laptop.newcomers.woke()
        else:
            changed = batch("cpu", "cpu0", "offline", "online")
            await laptop.newcomers.changed(Batch(changes=(), rescan=True) if how == "rescan" else changed)
        assert laptop.read(f"{CPUFREQ}/scaling_governor") == "performance"
        assert laptop.surveys == [True]

    laptop.play(story)


def test_a_driver_that_answers_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomers, "ASK_S", 0.1)
    fake = FakeGpus(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml.library()))
    monkeypatch.setenv("FAKE_NVML_STATE", str(fake.state))
    scene = Scene(fake.root, "[gpu]\npersistence_mode = on\n", Gpus(Host(fake.root), python=nvml.interpreter()))

    async def story() -> None:
        assert fake.get(0, "persistence") == "1"
        fake.gpu(0, persistence=0)
        fake.fail("nvmlInitWithFlags", 9)  # the driver is not ready
        change = asyncio.ensure_future(scene.newcomers.changed(batch("pci", A, "unbind", "bind")))
        while not scene.surveys and not change.done():
            await asyncio.sleep(0.05)
        assert fake.get(0, "persistence") == "0"
        fake.fail("nvmlInitWithFlags", None)
        await asyncio.wait_for(change, 20)
        assert fake.get(0, "persistence") == "1"
        assert scene.surveys == [False, False]
        assert scene.policy.degraded == []

    scene.play(story)


def test_clocks_are_locked_again_after_the_driver_took_the_gpu_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeGpus(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml.library()))
    monkeypatch.setenv("FAKE_NVML_STATE", str(fake.state))
    scene = Scene(fake.root, "[gpu]\nclocks_mhz = 900-1410\n", Gpus(Host(fake.root), python=nvml.interpreter()))

    async def story() -> None:
        assert fake.get(0, "locked") == "900,1410"
        fake.gpu(0, locked="")  # no driver tells
        await scene.newcomers.changed(batch("pci", A, "unbind", "bind"))
        assert fake.get(0, "locked") == "900,1410"

    scene.play(story)


def test_a_driver_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomers, "ASK_S", 0.1)
    monkeypatch.setattr(newcomers, "BIND_S", 0.5)
    fake = FakeGpus(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml.library()))
    monkeypatch.setenv("FAKE_NVML_STATE", str(fake.state))
    fake.fail("nvmlInitWithFlags", 9)
    scene = Scene(fake.root, "", Gpus(Host(fake.root), python=nvml.interpreter()))

    async def story() -> None:
        await asyncio.wait_for(scene.newcomers.changed(batch("pci", A, "bind")), 20)
        assert scene.surveys == [False]

    scene.play(story)


@pytest.fixture
def full_run(laptop: Scene, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that nobody can write the ledger past, once it is made."""
    monkeypatch.setattr(hostpolicy, "RETRY_S", 0.05)
    return laptop.root.parent / "run/ledger.new"


def test_what_sleep_has_lost_is_set_again_once_that_can_be_recorded(laptop: Scene, full_run: Path) -> None:
    """And not taken for another's: somebody who writes a value of his own does not sleep."""

    async def story() -> None:
        full_run.mkdir()
        (laptop.root / "proc/sys/vm/swappiness").write_text("60\n")
        await laptop.newcomers.woke()
        assert laptop.policy.state == "degraded"
        full_run.rmdir()
        async with asyncio.timeout(10):
            while laptop.read("proc/sys/vm/swappiness") != "10":
                await asyncio.sleep(0.01)

    laptop.play(story)
    assert laptop.policy.state == "ready"


def test_nothing_is_tried_again_after_the_end(laptop: Scene, full_run: Path) -> None:
    full_run.mkdir(parents=True)

    async def story() -> None:
        await laptop.policy.start()
        applying = asyncio.ensure_future(laptop.policy.apply())
        await asyncio.sleep(0)  # it has its turn before the end has
        await laptop.policy.stop(give_back=False)
        assert {row.passing for row in await applying} == {True}
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(story())
