"""Does CUDA start at all? nvidia-smi works on many a machine on which it does not.

cuInit of the driver's library is called, which makes no context and takes no GPU memory, in a child with a deadline:
it may hang in the driver, and what it opens must be closed again. It runs as the user who asks and with the libraries
that this user gets, so the daemon leaves it alone. It wakes GPUs that sleep and loads nvidia_uvm, so where either would
happen it is not called.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from torchtuned.checks.files import module_option
from torchtuned.checks.registry import Machine, Seen, Unseen, rule
from torchtuned.errors import Missing
from torchtuned.findings import Action, Severity
from torchtuned.host import Host
from torchtuned.nvidia import asleep

RESULT = "/.torchtuned/cuinit"  # of a machine that is a folder: what start() told there
DEADLINE_S = 20.0  # eight GPUs without persistence mode take several seconds
CHILD = """\
import ctypes
code = ctypes.CDLL("libcuda.so.1").cuInit(0)
with open("/proc/self/maps") as maps:
    print(code, next((line.split()[-1] for line in maps if "libcuda.so" in line), ""), flush=True)
"""
HMM = "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"
RELOAD = "when nothing holds /dev/nvidia-uvm: sudo rmmod nvidia_uvm; sudo modprobe nvidia_uvm; else sudo reboot"
NOT_INITIALIZED = 3
MEANINGS = {
    100: ("no device", "look whether this user may open /dev/nvidia* (ls -l), and at sudo journalctl -k -g NVRM"),
    802: ("system not yet initialized", "TT013 says whether the Fabric Manager runs; wait for it"),
    803: ("driver and library differ", "sudo reboot (TT002 says which are of what version)"),
    804: ("compatibility libraries that this GPU does not take", "unset LD_LIBRARY_PATH, or sudo apt remove the"
          " cuda-compat package that the library is of"),
    805: ("the MPS server does not answer", "TT069 says more: sudo rm -r /tmp/nvidia-mps, or start its server"),
    999: ("unknown error, as after a suspend", RELOAD),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Start:
    """How cuInit ended: its CUresult and the library that it was in. None: not known, `because`."""

    code: int | None
    library: str = ""
    because: str = ""

    @property
    def text(self) -> str:
        """As a folder keeps it."""
        return f"{self.code} {self.library}\n" if self.code is not None else ""


def start(host: Host) -> Start:
    """Start CUDA, or read how that went on a machine that is a folder. Missing where that was not kept."""
    if not host.real:
        code, _, library = host.read(RESULT).partition(" ")
        return Start(code=int(code), library=library)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", CHILD],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        said, complaint = child.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        child.kill()  # in the driver no signal may reach it: it is not waited for
        return Start(code=None, because=f"cuInit did not answer within {DEADLINE_S:g} s")
    code, _, library = said.strip().partition(" ")
    if not code.isdecimal():
        why = complaint.strip().rpartition("\n")[2] or f"the child ended with status {child.returncode}"
        return Start(code=None, because=f"cuInit could not be called: {why}")
    return Start(code=int(code), library=library)


def startable(machine: Machine) -> bool:
    """Whether there is a GPU for CUDA, and its device nodes are there already."""
    return any(card.driver == "nvidia" for card in machine.cards) and machine.host.exists("/dev/nvidia-uvm")


def sleeping(machine: Machine) -> str:
    """The address of a GPU that would be woken, "" without one."""
    return next((card.address for card in machine.cards if asleep(machine.host, card.address)), "")


@rule(
    "TT077",
    "CUDA does not start",
    severity=Severity.ERROR,
    action=Action.ASK,
    cost="torch.cuda.is_available() is False, though nvidia-smi works",
    source="NVIDIA/open-gpu-kernel-modules#797, pytorch/pytorch#111469, ollama/ollama#11593",
)
def starts(machine: Machine) -> Iterator[Seen | Unseen]:
    """cuInit, the first call of every CUDA program, made in a child as the user who asks: error 3 comes from the
    kernel's heterogeneous memory management with some drivers, 804 from compatibility libraries, 999 after a suspend.
    It is not called where a GPU sleeps or nvidia_uvm is not loaded, as it would change that."""
    if not machine.caller or not startable(machine):
        return
    if address := sleeping(machine):
        yield Unseen(f"GPU {address} sleeps, and starting CUDA would wake it")
        return
    try:
        told = start(machine.host)
    except Missing:
        yield Unseen("CUDA is not started for a machine in a folder")
        return
    if told.code is None:
        yield Unseen(told.because)
    elif told.code:
        yield _seen(machine, told)


def _seen(machine: Machine, told: Start) -> Seen:
    evidence = f"cuInit of {told.library or 'libcuda.so.1'} gave {told.code}"
    if told.code == NOT_INITIALIZED and machine.text(HMM) in ("N", "0"):
        return Seen(
            title="CUDA does not start: error 3, not initialized",
            evidence=f"{evidence}; {HMM} is {machine.text(HMM)}",
            fix=f"{module_option('uvm_disable_hmm=1', 'nvidia-uvm', 'nvidia_uvm')}; sudo reboot",
        )
    what, fix = MEANINGS.get(told.code or 0, ("", "sudo journalctl -k -g 'NVRM|nvidia' may say why"))
    return Seen(
        title=f"CUDA does not start: error {told.code}" + (f", {what}" if what else ""), evidence=evidence, fix=fix
    )
