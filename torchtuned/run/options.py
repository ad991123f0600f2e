"""The command line of torchtuned-run: a table, and a reader that stops at the first word that is no option.

argparse would cost a sixth of what the wrapper may add before each job, and it would take options from the user's
command too.
"""

from __future__ import annotations

from torchtuned.errors import InvalidRequest
from torchtuned.words import CONFINE, ENV_PROFILES, MAX_RANKS, MEMORY, POLICIES

TYPE_CHECKING = False  # `typing` and `collections.abc` would be imported before every job
if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_CORES = 65535

# name, what its value looks like ("" for none, "[=X]" for an optional one), the choices, one line of help
TABLE: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("gpus", "N|GPU,...|none", (), "so many free GPUs, or these (PCI address, UUID)"),
    ("cpus", "N|N%|node|all", (), "physical cores, instead of the default share"),
    ("shared", "", (), "take CPUs that other jobs have as well"),
    ("policy", "POLICY", POLICIES, "cores by exclusive, node, socket or core-complex"),
    ("ranks", "N", (), "processes it starts, when the command does not tell"),
    ("confine", "HOW", CONFINE, "keep the job there by cpuset, affinity or none"),
    ("memory", "HOW", MEMORY, "local, preferred, bind or interleave"),
    ("wait", "[=SECONDS]", (), "wait for a free place (without a number: for ever)"),
    ("require", "", (), "fail when torchtunedd cannot be asked"),
    ("linger", "", (), "have logind keep the job when you log out"),
    ("env-profile", "NAME,...", ENV_PROFILES, "more variables: cpu, memory, compile, debug"),
    ("gpu-ids", "uuid|index", ("uuid", "index"), "how CUDA_VISIBLE_DEVICES names the GPUs taken"),
    ("explain", "", (), "say what the command would get and why; run nothing"),
    ("json", "", (), "with --explain: as JSON"),
    ("report", "", (), "stay as its parent and say how it ended"),
    ("quiet", "", (), "nothing on standard error but errors"),
    ("version", "", (), "say the version"),
    ("help", "", (), "say this"),
)
SHORT = {"-h": "--help", "-q": "--quiet", "-V": "--version"}
_BY_NAME = {name: (form, choices) for name, form, choices, _ in TABLE}


class Options:
    """The command line as given; None and False where an option was not."""

    __slots__ = (
        "command",
        "confine",
        "cpus",
        "env_profile",
        "explain",
        "gpu_ids",
        "gpus",
        "help",
        "json",
        "linger",
        "memory",
        "policy",
        "quiet",
        "ranks",
        "report",
        "require",
        "shared",
        "version",
        "wait",
    )

    def __init__(self) -> None:
        self.command: list[str] = []
        self.gpus: list[str] | int | None = None
        self.cpus: str | None = None
        self.ranks: int | None = None
        self.confine: str | None = None
        self.policy, self.memory, self.gpu_ids = "exclusive", "local", "index"
        self.wait: float | None = None
        self.env_profile: tuple[str, ...] = ()
        self.shared = self.require = self.explain = self.json = self.report = self.quiet = False
        self.linger = False
        self.version = self.help = False


def parse(words: Sequence[str]) -> Options:
    """Read the words up to the command. Raises InvalidRequest that names the word and the way out."""
    options = Options()
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] != "-":
        word = words[index]
        index += 1
        if word == "--":
            break
        word = SHORT.get(word, word)
        name, equals, value = word[2:].partition("=")
        if not word.startswith("--") or name not in _BY_NAME:
            raise InvalidRequest(f"unknown option {word.partition('=')[0]}", hint=_nearest(word))
        form, choices = _BY_NAME[name]
        attribute = name.replace("-", "_")
        if not form:
            if equals:
                raise InvalidRequest(f"--{name} takes no value", hint=f"--{name}")
            setattr(options, attribute, True)
            continue
        if form.startswith("["):
            options.wait = _seconds(value) if equals else 0.0
            continue
        if not equals:
            if index >= len(words):
                raise InvalidRequest(f"--{name} needs a value", hint=f"--{name}={form}")
            value = words[index]
            index += 1
        setattr(options, attribute, _value(name, value, form, choices))
    options.command = list(words[index:])
    if options.json and not options.explain:
        raise InvalidRequest("--json goes with --explain", hint="--explain --json")
    return options


def _value(name: str, value: str, form: str, choices: tuple[str, ...]) -> object:
    if name == "ranks":
        return _count(name, value, 1, MAX_RANKS)
    if name == "gpus":
        return _gpus(value)
    if name == "cpus":
        return _cpus(value)
    parts = value.split(",") if name == "env-profile" else [value]
    for part in parts:
        if part not in choices:
            raise InvalidRequest(f"--{name}: {part!r} is none of {', '.join(choices)}", hint=_like(part, choices))
    return tuple(parts) if name == "env-profile" else value


def _count(name: str, value: str, least: int, most: int) -> int:
    if value.isascii() and value.isdigit() and len(value) < 6 and least <= int(value) <= most:
        return int(value)
    raise InvalidRequest(f"--{name}: not a number from {least} to {most}: {value[:60]!r}")


def _gpus(value: str) -> list[str] | int:
    if value == "none":
        return []
    if value.isascii() and value.isdigit():
        return _count("gpus", value, 0, MAX_RANKS) or []
    names = value.split(",")
    for name in names:
        if not name or len(name) > 100 or not name.isascii() or not (":" in name or name.startswith(("GPU-", "MIG-"))):
            raise InvalidRequest(
                f"--gpus: {name[:60]!r} is no PCI address or UUID",
                hint="a number takes so many free GPUs; `torchtuned topology` lists their addresses",
            )
    return names


def _cpus(value: str) -> str:
    number = value.removesuffix("%")
    if value in ("node", "all"):
        return value
    _count("cpus", number, 1, MAX_CORES)
    if value.endswith("%") and int(number) > 100:
        raise InvalidRequest("--cpus: more than 100%")
    return value


def _seconds(value: str) -> float:
    whole, _, part = value.partition(".")
    if len(value) < 10 and whole.isascii() and whole.isdigit() and (not part or (part.isascii() and part.isdigit())):
        return float(value)
    raise InvalidRequest(f"--wait: not a number of seconds: {value[:60]!r}", hint="--wait=600")


def _nearest(word: str) -> str:
    near = _like(word.partition("=")[0].lstrip("-"), tuple(_BY_NAME))
    return near.replace("did you mean ", "did you mean --") if near else "torchtuned-run --help"


def _like(word: str, choices: tuple[str, ...]) -> str:
    from torchtuned.wording import nearest

    near = nearest(word, choices)
    return f"did you mean {near}?" if near else ""


def help_text() -> str:
    """--help: fits a screen of 80 columns and 24 lines."""
    lines = ["Usage: torchtuned-run [OPTIONS] COMMAND [ARGUMENTS]", "Run a command on CPUs and GPUs of its own.", ""]
    for name, form, _, text in TABLE:
        option = f"--{name}" + (form if form.startswith("[") else f"={form}" if form else "")
        lines.append(f"  {option:<23} {text}")
    lines += ["", "Exit status: that of the command; 125 own failure, 126 not run, 127 not found"]
    return "\n".join(lines)
