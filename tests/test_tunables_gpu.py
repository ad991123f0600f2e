"""The GPU knobs, through the engine, on a fake NVML that the real pynvml loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import nvml
from fakes.nvml import FakeGpus

from torchtuned import config
from torchtuned.engine import Engine
from torchtuned.errors import Refused
from torchtuned.gpus import Gpus
from torchtuned.host import Host
from torchtuned.ledger import Ledger
from torchtuned.policy import Outcome, Row
from torchtuned.tunables.gpu import GpuFamily

A, B = FakeGpus.address(0), FakeGpus.address(1)
ALL = """
persistence_mode = on
power_control = on
power_limit_w = 300
clocks_mhz = 900-1410
compute_mode = exclusive_process
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    fake = FakeGpus(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml.library()))
    monkeypatch.setenv("FAKE_NVML_STATE", str(fake.state))
    return fake


@pytest.fixture
def restart(fake: FakeGpus, tmp_path: Path) -> Callable[[], Engine]:
    """Makes an engine as a new process would: only the files are the same."""

    def make() -> Engine:
        host = Host(fake.root)
        family = GpuFamily(Gpus(host, python=nvml.interpreter()))
        return Engine(host, Ledger(tmp_path / "ledger.json"), families=[family], deadline_s=20.0)

    return make


def wishes(text: str) -> config.Config:
    return config.load([("test.conf", f"[gpu]\n{text}\n")])


def apply(engine: Engine, text: str, *, only: str | None = None, reassert: bool = False) -> dict[str, Row]:
    chosen = None if only is None else [only]
    return rows(engine.apply(wishes(text), jobs_active=False, only=chosen, reassert=reassert))


def rows(found: list[Row]) -> dict[str, Row]:
    return {row.knob: row for row in found}


def of_first(fake: FakeGpus) -> list[str | None]:
    control = fake.root / "sys/bus/pci/devices" / A / "power/control"
    return [
        fake.get(0, "persistence"),
        fake.get(0, "power_limit"),
        fake.get(0, "compute_mode"),
        fake.get(0, "locked"),
        control.read_text().strip(),
    ]


def test_everything_set_and_given_back(fake: FakeGpus, restart: Callable[[], Engine]) -> None:
    fake.tree({f"sys/bus/pci/devices/{A}/power/control": "auto\n"})
    fake.gpu(0, locked="")
    original = of_first(fake)
    planned = rows(restart().plan(wishes(ALL)))
    assert of_first(fake) == original
    assert planned[f"gpu/{A}/persistence_mode"].current == "off"
    assert planned[f"gpu/{A}/power_limit_w"].reason == "would become 300"

    done = apply(restart(), ALL)
    assert {row.outcome for knob, row in done.items() if A in knob} == {Outcome.APPLIED}
    assert of_first(fake) == ["1", "300000", "3", "900,1410", "on"]
    assert done[f"gpu/{B}/power_control"].outcome is Outcome.KEPT

    again = apply(restart(), ALL)
    assert {row.reason for knob, row in again.items() if A in knob and "control" not in knob} == {
        "set by torchtuned, was off",
        "set by torchtuned, was 400",
        "set by torchtuned, was unlocked",
        "set by torchtuned, was default",
    }
    assert all(row.outcome is Outcome.APPLIED for row in restart().undo())
    assert of_first(fake) == original


def test_what_is_right_already_is_kept(fake: FakeGpus, restart: Callable[[], Engine]) -> None:
    fake.gpu(0, persistence=1)
    done = apply(restart(), "persistence_mode = on")
    assert done[f"gpu/{A}/persistence_mode"].outcome is Outcome.KEPT
    assert done[f"gpu/{B}/persistence_mode"].outcome is Outcome.APPLIED
    restart().undo()
    assert (fake.get(0, "persistence"), fake.get(1, "persistence")) == ("1", "0")


def test_one_question_serves_all_gpus(fake: FakeGpus, restart: Callable[[], Engine]) -> None:
    restart().plan(wishes("persistence_mode = on"))
    assert [name for name, _ in fake.calls()].count("nvmlInitWithFlags") == 1


