"""Containers with GPUs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from torchtuned.checks.files import unit_runs
from torchtuned.checks.registry import Machine, Seen, Unseen, rule
from torchtuned.findings import Action, Severity

DAEMON = "/etc/docker/daemon.json"
MAJOR = 195  # of /dev/nvidiaN
LINK = "sudo nvidia-ctk system create-dev-char-symlinks --create-all"
UDEV = (
    'ACTION=="add", DEVPATH=="/bus/pci/drivers/nvidia",'
    ' RUN+="/usr/bin/nvidia-ctk system create-dev-char-symlinks --create-all"'
)


@rule(
    "TT057",
    "containers lose their GPUs at the next daemon-reload",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="'NVML: Unknown Error' in every running container, after any package that reloads systemd",
    source="NVIDIA/nvidia-container-toolkit#48",
)
def device_links(machine: Machine) -> Iterator[Seen | Unseen]:
    """systemd sets the device rules of a container anew at each daemon-reload and finds devices by /dev/char, where
    NVIDIA's module leaves no links. Docker with the systemd cgroup driver (the default with cgroup v2) is concerned."""
    host = machine.host
    if not host.exists("/sys/module/nvidia") or not unit_runs(machine, "docker.service"):
        return
    try:
        options = json.loads(machine.text(DAEMON) or "{}").get("exec-opts", [])
    except (ValueError, AttributeError):
        yield Unseen(f"{DAEMON} is not JSON")
        return
    chosen = [re.sub(r"^native\.cgroupdriver=", "", str(option)) for option in options if "cgroupdriver" in str(option)]
    unified = host.exists("/sys/fs/cgroup/cgroup.controllers")
    driver = chosen[-1] if chosen else "systemd" if unified else "cgroupfs"
    links = [name for name in host.list("/dev/char") if name.startswith(f"{MAJOR}:")]
    if driver == "systemd" and not links:
        yield Seen(
            evidence=f"Docker's cgroup driver is systemd ({DAEMON if chosen else 'the default with cgroup v2'});"
            f" /dev/char has no {MAJOR}:*",
            fix=f"{LINK}; and at each boot: echo '{UDEV}' | sudo tee /etc/udev/rules.d/71-nvidia-dev-char.rules",
        )
