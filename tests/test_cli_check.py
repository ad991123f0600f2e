"""`torchtuned check` as a person and a program use it: exit status, JSON, explanations, the data set's facts."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tarfile
import tempfile
import threading
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from fakes.schema import fits, schema
from fakes.sound import CG, SESSION, A, B, build

from torchtuned.checks import REGISTRY, Machine, Running, reading
from torchtuned.cli import check
from torchtuned.cli import main as cli
from torchtuned.cli.check import running
from torchtuned.findings import Action, Finding, Severity, Unchecked
from torchtuned.jobs import Job, State
from torchtuned.placement import Grant, Request
from torchtuned.processes import Process
from torchtuned.selfplaced import Tables

TOP = Path(__file__).resolve().parent.parent
FOUND = Finding(
    code="TT048", severity=Severity.WARNING, action=Action.ASK, title="t", evidence="", cost="c", fix="f", source="s"
)

SHM = {"proc/sys/vm/overcommit_memory": "2\n", "proc/sys/vm/max_map_count": "65530\n"}


@pytest.fixture(autouse=True)
def _no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/nonexistent/bus")
    monkeypatch.setenv("COLUMNS", "80")


def test_a_sound_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = build(tmp_path, {}).root
    assert cli.main(["check", "--sysroot", str(root)]) == 0
    out = capsys.readouterr().out
    assert "nothing is wrong" in out
    assert "could not be checked" in out  # NVML is not asked about a folder, and that is said
    assert "NVML is not asked" in " ".join(out.split())


def test_faults_of_the_configuration_are_found_without_a_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody else says: the daemon goes on with what it read before."""
    profile = {"usr/share/torchtuned/profiles/training.conf": "[policy]\ndescription = x\n"}
    root = build(tmp_path, profile | {"etc/torchtuned/torchtuned.conf": "[jobs]\nslots = 2\n"}).root
    assert cli.main(["check", "--sysroot", str(root)]) == 0
    (root / "etc/torchtuned/torchtuned.conf").write_text("[jobs]\nslots = many\nbogus = 1\n")
    capsys.readouterr()
    assert cli.main(["check", "--sysroot", str(root), "--json"]) == 1
    [found] = json.loads(capsys.readouterr().out)["findings"]
    assert (found["code"], found["severity"]) == ("configuration", "error")
    assert "/etc/torchtuned/torchtuned.conf:2: " in found["evidence"]
    assert "/etc/torchtuned/torchtuned.conf:3: " in found["evidence"]
    assert cli.main(["check", "--sysroot", str(root)]) == 1
    assert "configuration error  the configuration has faults" in capsys.readouterr().out


def test_a_configuration_that_only_root_may_read_is_no_fault() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        profile = {"usr/share/torchtuned/profiles/training.conf": "[policy]\n"}
        root = build(Path(folder), profile | {"etc/torchtuned/torchtuned.conf": "[jobs]\nslots = many\n"}).root
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        (root / "etc/torchtuned/torchtuned.conf").chmod(0o600)
        words = ["/usr/bin/python3", "-B", "-m", "torchtuned", "check", "--json", "--sysroot", str(root)]
        env = {"PYTHONPATH": str(TOP), "DBUS_SYSTEM_BUS_ADDRESS": "unix:path=/nonexistent/bus"}
        for user, found in ((0, ["configuration"]), (65534, [])):
            done = subprocess.run(words, user=user, cwd="/", env=env, capture_output=True, text=True, check=False)
            assert [one["code"] for one in json.loads(done.stdout)["findings"]] == found


