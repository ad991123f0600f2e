"""What is mounted where, and the block devices beneath: mountinfo and /sys/block read once, for policy and checks."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass

from torchtuned.errors import HostError
from torchtuned.host import Host

BLOCK = "/sys/block"


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A mounted file system, as /proc/PID/mountinfo tells. `device` is its number, such as "8:1"; `options` are the
    file system's own, such as size=64m. `read_only`: by these, or by the mount's."""

    point: str
    device: str
    kind: str
    source: str
    options: tuple[str, ...]
    read_only: bool = False

    def option(self, name: str) -> str:
        """The value of "name=value", "" without one."""
        return next((text.partition("=")[2] for text in self.options if text.startswith(f"{name}=")), "")


def mounts(host: Host, process: str) -> list[Mount]:
    """What a process ("self", "1", a pid) sees mounted, in the order of mounting. Missing, Unreadable."""
    found = []
    for line in host.read(f"/proc/{process}/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        words, tail = left.split(" "), right.split(" ")  # a source may be empty, so blanks count
        if len(words) < 6 or len(tail) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), words[4])
        options = tuple(tail[2].split(","))
        read_only = "ro" in options or "ro" in words[5].split(",")
        found.append(
            Mount(point=point, device=words[2], kind=tail[0], source=tail[1], options=options, read_only=read_only)
        )
    return found


def mount_of(found: Iterable[Mount], path: str) -> Mount | None:
    """The file system that a path lies on: the longest mount point above it, and of several there the last."""
    best = None
    for mount in found:
        inside = mount.point == "/" or path == mount.point or path.startswith(mount.point + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def device_of(host: Host, mount: Mount) -> str:
    """The disk, or other whole block device, that a file system is on, "" where it is on none: by its number, else
    (btrfs mounts under one of its own) by the source's name.
    """
    for link in (f"/sys/dev/block/{mount.device}", mount.source):
        if link.startswith("/"):
            try:
                return disk_of(host, posixpath.basename(host.link(link)))
            except HostError:
                continue
    return disk_of(host, posixpath.basename(mount.source)) if mount.source.startswith("/dev/") else ""


def disk_of(host: Host, name: str) -> str:
    """The disk of a partition; any other block device is its own; "" where there is none."""
    if name and host.exists(f"{BLOCK}/{name}"):
        return name
    return next((disk for disk in host.list(BLOCK) if name and host.exists(f"{BLOCK}/{disk}/{name}")), "")


def beneath(host: Host, name: str) -> list[str]:
    """The disks that a crypt, LVM or RAID device is made of."""
    lower = (disk_of(host, slave) for slave in host.list(f"{BLOCK}/{name}/slaves"))
    return [disk for disk in lower if disk]
