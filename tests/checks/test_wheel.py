"""The advisor of wheels and drivers, T21 and T22 first, and how a torch is found without importing it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import nvml
from fakes.sound import build

from torchtuned.checks import run_checks, wheel
from torchtuned.checks.registry import Machine
from torchtuned.findings import Finding, Severity, Unchecked
from torchtuned.gpus import Gpus
from torchtuned.host import Host

PYTHON = "/home/ann/venv/bin/python"
SITE = "home/ann/venv/lib/python3.13/site-packages"


def version_py(version: str, cuda: str | None, hip: str | None = None) -> str:
    """As torch's build writes it."""
    return (
        f"from typing import Optional\n\n__all__ = ['__version__', 'debug', 'cuda']\n__version__ = '{version}'\n"
        f"debug = False\ncuda: Optional[str] = {cuda!r}\ngit_version = 'cf30'\nhip: Optional[str] = {hip!r}\n"
    )


def look(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    driver: str,
    torch: str,
    capability: tuple[int, int],
    python: tuple[str, ...] | None = None,
) -> tuple[list[Finding], list[Unchecked]]:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml.library()))
    monkeypatch.setenv("FAKE_NVML_STATE", str(folder / "nvml.state"))
    files = {f"{SITE}/torch/version.py": torch, "sys/module/nvidia/version": f"{driver}\n"}
    major, minor = capability
    fake = build(folder, files, capability_major=major, capability_minor=minor)
    fake.gpu(1, capability_major=major, capability_minor=minor)
    host = Host(fake.root)
    gpus = Gpus(host, python=nvml.interpreter() if python is None else python)
    return run_checks(host, gpus, ["TT074", "TT075", "TT076"], python=PYTHON)


def test_tt074_t21_the_default_wheel_on_debians_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = version_py("2.9.1+cu130", "13.0")
    [finding], unchecked = look(tmp_path, monkeypatch, driver="550.163.01", torch=torch, capability=(8, 6))
    assert (finding.code, finding.severity) == ("TT074", Severity.ERROR)
    assert ">=580" in finding.title
    assert "550.163.01" in finding.evidence
    assert "install the cu126 wheel" in finding.fix
    assert "update torch" not in finding.fix
    assert unchecked == []


def test_tt075_t22_blackwell_with_cuda_12_6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = version_py("2.9.1+cu126", "12.6")
    findings, _ = look(tmp_path, monkeypatch, driver="580.95.05", torch=torch, capability=(12, 0))
    assert [finding.code for finding in findings] == ["TT075", "TT075"]  # one for each GPU
    assert "sm_120" in findings[0].title
    assert "begin with CUDA 12.8" in findings[0].evidence
    assert "cu130" in findings[0].fix
    assert "cu126" not in findings[0].fix


def test_tt075_t22_pascal_with_cuda_13(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = version_py("2.9.1+cu130", "13.0")
    findings, _ = look(tmp_path, monkeypatch, driver="580.95.05", torch=torch, capability=(6, 1))
    assert {finding.code for finding in findings} == {"TT075"}
    assert "sm_61" in findings[0].title
    assert "install the cu126 wheel" in findings[0].fix
    assert "up to torch 2.14" in findings[0].fix


def test_tt076_a_build_without_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = version_py("2.13.0+cpu", None)
    [finding], _ = look(tmp_path, monkeypatch, driver="580.95.05", torch=torch, capability=(8, 0))
    assert (finding.code, finding.severity) == ("TT076", Severity.WARNING)
    assert "without CUDA" in finding.evidence


@pytest.mark.parametrize(
    ("driver", "version", "cuda", "capability"),
    [
        ("550.163.01", "2.9.1+cu126", "12.6", (8, 6)),
        ("535.309.01", "2.11.0+cu128", "12.8", (8, 9)),  # runs by minor version compatibility, and on code for 8.6
        ("580.95.05", "2.13.0", "13.0", (12, 1)),
        ("580.95.05", "2.13.0", "13.0", (13, 0)),  # newer than all: PTX of 12.0
    ],
)
def test_what_fits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: str,
    version: str,
    cuda: str,
    capability: tuple[int, int],
) -> None:
    torch = version_py(version, cuda)
    assert look(tmp_path, monkeypatch, driver=driver, torch=torch, capability=capability) == ([], [])


