"""What the tests ask of a machine: jobs in login sessions, the kernel's masks, the tool's own words."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import dataclass

from machine import SHARE, Machine

JOB = f"python3 {SHARE}/job.py"
MANAGER = "org.torchtuned1 /org/torchtuned1 org.torchtuned1.Manager"
STATE = f"busctl get-property {MANAGER} State"
NO_JOBS = f"! systemctl is-active -q torchtuned || busctl get-property {MANAGER} Jobs | grep -qx 'u 0'"
GOVERNOR = "/sys/devices/system/cpu/cpufreq/policy{}/scaling_governor"
INSTALL = "DEBIAN_FRONTEND=noninteractive apt-get install -q -y --allow-downgrades"

# At each boot, before torchtuned comes, every policy has another governor than its neighbour, and these sysctls.
ORIGINALS = ["powersave", "ondemand", "conservative", "schedutil", "userspace", "powersave", "ondemand", "schedutil"]
SET_ORIGINALS = "".join(
    f"ExecStart=/bin/sh -c 'echo {governor} > {GOVERNOR.format(number)}'\n" for number, governor in enumerate(ORIGINALS)
)
WANTED = "performance"  # by the default policy
ORIGINAL_SYSCTLS = {"vm.swappiness": "61", "net.core.somaxconn": "256"}
ORIGINALS_UNIT = f"""[Unit]
DefaultDependencies=no
After=systemd-modules-load.service systemd-sysctl.service
Before=basic.target
[Service]
Type=oneshot
RemainAfterExit=yes
{SET_ORIGINALS}ExecStart=/sbin/sysctl -w {" ".join(f"{key}={value}" for key, value in ORIGINAL_SYSCTLS.items())}
[Install]
WantedBy=basic.target
"""


@dataclass(frozen=True)
class Job:
    """A running tests/vm/job.py and what it said about itself."""

    name: str
    pid: int
    omp_num_threads: str | None
    cuda_visible_devices: str | None
    cgroup: str
    notes: str

    @property
    def scope(self) -> str:
        """The unit it runs in."""
        return self.cgroup.rsplit("/", 1)[1]


def start(machine: Machine, name: str, command: str, *, user: str) -> Job:
    """Start a shell command that ends in job.py, in a new login session of a user."""
    session = f"ssh {user}@localhost {shlex.quote(command)}; echo $? >{name}.status"
    machine.check(f"cd /root; rm -f {name}.*; ({session}) <>/dev/null >{name}.out 2>{name}.err &")
    out = machine.check(
        f"cd /root; for i in $(seq 600); do grep -q '}}$' {name}.out && exec cat {name}.out;"
        f" [ -e {name}.status ] && break; sleep 0.2; done; echo no job: $(cat {name}.*); exit 1"
    )
    said = json.loads(out)
    notes = machine.check(f"cat /root/{name}.err")
    fields = {key: said[key] for key in ("pid", "omp_num_threads", "cuda_visible_devices", "cgroup")}
    return Job(name=name, notes=notes, **fields)


def start_service(machine: Machine, name: str, *words: str) -> dict[str, object]:
    """Start job.py in a service; its row in the list of jobs, of which it is the only one."""
    out = f"/root/{name}.out"
    machine.check(f"rm -f {out}; systemd-run -q --unit {name} -p StandardOutput=file:{out} {' '.join(words)}")
    wait_for(machine, f"grep -q '}}' {out}")
    (row,) = listed(machine)
    return row


def stop(machine: Machine, *jobs: Job, signal: str = "TERM") -> None:
    """End all jobs that there are and wait until they, and the daemon's record of them, are gone."""
    machine.sh(f"kill -{signal} {' '.join(str(job.pid) for job in jobs)}")
    for job in jobs:
        wait_for(machine, f"! test -e /proc/{job.pid}")
    wait_for(machine, NO_JOBS)


def wait_for(machine: Machine, condition: str, timeout_s: float = 60) -> None:
    """Wait until a shell condition holds in the machine."""
    deadline = time.monotonic() + timeout_s
    while True:
        status, output = machine.sh(condition)
        if status == 0:
            return
        if time.monotonic() > deadline:
            journal = machine.sh("journalctl -u torchtuned -n 12 --no-pager -o cat")[1]
            raise AssertionError(f"still not after {timeout_s:.0f} s: {condition}\n{output}\n{journal}")
        time.sleep(0.5)


def cpus(text: str) -> set[int]:
    """Read a kernel CPU list."""
    spans = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}


def cpus_of(machine: Machine, job: Job) -> set[int]:
    """Return the CPUs of a job from the masks of all its threads, which must agree."""
    lists = machine.check(f"grep -h Cpus_allowed_list /proc/{job.pid}/task/*/status | cut -f 2").split()
    assert len(lists) >= 5, f"{job} has {len(lists)} threads"
    assert len(set(lists)) == 1, f"the threads of {job} differ: {lists}"
    return cpus(lists[0])


def cpus_of_process(machine: Machine, pid: object) -> set[int]:
    """Return the CPUs of a process from the mask of its first thread."""
    return cpus(machine.check(f"taskset -pc {pid}").rsplit(": ", 1)[1])


def masks(machine: Machine) -> dict[str, list[str]]:
    """Return the mask and name of every thread on the machine."""
    found: dict[str, list[str]] = json.loads(machine.check(f"python3 {SHARE}/masks.py"))
    return found


def changed(before: dict[str, list[str]], after: dict[str, list[str]]) -> dict[str, tuple[str, str, str]]:
    """Return the threads, there both times, whose mask is another now: name, before, after."""
    both = before.keys() & after.keys()
    assert len(both) > 50, "two snapshots of different machines"
    return {key: (after[key][1], before[key][0], after[key][0]) for key in both if before[key][0] != after[key][0]}


def show(machine: Machine, unit: str, *names: str) -> dict[str, str]:
    """Return properties of a unit."""
    text = machine.check(f"systemctl show {unit} " + " ".join(f"-p {name}" for name in names))
    return dict(line.split("=", 1) for line in text.splitlines())


def listed(machine: Machine) -> list[dict[str, object]]:
    """Return the jobs as torchtuned lists them."""
    jobs: list[dict[str, object]] = json.loads(machine.check("torchtuned jobs --json"))
    return jobs


def knobs(machine: Machine, command: str = "verify") -> dict[str, dict[str, str]]:
    """Return the rows of verify or plan by knob."""
    rows = json.loads(machine.sh(f"torchtuned {command} --json")[1])["knobs"]
    return {row["knob"]: row for row in rows}


def governors(machine: Machine) -> list[str]:
    """Return the governor of each cpufreq policy, policy0 first."""
    return machine.check(f"cat {GOVERNOR.format('[0-9]')}").split()


def sysctls(machine: Machine) -> dict[str, str]:
    """Return the values of the sysctls in question."""
    lines = machine.check("/sbin/sysctl " + " ".join(ORIGINAL_SYSCTLS)).splitlines()
    return dict(line.split(" = ") for line in lines)


def is_original(machine: Machine) -> bool:
    """Tell whether all values are what they were before torchtuned came."""
    return governors(machine) == ORIGINALS and sysctls(machine) == ORIGINAL_SYSCTLS


def is_tuned(machine: Machine) -> bool:
    """Tell whether the default policy is in force, by the kernel."""
    now = sysctls(machine)
    return set(governors(machine)) == {WANTED} and not now.items() & ORIGINAL_SYSCTLS.items()
