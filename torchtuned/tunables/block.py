"""Read-ahead and scheduler of block devices, matched by name, kind of disk, or what is mounted from them."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torchtuned.errors import HostError
from torchtuned.host import Host
from torchtuned.policy import Wish
from torchtuned.tunables import BracketKnob, Knob

BLOCK = "/sys/block"
MOUNTS = "/proc/1/mountinfo"
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
        try:
            rotational = host.read(f"{BLOCK}/{device}/queue/rotational") == "1"
        except HostError:
            return False
        if rotational != (match["rotational"] == "yes"):
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


def _under(host: Host, mount: str) -> set[str]:
    """The device that a mount point is on, and those beneath it (a crypt, LVM or RAID device has its own queue)."""
    found: set[str] = set()
    new = {name for name in (_mounted(host, mount),) if name}
    while new:
        found |= new
        new = {_disk_of(host, lower) for name in new for lower in host.list(f"{BLOCK}/{name}/slaves")} - found
    return found


def _mounted(host: Host, mount: str) -> str:
    """The block device of a mount point by PID 1's table, the last mount if several lie on it; "" if none."""
    found = ""
    try:
        lines = host.read(MOUNTS).splitlines()
    except HostError:
        return ""
    for line in lines:
        fields = line.split(" ")
        point = fields[4].replace("\\040", " ")
        if point == mount.rstrip("/") or point == mount:
            number, source = fields[2], fields[fields.index("-") + 2]
            found = _by_number(host, number) or _disk_of(host, _device_name(host, source))
    return found


def _by_number(host: Host, number: str) -> str:
    try:
        return _disk_of(host, posixpath.basename(host.link(f"/sys/dev/block/{number}")))
    except HostError:
        return ""  # btrfs and others mount under a number of their own


def _device_name(host: Host, source: str) -> str:
    try:
        return posixpath.basename(host.link(source))
    except HostError:
        return posixpath.basename(source)


def _disk_of(host: Host, name: str) -> str:
    """The disk of a partition; any other device is its own."""
    if host.exists(f"{BLOCK}/{name}"):
        return name
    return next((disk for disk in host.list(BLOCK) if host.exists(f"{BLOCK}/{disk}/{name}")), name)
