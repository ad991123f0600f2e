"""The kernel itself: its age, its clock, its interrupts, and what stands between GPUs on the PCI bus."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from torchtuned import pci
from torchtuned.checks.files import unit_runs
from torchtuned.checks.registry import UNMEASURED, Machine, Seen, Unseen, rule
from torchtuned.errors import HostError
from torchtuned.findings import Action, Severity, about_cpus

OLDEST = (5, 5)
CLOCK = "/sys/devices/system/clocksource/clocksource0"
DEVICES = re.compile(r"nvme|mlx|eth|en[ops]\d|ahci|megasas|mpt|ib|nvidia|virtio|ena|ice|i40e|bnxt")
CROWDED, LOUD = 0.75, 0.05
MANY = 1_000_000
ACS, ACS_CONTROL, REDIRECTS = 0x000D, 6, 0b11100  # request and completion redirect, upstream forwarding


@rule(
    "TT060",
    "the kernel reads a slow clock",
    severity=Severity.WARNING,
    action=Action.TELL,
    cost="each reading of the time is a call into the kernel, millions a second in one report; unmeasured",
    source="pytorch/pytorch#3390",
)
def clock(machine: Machine) -> Iterator[Seen | Unseen]:
    """current_clocksource hpet or acpi_pm: the processor's own counter was found to be unstable, or a virtual machine
    does not offer one."""
    now = machine.text(f"{CLOCK}/current_clocksource")
    if now in ("hpet", "acpi_pm", "jiffies", "refined-jiffies"):
        yield Seen(
            evidence=f"{CLOCK}/current_clocksource is {now};"
            f" available: {machine.text(f'{CLOCK}/available_clocksource')}",
            fix="sudo journalctl -k -g 'clocksource|TSC' says why; a newer firmware, or (only if it is known to be"
            " stable) tsc=reliable on the kernel's command line",
            about=(about_cpus(machine.topology.online),),
        )


@rule(
    "TT061",
    "the kernel is old, or lacks what torchtuned watches",
    severity=Severity.NOTICE,
    action=Action.TELL,
    cost="known hangs of training before 5.5; without cgroup v2 and PSI causes of slowness stay unseen",
    source="huggingface/accelerate#1929",
)
def age(machine: Machine) -> Iterator[Seen | Unseen]:
    """The kernel's release, whether cgroup v2 is in use, and whether there are pressure figures (PSI)."""
    release = machine.host.read("/proc/sys/kernel/osrelease")
    match = re.match(r"(\d+)\.(\d+)", release)
    if match and (int(match[1]), int(match[2])) < OLDEST:
        yield Seen(
            title="the kernel is old",
            severity=Severity.WARNING,
            evidence=f"/proc/sys/kernel/osrelease is {release}",
            fix="upgrade to a kernel of at least 5.5",
        )
    filesystems = machine.text("/proc/filesystems")
    lacking = []
    options = []
    if filesystems and not machine.host.exists("/sys/fs/cgroup/cgroup.controllers"):
        lacking.append("cgroup v2 is not the hierarchy in use (/sys/fs/cgroup/cgroup.controllers is not there)")
        options.append("systemd.unified_cgroup_hierarchy=1")
    if filesystems and not machine.host.exists("/proc/pressure/memory"):
        lacking.append("there is no /proc/pressure")
        options.append("psi=1")
    if lacking:
        yield Seen(
            title="the kernel lacks what torchtuned watches",
            evidence="; ".join(lacking),
            fix=f"{' '.join(options)} in GRUB_CMDLINE_LINUX of /etc/default/grub, then sudo update-grub and"
            " sudo reboot; of a container: on its host",
            cost="waiting for memory, disk and CPU, and kills in a job, stay unseen",
        )


