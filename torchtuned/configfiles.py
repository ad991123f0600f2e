"""Finds and reads the configuration files: the profile with what it includes, torchtuned.conf, the drop-ins."""

from __future__ import annotations

import codecs
import os
import posixpath
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from torchtuned.config import DEFAULT_PROFILE, Config, load, policy_section
from torchtuned.config_keys import way_out
from torchtuned.errors import HostError, InvalidConfig, Missing, TorchtunedError
from torchtuned.host import Host

MAIN = "/etc/torchtuned/torchtuned.conf"
DROP_INS = ("/etc/torchtuned/conf.d", "/run/torchtuned/conf.d", "/usr/lib/torchtuned/conf.d")
PROFILES = ("/etc/torchtuned/profiles", "/usr/share/torchtuned/profiles")
CHOSEN = "/var/lib/torchtuned/profile"
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (lambda mode: True, "a device"),
)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A profile that can be chosen, and its file."""

    name: str
    description: str
    file: str


def read_config(host: Host, profile: str | None = None, *, chosen: str = CHOSEN) -> Config:
    """The configuration of a machine, by `profile`; for None by the one kept in the file `chosen`, and for "" or where
    none is kept by the files' own.

    InvalidConfig names every fault of every file: also what is no file or leads nowhere, which must not count as no
    configuration, and files that others than root could write to.
    """
    faults: list[str] = []
    files = _files(host, _configuration(host, faults), faults)
    source = "asked for"
    if profile is None:
        kept = _files(host, [chosen] if _present(host, chosen, faults) else [], faults, trust=False)
        profile, source = "".join(text for _, text in kept), f"SetProfile, kept in {chosen}"
    if not profile:
        found = [policy_section(*file).get("profile") for file in files]
        profile, source = [(DEFAULT_PROFILE, "default"), *filter(None, found)][-1]
    files = [*_profile_files(host, profile, source, faults), *files]
    return load(files, profile=profile, profile_source=source, faults=faults)


def profiles(host: Host) -> list[Profile]:
    """All profiles, by name. InvalidConfig for a file that cannot be used."""
    result = []
    for name, file in sorted(_profile_paths(host).items()):
        description = policy_section(file, _read(host, file)).get("description", ("", ""))[0]
        result.append(Profile(name=name, description=description, file=file))
    return result


def _profile_paths(host: Host) -> dict[str, str]:
    """The file of each profile; of one name the administrator's counts, /dev/null masks it."""
    found: dict[str, str] = {}
    for folder in PROFILES:
        for name in _names(host, folder):
            found.setdefault(name.removesuffix(".conf"), f"{folder}/{name}")
    return {name: path for name, path in found.items() if not _masked(host, path)}


def _configuration(host: Host, faults: list[str]) -> list[str]:
    """torchtuned.conf, then the drop-ins by name; of one name the first folder's counts, /dev/null masks it."""
    found: dict[str, str] = {}
    for folder in DROP_INS:
        try:
            for name in _names(host, folder):
                found.setdefault(name, f"{folder}/{name}")
        except TorchtunedError as error:
            faults.append(str(error))
    paths = [MAIN] if _present(host, MAIN, faults) else []
    return [path for path in (*paths, *(path for _, path in sorted(found.items()))) if not _masked(host, path)]


def _names(host: Host, folder: str) -> list[str]:
    """The names of the configuration files in a folder, none where there is no such folder. InvalidConfig, HostError
    where something else has its name: that is a mistake, not a wish for none.
    """
    for place in (posixpath.dirname(folder), folder):
        if not host.present(place):
            return []
        if not stat.S_ISDIR(_status(host, place).st_mode):
            raise InvalidConfig("not a folder", where=place)
    return [name for name in host.list(folder) if name.endswith(".conf")]


def _present(host: Host, path: str, faults: list[str]) -> bool:
    try:
        return host.present(path)
    except HostError as error:
        faults.append(str(error))
        return False


def _masked(host: Host, path: str) -> bool:
    try:
        return host.link(path) == "/dev/null"
    except Missing:
        return False


def _profile_files(
    host: Host, name: str, source: str, faults: list[str], seen: tuple[str, ...] = ()
) -> list[tuple[str, str]]:
    """The file of a profile, after those that it includes."""
    if name in seen:
        faults.append(f"{source}: profile {name!r} includes itself through {' and '.join(seen)}")
        return []
    try:
        known = _profile_paths(host)
    except TorchtunedError as error:
        faults.append(str(error))
        return []
    if not known:
        looked = f"{source}: there is no profile {name!r}, nor any other in {' or '.join(PROFILES)}"
        faults.append(f"{looked}: install the package torchtuned again")
        return []
    if name not in known:
        faults.append(f"{source}: unknown profile {name!r}; {way_out(name, known)}")
        return []
    found = []
    for path, text in _files(host, [known[name]], faults):
        included, where = policy_section(path, text).get("include", ("", ""))
        for other in included.split():
            found += _profile_files(host, other, where, faults, (*seen, name))
        found.append((path, text))
    return found


def _files(host: Host, paths: Iterable[str], faults: list[str], *, trust: bool = True) -> list[tuple[str, str]]:
    """These files with their texts, without those that cannot be used. `trust`: who may write to them counts."""
    found = []
    for path in paths:
        try:
            found.append((path, _read(host, path, trust=trust)))
        except TorchtunedError as error:
            faults.append(str(error))
    return found


def _read(host: Host, path: str, *, trust: bool = True) -> str:
    """The text of a plain file that only root can have written. InvalidConfig, HostError."""
    status = _status(host, path)
    if not stat.S_ISREG(status.st_mode):
        kind = next(word for test, word in KINDS if test(status.st_mode))
        raise InvalidConfig(f"{kind}, not a file", where=path)
    for place in (path, posixpath.dirname(path)) if trust else ():
        status = host.stat(place)
        mode, owner = stat.S_IMODE(status.st_mode), status.st_uid
        if mode & (stat.S_IWGRP | stat.S_IWOTH) or owner not in (0, os.geteuid()):
            raise InvalidConfig(
                f"not used: others than root can change it (mode {mode:04o}, owner {owner})",
                where=place,
                hint=f"chown root:root {place} && chmod go-w {place}",
            )
    data = host.read_bytes(path)
    if data.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        kind = "UTF-8" if data.startswith(codecs.BOM_UTF8) else "UTF-16"
        raise InvalidConfig(f"begins with a byte order mark ({kind}); save it as UTF-8 without one", where=f"{path}:1")
    return data.decode("utf-8", "replace").rstrip(" \t\r\n\0")


def _status(host: Host, path: str) -> os.stat_result:
    """What a name that is there leads to. InvalidConfig, HostError."""
    try:
        return host.stat(path)
    except Missing as missing:
        raise InvalidConfig(f"a link that leads nowhere: {missing.what}", where=path) from None
