"""How each GPU is, by what NVML says of it: awake, linked, powered, clocked, whole, in a mode that training can use.

An idle GPU proves nothing: it sleeps its link down to Gen1 and its clocks to the floor. What shows under load only is
judged under load only, and said to be unchecked else.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from torchtuned.checks.registry import Machine, Seen, Unseen, rule
from torchtuned.errors import HostError
from torchtuned.findings import Action, Severity, about_gpu
from torchtuned.gpus import Reading
from torchtuned.nvidia import Function, persistenced
from torchtuned.pci import DEVICES

LOAD = 20  # per cent of time with a kernel on the GPU from which on link and clocks are judged
SWITCHES = ("0x1ac0", "0x1ac1", "0x1ac2", "0x1af1", "0x22a3")  # PCI devices of NVSwitch, V100 to H200
FABRIC_IN_PROGRESS, FABRIC_DONE = 2, 3  # nvmlGpuFabricState_t; 0 is not supported
# bits of the clocks event reasons (nvml.h)
APPLICATION_CLOCKS, SW_POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE = 0x2, 0x4, 0x8, 0x20, 0x40, 0x80
# what is normal has no line here: idle (0x1), sync boost (0x10), display clocks (0x100), a power cap near its limit
ALARMS = (
    (POWER_BRAKE, "the power brake is on: the power supply or the chassis asks for less"),
    (HW_THERMAL, "the hardware slows down: too hot"),
    (HW_SLOWDOWN, "the hardware slows down: power or heat"),
    (SW_THERMAL, "the driver slows down: too hot"),
)
COOL = "look at fans, airflow, dust and neighbours (nvidia-smi -q -d TEMPERATURE)"
SUPPLY = "look at power cables, supplies and the chassis's power budget (BMC log)"


def told(machine: Machine, field: str) -> Generator[Unseen, None, list[tuple[Reading, Any]]]:
    """The GPUs with the value of a field, as the value of `yield from`; yields why there is none. A GPU that does not
    have the field is passed over."""
    for address, reading in machine.readings.items():
        if field in reading.values:
            continue
        if reading.state == "asleep":
            yield Unseen(f"GPU {address} sleeps and is not woken for this")
        elif reading.state != "ok" or machine.gpus.status.state != "ok":
            yield Unseen(f"GPU {address}: {machine.gpus.status.text or 'NVML did not say'}")
    return [(reading, reading.values[field]) for reading in machine.readings.values() if field in reading.values]


@rule(
    "TT005",
    "persistence mode is off",
    severity=Severity.NOTICE,
    action=Action.AUTO,
    cost="seconds at each first use of the GPU; nothing in steady state",
    source="docs.nvidia.com/deploy/driver-persistence",
)
def persistence(machine: Machine) -> Iterator[Seen | Unseen]:
    """Without persistence mode the driver lets go of an unused GPU: each cold start of CUDA costs seconds, and locked
    clocks and limits are lost. A GPU that drives the boot display is kept awake by that and is left out."""
    for reading, on in (yield from told(machine, "persistence_mode")):
        if on or machine.text(f"{DEVICES}/{reading.address}/boot_vga") == "1":
            continue
        daemon = "runs" if persistenced(machine.host) else "does not run"
        yield Seen(
            evidence=f"{named(reading)}: off; nvidia-persistenced {daemon}",
            fix="persistence_mode = on under [gpu] in torchtuned.conf, or:"
            " sudo systemctl enable --now nvidia-persistenced",
        )


@rule(
    "TT006",
    "the PCIe link is narrower or slower than it could be",
    severity=Severity.WARNING,
    action=Action.TELL,
    cost="copies to and from the GPU, and between GPUs without NVLink, take longer, at most in that proportion",
    source="NVIDIA/NVSentinel#890",
)
def link(machine: Machine) -> Iterator[Seen | Unseen]:
    """The width and generation of the link under load against what GPU and slot can do, with all ports on the way.
    Idle GPUs slow their links down, so those are not judged."""
    for reading, (generation, width) in (yield from told(machine, "link")):
        best_generation, best_width = reading.values.get("link_max", (0, 0))
        below = width < best_width or generation < best_generation
        if not below:
            continue
        if not busy(reading):
            yield Unseen(f"GPU {reading.address} is idle, and a link is judged under load")
            continue
        what = f"x{width} of x{best_width}" if width < best_width else f"Gen{generation} of Gen{best_generation}"
        yield Seen(
            title=f"the PCIe link runs at {what}",
            evidence=f"{named(reading)} under load: Gen{generation} x{width}, possible Gen{best_generation}"
            f" x{best_width}; on the way: {path_of(machine, reading.address)}",
            fix="reseat the card, check riser and slot (bifurcation in the firmware), then look again under load",
            about=(about_gpu(reading.address),),
        )


@rule(
    "TT007",
    "a GPU is throttled",
    severity=Severity.ERROR,
    action=Action.TELL,
    cost="the GPU computes slower, by how much is unmeasured, and the slowest rank holds up all others",
    source="docs.nvidia.com/deploy/nvml-api, clocks event reasons; Azure/azurehpc#595",
)
def throttled(machine: Machine) -> Iterator[Seen | Unseen]:
    """Slowdown by the hardware, by heat or by the power brake. An idle GPU, sync boost and a power cap near the limit
    are normal and say nothing."""
    for reading, reasons in (yield from told(machine, "throttle")):
        alarm = next(((bit, words) for bit, words in ALARMS if reasons & bit), None)
        if alarm is None:
            continue
        bit, words = alarm
        hot = bit in (HW_THERMAL, SW_THERMAL)
        yield Seen(
            severity=Severity.WARNING if bit == SW_THERMAL else Severity.ERROR,
            title=words,
            evidence=f"{named(reading)}: reasons 0x{reasons:x}, {reading.values.get('temperature', '?')} °C,"
            f" SM at {reading.values.get('sm_clock', '?')} of {reading.values.get('sm_clock_max', '?')} MHz",
            fix=COOL if hot else SUPPLY,
            about=(about_gpu(reading.address),),
        )


@rule(
    "TT008",
    "the power limit is below its default",
    severity=Severity.NOTICE,
    action=Action.ASK,
    cost="depends on the model; in published tests 80 per cent of the power kept 95 per cent of the speed",
    source="docs.nvidia.com/deploy/nvml-api; pugetsystems.com, power limits",
)
def capped(machine: Machine) -> Iterator[Seen | Unseen]:
    """A limit that somebody set lower than the default, or one that the board enforces below what is set. It is never
    raised by torchtuned: it may be what the building's wiring allows."""
    for reading, default in (yield from told(machine, "power_default")):
        limit = reading.values.get("power_limit", default)
        enforced = reading.values.get("power_enforced", limit)
        if f"gpu/{reading.address}/power_limit_w" in machine.ours and enforced >= 0.95 * limit:
            continue
        if min(limit, enforced) >= 0.95 * default:
            continue
        felt = busy(reading) and reading.values.get("throttle", 0) & SW_POWER_CAP
        yield Seen(
            severity=Severity.WARNING if felt else Severity.NOTICE,
            evidence=f"{named(reading)}: limit {limit / 1000:g} W, in force {enforced / 1000:g} W,"
            f" default {default / 1000:g} W" + ("; it slows the GPU down now" if felt else ""),
            fix=f"if nobody wants it: sudo nvidia-smi -i {reading.address} -pl {default // 1000}",
            about=(about_gpu(reading.address),),
        )


