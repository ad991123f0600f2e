"""Breaks the daemon in the machine over and over, and looks after each time whether all is as it should be.

usage: python3 tally.py SCENARIO COUNT SEED       (as root; jobs that run at the start must run through all of it)

It runs in the machine, because a round trip to the host costs more than most moments do. After each moment it waits,
without touching anything, until the state is ready, verify is clean, every job runs on exactly the CPUs it was granted
(by the kernel's masks), and there is no grant, lease or scope without its process. At the end all is undone, the
originals are compared, and the policy is set again. Prints {"moments", "failed": [...], "seconds", "notes": {...}}.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtuned import errors
from torchtuned.client import MANAGER, ROOT, Client
from torchtuned.cpuset import parse_list

PATIENCE_S = 60.0
FINE = {"applied", "kept", "unsupported"}
SERVICE = "/sys/fs/cgroup/system.slice/torchtuned.service"
HERE = Path(__file__).parent
CPUFREQ = "/sys/devices/system/cpu/cpufreq"


def text(path: str | Path) -> str:
    """A file, stripped; "" when it is not there."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def tree(pid: int) -> set[int]:
    """A process and all below it."""
    found = {pid}
    for child in text(f"/proc/{pid}/task/{pid}/children").split():
        found |= tree(int(child))
    return found


def masks(pid: int) -> set[str]:
    """The CPU lists of a process's threads."""
    found = (text(path) for path in glob.glob(f"/proc/{pid}/task/*/status"))
    return {line.split()[1] for status in found for line in status.splitlines() if line.startswith("Cpus_allowed_list")}


def daemon() -> int:
    """The daemon's process, 0 while there is none."""
    return int((text(f"{SERVICE}/cgroup.procs").split() or ["0"])[0])


def daemon_state() -> str:
    """Of the daemon, "" while it does not answer."""
    with contextlib.suppress(errors.TorchtunedError), Client(timeout_s=20) as client:
        return str(client.properties(ROOT, MANAGER)["State"])
    return ""


def amiss(expected: set[int]) -> list[str]:
    """What is not as it should be with these jobs (processes), and no others, running."""
    if not daemon():
        return ["there is no daemon"]
    found: list[str] = []
    with Client(timeout_s=20) as client:
        manager = client.properties(ROOT, MANAGER)
        if manager["State"] != "ready":
            found.append(f"the state is {manager['State']}: {manager['Degraded']}")
        rows = client.call(ROOT, MANAGER, "Verify")[0]
        assert isinstance(rows, list)
        found += [f"verify: {row[0]} {row[3]}: {row[4]}" for row in rows if row[3] not in FINE]
        objects = client.objects()
    jobs = {path: o["org.torchtuned1.Job"] for path, o in objects.items() if "org.torchtuned1.Job" in o}
    gpus = [o["org.torchtuned1.Gpu"] for o in objects.values() if "org.torchtuned1.Gpu" in o]
    pids = {int(str(job["Pid"])) for job in jobs.values()}
    if pids != expected:
        found.append(f"jobs are of {sorted(pids)}, and {sorted(expected)} run")
    taken: Counter[int] = Counter()
    for job in jobs.values():
        if job["State"] != "running":
            found.append(f"job {job['Id']} is {job['State']}")
            continue
        cpus = parse_list(str(job["Cpus"]))
        taken.update(cpus)
        for mask in masks(int(str(job["Pid"]))):
            if parse_list(mask) != cpus:
                found.append(f"job {job['Id']} was granted {job['Cpus']} and runs on {mask}")
    found += [f"CPU {cpu} was granted {times} times" for cpu, times in taken.items() if times > 1]
    ours = set().union(*(tree(pid) for pid in expected)) if expected else set()
    for scope in glob.glob("/sys/fs/cgroup/**/torchtuned-job-*.scope", recursive=True):
        inside = {int(pid) for pid in text(f"{scope}/cgroup.procs").split()}
        if not inside & ours:
            found.append(f"{scope} is stale, with {sorted(inside)}")
    found += [f"GPU {gpu['Address']} is lent to {gpu['Job']}" for gpu in gpus if gpu["Job"] not in ("/", *jobs)]
    return found


def values() -> dict[str, str]:
    """What the policy touches, by the kernel."""
    found = {path: text(path) for path in glob.glob(f"{CPUFREQ}/policy*/scaling_governor")}
    return found | {f"sysctl {key}": text(f"/proc/sys/{key}") for key in ("vm/swappiness", "net/core/somaxconn")}


