"""What will end the job and can be told before it starts: too few threads allowed, too little shared memory, a logout.

This runs before every job, so it reads a few files with plain calls and imports nothing that costs. `root` is a folder
that stands for the machine; "" is the machine itself.
"""

from __future__ import annotations

import os

from torchtuned import systemdconf, units
from torchtuned.cpuset import parse_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

SMALL_SHM = 64 << 20  # bytes; what a container gets that asks for nothing
# Threads of a process that trains, besides its pools: autograd's, the loader's, NCCL's or gloo's, CUDA's own
OWN_THREADS = 24
WORKER_THREADS = 2  # of a DataLoader worker, besides a pool of its BLAS
SPARE_NPROC = 8192  # further tasks that a user may have: with more room than that nobody counts them
PICTURE = 224  # pixels; the edge of the pictures that most vision models train on
_WORKERS = ("num-workers", "workers", "dataloader-num-workers", "n-workers", "nworkers", "j")
_BATCH = ("batch-size", "batchsize", "per-device-train-batch-size", "train-batch-size", "b")
_EDGE = ("image-size", "img-size", "imgsz", "crop-size", "train-crop-size", "resolution")
_PREFETCH = ("prefetch-factor",)
_PROGRAMS = ("python", "pypy", "torchrun", "accelerate", "deepspeed")
_LOGIND_BUS = "org.freedesktop.login1"
_LINGER = "/var/lib/systemd/linger"


def read(path: str) -> str:
    """A small file's text, "" where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(65536)
    except OSError:
        return ""


def listing(path: str) -> list[str]:
    """The names in a folder, sorted."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


# -- processes and threads --------------------------------------------------------------------------------------------


def tasks(grant: Mapping[str, Any], threads: int, told: Mapping[str, int], *, nproc: int, root: str = "") -> list[str]:
    """Warn when the processes and threads that the job will have are more than it may have.

    Counted in pids.max (TasksMax= of a unit) of every cgroup from the job's up, and in `nproc`, the soft limit on the
    user's tasks (-1 for none). Each rank has a pool of `threads`, another library's pool of one per CPU, and the
    DataLoader workers that its command line tells, each with a pool.
    """
    ranks = grant["ranks"]
    cpus = len(parse_list(ranks[0]["cpus"] if ranks else grant["cpus"]))
    each = OWN_THREADS + threads + cpus + told.get("workers", 0) * (WORKER_THREADS + threads)
    need = max(1, len(ranks)) * each
    about = f"about {need} processes and threads ({_ranks(len(ranks))}{threads} threads and {cpus} CPUs"
    about += f", {told['workers']} DataLoader workers)" if told.get("workers") else ")"
    return [f"{about} will not fit: {why}; fewer by --cpus or workers" for why in _pids(need, root)] + [
        f"{about} will not fit: {why}" for why in _nproc(need, nproc, root)
    ]


def _pids(need: int, root: str) -> list[str]:
    """The cgroup with the least room, when that is too little."""
    cgroups, base = units.cgroups(read(f"{root}/proc/self/cgroup")), f"{root}/sys/fs/cgroup"
    path = cgroups.get("", "")
    if "pids" in cgroups:
        path, base = cgroups["pids"], f"{base}/pids"
    least, found = need, ""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        folder = "/".join([base, *parts[:length]])
        most, used = read(f"{folder}/pids.max").strip(), read(f"{folder}/pids.current").strip()
        room = int(most) - int(used or 0) if most.isdecimal() and (used or "0").isdecimal() else need
        if room < least:
            name = parts[length - 1] if length else ""
            is_unit = name.endswith((".slice", ".service", ".scope"))
            way = f"systemctl set-property {name} TasksMax=infinity" if is_unit else "docker run --pids-limit=-1"
            least, found = room, f"{folder[len(root) :]}/pids.max is {most}, {used or 0} are in use ({way})"
    return [found] if found else []


def _nproc(need: int, nproc: int, root: str) -> list[str]:
    if nproc < 0 or nproc > need + SPARE_NPROC:
        return []
    used, me = 0, os.getuid()
    for name in listing(f"{root}/proc"):
        try:
            if name.isdecimal() and os.stat(f"{root}/proc/{name}").st_uid == me:
                used += len(os.listdir(f"{root}/proc/{name}/task"))
        except OSError:
            continue  # it ended meanwhile
    if need <= nproc - used:
        return []
    return [
        f"this user may have {nproc} (ulimit -u), {used} are in use"
        " (raise it by a line '* - nproc unlimited' in /etc/security/limits.d/torch.conf and log in again)"
    ]


def _ranks(count: int) -> str:
    return f"{count} ranks, each with " if count > 1 else ""


# -- shared memory ----------------------------------------------------------------------------------------------------