@rule(
    "TT009",
    "clocks are limited by an earlier setting",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="the GPU computes slower, at most in that proportion; unmeasured",
    source="NebuTech/NBMiner#661",
)
def clocks(machine: Machine) -> Iterator[Seen | Unseen]:
    """Application clocks below their default, or SM clocks that stay far below the maximum under load because of a
    setting: what an earlier tool left locked. No driver tells what clocks are locked, so that shows under load only."""
    for reading, reasons in (yield from told(machine, "throttle")):
        if f"gpu/{reading.address}/clocks_mhz" in machine.ours:
            continue
        application, default = reading.values.get("application_clock", (0, 0))
        clock, best = reading.values.get("sm_clock", 0), reading.values.get("sm_clock_max", 0)
        if application < default:
            evidence = f"application clock {application} MHz, default {default} MHz"
        elif busy(reading) and reasons & APPLICATION_CLOCKS and clock < 0.8 * (default or best):
            evidence = (
                f"SM at {clock} MHz under load, {default or best} MHz are possible; the reason given is a setting"
            )
        else:
            continue
        yield Seen(
            evidence=f"{named(reading)}: {evidence}",
            fix=f"if nobody wants it: sudo nvidia-smi -i {reading.address} -rgc;"
            f" sudo nvidia-smi -i {reading.address} -rac",
            about=(about_gpu(reading.address),),
        )


