"""Report files: whose they are, how many are kept, and what a broken one does."""

from __future__ import annotations

import os
from pathlib import Path

from torchtuned.reports.store import Name, Store, find


def test_written_whole_private_and_found_again(tmp_path: Path) -> None:
    store, name = Store(tmp_path / "reports"), Name(1_700_000_000_000_000, 7, 1000)
    store.write(name, {"job": "7"})
    store.write(name, {"job": "7", "ended": 5})
    assert os.listdir(store.folder) == ["1700000000000000-7-1000.json"]
    assert (store.folder / name.file).stat().st_mode & 0o777 == 0o600
    assert store.names() == [name]
    assert store.read(name) == {"job": "7", "ended": 5}


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    store, name = Store(tmp_path), Name(1, 7, 1000)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / name.file).with_suffix(".new").symlink_to(victim)
    store.write(name, {})
    assert (victim.read_text(), store.read(name)) == ("precious", {})


def test_the_last_ones_are_kept_and_those_that_run(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=3)
    names = [Name(number, number, 0) for number in range(1, 8)]
    for name in names:
        store.write(name, {})
    store.prune(running={names[0]})
    assert store.names() == [names[0], *names[-3:]]


def test_a_flood_of_one_user_s_jobs_costs_nobody_else_a_report(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=6)
    theirs = [Name(number, number, 1000) for number in (1, 2)]
    flood = [Name(number, number, 1001) for number in range(10, 40)]
    root = Name(50, 50, 0)
    for name in (*theirs, *flood, root):
        store.write(name, {})
    store.prune(running=set())
    assert store.names() == [*theirs, *flood[-3:], root]
    more = [Name(number, number, 1000) for number in range(60, 70)]
    for name in more:
        store.write(name, {})
    store.prune(running={flood[-1]})
    assert store.names() == [*flood[-3:], root, *more[-3:]]


def test_of_jobs_with_one_number_the_newest_counts(tmp_path: Path) -> None:
    old, new, other = Name(1_000_000, 7, 0), Name(2_000_000, 7, 0), Name(3_000_000, 8, 0)
    names = [old, new, other]
    assert (find(names, "7"), find(names, "7-1"), find(names, "8"), find(names, "9")) == (new, old, other, None)


def test_what_is_no_report_is_none(tmp_path: Path) -> None:
    store, name = Store(tmp_path), Name(1, 7, 1000)
    for text in ("", "[1]", '{"half": ', "[" * 200_000):
        (tmp_path / name.file).write_text(text)
        assert store.read(name) is None
    (tmp_path / "notes.txt").write_text("")
    assert store.names() == [name]
    assert Store(tmp_path / "none").names() == []


def test_a_disk_that_is_full_loses_the_report_only(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    Store(blocked / "reports").write(Name(1, 7, 0), {})
    assert blocked.read_text() == ""
