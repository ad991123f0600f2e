"""Sessions and sleep: what a desktop or a logout does to a job that runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from torchtuned import units
from torchtuned.checks.files import (
    masked,
    module_option,
    process_name,
    setting,
    uid,
    unit_runs,
    user_name,
)
from torchtuned.checks.registry import Machine, Seen, Unseen, rule
from torchtuned.findings import Action, Severity
from torchtuned.systemdconf import is_yes

SLEEPERS = ("sleep.target", "suspend.target")
GDM = ("gdm.service", "gdm3.service")
PARAMS = "/proc/driver/nvidia/params"
LINGER = "/var/lib/systemd/linger"


@rule(
    "TT046",
    "the host goes to sleep when nobody is at it",
    severity=Severity.WARNING,
    action=Action.JOB,
    cost="training stops, and after waking CUDA may fail with 'unknown error' until the next boot",
    source="pytorch/pytorch#88639, pytorch/pytorch#43281",
)
def suspend(machine: Machine) -> Iterator[Seen | Unseen]:
    """logind's IdleAction and lid (on mains), and GDM, whose login screen suspends after 20 minutes on mains too,
    whoever works over ssh. torchtuned holds an inhibitor while its jobs run; other jobs have none. A host that cannot
    sleep, or may not (sleep.conf), is fine."""
    if any(masked(machine, unit) for unit in SLEEPERS) or not _may_sleep(machine):
        return
    causes = []
    logind = unit_runs(machine, "systemd-logind.service")
    action, where = setting(machine, "logind.conf", "IdleAction")
    if logind and action not in ("", "ignore", "lock"):
        causes.append(f"{where}: IdleAction={action}")
    if logind and machine.host.list("/proc/acpi/button/lid") and machine.cards:
        keys = ("HandleLidSwitchExternalPower", "HandleLidSwitch")
        found = ((key, *setting(machine, "logind.conf", key)) for key in keys)
        key, lid, where = next((one for one in found if one[1]), ("HandleLidSwitch", "", ""))
        if lid not in ("ignore", "lock"):
            causes.append(f"the lid suspends ({where or 'logind.conf'}: {key}={lid or 'suspend, the default'})")
    if any(unit_runs(machine, unit) for unit in GDM) and not _gdm_stays_awake(machine):
        causes.append("GDM runs, and nothing under /etc/gdm3 or /etc/dconf turns its suspend after 20 minutes off")
    if causes:
        yield Seen(
            evidence="; ".join(causes),
            fix="start jobs with torchtuned-run ([session] inhibit = sleep idle, and handle-lid-switch for the lid), or"
            " for good:"
            " sudo systemctl mask sleep.target suspend.target hibernate.target",
        )


def _may_sleep(machine: Machine) -> bool:
    """Whether the kernel can suspend, as far as it says so, and systemd lets it."""
    states = machine.text("/sys/power/state").split()
    allowed, _ = setting(machine, "sleep.conf", "AllowSuspend")
    able = not machine.host.exists("/sys/power/state") or bool({"mem", "standby", "freeze"} & set(states))
    return able and (not allowed or is_yes(allowed))


def _gdm_stays_awake(machine: Machine) -> bool:
    paths = ["/etc/gdm3/greeter.dconf-defaults"]
    for folder in ("/etc/dconf/db/gdm.d", "/etc/dconf/db/local.d"):
        paths += [f"{folder}/{name}" for name in machine.host.list(folder)]
    text = "\n".join(machine.text(path) for path in paths)
    awake = r"^\s*sleep-inactive-ac-(type\s*=\s*['\"](?!suspend|hibernate)|timeout\s*=\s*(u?int32\s+)?0\b)"
    return bool(re.search(awake, text, re.MULTILINE))


@rule(
    "TT047",
    "GPU memory is lost when the host sleeps",
    severity=Severity.NOTICE,
    action=Action.ASK,
    cost="programs on the GPU do not survive a suspend",
    source="pytorch/pytorch#49081",
)
def video_memory(machine: Machine) -> Iterator[Seen | Unseen]:
    """NVreg_PreserveVideoMemoryAllocations of the driver, on a host that has been suspended in this boot. Hosts that
    never sleep need nothing."""
    params = machine.text(PARAMS)
    slept = machine.number("/sys/power/suspend_stats/success") or 0
    if slept and re.search(r"^PreserveVideoMemoryAllocations: 0", params, re.MULTILINE):
        yield Seen(
            evidence=f"{PARAMS}: PreserveVideoMemoryAllocations: 0; the host slept {slept} times since boot",
            fix=f"{module_option('NVreg_PreserveVideoMemoryAllocations=1', 'nvidia-sleep')};"
            " sudo systemctl enable nvidia-suspend nvidia-hibernate nvidia-resume; sudo reboot",
        )


@rule(
    "TT048",
    "logging out deletes the shared memory of running jobs",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="a job in tmux or nohup crashes in its DataLoader workers when its user's last session ends",
    source="mlcommons/storage#447",
)
def remove_ipc(machine: Machine) -> Iterator[Seen | Unseen]:
    """logind's RemoveIPC (on by default) for users who do not linger. System users (below 1000) are spared, and so is
    a job in a unit of the system's. Looked at for each running job, and for what else the caller runs that computes on
    a GPU or has PyTorch's files in /dev/shm; a user who runs nothing has nothing to lose."""
    if not unit_runs(machine, "systemd-logind.service"):
        return
    value, where = setting(machine, "logind.conf", "RemoveIPC")
    if value and not is_yes(value):
        return
    people: list[tuple[int | None, str, str]] = [(job.uid, str(job.pid), job.id) for job in machine.jobs]
    if machine.caller:
        people += [(uid(machine), str(pid), "") for pid in _own_programs(machine)[:1]]
    for number, process, job in people:
        places = machine.text(f"/proc/{process}/cgroup")
        unit, outlives = units.unit(places), bool(units.service(places))
        if number is None or number < 1000 or outlives or not unit:
            continue
        name = user_name(machine, number)
        if not machine.host.exists(f"{LINGER}/{name}"):
            yield Seen(
                evidence=f"{where or 'logind.conf'}: RemoveIPC={value or 'yes, the default'};"
                f" {LINGER}/{name} is not there; process {process_name(machine, int(process))} is in {unit}",
                fix=f"sudo loginctl enable-linger {shlex.quote(name)}",
                job=job,
            )