def test_without_nvml_the_driver_is_still_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = version_py("2.9.1+cu130", "13.0")
    nothing = nvml.interpreter("")
    findings, unchecked = look(
        tmp_path, monkeypatch, driver="550.163.01", torch=torch, capability=(8, 6), python=nothing
    )
    assert [finding.code for finding in findings] == ["TT074"]
    assert [item.code for item in unchecked] == ["TT075"]
    assert "compute capability is not known" in unchecked[0].because


def test_a_torch_that_is_not_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = version_py("2.9.1", "12.2")
    findings, unchecked = look(tmp_path, monkeypatch, driver="550.163.01", torch=torch, capability=(8, 6))
    assert findings == []
    assert "not in the table" in unchecked[0].because


def test_no_torch(tmp_path: Path) -> None:
    host = Host(build(tmp_path, {}).root)
    findings, unchecked = run_checks(host, Gpus(host), ["TT074"], python=PYTHON)
    assert findings == []
    assert "no torch/version.py" in unchecked[0].because


def test_the_table_is_whole() -> None:
    for machine in ("x86_64", "aarch64"):
        table = wheel.table(machine)
        assert table.dated >= "2026"
        for row in table.wheels:
            assert row.variant == f"cu{row.cuda[0]}{row.cuda[1]}"
            assert row.cuda[0] in table.drivers
            assert row.last is None or row.first <= row.last
            assert list(row.archs) == sorted(row.archs)
    assert wheel.table("riscv64").wheels == ()


# where torch is


def find(python: str | Path, root: Path = Path("/")) -> wheel.Torch | None:
    host = Host(root)
    return wheel.find(Machine(host, Gpus(host)), str(python))


def put(folder: Path, version: str) -> None:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/version.py").write_text(version_py(version, "12.6"))
    (folder / "torch/__init__.py").write_text("raise SystemExit('torch was imported')\n")


def test_found_in_a_virtual_environment_without_running_it(tmp_path: Path) -> None:
    put(tmp_path / "lib/python3.12/site-packages", "2.8.0")
    (tmp_path / "bin").mkdir()
    found = find(tmp_path / "bin/python")
    assert found is not None
    assert (found.version, found.cuda, found.hip) == ("2.8.0", "12.6", None)
    assert find(tmp_path) == found  # the folder will do as well


def test_found_in_the_system_that_an_environment_includes(tmp_path: Path) -> None:
    put(tmp_path / "usr/lib/python3/dist-packages", "2.6.0")
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/pyvenv.cfg").write_text(f"home = {tmp_path}/usr/bin\ninclude-system-site-packages = true\n")
    found = find(tmp_path / "venv/bin/python")
    assert found is not None
    assert found.version == "2.6.0"
    (tmp_path / "venv/pyvenv.cfg").write_text(f"home = {tmp_path}/usr/bin\ninclude-system-site-packages = false\n")
    assert find(tmp_path / "venv/bin/python") is None


@pytest.mark.parametrize(
    ("name", "links", "found"),
    [
        ("python3.12", {}, "2.8.0"),
        ("python3", {"python3": "python3.12"}, "2.8.0"),
        ("python", {"python": "python3", "python3": "python3.9"}, "2.0.0"),
        ("python3.13", {}, None),
        ("python3.13t", {}, "2.9.0"),
        ("python3", {}, None),  # nothing tells which it is
    ],
)
def test_of_several_pythons_the_one_that_is_named(
    tmp_path: Path, name: str, links: dict[str, str], found: str | None
) -> None:
    for version, torch in {"3.9": "2.0.0", "3.12": "2.8.0", "3.13t": "2.9.0"}.items():
        put(tmp_path / f"lib/python{version}/site-packages", torch)
    (tmp_path / "lib/python3.13").mkdir()
    (tmp_path / "bin").mkdir()
    for link, target in links.items():
        (tmp_path / "bin" / link).symlink_to(target)
    torch = find(tmp_path / "bin" / name)
    assert (torch and torch.version) == found


