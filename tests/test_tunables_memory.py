from __future__ import annotations

from pathlib import Path

import pytest
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


RESERVE = "/proc/sys/vm/min_free_kbytes"


@pytest.mark.parametrize(("before", "wanted"), [("never", "always"), ("madvise", "never")])
def test_a_reserve_that_the_kernel_raises_with_them_goes_back(tmp_path: Path, before: str, wanted: str) -> None:
    made = Desk(Kernel({f"{FOLDER}/enabled": FILES[f"{FOLDER}/enabled"], RESERVE: "30000"}), tmp_path)
    made.kernel.set(f"{FOLDER}/enabled", before)
    made.kernel.files[RESERVE] = "30000"
    files = dict(made.kernel.files)
    made.apply(f"[memory]\ntransparent_hugepage = {wanted}\n")
    made.restart()
    made.undo()
    assert made.kernel.files == files


@pytest.mark.parametrize("then", ["never", "always"])
def test_a_reserve_that_somebody_set_since_stays(tmp_path: Path, then: str) -> None:
    made = Desk(Kernel({**FILES, RESERVE: "30000"}), tmp_path)
    made.apply("[memory]\ntransparent_hugepage = never\n")
    made.kernel.set(RESERVE, "90000")
    made.apply(f"[memory]\ntransparent_hugepage = {then}\n")
    made.undo()
    assert made.kernel.files == {**FILES, RESERVE: "90000"}


@pytest.mark.parametrize("whole", [True, False])
def test_a_reserve_of_the_policy_is_not_what_was_there_before_it(tmp_path: Path, whole: bool) -> None:  # noqa: FBT001
    """Huge pages come first, so that what the policy wants of the reserve is in force after them."""
    made = Desk(Kernel({**FILES, f"{FOLDER}/enabled": "always madvise [never]", RESERVE: "30000"}), tmp_path)
    before = dict(made.kernel.files)
    text = "[memory]\ntransparent_hugepage = always\n[sysctl]\nvm.min_free_kbytes = 50000\n"
    made.apply(text)
    assert made.kernel.files[RESERVE] == "50000"
    assert {row.outcome for row in made.verify(text).values()} == {Outcome.APPLIED}
    made.restart()
    if whole:
        made.apply(text.replace("always", "madvise"))
        made.undo()
        assert made.kernel.files == before
        return
    made.undo("memory")
    assert made.kernel.files[RESERVE] == "50000"
    made.undo()
    assert made.kernel.files == before


def test_the_kernel_command_line_comes_first(tmp_path: Path) -> None:
    made = Desk(Kernel({**FILES, "/proc/cmdline": "root=/dev/sda1 transparent_hugepage=never quiet"}), tmp_path)
    row = made.apply("[memory]\ntransparent_hugepage = always\n")["memory/transparent_hugepage"]
    assert (row.outcome, row.source) == (Outcome.FOREIGN, "/proc/cmdline")


def test_a_kernel_without_them(tmp_path: Path) -> None:
    row = Desk(Kernel({}), tmp_path).apply("[memory]\ntransparent_hugepage = always\n")["memory/transparent_hugepage"]
    assert row.outcome is Outcome.UNSUPPORTED
