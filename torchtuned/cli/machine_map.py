"""The machine as a drawing of letters: packages, NUMA nodes, cores, GPUs, and who has them. Pure.

Every CPU is one character, the CPUs of a core stand together, and a bar parts the level 3 caches. Letters, not
colours, carry the meaning, so that the drawing is right in a pipe, without colours and for the colour-blind.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchtuned.cpuset import CpuSet, format_list
from torchtuned.topology import Core, Gpu, Node, Topology
from torchtuned.wording import count

LETTERS = string.ascii_uppercase + "".join(letter for letter in string.ascii_lowercase if letter not in "ir")
FREE, SEVERAL, MANY, BARRED, ISOLATED, RESERVED = ".", "*", "#", "-", "i", "r"
STYLES = ("black on cyan", "black on yellow", "white on blue", "black on green", "white on magenta", "white on red")

Segment = tuple[str, str]  # text and its rich style, "" for none
Line = tuple[Segment, ...]


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Somebody who has CPUs or GPUs. `gpus` are PCI addresses; `label` is what the legend says."""

    label: str
    cpus: CpuSet
    gpus: tuple[str, ...] = ()


def draw(
    topology: Topology, owners: Sequence[Owner] = (), *, reserved: CpuSet = frozenset(), width: int = 80
) -> list[Line]:
    """Draw the machine in lines of at most `width` columns; the legend follows the drawing. `reserved`: CPUs that the
    administrator keeps from jobs.
    """
    cells = {cpu: _cell(cpu, topology, owners, reserved) for cpu in topology.online}
    lines: list[Line] = [((line, ""),) for line in _fold(_summary(topology), width, "")]
    drawn: set[str] = set()
    packages = topology.packages or (topology.online,)
    for number, package in enumerate(packages):
        lines += [(), ((f"package {number}" if topology.packages else "machine", "bold"),)]
        lines += _package(topology, package, cells, owners, drawn, width)
    lines += _leftovers(topology, owners, drawn, width)
    lines += [(), *_legend(cells, owners, width)]
    return lines


def _package(
    topology: Topology, package: CpuSet, cells: dict[int, Segment], owners: Sequence[Owner], drawn: set[str], width: int
) -> list[Line]:
    lines: list[Line] = []
    rest = package
    for node in topology.nodes:
        part = node.cpus & package
        if not part:
            continue
        rest -= part
        lines += _block(f"node {node.id}", topology, part, cells, width)
        gpus = [gpu for gpu in topology.gpus if gpu.address not in drawn and _at(gpu, node, topology)]
        drawn.update(gpu.address for gpu in gpus)
        lines += _gpus(gpus, owners, width)
    if rest:
        lines += _block("no node" if topology.nodes else "", topology, rest, cells, width)
    return lines


def _block(title: str, topology: Topology, cpus: CpuSet, cells: dict[int, Segment], width: int) -> list[Line]:
    """One heading and the cores of `cpus`, each kind of core (P and E) on lines of its own."""
    cores = sorted((c for c in topology.cores if c.cpus & cpus), key=lambda c: min(c.cpus))
    heading = f"{title}: " if title else ""
    lines: list[Line] = [(("  " + heading + f"CPUs {format_list(cpus)}", ""),)]
    if len(lines[0][0][0]) > width:
        lines = [((text, ""),) for text in _fold(f"{heading}CPUs {format_list(cpus)}", width, "  ")]
    kinds = sorted({core.kind for core in topology.cores})
    for kind in kinds:
        of_kind = [core for core in cores if core.kind == kind]
        if not of_kind:
            continue
        if len(kinds) > 1:
            name = "fastest cores" if kind == kinds[0] else "slowest cores" if kind == kinds[-1] else "middle cores"
            lines.append(((f"    {name}", "dim"),))
        lines += _cores(topology, of_kind, cpus, cells, width)
    return lines


def _cores(
    topology: Topology, cores: Sequence[Core], cpus: CpuSet, cells: dict[int, Segment], width: int
) -> list[Line]:
    """The cores as words of letters, in lines; a bar where the level 3 cache changes."""
    indent = "    "
    lines: list[Line] = []
    line: list[Segment] = [(indent, "")]
    used, last = len(indent), _cache(topology, cores[0])
    for core in cores:
        cache = _cache(topology, core)
        word = [cells[cpu] for cpu in sorted(core.cpus & cpus)]
        gap = " | " if cache != last and used > len(indent) else " " if used > len(indent) else ""
        if used + len(gap) + len(word) > width:
            lines.append(tuple(line))
            line, used, gap = [(indent, "")], len(indent), ""
        if gap:
            line.append((gap, "dim"))
        line += word
        used, last = used + len(gap) + len(word), cache
    return [*lines, tuple(line)]


