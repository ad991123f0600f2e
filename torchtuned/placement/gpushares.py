"""Shares of GPUs. Pure.

Every GPU has a home: its part of the whole cores near it, cut as torch's exclusive policy cuts them, whether or not
its neighbours are in use. So two jobs that start at different times on different GPUs find different cores. Where a
home is taken (by a job without GPUs, say) a GPU gets other free cores near it, then free cores far off, and only when
the machine has none left is anything shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtuned.cpuset import CpuSet, format_list
from torchtuned.placement.cpushares import grouped, quietest
from torchtuned.placement.dealing import Piece, by_node, cpus_of, deal, deal_or_share, group, near, pick
from torchtuned.placement.space import Space
from torchtuned.topology import Gpu


@dataclass
class Share:
    """What one GPU gets, and why."""

    cores: list[Piece]
    reasons: list[str]


@dataclass(frozen=True)
class _Plan:
    """What is meant for one GPU: `home` its own cores, `pool` all usable cores near it, `size` how many it gets.

    `far` cores are taken to reach the size only when the size was asked for.
    """

    gpu: Gpu
    home: list[Piece]
    pool: list[Piece]
    size: int
    far: bool


def gpu_shares(space: Space, gpus: Sequence[Gpu]) -> list[Share]:
    """One share for each GPU, in the same order. Busy, Unplaceable."""
    if space.request.policy == "exclusive" or space.request.cpus is not None:
        return _exclusive(space, gpus)
    stranded = [gpu for gpu in gpus if not space.near(gpu.local_cpus)]
    instead = dict(zip((gpu.address for gpu in stranded), _exclusive(space, stranded), strict=True))
    return [instead[gpu.address] if gpu in stranded else _whole(space, gpu) for gpu in gpus]


def _exclusive(space: Space, gpus: Sequence[Gpu]) -> list[Share]:
    plans, reasons = _plans(space, gpus)
    # first what is everyone's own, so that nobody's shortage is filled from a neighbour's home
    shares = [
        Share(space.take(space.free(plan.home)[: plan.size]), [reason])
        for plan, reason in zip(plans, reasons, strict=True)
    ]
    _fill(space, [(plan, share) for plan, share in zip(plans, shares, strict=True) if plan.size])
    for i, plan in enumerate(plans):
        if not plan.size:  # fewer cores were asked for than there are GPUs
            shares[i].cores = shares[i - 1].cores
    return shares


def _plans(space: Space, gpus: Sequence[Gpu]) -> tuple[list[_Plan], list[str]]:
    free = space.free(space.cores)
    kind, number = space.counted(free)
    homes, fair = _homes(space, gpus)
    pools = [space.near(gpu.local_cpus) for gpu in gpus]
    sizes = [len(homes[gpu.address]) for gpu in gpus]
    reasons = [_home_reason(space, gpu, homes[gpu.address], fair=gpu.address in fair) for gpu in gpus]
    if kind == "node":
        for local in {gpu.local_cpus: pool for gpu, pool in zip(gpus, pools, strict=True)}.values():
            mates = [i for i, pool in enumerate(pools) if pool == local]
            for i, part in zip(mates, deal(space.free(local), len(mates)), strict=True):
                sizes[i] = len(part) or sizes[i]
                reasons[i] = f"{sizes[i]} cores of its node for --cpus node"
    elif kind == "cores" and number:
        bunches = [i * number // len(gpus) for i in range(len(gpus))] if number < len(gpus) else list(range(len(gpus)))
        base, extra = divmod(number, len(gpus))
        sizes = [base + (i < extra) if base else int(i == bunches.index(bunch)) for i, bunch in enumerate(bunches)]
        reasons = [f"its part of {number} cores for --cpus {space.request.cpus}"] * len(gpus)
    plans = [
        _Plan(gpu, homes[gpu.address], pool, size, far=kind == "cores")
        for gpu, pool, size in zip(gpus, pools, sizes, strict=True)
    ]
    return plans, reasons


def _fill(space: Space, pairs: Sequence[tuple[_Plan, Share]]) -> None:
    """Make up for home cores that others hold: with near ones, then far ones, each time fairly, then by sharing."""
    short = [(plan, share) for plan, share in pairs if len(share.cores) < plan.size]
    for i, (plan, share) in enumerate(short):
        mates = sum(1 for other, _ in short[i:] if other.gpu.local_cpus == plan.gpu.local_cpus)
        free = space.free(plan.pool)
        share.cores += space.take(pick(free, min(plan.size - len(share.cores), -(-len(free) // mates))))
    short = [(plan, share) for plan, share in short if len(share.cores) < plan.size]
    far = [(plan, share) for plan, share in short if plan.far or not share.cores]
    for i, (plan, share) in enumerate(far):
        node = plan.pool[0].node if plan.pool else -1 if plan.gpu.numa_node is None else plan.gpu.numa_node
        free = space.free(space.cores)
        part = min(plan.size - len(share.cores), -(-len(free) // (len(far) - i)))
        more = space.take(near(free, space.machine, node)[:part])
        share.cores += more
        if more and plan.pool and not plan.far:
            cpus = format_list(cpus_of(more))
            space.warn(f"GPU {plan.gpu.address}: no core near it is free, so it gets CPUs {cpus} far from it")
    for plan, share in short:
        _settle(space, plan, share)


def _settle(space: Space, plan: _Plan, share: Share) -> None:
    """What is left to do when there are not enough free cores: say so, or share."""
    whose = f"GPU {plan.gpu.address}: "
    if share.cores:
        if len(share.cores) < plan.size:
            space.short(len(share.cores), plan.size, whose)
        return
    share.cores = plan.home or plan.pool
    if plan.far:  # the size was asked for
        wide = next((cores for cores in (plan.home, plan.pool) if len(cores) >= plan.size), space.cores)
        share.cores = quietest(space, wide, plan.size)
    if not all(piece.first in space.taken for piece in share.cores):  # else it is this job itself that has them
        space.share(share.cores, whose)


def _homes(space: Space, gpus: Sequence[Gpu]) -> tuple[dict[str, list[Piece]], frozenset[str]]:
    """The home of every GPU of the machine, and which have a fair part of other cores because none near is usable.

    GPUs that are near the same CPUs divide those. What is no GPU's home goes to those without; only where that is
    nothing does every GPU get a fair part of everything.
    """
    everyone = space.machine.gpus
    mates: dict[CpuSet, list[Gpu]] = {}
    for gpu in everyone:
        mates.setdefault(gpu.local_cpus, []).append(gpu)
    homes: dict[str, list[Piece]] = {}
    for local, own in _parted(space, {local: len(gpus) for local, gpus in mates.items()}).items():
        shares = deal(own, len(mates[local]))
        homes |= {gpu.address: share for gpu, share in zip(mates[local], shares, strict=True)}
    given = {piece.first for home in homes.values() for piece in home}
    lost = [gpu for gpu in everyone if not homes[gpu.address]]
    names = ", ".join(gpu.address for gpu in gpus if gpu in lost)
    if not names:
        return homes, frozenset()
    told = f"CPUs {format_list(cpus_of(space.cores))} leave no core near GPU {names}: "
    spare = [piece for piece in space.cores if piece.first not in given]
    if len(spare) >= len(lost):
        space.warn(told + f"a fair part of the {len(spare)} cores that are near no other GPU is used")
        for i, gpu in enumerate(lost):
            size = min(max(1, len(space.cores) // len(everyone)), len(spare) // (len(lost) - i))
            order = near(spare, space.machine, -1 if gpu.numa_node is None else gpu.numa_node)
            homes[gpu.address] = order[:size]
            spare = [piece for piece in spare if piece not in order[:size]]
        return homes, frozenset(gpu.address for gpu in lost)
    space.warn(told + "every GPU gets a fair part of what is allowed")
    shares = deal_or_share(by_node(space.cores), len(everyone))
    fair = {gpu.address: share for gpu, share in zip(everyone, shares, strict=True)}
    return fair, frozenset(fair)


def _parted(space: Space, users: Mapping[CpuSet, int]) -> dict[CpuSet, list[Piece]]:
    """The usable cores of each set of CPUs, with so many users. Where sets overlap, what several have goes to those
    that have the fewest cores for each user.
    """
    sets = sorted(users, key=lambda cpus: (len(cpus), min(cpus, default=-1)))
    common: dict[tuple[CpuSet, ...], list[Piece]] = {}
    for piece in space.cores:
        common.setdefault(tuple(cpus for cpus in sets if piece.first in cpus), []).append(piece)
    own: dict[CpuSet, list[Piece]] = {cpus: [] for cpus in users}
    for owners, cores in sorted(common.items(), key=lambda item: len(item[0])):
        counts = dict.fromkeys(owners, 0)
        for _ in cores if owners else ():
            counts[min(owners, key=lambda cpus: (len(own[cpus]) + counts[cpus]) / users[cpus])] += 1
        start = 0
        for cpus in sorted(owners, key=min):
            own[cpus] += cores[start : start + counts[cpus]]
            start += counts[cpus]
    return {cpus: sorted(cores, key=lambda piece: piece.first) for cpus, cores in own.items()}


def _home_reason(space: Space, gpu: Gpu, home: Sequence[Piece], *, fair: bool) -> str:
    if fair:
        return f"{len(home)} of all {len(space.cores)} cores, a part for each of {len(space.machine.gpus)} GPUs"
    mates = sum(1 for other in space.machine.gpus if other.local_cpus == gpu.local_cpus)
    parted = "" if mates == 1 else f", divided among {mates} GPUs"
    return f"{len(home)} of the {len(space.near(gpu.local_cpus))} cores there{parted}"


def _whole(space: Space, gpu: Gpu) -> Share:
    """node, socket and core-complex: torch's sets, less what other jobs hold. Ranks of one job may meet in them."""
    policy, local = space.request.policy, space.near(gpu.local_cpus)
    if policy == "socket":
        wish = _socket(space, local)
    elif policy == "core-complex":
        wish = _complex(space, gpu, local)
    else:
        wish = local
    free = [piece for piece in wish if piece.free]
    share = Share(free, [f"{len(free) or 'no'} free cores of its {policy}"])
    if not free:
        _fill(space, [(_Plan(gpu, wish, local, len(wish), far=False), share)])
    space.take(share.cores)
    return share


