"""The dataset doctor: from a path to the disks beneath it, and whether these suit training.

A path lies on a mount, the mount on a device, and that on others: partitions, LVM, dm-crypt, MD, loop files, the layers
of an overlay. Each has its own queue; what counts is whether any disk at the bottom turns.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from stat import S_ISDIR, S_ISREG

from torchtuned.checks.files import basename
from torchtuned.checks.registry import UNMEASURED, Machine, Seen, Unseen, rule
from torchtuned.errors import HostError, Missing
from torchtuned.findings import Action, Severity
from torchtuned.host import Space
from torchtuned.mounts import Mount, beneath, device_of, mount_of, mounts
from torchtuned.wording import size

NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "glusterfs", "sshfs")
PARALLEL = ("lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs")  # made for it: no finding
MEMORY = ("tmpfs", "ramfs")
VIRTUAL = ("QEMU", "VMware", "Msft", "Google", "VBOX")
MANY, SMALL, LARGE = 10_000, 128 << 10, 8 << 20
AHEAD_SEQUENTIAL_KB, AHEAD_RANDOM_KB = 1024, 4096


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Where a path lies. `layers` are block devices from the top down, `disks` those at the bottom. `rotational` is
    None where no block device is known; `read_ahead_kb` is that of the topmost device, which counts."""

    path: str
    mount: Mount
    kind: str  # "disk", "network", "parallel", "fuse", "memory", "unknown"
    layers: tuple[str, ...] = ()
    disks: tuple[str, ...] = ()
    rotational: bool | None = None
    read_ahead_kb: int | None = None
    space: Space | None = None
    via: tuple[str, ...] = field(default=())  # overlay and loop: what led to the device


def locate(machine: Machine, path: str) -> Dataset:
    """Follow a path down to its disks. Missing when the path or its mount is not there, Unreadable."""
    if machine.host.real:
        path = os.path.realpath(path)
    if not machine.host.exists(path):
        raise Missing("no such file or folder", where=path)
    table = mounts(machine.host, "self")
    mount = mount_of(table, path)
    if mount is None:
        raise Missing("no file system is mounted there", where=path)
    kind, layers, via = _down(machine, table, mount, depth=0)
    disks = tuple(name for name in layers if not machine.host.list(f"/sys/block/{name}/slaves") and _is_disk(name))
    turns = [_turns(machine, name) for name in disks]
    try:
        space = machine.host.space(path)
    except HostError:
        space = None
    return Dataset(
        path=path,
        mount=mount,
        kind=kind,
        layers=layers,
        disks=disks,
        rotational=True if True in turns else None if None in turns or not turns else False,
        read_ahead_kb=machine.number(f"/sys/block/{layers[0]}/queue/read_ahead_kb") if layers else None,
        space=space,
        via=via,
    )


def _is_disk(name: str) -> bool:
    return not name.startswith(("loop", "dm-", "md"))


def _turns(machine: Machine, name: str) -> bool | None:
    """Whether a disk turns. A virtual one says so whatever lies beneath it, so there it is not known."""
    told = machine.text(f"/sys/block/{name}/queue/rotational")
    model = machine.text(f"/sys/block/{name}/device/vendor") + machine.text(f"/sys/block/{name}/device/model")
    virtual = name.startswith(("vd", "xvd")) or any(maker in model for maker in VIRTUAL)
    return None if not told or (virtual and told == "1") else told == "1"


