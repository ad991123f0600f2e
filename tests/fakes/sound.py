"""A machine on which nothing is wrong, for checks: two sockets, two GPUs, one user, and a job that trains."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from fakes.nvml import FakeGpus
from fakes.tree import make_tree
from torchtuned.checks import Running

A, B = FakeGpus.address(0), FakeGpus.address(1)
SCOPE = "user.slice/user-1000.slice/torchtuned-job-7.scope"
SESSION = "user.slice/user-1000.slice/session-2.scope"
CG = "sys/fs/cgroup"
CPU = "sys/devices/system/cpu"
LIB = "usr/lib/x86_64-linux-gnu"
DRIVER = "580.95.05"
JOB = Running(id="7", pid=4000, uid=1000, cpus=frozenset(range(8)), gpus=(A,), scope="torchtuned-job-7.scope")

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max core file size        0                    unlimited            bytes
Max processes             255000               255000               processes
Max open files            1024                 524288               files
Max locked memory         8388608              8388608              bytes
"""
MOUNTS = """\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
23 22 0:22 / /proc rw,nosuid - proc proc rw
24 22 0:23 / /sys rw,nosuid - sysfs sysfs rw
25 24 0:24 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate
26 22 0:25 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,size=67108864k,inode64
27 22 259:5 / /data rw,relatime shared:9 - xfs /dev/nvme1n1 rw
"""
MEMORY = """\
MemTotal:       131072000 kB
MemAvailable:   120000000 kB
SwapTotal:        8388604 kB
SwapFree:         8388604 kB
CommitLimit:     73924604 kB
Committed_AS:    10000000 kB
"""
STATUS = "Name:\tpython\nUid:\t1000\t1000\t1000\t1000\nCpus_allowed_list:\t{}\nMems_allowed_list:\t0-1\n"


def process(
    pid: str, *, parent: int = 1, cpus: str = "0-7", name: str = "python", place: str = SCOPE
) -> dict[str, str]:
    """The files of one process of the user."""
    return {
        f"proc/{pid}/stat": f"{pid} ({name}) S {parent} 1 1\n",
        f"proc/{pid}/comm": f"{name}\n",
        f"proc/{pid}/status": STATUS.format(cpus),
        f"proc/{pid}/limits": LIMITS,
        f"proc/{pid}/cgroup": f"0::/{place}\n",
        f"proc/{pid}/mountinfo": MOUNTS,
        f"proc/{pid}/environ": "HOME=/home/ann\0PATH=/usr/bin\0",
        f"proc/{pid}/maps": "7f00-7f01 r--p 00000000 00:00 0 /usr/bin/python3\n",
        f"proc/{pid}/fd/0": "-> /dev/null",
    }


