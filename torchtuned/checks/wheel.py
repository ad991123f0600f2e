"""Do the driver, the GPUs and the torch of one Python fit each other; and if not, which wheel does.

What fits is data: wheels.json beside this file, with its date and sources. torch is never imported: its version.py is
read. Where that lies is told by the interpreter's folders, else by the interpreter, asked for its path in a child that
runs as the interpreter's owner.
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
import stat
import subprocess
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torchtuned.checks.registry import Machine, Seen, Unseen, rule
from torchtuned.errors import HostError
from torchtuned.findings import Action, Severity

TABLE = Path(__file__).with_name("wheels.json")
DEADLINE_S = 10.0
ASK = "import sys; print('\\n'.join(filter(None, sys.path)))"
SELECTOR = "pytorch.org, Get Started"

Version = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Torch:
    """A torch as its version.py tells. `cuda` is None for builds without CUDA, `hip` for builds without ROCm."""

    path: str
    version: str
    cuda: str | None
    hip: str | None


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A line of the table: a variant of the wheels of some releases. `last` is None while it is still made."""

    variant: str
    cuda: Version
    first: Version
    last: Version | None
    ends: str
    archs: tuple[Version, ...]
    ptx: Version | None

    def runs_on(self, capability: Version) -> bool:
        """Code for 8.0 runs on 8.6, not on 9.0; intermediate code (PTX) runs on all that is newer."""
        same = any(arch[0] == capability[0] and arch[1] <= capability[1] for arch in self.archs)
        return same or (self.ptx is not None and self.ptx <= capability)


@dataclass(frozen=True, kw_only=True)
class Table:
    dated: str
    drivers: dict[int, int]
    wheels: tuple[Wheel, ...]


