"""The limits of the job's own process, as the configuration wants them: open files, locked memory, core dumps, and how
readily the kernel's OOM killer takes it.

A limit that cannot be had is a line for the user, with the file or unit to edit, and never costs the job. An
unprivileged process can raise a soft limit up to the hard one and no further, and can only make itself a likelier
victim.
"""

from __future__ import annotations

import os
import resource

from torchtuned import units
from torchtuned.run.foresee import listing, read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SMALL_NOFILE = 4096  # a descriptor per shared tensor: DataLoader workers need thousands
OOM = "oom_score_adj"
DEFAULTS = {"nofile": "hard"}
_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "core": resource.RLIMIT_CORE}
_LIMITS_D = "/etc/security/limits.d"


def apply(wanted: Mapping[str, str], *, root: str = "") -> list[str]:
    """Set what `wanted` names: "hard" for as much as there may be, "infinity", a number, or "keep". Warnings.

    `root` is a folder that stands for the machine where it is looked up what to edit.
    """
    notes = []
    for name, word in {**DEFAULTS, **wanted}.items():
        if word == "keep":
            continue
        notes += _oom(word) if name == OOM else _limit(name, word, root)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < SMALL_NOFILE:
        way = where("nofile", "524288", root)
        notes.append(f"only {files} files can be open, which DataLoader workers use up soon; {way}")
    return notes


def _limit(name: str, word: str, root: str) -> list[str]:
    soft, hard = resource.getrlimit(_LIMITS[name])
    goal = {"hard": hard, "infinity": resource.RLIM_INFINITY}.get(word)
    if goal is None:
        goal = int(word)
    beyond = hard != resource.RLIM_INFINITY and (goal == resource.RLIM_INFINITY or goal > hard)
    if goal == soft and not beyond:
        return []
    try:
        resource.setrlimit(_LIMITS[name], (goal, goal if beyond else hard))
    except (OSError, ValueError, OverflowError) as error:
        if not beyond:
            return [f"the limit {name} stays at {soft}: {error}"]
    else:
        return []
    try:
        resource.setrlimit(_LIMITS[name], (hard, hard))
    except (OSError, ValueError) as error:
        return [f"the limit {name} stays at {soft}: {error}"]
    return [f"the limit {name} is {hard}, not {word} as the configuration wants; {where(name, word, root)}"]


def _oom(word: str) -> list[str]:
    """The kernel hands the value on to every process of the job."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            if file.read().strip() != word:
                file.write(word)
    except OSError as error:
        way = f"{unit_key(OOM)}={word} of its unit" if error.errno in (1, 13) else "is /proc mounted for reading only?"
        return [f"{OOM} is not set to {word}: {error.strerror} ({way})"]
    return []


def unit_key(name: str) -> str:
    """What systemd.exec(5) calls a limit."""
    return "OOMScoreAdjust" if name == OOM else f"Limit{name.upper()}"


def where(name: str, value: str, root: str = "") -> str:
    """What to edit for a higher hard limit: where pam_limits sets it, else the service, else a new file."""
    known = [f"{_LIMITS_D}/{file}" for file in listing(root + _LIMITS_D) if file.endswith(".conf")]
    for path in ["/etc/security/limits.conf", *known][::-1]:
        for line in read(root + path).splitlines():
            words = line.split()
            if len(words) > 3 and words[0][0] != "#" and words[1] in ("hard", "-") and words[2] == name:
                return f"raise it in {path} ({' '.join(words[:4])!r}) and log in again"
    if service := units.service(read(f"{root}/proc/self/cgroup")):
        return f"systemctl edit {service}: {unit_key(name)}={value} below [Service]; then restart it"
    text = "unlimited" if value == "infinity" else value
    return (
        f"raise it by a line '* hard {name} {text}' in {_LIMITS_D}/torch.conf and log in again"
        f" (docker run --ulimit {name}={'-1' if text == 'unlimited' else text})"
    )


def current() -> int:
    """Soft limit on the processes and threads of this user; RLIM_INFINITY for none, which is so for root too."""
    return resource.RLIM_INFINITY if os.geteuid() == 0 else resource.getrlimit(resource.RLIMIT_NPROC)[0]
