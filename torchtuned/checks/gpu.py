"""How each GPU is, by what NVML says of it: awake, linked, powered, clocked, whole, in a mode that training can use.

An idle GPU proves nothing: it sleeps its link down to Gen1 and its clocks to the floor. What shows under load only is
judged under load only, and said to be unchecked else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchtuned import discover
from torchtuned.checks.registry import Machine, Result, check
from torchtuned.errors import HostError
from torchtuned.findings import Action, Finding, Severity, Unchecked
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


def told(machine: Machine, code: str, field: str) -> Iterator[tuple[Reading, Any] | Unchecked]:
    """Each GPU with the value of a field, or why there is none. A GPU that does not have the field is passed over."""
    for address, reading in machine.readings.items():
        if field in reading.values:
            yield reading, reading.values[field]
        elif reading.state == "asleep":
            yield Unchecked(code=code, because=f"GPU {address} sleeps and is not woken for this")
        elif reading.state != "ok" or machine.gpus.status.state != "ok":
            yield Unchecked(code=code, because=f"GPU {address}: {machine.gpus.status.text or 'NVML did not say'}")


@check("TT005", "persistence mode is off")
def persistence(machine: Machine) -> Result:
    """Without persistence mode the driver lets go of an unused GPU: each cold start of CUDA costs seconds, and locked
    clocks and limits are lost. A GPU that drives the boot display is kept awake by that and is left out."""
    for item in told(machine, "TT005", "persistence_mode"):
        if isinstance(item, Unchecked):
            yield item
            continue
        reading, on = item
        if on or machine.text(f"{DEVICES}/{reading.address}/boot_vga") == "1":
            continue
        daemon = "runs" if persistenced(machine.host) else "does not run"
        yield Finding(
            code="TT005",
            severity=Severity.NOTICE,
            action=Action.AUTO,
            title="persistence mode is off",
            evidence=f"{named(reading)}: off; nvidia-persistenced {daemon}",
            cost="seconds at each first use of the GPU; nothing in steady state",
            fix="persistence_mode = on under [gpu] in torchtuned.conf, or: systemctl enable --now nvidia-persistenced",
            source="docs.nvidia.com/deploy/driver-persistence",
        )


@check("TT006", "the PCIe link is narrower or slower than it could be")
def link(machine: Machine) -> Result:
    """The width and generation of the link under load against what GPU and slot can do, with all ports on the way.
    Idle GPUs slow their links down, so those are not judged."""
    for item in told(machine, "TT006", "link"):
        if isinstance(item, Unchecked):
            yield item
            continue
        reading, (generation, width) = item
        best_generation, best_width = reading.values.get("link_max", (0, 0))
        below = width < best_width or generation < best_generation
        if not below:
            continue
        if not busy(reading):
            yield Unchecked(code="TT006", because=f"GPU {reading.address} is idle, and a link is judged under load")
            continue
        what = f"x{width} of x{best_width}" if width < best_width else f"Gen{generation} of Gen{best_generation}"
        yield Finding(
            code="TT006",
            severity=Severity.WARNING,
            action=Action.TELL,
            title=f"the PCIe link runs at {what}",
            evidence=f"{named(reading)} under load: Gen{generation} x{width}, possible Gen{best_generation}"
            f" x{best_width}; on the way: {path_of(machine, reading.address)}",
            cost="copies to and from the GPU, and between GPUs without NVLink, take longer in that proportion",
            fix="reseat the card, check riser and slot (bifurcation in the firmware), then look again under load",
            source="NVIDIA/NVSentinel#890",
        )


@check("TT007", "a GPU is throttled")
def throttled(machine: Machine) -> Result:
    """Slowdown by the hardware, by heat or by the power brake. An idle GPU, sync boost and a power cap near the limit
    are normal and say nothing."""
    for item in told(machine, "TT007", "throttle"):
        if isinstance(item, Unchecked):
            yield item
            continue
        reading, reasons = item
        alarm = next(((bit, words) for bit, words in ALARMS if reasons & bit), None)
        if alarm is None:
            continue
        bit, words = alarm
        hot = bit in (HW_THERMAL, SW_THERMAL)
        yield Finding(
            code="TT007",
            severity=Severity.WARNING if bit == SW_THERMAL else Severity.ERROR,
            action=Action.TELL,
            title=words,
            evidence=f"{named(reading)}: reasons 0x{reasons:x}, {reading.values.get('temperature', '?')} °C,"
            f" SM at {reading.values.get('sm_clock', '?')} of {reading.values.get('sm_clock_max', '?')} MHz",
            cost="the GPU computes at a fraction of its speed, and the slowest rank holds up all others",
            fix=COOL if hot else SUPPLY,
            source="docs.nvidia.com/deploy/nvml-api, clocks event reasons; Azure/azurehpc#595",
        )


@check("TT008", "the power limit is below its default")
def capped(machine: Machine) -> Result:
    """A limit that somebody set lower than the default, or one that the board enforces below what is set. It is never
    raised by torchtuned: it may be what the building's wiring allows."""
    for item in told(machine, "TT008", "power_default"):
        if isinstance(item, Unchecked):
            yield item
            continue
        reading, default = item
        limit = reading.values.get("power_limit", default)
        enforced = reading.values.get("power_enforced", limit)
        if f"gpu/{reading.address}/power_limit_w" in machine.ours and enforced >= 0.95 * limit:
            continue
        if min(limit, enforced) >= 0.95 * default:
            continue
        felt = busy(reading) and reading.values.get("throttle", 0) & SW_POWER_CAP
        yield Finding(
            code="TT008",
            severity=Severity.WARNING if felt else Severity.NOTICE,
            action=Action.ASK,
            title="the power limit is below its default",
            evidence=f"{named(reading)}: limit {limit / 1000:g} W, in force {enforced / 1000:g} W,"
            f" default {default / 1000:g} W" + ("; it slows the GPU down now" if felt else ""),
            cost="depends on the model; in published tests 80 per cent of the power kept 95 per cent of the speed",
            fix=f"if nobody wants it: nvidia-smi -i {reading.address} -pl {default // 1000}",
            source="docs.nvidia.com/deploy/nvml-api; pugetsystems.com, power limits",
        )


