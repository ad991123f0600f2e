"""What the NVIDIA driver wrote to the kernel log: Xid codes, told apart into the job's, the driver's, the hardware's.

Most people read any Xid as broken hardware. Many are not: a job with a bad pointer makes 13 or 31, and every killed
job a 45. The table gives each the side it comes from, as NVIDIA's catalogue of Xid errors has it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from torchtuned.checks.registry import Machine, Seen, Unseen, rule
from torchtuned.errors import Missing
from torchtuned.findings import Action, Severity, about_gpu
from torchtuned.host import Host

LOG = "/var/log/dmesg"  # of a machine that is a folder; a real one has a journal
LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}(?::[0-9a-fA-F]{2}){2}(?:\.[0-7])?)\): (\d+)(?:, (.*))?")


class Side(StrEnum):
    """Where the cause of an Xid lies."""

    JOB = "application fault"
    AFTER = "follows from a killed job or an earlier error"
    DRIVER = "driver or firmware"
    MEMORY = "GPU memory"
    HARDWARE = "hardware or power"


@dataclass(frozen=True)
class Meaning:
    """What one code means and what to do."""

    side: Side
    what: str
    fix: str


RESET = "drain the GPU and reset it: sudo nvidia-smi -r -i ADDRESS, or reboot"
REPLACE = "drain the GPU, sudo nvidia-smi -r -i ADDRESS, sudo dcgmi diag -r 3; if it comes back have it replaced"
SEAT = "check power cables, seating, riser and cooling; reboot; if it comes back have it replaced"
UPDATE = "sudo nvidia-smi -r -i ADDRESS; if it comes back use another driver version (sudo nvidia-bug-report.sh)"
PROGRAM = "look at the job: run it with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer; the host is fine"

XIDS: dict[int, Meaning] = {
    8: Meaning(Side.JOB, "the GPU stopped working on something", PROGRAM),
    13: Meaning(Side.JOB, "graphics engine exception, such as an index out of bounds in a kernel", PROGRAM),
    31: Meaning(Side.JOB, "GPU memory page fault: an illegal address in a kernel", PROGRAM),
    32: Meaning(Side.DRIVER, "corrupted push buffer: driver, or a bad PCIe link", UPDATE),
    38: Meaning(Side.DRIVER, "driver firmware error", UPDATE),
    43: Meaning(Side.JOB, "the GPU stopped processing the job's work", PROGRAM),
    45: Meaning(Side.AFTER, "a channel was cleaned up after a job was killed or failed", "nothing"),
    46: Meaning(Side.DRIVER, "the GPU stopped processing", UPDATE),
    48: Meaning(Side.MEMORY, "double-bit ECC error", REPLACE),
    61: Meaning(Side.HARDWARE, "internal microcontroller breakpoint", RESET),
    62: Meaning(Side.HARDWARE, "internal microcontroller halt", RESET),
    63: Meaning(Side.MEMORY, "a memory row was remapped or a page retired", RESET),
    64: Meaning(Side.MEMORY, "a row could not be remapped or a page not be retired", REPLACE),
    68: Meaning(Side.JOB, "video decoder exception", PROGRAM),
    69: Meaning(Side.JOB, "graphics engine class error", PROGRAM),
    74: Meaning(Side.HARDWARE, "NVLink error", REPLACE),
    79: Meaning(Side.HARDWARE, "the GPU has fallen off the bus", SEAT),
    92: Meaning(Side.MEMORY, "high rate of single-bit ECC errors", REPLACE),
    94: Meaning(Side.MEMORY, "contained memory error: one job was ended", RESET),
    95: Meaning(Side.MEMORY, "uncontained memory error: the GPU needs a reset", RESET),
    109: Meaning(Side.DRIVER, "context switch time-out", UPDATE),
    119: Meaning(Side.DRIVER, "the GPU's system processor (GSP) does not answer", UPDATE),
    120: Meaning(Side.DRIVER, "error in the GPU's system processor (GSP)", UPDATE),
    140: Meaning(Side.MEMORY, "unrecovered ECC error", REPLACE),
    143: Meaning(Side.HARDWARE, "the GPU could not be initialised", SEAT),
    154: Meaning(Side.AFTER, "the driver names a recovery action for an earlier error", RESET),
}
UNKNOWN = Meaning(Side.DRIVER, "see NVIDIA's catalogue of Xid errors", "look it up: docs.nvidia.com/deploy/xid-errors")
COST = {
    Side.JOB: "the job failed; other jobs are not concerned",
    Side.AFTER: "none by itself",
    Side.DRIVER: "jobs on this GPU fail until it is reset",
    Side.MEMORY: "jobs on this GPU fail, or it has less spare memory",
    Side.HARDWARE: "jobs on this GPU fail, and it may be gone until the next boot",
}
SEVERITY = {Side.JOB: Severity.NOTICE, Side.AFTER: Severity.NOTICE}


@rule(
    "TT010",
    "the driver reported errors (Xid)",
    severity=Severity.ERROR,
    action=Action.TELL,
    cost="by the side it comes from: the job's end, or a GPU that stays unusable",
    source="docs.nvidia.com/deploy/xid-errors",
)
def reported(machine: Machine) -> Iterator[Seen | Unseen]:
    """Xid codes of this boot from the kernel log, by GPU, with the side that each comes from: the job, the driver,
    the GPU's memory, or hardware and power."""
    if not machine.cards:
        return
    try:
        lines = list(kernel_log(machine.host))
    except Missing as missing:
        yield Unseen(str(missing))
        return
    seen: Counter[tuple[str, int]] = Counter()
    last: dict[tuple[str, int], str] = {}
    for line in lines:
        if found := LINE.search(line):
            key = (address(found[1]), int(found[2]))
            seen[key] += 1
            last[key] = found[3] or ""
    for (where, code), times in sorted(seen.items()):
        meaning = XIDS.get(code, UNKNOWN)
        said = f"; the last said: {last[where, code]}" if last[where, code] else ""
        yield Seen(
            severity=SEVERITY.get(meaning.side, Severity.ERROR),
            title=f"Xid {code}: {meaning.what} ({meaning.side})",
            evidence=f"GPU {where}, {times} time{'s' if times > 1 else ''} since boot{said}",
            cost=COST[meaning.side],
            fix=meaning.fix.replace("ADDRESS", where),
            about=() if meaning.side in SEVERITY else (about_gpu(where),),
        )


def address(text: str) -> str:
    """The PCI address of a GPU as the log writes it: "0000:01:00" (it leaves the function out)."""
    text = text.lower()
    return text if "." in text else f"{text}.0"


def kernel_log(host: Host) -> Iterator[str]:
    """The NVIDIA driver's kernel messages of this boot. Missing when no kernel message can be read."""
    for line in kernel_lines(host):
        if not host.real or line.startswith("NVRM"):
            yield line


def kernel_lines(host: Host) -> Iterator[str]:
    """The kernel's messages of this boot. Missing when none can be read."""
    if not host.real:
        yield from host.read(LOG).splitlines()
        return
    try:  # seldom needed, and no part of this package that an upgrade could change meanwhile
        from systemd import journal  # type: ignore[attr-defined,import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise Missing("python3-systemd is not installed, so the journal cannot be read", where="journal") from None
    with journal.Reader() as reader:
        reader.this_boot()
        reader.add_match(_TRANSPORT="kernel")
        any_seen = False
        for entry in reader:
            any_seen = True
            if isinstance(message := entry.get("MESSAGE"), str):
                yield message
    if not any_seen:
        raise Missing("no kernel messages in the journal, or not for this user (group adm)", where="journal")