@rule(
    "TT062",
    "most interrupts of the devices come to one CPU",
    severity=Severity.NOTICE,
    action=Action.ASK,
    cost=UNMEASURED,
    source="bloomberg/chef-bcpc#2115",
)
def interrupts(machine: Machine) -> Iterator[Seen | Unseen]:
    """/proc/interrupts of disks and network cards since boot, on hosts with eight CPUs and more, of which several go
    to one CPU. It holds up the rank that runs there."""
    lines = machine.host.read("/proc/interrupts").splitlines()
    cpus = len(lines[0].split()) if lines else 0
    totals = [0] * cpus
    devices: list[list[int]] = []
    for line in lines[1:]:
        words = line.split()
        counts = words[1 : cpus + 1]
        if DEVICES.search(" ".join(words[cpus + 1 :])) and all(word.isdecimal() for word in counts):
            devices.append([*map(int, counts)])
            totals = [total + count for total, count in zip(totals, devices[-1], strict=False)]
    every = sum(totals)
    if cpus >= 8 and every >= MANY and max(totals) > CROWDED * every:
        most = totals.index(max(totals))
        if sum(counts[most] > LOUD * every for counts in devices) < 2:
            return  # one interrupt alone: wherever it goes, it is one CPU that serves it
        runs = unit_runs(machine, "irqbalance.service")
        cpu = lines[0].split()[most].removeprefix("CPU")
        yield Seen(
            evidence=f"/proc/interrupts: CPU {cpu} served {100 * max(totals) // every} % of {every} interrupts"
            " of devices",
            fix=("irqbalance runs and leaves them there" if runs else "sudo apt install irqbalance")
            + "; one by one: echo LIST | sudo tee /proc/irq/N/smp_affinity_list",
            about=(about_cpus(frozenset({int(cpu)})),),
        )


@rule(
    "TT063",
    "the IOMMU translates what GPUs send each other",
    severity=Severity.NOTICE,
    action=Action.ASK,
    cost="peer-to-peer copies may hang or be slower; by translation alone unmeasured",
    source="NVIDIA/nccl#949",
)
def iommu(machine: Machine) -> Iterator[Seen | Unseen]:
    """The type of the IOMMU groups of a host's NVIDIA GPUs, two or more of them. DMA translates; identity (iommu=pt)
    lets devices through. Virtual machines that are given devices need the isolation."""
    translated = []
    for card in machine.cards:
        try:
            group = machine.host.link(f"{pci.DEVICES}/{card.address}/iommu_group").rpartition("/")[2]
        except HostError:
            continue
        if (kind := machine.text(f"/sys/kernel/iommu_groups/{group}/type")).startswith("DMA"):
            translated.append(f"{card.address} (group {group}: {kind})")
    if len(machine.cards) > 1 and translated:
        yield Seen(
            evidence=f"/sys/kernel/iommu_groups: {', '.join(translated)}",
            fix="iommu=pt in GRUB_CMDLINE_LINUX of /etc/default/grub, then sudo update-grub and sudo reboot; not where"
            " virtual machines are given devices of this host that nobody trusts",
        )


@rule(
    "TT064",
    "PCI bridges send what GPUs exchange up to the CPU",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="8 instead of 21 GB/s between GPUs in one report",
    source="NVIDIA/nccl#841",
)
def acs(machine: Machine) -> Iterator[Seen | Unseen]:
    """Access Control Services on the switches between GPUs redirect peer-to-peer traffic over the root complex. Their
    registers are in the part of the configuration space that only root may read."""
    bridges = sorted({step for card in machine.cards for step in _switches(machine, card.address)})
    if len(machine.cards) < 2 or not bridges:
        return
    hidden, on = 0, []
    for bridge in bridges:
        data = machine.host.read_bytes(f"{pci.DEVICES}/{bridge}/config")
        if len(data) <= 256:
            hidden += 1
        elif _acs_control(data) & REDIRECTS:
            on.append(bridge)
    if on:
        yield Seen(
            evidence=f"ACS redirects on {', '.join(on[:4])}" + (f" and {len(on) - 4} more" if len(on) > 4 else ""),
            fix="turn ACS off in the firmware, or until the next boot: "
            + "; ".join(f"sudo setpci -s {bridge} ECAP_ACS+6.w=0000" for bridge in on[:4])
            + " (which ends the isolation of virtual machines)",
        )
    elif hidden:
        yield Unseen(f"the ACS registers of {hidden} PCI bridges are for root only: sudo torchtuned check")


def _switches(machine: Machine, address: str) -> list[str]:
    """The bridges above a GPU, without the root port: those of a PCI switch."""
    try:
        steps = machine.host.link(f"{pci.DEVICES}/{address}").split("/")
    except HostError:
        return []
    return [step for step in steps if step.count(":") == 2][1:-1]


def _acs_control(data: bytes) -> int:
    """The ACS control register out of a configuration space, 0 where the bridge has none."""
    offset = 0x100
    while 0x100 <= offset <= len(data) - 8:
        (header,) = struct.unpack_from("<I", data, offset)
        if header & 0xFFFF == ACS:
            (control,) = struct.unpack_from("<H", data, offset + ACS_CONTROL)
            return int(control)
        following = header >> 20
        if following <= offset:
            break
        offset = following
    return 0
