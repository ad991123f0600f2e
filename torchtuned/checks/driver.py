"""Is the NVIDIA driver there, of one version, and will it be after the next boot? Told from files alone."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator

from torchtuned.checks.registry import Machine, Seen, Unseen, rule
from torchtuned.errors import HostError, Missing
from torchtuned.findings import Action, Severity, about_gpu
from torchtuned.host import Host

PASSED_ON = ("vfio-pci", "pci-stub", "xen-pciback")  # a virtual machine has the GPU, on purpose
LIBRARIES = ("libnvidia-ml.so.1", "libcuda.so.1")
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
)
BLACKWELL = 0x2900  # device ids from here on are Blackwell and later, which only the open module runs
KNOWS_BLACKWELL = 570
FROM_NVIDIA = (
    f"a driver of {KNOWS_BLACKWELL} or newer with the open module, which Debian 12 and 13 do not have: sudo apt install"
    " nvidia-open (NVIDIA's repository); sudo reboot"
)
MODULE_FOLDERS = ("updates/dkms", "updates", "extra", "extra/nvidia", "weak-updates", "kernel/drivers/video")
# Debian's is nvidia-current.ko (also -current-open, -tesla-470, -legacy-390xx), NVIDIA's own nvidia.ko
MODULE = re.compile(r"nvidia(?:-(?!.*(?:uvm|drm|modeset|peermem|fs|vfio)\b)[\w-]+)?\.ko(?:\.(?:xz|zst|gz))?")
VERSION = re.compile(r"\.so\.([0-9]+\.[0-9.]+)$")


@rule(
    "TT001",
    "a GPU is not run by the nvidia driver",
    severity=Severity.ERROR,
    action=Action.ASK,
    cost="PyTorch does not see this GPU",
    source="NVIDIA/gpu-operator#8",
)
def bound(machine: Machine) -> Iterator[Seen | Unseen]:
    """An NVIDIA GPU without the nvidia driver is no GPU to PyTorch. nouveau takes it when it is not blacklisted, and
    nothing does when the module was not built or not signed. GPUs handed to virtual machines are left out."""
    loaded = machine.host.exists("/sys/module/nvidia")
    for card in machine.cards:
        if card.driver == "nvidia" or card.driver in PASSED_ON:
            continue
        if card.driver:
            evidence = f"{card.address} ({card.device}) is bound to {card.driver}"
            fix = "sudo apt install nvidia-driver (contrib non-free non-free-firmware in apt's sources); sudo reboot"
            if int(card.device, 16) >= BLACKWELL:
                fix = FROM_NVIDIA
        elif loaded:
            evidence = f"{card.address} ({card.device}) is bound to no driver, though the nvidia module is loaded"
            fix = (
                f"sudo journalctl -k -g NVRM says why; echo {card.address} | sudo tee /sys/bus/pci/drivers/nvidia/bind"
            )
        elif not machine.host.exists("/sys/module"):
            yield Unseen(f"{card.address} names no driver, and there is no /sys/module to see whether one is loaded")
            continue
        else:
            evidence = f"{card.address} ({card.device}) has no driver and the nvidia module is not loaded"
            fix = "sudo modprobe nvidia; if that fails: sudo dkms status, and sudo journalctl -k -g 'nvidia|rejected'"
        yield Seen(
            evidence=evidence,
            fix=fix,
        )


@rule(
    "TT002",
    "driver module and libraries are of different versions",
    severity=Severity.ERROR,
    action=Action.ASK,
    cost="new jobs fail: CUDA and NVML refuse a module of another version",
    source="NVIDIA driver README, API mismatch",
)
def versions(machine: Machine) -> Iterator[Seen | Unseen]:
    """The loaded module, the libraries and the module on disk belong together. After an upgrade without a reboot
    running jobs go on and each new one fails; when only the file on disk is newer, that comes with the next reload."""
    loaded = machine.text("/sys/module/nvidia/version")
    if not loaded:
        return
    libraries = {name: version for name in LIBRARIES if (version := library_version(machine.host, name))}
    kernel = machine.text("/proc/sys/kernel/osrelease")
    disk = module_version(machine.host, kernel)
    other = {name: version for name, version in libraries.items() if version != loaded}
    if not libraries:
        yield Unseen("no libnvidia-ml.so.1 or libcuda.so.1 in the usual folders")
    if other or disk not in ("", loaded):
        seen = [f"loaded module {loaded}", *(f"{name} {version}" for name, version in libraries.items())]
        if disk:
            seen.append(f"module on disk {disk}")
        yield Seen(
            severity=Severity.ERROR if other else Severity.NOTICE,
            title="the driver was upgraded without a reboot",
            evidence=", ".join(seen),
            cost="new jobs fail: CUDA and NVML refuse a module of another version"
            if other
            else "nothing yet; a reload of the module, as at the next boot, changes the version",
            fix="sudo reboot; or, when nothing holds /dev/nvidia*: sudo systemctl stop nvidia-persistenced;"
            " sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia; sudo modprobe nvidia",
        )


@rule(
    "TT003",
    "the next kernel has no NVIDIA module",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="after the next reboot no GPU works",
    source="NVIDIA/gpu-driver-container#44",
)
def next_kernel(machine: Machine) -> Iterator[Seen | Unseen]:
    """After a kernel upgrade the module has to be there for the new kernel too: DKMS may have failed, or its headers
    are missing. Debian calls the file nvidia-current.ko, NVIDIA's repository nvidia.ko; either will do."""
    host = machine.host
    if not machine.cards:
        return
    if not host.exists("/sys/module/nvidia") and not modules(host, machine.text("/proc/sys/kernel/osrelease")):
        return  # this host does not use NVIDIA's driver
    kernels = [name.removeprefix("vmlinuz-") for name in host.list("/boot") if name.startswith("vmlinuz-")]
    if not kernels:
        yield Unseen("no kernel in /boot, so the next one is not known")
        return
    kernel = max(kernels, key=_natural)
    if not modules(host, kernel):
        yield Seen(
            title="the next boot has no NVIDIA module",
            evidence=f"newest kernel is {kernel}; no nvidia.ko or nvidia-current.ko under /lib/modules/{kernel}",
            fix=f"sudo apt install linux-headers-{kernel} && sudo dkms autoinstall -k {kernel}; dkms status shows it",
        )


