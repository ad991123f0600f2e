"""Placement: the pure function (topology, grants in force, request) -> grant.

Every GPU has a home: its part of the whole cores near it, cut as torch's exclusive policy cuts them, whether or not
its neighbours are in use. So two jobs that start at different times on different GPUs find different cores. Where a
home is taken (by a job without GPUs, say) a GPU gets other free cores near it, then free cores far off, and only when
the machine has none left is anything shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torchtuned.cpuset import CpuSet, format_list
from torchtuned.dealing import Piece, cpus_of, deal, deal_or_share, deal_ranks, group, near, pick, pieces
from torchtuned.documents import grant_from_json, grant_to_json, request_from_json, request_to_json
from torchtuned.errors import Busy, InvalidRequest, Unplaceable
from torchtuned.grants import MEMORY, POLICIES, Grant, Rank, Request, Rules
from torchtuned.topology import Gpu, Topology
from torchtuned.wanted import Wanted, wanted_gpus

__all__ = [
    "Grant",
    "Rank",
    "Request",
    "Rules",
    "grant_from_json",
    "grant_to_json",
    "place",
    "request_from_json",
    "request_to_json",
]

REMEDY = "to get cores of its own: start jobs with --cpus N, let the administrator set slots, or wait with --wait"


@dataclass(kw_only=True)
class _Space:
    """What there is to hand out, and what was said about it on the way."""

    machine: Topology
    in_force: Sequence[Grant]
    request: Request
    rules: Rules
    cores: list[Piece]
    taken: set[int] = field(default_factory=set)  # first CPUs of the pieces this job has already
    shared: bool = False
    warnings: list[str] = field(default_factory=list)

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def free(self, cores: Iterable[Piece]) -> list[Piece]:
        return [piece for piece in cores if piece.free and piece.first not in self.taken]

    def take(self, cores: list[Piece]) -> list[Piece]:
        self.taken.update(piece.first for piece in cores)
        return cores


@dataclass
class _Share:
    """What one GPU, or one rank without a GPU, gets."""

    cores: list[Piece]
    reasons: list[str]


def place(topology: Topology, in_force: Sequence[Grant], request: Request, rules: Rules | None = None) -> Grant:
    """Find a place for a job. Deterministic; the same code runs in the daemon, in the wrapper and for a dry look.

    InvalidRequest, NoSuchGpu: the request makes no sense here. Unplaceable: it never fits. Busy: not now.
    """
    rules = rules or Rules()
    _check(request)
    space = _space(topology, in_force, request, rules)
    wanted = wanted_gpus(topology, in_force, request)
    for note in wanted.warnings:
        space.warn(note)
    if wanted.unbound:
        return _unbound(space, wanted)
    if wanted.gpus:
        shares = _gpu_shares(space, wanted.gpus)
        ranks = _gpu_ranks(space, wanted, shares)
    else:
        ranks = _cpu_ranks(space, request.ranks or 1)
    return _grant(space, wanted, ranks)


def _check(request: Request) -> None:
    for value, known, where in ((request.policy, POLICIES, "--policy"), (request.memory, MEMORY, "--memory")):
        if value not in known:
            raise InvalidRequest("not known", where=f"{where} {value}", hint=f"one of {', '.join(known)}")
    if request.ranks is not None and not 1 <= request.ranks <= 4096:
        raise InvalidRequest("not a number of ranks", where=f"--ranks {request.ranks}", hint="from 1 to 4096")
    if request.cpu_max is not None and request.cpu_max < 1:
        raise InvalidRequest("not a number of CPUs", where=f"--cpu-max {request.cpu_max}", hint="at least 1")
    _cpus_wish(request.cpus)


def _cpus_wish(text: str | None) -> tuple[str, int]:
    """("", 0) when nothing is said, ("cores", 4), ("percent", 50), ("node", 0) or ("all", 0). InvalidRequest."""
    if text is None:
        return "", 0
    if text in ("node", "all"):
        return text, 0
    number = text.removesuffix("%")
    if number.isascii() and number.isdigit() and len(number) < 7 and int(number) > 0:
        if number == text:
            return "cores", int(number)
        if int(number) <= 100:
            return "percent", int(number)
    raise InvalidRequest("not an amount of CPUs", where=f"--cpus {text}", hint="cores as in 4, 50%, node or all")


def _space(machine: Topology, in_force: Sequence[Grant], request: Request, rules: Rules) -> _Space:
    allowed = machine.allowed if request.affinity is None else machine.allowed & request.affinity
    if not allowed:
        asked = machine.allowed if request.affinity is None else request.affinity
        raise Unplaceable(
            f"none of the CPUs {format_list(asked) or 'allowed here'} is online and allowed",
            where="affinity",
            hint=f"online are {format_list(machine.online)}",
        )
    busy = frozenset().union(*(grant.cpus for grant in in_force if grant.bound)) if not request.shared else frozenset()
    space = _Space(machine=machine, in_force=in_force, request=request, rules=rules, cores=[], shared=request.shared)
    for kept, words in (
        (_kept(machine, rules.reserved | machine.isolated), ""),
        (_kept(machine, rules.reserved), "only isolated CPUs are allowed here, so the job gets those"),
        (frozenset(), "only reserved CPUs are allowed here, so the job gets those"),
    ):
        space.cores = pieces(machine, allowed - kept, busy)
        if space.cores:
            if words:
                space.warn(words)
            break
    return space


def _kept(machine: Topology, kept: CpuSet) -> CpuSet:
    """CPUs that jobs do not get, with their siblings: half of a core would disturb the half that is kept."""
    return frozenset(cpu for core in machine.cores if not core.cpus.isdisjoint(kept) for cpu in core.cpus)


# Jobs without GPUs


def _cpu_ranks(space: _Space, count: int) -> list[Rank]:
    request = space.request
    free = space.free(space.cores)
    if not free:
        return _share_with_least_loaded(space, count)
    kind, number = _cpus_wish(request.cpus)
    total = _total(space)
    if kind in ("cores", "percent"):
        chosen = _counted(space, free, kind, number, total)
        why = f"{len(chosen)} cores for --cpus {request.cpus}"
    elif kind == "node":
        node = max(group(free, lambda piece: piece.node), key=len)
        chosen, why = node, f"all free cores of node {node[0].node}" if node[0].node >= 0 else "all free cores"
    elif not kind and space.rules.slots and not request.shared:
        chosen = _slot(space, free, total)
        why = f"{len(chosen)} of {total} cores: the machine is cut for {space.rules.slots} jobs"
    else:
        chosen, why = free, f"all {len(free)} free cores"
    space.take(chosen)
    if request.policy == "exclusive":
        shares = deal_ranks(chosen, count)
    else:
        shares = _whole_groups(space, chosen, count)
        why += f", by {request.policy}"
    return _ranks(space, [(_Share(share, [why]), None) for share in shares])


def _total(space: _Space) -> int:
    """The machine's cores that jobs may have at all."""
    kept = space.rules.reserved | space.machine.isolated
    return max(1, sum(1 for core in space.machine.cores if core.cpus.isdisjoint(kept)))


