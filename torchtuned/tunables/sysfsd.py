"""Which files of /sys the administrator sets at boot: `w` lines of tmpfiles.d(5), and Debian's sysfsutils.

These are to /sys what sysctl.d is to /proc/sys, so what they say beats the policy in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from torchtuned.host import Host
from torchtuned.tunables.sysctld import config_files, resolve

TMPFILES = ("/etc/tmpfiles.d", "/run/tmpfiles.d", "/usr/local/lib/tmpfiles.d", "/usr/lib/tmpfiles.d")
VENDOR = TMPFILES[-1]
SYSFSUTILS = "/etc/init.d/sysfsutils"


class SysfsSettings:
    """The administrator's lines, as (pattern of paths, FILE:LINE)."""

    def __init__(self, host: Host) -> None:
        self._lines = [*_tmpfiles(host), *_sysfsutils(host)]

    def source(self, path: str) -> str:
        """The FILE:LINE that sets a file; the last one, or the empty text."""
        return next((source for pattern, source in reversed(self._lines) if fnmatchcase(path, pattern)), "")


def _tmpfiles(host: Host) -> Iterator[tuple[str, str]]:
    for name, folder in sorted(config_files(host, TMPFILES).items()):
        if folder != VENDOR:
            for words, source in _lines(host, resolve(host, f"{folder}/{name}")):
                if words[0][0] == "w" and len(words) > 1:
                    yield words[1].strip("\"'"), source


def _sysfsutils(host: Host) -> Iterator[tuple[str, str]]:
    """Lines such as "kernel/mm/transparent_hugepage/enabled = never", below /sys."""
    if host.exists(SYSFSUTILS):
        names = [name for name in host.list("/etc/sysfs.d") if name.endswith(".conf")]
        for file in ("/etc/sysfs.conf", *(f"/etc/sysfs.d/{name}" for name in names)):
            for words, source in _lines(host, file):
                path = " ".join(words).partition("=")[0].strip()
                if path and " " not in path:  # "mode PATH = 0640" sets no value
                    yield f"/sys/{path}", source


def _lines(host: Host, file: str) -> Iterator[tuple[list[str], str]]:
    for number, line in enumerate(host.text(file).splitlines(), start=1):
        words = line.split()
        if words and words[0][0] not in "#;":
            yield words, f"{file}:{number}"
