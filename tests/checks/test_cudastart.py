"""Starting CUDA for real, with a library of ours in the place of the driver's; and where it is not started."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from fakes.sound import A, build

from torchtuned.checks import cudastart, run_checks
from torchtuned.checks.cudastart import start
from torchtuned.gpus import Gpus
from torchtuned.host import Host

LIBRARY = """\
#include <stdlib.h>
#include <unistd.h>
int cuInit(unsigned flags)
{
    const char *code = getenv("FAKE_CUINIT"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible && !*visible)
        return 100;
    if (!code)
        for (;;)
            pause();
    return atoi(code) + (int)flags;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "cuda.c").write_text(LIBRARY)
    path = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, folder / "cuda.c"], check=True, timeout=60)
    return path


@pytest.mark.parametrize("code", [0, 3, 804])
def test_what_cuinit_says(library: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setenv("FAKE_CUINIT", str(code))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides all GPUs from a program, and says nothing about the host
    found = start(Host())
    assert (found.code, found.library) == (code, str(library))


def test_one_that_hangs_is_left(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setattr(cudastart, "DEADLINE_S", 1.0)
    assert start(Host()) == cudastart.Start(code=None, because="cuInit did not answer within 1 s")


def test_without_a_driver_it_is_not_known(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    found = start(Host())
    assert found.code is None
    assert "libcuda.so.1" in found.because


def test_a_sleeping_gpu_is_not_woken(tmp_path: Path) -> None:
    power = f"sys/bus/pci/devices/{A}/power/runtime_status"
    host = Host(build(tmp_path, {power: "suspended\n", ".torchtuned/cuinit": "3 x\n"}).root)
    findings, unchecked = run_checks(host, Gpus(host), ["TT077"])
    assert findings == []
    assert [item.because for item in unchecked] == [f"GPU {A} sleeps, and starting CUDA would wake it"]


def test_the_daemon_does_not_start_it(tmp_path: Path) -> None:
    host = Host(build(tmp_path, {".torchtuned/cuinit": "3 x\n"}).root)
    assert [finding.code for finding in run_checks(host, Gpus(host), ["TT077"])[0]] == ["TT077"]
    assert run_checks(host, Gpus(host), ["TT077"], caller=False) == ([], [])
