"""A storm: 64 clients at once register, commit and release over a thousand times, and some are killed on the way.

What must hold is proved in two ways. On a made machine of 64 CPUs the daemon's answers and its table are looked at:
whoever holds CPUs (from its grant until it gives them back) holds them alone. On this machine's own CPUs the kernel is
asked: a client moves itself as torchtuned-run does, and while it is a job the masks of all jobs are disjoint.

A client takes an exclusive lock (one per CPU) for as long as it holds a grant. A second holder finds the lock taken, so
an overlap cannot slip through between two looks. A killed client loses its locks before the daemon can know of its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from fakes.tree import machine, make_tree
from harness import REPOSITORY, Daemon, PrivateBus

from torchtuned.cpuset import parse_list

CLIENTS, KILLED, WARM = 64, 12, 8
GROWTH_MIB = 2  # over seven hundred jobs; five kilobytes kept for each would be more
PROFILE = {"usr/share/torchtuned/profiles/training.conf": "[policy]\ndescription = changes nothing\n"}
# the wrapper's own client, many times over: SEED CYCLES MOST-CPUS pin|stay FOLDER
CLIENT = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
import fcntl, json, os, random
from torchtuned import errors
from torchtuned.client import MANAGER, ROOT, Client
from torchtuned.cpuset import parse_list

seed, cycles, most = map(int, sys.argv[1:4])
pin, folder = sys.argv[4] == "pin", sys.argv[5]
dice = random.Random(seed)
whole = os.sched_getaffinity(0)

def hold(cpus):
    files = [os.open(f"{{folder}}/{{cpu}}", os.O_RDWR) for cpu in sorted(cpus)]
    for file in files:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # taken: two have the same CPU
    return files

def register(bus, wait):
    request = json.dumps({{"schema": 1, "cpus": str(dice.randint(1, most)), "wait": wait}})
    me = os.pidfd_open(os.getpid())
    try:
        job, text = bus.call(ROOT, MANAGER, "Register", "hs", me, request)
    finally:
        os.close(me)
    return job, json.loads(text)

def cycle(bus):
    try:
        job, grant = register(bus, None if dice.random() < 0.2 else 0)
    except errors.Busy:
        job, grant = register(bus, 0)
    while grant["state"] == "queued":
        came = bus.wait_signal("Granted", 60)
        assert came is not None, "no place came"
        if came[0] == job:
            grant = json.loads(came[1])
    mine = parse_list(grant["cpus"])
    held = [] if grant["shared"] else hold(mine)
    if pin:
        os.sched_setaffinity(0, mine)
    committed = json.loads(bus.call(ROOT, MANAGER, "Commit", "o", job)[0])
    assert (committed["state"], committed["cpus"]) == ("running", grant["cpus"]), committed
    if pin:
        assert os.sched_getaffinity(0) == mine
        os.sched_setaffinity(0, whole)
    for file in held:
        os.close(file)
    bus.call(ROOT, MANAGER, "Release", "o", job)

with Client(timeout_s=50) as bus:
    bus.watch("Granted")
    for number in range(cycles):
        cycle(bus)
        print(number, flush=True)
"""


