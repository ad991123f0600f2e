"""Which variables a job gets: decisions on plain dictionaries."""

from __future__ import annotations

from typing import Any

import pytest

from torchtuned.environment import Facts, decide, leftovers
from torchtuned.run.launchers import recognise

FORBIDDEN = (
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
FULL = Facts(tcmalloc="/usr/lib/libtcmalloc.so.4", thp="madvise", cache_dir="/home/u/.cache/torchinductor",
             rank_door="/usr/share/torchtuned/rank", rankshim="/usr/lib/rankshim.py")  # fmt: skip


def rank(number: int, cpus: str, threads: int, gpu: str | None = None) -> dict[str, Any]:
    return {"rank": number, "gpu": gpu, "cpus": cpus, "memory_nodes": "0", "omp_num_threads": threads, "reasons": []}


def grant(**changes: Any) -> dict[str, Any]:
    """A CPU job on four cores with two threads each."""
    document: dict[str, Any] = {
        "cpus": "0-7",
        "threads": 4,
        "cpu_max": None,
        "gpus": [],
        "gpus_chosen": False,
        "gpus_alike": True,
        "gpu_indexes": None,
        "gpu_uuids": None,
        "confinement": "affinity",
        "ranks": [rank(0, "0-7", 4)],
    }
    return {**document, **changes}


GPUS = {
    "gpus": ["0000:02:00.0", "0000:01:00.0"],
    "gpus_chosen": True,
    "gpu_indexes": [1, 0],
    "gpu_uuids": ["GPU-bb", "GPU-aa"],
    "ranks": [rank(0, "0-3", 2, "0000:02:00.0"), rank(1, "4-7", 2, "0000:01:00.0")],
}


def shown(environ: dict[str, str], document: dict[str, Any], **options: Any) -> dict[str, tuple[str, str | None]]:
    return {name: (d.action, d.value) for name, d in decide(environ, document, **options).items()}


def test_a_plain_job_gets_its_thread_count_and_nothing_else() -> None:
    assert shown({"PATH": "/bin"}, grant()) == {"OMP_NUM_THREADS": ("set", "4")}


def test_what_the_user_set_stays() -> None:
    assert shown({"OMP_NUM_THREADS": "3"}, grant()) == {"OMP_NUM_THREADS": ("kept", "3")}
    assert shown({"OMP_NUM_THREADS": ""}, grant()) == {"OMP_NUM_THREADS": ("kept", "")}


@pytest.mark.parametrize(
    ("value", "cpu_max", "warned"),
    [("8", None, False), ("9", None, True), ("6", 2, True), ("2", 2, False), ("12,4", None, True), ("x", None, False)],
)
def test_more_threads_than_cpus_is_kept_with_a_warning(value: str, cpu_max: int | None, warned: bool) -> None:  # noqa: FBT001
    decision = decide({"OMP_NUM_THREADS": value}, grant(cpu_max=cpu_max))["OMP_NUM_THREADS"]
    assert (decision.action, decision.value, bool(decision.warning)) == ("kept", value, warned)


def test_a_quota_is_named_as_the_reason() -> None:
    decision = decide({}, grant(cpu_max=2, threads=2, ranks=[rank(0, "0-63", 2)], cpus="0-63"))["OMP_NUM_THREADS"]
    assert (decision.value, "quota" in decision.reason) == ("2", True)


def test_ranks_get_the_smallest_ranks_threads() -> None:
    document = grant(ranks=[rank(0, "0-3", 2), rank(1, "4-7", 1)])
    assert shown({}, document)["OMP_NUM_THREADS"] == ("set", "1")


def test_gpus_that_the_tool_chose_are_named_in_the_order_of_the_ranks() -> None:
    assert shown({}, grant(**GPUS)) == {
        "OMP_NUM_THREADS": ("set", "2"),
        "CUDA_VISIBLE_DEVICES": ("set", "1,0"),
        "CUDA_DEVICE_ORDER": ("set", "PCI_BUS_ID"),
    }
    by_uuid = shown({}, grant(**GPUS), gpu_ids="uuid")
    assert by_uuid["CUDA_VISIBLE_DEVICES"] == ("set", "GPU-bb,GPU-aa")
    assert "CUDA_DEVICE_ORDER" not in by_uuid


def test_mig_is_always_named_by_uuid() -> None:
    document = grant(**{**GPUS, "gpu_indexes": None, "gpu_uuids": ["MIG-1", "MIG-2"]})
    assert shown({}, document)["CUDA_VISIBLE_DEVICES"] == ("set", "MIG-1,MIG-2")


def test_uuids_that_are_not_known_fall_back_to_indexes_and_say_so() -> None:
    decision = decide({}, grant(**{**GPUS, "gpu_uuids": None}), gpu_ids="uuid")["CUDA_VISIBLE_DEVICES"]
    assert (decision.value, bool(decision.warning)) == ("1,0", True)


def test_an_explicit_option_wins_over_the_variable_and_says_so() -> None:
    decision = decide({"CUDA_VISIBLE_DEVICES": "0,1,2"}, grant(**GPUS))["CUDA_VISIBLE_DEVICES"]
    assert (decision.action, decision.value) == ("set", "1,0")
    assert "0,1,2" in decision.warning


def test_gpus_that_the_user_named_stay() -> None:
    document = grant(**{**GPUS, "gpus_chosen": False})
    environ = {"CUDA_VISIBLE_DEVICES": "1,0"}
    assert shown(environ, document)["CUDA_VISIBLE_DEVICES"] == ("kept", "1,0")
    assert "CUDA_DEVICE_ORDER" not in shown(environ, document)


@pytest.mark.parametrize(("alike", "order"), [(True, ("set", "PCI_BUS_ID")), (False, None)])
def test_the_order_is_made_certain_only_among_equals(alike: bool, order: object) -> None:  # noqa: FBT001
    document = grant(**{**GPUS, "gpus_chosen": False, "gpus_alike": alike})
    assert shown({}, document).get("CUDA_DEVICE_ORDER") == order


def test_asked_for_no_gpus_none_are_seen() -> None:
    assert shown({}, grant(), no_gpus=True)["CUDA_VISIBLE_DEVICES"] == ("set", "")
    assert shown({"CUDA_VISIBLE_DEVICES": "1"}, grant(), no_gpus=True)["CUDA_VISIBLE_DEVICES"] == ("kept", "1")


def launched(command: str, environ: dict[str, str] | None = None, **changes: Any) -> dict[str, tuple[str, str | None]]:
    document = grant(ranks=[rank(0, "0-3", 2), rank(1, "4-7", 1)], **changes)
    return shown(environ or {}, document, launcher=recognise(command.split(), {}), facts=FULL)


def test_torchrun_gets_the_door_for_its_ranks() -> None:
    found = launched("torchrun --nproc-per-node=2 t.py")
    assert found["PYTHON_EXEC"] == ("set", "/usr/share/torchtuned/rank")
    assert found["TORCHTUNED_RANKS"] == ("set", "0-3/2/0;4-7/1/1")
    assert "TORCHTUNED_PYTHON_EXEC" not in found


def test_the_users_thread_count_and_interpreter_reach_the_ranks() -> None:
    environ = {"OMP_NUM_THREADS": "3", "PYTHON_EXEC": "/opt/python", "CUDA_VISIBLE_DEVICES": "6, 4"}
    found = launched("torchrun --nproc-per-node=2 t.py", environ)
    assert found["TORCHTUNED_RANKS"] == ("set", "0-3//6;4-7//4")
    assert found["TORCHTUNED_PYTHON_EXEC"] == ("set", "/opt/python")


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("torchrun --nproc-per-node=2 --numa-binding=node t.py", {}),
        ("torchrun --nproc-per-node=2 --run-path /t.py", {}),
        ("accelerate launch --enable_cpu_affinity --num_processes=2 t.py", {}),
        ("torchrun --nproc-per-node=2 t.py", {"confinement": "none"}),
    ],
)
def test_ranks_are_not_bound_twice_or_where_nothing_is_bound(command: str, changes: dict[str, Any]) -> None:
    found = launched(command, **changes)
    assert found["PYTHON_EXEC"] == ("skipped", None)
    assert "TORCHTUNED_RANKS" not in found