def test_a_sleeping_gpu_keeps_its_entry_and_is_not_woken(fake: FakeGpus, restart: Callable[[], Engine]) -> None:
    apply(restart(), "persistence_mode = on")
    fake.tree({f"sys/bus/pci/devices/{A}/power/runtime_status": "suspended\n"})
    calls = len([call for call in fake.calls() if call[1] == 0])
    row = apply(restart(), "persistence_mode = on")[f"gpu/{A}/persistence_mode"]
    assert (row.outcome, "sleeps" in row.reason) == (Outcome.UNSUPPORTED, True)
    assert len([call for call in fake.calls() if call[1] == 0]) == calls
    fake.tree({f"sys/bus/pci/devices/{A}/power/runtime_status": "active\n"})
    restart().undo()
    assert fake.get(0, "persistence") == "0"


def test_asserted_again_after_a_driver_reload(fake: FakeGpus, restart: Callable[[], Engine]) -> None:
    apply(restart(), ALL)
    fake.gpu(0, persistence=0, power_limit=400000, power_enforced=400000, compute_mode=0, locked="")
    engine = restart()
    engine.families["gpu"]._gpus.locked.put(A, "unlocked")  # type: ignore[attr-defined]
    done = apply(engine, ALL, only=f"gpu/{A}", reassert=True)
    assert {knob.split("/")[1] for knob in done} == {A}
    assert of_first(fake)[:4] == ["1", "300000", "3", "900,1410"]
    engine.undo()
    assert of_first(fake)[:4] == ["0", "400000", "0", ""]


def test_somebody_elses_change_is_left(fake: FakeGpus, restart: Callable[[], Engine]) -> None:
    apply(restart(), "power_limit_w = 300")
    fake.gpu(0, power_limit=250000)
    row = apply(restart(), "power_limit_w = 300")[f"gpu/{A}/power_limit_w"]
    assert row.outcome is Outcome.DRIFTED
    restart().undo()
    assert (fake.get(0, "power_limit"), fake.get(1, "power_limit")) == ("250000", "400000")


def test_never_above_the_default_limit(fake: FakeGpus, restart: Callable[[], Engine]) -> None:
    fake.gpu(0, power_max=500000)
    row = apply(restart(), "power_limit_w = 450")[f"gpu/{A}/power_limit_w"]
    assert (row.outcome, fake.get(0, "power_limit")) == (Outcome.DENIED, "400000")
    assert "default limit of 400 W" in row.reason
    fake.gpu(0, power_limit=450000)  # but what the administrator had is given back
    apply(restart(), "power_limit_w = 300")
    assert fake.get(0, "power_limit") == "300000"
    restart().undo()
    assert fake.get(0, "power_limit") == "450000"


def test_a_write_without_effect_is_told(fake: FakeGpus, restart: Callable[[], Engine]) -> None:
    fake.gpu(0, power_sticky=1)
    row = apply(restart(), "power_limit_w = 300")[f"gpu/{A}/power_limit_w"]
    assert row.outcome is Outcome.FAILED
    assert "300 was accepted and 400 is in force" in row.reason


def test_not_supported_and_not_permitted(fake: FakeGpus, restart: Callable[[], Engine]) -> None:
    fake.fail("nvmlDeviceSetPersistenceMode", 3, gpu=0)
    fake.fail("nvmlDeviceSetPersistenceMode", 4, gpu=1)
    done = apply(restart(), "persistence_mode = on")
    assert done[f"gpu/{A}/persistence_mode"].outcome is Outcome.UNSUPPORTED
    assert done[f"gpu/{B}/persistence_mode"].outcome is Outcome.DENIED
    assert restart().undo() == []


