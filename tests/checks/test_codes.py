"""Every code of the host's checks: a machine that has the fault, and its twin that nearly has it and is fine."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fakes import nvml
from fakes.nvml import GIB
from fakes.sound import CG, CPU, JOB, LIMITS, MOUNTS, SCOPE, SESSION, A, build, interrupts, process

from torchtuned import checks
from torchtuned.checks import REGISTRY, Machine, Running, run_checks
from torchtuned.checks.memory import loader_need
from torchtuned.findings import Finding, Severity, Unchecked
from torchtuned.gpus import Gpus
from torchtuned.host import Host

Files = Mapping[str, str | bytes | None]
PCI = "sys/bus/pci/devices"
VM = "proc/sys/vm"
FREQ = f"{CPU}/cpufreq/policy0"
DATA = "proc/self/mountinfo"
IB = "sys/class/infiniband/mlx5_0/node_guid"
PORT = "sys/class/infiniband/mlx5_0/ports/1"
FABRIC: Files = {f"{PORT}/link_layer": "InfiniBand\n", f"{PORT}/state": "4: ACTIVE\n"}
APT = "etc/apt/apt.conf.d/50unattended-upgrades"
UPGRADES: Files = {
    "etc/apt/apt.conf.d/20auto-upgrades": 'APT::Periodic::Unattended-Upgrade "1";\n',
    "usr/lib/systemd/system/timers.target.wants/apt-daily-upgrade.timer": "-> ../apt-daily-upgrade.timer",
    "usr/lib/systemd/system/apt-daily-upgrade.timer": "[Timer]\n",
}
REBOOT = 'Unattended-Upgrade::Automatic-Reboot "true";\n'
GREETER = "etc/gdm3/greeter.dconf-defaults"
EFI = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
NO_DRIVER: Files = {"sys/module/nvidia": None, f"{PCI}/{A}/driver": None}
DOCKER: Files = {f"{CG}/system.slice/docker.service/cgroup.procs": "900\n"}
ACTIVE = f"{CG}/system.slice"
CUINIT, HMM = ".torchtuned/cuinit", "sys/module/nvidia_uvm/parameters/uvm_disable_hmm"
TMUX: Files = {**process("4100", place=SESSION), "dev/shm/torch_4100_77_0": "x"}
RANKS = {file: text for pid in ("4001", "4002", "4003") for file, text in process(pid, parent=4000, cpus="0").items()}
HOLDS: Files = {"proc/4000/fd/9": "-> /dev/nvidia0"}


@dataclass(frozen=True)
class Case:
    """`broken` and `healthy` change the sound machine. `seen` is in the evidence; `gpu` are NVML's values of GPU 0, in
    the broken machine, `fine` those in the healthy one."""

    code: str
    broken: Files
    healthy: Files
    seen: str
    jobs: tuple[Running, ...] = ()
    job: str = ""
    gpu: Mapping[str, object] = field(default_factory=dict)
    fine: Mapping[str, object] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def __str__(self) -> str:
        return f"{self.code} {self.name}".strip()


def limits(**values: str) -> str:
    text = LIMITS
    for name, value in values.items():
        lines = [
            f"Max {name.replace('_', ' '):<22}{value}" if line.startswith(f"Max {name.replace('_', ' ')}") else line
            for line in text.splitlines()
        ]
        text = "\n".join(lines) + "\n"
    return text


def idle(name: str, **numbers: int) -> dict[str, str]:
    """An idle state of each of the job's CPUs."""
    return {
        f"{CPU}/cpu{cpu}/cpuidle/state3/{what}": f"{text}\n"
        for cpu in range(8)
        for what, text in {"name": name, **numbers}.items()
    }


def mounted(line: str) -> str:
    return MOUNTS + line + "\n"


def waited(share: str) -> str:
    return f"some avg10=9 avg60=30.00 avg300=1 total=1\nfull avg10=9 avg60={share} avg300=9 total=1\n"


def spaces(*, caller: int, job: int) -> str:
    """GiB that are left in the caller's /dev/shm and in that of a job with one of its own."""
    return f"/dev/shm {64 << 30} {caller << 30} 0 0\n/proc/4000/root/dev/shm {64 << 30} {job << 30} 0 0\n"


def small_files(count: int, size: int) -> dict[str, str]:
    return {f"data/img/{i // 500}/{i}.jpg": "x" * size for i in range(count)}


