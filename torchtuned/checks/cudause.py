"""CUDA beyond the driver's own health: who holds GPUs, in what order they count, what keeps cuInit from working."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchtuned.checks.driver import BLACKWELL, FROM_NVIDIA, KNOWS_BLACKWELL
from torchtuned.checks.files import environment, module_option, process_name
from torchtuned.checks.registry import Machine, Seen, Unseen, rule
from torchtuned.checks.xid import kernel_lines
from torchtuned.errors import HostError, Missing
from torchtuned.findings import Action, Severity, about_gpu
from torchtuned.wording import size

HELD = 1 << 30  # bytes; a driver alone holds less, a display server seldom more
OPEN = "Open Kernel Module"
PROFILERS = (
    "/usr/bin/nsys",
    "/usr/local/cuda/bin/ncu",
    "/usr/local/cuda/bin/nsys",
    "/opt/nvidia/nsight-compute",
    "/usr/bin/ncu",
)
PARAMS = "/proc/driver/nvidia/params"
PIPES = "/tmp/nvidia-mps"
CONTROL = "nvidia-cuda-mps"  # the kernel cuts nvidia-cuda-mps-control to 15 letters


@rule(
    "TT065",
    "GPU memory is held by nobody that NVML names",
    severity=Severity.WARNING,
    action=Action.TELL,
    cost="out of memory for the next job",
    source="pytorch/pytorch#4293",
)
def invisible(machine: Machine) -> Iterator[Seen | Unseen]:
    """GPUs with more than 1 GiB in use and no compute process: a crashed job's workers, or a process of a container.
    Who has /dev/nvidia* open is looked up in /proc."""
    taken = {}
    for address, reading in machine.readings.items():
        used, _ = reading.values.get("memory", (0, 0))
        if used > HELD and "processes" in reading.values and not reading.values["processes"]:
            taken[address] = used
    if not taken:
        return
    holders, hidden = [], 0
    for pid in machine.parents:
        folder = f"/proc/{pid}/fd"
        try:
            names = machine.host.list(folder)
            if any(re.match(r"/dev/nvidia(\d|-uvm$)", _target(machine, f"{folder}/{name}")) for name in names):
                holders.append(process_name(machine, pid))
        except HostError:
            hidden += 1
    named = f"/dev/nvidia* is open in {', '.join(holders[:6])}" if holders else "no process seen has /dev/nvidia* open"
    for address, used in taken.items():
        yield Seen(
            evidence=f"GPU {address}: {size(used)} in use, NVML lists no process; {named}"
            + (f"; {hidden} processes are other users'" if hidden else ""),
            fix="end the processes named (kill PID); none named: sudo torchtuned check, or sudo fuser -v /dev/nvidia*",
            about=(about_gpu(address),),
        )


def _target(machine: Machine, path: str) -> str:
    try:
        return machine.host.link(path)
    except Missing:
        return ""


@rule(
    "TT068",
    "CUDA counts these GPUs in another order than nvidia-smi",
    severity=Severity.NOTICE,
    action=Action.JOB,
    cost="CUDA_VISIBLE_DEVICES=0 may mean another GPU than meant",
    source="gpustack/gpustack#1633",
)
def order(machine: Machine) -> Iterator[Seen | Unseen]:
    """GPUs of different models, and CUDA_DEVICE_ORDER not PCI_BUS_ID: CUDA puts the fastest first. torchtuned keys
    everything on addresses and UUIDs."""
    models = {card.device for card in machine.cards}
    if len(models) < 2 or not machine.caller:
        return
    chosen = environment(machine, "self").get("CUDA_DEVICE_ORDER", "")
    if chosen != "PCI_BUS_ID":
        named = ", ".join(f"{card.address} is {_name(machine, card.address) or card.device}" for card in machine.cards)
        yield Seen(
            evidence=f"{named}; CUDA_DEVICE_ORDER is {chosen or 'not set'}",
            fix="export CUDA_DEVICE_ORDER=PCI_BUS_ID, or torchtuned-run --gpus ADDRESS",
        )


def _name(machine: Machine, address: str) -> str:
    reading = machine.readings.get(address)
    return str(reading.values.get("name", "")) if reading else ""


@rule(
    "TT069",
    "a dead MPS server is in the way",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="CUDA fails with error 805 or 807 for whoever finds its pipe",
    source="nanoporetech/dorado#458",
)
def mps(machine: Machine) -> Iterator[Seen | Unseen]:
    """The pipe of NVIDIA's Multi-Process Service with no server behind it."""
    if "control" not in machine.host.list(PIPES):
        return
    if not any(machine.text(f"/proc/{pid}/comm").startswith(CONTROL) for pid in machine.parents):
        yield Seen(
            evidence=f"{PIPES}/control is there, and no nvidia-cuda-mps-control runs",
            fix=f"sudo rm -r {PIPES}, or start it: sudo nvidia-cuda-mps-control -d",
        )