class Session:
    """A login session of alice that starts jobs when told to: this file's own `session`, over ssh."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            ["ssh", "alice@localhost", f"exec python3 -B {__file__} session"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def start(self) -> int:
        """Start torchtuned-run in the session; returns its process at once."""
        return int(self._ask("start"))

    def end(self, pid: int) -> str:
        """Kill it and wait for its end; what it had said."""
        return self._ask(f"end {pid}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _ask(self, words: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def session() -> None:
    """In alice's session: fork with the wrapper loaded, so that a job's start is its calls and nothing else."""
    from torchtuned.run import foresee, main, rlimits, selfplace, setup  # noqa: F401

    print("ready", flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "end":
            pid = int(rest[0])
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            said = Path(f"/tmp/tally-{pid}")
            print(" ".join(said.read_text().split()), flush=True)
            said.unlink()
            continue
        pid = os.fork()
        if not pid:
            err = os.open(f"/tmp/tally-{os.getpid()}", os.O_WRONLY | os.O_CREAT, 0o600)
            for fd, wanted in ((os.open(os.devnull, os.O_RDWR), (0, 1)), (err, (2,))):
                for number in wanted:
                    os.dup2(fd, number)
            sys.argv = ["torchtuned-run", "--gpus=none", "--cpus=1", "sleep", "1000"]
            os._exit(main.main())
        print(pid, flush=True)


class Tally:
    """The moments of one scenario, and what was amiss after each."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.jobs = self._running()
        self.moments, self.notes = 0, Counter[str]()
        self.failed: list[str] = []
        self.slowest = 0.0

    def _running(self) -> set[int]:
        with Client(timeout_s=20) as client:
            objects = client.objects()
        return {int(str(o["org.torchtuned1.Job"]["Pid"])) for o in objects.values() if "org.torchtuned1.Job" in o}

    def settle(self, what: str, *more: int, moment: bool = True) -> None:
        """Wait until nothing is amiss, or for good."""
        start = time.monotonic()
        while True:
            try:
                found = amiss(self.jobs | set(more))
            except errors.TorchtunedError as e:
                found = [str(e)]
            took = time.monotonic() - start
            if not found or took > PATIENCE_S:
                break
            time.sleep(0.2)
        self.moments += moment
        self.slowest = max(self.slowest, took)
        self.failed += [f"{what}: {line}" for line in found]

    def undo(self, originals: dict[str, str]) -> None:
        """All is given back, and set again."""
        with Client(timeout_s=60) as client:
            client.call(ROOT, MANAGER, "Undo", "as", [])
            now = values()
            self.failed += [f"after undo {key} is {now[key]}, was {v}" for key, v in originals.items() if now[key] != v]
            client.call(ROOT, MANAGER, "Apply")
        self.settle("apply after undo", moment=False)


def call(member: str, signature: str = "", *arguments: object) -> None:
    """One call whose answer may not come."""
    with contextlib.suppress(errors.TorchtunedError), Client(timeout_s=30) as client:
        client.call(ROOT, MANAGER, member, signature, *arguments)


def begun(pid: int) -> bool:
    """Whether torchtuned-run has become its command."""
    return text(f"/proc/{pid}/comm") == "sleep"