def _own_programs(machine: Machine) -> list[int]:
    """The caller's processes, outside of torchtuned's jobs, that train: on a GPU, or with tensors in /dev/shm, whose
    names begin with their maker's PID."""
    jobs = {pid for job in machine.jobs for pid in machine.family(job.pid)}
    makers = [int(found[1]) for name in machine.host.list("/dev/shm") if (found := re.match(r"torch_(\d+)_", name))]
    programs = dict.fromkeys([*(pid for pid, job in machine.workers() if not job), *makers])
    me = uid(machine)
    return [pid for pid in programs if pid in machine.parents and pid not in jobs and uid(machine, str(pid)) == me]


@rule(
    "TT049",
    "logging out kills running jobs",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="nohup, screen and tmux do not help: the job ends with its session",
    source="systemd/systemd#8486",
)
def kill_processes(machine: Machine) -> Iterator[Seen | Unseen]:
    """logind's KillUserProcesses, which Debian leaves off: it ends whatever a user left running, tmux and all."""
    value, where = setting(machine, "logind.conf", "KillUserProcesses")
    if is_yes(value):
        yield Seen(
            evidence=f"{where}: KillUserProcesses={value}",
            fix="sudo mkdir -p /etc/systemd/logind.conf.d; printf '[Login]\\nKillUserProcesses=no\\n' | sudo tee"
            " /etc/systemd/logind.conf.d/99-torchtuned.conf; sudo systemctl kill -s HUP systemd-logind",
        )
