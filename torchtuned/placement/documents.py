"""Requests, grants and topologies as the JSON that travels over D-Bus, lies in files and is printed. Pure.

A request comes from anybody, so it is read strictly: an unknown word is an error that names it. A grant was written
by torchtuned itself, perhaps by a newer one, or is what `torchtuned place --json` printed; of it only what placement
needs is read.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchtuned.cpuset import CpuSet, format_list, parse_list
from torchtuned.errors import InvalidRequest
from torchtuned.placement.grants import Grant, Rank, Request
from torchtuned.topology import Gpu, Topology
from torchtuned.words import CONFINE, MAX_RANKS, MEMORY, POLICIES

TYPE_CHECKING = False  # `typing` would be imported before every job that places itself
if TYPE_CHECKING:
    from typing import Any, TypeVar

    T = TypeVar("T")

SCHEMA = 1
MAX_WORDS, MAX_LENGTH = 64, 256
TURNS = "\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_KINDS: Mapping[type, str] = {bool: "true or false", int: "a whole number"}


def topology_document(machine: Topology) -> dict[str, Any]:
    """What `torchtuned topology --json` prints."""
    return {
        "schema": SCHEMA,
        "online": format_list(machine.online),
        "allowed_cpus": format_list(machine.allowed),
        "isolated": format_list(machine.isolated),
        "cores": [format_list(core.cpus) for core in machine.cores],
        "core_kinds": [core.kind for core in machine.cores],
        "packages": [format_list(package) for package in machine.packages],
        "l3": [format_list(cpus) for cpus in machine.l3],
        "node_cpus": {str(node.id): format_list(node.cpus) for node in machine.nodes},
        "nodes_without_cpus": [node.id for node in machine.nodes if not node.cpus],
        "gpus": {
            gpu.address: {
                "vendor": gpu.vendor,
                "device": gpu.device,
                "numa_node": gpu.numa_node,
                "local_cpus": format_list(gpu.local_cpus),
                "locality": gpu.locality,
                "driver": gpu.driver,
                "uuid": gpu.uuid,
                "name": gpu.name,
            }
            for gpu in machine.gpus
        },
    }


def gpu_properties(gpu: Gpu, *, persistence: bool | None = None, job: str = "/") -> dict[str, Any]:
    """The properties of org.torchtuned1.Gpu; `job` is the path of the one that has it, "/" when none has."""
    return {
        "Address": gpu.address,
        "Uuid": gpu.uuid,
        "Name": gpu.name,
        "Driver": gpu.driver,
        "NumaNode": -1 if gpu.numa_node is None else gpu.numa_node,
        "Cpus": format_list(gpu.local_cpus),
        "Locality": gpu.locality,
        "PersistenceMode": "" if persistence is None else "on" if persistence else "off",
        "Job": job,
    }


def answer(grant: Grant) -> dict[str, Any]:
    """What `torchtuned place --json` prints."""
    return {
        "schema": SCHEMA,
        "cpus": format_list(grant.cpus),
        "memory_nodes": format_list(grant.memory_nodes),
        "gpus": list(grant.gpus),
        "shared": grant.shared,
        "bound": grant.bound,
        "threads": grant.threads,
        "ranks": [
            {
                "rank": rank.rank,
                "gpu": rank.gpu,
                "cpus": format_list(rank.cpus),
                "memory_nodes": format_list(rank.memory_nodes),
                "omp_num_threads": rank.omp_num_threads,
                "reasons": list(rank.reasons),
            }
            for rank in grant.ranks
        ],
        "warnings": list(grant.warnings),
        "reasons": list(grant.reasons),
    }


def grant_to_json(grant: Grant) -> dict[str, Any]:
    """A grant on the wire or in jobs.json; what the job table knows beside it (job, state, scope, …) goes on top."""
    return {**answer(grant), "gpus_chosen": grant.gpus_chosen}


def grant_from_json(document: object) -> Grant:
    """Read a grant: one of grant_to_json(), of the wire, or an answer of `place`. InvalidRequest."""
    fields = _object(document, "grant")
    ranks = fields.get("ranks", [])
    if not isinstance(ranks, list):
        raise _bad("grant.ranks", ranks, "a list")
    read = tuple(_rank(rank, i) for i, rank in enumerate(ranks))
    gpus = fields.get("gpus")
    return Grant(
        cpus=_cpus(fields, "cpus", "grant"),
        memory_nodes=_cpus(fields, "memory_nodes", "grant", default=""),
        gpus=_words(gpus, "grant.gpus") if gpus is not None else tuple(dict.fromkeys(r.gpu for r in read if r.gpu)),
        shared=_typed(fields, "shared", "grant", bool, default=False),
        threads=_typed(fields, "threads", "grant", int, default=1),
        ranks=read,
        warnings=_words(fields.get("warnings", []), "grant.warnings"),
        reasons=_words(fields.get("reasons", []), "grant.reasons"),
        bound=_typed(fields, "bound", "grant", bool, default=True),
        gpus_chosen=_typed(fields, "gpus_chosen", "grant", bool, default=False),
    )


def grants_in_force(document: object) -> list[Grant]:
    """Read what `torchtuned place --in-force FILE` names: a JSON list of grants. InvalidRequest."""
    if not isinstance(document, list):
        raise _bad("grants in force", document, "a list of grants, as place --json prints them")
    return [grant_from_json(entry) for entry in document]


def _rank(document: object, index: int) -> Rank:
    where = f"grant.ranks[{index}]"
    fields = _object(document, where)
    return Rank(
        rank=_typed(fields, "rank", where, int, default=index),
        gpu=_optional(fields, "gpu", where, str),
        cpus=_cpus(fields, "cpus", where),
        memory_nodes=_cpus(fields, "memory_nodes", where, default=""),
        omp_num_threads=_typed(fields, "omp_num_threads", where, int, default=1),
        reasons=_words(fields.get("reasons", []), f"{where}.reasons"),
    )


def request_to_json(request: Request) -> dict[str, Any]:
    """A request on the wire. The caller's own limits stay out: the daemon reads those itself."""
    return {
        "schema": SCHEMA,
        "command": [word[:MAX_LENGTH] for word in request.command[:MAX_WORDS]],
        "gpus": list(request.gpus) if isinstance(request.gpus, tuple) else request.gpus,
        "cuda_visible_devices": request.cuda_visible_devices,
        "cuda_device_order": request.cuda_device_order,
        "ranks": request.ranks,
        "policy": request.policy,
        "cpus": request.cpus,
        "shared": request.shared,
        "memory": request.memory,
        "confine": request.confine,
        "wait": request.wait,
    }


