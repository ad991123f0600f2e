"""What this process may use: CPUs, cores, its part of them among this host's ranks, and a GPU or none.

Read from the kernel each time (affinity, cgroups, topology): a number that a launcher left in the environment may be
for another process. Nothing here imports torch, and nothing initialises CUDA.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Local ranks as the launchers name them: torchrun and accelerate, Open MPI, Intel MPI and MPICH, MVAPICH, Slurm
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "SLURM_NTASKS_PER_NODE",
)


@dataclass(frozen=True)
class Place:
    """The part of the machine that is this process'.

    cpus   logical CPUs it may run on (its affinity mask)
    cores  whole physical cores that are its own to use, at least 1: those of `cpus`, no more than the CPU quota of its
           cgroups, divided by the ranks that share them
    ranks  processes of this job that share `cpus`, at least 1; 1 where each rank has CPUs of its own
    gpu    whether there is a CUDA or ROCm device that this process may see
    """

    cpus: frozenset[int]
    cores: int
    ranks: int
    gpu: bool


def here(environ: Mapping[str, str] | None = None, root: str | os.PathLike[str] = "/") -> Place:
    """The place of the calling process now. `root` is where /proc, /sys and /dev are read.

    Never raises for what the kernel does not tell: no topology means one core per CPU, no cgroup no quota.
    """
    environ = os.environ if environ is None else environ
    base = Path(root)
    cpus = frozenset(os.sched_getaffinity(0))
    ranks = 1 if _own_cpus(base, cpus) else _local_ranks(environ)
    cores = count_cores(cpus, base)
    quota = cpu_quota(base)
    if quota is not None:
        cores = min(cores, int(quota))
    return Place(cpus, max(1, cores // ranks), ranks, _has_gpu(base, environ))


def count_cores(cpus: Iterable[int], root: Path = Path("/")) -> int:
    """Physical cores that the CPUs belong to."""
    return len({_core(root, cpu) for cpu in cpus})


def cpu_quota(root: Path) -> float | None:
    """CPUs' worth of time per second that the cgroups of this process allow: the smallest limit on the way up, or None.

    cgroup v2 `cpu.max` ("max 100000", "150000 100000"), v1 `cpu.cfs_quota_us` (-1: none). Source: the kernel's
    Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst.
    """
    limits = [limit for folder in _cgroups(root) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _limit(folder: Path) -> float | None:
    new = _read(folder / "cpu.max").split()
    if len(new) == 2 and new[0].isdigit() and int(new[1]) > 0:
        return int(new[0]) / int(new[1])
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) > 0 else None


def _cgroups(root: Path) -> Iterator[Path]:
    """The folders of this process' cgroups, from its own up to the root of each hierarchy that may limit CPU time."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            base = root / "sys/fs/cgroup"
        elif "cpu" in controllers.split(","):
            base = root / "sys/fs/cgroup" / controllers
        else:
            continue
        folder = base / path.lstrip("/")
        while True:
            yield folder
            if folder == base:
                break
            folder = folder.parent


def _own_cpus(root: Path, cpus: frozenset[int]) -> bool:
    """Whether this process is bound more narrowly than what started it: its CPUs are then its own, not all ranks'."""
    status = _read(root / "proc" / str(os.getppid()) / "status")
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.MULTILINE)
    return match is not None and cpus < parse_cpus(match[1])


def parse_cpus(text: str) -> frozenset[int]:
    """The CPUs of a kernel CPU list, "0-3,8". Raises ValueError."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _local_ranks(environ: Mapping[str, str]) -> int:
    for name in _LOCAL_SIZES:
        value = environ.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    return 1


def _core(root: Path, cpu: int) -> str:
    """Something that all hardware threads of a core share, and nobody else."""
    siblings = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return siblings or str(cpu)


def _has_gpu(root: Path, environ: Mapping[str, str]) -> bool:
    """By device files, as asking CUDA would initialise it. An empty list of visible devices means none."""
    nvidia = any(re.fullmatch(r"nvidia\d+|dxg", name) for name in _names(root / "dev"))  # dxg: a GPU under WSL
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if nvidia and (visible is None or _first_visible(visible)):
        return True
    visible = environ.get("HIP_VISIBLE_DEVICES", environ.get("ROCR_VISIBLE_DEVICES"))
    return (root / "dev/kfd").exists() and (visible is None or _first_visible(visible))


def _first_visible(value: str) -> bool:
    """CUDA reads the list up to the first entry that names no device: "-1" and "" hide all."""
    first = value.split(",")[0].strip()
    return bool(first) and not first.startswith("-")


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(path: Path) -> str:
    """A file's text, "" where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
