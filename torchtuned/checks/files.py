"""Small readers that several families of checks share: limits, settings of systemd and apt, units.

All of it is read from files, so that it works on a folder too, and without a bus.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from torchtuned import systemdconf, units
from torchtuned.checks.registry import Machine
from torchtuned.cpuset import CpuSet, parse_list
from torchtuned.errors import HostError, Missing

UNLIMITED = 2**63
UNIT_FOLDERS = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
SLICES = ("/sys/fs/cgroup/system.slice", "/sys/fs/cgroup/systemd/system.slice", "/sys/fs/cgroup/unified/system.slice")


def amount(text: str) -> int:
    """Bytes of "65536k", "64m", "1g" or "4096"; 0 when it is none of these."""
    match = re.fullmatch(r"(\d+)([kmgt]?)", text.lower())
    return int(match[1]) << 10 * " kmgt".index(match[2] or " ") if match else 0


def memory(machine: Machine) -> dict[str, int]:
    """/proc/meminfo in bytes. Missing, Unreadable."""
    found = re.findall(r"^(\S+):\s+(\d+)", machine.host.read("/proc/meminfo"), re.MULTILINE)
    return {name: int(kib) << 10 for name, kib in found}


def limit(machine: Machine, process: str, name: str) -> tuple[int, int]:
    """The soft and hard limit that /proc/PID/limits has under a name ("open files"). Missing, Unreadable."""
    path = f"/proc/{process}/limits"
    match = re.search(rf"^Max {re.escape(name)}\s+(\S+)\s+(\S+)", machine.host.read(path), re.MULTILINE)
    if not match:
        raise Missing(f"no limit on {name}", where=path)
    soft, hard = (UNLIMITED if text == "unlimited" else int(text) for text in match.groups())
    return soft, hard


def environment(machine: Machine, process: str) -> dict[str, str]:
    """The environment that a process was started with. Missing, Unreadable (another user's)."""
    pairs = (entry.partition("=") for entry in machine.host.read(f"/proc/{process}/environ").split("\0"))
    return {name: value for name, _, value in pairs if name}


def setting(machine: Machine, file: str, key: str) -> tuple[str, str]:
    """The value of a key in a file of systemd's ("logind.conf"), and the file that has it; "" for the default."""
    host = machine.host

    def read(path: str) -> str | None:
        return machine.text(path) if host.exists(path) else None

    return systemdconf.settings(file, read=read, names=host.list).get(key, ("", ""))


def unit_runs(machine: Machine, unit: str) -> bool:
    """Whether a system unit has a cgroup, which is so while it runs."""
    return any(machine.host.exists(f"{folder}/{unit}") for folder in SLICES)


def unit_enabled(machine: Machine, unit: str) -> bool:
    """Whether something starts the unit at boot, and it is not masked."""
    return not masked(machine, unit) and any(
        unit in machine.host.list(f"{folder}/{wants}")
        for folder in UNIT_FOLDERS
        for wants in machine.host.list(folder)
        if wants.endswith((".wants", ".requires"))
    )


def masked(machine: Machine, unit: str) -> bool:
    """Whether the unit is a link to /dev/null."""
    for folder in UNIT_FOLDERS[:2]:
        try:
            if machine.host.link(f"{folder}/{unit}") == "/dev/null":
                return True
        except HostError:
            continue
    return False


def apt(machine: Machine) -> str:
    """All of apt's configuration, without comments."""
    folder = "/etc/apt/apt.conf.d"
    names = [f"{folder}/{name}" for name in machine.host.list(folder) if "." not in name or name.endswith(".conf")]
    text = "\n".join(machine.text(path) for path in [*names, "/etc/apt/apt.conf"])
    return re.sub(r"/\*.*?\*/|(?<!:)//.*?$|^\s*#.*?$", "", text, flags=re.DOTALL | re.MULTILINE)


def apt_value(text: str, key: str) -> str:
    """The last value of a key ("Unattended-Upgrade::Automatic-Reboot") in apt's configuration, "" without one."""
    found = re.findall(rf"{re.escape(key)}\s+\"([^\"]*)\"", text)
    return str(found[-1]) if found else ""


def uid(machine: Machine, process: str = "self") -> int | None:
    """The user id of a process, by default of the one that asks."""
    match = re.search(r"^Uid:\s+(\d+)", machine.text(f"/proc/{process}/status"), re.MULTILINE)
    return int(match[1]) if match else None


def user_name(machine: Machine, uid: int) -> str:
    """The name of a user in /etc/passwd, else the number."""
    for line in machine.text("/etc/passwd").splitlines():
        fields = line.split(":")
        if len(fields) > 2 and fields[2] == str(uid):
            return fields[0]
    return str(uid)


def affinity(machine: Machine, pid: int | str) -> CpuSet:
    """The CPUs that a process may run on, none when it has ended."""
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)", machine.text(f"/proc/{pid}/status"), re.MULTILINE)
    return parse_list(match[1]) if match else frozenset()


def unit_of(machine: Machine, process: str) -> str:
    """The unit that a process belongs to, as units.unit() has it."""
    return units.unit(machine.text(f"/proc/{process}/cgroup"))


def module_option(option: str, file: str, module: str = "nvidia") -> str:
    """The command that sets an option of NVIDIA's module for good. Debian calls its module nvidia-current, NVIDIA's
    own packages nvidia; a line for a module that is not there does nothing."""
    debian = module.replace("nvidia", "nvidia-current", 1).replace("_", "-")
    lines = f"options {module} {option}\\noptions {debian} {option}\\n"
    return f"printf '{lines}' | sudo tee /etc/modprobe.d/{file}.conf; sudo update-initramfs -u"


def process_name(machine: Machine, pid: int) -> str:
    """A process for people: its number and name, which any program may give itself, with line feeds and all."""
    name = "".join(c if c.isprintable() else "?" for c in machine.text(f"/proc/{pid}/comm"))
    return f"{pid} ({name})" if name else str(pid)


def settings_lines(machine: Machine, paths: list[str], pattern: str) -> Iterator[tuple[str, str]]:
    """The lines of some files that match, each with FILE:LINE. Files that are not there are passed over."""
    for path in paths:
        for number, line in enumerate(machine.text(path).splitlines(), 1):
            if re.search(pattern, line):
                yield f"{path}:{number}", line.strip()


def basename(path: str) -> str:
    """The last part of a path or link."""
    return posixpath.basename(path)
