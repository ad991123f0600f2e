from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from fakes.tree import make_tree

from torchtuned.errors import Missing, Refused, Unreadable
from torchtuned.host import Host


def test_text_comes_without_the_end_that_kernels_add(tmp_path: Path) -> None:
    make_tree(tmp_path, {"sys/a": b"0-3\n\0", "sys/b": "  two words \n", "sys/empty": ""})
    host = Host(tmp_path)
    assert host.read("/sys/a") == "0-3"
    assert host.cpus("/sys/a") == {0, 1, 2, 3}
    assert host.read("/sys/b") == "  two words"
    assert host.read("/sys/empty") == ""
    assert host.cpus("/sys/empty") == frozenset()


def test_a_long_file_is_read_to_its_end(tmp_path: Path) -> None:
    make_tree(tmp_path, {"proc/big": "x" * 200_000})
    assert len(Host(tmp_path).read("/proc/big")) == 200_000


def test_a_file_without_an_end_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "version.py").symlink_to("/dev/zero")
    with pytest.raises(Unreadable, match="larger than 64 MiB"):
        Host(tmp_path).read("/version.py")


def test_numbers_and_lists_that_are_none_are_unreadable(tmp_path: Path) -> None:
    host = Host(make_tree(tmp_path, {"sys/a": "many\n"}))
    with pytest.raises(Unreadable, match="/sys/a: not a number: 'many'"):
        host.read_int("/sys/a")
    with pytest.raises(Unreadable, match="/sys/a: not a CPU list: 'many'"):
        host.cpus("/sys/a")


def test_missing_and_unreadable_are_two_things(tmp_path: Path) -> None:
    host = Host(make_tree(tmp_path, {"sys/folder": None, "sys/file": "1"}))
    with pytest.raises(Missing) as missing:
        host.read("/sys/nothing")
    assert (missing.value.where, missing.value.errno) == ("/sys/nothing", errno.ENOENT)
    with pytest.raises(Missing):
        host.read("/sys/file/below")
    with pytest.raises(Unreadable) as unreadable:
        host.read("/sys/folder")
    assert unreadable.value.errno == errno.EISDIR
    with pytest.raises(Unreadable):
        host.list("/" + "x" * 5000)


def test_a_process_that_ended_is_missing() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(Missing):
        Host().read(f"/proc/{pid}/status")


def test_text_is_what_can_be_read_or_the_default(tmp_path: Path) -> None:
    host = Host(make_tree(tmp_path, {"sys/a": "x \n\0", "sys/b/c": ""}))
    assert (host.text("/sys/a"), host.text("/sys/none"), host.text("/sys/none", "-")) == ("x", "", "-")
    assert host.text("/sys/b", "a folder") == "a folder"


def test_names_are_sorted_and_none_without_the_folder(tmp_path: Path) -> None:
    host = Host(make_tree(tmp_path, {"sys/b": "", "sys/a": "", "sys/c/d": ""}))
    assert host.list("/sys") == ["a", "b", "c"]
    assert host.list("/proc") == []
    assert host.list("/sys/a") == []


def test_links_are_given_as_they_are(tmp_path: Path) -> None:
    host = Host(make_tree(tmp_path, {"sys/a": "", "sys/link": "-> a", "sys/dangling": "-> nowhere"}))
    assert host.link("/sys/link") == "a"
    assert host.exists("/sys/link")
    assert not host.exists("/sys/dangling")
    for path in ("/sys/a", "/sys/none"):
        with pytest.raises(Missing):
            host.link(path)


def test_a_value_is_written_and_nothing_is_created(tmp_path: Path) -> None:
    host = Host(make_tree(tmp_path, {"sys/governor": "performance\n"}))
    host.write("/sys/governor", "powersave")
    assert (tmp_path / "sys/governor").read_text() == "powersave"
    with pytest.raises(Missing):
        host.write("/sys/other", "1")
    assert not (tmp_path / "sys/other").exists()


def test_what_the_kernel_does_not_take_is_refused_with_its_errno() -> None:
    with pytest.raises(Refused) as refused:
        Host().write("/dev/full", "10")
    assert refused.value.errno == errno.ENOSPC
    assert "no space left on device on writing '10'" in str(refused.value)
    with pytest.raises(Refused):
        Host().hold("/dev/full", b"\0\0\0\0")


def test_a_held_file_stays_open(tmp_path: Path) -> None:
    host = Host(make_tree(tmp_path, {"dev/cpu_dma_latency": "old!"}))
    fd = host.hold("/dev/cpu_dma_latency", b"\0\0\0\0")
    assert os.fstat(fd).st_size == 4
    os.close(fd)
    with pytest.raises(Missing):
        host.hold("/dev/none", b"")


def test_only_the_root_is_the_real_machine(tmp_path: Path) -> None:
    assert Host().real
    assert Host("//").real
    assert not Host(tmp_path).real
    assert Host().read("/proc/self/comm")
    assert Host(f"{tmp_path}/").root == tmp_path