def _down(
    machine: Machine, table: list[Mount], mount: Mount, *, depth: int
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Kind, block devices and detours of a mount."""
    kind = mount.kind
    if kind.startswith("fuse.") and kind != "fuse.fuse-overlayfs":
        return ("network" if kind.removeprefix("fuse.") in NETWORK else "fuse"), (), ()
    for name, kinds in (("network", NETWORK), ("parallel", PARALLEL), ("memory", MEMORY)):
        if kind in kinds:
            return name, (), ()
    if kind in ("overlay", "fuse.fuse-overlayfs") and depth < 4:
        folder = mount.option("upperdir") or mount.option("lowerdir").split(":")[0]
        below = mount_of([other for other in table if other is not mount and other.kind != "overlay"], folder)
        if below is None or not folder:
            return "unknown", (), ("overlay",)
        found, layers, via = _down(machine, table, below, depth=depth + 1)
        return found, layers, ("overlay", *via)
    top = device_of(machine.host, mount)
    if not top:
        return "fuse" if kind == "fuseblk" else "unknown", (), ()
    layers, via = _stack(machine, table, top, depth)
    return ("fuse" if kind == "fuseblk" else "disk"), layers, via


def _stack(machine: Machine, table: list[Mount], top: str, depth: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    layers, via = [top], []
    for name in layers:
        layers += [disk for disk in beneath(machine.host, name) if disk not in layers]
        backing = machine.text(f"/sys/block/{name}/loop/backing_file")
        below = mount_of(table, backing) if backing else None
        if below is not None and depth < 4:
            _, more, detours = _down(machine, table, below, depth=depth + 1)
            via += [f"file {backing}", *detours]
            layers += [device for device in more if device not in layers]
    return tuple(layers), tuple(via)


def describe(machine: Machine, name: str) -> str:
    """A block device for people: what it is."""
    if machine.host.exists(f"/sys/block/{name}/md"):
        return f"{name} (RAID {machine.text(f'/sys/block/{name}/md/level')})"
    uuid = machine.text(f"/sys/block/{name}/dm/uuid")
    if uuid:
        words = {"CRYPT": "dm-crypt", "LVM": "LVM"}
        return f"{name} ({words.get(uuid.partition('-')[0], uuid.partition('-')[0])})"
    if not _is_disk(name):
        return name
    kind = {True: "turns", False: "flash", None: "unknown kind"}[_turns(machine, name)]
    return f"{name} ({'NVMe' if name.startswith('nvme') else kind})"


def _data(machine: Machine) -> Dataset | None:
    return None if machine.data is None else locate(machine, machine.data)


@rule(
    "TT035",
    "the data lies on a disk that turns",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="about 8 times slower input than from an SSD in one vendor's test, where reading is the limit",
    source="nianticlabs/monodepth2#157; Colfax and Micron, TFRecord input",
)
def turning(machine: Machine) -> Iterator[Seen | Unseen]:
    """The disks beneath --data, through partitions, LVM, dm-crypt, MD, loop files and overlays."""
    data = _data(machine)
    if data is None:
        return
    if data.kind == "unknown" or (data.kind == "disk" and data.rotational is None):
        yield Unseen(
            f"{data.mount.point} is {data.mount.kind} from {data.mount.source}, and whether a disk turns beneath it"
            " cannot be seen from here"
        )
    elif data.rotational:
        turning = [name for name in data.disks if _turns(machine, name)]
        yield Seen(
            evidence=f"{data.path} is on {' on '.join(describe(machine, name) for name in data.layers)};"
            f" /sys/block/{turning[0]}/queue/rotational is 1",
            fix=f"copy it to flash before training: {_copy(machine, data)}",
        )


def staging_target(machine: Machine) -> str:
    """The mount point on flash with the most room of those that can be written, "" without one with room for the
    data."""
    found = [(sum(machine.data_files.sizes), "")]
    for mount in mounts(machine.host, "self"):
        device = device_of(machine.host, mount) if mount.kind in ("ext4", "xfs", "btrfs", "f2fs") else ""
        if not device or mount.read_only:
            continue
        layers, _ = _stack(machine, [], device, 4)
        disks = [name for name in layers if _is_disk(name)]
        if disks and all(_turns(machine, name) is False for name in disks):
            try:
                if S_ISDIR(machine.host.stat(mount.point).st_mode):  # containers mount single files
                    found.append((machine.host.space(mount.point).free, mount.point))
            except HostError:
                continue
    return max(found, key=lambda one: (one[0], -len(one[1])))[1]  # of one file system the mount nearest to /


def _copy(machine: Machine, data: Dataset) -> str:
    target = staging_target(machine)
    place = os.path.join(target, f"{basename(data.path)}-copy") if target else "A-FOLDER-ON-FLASH"
    a_file = S_ISREG(machine.host.stat(data.path).st_mode)
    return shlex.join(["rsync", "-a", data.path if a_file else f"{data.path}/", f"{place}/"])


@rule(
    "TT036",
    "the data comes over a network or through FUSE",
    severity=Severity.NOTICE,
    action=Action.ASK,
    cost="each open of a file is a round trip, or a switch to another process and back; unmeasured for this host",
    source="ultralytics/yolov5#5681",
)
def remote(machine: Machine) -> Iterator[Seen | Unseen]:
    """NFS, SMB and FUSE under --data. Parallel file systems (Lustre, GPFS, BeeGFS, Ceph) are made for it and no
    finding."""
    data = _data(machine)
    if data is not None and data.kind in ("network", "fuse"):
        yield Seen(
            evidence=f"{data.path} is on {data.mount.point}: {data.mount.kind} from {data.mount.source}",
            fix=f"copy it to a local disk before training: {_copy(machine, data)}",
        )


@rule(
    "TT037",
    "read-ahead does not suit the data",
    severity=Severity.NOTICE,
    action=Action.ASK,
    cost="twice the random reads a second with less read-ahead in one report; unmeasured for training",
    source="apache/lucene#16044, deepmodeling/deepmd-kit#5413",
)
def read_ahead(machine: Machine) -> Iterator[Seen | Unseen]:
    """read_ahead_kb of the topmost device, against the files: large ones on a disk that turns want more than the
    default 128 KiB, small ones on flash less than 4 MiB. In between nothing is said."""
    data = _data(machine)
    if data is None or data.read_ahead_kb is None or data.rotational is None:
        return
    files = machine.data_files
    path, median = f"/sys/block/{data.layers[0]}/queue/read_ahead_kb", size(files.median)
    if data.rotational and files.median >= LARGE and data.read_ahead_kb < AHEAD_SEQUENTIAL_KB:
        yield Seen(
            evidence=f"{path} is {data.read_ahead_kb}; the files' median is {median}, and the disk turns",
            fix=f"echo 4096 | sudo tee {path}, or in torchtuned.conf under [block:data]: device = {data.layers[0]},"
            " read_ahead_kb = >=4096",
        )
    elif not data.rotational and 0 < files.median < SMALL and data.read_ahead_kb >= AHEAD_RANDOM_KB:
        yield Seen(
            evidence=f"{path} is {data.read_ahead_kb}; the files' median is {median}, on flash",
            fix=f"echo 128 | sudo tee {path}",
        )


@rule(
    "TT038",
    "the data is many small files",
    severity=Severity.NOTICE,
    action=Action.TELL,
    cost="opening costs more than reading, most of all on disks that turn and over networks; unmeasured for this host",
    source="mlcommons/storage",
)
def small_files(machine: Machine) -> Iterator[Seen | Unseen]:
    """Ten thousand files and more with a median below 128 KiB, in the first seconds of a walk through --data."""
    data = _data(machine)
    if data is None:
        return
    files = machine.data_files
    if len(files.sizes) >= MANY and files.median < SMALL:
        slow = data.rotational or data.kind in ("network", "fuse")
        yield Seen(
            evidence=f"{data.path}: {'' if files.whole else 'over '}{len(files.sizes)} files,"
            f" median {size(files.median)}",
            fix="pack them into shards of 100 MB and more (tar with webdataset, Parquet) and read those in order",
            severity=Severity.WARNING if slow else None,
        )


@rule(
    "TT039",
    "the data lies in memory",
    severity=Severity.NOTICE,
    action=Action.TELL,
    cost=UNMEASURED,
    source="Debian 13 release notes, /tmp as tmpfs",
)
def in_memory(machine: Machine) -> Iterator[Seen | Unseen]:
    """A tmpfs under --data: fast, but it takes the memory that workers need, may be swapped out, and is gone at the
    next boot. Debian 13's /tmp is one and is cleaned."""
    data = _data(machine)
    if data is not None and data.kind == "memory":
        yield Seen(
            evidence=f"{data.path} is on {data.mount.point}: {data.mount.kind}"
            + (f" with {size(data.space.total - data.space.free)} in use" if data.space else ""),
            fix="keep a copy on disk; the page cache holds what fits anyway",
        )