@rule(
    "TT011",
    "GPU memory waits for a repair",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="jobs may end with an ECC error until then",
    source="docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt",
)
def memory(machine: Machine) -> Iterator[Seen | Unseen]:
    """Rows that the GPU will remap, or pages that it will retire, at the next reset; and rows that could not be
    remapped any more."""
    for reading in machine.readings.values():
        rows = reading.values.get("rows", {})
        if rows.get("failure"):
            severity, what, fix = Severity.ERROR, "a memory row could not be remapped", "have the GPU replaced"
        elif rows.get("pending") or reading.values.get("retired_pending"):
            severity = Severity.WARNING
            what = "a memory repair waits for a reset"
            fix = f"drain the GPU, then sudo nvidia-smi -r -i {reading.address}, or reboot"
        else:
            continue
        yield Seen(
            severity=severity,
            title=what,
            evidence=f"{named(reading)}: remapped rows correctable {rows.get('correctable', 0)}, uncorrectable"
            f" {rows.get('uncorrectable', 0)}, pending {'yes' if rows.get('pending') else 'no'},"
            f" pages pending {'yes' if reading.values.get('retired_pending') else 'no'}",
            fix=fix,
            about=(about_gpu(reading.address),),
        )


@rule(
    "TT012",
    "a GPU does not answer",
    severity=Severity.ERROR,
    action=Action.TELL,
    cost="no job can use it; jobs that do may hang for ever",
    source="docs.nvidia.com/deploy/xid-errors, Xid 79",
)
def answers(machine: Machine) -> Iterator[Seen | Unseen]:
    """A GPU that the kernel lists and the driver cannot reach: fallen off the bus, or hanging."""
    words = {"lost": "the GPU has fallen off the bus", "hung": "the driver does not answer for this GPU"}
    for reading in machine.readings.values():
        if reading.state in words:
            said = ", ".join(sorted({text for _, text in reading.errors.values()})) or "silence"
            yield Seen(
                title=words[reading.state],
                evidence=f"GPU {reading.address}: {said}",
                fix="sudo journalctl -k -g Xid says more; check power cables and seating; sudo reboot",
                about=(about_gpu(reading.address),),
            )


@rule(
    "TT013",
    "NVSwitch without a running Fabric Manager",
    severity=Severity.ERROR,
    action=Action.ASK,
    cost="CUDA fails with error 802 (system not yet initialized)",
    source="pytorch/pytorch#35710",
)
def fabric(machine: Machine) -> Iterator[Seen | Unseen]:
    """GPUs behind NVSwitches need NVIDIA's Fabric Manager: without it CUDA starts with error 802 while nvidia-smi
    looks fine. A host without NVSwitch needs none."""
    switches = [f for f in machine.functions if is_switch(f)]
    if not switches:
        return
    states = {a: r.values["fabric"]["state"] for a, r in machine.readings.items() if "fabric" in r.values}
    waiting = sorted(address for address, state in states.items() if 0 < state < FABRIC_DONE)
    if not waiting and (FABRIC_DONE in states.values() or fabric_manager(machine)):
        return
    starting = bool(waiting) and all(states[address] == FABRIC_IN_PROGRESS for address in waiting)
    where = f"; not ready: {', '.join(waiting)}" if waiting else "; no nv-fabricmanager process"
    yield Seen(
        severity=Severity.NOTICE if starting else Severity.ERROR,
        title="the NVLink fabric is starting" if starting else "NVSwitch without a running Fabric Manager",
        evidence=f"{len(switches)} NVSwitch{'es' if len(switches) > 1 else ''} ({switches[0].address}){where}",
        fix="wait" if starting else "sudo systemctl enable --now nvidia-fabricmanager, of exactly the driver's version",
        about=tuple(map(about_gpu, waiting or machine.readings)),
    )


