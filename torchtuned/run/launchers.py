"""What a command says about the ranks it will start: torchrun, `python -m torch.distributed.run`, accelerate. Pure.

Only the words of the command and the variables and files that these launchers read count. A launcher that binds its
ranks itself (`--numa-binding`, `--enable_cpu_affinity`) is left to do so: two binders undo each other.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` and `collections.abc` would be imported before every job
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_ACCELERATE_MODULES = ("accelerate.commands.launch", "accelerate.launch")
# torchrun's options without a value; every other one takes one
_TORCHRUN_FLAGS = ("standalone", "module", "no-python", "run-path", "virtual-local-rank", "use-env", "help")
_TORCHRUN_VALUES = (
    "nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf max-restarts monitor-interval start-method "
    "event-log-handler role log-dir redirects tee local-ranks-filter duplicate-stdout-filters "
    "duplicate-stderr-filters node-rank master-addr master-port local-addr logs-specs numa-binding "
    "signals-to-handle shutdown-timeout"
).split()
_SHORT = {"-m": "module", "-r": "redirects", "-t": "tee", "-h": "help"}
# accelerate's options that make it start several processes wherever it runs
_SEVERAL = ("multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
# of an interpreter: the options that take the next word
_PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")


class Launcher:
    """A launcher of several processes, as far as its command line tells.

    ranks: how many it starts on this machine, None when the machine decides; then `count` is "gpu" (one per visible
    GPU), "auto" (the same, or one per CPU without GPUs), "gpus" (accelerate without --multi_gpu: `most` processes, or
    one per GPU, where there is more than one GPU, and a single one elsewhere) or "cpu". `binds` names what else binds
    the ranks, "" for nothing. `door`: it starts $PYTHON_EXEC instead of its own interpreter. `program_at` is the index
    of the program's first word in the command when torchrun starts it directly (--no-python), else None.
    """

    __slots__ = ("binds", "count", "door", "most", "name", "program_at", "ranks")

    def __init__(self, name: str) -> None:
        self.name = name
        self.ranks: int | None = 1
        self.count = ""
        self.most: int | None = None
        self.binds = ""
        self.door = True
        self.program_at: int | None = None

    def with_gpus(self, gpus: int) -> int | None:
        """How many ranks where the machine decides and the job sees so many GPUs; None when that tells nothing."""
        if self.count == "gpus":
            return self.most or gpus if gpus > 1 else None
        return (gpus or None) if self.count in ("gpu", "auto") else None


def recognise(
    command: Sequence[str], environ: Mapping[str, str], read: Callable[[str], str] = lambda path: ""
) -> Launcher | None:
    """The launcher that a command is, or None. `read` gives the text of a small file, "" when it cannot be read."""
    start = 0
    first = _base(command[0]) if command else ""
    if first.startswith("python") or first in ("pypy3", "pypy"):
        start, first = _after_interpreter(command)
    if first in ("torchrun", *_TORCHRUN_MODULES):
        return _torchrun(command, start + 1, environ)
    if first == "accelerate" and command[start + 1 : start + 2] == ["launch"]:
        return _accelerate(command[start + 2 :], environ, read)
    if first in ("accelerate-launch", *_ACCELERATE_MODULES):
        return _accelerate(command[start + 1 :], environ, read)
    return None


def _base(word: str) -> str:
    return word.rpartition("/")[2]


def _after_interpreter(command: Sequence[str]) -> tuple[int, str]:
    """Where the program's word is in a Python command line, and the script's base name or the module's name."""
    index = 1
    while index < len(command):
        word = command[index]
        if word == "-m":
            return index + 1, command[index + 1] if index + 1 < len(command) else ""
        if word.startswith("-m"):
            return index, word[2:]
        if word in _PYTHON_VALUES:
            index += 2
        elif word.startswith("-") and word != "-":
            index += 1
            if word == "-c":
                break
        else:
            return index, _base(word)
    return index, ""


