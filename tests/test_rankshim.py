"""Each rank is bound before its interpreter starts: the parts, and real torchrun with real ranks on gloo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_run import MINE, RUN, _no_daemon

from torchtuned.cpuset import format_list, parse_list
from torchtuned.rankshim import interpreter, parse_cpus, parse_table, which_rank

__all__ = ["_no_daemon"]  # a fixture for every test here

TOP = Path(__file__).resolve().parent.parent
DOOR = TOP / "share/torchtuned/rank"
BIN = Path(sys.executable).parent
CPUS = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(CPUS) < 2, reason="two ranks can only be told apart on two CPUs")

SEEN = """
import json, os, sys
os.write(1, b"\\n%s\\n" % json.dumps({"rank": os.environ.get("LOCAL_RANK"), "cpus": sorted(os.sched_getaffinity(0)),
    "launcher": sorted(os.sched_getaffinity(os.getppid())), "omp": os.environ.get("OMP_NUM_THREADS"),
    "python": sys.executable, "words": sys.argv[1:],
    "ours": sorted(n for n in os.environ if n.startswith("TORCHTUNED") or n == "PYTHON_EXEC")}).encode())
"""
TRAIN = """
import json, os, sys, threading
start = sorted(os.sched_getaffinity(0))
import torch, torch.distributed as dist
from torch.utils.data import DataLoader

class Masks(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i): return torch.tensor(sorted(os.sched_getaffinity(0)) + [-1] * 64)[:64]

