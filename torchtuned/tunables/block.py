"""Read-ahead and scheduler of block devices, matched by name, kind of disk, or what is mounted from them."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torchtuned.errors import HostError
from torchtuned.host import Host
from torchtuned.mounts import BLOCK, beneath, device_of, mounts
from torchtuned.policy import Companion, Wish
from torchtuned.tunables import BracketKnob, Knob

NOT_DISKS = ("loop", "ram", "zram", "sr", "fd")
PAGE_KB = 4


class ReadAhead(Knob):
    """In KiB. The kernel rounds down to whole pages."""

    stage = 41

    def __init__(self, device: str) -> None:
        super().__init__(f"block/{device}/read_ahead_kb", f"{BLOCK}/{device}/queue/read_ahead_kb")

    def predict(self, host: Host, value: str) -> str:
        return str(int(value) // PAGE_KB * PAGE_KB)


class Scheduler(BracketKnob):
    stage = 40

    def __init__(self, device: str) -> None:
        super().__init__(f"block/{device}/scheduler", f"{BLOCK}/{device}/queue/scheduler")
        self.depth = f"{BLOCK}/{device}/queue/nr_requests"

    def companions(self, host: Host, value: str) -> tuple[Companion, ...]:
        """The kernel sets the length of the queue anew with each scheduler, whatever somebody has made it."""
        if not host.exists(self.depth):
            return ()
        return (Companion(path=self.depth, original=host.read(self.depth), fades=True),)


KINDS = {"read_ahead_kb": ReadAhead, "scheduler": Scheduler}


class BlockFamily:
    name = "block"

    def expand(self, host: Host, wish: Wish) -> list[Knob]:
        kind = KINDS[wish.knob.rpartition("/")[2]]
        knobs = [kind(device) for device in host.list(BLOCK) if _means(host, wish.match, device)]
        return [knob for knob in knobs if host.exists(knob.path)]

    def find(self, host: Host, id: str) -> Knob | None:
        match id.split("/"):
            case ["block", device, name] if name in KINDS and device:
                return KINDS[name](device)
        return None

    def absent(self, host: Host, wish: Wish) -> str:
        return "no block device is like that: " + ", ".join(f"{key} = {value}" for key, value in wish.match.items())


def _means(host: Host, match: Mapping[str, str], device: str) -> bool:
    """Whether all that a [block:NAME] section says is true of a device."""
    if "device" in match:
        if not any(_named(host, device, pattern) for pattern in match["device"].split()):
            return False
    elif device.startswith(NOT_DISKS):
        return False
    if "rotational" in match:
        wanted = "1" if match["rotational"] == "yes" else "0"
        if host.text(f"{BLOCK}/{device}/queue/rotational") != wanted:
            return False
    return "mount" not in match or any(device in _under(host, mount) for mount in match["mount"].split())


def _named(host: Host, device: str, pattern: str) -> bool:
    """Whether a device is "sda", "nvme*" or "/dev/disk/by-id/..."; a partition means its disk."""
    name = pattern
    if pattern.startswith("/dev/"):
        try:
            name = posixpath.basename(host.link(pattern))
        except HostError:
            name = posixpath.basename(pattern)
    return fnmatchcase(device, name) or host.exists(f"{BLOCK}/{device}/{name}/partition")


def _under(host: Host, mount: str) -> list[str]:
    """The device that a mount point is on by PID 1's table (the last mount, if several lie there), and those beneath
    it: a crypt, LVM or RAID device has its own queue.
    """
    try:
        table = mounts(host, "1")
    except HostError:
        return []
    here = [found for found in table if found.point in (mount, mount.rstrip("/"))]
    found = [device for device in (device_of(host, place) for place in here[-1:]) if device]
    for name in found:
        found += [disk for disk in beneath(host, name) if disk not in found]
    return found
