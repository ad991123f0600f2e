"""Which environment variables a job gets, and why: a decision per variable. Pure.

What the user set stays. Little is set at all, because a wrong variable costs more than a missing one: OMP_PROC_BIND,
OMP_PLACES, GOMP_CPU_AFFINITY and KMP_AFFINITY shrink pip's torch and all its DataLoader workers to one CPU, NCCL's
tuning variables belong to the site, and CUDA_DEVICE_MAX_CONNECTIONS or the TF32 overrides change results.
"""

from __future__ import annotations

from torchtuned.cpuset import parse_list

TYPE_CHECKING = False  # `typing` and `collections.abc` would be imported before every job
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from torchtuned.run.launchers import Launcher

RANKS = "TORCHTUNED_RANKS"
RANKSHIM = "TORCHTUNED_RANKSHIM"
OWN_PYTHON_EXEC = "TORCHTUNED_PYTHON_EXEC"
MAX_TABLE = 100_000  # characters; the kernel takes 128 KiB for one variable, and exec fails with more

# variable, the values that do harm ("" = any but unset, empty or 0), what they do
_LEFTOVERS = (
    ("CUDA_LAUNCH_BLOCKING", "", "every kernel launch waits for the GPU"),
    ("NCCL_DEBUG", "TRACE", "NCCL writes a line for every call"),
    ("NCCL_P2P_DISABLE", "", "GPUs talk through the host instead of directly"),
    ("NCCL_SHM_DISABLE", "", "ranks of one host talk through the network"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "", "every tensor is a cudaMalloc"),
    ("CUBLAS_WORKSPACE_CONFIG", "", "cuBLAS is held to deterministic, slower ways"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "every collective is checked across ranks first"),
    ("TORCH_SHOW_DISPATCH_TRACE", "", "every operator call is printed"),
    ("MALLOC_CHECK_", "", "every allocation is checked"),
    ("MALLOC_PERTURB_", "", "every allocation is overwritten"),
    ("OMP_PROC_BIND", "true|close|spread|master|primary", "torch and its DataLoader workers end up on one CPU"),
    ("OMP_PLACES", "", "torch and its DataLoader workers end up on one CPU"),
    ("GOMP_CPU_AFFINITY", "", "torch and its DataLoader workers end up on one CPU"),
)


class Decision:
    """What becomes of one variable: `action` is "set", "kept" (the user's) or "skipped" (value None).

    `warning` is something the user should hear even when nothing is asked; "" for nothing.
    """

    __slots__ = ("action", "reason", "value", "warning")

    def __init__(self, value: str | None, action: str, reason: str, *, warning: str = "") -> None:
        self.value, self.action, self.reason, self.warning = value, action, reason, warning

    def __repr__(self) -> str:
        return f"Decision({self.value!r}, {self.action!r}, {self.reason!r})"


class Facts:
    """What profiles need to know of the machine, looked up by the caller: the path of a tcmalloc that loads ("" for
    none), the kernel's transparent_hugepage mode ("" for unknown), a folder on disk for compiled kernels, and the
    executable that binds ranks ("" when it is not installed) with the code it runs.
    """

    __slots__ = ("cache_dir", "rank_door", "rankshim", "tcmalloc", "thp")

    def __init__(
        self, *, tcmalloc: str = "", thp: str = "", cache_dir: str = "", rank_door: str = "", rankshim: str = ""
    ) -> None:
        self.tcmalloc, self.thp, self.cache_dir = tcmalloc, thp, cache_dir
        self.rank_door, self.rankshim = rank_door, rankshim


