"""Sets of CPU (or node) numbers, in the notations of the kernel and of systemd."""

from __future__ import annotations

from collections.abc import Iterable

CpuSet = frozenset[int]
LIMIT = 65536  # no kernel numbers CPUs this high; a bound keeps "0-99999999999" from eating memory

_HEX = frozenset("0123456789abcdefABCDEF")


def parse_list(text: str) -> CpuSet:
    """Read "0-3,8" (cpulist, Cpus_allowed_list); empty text is the empty set.

    Raises ValueError with the offending part, also when the parts together name more than LIMIT numbers: a text from
    a stranger that says "0-65535," a thousand times is not worth a second. Newlines and NUL bytes around the text are
    ignored: kernels of 2021 ended these files with both.
    """
    cpus: set[int] = set()
    left = LIMIT
    for part in text.strip(" \t\n\0").split(","):
        part = part.strip()
        if not part:
            continue
        first, dash, last = part.partition("-")
        if not (first.isascii() and first.isdigit() and (not dash or (last.isascii() and last.isdigit()))):
            raise ValueError(f"not a CPU list: {part!r}")
        low = int(first) if len(first) <= 6 else LIMIT
        high = low if not dash else int(last) if len(last) <= 6 else LIMIT
        left -= high - low + 1
        if high < low or high >= LIMIT or left < 0:
            raise ValueError(f"not a CPU list: {part!r}")
        cpus.update(range(low, high + 1))
    return frozenset(cpus)


def format_list(cpus: Iterable[int]) -> str:
    """Write a set as "0-3,8"; the empty set is the empty text."""
    parts: list[str] = []
    start = end = -2
    for cpu in sorted(cpus):
        if cpu == end + 1:
            end = cpu
            continue
        if start >= 0:
            parts.append(f"{start}-{end}" if end > start else f"{start}")
        start = end = cpu
    if start >= 0:
        parts.append(f"{start}-{end}" if end > start else f"{start}")
    return ",".join(parts)


def parse_mask(text: str) -> CpuSet:
    """Read "ff,00000001" (cpumap, local_cpus, thread_siblings): hexadecimal words, highest first."""
    digits = text.strip(" \t\n\0").replace(",", "")
    if not digits:
        return frozenset()
    if len(digits) * 4 > LIMIT:
        raise ValueError("not a CPU mask: too long")
    if not _HEX.issuperset(digits):  # int() would take a sign, too, and a negative number has no highest bit
        raise ValueError(f"not a CPU mask: {text.strip()[:40]!r}")
    bits = int(digits, 16)
    cpus = []
    while bits:  # by set bits, not by all bits: a machine of 4,096 CPUs has thousands of masks with two bits each
        low = bits & -bits
        cpus.append(low.bit_length() - 1)
        bits ^= low
    return frozenset(cpus)


def to_bytes(cpus: Iterable[int]) -> bytes:
    """Write a set as systemd's AllowedCPUs= on D-Bus: CPU n is bit n%8 of byte n/8."""
    mask = bytearray(max(cpus, default=-1) // 8 + 1) if (cpus := list(cpus)) else bytearray()
    for cpu in cpus:
        mask[cpu // 8] |= 1 << cpu % 8
    return bytes(mask)