def files() -> dict[str, str]:
    """The machine's files, apart from what FakeGpus writes of the GPUs."""
    tree = {
        f"{CPU}/online": "0-15\n",
        "sys/devices/system/node/online": "0-1\n",
        "sys/devices/system/node/node0/cpulist": "0-7\n",
        "sys/devices/system/node/node1/cpulist": "8-15\n",
        "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
        "sys/module/nvidia/version": f"{DRIVER}\n",
        "sys/module/nvidia_uvm/refcnt": "0\n",
        "dev/nvidia-uvm": "",
        ".torchtuned/cuinit": f"0 /{LIB}/libcuda.so.{DRIVER}\n",
        "proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}\n",
        "proc/driver/nvidia/params": "RmProfilingAdminOnly: 1\nPreserveVideoMemoryAllocations: 1\n",
        "proc/sys/kernel/osrelease": "6.12.43+deb13-amd64\n",
        "boot/vmlinuz-6.12.43+deb13-amd64": "",
        "lib/modules/6.12.43+deb13-amd64/updates/dkms/nvidia-current.ko": f"\x7fELF\0version={DRIVER}\0",
        f"{LIB}/libnvidia-ml.so.1": f"-> libnvidia-ml.so.{DRIVER}",
        f"{LIB}/libnvidia-ml.so.{DRIVER}": "",
        "var/log/dmesg": "[    0.000000] Linux version 6.12.43+deb13-amd64\n",
        "proc/sys/kernel/core_pattern": "core\n",
        "proc/sys/kernel/hostname": "trainer\n",
        "proc/sys/kernel/numa_balancing": "0\n",
        "proc/sys/vm/max_map_count": "1048576\n",
        "proc/sys/vm/overcommit_memory": "0\n",
        "proc/sys/vm/zone_reclaim_mode": "0\n",
        "proc/meminfo": MEMORY,
        "proc/vmstat": "nr_free_pages 1\noom_kill 0\n",
        "proc/filesystems": "nodev\tcgroup2\n\text4\n",
        "proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=9\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=9\n",
        "proc/interrupts": interrupts([100_000] * 16),
        f"{CG}/cgroup.controllers": "cpuset cpu io memory pids\n",
        f"{CG}/system.slice/systemd-logind.service/cgroup.procs": "500\n",
        f"{CG}/user.slice/user-1000.slice/pids.max": "84000\n",
        f"{CG}/user.slice/user-1000.slice/pids.current": "60\n",
        f"{CG}/user.slice/user-1000.slice/memory.events": "low 0\noom 0\noom_kill 0\n",
        f"{CG}/{SCOPE}/memory.events": "low 0\noom 0\noom_kill 0\n",
        f"{CG}/{SCOPE}/pids.max": "max\n",
        f"{CG}/{SESSION}/pids.max": "max\n",
        f"{CG}/{SESSION}/cpu.max": "max 100000\n",
        f"{CG}/{SESSION}/cpu.stat": "usage_usec 1\nnr_periods 0\nnr_throttled 0\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "sys/kernel/mm/transparent_hugepage/defrag": "always defer defer+madvise [madvise] never\n",
        "etc/passwd": "root:x:0:0::/root:/bin/bash\nann:x:1000:1000::/home/ann:/bin/bash\n",
        "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 trainer\n",
        "etc/systemd/logind.conf": "[Login]\n#RemoveIPC=yes\n",
        "var/lib/systemd/linger/ann": "",
        "sys/block/nvme0n1/queue/rotational": "0\n",
        "sys/block/nvme0n1/queue/read_ahead_kb": "128\n",
        "sys/block/nvme0n1/nvme0n1p2/partition": "2\n",
        "sys/block/nvme1n1/queue/rotational": "0\n",
        "sys/block/nvme1n1/queue/read_ahead_kb": "128\n",
        "sys/dev/block/259:2": "-> ../../devices/pci0000:00/nvme/nvme0/nvme0n1/nvme0n1p2",
        "sys/dev/block/259:5": "-> ../../devices/pci0000:00/nvme/nvme1/nvme1n1",
        ".torchtuned/space": f"/ {900 << 30} {500 << 30} 1000000 900000\n/data {900 << 30} {500 << 30} 0 0\n"
        f"/dev/shm {64 << 30} {60 << 30} 0 0\n",
        "data/shard-0.tar": "x" * 1000,
    }
    for policy in range(2):
        folder = f"{CPU}/cpufreq/policy{policy}"
        tree |= {
            f"{folder}/affected_cpus": f"{policy}\n",
            f"{folder}/scaling_driver": "intel_pstate\n",
            f"{folder}/scaling_governor": "powersave\n",
            f"{folder}/energy_performance_preference": "balance_performance\n",
            f"{folder}/scaling_max_freq": "3500000\n",
            f"{folder}/cpuinfo_max_freq": "3500000\n",
        }
    tree |= process("self", cpus="0-15", name="bash", place=SESSION)
    tree["proc/self/stat"] = "3000 (bash) S 1 1 1\n"
    return tree | process("4000") | process("4001", parent=4000)


def interrupts(counts: list[int], device: str = "nvme0q1") -> str:
    """/proc/interrupts with two lines of a device, which have half of the counts each."""
    cpus = " ".join(f"CPU{cpu}" for cpu in range(len(counts)))
    half = " ".join(str(count // 2) for count in counts)
    lines = "".join(f" {number}: {half} IR-PCI-MSI 524288-edge {device}\n" for number in (42, 43))
    return f"      {cpus}\n{lines} LOC: 5 5 Local timer\n"


def build(folder: Path, changes: Mapping[str, str | bytes | None], **gpu: object) -> FakeGpus:
    """The machine with these files changed (None: taken away, with what is below) and these values of its first GPU."""
    fake = FakeGpus(folder)
    fake.set({"driver": DRIVER, "nvml": f"13.{DRIVER}", "cuda": 13000})
    for i in range(2):
        fake.gpu(i, **({"persistence": 1, "affinity": "ff"} | (gpu if i == 0 else {})))
    gone = [name for name, text in changes.items() if text is None]
    tree: dict[str, str | bytes | None] = {
        name: text
        for name, text in {**files(), **changes}.items()
        if not any(name == out or name.startswith(f"{out}/") for out in gone)
    }
    for name in [*gone, *tree]:  # what FakeGpus has written already
        path = fake.root / name
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif name in gone and path.is_dir():
            shutil.rmtree(path)
    make_tree(fake.root, tree)
    return fake