def decide(
    environ: Mapping[str, str],
    grant: Mapping[str, Any],
    *,
    env_profile: Sequence[str] = (),
    launcher: Launcher | None = None,
    facts: Facts | None = None,
    gpu_ids: str = "index",
    no_gpus: bool = False,
) -> dict[str, Decision]:
    """A decision for every variable that was looked at, by name.

    `grant` is a grant document (share/torchtuned/schemas/grant.json) that has been checked. `gpu_ids` is "index" or
    "uuid"; `no_gpus`: the user asked for none, so none should be seen.
    """
    facts = facts or Facts()
    decisions: dict[str, Decision] = {"OMP_NUM_THREADS": _omp(environ, grant, launcher)}
    decisions.update(_cuda(environ, grant, gpu_ids=gpu_ids, no_gpus=no_gpus))
    if launcher is not None:
        visible = decisions.get("CUDA_VISIBLE_DEVICES")
        decisions.update(_ranks(environ, grant, launcher, facts, visible, threads=decisions["OMP_NUM_THREADS"]))
    if "cpu" in env_profile:
        decisions.update(_cpu_profile(environ, facts))
    if "memory" in env_profile:
        decisions.update(_memory_profile(environ))
    if "compile" in env_profile:
        decisions.update(_compile_profile(environ, grant, facts))
    if "debug" in env_profile:
        for name, value in (("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"), ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")):
            decisions[name] = _unless_set(environ, name, value, "profile debug: NCCL's flight recorder")
    return decisions


def leftovers(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable that somebody debugged with and left behind."""
    found = []
    for name, values, effect in _LEFTOVERS:
        value = environ.get(name, "")
        harmful = value.lower() in values.lower().split("|") if values else value not in ("", "0")
        if value and harmful:
            found.append(f"{name}={value[:40]} is set: {effect}; unset it unless you mean it")
    return found


def _unless_set(environ: Mapping[str, str], name: str, value: str, reason: str) -> Decision:
    if name in environ:
        return Decision(environ[name], "kept", "set by you")
    return Decision(value, "set", reason)


def _threads(grant: Mapping[str, Any]) -> tuple[int, str]:
    """Threads for one process of the job, and where the number comes from."""
    ranks = grant["ranks"]
    if len(ranks) > 1:
        return min(rank["omp_num_threads"] for rank in ranks), f"the cores of one of {len(ranks)} ranks"
    threads = ranks[0]["omp_num_threads"] if ranks else grant["threads"]
    if threads < grant["threads"]:
        return threads, f"at most {threads} for a process that feeds a GPU"
    quota = grant.get("cpu_max")
    if quota is not None and quota == threads:
        return threads, f"the CPU quota of the job is {quota}"
    return threads, "the cores of the job"


def _omp(environ: Mapping[str, str], grant: Mapping[str, Any], launcher: Launcher | None) -> Decision:
    name = "OMP_NUM_THREADS"
    threads, reason = _threads(grant)
    if name in environ:
        value = environ[name]
        first = value.partition(",")[0].strip()
        effective = len(parse_list(grant["cpus"]))
        if grant.get("cpu_max"):
            effective = min(effective, grant["cpu_max"])
        if first.isascii() and first.isdigit() and int(first[:9]) > effective:
            said = f"{name}={first[:9]} is more than the {effective} CPUs that this job can use; {threads} would fit"
            return Decision(value, "kept", "set by you", warning=said)
        return Decision(value, "kept", "set by you")
    if launcher is not None and launcher.count == "cpu" and len(grant["ranks"]) < 2:
        return Decision(None, "skipped", f"{launcher.name} starts one rank per CPU and gives each one thread")
    return Decision(str(threads), "set", reason)


def _cuda(environ: Mapping[str, str], grant: Mapping[str, Any], *, gpu_ids: str, no_gpus: bool) -> dict[str, Decision]:
    visible, order = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
    if no_gpus:
        return {visible: _unless_set(environ, visible, "", "--gpus none")}
    if not grant["gpus"]:
        return {}
    decisions: dict[str, Decision] = {}
    if grant["gpus_chosen"]:
        uuids: list[str] = grant.get("gpu_uuids") or []
        indexes: list[int] | None = grant.get("gpu_indexes")
        by_uuid = uuids and (gpu_ids == "uuid" or indexes is None or any(u.startswith("MIG-") for u in uuids))
        if by_uuid:
            decisions[visible] = Decision(",".join(uuids), "set", "the GPUs of this job, by UUID")
        elif indexes is not None:
            decisions[visible] = Decision(",".join(map(str, indexes)), "set", "the GPUs of this job")
            decisions[order] = Decision("PCI_BUS_ID", "set", "so that the indexes mean these GPUs")
            if gpu_ids == "uuid":
                decisions[visible].warning = "the UUIDs of the GPUs are not known here; indexes are used"
        else:
            return {visible: Decision(None, "skipped", "neither index nor UUID of the GPUs is known")}
        for name, decision in decisions.items():
            if environ.get(name, decision.value) != decision.value:
                # the option on the command line is the later and plainer word, and the lease is on these GPUs
                decision.warning = f"{name}={environ[name]} is replaced by {decision.value}, because --gpus was given"
        return decisions
    if visible in environ:
        decisions[visible] = Decision(environ[visible], "kept", "set by you")
    elif order not in environ and grant.get("gpus_alike"):
        decisions[order] = Decision("PCI_BUS_ID", "set", "all GPUs are alike, so this only makes the order certain")
    if order in environ:
        decisions[order] = Decision(environ[order], "kept", "set by you")
    return decisions


def _ranks(
    environ: Mapping[str, str],
    grant: Mapping[str, Any],
    launcher: Launcher,
    facts: Facts,
    visible: Decision | None,
    *,
    threads: Decision,
) -> dict[str, Decision]:
    """The door by which each rank is bound before its first allocation; see rankshim.py for the table's form."""
    name = "PYTHON_EXEC"
    if len(grant["ranks"]) < 2:
        return {}
    why = ""
    if launcher.binds:
        why = f"{launcher.binds} binds the ranks already"
    elif not launcher.door:
        why = f"{launcher.name} runs the ranks inside its own interpreter (--run-path), so nothing can bind them first"
    elif not facts.rank_door:
        why = "the part that binds ranks is not installed"
    elif grant["confinement"] == "none":
        why = "the job is not confined"
    if why:
        return {name: Decision(None, "skipped", f"ranks share the job's CPUs: {why}")}
    seen = (visible.value if visible is not None else environ.get("CUDA_VISIBLE_DEVICES")) or ""
    entries = [entry.strip() for entry in seen.split(",")] if seen else []
    rows = []
    for index, rank in enumerate(grant["ranks"]):
        count = "" if threads.action == "kept" else str(rank["omp_num_threads"])
        rows.append(f"{rank['cpus']}/{count}/{entries[index] if index < len(entries) else index}")
    text = ";".join(rows)
    if len(text) > MAX_TABLE:
        return {name: Decision(None, "skipped", f"ranks share the job's CPUs: {len(rows)} are too many to list")}
    decisions = {
        name: Decision(facts.rank_door, "set", f"{launcher.name} starts this, which binds the rank and becomes Python"),
        RANKS: Decision(text, "set", "CPUs, threads and GPU of each rank"),
        RANKSHIM: Decision(facts.rankshim, "set", "what binds a rank"),
    }
    if environ.get(name):
        decisions[OWN_PYTHON_EXEC] = Decision(environ[name], "set", "your PYTHON_EXEC, which the ranks become")
    return decisions


def _cpu_profile(environ: Mapping[str, str], facts: Facts) -> dict[str, Decision]:
    thp = "THP_MEM_ALLOC_ENABLE"
    decisions = {thp: _unless_set(environ, thp, "1", "profile cpu: huge pages for tensors")}
    if facts.thp == "never" and thp not in environ:
        decisions[thp] = Decision(None, "skipped", "transparent huge pages are off in this kernel")
    if environ.get("LD_PRELOAD"):
        decisions["LD_PRELOAD"] = Decision(environ["LD_PRELOAD"], "kept", "set by you")
    elif facts.tcmalloc:
        decisions["LD_PRELOAD"] = Decision(facts.tcmalloc, "set", "profile cpu: tcmalloc, which loads here")
    else:
        missing = "no tcmalloc that loads was found (package libtcmalloc-minimal4)"
        decisions["LD_PRELOAD"] = Decision(None, "skipped", missing, warning=f"--env-profile=cpu: {missing}")
    return decisions


def _memory_profile(environ: Mapping[str, str]) -> dict[str, Decision]:
    """The CUDA name is the one that both old and new torch obey; either name set by the user means hands off."""
    name, newer = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    if newer in environ and name not in environ:
        return {name: Decision(None, "skipped", f"{newer} is set by you")}
    return {name: _unless_set(environ, name, "expandable_segments:True", "profile memory: less fragmentation")}


def _compile_profile(environ: Mapping[str, str], grant: Mapping[str, Any], facts: Facts) -> dict[str, Decision]:
    cache, workers = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"
    ranks = grant["ranks"]
    cores = min((len(parse_list(rank["cpus"])) for rank in ranks), default=grant["threads"])
    count = max(1, min(cores, grant["threads"]) if len(ranks) < 2 else min(cores, grant["threads"] // len(ranks)))
    decisions = {workers: _unless_set(environ, workers, str(count), "profile compile: the cores of the process")}
    if facts.cache_dir or cache in environ:
        decisions[cache] = _unless_set(environ, cache, facts.cache_dir, "profile compile: on disk, outlives a reboot")
    else:
        decisions[cache] = Decision(None, "skipped", "neither XDG_CACHE_HOME nor HOME is set")
    return decisions
