"""Several hosts: names and the direct way from network card to GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchtuned.checks.files import environment
from torchtuned.checks.registry import Machine, Seen, Unseen, rule
from torchtuned.errors import HostError
from torchtuned.findings import Action, Severity

RDMA = "/sys/class/infiniband"
LOCAL = ("", "localhost", "127", "::1")  # up to the first dot
CHOSEN = "GLOO_SOCKET_IFNAME"


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
    """The first line of /etc/hosts with the host's name gives it a loopback address, as Debian does, and the host is
    one of several: it is on an InfiniBand fabric, or runs a part of a job's ranks, or a job whose MASTER_ADDR is not
    local. A single host is fine as it is, and so is one where GLOO_SOCKET_IFNAME is set."""
    name = machine.text("/proc/sys/kernel/hostname") or machine.text("/etc/hostname")
    hosts = (line.partition("#")[0].strip() for line in machine.text("/etc/hosts").splitlines())
    line = next((line for line in hosts if name in line.split()[1:]), "")
    if not name or not re.match(r"127\.|::1\s", line):
        return
    chosen = machine.caller and f"{CHOSEN}=" in machine.text("/proc/self/environ")
    if (fabrics := _fabrics(machine)) and not chosen:
        yield Seen(evidence=f"/etc/hosts: {line!r}; {RDMA}: {', '.join(fabrics)} on InfiniBand", fix=_FIX)
    for pid, job in machine.workers():
        try:
            env = environment(machine, str(pid))
        except HostError as error:
            yield Unseen(str(error))
            continue
        elsewhere = env.get("MASTER_ADDR", "").partition(".")[0] not in (*LOCAL, name.partition(".")[0])
        ranks, here = env.get("WORLD_SIZE", ""), env.get("LOCAL_WORLD_SIZE", "")
        if (ranks != here if ranks and here else elsewhere) and CHOSEN not in env:
            told = [f"{name}={env[name]}" for name in ("MASTER_ADDR", "WORLD_SIZE", "LOCAL_WORLD_SIZE") if name in env]
            yield Seen(
                evidence=f"/etc/hosts: {line!r}; process {pid} has {', '.join(told)}",
                fix=_FIX,
                job=job,
            )
            return


def _fabrics(machine: Machine) -> list[str]:
    """The cards with a port that is up on InfiniBand. Ethernet cards are listed there too, for RoCE."""

    def up(port: str) -> bool:
        return machine.text(f"{port}/link_layer") == "InfiniBand" and "ACTIVE" in machine.text(f"{port}/state")

    folders = {card: f"{RDMA}/{card}/ports" for card in machine.host.list(RDMA)}
    return [card for card, ports in folders.items() if any(up(f"{ports}/{port}") for port in machine.host.list(ports))]


_FIX = (
    "for several hosts: export GLOO_SOCKET_IFNAME=INTERFACE NCCL_SOCKET_IFNAME=INTERFACE, or give the name its address"
)