def test_a_table_that_exec_would_refuse_is_not_made() -> None:
    ranks = [rank(i, ",".join(map(str, range(0, 60, 2))), 1) for i in range(4096)]
    launcher = recognise("torchrun --nproc-per-node=4096 t.py".split(), {})
    assert shown({}, grant(ranks=ranks), launcher=launcher, facts=FULL)["PYTHON_EXEC"] == ("skipped", None)


def test_one_rank_needs_no_door() -> None:
    launcher = recognise(["torchrun", "t.py"], {})
    assert set(shown({}, grant(), launcher=launcher, facts=FULL)) == {"OMP_NUM_THREADS"}


def test_one_rank_per_cpu_gets_torchruns_one_thread() -> None:
    launcher = recognise("torchrun --nproc-per-node=cpu t.py".split(), {})
    assert shown({}, grant(), launcher=launcher)["OMP_NUM_THREADS"] == ("skipped", None)


def test_profiles() -> None:
    found = shown({}, grant(), env_profile=("cpu", "memory", "compile", "debug"), facts=FULL)
    assert found == {
        "OMP_NUM_THREADS": ("set", "4"),
        "THP_MEM_ALLOC_ENABLE": ("set", "1"),
        "LD_PRELOAD": ("set", "/usr/lib/libtcmalloc.so.4"),
        "PYTORCH_CUDA_ALLOC_CONF": ("set", "expandable_segments:True"),
        "TORCHINDUCTOR_COMPILE_THREADS": ("set", "4"),
        "TORCHINDUCTOR_CACHE_DIR": ("set", "/home/u/.cache/torchinductor"),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": ("set", "2000"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": ("set", "1"),
    }