@check("TT009", "clocks are limited by an earlier setting")
def clocks(machine: Machine) -> Result:
    """Application clocks below their default, or SM clocks that stay far below the maximum under load because of a
    setting: what an earlier tool left locked. No driver tells what clocks are locked, so that shows under load only."""
    for item in told(machine, "TT009", "throttle"):
        if isinstance(item, Unchecked):
            yield item
            continue
        reading, reasons = item
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
        yield Finding(
            code="TT009",
            severity=Severity.WARNING,
            action=Action.ASK,
            title="clocks are limited by an earlier setting",
            evidence=f"{named(reading)}: {evidence}",
            cost="the GPU computes slower, in that proportion",
            fix=f"if nobody wants it: nvidia-smi -i {reading.address} -rgc; nvidia-smi -i {reading.address} -rac",
            source="NebuTech/NBMiner#661",
        )


@check("TT011", "GPU memory waits for a repair")
def memory(machine: Machine) -> Result:
    """Rows that the GPU will remap, or pages that it will retire, at the next reset; and rows that could not be
    remapped any more."""
    for reading in machine.readings.values():
        rows = reading.values.get("rows", {})
        if rows.get("failure"):
            severity, what, fix = Severity.ERROR, "a memory row could not be remapped", "have the GPU replaced"
        elif rows.get("pending") or reading.values.get("retired_pending"):
            severity = Severity.WARNING
            what = "a memory repair waits for a reset"
            fix = f"drain the GPU, then nvidia-smi -r -i {reading.address}, or reboot"
        else:
            continue
        yield Finding(
            code="TT011",
            severity=severity,
            action=Action.ASK,
            title=what,
            evidence=f"{named(reading)}: remapped rows correctable {rows.get('correctable', 0)}, uncorrectable"
            f" {rows.get('uncorrectable', 0)}, pending {'yes' if rows.get('pending') else 'no'},"
            f" pages pending {'yes' if reading.values.get('retired_pending') else 'no'}",
            cost="jobs may end with an ECC error until then",
            fix=fix,
            source="docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt",
        )


@check("TT012", "a GPU does not answer")
def answers(machine: Machine) -> Result:
    """A GPU that the kernel lists and the driver cannot reach: fallen off the bus, or hanging."""
    words = {"lost": "the GPU has fallen off the bus", "hung": "the driver does not answer for this GPU"}
    for reading in machine.readings.values():
        if reading.state in words:
            said = ", ".join(sorted({text for _, text in reading.errors.values()})) or "silence"
            yield Finding(
                code="TT012",
                severity=Severity.ERROR,
                action=Action.TELL,
                title=words[reading.state],
                evidence=f"GPU {reading.address}: {said}",
                cost="no job can use it; jobs that do may hang for ever",
                fix="look for Xid in journalctl -k, check power cables and seating, reboot",
                source="docs.nvidia.com/deploy/xid-errors, Xid 79",
            )


