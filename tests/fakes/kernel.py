"""A machine in memory whose /sys and /proc behave as a kernel's do where that matters to host policy.

Drivers refuse values they do not offer, intel_pstate and amd-pstate lock the preference under `performance`, one of a
pair of sysctls zeroes the other, lists show the value in force in brackets. `step` is called before and after each
write, and may fail it, kill the caller, or hang.
"""

from __future__ import annotations

import errno
import os
import posixpath
import select
import struct
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from torchtuned.errors import Missing, Refused, Unreadable
from torchtuned.host import Host

CPUFREQ = "/sys/devices/system/cpu/cpufreq"
EPP = "energy_performance_preference"
PAIRS = {
    f"/proc/sys/vm/dirty{kind}_{one}": f"/proc/sys/vm/dirty{kind}_{other}"
    for kind in ("", "_background")
    for one, other in (("bytes", "ratio"), ("ratio", "bytes"))
}
NO_LIMIT = 2_000_000_000
BRACKETS = ("/sys/kernel/mm/transparent_hugepage/*", "/sys/block/*/queue/scheduler")


def policy(
    number: int, driver: str, governor: str = "schedutil", *, governors: str = "", epp: str = "", cpus: str = ""
) -> dict[str, str]:
    """The files of one cpufreq policy."""
    folder = f"{CPUFREQ}/policy{number}"
    files = {
        f"{folder}/affected_cpus": cpus or str(number),
        f"{folder}/scaling_driver": driver,
        f"{folder}/scaling_governor": governor,
        f"{folder}/scaling_available_governors": governors or "ondemand powersave performance schedutil userspace",
        f"{folder}/scaling_setspeed": "2000000" if governor == "userspace" else "<unsupported>",
    }
    if epp:
        files[f"{folder}/{EPP}"] = epp
        available = "default performance balance_performance balance_power power"
        files[f"{folder}/energy_performance_available_preferences"] = available
    return files