def parse(text: str) -> Version:
    """ "12.6" as (12, 6); what is no number ends it."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


@cache
def table(machine: str) -> Table:
    """The wheels for an architecture ("x86_64", "aarch64")."""
    document = json.loads(TABLE.read_text(encoding="utf-8"))
    wheels = [
        Wheel(
            variant=row["variant"],
            cuda=parse(row["cuda"]),
            first=parse(row["torch"][0]),
            last=parse(row["torch"][1]) if row["torch"][1] else None,
            ends=row.get("ends", ""),
            archs=tuple(map(parse, row["archs"])),
            ptx=parse(row["ptx"]) or None,
        )
        for row in document["wheels"]
        if row["machine"] == machine
    ]
    return Table(
        dated=document["dated"],
        drivers={row["cuda"]: row["driver"] for row in document["drivers"]},
        wheels=tuple(wheels),
    )


def fitting(known: Table, driver: Version, capabilities: Sequence[Version]) -> list[Wheel]:
    """The variants that this driver and all these GPUs run, those of the newest torch first, of them the older CUDA
    last."""
    found = [
        wheel
        for wheel in known.wheels
        if driver[:1] >= (known.drivers.get(wheel.cuda[0], 0),) and all(map(wheel.runs_on, capabilities))
    ]
    newest: dict[str, Wheel] = {}
    for wheel in sorted(found, key=lambda wheel: (wheel.last or (9999,), wheel.cuda), reverse=True):
        newest.setdefault(wheel.variant, wheel)
    return list(newest.values())


def advice(known: Table, wheels: Sequence[Wheel]) -> str:
    """What to install, in words."""
    if not wheels:
        return f"no wheel in the table of {known.dated} fits: another driver, or build torch from source"
    best = wheels[0]
    cuda = ".".join(map(str, best.cuda))
    text = f"install the {best.variant} wheel of torch: {SELECTOR}, CUDA {cuda} (its version ends in +{best.variant})"
    if best.last:
        text += f"; it is made up to torch {'.'.join(map(str, best.last))}"
    others = [wheel.variant for wheel in wheels[1:3] if wheel.last is None or best.last]
    if others:
        text += f"; {' and '.join(others)} fit too"
    return f"{text} (table of {known.dated})"


@rule(
    "TT074",
    "this torch needs a newer driver",
    severity=Severity.ERROR,
    action=Action.TELL,
    cost="CUDA does not start: 'The NVIDIA driver on your system is too old'",
    source="pytorch/pytorch#178665, docs.nvidia.com/deploy/cuda-compatibility",
)
def too_new(machine: Machine) -> Iterator[Seen | Unseen]:
    """The CUDA of the torch in --python against the loaded driver: CUDA 13 needs driver 580, all of 12 run on 525 and
    newer. Debian 13 has driver 550, and torch's default wheel has CUDA 13. The way out is another wheel, or NVIDIA's
    driver."""
    torch = yield from _torch(machine)
    driver = parse(machine.text("/sys/module/nvidia/version"))
    if torch is None or not torch.cuda:
        return
    if not driver:
        if machine.cards:
            yield Unseen("the nvidia module is not loaded, so there is no driver version to compare with")
        return
    known = _table(machine)
    least = known.drivers.get(parse(torch.cuda)[0])
    if least is None:
        yield Unseen(f"CUDA {torch.cuda} is not in the table of {known.dated}")
    elif driver[0] < least:
        wheels = fitting(known, driver, list(_capabilities(machine).values()))
        yield Seen(
            title=f"this torch needs driver >={least}",
            evidence=f"{torch.path}: torch {torch.version} with CUDA {torch.cuda}; /sys/module/nvidia/version:"
            f" {machine.text('/sys/module/nvidia/version')}",
            fix=f"{advice(known, wheels)}; or a driver >={least} from NVIDIA's own repository for apt",
        )


@rule(
    "TT075",
    "this torch has no code for the GPU",
    severity=Severity.ERROR,
    action=Action.TELL,
    cost="'no kernel image is available for execution on the device' at the first operation",
    source="pytorch/pytorch#190385, pytorch/pytorch#155141",
)
def no_code(machine: Machine) -> Iterator[Seen | Unseen]:
    """The compute capability of each GPU against what the wheels of that torch and CUDA are built for. A torch built
    from source may differ; that is not told from files."""
    torch = yield from _torch(machine)
    if torch is None or not torch.cuda or not machine.cards:
        return
    known, release, cuda = _table(machine), parse(torch.version)[:2], parse(torch.cuda)[:2]
    lines = [w for w in known.wheels if w.cuda == cuda and w.first <= release and (not w.last or release <= w.last)]
    if not lines:
        yield Unseen(f"torch {torch.version} with CUDA {torch.cuda} is not in the table of {known.dated}")
        return
    capabilities = _capabilities(machine)
    if not capabilities:
        yield Unseen(f"the GPUs' compute capability is not known: {machine.gpus.status.text or 'NVML did not say'}")
        return
    driver = parse(machine.text("/sys/module/nvidia/version"))
    for address, capability in capabilities.items():
        if lines[0].runs_on(capability):
            continue
        wheels = fitting(known, driver, list(capabilities.values()))
        least = min((w.cuda for w in known.wheels if w.runs_on(capability)), default=None)
        needs = f"; its wheels begin with CUDA {'.'.join(map(str, least))}" if least and least > cuda else ""
        yield Seen(
            title=f"this torch has no code for sm_{capability[0]}{capability[1]}",
            evidence=f"GPU {address} has compute capability {capability[0]}.{capability[1]}; torch {torch.version} with"
            f" CUDA {torch.cuda} is built for {', '.join(f'{a}.{b}' for a, b in lines[0].archs)}{needs}",
            fix=advice(known, wheels),
        )


@rule(
    "TT076",
    "this torch cannot use the GPUs",
    severity=Severity.WARNING,
    action=Action.TELL,
    cost="training runs on the CPUs",
    source="pytorch/pytorch#162531",
)
def without_cuda(machine: Machine) -> Iterator[Seen | Unseen]:
    """A build of torch without CUDA on a host whose NVIDIA GPUs have their driver."""
    torch = yield from _torch(machine)
    driver = parse(machine.text("/sys/module/nvidia/version"))
    if torch is None or torch.cuda or not driver or not machine.cards:
        return
    wheels = fitting(_table(machine), driver, list(_capabilities(machine).values()))
    yield Seen(
        evidence=f"{torch.path}: torch {torch.version} is built {'for ROCm' if torch.hip else 'without CUDA'};"
        f" {len(machine.cards)} NVIDIA GPUs with driver {machine.text('/sys/module/nvidia/version')}",
        fix=advice(_table(machine), wheels),
    )


def _torch(machine: Machine) -> Generator[Unseen, None, Torch | None]:
    """The torch of --python, as the value of `yield from`; None without --python or without torch."""
    if machine.python is None:
        return None
    try:
        found = find(machine, machine.python)
    except (OSError, subprocess.SubprocessError) as error:
        yield Unseen(f"{machine.python} does not tell its path: {error}")
        return None
    if found is None:
        hint = "" if "python" in os.path.basename(machine.python) else " (of several Pythons there, name one)"
        yield Unseen(f"no torch/version.py in the folders of {machine.python}{hint}")
    return found


def find(machine: Machine, python: str) -> Torch | None:
    """The torch that an interpreter (or a folder of one) would import. OSError and SubprocessError from asking it."""
    for folder in _folders(machine, python):
        if found := _read(machine, f"{folder}/torch/version.py"):
            return found
    for folder in _asked(python) if machine.host.real and os.access(python, os.X_OK) and os.path.isfile(python) else ():
        if found := _read(machine, f"{folder}/torch/version.py"):
            return found
    return None


def _folders(machine: Machine, python: str) -> Iterator[str]:
    """Where packages lie by the layout of virtual environments, conda and Debian; the given folder itself first. Of
    several Pythons in one place only that of the interpreter's version counts, none where nothing tells it."""
    python = os.path.normpath(python)
    yield python
    prefix = _prefix(python)
    config = machine.text(f"{prefix}/pyvenv.cfg")
    target = _target(machine, python)
    if not config:
        prefix = _prefix(target)  # where Python looks for its own, too
    prefixes = [prefix]
    told = re.search(r"python(3\.\d+t?)$", target) or re.search(r"^version(?:_info)?\s*=\s*(3\.\d+)", config, re.M)
    if re.search(r"^include-system-site-packages\s*=\s*true", config, re.MULTILINE | re.IGNORECASE):
        home = re.search(r"^home\s*=\s*(.+)$", config, re.MULTILINE)
        prefixes += [os.path.dirname(home[1].strip())] if home else []
    for place in (f"{prefix}/{lib}" for prefix in prefixes for lib in ("local/lib", "lib", "lib64")):
        names = [name for name in machine.host.list(place) if name.startswith("python3.")]
        if told:
            names = [f"python{told[1]}"]
        for name in [*(names if len(names) == 1 else []), "python3"]:
            yield f"{place}/{name}/site-packages"
            yield f"{place}/{name}/dist-packages"