@check("TT013", "NVSwitch without a running Fabric Manager")
def fabric(machine: Machine) -> Result:
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
    yield Finding(
        code="TT013",
        severity=Severity.NOTICE if starting else Severity.ERROR,
        action=Action.ASK,
        title="the NVLink fabric is starting" if starting else "NVSwitch without a running Fabric Manager",
        evidence=f"{len(switches)} NVSwitch{'es' if len(switches) > 1 else ''} ({switches[0].address}){where}",
        cost="CUDA fails with error 802 (system not yet initialized)",
        fix="wait" if starting else "systemctl enable --now nvidia-fabricmanager, of exactly the driver's version",
        source="pytorch/pytorch#35710",
    )


@check("TT014", "MIG is half set up")
def mig(machine: Machine) -> Result:
    """MIG that is on without a device in it leaves the GPU unusable; a mode that waits for a reset is neither."""
    for item in told(machine, "TT014", "mig"):
        if isinstance(item, Unchecked):
            yield item
            continue
        reading, state = item
        if state["current"] != state["pending"]:
            words = {True: "on", False: "off"}
            what = f"MIG is {words[state['current']]} and will be {words[state['pending']]} after a reset"
            fix = f"drain the GPU, then nvidia-smi -r -i {reading.address}"
        elif state["current"] and not state["uuids"]:
            what = "MIG is on and has no device"
            fix = f"nvidia-smi mig -i {reading.address} -cgi PROFILE -C, or turn it off: nvidia-smi -i"
            fix += f" {reading.address} -mig 0"
        else:
            continue
        yield Finding(
            code="TT014",
            severity=Severity.WARNING,
            action=Action.ASK,
            title=what,
            evidence=f"{named(reading)}: current {state['current']}, pending {state['pending']},"
            f" devices {len(state['uuids'])}",
            cost="CUDA does not see this GPU, or sees it in another shape than expected",
            fix=fix,
            source="docs.nvidia.com/datacenter/tesla/mig-user-guide",
        )


@check("TT015", "the compute mode keeps jobs out")
def compute_mode(machine: Machine) -> Result:
    """EXCLUSIVE_PROCESS lets one process use the GPU, so a second rank or a debugger fails; PROHIBITED none."""
    for item in told(machine, "TT015", "compute_mode"):
        if isinstance(item, Unchecked):
            yield item
            continue
        reading, mode = item
        if mode == "default" or f"gpu/{reading.address}/compute_mode" in machine.ours:
            continue
        yield Finding(
            code="TT015",
            severity=Severity.ERROR if mode == "prohibited" else Severity.WARNING,
            action=Action.ASK,
            title=f"the compute mode is {mode}",
            evidence=f"{named(reading)}: {mode}",
            cost="no CUDA job can use it" if mode == "prohibited" else "a second process on this GPU fails",
            fix=f"if nobody wants it: nvidia-smi -i {reading.address} -c DEFAULT",
            source="pytorch/pytorch#3871",
        )


@check("TT016", "nobody knows which CPUs are near a GPU")
def locality(machine: Machine) -> Result:
    """On a host with several NUMA nodes a GPU whose node neither the kernel nor NVML tells is bound to none, as node 0
    would be a guess. Virtual machines show it, and firmware without the tables."""
    if not machine.cards:
        return
    found = discover.topology(machine.host, gpus=machine.gpus.facts())
    unknown = [gpu.address for gpu in found.gpus if gpu.locality == "unknown"]
    if unknown:
        yield Finding(
            code="TT016",
            severity=Severity.NOTICE,
            action=Action.TELL,
            title="nobody knows which CPUs are near a GPU",
            evidence=f"{', '.join(unknown)}: numa_node is -1, and NVML names no CPUs; the host has"
            f" {len([node for node in found.nodes if node.cpus])} nodes with CPUs",
            cost="jobs on these GPUs are not bound to CPUs; loaders on the wrong node cost up to a quarter of speed",
            fix="in a virtual machine pass the topology on (QEMU: pxb-pcie with numa_node); else try a newer firmware",
            source="rapidsai/dask-cuda#1381",
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
