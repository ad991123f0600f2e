"""What may be believed of a grant that came over the bus. Pure.

Whoever owns the name on the bus can say anything. The wrapper takes CPU lists, names of GPUs and numbers, each in its
one form and within what this process may use already, and text to show. So a hostile owner can at most place a job
badly: nothing here ends up as a file name, a command, or a variable's free text.
"""

from __future__ import annotations

from torchtuned.cpuset import LIMIT, CpuSet, format_list, parse_list
from torchtuned.errors import Failed
from torchtuned.units import job_of
from torchtuned.words import CONFINE, ENV_PROFILES, LIMIT_WORDS, LIMITS, MAX_RANKS

SCHEMA = 1
STATES = ("queued", "granted", "running")
MAX_TEXTS = 64
MAX_TEXT = 500
_HEX = frozenset("0123456789abcdef")
_WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")


def trusted(document: object, mask: CpuSet) -> dict[str, object]:
    """The grant with every known field checked and nothing else. Raises Failed with the field that is not right.

    `mask` are the CPUs that this process may run on: no grant may widen it. A queued grant has no place yet.
    """
    if not isinstance(document, dict):
        raise Failed("the grant is not a JSON object")
    get = document.get
    if get("schema") != SCHEMA:
        raise Failed(f"the grant has schema {_short(get('schema'))}; this torchtuned-run reads {SCHEMA}")
    state = _one_of("state", get("state"), STATES)
    cpus = _cpus("cpus", get("cpus"), mask)
    if not cpus and state != "queued":
        raise Failed("the grant names no CPUs")
    return {
        "schema": SCHEMA,
        "job": _words("job", get("job")),
        "state": state,
        "cpus": format_list(cpus),
        "memory_nodes": format_list(_numbers("memory_nodes", get("memory_nodes"))),
        "gpus": [_address(item) for item in _items("gpus", get("gpus"))],
        "shared": _flag("shared", get("shared")),
        "threads": _number("threads", get("threads"), 0 if state == "queued" else 1),
        "cpu_max": None if get("cpu_max") is None else _number("cpu_max", get("cpu_max"), 1),
        "confinement": _one_of("confinement", get("confinement"), CONFINE),
        "scope": _scope(get("scope", "")),
        "ranks": [_rank(item, cpus) for item in _items("ranks", get("ranks"), MAX_RANKS)],
        "warnings": _texts("warnings", get("warnings")),
        "reasons": _texts("reasons", get("reasons")),
        "omp_max_gpu": _number("omp_max_gpu", get("omp_max_gpu", 8), 1),
        "gpus_chosen": _flag("gpus_chosen", get("gpus_chosen", False)),
        "gpus_alike": _flag("gpus_alike", get("gpus_alike", False)),
        "gpu_indexes": _indexes(get("gpu_indexes")),
        "gpu_uuids": _uuids(get("gpu_uuids")),
        "limits": _limits(get("limits", {})),
        "env_profiles": [
            _one_of("env_profiles", item, ENV_PROFILES) for item in _items("env_profiles", get("env_profiles", []), 8)
        ],
    }


def _rank(document: object, cpus: CpuSet) -> dict[str, object]:
    if not isinstance(document, dict):
        raise Failed("ranks: not a list of JSON objects")
    gpu = document.get("gpu")
    return {
        "rank": _number("ranks: rank", document.get("rank"), 0),
        "gpu": None if gpu is None else _address(gpu),
        "cpus": format_list(_cpus("ranks: cpus", document.get("cpus"), cpus)),
        "memory_nodes": format_list(_numbers("ranks: memory_nodes", document.get("memory_nodes"))),
        "omp_num_threads": _number("ranks: omp_num_threads", document.get("omp_num_threads"), 1),
        "reasons": _texts("ranks: reasons", document.get("reasons", [])),
    }


def _cpus(field: str, value: object, within: CpuSet) -> CpuSet:
    cpus = _numbers(field, value)
    if not cpus <= within:
        raise Failed(f"{field}: {_short(value)} has CPUs that this process may not use")
    return cpus