def told(command: Sequence[str]) -> dict[str, int]:
    """What a Python program's command line says of its DataLoader: workers, batch, edge (of pictures), prefetch."""
    found: dict[str, int] = {}
    program = command[0].rpartition("/")[2] if command else ""
    if not program.startswith(_PROGRAMS) and not program.endswith(".py"):
        return found  # make -j8
    for index, word in enumerate(command):
        name, equals, value = word.partition("=")
        if not (word.startswith("-") or equals):
            continue
        short = len(word) > 2 and word[:2] in ("-j", "-b") and word[2:].isdecimal()
        name, value = (word[1], word[2:]) if short else (name.lstrip("-").rpartition(".")[2], value)
        if not equals and not short:
            value = command[index + 1] if index + 1 < len(command) else ""
        name = name.replace("_", "-").lower()
        for key, names in (("workers", _WORKERS), ("batch", _BATCH), ("edge", _EDGE), ("prefetch", _PREFETCH)):
            if name in names and value.isascii() and value.isdecimal() and len(value) < 7:
                found[key] = int(value)
    return found


def shared_memory(ranks: int, told: Mapping[str, int], *, path: str = "/dev/shm") -> list[str]:
    """Warn when DataLoader workers would die of a bus error: the memory they share is small, full, or less than the
    batches that they hold at once, where the command line tells how many workers and how large a batch.
    """
    try:
        found = os.statvfs(path)
    except OSError:
        return [f"{path} is not there; DataLoader workers need it"]
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return [f"{path} has {text}" for text in short_of(size, free, ranks, told)]


def short_of(size: int, free: int, ranks: int, told: Mapping[str, int]) -> list[str]:
    """What is wrong with so many bytes of shared memory."""
    workers, batch, edge = told.get("workers"), told.get("batch"), told.get("edge", PICTURE)
    if workers == 0:
        return []
    has = f"{size >> 20} MiB" if free > SMALL_SHM or size <= SMALL_SHM else f"{free >> 20} of {size >> 20} MiB left"
    if workers and batch:
        prefetch = told.get("prefetch", 2)
        need = max(1, ranks) * workers * prefetch * batch * 3 * edge * edge * 4
        if need > free:
            has = f"{size >> 20} MiB" if free > 0.9 * size else f"{free >> 20} of {size >> 20} MiB left"
            return [
                f"{has}, and {_ranks(ranks)}{workers} DataLoader workers hold about {need >> 20} MiB"
                f" ({prefetch} batches of {batch} x 3 x {edge} x {edge} float32 each): they would die of a bus error;"
                f" {_way(need)}, or fewer workers"
            ]
    if size <= SMALL_SHM:
        return [f"{has}; DataLoader workers need more ({_way(8 << 30)})"]
    if free <= SMALL_SHM:
        return [f"{has}; DataLoader workers need more (see torch_* there)"]
    return []


def _way(need: int) -> str:
    gib = max(1, -(-need * 5 // 4 >> 30))
    gib += need * 5 // 4 > gib << 30
    return f"docker run --shm-size={gib}g, elsewhere mount -o remount,size={gib}g /dev/shm"


# -- logging out ------------------------------------------------------------------------------------------------------


def logout(uid: int, name: str, *, root: str = "") -> list[str]:
    """Warn when the end of the login session takes the job, or the memory that its workers share, with it.

    logind deletes the IPC objects of users from 1000 on who do not linger when their last session ends (RemoveIPC, on
    by default), and with KillUserProcesses ends what a session has started, lingering or not.
    """
    place = units.place(read(f"{root}/proc/self/cgroup"))
    if uid < 1000 or "/user.slice/user-" not in place:
        return []
    settings = _logind(root)
    notes = []
    if "/session-" in place and systemdconf.is_yes(settings.get("KillUserProcesses", "no")):
        notes.append(
            "the job ends when you log out (KillUserProcesses in logind.conf);"
            " start it as systemd-run --user --scope torchtuned-run ..., with loginctl enable-linger"
        )
    if systemdconf.is_yes(settings.get("RemoveIPC", "yes")) and not os.path.lexists(f"{root}{_LINGER}/{name}"):
        notes.append(
            "when your last session ends, logind deletes the shared memory of the job's DataLoader workers (RemoveIPC);"
            " torchtuned-run --linger, or loginctl enable-linger, keeps it"
        )
    return notes


def _logind(root: str) -> dict[str, str]:
    def text(path: str) -> str | None:
        return read(f"{root}{path}") if os.path.exists(f"{root}{path}") else None

    found = systemdconf.settings("logind.conf", read=text, names=lambda path: listing(f"{root}{path}"))
    return {key: value for key, (value, _) in found.items() if value}


def user_name(uid: int) -> str:
    """The name of a user, else the number. Asked only where it decides something: directories may be far away."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def linger(uid: int, *, wait_s: float = 60) -> list[str]:
    """Ask logind to keep the user's things when the last session ends (polkit may ask for a password). What was not
    to be had, as warnings.
    """
    name = user_name(uid)
    if uid < 1000 or os.path.lexists(f"{_LINGER}/{name}"):
        return []
    from torchtuned import errors
    from torchtuned.client import Client

    try:
        with Client(interactive=True) as bus:
            login, manager = "/org/freedesktop/login1", f"{_LOGIND_BUS}.Manager"
            bus.call(login, manager, "SetUserLinger", "ubb", uid, 1, 1, timeout_s=wait_s, service=_LOGIND_BUS)
    except errors.DaemonUnreachable:
        return ["--linger: systemd-logind does not answer; where none runs, a logout takes nothing away"]
    except errors.TorchtunedError as error:
        return [f"--linger: {error.what}; ask an administrator for loginctl enable-linger {name}"]
    return []
