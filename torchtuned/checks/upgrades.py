"""What upgrades do by themselves: replace the driver, restart services, reboot, refuse a module."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchtuned.checks.files import apt, apt_value, unit_enabled
from torchtuned.checks.registry import Machine, Seen, Unseen, rule
from torchtuned.checks.xid import kernel_lines
from torchtuned.errors import Missing
from torchtuned.findings import Action, Severity
from torchtuned.systemdconf import is_yes

TIMER = "apt-daily-upgrade.timer"
SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


def _upgrades(machine: Machine) -> str:
    """apt's configuration where unattended upgrades are on, else ""."""
    text = apt(machine)
    on = apt_value(text, "APT::Periodic::Unattended-Upgrade") not in ("", "0")
    return text if on and unit_enabled(machine, TIMER) else ""


@rule(
    "TT052",
    "upgrades may reboot the host by themselves",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="a job that runs then is lost",
    source="lyulyul/shine-cluster#33",
)
def reboots(machine: Machine) -> Iterator[Seen | Unseen]:
    """Unattended-Upgrade::Automatic-Reboot. Logged-in users do not stop it unless that is configured too."""
    text = _upgrades(machine)
    if is_yes(apt_value(text, "Unattended-Upgrade::Automatic-Reboot")):
        when = apt_value(text, "Unattended-Upgrade::Automatic-Reboot-Time") or "now"
        yield Seen(
            evidence=f"/etc/apt/apt.conf.d: Automatic-Reboot is on, time {when}; {TIMER} is enabled",
            fix="echo 'Unattended-Upgrade::Automatic-Reboot \"false\";' | sudo tee /etc/apt/apt.conf.d/99-no-reboot",
        )


@rule(
    "TT053",
    "upgrades may replace the GPU driver under a job",
    severity=Severity.NOTICE,
    action=Action.ASK,
    cost="running jobs go on, each new one fails until the reboot (driver/library version mismatch)",
    source="pando85/homelab#4110",
)
def driver(machine: Machine) -> Iterator[Seen | Unseen]:
    """Unattended upgrades on a host with NVIDIA's driver from a package, and no nvidia in the package blacklist.
    Holding it back also holds back its security fixes, so somebody has to do those by hand."""
    text = _upgrades(machine)
    if not text or not machine.host.exists("/sys/module/nvidia"):
        return
    packages = [
        name for name in machine.host.list("/var/lib/dpkg/info") if re.match(r"libnvidia-ml1|nvidia-driver", name)
    ]
    blocks = re.findall(r"Unattended-Upgrade::Package-Blacklist\s*\{(.*?)\}", text, re.DOTALL)
    if packages and not any("nvidia" in block for block in blocks):
        yield Seen(
            evidence=f"{TIMER} is enabled, {packages[0].partition('.')[0]} is a package, and"
            " Unattended-Upgrade::Package-Blacklist has no nvidia",
            fix='echo \'Unattended-Upgrade::Package-Blacklist { "nvidia"; "libnvidia"; "libcuda"; };\''
            " | sudo tee /etc/apt/apt.conf.d/99-nvidia; sudo apt upgrade  # the latter between jobs",
        )


@rule(
    "TT054",
    "an upgrade waits for a reboot",
    severity=Severity.NOTICE,
    action=Action.ASK,
    cost="none yet; driver and kernel may no longer fit when a module is loaded again",
    source="Azure/batch-shipyard#174",
)
def reboot_required(machine: Machine) -> Iterator[Seen | Unseen]:
    """/run/reboot-required, which packages leave that take effect with the next boot only: kernels, drivers, libc."""
    if machine.host.exists("/run/reboot-required"):
        packages = sorted(set(machine.text("/run/reboot-required.pkgs").split()))
        yield Seen(
            evidence="/run/reboot-required is there" + (f", for {', '.join(packages[:6])}" if packages else ""),
            fix="when no job runs (torchtuned jobs): sudo reboot",
        )


@rule(
    "TT055",
    "upgrades restart services without asking",
    severity=Severity.NOTICE,
    action=Action.ASK,
    cost="containers and sessions of jobs may be restarted with their service",
    source="docker/for-linux#813",
)
def needrestart(machine: Machine) -> Iterator[Seen | Unseen]:
    """needrestart in automatic mode ('a') restarts services after each upgrade unasked. The last line counts."""
    folder = "/etc/needrestart/conf.d"
    names = [name for name in machine.host.list(folder) if name.endswith(".conf")]
    where = mode = ""
    for path in ["/etc/needrestart/needrestart.conf", *(f"{folder}/{name}" for name in names)]:
        for found in re.findall(r"^\s*\$nrconf\{restart\}\s*=\s*['\"](\w)['\"]", machine.text(path), re.MULTILINE):
            where, mode = path, found
    if mode == "a":
        yield Seen(
            evidence=f"{where}: $nrconf{{restart}} = 'a'",
            fix=f"echo \"\\$nrconf{{restart}} = 'l';\" | sudo tee {folder}/zz-torchtuned.conf",
        )


@rule(
    "TT056",
    "Secure Boot refuses the GPU driver",
    severity=Severity.ERROR,
    action=Action.ASK,
    cost="no GPU works",
    source="GoogleCloudPlatform/compute-gpu-installation#18",
)
def secure_boot(machine: Machine) -> Iterator[Seen | Unseen]:
    """Secure Boot on, an NVIDIA GPU without a driver, and a module that the kernel rejected because it does not know
    the key that signed it."""
    if not machine.cards or machine.host.exists("/sys/module/nvidia"):
        return
    try:
        value = machine.host.read_bytes(SECURE_BOOT)
    except Missing:
        return  # no EFI
    if value[4:5] != b"\1":
        return
    rejected = [line for line in kernel_lines(machine.host) if "Key was rejected by service" in line]
    yield Seen(
        evidence="SecureBoot is 1 in EFI, the nvidia module is not loaded"
        + (f", and the kernel says: {rejected[-1].strip()}" if rejected else ""),
        fix="sudo mokutil --import /var/lib/dkms/mok.pub, then sudo reboot and enroll the key at the console",
        severity=None if rejected else Severity.WARNING,
    )