def request_from_json(document: object) -> Request:
    """Read a request. InvalidRequest names the word and what would do."""
    fields = _object(document, "request")
    known = request_to_json(Request())
    if unknown := sorted(set(fields) - set(known)):
        raise InvalidRequest(f"not known: {', '.join(unknown)}", where="request", hint=f"known are {', '.join(known)}")
    if _typed(fields, "schema", "request", int, default=SCHEMA) != SCHEMA:
        raise InvalidRequest("another version", where=f"request.schema {fields['schema']}", hint=f"this is {SCHEMA}")
    command = _words(fields.get("command", []), "request.command")
    if len(command) > MAX_WORDS or any(len(word) > MAX_LENGTH for word in command):
        raise InvalidRequest("too long", where="request.command", hint=f"{MAX_WORDS} words of {MAX_LENGTH} characters")
    if any(map(_is_control, "".join(command))):  # it is shown: on terminals, in logs, as a scope's description
        raise InvalidRequest("has control characters", where="request.command", hint="replace them, it is only shown")
    wait = fields.get("wait")
    if wait is not None and (isinstance(wait, bool) or not isinstance(wait, (int, float)) or not 0 <= wait < 1e9):
        raise _bad("request.wait", wait, "seconds, 0 for ever, or null")
    ranks = _optional(fields, "ranks", "request", int)
    if ranks is not None and not 1 <= ranks <= MAX_RANKS:
        raise _bad("request.ranks", ranks, f"from 1 to {MAX_RANKS}, or null")
    return Request(
        gpus=_gpus(fields.get("gpus")),
        cuda_visible_devices=_optional(fields, "cuda_visible_devices", "request", str),
        cuda_device_order=_optional(fields, "cuda_device_order", "request", str),
        ranks=ranks,
        policy=_choice(fields, "policy", POLICIES, default="exclusive"),
        cpus=_optional(fields, "cpus", "request", str),
        shared=_typed(fields, "shared", "request", bool, default=False),
        memory=_choice(fields, "memory", MEMORY, default="local"),
        confine=_choice(fields, "confine", CONFINE, default="") or None,
        command=command,
        wait=wait,
    )


def _is_control(sign: str) -> bool:
    """C0 and C1 controls, ends of lines and what turns the direction of writing, which would show a word other than it
    is, and halves of surrogate pairs, which no text outside of JSON can hold.
    """
    return sign < " " or "\x7f" <= sign <= "\x9f" or "\ud800" <= sign <= "\udfff" or sign in TURNS


def _gpus(value: object) -> tuple[str, ...] | int | None:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_RANKS:
        return value
    if isinstance(value, list) and len(value) <= MAX_RANKS:
        return _words(value, "request.gpus")
    raise _bad("request.gpus", value, "a number, a list of PCI addresses or UUIDs, or null")


def _object(document: object, where: str) -> Mapping[str, Any]:
    if not isinstance(document, dict):
        raise _bad(where, document, "an object")
    return document


def _bad(where: str, value: object, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{str(value)[:60]!r} does not do", where=where, hint=wanted)


def _typed(fields: Mapping[str, Any], key: str, where: str, kind: type[T], *, default: T) -> T:
    value = fields.get(key, default)
    if type(value) is not kind:  # isinstance would let true pass for 1
        raise _bad(f"{where}.{key}", value, _KINDS.get(kind, "a text"))
    return value


def _optional(fields: Mapping[str, Any], key: str, where: str, kind: type[T]) -> T | None:
    value: object = fields.get(key)
    if value is None:
        return None
    if type(value) is not kind:
        raise _bad(f"{where}.{key}", value, f"{_KINDS.get(kind, 'a text')}, or null")
    return value


def _choice(fields: Mapping[str, Any], key: str, known: tuple[str, ...], *, default: str) -> str:
    value = fields.get(key)
    if value is None:
        return default
    if value not in known:
        raise _bad(f"request.{key}", value, f"one of {', '.join(known)}")
    return str(value)


def _words(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise _bad(where, value, "a list of texts")
    return tuple(value)


def _cpus(fields: Mapping[str, Any], key: str, where: str, *, default: str | None = None) -> CpuSet:
    value = fields.get(key, default)
    if not isinstance(value, str):
        raise _bad(f"{where}.{key}", value, "a CPU list such as 0-3,8")
    try:
        return parse_list(value)
    except ValueError:
        raise _bad(f"{where}.{key}", value, "a CPU list such as 0-3,8") from None
