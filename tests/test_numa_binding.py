"""T06: torchtuned-run around torchrun --numa-binding: one binding, torchrun's own, inside of the job's CPUs.

torchrun looks for its GPUs before it binds, so without GPUs the one function that maps a GPU to CPUs is replaced; the
rest is the real torchrun, its numactl in front of each rank, and real masks.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_rankshim import BIN, CPUS, SEEN
from test_run import RUN, _no_daemon

__all__ = ["_no_daemon"]  # a fixture for every test here

TORCHRUN = f"""#!{BIN}/python
import torch.numa.binding as binding
from torch.distributed.run import main
binding._get_logical_cpus_to_bind_to = lambda *, gpu_index, numa_options: {{CPUS[gpu_index]}}
main()
"""

pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="two ranks can only be told apart on two CPUs")


def launch(tmp_path: Path, *before: str, cpus: list[int]) -> list[dict[str, Any]]:
    pytest.importorskip("torch.numa.binding", reason="torch before 2.9 binds nothing")
    assert shutil.which("numactl"), "apt install numactl"
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(TORCHRUN.replace("CPUS", repr(cpus)))
    torchrun.chmod(0o755)
    (tmp_path / "script.py").write_text(SEEN)
    words = [*before, *RUN, str(torchrun), "--standalone", "--nproc-per-node=2", "--numa-binding=node", "script.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda rank: str(rank["rank"]))


def test_torchruns_binding_is_the_only_one(tmp_path: Path) -> None:
    """Rank 0 on the last CPU and rank 1 on the first, which is not how torchtuned would have dealt them."""
    ranks = launch(tmp_path, cpus=[CPUS[-1], CPUS[0]])
    assert [rank["cpus"] for rank in ranks] == [[CPUS[-1]], [CPUS[0]]]
    assert [rank["ours"] for rank in ranks] == [[], []], "no door of ours in between"
    assert [rank["launcher"] for rank in ranks] == [CPUS, CPUS]


def test_a_mask_from_before_is_never_left(tmp_path: Path) -> None:
    ranks = launch(tmp_path, "taskset", "-c", str(CPUS[0]), cpus=[CPUS[0], CPUS[0]])
    assert [rank["cpus"] for rank in ranks] == [[CPUS[0]], [CPUS[0]]]
    assert [rank["launcher"] for rank in ranks] == [[CPUS[0]], [CPUS[0]]]
