"""How many ranks a command starts, told from its words."""

from __future__ import annotations

import pytest

from torchtuned.run.launchers import recognise


@pytest.mark.parametrize(
    ("command", "ranks", "count"),
    [
        ("torchrun train.py", 1, ""),
        ("torchrun --nproc-per-node=4 train.py", 4, ""),
        ("torchrun --nproc_per_node 4 train.py --nproc-per-node=9", 4, ""),
        ("/opt/venv/bin/torchrun --standalone --nnodes=1 --nproc-per-node 2 train.py", 2, ""),
        ("torchrun --nproc-p=3 train.py", 3, ""),
        ("torchrun -r 3 -t3 --nproc-per-node=2 train.py", 2, ""),
        ("torchrun --nproc-per-node=gpu train.py", None, "gpu"),
        ("torchrun --nproc-per-node=auto train.py", None, "auto"),
        ("torchrun --nproc-per-node=cpu train.py", None, "cpu"),
        ("torchrun --rdzv-id --nproc-per-node=7 --nproc-per-node=2 train.py", 2, ""),
        ("torchrun --nproc-per-node=2 -m package.train", 2, ""),
        ("python -m torch.distributed.run --nproc-per-node=2 train.py", 2, ""),
        ("/usr/bin/python3.12 -u -X dev -m torch.distributed.launch --nproc_per_node=2 train.py", 2, ""),
        ("python3 -mtorch.distributed.run --nproc-per-node=2 train.py", 2, ""),
        ("python /opt/venv/bin/torchrun --nproc-per-node=2 train.py", 2, ""),
        ("accelerate launch --multi_gpu --num_processes 4 --num-machines=2 train.py --num_processes 9", 2, ""),
        ("accelerate-launch --multi_gpu --num-processes=3 train.py", 3, ""),
        ("accelerate launch --multi_gpu train.py", None, "gpu"),
        ("python -m accelerate.commands.launch --use_fsdp --num_processes=3 train.py", 3, ""),
        ("accelerate launch --cpu --num_processes 4 train.py", 1, ""),
        ("accelerate launch --num_processes 1 train.py", 1, ""),
        ("accelerate launch --num_processes 4 train.py", None, "gpus"),
        ("accelerate launch train.py", None, "gpus"),
    ],
)
def test_ranks(command: str, ranks: int | None, count: str) -> None:
    launcher = recognise(command.split(), {})
    assert launcher is not None
    assert launcher.ranks == ranks
    assert ranks is not None or launcher.count == count


@pytest.mark.parametrize(
    ("command", "gpus", "ranks"),
    [
        ("torchrun --nproc-per-node=gpu t.py", 4, 4),
        ("torchrun --nproc-per-node=auto t.py", 0, None),
        ("torchrun --nproc-per-node=cpu t.py", 4, None),
        ("accelerate launch t.py", 4, 4),
        ("accelerate launch --num_processes 2 t.py", 4, 2),
        ("accelerate launch --num_processes 2 t.py", 1, None),  # a single process, in accelerate's own words
        ("accelerate launch t.py", 1, None),
        ("accelerate launch --multi_gpu t.py", 1, 1),
    ],
)
def test_where_the_machine_decides(command: str, gpus: int, ranks: int | None) -> None:
    launcher = recognise(command.split(), {})
    assert launcher is not None
    assert launcher.with_gpus(gpus) == ranks


CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: {kind}
fsdp_config:
  num_processes: 77
num_machines: 1
num_processes: 4  # of this machine
use_cpu: {cpu}
"""


@pytest.mark.parametrize(
    ("kind", "cpu", "words", "ranks", "count"),
    [
        ("MULTI_GPU", "false", "", 4, "gpu"),
        ("'FSDP'", "false", "--num_processes 2", 2, "gpu"),
        ("'NO'", "false", "", 1, ""),
        ("'NO'", "false", "--multi_gpu", 4, "gpu"),
        ("MULTI_CPU", "true", "", 1, ""),
        ("MULTI_GPU", "false", "--cpu", 1, ""),
    ],
)
def test_accelerates_own_configuration(kind: str, cpu: str, words: str, ranks: int, count: str) -> None:
    text = CONFIG.format(kind=kind, cpu=cpu)
    for environ, option, path in (
        ({"HOME": "/home/ann"}, "", "/home/ann/.cache/huggingface/accelerate/default_config.yaml"),
        ({"HF_HOME": "/srv/hf", "HOME": "/home/ann"}, "", "/srv/hf/accelerate/default_config.yaml"),
        ({}, "--config_file=own.yaml", "own.yaml"),
    ):
        command = f"accelerate launch {option} {words} train.py".split()
        launcher = recognise(command, environ, lambda name, path=path: text if name == path else "")
        assert launcher is not None
        assert (launcher.ranks, launcher.count) == (ranks, count)


@pytest.mark.parametrize(
    "command",
    [
        "python train.py --nproc-per-node=4",
        "python -c pass torchrun",
        "python",
        "python -m",
        "accelerate config",
        "accelerate",
        "bash torchrun",
        "python -m http.server",
    ],
)
def test_no_launcher(command: str) -> None:
    assert recognise(command.split(), {}) is None


def test_no_command() -> None:
    assert recognise([], {}) is None


def test_variables_of_torchrun_count_and_options_win() -> None:
    environ = {"PET_NPROC_PER_NODE": "4"}
    assert recognise(["torchrun", "t.py"], environ).ranks == 4  # type: ignore[union-attr]
    assert recognise(["torchrun", "--nproc-per-node=2", "t.py"], environ).ranks == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("value", ["0", "-1", "1e3", "999999999999", "²", ""])
def test_counts_that_are_none(value: str) -> None:
    launcher = recognise(["torchrun", f"--nproc-per-node={value}", "t.py"], {})
    assert launcher is not None
    assert launcher.ranks is None


def test_who_binds_already() -> None:
    torchrun = recognise("torchrun --numa-binding=node --nproc-per-node=2 t.py".split(), {})
    accelerate = recognise("accelerate launch --enable_cpu_affinity --num_processes=2 t.py".split(), {})
    assert torchrun is not None
    assert accelerate is not None
    assert torchrun.binds == "torchrun --numa-binding=node"
    assert accelerate.binds == "accelerate --enable_cpu_affinity"


def test_the_door() -> None:
    direct = recognise("torchrun --nproc-per-node=2 --no-python ./prog --x".split(), {})
    inside = recognise("torchrun --nproc-per-node=2 --run-path /t.py".split(), {})
    assert direct is not None
    assert inside is not None
    assert (direct.door, direct.program_at) == (True, 3)
    assert (inside.door, inside.program_at) == (False, None)
