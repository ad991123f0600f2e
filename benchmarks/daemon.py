"""This source tree's torchtunedd on a bus of its own, for the benchmarks that need one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rounds import TOP

sys.path[:0] = [str(TOP), str(TOP / "tests"), str(TOP / "tests/bus")]

from fakes.tree import make_tree  # noqa: E402
from harness import PrivateBus  # noqa: E402

from torchtuned.client import MANAGER, ROOT, Client  # noqa: E402
from torchtuned.errors import DaemonUnreachable  # noqa: E402


@dataclass(frozen=True)
class Daemon:
    """One that answers. Client() talks to it."""

    pid: int
    bus: PrivateBus

    def environment(self, **more: str) -> dict[str, str]:
        """Variables for a program that is to find it, and for torchtuned-run a place of its own beside it."""
        environ = {**self.bus.environment, "XDG_RUNTIME_DIR": str(self.bus.folder), **more}
        for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):  # the installed one comes with its bytecode
            environ.pop(name, None)
        return environ


def this_machine(folder: Path) -> Path:
    """This machine's CPUs, with a policy that changes nothing."""
    here = {"sys": "-> /sys", "proc": "-> /proc", "usr/share/torchtuned/profiles/training.conf": "[policy]\n"}
    return make_tree(folder / "here", here)


@contextlib.contextmanager
def daemon_on(machine: Callable[[Path], Path]) -> Iterator[Daemon]:
    """torchtunedd on a machine that `machine` makes in a folder. All of it is in memory, as /run is."""
    folder = Path(tempfile.mkdtemp(prefix="torchtuned-benchmarks-", dir="/dev/shm"))
    folder.chmod(0o700)
    bus = PrivateBus(folder)
    process: subprocess.Popen[bytes] | None = None
    try:
        words = [sys.executable, "-m", "torchtuned.daemon", f"--sysroot={machine(folder)}"]
        words += [f"--run-dir={folder}/run", f"--state-dir={folder}/state"]
        process = subprocess.Popen(words, env=bus.environment, stderr=subprocess.DEVNULL)
        os.environ["DBUS_SYSTEM_BUS_ADDRESS"] = bus.address
        _wait_for(process)
        yield Daemon(process.pid, bus)
    finally:
        if process is not None:
            process.kill()
            process.wait()
        bus.stop()
        shutil.rmtree(folder)


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            with Client() as client:
                if client.properties(ROOT, MANAGER)["State"] == "ready":
                    return
        except DaemonUnreachable:
            pass
        time.sleep(0.1)
    sys.exit(f"torchtunedd ended with {process.returncode}")
