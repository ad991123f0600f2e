"""A bundle replays: the same findings, topology and plan, and nothing in it that is private."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
from pathlib import Path

import pytest
from fakes.sound import MOUNTS, build

from torchtuned.bugreport import Privacy
from torchtuned.cli import main as cli
from torchtuned.host import Host

SECRETS = ("ann", "trainer", "filer", "hunter2", "10.1.2.3", "8c1d7a4e", "pw@proxy", "mysecretproject")
FAULTY: dict[str, str | bytes | None] = {
    "proc/sys/vm/overcommit_memory": "2\n",
    "proc/self/mountinfo": MOUNTS + "40 22 0:50 / /home/ann/data rw - nfs4 filer.lab:/export/ann rw,addr=10.1.2.3\n",
    "proc/self/environ": "AWS_SECRET=hunter2\0MASTER_ADDR=10.1.2.3\0LD_LIBRARY_PATH=/usr/local/cuda/lib64\0",
    "usr/local/cuda/lib64/libcudart.so.12": "",
    "proc/cmdline": "root=UUID=8c1d7a4e-0000-4000-8000-0123456789ab ro transparent_hugepage=madvise\n",
    "etc/apt/apt.conf.d/10proxy": 'Acquire::http::Proxy "http://ann:pw@proxy:3128";\n',
    "etc/apt/apt.conf.d/20auto-upgrades": 'APT::Periodic::Unattended-Upgrade "1";\n',
    "etc/apt/apt.conf.d/50unattended-upgrades": 'Unattended-Upgrade::Automatic-Reboot "true";\n',
    "usr/lib/systemd/system/timers.target.wants/apt-daily-upgrade.timer": "x",
    "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 trainer\n10.1.2.3 filer.lab filer\n",
    "sys/class/infiniband/mlx5_0/node_guid": "8c1d7a4e",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "etc/systemd/system/sleep.target": "-> /dev/null",
    "etc/systemd/logind.conf": "[Login]\nIdleAction=suspend\n",
    "var/lib/systemd/linger/ann": None,
    "dev/shm/torch_4001_77_0": "x",
    "proc/4001/comm": "mysecretproject\n",
    "proc/4001/stat": "4001 (mysecretproject) S 4000 1 1\n",
    "tmp/mysecretproject": "x",
    "tmp/torchinductor_ann/x": "x",
    "var/log/dmesg": "[1] NVRM: Xid (PCI:0000:01:00): 79, pid=4001, name=python\n[2] usb: device of ann\n",
}


@pytest.fixture(autouse=True)
def _no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/nonexistent/bus")


def bundle(folder: Path, root: Path) -> Path:
    """The folder that a bundle of the machine at `root` makes."""
    archive = folder / "report.tar.gz"
    assert cli.main(["bug-report", "--sysroot", str(root), "--output", str(archive)]) == 0
    assert os.stat(archive).st_mode & 0o777 == 0o600
    out = folder / "out"
    out.mkdir()
    subprocess.run(["tar", "xzf", archive, "-C", out], check=True)
    [top] = out.iterdir()
    return top


def replay(root: Path, capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, object]:
    capsys.readouterr()
    cli.main([*command, "--sysroot", str(root), "--json"])
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


def test_the_same_findings_come_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = build(tmp_path, FAULTY).root
    before = replay(root, capsys, "check")
    after = replay(bundle(tmp_path, root), capsys, "check")
    codes = [item["code"] for item in before["findings"]]  # type: ignore[attr-defined]
    assert {"TT025", "TT048", "TT052", "TT059", "TT071", "TT010"} <= set(codes)
    assert "TT046" not in codes  # sleep.target is masked
    names = Privacy.of(Host(root))
    assert after == json.loads(names.words(json.dumps(before)).replace("mysecretproject", "program"))


def test_nothing_private_is_in_it(tmp_path: Path) -> None:
    top = bundle(tmp_path, build(tmp_path, FAULTY).root)
    secret = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(map(re.escape, SECRETS))})(?![A-Za-z0-9])")
    for path in top.rglob("*"):
        inside = str(path.relative_to(top))
        text = os.readlink(path) if path.is_symlink() else path.read_text("utf-8", "replace") if path.is_file() else ""
        assert not secret.search(inside)
        assert not [line for line in text.splitlines() if secret.search(line)], inside
    assert "user1" in (top / "etc/passwd").read_text()


def test_topology_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = build(tmp_path, {}).root
    assert replay(root, capsys, "topology") == replay(bundle(tmp_path, root), capsys, "topology")


def test_topology_of_real_machines_is_the_same(snapshot, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert replay(snapshot.root, capsys, "topology") == replay(bundle(tmp_path, snapshot.root), capsys, "topology")


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top = bundle(tmp_path, Path("/"))
    kept = json.loads((top / ".torchtuned/check.json").read_text())
    again = replay(top, capsys, "check")
    found, replayed = ({item["code"] for item in document["findings"]} for document in (kept, again))  # type: ignore[attr-defined]
    # who else takes the CPUs is seen by looking twice, which a folder does not allow
    assert replayed == found - {"TT078", "TT079"}


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("precious")
    assert cli.main(["bug-report", "--sysroot", str(tmp_path), "--output", str(tmp_path / "mine")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "precious"


def test_of_a_bundle_that_cannot_be_written_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = build(tmp_path, FAULTY).root
    monkeypatch.chdir(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as a full disk
    try:
        status = cli.main(["bug-report", "--sysroot", str(root), "--output", "report"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (status, capsys.readouterr().err) == (1, "torchtuned: File too large\n")
    assert not os.path.exists("report")