if __name__ == "__main__":
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    model = torch.nn.Linear(64, 64)
    for _ in range(3):
        model(torch.randn(256, 64)).sum().backward()
    masks = {}
    for how in ("fork", "spawn"):
        loader = DataLoader(Masks(), num_workers=1, multiprocessing_context=how)
        masks[how] = sorted({int(c) for batch in loader for c in batch.flatten() if c >= 0})
    threads = [sorted(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")]
    os.write(1, b"\\n%s\\n" % json.dumps({"rank": dist.get_rank(), "start": start, "threads": threads, "workers": masks,
        "omp": torch.get_num_threads(), "total": total.item(),
        "launcher": sorted(os.sched_getaffinity(os.getppid()))}).encode())
    dist.destroy_process_group()
"""


def test_the_table() -> None:
    assert parse_table("0-1,8/4/0;2//GPU-x") == [({0, 1, 8}, "4", "0"), ({2}, "", "GPU-x")]
    assert parse_cpus("0") == {0}
    for text in ("", "0-1", "0/x/0", "a/1/0", "0/1/0;"):
        with pytest.raises(ValueError):  # noqa: PT011
            parse_table(text)


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({"LOCAL_RANK": "1"}, 1),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"}, 1),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "6"}, 1),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "4"}, 0),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "9"}, 0),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_which_rank(environ: dict[str, str], rank: int) -> None:
    assert which_rank(environ, ["4", "6"]) == rank


def test_the_interpreter_is_the_launchers_own() -> None:
    """A child asks for its parent's interpreter: this one, with its virtual environment, by path and by PATH."""
    code = "import os; from torchtuned.rankshim import interpreter; print(interpreter(dict(os.environ)))"
    environ = {**os.environ, "PYTHONPATH": str(TOP), "PATH": f"{BIN}:{os.environ['PATH']}"}
    for name in (sys.executable, "python"):
        launcher = f"import subprocess, sys; subprocess.run([{sys.executable!r}, '-c', {code!r}])"
        words = [name, "-c", launcher]
        found = subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout.strip()
        assert found == str(BIN / Path(name).name)
    assert interpreter({"TORCHTUNED_PYTHON_EXEC": "/opt/x"}) == "/opt/x"


def door(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """What torchrun does: start the door, in an environment of a rank."""
    base = {name: value for name, value in os.environ.items() if name not in ("LC_ALL", "LANG", "LC_CTYPE")}
    extra = {"TORCHTUNED_RANKSHIM": str(TOP / "torchtuned/rankshim.py"), "PYTHON_EXEC": str(DOOR), **environ}
    return subprocess.run([str(DOOR), *words], env={**base, **extra}, capture_output=True, text=True, timeout=60)


def seen(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_the_door_binds_and_leaves_no_trace() -> None:
    rows = f"{CPUS[-1]}/3/0"
    found = seen(door("-u", "-c", SEEN, "--x", "a b", TORCHTUNED_RANKS=rows, LOCAL_RANK="0", OMP_NUM_THREADS="1"))
    assert found["cpus"] == [CPUS[-1]]
    assert (found["omp"], found["ours"], found["words"]) == ("3", [], ["--x", "a b"])
    assert found["python"] == sys.executable
    assert "LC_CTYPE" not in door("env", TORCHTUNED_RANKS=rows, LOCAL_RANK="0").stdout


def test_the_door_hands_on_default_signals() -> None:
    ignored = door("grep", "SigIgn", "/proc/self/status", TORCHTUNED_RANKS=f"{CPUS[0]}/1/0", LOCAL_RANK="0").stdout
    assert int(ignored.split()[1], 16) & (1 << 12) == 0, "SIGPIPE is not ignored"


def test_the_users_thread_count_and_interpreter_stay() -> None:
    environ = {"TORCHTUNED_RANKS": f"{CPUS[0]}//0", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "5"}
    found = seen(door("-c", SEEN, **environ, TORCHTUNED_PYTHON_EXEC="/usr/bin/python3"))
    assert (found["omp"], found["python"], found["ours"]) == ("5", "/usr/bin/python3", ["PYTHON_EXEC"])


@needs_two
@pytest.mark.parametrize(
    ("rows", "rank", "says"),
    [
        (f"{CPUS[0]}/1/0", "1", ""),  # more ranks than were announced
        ("60000/1/0", "0", "none of the CPUs of rank 0 is left"),
        ("nonsense", "0", "rank 0 is not bound"),
        (f"{CPUS[0]}/1/0", "x", "rank x is not bound"),
    ],
)
def test_what_is_wrong_keeps_no_rank_from_starting(rows: str, rank: str, says: str) -> None:
    done = door("-c", SEEN, TORCHTUNED_RANKS=rows, LOCAL_RANK=rank)
    assert seen(done)["cpus"] == CPUS
    assert says in done.stderr


@needs_two
def test_a_rank_that_somebody_has_bound_is_left_alone() -> None:
    """As torchrun --numa-binding does it, by a numactl in between."""
    environ = {**os.environ, "TORCHTUNED_RANKSHIM": str(TOP / "torchtuned/rankshim.py"), "LOCAL_RANK": "0"}
    environ["TORCHTUNED_RANKS"] = f"{CPUS[0]}/1/0"
    words = ["taskset", "-c", str(CPUS[1]), str(DOOR), "-c", SEEN]
    assert seen(subprocess.run(words, env=environ, capture_output=True, text=True))["cpus"] == [CPUS[1]]


def test_what_cannot_be_started_is_said() -> None:
    rows = {"TORCHTUNED_RANKS": f"{CPUS[0]}/1/0", "LOCAL_RANK": "0"}
    assert door("no-such-program", **rows).returncode == 127
    assert door("-c", "pass", TORCHTUNED_PYTHON_EXEC="/etc/passwd", **rows).returncode == 126


def launch(tmp_path: Path, script: str, *words: str, options: tuple[str, ...] = (), **environ: str) -> list[Any]:
    """Run a script under torchtuned-run and a launcher; the JSON lines that the ranks printed, by rank."""
    (tmp_path / "script.py").write_text(script)
    command = [*RUN, *options, *words]
    done = subprocess.run(
        command, env={**os.environ, **environ}, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: (str(line["rank"]), line["cpus"] if "cpus" in line else ""))


def trained(ranks: list[Any]) -> None:
    """Each rank had one mask from its first statement on, in every thread and every worker, and all took part."""
    count = len(ranks)
    assert [rank["total"] for rank in ranks] == [count * (count + 1) / 2] * count
    masks = [rank["start"] for rank in ranks]
    assert sorted({cpu for mask in masks for cpu in mask}) == CPUS
    most = -(-count // len(CPUS))
    assert max(sum(cpu in mask for mask in masks) for cpu in CPUS) == most, "no CPU has more ranks than it must"
    for rank, mask in zip(ranks, masks, strict=True):
        assert mask
        assert rank["threads"] == [mask] * len(rank["threads"]), "bound before the first thread"
        assert rank["workers"] == {"fork": mask, "spawn": mask}
        assert rank["omp"] == len(mask)
        assert rank["launcher"] == CPUS, "the launcher itself has the whole job's"


@needs_two
@pytest.mark.parametrize("count", [2, 4])
def test_torchrun_trains_on_ranks_with_cpus_of_their_own(tmp_path: Path, count: int) -> None:
    torchrun = str(BIN / "torchrun")
    trained(launch(tmp_path, TRAIN, torchrun, "--standalone", f"--nproc-per-node={count}", "script.py"))


ACCELERATE = shutil.which("accelerate", path=os.environ.get("TORCHTUNED_ACCELERATE", str(BIN)))
if ACCELERATE is not None and len(CPUS) > 1:  # it is not among the tests' requirements

    @pytest.mark.parametrize("count", [2, 4])
    def test_accelerate_trains_on_ranks_with_cpus_of_their_own(tmp_path: Path, count: int) -> None:
        words = [str(ACCELERATE), "launch", "--multi_gpu", f"--num_processes={count}", "script.py"]
        trained(launch(tmp_path, TRAIN, *words))


@needs_two
@pytest.mark.parametrize(
    "words",
    [
        [str(BIN / "python"), "-m", "torch.distributed.run", "--nproc-per-node=2", "--virtual-local-rank", "script.py"],
        [str(BIN / "torchrun"), "--nproc-per-node=2", "--no-python", str(BIN / "python"), "script.py"],
    ],
)
def test_other_ways_to_start_ranks(tmp_path: Path, words: list[str]) -> None:
    found = launch(tmp_path, SEEN, *words, "a")
    assert sorted(len(rank["cpus"]) for rank in found) == [len(CPUS) // 2, (len(CPUS) + 1) // 2]
    assert sorted(cpu for rank in found for cpu in rank["cpus"]) == CPUS
    assert [(rank["python"], rank["words"], rank["ours"]) for rank in found] == [(str(BIN / "python"), ["a"], [])] * 2


@needs_two
def test_a_job_on_one_cpu_keeps_its_ranks_there(tmp_path: Path) -> None:
    """The mask was narrower before (Slurm, taskset): ranks share what there is, and never leave it."""
    words = ["--nproc-per-node=2", "script.py"]
    (tmp_path / "script.py").write_text(SEEN)
    command = ["taskset", "-c", str(CPUS[-1]), *RUN, str(BIN / "torchrun"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [rank["cpus"] for rank in found] == [[CPUS[-1]]] * 2


def test_a_binding_of_torchruns_own_is_left_to_it() -> None:
    words = ["--explain", "--json", "torchrun", "--numa-binding=node", "--nproc-per-node=2", "t.py"]
    answer = json.loads(subprocess.run([*RUN, *words], capture_output=True, text=True, check=True).stdout)
    assert answer["environment"]["PYTHON_EXEC"]["action"] == "skipped"
    assert "--numa-binding=node" in answer["environment"]["PYTHON_EXEC"]["reason"]
    assert answer["cpus"] == MINE == format_list(parse_list(MINE))
