"""From a path to its disks, and what lies on it."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest
from fakes.sound import MOUNTS, build
from fakes.tree import make_tree

from torchtuned.checks import dataset, registry, run_checks, walk
from torchtuned.checks.registry import Machine
from torchtuned.cli import main as cli
from torchtuned.errors import Missing
from torchtuned.gpus import Gpus
from torchtuned.host import Host

HDD = {f"sys/block/sd{x}/queue/rotational": "1\n" for x in "ab"}


def machine(folder: Path, files: dict[str, str], data: str = "/data") -> Machine:
    host = Host(build(folder, files).root)
    return Machine(host, Gpus(host), data=data)


TURNS = {"sys/dev/block/8:1": "-> ../../devices/x/sda", "sys/block/sda/queue/read_ahead_kb": "128\n", **HDD}


def on(device: str, *more: str) -> str:
    """The mounts with /data on another device."""
    return MOUNTS.replace("259:5", device) + "".join(f"{line}\n" for line in more)


def test_crypt_on_lvm_on_raid_on_two_disks(tmp_path: Path) -> None:
    files = {
        **HDD,
        "proc/self/mountinfo": on("254:1"),
        "sys/dev/block/254:1": "-> ../../devices/virtual/block/dm-1",
        "sys/block/dm-1/dm/uuid": "CRYPT-LUKS2-00-data\n",
        "sys/block/dm-1/queue/read_ahead_kb": "256\n",
        "sys/block/dm-1/slaves/dm-0/x": "",
        "sys/block/dm-0/dm/uuid": "LVM-abc\n",
        "sys/block/dm-0/slaves/md0/x": "",
        "sys/block/md0/md/level": "raid1\n",
        "sys/block/md0/slaves/sda1/x": "",
        "sys/block/md0/slaves/sdb1/x": "",
        "sys/block/sda/sda1/partition": "1\n",
        "sys/block/sdb/sdb1/partition": "1\n",
    }
    host = machine(tmp_path, files)
    found = dataset.locate(host, "/data")
    assert found.layers == ("dm-1", "dm-0", "md0", "sda", "sdb")
    assert found.disks == ("sda", "sdb")
    assert (found.kind, found.rotational, found.read_ahead_kb) == ("disk", True, 256)
    assert [dataset.describe(host, name) for name in found.layers[:4]] == [
        "dm-1 (dm-crypt)",
        "dm-0 (LVM)",
        "md0 (RAID raid1)",
        "sda (turns)",
    ]
    [finding], _ = run_checks(host.host, host.gpus, ["TT035"], data="/data")
    assert finding.fix == "copy it to flash before training: rsync -a /data/ /data-copy/"


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("51 22 259:5 / /fast rw - xfs /dev/nvme1n1 rw", "/fast/data-copy/"),
        ("51 22 259:5 / /fast rw - xfs /dev/nvme1n1 ro", "/data-copy/"),
        ("51 22 259:5 / /fast ro,relatime - xfs /dev/nvme1n1 rw", "/data-copy/"),
        ("51 22 259:5 /x /fast/hosts rw - xfs /dev/nvme1n1 rw", "/data-copy/"),  # one file, as containers have them
        ("51 22 259:2 / /var/lib/x rw - ext4 /dev/nvme0n1p2 rw", "/data-copy/"),  # the same file system once more
    ],
)
def test_a_copy_goes_where_it_can_be_written(tmp_path: Path, line: str, place: str) -> None:
    room = "".join(f"{name} {900 << 30} {free << 30} 0 0\n" for name, free in
                   {"/": 500, "/fast": 800, "/fast/hosts": 800, "/var/lib/x": 500}.items())  # fmt: skip
    files = {**TURNS, "proc/self/mountinfo": on("8:1", line), "fast/hosts": "x", "var/lib/x/y": "x"}
    host = machine(tmp_path, {**files, ".torchtuned/space": room})
    [finding], _ = run_checks(host.host, host.gpus, ["TT035"], data="/data")
    assert finding.fix.endswith(f"rsync -a /data/ {place}")


def test_a_copy_needs_room_and_a_file_is_no_folder(tmp_path: Path) -> None:
    files = {**TURNS, "proc/self/mountinfo": on("8:1"), ".torchtuned/space": f"/ {9 << 30} 500 0 0\n"}
    host = machine(tmp_path, files)
    [finding], _ = run_checks(host.host, host.gpus, ["TT035"], data="/data/shard-0.tar")
    assert finding.fix.endswith("rsync -a /data/shard-0.tar A-FOLDER-ON-FLASH/")  # it has 1000 bytes


def test_an_overlay_lies_where_its_upper_folder_lies(tmp_path: Path) -> None:
    line = "50 22 0:60 / /data rw - overlay overlay rw,lowerdir=/srv/a:/srv/b,upperdir=/srv/up,workdir=/srv/w"
    files = {
        **HDD,
        "proc/self/mountinfo": MOUNTS + "49 22 8:1 / /srv rw - ext4 /dev/sda1 rw\n" + line + "\n",
        "sys/dev/block/8:1": "-> ../../devices/x/sda/sda1",
        "sys/block/sda/sda1/partition": "1\n",
    }
    found = dataset.locate(machine(tmp_path, files), "/data")
    assert (found.kind, found.disks, found.via, found.rotational) == ("disk", ("sda",), ("overlay",), True)


def test_a_loop_file_lies_on_the_disk_of_its_file(tmp_path: Path) -> None:
    files = {
        "proc/self/mountinfo": on("7:0"),
        "sys/dev/block/7:0": "-> ../../devices/virtual/block/loop0",
        "sys/block/loop0/loop/backing_file": "/var/images/data.img\n",
    }
    found = dataset.locate(machine(tmp_path, files), "/data")
    assert found.layers == ("loop0", "nvme0n1")
    assert found.disks == ("nvme0n1",)
    assert found.via == ("file /var/images/data.img",)
    assert found.rotational is False


def test_btrfs_has_a_number_of_its_own(tmp_path: Path) -> None:
    files = {
        **HDD,
        "proc/self/mountinfo": on("0:44").replace("xfs /dev/nvme1n1", "btrfs /dev/mapper/pool"),
        "dev/mapper/pool": "-> ../dm-3",
        "sys/block/dm-3/slaves/sda/x": "",
    }
    assert dataset.locate(machine(tmp_path, files), "/data").disks == ("sda",)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("nfs4 filer:/x rw", "network"),
        ("cifs //filer/x rw", "network"),
        ("fuse.sshfs ann@filer: rw", "network"),
        ("fuse.gocryptfs x rw", "fuse"),
        ("lustre mgs:/x rw", "parallel"),
        ("tmpfs tmpfs rw", "memory"),
        ("tmpfs  rw", "memory"),  # mount -t tmpfs "" /data
        ("zfs pool/data rw", "unknown"),
    ],
)
def test_kinds(tmp_path: Path, line: str, kind: str) -> None:
    files = {"proc/self/mountinfo": MOUNTS + f"50 22 0:60 / /data rw - {line}\n"}
    assert dataset.locate(machine(tmp_path, files), "/data").kind == kind


@pytest.mark.parametrize(
    "files",
    [
        {"sys/block/vda/queue/rotational": "1\n", "sys/dev/block/252:1": "-> ../../devices/x/vda/vda1"},
        {
            "sys/block/vda/queue/rotational": "1\n",
            "sys/block/vda/device/vendor": "QEMU\n",
            "sys/dev/block/252:1": "-> ../x/vda",
        },
    ],
)
def test_a_virtual_disk_that_says_it_turns_is_not_believed(tmp_path: Path, files: dict[str, str]) -> None:
    host = machine(tmp_path, {**files, "sys/block/vda/vda1/partition": "1\n", "proc/self/mountinfo": on("252:1")})
    assert dataset.locate(host, "/data").rotational is None
    findings, [unchecked] = run_checks(host.host, host.gpus, ["TT035"], data="/data")
    assert findings == []
    assert "cannot be seen" in unchecked.because


def test_a_path_with_blanks_and_a_path_that_is_not_there(tmp_path: Path) -> None:
    files = {"proc/self/mountinfo": MOUNTS + "51 22 8:1 / /mnt/my\\040data rw - ext4 /dev/sda1 rw\n"}
    host = machine(tmp_path, {**files, "mnt/my data/x": "1"})
    assert dataset.locate(host, "/mnt/my data").mount.point == "/mnt/my data"
    with pytest.raises(Missing, match="no such file"):
        dataset.locate(host, "/nowhere")
    findings, unchecked = run_checks(host.host, host.gpus, ["TT035"], data="/nowhere")
    assert (findings, unchecked[0].code) == ([], "TT035")


def test_look_counts_what_is_there(tmp_path: Path) -> None:
    make_tree(tmp_path, {f"data/{i}/{j}.bin": "x" * (i + 1) for i in range(4) for j in range(5)})
    (tmp_path / "data/link").symlink_to("/")
    found = walk.walk(str(tmp_path / "data"))
    assert (len(found.sizes), found.sizes[0], found.sizes[-1], found.whole) == (20, 1, 4, True)


def test_look_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(tmp_path, {f"data/{i}": "x" for i in range(50)})
    monkeypatch.setattr(walk, "MOST_FILES", 20)
    found = walk.walk(str(tmp_path / "data"))
    assert (len(found.sizes), found.whole) == (20, False)


def test_a_folder_that_cannot_be_read_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does a file server that does not answer, whose error Python calls by the name of a time that is over."""
    make_tree(tmp_path, {f"data/{i}/{j}": "x" for i in range(9) for j in range(3)})
    scandir = os.scandir

    def fails(path: str) -> object:
        if path.endswith("/4"):
            raise TimeoutError(errno.ETIMEDOUT, "no answer")
        return scandir(path)

    assert walk.walk(str(tmp_path / "data")).whole
    monkeypatch.setattr(os, "scandir", fails)
    found = walk.walk(str(tmp_path / "data"))
    assert (len(found.sizes), found.whole) == (8 * 3, False)


def test_a_file_that_goes_meanwhile_takes_no_other_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(tmp_path, {f"data/{i}": "x" for i in range(9)})
    scandir = os.scandir

    def gone(path: str) -> object:
        with scandir(path) as entries:
            found = list(entries)
        assert all(entry.is_file() for entry in found)  # as the folder has them now
        os.unlink(found[0].path)
        return contextlib.nullcontext(found)

    monkeypatch.setattr(os, "scandir", gone)
    assert len(walk.walk(str(tmp_path / "data")).sizes) == 8


def test_the_data_is_walked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all checks together, and by the command that tells its size."""
    seen: list[str] = []
    walked = walk.walk
    monkeypatch.setattr(registry, "walk", lambda root: seen.append(root) or walked(root))
    root = build(tmp_path, {**TURNS, "proc/self/mountinfo": on("8:1")}).root
    cli.main(["check", "--sysroot", str(root), "--data", "/data", "--json"])
    assert len(seen) == 1