def test_without_nvml_the_rest_works(fake: FakeGpus, restart: Callable[[], Engine]) -> None:
    fake.tree({f"sys/bus/pci/devices/{A}/power/control": "auto\n"})
    fake.fail("nvmlInitWithFlags", 18)
    done = apply(restart(), "persistence_mode = on\npower_control = on")
    assert done[f"gpu/{A}/persistence_mode"].outcome is Outcome.UNSUPPORTED
    assert "different versions" in done[f"gpu/{A}/persistence_mode"].reason
    assert done[f"gpu/{A}/power_control"].outcome is Outcome.APPLIED


def test_a_failed_lock_is_not_noted(fake: FakeGpus) -> None:
    gpus = Gpus(Host(fake.root), python=nvml.interpreter())
    with pytest.raises(Refused):
        gpus.set(A, "locked_clocks", "1410-900")
    assert gpus.locked.get(A) == "unlocked"
    gpus.set(A, "locked_clocks", "1200")
    assert (fake.get(0, "locked"), gpus.locked.get(A), gpus.locked.get(B)) == ("1200,1200", "1200", "unlocked")
    gpus.forget()
    assert gpus.locked.get(A) == "1200"


def test_a_lock_ends_with_the_driver_that_has_it(fake: FakeGpus, restart: Callable[[], Engine]) -> None:
    """The module was unloaded and loaded again: another folder in sysfs, though nobody told us."""
    drivers = fake.root / "sys/bus/pci/drivers"
    (drivers / "nvidia").mkdir(parents=True)
    apply(restart(), "clocks_mhz = 1200")
    assert apply(restart(), "clocks_mhz = 1200")[f"gpu/{A}/clocks_mhz"].reason == "set by torchtuned, was unlocked"
    (drivers / "nvidia").rename(drivers / "gone")
    (drivers / "nvidia").mkdir()
    fake.gpu(0, locked="")
    assert apply(restart(), "clocks_mhz = 1200", reassert=True)[f"gpu/{A}/clocks_mhz"].current == "1200"
    assert fake.get(0, "locked") == "1200,1200"


def test_locked_clocks_are_given_back_without_the_note(fake: FakeGpus, restart: Callable[[], Engine]) -> None:
    apply(restart(), "clocks_mhz = 1200")
    (fake.root / "run/torchtuned/locked-clocks.json").unlink()
    restart().undo()
    assert fake.get(0, "locked") == fake.get(1, "locked") == ""


def test_other_devices(fake: FakeGpus, restart: Callable[[], Engine]) -> None:
    devices = "sys/bus/pci/devices"
    for address, vendor, kind in (
        ("0000:03:00.0", "0x1002", "0x038000"),
        ("0000:04:00.0", "0x1234", "0x038000"),  # watched by configuration
        ("0000:53:00.0", "0x1a03", "0x030000"),  # a server's management chip
    ):
        files = {"vendor": vendor, "class": kind, "power/control": "auto\n"}
        fake.tree({f"{devices}/{address}/{name}": text for name, text in files.items()})
    engine = restart()
    done = apply(engine, "power_control = on\npersistence_mode = on\nwatch = 1234:0380")
    assert done["gpu/0000:03:00.0/power_control"].outcome is Outcome.APPLIED
    assert done["gpu/0000:04:00.0/power_control"].outcome is Outcome.APPLIED
    assert not any("53:00.0" in knob for knob in done)
    assert {knob for knob in done if "persistence" in knob} == {f"gpu/{gpu}/persistence_mode" for gpu in (A, B)}
    apply(engine, "power_control = on\npersistence_mode = on")  # watched no longer: given back
    assert (fake.root / f"{devices}/0000:04:00.0/power/control").read_text().strip() == "auto"
    assert (fake.root / f"{devices}/0000:03:00.0/power/control").read_text().strip() == "on"


def test_no_gpu(tmp_path: Path) -> None:
    (tmp_path / "root/sys").mkdir(parents=True)
    engine = Engine(Host(tmp_path / "root"), Ledger(tmp_path / "ledger.json"), families=[GpuFamily()])
    (row,) = engine.plan(wishes("persistence_mode = on"))
    assert (row.outcome, row.reason) == (Outcome.UNSUPPORTED, "no NVIDIA GPU here")
