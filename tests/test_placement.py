"""Shares on small machines. O1 to O40 are cases that peers' own code answered, with the numbers it gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.tree import (
    CPU,
    gpu_addresses,
    machine,
    machine_a,
    machine_b,
    machine_c,
    machine_d,
    machine_e,
    machine_f,
    make_tree,
    on_nodes,
    pairs,
)

from torchtuned import discover
from torchtuned.cpuset import format_list, parse_list
from torchtuned.errors import Busy, InvalidRequest, NoSuchGpu, Unplaceable
from torchtuned.host import Host
from torchtuned.placement import place
from torchtuned.placement.grants import Grant, Request, Rules
from torchtuned.topology import GpuFacts, Topology

Files = Mapping[str, str | bytes | None]


def read(folder: Path, files: Files) -> Topology:
    return discover.topology(Host(make_tree(folder, files)))


def all_gpus(found: Topology, **wishes: Any) -> Request:
    affinity = wishes.pop("affinity", None)
    return Request(
        gpus=tuple(gpu.address for gpu in found.gpus),
        affinity=None if affinity is None else parse_list(affinity),
        **wishes,
    )


def by_rank(grant: Grant) -> list[str]:
    return [format_list(rank.cpus) for rank in grant.ranks]


def held(cpus: str, *gpus: str) -> Grant:
    return Grant(cpus=parse_list(cpus), gpus=gpus)


A_EXCLUSIVE = ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]
A_NODE = ["0-7,16-23", "0-7,16-23", "8-15,24-31", "8-15,24-31"]
B_SOCKET = ["0-63,128-191"] * 4 + ["64-127,192-255"] * 4
B_NODE = [
    cpus for cpus in ("48-63,176-191", "16-31,144-159", "112-127,240-255", "80-95,208-223") for _ in range(2)
]  # fmt: skip
B_EXCLUSIVE = [
    "48-55,176-183", "56-63,184-191", "16-23,144-151", "24-31,152-159",
    "112-119,240-247", "120-127,248-255", "80-87,208-215", "88-95,216-223",
]  # fmt: skip
B_COMPLEX = [
    "48-51,176-179", "52-55,180-183", "16-19,144-147", "20-23,148-151",
    "112-115,240-243", "116-119,244-247", "80-83,208-211", "84-87,212-215",
]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "policy", "affinity", "ranks"),
    [
        pytest.param(machine_a(), "node", None, A_NODE, id="O1"),
        pytest.param(machine_a(), "exclusive", None, A_EXCLUSIVE, id="O2-O25"),
        pytest.param(machine_b(), "socket", None, B_SOCKET, id="O3-socket"),
        pytest.param(machine_b(), "node", None, B_NODE, id="O3-node"),
        pytest.param(machine_b(), "exclusive", None, B_EXCLUSIVE, id="O4"),
        pytest.param(machine_b(), "core-complex", None, B_COMPLEX, id="O5"),
        pytest.param(
            machine_c(), "exclusive", None, [f"{c}-{c + 11},{c + 96}-{c + 107}" for c in range(0, 96, 12)], id="O6"
        ),
        pytest.param(machine_f(), "exclusive", None, ["0-3", "4-6", "7-9"], id="O7"),
        pytest.param(machine_d(), "exclusive", None, ["0-5,16-21", "6-10,22-26", "11-15,27-31"], id="O9-exclusive"),
        pytest.param(machine_d(), "core-complex", None, ["0-7,16-23", "8-15,24-31", "0-7,16-23"], id="O9-core-complex"),
        pytest.param(
            machine_a(gpus=(0, 0, 0, 1)),
            "exclusive",
            None,
            ["0-2,16-18", "3-5,19-21", "6-7,22-23", "8-15,24-31"],
            id="O27-O38",
        ),
        pytest.param(
            machine_a(gpus=(0, 0), online="0-2,4-18,20-31"), "node", None, ["0-2,4-7,16-18,20-23"] * 2, id="O40-node"
        ),
        pytest.param(
            machine_a(gpus=(0, 0), online="0-2,4-18,20-31"),
            "exclusive",
            None,
            ["0-2,4,16-18,20", "5-7,21-23"],
            id="O40-exclusive",
        ),
    ],
)
def test_torch_s_numbers(tmp_path: Path, files: Files, policy: str, affinity: str | None, ranks: list[str]) -> None:
    found = read(tmp_path, files)
    grant = place(found, [], all_gpus(found, policy=policy, affinity=affinity))
    assert by_rank(grant) == ranks
    assert [rank.gpu for rank in grant.ranks] == [gpu.address for gpu in found.gpus]
    assert not grant.shared


def test_o9_sharing_a_core_complex_is_reported(tmp_path: Path) -> None:
    found = read(tmp_path, machine_d())
    grant = place(found, [], all_gpus(found, policy="core-complex"))
    assert grant.warnings == ("there are fewer core complexes than GPUs, so some ranks share CPUs 0-7,16-23",)
    assert [rank.omp_num_threads for rank in grant.ranks] == [4, 8, 4]


@pytest.mark.parametrize("policy", ["exclusive", "node", "socket", "core-complex"])
def test_o8_two_jobs_get_two_places(tmp_path: Path, policy: str) -> None:
    found = read(tmp_path, machine_a())
    first = place(found, [], Request(cuda_visible_devices="0", policy=policy))
    second = place(found, [first], Request(cuda_visible_devices="1", policy=policy))
    assert not first.cpus & second.cpus
    assert not first.shared
    assert not second.shared
    if policy == "exclusive":
        assert (format_list(first.cpus), format_list(second.cpus)) == ("0-3,16-19", "4-7,20-23")


@pytest.mark.parametrize(
    ("policy", "ranks"),
    [
        ("exclusive", ["0-1", "2-3", "4-5", "6-7"]),
        ("node", ["0-7", "0-7", "4-5", "6-7"]),
        ("socket", ["0-7", "0-7", "4-5", "6-7"]),
        ("core-complex", ["0-7", "0-7", "4-5", "6-7"]),
    ],
)
def test_o12_an_affinity_without_the_other_node(tmp_path: Path, policy: str, ranks: list[str]) -> None:
    """torch raises for all of these; here every rank has CPUs that are allowed, and one warning says why those."""
    found = read(tmp_path, machine_a())
    grant = place(found, [], all_gpus(found, policy=policy, affinity="0-7"))
    assert by_rank(grant) == ranks
    strays = [warning for warning in grant.warnings if "leave no core near GPU 0000:30:00.0, 0000:40:00.0" in warning]
    assert len(strays) == 1
    if policy == "exclusive":
        assert list(grant.warnings) == strays


@pytest.mark.parametrize(("policy", "ranks"), [("exclusive", ["48-50", "51-53"]), ("core-complex", ["48-51", "52-53"])])
def test_o13_parts_of_cores_and_of_an_l3(tmp_path: Path, policy: str, ranks: list[str]) -> None:
    found = read(tmp_path, machine_b())
    pair = tuple(gpu.address for gpu in found.gpus[:2])
    grant = place(found, [], Request(gpus=pair, policy=policy, affinity=parse_list("48-53")))
    assert by_rank(grant) == ranks
    partial = ("the affinity leaves only a part of some core complexes",)
    assert grant.warnings == (partial if policy == "core-complex" else ())


SNC4 = {0: "0-7", 7: "8-15", 3: "16-23", 21: "24-31", 4: "32-39", 60: "40-47", 9: "48-55", 2: "56-63", 33: "", 34: ""}


def snc4(*gpus: int) -> Files:
    """Two sockets of four nodes with ids in no order, four threads a core, and memory on CXL next to node 9."""
    ids = sorted(SNC4)
    rows = {i: " ".join("10" if i == j else "14" if {i, j} == {33, 9} else "20" for j in ids) for i in ids}
    cores = [f"{first}-{first + 3}" for first in range(0, 64, 4)]
    return machine(cores=cores, packages=["0-31", "32-63"], nodes=SNC4, distances=rows, gpus=on_nodes(*gpus))


def test_a_lost_node_costs_only_its_own_gpus(tmp_path: Path) -> None:
    """The others keep the cores near them, and what is near none goes to those that have lost theirs."""
    found = read(tmp_path / "whole", snc4(60, 33, 2))
    assert by_rank(place(found, [], all_gpus(found))) == ["40-47", "48-55", "56-63"]
    limits = {f"{CPU}/isolated": "40-47\n", f"{CPU}/online": "0-55,57-63\n"}
    found = read(tmp_path / "less", snc4(60, 33, 2) | limits)
    grant = place(found, [], all_gpus(found))
    assert by_rank(grant) == ["0-7,16-23", "48-55", "57-63"]
    (warning,) = grant.warnings
    assert "leave no core near GPU 0000:10:00.0: a fair part of the 10 cores that are near no other GPU" in warning


@pytest.mark.parametrize(
    ("nodes", "gpus", "ranks"),
    [
        ({0: "0-5", 1: "2-7"}, (0, 1), ["0-3", "4-7"]),
        ({0: "0-7", 1: "4-7"}, (0, 1), ["0-3", "4-7"]),
        ({0: "0-7", 1: "0-5"}, (0, 1), ["4-7", "0-3"]),
        ({0: "0-7", 1: "2-7"}, (0, 1, 1, 1), ["0-1", "2-3", "4-5", "6-7"]),
    ],
)
def test_nodes_that_overlap_share_what_they_have_in_common(
    tmp_path: Path, nodes: dict[int, str], gpus: tuple[int, ...], ranks: list[str]
) -> None:
    found = read(tmp_path, machine(cores=[str(cpu) for cpu in range(8)], nodes=nodes, gpus=on_nodes(*gpus)))
    assert by_rank(place(found, [], all_gpus(found))) == ranks


def test_o15_possible_nodes_that_are_not_there(tmp_path: Path) -> None:
    found = read(tmp_path, {**machine_a(), "sys/devices/system/node/possible": "0-3\n"})
    assert by_rank(place(found, [], all_gpus(found, policy="socket"))) == A_NODE


@pytest.mark.parametrize("policy", ["socket", "node", "exclusive"])
def test_o17_nodes_of_gpu_memory(tmp_path: Path, policy: str) -> None:
    """A Grace Hopper: 72 cores on node 0, and eight nodes without CPUs."""
    nodes = {0: "0-71"} | dict.fromkeys(range(1, 9), "")
    found = read(tmp_path, machine(cores=[str(c) for c in range(72)], nodes=nodes, gpus=on_nodes(0)))
    grant = place(found, [], all_gpus(found, policy=policy))
    assert by_rank(grant) == ["0-71"]
    assert grant.memory_nodes == {0}
    assert grant.ranks[0].omp_num_threads == 8


def test_o19_threads_are_the_rank_s_own(tmp_path: Path) -> None:
    found = read(tmp_path, machine(cores=pairs(0, 56, 56), nodes={0: "0-27,56-83", 1: "28-55,84-111"}))
    assert place(found, [], Request()).ranks[0].omp_num_threads == 56
    grant = place(found, [], Request(ranks=4))
    assert by_rank(grant) == [f"{c}-{c + 13},{c + 56}-{c + 69}" for c in range(0, 56, 14)]
    assert [rank.omp_num_threads for rank in grant.ranks] == [14] * 4
    assert [format_list(rank.memory_nodes) for rank in grant.ranks] == ["0", "0", "1", "1"]


def test_o21_adjacent_siblings_are_one_core(tmp_path: Path) -> None:
    """Eight cores with two threads, numbered 0-1, 2-3, …: a peer takes CPUs 0-7 for eight cores and gets four."""
    found = read(tmp_path, machine(cores=[f"{c},{c + 1}" for c in range(0, 16, 2)]))
    grant = place(found, [], Request(cpus="8"))
    assert {0, 2, 4, 6, 8, 10, 12, 14} < grant.cpus
    assert grant.threads == grant.ranks[0].omp_num_threads == 8
    assert format_list(place(found, [], Request(cpus="4")).cpus) == "0-7"


@pytest.mark.parametrize(
    ("files", "affinity", "count", "ranks"),
    [
        (machine_a(gpus=()), None, 4, A_EXCLUSIVE),
        (machine(cores=[str(c) for c in range(10)]), None, 3, ["0-3", "4-6", "7-9"]),  # hwloc gives the last the rest
        (
            machine(cores=[f"{c},{c + 1}" for c in range(0, 32, 2)], nodes={0: "0-15", 1: "16-31"}),
            "0-5,16-19",
            4,
            ["0-3", "4-5", "16-17", "18-19"],
        ),
    ],
)
def test_o32_ranks_without_gpus(tmp_path: Path, files: Files, affinity: str, count: int, ranks: list[str]) -> None:
    found = read(tmp_path, files)
    assert by_rank(place(found, [], all_gpus(found, ranks=count, affinity=affinity))) == ranks


def test_ranks_stay_within_a_node_where_that_is_as_even(tmp_path: Path) -> None:
    cores = [str(c) for c in range(14)]
    found = read(tmp_path / "7", machine(cores=cores, nodes={0: "0-6", 1: "7-13"}))
    assert by_rank(place(found, [], Request(ranks=4))) == ["0-3", "4-6", "7-10", "11-13"]
    found = read(tmp_path / "8", machine(cores=[*cores, "14", "15"], nodes={0: "0-7", 1: "8-15"}))
    assert by_rank(place(found, [], Request(ranks=3))) == ["0-5", "6-10", "11-15"]


# DESIGN's default shares


def test_sixty_four_cores_on_two_nodes_with_four_gpus_each_make_eight_cores_a_gpu(tmp_path: Path) -> None:
    halves = {0: "0-31", 1: "32-63"}
    files = machine(cores=[str(c) for c in range(64)], nodes=halves, gpus=on_nodes(0, 0, 0, 0, 1, 1, 1, 1))
    found = read(tmp_path, files)
    for i, address in enumerate(gpu_addresses(8)):
        grant = place(found, [], Request(gpus=(address,)))
        assert format_list(grant.cpus) == f"{8 * i}-{8 * i + 7}"
        assert grant.threads == 8


def test_no_gpu_named_gives_the_share_of_the_first_free_one_for_each_rank(tmp_path: Path) -> None:
    found = read(tmp_path, machine_a())
    first, second, third, _ = gpu_addresses(4)
    grant = place(found, [], Request())
    assert by_rank(grant) == A_EXCLUSIVE[:1]
    assert (grant.gpus, grant.ranks[0].gpu, grant.gpus_chosen) == ((), None, False)
    assert "no GPU is named: the job gets the cores of one GPU and sees all GPUs" in grant.reasons[0]
    assert by_rank(place(found, [], Request(ranks=3))) == A_EXCLUSIVE[:3]
    leased = [held("0-3,16-19", first), held("4-7,20-23", second)]
    assert by_rank(place(found, leased, Request())) == A_EXCLUSIVE[2:3]
    # neither of the two named a GPU, so none is leased, but their cores are taken
    busy = [held("0-3,16-19"), held("4-7,20-23")]
    assert by_rank(place(found, busy, Request())) == A_EXCLUSIVE[2:3]
    assert place(found, busy, Request(gpus=1)).gpus == (third,)


def test_a_cpu_job_gets_all_that_is_free(tmp_path: Path) -> None:
    found = read(tmp_path, machine_a(gpus=()))
    assert format_list(place(found, [], Request()).cpus) == "0-31"
    rest = place(found, [held("0-3,16-19")], Request())
    assert (format_list(rest.cpus), rest.threads, rest.shared) == ("4-15,20-31", 12, False)
    assert rest.memory_nodes == {0, 1}


def test_slots_divide_the_machine_and_not_what_is_free(tmp_path: Path) -> None:
    found = read(tmp_path, machine_f() | {})
    rules = Rules(slots=3)
    jobs: list[Grant] = []
    for cpus in ("0-3", "4-6", "7-9"):
        jobs.append(place(found, jobs, Request(gpus=()), rules))
        assert format_list(jobs[-1].cpus) == cpus
    assert place(found, jobs, Request(gpus=()), rules).shared
    assert format_list(place(found, jobs[:1] + jobs[2:], Request(gpus=()), rules).cpus) == "4-6"
    narrow = place(found, [], Request(gpus=(), affinity=parse_list("2-4,9")), rules)
    assert format_list(narrow.cpus) == "2-4"


def test_nothing_free_is_shared_with_the_least_loaded_job(tmp_path: Path) -> None:
    found = read(tmp_path, machine_f())
    jobs = [held("0-5"), held("6-9")]
    third = place(found, jobs, Request(gpus=()))
    assert (third.shared, format_list(third.cpus), third.threads) == (True, "0-5", 3)
    (warning,) = third.warnings
    assert warning.startswith("no core is free: CPUs 0-5 are shared with 1 other job, 3 threads for this one;")
    assert all(remedy in warning for remedy in ("--cpus N", "slots", "--wait"))
    fourth = place(found, [*jobs, third], Request(gpus=()))
    assert (format_list(fourth.cpus), fourth.threads) == ("6-9", 2)


def test_as_many_cores_are_shared_as_were_asked_for(tmp_path: Path) -> None:
    found = read(tmp_path, machine_f())
    jobs = [held("0-3"), held("4-9")]
    one = place(found, jobs, Request(gpus=(), cpus="1"))
    assert (one.shared, format_list(one.cpus), one.threads) == (True, "4", 1)
    two = place(found, [*jobs, one], Request(gpus=(), cpus="2"))
    assert (format_list(two.cpus), two.threads) == ("0-1", 1), "where two jobs are it is fuller now"
    wide = place(found, jobs, Request(gpus=(), cpus="8"))
    assert (format_list(wide.cpus), wide.threads) == ("0-1,4-9", 2)
    asked = place(found, [held("0-1")], Request(gpus=(), cpus="2", shared=True))
    assert (format_list(asked.cpus), asked.shared) == ("2-3", True)
    for gpus in (gpu_addresses(1), gpu_addresses(2)):
        near = place(found, jobs, Request(gpus=tuple(gpus), cpus="2"))
        assert (near.shared, len(near.cpus)) == (True, 2)


@pytest.mark.parametrize("when_full", ["wait", "refuse"])
def test_the_administrator_may_not_want_sharing(tmp_path: Path, when_full: str) -> None:
    found = read(tmp_path, machine_f())
    rules = Rules(when_full=when_full)
    with pytest.raises(Busy, match=r"no core is free.*--cpus N.*slots.*--wait"):
        place(found, [held("0-9")], Request(gpus=()), rules)
    with pytest.raises(Busy, match="no core is free"):
        place(found, [held("0-9")], Request(gpus=(gpu_addresses(1)[0],)), rules)
    with pytest.raises(Busy, match="--cpus 4: 2 of 4 cores are free"):
        place(found, [held("0-7")], Request(gpus=(), cpus="4"), rules)
    assert not place(found, [held("0-7")], Request(gpus=(), cpus="2"), rules).shared


def test_freed_cpus_are_found_again(tmp_path: Path) -> None:
    found = read(tmp_path, machine_f())
    first, second = held("0-3"), held("4-9")
    assert format_list(place(found, [second], Request(gpus=())).cpus) == "0-3"
    assert format_list(place(found, [first], Request(gpus=())).cpus) == "4-9"


# --cpus and --shared


@pytest.mark.parametrize(
    ("wish", "cpus", "threads"),
    [
        ("1", "0,16", 1),
        ("4", "0-3,16-19", 4),
        ("50%", "0-7,16-23", 8),
        ("1%", "0,16", 1),
        ("10", "0-9,16-25", 10),
        ("node", "0-7,16-23", 8),
        ("all", "0-31", 16),
    ],
)
def test_cpus_are_whole_cores(tmp_path: Path, wish: str, cpus: str, threads: int) -> None:
    found = read(tmp_path, machine_a(gpus=()))
    grant = place(found, [], Request(cpus=wish))
    assert (format_list(grant.cpus), grant.threads, grant.ranks[0].omp_num_threads) == (cpus, threads, threads)


@pytest.mark.parametrize("wish", ["0", "-1", "x", "1.5", "101%", "0%", "%", "", "1e3", "٣", "nodes", "9999999"])
def test_amounts_that_are_none(tmp_path: Path, wish: str) -> None:
    with pytest.raises(InvalidRequest, match=r"--cpus .*cores as in 4, 50%, node or all"):
        place(read(tmp_path, machine_f()), [], Request(gpus=(), cpus=wish))


def test_more_cores_than_there_are_never_fit(tmp_path: Path) -> None:
    found = read(tmp_path, machine_f())
    with pytest.raises(Unplaceable, match="--cpus 11: this job may have 10 cores at most"):
        place(found, [], Request(gpus=(), cpus="11"))
    with pytest.raises(Unplaceable, match=r"\(ask for fewer\)$"):  # no affinity is that wide
        place(found, [], Request(gpus=(), cpus="11"))
    with pytest.raises(Unplaceable, match=r"may have 1 core at most \(ask for fewer, or .* a wider affinity\)"):
        place(found, [], all_gpus(found, cpus="4", affinity="0"))
    with pytest.raises(Unplaceable, match="3 cores at most"):
        place(found, [], all_gpus(found, cpus="4", affinity="0-2"))


def test_fewer_than_asked_for_is_said(tmp_path: Path) -> None:
    grant = place(read(tmp_path, machine_f()), [held("0-7")], Request(gpus=(), cpus="4"))
    assert (format_list(grant.cpus), grant.shared) == ("8-9", False)
    assert grant.warnings == ("only 2 of 4 cores are free; --wait waits for more, --shared shares them",)


def test_a_small_job_leaves_whole_nodes_and_caches_whole(tmp_path: Path) -> None:
    found = read(tmp_path, machine_b())
    used = held("0-13,128-141")  # of node 0 two cores are left
    assert format_list(place(found, [used], Request(gpus=(), cpus="2")).cpus) == "14-15,142-143"
    assert format_list(place(found, [used], Request(gpus=(), cpus="4")).cpus) == "16-19,144-147"
    assert place(found, [used], Request(gpus=(), cpus="18")).memory_nodes == {1, 2}


@pytest.mark.parametrize(
    ("wish", "ranks"),
    [
        ("2", ["0,16", "8,24"]),
        ("6", ["0-2,16-18", "8-10,24-26"]),
        ("12", ["0-5,16-21", "8-13,24-29"]),
        ("node", ["0-7,16-23", "8-15,24-31"]),
        ("all", ["0-7,16-23", "8-15,24-31"]),
        ("1", ["0,16", "0,16"]),
    ],
)
def test_cpus_of_a_gpu_job_are_near_its_gpus(tmp_path: Path, wish: str, ranks: list[str]) -> None:
    found = read(tmp_path, machine_a())
    first, _, third, _ = gpu_addresses(4)
    assert by_rank(place(found, [], Request(gpus=(first, third), cpus=wish))) == ranks


def test_shared_as_asked(tmp_path: Path) -> None:
    found = read(tmp_path, machine_f())
    grant = place(found, [held("0-3"), held("2-5")], Request(gpus=(), shared=True))
    assert (grant.shared, format_list(grant.cpus), grant.threads, grant.warnings) == (True, "0-9", 3, ())
    later = place(found, [grant], Request(gpus=()))
    assert later.shared  # a shared job's cores are in use all the same


def test_a_share_taken_by_others_is_made_up_for_nearby_first(tmp_path: Path) -> None:
    found = read(tmp_path, machine_a())
    first, second, *_ = gpu_addresses(4)
    part = place(found, [held("0-1,16-17")], Request(gpus=(first,)))
    assert (format_list(part.cpus), part.warnings) == ("2-5,18-21", ())
    near = place(found, [held("0-5,16-21")], Request(gpus=(first,)))
    assert format_list(near.cpus) == "6-7,22-23"
    assert near.warnings == (
        "GPU 0000:10:00.0: only 2 of 4 cores are free; --wait waits for more, --shared shares them",
    )
    far = place(found, [held("0-7,16-23")], Request(gpus=(second,)))
    assert (format_list(far.cpus), far.shared) == ("8-11,24-27", False)
    assert far.warnings == ("GPU 0000:20:00.0: no core near it is free, so it gets CPUs 8-11,24-27 far from it",)
    none = place(found, [held("0-31")], Request(gpus=(second,)))
    assert (format_list(none.cpus), none.shared, none.threads) == ("4-7,20-23", True, 2)
    assert none.warnings[0].startswith("GPU 0000:20:00.0: no core is free: CPUs 4-7,20-23 are shared with 1 other job")


# Ranks


def test_more_ranks_than_gpus_divide_each_gpu_s_share(tmp_path: Path) -> None:
    found = read(tmp_path, machine_a())
    grant = place(found, [], all_gpus(found, ranks=8))
    assert by_rank(grant)[:4] == ["0-1,16-17", "2-3,18-19", "4-5,20-21", "6-7,22-23"]
    first, second, *_ = gpu_addresses(4)
    assert [rank.gpu for rank in grant.ranks[:4]] == [first, first, second, second]
    uneven = place(found, [], Request(gpus=(first, second), ranks=3))
    assert [rank.gpu for rank in uneven.ranks] == [first, first, second]
    assert by_rank(uneven) == ["0-1,16-17", "2-3,18-19", "4-7,20-23"]
    crowd = place(found, [], Request(gpus=(first,), ranks=6))
    assert all(rank.cpus for rank in crowd.ranks)
    assert crowd.cpus == parse_list("0-3,16-19")
    assert crowd.warnings == ("there are fewer cores than ranks, so some ranks share a core",)
    assert [rank.omp_num_threads for rank in crowd.ranks] == [1] * 6


def test_ranks_on_one_node_s_cpus_do_not_compute_twice_over(tmp_path: Path) -> None:
    found = read(tmp_path, machine_a())
    grant = place(found, [], all_gpus(found, policy="node"))
    assert [rank.omp_num_threads for rank in grant.ranks] == [4] * 4


def test_fewer_ranks_than_gpus(tmp_path: Path) -> None:
    found = read(tmp_path, machine_a())
    alone = place(found, [], all_gpus(found, ranks=1))
    assert by_rank(alone) == ["0-31"]
    assert alone.ranks[0].gpu == gpu_addresses(1)[0]
    two = place(found, [], all_gpus(found, ranks=2))
    assert by_rank(two) == A_EXCLUSIVE[:2]
    assert two.cpus == parse_list("0-7,16-23")


def test_ranks_are_numbered_and_make_up_the_grant(tmp_path: Path) -> None:
    found = read(tmp_path, machine_a())
    grant = place(found, [], all_gpus(found))
    assert [rank.rank for rank in grant.ranks] == [0, 1, 2, 3]
    assert grant.cpus == frozenset().union(*(rank.cpus for rank in grant.ranks))
    assert [format_list(rank.memory_nodes) for rank in grant.ranks] == ["0", "0", "1", "1"]


def test_unlike_cores_are_dealt_kind_by_kind(tmp_path: Path) -> None:
    found = read(tmp_path, machine_e())
    grant = place(found, [], all_gpus(found))
    assert by_rank(grant) == ["0-7,16-23", "8-15,24-31"]
    assert [rank.omp_num_threads for rank in grant.ranks] == [8, 8]
    assert by_rank(place(found, [], Request(gpus=(), ranks=3))) == ["0-5,16-21", "6-11,22-26", "12-15,27-31"]
    assert format_list(place(found, [], Request(gpus=(), cpus="3")).cpus) == "0-5"


@pytest.mark.parametrize("threads", [1, 2, 4, 8])
def test_cores_with_any_number_of_threads_stay_whole(tmp_path: Path, threads: int) -> None:
    cores = [f"{threads * i}-{threads * i + threads - 1}" for i in range(6)]
    found = read(tmp_path, machine(cores=cores, gpus=on_nodes(0, 0)))
    grant = place(found, [], all_gpus(found))
    assert by_rank(grant) == [f"0-{3 * threads - 1}", f"{3 * threads}-{6 * threads - 1}"]
    assert [rank.omp_num_threads for rank in grant.ranks] == [3, 3]


def test_a_core_is_taken_as_a_whole_even_by_a_job_that_may_use_half(tmp_path: Path) -> None:
    found = read(tmp_path, machine_a(gpus=()))
    first = place(found, [], Request(affinity=parse_list("0-7")))
    second = place(found, [first], Request(affinity=parse_list("16-23")))
    assert second.shared  # the siblings of the first job's CPUs: another job there would halve both


# Quotas


def test_threads_obey_the_quota(tmp_path: Path) -> None:
    found = read(tmp_path, machine_a())
    assert place(found, [], Request(gpus=(), cpu_max=2)).ranks[0].omp_num_threads == 2
    assert place(found, [], Request(gpus=(), cpu_max=2)).threads == 2
    grant = place(found, [], all_gpus(found, cpu_max=6))
    assert [rank.omp_num_threads for rank in grant.ranks] == [1] * 4
    assert [rank.omp_num_threads for rank in place(found, [], all_gpus(found, cpu_max=12)).ranks] == [3] * 4
    with pytest.raises(InvalidRequest, match="--cpu-max 0"):
        place(found, [], Request(cpu_max=0))


def test_gpu_ranks_get_a_bounded_number_of_threads(tmp_path: Path) -> None:
    found = read(tmp_path, machine_c())
    assert {rank.omp_num_threads for rank in place(found, [], all_gpus(found)).ranks} == {8}
    assert {rank.omp_num_threads for rank in place(found, [], all_gpus(found), Rules(omp_max_gpu=10)).ranks} == {10}
    assert place(found, [], Request(gpus=())).ranks[0].omp_num_threads == 96


# Reserved, isolated, allowed


def test_reserved_and_isolated_cores_are_left_alone_with_their_siblings(tmp_path: Path) -> None:
    found = read(tmp_path, {**machine_a(gpus=(0, 1)), "sys/devices/system/cpu/isolated": "4-5\n"})
    grant = place(found, [], all_gpus(found), Rules(reserved=parse_list("0,25")))
    assert by_rank(grant) == ["1-3,6-7,17-19,22-23", "8,10-15,24,26-31"]
    assert "CPUs 4-5 are isolated from the scheduler" in grant.reasons
    assert "CPUs 0,25 are reserved by the administrator" in grant.reasons


def test_who_is_allowed_nothing_else_gets_isolated_and_reserved_cores(tmp_path: Path) -> None:
    found = read(tmp_path, {**machine_a(gpus=()), "sys/devices/system/cpu/isolated": "4-5\n"})
    isolated = place(found, [], Request(affinity=parse_list("4-5,20-21")))
    assert format_list(isolated.cpus) == "4-5,20-21"
    assert isolated.warnings == ("only isolated CPUs are allowed here, so the job gets those",)
    reserved = place(found, [], Request(affinity=parse_list("0")), Rules(reserved=parse_list("0")))
    assert format_list(reserved.cpus) == "0"
    assert reserved.warnings == ("only reserved CPUs are allowed here, so the job gets those",)


def test_an_affinity_without_any_cpu_of_this_machine(tmp_path: Path) -> None:
    found = read(tmp_path, machine_f())
    with pytest.raises(Unplaceable, match=r"none of the CPUs 64-65 can be used.*allowed and online are 0-9"):
        place(found, [], Request(gpus=(), affinity=parse_list("64-65")))


def test_memory_is_the_nearest_that_the_cgroup_allows(tmp_path: Path) -> None:
    files = {
        **machine_a(),
        "proc/mounts": "none /dev/cpuset cpuset rw 0 0\n",
        "proc/self/cpuset": "/job\n",
        "dev/cpuset/job/cpus": "0-15\n",
        "dev/cpuset/job/mems": "1\n",
    }
    grant = place(read(tmp_path, files), [], Request(gpus=(), cpus="2"))
    assert (format_list(grant.cpus), format_list(grant.memory_nodes)) == ("0-1", "1")


# GPUs


def test_a_gpu_without_known_place_binds_nothing_on_several_nodes(tmp_path: Path) -> None:
    found = read(tmp_path, machine_a(gpus=(0, -1)))
    first, second = gpu_addresses(2)
    grant = place(found, [], Request(gpus=(second,)))
    assert not grant.bound
    assert grant.cpus == found.allowed
    assert grant.warnings == ("bound to nothing: nothing tells which CPUs are near GPU 0000:20:00.0",)
    assert grant.ranks[0].omp_num_threads == 8
    after = place(found, [grant], Request(gpus=(first,)))
    assert (format_list(after.cpus), after.shared) == ("0-7,16-23", False)
    assert place(found, [], Request(gpus=(second,), cpu_max=2)).ranks[0].omp_num_threads == 2
    assert [rank.omp_num_threads for rank in place(found, [], Request(gpus=(first, second))).ranks] == [8, 8]
    ranks = place(found, [], Request(gpus=(first, second), cpu_max=6)).ranks
    assert [rank.omp_num_threads for rank in ranks] == [3, 3]


def test_gpus_of_different_kinds_bind_nothing_unless_it_makes_no_difference(tmp_path: Path) -> None:
    unlike = {address: {**facts, "device": f"0x20b{i}"} for i, (address, facts) in enumerate(on_nodes(0, 1).items())}
    halves = {0: "0-7,16-23", 1: "8-15,24-31"}
    two = read(tmp_path / "two", machine(cores=pairs(0, 16, 16), nodes=halves, gpus=unlike))
    grant = place(two, [], Request(cuda_visible_devices="1"))
    assert (grant.bound, grant.ranks[0].gpu) == (False, None)
    assert "fastest first" in grant.warnings[0]
    sure = place(two, [], Request(cuda_visible_devices="1", cuda_device_order="PCI_BUS_ID"))
    assert (format_list(sure.cpus), sure.gpus) == ("8-15,24-31", (gpu_addresses(2)[1],))
    near = {address: {**facts, "numa_node": "0"} for address, facts in unlike.items()}
    one = read(tmp_path / "one", machine(cores=pairs(0, 16, 16), gpus=near))
    grant = place(one, [], Request(cuda_visible_devices="1"))
    assert (grant.bound, format_list(grant.cpus), grant.gpus) == (True, "0-7,16-23", ())


def test_cuda_visible_devices_in_its_own_order(tmp_path: Path) -> None:
    found = read(tmp_path, machine_a())
    grant = place(found, [], Request(cuda_visible_devices="3,0"))
    assert by_rank(grant) == [A_EXCLUSIVE[3], A_EXCLUSIVE[0]]
    assert grant.gpus == (gpu_addresses(4)[3], gpu_addresses(4)[0])
    assert not grant.gpus_chosen
    none = place(found, [], Request(cuda_visible_devices=""))
    assert (format_list(none.cpus), none.gpus, none.ranks[0].gpu) == ("0-31", (), None)
    again = place(found, [grant], Request(cuda_visible_devices="0"))
    assert "CUDA_VISIBLE_DEVICES names 0000:10:00.0, which another job has" in again.warnings


def test_a_gpu_on_a_node_without_cpus_goes_to_the_nearest(tmp_path: Path) -> None:
    files = machine(
        cores=[str(c) for c in range(8)],
        nodes={0: "0-3", 1: "4-7", 2: ""},
        distances={0: "10 20 28", 1: "20 10 12", 2: "28 12 10"},
        gpus=on_nodes(2),
    )
    found = read(tmp_path, files)
    grant = place(found, [], all_gpus(found))
    assert (by_rank(grant), format_list(grant.memory_nodes)) == (["4-7"], "1")


def test_leases(tmp_path: Path) -> None:
    found = read(tmp_path, machine_a())
    first, second, third, fourth = gpu_addresses(4)
    one = place(found, [], Request(gpus=1))
    assert (one.gpus, one.gpus_chosen, by_rank(one)) == ((first,), True, A_EXCLUSIVE[:1])
    two = place(found, [one], Request(gpus=2))
    assert two.gpus == (third, fourth)  # of one node if it can
    last = place(found, [one, two], Request(gpus=1))
    assert last.gpus == (second,)
    with pytest.raises(Busy, match="--gpus 1: 0 of 4 GPUs are free"):
        place(found, [one, two, last], Request(gpus=1))
    with pytest.raises(Busy, match=r"^another job has GPU 0000:10:00.0 "):
        place(found, [one], Request(gpus=(first,)))
    assert place(found, [one], Request(gpus=(first,), shared=True)).gpus == (first,)
    with pytest.raises(Unplaceable, match="--gpus 5: there are 4 GPUs here"):
        place(found, [], Request(gpus=5))
    assert place(found, [held("0", second)], Request(gpus=3)).gpus == (first, third, fourth)


def test_gpus_with_free_cores_nearby_are_chosen_first(tmp_path: Path) -> None:
    found = read(tmp_path, machine_a())
    first, second, third, fourth = gpu_addresses(4)
    assert place(found, [held("0-7,16-23")], Request(gpus=1)).gpus == (third,)
    assert place(found, [], Request(gpus=2, affinity=parse_list("8-15,24-31"))).gpus == (third, fourth)
    assert place(found, [held("0-7", fourth)], Request(gpus=3)).gpus == (first, second, third)
    assert by_rank(place(found, [], Request(affinity=parse_list("8-15")))) == ["8-11"]


def test_gpus_that_are_only_a_default(tmp_path: Path) -> None:
    """`place` without --gpus means all of them, as far as they are free."""
    found = read(tmp_path, machine_a())
    first, *others = gpu_addresses(4)
    one = place(found, [], Request(gpus=(first,)))
    rest = place(found, [one], all_gpus(found, insist=False))
    assert rest.gpus == tuple(others)
    assert rest.warnings == ("GPU 0000:10:00.0: another job has it, so it is left out",)
    again = place(found, [one, rest], all_gpus(found, insist=False))
    assert (again.shared, by_rank(again)) == (True, A_EXCLUSIVE)
    assert "so it is shared" in again.warnings[0]


def test_a_number_chooses_among_the_visible(tmp_path: Path) -> None:
    found = read(tmp_path, machine_a())
    grant = place(found, [], Request(gpus=1, cuda_visible_devices="2,3"))
    assert grant.gpus == (gpu_addresses(3)[2],)


def test_names_of_gpus(tmp_path: Path) -> None:
    address = gpu_addresses(1)[0]
    host = Host(make_tree(tmp_path, machine_a()))
    found = discover.topology(host, gpus={address: GpuFacts(uuid="GPU-1234")})
    assert place(found, [], Request(gpus=("GPU-1234",))).gpus == (address,)
    with pytest.raises(NoSuchGpu, match=r"0000:99:00.0: no such GPU \(GPUs here: 0000:10:00.0, "):
        place(found, [], Request(gpus=("0000:99:00.0",)))
    with pytest.raises(InvalidRequest, match="named twice"):
        place(found, [], Request(gpus=(address, "GPU-1234")))


def test_a_gpu_given_to_a_virtual_machine_is_not_handed_out(tmp_path: Path) -> None:
    files = machine_a(gpus=(0, 0))
    folder = make_tree(tmp_path, files)
    address = gpu_addresses(1)[0]
    (folder / f"sys/bus/pci/devices/{address}/driver").symlink_to("../../../../bus/pci/drivers/vfio-pci")
    found = discover.topology(Host(folder))
    assert found.gpus[0].driver == "vfio-pci"
    assert place(found, [], Request(gpus=1)).gpus == (gpu_addresses(2)[1],)


def test_more_gpus_than_cores(tmp_path: Path) -> None:
    found = read(tmp_path, machine(cores=["0", "1"], gpus=on_nodes(0, 0, 0, 0)))
    grant = place(found, [], all_gpus(found))
    assert by_rank(grant) == ["0", "0", "1", "1"]
    assert "there are fewer cores than ranks, so some ranks share a core" in grant.warnings
    assert not grant.shared


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"policy": "best"}, "--policy best: not known"),
        ({"memory": "far"}, "--memory far: not known"),
        ({"ranks": 0}, "--ranks 0"),
        ({"gpus": -1}, "--gpus -1"),
    ],
)
def test_wishes_that_make_no_sense(tmp_path: Path, wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        place(read(tmp_path, machine_a()), [], Request(**wishes))


def test_strict_memory_is_warned_about(tmp_path: Path) -> None:
    grant = place(read(tmp_path, machine_f()), [], Request(gpus=(), memory="bind"))
    assert grant.warnings == ("memory bound to nodes 0: when those are full the kernel kills the job",)


def test_policies_for_ranks_without_gpus(tmp_path: Path) -> None:
    found = read(tmp_path, machine_b())
    halves = ["0-63,128-191", "64-127,192-255"]
    assert by_rank(place(found, [], Request(gpus=(), ranks=2, policy="socket"))) == halves
    assert by_rank(place(found, [], Request(gpus=(), ranks=1, policy="node"))) == ["0-15,128-143"]
    alone = place(found, [], Request(gpus=(), ranks=3, cpus="2"))
    assert alone.warnings == ("there are fewer cores than ranks, so some ranks share a core",)
    crowd: Sequence[str] = by_rank(place(found, [], Request(gpus=(), ranks=4, policy="socket")))
    assert crowd == [halves[0], halves[0], halves[1], halves[1]]


def test_core_complexes_of_two_jobs(tmp_path: Path) -> None:
    found = read(tmp_path, machine_d())
    first, second, third = gpu_addresses(3)
    job = place(found, [], Request(gpus=(first,), policy="core-complex"))
    other = place(found, [job], Request(gpus=(third,), policy="core-complex"))
    assert (by_rank(job), by_rank(other)) == (["0-7,16-23"], ["8-15,24-31"])
    assert place(found, [job, other], Request(gpus=(second,), policy="core-complex")).shared
