"""What is published about knobs: for every one that policy has, an entry, with a source unless it says unmeasured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchtuned.config_keys import SECTIONS
from torchtuned.effects import EFFECTS, UNMEASURED, Effect, effect

PROFILES = Path(__file__).resolve().parent.parent / "share/torchtuned/profiles"
SHIPPED = sorted(
    {
        f"sysctl/{key}"
        for path in PROFILES.glob("*.conf")
        for key in re.findall(r"^((?:vm|net|kernel)\.[\w.]+) =", path.read_text(), re.M)
    }
)
KNOBS = [key.knob.replace("*", "x0") for keys in SECTIONS.values() for key in keys.values() if key.knob]


@pytest.mark.parametrize("knob", [*KNOBS, "sysctl/vm.swappiness", "sysctl/kernel.numa_balancing", *SHIPPED])
def test_every_knob_has_an_entry(knob: str) -> None:
    assert effect(knob).purpose


def test_others_are_unmeasured() -> None:
    assert effect("sysctl/kernel.sched_rt").effect == UNMEASURED


@pytest.mark.parametrize("entry", EFFECTS, ids=lambda entry: entry.knobs[0])
def test_figures_have_a_source(entry: Effect) -> None:
    if re.search(r"\d", entry.effect):
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+(, [\w.-]+/[\w.-]+#\d+)*", entry.source)
    if entry.effect == UNMEASURED:
        assert not entry.source
