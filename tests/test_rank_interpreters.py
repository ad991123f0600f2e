"""Ranks of any interpreter: the system's, a virtual environment's, and those with a prefix of their own, as conda's.

Nothing of torchtuned is installed into any interpreter: the rank is bound by another process, which then becomes it.
So a user's sitecustomize is theirs, and a Python start that is no rank costs what it did. The last test holds that.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from test_rankshim import CPUS, DOOR, SEEN, TOP
from test_run import RUN, _no_daemon

__all__ = ["_no_daemon"]  # a fixture for every test here

LAUNCHER = """
import os, subprocess, sys
sys.exit(subprocess.run([os.environ["PYTHON_EXEC"], "-u", *sys.argv[1:]]).returncode)
"""
SITE = "import os\nos.environ['SITECUSTOMIZE'] = 'mine'\n"
SAYS = SEEN + "print(json.dumps([os.environ.get('SITECUSTOMIZE'), sys.prefix, 'torchtuned' in sys.modules]))\n"


def own_prefix(folder: Path) -> Path:
    """An interpreter with bin and lib in a prefix of its own, and no pyvenv.cfg, as conda lays it out."""
    version = "python" + ".".join(sys.version.split(".")[:2])
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").mkdir()
    shutil.copy(os.path.realpath("/usr/bin/python3"), folder / "bin" / version)
    (folder / "bin/python").symlink_to(version)
    (folder / "lib" / version).symlink_to(Path(os.__file__).parent)
    return folder / "bin/python"


def wrapper(folder: Path, python: Path) -> Path:
    """A script called python that sets something and becomes the real one under its own name."""
    (folder / "bin").mkdir(parents=True)
    path = folder / "bin/python"
    path.write_text(f'#!/bin/bash\nexport WRAPPED=$((WRAPPED + 1))\nexec -a "$0" {python.resolve()} "$@"\n')
    path.chmod(0o755)
    return path


def interpreters(folder: Path) -> dict[str, Path]:
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", folder / "venv"], check=True)
    found = {"system": Path("/usr/bin/python3"), "venv": folder / "venv/bin/python"}
    found["conda"] = own_prefix(folder / "conda")
    own_prefix(folder / "before")
    (folder / "before").rename(folder / "after")
    found["relocated"] = folder / "after/bin/python"
    found["wrapper"] = wrapper(folder / "wrapped", found["conda"])
    for minor in range(10, 15):  # others that this machine has; what PATH names may be a script that chooses one
        path = shutil.which(f"python3.{minor}")
        words = [path or "false", "-c", "import sys; print(sys.executable)"]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode == 0:
            found[f"3.{minor}"] = Path(done.stdout.strip())
    return found


def test_a_rank_is_the_launchers_interpreter_with_its_own_site(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SAYS)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(SITE)
    environ = {**os.environ, "TORCHTUNED_RANKSHIM": str(TOP / "torchtuned/rankshim.py"), "PYTHON_EXEC": str(DOOR)}
    environ |= {"TORCHTUNED_RANKS": f"{CPUS[-1]}/3/0", "LOCAL_RANK": "0", "PYTHONPATH": str(tmp_path / "site")}
    for name, python in interpreters(tmp_path).items():
        words = [str(python), "-c", LAUNCHER, str(tmp_path / "script.py"), "--x"]
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (name, done.stderr)
        rank, site = [json.loads(line) for line in done.stdout.splitlines() if line.strip()]
        assert (rank["cpus"], rank["omp"], rank["ours"]) == ([CPUS[-1]], "3", []), name
        assert rank["python"] == str(python), name
        prefix = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True)
        assert site == ["mine", prefix.stdout.strip(), False], name


def test_a_python_that_is_no_rank_starts_as_ever() -> None:
    """Under torchtuned-run it imports the same modules from the same places, and nothing in the package is for site."""
    code = "import sys; print(sorted(sys.modules), sys.path, sys.flags, sorted(sys.argv))"
    words = ["/usr/bin/python3", "-c", code]
    bare = subprocess.run(words, capture_output=True, text=True, check=True)
    assert subprocess.run([*RUN, "--quiet", *words], capture_output=True, text=True, check=True).stdout == bare.stdout
    files = [path.name for top in ("torchtuned", "share", "debian") for path in (TOP / top).rglob("*")]
    assert "rankshim.py" in files
    assert not [name for name in files if name.endswith(("sitecustomize.py", "usercustomize.py", ".pth"))]
