"""Any key of /proc/sys, with the pairs of which the kernel keeps only one."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torchtuned.config_keys import EXCLUSIVE, sysctl_name
from torchtuned.host import Host
from torchtuned.policy import Companion, Entry, Wish
from torchtuned.tunables import Knob

ROOT = "/proc/sys"
GLOB = frozenset("*?[")
CAPACITIES = (
    "fs.aio-max-nr",
    "fs.epoll.max_user_watches",
    "fs.file-max",
    "fs.inotify.max_*",
    "fs.mqueue.*_max",
    "fs.nr_open",
    "kernel.keys.max*",
    "kernel.msgm*",
    "kernel.pid_max",
    "kernel.sem",
    "kernel.shm*",
    "kernel.threads-max",
    "net.core.*mem_max",
    "net.core.netdev_max_backlog",
    "net.core.optmem_max",
    "net.core.somaxconn",
    "net.ipv4.tcp_max_*",
    "net.ipv4.udp_mem",
    "net.netfilter.nf_conntrack_max",
    "vm.max_map_count",
)
"""Limits that only a too small value does harm to; policy raises them and never lowers them."""


def path(key: str) -> str:
    """The file of a sysctl by its plain name."""
    return f"{ROOT}/{key if '/' in key else key.replace('.', '/')}"


def partner(key: str) -> str:
    """The sysctl that the kernel zeroes when this one is written, or the empty text."""
    return next((pair[1 - pair.index(key)] for pair in EXCLUSIVE if key in pair), "")


class Sysctl(Knob):
    stage = 10

    def __init__(self, key: str) -> None:
        super().__init__(f"sysctl/{key}", path(key))
        self.key = key
        self.capacity = any(fnmatchcase(key, pattern) for pattern in CAPACITIES)

    def read(self, host: Host) -> str:
        return " ".join(host.read(self.path).split())  # the kernel separates several numbers by tabs

    def companions(self, host: Host, value: str) -> tuple[Companion, ...]:
        other = partner(self.key)
        if not other or not host.exists(path(other)):
            return ()
        return (Companion(path=path(other), original=host.read(path(other)), after="0"),)

    def restore(self, host: Host, entry: Entry, companions: Sequence[Companion]) -> None:
        lost = [companion for companion in companions if companion.original != "0"]
        if entry.original == "0" and lost:  # of a pair the kernel refuses a 0; writing the other side makes it
            host.write(lost[0].path, lost[0].original)
        else:
            super().restore(host, entry, ())


class SysctlFamily:
    name = "sysctl"

    def expand(self, host: Host, wish: Wish) -> list[Knob]:
        key = wish.knob.removeprefix("sysctl/")
        if not GLOB & set(key):
            return [Sysctl(key)] if host.exists(path(key)) else []
        folders = [""]
        *parents, last = path(key).removeprefix(f"{ROOT}/").split("/")
        for part in parents:
            folders = [f"{folder}/{name}" for folder in folders for name in _matching(host, f"{ROOT}{folder}", part)]
        files = [f"{folder}/{name}" for folder in folders for name in _matching(host, f"{ROOT}{folder}", last)]
        return [Sysctl(sysctl_name(file[1:])) for file in files]

    def find(self, host: Host, id: str) -> Knob | None:
        try:
            return Sysctl(sysctl_name(id.removeprefix("sysctl/")))
        except ValueError:
            return None

    def absent(self, host: Host, wish: Wish) -> str:
        return "this kernel has no such sysctl, or its module is not loaded"


def _matching(host: Host, folder: str, part: str) -> list[str]:
    if not GLOB & set(part):
        return [part] if host.exists(f"{folder}/{part}") else []
    return [name for name in host.list(folder) if fnmatchcase(name, part)]
