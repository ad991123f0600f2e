"""Transparent huge pages."""

from __future__ import annotations

from torchtuned.host import Host
from torchtuned.policy import Companion, Wish
from torchtuned.tunables import BracketKnob, Knob

FOLDER = "/sys/kernel/mm/transparent_hugepage"
FILES = {"memory/transparent_hugepage": "enabled", "memory/transparent_hugepage_defrag": "defrag"}
ENABLED, RESERVE = "memory/transparent_hugepage", "/proc/sys/vm/min_free_kbytes"


class HugePages(BracketKnob):
    """Comes before sysctls: where they are switched on, the kernel raises vm.min_free_kbytes to what it recommends with
    them, over anybody's own lower value, and does not take it back."""

    stage = 5

    def __init__(self) -> None:
        super().__init__(ENABLED, f"{FOLDER}/{FILES[ENABLED]}")

    def companions(self, host: Host, value: str) -> tuple[Companion, ...]:
        return (Companion(path=RESERVE, original=host.read(RESERVE)),) if host.exists(RESERVE) else ()


class Memory:
    name = "memory"

    def expand(self, host: Host, wish: Wish) -> list[Knob]:
        knob = self.find(host, wish.knob)
        return [knob] if knob and host.exists(knob.path) else []

    def find(self, host: Host, id: str) -> Knob | None:
        if id == ENABLED:
            return HugePages()
        return BracketKnob(id, f"{FOLDER}/{FILES[id]}") if id in FILES else None

    def absent(self, host: Host, wish: Wish) -> str:
        return "this kernel has no transparent huge pages"
