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
        ("accelerate launch --num_processes 4 --num-machines=2 train.py --num_processes 9", 2, ""),
        ("accelerate-launch --multi_gpu --num-processes=3 train.py", 3, ""),
        ("python -m accelerate.commands.launch --num_processes=3 train.py", 3, ""),
        ("accelerate launch --cpu --num_processes 4 train.py", 1, ""),
        ("accelerate launch train.py", None, "gpu"),
    ],
)
def test_ranks(command: str, ranks: int | None, count: str) -> None:
    launcher = recognise(command.split(), {})
    assert launcher is not None
    assert launcher.ranks == ranks
    assert ranks is not None or launcher.count == count


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
