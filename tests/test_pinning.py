"""Masks after CPUs went and came: what the kernel widened is put right, what a program chose is not touched."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from torchtuned import pinning
from torchtuned.cpuset import parse_list
from torchtuned.pinning import Online
from torchtuned.placement import Grant, Rank

ALL = frozenset(range(8))
RANKS = tuple(Rank(rank=i, cpus=parse_list(cpus)) for i, cpus in enumerate(("0-1", "2-3")))
JOB = Grant(cpus=parse_list("0-3"), ranks=RANKS)


@pytest.mark.parametrize(
    ("mask", "before", "now", "wanted"),
    [
        ("0-7", "0-2,4-7", "0-7", "0-3"),  # the kernel let it go
        ("0-2,4-7", "0-7", "0-2,4-7", "0-2"),  # at once: what is left of its share
        ("0-2", "0-2,4-7", "0-7", "0-3"),  # and back, when that CPU is
        ("2", "0-2,4-7", "0-7", "2-3"),  # a rank's share, likewise
        ("0-3", "0-7", "0-2,4-7", ""),  # a mask may hold CPUs that are away
        ("1", "0-2,4-7", "0-7", ""),  # narrower is the program's own wish
        ("0-1", "0-2,4-7", "0-7", ""),
        ("5", "0-2,4-7", "0-7", ""),  # elsewhere as well
        ("0-7", "0-7", "4-7", ""),  # none of its CPUs is there
        ("4-7", "4-7", "0-7", "0-3"),  # all of them were away: nobody chose that
        ("0-7", "0-7", "0-7", "0-3"),  # they went and came between two looks
    ],
)
def test_what_is_put_right(mask: str, before: str, now: str, wanted: str) -> None:
    cpus = Online(before=parse_list(before), now=parse_list(now))
    found = pinning._wanted(parse_list(mask), JOB.cpus, JOB, cpus)
    assert (found or frozenset()) == parse_list(wanted)


def test_a_rank_gets_its_own_share_where_that_is_known() -> None:
    first, launcher, everywhere = parse_list("0-1"), parse_list("0-3"), ALL
    assert pinning._missing_rank({10: {first}, 11: {launcher}, 12: {everywhere}}, JOB) == parse_list("2-3")
    assert pinning._missing_rank({10: {everywhere}, 12: {everywhere}}, JOB) == JOB.cpus  # either may be either
    assert pinning._missing_rank({10: {first, everywhere}, 12: {everywhere}}, JOB) == JOB.cpus
    assert pinning._missing_rank({}, Grant(cpus=ALL)) == ALL


@pytest.fixture
def pair() -> Iterator[list[int]]:
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield [child.pid for child in children]
    for child in children:
        child.kill()
        child.wait()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_only_the_jobs_own_processes_are_moved(pair: list[int]) -> None:
    mine, stranger = pair
    everything = frozenset(os.sched_getaffinity(0))
    grant = Grant(cpus=frozenset({min(everything)}))
    cpus = Online(before=everything, now=everything)
    before = len(os.listdir("/proc/self/fd"))
    pinning.pin([mine, stranger, 2**22 + 1], grant, cpus, leader=mine, is_ours=lambda pid: pid == mine)
    assert os.sched_getaffinity(mine) == grant.cpus
    assert os.sched_getaffinity(stranger) == everything
    assert len(os.listdir("/proc/self/fd")) == before
