"""Memory: shared memory, mappings, overcommit, huge pages, pressure, kills, NUMA settings of the kernel."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from torchtuned.checks.files import amount, memory, unit_runs
from torchtuned.checks.registry import UNMEASURED, Machine, Seen, Unseen, rule
from torchtuned.cpulimits import folders
from torchtuned.errors import HostError, Missing
from torchtuned.findings import MEMORY, Action, Severity, about_job
from torchtuned.mounts import mount_of, mounts
from torchtuned.wording import size

SHM = "/dev/shm"
SHM_LEAST = 1 << 30
MAPS_LEAST = 262144
VM = "/proc/sys/vm"
THP = "/sys/kernel/mm/transparent_hugepage"
STALL = 5.0  # per cent of the last minute in which all tasks waited for memory
USERS = ("/sys/fs/cgroup/user.slice", "/sys/fs/cgroup/memory/user.slice")


def loader_need(*, workers: int, prefetch: int, batch_bytes: int) -> int:
    """Shared memory that DataLoader workers fill with batches that wait, in bytes."""
    return workers * prefetch * batch_bytes


@rule(
    "TT022",
    "/dev/shm is small",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="DataLoader workers die with 'Bus error', NCCL fails to start",
    source="pytorch/pytorch#5040",
    jobs=True,
)
def shared_memory(machine: Machine) -> Iterator[Seen | Unseen]:
    """The size of /dev/shm where the job sees it, and what is left of it. Workers hand batches over in it: eight of
    them with two batches of 64 images of 3x224x224 float32 each take 588 MiB. Containers have 64 MiB unless told."""
    viewers = [("self" if machine.caller else "1", "")] + [(str(one.pid), one.id) for one in machine.jobs]
    seen: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for process, viewer in viewers:
        try:
            mount = mount_of(mounts(machine.host, process), SHM)
        except Missing:
            if process in ("self", "1"):
                raise
            continue  # the job ended meanwhile
        if mount is None or mount.point != SHM:
            yield Unseen(f"nothing is mounted on {SHM}")
            continue
        total = amount(mount.option("size")) or memory(machine)["MemTotal"] // 2
        seen.setdefault((mount.device, total), []).append((process, viewer))
    for (_, total), ((process, job), *others) in seen.items():
        about = tuple(about_job(one) for one in (job, *(other for _, other in others)) if one)
        yield from _judge_shm(machine, total, process if job else "", job, about)


def _judge_shm(
    machine: Machine, total: int, process: str, job: str, about: tuple[str, ...]
) -> Iterator[Seen | Unseen]:
    """`process`: whose /dev/shm it is where it is not the host's; then nobody else's says how full it is."""
    need = loader_need(workers=8, prefetch=2, batch_bytes=64 * 3 * 224 * 224 * 4)
    wanted = size(max(8 << 30, memory(machine)["MemTotal"] // 2)).replace(" GiB", "G").replace(" ", "")
    fix = "" if process else f"sudo mount -o remount,size=50% {SHM}; in a container: "
    fix += f"docker run --shm-size={wanted} or --ipc=host"
    place = f"/proc/{process}/root{SHM}" if process else SHM
    if total < SHM_LEAST:
        yield Seen(
            evidence=f"{place} holds {size(total)}; 8 workers with 2 batches of 64x3x224x224 float32 each take"
            f" {size(need)}",
            fix=fix,
            severity=Severity.ERROR if total < need else None,
            job=job,
            about=about,
        )
        return
    try:
        free = machine.host.space(place).free
    except Missing:
        return  # the job ended meanwhile, or a folder that does not say
    except HostError as error:
        yield Unseen(str(error))
        return
    if free < SHM_LEAST and free < total // 10:
        yield Seen(
            title="/dev/shm is nearly full",
            evidence=f"{place} has {size(free)} of {size(total)} left",
            fix=f"ls -lS {place} shows what takes it (TT023: what nobody uses any more); {fix}",
            job=job,
            about=about,
        )


@rule(
    "TT023",
    "crashed jobs left shared memory behind",
    severity=Severity.NOTICE,
    action=Action.ASK,
    cost="memory that nobody can use until it is removed",
    source="pytorch/pytorch#16979",
)
def orphans(machine: Machine) -> Iterator[Seen | Unseen]:
    """Files of PyTorch and NCCL in /dev/shm that no process has mapped and whose maker has ended. A file passed on to
    another process stays in use after its maker's end, so all maps have to be readable to tell."""
    names = [name for name in machine.host.list(SHM) if name.startswith(("torch_", "nccl-"))]
    alive = {f"torch_{pid}_" for pid in machine.parents}
    names = [name for name in names if not name.startswith(tuple(alive)) or not alive]
    if not names:
        return
    used, hidden = set(), 0
    for pid in machine.parents:
        try:
            used |= set(re.findall(r"/dev/shm/(\S+)", machine.text(f"/proc/{pid}/maps")))
        except HostError:
            hidden += 1
    left = [name for name in names if name not in used]
    if not left:
        return
    if hidden:
        yield Unseen(f"{len(left)} files in {SHM} may be left over; {hidden} processes' maps are other users': sudo")
        return
    total = sum(machine.host.stat(f"{SHM}/{name}").st_size for name in left)
    yield Seen(
        evidence=f"{SHM}: {len(left)} files with {size(total)}, mapped by no process: {', '.join(left[:3])}"
        + ("…" if len(left) > 3 else ""),
        fix=shlex.join(["sudo", "rm", "--", *(f"{SHM}/{name}" for name in left[:20])])
        + (" …" if len(left) > 20 else ""),
    )