def _numbers(field: str, value: object) -> CpuSet:
    """A CPU or node list in the kernel's form."""
    if isinstance(value, str) and len(value) <= 40000:
        try:
            return parse_list(value)
        except ValueError:
            pass
    raise Failed(f"{field}: not a list of numbers: {_short(value)}")


def _address(value: object) -> str:
    """A PCI address, "0000:01:00.0"; domains may have more than four digits."""
    if isinstance(value, str) and len(value) <= 16:
        domain, _, rest = value.partition(":")
        bus, _, rest = rest.partition(":")
        slot, _, function = rest.partition(".")
        sizes = len(domain) >= 4 and len(bus) == 2 and len(slot) == 2 and len(function) == 1
        if sizes and _HEX.issuperset(domain + bus + slot + function):
            return value
    raise Failed(f"gpus: not a PCI address: {_short(value)}")


def _scope(value: object) -> str:
    if value == "":
        return ""
    if isinstance(value, str) and (job_id := job_of(value)):
        _words("scope", job_id)
        return value
    raise Failed(f"scope: not a scope of torchtuned: {_short(value)}")


def _uuids(value: object) -> list[str] | None:
    if value is None:
        return None
    uuids = []
    for item in _items("gpu_uuids", value):
        if not isinstance(item, str) or not item.startswith(("GPU-", "MIG-")):
            raise Failed(f"gpu_uuids: not a UUID: {_short(item)}")
        _words("gpu_uuids", item.replace("/", "-"))  # drivers before 470: MIG-GPU-UUID/instance/instance
        uuids.append(item)
    return uuids


def _indexes(value: object) -> list[int] | None:
    return None if value is None else [_number("gpu_indexes", item, 0) for item in _items("gpu_indexes", value)]


def _limits(value: object) -> dict[str, str]:
    """The administrator's limits for jobs: "keep", "hard", "infinity" or a number for a resource that we know."""
    if not isinstance(value, dict) or len(value) > len(LIMITS):
        raise Failed(f"limits: not an object of at most {len(LIMITS)}: {_short(value)}")
    for name, limit in value.items():
        _one_of("limits", name, LIMITS)
        if not isinstance(limit, str) or not (_score(limit) if name == "oom_score_adj" else _limit(limit)):
            raise Failed(f"limits: {name}: not a limit: {_short(limit)}")
    return dict(value)


def _limit(text: str) -> bool:
    return text in LIMIT_WORDS or (text.isascii() and text.isdigit() and len(text) < 20)


def _score(text: str) -> bool:
    digits = text.removeprefix("-")
    return text == "keep" or (digits.isascii() and digits.isdigit() and len(digits) < 5 and int(digits) <= 1000)


def _words(field: str, value: object) -> str:
    if isinstance(value, str) and 0 < len(value) <= 100 and _WORD.issuperset(value):
        return value
    raise Failed(f"{field}: not a plain word: {_short(value)}")


def _number(field: str, value: object, least: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and least <= value < LIMIT:
        return value
    raise Failed(f"{field}: not a number from {least} to {LIMIT - 1}: {_short(value)}")


def _flag(field: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise Failed(f"{field}: neither true nor false: {_short(value)}")


def _one_of(field: str, value: object, words: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in words:
        return value
    raise Failed(f"{field}: none of {', '.join(words)}: {_short(value)}")


def _items(field: str, value: object, most: int = 256) -> list[object]:
    if isinstance(value, list) and len(value) <= most:
        return value
    raise Failed(f"{field}: not a list of at most {most}: {_short(value)}")


def _texts(field: str, value: object) -> list[str]:
    """Lines to show: one line each, without control characters (a terminal would obey escape sequences), cut."""
    texts = []
    for item in _items(field, value, 10 * MAX_TEXTS)[:MAX_TEXTS]:
        if not isinstance(item, str):
            raise Failed(f"{field}: not text: {_short(item)}")
        texts.append("".join(c if c.isprintable() else "?" for c in item[:MAX_TEXT]))
    return texts


def _short(value: object) -> str:
    """A value as a message may show it; a huge one is not spelt out first."""
    text = ascii(value if not isinstance(value, (str, list, dict)) else value[:60] if isinstance(value, str) else "...")
    return text if len(text) <= 60 else text[:57] + "..."
