"""Disks that fill up or are busy with themselves, and caches in the wrong place."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator

from torchtuned.checks.registry import Machine, Seen, Unseen, rule
from torchtuned.errors import Missing
from torchtuned.findings import Action, Severity
from torchtuned.mounts import mount_of, mounts
from torchtuned.wording import size

PLACES = ("/", "/home", "/tmp", "/var/tmp")
SHARE, LEAST = 0.05, 10 << 30  # a checkpoint of a 7B model with its optimizer is 80 GB; 10 GiB is too little for any
LEAST_FILES = 100_000


@rule(
    "TT032",
    "a file system is nearly full",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="the next checkpoint or log line fails, and with it the job",
    source="pytorch/pytorch#10577",
)
def nearly_full(machine: Machine) -> Iterator[Seen | Unseen]:
    """Less than 5 % and less than 10 GiB left where jobs write: /, /home, /tmp, /var/tmp and the folder of --data; or
    hardly any inodes, which many small files use up first. What is mounted read-only is always full, and fine."""
    table = mounts(machine.host, "self") if machine.host.exists("/proc/self/mountinfo") else []
    told = set()
    for place in dict.fromkeys([*PLACES, *([machine.data] if machine.data else [])]):
        try:
            space = machine.host.space(place)
        except Missing:
            continue
        mount = mount_of(table, os.path.realpath(place) if machine.host.real else place)
        on = mount.device if mount else place
        if on in told or not space.total or (mount and mount.read_only):
            continue
        told.add(on)
        folder = shlex.quote(place)
        if space.free < SHARE * space.total and space.free < LEAST:
            yield Seen(
                evidence=f"{place}: {size(space.free)} of {size(space.total)} left",
                fix=f"sudo du -xh --max-depth=2 {folder} | sort -h | tail; old checkpoints, core dumps and caches",
            )
        elif space.files_free < min(SHARE * space.files, LEAST_FILES):
            yield Seen(
                title="a file system has hardly any inodes left",
                evidence=f"{place}: {space.files_free} of {space.files} inodes left",
                fix=f"sudo du -x --inodes --max-depth=2 {folder} | sort -n | tail; pack small files into shards (tar)",
            )


@rule(
    "TT033",
    "a RAID checks or rebuilds itself",
    severity=Severity.NOTICE,
    action=Action.ASK,
    cost="data comes slower while it lasts (12 h for 2 TB in one report)",
    source="serverfault.com/questions/199096",
)
def raid(machine: Machine) -> Iterator[Seen | Unseen]:
    """sync_action of MD arrays; Debian starts a check on the first Sunday of each month. Also an array that misses a
    disk."""
    for device in machine.host.list("/sys/block"):
        folder = f"/sys/block/{device}/md"
        action = machine.text(f"{folder}/sync_action")
        if action not in ("", "idle", "frozen"):
            yield Seen(
                title=f"a RAID is in {action}",
                evidence=f"{folder}/sync_action is {action},"
                f" {machine.text(folder + '/sync_completed') or '?'} sectors done",
                fix=f"slower: echo 20000 | sudo tee {folder}/sync_speed_max"
                + (f"; stop until next month: echo idle | sudo tee {folder}/sync_action" if action == "check" else ""),
            )
        if (missing := machine.number(f"{folder}/degraded") or 0) > 0:
            yield Seen(
                title="a RAID misses a disk",
                severity=Severity.ERROR,
                cost="the next failing disk takes the data with it; reads may be slower",
                evidence=f"{folder}/degraded is {missing}",
                fix=f"sudo mdadm --detail /dev/{device}; replace the disk",
            )


@rule(
    "TT034",
    "compiled kernels are cached in memory",
    severity=Severity.NOTICE,
    action=Action.JOB,
    cost="compiled again after each reboot or clean-up, and the cache counts as memory; unmeasured",
    source="pytorch/pytorch#121122",
)
def compile_cache(machine: Machine) -> Iterator[Seen | Unseen]:
    """torch.compile keeps its results under /tmp, which is memory on Debian 13 and cleaned after ten days. A finding
    where such a cache is."""
    caches = [name for name in machine.host.list("/tmp") if re.match(r"torchinductor_|triton", name)]
    if not caches:
        return
    mount = mount_of(mounts(machine.host, "self" if machine.caller else "1"), "/tmp")
    if mount is not None and mount.kind == "tmpfs":
        yield Seen(
            evidence=f"/tmp is a tmpfs and holds {', '.join(caches[:3])}",
            fix="torchtuned-run --env-profile compile, or: export TORCHINDUCTOR_CACHE_DIR=~/.cache/torchinductor",
        )
