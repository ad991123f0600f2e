"""Clocks and sleep of CPUs and GPUs, and who else sets them."""

from __future__ import annotations

from collections.abc import Iterator

from torchtuned.checks.files import unit_runs
from torchtuned.checks.registry import UNMEASURED, Machine, Seen, Unseen, rule
from torchtuned.cpuset import format_list, parse_list
from torchtuned.findings import Action, Severity, about_cpus
from torchtuned.pci import DEVICES
from torchtuned.tunables.cpu import CPUFREQ, EPP, PLATFORM, on_battery, policies
from torchtuned.tunables.owners import PPD, TUNERS

ACTIVE = ("intel_pstate", "amd-pstate-epp")  # their powersave is no brake: the preference decides
SAVING = ("power", "balance_power")
QUIET = ("low-power", "quiet", "cool")
WAKE_US, OFTEN, TOO_SHORT = 100, 10_000, 0.25
CPUS = "/sys/devices/system/cpu"


@rule(
    "TT040",
    "the CPUs are held at a low clock",
    severity=Severity.WARNING,
    action=Action.AUTO,
    cost="loading data and launching kernels take longer, at most in that proportion; unmeasured for GPU training",
    source="tenstorrent/tt-metal#5281",
)
def governor(machine: Machine) -> Iterator[Seen | Unseen]:
    """The governor powersave of acpi-cpufreq and of the passive drivers is the lowest clock, always. Under intel_pstate
    and amd-pstate in active mode powersave is the normal choice and no finding. Also a maximum set far below what the
    CPU can do."""
    saving: dict[str, list[str]] = {}  # policies by their driver
    capped: dict[tuple[int, int], list[str]] = {}  # by the maximum that is set and the CPUs' own, in MHz
    for policy in policies(machine.host):
        folder = f"{CPUFREQ}/{policy}"
        driver, name = (machine.text(f"{folder}/scaling_{word}") for word in ("driver", "governor"))
        most, best = machine.number(f"{folder}/scaling_max_freq"), machine.number(f"{folder}/cpuinfo_max_freq")
        if name == "powersave" and driver not in ACTIVE:
            saving.setdefault(driver, []).append(policy)
        elif most and best and most < 0.8 * best:
            capped.setdefault((most // 1000, best // 1000), []).append(policy)
    for driver, where in saving.items():
        yield Seen(
            evidence=f"{CPUFREQ}/policy{_numbers(where)}: governor powersave under {driver}",
            fix="governor = performance|schedutil under [cpu] (profile training does it)",
            about=(about_cpus(_cpus_of(machine, where)),),
        )
    for (most, best), where in capped.items():
        which = _cpus_of(machine, where)
        raised = f"sudo cpupower -c {format_list(which)} frequency-set -u {best}MHz"
        yield Seen(
            evidence=f"{CPUFREQ}/policy{_numbers(where)}: scaling_max_freq {most} of {best} MHz",
            fix=f"unless somebody wants it: {raised} (package linux-cpupower)",
            action=Action.ASK,
            about=(about_cpus(which),),
        )


@rule(
    "TT041",
    "the CPUs prefer saving power",
    severity=Severity.NOTICE,
    action=Action.AUTO,
    cost=UNMEASURED,
    source="AdnanHodzic/auto-cpufreq#680",
)
def preference(machine: Machine) -> Iterator[Seen | Unseen]:
    """energy_performance_preference of intel_pstate and amd-pstate: power and balance_power raise clocks late. On
    battery that is right and no finding."""
    if on_battery(machine.host):
        return
    found: dict[str, list[str]] = {}
    for policy in policies(machine.host):
        if (value := machine.text(f"{CPUFREQ}/{policy}/{EPP}")) in SAVING:
            found.setdefault(value, []).append(policy)
    for value, where in found.items():
        yield Seen(
            evidence=f"{CPUFREQ}/policy{_numbers(where)}/{EPP} is {value}",
            fix="energy_performance_preference = performance|balance_performance under [cpu] (profile training)",
            about=(about_cpus(_cpus_of(machine, where)),),
        )


def _cpus_of(machine: Machine, where: list[str]) -> frozenset[int]:
    """The CPUs of some cpufreq policies."""
    found: set[int] = set()
    for policy in where:
        names = machine.text(f"{CPUFREQ}/{policy}/affected_cpus") or policy.removeprefix("policy")
        found |= {int(name) for name in names.split() if name.isdecimal()}
    return frozenset(found)


def _numbers(where: list[str]) -> str:
    return format_list(int(name.removeprefix("policy")) for name in where)


@rule(
    "TT042",
    "the machine saves power as a whole",
    severity=Severity.WARNING,
    action=Action.JOB,
    cost="firmware and drivers cap CPU and GPU; how much is unmeasured",
    source="kernel ABI sysfs-platform_profile",
)
def saving(machine: Machine) -> Iterator[Seen | Unseen]:
    """Running on battery, or a platform profile of the firmware that favours quiet."""
    profile = machine.text(PLATFORM)
    if on_battery(machine.host):
        yield Seen(
            evidence="/sys/class/power_supply: a battery discharges and no mains is online",
            fix="plug it in",
            action=Action.TELL,
            about=(about_cpus(machine.topology.online),),
        )
    elif profile in QUIET:
        yield Seen(
            evidence=f"{PLATFORM} is {profile}",
            fix="platform_profile = performance|balanced-performance @jobs under [cpu] (profile throughput does it)",
            about=(about_cpus(machine.topology.online),),
        )


@rule(
    "TT043",
    "several programs set the same knobs",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="values flip back, and nobody knows which is in force",
    source="AdnanHodzic/auto-cpufreq#349",
)
def tuners(machine: Machine) -> Iterator[Seen | Unseen]:
    """Other tuners that run now: TuneD, TLP, auto-cpufreq, cpupower, power-profiles-daemon. torchtuned leaves the knobs
    of one to it; two of them fight each other."""
    running = [tuner for tuner in TUNERS if unit_runs(machine, tuner.unit)]
    if len(running) > 1:
        last = next((tuner for tuner in running if tuner.unit == PPD), running[-1])
        yield Seen(
            evidence=f"running: {', '.join(tuner.unit for tuner in running)}",
            fix=f"keep one; for example: sudo systemctl disable --now {last.unit}",
        )


@rule(
    "TT044",
    "CPUs of a job sleep deeply and are woken too soon",
    severity=Severity.NOTICE,
    action=Action.JOB,
    cost="150 to 230 us a wake-up on recent Xeons, 5 to 15 on EPYC; little at high load",
    source="google/gvisor#14526, firecracker-microvm/firecracker#5671",
    jobs=True,
)
def idle_states(machine: Machine) -> Iterator[Seen | Unseen]:
    """Idle states that take over 100 us to leave, by their latency and never by their number, on the CPUs of a running
    job, where the kernel chose them often and was woken too soon in a quarter of the cases (its own count, "above").
    Nearly every CPU has such states, and forbidding them costs power and may cost turbo."""
    for job in machine.jobs:
        states = []
        folder = f"/sys/devices/system/cpu/cpu{min(job.cpus, default=0)}/cpuidle"
        for name in machine.host.list(folder) if job.cpus else ():
            latency = machine.number(f"{folder}/{name}/latency") or 0
            if latency <= WAKE_US or machine.text(f"{folder}/{name}/disable") not in ("", "0"):
                continue
            used, wrong = (
                sum(machine.number(f"{CPUS}/cpu{cpu}/cpuidle/{name}/{what}") or 0 for cpu in job.cpus)
                for what in ("usage", "above")
            )
            if used >= OFTEN and wrong >= used * TOO_SHORT:
                states.append(
                    f"{machine.text(f'{folder}/{name}/name')} ({latency} us) entered {used} times since boot,"
                    f" {wrong} of them for too short"
                )
        if states and not any(knob.startswith("latency/") for knob in machine.ours):
            yield Seen(
                evidence=f"{CPUS}/cpu{format_list(job.cpus)}/cpuidle: {', '.join(states)}",
                fix=f"latency_us = {WAKE_US} under [cpu] (profile latency does it while jobs run)",
                job=job.id,
            )


@rule(
    "TT045",
    "a GPU may fall asleep within a job",
    severity=Severity.NOTICE,
    action=Action.JOB,
    cost="seconds to wake, and hard freezes on some laptops",
    source="pop-os/system76-power#292",
    jobs=True,
)
def gpu_sleep(machine: Machine) -> Iterator[Seen | Unseen]:
    """power/control = auto lets the kernel suspend a GPU that nobody holds open. A finding only for GPUs of a running
    job."""
    for job in machine.jobs:
        for address in job.gpus:
            path = f"{DEVICES}/{address}/power/control"
            if machine.text(path) == "auto":
                yield Seen(
                    evidence=f"{path} is auto",
                    fix="power_control = on @jobs under [gpu] (profile training does it)",
                    job=job.id,
                )


@rule(
    "TT073",
    "a job computes on fast and slow cores",
    severity=Severity.NOTICE,
    action=Action.TELL,
    cost="a parallel loop ends with its slowest thread; unmeasured",
    source="Intel hybrid architecture, /sys/devices/cpu_core",
    jobs=True,
)
def hybrid(machine: Machine) -> Iterator[Seen | Unseen]:
    """OpenMP deals work out evenly, so threads on efficiency cores hold up those on performance cores."""
    try:
        fast, slow = (parse_list(machine.text(f"/sys/devices/cpu_{kind}/cpus")) for kind in ("core", "atom"))
    except ValueError:
        return
    for job in machine.jobs:
        if job.cpus & fast and job.cpus & slow:
            yield Seen(
                evidence=f"CPUs {format_list(job.cpus & fast)} are performance cores, {format_list(job.cpus & slow)}"
                " efficiency cores",
                fix=f"torchtuned-run --cpus {len(machine_cores(machine, fast))} takes the fast ones alone",
                job=job.id,
            )


def machine_cores(machine: Machine, cpus: frozenset[int]) -> list[frozenset[int]]:
    """The cores that have these CPUs."""
    return [core.cpus for core in machine.topology.cores if core.cpus & cpus]
