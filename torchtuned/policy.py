"""Wanted knob values, and what should happen to a knob that has another value. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    APPLIED = "applied"
    KEPT = "kept"
    UNSUPPORTED = "unsupported"
    DENIED = "denied"
    FOREIGN = "foreign"
    FAILED = "failed"
    DRIFTED = "drifted"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a plan: what a knob is, what it should be, and what became (or would become) of it.

    `source` is where the wish comes from: FILE:LINE, or the profile's.
    """

    knob: str
    current: str
    wanted: str
    outcome: Outcome
    reason: str
    source: str
