"""The arrows of the design: who may import whom, and who may touch the machine. Read from the source, with ast."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "torchtuned"

# From the bottom up: a module imports only its own layer and those below. A name with "." at its end is a folder.
LAYERS: dict[str, tuple[str, ...]] = {
    "pure": (
        *("errors", "cpuset", "topology", "policy", "config", "config_keys", "environment", "findings", "cuda"),
        *(
            "wording",
            "words",
            "systemdconf",
            "units",
            "placement.",
            "run.launchers",
            "effects",
            "cli.machine_map",
            "reports.usage",
            "reports.ending",
        ),
    ),
    "doors": (
        *(
            "host",
            "gpus",
            "nvidia",
            "pci",
            "ledger",
            "processes",
            "deadline",
            "files",
            "jobtables",
            "run.trust",
            "notify",
        ),
        *("reports.proctree", "reports.inotify", "reports.journal", "reports.store"),
    ),
    "readers": (
        *("discover", "cpulimits", "scopes", "configfiles", "mounts", "tunables.", "checks."),
        *("reports.accounting", "reports.postmortem"),
    ),
    "engine": ("engine", "changes", "survey", "jobs", "bugreport", "reports.jobrecord"),
    "use cases": (
        *("manager", "places", "confining", "pinning", "selfplaced", "adopting", "leases", "watches", "turns", "tasks"),
        *("hostpolicy", "hostchecks", "reports."),
    ),
    "bus": ("bus.", "objects", "systemd1", "polkit", "logind", "hotplug", "newcomers"),
    "surfaces": ("dbusapi", "cli.", "client", "run."),
    "root": ("daemon", "__main__"),
}
ALONE = ("torch.", "lint.", "rankshim", "nvml")  # import nothing else of the package

TOUCHY = frozenset(
    {"asyncio", "ctypes", "datetime", "fcntl", "glob", "io", "locale", "logging", "os", "pathlib", "platform"}
    | {"random", "secrets", "select", "shutil", "signal", "socket", "subprocess", "sys", "tempfile", "threading"}
    | {"time", "urllib", "uuid"}
)


@cache
def tree(name: str) -> ast.Module:
    path = PACKAGE / (name.replace(".", "/") + ".py")
    return ast.parse((path if path.exists() else PACKAGE / name.replace(".", "/") / "__init__.py").read_text())


def modules() -> list[str]:
    """Every module, as "host" or "tunables.cpu"; a package by its name alone."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(name for name in found if name)


def within(name: str, entries: tuple[str, ...]) -> bool:
    return any(name == entry or (entry.endswith(".") and f"{name}.".startswith(entry)) for entry in entries)


def layer(name: str) -> str:
    found = [layer for layer, entries in LAYERS.items() if within(name, entries)]
    assert found, f"put torchtuned/{name.replace('.', '/')} into a layer of {__name__}"
    return found[0]


def imports(name: str) -> set[str]:
    """The modules that one imports, absolute: "torchtuned.host", "os", "dbus_next.aio"."""
    package = (PACKAGE / name.replace(".", "/")).is_dir()
    here = ["torchtuned", *name.split(".")] if package else ["torchtuned", *name.split(".")[:-1]]
    found: set[str] = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*here[: len(here) - node.level + 1], *(node.module or "").split(".")]).strip(".")
            base = base if node.level else node.module or ""
            inner = {f"{base}.{alias.name}" for alias in node.names}
            known = {path for path in inner if path.removeprefix("torchtuned.") in modules()}
            found |= known or {base}
    return found


def own(name: str) -> set[str]:
    """The modules of this package that one imports, as "host"."""
    return {path.removeprefix("torchtuned.") for path in imports(name) if path.startswith("torchtuned.")}


@pytest.mark.parametrize("name", modules())
def test_imports_go_down(name: str) -> None:
    if within(name, ALONE):
        root = name.split(".")[0]
        strangers = {other for other in own(name) if other.split(".")[0] != root}
        assert not strangers
        return
    order = list(LAYERS)
    alone = {other for other in own(name) if within(other, ALONE)}
    above = {other for other in own(name) - alone if order.index(layer(other)) > order.index(layer(name))}
    assert not above, f"{name} ({layer(name)}) is below these"
    assert not alone or name.startswith("cli.")


@pytest.mark.parametrize("name", [name for name in modules() if within(name, LAYERS["pure"])])
def test_pure_code_touches_nothing(name: str) -> None:
    assert not {path.split(".")[0] for path in imports(name)} & TOUCHY
    calls = {ast.unparse(node.func) for node in ast.walk(tree(name)) if isinstance(node, ast.Call)}
    assert not {"open", "print", "input", "eval", "exec"} & calls


def test_one_package_speaks_to_the_bus_library() -> None:
    users = {name for name in modules() if any(path.split(".")[0] == "dbus_next" for path in imports(name))}
    assert {name.split(".")[0] for name in users} == {"bus"}


def test_who_may_use_the_bus() -> None:
    users = {name for name in modules() if any(within(other, LAYERS["bus"]) for other in own(name))}
    assert users <= {name for name in modules() if within(name, (*LAYERS["bus"], "dbusapi", "daemon"))}


def reach(name: str) -> set[str]:
    """All modules that importing this one may load, of the package and of others."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for path in imports(waiting.pop()) - found:
            found.add(path)
            if path.removeprefix("torchtuned.") in modules() and path.startswith("torchtuned."):
                waiting.append(path.removeprefix("torchtuned."))
    return found


@pytest.mark.parametrize("name", ["daemon", "run.main", "cli.main"])
def test_nothing_but_torch_s_own_part_imports_torch(name: str) -> None:
    assert not {path for path in reach(name) if path.split(".")[0] == "torch"}


def test_the_wrapper_stays_light() -> None:
    heavy = {"dbus_next", "rich", "psutil", "pyudev", "systemd", "pynvml", "asyncio"}
    assert not {path.split(".")[0] for path in reach("run.main")} & heavy


@pytest.mark.parametrize("name", [name for name in modules() if within(name, ("torch.", "rankshim", "lint."))])
def test_what_runs_in_a_user_s_python_needs_nothing_else(name: str) -> None:
    allowed = {*sys.stdlib_module_names, "torch", "torchtuned"}
    assert {path.split(".")[0] for path in imports(name)} <= allowed


@pytest.mark.parametrize("name", [name for name in modules() if not within(name, (*LAYERS["doors"], *ALONE))])
def test_only_the_doors_open_the_kernel_s_files(name: str) -> None:
    """No call gets a path below /sys, /proc or /dev, except methods of Host.

    A process's own /proc/self is no part of the machine that a folder could stand for.
    """
    kernels = re.compile(r"/(sys|proc(?!/self/)|dev(?!/null$))/")
    found = []
    for node in ast.walk(tree(name)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        first = node.args[0] if node.args else None
        if isinstance(first, ast.JoinedStr) and first.values:
            first = first.values[0]
        path = first.value if isinstance(first, ast.Constant) else None
        opens = called in ("open", "Path", "Path.home") or called.split(".")[0] in ("os", "io", "pathlib", "shutil")
        if opens and isinstance(path, str) and kernels.match(path):
            found.append(f"line {node.lineno}: {called}({path!r})")
    assert not found
