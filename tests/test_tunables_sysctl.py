"""Sysctls: pairs, numbers in a row, limits, patterns, and which of them the administrator has decided."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from fakes.kernel import Kernel
from fakes.policy import Desk, by_knob, config
from fakes.tree import make_tree

from torchtuned.engine import Engine
from torchtuned.host import Host
from torchtuned.ledger import Ledger
from torchtuned.policy import Outcome
from torchtuned.tunables.sysctld import Assignments

PAIR = {"/proc/sys/vm/dirty_bytes": "0", "/proc/sys/vm/dirty_ratio": "20"}


def desk(tmp_path: Path, files: Mapping[str, str]) -> Desk:
    return Desk(Kernel(files), tmp_path)


def test_the_administrators_higher_limits_stay_also_after_undo(tmp_path: Path) -> None:
    files = {
        "/proc/sys/vm/max_map_count": "1048576",
        "/proc/sys/net/core/somaxconn": "4096",
        "/proc/sys/vm/swappiness": "1",
    }
    made = desk(tmp_path, files)
    rows = made.apply("[sysctl]\nvm.max_map_count = 262144\nnet.core.somaxconn = 1024\nvm.swappiness = <=10\n")
    assert {row.reason for row in rows.values()} == {"already higher", "already lower"}
    assert {row.outcome for row in rows.values()} == {Outcome.KEPT}
    made.undo()
    assert made.kernel.files == files
    assert made.kernel.writes == []


def test_numbers_in_a_row_are_one_value(tmp_path: Path) -> None:
    made = desk(tmp_path, {"/proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456"})
    row = made.apply("[sysctl]\nnet.ipv4.tcp_rmem = >=4096 87380 16777216\n")["sysctl/net.ipv4.tcp_rmem"]
    assert (row.current, row.outcome) == ("4096 131072 16777216", Outcome.APPLIED)
    made.undo()
    assert made.kernel.files["/proc/sys/net/ipv4/tcp_rmem"].split() == ["4096", "131072", "6291456"]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    ("before", "text"),
    [
        (PAIR, "vm.dirty_bytes = 500000000"),
        ({"/proc/sys/vm/dirty_bytes": "99999999", "/proc/sys/vm/dirty_ratio": "0"}, "vm.dirty_ratio = 40"),
        ({"/proc/sys/vm/dirty_bytes": "99999999", "/proc/sys/vm/dirty_ratio": "0"}, "vm.dirty_bytes = 500000000"),
        (PAIR, "vm.dirty_ratio = 40"),
    ],
)
def test_an_exclusive_pair_goes_back_as_one(tmp_path: Path, before: dict[str, str], text: str, restart: bool) -> None:  # noqa: FBT001 - a table
    made = desk(tmp_path, before)
    made.apply(f"[sysctl]\n{text}\n")
    assert made.kernel.files != before
    if restart:
        made.restart()
    rows = made.undo()
    assert made.kernel.files == before
    assert [row.outcome for row in rows.values()] == [Outcome.APPLIED]
    assert made.ledger() == []


def test_from_one_of_a_pair_to_the_other_and_back(tmp_path: Path) -> None:
    made = desk(tmp_path, PAIR)
    made.apply("[sysctl]\nvm.dirty_bytes = 500000000\n")
    made.apply("[sysctl]\nvm.dirty_ratio = 40\n")
    assert made.kernel.files == {"/proc/sys/vm/dirty_bytes": "0", "/proc/sys/vm/dirty_ratio": "40"}
    assert made.ledger() == ["sysctl/vm.dirty_ratio"]
    made.undo()
    assert made.kernel.files == PAIR


def test_somebody_who_sets_the_other_one_of_a_pair_keeps_it(tmp_path: Path) -> None:
    made = desk(tmp_path, PAIR)
    made.apply("[sysctl]\nvm.dirty_bytes = 500000000\n")
    made.kernel.set("/proc/sys/vm/dirty_ratio", "15")
    assert made.verify("[sysctl]\nvm.dirty_bytes = 500000000\n")["sysctl/vm.dirty_bytes"].outcome is Outcome.DRIFTED
    made.undo()
    assert made.kernel.files == {"/proc/sys/vm/dirty_bytes": "0", "/proc/sys/vm/dirty_ratio": "15"}


def test_somebody_who_sets_the_same_one_of_a_pair_keeps_it(tmp_path: Path) -> None:
    made = desk(tmp_path, PAIR)
    made.apply("[sysctl]\nvm.dirty_bytes = 500000000\n")
    made.kernel.set("/proc/sys/vm/dirty_bytes", "77777777")
    made.undo()
    assert made.kernel.files == {"/proc/sys/vm/dirty_bytes": "77777777", "/proc/sys/vm/dirty_ratio": "0"}


def test_a_key_may_be_a_pattern(tmp_path: Path) -> None:
    made = desk(tmp_path, {f"/proc/sys/net/ipv4/conf/{name}/rp_filter": "2" for name in ("all", "lo", "eth0.100")})
    rows = made.apply("[sysctl]\nnet.ipv4.conf.*.rp_filter = 1\n")
    assert [*rows] == [
        "sysctl/net.ipv4.conf.all.rp_filter",
        "sysctl/net/ipv4/conf/eth0.100/rp_filter",
        "sysctl/net.ipv4.conf.lo.rp_filter",
    ]
    made.undo("sysctl/net/ipv4/conf/eth0.100/rp_filter")
    assert made.kernel.files["/proc/sys/net/ipv4/conf/eth0.100/rp_filter"] == "2"
    assert made.kernel.files["/proc/sys/net/ipv4/conf/lo/rp_filter"] == "1"


def test_a_sysctl_that_this_kernel_lacks(tmp_path: Path) -> None:
    row = desk(tmp_path, {}).apply("[sysctl]\nkernel.numa_balancing = 0\n")["sysctl/kernel.numa_balancing"]
    assert (row.outcome, row.current) == (Outcome.UNSUPPORTED, "")


def test_numa_balancing_2_is_given_back_as_2(tmp_path: Path) -> None:
    made = desk(tmp_path, {"/proc/sys/kernel/numa_balancing": "2"})
    assert made.apply("[sysctl]\nkernel.numa_balancing = 0 @jobs\n", jobs=False)[
        "sysctl/kernel.numa_balancing"
    ].reason == "0 while a job runs"  # fmt: skip
    made.apply("[sysctl]\nkernel.numa_balancing = 0 @jobs\n", jobs=True)
    assert made.kernel.files["/proc/sys/kernel/numa_balancing"] == "0"
    made.apply("[sysctl]\nkernel.numa_balancing = 0 @jobs\n", jobs=False)
    assert made.kernel.files["/proc/sys/kernel/numa_balancing"] == "2"


ADMINS = {
    "later vendor file wins": (
        {"/etc/sysctl.d/10-a.conf": "vm.swappiness=5", "/usr/lib/sysctl.d/50-b.conf": "vm.swappiness=60"}, None,
    ),
    "later admin file wins": (
        {"/etc/sysctl.d/90-a.conf": "# x\n\nvm.swappiness = 5\n", "/usr/lib/sysctl.d/50-b.conf": "vm.swappiness=60"},
        "/etc/sysctl.d/90-a.conf:3",
    ),
    "of one name /etc counts": (
        {"/etc/sysctl.d/a.conf": "vm.max_map_count=1", "/run/sysctl.d/a.conf": "vm.swappiness=1"}, None,
    ),
    "of one name /run comes before /usr/lib": (
        {"/run/sysctl.d/a.conf": "vm.swappiness=1", "/usr/lib/sysctl.d/a.conf": "vm.swappiness=2"},
        "/run/sysctl.d/a.conf:1",
    ),
    "/usr/local is the administrator's": (
        {"/usr/local/lib/sysctl.d/a.conf": "vm/swappiness=1"}, "/usr/local/lib/sysctl.d/a.conf:1",
    ),
    "a link to /dev/null masks": (
        {"/etc/sysctl.d/a.conf": "-> /dev/null", "/run/sysctl.d/a.conf": "vm.swappiness=1"}, None,
    ),
    "an empty file masks": ({"/etc/sysctl.d/a.conf": "", "/run/sysctl.d/a.conf": "vm.swappiness=1"}, None),
    "a minus before an assignment only forgives": (
        {"/etc/sysctl.d/a.conf": "-vm.swappiness = 1"}, "/etc/sysctl.d/a.conf:1",
    ),
    "patterns": ({"/etc/sysctl.d/a.conf": "vm.swap* = 1"}, "/etc/sysctl.d/a.conf:1"),
    "a pattern spans one part": ({"/etc/sysctl.d/a.conf": "* = 1\nvm.*.x = 1\n*/x = 2"}, None),
    "a minus takes a key out of patterns": ({"/etc/sysctl.d/a.conf": "vm.* = 1\n-vm.swappiness"}, None),
    "a key beats a pattern": (
        {"/etc/sysctl.d/z.conf": "vm.* = 1", "/usr/lib/sysctl.d/a.conf": "vm.swappiness = 60"}, None,
    ),
    "the last pattern wins": (
        {"/etc/sysctl.d/b.conf": "vm.swap* = 1", "/usr/lib/sysctl.d/c.conf": "vm.s* = 60"}, None,
    ),
    "a repeated pattern keeps its place": (
        {"/etc/sysctl.d/a.conf": "vm.swap* = 1", "/usr/lib/sysctl.d/b.conf": "vm.s* = 60",
         "/etc/sysctl.d/c.conf": "vm.swap* = 1"}, None,
    ),
    "a pattern with a new value moves to the end": (
        {"/etc/sysctl.d/a.conf": "vm.swap* = 1", "/usr/lib/sysctl.d/b.conf": "vm.s* = 60",
         "/etc/sysctl.d/c.conf": "vm.swap* = 2"}, "/etc/sysctl.d/c.conf:1",
    ),
    "comments and lines that are no assignment": (
        {"/etc/sysctl.d/a.conf": "; vm.swappiness=1\n#vm.swappiness=1\nvm.swappiness 1\n"}, None,
    ),
    "only .conf files": ({"/etc/sysctl.d/README.sysctl": "vm.swappiness=1"}, None),
    "/etc/sysctl.conf alone is not read (Debian 13)": ({"/etc/sysctl.conf": "vm.swappiness=1"}, None),
    "/etc/sysctl.conf through its link is (Debian 12)": (
        {"/etc/sysctl.conf": "#\nvm.swappiness=1", "/etc/sysctl.d/99-sysctl.conf": "-> ../sysctl.conf"},
        "/etc/sysctl.conf:2",
    ),
    "the same through an absolute link": (
        {"/etc/sysctl.conf": "vm.swappiness=1", "/etc/sysctl.d/99-sysctl.conf": "-> /etc/sysctl.conf"},
        "/etc/sysctl.conf:1",
    ),
    "the kernel command line": ({"/proc/cmdline": "quiet sysctl.vm.swappiness=1 root=/dev/x"}, "/proc/cmdline"),
    "a file beats the kernel command line": (
        {"/proc/cmdline": "sysctl.vm.swappiness=1", "/usr/lib/sysctl.d/a.conf": "vm.swappiness=60"}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ADMINS)
def test_whose_a_sysctl_is(tmp_path: Path, case: str) -> None:
    files, source = ADMINS[case]
    found = Assignments(Host(make_tree(tmp_path, files))).admins("vm.swappiness")
    assert (found.source if found else None) == source


def test_reading_agrees_with_systemd(tmp_path: Path) -> None:
    """systemd's own reader lists the files that count, in its order."""
    tree = make_tree(
        tmp_path,
        {
            "etc/sysctl.d/20-b.conf": "vm.swappiness=1\n",
            "run/sysctl.d/20-b.conf": "vm.swappiness=2\n",
            "run/sysctl.d/30-c.conf": "vm.swappiness=3\n",
            "usr/lib/sysctl.d/30-c.conf": "vm.swappiness=4\n",
            "usr/lib/sysctl.d/10-a.conf": "vm.swappiness=5\n",
            "etc/sysctl.d/25-x.conf": "-> /dev/null",
            "usr/lib/sysctl.d/25-x.conf": "vm.swappiness=6\n",
            "usr/local/lib/sysctl.d/40-d.conf": "vm.swappiness=7\n",
        },
    )
    command = ["systemd-analyze", f"--root={tree}", "cat-config", "sysctl.d"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    theirs = [line[2:].removeprefix(str(tree)) for line in output.splitlines() if line.startswith("# /")]
    read = Assignments(Host(tree))
    ours = read.winner("vm.swappiness")
    assert ours is not None
    assert theirs[-1] == ours.source.partition(":")[0] == "/usr/local/lib/sysctl.d/40-d.conf"


@pytest.mark.parametrize("tool", ["dirty_ratio", "dirty_bytes"])
def test_the_administrators_say_over_one_of_a_pair_is_over_both(tmp_path: Path, tool: str) -> None:
    made = desk(tmp_path, {**PAIR, "/etc/sysctl.d/a.conf": f"vm.{tool} = 7"})
    row = made.apply("[sysctl]\nvm.dirty_bytes = 500000000\n")["sysctl/vm.dirty_bytes"]
    assert (row.outcome, row.reason, row.source) == (
        Outcome.FOREIGN, "set by the administrator", "/etc/sysctl.d/a.conf:1",
    )  # fmt: skip


def test_a_line_that_the_administrator_adds_later_ends_ours(tmp_path: Path) -> None:
    made = desk(tmp_path, {"/proc/sys/vm/swappiness": "60"})
    made.apply("[sysctl]\nvm.swappiness = 10\n")
    made.kernel.files["/etc/sysctl.d/a.conf"] = "vm.swappiness = 30\n"
    row = made.apply("[sysctl]\nvm.swappiness = 10\n")["sysctl/vm.swappiness"]
    assert (row.outcome, row.current) == (Outcome.FOREIGN, "60")
    assert made.ledger() == []


def test_a_real_sysctl_there_and_back(tmp_path: Path) -> None:
    key = Path("/proc/sys/vm/page-cluster")  # how much one swap read brings; harmless for a moment
    before = key.read_text()
    wanted = "2" if before.strip() != "2" else "1"
    text, path = f"[sysctl]\nvm.page-cluster = {wanted}\n", tmp_path / "ledger.json"
    try:
        rows = by_knob(Engine(Host("/"), Ledger(path)).apply(config(text), jobs_active=False))
        row = rows["sysctl/vm.page-cluster"]
        assert (row.outcome, row.current, key.read_text().strip()) == (Outcome.APPLIED, wanted, wanted)
        assert path.exists()
        assert by_knob(Engine(Host("/"), Ledger(path)).undo())["sysctl/vm.page-cluster"].outcome is Outcome.APPLIED
        assert key.read_text() == before
        assert not path.exists()
    finally:
        key.write_text(before)