class Storm:
    """Clients at work, until each has done its cycles; `killed` of them fall before, when a seed decides."""

    def __init__(self, bus: PrivateBus, *, cycles: int, most: int, pin: bool, killed: int = 0) -> None:
        self.dice, self.total, self.killed = random.Random(cycles), CLIENTS * cycles, killed
        self.folder = Path(tempfile.mkdtemp(dir=bus.folder))
        for cpu in range(64):
            (self.folder / str(cpu)).touch()
        (self.folder / "client.py").write_text(CLIENT)
        words = ["/usr/bin/python3", "-I", str(self.folder / "client.py")]
        how = [str(cycles), str(most), "pin" if pin else "stay", str(self.folder)]
        self.clients = []
        for seed in range(CLIENTS):
            with (self.folder / f"out-{seed}").open("w") as out, (self.folder / f"err-{seed}").open("w") as err:
                self.clients.append(
                    subprocess.Popen([*words, str(seed), *how], env=bus.environment, stdout=out, stderr=err)
                )

    def cycles(self) -> int:
        return sum(path.read_text().count("\n") for path in self.folder.glob("out-*"))

    def play(self, look: Callable[[], None]) -> int:
        """To the end, calling `look` all the time; the number of whole cycles."""
        victims = dict(enumerate(self.dice.sample(range(CLIENTS), self.killed)))
        moments = sorted(self.dice.randrange(CLIENTS, self.total * 2 // 3) for _ in victims)
        fallen: list[int] = []
        try:
            while any(client.poll() is None for client in self.clients):
                look()
                done = self.cycles()
                while len(fallen) < self.killed and moments[len(fallen)] <= done:
                    victim = victims[len(fallen)]
                    self.clients[victim].kill()
                    fallen.append(victim)
                time.sleep(0.05)
        finally:
            for client in self.clients:
                client.kill()
                client.wait()
        assert len(fallen) == self.killed
        for number, client in enumerate(self.clients):
            said = (self.folder / f"err-{number}").read_text()
            assert not said, said
            assert client.returncode == 0 or (number in fallen and client.returncode == -signal.SIGKILL)
        return self.cycles()


def exclusive_grants(one: Daemon) -> list[frozenset[int]]:
    """What the daemon's table says at this moment; the file is replaced as a whole."""
    document = json.loads((one.run_dir / "jobs.json").read_text())
    grants = [job["grant"] for job in document["jobs"] if job.get("grant")]
    return [parse_list(grant["cpus"]) for grant in grants if not grant["shared"]]


def _targets(folder: Path) -> Iterator[str]:
    """Where a process's descriptors lead; one may be closed while they are read."""
    for link in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(link)


def settled(bus: PrivateBus, one: Daemon, most: int = 1 << 20) -> tuple[list[str], int]:
    """(descriptors, resident MiB) of the daemon, once it has noticed the last end, has written its reports, which lag
    behind in a storm, and holds at most so many descriptors.
    """
    end, quiet_since, before = time.monotonic() + 40, time.monotonic(), frozenset[str]()
    folder = Path(f"/proc/{one.process.pid}/fd")
    while True:
        jobs = [path for path in bus.managed() if "/jobs/" in path]
        files = sorted(_targets(folder))
        reports = frozenset(os.listdir(one.state_dir / "reports"))
        now = time.monotonic()
        if jobs or len(files) > most or reports != before:
            quiet_since, before = now, reports
        if now > quiet_since + 2 or now > end:
            break
        time.sleep(0.1)
    assert not jobs
    assert json.loads((one.run_dir / "jobs.json").read_text())["jobs"] == []
    return files, psutil.Process(one.process.pid).memory_info().rss >> 20


def look_at(one: Daemon, at_once: list[int]) -> Callable[[], None]:
    """A look at the daemon's table, which also notes how many jobs have CPUs of their own."""

    def look() -> None:
        grants = exclusive_grants(one)
        assert sum(map(len, grants)) == len(frozenset().union(*grants)), "CPUs were granted twice"
        at_once.append(len(grants))

    return look


def test_sixty_four_clients_on_sixty_four_cpus(bus: PrivateBus, daemon: Callable[..., Daemon]) -> None:
    files = machine(cores=[str(cpu) for cpu in range(64)], nodes={0: "0-31", 1: "32-63"})
    one = daemon("--sysroot", make_tree(bus.folder / "machine", {**files, **PROFILE}))
    at_once = [0]
    first = Storm(bus, cycles=WARM, most=8, pin=False).play(look_at(one, at_once))  # the daemon takes what it keeps
    kept, resident = settled(bus, one)
    second = Storm(bus, cycles=19 - WARM, most=8, pin=False, killed=KILLED).play(look_at(one, at_once))
    kept_after, resident_after = settled(bus, one, len(kept))
    assert first + second >= 1000
    assert max(at_once) > 2
    assert len(kept_after) <= len(kept), (kept, kept_after)
    assert resident_after <= resident + GROWTH_MIB


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="masks can only be told apart on two CPUs")
def test_the_kernels_masks_of_sixty_four_clients(bus: PrivateBus, daemon: Callable[..., Daemon]) -> None:
    here: dict[str, str | bytes | None] = {"sys": "-> /sys", "proc": "-> /proc", "dev": "-> /dev"}
    one = daemon("--sysroot", make_tree(bus.folder / "here", {**here, **PROFILE}))
    at_once = [0]
    done = Storm(bus, cycles=4, most=1, pin=True, killed=KILLED).play(look_at(one, at_once))
    settled(bus, one)
    assert done > CLIENTS
    assert max(at_once) > 1
