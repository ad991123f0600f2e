"""Cutting cores into shares. Pure.

A piece is what a job may use of one core: all its hardware threads unless the caller's affinity leaves some out.
Pieces are never cut, so no two jobs meet on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchtuned.cpuset import CpuSet
from torchtuned.topology import Topology


@dataclass(frozen=True, slots=True)
class Piece:
    """A core's usable CPUs. `first` is the lowest; `node` and `cache` name its NUMA node and last level of cache;
    `free` tells that no other job holds any of the core.
    """

    first: int
    cpus: CpuSet
    kind: int
    node: int
    cache: int
    free: bool


def pieces(machine: Topology, usable: CpuSet, busy: CpuSet) -> list[Piece]:
    """What is usable of each core, in the order of the machine's cores (by their lowest CPU)."""
    cache_of = {cpu: i for i, cpus in enumerate(machine.llc) for cpu in cpus}
    found = []
    for core in machine.cores:
        if cpus := core.cpus & usable:
            first = min(cpus)
            found.append(
                Piece(
                    first=first,
                    cpus=cpus,
                    kind=core.kind,
                    node=machine.node_of.get(first, -1),
                    cache=cache_of.get(first, -1),
                    free=core.cpus.isdisjoint(busy),
                )
            )
    return found


def cpus_of(share: Iterable[Piece]) -> CpuSet:
    return frozenset(cpu for piece in share for cpu in piece.cpus)


def deal(cores: Sequence[Piece], count: int, *, kinds: bool = True) -> list[list[Piece]]:
    """`count` shares of neighbouring pieces, kind by kind; what does not divide goes to the first shares.

    As torch's exclusive policy does it, but for unlike cores. Shares are empty when there are fewer pieces.
    """
    shares: list[list[Piece]] = [[] for _ in range(count)]
    for alike in group(cores, lambda piece: piece.kind if kinds else 0):
        base, extra = divmod(len(alike), count)
        start = 0
        for i, share in enumerate(shares):
            end = start + base + (i < extra)
            share += alike[start:end]
            start = end
    return shares


def deal_or_share(cores: Sequence[Piece], count: int) -> list[list[Piece]]:
    """As deal(); but with fewer pieces than shares, neighbouring shares have a piece in common and none is empty."""
    if len(cores) >= count:
        shares = deal(cores, count)
        if all(shares):
            return shares
        return deal(cores, count, kinds=False)
    return [[cores[i * len(cores) // count]] for i in range(count)]


def deal_ranks(cores: Sequence[Piece], count: int) -> list[list[Piece]]:
    """Shares for ranks without GPUs: as even as can be, and within one node each where that costs no evenness."""
    nodes = group(cores, lambda piece: piece.node)
    if 1 < len(nodes) <= count <= len(cores):
        parts = _apportion([len(node) for node in nodes], count)
        if all(len(node) // part >= len(cores) // count for node, part in zip(nodes, parts, strict=True)):
            return [share for node, part in zip(nodes, parts, strict=True) for share in deal_or_share(node, part)]
    return deal_or_share(by_node(cores), count)


def _apportion(sizes: Sequence[int], count: int) -> list[int]:
    """Split `count` in proportion to the sizes, at least 1 each; the largest remainders get the rest."""
    total = sum(sizes)
    parts = [max(1, size * count // total) for size in sizes]
    while sum(parts) < count:
        i = max(range(len(sizes)), key=lambda i: (sizes[i] / parts[i], -i))
        parts[i] += 1
    while sum(parts) > count:
        i = min((i for i in range(len(sizes)) if parts[i] > 1), key=lambda i: (sizes[i] / parts[i], -i))
        parts[i] -= 1
    return parts


def group(cores: Iterable[Piece], key: Callable[[Piece], int]) -> list[list[Piece]]:
    """Pieces by key, in order of the key."""
    groups: dict[int, list[Piece]] = {}
    for piece in cores:
        groups.setdefault(key(piece), []).append(piece)
    return [groups[value] for value in sorted(groups)]


def by_node(cores: Iterable[Piece]) -> list[Piece]:
    """Pieces of a node side by side, so that neighbouring ranks and jobs have neighbouring cores."""
    return [piece for node in group(cores, lambda piece: piece.node) for piece in node]


def pick(cores: Sequence[Piece], count: int) -> list[Piece]:
    """`count` pieces close together: of one node if one has enough (the fullest that does, so that whole nodes stay
    whole), the fastest kinds first, of one cache if one has enough. All of them when there are not more.
    """
    if len(cores) <= count:
        return list(cores)
    chosen: list[Piece] = []
    for node in _fitting(group(cores, lambda piece: piece.node), count):
        for alike in group(node, lambda piece: piece.kind):
            for cache in _fitting(group(alike, lambda piece: piece.cache), count - len(chosen)):
                chosen += cache[: count - len(chosen)]
    return chosen


def _fitting(groups: list[list[Piece]], count: int) -> list[list[Piece]]:
    """The smallest group that is big enough, alone; without one, all of them, biggest first."""
    enough = [cores for cores in groups if len(cores) >= count]
    if enough:
        return [min(enough, key=len)]
    return sorted(groups, key=lambda cores: -len(cores))


def near(cores: Iterable[Piece], machine: Topology, node: int) -> list[Piece]:
    """Pieces in order of their node's distance from `node`."""
    order: Mapping[int, int] = {other.id: i for i, other in enumerate(machine.nearest_nodes(node))}
    return sorted(cores, key=lambda piece: (order.get(piece.node, len(order)), piece.first))
