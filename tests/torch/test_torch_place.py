"""Where a process finds itself: CPUs, cores, quota, ranks, GPU, from folders that stand for the kernel's files."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtuned.torch import here
from torchtuned.torch.place import Place, count_cores, cpu_quota, parse_cpus

TOP = Path(__file__).resolve().parents[2]
CPUS = sorted(os.sched_getaffinity(0))


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def parent(cpus: str) -> dict[str, str]:
    return {f"proc/{os.getppid()}/status": f"Name:\tx\nCpus_allowed_list:\t{cpus}\n"}


@pytest.mark.parametrize(("text", "expected"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0,2-2", {0, 2})])
def test_cpu_lists(text: str, expected: set[int]) -> None:
    assert parse_cpus(text) == expected


def test_nothing_known_is_one_core_per_cpu(tmp_path: Path) -> None:
    assert here({}, tmp_path) == Place(frozenset(CPUS), len(CPUS), 1, gpu=False)


def test_hardware_threads_are_no_cores(tmp_path: Path) -> None:
    pairs = {
        f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n - n % 2}-{n - n % 2 + 1}\n"
        for n in range(8)
    }
    assert count_cores(range(8), tree(tmp_path, pairs)) == 4


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "50000 25000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/job\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/../outside\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1.0),
        ({}, None),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "nonsense\n"}, None),
        ({"proc/self/cgroup": "nonsense\n"}, None),
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    assert cpu_quota(tree(tmp_path, files)) == expected


def test_quota_limits_cores_but_never_below_one(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}
    assert here({}, tree(tmp_path, files)).cores == 1


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "2"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_WORLD_SIZE": "two"}, 1),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_NTASKS_PER_NODE": "8"}, 2),
    ],
)
def test_ranks_share_what_was_not_dealt_out(tmp_path: Path, environ: dict[str, str], ranks: int) -> None:
    tree(tmp_path, parent(",".join(map(str, CPUS))))
    place = here(environ, tmp_path)
    assert (place.ranks, place.cores) == (ranks, max(1, len(CPUS) // ranks))


def test_a_rank_that_was_bound_has_its_cpus_alone(tmp_path: Path) -> None:
    tree(tmp_path, parent(f"0-{max(CPUS) + 8}"))
    assert here({"LOCAL_WORLD_SIZE": "2"}, tmp_path) == Place(frozenset(CPUS), len(CPUS), 1, gpu=False)


def test_a_rank_bound_for_real() -> None:
    script = "from torchtuned.torch import here; p = here(); print(len(p.cpus), p.cores, p.ranks)"
    bound = (
        "import os, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {script!r}], preexec_fn=lambda: os.sched_setaffinity(0, {{{CPUS[0]}}}))"
    )
    environ = {**os.environ, "LOCAL_WORLD_SIZE": "2"}
    run = subprocess.run(
        [sys.executable, "-c", bound], cwd=TOP, env=environ, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["1", "1", "2" if len(CPUS) == 1 else "1"]


@pytest.mark.parametrize(
    ("device", "environ", "gpu"),
    [
        ("dev/nvidia0", {}, True),
        ("dev/nvidia0", {"CUDA_VISIBLE_DEVICES": "0"}, True),
        ("dev/nvidia0", {"CUDA_VISIBLE_DEVICES": ""}, False),
        ("dev/nvidia0", {"CUDA_VISIBLE_DEVICES": "-1"}, False),
        ("dev/nvidia0", {"CUDA_VISIBLE_DEVICES": "-1,0"}, False),
        ("dev/nvidiactl", {}, False),
        ("dev/dxg", {}, True),
        ("dev/kfd", {}, True),
        ("dev/kfd", {"HIP_VISIBLE_DEVICES": ""}, False),
        ("dev/null", {}, False),
    ],
)
def test_gpu_by_device_files(tmp_path: Path, device: str, environ: dict[str, str], gpu: bool) -> None:  # noqa: FBT001
    assert here(environ, tree(tmp_path, {device: ""})).gpu is gpu


def test_python_3_10_can_read_it() -> None:
    for path in [TOP / "torchtuned/__init__.py", *(TOP / "torchtuned/torch").glob("*.py")]:
        ast.parse(path.read_text(), feature_version=(3, 10))


def test_importing_it_imports_no_torch() -> None:
    script = "import sys, torchtuned.torch as t; t.here(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=TOP, check=True)
