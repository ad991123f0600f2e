"""What torchtuned-run does to its own process besides the CPUs, and the facts it looks up for environment variables.

Nothing here may cost the job: what the kernel or a container refuses becomes a line for the user.
"""

from __future__ import annotations

import os

from torchtuned.cpuset import parse_list
from torchtuned.environment import Facts
from torchtuned.run import foresee, rlimits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from torchtuned.environment import Decision

# set_mempolicy(2): its number by machine, since libc has no function for it
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "ppc64le": 261, "riscv64": 237, "s390x": 270, "loongarch64": 237}
_MODES = {"preferred": 5, "bind": 2, "interleave": 3}  # preferred: MPOL_PREFERRED_MANY, Linux 5.15
_MPOL_PREFERRED = 1


def prospects(
    command: Sequence[str], grant: Mapping[str, Any], decisions: Mapping[str, Decision], *, lingers: bool = False
) -> list[str]:
    """What the job will run into, as far as that can be told before it starts. Warnings."""
    threads = decisions["OMP_NUM_THREADS"].value or ""
    first = threads.partition(",")[0].strip()
    count = int(first) if first.isascii() and first.isdecimal() and len(first) < 6 else grant["threads"]
    loader = foresee.told(command)
    notes = foresee.tasks(grant, count, loader, nproc=rlimits.current())
    notes += foresee.shared_memory(len(grant["ranks"]), loader)
    uid = os.getuid()
    if uid >= 1000 and not lingers:
        notes += foresee.logout(uid, foresee.user_name(uid))
    return notes


def memory(how: str, nodes: str) -> list[str]:
    """Set this process's memory policy, which exec keeps; "local" is what the kernel does anyway. Warnings."""
    if how == "local":
        return []
    if not nodes:
        return [f"--memory={how}: the job has no memory nodes of its own; nothing is set"]
    import ctypes

    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        return [f"--memory={how}: not known on {os.uname().machine}; nothing is set"]
    wanted = parse_list(nodes)
    bits = 64 * (max(wanted) // 64 + 1)
    words = (ctypes.c_uint64 * (bits // 64))()
    for node in wanted:
        words[node // 64] |= 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    mode = _MPOL_PREFERRED if how == "preferred" and len(wanted) == 1 else _MODES[how]
    if libc.syscall(ctypes.c_long(number), ctypes.c_long(mode), words, ctypes.c_ulong(bits + 1)) == 0:
        return []
    return [f"--memory={how}: {os.strerror(ctypes.get_errno()).lower()}; memory comes from wherever the kernel likes"]


def facts(profiles: Sequence[str], environ: Mapping[str, str]) -> Facts:
    """What decide() needs to know for these profiles, and the door for ranks."""
    door, shim = _rank_door()
    found = Facts(rank_door=door, rankshim=shim)
    if "cpu" in profiles:
        found.thp = _thp()
        if not environ.get("LD_PRELOAD"):
            found.tcmalloc = _tcmalloc()
    if "compile" in profiles:
        cache = environ.get("XDG_CACHE_HOME") or (f"{environ['HOME']}/.cache" if environ.get("HOME") else "")
        found.cache_dir = f"{cache}/torchinductor" if cache.startswith("/") else ""
    return found


def _rank_door() -> tuple[str, str]:
    """share/torchtuned/rank and the code it runs: of a source tree, else the installed one."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for share in (os.path.join(os.path.dirname(package), "share"), "/usr/share"):
        door = os.path.join(share, "torchtuned/rank")
        if os.access(door, os.X_OK):
            return door, os.path.join(package, "rankshim.py")
    return "", ""


def _thp() -> str:
    from torchtuned.host import Host

    return Host().text("/sys/kernel/mm/transparent_hugepage/enabled").partition("[")[2].partition("]")[0]


def _tcmalloc() -> str:
    """A tcmalloc that the loader's cache knows and that a program really starts with: a name that does not load makes
    every program of the job say so.
    """
    import subprocess

    try:
        cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, timeout=5, check=False).stdout
        for line in cache.splitlines():
            name, _, path = line.strip().partition(" ")
            path = path.rpartition("=> ")[2]
            if name.startswith(("libtcmalloc_minimal.so.", "libtcmalloc.so.")) and path.startswith("/"):
                proof = subprocess.run(
                    ["/bin/cat", "/proc/self/maps"],
                    env={"LD_PRELOAD": path},
                    capture_output=True,
                    text=True,
                    timeout=5,
                    check=False,
                )
                if proof.returncode == 0 and not proof.stderr and os.path.realpath(path) in proof.stdout:
                    return path
    except (OSError, subprocess.SubprocessError):
        pass
    return ""
