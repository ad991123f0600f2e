"""tests/gpu/run on fake GPUs, bound over /sys in a mount namespace: it has to work when a real GPU is to be had."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from fakes import nvml
from fakes.nvml import FakeGpus

TOP = Path(__file__).resolve().parent.parent
BIND = 'mount --bind "$1" /sys/bus/pci/devices && exec "$2" tests/gpu/run --change'


def test_on_fake_gpus(tmp_path: Path) -> None:
    fake = FakeGpus(tmp_path)
    devices = fake.root / "sys/bus/pci/devices"
    python = nvml.interpreter()[0]
    environment = {"LD_LIBRARY_PATH": str(nvml.library()), "FAKE_NVML_STATE": str(fake.state), "HOME": str(tmp_path)}
    environment["DBUS_SYSTEM_BUS_ADDRESS"] = f"unix:path={tmp_path}/no-bus"
    environment["XDG_RUNTIME_DIR"] = str(tmp_path)
    command = ["unshare", "--mount", "sh", "-c", BIND, "sh", devices, python]
    ran = subprocess.run(command, cwd=TOP, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = ran.stdout.splitlines()
    assert said[-1].endswith(" passed, 0 failed")
    assert sum(line.startswith("ok ") for line in said) >= 15
    assert any("persistence off -> on" in line for line in said)
    assert "ok   a second job is refused" in ran.stdout
    assert fake.get(0, "persistence") == fake.get(1, "persistence") == "0"
    assert "0000:01:00.0" not in os.listdir("/sys/bus/pci/devices")
