"""Which GPUs a job means, or gets. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtuned import cuda
from torchtuned.errors import Busy, InvalidRequest, NoSuchGpu, Unplaceable
from torchtuned.placement.grants import Grant, Request
from torchtuned.topology import Gpu, Topology


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """`gpus` in the job's order; `leased` addresses nobody else gets; `chosen`: picked here, the job has yet to hear
    which; `named`: rank i surely uses GPU i. `unbound` says why CPUs cannot be chosen, "" if they can.
    """

    gpus: tuple[Gpu, ...] = ()
    leased: tuple[str, ...] = ()
    chosen: bool = False
    named: bool = True
    unbound: str = ""
    warnings: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


def wanted_gpus(machine: Topology, in_force: Sequence[Grant], request: Request) -> Wanted:
    """Resolve a request's GPUs. NoSuchGpu, InvalidRequest, Unplaceable (more than there are), Busy (leased)."""
    leased = {address for grant in in_force for address in grant.gpus}
    here = cuda.counted(machine.gpus)
    if isinstance(request.gpus, tuple):
        return _named(machine, leased, request, request.gpus)
    trouble = _trouble(machine, in_force, request)
    meant: cuda.Meaning | None = None
    if request.cuda_visible_devices is not None:
        meant = cuda.meaning(request.cuda_visible_devices, request.cuda_device_order, machine.gpus)
    if request.gpus is not None:
        return _leases(machine, _visible(here, meant), leased, request.gpus, trouble)
    if meant is None:
        return _unsaid(here, leased, request, trouble, "no GPU is named")
    notes = tuple(note for note in (meant.note,) if note)
    if meant.gpus is None:
        if len({gpu.local_cpus for gpu in here}) == 1 and here[0].local_cpus:
            return _unsaid(here, leased, request, trouble, meant.reason)
        return Wanted(unbound=meant.reason, warnings=notes)
    gpus = tuple(gpu for address in meant.gpus for gpu in machine.gpus if gpu.address == address)
    busy = [address for address in meant.gpus if address in leased]
    if busy:
        notes += (f"CUDA_VISIBLE_DEVICES names {', '.join(busy)}, which another job has",)
    return Wanted(gpus=gpus, leased=meant.gpus, unbound=_unknown(gpus), warnings=notes)


def _trouble(machine: Topology, in_force: Sequence[Grant], request: Request) -> dict[str, int]:
    """Which GPUs to choose last: 1 for those without a free usable CPU nearby, 2 for those whose place is unknown."""
    usable = machine.allowed if request.affinity is None else machine.allowed & request.affinity
    usable -= machine.isolated.union(*(grant.cpus for grant in in_force if grant.bound))
    return {gpu.address: 2 * (not gpu.local_cpus) or int(gpu.local_cpus.isdisjoint(usable)) for gpu in machine.gpus}


def _unknown(gpus: Sequence[Gpu]) -> str:
    lost = [gpu.address for gpu in gpus if not gpu.local_cpus]
    return f"nothing tells which CPUs are near GPU {', '.join(lost)}" if lost else ""


def _named(machine: Topology, leased: set[str], request: Request, names: Sequence[str]) -> Wanted:
    gpus: list[Gpu] = []
    for name in names:
        fits = [gpu for gpu in machine.gpus if name in (gpu.address, gpu.uuid)]
        if not fits:
            known = ", ".join(gpu.address for gpu in machine.gpus) or "none"
            raise NoSuchGpu("no such GPU", where=name, hint=f"GPUs here: {known}")
        if fits[0] in gpus:
            raise InvalidRequest("named twice", where=f"GPU {name}")
        gpus.append(fits[0])
    busy = ", ".join(gpu.address for gpu in gpus if gpu.address in leased)
    notes: tuple[str, ...] = ()
    if busy and request.insist and not request.shared:
        raise Busy(f"another job has GPU {busy}", hint="wait with --wait, share with --shared")
    if busy and not request.insist:
        gpus = [gpu for gpu in gpus if gpu.address not in leased] or gpus
        notes = (f"GPU {busy}: another job has it, so it is {'shared' if gpus[0].address in leased else 'left out'}",)
    return Wanted(
        gpus=tuple(gpus),
        leased=tuple(gpu.address for gpu in gpus),
        chosen=bool(gpus),
        unbound=_unknown(gpus),
        warnings=notes,
    )


def _visible(here: Sequence[Gpu], meant: cuda.Meaning | None) -> list[Gpu]:
    """Where the user narrowed the GPUs already, the choice is among those."""
    if meant is None or meant.gpus is None:
        return list(here)
    return [gpu for gpu in here if gpu.address in meant.gpus]


def _leases(machine: Topology, here: Sequence[Gpu], leased: set[str], count: int, trouble: Mapping[str, int]) -> Wanted:
    """`count` free GPUs: of the node that they fill best, else of as few and as near nodes as can be."""
    if count < 0:
        raise InvalidRequest("not a number of GPUs", where=f"--gpus {count}")
    if count == 0:
        return Wanted()
    if count > len(here):
        raise Unplaceable(f"there are {len(here)} GPUs here", where=f"--gpus {count}")
    free = [gpu for gpu in here if gpu.address not in leased]
    if count > len(free):
        raise Busy(f"{len(free)} of {len(here)} GPUs are free", where=f"--gpus {count}", hint="wait with --wait")
    nodes: dict[object, list[Gpu]] = {}
    for gpu in free:
        nodes.setdefault(gpu.local_cpus, []).append(gpu)
    enough = [mates for mates in nodes.values() if len(mates) >= count]
    if enough:
        chosen = min(enough, key=lambda mates: (trouble[mates[0].address], len(mates)))[:count]
    else:
        home = min(nodes.values(), key=lambda mates: (trouble[mates[0].address], -len(mates)))
        order = {node.id: i for i, node in enumerate(machine.nearest_nodes(_node(home[0])))}
        others = [gpu for gpu in free if gpu not in home]
        others.sort(key=lambda gpu: (trouble[gpu.address], order.get(_node(gpu), len(order))))
        chosen = (home + others)[:count]
    gpus = tuple(gpu for gpu in free if gpu in chosen)
    return Wanted(
        gpus=gpus,
        leased=tuple(gpu.address for gpu in gpus),
        chosen=True,
        unbound=_unknown(gpus),
        reasons=(f"{count} of {len(free)} free GPUs",),
    )


def _node(gpu: Gpu) -> int:
    return -1 if gpu.numa_node is None else gpu.numa_node


def _unsaid(here: Sequence[Gpu], leased: set[str], request: Request, trouble: Mapping[str, int], why: str) -> Wanted:
    """GPUs are there and none is named: the share of the first free one for each rank, and no lease."""
    placed = [gpu for gpu in here if gpu.local_cpus]
    if not placed:
        return Wanted(unbound=_unknown(here)) if here else Wanted()
    waiting = sorted(placed, key=lambda gpu: (gpu.address in leased, trouble[gpu.address]))
    chosen = waiting[: request.ranks or 1]
    share = "one GPU" if len(chosen) == 1 else f"{len(chosen)} GPUs"
    return Wanted(
        gpus=tuple(gpu for gpu in here if gpu in chosen),
        named=False,
        reasons=(f"{why}: the job gets the cores of {share} and sees all GPUs; say --gpus N for some of its own",),
    )
