from __future__ import annotations

from pathlib import Path

import pytest
from fakes.kernel import Kernel
from fakes.policy import Desk

from torchtuned.policy import Outcome

MOUNTS = """\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
30 22 253:0 / /data rw,relatime shared:2 - ext4 /dev/mapper/vg-data rw
31 22 0:44 / /home rw - btrfs /dev/sdb1 rw
32 22 0:50 / /net rw - nfs4 server:/x rw
33 22 8:33 / /with\\040space rw - ext4 /dev/sdc1 rw
34 22 0:51 / /scratch rw - tmpfs  rw
"""


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    files = {}
    for name, rotational in (("nvme0n1", "0"), ("sda", "1"), ("sdb", "1"), ("sdc", "1"), ("dm-0", "1"), ("loop0", "0")):
        files[f"/sys/block/{name}/queue/read_ahead_kb"] = "128"
        files[f"/sys/block/{name}/queue/rotational"] = rotational
        files[f"/sys/block/{name}/queue/scheduler"] = "none [mq-deadline] kyber" if name != "dm-0" else "none"
    for disk, part in (("nvme0n1", "nvme0n1p2"), ("sda", "sda1"), ("sdb", "sdb1"), ("sdc", "sdc1")):
        files[f"/sys/block/{disk}/{part}/partition"] = "1"
    files["/sys/block/dm-0/slaves/sda1/x"] = ""
    kernel = Kernel({**files, "/proc/1/mountinfo": MOUNTS})
    kernel.links = {
        "/sys/dev/block/259:2": "../../block/nvme0n1/nvme0n1p2",
        "/sys/dev/block/253:0": "../../block/dm-0",
        "/sys/dev/block/8:33": "../../block/sdc/sdc1",
        "/dev/disk/by-id/ata-X": "../../sdb",
        "/dev/mapper/vg-data": "../dm-0",
    }
    return Desk(kernel, tmp_path)


@pytest.mark.parametrize(
    ("match", "devices"),
    [
        ("device = sd?", "sda sdb sdc"),
        ("device = sda nvme*", "nvme0n1 sda"),
        ("device = /dev/disk/by-id/ata-X", "sdb"),
        ("device = /dev/sdc1", "sdc"),
        ("device = loop0", "loop0"),
        ("device = *", "dm-0 loop0 nvme0n1 sda sdb sdc"),
        ("rotational = yes", "dm-0 sda sdb sdc"),
        ("rotational = no", "nvme0n1"),
        ("rotational = yes\ndevice = sdb", "sdb"),
        ("mount = /", "nvme0n1"),
        ("mount = /data", "dm-0 sda"),
        ("mount = /home /data/", "dm-0 sda sdb"),
        ("mount = /with space", ""),
        ("mount = /net", ""),
        ("device = sdz", ""),
    ],
)
def test_devices_are_matched(desk: Desk, match: str, devices: str) -> None:
    rows = desk.apply(f"[block:x]\n{match}\nread_ahead_kb = >=4096\n")
    assert [knob.split("/")[1] for knob in rows if "*" not in knob] == devices.split()
    if not devices:
        assert rows["block/*/read_ahead_kb"].outcome is Outcome.UNSUPPORTED
        assert rows["block/*/read_ahead_kb"].reason == f"no block device is like that: {match}"
    desk.restart()
    desk.undo()
    assert {text for path, text in desk.kernel.files.items() if path.endswith("read_ahead_kb")} == {"128"}


def test_the_kernel_rounds_and_we_know(desk: Desk) -> None:
    row = desk.apply("[block:x]\ndevice = sda\nread_ahead_kb = 1023\n")["block/sda/read_ahead_kb"]
    assert (row.current, row.outcome) == ("1020", Outcome.APPLIED)
    assert desk.apply("[block:x]\ndevice = sda\nread_ahead_kb = 1023\n")["block/sda/read_ahead_kb"].current == "1020"
    assert len(desk.kernel.writes) == 1


def test_scheduler_there_and_back(desk: Desk) -> None:
    rows = desk.apply("[block:x]\ndevice = sda dm-0\nscheduler = bfq|kyber\n")
    assert desk.kernel.files["/sys/block/sda/queue/scheduler"] == "none mq-deadline [kyber]"
    assert rows["block/sda/scheduler"].reason == "set by torchtuned, was mq-deadline; bfq is not offered here"
    assert rows["block/dm-0/scheduler"].outcome is not Outcome.APPLIED
    desk.undo()
    assert desk.kernel.files["/sys/block/sda/queue/scheduler"] == "none [mq-deadline] kyber"


def test_a_queue_keeps_the_length_that_somebody_gave_it(desk: Desk) -> None:
    """The kernel gives each scheduler a length of its own, also on the way back."""
    length = "/sys/block/sda/queue/nr_requests"
    desk.kernel.files[length] = "1024"
    desk.apply("[block:x]\ndevice = sda\nscheduler = kyber\n")
    assert desk.kernel.files[length] == "256"
    desk.restart()
    desk.undo()
    assert desk.kernel.files[length] == "1024"


def test_of_two_sections_the_later_counts(desk: Desk) -> None:
    text = "[block:all]\ndevice = *\nread_ahead_kb = 512\n[block:one]\ndevice = sda\nread_ahead_kb = 4096\n"
    rows = desk.apply(text)
    assert rows["block/sda/read_ahead_kb"].current == "4096"
    assert rows["block/sdb/read_ahead_kb"].current == "512"


def test_a_device_that_was_pulled_out_leaves_no_entry(desk: Desk) -> None:
    desk.apply("[block:x]\ndevice = sd?\nread_ahead_kb = 512\n")
    for path in [path for path in desk.kernel.files if path.startswith("/sys/block/sdb/")]:
        del desk.kernel.files[path]
    row = desk.undo()["block/sdb/read_ahead_kb"]
    assert row.outcome is Outcome.UNSUPPORTED
    assert row.reason.startswith("nothing to give back, the device went away with its value")
    assert desk.ledger() == []
