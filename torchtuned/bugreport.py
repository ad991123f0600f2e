"""A machine as a bundle of files that `--sysroot` replays: what our own code read of it, and nothing else.

The bundle is made by running the commands on a Host that writes down what it is asked. So whatever they decided can be
decided again from it, and no list of interesting files can be out of date. What is private is taken out on the way in:
names of users and of the host, addresses, environments, identifiers of disks, processes' names. Serial numbers are
read by nothing here.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
import struct
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field

from torchtuned.errors import HostError
from torchtuned.host import SPACE, Host, Space

VARIABLES = re.compile(
    r"(CUDA_|OMP_|KMP_|GOMP_|MKL_|NCCL_|GLOO_|PYTORCH_|TORCH|LD_LIBRARY_PATH$|LOCAL_RANK$|RANK$|MASTER_ADDR$)"
)
KERNEL = re.compile(r"NVRM|Key was rejected|clocksource|tsc:|Out of memory|oom-kill", re.IGNORECASE)
APT = re.compile(r"Unattended-Upgrade|APT::Periodic|^\s*[{}]|^\s*\"?(lib)?(nvidia|cuda)", re.IGNORECASE)
PROGRAMS = re.compile(
    r"python|torchrun|accelerate|nvidia|nv-fabric|dcgm|torchtuned|systemd|docker|containerd|bash|sshd"
)
TEMPORARY = re.compile(r"torchinductor_|triton|nvidia-mps")
IPV4 = re.compile(r"(?<![\d.])(?!127\.)\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
IPV6 = re.compile(r"(?<![\w:])(?:[0-9a-f]{1,4}:){4,7}[0-9a-f]{1,4}(?![\w:])", re.IGNORECASE)
MAC = re.compile(r"(?<![\w:])(?:[0-9a-f]{2}:){5}[0-9a-f]{2}(?![\w:])", re.IGNORECASE)
UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.IGNORECASE)
SHORT = 2  # letters: a name as short as that is in too many words


@dataclass
class Privacy:
    """What is replaced: the host's name and users' names, as words, in text and in paths outside of /sys."""

    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, host: Host) -> Privacy:
        """The names of a machine: its own, in full and in short, and those of its people (user ids from 1000 on)."""
        found: dict[str, str] = {}
        for path in ("/proc/sys/kernel/hostname", "/etc/hostname"):
            name = host.text(path)
            for part in (name, name.partition(".")[0]):
                if part not in ("localhost", ""):
                    found[part] = "host"
            if domain := name.partition(".")[2]:
                found[domain] = "example"
        lines = host.text("/etc/passwd").splitlines()
        people = [fields[0] for line in lines if len(fields := line.split(":")) > 2 and _person(fields[2])]
        for name in (os.environ.get("USER", ""), os.environ.get("SUDO_USER", "")) if host.real else ():
            if name not in ("", "root") and name not in people:
                people.append(name)
        found |= {name: f"user{number}" for number, name in enumerate(people, 1)}
        return cls(found)

    def words(self, text: str) -> str:
        """The text with names, addresses and UUIDs replaced."""
        for name, other in sorted(self.names.items(), key=lambda pair: -len(pair[0])):
            if len(name) > SHORT:
                text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", other, text)
        for pattern, other in ((IPV4, "192.0.2.1"), (MAC, "02:00:00:00:00:00"), (IPV6, "2001:db8::1"), (UUID, "uuid")):
            text = pattern.sub(other, text)
        return text

    def path(self, path: str) -> str:
        """A path with names replaced; /sys has none."""
        return path if path.startswith("/sys/") else self.words(path)

    def content(self, path: str, data: bytes) -> bytes:
        """A file as it goes into the bundle."""
        if path.startswith("/sys/"):
            return _sysfs(path, data)
        text = data.decode("utf-8", "replace")
        if path.endswith("/environ"):
            text = "\0".join(_variable(entry) for entry in text.split("\0") if VARIABLES.match(entry.partition("=")[0]))
        elif path == "/etc/passwd":
            kept = (fields for line in text.splitlines() if len(fields := line.split(":")) > 2 and _person(fields[2]))
            text = "".join(f"{fields[0]}:x:{fields[2]}:{fields[2]}::/:\n" for fields in kept)
        elif path == "/etc/hosts":
            text = "".join(f"{line}\n" for line in text.splitlines() if re.match(r"\s*(127\.|::1)", line))
        elif path.startswith("/etc/apt/"):
            text = "".join(f"{line}\n" for line in text.splitlines() if APT.search(line))
        elif path == "/proc/cmdline":
            text = re.sub(r"\b(root|resume|cryptdevice|rd\.luks\S*?)=\S+", r"\1=removed", text)
        elif path.endswith("/mountinfo") or path == "/proc/mounts":
            text = re.sub(r"( - \S+ )(?!/dev/)[^\s:]+:\S*", r"\1server:/export", text)
            text = re.sub(r" //\S+", " //server/export", text)
        elif path.endswith("/comm") and not PROGRAMS.search(text):
            text = "program\n"
        elif path.endswith("/stat") and path.startswith("/proc/"):
            text = re.sub(r"\((.*)\)", lambda m: m[0] if PROGRAMS.search(m[1]) else "(program)", text)
        elif path.endswith("/maps"):
            text = re.sub(r"(?m)\s+/(?!dev/shm/(torch_|nccl-)).*$", " /removed", text)
        return self.words(text).encode()


def _person(uid: str) -> bool:
    return uid.isdecimal() and 1000 <= int(uid) < 60000


def _variable(entry: str) -> str:
    name, _, value = entry.partition("=")
    if "ADDR" in name and value not in ("localhost", "127.0.0.1", "::1"):
        value = "other.example"
    return f"{name}={value}"


def _sysfs(path: str, data: bytes) -> bytes:
    if path.endswith("/dm/uuid"):
        return data.partition(b"-")[0] + b"-removed\n"
    if path.endswith("/config"):
        return _capabilities(data)
    return data


def _capabilities(data: bytes) -> bytes:
    """A PCI configuration space with nothing but the headers of its extended capabilities and the registers of ACS:
    among the others is a serial number."""
    kept = bytearray(len(data))
    offset = 0x100
    while 0x100 <= offset <= len(data) - 8:
        (header,) = struct.unpack_from("<I", data, offset)
        length = 8 if header & 0xFFFF == 0x000D else 4
        kept[offset : offset + length] = data[offset : offset + length]
        if header >> 20 <= offset:
            break
        offset = header >> 20
    return bytes(kept)


class Recorder(Host):
    """A machine that writes down what it is asked, made private. `unreadable` are the files kept from us."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        super().__init__(root)
        self.privacy = Privacy.of(Host(root))
        self.files: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self.folders: set[str] = set()
        self.spaces: dict[str, Space] = {}
        self.unreadable: set[str] = set()

    def read_bytes(self, path: str) -> bytes:
        try:
            data = super().read_bytes(path)
        except HostError as error:
            if error.errno in (1, 13):
                self.unreadable.add(self.privacy.path(path))
            raise
        kept = self.privacy.content(path, data)
        self.files[self.privacy.path(path)] = kept
        return kept if path.endswith("/comm") else data  # findings name processes, and are in the bundle too

    def exists(self, path: str) -> bool:
        found = super().exists(path)
        if found:
            place = self.privacy.path(path)
            if os.path.isdir(self._prefix + path):
                self.folders.add(place)
            else:
                self.files.setdefault(place, b"")
        return found

    def list(self, path: str) -> list[str]:
        names = super().list(path)
        if names:
            self.folders.add(self.privacy.path(path))
        for name in names:
            if path != "/tmp" or TEMPORARY.match(name):
                self.files.setdefault(self.privacy.path(f"{path}/{name}"), b"")
        return names

    def link(self, path: str) -> str:
        target = super().link(path)
        if "/fd/" not in path or target.startswith("/dev/nvidia"):
            self.links[self.privacy.path(path)] = self.privacy.path(target)
        return target

    def space(self, path: str) -> Space:
        found = super().space(path)
        self.spaces[self.privacy.path(path)] = found
        return found

    def add(self, path: str, text: str) -> None:
        """Put a document beside what was read."""
        self.files[path] = self.privacy.words(text).encode()

    def write_bundle(self, file: io.BufferedIOBase, *, top: str) -> int:
        """Write a gzipped tar of one folder; returns how many files are in it."""
        if self.spaces:
            lines = (f"{path} {' '.join(map(str, astuple(space)))}\n" for path, space in sorted(self.spaces.items()))
            self.files[SPACE] = "".join(lines).encode()
        if self.unreadable:
            self.files["/.torchtuned/unreadable"] = "".join(f"{path}\n" for path in sorted(self.unreadable)).encode()
        members = self._members()
        with tarfile.open(fileobj=file, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
            for path in sorted(members):
                content = members[path]
                info = tarfile.TarInfo(f"{top}{path}")
                info.mode = 0o644
                if content is None:
                    info.type, info.mode = tarfile.DIRTYPE, 0o755
                elif isinstance(content, str):
                    info.type, info.linkname = tarfile.SYMTYPE, _relative(path, content)
                else:
                    info.size = len(content)
                tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
        return sum(isinstance(content, bytes) for content in members.values())

    def _members(self) -> dict[str, bytes | str | None]:
        """What is where, with every path led through the links, as the kernel would: a file lies where its folder
        really is. None is a folder, a text a link."""
        found: dict[str, bytes | str | None] = {}
        for path, target in self.links.items():
            found[self._resolve(path, last=False)] = target
        for path, data in self.files.items():
            place = self._resolve(path)
            if data or place not in found:  # what was only listed gives way to what was read
                found[place] = data
        for path in self.folders:
            found[self._resolve(path)] = None
        for path in list(found):
            for folder in _above(path):
                found[folder] = None  # a name that was only listed before
        return found

    def _resolve(self, path: str, *, last: bool = True) -> str:
        for _ in range(40):
            for part in [*reversed(list(_above(path))), *([path] if last else [])]:
                target = self.links.get(part)
                if target is not None and (not target.startswith("/dev/null")):
                    path = posixpath.normpath(posixpath.join(posixpath.dirname(part), target) + path[len(part) :])
                    break
            else:
                return path
        return path


def _above(path: str) -> Iterable[str]:
    """The folders above a path, nearest first, without the root."""
    path = posixpath.dirname(path)
    while path not in ("/", ""):
        yield path
        path = posixpath.dirname(path)


def _relative(path: str, target: str) -> str:
    """A link that stays in the bundle; /dev/null says that a unit is masked, by these very letters."""
    if not target.startswith("/") or target == "/dev/null":
        return target
    return posixpath.relpath(target, posixpath.dirname(path))
