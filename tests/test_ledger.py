from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from torchtuned.errors import Failed
from torchtuned.ledger import Ledger
from torchtuned.policy import Companion, Entry, State

ENTRY = Entry(
    knob="cpu/policy0/governor", original="schedutil", written="performance", asked="performance", when="jobs",
    source="a:1", since=1.5, state=State.WRITTEN,
    companions=(Companion(path="/sys/x", original="balance_power", after="performance", apart=True),),
)  # fmt: skip
OTHER = Entry(knob="sysctl/vm.swappiness", original="60", written="10")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run/ledger.json"


def write(path: Path, *entries: Entry, boot_id: str = "") -> None:
    ledger = Ledger(path, boot_id=boot_id)
    with ledger.locked():
        ledger.save({entry.knob: entry for entry in entries})


def files(path: Path) -> list[str]:
    return sorted(os.listdir(path.parent))


def test_entries_come_back_in_their_order(path: Path) -> None:
    write(path, OTHER, ENTRY)
    again = Ledger(path)
    again.peek()
    assert list(again.entries.values()) == [OTHER, ENTRY]
    assert path.stat().st_mode & 0o777 == 0o600
    assert files(path) == ["ledger.json", "ledger.lock"]


def test_without_entries_there_is_no_file(path: Path) -> None:
    write(path, OTHER)
    write(path)
    assert files(path) == ["ledger.lock"]


def test_a_ledger_sees_what_another_process_wrote(path: Path) -> None:
    ours, theirs = Ledger(path), Ledger(path)
    with ours.locked():
        ours.save({OTHER.knob: OTHER})
    with theirs.locked():
        theirs.save({**theirs.entries, ENTRY.knob: ENTRY})
    with ours.locked():
        assert [*ours.entries] == [OTHER.knob, ENTRY.knob]
        ours.save({})
    with theirs.locked():
        assert not theirs.entries


def test_one_operation_at_a_time(path: Path) -> None:
    ledger = Ledger(path)
    script = (
        "import sys, time; from torchtuned.ledger import Ledger\n"
        "with Ledger(sys.argv[1]).locked(): print('in', time.monotonic(), flush=True)"
    )
    with ledger.locked():
        child = subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE, text=True)
        time.sleep(0.5)
        left = time.monotonic()
    output, _ = child.communicate(timeout=20)
    assert float(output.split()[1]) >= left


def test_a_lock_that_is_never_let_go_is_an_error_that_says_where(path: Path) -> None:
    with Ledger(path).locked():
        started = time.monotonic()
        expected = r"ledger.lock: another process has been changing knobs for 0.3 s.*lslocks \| grep ledger.lock"
        with pytest.raises(Failed, match=expected), Ledger(path, patience_s=0.3).locked():
            raise AssertionError
        assert 0.2 < time.monotonic() - started < 5


def test_nobody_but_root_can_keep_the_ledger_locked(path: Path) -> None:
    """Who may open a file for reading may lock it: so there must be nothing to open."""
    write(path, OTHER)
    script = (
        "import fcntl, os, sys, time\nos.setuid(65534)\nheld = []\n"
        "for name in ('', 'ledger.json', 'ledger.lock', 'ledger.new'):\n"
        "    try:\n        held.append(os.open(os.path.join(sys.argv[1], name), os.O_RDONLY))\n"
        "        fcntl.flock(held[-1], fcntl.LOCK_EX)\n"
        "    except OSError:\n        pass\n"
        "print(len(held), flush=True)\ntime.sleep(60)"
    )
    for folder in (path.parent, *path.parents):
        if folder.stat().st_mode & 0o005 != 0o005 and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    nobody = subprocess.Popen([sys.executable, "-c", script, path.parent], stdout=subprocess.PIPE, text=True)
    try:
        assert nobody.stdout is not None
        assert nobody.stdout.readline() == "1\n"  # the folder
        with Ledger(path, patience_s=2).locked():
            pass
    finally:
        nobody.kill()
        nobody.communicate()


def test_a_full_run_keeps_nobody_from_undoing(path: Path) -> None:
    write(path, OTHER)
    ledger = Ledger(path)
    with no_space(), ledger.locked():
        assert [*ledger.entries] == [OTHER.knob]


def test_entries_of_another_boot_are_gone(path: Path) -> None:
    write(path, OTHER, boot_id="one")
    for boot_id, left in (("one", 1), ("two", 0)):
        ledger = Ledger(path, boot_id=boot_id)
        ledger.peek()
        assert len(ledger.entries) == left


def test_a_write_that_fails_changes_nothing(path: Path) -> None:
    write(path, OTHER)
    before = path.read_text()
    ledger = Ledger(path)
    with (
        ledger.locked(),
        no_space(),
        pytest.raises(Failed, match=r"ledger.json: cannot write the ledger: File too large"),
    ):
        ledger.save({OTHER.knob: OTHER, ENTRY.knob: ENTRY})
    assert path.read_text() == before
    assert [*ledger.entries] == [OTHER.knob]
    assert files(path) == ["ledger.json", "ledger.lock"]
    with ledger.locked(), no_space():
        ledger.save({})  # to have nothing left needs no space
    assert not path.exists()


class no_space:
    """Files of this process cannot grow: the kernel refuses each write, as on a full /run."""

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, self.before[1]))

    def __exit__(self, *exc: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def test_what_a_killed_writer_left_is_no_hindrance(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.with_suffix(".new").write_text("{")
    write(path, OTHER)
    assert files(path) == ["ledger.json", "ledger.lock"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 200_000,
        *(
            json.dumps({"version": 1, "boot_id": "", "entries": [asdict(ENTRY) | change]})
            for change in (
                {"since": "x"},
                {"since": -1},
                {"refused": None},
                {"source": 3},
                {"original": "\0"},
                {"previous": []},
                {"companions": [{"path": 1, "original": "a", "after": None}]},
            )
        ),
        "[]",
        '{"version": 2, "boot_id": "", "entries": []}',
        '{"version": 1, "boot_id": "", "entries": [{"knob": "a"}]}',
        '{"version": 1, "boot_id": "", "entries": [{"knob": "a", "original": 1, "written": "2", "companions": [],'
        ' "state": "written"}]}',
        '{"version": 1, "boot_id": "", "entries": [{"knob": "a", "original": "1", "written": "2", "companions": [],'
        ' "state": "lost"}]}',
    ],
)
def test_a_damaged_ledger_is_an_error_not_an_empty_one(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)
    ledger = Ledger(path)
    with pytest.raises(Failed, match=r"original values are not known.*until you remove that file"), ledger.locked():
        raise AssertionError
    assert path.read_text() == text


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ledger = Ledger(tmp_path / "file/ledger.json")
    with pytest.raises(Failed, match="cannot use the lock of the ledger: File exists"), ledger.locked():
        raise AssertionError


def test_who_may_not_read_it_sees_no_entries(path: Path) -> None:
    write(path, OTHER)
    script = (
        "import os, sys; from torchtuned.ledger import Ledger\n"
        "ledger = Ledger(sys.argv[1]); os.setuid(65534)\n"
        "ledger.peek(); print(len(ledger.entries))"
    )
    for folder in (path.parent, *path.parents):
        if folder.stat().st_mode & 0o001 == 0 and str(folder).startswith("/tmp/"):
            folder.chmod(0o711)
    child = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert child.stdout == "0\n"


def test_the_file_is_plain_json_that_a_person_can_read(path: Path) -> None:
    write(path, replace(ENTRY, companions=()))
    document = json.loads(path.read_text())
    assert document["version"] == 1
    assert document["entries"][0]["original"] == "schedutil"
