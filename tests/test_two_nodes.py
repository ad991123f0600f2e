"""One training over two nodes: network namespaces on one machine, each with torchtuned-run and torchrun of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_rankshim import BIN, CPUS
from test_run import RUN, _no_daemon

__all__ = ["_no_daemon"]  # a fixture for every test here

NODES = ("10.77.0.1", "10.77.0.2")
RANK = """
import json, os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(total)
os.write(1, b"\\n%s\\n" % json.dumps({"rank": dist.get_rank(), "local": os.environ["LOCAL_RANK"],
    "cpus": sorted(os.sched_getaffinity(0)), "total": total.item()}).encode())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def spaces() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them."""
    if os.getuid() != 0 or not shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin"):
        pytest.skip("network namespaces take root and iproute2")
    names = [f"torchtuned-{os.getpid()}-{end}" for end in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["/sbin/ip", *words], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, NODES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["/sbin/ip", "netns", "del", name], check=False)


@pytest.mark.skipif(len(CPUS) < 2, reason="two nodes can only be told apart on two CPUs")
def test_four_ranks_on_two_nodes(spaces: list[str], tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    nodes = []
    for number, name in enumerate(spaces):
        torchrun = [
            *(str(BIN / "torchrun"), "--nnodes=2", "--nproc-per-node=2", f"--node-rank={number}"),
            *(f"--master-addr={NODES[0]}", "--master-port=29400", str(script)),
        ]
        words = ["/sbin/ip", "netns", "exec", name, *RUN, "--quiet", f"--cpus={len(CPUS) // 2}", *torchrun]
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "cable"}
        nodes.append(subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    places = []
    for node in nodes:
        out, err = node.communicate(timeout=240)
        assert node.returncode == 0, err
        ranks = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert sorted(rank["local"] for rank in ranks) == ["0", "1"]
        assert [rank["total"] for rank in ranks] == [10.0, 10.0]
        places.append({cpu for rank in ranks for cpu in rank["cpus"]})
    assert places[0]
    assert places[1]
    assert not places[0] & places[1], "the nodes' jobs have CPUs of their own"
