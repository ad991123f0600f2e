"""GPUs: persistence mode, runtime power management, and, only where an administrator asks, limits, clocks and mode.

Persistence mode is set with one NVML call whoever keeps it: where nvidia-persistenced runs the library hands the wish
to that daemon, else the driver keeps the GPU open itself. There is one writer, then, and nothing to fight over.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Collection, Sequence

from torchtuned.errors import HostError, Refused
from torchtuned.gpus import Gpus, Reading
from torchtuned.host import Host
from torchtuned.nvidia import UNLOCKED, functions
from torchtuned.pci import DEVICES, WATCHED
from torchtuned.policy import Companion, Entry, Wish
from torchtuned.tunables import Knob

FRESH_S = 2.0
# Without persistence mode a sound GPU takes up to three seconds for each question, and one access asks up to three.
# A GPU that hangs is given up by Gpus itself before that, so that the words are NVML's.
PATIENCE_S, MORE_S = 12.0, 4.0


class Glance:
    """What all GPUs say of one knob, asked in one go when the first of them is read, and good for a moment only:
    a plan reads eight GPUs, and each question costs a process."""

    def __init__(self, gpus: Gpus, addresses: Sequence[str], field: str) -> None:
        self._gpus, self._addresses, self._field = gpus, addresses, field
        self._readings: dict[str, Reading] = {}
        self._until = 0.0

    @property
    def others(self) -> int:
        """How many GPUs the longest question is about, beside one."""
        return max(0, len(self._addresses) - 1)

    def get(self, address: str) -> str:
        """As Gpus.get()."""
        if address not in self._addresses:
            return self._gpus.get(address, self._field)
        if address not in self._readings or time.monotonic() > self._until:
            self._readings = self._gpus.read(self._addresses, (self._field,))
            self._until = time.monotonic() + FRESH_S
        return self._gpus.value(self._readings[address], self._field)

    def forget(self, address: str) -> None:
        """The next get() asks the GPU."""
        self._readings.pop(address, None)
        self._addresses = [other for other in self._addresses if other != address]


class NvmlKnob(Knob):
    """A value that the NVIDIA driver keeps."""

    field = ""

    def __init__(self, address: str, name: str, gpus: Gpus, glance: Glance | None = None) -> None:
        super().__init__(f"gpu/{address}/{name}", f"NVML of GPU {address}")
        self.address, self.gpus = address, gpus
        self.glance = glance or Glance(gpus, (), self.field)
        self.patience = PATIENCE_S + MORE_S * self.glance.others  # one of them answers for all

    def read(self, host: Host) -> str:
        return self.glance.get(self.address)

    def write(self, host: Host, value: str) -> None:
        self.glance.forget(self.address)
        self.gpus.set(self.address, self.field, value)


class Persistence(NvmlKnob):
    stage = 61
    field = "persistence_mode"


class PowerLimit(NvmlKnob):
    """In watts. A limit above the default is refused: the default may be what the cabling and the cooling allow."""

    stage = 62
    field = "power_limit"

    def write(self, host: Host, value: str) -> None:
        default = self.gpus.get(self.address, "power_default")
        if float(value) > float(default):
            what = f"{value} W is above the default limit of {default} W, which torchtuned never exceeds"
            raise Refused(what, where=self.path, errno=errno.EPERM)
        super().write(host, value)

    def restore(self, host: Host, entry: Entry, companions: Sequence[Companion]) -> None:
        if self.read(host) != entry.original:  # whatever the administrator had before, even above the default
            super().write(host, entry.original)


class ComputeMode(NvmlKnob):
    stage = 62
    field = "compute_mode"


class Clocks(NvmlKnob):
    """Locked SM clocks, "MHZ" or "MHZ-MHZ". What somebody else locked before us no driver tells: it counts as
    unlocked, and undo unlocks."""

    stage = 62
    field = "locked_clocks"

    def read(self, host: Host) -> str:
        self.gpus.get(self.address, "sm_clock_max")  # that it has clocks, and can be asked
        return self.gpus.locked.get(self.address)

    def write(self, host: Host, value: str) -> None:
        self.gpus.set(self.address, self.field, value)

    def restore(self, host: Host, entry: Entry, companions: Sequence[Companion]) -> None:
        self.write(host, UNLOCKED)  # without a look at our note, which may be lost


OF_NVML: dict[str, type[NvmlKnob]] = {
    "persistence_mode": Persistence,
    "power_limit_w": PowerLimit,
    "compute_mode": ComputeMode,
    "clocks_mhz": Clocks,
}


class PowerControl(Knob):
    """Whether the kernel may put the device to sleep: "auto" or "on". It comes first: what sleeps is not asked."""

    stage = 60

    def __init__(self, address: str) -> None:
        super().__init__(f"gpu/{address}/power_control", f"{DEVICES}/{address}/power/control")


class GpuFamily:
    """Knobs by PCI address. `watch`: further (vendor, class) pairs, such as ("0x1234", "0x0380"), for power_control, as
    the configuration has them when the engine looks."""

    name = "gpu"

    def __init__(self, gpus: Gpus | None = None) -> None:
        self._gpus = gpus
        self.watch: Collection[tuple[str, str]] = ()

    def expand(self, host: Host, wish: Wish) -> list[Knob]:
        _, _, name = wish.knob.split("/")
        if name == "power_control":
            return [PowerControl(address) for address in self._devices(host)]
        gpus = self._of(host)
        addresses = [f.address for f in functions(host) if f.is_gpu and f.driver == "nvidia"]
        kind = OF_NVML[name]
        glance = Glance(gpus, addresses, kind.field)
        return [kind(address, name, gpus, glance) for address in addresses]

    def find(self, host: Host, id: str) -> Knob | None:
        match id.split("/"):
            case ["gpu", address, "power_control"]:
                return PowerControl(address)
            case ["gpu", address, name] if name in OF_NVML:
                return OF_NVML[name](address, name, self._of(host))
        return None

    def absent(self, host: Host, wish: Wish) -> str:
        if not any(function.is_gpu for function in functions(host)):
            return "no NVIDIA GPU here"
        return "no GPU here runs on the nvidia driver"

    def _of(self, host: Host) -> Gpus:
        if self._gpus is None:
            self._gpus = Gpus(host)
        return self._gpus

    def _devices(self, host: Host) -> list[str]:
        wanted = WATCHED.union(self.watch)
        found = []
        for address in host.list(DEVICES):
            with contextlib.suppress(HostError):
                pair = (host.read(f"{DEVICES}/{address}/vendor"), host.read(f"{DEVICES}/{address}/class")[:6])
                if pair in wanted and host.exists(f"{DEVICES}/{address}/power/control"):
                    found.append(address)
        return found
