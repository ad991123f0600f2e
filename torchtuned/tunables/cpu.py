"""Clock and power of the CPUs: cpufreq policies, boost, Intel's floor, and the firmware's platform profile."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence

from torchtuned.errors import HostError, Unreadable
from torchtuned.host import Host
from torchtuned.policy import Companion, Entry, Wish
from torchtuned.tunables import Knob, read_words

CPUFREQ = "/sys/devices/system/cpu/cpufreq"
INTEL = "/sys/devices/system/cpu/intel_pstate"
PLATFORM = "/sys/firmware/acpi/platform_profile"
EPP = "energy_performance_preference"
EPP_DRIVERS = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")


def policies(host: Host) -> list[str]:
    """The cpufreq policies by number, also those whose CPUs are all offline."""
    names = [name for name in host.list(CPUFREQ) if re.fullmatch(r"policy[0-9]+", name)]
    return sorted(names, key=lambda name: int(name.removeprefix("policy")))


def _offline(host: Host, policy: str) -> bool:
    """Whether all of a policy's CPUs are, in which case the kernel answers EBUSY for its other files."""
    path = f"{CPUFREQ}/{policy}/affected_cpus"
    return host.exists(path) and not host.read(path)


def has_preference(host: Host) -> bool:
    """Whether a driver here takes an energy_performance_preference (intel_pstate, amd-pstate, both active)."""
    return any(host.exists(f"{CPUFREQ}/{policy}/{EPP}") for policy in policies(host))


class PolicyKnob(Knob):
    """A file of one cpufreq policy."""

    def __init__(self, policy: str, name: str, file: str) -> None:
        super().__init__(f"cpu/{policy}/{name}", f"{CPUFREQ}/{policy}/{file}")
        self.policy = policy
        self.folder = f"{CPUFREQ}/{policy}"

    def read(self, host: Host) -> str:
        if _offline(host, self.policy):
            raise Unreadable("its CPUs are offline", where=self.path, errno=errno.EBUSY)
        return super().read(host)


class Governor(PolicyKnob):
    stage = 21

    def __init__(self, policy: str) -> None:
        super().__init__(policy, "governor", "scaling_governor")

    def choices(self, host: Host) -> Sequence[str] | None:
        return read_words(host, f"{self.folder}/scaling_available_governors")

    def companions(self, host: Host, value: str) -> tuple[Companion, ...]:
        found, before = [], self.read(host)
        preference = f"{self.folder}/{EPP}"
        if host.exists(preference):  # amd-pstate leaves it at "performance" when the governor goes back
            now = host.read(preference)
            after = value if value == "performance" else None if before == "performance" else now
            found.append(Companion(path=preference, original=now, after=after, apart=True))
        if before == "userspace":
            speed = f"{self.folder}/scaling_setspeed"
            found.append(Companion(path=speed, original=host.read(speed), fades=True))
        return tuple(found)


class Preference(PolicyKnob):
    stage = 22

    def __init__(self, policy: str) -> None:
        super().__init__(policy, EPP, EPP)

    def choices(self, host: Host) -> Sequence[str] | None:
        return read_words(host, f"{self.folder}/energy_performance_available_preferences")

    def implied(self, host: Host, pending: Mapping[str, str]) -> str:
        """Under `performance` these drivers answer EBUSY: the governor means this preference."""
        governor = pending.get(f"cpu/{self.policy}/governor") or host.read(f"{self.folder}/scaling_governor")
        if governor == "performance" and host.read(f"{self.folder}/scaling_driver") in EPP_DRIVERS:
            return "implied by governor performance"
        return ""

    def excuse(self, error: HostError) -> str:
        return "implied by governor" if error.errno == errno.EBUSY else ""


class PolicyBoost(PolicyKnob):
    """Boost of one policy (amd-pstate since Linux 6.11), where there is no switch for all."""

    stage = 23

    def __init__(self, policy: str) -> None:
        super().__init__(policy, "boost", "boost")

    def read(self, host: Host) -> str:
        return _switch(super().read(host))

    def write(self, host: Host, value: str) -> None:
        host.write(self.path, "1" if value == "on" else "0")