def kills(tally: Tally, count: int) -> None:
    """SIGKILL at random moments of apply, undo, register and commit."""
    alice = Session()
    actions = {"apply": lambda: call("Apply"), "undo": lambda: call("Undo", "as", [])}
    lasts = {}
    for name in ("undo", "apply"):
        start = time.monotonic()
        actions[name]()
        lasts[name] = time.monotonic() - start
    start, pid = time.monotonic(), alice.start()
    while not begun(pid) and time.monotonic() < start + 30:
        time.sleep(0.005)
    lasts["run"] = time.monotonic() - start
    alice.end(pid)
    tally.settle("a job before", moment=False)
    for number in range(count):
        action = tally.dice.choice(("apply", "undo", "run", "run"))
        pid, thread = 0, None
        if action == "run":
            pid = alice.start()
        else:
            thread = threading.Thread(target=actions[action])
            thread.start()
        time.sleep(tally.dice.uniform(0, lasts[action]))
        os.kill(daemon(), signal.SIGKILL)
        at = action
        if pid:
            table = json.loads(text("/run/torchtuned/jobs.json") or '{"jobs": []}')["jobs"]
            state = next((job["state"] for job in table if job["pid"] == pid), "")
            at = {"": "register", "granted": "commit", "running": "just committed"}[state]
        tally.notes[f"in {at}"] += 1
        if thread is not None:
            thread.join()
        what = f"{number}, killed in {at}"
        if pid:
            deadline = time.monotonic() + PATIENCE_S
            while not begun(pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            tally.settle(what, pid)
            tally.failed += [] if begun(pid) else [f"{what}: the job does not run"]
            said = alice.end(pid)
            tally.notes[f"placed without it: {said[:60]}"] += "placed without" in said
            tally.settle(f"{what}, and the job's end", moment=False)
        else:
            tally.settle(what)
    alice.close()


def bus(tally: Tally, count: int) -> None:
    """The bus dies under everybody."""
    for number in range(count):
        old = daemon()
        subprocess.run(["systemctl", "kill", "-s", "KILL", "dbus.service"], check=True)
        wait_until(lambda old=old: daemon() not in (0, old), f"{number}: no new daemon", tally)  # type: ignore[misc]
        tally.settle(f"bus killed, {number}")


def wait_until(condition: Callable[[], bool], otherwise: str, tally: Tally) -> None:
    """Wait for a condition, for as long as for everything."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            tally.failed.append(otherwise)
            return
        time.sleep(0.1)


def full(tally: Tally, count: int) -> None:
    """Not a byte is free in /run while it applies, a job comes, and the daemon is killed."""
    alice = Session()
    for number in range(count):
        with open("/run/filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
        with open("/run/filler", "ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(512))
        call("Undo", "as", [])
        call("Apply")
        pid = alice.start()
        wait_until(lambda pid=pid: begun(pid), f"{number}: no job while /run is full", tally)  # type: ignore[misc]
        old = daemon()
        os.kill(old, signal.SIGKILL)
        wait_until(lambda old=old: daemon() not in (0, old), f"{number}: no daemon while full", tally)  # type: ignore[misc]
        wait_until(lambda: daemon_state() in ("ready", "degraded"), f"{number}: nothing applied while full", tally)
        tally.notes[f"{daemon_state() or 'no answer'} while full"] += 1
        said = alice.end(pid)
        tally.notes["a job came all the same" if "placed without" in said else "a job was recorded"] += 1
        os.unlink("/run/filler")
        tally.settle(f"/run full, {number}")
    alice.close()


def storm(tally: Tally, count: int) -> None:
    """CPUs go and come faster than anybody follows."""
    cpus = [int(path.rsplit("cpu", 1)[1]) for path in glob.glob("/sys/devices/system/cpu/cpu[1-9]")]
    for number in range(count):
        for _ in range(12):
            cpu = tally.dice.choice(cpus)
            with contextlib.suppress(OSError):
                Path(f"/sys/devices/system/cpu/cpu{cpu}/online").write_text(str(tally.dice.randint(0, 1)))
                tally.notes["written"] += 1
            time.sleep(tally.dice.choice((0, 0.05, 0.3)))
        for cpu in cpus:
            Path(f"/sys/devices/system/cpu/cpu{cpu}/online").write_text("1")
        tally.settle(f"CPU storm {number}")


def dpkg(tally: Tally, count: int) -> None:
    """Upgrade with jobs running, removal and installation again."""
    install = ["dpkg", "--install"]
    for number in range(count):
        for what, words in (
            ("an older one", [*install, str(HERE / "older.deb")]),
            ("upgrade", [*install, str(HERE / "torchtuned.deb")]),
            ("removal", ["dpkg", "--remove", "torchtuned"]),
            ("installed again", [*install, str(HERE / "torchtuned.deb")]),
        ):
            done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C.UTF-8"})
            if done.returncode:
                tally.failed.append(f"{what}: {done.stdout[-300:]}{done.stderr[-300:]}")
            if what == "removal":
                now = values()
                wrong = [key for key, value in ORIGINALS.items() if now[key] != value]
                tally.failed += [f"removal left {key} at {now[key]}" for key in wrong]
                tally.moments += 1
            else:
                tally.settle(f"{what}, {number}")


def purge(tally: Tally, count: int) -> None:
    """Purged, without jobs, and installed again."""
    for number in range(count):
        for words in (["dpkg", "--purge", "torchtuned"], ["dpkg", "--install", str(HERE / "torchtuned.deb")]):
            done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C.UTF-8"})
            if done.returncode:
                tally.failed.append(f"{words[1]}: {done.stdout[-300:]}{done.stderr[-300:]}")
            if words[1] == "--purge":
                left = [path for place in ("/run", "/var/lib", "/etc") for path in glob.glob(f"{place}/torchtuned*")]
                now = values()
                tally.failed += [f"purge left {path}" for path in left]
                tally.failed += [f"purge left {key}" for key, value in ORIGINALS.items() if now[key] != value]
        tally.settle(f"purge {number}")


def look(tally: Tally, count: int) -> None:
    """What the host did to the machine: only look."""
    tally.settle("as it is")


SCENARIOS: dict[str, Callable[[Tally, int], None]] = {
    **{"kills": kills, "bus": bus, "full": full, "storm": storm, "dpkg": dpkg, "purge": purge, "look": look},
}
ORIGINALS: dict[str, str] = {}


def main() -> None:
    name, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    start = time.monotonic()
    tally = Tally(seed)
    call("Undo", "as", [])
    ORIGINALS.update(values())
    call("Apply")
    tally.settle("before", moment=False)
    SCENARIOS[name](tally, count)
    tally.undo(ORIGINALS)
    answer: dict[str, Any] = {
        "moments": tally.moments,
        "failed": tally.failed,
        "seconds": round(time.monotonic() - start, 1),
        "slowest_s": round(tally.slowest, 1),
        "jobs": len(tally.jobs),
        "notes": dict(+tally.notes),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    session() if sys.argv[1] == "session" else main()
