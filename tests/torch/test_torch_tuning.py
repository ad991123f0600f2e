"""tune on the real torch: each case in a process of its own, as thread pools cannot be set twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchtuned.torch import Place, tune
from torchtuned.torch.tuning import MAX_GPU_THREADS, auto_threads

TOP = Path(__file__).resolve().parents[2]
PLACE = "Place(cpus=here().cpus, cores=3, ranks=1, gpu=False)"


def tuned(call: str, environment: dict[str, str] | None = None, *, before: str = "") -> dict[str, Any]:
    """What `tune(call)` changed and kept, and the settings afterwards, in a fresh process."""
    script = f"""
import json, torch
from torchtuned.torch import Place, here, tune
{before}
done = tune(place={PLACE}, {call})
print(json.dumps({{
    "changed": {{name: [change.before, change.after] for name, change in done.changed.items()}},
    "kept": done.kept,
    "threads": torch.get_num_threads(),
    "interop": torch.get_num_interop_threads(),
    "benchmark": torch.backends.cudnn.benchmark,
    "precision": torch.get_float32_matmul_precision(),
    "cuda": torch.cuda.is_initialized(),
}}))
"""
    clean = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    words = [sys.executable, "-W", "ignore", "-c", script]
    run = subprocess.run(
        words, cwd=TOP, env={**clean, **(environment or {})}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    assert not found["cuda"]
    return found


def test_threads_become_the_cores() -> None:
    found = tuned("interop_threads=None")
    assert found["threads"] == 3
    assert found["changed"]["threads"][1] == 3


def test_cores_for_the_loader_s_workers() -> None:
    assert tuned("loader_workers=2")["threads"] == 1
    assert tuned("loader_workers=9")["threads"] == 1


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_variables_of_the_user_stay(name: str) -> None:
    found = tuned("", {name: "1"})
    assert found["kept"]["threads"] == f"{name}=1"
    assert "threads" not in found["changed"]


def test_set_num_threads_of_the_user_stays() -> None:
    found = tuned("", before="torch.set_num_threads(5)")
    assert found["threads"] == 5
    assert found["kept"]["threads"].startswith("5, which is not")


def test_a_number_is_set_as_asked() -> None:
    found = tuned("threads=2, interop_threads=3", {"OMP_NUM_THREADS": "4"}, before="torch.set_num_threads(5)")
    assert (found["threads"], found["interop"]) == (2, 3)
    assert found["changed"] == {"threads": [5, 2], "interop_threads": [found["changed"]["interop_threads"][0], 3]}


def test_torchrun_s_own_default_is_not_the_user_s() -> None:
    run = {"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1"}
    if "OMP_NUM_THREADS" in os.environ:  # then our own process, the parent, was started with it: it is the user's
        assert tuned("", run)["kept"]["threads"] == "OMP_NUM_THREADS=1"
    else:
        assert tuned("", run)["threads"] == 3
    assert tuned("", {**run, "OMP_NUM_THREADS": "2"})["kept"]["threads"] == "OMP_NUM_THREADS=2"


def test_interop_threads_after_parallel_work_stay() -> None:
    found = tuned("interop_threads=7", before="torch.set_num_interop_threads(5)")
    assert found["interop"] == 5
    assert found["kept"]["interop_threads"].startswith("5: set before")


def test_nothing_asked_nothing_done() -> None:
    found = tuned("threads=None, interop_threads=None")
    assert (found["changed"], found["kept"]) == ({}, {})


def test_matmul_precision() -> None:
    found = tuned("matmul_precision='high'")
    assert found["changed"]["matmul_precision"] == ["highest", "high"]
    assert found["precision"] == "high"


def test_matmul_precision_of_the_user_stays() -> None:
    found = tuned("matmul_precision='high'", before="torch.set_float32_matmul_precision('medium')")
    assert found["precision"] == "medium"
    assert "matmul_precision" in found["kept"]
    found = tuned("matmul_precision='high'", {"NVIDIA_TF32_OVERRIDE": "0"})
    assert found["kept"]["matmul_precision"] == "NVIDIA_TF32_OVERRIDE=0"


BUILT = "torch.backends.cuda.is_built = lambda: True"  # a torch with cuDNN, as far as tune asks


def test_cudnn_benchmark() -> None:
    assert "no cuDNN" in tuned("cudnn_benchmark=True")["kept"]["cudnn_benchmark"]
    found = tuned("cudnn_benchmark=True", before=BUILT)
    assert found["changed"]["cudnn_benchmark"] == [False, True]
    assert found["benchmark"] is True
    found = tuned("cudnn_benchmark=False", before=f"{BUILT}\ntorch.backends.cudnn.benchmark = True")
    assert found["benchmark"] is False


@pytest.mark.parametrize(
    "wish", ["torch.backends.cudnn.deterministic = True", "torch.use_deterministic_algorithms(True)"]
)
def test_deterministic_programs_stay_so(wish: str) -> None:
    found = tuned("cudnn_benchmark=True", before=f"{BUILT}\n{wish}")
    assert found["benchmark"] is False
    assert "deterministic" in found["kept"]["cudnn_benchmark"]


def test_second_call_changes_nothing() -> None:
    found = tuned("", before=f"tune(place={PLACE})")
    assert found["changed"] == {}


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (6, 6), (64, MAX_GPU_THREADS)])
def test_threads_beside_a_gpu(cores: int, threads: int) -> None:
    assert auto_threads(Place(frozenset(range(cores)), cores, 1, gpu=True), gpu=True, loader_workers=4) == threads


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"interop_threads": -2}, {"threads": True}])
def test_wrong_numbers(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a number of threads, 1 or more"):
        tune(**wrong)  # type: ignore[arg-type]


def test_wrong_precision() -> None:
    with pytest.raises(ValueError, match="highest, high or medium"):
        tune(matmul_precision="low")  # type: ignore[arg-type]


def test_examples_run(tmp_path: Path) -> None:
    for name in ("slow_train.py", "fast_train.py"):
        words = [sys.executable, str(TOP / "examples" / name), "--epochs", "1", "--samples", "128"]
        # one thread: on a busy machine two of them wait for each other in every operation
        environ = {**os.environ, "PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1"}
        run = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert run.stdout.startswith("epoch 0: loss ")
