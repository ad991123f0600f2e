"""Gpus against a fake libnvidia-ml.so.1 that the real pynvml loads."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest
from fakes import nvml
from fakes.nvml import FakeGpus
from fakes.tree import make_tree

from torchtuned import nvidia
from torchtuned.errors import Missing, Refused, Unreadable
from torchtuned.gpus import Gpus, Process
from torchtuned.host import Host

A, B, C = (FakeGpus.address(i) for i in range(3))
NO_PERMISSION, UNKNOWN_ERROR, IN_USE = 4, 999, 19


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    fake = FakeGpus(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml.library()))
    monkeypatch.setenv("FAKE_NVML_STATE", str(fake.state))
    return fake


def gpus(fake: FakeGpus, version: str = nvml.VERSIONS[0], deadline_s: float = 10.0) -> Gpus:
    return Gpus(Host(fake.root), python=nvml.interpreter(version), deadline_s=deadline_s)


@pytest.mark.parametrize("version", nvml.VERSIONS)
@pytest.mark.parametrize("options", [(), ("-DOLD_DRIVER",)])
def test_all_versions_of_pynvml(
    fake: FakeGpus, monkeypatch: pytest.MonkeyPatch, version: str, options: tuple[str, ...]
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml.library(*options)))
    fake.gpu(
        0, processes=f"4711:{nvml.GIB},4712:0", utilization=97, mig_current=1, **{"mig.2": "MIG-x", "mig.4": "MIG-y"}
    )
    fake.gpu(1, affinity="ff00000000000000000f0", fabric_state=3)
    asked = gpus(fake, version)

    facts = asked.facts()
    assert facts[A].name == "NVIDIA A100-SXM4-80GB"
    assert facts[A].uuid == "GPU-00000000-0000-0000-0000-000000000000"
    assert facts[A].cpus == frozenset(range(8))
    assert facts[A].mig == ("MIG-x", "MIG-y")
    assert facts[B].cpus == frozenset(range(4, 8)) | frozenset(range(76, 84))

    sample = asked.sample()[A]
    assert (sample.state, sample.driver_version, sample.persistence) == ("ok", "535.261.03", False)
    assert (sample.power, sample.power_limit, sample.temperature, sample.utilization) == (60.0, 400.0, 34, 97)
    assert (sample.memory_used, sample.memory_total, sample.pstate) == (nvml.GIB, 80 * nvml.GIB, 0)
    assert asked.busy() == {A: (Process(pid=4711, memory=nvml.GIB), Process(pid=4712, memory=0)), B: ()}

    assert asked.set(B, "persistence_mode", "on") == "on"
    assert fake.get(1, "persistence") == "1"
    assert asked.status.driver == "535.261.03"
    assert (asked.status.state, asked.status.cuda) == ("ok", 12020)

    health = asked.read([B], ("throttle", "rows", "fabric", "link", "link_max", "sm_clock"))[B]
    assert health.values["throttle"] == 1
    assert health.values["link"] == health.values["link_max"] == [4, 16]
    if options:
        assert health.errors["rows"][0] == health.errors["fabric"][0] == 13  # function not found
    else:
        assert health.values["fabric"] == {"state": 3, "status": 0}
        assert health.values["rows"]["pending"] is False


def test_newer_name_of_the_throttle_reasons(fake: FakeGpus) -> None:
    fake.fail("nvmlDeviceGetCurrentClocksThrottleReasons", 13)
    assert gpus(fake, "13.615.71").read([A], ("throttle",))[A].values == {"throttle": 1}
    assert gpus(fake, "11.525.112").read([A], ("throttle",))[A].errors["throttle"][0] == 13  # knows the old name only


def test_nothing_stays_open(fake: FakeGpus) -> None:
    asked = gpus(fake)
    asked.sample()
    asked.set(A, "persistence_mode", "on")
    names = [name for name, _ in fake.calls()]
    assert names.count("nvmlInitWithFlags") == names.count("nvmlShutdown") == 2
    assert names[-1] == "nvmlShutdown"
    assert "libnvidia-ml" not in Path("/proc/self/maps").read_text()


def test_facts_are_kept_until_forgotten(fake: FakeGpus) -> None:
    asked = gpus(fake)
    before = asked.facts()
    calls = len(fake.calls())
    assert asked.facts() == before
    assert len(fake.calls()) == calls
    fake.gpu(1, uuid="GPU-new")
    assert asked.facts() == before
    asked.forget()
    assert (asked.facts()[A], asked.facts()[B].uuid) == (before[A], "GPU-new")


def test_a_sleeping_gpu_is_left_alone(fake: FakeGpus) -> None:
    """A question would wake it; the others are asked by their address, never by index, which may wake all."""
    status = "sys/bus/pci/devices/0000:01:00.0/power/runtime_status"
    fake.tree({status: "suspended\n"})
    asked = gpus(fake)
    assert {a: s.state for a, s in asked.sample().items()} == {A: "asleep", B: "ok"}
    assert {gpu for _, gpu in fake.calls()} == {-1, 1}
    with pytest.raises(Refused, match="sleeps"):
        asked.set(A, "persistence_mode", "on")
    with pytest.raises(Unreadable, match="sleeps") as caught:
        asked.get(A, "persistence_mode")
    assert caught.value.errno == errno.EBUSY
    assert {gpu for _, gpu in fake.calls()} == {-1, 1}

    fake.tree({status.replace("01:00.0", "02:00.0"): "suspended\n"})
    calls = len(fake.calls())
    assert asked.facts() == asked.busy() == {}
    assert asked.status.state == "asleep"
    assert len(fake.calls()) == calls  # with all asleep NVML is not even opened


def test_a_gpu_of_another_driver_is_not_asked(fake: FakeGpus) -> None:
    link = fake.root / "sys/bus/pci/devices/0000:01:00.0/driver"
    link.unlink()
    link.symlink_to("../../../bus/pci/drivers/vfio-pci")
    asked = gpus(fake)
    assert asked.sample()[A].state == "unbound"
    assert (A, 0) not in fake.calls()
    with pytest.raises(Missing, match="not bound"):
        asked.get(A, "persistence_mode")


@pytest.mark.parametrize(
    ("code", "state"),
    [(9, "no-driver"), (18, "mismatch"), (12, "no-library"), (4, "denied"), (999, "failed")],
)
def test_nvml_does_not_start(fake: FakeGpus, code: int, state: str) -> None:
    fake.fail("nvmlInitWithFlags", code)
    asked = gpus(fake)
    assert asked.facts() == asked.busy() == {}
    assert asked.status.state == state
    assert asked.status.text
    assert asked.sample()[A].state == "unknown"
    with pytest.raises(Refused if state == "denied" else Missing) as caught:
        asked.set(A, "persistence_mode", "on")
    assert asked.status.text in str(caught.value)
    assert fake.get(0, "persistence") == "0"


def test_without_pynvml(fake: FakeGpus) -> None:
    asked = gpus(fake, version="")
    assert asked.facts() == {}
    assert asked.status.state == "no-pynvml"
    assert "python3-pynvml" in asked.status.text


def test_without_the_library(fake: FakeGpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    asked = gpus(fake)
    assert asked.facts() == {}
    assert asked.status.state == "no-library"


def test_an_interpreter_that_fails(fake: FakeGpus) -> None:
    asked = Gpus(Host(fake.root), python=("/bin/sh", "-c", "echo broken >&2; exit 3"))
    assert asked.facts() == {}
    assert asked.status.state == "failed"
    assert "broken" in asked.status.text


def test_a_folder_is_not_asked_about(fake: FakeGpus) -> None:
    asked = Gpus(Host(fake.root))
    assert asked.facts() == {}
    assert asked.status.state == "off"
    assert fake.calls() == []


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    asked = Gpus(Host(make_tree(tmp_path / "empty", {"sys": None})), python=nvml.interpreter())
    assert asked.addresses() == ()
    assert asked.facts() == asked.sample() == asked.busy() == {}
    assert asked.status.state == "no-gpu"


def test_a_gpu_that_fell_off_the_bus(fake: FakeGpus) -> None:
    fake.fail("nvmlDeviceGetPowerUsage", 15, gpu=0)
    asked = gpus(fake)
    assert {a: s.state for a, s in asked.sample().items()} == {A: "lost", B: "ok"}
    fake.fail("nvmlDeviceGetPowerUsage", None, gpu=0)
    fake.fail("nvmlDeviceGetHandleByPciBusId_v2", 15, gpu=0)
    assert {a: s.state for a, s in asked.sample().items()} == {A: "lost", B: "ok"}
    with pytest.raises(Refused):
        asked.set(A, "persistence_mode", "on")


def test_what_one_gpu_does_not_have_costs_that_field_only(fake: FakeGpus) -> None:
    fake.gpu(0, power=None, temperature=None)
    fake.fail("nvmlDeviceGetUtilizationRates", UNKNOWN_ERROR, gpu=0)
    sample = gpus(fake).sample()[A]
    assert (sample.state, sample.power, sample.temperature, sample.utilization) == ("ok", None, None, None)
    assert sample.power_limit == 400.0


def test_a_hanging_gpu_costs_itself_only(fake: FakeGpus) -> None:
    fake.plug(2)
    fake.set({"count": 3})
    fake.hang("nvmlDeviceGetPowerUsage", gpu=1)
    asked = gpus(fake, deadline_s=1.5)
    start = time.monotonic()
    assert {a: s.state for a, s in asked.sample().items()} == {A: "ok", B: "hung", C: "ok"}
    assert time.monotonic() - start < 4
    with pytest.raises(Unreadable, match="no answer within"):
        asked.get(B, "power")
    fake.hang("nvmlDeviceSetPersistenceMode", gpu=0)
    with pytest.raises(Refused, match="no answer within"):
        asked.set(A, "persistence_mode", "on")


def test_a_hang_at_the_start(fake: FakeGpus) -> None:
    fake.hang("nvmlInitWithFlags")
    asked = gpus(fake, deadline_s=0.5)
    start = time.monotonic()
    assert {s.state for s in asked.sample().values()} == {"hung"}
    assert time.monotonic() - start < 2
    assert asked.status.state == "hung"


def test_a_call_that_no_signal_ends_is_not_joined_by_others(fake: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child in the kernel survives SIGKILL; here it does because the signal is kept from it."""
    fake.hang("nvmlInitWithFlags")
    asked = gpus(fake, deadline_s=0.5)
    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen.kill", lambda child: None)
        asked.sample()
    (child,) = asked._stuck
    start = time.monotonic()
    assert {s.state for s in asked.sample().values()} == {"hung"}
    assert time.monotonic() - start < 0.2
    assert f"process {child.pid}" in asked.status.text
    fake.set({"hang.nvmlInitWithFlags": None})
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert {s.state for s in asked.sample().values()} == {"ok"}