def test_findings_worst_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = build(tmp_path, SHM).root
    assert cli.main(["check", "--sysroot", str(root), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert fits(document, schema("check"))
    assert set(document) == {"schema", "findings", "unchecked"}
    assert [(item["code"], item["severity"], item["class"]) for item in document["findings"]] == [
        ("TT025", "warning", "ASK"),
        ("TT024", "notice", "AUTO"),
    ]
    assert all(set(item) == {"code", "because"} for item in document["unchecked"])


def test_words_fit_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = build(tmp_path, {**SHM, f"{CG}/{SESSION}/pids.max": "100\n"}).root
    assert cli.main(["check", "--sysroot", str(root)]) == 1
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    assert "\n2 warnings, 1 notice; " in out
    assert "[for you to decide]" in out
    assert not re.search(r"ASK|AUTO", out)


def test_names_of_others_are_neither_commands_of_the_terminal_nor_of_the_shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "torch_9\x1b]0;x\x07\x9b2J; touch $HOME"
    root = build(tmp_path, {f"dev/shm/{name}": "x"}).root
    assert cli.main(["check", "--sysroot", str(root)]) == 1
    out = capsys.readouterr().out
    assert "torch_9?]0;x??2J" in out.replace("\n", "")
    assert not {"\x1b", "\x07", "\x9b"} & set(out)
    cli.main(["check", "--sysroot", str(root), "--json"])
    text = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\x9b"} & set(text)
    [finding] = json.loads(text)["findings"]
    assert finding["code"] == "TT023"
    assert shlex.split(finding["fix"]) == ["sudo", "rm", "--", f"/dev/shm/{name}"]


@pytest.mark.parametrize("code", sorted(REGISTRY))
def test_every_code_can_be_explained(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--explain", code.lower(), "--sysroot", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert fits(document, schema("check"))
    assert document["code"] == code
    assert len(document["explanation"]) > 60


def test_explain_alone_lists_all_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("TT")] == sorted(REGISTRY)
    assert any(line.split() == ["TT079", *REGISTRY["TT079"].title.split()] for line in lines)
    assert cli.main(["check", "--explain", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert fits(document, schema("check"))
    assert {one["code"]: one["title"] for one in document["checks"]} == {
        code: check.title for code, check in REGISTRY.items()
    }


def test_without_a_daemon_jobs_that_placed_themselves_are_looked_into(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One's own; of those of others only that their CPUs are theirs."""
    tables = {0: [(4000, 1001)], 1000: [(5000, 1000)]}

    def seen_by(_: Tables, uid: int, __: object) -> list[Job]:
        return [
            Job(
                id="",
                process=Process(pid=pid, start=1, uid=owner),
                request=Request(),
                since=1,
                state=State.RUNNING,
                grant=Grant(cpus=frozenset({1}), threads=1),
            )
            for pid, owner in tables.get(uid, ())
        ]

    seen: list[Machine] = []

    def look(machine: Machine, _: object) -> tuple[list[Finding], list[Unchecked]]:
        seen.append(machine)
        because = "torchtunedd does not answer"
        return [], [Unchecked(code=code, because=because) for code, one in REGISTRY.items() if one.jobs]

    monkeypatch.setattr(Tables, "seen_by", seen_by)
    monkeypatch.setattr(check.checks, "look", look)
    monkeypatch.setattr(check.os, "getuid", lambda: 1000)
    assert cli.main(["check"]) == 0
    [machine] = seen
    assert [(job.id, job.pid, job.cpus) for job in machine.jobs] == [("self-5000", 5000, {1})]
    assert [job.id for job in machine.all_jobs] == ["self-5000", "self-4000"]
    assert not machine.jobs_known
    assert re.search(r"^  \d+ checks of running jobs  because torchtunedd", capsys.readouterr().out, re.MULTILINE)


def test_explain_tells_what_is_so_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--explain", "TT025", "--sysroot", str(build(tmp_path, SHM).root)]) == 0
    assert "overcommit_memory is 2" in " ".join(capsys.readouterr().out.split())


def test_a_wrong_code_and_a_wrong_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--explain", "TT999"]) == 2
    assert "no check TT999" in capsys.readouterr().err
    assert cli.main(["check", "--data", "/nowhere/at/all"]) == 2
    assert "--data /nowhere/at/all" in capsys.readouterr().err


def test_devices_that_are_to_count_as_gpus_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = "sys/bus/pci/devices/0000:aa:00.0"
    changes = {
        f"{device}/vendor": "0x1234\n",
        f"{device}/class": "0x120000\n",
        f"{device}/device": "0x0001\n",
        f"{device}/numa_node": "-1\n",
        "etc/torchtuned/torchtuned.conf": "[policy]\nprofile = none\n[gpu]\nwatch = 1234:1200\n",
        "usr/share/torchtuned/profiles/none.conf": "[policy]\n",
        "usr/share/torchtuned/profiles/training.conf": "[policy]\n",
    }
    root = build(tmp_path, changes).root
    assert cli.main(["check", "--sysroot", str(root), "--json"]) == 1
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["code"], finding["about"]) == ("TT016", "gpu/0000:aa:00.0")
    report = tmp_path / "report.tar.gz"
    assert cli.main(["bug-report", "--sysroot", str(root), "--output", str(report)]) == 0
    with tarfile.open(report) as bundle:
        [name] = [name for name in bundle.getnames() if name.endswith(".torchtuned/check.json")]
        kept = bundle.extractfile(name)
        assert kept is not None
        assert [item["code"] for item in json.load(kept)["findings"]] == ["TT016"]
    (root / "etc/torchtuned/torchtuned.conf").unlink()
    capsys.readouterr()
    assert cli.main(["check", "--sysroot", str(root), "--json"]) == 0


def test_eight_gpus_with_one_fault_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, str | bytes | None] = {"sys/module/nvidia": None}
    for address in (A, B):
        changes[f"sys/bus/pci/devices/{address}/driver"] = None
    root = build(tmp_path, changes).root
    assert cli.main(["check", "--sysroot", str(root)]) == 1
    out = capsys.readouterr().out
    assert out.count("TT001 error") == 1
    assert out.count("  seen") == 2
    assert "\n2 errors.\n" in out


def test_facts_of_a_data_set_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = build(tmp_path, {}).root
    assert cli.main(["check", "--sysroot", str(root), "--data", "/data", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert data["devices"] == ["nvme1n1 (NVMe)"]
    assert (data["rotational"], data["kind"], data["files"], data["all_seen"]) == (False, "disk", 1, True)
    assert "cold_bytes_per_s" not in data  # a folder that stands for another machine is not measured


def test_a_real_data_set_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SECONDS", 0.2)
    for i in range(20):
        (tmp_path / f"{i}.bin").write_bytes(bytes(50_000))
    cli.main(["check", "--data", str(tmp_path), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert fits(document, schema("check"))
    data = document["data"]
    assert (data["files"], data["bytes"], data["median_bytes"]) == (20, 1_000_000, 50_000)
    assert data["warm_bytes_per_s"] > 0
    assert data["cold_bytes_per_s"] > 0
    assert data["staging_seconds"] is not None


def test_reading_ends_in_time_and_tells_its_progress(tmp_path: Path) -> None:
    path = tmp_path / "big"
    with open(path, "wb") as file:
        file.truncate(4 << 30)
    shares: list[float] = []
    found = reading.measure([str(path)], shares.append, seconds=0.1)
    assert found is not None
    assert found.cold is not None
    assert 0 < found.cold.seconds < 1
    assert 0 < found.warm.seconds < 1
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_the_cache_is_read_no_further_than_the_disk_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the rest of a file that is too large for the time would count as from the cache."""
    for i in range(3):
        (tmp_path / f"{i}").write_bytes(bytes(5 << 20))
    clock = chain((i * 0.1 for i in range(9)), (1 + i * 0.001 for i in range(1000)))  # the cache is faster
    monkeypatch.setattr(reading.time, "monotonic", lambda: next(clock))
    found = reading.measure([str(tmp_path / f"{i}") for i in range(3)], seconds=0.75)
    assert found is not None
    assert found.cold is not None
    assert 5 << 20 < found.cold.read < 10 << 20
    assert found.warm.read == found.cold.read


def test_files_of_others_stay_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(bytes(1000))
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    found = reading.measure([str(tmp_path / "x")], seconds=0.1)
    assert found is not None
    assert found.cold is None
    assert "yours" in found.because
    assert found.warm.read == 1000


def test_nothing_to_read() -> None:
    assert reading.measure(["/nowhere"], seconds=0.1) is None


def test_jobs_out_of_the_daemons_objects() -> None:
    job = {
        "Id": "7", "Pid": 4000, "Uid": 1000, "State": "running", "Cpus": "0-3", "Gpus": ["0000:01:00.0"], "Scope": "s",
    }  # fmt: skip
    objects = {
        "/a": {"org.torchtuned1.Job": job},
        "/b": {"org.torchtuned1.Job": {**job, "State": "queued"}},
        "/c": {"org.torchtuned1.Gpu": {}},
    }
    [found] = running(objects)
    assert (found.id, found.pid, found.cpus, found.gpus) == ("7", 4000, frozenset(range(4)), ("0000:01:00.0",))


@pytest.mark.parametrize(("uid", "seen"), [(1000, ["7"]), (1001, ["8"]), (0, ["7", "8"])])
def test_what_concerns_a_job_is_for_its_user_and_for_root_and_told_once(
    uid: int, seen: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [Running(id=number, pid=4000, uid=owner) for number, owner in (("7", 1000), ("8", 1001))]
    found = [replace(FOUND, job=job.id, evidence=f"in {job.id}") for job in jobs]
    theirs = [finding.document() for finding in found if uid in (0, {"7": 1000, "8": 1001}[finding.job])]
    unsure = [Unchecked(code=FOUND.code, because="another user's")]
    monkeypatch.setattr(check.checks, "look", lambda *_: (found, unsure))
    monkeypatch.setattr(check, "_ask_daemon", lambda: (jobs, frozenset(), theirs))
    monkeypatch.setattr(check.os, "getuid", lambda: uid)
    monkeypatch.setattr("sys.argv", ["torchtuned", "check", "--json"])
    cli.main()
    assert [item["job"] for item in json.loads(capsys.readouterr().out)["findings"]] == seen


def test_what_has_nothing_to_say_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/kmsg, for one, which is a file by its kind."""
    monkeypatch.setattr("os.geteuid", lambda: 12345)  # a pipe cannot be dropped from the cache, kmsg can
    (tmp_path / "x").write_bytes(bytes(1000))
    os.mkfifo(tmp_path / "silent")
    writer = os.open(tmp_path / "silent", os.O_RDWR)  # without one its reader would be at the end
    found: list[reading.Reading | None] = []
    paths = [str(tmp_path / "silent"), str(tmp_path / "x")]
    thread = threading.Thread(target=lambda: found.append(reading.measure(paths, seconds=0.1)), daemon=True)
    thread.start()
    thread.join(20)
    os.close(writer)
    assert [one and one.warm.read for one in found] == [1000]