@rule(
    "TT004",
    "/dev/nvidia-uvm is missing",
    severity=Severity.ERROR,
    action=Action.AUTO,
    cost="CUDA cannot start (error 999 or 'no CUDA GPUs are available') unless root starts the first job",
    source="NVIDIA/enroot#106",
)
def unified_memory(machine: Machine) -> Iterator[Seen | Unseen]:
    """CUDA opens /dev/nvidia-uvm first; nvidia-smi does not need it, so all looks well until a job starts."""
    if not machine.host.exists("/sys/module/nvidia") or machine.host.exists("/dev/nvidia-uvm"):
        return
    module = "loaded" if machine.host.exists("/sys/module/nvidia_uvm") else "not loaded"
    yield Seen(
        evidence=f"the nvidia module is loaded, nvidia_uvm is {module}, and there is no /dev/nvidia-uvm",
        fix="sudo nvidia-modprobe -u -c0 (package nvidia-modprobe); it makes device nodes and nothing else",
        about=tuple(about_gpu(card.address) for card in machine.cards),
    )


def library_version(host: Host, name: str) -> str:
    """The version in the name of the file that a library's links lead to, "" when there is none."""
    for folder in LIBRARY_FOLDERS:
        path = f"{folder}/{name}"
        for _ in range(8):  # Debian goes through /etc/alternatives and a glx diversion
            try:
                target = host.link(path)
            except HostError:
                break
            path = target if target.startswith("/") else f"{path.rpartition('/')[0]}/{target}"
        if found := VERSION.search(path):
            return found[1]
    return ""


def modules(host: Host, kernel: str) -> list[str]:
    """The paths of the NVIDIA modules for a kernel."""
    root = next((r for r in (f"/lib/modules/{kernel}", f"/usr/lib/modules/{kernel}") if host.exists(r)), "")
    if not root or not kernel:
        return []
    found = [f"{root}/{folder}/{name}" for folder in MODULE_FOLDERS for name in host.list(f"{root}/{folder}")]
    try:
        found += [f"{root}/{line.partition(':')[0]}" for line in host.read(f"{root}/modules.dep").splitlines()]
    except Missing:
        pass
    named = dict.fromkeys(path for path in found if MODULE.fullmatch(path.rpartition("/")[2]))
    return [path for path in named if host.exists(path)]


def module_version(host: Host, kernel: str) -> str:
    """The version of the module on disk for a kernel: what DKMS built, else what the file says; "" if not known."""
    for name in host.list("/var/lib/dkms"):
        if MODULE.fullmatch(f"{name}.ko"):  # nvidia-fs is none
            for version in host.list(f"/var/lib/dkms/{name}"):
                if version[:1].isdigit() and host.exists(f"/var/lib/dkms/{name}/{version}/{kernel}"):
                    return version
    return next(_versions_inside(host, kernel), "")


def _versions_inside(host: Host, kernel: str) -> Iterator[str]:
    """From the .modinfo section; compressed modules are passed over, as unpacking them takes seconds."""
    for path in modules(host, kernel):
        if path.endswith(".ko") and host.stat(path).st_size:
            with (
                open(host.root / path.lstrip("/"), "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                start = data.find(b"\0version=")
                if start >= 0:
                    yield data[start + 9 : data.find(b"\0", start + 9)].decode("ascii", "replace")


def _natural(version: str) -> list[tuple[int, str]]:
    """Sort key by which 6.12.9 comes before 6.12.43."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", version)]
