"""Which sysctls the administrator has decided, read out of sysctl.d(5) exactly as systemd-sysctl reads it.

Of files with one name the first folder's counts, a link to /dev/null or an empty file masks it; files go by name
whatever their folder, the last assignment of a key wins, a key beats any pattern, "-key" alone takes a key out of the
patterns, "-key = value" only means that a failure does not matter. /etc/sysctl.conf counts only through a link such as
Debian 12's /etc/sysctl.d/99-sysctl.conf.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torchtuned.config_keys import sysctl_name
from torchtuned.errors import HostError, Missing
from torchtuned.host import Host
from torchtuned.tunables.sysctl import GLOB, partner

FOLDERS = ("/etc/sysctl.d", "/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d")
VENDOR = "/usr/lib/sysctl.d"
COMMAND_LINE = "/proc/cmdline"


@dataclass(frozen=True)
class Assignment:
    """One line. `value` is None for "-key", which only takes the key out of the patterns."""

    key: str
    value: str | None
    source: str
    admin: bool


class Assignments:
    """All lines that count on a machine, in systemd's order."""

    def __init__(self, host: Host) -> None:
        self.faults: list[str] = []
        found = [*_command_line(host)]
        for name, folder in sorted(config_files(host, FOLDERS).items()):
            found += self._parse(host, f"{folder}/{name}", admin=folder != VENDOR)
        self._all = found
        self._keys: dict[str, Assignment] = {}
        self._patterns: dict[str, Assignment] = {}
        for assignment in found:
            if GLOB & set(assignment.key):
                earlier = self._patterns.get(assignment.key)
                if earlier and earlier.value != assignment.value:
                    del self._patterns[assignment.key]  # a new value goes to the end, the same one keeps its place
                self._patterns[assignment.key] = assignment
            else:
                self._keys[assignment.key] = assignment

    def winner(self, key: str) -> Assignment | None:
        """The line whose value the key gets at boot."""
        exact = self._keys.get(key)
        if exact:
            return exact if exact.value is not None else None
        hits = [found for found in self._patterns.values() if found.value is not None and _match(key, found.key)]
        return hits[-1] if hits else None

    def admins(self, key: str) -> Assignment | None:
        """The administrator's line that decides a key, or the other one of its exclusive pair."""
        for name in filter(None, (key, partner(key))):
            found = self.winner(name)
            if found and found.admin:
                return found
        return None

    def mentions(self, key: str) -> list[str]:
        """Where a key is given a value, whoever does it, and whether or not it counts."""
        return [found.source for found in self._all if found.value is not None and _match(key, found.key)]

    def _parse(self, host: Host, path: str, *, admin: bool) -> Iterator[Assignment]:
        shown = resolve(host, path)
        if shown == "/dev/null":
            return
        try:
            lines = host.read(shown).splitlines()
        except HostError as error:
            self.faults.append(str(error))
            return
        for number, raw in enumerate(lines, start=1):
            line = raw.strip()
            if not line or line[0] in "#;":
                continue
            key, equals, value = line.partition("=")
            if not equals and line[0] != "-":
                continue  # systemd says so in the journal and goes on
            try:
                name = sysctl_name(key.removeprefix("-").strip())
            except ValueError:
                continue
            yield Assignment(name, value.strip() if equals else None, f"{shown}:{number}", admin)


def config_files(host: Host, folders: Sequence[str]) -> dict[str, str]:
    """The name of each *.conf that counts, with its folder: of one name the first folder's."""
    files: dict[str, str] = {}
    for folder in folders:
        with contextlib.suppress(HostError):  # a folder that not even root may read says nothing
            for name in host.list(folder):
                if name.endswith(".conf"):
                    files.setdefault(name, folder)
    return files


def resolve(host: Host, path: str) -> str:
    """Follow the links of a file by hand: an absolute one means the machine's file, also under another root."""
    for _ in range(8):
        try:
            target = host.link(path)
        except Missing:
            return path
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return path


def _command_line(host: Host) -> Iterator[Assignment]:
    for word in host.text(COMMAND_LINE).split():
        key, equals, value = word.partition("=")
        if key.startswith(("sysctl.", "sysctl/")) and equals:
            with contextlib.suppress(ValueError):
                yield Assignment(sysctl_name(key[len("sysctl.") :]), value, COMMAND_LINE, admin=True)


def _match(key: str, pattern: str) -> bool:
    """systemd matches file names, so "*" never spans two parts."""
    parts, wanted = (name.split("/" if "/" in name else ".") for name in (key, pattern))
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
