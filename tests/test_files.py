"""Files put in place whole: their permissions, what fails, and what lies in the way."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from test_ledger import no_space

from torchtuned.files import replace_file, way_out


@pytest.mark.parametrize("umask", [0o077, 0o022, 0])
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_the_permissions_are_those_asked_for(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        replace_file(tmp_path / "file.json", "text\n", mode=mode, sync=True)
    finally:
        os.umask(before)
    assert (tmp_path / "file.json").stat().st_mode & 0o777 == mode
    assert (tmp_path / "file.json").read_text() == "text\n"


@pytest.mark.parametrize("sync", [True, False])
def test_a_write_that_fails_leaves_the_old_text(tmp_path: Path, *, sync: bool) -> None:
    path = tmp_path / "file.json"
    path.write_text("old")
    with no_space(), pytest.raises(OSError, match="File too large"):
        replace_file(path, "new", mode=0o600, sync=sync)
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["file.json"])


def test_what_lies_in_the_way_is_neither_written_nor_kept(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "file.new").symlink_to(tmp_path / "victim")
    replace_file(tmp_path / "file.json", "text", mode=0o600, sync=False)
    assert sorted(os.listdir(tmp_path)) == ["file.json", "victim"]
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "df -h /run/x"),
        (errno.EROFS, "mounted read-only: findmnt"),
        (errno.EACCES, "root"),
        (errno.EIO, ""),
    ],
)
def test_what_to_do_about_it_depends_on_the_error(number: int, hint: str) -> None:
    said = way_out(OSError(number, os.strerror(number)), Path("/run/x"))
    assert (hint in said) if hint else not said
