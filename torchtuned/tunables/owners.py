"""Who else decides about a knob: other tuners that run, the administrator's sysctl.d and
tmpfiles.d, the kernel command line.

torchtuned does not fight any of them. Which tuners run is asked of PID 1 by the caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torchtuned.host import Host
from torchtuned.policy import Owner
from torchtuned.tunables.cpu import has_preference
from torchtuned.tunables.sysctld import COMMAND_LINE, Assignments
from torchtuned.tunables.sysfsd import SysfsSettings


@dataclass(frozen=True)
class Tuner:
    """`unit` is the systemd unit; `knobs` are the patterns of what it sets; `bus` is its name on the system bus."""

    unit: str
    title: str
    knobs: tuple[str, ...]
    bus: str = ""


PPD = "power-profiles-daemon.service"
TUNERS = (
    Tuner("tuned.service", "TuneD", ("cpu/*", "latency/*", "sysctl/*", "memory/*", "block/*"), bus="com.redhat.tuned"),
    Tuner("tlp.service", "TLP", ("cpu/*", "block/*", "gpu/*/power_control")),
    Tuner("auto-cpufreq.service", "auto-cpufreq", ("cpu/*",)),
    Tuner("cpupower.service", "cpupower", ("cpu/*",)),
    Tuner("cpufrequtils.service", "cpufrequtils", ("cpu/*/governor",)),
    Tuner("system76-power.service", "system76-power", ("cpu/*",)),
    Tuner(
        PPD,
        "power-profiles-daemon",
        ("cpu/platform_profile", "cpu/*/energy_performance_preference"),
        bus="net.hadess.PowerProfiles",
    ),
)
UNITS = tuple(tuner.unit for tuner in TUNERS)
"""The units to ask PID 1 about."""
BUS_NAMES = {tuner.bus: tuner.unit for tuner in TUNERS if tuner.bus}
"""Who was started by hand is in no unit, but owns its name on the bus."""

PPD_DRIVER = ("cpu/*/governor", "cpu/*boost", "cpu/min_perf_pct")
"""What power-profiles-daemon sets, too, where it has a CPU driver."""


class Owners:
    """The owners as they are now; one object serves one plan. `tuners` are active units, or their names."""

    def __init__(self, host: Host, tuners: Iterable[str] = ()) -> None:
        active = {name.removesuffix(".service") + ".service" for name in tuners}
        self.tuners = [tuner for tuner in TUNERS if tuner.unit in active]
        self.assignments = Assignments(host)
        self.sysfs = SysfsSettings(host)
        self._ppd_drives = PPD in active and has_preference(host)
        self._command_line = host.text(COMMAND_LINE).split()

    def owner(self, knob: str, path: str = "") -> Owner | None:
        """Who decides about a knob, and its file, None if torchtuned may."""
        for tuner in self.tuners:
            patterns = tuner.knobs + (PPD_DRIVER if tuner.unit == PPD and self._ppd_drives else ())
            if any(fnmatchcase(knob, pattern) for pattern in patterns):
                name = tuner.title
                if tuner.unit == PPD:
                    name += ", which is asked for performance while jobs run"
                return Owner(name, tuner.unit, active=True)
        if knob.startswith("sysctl/"):
            found = self.assignments.admins(knob.removeprefix("sysctl/"))
            if found:
                return Owner("the administrator", found.source)
        source = self.sysfs.source(path)
        if source:
            return Owner("the administrator", source)
        if knob == "memory/transparent_hugepage":
            if any(word.startswith("transparent_hugepage=") for word in self._command_line):
                return Owner("the kernel command line", COMMAND_LINE)
        return None
