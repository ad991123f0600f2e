"""The command line: usage, exit status, words instead of tracebacks, output that fits and pipes."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import tree

from torchtuned.cli import main as cli
from torchtuned.cli import policy as cli_policy
from torchtuned.cli.command import Command
from torchtuned.cli.config import _Answer, _facts
from torchtuned.cli.policy import local_ledger, row_document, without_daemon
from torchtuned.configfiles import read_config
from torchtuned.engine import Engine
from torchtuned.errors import Unplaceable
from torchtuned.host import Host

TOP = Path(__file__).resolve().parent.parent
NAMES = [command.name for command in cli.COMMANDS]
NO_BUS = {"DBUS_SYSTEM_BUS_ADDRESS": "unix:path=/nonexistent/bus"}


@pytest.fixture(autouse=True)
def _no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NO_BUS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of two nodes with four GPUs, the package's own profiles, and an administrator's sysctl.d."""
    files = tree.machine_a() | {
        "etc/sysctl.d/99-mine.conf": "vm.swappiness = 5\n",
        "usr/lib/sysctl.d/50-vendor.conf": "vm.swap* = 60\n",
        "proc/sys/vm/swappiness": "60\n",
        "proc/sys/vm/max_map_count": "65530\n",
        "proc/sys/net/core/somaxconn": "8192\n",
        "usr/share/torchtuned": f"-> {TOP}/share/torchtuned",
    }
    return tree.make_tree(tmp_path / "root", files)


