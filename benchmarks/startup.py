"""What torchtuned-run adds before a program starts: with torchtunedd, without it, and beside what else takes time.

usage: .venv/bin/python benchmarks/startup.py [--rounds N] [--python PYTHON-WITH-TORCH]

Each round starts every kind once, in turn, so that whatever else the machine does hits all of them alike; figures are
medians of one run. "adds" is against the bare program. The daemon runs on a bus of its own; there is no systemd on that
bus, so on a real system the time in which PID 1 makes the job's scope comes on top. Aim: 40 ms.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TOP), str(TOP / "tests"), str(TOP / "tests/bus")]

from fakes.tree import make_tree  # noqa: E402
from harness import PrivateBus  # noqa: E402

from torchtuned.client import MANAGER, ROOT, Client  # noqa: E402
from torchtuned.errors import DaemonUnreachable  # noqa: E402

PYTHON = "/usr/bin/python3"
ENTRY = f"import sys; sys.path.insert(0, {str(TOP)!r}); from torchtuned.run.main import main; sys.exit(main())"
RUN = [PYTHON, "-I", "-c", ENTRY, "--quiet"]
PROGRAM = "/bin/true"
AIM_MS = 40


def milliseconds(words: list[str], environ: dict[str, str]) -> float:
    """From fork to end of one process."""
    start = time.perf_counter()
    pid = os.posix_spawn(words[0], words, environ)
    status = os.waitpid(pid, 0)[1]
    taken = (time.perf_counter() - start) * 1000
    if status:
        sys.exit(f"{' '.join(words)[:200]}: ended with {os.waitstatus_to_exitcode(status)}")
    return taken


def progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        filled = 40 * done // of
        sys.stderr.write(f"\r[{'#' * filled}{'.' * (40 - filled)}] {done}/{of}" + ("\r\x1b[K" if done == of else ""))
        sys.stderr.flush()


def this_machine(folder: Path) -> Path:
    """This machine's CPUs, with a policy that changes nothing."""
    here = {"sys": "-> /sys", "proc": "-> /proc", "usr/share/torchtuned/profiles/training.conf": "[policy]\n"}
    return make_tree(folder / "here", here)


def start_daemon(bus: PrivateBus, root: Path) -> subprocess.Popen[bytes]:
    """torchtunedd on a machine in a folder, once it answers. From here on Client() talks to it."""
    words = [sys.executable, "-m", "torchtuned.daemon", f"--sysroot={root}", f"--run-dir={bus.folder}/run"]
    daemon = subprocess.Popen(
        [*words, f"--state-dir={bus.folder}/state"], env=bus.environment, stderr=subprocess.DEVNULL
    )
    os.environ["DBUS_SYSTEM_BUS_ADDRESS"] = bus.address
    while daemon.poll() is None:
        try:
            with Client() as client:
                if client.properties(ROOT, MANAGER)["State"] == "ready":
                    return daemon
        except DaemonUnreachable:
            pass
        time.sleep(0.1)
    sys.exit(f"torchtunedd ended with {daemon.returncode}")


def measure(bus: PrivateBus, rounds: int, torch: str) -> dict[str, list[float]]:
    nowhere = {**bus.environment, "DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={bus.folder}/none"}
    for environ in (bus.environment, nowhere):
        environ["XDG_RUNTIME_DIR"] = str(bus.folder)
        environ.pop("PYTHONPATH", None)
    kinds: dict[str, tuple[list[str], dict[str, str]]] = {
        "the bare program": ([PROGRAM], nowhere),
        "torchtuned-run, torchtunedd there": ([*RUN, "--require", PROGRAM], bus.environment),
        "torchtuned-run, no torchtunedd": ([*RUN, PROGRAM], nowhere),
        "python3 that does nothing": ([PYTHON, "-I", "-c", "pass"], nowhere),
        "python3, import dbus_next": ([PYTHON, "-I", "-c", "import dbus_next"], nowhere),
    }
    if torch:
        kinds["python, import torch"] = ([torch, "-c", "import torch"], nowhere)
    for words, environ in kinds.values():  # once for the disk's cache and for the bytecode
        milliseconds(words, environ)
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    for done in range(rounds):
        for kind, (words, environ) in kinds.items():
            if "torch" not in kind.split()[-1] or done < max(3, rounds // 10):
                taken[kind].append(milliseconds(words, environ))
        progress(done + 1, rounds)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description="what torchtuned-run adds before a program starts")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--python", default="", help="an interpreter with torch, to compare with its import")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="torchtuned-startup-", dir="/dev/shm"))
    folder.chmod(0o700)
    bus = PrivateBus(folder)
    try:
        daemon = start_daemon(bus, this_machine(folder))
        taken = measure(bus, options.rounds, options.python)
        daemon.kill()
        daemon.wait()
    finally:
        bus.stop()  # which ends the daemon too
        shutil.rmtree(folder)
    medians = {kind: statistics.median(times) for kind, times in taken.items()}
    bare = medians["the bare program"]
    print(f"{'':36}{'median ms':>10}{'p90 ms':>9}{'adds ms':>9}")
    for kind, times in taken.items():
        p90 = sorted(times)[int(0.9 * (len(times) - 1))]
        print(f"{kind:36}{medians[kind]:10.1f}{p90:9.1f}{medians[kind] - bare:9.1f}")
    added = medians["torchtuned-run, torchtunedd there"] - bare
    print(f"\nadded with torchtunedd: {added / AIM_MS:.2f} of the aim of {AIM_MS} ms")
    if options.python:
        print(f"added with torchtunedd: {added / medians['python, import torch']:.3f} of import torch")


if __name__ == "__main__":
    main()