@rule(
    "TT014",
    "MIG is half set up",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="CUDA does not see this GPU, or sees it in another shape than expected",
    source="docs.nvidia.com/datacenter/tesla/mig-user-guide",
)
def mig(machine: Machine) -> Iterator[Seen | Unseen]:
    """MIG that is on without a device in it leaves the GPU unusable; a mode that waits for a reset is neither."""
    for reading, state in (yield from told(machine, "mig")):
        if state["current"] != state["pending"]:
            words = {True: "on", False: "off"}
            what = f"MIG is {words[state['current']]} and will be {words[state['pending']]} after a reset"
            fix = f"drain the GPU, then sudo nvidia-smi -r -i {reading.address}"
        elif state["current"] and not state["uuids"]:
            what = "MIG is on and has no device"
            fix = f"sudo nvidia-smi mig -i {reading.address} -cgi PROFILE -C (-lgip lists them), or turn it off:"
            fix += f" sudo nvidia-smi -i {reading.address} -mig 0"
        else:
            continue
        yield Seen(
            title=what,
            evidence=f"{named(reading)}: current {state['current']}, pending {state['pending']},"
            f" devices {len(state['uuids'])}",
            fix=fix,
            about=(about_gpu(reading.address),),
        )


@rule(
    "TT015",
    "the compute mode keeps jobs out",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="a second process on this GPU fails",
    source="pytorch/pytorch#3871",
)
def compute_mode(machine: Machine) -> Iterator[Seen | Unseen]:
    """EXCLUSIVE_PROCESS lets one process use the GPU, so a second rank or a debugger fails; PROHIBITED none."""
    for reading, mode in (yield from told(machine, "compute_mode")):
        if mode == "default" or f"gpu/{reading.address}/compute_mode" in machine.ours:
            continue
        yield Seen(
            severity=Severity.ERROR if mode == "prohibited" else Severity.WARNING,
            title=f"the compute mode is {mode}",
            evidence=f"{named(reading)}: {mode}",
            cost="no CUDA job can use it" if mode == "prohibited" else "a second process on this GPU fails",
            fix=f"if nobody wants it: sudo nvidia-smi -i {reading.address} -c DEFAULT",
            about=(about_gpu(reading.address),),
        )


@rule(
    "TT016",
    "nobody knows which CPUs are near a GPU",
    severity=Severity.NOTICE,
    action=Action.TELL,
    cost="jobs on these GPUs are not bound to CPUs; loaders on the wrong node cost 23 per cent in one report",
    source="rapidsai/dask-cuda#1381",
)
def locality(machine: Machine) -> Iterator[Seen | Unseen]:
    """On a host with several NUMA nodes a GPU whose node neither the kernel nor NVML tells is bound to none, as node 0
    would be a guess. Virtual machines show it, and firmware without the tables."""
    found = machine.topology
    unknown = [gpu.address for gpu in found.gpus if gpu.locality == "unknown"]
    if unknown:
        yield Seen(
            evidence=f"{', '.join(unknown)}: numa_node is -1, and NVML names no CPUs; the host has"
            f" {len([node for node in found.nodes if node.cpus])} nodes with CPUs",
            fix="in a virtual machine pass the topology on (QEMU: pxb-pcie with numa_node); else try a newer firmware",
            about=tuple(map(about_gpu, unknown)),
        )


def named(reading: Reading) -> str:
    """The GPU with its name."""
    return f"GPU {reading.address} ({reading.values.get('name', 'unnamed')})"


def busy(reading: Reading) -> bool:
    """Whether it works enough for its link and clocks to be at their best."""
    return int(reading.values.get("utilization", 0)) >= LOAD


def is_switch(function: Function) -> bool:
    """Whether it is an NVSwitch; other bridges of NVIDIA's have the same class."""
    return function.kind == "0x0680" and (function.driver == "nvidia-nvswitch" or function.device in SWITCHES)


def fabric_manager(machine: Machine) -> bool:
    """Whether a Fabric Manager runs here (the kernel cuts its name to 15 letters)."""
    pids = [name for name in machine.host.list("/proc") if name.isdigit()]
    return any(machine.text(f"/proc/{pid}/comm") == "nv-fabricmanage" for pid in pids)


def path_of(machine: Machine, address: str) -> str:
    """The ports from the GPU up, each with its link as sysfs has it, current of maximum."""
    try:
        steps = machine.host.link(f"{DEVICES}/{address}").split("/")
    except HostError:
        steps = [address]
    ports = []
    for step in reversed([step for step in steps if step.count(":") == 2]):
        now, most = (machine.text(f"{DEVICES}/{step}/{name}_link_width") for name in ("current", "max"))
        ports.append(f"{step} x{now} of x{most}" if now and most else step)
    return ", ".join(ports)
