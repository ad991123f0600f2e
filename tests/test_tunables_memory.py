from __future__ import annotations

from pathlib import Path

from fakes.kernel import Kernel
from fakes.policy import Desk

from torchtuned.policy import Outcome

FOLDER = "/sys/kernel/mm/transparent_hugepage"
FILES = {
    f"{FOLDER}/enabled": "always [madvise] never",
    f"{FOLDER}/defrag": "always defer defer+madvise [madvise] never",
}


def test_huge_pages_there_and_back(tmp_path: Path) -> None:
    made = Desk(Kernel(FILES), tmp_path)
    text = "[memory]\ntransparent_hugepage = always\ntransparent_hugepage_defrag = defer+madvise\n"
    rows = made.apply(text)
    assert {row.outcome for row in rows.values()} == {Outcome.APPLIED}
    assert made.kernel.files[f"{FOLDER}/enabled"] == "[always] madvise never"
    assert made.verify(text)["memory/transparent_hugepage"].current == "always"
    made.restart()
    made.undo()
    assert made.kernel.files == FILES


def test_the_kernel_command_line_comes_first(tmp_path: Path) -> None:
    made = Desk(Kernel({**FILES, "/proc/cmdline": "root=/dev/sda1 transparent_hugepage=never quiet"}), tmp_path)
    row = made.apply("[memory]\ntransparent_hugepage = always\n")["memory/transparent_hugepage"]
    assert (row.outcome, row.source) == (Outcome.FOREIGN, "/proc/cmdline")


def test_a_kernel_without_them(tmp_path: Path) -> None:
    row = Desk(Kernel({}), tmp_path).apply("[memory]\ntransparent_hugepage = always\n")["memory/transparent_hugepage"]
    assert row.outcome is Outcome.UNSUPPORTED
