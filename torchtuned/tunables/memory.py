"""Transparent huge pages."""

from __future__ import annotations

from torchtuned.host import Host
from torchtuned.policy import Wish
from torchtuned.tunables import BracketKnob, Knob

FOLDER = "/sys/kernel/mm/transparent_hugepage"
FILES = {"memory/transparent_hugepage": "enabled", "memory/transparent_hugepage_defrag": "defrag"}


class Memory:
    name = "memory"

    def expand(self, host: Host, wish: Wish) -> list[Knob]:
        knob = self.find(host, wish.knob)
        return [knob] if knob and host.exists(knob.path) else []

    def find(self, host: Host, id: str) -> Knob | None:
        return BracketKnob(id, f"{FOLDER}/{FILES[id]}") if id in FILES else None

    def absent(self, host: Host, wish: Wish) -> str:
        return "this kernel has no transparent huge pages"