@rule(
    "TT024",
    "few memory mappings are allowed",
    severity=Severity.NOTICE,
    action=Action.AUTO,
    cost="'cannot allocate memory' with memory free, once a process has that many mappings",
    source="pytorch/pytorch#60626",
    jobs=True,
)
def mappings(machine: Machine) -> Iterator[Seen | Unseen]:
    """vm.max_map_count bounds the mappings of a process: one for each shared tensor and each CUDA allocation. Debian 13
    has 1048576, older kernels 65530. It is never lowered."""
    most = machine.host.read_int(f"{VM}/max_map_count")
    fix = "vm.max_map_count = >=1048576 under [sysctl] (profile training does it), or:"
    fix += " sudo sysctl -w vm.max_map_count=1048576"
    if most < MAPS_LEAST:
        yield Seen(evidence=f"{VM}/max_map_count is {most}", fix=fix)
    for pid, job in machine.workers():
        try:
            count = machine.text(f"/proc/{pid}/maps").count("\n") + 1
        except HostError as error:
            yield Unseen(str(error))
            continue
        if count >= 0.8 * most:
            yield Seen(
                title="a job is near the limit of memory mappings",
                severity=Severity.WARNING,
                evidence=f"/proc/{pid}/maps has {count} lines, vm.max_map_count is {most}",
                fix=fix,
                job=job,
            )


@rule(
    "TT025",
    "the kernel refuses to promise more memory than there is",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="fork of DataLoader workers and pinned memory fail with 'cannot allocate memory' while memory is free",
    source="pytorch/pytorch#87861",
)
def overcommit(machine: Machine) -> Iterator[Seen | Unseen]:
    """vm.overcommit_memory = 2 counts every private mapping in full; a CUDA process maps far more than it uses."""
    if machine.host.read_int(f"{VM}/overcommit_memory") == 2:
        facts = memory(machine)
        yield Seen(
            evidence=f"{VM}/overcommit_memory is 2; promised {size(facts.get('Committed_AS', 0))} of"
            f" {size(facts.get('CommitLimit', 0))}",
            fix="echo 'vm.overcommit_memory = 0' | sudo tee /etc/sysctl.d/90-overcommit.conf;"
            " sudo sysctl -p /etc/sysctl.d/90-overcommit.conf  # unless somebody wants it",
        )


@rule(
    "TT026",
    "huge pages are switched off, or bought with stalls",
    severity=Severity.NOTICE,
    action=Action.ASK,
    cost="+15 % for one CPU-bound program, none known for GPU training; it harms under memory pressure",
    source="huggingface/candle#2149, ikawrakow/ik_llama.cpp#1",
)
def huge_pages(machine: Machine) -> Iterator[Seen | Unseen]:
    """Transparent huge pages: Debian's madvise lets a job ask for them and is fine, and so is always. never takes the
    choice away, and defrag = always makes every page fault wait for memory to be moved together."""
    enabled, defrag = _chosen(machine, "enabled"), _chosen(machine, "defrag")
    if enabled == "never":
        yield Seen(
            evidence=f"{THP}/enabled is never, so torchtuned-run --env-profile cpu has no effect",
            fix="transparent_hugepage = madvise under [memory] in torchtuned.conf",
            action=Action.AUTO,
        )
    if enabled != "never" and defrag == "always":
        yield Seen(
            evidence=f"{THP}/defrag is always",
            cost=UNMEASURED,
            fix="transparent_hugepage_defrag = madvise under [memory] in torchtuned.conf",
            action=Action.AUTO,
        )


def _chosen(machine: Machine, name: str) -> str:
    match = re.search(r"\[(\w+)\]", machine.text(f"{THP}/{name}"))
    return match[1] if match else ""


@rule(
    "TT027",
    "tasks wait for memory",
    severity=Severity.WARNING,
    action=Action.TELL,
    cost="everything on the host is slower while it lasts; how much is unmeasured",
    source="ultralytics/ultralytics#24065",
)
def pressure(machine: Machine) -> Iterator[Seen | Unseen]:
    """/proc/pressure/memory: the share of the last minute in which all tasks waited for memory, from swapping or from
    page cache that is thrown out and read again."""
    try:
        text = machine.host.read("/proc/pressure/memory")
    except Missing:
        yield Unseen("this kernel has no /proc/pressure (PSI)")
        return
    match = re.search(r"^full .*avg60=([\d.]+)", text, re.MULTILINE)
    if match and float(match[1]) >= STALL:
        facts = memory(machine)
        swapped = facts.get("SwapTotal", 0) - facts.get("SwapFree", 0)
        yield Seen(
            evidence=f"/proc/pressure/memory: all tasks waited {match[1]} % of the last minute; available"
            f" {size(facts['MemAvailable'])}, swapped out {size(swapped)}",
            fix="fewer DataLoader workers, smaller prefetch_factor, or less else on the host (ps --sort=-rss aux)",
            about=(MEMORY,),
        )


