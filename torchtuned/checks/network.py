"""Several hosts: names and the direct way from network card to GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchtuned.checks.files import environment
from torchtuned.checks.registry import Machine, Seen, Unseen, rule
from torchtuned.errors import HostError
from torchtuned.findings import Action, Severity

RDMA = "/sys/class/infiniband"
LOCAL = ("", "localhost", "127.0.0.1", "::1")


@rule(
    "TT058",
    "the network card cannot reach GPU memory directly",
    severity=Severity.WARNING,
    action=Action.ASK,
    cost="about 10 instead of 180 GB/s between nodes in one report, without an error",
    source="NVIDIA/nccl#1676",
)
def peer_memory(machine: Machine) -> Iterator[Seen | Unseen]:
    """An InfiniBand or RoCE card and NVIDIA GPUs need nvidia_peermem for GPUDirect RDMA, or the open kernel module,
    which offers memory by dma-buf."""
    cards = machine.host.list(RDMA)
    if not cards or not machine.host.exists("/sys/module/nvidia"):
        return
    open_module = "Open Kernel Module" in machine.text("/proc/driver/nvidia/version")
    peermem = any(machine.host.exists(f"/sys/module/{name}") for name in ("nvidia_peermem", "nv_peer_mem"))
    if not peermem and not open_module:
        yield Seen(
            evidence=f"{RDMA} has {', '.join(cards)}; nvidia_peermem is not loaded and the driver is not the open one",
            fix="sudo modprobe nvidia_peermem; echo nvidia_peermem | sudo tee /etc/modules-load.d/nvidia-peermem.conf",
        )


@rule(
    "TT059",
    "this host's name means this host alone",
    severity=Severity.NOTICE,
    action=Action.TELL,
    cost="ranks of other hosts cannot connect: Gloo and NCCL wait until they time out",
    source="vllm-project/vllm#7074",
    jobs=True,
)
def host_name(machine: Machine) -> Iterator[Seen | Unseen]:
    """/etc/hosts gives the host's name a loopback address, as Debian does, and the host is one of several: it has
    InfiniBand, or a job whose MASTER_ADDR is not local. A single host is fine as it is."""
    name = machine.text("/proc/sys/kernel/hostname") or machine.text("/etc/hostname")
    line = next(
        (
            line
            for line in machine.text("/etc/hosts").splitlines()
            if re.match(r"\s*(127\.|::1\s)", line) and name in line.partition("#")[0].split()[1:]
        ),
        "",
    )
    if not name or not line:
        return
    if cards := machine.host.list(RDMA):
        yield Seen(evidence=f"/etc/hosts: {line.strip()!r}; {RDMA} has {', '.join(cards)}", fix=_FIX)
    for pid, job in machine.workers():
        try:
            env = environment(machine, str(pid))
        except HostError as error:
            yield Unseen(str(error))
            continue
        if env.get("MASTER_ADDR", "") not in (*LOCAL, name):
            yield Seen(
                evidence=f"/etc/hosts: {line.strip()!r}; process {pid} has MASTER_ADDR={env['MASTER_ADDR']}",
                fix=_FIX,
                job=job,
            )
            return


_FIX = (
    "for several hosts: export GLOO_SOCKET_IFNAME=INTERFACE NCCL_SOCKET_IFNAME=INTERFACE, or give the name its address"
)
