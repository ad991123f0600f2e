"""Small machines for tests: a folder of files that stands for /."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torchtuned.cpuset import format_list, parse_list

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
PCI = "sys/bus/pci/devices"


def make_tree(folder: Path, files: Mapping[str, str | bytes | None]) -> Path:
    """Write the files ("sys/devices/system/cpu/online": "0-3\\n"); None makes a folder, "-> X" a link to X."""
    made: set[Path] = set()
    for name, content in files.items():
        path = folder / name.lstrip("/")
        if path.parent not in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.add(path.parent)
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif content.startswith("-> "):
            path.symlink_to(content[3:])
        else:
            path.write_text(content)
    return folder


def mask(cpus: str | Iterable[int]) -> str:
    """A CPU list as the kernel's mask: "0,32" is "00000001,00000001"."""
    numbers = parse_list(cpus) if isinstance(cpus, str) else cpus
    bits = sum(1 << cpu for cpu in numbers)
    words = [f"{bits >> 32 * i & 0xFFFFFFFF:08x}" for i in range(max(1, (bits.bit_length() + 31) // 32))]
    return ",".join(reversed(words))


def pairs(first: int, count: int, apart: int) -> list[str]:
    """Cores with two threads each, as "0,16", "1,17", …"""
    return [f"{cpu},{cpu + apart}" for cpu in range(first, first + count)]


def machine(
    *,
    cores: Sequence[str],
    packages: Sequence[str] = (),
    nodes: Mapping[int, str] | None = None,
    distances: Mapping[int, str] | None = None,
    l3: Sequence[str] = (),
    gpus: Mapping[str, Mapping[str, str]] | None = None,
    online: str | None = None,
) -> dict[str, str | bytes | None]:
    """The sysfs files of a machine, from CPU lists. CPUs not in `online` keep a folder without topology.

    A GPU's files may be given ("numa_node", "class", …); "parents" are the bridges above it, outermost first.
    """
    every = sorted(cpu for core in cores for cpu in parse_list(core))
    up = parse_list(online) if online is not None else frozenset(every)
    packages = packages or [format_list(every)]
    files: dict[str, str | bytes | None] = {f"{CPU}/online": format_list(up) + "\n"}
    for cpu in every:
        files[f"{CPU}/cpu{cpu}/online"] = f"{int(cpu in up)}\n"
    for core in cores:
        for cpu in parse_list(core) & up:
            files[f"{CPU}/cpu{cpu}/topology/thread_siblings_list"] = format_list(parse_list(core) & up) + "\n"
    for i, package in enumerate(packages):
        for cpu in parse_list(package) & up:
            files[f"{CPU}/cpu{cpu}/topology/physical_package_id"] = f"{i}\n"
    for group in l3:
        for cpu in parse_list(group) & up:
            files[f"{CPU}/cpu{cpu}/cache/index3/level"] = "3\n"
            files[f"{CPU}/cpu{cpu}/cache/index3/type"] = "Unified\n"
            files[f"{CPU}/cpu{cpu}/cache/index3/shared_cpu_list"] = format_list(parse_list(group) & up) + "\n"
    for node, cpus in ({0: format_list(every)} if nodes is None else nodes).items():
        files[f"{NODE}/node{node}/cpulist"] = format_list(parse_list(cpus) & up) + "\n"
        if distances:
            files[f"{NODE}/node{node}/distance"] = distances[node] + "\n"
    for address, facts in (gpus or {}).items():
        files |= pci_device(address, facts)
    return files


def pci_device(address: str, facts: Mapping[str, str]) -> dict[str, str | bytes | None]:
    """One PCI device, by default an NVIDIA GPU whose node the kernel does not know."""
    steps = [*facts.get("parents", "").split(), address]
    home = f"sys/devices/pci{address[:7]}/" + "/".join(steps)
    defaults = {"vendor": "0x10de", "device": "0x20b0", "class": "0x030200", "numa_node": "-1"}
    files: dict[str, str | bytes | None] = {
        f"{home}/{name}": f"{text}\n" for name, text in {**defaults, **facts}.items() if name != "parents"
    }
    return files | {f"{PCI}/{address}": f"-> ../../../../{home}"}


# The machines of the peers' cases, by their letters there: A a plain two-socket server, B a DGX A100 in NPS4, C two
# sockets with eight GPUs, D a Ryzen with two L3s, E a hybrid desktop part, F ten cores without SMT.


def gpu_addresses(count: int) -> list[str]:
    return [f"0000:{16 * (i + 1):02x}:00.0" for i in range(count)]


def on_nodes(*nodes: int) -> dict[str, dict[str, str]]:
    """GPUs in PCI order on these nodes."""
    return {address: {"numa_node": str(node)} for address, node in zip(gpu_addresses(len(nodes)), nodes, strict=True)}


def machine_a(*, gpus: Sequence[int] = (0, 0, 1, 1), online: str | None = None) -> dict[str, str | bytes | None]:
    halves = ["0-7,16-23", "8-15,24-31"]
    return machine(
        cores=pairs(0, 16, 16),
        packages=halves,
        nodes=dict(enumerate(halves)),
        distances={0: "10 21", 1: "21 10"},
        l3=halves,
        gpus=on_nodes(*gpus),
        online=online,
    )


def machine_b() -> dict[str, str | bytes | None]:
    return machine(
        cores=pairs(0, 128, 128),
        packages=["0-63,128-191", "64-127,192-255"],
        nodes={i: f"{16 * i}-{16 * i + 15},{16 * i + 128}-{16 * i + 143}" for i in range(8)},
        l3=[f"{c}-{c + 3},{c + 128}-{c + 131}" for c in range(0, 128, 4)],
        gpus=on_nodes(3, 3, 1, 1, 7, 7, 5, 5),
    )


def machine_c() -> dict[str, str | bytes | None]:
    halves = ["0-47,96-143", "48-95,144-191"]
    return machine(
        cores=pairs(0, 96, 96), packages=halves, nodes=dict(enumerate(halves)), gpus=on_nodes(0, 0, 0, 0, 1, 1, 1, 1)
    )


def machine_d(gpus: int = 3) -> dict[str, str | bytes | None]:
    return machine(cores=pairs(0, 16, 16), l3=["0-7,16-23", "8-15,24-31"], gpus=on_nodes(*[-1] * gpus))


def machine_e(gpus: int = 2) -> dict[str, str | bytes | None]:
    cores = [f"{cpu}-{cpu + 1}" for cpu in range(0, 16, 2)] + [str(cpu) for cpu in range(16, 32)]
    files = machine(cores=cores, gpus=on_nodes(*[-1] * gpus))
    return files | {"sys/devices/cpu_core/cpus": "0-15\n", "sys/devices/cpu_atom/cpus": "16-31\n"}


def machine_f() -> dict[str, str | bytes | None]:
    return machine(cores=[str(cpu) for cpu in range(10)], gpus=on_nodes(0, 0, 0))


def machine_of(cpus: int) -> dict[str, str | bytes | None]:
    """A large server: cores with two threads, 4 packages, 16 nodes with one GPU each, an L3 for every two cores."""
    cores = cpus // 2
    node, package = cores // 16, cores // 4
    both = [f"{start}-{start + node - 1},{cores + start}-{cores + start + node - 1}" for start in range(0, cores, node)]
    return machine(
        cores=pairs(0, cores, cores),
        packages=[f"{i}-{i + package - 1},{cores + i}-{cores + i + package - 1}" for i in range(0, cores, package)],
        nodes=dict(enumerate(both)),
        distances={i: " ".join("10" if i == j else "32" for j in range(16)) for i in range(16)},
        l3=[f"{start}-{start + 1},{cores + start}-{cores + start + 1}" for start in range(0, cores, 2)],
        gpus={f"{i:04x}:01:00.0": {"numa_node": str(i)} for i in range(16)},
    )