def _torchrun(command: Sequence[str], index: int, environ: Mapping[str, str]) -> Launcher:
    launcher = Launcher("torchrun")
    count = environ.get("PET_NPROC_PER_NODE", "1")
    flags = {flag for flag in _TORCHRUN_FLAGS if environ.get("PET_" + flag.upper().replace("-", "_")) == "1"}
    while index < len(command):
        word = command[index]
        if word == "--" or not word.startswith("-") or word == "-":
            index += word == "--"
            break
        name, value, attached = _option(word)
        index += 1
        if name in _TORCHRUN_FLAGS:
            flags.add(name)
            continue
        if not attached:
            value = command[index] if index < len(command) else ""
            index += 1
        if name == "nproc-per-node":
            count = value
        elif name == "numa-binding":
            launcher.binds = f"torchrun --numa-binding={value}"
    launcher.ranks = _number(count)
    if launcher.ranks is None:
        launcher.count = count if count in ("gpu", "auto", "cpu") else "cpu"
    if "run-path" in flags:
        launcher.door = False
    elif "no-python" in flags:
        launcher.program_at = index
    return launcher


def _option(word: str) -> tuple[str, str, bool]:
    """(full name, value, whether a value was attached) of one of torchrun's options; argparse takes short prefixes."""
    if not word.startswith("--"):
        return _SHORT.get(word[:2], word), word[2:], len(word) > 2
    written, equals, value = word[2:].partition("=")
    name = written.replace("_", "-")
    fits = [full for full in (*_TORCHRUN_FLAGS, *_TORCHRUN_VALUES) if full.startswith(name)]
    return (name if name in fits or len(fits) != 1 else fits[0]), value, bool(equals)


def _accelerate(words: Sequence[str], environ: Mapping[str, str], read: Callable[[str], str]) -> Launcher:
    """accelerate hands several processes to torch.distributed.run, so the same door is open. It starts several only
    when it is told of a way to train on several devices, or finds several GPUs.

    Its options are too many to know which take a value; the scan ends at the first word that names a script or module.
    """
    launcher = Launcher("accelerate")
    found: dict[str, str] = {}
    previous = ""
    for word in words:
        if word in ("-m", "--module", "--no_python", "--no-python") or word.endswith((".py", ".sh")):
            break
        if previous and not word.startswith("-"):
            found[previous] = word
            previous = ""
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = value
            previous = "" if equals else name
    if "cpu" in found:
        return launcher
    file = _accelerate_file(found.get("config_file", ""), environ, read)
    if found.get("enable_cpu_affinity") is not None or file.get("enable_cpu_affinity") == "true":
        launcher.binds = "accelerate --enable_cpu_affinity"
    several = any(name in found for name in _SEVERAL)
    kind = file.get("distributed_type", "NO").upper()
    if file and not several and (kind in ("NO", "MULTI_CPU") or file.get("use_cpu") == "true"):
        return launcher  # one process, or as many as mpirun starts
    machines = _number(found.get("num_machines", "") or file.get("num_machines", "")) or 1
    count = _number(found.get("num_processes", "") or file.get("num_processes", ""))
    each = None if count is None else max(1, count // machines)
    if several or file:
        launcher.ranks, launcher.count = each, "gpu"
    else:
        launcher.ranks, launcher.count, launcher.most = None if each != 1 else 1, "gpus", each
    return launcher


def _accelerate_file(path: str, environ: Mapping[str, str], read: Callable[[str], str]) -> dict[str, str]:
    """The plain lines of accelerate's own configuration, which holds unless the command line says otherwise."""
    if not path:
        cache = environ.get("XDG_CACHE_HOME") or environ.get("HOME", "") + "/.cache"
        path = (environ.get("HF_HOME") or cache + "/huggingface") + "/accelerate/default_config.yaml"
    lines = [line.partition(":") for line in read(path).splitlines() if line[:1].isalpha()]
    return {name: value.partition("#")[0].strip().strip("'\"") for name, _, value in lines}


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and 0 < len(text) < 6 and int(text) > 0 else None