def _socket(space: Space, local: Sequence[Piece]) -> list[Piece]:
    """Every node whose lowest usable CPU is in the package of the lowest usable CPU of the GPU's node, as in torch."""
    nodes = group(space.cores, lambda piece: piece.node)
    home = next(node for node in nodes if node[0].node == local[0].node)
    package = next(cpus for cpus in space.machine.packages if home[0].first in cpus)
    return [piece for node in nodes if node[0].first in package for piece in node]


def _complex(space: Space, gpu: Gpu, local: Sequence[Piece]) -> list[Piece]:
    """torch's choice, GPU i of a node the i-th biggest complex there; the next ones where other jobs are."""
    groups = grouped(space.machine, "core-complex", local)
    start = [other.address for other in space.machine.gpus if other.local_cpus == gpu.local_cpus].index(gpu.address)
    turns = [groups[(start + i) % len(groups)] for i in range(len(groups))]
    chosen = (
        next((cores for cores in turns if len(space.free(cores)) == len(cores)), None)
        or next((cores for cores in turns if all(piece.free for piece in cores)), None)
        or max(turns, key=lambda cores: len(space.free(cores)))
    )
    if any(piece.first in space.taken for piece in chosen):
        space.warn(f"there are fewer core complexes than GPUs, so some ranks share CPUs {format_list(cpus_of(chosen))}")
    if chosen[0].cache >= 0 and not space.machine.llc[chosen[0].cache] <= cpus_of(local):
        space.warn("the affinity leaves only a part of some core complexes")
    return chosen
