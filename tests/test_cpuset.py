from __future__ import annotations

import pytest
from fakes.fuzz import often
from fakes.tree import mask
from hypothesis import given
from hypothesis import strategies as st

from torchtuned.cpuset import format_list, parse_list, parse_mask, to_bytes

CPUS = st.frozensets(st.integers(0, 4095))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8", {0, 1, 2, 3, 8}),
        ("", set()),
        ("\n", set()),
        ("0-1\n\0", {0, 1}),
        ("7", {7}),
        ("3,1-2", {1, 2, 3}),
        ("0-2,1-4", {0, 1, 2, 3, 4}),
        (" 0 , 2 ", {0, 2}),
    ],
)
def test_lists_of_the_kernel(text: str, cpus: set[int]) -> None:
    assert parse_list(text) == cpus


@pytest.mark.parametrize("text", ["x", "3-1", "-1", "1-", "0-99999999999", "65536", "0 1", "٣", "1-2-3", "0x1"])
def test_what_is_no_list_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="not a CPU list"):
        parse_list(text)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("ff", set(range(8))),
        ("00000000,00000000", set()),
        ("1,00000001", {0, 32}),
        ("00ff00ff\n\0", {*range(8), *range(16, 24)}),
        ("", set()),
    ],
)
def test_masks_of_the_kernel(text: str, cpus: set[int]) -> None:
    assert parse_mask(text) == cpus


@pytest.mark.parametrize("text", ["xyz", "0,g", "f" * 20000, "-1", "0x1", "1_0", "+1"])
def test_what_is_no_mask_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="not a CPU mask"):
        parse_mask(text)


@often(100)
@given(CPUS)
def test_every_notation_gives_the_same_set_back(cpus: frozenset[int]) -> None:
    assert parse_list(format_list(cpus)) == cpus
    assert parse_mask(mask(cpus)) == cpus
    bits = int.from_bytes(to_bytes(cpus), "little")
    assert {i for i in range(bits.bit_length()) if bits >> i & 1} == cpus


def test_lists_are_as_short_as_the_kernel_writes_them() -> None:
    assert format_list([8, 3, 1, 2, 0]) == "0-3,8"
    assert format_list([0, 1]) == "0-1"
    assert format_list([]) == ""
    assert to_bytes([]) == b""
    assert to_bytes([0, 9]) == b"\x01\x02"