class Kernel(Host):
    """Files by path. A value in `after_performance` is what intel_pstate has saved for the way back."""

    def __init__(self, files: Mapping[str, str]) -> None:
        super().__init__("/nonexistent")
        self.files = dict(files)
        self.links: dict[str, str] = {}
        self.holders: dict[str, list[tuple[int, int]]] = {}
        self.step: Callable[[str, str], None] = lambda moment, path: None
        self.read_step: Callable[[str], None] = lambda path: None
        self.saved: dict[str, str] = {}
        self.writes: list[tuple[str, str]] = []

    def copy(self) -> Kernel:
        other = Kernel(self.files)
        other.saved = dict(self.saved)
        return other

    def read_bytes(self, path: str) -> bytes:
        self.read_step(path)
        if path in self.holders:
            return struct.pack("=i", self.held(path))
        if path not in self.files:
            raise Missing("no such file or directory", where=path, errno=errno.ENOENT)
        if path.startswith(f"{CPUFREQ}/policy") and not self.files.get(f"{posixpath.dirname(path)}/affected_cpus", "0"):
            if not path.endswith("/affected_cpus"):
                raise Unreadable("device or resource busy", where=path, errno=errno.EBUSY)
        return self.files[path].encode()

    def exists(self, path: str) -> bool:
        return path in self.files or path in self.holders or any(name.startswith(path + "/") for name in self.files)

    def list(self, path: str) -> list[str]:
        start = path.rstrip("/") + "/"
        return sorted(
            {name[len(start) :].partition("/")[0] for name in (*self.files, *self.links) if name.startswith(start)}
        )

    def link(self, path: str) -> str:
        if path not in self.links:
            raise Missing("not a link", where=path, errno=errno.EINVAL)
        return self.links[path]

    def stat(self, path: str) -> os.stat_result:
        return os.stat("/")

    def write(self, path: str, value: str) -> None:
        self.step("before", path)
        self.set(path, value)
        self.writes.append((path, value))
        self.step("after", path)

    def hold(self, path: str, data: bytes) -> int:
        self.step("before", path)
        if path not in self.holders:
            raise Missing("no such file or directory", where=path, errno=errno.ENOENT)
        watch, given = os.pipe()
        self.holders[path].append((watch, struct.unpack("=i", data)[0]))
        return given

    def held(self, path: str) -> int:
        """The lowest value whose descriptor is open somewhere."""
        values = [NO_LIMIT]
        for watch, value in self.holders[path]:
            poll = select.poll()
            poll.register(watch)
            if not poll.poll(0):
                values.append(value)
        return min(values)

    def set(self, path: str, value: str) -> None:
        """What the kernel does with a value, whoever writes it."""
        if path not in self.files:
            raise Missing("no such file or directory", where=path, errno=errno.ENOENT)
        folder, name = posixpath.split(path)
        if name == "scaling_governor":
            self._governor(folder, value)
        elif name == EPP:
            self._preference(folder, value)
        elif any(fnmatchcase(path, pattern) for pattern in BRACKETS):
            words = [word.strip("[]") for word in self.files[path].split()]
            self._offered(path, value, words)
            before, self.files[path] = self.files[path], " ".join(f"[{w}]" if w == value else w for w in words)
            if before != self.files[path]:
                self._afterwards(path, value)
        elif name == "platform_profile":
            self._offered(path, value, self.files[f"{path}_choices"].split())
            self.files[path] = value
        elif path in PAIRS:
            if value == "0" and name.endswith("bytes"):
                self._refuse(path, value)
            self.files[path] = value
            if PAIRS[path] in self.files:
                self.files[PAIRS[path]] = "0"
        elif fnmatchcase(path, f"{CPUFREQ}/policy*/boost") and self.files.get(f"{CPUFREQ}/boost") == "0":
            self._refuse(path, value)
        elif name == "read_ahead_kb":
            self.files[path] = str(int(value) // 4 * 4)
        elif path.startswith("/proc/sys/") and not all(word.lstrip("-").isdigit() for word in value.split()):
            self._refuse(path, value)
        else:
            self.files[path] = value
            if path == f"{CPUFREQ}/boost":
                for other in self.files:
                    if fnmatchcase(other, f"{CPUFREQ}/policy*/boost") and self._is_online(posixpath.dirname(other)):
                        self.files[other] = value

    def _afterwards(self, path: str, value: str) -> None:
        """Block layer and khugepaged (Linux 6.18, seen): a queue's length is set anew, a reserve only raised."""
        depth, reserve = f"{posixpath.dirname(path)}/nr_requests", "/proc/sys/vm/min_free_kbytes"
        if depth in self.files:
            self.files[depth] = "128" if value == "none" else "256"
        elif path.endswith("/enabled") and value != "never" and reserve in self.files:
            self.files[reserve] = str(max(67584, int(self.files[reserve])))

    def _governor(self, folder: str, value: str) -> None:
        path, preference = f"{folder}/scaling_governor", f"{folder}/{EPP}"
        self._online(folder, path)
        self._offered(path, value, self.files[f"{folder}/scaling_available_governors"].split())
        before, self.files[path] = self.files[path], value
        self.files[f"{folder}/scaling_setspeed"] = "1500000" if value == "userspace" else "<unsupported>"
        if preference in self.files and before != value:
            if value == "performance":
                self.saved[folder] = self.files[preference]
                self.files[preference] = "performance"
            elif self.files[f"{folder}/scaling_driver"] == "intel_pstate":
                self.files[preference] = self.saved.pop(folder, self.files[preference])

    def _preference(self, folder: str, value: str) -> None:
        path = f"{folder}/{EPP}"
        self._online(folder, path)
        self._offered(path, value, self.files[f"{folder}/energy_performance_available_preferences"].split())
        if self.files[f"{folder}/scaling_governor"] == "performance" and value != "performance":
            raise Refused("device or resource busy", where=path, errno=errno.EBUSY)
        self.files[path] = value

    def online(self, number: int, *, back: bool) -> None:
        """A policy's CPUs come, or go. Its boost is then that of the switch for all."""
        folder = f"{CPUFREQ}/policy{number}"
        self.files[f"{folder}/affected_cpus"] = str(number) if back else ""
        if back and {f"{folder}/boost", f"{CPUFREQ}/boost"} <= self.files.keys():
            self.files[f"{folder}/boost"] = self.files[f"{CPUFREQ}/boost"]

    def _is_online(self, folder: str) -> bool:
        return self.files.get(f"{folder}/affected_cpus") != ""

    def _online(self, folder: str, path: str) -> None:
        if not self._is_online(folder):
            raise Refused("device or resource busy", where=path, errno=errno.EBUSY)

    def _offered(self, path: str, value: str, words: Sequence[str]) -> None:
        if value not in words:
            self._refuse(path, value)

    @staticmethod
    def _refuse(path: str, value: str) -> None:
        raise Refused(f"invalid argument on writing {value!r}", where=path, errno=errno.EINVAL)
