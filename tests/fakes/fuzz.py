"""How often tests with made-up input run: a fixed seed and a few examples as a rule, many others in a long run.

tests/fuzz sets TORCHTUNED_FUZZ to the factor; then the seed is random, and what fails is printed to be tried again.
"""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from torchtuned.errors import HostError, Missing, Unreadable
from torchtuned.host import Host

FACTOR = int(os.environ.get("TORCHTUNED_FUZZ", "0"))
UNUSUAL = st.one_of(
    st.sampled_from(
        [
            *(b"", b"\n", b"0", b"-1", b"1", b"max", b"max 100000", b"0 0", b"-1 -1", b"1e9", b"0x10", b"\0"),
            *(b"0-3", b"3-0", b"0-63", b"0-99999999999", b"0,", b",", b"0-", b"0-3:1/2", b"0-1000000", b"all", b"none"),
            *(b"ffffffff,ffffffff", b"00000000", b"f" * 64, b"g", b"9" * 5000, b"[x] y", b"[", b"a: b", b"(x) S 1 1 1"),
            *(b"<unsupported>", b"../../etc/shadow", b"0::/", b"0::/../..", b"1:cpuset:/x\n0::/y", b"N/A"),
            *(b"\xff\xfe", b"\xc2\xb2", b"\xd9\xa3"),  # the last two are digits to Python, not to the kernel
        ]
    ),
    st.binary(max_size=40),
    st.integers(-(2**70), 2**70).map(lambda number: str(number).encode()),
    st.text("0123456789abcdef,x\n", max_size=20).map(str.encode),
    st.lists(st.integers(0, 99) | st.sampled_from(["", "1-2", "7-8", "-"]), max_size=5).map(
        lambda parts: ",".join(map(str, parts)).encode()
    ),
)


def often(examples: int) -> settings:
    """Settings for a test that runs so many examples as a rule."""
    return settings(
        max_examples=examples * (FACTOR or 1),
        derandomize=not FACTOR,
        deadline=None,
        database=None,
        print_blob=bool(FACTOR),
        suppress_health_check=[*HealthCheck],
    )


@dataclass(frozen=True)
class Spoiling:
    """Of a hundred files `rate` say one of `values` instead; which file and which value, `seed` decides."""

    rate: int
    seed: int
    values: list[bytes | type[HostError]]


SPOILINGS = st.builds(
    Spoiling,
    st.sampled_from([2, 10, 40, 100]),
    st.integers(0, 2**32),
    st.lists(UNUSUAL | st.sampled_from([Missing, Unreadable]), min_size=1, max_size=12),
)


class Spoiled(Host):
    """A machine in a folder of which some files say something else, cannot be read, or are gone when they are opened.

    Each says the same for ever, in whatever order and thread they are read.
    """

    def __init__(self, root: Path, spoiling: Spoiling) -> None:
        super().__init__(root)
        self._spoiling = spoiling

    def read_bytes(self, path: str) -> bytes:
        dice = random.Random(f"{self._spoiling.seed} {path}")
        if dice.randrange(100) >= self._spoiling.rate:
            return super().read_bytes(path)
        said = dice.choice(self._spoiling.values)
        if isinstance(said, bytes):
            return said
        raise said("spoiled", where=path, errno=errno.EIO)