@rule(
    "TT028",
    "the kernel killed processes for lack of memory",
    severity=Severity.WARNING,
    action=Action.TELL,
    cost="the job ends with 'Killed' or 'DataLoader worker exited unexpectedly'",
    source="pytorch/pytorch#13246",
    jobs=True,
)
def kills(machine: Machine) -> Iterator[Seen | Unseen]:
    """oom_kill in memory.events of running jobs and of the users' slices, and in /proc/vmstat for the whole host since
    boot. Old kills stay counted until the reboot."""
    for job in machine.jobs:
        for folder in folders(machine.host, f"/proc/{job.pid}", "memory")[:1]:
            if count := _kills(machine.text(f"{folder}/memory.events")):
                yield Seen(evidence=f"{folder}/memory.events: oom_kill {count}", fix=_LESS, job=job.id)
    found = {
        name: count
        for users in USERS
        for name in machine.host.list(users)
        if name.endswith(".slice") and (count := _kills(machine.text(f"{users}/{name}/memory.events")))
    }
    total = _kills(machine.text("/proc/vmstat"))
    if total or found:
        by_user = ", ".join(f"{name} {count}" for name, count in found.items())
        yield Seen(
            severity=Severity.NOTICE,
            evidence=f"/proc/vmstat: oom_kill {total} since boot" + (f"; {by_user}" if by_user else ""),
            fix=f"journalctl -k -g 'Out of memory|oom-kill' says who and when; {_LESS}",
        )


_LESS = "fewer workers, smaller batches, no Python lists in the Dataset (they grow in every worker)"


def _kills(text: str) -> int:
    match = re.search(r"^oom_kill (\d+)", text, re.MULTILINE)
    return int(match[1]) if match else 0


@rule(
    "TT029",
    "systemd-oomd may kill jobs before memory is out",
    severity=Severity.NOTICE,
    action=Action.ASK,
    cost="a job that swaps for 20 s is killed whole, without a word in its output",
    source="systemd/systemd#35270",
)
def oomd(machine: Machine) -> Iterator[Seen | Unseen]:
    """Once systemd-oomd is installed it kills sessions of users whose tasks wait for memory half of the time."""
    if unit_runs(machine, "systemd-oomd.service"):
        yield Seen(
            evidence="systemd-oomd.service runs",
            fix="sudo systemctl disable --now systemd-oomd, or for one job:"
            " sudo systemctl set-property torchtuned-job-ID.scope ManagedOOMPreference=avoid",
            about=(MEMORY,),
        )


@rule(
    "TT030",
    "a full NUMA node is emptied before the next one is used",
    severity=Severity.WARNING,
    action=Action.AUTO,
    cost=UNMEASURED,
    source="kernel admin-guide/sysctl/vm",
)
def zone_reclaim(machine: Machine) -> Iterator[Seen | Unseen]:
    """vm.zone_reclaim_mode other than 0 throws page cache away rather than take memory of another node; loaders wait
    for it. The kernel's default is 0."""
    mode = machine.number(f"{VM}/zone_reclaim_mode")
    if mode and len(machine.topology.nodes) > 1:
        yield Seen(
            evidence=f"{VM}/zone_reclaim_mode is {mode}, with {len(machine.topology.nodes)} nodes",
            fix="vm.zone_reclaim_mode = 0 under [sysctl] (profile training does it), or:"
            " sudo sysctl -w vm.zone_reclaim_mode=0",
            about=(MEMORY,),
        )


@rule(
    "TT031",
    "automatic NUMA balancing moves memory under pinned jobs",
    severity=Severity.NOTICE,
    action=Action.JOB,
    cost="stalls of 5 to 31 ms in a serving benchmark; unmeasured for training",
    source="deepseek-ai/DeepEP#624",
    jobs=True,
)
def numa_balancing(machine: Machine) -> Iterator[Seen | Unseen]:
    """kernel.numa_balancing is a mask: any value but 0 is on. It is good for programs that nobody pins, so it is a
    finding only while a job of torchtuned's runs on a host with several nodes."""
    mode = machine.number("/proc/sys/kernel/numa_balancing")
    if mode and machine.jobs and len(machine.topology.nodes) > 1:
        yield Seen(
            evidence=f"/proc/sys/kernel/numa_balancing is {mode} while jobs run",
            fix="kernel.numa_balancing = 0 @jobs under [sysctl] (profile training does it)",
            about=(MEMORY,),
        )