def test_a_child_that_dies_on_a_gpu(fake: FakeGpus) -> None:
    """Even a crash inside the library leaves the others their answers."""
    fake.fail("nvmlDeviceGetPowerUsage", None, gpu=0)
    fake.gpu(0, **{"crash.nvmlDeviceGetPowerUsage": 1})
    assert {a: s.state for a, s in gpus(fake).sample().items()} == {A: "unknown", B: "ok"}


@pytest.mark.parametrize(
    ("knob", "value", "field", "stored", "undo", "original"),
    [
        ("persistence_mode", "on", "persistence", "1", "off", "0"),
        ("power_limit", "250.5", "power_limit", "250500", "400", "400000"),
        ("compute_mode", "exclusive_process", "compute_mode", "3", "default", "0"),
        ("locked_clocks", "900-1410", "locked", "900,1410", "unlocked", ""),
    ],
)
def test_knobs(fake: FakeGpus, knob: str, value: str, field: str, stored: str, undo: str, original: str) -> None:
    asked = gpus(fake)
    assert asked.set(A, knob, value) == value
    assert fake.get(0, field) == stored
    assert fake.get(1, field) != stored
    if knob != "locked_clocks":
        assert asked.get(A, knob) == value
    assert asked.set(A, knob, undo) == undo
    assert fake.get(0, field) == original


