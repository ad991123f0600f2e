"""Shares of jobs without GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from torchtuned.placement.dealing import Piece, by_node, cpus_of, deal_or_share, deal_ranks, group, pick, pieces
from torchtuned.placement.space import Space
from torchtuned.topology import Topology
from torchtuned.wording import count as counted


def cpu_shares(space: Space, count: int) -> tuple[list[list[Piece]], str]:
    """The cores of each rank, and why these. Busy, Unplaceable."""
    free = space.free(space.cores)
    kind, number = space.counted(free)
    if not free:
        cores = quietest(space, space.cores, number) if number else _least_loaded(space)
        space.share(cores)
        return deal_or_share(cores, count), "no core is free; here are the fewest jobs for the number of cores"
    if kind == "cores":
        chosen = quietest(space, free, number)
        why = f"{counted(len(chosen), 'core')} for --cpus {space.request.cpus}"
        if len(chosen) < number:
            space.short(len(chosen), number)
    elif kind == "node":
        chosen = max(group(free, lambda piece: piece.node), key=len)
        why = "all free cores"
        if chosen[0].node >= 0:
            why = f"the {counted(len(chosen), 'free core')} of node {chosen[0].node}"
    elif space.rules.slots and not space.request.shared:
        chosen = _slot(space, free)
        why = f"{len(chosen)} of {space.total} cores: the machine is cut for {space.rules.slots} jobs"
    else:
        chosen = free
        why = f"all {counted(len(free), 'free core')}"
        if space.request.shared:
            why = f"all {counted(len(free), 'core')}, shared as asked"
    if space.request.policy == "exclusive":
        return deal_ranks(chosen, count), why
    return _whole_groups(space, chosen, count), f"{why}, by {space.request.policy}"


def _slot(space: Space, free: list[Piece]) -> list[Piece]:
    """The first slot that is free as a whole, else that many free cores: never a part of what happens to be free."""
    usable = {piece.first: piece for piece in space.cores}
    every = by_node(pieces(space.machine, space.machine.online - space.kept, frozenset()))
    for slot in deal_or_share(every, min(space.rules.slots, len(every))):
        own = [usable[piece.first] for piece in slot if piece.first in usable]
        if len(own) == len(slot) and all(piece.free for piece in own):
            return own
    size = max(1, space.total // space.rules.slots)
    if len(free) < size:
        space.short(len(free), size)
    return pick(free, size)


def quietest(space: Space, cores: Iterable[Piece], number: int) -> list[Piece]:
    """That many cores with the fewest other jobs on them: the least loaded job's before others', and close together."""
    roomy = {piece.first for piece in _least_loaded(space)}
    chosen: list[Piece] = []
    for alike in group(cores, lambda piece: 2 * space.jobs_on([piece]) + (piece.first not in roomy)):
        chosen += pick(alike, number - len(chosen))
    return chosen


def _least_loaded(space: Space) -> list[Piece]:
    """The usable cores of the job that leave most cores for each after this one joins."""
    piece_of = {cpu: piece for piece in space.cores for cpu in piece.cpus}
    places = []
    for grant in space.in_force:
        cores = {piece_of[cpu].first: piece_of[cpu] for cpu in grant.cpus if cpu in piece_of}
        if grant.bound and cores:
            places.append([cores[first] for first in sorted(cores)])

    def room(cores: list[Piece]) -> tuple[float, int, int]:
        jobs = space.jobs_on(cores)
        return len(cores) / (1 + jobs), -jobs, -cores[0].first

    return max(places, key=room, default=space.cores)


def grouped(machine: Topology, policy: str, cores: Iterable[Piece]) -> list[list[Piece]]:
    """Cores by node, socket or core complex; the latter biggest first, as torch orders them."""
    if policy == "core-complex":
        return sorted(group(cores, lambda piece: piece.cache), key=lambda cores: (-len(cpus_of(cores)), cores[0].first))
    if policy == "node":
        return group(cores, lambda piece: piece.node)
    package = {cpu: i for i, cpus in enumerate(machine.packages) for cpu in cpus}
    return group(cores, lambda piece: package.get(piece.first, -1))


def _whole_groups(space: Space, cores: list[Piece], count: int) -> list[list[Piece]]:
    """For node, socket and core-complex: a whole group for each rank; more ranks than groups share them in order."""
    groups = grouped(space.machine, space.request.policy, cores)
    if count <= len(groups):
        biggest = sorted(groups, key=lambda cores: -len(cores))[:count]
        return sorted(biggest, key=lambda cores: cores[0].first)
    space.warn(f"there are {count} ranks for {len(groups)} {space.request.policy} group(s) of cores, so some share one")
    return [groups[i * len(groups) // count] for i in range(count)]