def _prefix(python: str) -> str:
    """The folder that has an interpreter's bin, or the folder itself."""
    folder, bin_ = os.path.split(os.path.dirname(python))
    return folder if bin_ == "bin" else python


def _target(machine: Machine, python: str) -> str:
    """Where the links lead from an interpreter: /usr/bin/python3 to /usr/bin/python3.13."""
    for _ in range(8):
        try:
            python = os.path.normpath(os.path.join(os.path.dirname(python), machine.host.link(python)))
        except HostError:
            break
    return python


def _asked(python: str) -> list[str]:
    """The interpreter's own search path. When we are root it is run as the user to whom it belongs: it is that user's
    program, and gets none of root's groups, variables or terminal (into which it could type). PermissionError.
    """
    python = os.path.join(os.path.realpath(os.path.dirname(python)), os.path.basename(python))
    who: dict[str, object] = {}
    # root's link may lead to a user's program
    if os.geteuid() == 0 and (owner := _owner(python) or _owner(os.path.realpath(python))):
        who = {"user": owner, "group": _group(owner), "extra_groups": [], "env": {"PATH": os.defpath}}
    done = subprocess.run(  # type: ignore[call-overload]
        [python, "-c", ASK],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=DEADLINE_S,
        cwd="/",
        check=True,
        start_new_session=True,
        **who,
    )
    return str(done.stdout).splitlines()


def _owner(path: str) -> int:
    """The one user who, beside root, can change what a path leads to; 0 where only root can. The folders above it are
    no links. PermissionError where several users can: one could have a program of his run as another, or as root.

    They are looked at from the top: what is exchanged meanwhile is exchanged by who is known by then.
    """
    owner = 0
    for place in (*reversed(Path(path).parents), Path(path)):
        found = os.lstat(place)
        owner = owner or found.st_uid
        link = stat.S_ISLNK(found.st_mode)
        shared = 0 if link or found.st_mode & stat.S_ISVTX else found.st_mode
        if (
            found.st_uid not in (0, owner)
            or shared & stat.S_IWOTH
            or (shared & stat.S_IWGRP and found.st_gid not in (0, _group(owner)))
            or (link and place != Path(path))
        ):
            raise PermissionError(errno.EPERM, "several users can change it; check as the one whose it is", str(place))
    return owner


def _group(user: int) -> int:
    """The user's own group: that of a file may be another's."""
    try:
        return pwd.getpwuid(user).pw_gid
    except KeyError:
        return user


def _read(machine: Machine, path: str) -> Torch | None:
    text = machine.host.text(path)
    values = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*=\s*['\"]?([^'\"\n]*)", text, re.MULTILINE))
    if "__version__" not in values:
        return None
    cuda, hip = (value if (value := values.get(name, "None").strip()) != "None" else None for name in ("cuda", "hip"))
    return Torch(path=path, version=values["__version__"], cuda=cuda, hip=hip)


def _table(machine: Machine) -> Table:
    told = machine.text("/proc/sys/kernel/arch") or (os.uname().machine if machine.host.real else "x86_64")
    return table(told)


def _capabilities(machine: Machine) -> dict[str, Version]:
    return {
        address: tuple(reading.values["compute_capability"])
        for address, reading in machine.readings.items()
        if "compute_capability" in reading.values
    }
