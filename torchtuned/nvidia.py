"""What is known of NVIDIA's devices without asking the driver: from the kernel, from nvidia-persistenced, from us."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

from torchtuned.errors import HostError, Refused
from torchtuned.files import replace_file
from torchtuned.host import Host
from torchtuned.pci import DEVICES, driver
from torchtuned.topology import NVIDIA, pci_key

GPU_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers; not NVSwitch (0x0680), not the card's audio (0x0403)
PERSISTENCED = "/run/nvidia-persistenced"
UNLOCKED = "unlocked"
NOTE = "/run/torchtuned/locked-clocks.json"


@dataclass(frozen=True, kw_only=True)
class Function:
    """One PCI function of NVIDIA's: a GPU, an NVSwitch, an audio or USB part. `driver` is "" when none is bound."""

    address: str
    kind: str  # class without the programming interface, such as "0x0302"
    device: str
    driver: str

    @property
    def is_gpu(self) -> bool:
        return self.kind in GPU_CLASSES


def functions(host: Host) -> tuple[Function, ...]:
    """NVIDIA's PCI functions, in PCI order."""
    found = []
    for address in host.list(DEVICES):
        path = f"{DEVICES}/{address}"
        with contextlib.suppress(HostError):  # a device may go while we look
            if host.read(f"{path}/vendor") == NVIDIA:
                kind, device = host.read(f"{path}/class")[:6], host.read(f"{path}/device")
                found.append(Function(address=address, kind=kind, device=device, driver=driver(host, address)))
    return tuple(sorted(found, key=lambda f: pci_key(f.address)))


def asleep(host: Host, address: str) -> bool:
    """Whether the kernel has put the device to sleep (runtime power management)."""
    return host.text(f"{DEVICES}/{address}/power/runtime_status") in ("suspended", "suspending")


def persistenced(host: Host) -> int:
    """The process id of a running nvidia-persistenced, or 0. NVML hands persistence mode to it by itself."""
    try:
        pid = host.read_int(f"{PERSISTENCED}/nvidia-persistenced.pid")
        return pid if host.read(f"/proc/{pid}/comm").startswith("nvidia-persiste") else 0
    except HostError:
        return 0


class LockedClocks:
    """Our note of the clocks that we locked, by PCI address: NVML sets them and no driver reads them back.

    A lock ends with the driver that it was given to, so the note is good only for as long as the inodes of driver and
    device in sysfs are the same. It lies in /run and ends with the boot.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._path = host.root / NOTE.lstrip("/")

    def get(self, address: str) -> str:
        """ "MHZ", "MHZ-MHZ" or "unlocked", as it was put. A note that cannot be read is none."""
        clocks, token = self._all().get(address, (UNLOCKED, ""))
        return clocks if token == self._token(address) else UNLOCKED

    def put(self, address: str, clocks: str) -> None:
        """Note what is locked now, "unlocked" for nothing. Refused when it cannot be noted."""
        before = self._all()
        noted = {other: value for other, value in before.items() if other != address}
        if clocks != UNLOCKED:
            noted[address] = (clocks, self._token(address))
        if noted == before:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, json.dumps(noted), mode=0o644, sync=False)  # a user's plan and status read it
        except OSError as error:
            raise Refused(f"cannot note the locked clocks: {error.strerror}", where=NOTE) from error

    def _token(self, address: str) -> str:
        token = []
        for path in ("/sys/bus/pci/drivers/nvidia", f"{DEVICES}/{address}"):
            with contextlib.suppress(HostError):
                token.append(str(self._host.stat(path).st_ino))
        return ".".join(token)

    def _all(self) -> dict[str, tuple[str, str]]:
        try:
            noted = json.loads(self._path.read_text(encoding="utf-8"))
            return {str(address): (str(clocks), str(token)) for address, (clocks, token) in noted.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}