def _cache(topology: Topology, core: Core) -> int:
    return next((i for i, cache in enumerate(topology.l3) if core.cpus & cache), -1)


def _cell(cpu: int, topology: Topology, owners: Sequence[Owner], reserved: CpuSet) -> Segment:
    having = [i for i, owner in enumerate(owners) if cpu in owner.cpus]
    if len(having) > 1:
        return SEVERAL, "reverse"
    if having:
        return _letter(having[0]), _style(having[0])
    if cpu not in topology.allowed:
        return BARRED, "dim"
    if cpu in reserved:
        return RESERVED, "dim"
    return (ISOLATED, "dim") if cpu in topology.isolated else (FREE, "")


def _letter(index: int) -> str:
    return LETTERS[index] if index < len(LETTERS) else MANY


def _style(index: int) -> str:
    return STYLES[index % len(STYLES)]


def _at(gpu: Gpu, node: Node, topology: Topology) -> bool:
    if gpu.numa_node is not None and any(other.id == gpu.numa_node and other.cpus for other in topology.nodes):
        return gpu.numa_node == node.id
    return bool(gpu.local_cpus) and gpu.local_cpus <= node.cpus


def _gpus(gpus: Iterable[Gpu], owners: Sequence[Owner], width: int, *, remark: str = "") -> list[Line]:
    lines: list[Line] = []
    for gpu in gpus:
        having = [i for i, owner in enumerate(owners) if gpu.address in owner.gpus]
        mark: Segment = (FREE, "")
        if having:
            mark = (SEVERAL, "reverse") if len(having) > 1 else (_letter(having[0]), _style(having[0]))
        text = f" GPU {gpu.address} {gpu.name or f'{gpu.vendor}:{gpu.device}'}{remark}"
        lines.append((("    ", ""), mark, (text[: width - 5], "")))
    return lines


def _leftovers(topology: Topology, owners: Sequence[Owner], drawn: set[str], width: int) -> list[Line]:
    """What has no CPUs to stand at: nodes of memory alone, GPUs whose place is unknown or spans nodes."""
    lines: list[Line] = []
    bare = [node for node in topology.nodes if not node.cpus]
    for node in bare:
        near = "".join(f", nearest is node {other.id}" for other in topology.nearest_nodes(node.id)[:1])
        lines.append(((f"node {node.id}: memory only{near}"[:width], ""),))
    rest = [gpu for gpu in topology.gpus if gpu.address not in drawn]
    unknown = [gpu for gpu in rest if not gpu.local_cpus]
    elsewhere = [gpu for gpu in rest if gpu.local_cpus]
    if elsewhere:
        lines.append((("GPUs near several nodes", "bold"),))
        for gpu in elsewhere:
            lines += _gpus([gpu], owners, width, remark=f", CPUs {format_list(gpu.local_cpus)}")
    if unknown:
        lines.append((("GPUs whose place the machine does not tell", "bold"),))
        lines += _gpus(unknown, owners, width)
    return [(), *lines] if lines else []


def _legend(cells: dict[int, Segment], owners: Sequence[Owner], width: int) -> list[Line]:
    seen = {text for text, _ in cells.values()}
    lines: list[Line] = []
    for i, owner in enumerate(owners):
        text = f" {owner.label}, CPUs {format_list(owner.cpus) or 'none'}"
        first, *more = _fold(text, width - 1, "   ")
        lines.append(((_letter(i), _style(i)), (" " + first.lstrip(), "")))
        lines += [((line, ""),) for line in more]
    meanings = {
        FREE: "free",
        SEVERAL: "shared by several jobs",
        BARRED: "not for you here (cgroup or affinity)",
        ISOLATED: "isolated by the kernel's command line",
        RESERVED: "reserved ([jobs] reserved)",
        MANY: f"job number {len(LETTERS) + 1} and later",
    }
    signs = "   ".join(f"{sign} {meaning}" for sign, meaning in meanings.items() if sign in seen)
    return [*lines, *(((line, ""),) for line in _fold(signs, width, "") if line)]


def _summary(topology: Topology) -> str:
    parts = [
        count(len(topology.packages), "package"),
        count(len(topology.nodes), "NUMA node"),
        count(len(topology.cores), "core"),
        count(len(topology.online), "CPU"),
        count(len(topology.gpus), "GPU"),
    ]
    return ", ".join(part for part in parts if not part.startswith("0 ") or part.endswith("GPUs"))


def _fold(text: str, width: int, indent: str) -> list[str]:
    """Break at spaces and commas so that no line is longer than `width`; `indent` starts every line."""
    lines = [indent]
    for word in text.replace(",", ",\0").replace(" ", " \0").split("\0"):
        if len(lines[-1]) + len(word.rstrip()) > width and lines[-1].strip():
            lines.append(indent)
        lines[-1] += word
    return [line.rstrip() for line in lines]
