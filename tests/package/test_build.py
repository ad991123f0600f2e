"""The package as built: reproducible, complete, one version everywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

if "TORCHTUNED_DEB" not in os.environ:
    pytest.skip("needs a built package: tests/run package", allow_module_level=True)

TOP = Path(__file__).resolve().parents[2]
DEB = Path(os.environ["TORCHTUNED_DEB"])


def field(name: str) -> str:
    return subprocess.run(["dpkg-deb", "-f", DEB, name], check=True, capture_output=True, text=True).stdout.strip()


def test_two_builds_in_different_folders_are_byte_identical(tmp_path: Path) -> None:
    tree = tmp_path / "somewhere else"
    ignored = shutil.ignore_patterns(".*", "dist", "build", "__pycache__")
    shutil.copytree(TOP, tree, symlinks=True, ignore=ignored)
    subprocess.run([tree / "debian/make-deb", tmp_path / "again.deb"], check=True)
    assert (tmp_path / "again.deb").read_bytes() == DEB.read_bytes()


def test_the_versions_agree() -> None:
    module = re.search(r'__version__ = "(.+)"', (TOP / "torchtuned/__init__.py").read_text())
    assert module is not None
    assert field("Version") == module[1]


def test_everything_under_share_and_etc_is_installed(tmp_path: Path) -> None:
    subprocess.run(["dpkg-deb", "-x", DEB, tmp_path], check=True)
    for source, target in ((TOP / "share", tmp_path / "usr/share"), (TOP / "etc", tmp_path / "etc")):
        for file in source.rglob("*"):
            if file.is_file():
                installed = target / file.relative_to(source)
                assert installed.exists() or installed.with_name(installed.name + ".gz").exists(), file


def test_the_commands_are_isolated_from_the_users_python(tmp_path: Path) -> None:
    subprocess.run(["dpkg-deb", "-x", DEB, tmp_path], check=True)
    for command in ("usr/bin/torchtuned", "usr/bin/torchtuned-run", "usr/sbin/torchtunedd"):
        assert (tmp_path / command).read_text().startswith("#!/usr/bin/python3 -I\n"), command