CASES = (
    Case(
        "TT017",
        {"proc/self/limits": limits(open_files="1024 1024 files")},
        {"proc/self/limits": limits(open_files="1024 524288 files")},
        "open files 1024, at most 1024",
    ),
    Case(
        "TT018",
        {f"proc/4001/fd/{i}": "-> socket:[1]" for i in range(900)},
        {f"proc/4001/fd/{i}": "-> socket:[1]" for i in range(700)},
        "900 descriptors, the soft limit is 1024",
        jobs=(JOB,),
        job="7",
    ),
    Case(
        "TT019",
        {f"{CG}/{SESSION}/pids.max": "1024\n"},
        {f"{CG}/{SESSION}/pids.max": "33000\n"},
        f"/{CG}/{SESSION}/pids.max is 1024",
    ),
    Case(
        "TT019",
        {f"{CG}/{SCOPE}/pids.max": "20000\n", f"{CG}/{SCOPE}/pids.current": "19000\n"},
        {f"{CG}/{SCOPE}/pids.max": "20000\n", f"{CG}/{SCOPE}/pids.current": "900\n"},
        "19000 are in use",
        jobs=(JOB,),
        job="7",
        name="of a job",
    ),
    Case(
        "TT020",
        {IB: "1"},
        {IB: "1", "proc/self/limits": limits(locked_memory="unlimited unlimited bytes")},
        "locked memory at most 8 MiB",
    ),
    Case(
        "TT021",
        {"proc/self/limits": limits(core_file_size="unlimited unlimited bytes")},
        {
            "proc/self/limits": limits(core_file_size="unlimited unlimited bytes"),
            "proc/sys/kernel/core_pattern": "|/usr/lib/systemd/systemd-coredump %P\n",
        },
        "core_pattern is 'core'",
    ),
    Case(
        "TT022",
        {DATA: MOUNTS.replace("size=67108864k", "size=65536k")},
        {DATA: MOUNTS.replace("size=67108864k", "size=8388608k")},
        "/dev/shm holds 64 MiB",
    ),
    Case(
        "TT022",
        {"proc/4000/mountinfo": MOUNTS.replace("size=67108864k", "size=65536k").replace("0:25", "0:77")},
        {"proc/4000/mountinfo": MOUNTS.replace("0:25", "0:77")},
        "64 MiB",
        jobs=(JOB,),
        job="7",
        name="in the job's namespace",
    ),
    Case(
        "TT022",
        {".torchtuned/space": f"/dev/shm {64 << 30} {100 << 20} 0 0\n"},
        {".torchtuned/space": f"/dev/shm {64 << 30} {20 << 30} 0 0\n"},
        "100 MiB of 64 GiB left",
        name="nearly full",
    ),
    Case(
        "TT022",
        {"proc/4000/mountinfo": MOUNTS.replace("0:25", "0:77"), ".torchtuned/space": spaces(caller=60, job=0)},
        {"proc/4000/mountinfo": MOUNTS.replace("0:25", "0:77"), ".torchtuned/space": spaces(caller=60, job=50)},
        "/proc/4000/root/dev/shm has 0 bytes of 64 GiB left",
        jobs=(JOB,),
        job="7",
        name="nearly full in the job's namespace",
    ),
    Case(
        "TT022",
        {"proc/4000/mountinfo": MOUNTS.replace("0:25", "0:77"), ".torchtuned/space": spaces(caller=0, job=50)},
        {"proc/4000/mountinfo": MOUNTS.replace("0:25", "0:77"), ".torchtuned/space": spaces(caller=60, job=50)},
        "/dev/shm has 0 bytes of 64 GiB left",
        jobs=(JOB,),
        name="the caller's is not the job's",
    ),
    Case(
        "TT023",
        {"dev/shm/torch_999_77_0": "x" * 5000},
        {
            "dev/shm/torch_999_77_0": "x" * 5000,
            "dev/shm/torch_4000_1_0": "x",
            "proc/4001/maps": "7f00-7f01 rw-s 00000000 00:19 5 /dev/shm/torch_999_77_0\n",
        },
        "1 files with 4.88 KiB, mapped by no process: torch_999_77_0",
    ),
    Case("TT024", {f"{VM}/max_map_count": "65530\n"}, {f"{VM}/max_map_count": "262144\n"}, "max_map_count is 65530"),
    Case(
        "TT024",
        {f"{VM}/max_map_count": "300000\n", "proc/4001/maps": "7f00-7f01 r--p 0 0 0 x\n" * 250_000},
        {f"{VM}/max_map_count": "300000\n", "proc/4001/maps": "7f00-7f01 r--p 0 0 0 x\n" * 1000},
        "has 250000 lines",
        jobs=(JOB,),
        job="7",
        name="of a job",
    ),
    Case("TT025", {f"{VM}/overcommit_memory": "2\n"}, {f"{VM}/overcommit_memory": "1\n"}, "overcommit_memory is 2"),
    Case(
        "TT026",
        {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"},
        {"sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never\n"},
        "enabled is never",
    ),
    Case(
        "TT026",
        {"sys/kernel/mm/transparent_hugepage/defrag": "[always] defer madvise never\n"},
        {"sys/kernel/mm/transparent_hugepage/defrag": "always [defer] madvise never\n"},
        "defrag is always",
        name="defrag",
    ),
    Case(
        "TT027",
        {"proc/pressure/memory": waited("12.50")},
        {"proc/pressure/memory": waited("1.50")},
        "waited 12.50 % of the last minute",
    ),
    Case(
        "TT028",
        {"proc/vmstat": "oom_kill 3\n", f"{CG}/user.slice/user-1000.slice/memory.events": "oom_kill 2\n"},
        {"proc/vmstat": "oom_kill 0\noom_killer_disabled 1\n"},
        "oom_kill 3 since boot; user-1000.slice 2",
    ),
    Case(
        "TT028",
        {f"{CG}/{SCOPE}/memory.events": "oom 1\noom_kill 1\noom_group_kill 0\n"},
        {f"{CG}/{SCOPE}/memory.events": "oom 1\noom_kill 0\n"},
        f"{SCOPE}/memory.events: oom_kill 1",
        jobs=(JOB,),
        job="7",
        name="of a job",
    ),
    Case(
        "TT029",
        {f"{ACTIVE}/systemd-oomd.service/cgroup.procs": "9\n"},
        {"usr/lib/systemd/system/systemd-oomd.service": "[Unit]\n"},
        "systemd-oomd.service runs",
    ),
    Case(
        "TT030",
        {f"{VM}/zone_reclaim_mode": "1\n"},
        {f"{VM}/zone_reclaim_mode": "1\n", "sys/devices/system/node/node1": None},
        "zone_reclaim_mode is 1, with 2 nodes",
    ),
    Case(
        "TT031",
        {"proc/sys/kernel/numa_balancing": "2\n"},
        {"proc/sys/kernel/numa_balancing": "0\n"},
        "numa_balancing is 2",
        jobs=(JOB,),
    ),
    Case(
        "TT032",
        {".torchtuned/space": f"/ {900 << 30} {5 << 30} 100 90\n"},
        {".torchtuned/space": f"/ {900 << 30} {30 << 30} 100 90\n"},
        "/: 5 GiB of 900 GiB left",
    ),
    Case(
        "TT032",
        {".torchtuned/space": f"/ {900 << 30} {500 << 30} 1000 10\n"},
        {".torchtuned/space": f"/ {900 << 30} {500 << 30} 0 0\n"},
        "10 of 1000 inodes left",
        name="inodes",
    ),
    Case(
        "TT032",
        {".torchtuned/space": f"/ {900 << 30} {500 << 30} 200000000 50000\n"},
        {".torchtuned/space": f"/ {900 << 30} {500 << 30} 200000000 5000000\n"},
        "50000 of 200000000 inodes left",
        name="inodes of a large one",
    ),
    Case(
        "TT032",
        {".torchtuned/space": f"/data {9 << 30} 0 0 0\n"},
        {".torchtuned/space": f"/data {9 << 30} 0 0 0\n", DATA: MOUNTS.replace("xfs /dev/nvme1n1 rw", "erofs x ro")},
        "/data: 0 bytes of 9 GiB left",
        options={"data": "/data"},
        name="read-only",
    ),
    Case(
        "TT033",
        {"sys/block/md0/md/sync_action": "check\n", "sys/block/md0/md/sync_completed": "5 / 100\n"},
        {"sys/block/md0/md/sync_action": "idle\n", "sys/block/md0/md/degraded": "0\n"},
        "md0/md/sync_action is check, 5 / 100 sectors done",
    ),
    Case(
        "TT033",
        {"sys/block/md0/md/sync_action": "idle\n", "sys/block/md0/md/degraded": "1\n"},
        {"sys/block/md0/md/sync_action": "idle\n", "sys/block/md0/md/degraded": "0\n"},
        "degraded is 1",
        name="a disk is missing",
    ),
    Case(
        "TT034",
        {"tmp/torchinductor_ann/x": "1", DATA: mounted("30 22 0:40 / /tmp rw - tmpfs tmpfs rw")},
        {"tmp/torchinductor_ann/x": "1"},
        "/tmp is a tmpfs and holds torchinductor_ann",
    ),
    Case(
        "TT035",
        {
            DATA: MOUNTS.replace("259:5", "8:17"),
            "sys/dev/block/8:17": "-> ../../devices/ata1/block/sdb/sdb1",
            "sys/block/sdb/sdb1/partition": "1\n",
            "sys/block/sdb/queue/rotational": "1\n",
        },
        {},
        "/data is on sdb (turns); /sys/block/sdb/queue/rotational is 1",
        options={"data": "/data"},
    ),
    Case(
        "TT036",
        {DATA: mounted("40 22 0:50 / /data rw - nfs4 filer:/export rw,vers=4.2")},
        {DATA: mounted("40 22 0:50 / /data rw - lustre mgs@tcp:/scratch rw")},
        "/data is on /data: nfs4 from filer:/export",
        options={"data": "/data"},
    ),
    Case(
        "TT036",
        {DATA: mounted("40 22 0:50 / /data rw - fuse.s3fs s3fs rw")},
        {},
        "fuse.s3fs",
        options={"data": "/data"},
        name="FUSE",
    ),
    Case(
        "TT037",
        {"sys/block/nvme1n1/queue/rotational": "1\n", "data/shard-0.tar": "x" * (9 << 20)},
        {
            "sys/block/nvme1n1/queue/rotational": "1\n",
            "sys/block/nvme1n1/queue/read_ahead_kb": "4096\n",
            "data/shard-0.tar": "x" * (9 << 20),
        },
        "read_ahead_kb is 128; the files' median is 9 MiB",
        options={"data": "/data"},
    ),
    Case(
        "TT037",
        {"sys/block/nvme1n1/queue/read_ahead_kb": "8192\n"},
        {"sys/block/nvme1n1/queue/read_ahead_kb": "8192\n", "data/shard-0.tar": "x" * (9 << 20)},
        "read_ahead_kb is 8192; the files' median is 1000 bytes",
        options={"data": "/data"},
        name="random reads",
    ),
    Case(
        "TT038",
        small_files(10_000, 10),
        small_files(500, 10),
        "10001 files, median 10 bytes",
        options={"data": "/data"},
    ),
    Case(
        "TT039",
        {DATA: mounted("40 22 0:50 / /data rw - tmpfs tmpfs rw,size=1g")},
        {},
        "/data is on /data: tmpfs",
        options={"data": "/data"},
    ),
    Case(
        "TT040",
        {f"{FREQ}/scaling_driver": "acpi-cpufreq\n", f"{FREQ}/scaling_governor": "powersave\n"},
        {f"{FREQ}/scaling_driver": "intel_pstate\n", f"{FREQ}/scaling_governor": "powersave\n"},
        "policy0: governor powersave under acpi-cpufreq",
    ),
    Case(
        "TT040",
        {f"{FREQ}/scaling_max_freq": "1200000\n"},
        {f"{FREQ}/scaling_max_freq": "3000000\n"},
        "scaling_max_freq 1200 of 3500 MHz",
        name="maximum",
    ),
    Case(
        "TT041",
        {f"{FREQ}/energy_performance_preference": "power\n"},
        {
            f"{FREQ}/energy_performance_preference": "power\n",
            "sys/class/power_supply/BAT0/type": "Battery\n",
            "sys/class/power_supply/BAT0/status": "Discharging\n",
        },
        "policy0/energy_performance_preference is power",
    ),
    Case(
        "TT042",
        {"sys/class/power_supply/BAT0/type": "Battery\n", "sys/class/power_supply/BAT0/status": "Discharging\n"},
        {
            "sys/class/power_supply/BAT0/type": "Battery\n",
            "sys/class/power_supply/BAT0/status": "Charging\n",
            "sys/class/power_supply/AC/type": "Mains\n",
            "sys/class/power_supply/AC/online": "1\n",
        },
        "a battery discharges",
    ),
    Case(
        "TT042",
        {"sys/firmware/acpi/platform_profile": "low-power\n"},
        {"sys/firmware/acpi/platform_profile": "balanced\n"},
        "platform_profile is low-power",
        name="firmware",
    ),
    Case(
        "TT043",
        {f"{ACTIVE}/tuned.service/p": "1", f"{ACTIVE}/tlp.service/p": "2"},
        {f"{ACTIVE}/tuned.service/p": "1"},
        "running: tuned.service, tlp.service",
    ),
    Case(
        "TT044",
        idle("C6", latency=170, usage=4000, above=1200),
        idle("C1E", latency=10, usage=4000, above=1200),
        "cpu0-7/cpuidle: C6 (170 us) entered 32000 times since boot, 9600 of them for too short",
        jobs=(JOB,),
        job="7",
    ),
    Case(
        "TT044",
        idle("C6", latency=170, usage=4000, above=1200),
        idle("C6", latency=170, usage=400_000, above=1200),
        "9600 of them for too short",
        jobs=(JOB,),
        job="7",
        name="rightly chosen",
    ),
    Case(
        "TT045",
        {f"{PCI}/{A}/power/control": "auto\n"},
        {f"{PCI}/{A}/power/control": "on\n"},
        "power/control is auto",
        jobs=(JOB,),
        job="7",
    ),
    Case(
        "TT046",
        {"etc/systemd/logind.conf": "[Login]\nIdleAction=suspend\n"},
        {"etc/systemd/logind.conf": "[Login]\nIdleAction=suspend\n", "etc/systemd/system/sleep.target": "-> /dev/null"},
        "/etc/systemd/logind.conf: IdleAction=suspend",
    ),
    Case(
        "TT046",
        {f"{ACTIVE}/gdm.service/p": "1"},
        {f"{ACTIVE}/gdm.service/p": "1", "etc/gdm3/greeter.dconf-defaults": "sleep-inactive-ac-type='nothing'\n"},
        "GDM runs",
        name="GDM",
    ),
    Case(
        "TT046",
        {"proc/acpi/button/lid/LID0/state": "open\n"},
        {
            "proc/acpi/button/lid/LID0/state": "open\n",
            "etc/systemd/logind.conf.d/lid.conf": "[Login]\nHandleLidSwitch=ignore\n",
        },
        "the lid suspends",
        name="lid",
    ),
    Case(
        "TT046",
        {"proc/acpi/button/lid/LID0/state": "open\n", "etc/systemd/logind.conf": "[Login]\n"},
        {
            "proc/acpi/button/lid/LID0/state": "open\n",
            "etc/systemd/logind.conf": "[Login]\nHandleLidSwitch=suspend\nHandleLidSwitchExternalPower=lock\n",
        },
        "the lid suspends",
        name="lid on mains",
    ),
    Case(
        "TT046",
        {"etc/systemd/logind.conf": "[Login]\nIdleAction=suspend\n", "sys/power/state": "freeze mem disk\n"},
        {"etc/systemd/logind.conf": "[Login]\nIdleAction=suspend\n", "sys/power/state": "disk\n"},
        "IdleAction=suspend",
        name="a host that cannot",
    ),
    Case(
        "TT046",
        {f"{ACTIVE}/gdm.service/p": "1", "etc/systemd/sleep.conf": "[Sleep]\n#AllowSuspend=no\n"},
        {f"{ACTIVE}/gdm.service/p": "1", "etc/systemd/sleep.conf": "[Sleep]\nAllowSuspend=no\n"},
        "GDM runs",
        name="sleep.conf",
    ),
    Case(
        "TT046",
        {f"{ACTIVE}/gdm.service/p": "1", GREETER: "sleep-inactive-ac-type='suspend'\n"},
        {f"{ACTIVE}/gdm.service/p": "1", GREETER: "sleep-inactive-ac-timeout=uint32 0\n"},
        "GDM runs",
        name="GDM's timeout",
    ),
    Case(
        "TT046",
        {"proc/acpi/button/lid/LID0/state": "open\n"},
        {"proc/acpi/button/lid/LID0/state": "open\n", f"{ACTIVE}/systemd-logind.service": None},
        "the lid suspends",
        name="in a container",
    ),
    Case(
        "TT047",
        {
            "proc/driver/nvidia/params": "PreserveVideoMemoryAllocations: 0\n",
            "sys/power/suspend_stats/success": "2\n",
        },
        {
            "proc/driver/nvidia/params": "PreserveVideoMemoryAllocations: 0\n",
            "sys/power/suspend_stats/success": "0\n",
        },
        "the host slept 2 times",
    ),
    Case(
        "TT048",
        {"var/lib/systemd/linger/ann": None, **TMUX},
        {"var/lib/systemd/linger/ann": None, **TMUX, "dev/shm/torch_4100_77_0": None},
        f"/var/lib/systemd/linger/ann is not there; process 4100 (python) is in {SESSION.rpartition('/')[2]}",
    ),
    Case(
        "TT048",
        {"var/lib/systemd/linger/ann": None, "proc/self/cgroup": "0::/system.slice/cron.service\n"},
        {
            "var/lib/systemd/linger/ann": None,
            "proc/self/cgroup": "0::/system.slice/cron.service\n",
            "proc/4000/cgroup": "0::/system.slice/x.service\n",
        },
        "process 4000 (python) is in torchtuned-job-7.scope",
        jobs=(JOB,),
        job="7",
        name="of a job",
    ),
    Case(
        "TT049",
        {"etc/systemd/logind.conf.d/kill.conf": "[Login]\nKillUserProcesses=yes\n"},
        {"etc/systemd/logind.conf": "[Login]\n#KillUserProcesses=yes\n"},
        "kill.conf: KillUserProcesses=yes",
    ),
    Case(
        "TT050",
        {
            f"{CG}/{SESSION}/cpu.max": "200000 100000\n",
            f"{CG}/{SESSION}/cpu.stat": "nr_periods 1000\nnr_throttled 800\n",
        },
        {
            f"{CG}/{SESSION}/cpu.max": "200000 100000\n",
            f"{CG}/{SESSION}/cpu.stat": "nr_periods 1000\nnr_throttled 3\n",
        },
        "throttled in 800 of 1000 periods; the quota is 200000 100000",
    ),
    Case(
        "TT051",
        {f"proc/4000/task/{i}/stat": f"{i} (python) R 1 1\n" for i in range(40)},
        {f"proc/4000/task/{i}/stat": f"{i} (python) {'R' if i < 8 else 'S'} 1 1\n" for i in range(40)},
        "40 threads want to run on 8 CPUs",
        jobs=(JOB,),
        job="7",
    ),
    Case(
        "TT052",
        {**UPGRADES, APT: REBOOT},
        {**UPGRADES, APT: "// " + REBOOT},
        "Automatic-Reboot is on",
    ),
    Case(
        "TT052",
        {**UPGRADES, APT: REBOOT},
        {**UPGRADES, APT: REBOOT, "etc/systemd/system/apt-daily-upgrade.timer": "-> /dev/null"},
        "apt-daily-upgrade.timer is enabled",
        name="timer masked",
    ),
    Case(
        "TT053",
        {**UPGRADES, "var/lib/dpkg/info/libnvidia-ml1:amd64.list": ""},
        {
            **UPGRADES,
            "var/lib/dpkg/info/libnvidia-ml1:amd64.list": "",
            APT: 'Unattended-Upgrade::Package-Blacklist {\n  "nvidia";\n};\n',
        },
        "Package-Blacklist has no nvidia",
    ),
    Case(
        "TT054",
        {"run/reboot-required": "", "run/reboot-required.pkgs": "linux-image-amd64\n"},
        {"run/needrestart": ""},
        "for linux-image-amd64",
    ),
    Case(
        "TT055",
        {"etc/needrestart/conf.d/auto.conf": "$nrconf{restart} = 'a';\n"},
        {
            "etc/needrestart/needrestart.conf": "#$nrconf{restart} = 'i';\n$nrconf{restart} = 'a';\n",
            "etc/needrestart/conf.d/zz-torchtuned.conf": "$nrconf{restart} = 'l';\n",  # its own mend
        },
        "auto.conf: $nrconf{restart} = 'a'",
    ),
    Case(
        "TT056",
        {
            **NO_DRIVER,
            EFI: b"\x06\0\0\0\1",
            "var/log/dmesg": "[ 9.1] Loading of module failed: Key was rejected by service\n",
        },
        {**NO_DRIVER, EFI: b"\x06\0\0\0\0"},
        "Key was rejected by service",
    ),
    Case("TT057", DOCKER, {**DOCKER, "dev/char/195:0": "-> ../nvidia0", "dev/nvidia0": ""}, "/dev/char has no 195:*"),
    Case(
        "TT057",
        {**DOCKER, "etc/docker/daemon.json": '{"exec-opts": ["native.cgroupdriver=systemd"]}'},
        {**DOCKER, "etc/docker/daemon.json": '{"exec-opts": ["native.cgroupdriver=cgroupfs"]}'},
        "/etc/docker/daemon.json",
        name="cgroup driver",
    ),
    Case(
        "TT058",
        {IB: "1", "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05\n"},
        {
            IB: "1",
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05\n",
            "sys/module/nvidia_peermem/refcnt": "0\n",
        },
        "nvidia_peermem is not loaded",
    ),
    Case("TT059", FABRIC, {**FABRIC, f"{PORT}/link_layer": "Ethernet\n"}, "'127.0.1.1 trainer'"),
    Case("TT059", FABRIC, {**FABRIC, f"{PORT}/state": "1: DOWN\n"}, "mlx5_0 on InfiniBand", name="port"),
    Case(
        "TT059",
        FABRIC,
        {**FABRIC, "etc/hosts": "10.0.0.5 trainer.lab trainer\n127.0.1.1 trainer\n"},
        "'127.0.1.1 trainer'",
        name="address",
    ),
    Case("TT059", FABRIC, {**FABRIC, "proc/self/environ": "GLOO_SOCKET_IFNAME=ib0\0"}, "trainer", name="set for all"),
    Case(
        "TT059",
        {"proc/4001/environ": "MASTER_ADDR=node1.lab\0"},
        {"proc/4001/environ": "MASTER_ADDR=trainer.lab\0"},
        "MASTER_ADDR=node1.lab",
        jobs=(JOB,),
        job="7",
        name="of a job",
    ),
    Case(
        "TT059",
        {"proc/4001/environ": "MASTER_ADDR=10.0.0.5\0WORLD_SIZE=16\0LOCAL_WORLD_SIZE=8\0"},
        {"proc/4001/environ": "MASTER_ADDR=10.0.0.5\0WORLD_SIZE=8\0LOCAL_WORLD_SIZE=8\0"},
        "MASTER_ADDR=10.0.0.5, WORLD_SIZE=16, LOCAL_WORLD_SIZE=8",
        jobs=(JOB,),
        job="7",
        name="all ranks here",
    ),
    Case(
        "TT059",
        {"proc/4001/environ": "MASTER_ADDR=trainer\0WORLD_SIZE=16\0LOCAL_WORLD_SIZE=8\0"},
        {"proc/4001/environ": "MASTER_ADDR=trainer\0WORLD_SIZE=16\0LOCAL_WORLD_SIZE=8\0GLOO_SOCKET_IFNAME=eth0\0"},
        "MASTER_ADDR=trainer, WORLD_SIZE=16",
        jobs=(JOB,),
        job="7",
        name="where rank 0 is",
    ),
    Case(
        "TT060",
        {"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet\n"},
        {"sys/devices/system/clocksource/clocksource0/current_clocksource": "kvm-clock\n"},
        "current_clocksource is hpet",
    ),
    Case(
        "TT061",
        {"proc/sys/kernel/osrelease": "4.19.0-27-amd64\n"},
        {"proc/sys/kernel/osrelease": "5.10.0-32-amd64\n"},
        "osrelease is 4.19.0-27-amd64",
    ),
    Case("TT061", {f"{CG}/cgroup.controllers": None}, {}, "cgroup v2 is not the hierarchy", name="cgroup v1"),
    Case(
        "TT062",
        {"proc/interrupts": interrupts([5_000_000] + [10_000] * 15)},
        {"proc/interrupts": interrupts([5_000_000] + [10_000] * 15, "acpi")},
        "CPU 0 served 97 %",
    ),
    Case(
        "TT062",
        {"proc/interrupts": interrupts([5_000_000] + [10_000] * 15)},
        {"proc/interrupts": interrupts([5_000_000] + [10_000] * 15).replace("43:", "RES:").replace("nvme0q1", "x", 1)},
        "CPU 0 served 97 %",
        name="one interrupt alone",
    ),
    Case(
        "TT063",
        {f"{PCI}/{A}/iommu_group": "-> ../../iommu_groups/12", "sys/kernel/iommu_groups/12/type": "DMA-FQ\n"},
        {f"{PCI}/{A}/iommu_group": "-> ../../iommu_groups/12", "sys/kernel/iommu_groups/12/type": "identity\n"},
        "group 12: DMA-FQ",
    ),
    Case(
        "TT065",
        HOLDS,
        HOLDS,
        "20 GiB in use, NVML lists no process; /dev/nvidia* is open in 4000 (python)",
        gpu={"memory_used": 20 * GIB},
        fine={"memory_used": 20 * GIB, "processes": f"4000:{20 * GIB}"},
    ),
    Case(
        "TT066",
        process("4000", cpus="8-15"),
        process("4000", cpus="4-11"),
        "is bound to CPUs 8-15",
        jobs=(JOB,),
        job="7",
        gpu={"processes": f"4000:{GIB}"},
        fine={"processes": f"4000:{GIB}"},
    ),
    Case(
        "TT067",
        {**process("4001", parent=4000, cpus="3"), "proc/4001/environ": "OMP_PROC_BIND=true\0"},
        process("4001", parent=4000, cpus="2-3"),
        "may use CPU 3 of 0-7; its environment has OMP_PROC_BIND=true",
        jobs=(JOB,),
        job="7",
    ),
    Case(
        "TT067",
        {**RANKS, **process("4009", parent=4001, cpus="0")},
        {**process("4001", parent=4000, cpus="0"), **process("4002", parent=4000, cpus="1")},
        "process 4001 (python) and 3 more may use CPU 0 of 0-1",
        jobs=(replace(JOB, cpus=frozenset({0, 1})),),
        job="7",
        name="of ranks",
    ),
    Case(
        "TT068",
        {f"{PCI}/{A}/device": "0x1eb8\n"},
        {f"{PCI}/{A}/device": "0x1eb8\n", "proc/self/environ": "CUDA_DEVICE_ORDER=PCI_BUS_ID\0"},
        "CUDA_DEVICE_ORDER is not set",
    ),
    Case(
        "TT069",
        {"tmp/nvidia-mps/control": ""},
        {"tmp/nvidia-mps/control": "", **process("4100", name="nvidia-cuda-mps")},
        "no nvidia-cuda-mps-control runs",
    ),
    Case(
        "TT070",
        {
            f"{PCI}/{A}/device": "0x2b85\n",
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05\n",
        },
        {f"{PCI}/{A}/device": "0x2b85\n"},
        "(0x2b85) is Blackwell or later",
    ),
    Case(
        "TT070",
        {
            f"{PCI}/{A}/driver": None,
            "var/log/dmesg": "[1.0] NVRM: installed in this system is not supported by open nvidia.ko\n",
        },
        {f"{PCI}/{A}/driver": None},
        "is not supported by open",
        name="before Turing",
    ),
    Case(
        "TT071",
        {"proc/self/environ": "LD_LIBRARY_PATH=/usr/local/cuda/lib64\0", "usr/local/cuda/lib64/libnvJitLink.so.12": ""},
        {"proc/self/environ": "LD_LIBRARY_PATH=/opt/mine/lib\0", "opt/mine/lib/libmine.so": ""},
        "LD_LIBRARY_PATH has /usr/local/cuda/lib64, with libnvJitLink.so.12",
    ),
    Case(
        "TT072",
        {"usr/local/cuda/bin/ncu": ""},
        {"usr/local/cuda/bin/ncu": "", "proc/driver/nvidia/params": "RmProfilingAdminOnly: 0\n"},
        "RmProfilingAdminOnly: 1",
    ),
    Case(
        "TT073",
        {"sys/devices/cpu_core/cpus": "0-3\n", "sys/devices/cpu_atom/cpus": "4-15\n"},
        {"sys/devices/cpu_core/cpus": "0-7\n", "sys/devices/cpu_atom/cpus": "8-15\n"},
        "CPUs 0-3 are performance cores, 4-7 efficiency cores",
        jobs=(JOB,),
        job="7",
    ),
    Case(
        "TT077",
        {CUINIT: "3 /usr/lib/libcuda.so.1\n", HMM: "N\n"},
        {CUINIT: "3 /usr/lib/libcuda.so.1\n", HMM: "N\n", "dev/nvidia-uvm": None},
        f"cuInit of /usr/lib/libcuda.so.1 gave 3; /{HMM} is N",
    ),
    Case(
        "TT077",
        {CUINIT: "804 /usr/local/cuda/compat/libcuda.so.1\n"},
        {CUINIT: "0 /usr/local/cuda/compat/libcuda.so.1\n"},
        "cuInit of /usr/local/cuda/compat/libcuda.so.1 gave 804",
        name="compatibility libraries",
    ),
)
ELSEWHERE = {
    "TT064": "test_pci.py",
    **dict.fromkeys(("TT078", "TT079"), "test_contention.py"),
    **dict.fromkeys(("TT074", "TT075", "TT076"), "test_wheel.py"),
}


FILES_OF_ROOT = re.compile(r">>?\s*(/etc|/sys|/proc|/boot|/usr|/lib|/var|/run|\{)")
ROOTS = "apt|systemctl|sysctl|modprobe|rmmod|update-initramfs|update-grub|mount|setpci|mokutil|cpupower|mdadm|loginctl"
COMMANDS_OF_ROOT = re.compile(
    rf"(?<!sudo )(?<![\w/.-])(?:(?:{ROOTS}|nvidia-ctk|nvidia-modprobe|dcgmi|nvidia-bug-report.sh) +[-\w{{]"
    r"|dkms (?!status)\w|nvidia-smi -(?!q))"
)


def as_root_only(text: str) -> list[str]:
    """What in a command fails for a user who may use sudo: redirections that the user's own shell would open, and
    commands that only root may run."""
    return [found[0] for pattern in (FILES_OF_ROOT, COMMANDS_OF_ROOT) for found in pattern.finditer(text)]


def words_of(path: Path) -> list[str]:
    """The texts of a module without its docstrings, those of one expression put together, {} for what is filled in."""
    tree = ast.parse(path.read_text("utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and node.body
            and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found.append(node.value)
    return found


def test_what_mends_works_with_sudo() -> None:
    assert as_root_only("echo 1 > /sys/x; sudo echo x >>/etc/y; apt install z; nvidia-smi -pl 5") == [
        "> /sys", ">>/etc", "apt i", "nvidia-smi -"
    ]  # fmt: skip
    fine = "echo 1 | sudo tee /sys/x; sudo apt install z; nvidia-smi -q; dkms status; /usr/bin/nvidia-ctk system"
    assert as_root_only(fine) == []
    package = Path(__file__).resolve().parents[2] / "torchtuned"
    texts = [(path.name, text) for path in sorted((package / "checks").glob("*.py")) for text in words_of(path)]
    assert len(texts) > 500
    assert [(name, found, text) for name, text in texts if (found := as_root_only(text))] == []


def look(
    folder: Path, case: Case, changes: Files, gpu: Mapping[str, object], *, python: tuple[str, ...] | None
) -> tuple[list[Finding], list[Unchecked]]:
    fake = build(folder, changes, **gpu)
    host = Host(fake.root)
    return run_checks(host, Gpus(host, python=python), [case.code], jobs=case.jobs, **case.options)


@pytest.fixture
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, ...] | None:
    """The interpreter that asks the fake NVML, for the cases that are about it."""
    case = request.getfixturevalue("case")
    if not case.gpu:
        return None
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml.library()))
    return nvml.interpreter()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_broken(case: Case, tmp_path: Path, asked: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML_STATE", str(tmp_path / "nvml.state"))
    findings, _ = look(tmp_path, case, case.broken, case.gpu, python=asked)
    assert [finding.code for finding in findings] == [case.code]
    finding = findings[0]
    assert case.seen in finding.evidence
    assert finding.job == case.job
    assert all((finding.fix, finding.cost, finding.source, finding.title))
    assert not as_root_only(finding.fix)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_healthy_twin(
    case: Case, tmp_path: Path, asked: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NVML_STATE", str(tmp_path / "nvml.state"))
    assert look(tmp_path, case, case.healthy, case.fine, python=asked) == ([], [])


def test_nobody_is_told_to_install_what_runs(tmp_path: Path) -> None:
    crowded = {"proc/interrupts": interrupts([5_000_000] + [10_000] * 15)}
    for number, (unit, told) in enumerate({"x": "sudo apt install", "irqbalance": "irqbalance runs"}.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        host = Host(build(folder, {**crowded, f"{ACTIVE}/{unit}.service/cgroup.procs": "9\n"}).root)
        [finding], _ = run_checks(host, Gpus(host), ["TT062"])
        assert finding.fix.startswith(told)


def test_every_code_has_a_case() -> None:
    here = {case.code for case in CASES} | ELSEWHERE.keys()
    gpus = {f"TT{number:03}" for number in range(1, 17)}  # test_checks_gpu.py
    assert here | gpus == REGISTRY.keys()
    for code, file in ELSEWHERE.items():
        assert f"def test_{code.lower()}" in (Path(__file__).parent / file).read_text()


def test_every_check_explains_itself_and_names_its_source() -> None:
    folder = Path(checks.__file__).parent
    modules = {f"torchtuned.checks.{path.stem}" for path in folder.glob("*.py") if "\n@rule(" in path.read_text()}
    assert {check.run.__module__ for check in REGISTRY.values()} == modules
    for check in REGISTRY.values():
        assert len(check.explanation) > 60
        assert check.source or int(check.code[2:]) <= 16


@pytest.mark.parametrize("jobs", [(), (JOB,)])
def test_nothing_is_wrong_with_a_sound_machine(
    jobs: tuple[Running, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml.library()))
    monkeypatch.setenv("FAKE_NVML_STATE", str(tmp_path / "nvml.state"))
    host = Host(build(tmp_path, {}).root)
    assert run_checks(host, Gpus(host, python=nvml.interpreter()), jobs=jobs, data="/data") == ([], [])


def test_the_daemon_does_not_judge_its_own_limits(tmp_path: Path) -> None:
    changes = {"proc/self/limits": limits(open_files="64 64 files"), "proc/1/mountinfo": MOUNTS}
    host = Host(build(tmp_path, changes).root)
    codes = [case.code for case in CASES if not case.options]
    assert run_checks(host, Gpus(host), codes, caller=False)[0] == []


def test_jobs_that_nobody_knows_are_unchecked(tmp_path: Path) -> None:
    host = Host(build(tmp_path, {}).root)
    _, unchecked = run_checks(host, Gpus(host), ["TT018", "TT031", "TT032"], jobs=None)
    assert {item.code for item in unchecked} == {"TT018", "TT031"}
    assert {item.because for item in unchecked} == {"torchtunedd does not answer, so its jobs are not known"}


def test_jobs_that_placed_themselves_are_looked_into_alone(tmp_path: Path) -> None:
    host = Host(build(tmp_path, {f"proc/4001/fd/{i}": "-> socket:[1]" for i in range(900)}).root)
    machine = Machine(host, Gpus(host), jobs=(replace(JOB, id="self-4000", scope=""),), some_jobs=True)
    found, unchecked = checks.look(machine, ["TT018"])
    assert [finding.job for finding in found] == ["self-4000"]
    assert [item.because for item in unchecked] == [
        "torchtunedd does not answer, so no jobs are known but those that placed themselves"
    ]


def test_a_job_that_ended_is_no_fault(tmp_path: Path) -> None:
    host = Host(build(tmp_path, {}).root)
    gone = replace(JOB, pid=5555)
    assert run_checks(host, Gpus(host), [c.code for c in CASES if not c.options], jobs=(gone,))[0] == []


def test_what_is_missing_is_unchecked(tmp_path: Path) -> None:
    host = Host(build(tmp_path, {"proc/self/limits": None, "proc/pressure": None}).root)
    findings, unchecked = run_checks(host, Gpus(host), ["TT017", "TT027"])
    assert findings == []
    assert [(item.code, "proc" in item.because) for item in unchecked] == [("TT017", True), ("TT027", True)]


def test_a_check_that_stumbles_takes_no_other_with_it(tmp_path: Path) -> None:
    changes = {f"{VM}/overcommit_memory": "2\n", "proc/meminfo": ""}
    host = Host(build(tmp_path, {**changes, "proc/sys/vm/max_map_count": "65530\n"}).root)
    findings, unchecked = run_checks(host, Gpus(host), ["TT022", "TT024"])
    assert [finding.code for finding in findings] == ["TT024"]
    assert [item.code for item in unchecked] == ["TT022"]
    assert "torchtuned's own" in unchecked[0].because


# what reports from the field ask for by number


def test_t03_the_estimate_of_shared_memory(tmp_path: Path) -> None:
    assert loader_need(workers=8, prefetch=2, batch_bytes=64 * 3 * 224 * 224 * 4) == 588 << 20
    changes = {DATA: MOUNTS.replace("size=67108864k", "size=65536k")}
    host = Host(build(tmp_path, changes).root)
    [finding], _ = run_checks(host, Gpus(host), ["TT022"])
    assert finding.severity is Severity.ERROR
    assert "588 MiB" in finding.evidence
    assert "--shm-size" in finding.fix


@pytest.mark.parametrize(
    ("uid", "linger", "expected"), [("1000", False, ["TT048"]), ("999", False, []), ("1000", True, [])]
)
def test_t10_logging_out(tmp_path: Path, uid: str, expected: list[str], *, linger: bool) -> None:
    status = f"Name:\tbash\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n"
    changes: dict[str, str | bytes | None] = {
        **TMUX,
        "proc/self/status": status,
        "proc/4100/status": status,
        "etc/passwd": f"ann:x:{uid}:{uid}::/home/ann:/bin/sh\n",
    }
    if not linger:
        changes["var/lib/systemd/linger/ann"] = None
    host = Host(build(tmp_path, changes).root)
    findings, _ = run_checks(host, Gpus(host), ["TT048"])
    assert [finding.code for finding in findings] == expected
    assert all(finding.fix == "sudo loginctl enable-linger ann" for finding in findings)


def test_t26_nothing_here_reloads_systemd() -> None:
    """A daemon-reload takes the GPUs of running containers away, so no code path has one, nor has a maintainer script
    of ours beyond what debhelper writes."""
    top = Path(__file__).resolve().parents[2]
    files = [*top.glob("torchtuned/**/*.py"), *top.glob("debian/*.p*"), *top.glob("systemd/*")]
    calls = re.compile(r"systemctl\b[^\n]*daemon-reload|[\"']Reload[\"'], *[\"']\"|Manager\.Reload\b.*systemd1")
    assert files
    assert not [str(path) for path in files if path.is_file() and calls.search(path.read_text("utf-8", "replace"))]


@pytest.mark.parametrize(
    ("files", "where"),
    [
        (
            {"etc/security/limits.d/lab.conf": "# lab\n* hard nofile 1024\n"},
            "change /etc/security/limits.d/lab.conf:2 ('* hard nofile 1024')",
        ),
        (
            {"proc/self/cgroup": "0::/system.slice/slurmd.service\n"},
            "sudo systemctl edit slurmd.service: [Service] LimitNOFILE=524288",
        ),
        *(
            (files, "echo 'ann - nofile 524288' | sudo tee /etc/security/limits.d/torchtuned-nofile-ann.conf")
            for files in ({}, {"proc/self/cgroup": "0::/user.slice/user-1000.slice/user@1000.service/a.service\n"})
        ),
    ],
)
def test_t27_which_file_to_edit(tmp_path: Path, files: dict[str, str], where: str) -> None:
    host = Host(build(tmp_path, {**files, "proc/self/limits": limits(open_files="1024 1024 files")}).root)
    [finding], _ = run_checks(host, Gpus(host), ["TT017"])
    assert finding.fix.startswith(where)
