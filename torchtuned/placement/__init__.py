"""Placement: the pure function (topology, grants in force, request) -> grant.

The daemon, the wrapper without a daemon, and a dry look all call this one, so they agree. Cores are never cut, ranks
of a job get parts of its share, and what could not be had as wished is a warning that names the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchtuned.cpuset import CpuSet, format_list
from torchtuned.errors import InvalidRequest
from torchtuned.placement.cpushares import cpu_shares
from torchtuned.placement.dealing import cpus_of, deal_or_share
from torchtuned.placement.documents import grant_from_json, grant_to_json, request_from_json, request_to_json
from torchtuned.placement.gpushares import Share, gpu_shares
from torchtuned.placement.grants import Grant, Rank, Request, Rules
from torchtuned.placement.space import Space, cpus_wish, space_for
from torchtuned.placement.wanted import Wanted, wanted_gpus
from torchtuned.topology import Gpu, Topology
from torchtuned.words import MAX_RANKS, MEMORY, POLICIES

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

_HOW = {
    "numa_node": "on node {}",
    "nearest-node": "on node {}, which has no CPUs: the nearest that has",
    "local_cpulist": "by the CPUs that its device file names",
    "parent": "by the bridge above it",
    "nvml": "by its driver",
    "single-node": "on a machine with one node",
}


def place(topology: Topology, in_force: Sequence[Grant], request: Request, rules: Rules | None = None) -> Grant:
    """Find a place for a job. Deterministic.

    InvalidRequest, NoSuchGpu: the request makes no sense here. Unplaceable: it never fits. Busy: not now.
    """
    _check(request)
    space = space_for(topology, in_force, request, rules or Rules())
    wanted = wanted_gpus(topology, in_force, request)
    for note in wanted.warnings:
        space.warn(note)
    if wanted.unbound:
        return _unbound(space, wanted)
    if wanted.gpus:
        ranks = _gpu_ranks(space, wanted)
    else:
        shares, why = cpu_shares(space, request.ranks or 1)
        ranks = _ranks(space, [(Share(cores, [why]), None) for cores in shares])
    return _grant(space, wanted, ranks)


def _check(request: Request) -> None:
    for value, known, where in ((request.policy, POLICIES, "--policy"), (request.memory, MEMORY, "--memory")):
        if value not in known:
            raise InvalidRequest("not known", where=f"{where} {value}", hint=f"one of {', '.join(known)}")
    if request.ranks is not None and not 1 <= request.ranks <= MAX_RANKS:
        raise InvalidRequest("not a number of ranks", where=f"--ranks {request.ranks}", hint=f"from 1 to {MAX_RANKS}")
    if request.cpu_max is not None and request.cpu_max < 1:
        raise InvalidRequest("not a number of CPUs", where=f"--cpu-max {request.cpu_max}", hint="at least 1")
    cpus_wish(request.cpus)


def _gpu_ranks(space: Space, wanted: Wanted) -> list[Rank]:
    """Rank i gets the share of GPU i; more ranks than GPUs divide the shares, one alone has them all."""
    gpus, shares = wanted.gpus, gpu_shares(space, wanted.gpus)
    count = space.request.ranks or (len(gpus) if wanted.named else 1)
    if count == 1:
        cores = list({piece.first: piece for share in shares for piece in share.cores}.values())
        told = zip(gpus, shares, strict=True)
        reasons = [f"{_known(gpu)}: {reason}" for gpu, share in told for reason in share.reasons]
        return _ranks(space, [(Share(cores, reasons), gpus[0])], named=wanted.named)
    gpu_of = [rank * len(gpus) // count if count > len(gpus) else rank for rank in range(count)]
    found: list[tuple[Share, Gpu | None]] = []
    for i, (gpu, share) in enumerate(zip(gpus, shares, strict=True)):
        mates = gpu_of.count(i)
        parts = [share.cores] * mates
        reasons = [f"{_known(gpu)}: {reason}" for reason in share.reasons]
        if mates > 1:
            reasons.append(f"{mates} ranks divide the share of this GPU")
            if space.request.policy == "exclusive":
                parts = deal_or_share(share.cores, mates)
        found += [(Share(part, reasons), gpu) for part in parts]
    return _ranks(space, found, named=wanted.named)


def _known(gpu: Gpu) -> str:
    return f"GPU {gpu.address} ({_HOW[gpu.locality].format(gpu.numa_node)})"


def _unbound(space: Space, wanted: Wanted) -> Grant:
    """Where the right CPUs are not known, binding to a guess would be worse than binding to nothing."""
    machine, request, allowed = space.machine, space.request, space.allowed
    count = request.ranks or max(1, len(wanted.gpus))
    threads = len(space.cores) // max(len(machine.gpus), count)
    quota = threads if request.cpu_max is None else request.cpu_max // count
    threads = max(1, min(threads, space.rules.omp_max_gpu, quota))
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
        reasons=(*wanted.reasons, *space.left_out()),
        bound=False,
        gpus_chosen=wanted.chosen,
    )


def _ranks(space: Space, shares: Sequence[tuple[Share, Gpu | None]], *, named: bool = True) -> list[Rank]:
    """Number the shares and give each its threads: its cores, divided among all that compute there, within quota."""
    users: dict[int, int] = {}
    for share, _ in shares:
        for piece in share.cores:
            users[piece.first] = users.get(piece.first, 0) + 1
    if space.request.policy == "exclusive" and any(count > 1 for count in users.values()):
        space.warn("there are fewer cores than ranks, so some ranks share a core")
    quota = space.request.cpu_max
    ranks = []
    for i, (share, gpu) in enumerate(shares):
        threads = len(share.cores) // max(users[piece.first] for piece in share.cores)
        reasons = list(share.reasons)
        if space.shared:
            threads //= 1 + space.jobs_on(share.cores)
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


def _grant(space: Space, wanted: Wanted, ranks: list[Rank]) -> Grant:
    cpus = frozenset[int]().union(*(rank.cpus for rank in ranks))
    cores = [piece for piece in space.cores if not piece.cpus.isdisjoint(cpus)]
    threads = len(cores) // (1 + space.jobs_on(cores) if space.shared else 1)
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
        reasons=(*wanted.reasons, *space.left_out()),
        gpus_chosen=wanted.chosen,
    )


def _memory(machine: Topology, cpus: CpuSet) -> CpuSet:
    """The nodes of these CPUs, as far as their memory is allowed; else the nearest whose memory is."""
    own = [node.id for node in machine.nodes if not node.cpus.isdisjoint(cpus)]
    allowed = frozenset(own) & machine.allowed_nodes
    if allowed or not own:
        return allowed
    others = [node.id for node in machine.nearest_nodes(own[0]) if node.id in machine.allowed_nodes]
    return frozenset(others[:1]) or machine.allowed_nodes
