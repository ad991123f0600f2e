"""A machine with NVIDIA GPUs for tests: a sysfs tree, and a libnvidia-ml.so.1 that the real pynvml loads.

`nvml.c` describes the state file. `interpreter()` makes small virtual environments with
one version of pynvml each.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path

from fakes.tree import make_tree

SOURCE = Path(__file__).with_name("nvml.c")
WATT = 1000  # NVML counts in milliwatts
GIB = 1 << 30

A100: Mapping[str, object] = {
    "name": "NVIDIA A100-SXM4-80GB",
    "persistence": 0,
    "power": 60 * WATT,
    "power_limit": 400 * WATT,
    "power_default": 400 * WATT,
    "power_enforced": 400 * WATT,
    "power_min": 100 * WATT,
    "power_max": 400 * WATT,
    "temperature": 34,
    "utilization": 0,
    "memory_total": 80 * GIB,
    "memory_used": GIB,
    "pstate": 0,
    "throttle": "0x1",
    "sm_clock": 210,
    "sm_clock_max": 1410,
    "compute_mode": 0,
    "rows": "0,0,0,0",
    "link_gen": 4,
    "link_width": 16,
    "link_gen_max": 4,
    "link_width_max": 16,
    "fabric_state": 0,
    "mig_current": 0,
    "affinity": "ff",
    "capability_major": 8,
    "capability_minor": 0,
}


VERSIONS = ("11.525.112", "12.550.89", "13.615.71")  # Debian 12's python3-pynvml, Debian 13's, and a new one of PyPI
TOP = Path(__file__).resolve().parents[3]


@functools.cache
def scratch() -> Path:
    """A folder for what is built once per test run."""
    folder = Path(tempfile.mkdtemp(prefix="torchtuned-nvml-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def library(*options: str) -> Path:
    """The folder of the compiled library, for LD_LIBRARY_PATH. -DOLD_DRIVER leaves newer functions out."""
    name = "libnvidia-ml.so.1"
    folder = scratch() / "-".join(("lib", *options))
    folder.mkdir()
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{name}", *options]
    subprocess.run([*command, "-o", folder / name, SOURCE], check=True, timeout=60)
    return folder


@functools.cache
def interpreter(version: str = VERSIONS[0]) -> tuple[str, ...]:
    """An isolated Python with this version of pynvml ("": with none), as Gpus(python=...) takes it.

    Debian's packages hold the same file as PyPI's nvidia-ml-py of the same version.
    """
    folder = scratch() / f"python-{version}"
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    if version:
        kept = TOP / ".venv" / f"nvidia-ml-py-{version}"
        if not kept.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(kept)]
            subprocess.run([*pip, f"nvidia-ml-py=={version}"], check=True, timeout=300)
        site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        shutil.copy(kept / "pynvml.py", site)
    return (str(folder / "bin" / "python"), "-I")


class FakeGpus:
    """`count` GPUs, 0000:01:00.0 and on, in a tree and in a state file."""

    def __init__(self, folder: Path, count: int = 2, **changes: object) -> None:
        self.root = folder / "root"
        self.state = folder / "nvml.state"
        self.log = folder / "nvml.log"
        self.root.mkdir()
        self.state.write_text("")
        lines: dict[str, object] = {"driver": "535.261.03", "nvml": "12.535.261.03", "cuda": 12020, "log": self.log}
        self.set(lines | {"count": count})
        for i in range(count):
            self.plug(i, **changes)

    def plug(self, index: int, **changes: object) -> None:
        """One GPU as it comes up, in sysfs and in NVML."""
        device = f"sys/bus/pci/devices/{self.address(index)}"
        files = {"vendor": "0x10de", "class": "0x030200", "device": "0x20b2", "numa_node": "0", "driver": "-> nvidia"}
        make_tree(self.root, {f"{device}/{name}": text for name, text in files.items()})
        make_tree(self.root, {f"{device}/power/control": "on\n", f"{device}/power/runtime_status": "active\n"})
        uuid = f"GPU-{index:08x}-0000-0000-0000-000000000000"
        self.gpu(index, **({"pci": self.address(index), "uuid": uuid} | dict(A100) | changes))

    @staticmethod
    def address(index: int) -> str:
        return f"0000:{index + 1:02x}:00.0"

    def gpu(self, index: int, **changes: object) -> None:
        """Change fields of one GPU; None takes one away."""
        self.set({f"gpu.{index}.{name}": value for name, value in changes.items()})

    def fail(self, function: str, code: int | None, gpu: int | None = None) -> None:
        self.set({f"{'' if gpu is None else f'gpu.{gpu}.'}fail.{function}": code})

    def hang(self, function: str, gpu: int | None = None) -> None:
        self.set({f"{'' if gpu is None else f'gpu.{gpu}.'}hang.{function}": 1})

    def set(self, changes: Mapping[str, object]) -> None:
        with open(f"{self.state}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lines = self.all() | {key: None if value is None else str(value) for key, value in changes.items()}
            fresh = Path(f"{self.state}.new")
            fresh.write_text("".join(f"{key}={value}\n" for key, value in lines.items() if value is not None))
            os.rename(fresh, self.state)

    def all(self) -> dict[str, str | None]:
        return dict(line.split("=", 1) for line in self.state.read_text().splitlines())

    def get(self, index: int, field: str) -> str | None:
        return self.all().get(f"gpu.{index}.{field}")

    def calls(self) -> list[tuple[str, int]]:
        """What was called so far, as (function, GPU or -1)."""
        if not self.log.exists():
            return []
        return [(name, int(gpu)) for name, gpu in (line.split() for line in self.log.read_text().splitlines())]

    def tree(self, files: Mapping[str, str | bytes | None]) -> None:
        make_tree(self.root, files)
