"""Real machines, against what lscpu and hwloc say of them."""

from __future__ import annotations

from typing import Any

from conftest import Snapshot

from torchtuned import discover, pci
from torchtuned.cpuset import parse_list
from torchtuned.host import Host
from torchtuned.placement import Request, documents, place


def test_the_same_answer_as_lscpu_and_hwloc(snapshot: Snapshot) -> None:
    document = documents.topology_document(discover.topology(Host(snapshot.root)))
    agreed = snapshot.agreed
    for key in ("online", "allowed_cpus", "cores", "packages", "l3", "node_cpus"):
        assert document[key] == agreed[key], key
    assert [str(node) for node in document["nodes_without_cpus"]] == sorted(agreed["nodes_without_cpus"])


def test_memory_is_allowed_where_hwloc_says(snapshot: Snapshot) -> None:
    found = discover.topology(Host(snapshot.root))
    if found.nodes:  # without a node directory hwloc makes up a node 0
        assert found.allowed_nodes == parse_list(snapshot.agreed["allowed_nodes"])


def test_gpus_are_those_of_nvidia_and_amd(snapshot: Snapshot) -> None:
    found = discover.topology(Host(snapshot.root))
    counted = ("0x10de 0x0300", "0x10de 0x0302", "0x1002 0x0300", "0x1002 0x0380", "0x1002 0x1200")
    wanted = {
        address: device
        for address, device in snapshot.agreed["gpus_and_accelerators"].items()
        if f"{device['vendor']} {device['class']}" in counted
    }
    assert [gpu.address for gpu in found.gpus] == sorted(wanted)
    for gpu in found.gpus:
        device = wanted[gpu.address]
        assert (gpu.vendor, gpu.device) == (device["vendor"], device["device"])
        assert gpu.numa_node == (None if device["kernel_numa_node"] == -1 else device["kernel_numa_node"])
        assert gpu.local_cpus == parse_list(device["hwloc_local_cpus"])


def test_node_of_every_pci_device(snapshot: Snapshot) -> None:
    """Watching every vendor and class there is makes every device count, so all can be compared."""
    host = Host(snapshot.root)
    kinds = {
        (host.read(f"{pci.DEVICES}/{name}/vendor").lower(), host.read(f"{pci.DEVICES}/{name}/class").lower()[:6])
        for name in host.list(pci.DEVICES)
    }
    found = {gpu.address: gpu for gpu in discover.topology(host, watch=kinds).gpus}
    agreed: dict[str, Any] = snapshot.agreed["pci_by_kernel_numa_node"]
    nodes = {address: node for node, addresses in agreed.items() for address in addresses if address in found}
    virtual = {name for name in host.list(pci.DEVICES) if host.exists(f"{pci.DEVICES}/{name}/physfn")}
    assert set(found) == set(host.list(pci.DEVICES)) - virtual  # a virtual function is not a device of its own here
    assert {address: str(found[address].numa_node) for address in nodes} == {
        address: "None" if node == "-1" else node for address, node in nodes.items()
    }


def test_a_job_for_every_gpu_and_one_for_none(snapshot: Snapshot) -> None:
    found = discover.topology(Host(snapshot.root))
    first = place(found, [], Request(gpus=tuple(gpu.address for gpu in found.gpus)))
    whole = {cpu for core in found.cores if core.cpus & first.cpus for cpu in core.cpus & found.allowed}
    assert first.cpus
    assert first.cpus == whole <= found.allowed - found.isolated
    second = place(found, [first], Request(gpus=()))
    assert second.shared or not second.cpus & first.cpus
    nodes = {node.id for node in found.nodes if node.cpus & first.cpus}
    assert first.memory_nodes == nodes & found.allowed_nodes or not nodes & found.allowed_nodes
