"""Tables: alike rows as one, long cells whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torchtuned.cli import render


def row(knob: str, **values: str) -> render.Row:
    usual = {"current": "a", "wanted": "b", "outcome": "kept", "reason": "", "source": ""}
    return {"knob": knob, **usual, **values}


def names(*rows: render.Row) -> list[str]:
    return [name for name, _ in render.gather(rows)]


def test_alike_knobs_are_one_row() -> None:
    rows = [row(f"cpu/policy{cpu}/governor") for cpu in (0, 1, 2, 5)]
    assert names(*rows) == ["cpu/policy0-2,5/governor"]


def test_a_knob_that_differs_stands_alone() -> None:
    rows = [row(f"cpu/policy{cpu}/governor", current="x" if cpu == 1 else "a") for cpu in range(4)]
    assert names(*rows) == ["cpu/policy0,2-3/governor", "cpu/policy1/governor"]


def test_gpus_are_counted() -> None:
    rows = [row(f"gpu/0000:{bus}:00.0/persistence_mode") for bus in ("01", "41")]
    assert names(*rows) == ["gpu/*/persistence_mode (2 of them)"]


def test_names_with_numbers_of_their_own_are_left() -> None:
    assert names(row("sysctl/net.ipv4.tcp_rmem"), row("block/nvme0n1/scheduler")) == [
        "sysctl/net.ipv4.tcp_rmem",
        "block/nvme0n1/scheduler",
    ]


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("short", "short"),
        ("performance|schedutil", "performance|\nschedutil"),
        ("set by /etc/sysctl.d/99-mine.conf:1", "set by /etc/\nsysctl.d/\n99-mine.\nconf:1"),
        ("abcdefghijklmnopq", "abcdefghijklmnopq"),
    ],
)
def test_folding_breaks_after_signs(text: str, folded: str) -> None:
    assert render.fold(text, 12) == folded
    assert folded.replace("\n", "").replace(" ", "") == text.replace(" ", "")


def test_a_narrow_screen_gets_no_columns_of_two_letters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = ("Job", "User", "Command", "State", "CPUs", "GPUs")
    rows = [("7", "alice", "python train.py", "running", "0-3", "0000:01:00.0\n0000:02:00.0"), ("8", *["x"] * 5)]
    monkeypatch.setenv("COLUMNS", "80")
    render.table(heads, rows)
    assert "Job   User    Command" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "40")
    render.table(heads, rows)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == ["Job 7", "  User     alice", "  Command  python train.py", "  State    running"]
    assert lines[5:8] == ["  GPUs     0000:01:00.0", "           0000:02:00.0", "Job 8"]


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("echo 'a b' | sudo tee /etc/some/file.conf", "echo 'a b' |\nsudo tee /etc/some/file.conf"),
        ("when free: sudo reboot now and here", "when free:\nsudo reboot now and here"),
        ("sudo apt install x && sudo dkms y z", "sudo apt install x &&\nsudo dkms y z"),
        ("sudo " + "long " * 8, "sudo long long long long long\nlong long long"),
        ("sudo tee /etc/a/file.conf # then log in", "sudo tee /etc/a/file.conf\n# then log in"),
        ("look at fans, dust and the neighbours", "look at fans, dust and the\nneighbours"),
    ],
)
def test_commands_are_not_torn(text: str, folded: str) -> None:
    assert render.fold_commands(text, 30).rstrip() == folded


def test_a_plan_fits_80_columns_and_keeps_every_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    rows = [
        row(
            "sysctl/vm.swappiness",
            outcome="foreign",
            reason="set by the administrator",
            source="/etc/sysctl.d/9.conf:1",
        ),
        row("cpu/policy0/energy_performance_preference", current="balance_performance", wanted="performance|power"),
        row(
            "memory/transparent_hugepage_defrag", current="defer+madvise", wanted="always", reason="[bold]as is[/bold]"
        ),
        row("cpu/*/boost", current="", outcome="unsupported"),
    ]
    render.plan(rows)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    flat = "".join(out.split())
    for text in ("/etc/sysctl.", "balance_", "defer+madvise", "[bold]", "notonthismachine:cpu/*/boost"):
        assert text in flat
    assert "\x1b" not in out


EVIL = "MIG-\x1b]52;c;x\x07\x9b2J\r\x7f"


@pytest.mark.parametrize(
    "show",
    [
        lambda: render.table(("Name",), [(EVIL,)]),
        lambda: render.facts(EVIL, [(EVIL, EVIL)]),
        lambda: render.plan(
            [row(f"{EVIL}/a", current=EVIL, reason=EVIL), row(EVIL, current="", outcome="unsupported")]
        ),
        lambda: render.wishes([{"knob": EVIL, "wanted": EVIL, "when": EVIL, "reason": EVIL}]),
        lambda: render.drawing([((EVIL, "bold"), (EVIL, ""))]),
    ],
    ids=["table", "facts", "plan", "wishes", "drawing"],
)
def test_nothing_that_is_printed_steers_the_terminal(
    show: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A job's user chooses what its warnings quote, and root reads them."""
    show()
    out = capsys.readouterr().out
    assert "MIG-?" in out
    assert all(letter.isprintable() or letter == "\n" for letter in out), ascii(out)
