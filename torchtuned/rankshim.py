"""Binds one rank of a job to its CPUs before its interpreter starts, then becomes that interpreter.

torchrun (and accelerate, which uses it) starts $PYTHON_EXEC in place of its own interpreter; torchtuned-run makes that
share/torchtuned/rank, which runs this file. So a rank has its CPUs before its first allocation and its first thread,
whatever interpreter it is (nothing of this runs inside it), and torchrun itself keeps the CPUs of the whole job.

TORCHTUNED_RANKS holds "CPUS/THREADS/GPU" per local rank, joined by ";": a CPU list, the value for OMP_NUM_THREADS
(empty: the user set it) and the entry of CUDA_VISIBLE_DEVICES that is this rank's. Whoever has bound the rank before us
(numactl, a batch system) is left alone. No failure here keeps a rank from starting: it runs unbound, with a line.
This file is run by path with no package around it: it imports nothing else of torchtuned. Python 3.10 and newer.
"""

from __future__ import annotations

import os
import signal
import sys

TABLE = "TORCHTUNED_RANKS"
OWN_PYTHON_EXEC = "TORCHTUNED_PYTHON_EXEC"
INTERNAL = (TABLE, OWN_PYTHON_EXEC, "TORCHTUNED_RANKSHIM", "PYTHON_EXEC")


def parse_table(text: str) -> list[tuple[set[int], str, str]]:
    """(CPUs, threads, GPU entry) of each local rank. Raises ValueError."""
    rows = []
    for row in text.split(";"):
        cpus, threads, gpu = row.split("/")
        if threads and not threads.isdigit():
            raise ValueError(f"not a number of threads: {threads!r}")
        rows.append((parse_cpus(cpus), threads, gpu))
    return rows


def parse_cpus(text: str) -> set[int]:
    """The CPUs of a kernel CPU list, "0-3,8"."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def which_rank(environ: dict[str, str], entries: list[str]) -> int:
    """The row of this process: by its only visible GPU where every rank has its own (torchrun --virtual-local-rank
    says LOCAL_RANK=0 to all of them), else LOCAL_RANK. Raises KeyError or ValueError.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if len(entries) > 1 and environ.get("LOCAL_RANK") == "0" and visible and "," not in visible:
        if entries.count(visible) == 1:
            return entries.index(visible)
    return int(environ["LOCAL_RANK"])


def bind(environ: dict[str, str]) -> None:
    """Give this process the CPUs and thread count of its rank, unless somebody else has bound it."""
    rows = parse_table(environ[TABLE])
    rank = which_rank(environ, [gpu for _, _, gpu in rows])
    if not 0 <= rank < len(rows):
        return  # more ranks than were announced: the job's CPUs are theirs
    cpus, threads, _ = rows[rank]
    mask = os.sched_getaffinity(0)
    if mask != os.sched_getaffinity(os.getppid()):
        return  # bound on the way here, by numactl for instance
    mine = cpus & mask
    if not mine:
        raise ValueError(f"none of the CPUs of rank {rank} is left to this process")
    os.sched_setaffinity(0, mine)
    if threads:
        environ["OMP_NUM_THREADS"] = threads


def interpreter(environ: dict[str, str]) -> str:
    """The interpreter to become: the user's own $PYTHON_EXEC, else the launcher's.

    The launcher's sys.executable is found as the launcher found it: from argv[0], by PATH when it has no slash; but
    only if that is the file that the launcher runs, or called python, as a script is that starts one with exec -a. Else
    the file that it runs, which has lost its virtual environment.
    """
    if environ.get(OWN_PYTHON_EXEC):
        return environ[OWN_PYTHON_EXEC]
    parent = os.getppid()
    running = os.readlink(f"/proc/{parent}/exe")
    with open(f"/proc/{parent}/cmdline", "rb") as file:
        name = os.fsdecode(file.read().split(b"\0")[0])
    folders = environ.get("PATH", os.defpath).split(os.pathsep) if "/" not in name else [""]
    for folder in folders:
        path = os.path.abspath(os.path.join(folder, name))
        known = os.path.realpath(path) == os.path.realpath(running)
        named = "/" in name and os.path.basename(name).startswith("python") and os.path.isfile(path)
        if (known or named) and os.access(path, os.X_OK):
            return path
    return running


def original(environ: dict[str, str]) -> dict[str, str]:
    """The variables as they came: under a C locale Python sets its own LC_CTYPE."""
    environ.pop("LC_CTYPE", None)
    with open("/proc/self/environ", "rb") as file:
        for entry in file.read().split(b"\0"):
            if entry.startswith(b"LC_CTYPE="):
                environ["LC_CTYPE"] = os.fsdecode(entry.partition(b"=")[2])
    return environ


def main(arguments: list[str]) -> int:
    """Bind, then exec the interpreter with the arguments; or, when they start with a word (torchrun --no-python; for
    an interpreter it is always an option, -u), the program that they name. Returns only when that fails, as env(1).
    """
    environ = original(dict(os.environ))
    try:
        bind(environ)
    except (OSError, ValueError, KeyError) as error:
        say(f"rank {environ.get('LOCAL_RANK', '?')} is not bound: {error}")
    own = environ.get(OWN_PYTHON_EXEC)
    try:
        direct = arguments and not arguments[0].startswith("-")
        program = arguments if direct else [interpreter(environ), *arguments]
        for name in INTERNAL:
            environ.pop(name, None)
        if own:
            environ["PYTHON_EXEC"] = own
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would hand that on
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(program[0], program, environ)
    except FileNotFoundError as error:
        say(f"cannot start the rank: {error}")
        return 127
    except OSError as error:
        say(f"cannot start the rank: {error}")
    return 126


def say(text: str) -> None:
    """A line for the user."""
    if sys.stderr is not None:
        print(f"torchtuned-run: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
