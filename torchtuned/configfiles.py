"""Finds and reads the configuration files: the profile with what it includes, torchtuned.conf, the drop-ins."""

from __future__ import annotations

import os
import posixpath
import re
import stat
from dataclasses import dataclass

from torchtuned.config import DEFAULT_PROFILE, Config, load, policy_section
from torchtuned.config_keys import nearest
from torchtuned.errors import HostError, InvalidConfig, Missing
from torchtuned.host import Host

MAIN = "/etc/torchtuned/torchtuned.conf"
DROP_INS = ("/etc/torchtuned/conf.d", "/run/torchtuned/conf.d", "/usr/lib/torchtuned/conf.d")
PROFILES = ("/etc/torchtuned/profiles", "/usr/share/torchtuned/profiles")
CHOSEN = "/var/lib/torchtuned/profile"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A profile that can be chosen, and its file."""

    name: str
    description: str
    file: str


def read_config(host: Host, profile: str | None = None, *, chosen: str = CHOSEN) -> Config:
    """The configuration of a machine, by `profile`; for None by the one kept in the file `chosen`, and for "" or where
    none is kept by the files' own.

    InvalidConfig names every fault of every file, also files that others than root could write to.
    """
    try:
        files = [(path, _read(host, path)) for path in _configuration(host)]
        source = "asked for"
        if profile is None and host.exists(chosen):
            profile, source = host.read(chosen) or None, f"SetProfile, kept in {chosen}"
        if not profile:
            found = [policy_section(*file).get("profile") for file in files]
            profile, source = [(DEFAULT_PROFILE, "default"), *filter(None, found)][-1]
        return load([*_profile_files(host, profile, source), *files], profile=profile, profile_source=source)
    except HostError as error:
        raise InvalidConfig(str(error)) from None


def profiles(host: Host) -> list[Profile]:
    """All profiles, by name. InvalidConfig for a file that cannot be used."""
    found: dict[str, str] = {}
    for folder in PROFILES:
        for name in host.list(folder):
            if name.endswith(".conf"):
                found.setdefault(name.removesuffix(".conf"), f"{folder}/{name}")
    result = []
    for name, file in sorted(found.items()):
        description = policy_section(file, _read(host, file)).get("description", ("", ""))[0]
        result.append(Profile(name=name, description=description, file=file))
    return result


def _configuration(host: Host) -> list[str]:
    """torchtuned.conf, then the drop-ins by name; of one name the first folder's counts, /dev/null masks it."""
    found: dict[str, str] = {}
    for folder in DROP_INS:
        for name in host.list(folder):
            if name.endswith(".conf"):
                found.setdefault(name, f"{folder}/{name}")
    paths = [MAIN] if host.exists(MAIN) else []
    return paths + [path for _, path in sorted(found.items()) if not _masked(host, path)]


def _masked(host: Host, path: str) -> bool:
    try:
        return host.link(path) == "/dev/null"
    except Missing:
        return False


def _profile_files(host: Host, name: str, source: str, seen: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """The file of a profile, after those that it includes."""
    if name in seen:
        raise InvalidConfig(f"profile {name!r} includes itself through {' and '.join(seen)}", where=source)
    names = [profile.name for profile in profiles(host)]
    if name not in names or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise InvalidConfig(
            f"unknown profile {name!r}; {nearest(name, names)}" if names else "no profiles", where=source
        )
    path = next(profile.file for profile in profiles(host) if profile.name == name)
    text = _read(host, path)
    included, where = policy_section(path, text).get("include", ("", ""))
    files = []
    for other in included.split():
        files += _profile_files(host, other, where, (*seen, name))
    return [*files, (path, text)]


def _read(host: Host, path: str) -> str:
    """The text of a file that only root can have written."""
    for place in (path, posixpath.dirname(path)):
        status = host.stat(place)
        mode, owner = stat.S_IMODE(status.st_mode), status.st_uid
        if mode & (stat.S_IWGRP | stat.S_IWOTH) or owner not in (0, os.geteuid()):
            raise InvalidConfig(
                f"not used: others than root can change it (mode {mode:04o}, owner {owner})",
                where=place,
                hint=f"chown root:root {place} && chmod go-w {place}",
            )
    return host.read(path)