def test_an_environment_tells_its_version(tmp_path: Path) -> None:
    for version, torch in {"3.9": "2.0.0", "3.12": "2.8.0"}.items():
        put(tmp_path / f"lib/python{version}/site-packages", torch)
    (tmp_path / "pyvenv.cfg").write_text("home = /opt/python/bin\nversion = 3.9.18\n")
    torch = find(tmp_path)
    assert torch is not None
    assert torch.version == "2.0.0"
    (tmp_path / "pyvenv.cfg").unlink()
    _, [unchecked] = run_checks(Host(), Gpus(Host()), ["TT074"], python=str(tmp_path))
    assert "name one" in unchecked.because


def test_a_link_to_an_interpreter_means_that_one(tmp_path: Path) -> None:
    put(tmp_path / "opt/lib/python3.12/site-packages", "2.8.0")
    put(tmp_path / "local/lib/python3.12/dist-packages", "2.0.0")
    for folder in ("opt/bin", "local/bin"):
        (tmp_path / folder).mkdir()
    (tmp_path / "local/bin/python3.12").symlink_to("../../opt/bin/python3.12")
    torch = find(tmp_path / "local/bin/python3.12")
    assert torch is not None
    assert torch.version == "2.8.0"


def test_an_interpreter_is_asked_where_its_folders_do_not_tell(tmp_path: Path) -> None:
    put(tmp_path / "odd", "2.7.0")
    (tmp_path / "tool").mkdir()
    tmp_path.chmod(0o755)
    python = tmp_path / "tool/python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/odd exec {sys.executable} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    found = find(python)
    assert found is not None
    assert found.version == "2.7.0"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("named", ["tool/python", "link"])
def test_root_runs_an_interpreter_as_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    """With nothing of root's: not the group that chown left to the file, no variable, and not its terminal."""
    monkeypatch.setenv("TOKEN", "secret")
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    (tmp_path / "tool").mkdir()
    python = tmp_path / "tool/python"
    told = '$(id -u) $(id -G) "$TOKEN" $(($6 == $$))'  # the last: whether it leads its session
    python.write_text(f"#!/bin/sh\nset -- $(cat /proc/$$/stat)\necho {told} > {tmp_path}/tool/who\n")
    python.chmod(0o755)
    for path in (python, tmp_path / "tool"):
        os.chown(path, 65534, 0)
    (tmp_path / "link").symlink_to(python)
    assert find(tmp_path / named) is None
    assert (tmp_path / "tool/who").read_text() == "65534 65534  1\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_runs_as_the_user_who_could_exchange_an_interpreter(tmp_path: Path) -> None:
    """Whose file it is says little where the folder is somebody else's: it may be another's a moment later."""
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    python = tmp_path / "mine/tool/python"
    python.parent.mkdir(parents=True)
    who = tmp_path / "mine/who"
    python.write_text(f"#!/bin/sh\nid -u > {who}\n")
    python.chmod(0o755)
    os.chown(tmp_path / "mine", 65534, 65534)
    (tmp_path / "link").symlink_to(python)
    for named in (python, tmp_path / "link"):
        assert find(named) is None
        assert who.read_text() == "65534\n"
        who.unlink()
    for change in (lambda: os.chown(python, 1, 1), lambda: os.chown(python.parent, 1, 1)):
        change()
        with pytest.raises(PermissionError, match="several users can change it"):
            find(python)
        os.chown(python, 0, 0)
    os.chown(python.parent, 0, 0)
    os.chown(tmp_path / "mine", 0, 0)
    for mode in (0o777, 0o775):
        os.chown(python.parent, 0, 65534)
        python.parent.chmod(mode)
        with pytest.raises(PermissionError, match="several users can change it"):
            find(python)
    assert not who.exists()


def test_an_interpreter_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "DEADLINE_S", 0.3)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 20\n")
    python.chmod(0o755)
    with pytest.raises(subprocess.TimeoutExpired):
        find(python)
    findings, [unchecked] = run_checks(Host(), Gpus(Host()), ["TT074"], python=str(python))
    assert findings == []
    assert "timed out" in unchecked.because


def test_a_real_torch() -> None:
    torch = pytest.importorskip("torch")
    found = find(sys.executable)
    assert found is not None
    assert found.version == torch.__version__
    assert found.cuda == torch.version.cuda
