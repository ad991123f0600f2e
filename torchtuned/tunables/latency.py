"""How long an idle CPU may take to wake: /dev/cpu_dma_latency, in force for as long as a descriptor is held.

The knob counts in the microseconds that the slowest idle state still allowed takes to leave. It is never about the
index of a state: state 3 may be a C6 of 170 us on one machine and a C1E of 10 us on the next.
"""

from __future__ import annotations

import struct

from torchtuned.errors import HostError, Missing
from torchtuned.host import Host
from torchtuned.policy import Wish
from torchtuned.tunables import Held, Knob

DEVICE = "/dev/cpu_dma_latency"
ID = "latency/cpu_dma_latency"
CPU = "/sys/devices/system/cpu"
KINDS = (f"{CPU}/online", "/sys/devices/cpu_atom/cpus")


def idle_states(host: Host) -> list[tuple[int, str]]:
    """(microseconds to leave it, name) of each idle state in use, fastest first; of one CPU per kind of core."""
    states = set()
    for path in KINDS:
        try:
            cpu = min(host.cpus(path))
            folder = f"{CPU}/cpu{cpu}/cpuidle"
            for name in host.list(folder):
                state = f"{folder}/{name}"
                if not host.exists(f"{state}/disable") or host.read(f"{state}/disable") == "0":
                    states.add((host.read_int(f"{state}/latency"), host.read(f"{state}/name")))
        except (HostError, ValueError):
            continue  # no such kind of core, or no state to be slow to wake from
    return sorted(states)


class Latency(Held):
    stage = 70

    def __init__(self) -> None:
        super().__init__(ID, DEVICE)

    def read(self, host: Host) -> str:
        data = host.read_bytes(DEVICE)
        limit = struct.unpack("=i", data[:4])[0] if len(data) >= 4 else 2**31 - 1
        return self._slowest(host, limit)

    def unheld(self, host: Host) -> str:
        return self._slowest(host, 2**31 - 1)

    def hold(self, host: Host, value: str) -> int:
        return host.hold(DEVICE, struct.pack("=i", int(value)))

    @staticmethod
    def _slowest(host: Host, limit: int) -> str:
        allowed = [latency for latency, _ in idle_states(host) if latency <= limit]
        if not allowed:
            raise Missing("no idle states are known here, as in most virtual machines", where=f"{CPU}/cpu*/cpuidle")
        return str(max(allowed))


class LatencyFamily:
    name = "latency"

    def expand(self, host: Host, wish: Wish) -> list[Knob]:
        return [Latency()] if host.exists(DEVICE) else []

    def find(self, host: Host, id: str) -> Knob | None:
        return Latency() if id == ID else None

    def absent(self, host: Host, wish: Wish) -> str:
        return "this kernel has no /dev/cpu_dma_latency"