def test_profiles_leave_what_is_set_or_cannot_work() -> None:
    environ = {"LD_PRELOAD": "/my.so", "PYTORCH_ALLOC_CONF": "x", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    found = shown(environ, grant(), env_profile=("cpu", "memory", "compile", "debug"), facts=Facts(thp="never"))
    assert found["LD_PRELOAD"] == ("kept", "/my.so")
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == ("skipped", None)
    assert found["THP_MEM_ALLOC_ENABLE"] == ("skipped", None)
    assert found["TORCHINDUCTOR_CACHE_DIR"] == ("skipped", None)
    assert found["TORCH_NCCL_DUMP_ON_TIMEOUT"] == ("kept", "0")
    assert decide({}, grant(), env_profile=("cpu",))["LD_PRELOAD"].warning


def test_the_harmful_ones_are_never_touched() -> None:
    for launcher in (None, recognise("torchrun --nproc-per-node=2 t.py".split(), {})):
        for document in (grant(), grant(**GPUS)):
            found = decide(
                {}, document, env_profile=("cpu", "memory", "compile", "debug"), launcher=launcher, facts=FULL
            )
            assert not set(FORBIDDEN) & set(found)
            assert [name for name in found if name.startswith("NCCL_")] == []


@pytest.mark.parametrize(
    ("environ", "warned"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, True),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, False),
        ({"NCCL_DEBUG": "trace"}, True),
        ({"NCCL_DEBUG": "INFO"}, False),
        ({"OMP_PROC_BIND": "close"}, True),
        ({"OMP_PROC_BIND": "false"}, False),
        ({"GOMP_CPU_AFFINITY": "0-3"}, True),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": ""}, False),
        ({}, False),
    ],
)
def test_leftovers_of_debugging(environ: dict[str, str], warned: bool) -> None:  # noqa: FBT001
    found = leftovers(environ)
    assert bool(found) is warned
    assert all(name in found[0] for name in environ if warned)
