"""Words that several commands share."""

from __future__ import annotations

import pytest

from torchtuned.wording import count, named, nearest, size


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0, "0 bytes"), (999, "999 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (64 << 20, "64 MiB")),
        *((3 << 30, "3 GiB"), (12.34 * 2**30, "12.3 GiB"), (1000 << 30, "1000 GiB"), (5 << 40, "5 TiB")),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_sizes(number: float, text: str) -> None:
    assert size(number) == text


def test_counts() -> None:
    assert [count(number, "job") for number in (0, 1, 2)] == ["0 jobs", "1 job", "2 jobs"]


def test_misspellings() -> None:
    assert nearest("statsu", ["plan", "status"]) == "status"
    assert nearest("x", iter(["plan", "status"])) == nearest("plan", []) == ""


def test_nothing_can_be_seen() -> None:
    assert (named(""), named("x")) == ("''", "x")