@rule(
    "TT070",
    "the driver's flavour does not run this GPU",
    severity=Severity.ERROR,
    action=Action.ASK,
    cost="PyTorch does not see this GPU",
    source="NVIDIA/open-gpu-kernel-modules#862",
)
def flavour(machine: Machine) -> Iterator[Seen | Unseen]:
    """Blackwell and later need the open kernel module; GPUs before Turing have no GSP and need the closed one. Told
    from PCI device ids, /proc/driver/nvidia/version and, for old GPUs, the kernel log."""
    version = machine.text("/proc/driver/nvidia/version")
    if not version:
        return
    for card in machine.cards:
        if OPEN not in version and int(card.device, 16) >= BLACKWELL:
            yield Seen(
                evidence=f"{card.address} ({card.device}) is Blackwell or later; /proc/driver/nvidia/version:"
                f" {version.splitlines()[0]}",
                fix=_open_module(version),
            )
    if OPEN in version and any(card.driver != "nvidia" for card in machine.cards):
        said = [line for line in kernel_lines(machine.host) if "is not supported by open" in line]
        if said:
            yield Seen(
                evidence=f"the kernel says: {said[-1].strip()}; /proc/driver/nvidia/version: {version.splitlines()[0]}",
                fix="sudo apt install nvidia-kernel-dkms (Debian), of the driver's version; sudo reboot",
            )


def _open_module(version: str) -> str:
    """Debian 12 and 13 have drivers that do not know Blackwell; NVIDIA's know it from 570 on."""
    numbers = re.findall(r"\b(\d{3,})\.\d+", version)
    if numbers and int(numbers[0]) >= KNOWS_BLACKWELL:
        return "the open module of the same driver: sudo apt install nvidia-open (NVIDIA's repository); sudo reboot"
    return FROM_NVIDIA


@rule(
    "TT071",
    "other CUDA libraries come before torch's own",
    severity=Severity.WARNING,
    action=Action.TELL,
    cost="undefined symbols (nvJitLink) or error 804 at the first use of CUDA",
    source="pytorch/pytorch#111469, ollama/ollama#11593",
    jobs=True,
)
def libraries(machine: Machine) -> Iterator[Seen | Unseen]:
    """LD_LIBRARY_PATH with a folder that holds CUDA's libraries: wheels bring their own, and these win. Also a folder
    of forward-compatibility libraries (cuda-compat), which fail on GeForce."""
    processes = [("self", "")] if machine.caller else []
    processes += [(str(pid), job) for pid, job in machine.workers()]
    for process, job in processes:
        try:
            value = environment(machine, process).get("LD_LIBRARY_PATH", "")
        except Missing:
            continue  # it ended meanwhile
        except HostError as error:
            yield Unseen(str(error))
            continue
        for folder in filter(None, value.split(":")):
            mine = [
                name
                for name in machine.host.list(folder)
                if re.match(r"lib(cudart|nvJitLink|cublas|cudnn|nccl|cuda)\.so", name)
            ]
            if mine and "site-packages" not in folder:
                yield Seen(
                    evidence=f"/proc/{process}/environ: LD_LIBRARY_PATH has {folder}, with {', '.join(mine[:3])}",
                    fix="unset LD_LIBRARY_PATH (wheels of torch need none), or take that folder out of it",
                    job=job,
                )


@rule(
    "TT072",
    "profilers are for root only",
    severity=Severity.NOTICE,
    action=Action.ASK,
    cost="Nsight and the PyTorch profiler's hardware counters fail with ERR_NVGPUCTRPERM",
    source="NVIDIA/gpu-operator#1158",
)
def profilers(machine: Machine) -> Iterator[Seen | Unseen]:
    """RmProfilingAdminOnly of the driver, where a profiler is installed. It is NVIDIA's default, because counters tell
    one user something of another."""
    installed = [path for path in PROFILERS if machine.host.exists(path)]
    if installed and re.search(r"^RmProfilingAdminOnly: 1", machine.text(PARAMS), re.MULTILINE):
        yield Seen(
            evidence=f"{PARAMS}: RmProfilingAdminOnly: 1; {installed[0]} is installed",
            fix=f"{module_option('NVreg_RestrictProfilingToAdminUsers=0', 'nvidia-profiling')}; sudo reboot."
            " On a shared host this lets users see each other's counters",
        )