def test_power_in_watts(fake: FakeGpus) -> None:
    asked = gpus(fake)
    assert asked.get(A, "power_default") == "400"
    assert asked.get(A, "power_range") == "100-400"


def test_refusals(fake: FakeGpus) -> None:
    asked = gpus(fake)
    fake.fail("nvmlDeviceSetPersistenceMode", NO_PERMISSION)
    with pytest.raises(Refused, match="needs root") as caught:
        asked.set(A, "persistence_mode", "on")
    assert caught.value.errno == 13
    fake.fail("nvmlDeviceSetPersistenceMode", IN_USE)
    with pytest.raises(Refused):
        asked.set(A, "persistence_mode", "on")
    fake.fail("nvmlDeviceSetComputeMode", 3)
    with pytest.raises(Missing, match="does not have it"):
        asked.set(A, "compute_mode", "prohibited")
    with pytest.raises(Refused):
        asked.set(A, "power_limit", "900")  # the driver's own range
    fake.gpu(0, power_sticky=1)
    with pytest.raises(Refused, match="200 was accepted and 400 is in force"):
        asked.set(A, "power_limit", "200")
    fake.fail("nvmlDeviceGetComputeMode", UNKNOWN_ERROR)
    with pytest.raises(Unreadable):
        asked.get(A, "compute_mode")


