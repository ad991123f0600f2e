"""The drawn machine: every CPU once, never too wide, and letters that say who has what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Snapshot
from fakes import tree

from torchtuned import discover
from torchtuned.cli.machine_map import Line, Owner, draw
from torchtuned.cpuset import parse_list
from torchtuned.host import Host
from torchtuned.topology import Topology


def text(line: Line) -> str:
    return "".join(part for part, _ in line)


def cells(lines: list[Line]) -> str:
    """The signs of all CPUs: lines indented by four that hold no words."""
    drawn = [text(line) for line in lines]
    return "".join(
        line.replace(" ", "").replace("|", "")
        for line in drawn
        if line.startswith("    ") and "GPU" not in line and "cores" not in line
    )


def synthetic(folder: Path, *, packages: int, nodes: int, cores: int, smt: int) -> Topology:
    """A regular machine: `nodes` a package, `cores` a node, numbered as x86 does."""
    total = packages * nodes * cores
    siblings = [",".join(str(core + total * i) for i in range(smt)) for core in range(total)]
    blocks = [",".join(siblings[i : i + cores]) for i in range(0, total, cores)]
    sockets = [",".join(blocks[i : i + nodes]) for i in range(0, len(blocks), nodes)]
    files = tree.machine(cores=siblings, packages=sockets, nodes=dict(enumerate(blocks)), l3=blocks)
    return discover.topology(Host(tree.make_tree(folder, files)))


def test_every_cpu_of_a_real_machine_is_drawn_once(snapshot: Snapshot) -> None:
    found = discover.topology(Host(snapshot.root))
    lines = draw(found)
    assert len(cells(lines)) == len(found.online)
    assert max(len(text(line)) for line in lines) <= 80
    assert sum(" GPU " in text(line) for line in lines[1:]) == len(found.gpus)


@pytest.mark.parametrize(
    ("packages", "nodes", "cores", "smt"),
    [(1, 1, 4, 1), (1, 1, 8, 2), (2, 1, 16, 2), (2, 4, 16, 2), (4, 1, 64, 1), (1, 1, 64, 4), (1, 1, 32, 8)],
)
@pytest.mark.parametrize("width", [40, 80])
def test_4_to_256_cpus_fit(tmp_path: Path, packages: int, nodes: int, cores: int, smt: int, width: int) -> None:
    found = synthetic(tmp_path, packages=packages, nodes=nodes, cores=cores, smt=smt)
    lines = draw(found, [Owner(label="a job with " + "a long name " * 9, cpus=found.online)], width=width)
    assert cells(lines).count("A") == packages * nodes * cores * smt
    assert max(len(text(line)) for line in lines) <= width


def test_letters_say_who_has_what(tmp_path: Path) -> None:
    found = discover.topology(Host(tree.make_tree(tmp_path, tree.machine_a())))
    first = Owner(label="job 1", cpus=parse_list("0-1,16-17"), gpus=("0000:10:00.0",))
    second = Owner(label="job 2", cpus=parse_list("1-2,17-18"))
    lines = [text(line) for line in draw(found, [first, second])]
    assert "    AA ** BB .. .. .. .. .." in lines
    assert any(line.startswith("    A GPU 0000:10:00.0") for line in lines)
    assert any(line.startswith("    . GPU 0000:20:00.0") for line in lines)
    assert "A job 1, CPUs 0-1,16-17" in lines
    assert "B job 2, CPUs 1-2,17-18" in lines
    assert ". free   * shared by several jobs" in lines


def test_caches_are_parted_by_a_bar(tmp_path: Path) -> None:
    found = discover.topology(Host(tree.make_tree(tmp_path, tree.machine_d(gpus=0))))
    assert "    .. .. .. .. .. .. .. .. | .. .. .. .. .. .. .. .." in [text(line) for line in draw(found)]


def test_gpus_of_unknown_place_stand_apart(tmp_path: Path) -> None:
    found = discover.topology(Host(tree.make_tree(tmp_path, tree.machine_a(gpus=(-1, -1)))))
    lines = [text(line) for line in draw(found)]
    heading = lines.index("GPUs whose place the machine does not tell")
    assert lines[heading + 1].startswith("    . GPU 0000:10:00.0")


def test_memory_nodes_name_their_nearest(tmp_path: Path) -> None:
    files = tree.machine(
        cores=["0", "1"], nodes={0: "0", 1: "1", 2: ""}, distances={0: "10 21 28", 1: "21 10 17", 2: "28 17 10"}
    )
    found = discover.topology(Host(tree.make_tree(tmp_path, files)))
    assert "node 2: memory only, nearest is node 1" in [text(line) for line in draw(found)]


def test_cpus_that_are_out_of_bounds_are_marked(tmp_path: Path) -> None:
    files = tree.machine(cores=["0", "1", "2", "3"]) | {f"{tree.CPU}/isolated": "3\n"}
    found = discover.topology(Host(tree.make_tree(tmp_path, files)))
    barred = replace(found, allowed=parse_list("1-3"))
    assert "    - . . i" in [text(line) for line in draw(barred)]
    jobs = [Owner(label="job 1", cpus=parse_list("1"))]
    lines = [text(line) for line in draw(barred, jobs, reserved=parse_list("0-2"))]
    assert "    - A r i" in lines
    assert "r reserved ([jobs] reserved)" in lines[-1]


def test_with_nothing_free_the_last_line_is_a_job(tmp_path: Path) -> None:
    found = synthetic(tmp_path, packages=1, nodes=1, cores=4, smt=1)
    lines = [text(line) for line in draw(found, [Owner(label="job 1", cpus=found.online)])]
    assert lines[-1] == "A job 1, CPUs 0-3"


def test_more_jobs_than_letters(tmp_path: Path) -> None:
    found = synthetic(tmp_path, packages=1, nodes=1, cores=64, smt=1)
    owners = [Owner(label=f"job {cpu}", cpus=frozenset({cpu})) for cpu in range(60)]
    drawn = cells(draw(found, owners))
    assert drawn.count("#") == 60 - 50
    assert drawn.endswith("....")
