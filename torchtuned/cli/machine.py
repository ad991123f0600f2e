"""The commands about the machine and a place on it: topology, place. None of them needs the daemon."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path

from torchtuned import discover
from torchtuned.cli import render
from torchtuned.cli.command import FINE, note, print_json
from torchtuned.configfiles import read_config
from torchtuned.cpulimits import limits
from torchtuned.cpuset import CpuSet, format_list, parse_list
from torchtuned.errors import InvalidRequest, TorchtunedError
from torchtuned.host import Host
from torchtuned.placement import place as place_job
from torchtuned.placement.documents import answer, grants_in_force, topology_document
from torchtuned.placement.grants import Grant, Request, Rules
from torchtuned.topology import Gpu, Topology
from torchtuned.words import POLICIES


def sysroot_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sysroot", metavar="DIR", default="/", help="read sys/ and proc/ below DIR, not this machine's"
    )


def host_of(args: argparse.Namespace) -> Host:
    if not Path(args.sysroot).is_dir():
        raise InvalidRequest("no such folder", where=f"--sysroot {args.sysroot}", hint="name one that holds sys/")
    return Host(args.sysroot)


def watched(host: Host) -> tuple[tuple[str, str], ...]:
    """Further PCI devices that count as GPUs ([gpu] watch); none of a configuration with faults, which others tell."""
    try:
        return read_config(host, None).gpu.watch
    except TorchtunedError:
        return ()


def rules_of(host: Host) -> Rules:
    """What the administrator keeps free ([jobs]); as for a job, without a configuration that has faults."""
    try:
        return read_config(host, None).rules()
    except TorchtunedError as error:
        if host.exists("/etc/torchtuned"):
            note(f"the configuration is not used: {str(error).splitlines()[0]}")
        return Rules()


def _discover(host: Host) -> Topology:
    return discover.topology(host, caller=os.getpid() if host.real else None, watch=watched(host))


# topology


def topology(args: argparse.Namespace) -> int:
    found = _discover(host_of(args))
    if args.json:
        print_json(topology_document(found))
        return FINE
    rows = [
        ("CPUs online", _cpus(found.online)),
        ("CPUs you may use", _cpus(found.allowed)),
        ("Isolated CPUs", format_list(found.isolated) or "none"),
        ("Cores", f"{len(found.cores)}, {_threads(found)}"),
        ("Packages", "; ".join(f"CPUs {format_list(cpus)}" for cpus in found.packages) or "unknown"),
        ("L3 caches", "; ".join(map(format_list, found.l3)) or "unknown"),
    ]
    rows += [
        (f"NUMA node {node.id}", f"CPUs {format_list(node.cpus)}" if node.cpus else "memory only")
        for node in found.nodes
    ]
    rows += [(f"GPU {gpu.address}", _gpu(gpu)) for gpu in found.gpus]
    if not found.gpus:
        rows.append(("GPUs", "none found"))
    render.table(("What", "Found"), rows, styles=("bold",))
    return FINE


def _cpus(cpus: CpuSet) -> str:
    return f"{format_list(cpus) or 'none'} ({len(cpus)})"


def _threads(found: Topology) -> str:
    counts = sorted({len(core.cpus) for core in found.cores})
    kinds = len({core.kind for core in found.cores})
    each = f"{' or '.join(map(str, counts)) or 'no'} CPU{'' if counts == [1] else 's'} each"
    return each + (f", {kinds} kinds" if kinds > 1 else "")


def _gpu(gpu: Gpu) -> str:
    where = f"CPUs {format_list(gpu.local_cpus)}" if gpu.local_cpus else "near no CPUs that the machine tells of"
    node = "" if gpu.numa_node is None else f", node {gpu.numa_node}"
    return f"{gpu.vendor}:{gpu.device}{node}, {where} (known by {gpu.locality})"


# place


def place_options(parser: argparse.ArgumentParser) -> None:
    sysroot_option(parser)
    parser.add_argument("--gpus", metavar="WHICH", help="addresses parted by commas, a number, or none; default: all")
    parser.add_argument("--ranks", metavar="N", help="processes to place; default: one for each GPU, else 1")
    parser.add_argument(
        "--policy", metavar="NAME", default="exclusive", help=f"{', '.join(POLICIES)}; default: exclusive"
    )
    parser.add_argument("--affinity", metavar="LIST", help="take CPUs out of this list only, as in 0-3,8")
    parser.add_argument("--cpus", metavar="X", help="N physical cores, N%% of the machine's, node, or all")
    parser.add_argument("--cpu-max", metavar="N", help="CPU time of at most N CPUs, as cpu.max of a container")
    parser.add_argument("--in-force", metavar="FILE", help="JSON list of grants that others hold")


def place(args: argparse.Namespace) -> int:
    host = host_of(args)
    found = _discover(host)
    limit = _number("--cpu-max", args.cpu_max, least=1)
    if limit is None:
        limit = limits(host, os.getpid()).cpu_max
    request = Request(
        gpus=_gpus(args.gpus, found),
        ranks=_number("--ranks", args.ranks, least=1),
        policy=args.policy,
        cpus=args.cpus,
        affinity=_list("--affinity", args.affinity),
        cpu_max=limit,
        insist=args.gpus is not None,
    )
    grant = place_job(found, _in_force(args.in_force), request, rules_of(host))
    if args.json:
        print_json(answer(grant))
        return FINE
    if args.in_force is None:
        print("On an idle machine; torchtuned-run --explain COMMAND says where it would go now.")
    print_grant(grant)
    return FINE


def print_grant(grant: Grant) -> None:
    render.table(
        ("Rank", "GPU", "CPUs", "Memory", "Threads"),
        [
            (
                str(rank.rank),
                rank.gpu or "none",
                format_list(rank.cpus),
                f"node {format_list(rank.memory_nodes)}" if rank.memory_nodes else "any",
                str(rank.omp_num_threads),
            )
            for rank in grant.ranks
        ],
        styles=("bold",),
    )
    reasons = _once([*(reason for rank in grant.ranks for reason in rank.reasons), *grant.reasons])
    texts = [("because", reason) for reason in reasons] + [("warning", warning) for warning in grant.warnings]
    if texts:
        render.facts("", texts)


def _once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _number(option: str, text: str | None, *, least: int) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text) >= least):
        raise InvalidRequest("not a number that fits", where=f"{option} {text}", hint=f"a whole number from {least}")
    return int(text)


def _list(option: str, text: str | None) -> CpuSet | None:
    if text is None:
        return None
    try:
        return parse_list(text)
    except ValueError as error:
        raise InvalidRequest(str(error), where=f"{option} {text}", hint="as in 0-3,8") from None


def _gpus(text: str | None, found: Topology) -> tuple[str, ...] | int:
    """All in PCI order when nothing is said; a number stays a number, for placement to choose."""
    if text is None:
        return tuple(gpu.address for gpu in found.gpus)
    if text == "none":
        return ()
    if text.isascii() and text.isdigit():
        return _number("--gpus", text, least=0) or 0
    return tuple(part.strip() for part in text.split(","))


def _in_force(path: str | None) -> list[Grant]:
    if path is None:
        return []
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(error.strerror or "cannot be read", where=f"--in-force {path}") from None
    except ValueError as error:
        raise InvalidRequest(
            f"not JSON: {error}", where=path, hint="a list of grants, as place --json prints"
        ) from None
    return grants_in_force(document)