def test_the_state_may_change_while_in_use(fake: FakeGpus) -> None:
    asked = gpus(fake)
    assert asked.sample()[B].temperature == 34
    fake.gpu(1, temperature=81)
    assert asked.sample()[B].temperature == 81
    fake.plug(2)
    fake.set({"count": 3})
    assert asked.sample()[C].state == "ok"


def test_pci_functions(tmp_path: Path) -> None:
    devices = "sys/bus/pci/devices"
    host = Host(
        make_tree(
            tmp_path,
            {
                f"{devices}/10000:01:00.0/vendor": "0x10de\n",
                f"{devices}/10000:01:00.0/class": "0x030000\n",
                f"{devices}/10000:01:00.0/device": "0x2684\n",
                f"{devices}/10000:01:00.1/vendor": "0x10de\n",
                f"{devices}/10000:01:00.1/class": "0x040300\n",
                f"{devices}/10000:01:00.1/device": "0x22ba\n",
                f"{devices}/f000:c3:00.0/vendor": "0x10de\n",
                f"{devices}/f000:c3:00.0/class": "0x068000\n",
                f"{devices}/f000:c3:00.0/device": "0x1af1\n",
                f"{devices}/f000:01:00.0/vendor": "0x10de\n",
                f"{devices}/f000:01:00.0/class": "0x030200\n",
                f"{devices}/f000:01:00.0/device": "0x20b2\n",
                f"{devices}/f000:01:00.0/driver": "-> ../../../bus/pci/drivers/nouveau",
                f"{devices}/0000:53:00.0/vendor": "0x1a03\n",
                f"{devices}/0000:53:00.0/class": "0x030000\n",
                f"{devices}/0000:54:00.0/vendor": "0x10de\n",  # going away: no class file any more
            },
        )
    )
    found = nvidia.functions(host)
    assert [f.address for f in found] == ["f000:01:00.0", "f000:c3:00.0", "10000:01:00.0", "10000:01:00.1"]
    assert [f.driver for f in found] == ["nouveau", "", "", ""]
    assert Gpus(host).addresses() == ("f000:01:00.0", "10000:01:00.0")


def test_nvidia_persistenced(tmp_path: Path) -> None:
    host = Host(make_tree(tmp_path, {"run/nvidia-persistenced/nvidia-persistenced.pid": "812\n"}))
    assert nvidia.persistenced(host) == 0  # a pid file that a killed daemon left behind
    make_tree(tmp_path, {"proc/812/comm": "bash\n"})
    assert nvidia.persistenced(host) == 0
    make_tree(tmp_path, {"proc/812/comm": "nvidia-persiste\n"})
    assert nvidia.persistenced(host) == 812
