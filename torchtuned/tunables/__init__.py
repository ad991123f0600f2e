"""Families of knobs: which there are on this machine, and how each is read, written and given back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from torchtuned.errors import HostError
from torchtuned.host import Host
from torchtuned.policy import Companion, Entry, Wish


class Knob:
    """One value in one file. Families subclass it where the kernel is less simple than that.

    `stage` orders the writes of a plan (undo goes the other way). `capacity`: a limit that is only ever raised.
    `patience`: seconds that one access may take in good health, where that is more than the engine allows to others.
    """

    stage = 50
    capacity = False
    patience = 0.0

    def __init__(self, id: str, path: str) -> None:
        self.id, self.path = id, path

    def read(self, host: Host) -> str:
        """The value now. Missing; Unreadable, with EBUSY when the device is there but asleep or offline."""
        return host.read(self.path)

    def write(self, host: Host, value: str) -> None:
        """Missing, Refused."""
        host.write(self.path, value)

    def choices(self, host: Host) -> Sequence[str] | None:
        """The values that the kernel offers, None when it does not list them."""
        return None

    def predict(self, host: Host, value: str) -> str:
        """What the kernel is known to make of a value, such as rounding it."""
        return value

    def implied(self, host: Host, pending: Mapping[str, str]) -> str:
        """Why this knob cannot be chosen now, because another one decides; `pending` is what this plan writes."""
        return ""

    def excuse(self, error: HostError) -> str:
        """Why a refusal by the kernel is no fault, or the empty text."""
        return ""

    def companions(self, host: Host, value: str) -> tuple[Companion, ...]:
        """Other files that the kernel changes when this knob gets `value`, as they are now."""
        return ()

    def restore(self, host: Host, entry: Entry, companions: Sequence[Companion]) -> None:
        """Write the original, then those companions that still hold what our write made of them. HostError."""
        if self.read(host) != entry.original:
            self.write(host, entry.original)
        for companion in companions:
            if host.read(companion.path) != companion.original:
                host.write(companion.path, companion.original)


class Held(Knob, ABC):
    """A value that lasts as long as a descriptor is open. It needs no ledger: the kernel gives it back."""

    @abstractmethod
    def hold(self, host: Host, value: str) -> int:
        """Return the descriptor. Missing, Refused."""

    @abstractmethod
    def unheld(self, host: Host) -> str:
        """The value when nobody holds one."""


class Family(Protocol):
    """Knobs of one kind. `name` is the first part of their ids."""

    name: str

    def expand(self, host: Host, wish: Wish) -> list[Knob]:
        """The knobs on this machine that a wish means. HostError."""

    def find(self, host: Host, id: str) -> Knob | None:
        """The knob of that id, also when its device is away; None when there is no such knob."""

    def absent(self, host: Host, wish: Wish) -> str:
        """Why `expand` finds nothing."""


def find_knob(families: Mapping[str, Family], host: Host, id: str) -> Knob | None:
    """The knob of that id, also when its device is away; None when there is no such knob."""
    family = families.get(id.partition("/")[0])
    return family.find(host, id) if family else None


def read_words(host: Host, path: str) -> tuple[str, ...] | None:
    """A file that lists words, None when there is none."""
    return tuple(host.text(path).split()) or None


class BracketKnob(Knob):
    """A file that lists all values and puts the one in force in brackets: "always [madvise] never"."""

    def read(self, host: Host) -> str:
        words = host.read(self.path).split()
        return next((word[1:-1] for word in words if word[0] == "[" and word[-1] == "]"), " ".join(words))

    def choices(self, host: Host) -> Sequence[str] | None:
        words = read_words(host, self.path) or ()
        return tuple(word.strip("[]") for word in words) if len(words) > 1 else None