def _counted(space: _Space, free: list[Piece], kind: str, number: int, total: int) -> list[Piece]:
    wish = number if kind == "cores" else max(1, total * number // 100)
    if kind == "cores" and wish > len(space.cores):
        raise Unplaceable(
            f"{wish} cores are more than the {len(space.cores)} that this job may have",
            where=f"--cpus {space.request.cpus}",
            hint="ask for fewer, or start it with a wider affinity",
        )
    chosen = pick(free, wish)
    if len(chosen) < wish and kind == "cores":
        if space.rules.when_full != "share":
            raise Busy(f"{wish} cores wanted, {len(free)} free", where=f"--cpus {wish}", hint="wait with --wait")
        space.warn(f"only {len(chosen)} of the {wish} cores asked for are free; wait with --wait, share with --shared")
    return chosen


def _slot(space: _Space, free: list[Piece], total: int) -> list[Piece]:
    """The first slot that is free as a whole, else that many free cores: never a part of what happens to be free."""
    slots = min(space.rules.slots, len(space.cores))
    ordered = [piece for node in group(space.cores, lambda piece: piece.node) for piece in node]
    for slot in deal_or_share(ordered, slots):
        if all(piece.free for piece in slot):
            return slot
    return pick(free, max(1, total // space.rules.slots))


def _whole_groups(space: _Space, cores: list[Piece], count: int) -> list[list[Piece]]:
    """For ranks without GPUs under node, socket and core-complex: a whole group each, dealt in order."""
    groups = _grouped(space.machine, space.request.policy, cores)
    if count <= len(groups):
        groups = sorted(sorted(groups, key=lambda cores: -len(cores))[:count], key=lambda cores: cores[0].first)
    else:
        space.warn(f"{count} ranks share {len(groups)} {space.request.policy} groups of cores")
    return [groups[i * len(groups) // count] for i in range(count)]


def _grouped(machine: Topology, policy: str, cores: Iterable[Piece]) -> list[list[Piece]]:
    if policy == "core-complex":
        return sorted(group(cores, lambda piece: piece.cache), key=lambda cores: (-len(cpus_of(cores)), cores[0].first))
    if policy == "node":
        return group(cores, lambda piece: piece.node)
    package = {cpu: i for i, cpus in enumerate(machine.packages) for cpu in cpus}
    return group(cores, lambda piece: package.get(piece.first, -1))


def _share_with_least_loaded(space: _Space, count: int) -> list[Rank]:
    """Nothing is free: go where most cores are left for each job."""
    _full(space)
    own = {piece.first: piece for piece in space.cores}
    places: list[list[Piece]] = []
    for grant in space.in_force:
        if grant.bound and (cores := [piece for piece in own.values() if not piece.cpus.isdisjoint(grant.cpus)]):
            places.append(cores)
    chosen = max(places, key=lambda cores: (len(cores) / _jobs_on(space, cores), -cores[0].first), default=space.cores)
    jobs = _jobs_on(space, chosen) - 1
    threads = max(1, len(chosen) // (jobs + 1))
    space.warn(
        f"no core is free: CPUs {format_list(cpus_of(chosen))} are shared with {jobs} other "
        f"job{'s' if jobs != 1 else ''}, {threads} threads each; {REMEDY}"
    )
    why = "no core is free; these have the fewest jobs for their number"
    return _ranks(space, [(_Share(share, [why]), None) for share in deal_or_share(chosen, count)])


def _full(space: _Space) -> None:
    """Mark the job as sharing, or refuse where the administrator says so."""
    if space.rules.when_full != "share":
        raise Busy("no core is free", where="CPUs", hint=REMEDY)
    space.shared = True


def _jobs_on(space: _Space, cores: Iterable[Piece]) -> int:
    """How many jobs these cores would have with this one."""
    cpus = cpus_of(cores)
    return 1 + sum(1 for grant in space.in_force if grant.bound and not grant.cpus.isdisjoint(cpus))


# Jobs with GPUs


def _gpu_shares(space: _Space, gpus: Sequence[Gpu]) -> list[_Share]:
    """One share for each GPU, in the same order."""
    policy = space.request.policy
    kind, number = _cpus_wish(space.request.cpus)
    if policy == "exclusive" or kind:
        return _exclusive(space, gpus, kind, number)
    return [_whole(space, gpu) for gpu in gpus]


def _exclusive(space: _Space, gpus: Sequence[Gpu], kind: str, number: int) -> list[_Share]:
    homes, fair = _homes(space, gpus)
    sizes = [len(homes[gpu.address]) for gpu in gpus]
    if kind in ("cores", "percent", "all"):
        free = space.free(space.cores)
        wish = len(free) if kind == "all" else number if kind == "cores" else max(1, _total(space) * number // 100)
        if kind == "cores" and wish > len(space.cores):
            _counted(space, free, kind, number, 0)
        sizes = [wish // len(gpus) + (i < wish % len(gpus)) for i in range(len(gpus))]
    pools = [_pool(space, gpu) for gpu in gpus]
    if kind == "node":
        for local in {gpu.local_cpus: pool for gpu, pool in zip(gpus, pools, strict=True)}.values():
            mates = [i for i, pool in enumerate(pools) if pool == local]
            for i, part in zip(mates, deal(space.free(local), len(mates)), strict=True):
                sizes[i] = max(1, len(part))
    # first what is everyone's own, so that nobody's shortage is filled from a neighbour's home
    shares = [
        _Share(space.take(space.free(homes[gpu.address])[:size]), [_home_reason(space, gpu, homes[gpu.address], fair=fair)])
        for gpu, size in zip(gpus, sizes, strict=True)
    ]
    for gpu, size, pool, share in zip(gpus, sizes, pools, shares, strict=True):
        _fill(space, gpu, share, pool, size, far=bool(kind) and kind != "node", home=homes[gpu.address])
    return shares


def _fill(
    space: _Space, gpu: Gpu, share: _Share, pool: list[Piece], size: int, *, far: bool, home: list[Piece]
) -> None:
    """Make up for home cores that others hold: near ones, then (asked for, or when there is nothing at all) far
    ones, then sharing.
    """
    if len(share.cores) < size and (more := pick(space.free(pool), size - len(share.cores))):
        share.cores += space.take(more)
        if not set(more) <= set(home):
            share.reasons.append(f"{len(more)} of them from elsewhere on its node")
    if (far or not share.cores) and len(share.cores) < size:
        node = pool[0].node if pool else gpu.numa_node if gpu.numa_node is not None else -1
        if more := near(space.free(space.cores), space.machine, node)[: size - len(share.cores)]:
            share.cores += space.take(more)
            if not far:
                space.warn(f"GPU {gpu.address}: no free core near it, so CPUs {format_list(cpus_of(more))} far from it")
    if not share.cores and home and all(piece.first in space.taken for piece in home):
        share.cores = home  # fewer cores than ranks: shared with a rank of the same job
        space.warn("there are fewer cores than GPUs, so some ranks share a core")
    elif not share.cores:
        _full(space)
        share.cores = home
        jobs = _jobs_on(space, home) - 1
        space.warn(
            f"GPU {gpu.address}: no core is free: CPUs {format_list(cpus_of(home))} are shared with {jobs} other "
            f"job{'s' if jobs != 1 else ''}; {REMEDY}"
        )
    elif len(share.cores) < size:
        space.warn(f"GPU {gpu.address}: only {len(share.cores)} of its {size} cores are free")


def _pool(space: _Space, gpu: Gpu) -> list[Piece]:
    """The usable cores near a GPU."""
    return [piece for piece in space.cores if piece.first in gpu.local_cpus]


def _homes(space: _Space, gpus: Sequence[Gpu]) -> tuple[dict[str, list[Piece]], bool]:
    """The home of every GPU of the machine, and whether it is a fair part of everything instead of its node's.

    GPUs that are near the same CPUs divide those; where one set lies inside another the inner one goes first.
    """
    machine = space.machine
    homes: dict[str, list[Piece]] = {gpu.address: [] for gpu in machine.gpus}
    given: set[int] = set()
    mates: dict[CpuSet, list[Gpu]] = {}
    for gpu in machine.gpus:
        mates.setdefault(gpu.local_cpus, []).append(gpu)
    for local in sorted(mates, key=lambda cpus: (len(cpus), min(cpus, default=-1))):
        near_by = [piece for piece in space.cores if piece.first in local and piece.first not in given]
        given |= {piece.first for piece in near_by}
        for gpu, share in zip(mates[local], deal(near_by, len(mates[local])), strict=True):
            homes[gpu.address] = share
    if all(homes[gpu.address] for gpu in gpus):
        return homes, False
    stranded = [gpu.address for gpu in gpus if not homes[gpu.address]]
    space.warn(
        f"CPUs {format_list(cpus_of(space.cores))} leave {', '.join(stranded)} no core nearby: "
        "every GPU gets a fair part of what is allowed"
    )
    ordered = [piece for node in group(space.cores, lambda piece: piece.node) for piece in node]
    shares = deal_or_share(ordered, len(machine.gpus))
    return {gpu.address: share for gpu, share in zip(machine.gpus, shares, strict=True)}, True


def _home_reason(space: _Space, gpu: Gpu, home: list[Piece], *, fair: bool) -> str:
    if fair:
        return f"a part of all allowed cores, among {len(space.machine.gpus)} GPUs"
    mates = sum(1 for other in space.machine.gpus if other.local_cpus == gpu.local_cpus)
    return f"{len(home)} of {len(_pool(space, gpu))} cores near it, among {mates} GPU{'s' if mates != 1 else ''}"


def _whole(space: _Space, gpu: Gpu) -> _Share:
    """node, socket and core-complex: torch's sets, less what other jobs hold. Ranks of one job may meet in them."""
    machine, policy = space.machine, space.request.policy
    local = _pool(space, gpu)
    if not local:
        return _exclusive(space, [gpu], "", 0)[0]
    pool = local
    if policy == "socket":
        pool = _socket(space, local)
    if policy == "core-complex":
        mates = [other.address for other in machine.gpus if other.local_cpus == gpu.local_cpus]
        groups = _grouped(machine, policy, local)
        start = mates.index(gpu.address)
        turns = [groups[(start + i) % len(groups)] for i in range(len(groups))]
        pool = next((cores for cores in turns if all(piece.free for piece in cores)), turns[0])
        if len(groups) < len(mates):
            space.warn(f"{len(mates)} GPUs share {len(groups)} core complexes")
        whole = machine.llc[pool[0].cache] if pool[0].cache >= 0 else frozenset()
        if not whole <= cpus_of(pool):
            space.warn(f"CPUs {format_list(cpus_of(pool))} are a part of the core complex {format_list(whole)}")
    cores = [piece for piece in pool if piece.free]
    share = _Share(cores, [f"the {policy} of its GPU"])
    _fill(space, gpu, share, local, len(pool) if not cores else 0, far=False, home=pool)
    return share


def _socket(space: _Space, local: list[Piece]) -> list[Piece]:
    """Every node whose lowest usable CPU is in the package of the lowest usable CPU near the GPU, as torch does it."""
    package = next((cpus for cpus in space.machine.packages if local[0].first in cpus), frozenset())
    nodes = group(space.cores, lambda piece: piece.node)
    return [piece for node in nodes if node[0].first in package for piece in node]


def _gpu_ranks(space: _Space, wanted: Wanted, shares: Sequence[_Share]) -> list[Rank]:
    """Rank i gets the share of GPU i; more ranks than GPUs divide the shares, one alone has them all."""
    gpus = wanted.gpus
    count = space.request.ranks or (len(gpus) if wanted.named else 1)
    if count == 1:
        cores = list({piece.first: piece for share in shares for piece in share.cores}.values())
        told = zip(gpus, shares, strict=True)
        reasons = [f"{_known(gpu)}: {reason}" for gpu, share in told for reason in share.reasons]
        return _ranks(space, [(_Share(cores, reasons), gpus[0])], named=wanted.named)
    gpu_of = [rank * len(gpus) // count if count > len(gpus) else rank for rank in range(count)]
    found: list[tuple[_Share, Gpu | None]] = []
    for i, (gpu, share) in enumerate(zip(gpus, shares, strict=True)):
        mates = gpu_of.count(i)
        parts = [share.cores] * mates
        reasons = [f"{_known(gpu)}: {reason}" for reason in share.reasons]
        if mates > 1:
            reasons.append(f"{mates} ranks divide the share of this GPU")
            if space.request.policy == "exclusive":
                parts = deal_or_share(share.cores, mates)
                if len(share.cores) < mates:
                    space.warn("there are fewer cores than ranks, so some ranks share a core")
        found += [(_Share(part, reasons), gpu) for part in parts]
    return _ranks(space, found, named=wanted.named)


def _known(gpu: Gpu) -> str:
    how = {
        "numa_node": f"on node {gpu.numa_node}",
        "nearest-node": f"on node {gpu.numa_node}, which has no CPUs; these are the nearest",
        "local_cpulist": "near the CPUs its device file names",
        "parent": "near the CPUs of the bridge above it",
        "nvml": "near the CPUs its driver names",
        "single-node": "this machine has one node",
    }
    return f"GPU {gpu.address} ({how.get(gpu.locality, gpu.locality)})"


def _unbound(space: _Space, wanted: Wanted) -> Grant:
    """Where the right CPUs are not known, binding to a guess would be worse than binding to nothing."""
    machine, request = space.machine, space.request
    allowed = machine.allowed if request.affinity is None else machine.allowed & request.affinity
    count = request.ranks or max(1, len(wanted.gpus))
    threads = len(space.cores) // max(len(machine.gpus), count)
    threads = max(1, min(threads, space.rules.omp_max_gpu, (request.cpu_max or threads) // count))
    nodes = _memory(machine, allowed)
    ranks = tuple(
        Rank(
            rank=i,
            gpu=wanted.gpus[i * len(wanted.gpus) // count].address if wanted.gpus else None,
            cpus=allowed,
            memory_nodes=nodes,
            omp_num_threads=threads,
            reasons=("bound to nothing: " + wanted.unbound,),
        )
        for i in range(count)
    )
    return Grant(
        cpus=allowed,
        memory_nodes=nodes,
        gpus=wanted.leased,
        shared=True,
        threads=min(len(space.cores), request.cpu_max or len(space.cores)),
        ranks=ranks,
        warnings=(*space.warnings, f"bound to nothing: {wanted.unbound}"),
        reasons=wanted.reasons,
        bound=False,
        gpus_chosen=wanted.chosen,
    )


# Putting it together


def _ranks(space: _Space, shares: Sequence[tuple[_Share, Gpu | None]], *, named: bool = True) -> list[Rank]:
    """Number the shares and give each its threads: its cores, divided among all that compute there, within quota."""
    users: dict[int, int] = {}
    for share, _ in shares:
        for piece in share.cores:
            users[piece.first] = users.get(piece.first, 0) + 1
    quota = space.request.cpu_max
    ranks = []
    for i, (share, gpu) in enumerate(shares):
        threads = len(share.cores) // max(users[piece.first] for piece in share.cores)
        reasons = list(share.reasons)
        if space.shared:
            threads //= _jobs_on(space, share.cores)
        if quota is not None and quota // len(shares) < threads:
            threads = quota // len(shares)
            reasons.append(f"{max(1, threads)} threads: a quota of {quota} CPUs holds for {len(shares)} ranks")
        if gpu is not None and threads > space.rules.omp_max_gpu:
            threads = space.rules.omp_max_gpu
            reasons.append(f"{threads} threads: the most for a rank with a GPU")
        cpus = cpus_of(share.cores)
        ranks.append(
            Rank(
                rank=i,
                gpu=gpu.address if gpu is not None and named else None,
                cpus=cpus,
                memory_nodes=_memory(space.machine, cpus),
                omp_num_threads=max(1, threads),
                reasons=tuple(reasons),
            )
        )
    return ranks


def _grant(space: _Space, wanted: Wanted, ranks: list[Rank]) -> Grant:
    cpus = frozenset[int]().union(*(rank.cpus for rank in ranks))
    cores = [piece for piece in space.cores if not piece.cpus.isdisjoint(cpus)]
    threads = len(cores) // (_jobs_on(space, cores) if space.shared else 1)
    nodes = _memory(space.machine, cpus)
    if space.request.memory == "bind":
        space.warn(f"memory bound to nodes {format_list(nodes)}: when those are full the kernel kills the job")
    return Grant(
        cpus=cpus,
        memory_nodes=nodes,
        gpus=wanted.leased,
        shared=space.shared,
        threads=max(1, min(threads, space.request.cpu_max or threads)),
        ranks=tuple(ranks),
        warnings=tuple(space.warnings),
        reasons=wanted.reasons,
        gpus_chosen=wanted.chosen,
    )


def _memory(machine: Topology, cpus: CpuSet) -> CpuSet:
    """The nodes of these CPUs, as far as their memory is allowed; else the nearest whose memory is."""
    own = [node.id for node in machine.nodes if not node.cpus.isdisjoint(cpus)]
    allowed = frozenset(own) & machine.allowed_nodes
    if allowed or not own:
        return allowed
    near_by: Callable[[int], int] = [node.id for node in machine.nearest_nodes(own[0])].index
    others = [node.id for node in machine.nodes if node.cpus and node.id in machine.allowed_nodes]
    return frozenset({min(others, key=near_by)}) if others else machine.allowed_nodes