class Boost(Knob):
    """The switch for all CPUs. Intel's file says it the other way round."""

    stage = 23

    def __init__(self, *, inverted: bool) -> None:
        super().__init__("cpu/boost", f"{INTEL}/no_turbo" if inverted else f"{CPUFREQ}/boost")
        self.inverted = inverted

    def read(self, host: Host) -> str:
        return _switch(host.read(self.path), inverted=self.inverted)

    def write(self, host: Host, value: str) -> None:
        host.write(self.path, "1" if (value == "on") != self.inverted else "0")

    def companions(self, host: Host, value: str) -> tuple[Companion, ...]:
        return tuple(Companion(path=file, original=host.read(file), fades=True) for file in self._files(host))

    def restore(self, host: Host, entry: Entry, companions: Sequence[Companion]) -> None:
        here = self._files(host)
        super().restore(host, entry, [companion for companion in companions if companion.path in here])

    def _files(self, host: Host) -> list[str]:
        """Those of the policies. One whose CPUs are offline answers nothing, and is like the switch when it is back."""
        files = [f"{CPUFREQ}/{policy}/boost" for policy in policies(host) if not _offline(host, policy)]
        return [file for file in files if host.exists(file)]


class MinPerf(Knob):
    stage = 24

    def __init__(self) -> None:
        super().__init__("cpu/min_perf_pct", f"{INTEL}/min_perf_pct")

    def predict(self, host: Host, value: str) -> str:
        return str(min(int(value), host.read_int(f"{INTEL}/max_perf_pct")))


class PlatformProfile(Knob):
    """The firmware's own trade of speed for heat. It may limit the governor, so it goes first."""

    stage = 20

    def __init__(self) -> None:
        super().__init__("cpu/platform_profile", PLATFORM)

    def choices(self, host: Host) -> Sequence[str] | None:
        return read_words(host, f"{PLATFORM}_choices")

    def implied(self, host: Host, pending: Mapping[str, str]) -> str:
        current, choices = self.read(host), self.choices(host)
        return "" if choices is None or current in choices else f"{current!r} could not be given back"


class CpuFamily:
    name = "cpu"

    def expand(self, host: Host, wish: Wish) -> list[Knob]:
        _, *middle, last = wish.knob.split("/")
        if last == "boost" and (host.exists(f"{CPUFREQ}/boost") or host.exists(f"{INTEL}/no_turbo")):
            return [Boost(inverted=not host.exists(f"{CPUFREQ}/boost"))]
        if middle:
            found = [self.find(host, f"cpu/{policy}/{last}") for policy in policies(host)]
        else:
            found = [self.find(host, wish.knob)]
        return [knob for knob in found if knob and host.exists(knob.path)]

    def find(self, host: Host, id: str) -> Knob | None:
        match id.split("/"):
            case ["cpu", "boost"]:
                return Boost(inverted=not host.exists(f"{CPUFREQ}/boost"))
            case ["cpu", "min_perf_pct"]:
                return MinPerf()
            case ["cpu", "platform_profile"]:
                return PlatformProfile()
            case ["cpu", policy, name] if name in _OF_POLICY and re.fullmatch(r"policy[0-9]+", policy):
                return _OF_POLICY[name](policy)
        return None

    def absent(self, host: Host, wish: Wish) -> str:
        if wish.knob == "cpu/platform_profile":
            return "the firmware offers no platform profile"
        if wish.knob == "cpu/min_perf_pct":
            return "only intel_pstate has it"
        if not policies(host):
            return "no cpufreq driver, as in most virtual machines"
        driver = next(iter(read_words(host, f"{CPUFREQ}/{policies(host)[0]}/scaling_driver") or ()), "this driver")
        return f"{driver} does not have it"


_OF_POLICY = {"governor": Governor, EPP: Preference, "boost": PolicyBoost}


def _switch(text: str, *, inverted: bool = False) -> str:
    return "on" if (text == "1") != inverted else "off"


def on_battery(host: Host) -> bool:
    """Whether the machine itself (not a mouse) is discharging a battery, and no power supply is plugged in."""
    folder, discharging = "/sys/class/power_supply", False
    for name in host.list(folder) if host.exists(folder) else ():
        words = {file: host.text(f"{folder}/{name}/{file}") for file in ("type", "online", "status", "scope")}
        if words["type"] in ("Mains", "USB") and words["online"] == "1":
            return False
        discharging |= words["type"] == "Battery" and words["scope"] != "Device" and words["status"] == "Discharging"
    return discharging