def torchtuned(*words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the program as a user does, apart from this process."""
    words = (sys.executable, "-m", "torchtuned", *words)
    return subprocess.run(words, text=True, capture_output=True, cwd=TOP, timeout=60, env=env, check=False)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        status = cli.main(words)
    except SystemExit as end:
        status = int(str(end.code or 0))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# help and usage


def test_help_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert len(out.splitlines()) <= 24
    assert max(map(len, out.splitlines())) <= 80
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_help_of_each_command_fits_a_screen(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, name, "--help")
    assert status == 0
    assert len(out.splitlines()) <= 24
    assert max(map(len, out.splitlines())) <= 80
    assert "examples:" in out


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_examples_are_right(command: Command) -> None:
    assert command.examples
    for example in command.examples:
        words = example.removeprefix("sudo ").split()
        assert words[:2] == ["torchtuned", command.name]
        cli.parser(command).parse_args(words[2:])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "usage: torchtuned COMMAND"),
        (("statsu",), "unknown command statsu, did you mean status?"),
        (("",), "unknown command ''"),
        (("status", ""), "unknown argument ''"),
        (("status", "--", "--json"), "unknown argument --json (see"),
        (("plan", "--sysroot", ""), "--sysroot needs a value"),
        (("check", "--python", ""), "--python needs a value"),
        (("check", "--data="), "--data needs a value"),
        (("check", "--explain", ""), "--explain needs a value"),
        (("bug-report", "--output", ""), "--output needs a value"),
        (("check", "--python", "/nosuch"), "--python /nosuch: no such file or folder"),
        (("check", "--data", "/nosuch"), "--data /nosuch: no such file or folder"),
        (("top", "--interval", "soon"), "'soon' is not a number of seconds from 0.2 to 3600"),
        (("top", "--interval", "nan"), "'nan' is not a number of seconds"),
        (("--jsn",), "unknown option --jsn"),
        (("place", "--gpu", "1"), "unknown option --gpu, did you mean --gpus?"),
        (("place", "--bogus"), "unknown option --bogus (see torchtuned place --help)"),
        (("place", "--gpus"), "--gpus: expected one argument"),
        (("topology", "extra"), "unknown argument extra"),
        (("topology", "--sysroot", "/nonexistent"), "no such folder"),
        (("why",), "KNOB"),
        (("run", "train.py"), "unknown command run, did you mean torchtuned-run?"),
        (("profile", "sett"), "invalid choice: 'sett' (did you mean set?)"),
        (("profile", "quiet"), "torchtuned profile set quiet"),
        (("profile", "list", "quiet"), "torchtuned profile show quiet"),
        (("profile", "set"), "set needs the name of a profile"),
        (("profile", "--markdown"), "--markdown goes with show"),
        (("place", "--ranks", "x"), "--ranks x"),
        (("place", "--ranks", "0"), "--ranks 0"),
        (("place", "--cpu-max", "1.5"), "--cpu-max 1.5"),
        (("place", "--affinity", "0-"), "--affinity 0-"),
        (("place", "--policy", "nearest"), "exclusive, node, socket, core-complex"),
        (("place", "--cpus", "many"), "--cpus many"),
        (("place", "--in-force", "/nonexistent.json"), "/nonexistent.json"),
    ],
)
def test_usage_errors(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *words)
    assert status == 2
    assert said in err
    assert not out
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("nonsense", "not JSON"),
        ("{}", "a list of grants"),
        ('[{"cpus": 7}]', "grant.cpus"),
        ('[{"cpus": "0-x"}]', "grant.cpus"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_bad_grants_in_force(
    content: str | bytes, said: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "grants.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    status, _, err = run(capsys, "place", "--sysroot", str(root), "--in-force", str(file))
    assert status == 2
    assert said in err


def test_a_place_is_one_on_an_idle_machine(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "place", "--sysroot", str(root))[1].startswith("On an idle machine; torchtuned-run --explain ")
    assert "idle machine" in run(capsys, "place", "--help")[1]


# what is read from a machine


def test_watched_devices_are_gpus_of_the_topology(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = tree.pci_device("0000:99:00.0", {"vendor": "0x1ed5", "class": "0x030200"})
    tree.make_tree(root, {**device, "etc/torchtuned/torchtuned.conf": "[gpu]\nwatch = 1ED5:0302\n"})
    for command in ("topology", "map"):
        _, out, _ = run(capsys, command, "--sysroot", str(root), "--json")
        assert json.loads(out)["gpus"]["0000:99:00.0"]["vendor"] == "0x1ed5"


def test_topology_document(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "topology", "--sysroot", str(root), "--json")
    document = json.loads(out)
    assert (status, err) == (0, "")
    assert document["schema"] == 1
    assert document["online"] == document["allowed_cpus"] == "0-31"
    assert document["cores"][0] == "0,16"
    assert document["packages"] == document["l3"] == ["0-7,16-23", "8-15,24-31"]
    assert document["node_cpus"] == {"0": "0-7,16-23", "1": "8-15,24-31"}
    assert document["nodes_without_cpus"] == []
    gpu = document["gpus"]["0000:40:00.0"]
    assert (gpu["vendor"], gpu["numa_node"], gpu["local_cpus"]) == ("0x10de", 1, "8-15,24-31")
    assert gpu["locality"] == "numa_node"


def test_place_defaults_to_all_gpus(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "place", "--sysroot", str(root), "--json")
    document = json.loads(out)
    assert status == 0
    assert [(rank["rank"], rank["gpu"], rank["cpus"]) for rank in document["ranks"]] == [
        (0, "0000:10:00.0", "0-3,16-19"),
        (1, "0000:20:00.0", "4-7,20-23"),
        (2, "0000:30:00.0", "8-11,24-27"),
        (3, "0000:40:00.0", "12-15,28-31"),
    ]
    assert document["cpus"] == "0-31"
    assert {"schema", "memory_nodes", "shared", "warnings"} <= document.keys()
    assert {"memory_nodes", "omp_num_threads", "reasons"} <= document["ranks"][0].keys()


@pytest.mark.parametrize(
    ("words", "cpus"),
    [
        (("--gpus", "none"), "0-31"),
        (("--gpus", "0000:30:00.0"), "8-11,24-27"),
        (("--gpus", "1"), "0-3,16-19"),
        (("--gpus", "none", "--cpus", "2"), "0-1,16-17"),
        (("--gpus", "none", "--affinity", "8-9,24-25"), "8-9,24-25"),
    ],
)
def test_place_options(words: tuple[str, ...], cpus: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "place", "--sysroot", str(root), "--json", *words)
    assert (status, json.loads(out)["cpus"]) == (0, cpus)


def test_place_keeps_to_the_configuration_as_a_job_has_to(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("place", "--sysroot", str(root), "--json", "--gpus", "none")
    tree.make_tree(root, {"etc/torchtuned/torchtuned.conf": "[jobs]\nreserved = 0-7\nslots = 2\n"})
    status, out, err = run(capsys, *words)
    assert (status, json.loads(out)["cpus"], err) == (0, "8-11,24-27", "")
    (root / "etc/torchtuned/torchtuned.conf").write_text("[jobs]\nreserved = x\n")
    status, out, err = run(capsys, *words)
    assert (status, json.loads(out)["cpus"]) == (0, "0-31")
    assert "the configuration is not used: " in err
    assert "torchtuned.conf" in err


def test_place_obeys_a_quota(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "place", "--sysroot", str(root), "--json", "--gpus", "none", "--cpu-max", "2")
    assert json.loads(out)["ranks"][0]["omp_num_threads"] == 2


def test_an_answer_of_place_can_be_in_force(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("place", "--sysroot", str(root), "--json", "--gpus", "none", "--cpus", "2")
    _, first, _ = run(capsys, *words)
    (tmp_path / "grants.json").write_text(f"[{first}]")
    _, second, _ = run(capsys, *words, "--in-force", str(tmp_path / "grants.json"))
    assert json.loads(second)["cpus"] == "2-3,18-19"


def test_unplaceable_is_1(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "place", "--sysroot", str(root), "--affinity", "500")
    assert (status, out) == (1, "")
    assert "500" in err


def test_an_unknown_gpu_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "place", "--sysroot", str(root), "--gpus", "0000:99:00.0")
    assert status == 1
    assert "0000:99:00.0" in err


@pytest.mark.parametrize(
    "words",
    [
        ("topology",),
        ("place",),
        ("map",),
        ("plan",),
        ("verify",),
        ("profile", "list"),
        ("profile", "show"),
        ("config",),
        ("why", "governor"),
    ],
    ids=" ".join,
)
def test_tables_fit_80_columns_and_have_no_colour(
    words: tuple[str, ...], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *words, "--sysroot", str(root))
    assert status in (0, 1)
    assert not err
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out


@pytest.mark.parametrize(
    "words",
    [
        ("topology",),
        ("place",),
        ("map",),
        ("plan",),
        ("verify",),
        ("profile",),
        ("profile", "show"),
        ("config",),
        ("why", "*"),
    ],
    ids=" ".join,
)
def test_every_document_has_a_schema(words: tuple[str, ...], root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *words, "--sysroot", str(root), "--json")
    assert json.loads(out)["schema"] == 1


# policy without a daemon


def knobs(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, str]]:
    _, out, _ = run(capsys, *words, "--json")
    return {row["knob"]: row for row in json.loads(out)["knobs"]}


def test_plan_is_worked_out_here(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = knobs(capsys, "plan", "--sysroot", str(root))
    assert rows["sysctl/vm.max_map_count"]["outcome"] == "applied"
    assert rows["sysctl/net.core.somaxconn"]["outcome"] == "kept"
    assert rows["sysctl/vm.swappiness"]["outcome"] == "foreign"
    assert rows["sysctl/vm.swappiness"]["source"] == "/etc/sysctl.d/99-mine.conf:1"
    assert set(rows["sysctl/vm.swappiness"]) == {"knob", "current", "wanted", "outcome", "reason", "source"}
    assert (root / "proc/sys/vm/max_map_count").read_text() == "65530\n"


def test_a_tuner_that_has_set_its_values_and_ended_is_seen_too(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    links = root / "run/systemd/units"
    links.mkdir(parents=True)
    (links / "invocation:tuned.service").symlink_to("0" * 32)
    assert knobs(capsys, "plan", "--sysroot", str(root))["sysctl/vm.max_map_count"]["source"] != "tuned.service"
    tree.make_tree(root, {"usr/lib/systemd/system/tuned.service": "[Unit]\n"})  # it was not purged since
    row = knobs(capsys, "plan", "--sysroot", str(root))["sysctl/vm.max_map_count"]
    assert (row["outcome"], row["reason"], row["source"]) == ("foreign", "left to TuneD", "tuned.service")


def test_irqbalance_is_named_when_it_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "irqbalance (irqbalance.service) runs: interrupts are left to it"
    assert said not in run(capsys, "plan", "--sysroot", str(root))[1]
    (root / "sys/fs/cgroup/system.slice/irqbalance.service").mkdir(parents=True)
    for command in ("plan", "verify"):
        assert said in run(capsys, command, "--sysroot", str(root))[1].splitlines()


def test_why_names_a_tmpfiles_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = root / "sys/kernel/mm/transparent_hugepage"
    place.mkdir(parents=True, exist_ok=True)
    (place / "enabled").write_text("[always] madvise never\n")
    (root / "etc/tmpfiles.d").mkdir()
    (root / "etc/tmpfiles.d/a.conf").write_text("w /sys/kernel/mm/transparent_hugepage/enabled - - - - always\n")
    (root / "etc/torchtuned/conf.d").mkdir(parents=True, exist_ok=True)
    (root / "etc/torchtuned/conf.d/a.conf").write_text("[memory]\ntransparent_hugepage = madvise\n")
    _, out, _ = run(capsys, "why", "transparent_hugepage", "--sysroot", str(root))
    assert "the administrator (/etc/tmpfiles.d/a.conf:1)" in " ".join(out.split())


def test_verify_tells_what_is_not_in_force(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, _ = run(capsys, "verify", "--sysroot", str(root))
    assert status == 1
    assert run(capsys, "verify", "--sysroot", str(root), "--profile", "observe")[0] == 0


def test_a_plan_tells_people_that_nothing_is_applied_yet(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", "--sysroot", str(root))
    words = " ".join(out.split())
    assert "not yet applied" in words
    assert "applied" not in words.replace("not yet applied", "")


def test_plan_without_a_daemon_says_so() -> None:
    done = torchtuned("plan", env={**os.environ, **NO_BUS})
    first = done.stderr.splitlines()[0]
    assert "worked out here, as without jobs" in first
    assert ("(start it: " in first) == Path("/run/systemd/system").is_dir()  # that it cannot run here helps nobody
    assert len(done.stderr.splitlines()[0]) < 120


def test_what_nobody_applies_is_not_told_as_a_change(root: Path) -> None:
    """Without a daemon on the machine itself, `apply` is no way out."""
    host = Host(root)
    rows = Engine(host, local_ledger(host)).verify(read_config(host, None), jobs_active=False)
    [before] = [row for row in rows if row.knob == "sysctl/vm.max_map_count"]
    assert before.reason == "not in force: apply sets it"
    document, told = (without_daemon(before, in_words=words) for words in (False, True))
    way = document["reason"].removeprefix("not applied here: ")
    assert way in ("systemctl start torchtuned does it", "there is no daemon")
    assert document == {**row_document(before), "reason": f"not applied here: {way}"}
    assert told == {**row_document(before), "outcome": "not applied here", "reason": way}
    for row in rows:
        assert row.untried == (row.reason == before.reason)
        assert row.untried or without_daemon(row, in_words=True) == row_document(row)


def test_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    script = "import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); from torchtuned.cli.main import main"
    for words in (["lint", "."], ["check", "--data", "."]):
        done = subprocess.run(
            ["/usr/bin/python3", "-B", "-c", f"{script}; raise SystemExit(main({words}))"],
            env={"PYTHONPATH": str(TOP), **NO_BUS}, cwd=tmp_path, text=True, capture_output=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (1, "torchtuned: the current folder is gone: cd to another one\n")


@pytest.mark.parametrize("name", ["status", "apply", "report", "top"])
def test_a_document_without_a_daemon(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # root reads the reports themselves
    status, out, err = run(capsys, name, "--json")
    document = json.loads(out)
    assert status == 69
    assert (document["schema"], document["state"], document["knobs"]) == (1, "unreachable", [])
    assert "bus" in err


@pytest.mark.parametrize("name", ["status", "apply", "reload"])
def test_commands_that_need_the_daemon_end_with_69(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, name)
    assert (status, out) == (69, "")
    assert err.startswith("torchtuned: ")
    assert len(err) < 90
    assert ("systemctl start torchtuned" if Path("/run/systemd/system").is_dir() else "needs systemd") in err


def test_undo_without_a_daemon_needs_root(tmp_path: Path) -> None:
    user = {"user": "nobody"} if os.geteuid() == 0 else {}
    done = subprocess.run(
        ["/usr/bin/python3", "-B", "-m", "torchtuned", "undo"],
        env={"PYTHONPATH": str(TOP), **NO_BUS},
        cwd="/",
        text=True,
        capture_output=True,
        timeout=60,
        **user,  # type: ignore[call-overload]
    )
    assert done.returncode == 77
    assert "sudo torchtuned undo" in done.stderr
    assert not done.stdout


def test_undo_without_a_daemon_as_a_document(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "etc/sysctl.d/99-mine.conf").unlink()
    host = Host(root)
    Engine(host, local_ledger(host)).apply(read_config(host, None), jobs_active=False)
    assert (root / "proc/sys/vm/swappiness").read_text() == "10"
    (root / "proc/sys/vm/max_map_count").write_text("70000\n")
    monkeypatch.setattr(cli_policy, "Host", lambda: host)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    status, out, err = run(capsys, "undo", "vm.swappiness", "--json")
    document = json.loads(out)
    [row] = document.pop("knobs")
    assert (status, document) == (0, {"schema": 1, "state": "unreachable", "profile": ""})
    assert (row["knob"], row["current"], row["outcome"]) == ("sysctl/vm.swappiness", "60", "applied")
    assert set(row) == {"knob", "current", "wanted", "outcome", "reason", "source"}
    assert err.count("\n") == 1
    status, out, _ = run(capsys, "undo", "--json")
    rows = {row["knob"]: row["outcome"] for row in json.loads(out)["knobs"]}
    assert (status, rows["sysctl/vm.max_map_count"]) == (1, "drifted")
    status, out, _ = run(capsys, "undo", "--json")
    assert (status, json.loads(out)["knobs"]) == (0, [])
    status, out, err = run(capsys, "undo")
    assert (status, out) == (0, "Nothing to give back.\n")
    assert "; it has left no ledger" in err


@pytest.mark.parametrize(
    "reason", ["set by torchtuned, was 60", "somebody changed it after torchtuned had set 10 (it was 60)"]
)
def test_why_does_not_contradict_the_daemon(reason: str) -> None:
    """Its ledger is not here, as with --run-dir, and it says itself that it has set the value."""
    row = dict.fromkeys(("knob", "current", "wanted", "outcome", "source"), "x") | {"reason": reason}
    answer = _Answer(name="x", row=row, wish=None, entry=None, owner="", mentions=(), comment="")
    known = "no change of it by torchtuned is in the ledger in /run/torchtuned"
    assert dict(_facts(answer, secret=False))["before"] == known
    assert "ask as root" in dict(_facts(answer, secret=True))["before"]
    other = replace(answer, row={**row, "reason": "not in force: apply sets it"})
    assert dict(_facts(other, secret=False))["before"] == known


def test_why(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "why", "vm.swappiness", "--sysroot", str(root), "--json")
    [answer] = json.loads(out)["knobs"]
    assert status == 0
    assert answer["knob"] == "sysctl/vm.swappiness"
    assert answer["owner"] == "the administrator (/etc/sysctl.d/99-mine.conf:1)"
    assert answer["mentions"] == ["/usr/lib/sysctl.d/50-vendor.conf:1", "/etc/sysctl.d/99-mine.conf:1"]
    assert "set in" in run(capsys, "why", "vm.swappiness", "--sysroot", str(root))[1]
    assert answer["effect"].startswith("unmeasured")
    assert answer["before"] is None
    assert (
        "profiles/training.conf"
        in next(iter(knobs(capsys, "why", "max_map_count", "--sysroot", str(root)).values()))["source"]
    )


def test_why_of_no_knob(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "why", "vm.swapiness", "--sysroot", str(root))
    assert status == 1
    assert "did you mean vm.swappiness?" in err


def test_profiles(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "profile", "--sysroot", str(root), "--json")
    document = json.loads(out)
    assert document["profile"] == "training"
    assert {"training", "observe"} <= {profile["name"] for profile in document["profiles"]}
    _, out, _ = run(capsys, "profile", "show", "observe", "--sysroot", str(root))
    assert "sysctl/vm.swappiness is left as it is" in out
    status, _, err = run(capsys, "profile", "show", "obsrve", "--sysroot", str(root))
    assert status == 2
    assert "did you mean 'observe'?" in err


def test_config_prints_where_a_value_is_from(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree.make_tree(root, {"etc/torchtuned/conf.d/50-lab.conf": "[sysctl]\nvm.swappiness = <=1\n"})
    _, out, _ = run(capsys, "config", "--sysroot", str(root))
    lines = out.splitlines()
    at = lines.index("vm.swappiness = <=1")
    assert lines[at - 1].startswith(
        "# /etc/torchtuned/conf.d/50-lab.conf:2, over <=10 (/usr/share/torchtuned/profiles/training.conf:"
    )
    assert "# slots = 0" in lines


def test_a_bad_configuration_names_file_and_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree.make_tree(root, {"etc/torchtuned/conf.d/50-lab.conf": "[sysctl]\nvm.swappiness = <=x\n[jbos]\n"})
    status, _, err = run(capsys, "config", "--sysroot", str(root))
    assert status == 2
    assert "/etc/torchtuned/conf.d/50-lab.conf:2" in err
    assert "/etc/torchtuned/conf.d/50-lab.conf:3" in err


# pipes, terminals, faults


def test_a_reader_that_goes_away(root: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m torchtuned topology --sysroot {root} --json; echo status $? >&2",
        shell=True,
        stdout=_closed_pipe(),
        stderr=subprocess.PIPE,
        text=True,
        cwd=TOP,
        timeout=60,
    )
    assert done.stderr == "status 141\n"


def _closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def test_a_full_disk(root: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "torchtuned", "topology", "--sysroot", str(root), "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=TOP,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == "torchtuned: No space left on device\n"


def test_a_closed_output(root: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m torchtuned topology --sysroot {root} >&-",
        shell=True,
        stderr=subprocess.PIPE,
        text=True,
        cwd=TOP,
        timeout=60,
    )
    assert "Traceback" not in done.stderr


def test_a_closed_standard_error() -> None:
    """What belongs there does not go into the answer instead."""
    env = {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": "unix:path=/nonexistent"}
    told = []
    for words in ("status --json", "status --jsno", "nonsense"):
        line = f"{sys.executable} -m torchtuned {words} 2>&-"
        done = subprocess.run(line, shell=True, stdout=subprocess.PIPE, text=True, cwd=TOP, env=env, timeout=60)
        told.append((done.returncode, done.stdout))
    assert json.loads(told[0][1])["state"] == "unreachable"
    assert told[1:] == [(2, ""), (2, "")]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_knows_few_signs(encoding: str, root: Path) -> None:
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = torchtuned("plan", "--sysroot", str(root), env=env)
    assert (done.returncode, done.stderr) == (0, "")
    done.stdout.encode("ascii")


@pytest.mark.parametrize(("variables", "colours"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_on_a_terminal(variables: dict[str, str], colours: bool, root: Path) -> None:  # noqa: FBT001
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm-256color"}
    master, terminal = pty.openpty()
    words = [sys.executable, "-m", "torchtuned", "plan", "--sysroot", str(root)]
    with subprocess.Popen(words, stdout=terminal, stderr=terminal, env=env | variables, cwd=TOP) as running:
        os.close(terminal)
        output = b""
        try:
            while chunk := os.read(master, 65536):
                output += chunk
        except OSError:
            pass  # the other end is closed: all has been read
    os.close(master)
    assert running.returncode == 0
    assert (b"\x1b[32m" in output or b"\x1b[36m" in output) is colours


def test_an_interrupt(root: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "torchtuned", "gpus", "--watch", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **NO_BUS, "PYTHONUNBUFFERED": ""},
        cwd=TOP,
        text=True,
    ) as running:
        assert running.stdout
        try:
            assert select.select([running.stdout], [], [], 30)[0], "nothing comes through the pipe"
        except BaseException:
            running.kill()
            raise
        assert running.stdout.readline().startswith("[")
        time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in err


def _command(error: BaseException) -> Command:
    def run(args: object) -> int:
        raise error

    return Command(name="boom", summary="fails", run=run)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (
            Unplaceable("no room", where="node 0", hint="come back later"),
            1,
            "torchtuned: node 0: no room (come back later)\n",
        ),
        (PermissionError(13, "Permission denied", "/x"), 1, "torchtuned: /x: Permission denied\n"),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError("why"), 70, "a fault of torchtuned's own: ZeroDivisionError: why at test_cli.py:"),
    ],
)
def test_every_error_becomes_words(
    error: BaseException,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "COMMANDS", (_command(error),))
    got, out, err = run(capsys, "boom")
    assert (got, out) == (status, "")
    assert said in err
    assert "Traceback" not in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("version",), ("--version",)):
        status, out, _ = run(capsys, *words)
        assert status == 0
        assert out.splitlines() == ["torchtuned 0.1.0", "torchtunedd does not answer"]
