"""Two GPUs, one on node 1 and one on node 3: places next to them, leases, hot removal. No driver, no CUDA."""

from __future__ import annotations

import json

from inside import JOB, MANAGER, cpus_of, start, stop, wait_for
from machine import Machine

GPUS = ("0000:42:00.0", "0000:82:00.0")
NODE_1, NODE_3 = {2, 3}, {6, 7}


def test_topology_knows_both_and_their_nodes(ready: Machine) -> None:
    gpus = json.loads(ready.check("torchtuned topology --json"))["gpus"]
    assert {address: gpu["numa_node"] for address, gpu in gpus.items()} == dict(zip(GPUS, (1, 3), strict=True))


def test_each_job_gets_a_gpu_and_the_cores_of_its_node(ready: Machine) -> None:
    one = start(ready, "a", f"exec torchtuned-run --gpus 1 {JOB}", user="alice")
    two = start(ready, "b", f"exec torchtuned-run --gpus 1 {JOB}", user="bob")
    assert [cpus_of(ready, one), cpus_of(ready, two)] == [NODE_1, NODE_3]
    assert (one.cuda_visible_devices, two.cuda_visible_devices) == ("0", "1")
    status, output = ready.sh("ssh bob@localhost torchtuned-run --gpus 1 true")
    assert status == 125, output
    assert "GPU" in output
    ready.check(f"kill {one.pid}")
    wait_for(ready, f"busctl get-property {MANAGER} Jobs | grep -x 'u 1'")
    free = ready.login("bob", "torchtuned-run --gpus 1 sh -c 'echo $CUDA_VISIBLE_DEVICES' 2>/dev/null")
    assert free.strip() == "0"
    stop(ready, two)


def test_a_cpu_job_may_have_the_whole_machine(ready: Machine) -> None:
    job = start(ready, "a", f"exec torchtuned-run --gpus none {JOB}", user="alice")
    assert cpus_of(ready, job) == set(range(8))
    stop(ready, job)


def test_gpus_come_and_go_on_the_bus(ready: Machine) -> None:
    ready.check(f"echo 1 >/sys/bus/pci/devices/{GPUS[1]}/remove")
    wait_for(ready, "test $(busctl tree --list org.torchtuned1 | grep -c /gpus/) = 1")
    ready.check("echo 1 >/sys/bus/pci/rescan")
    wait_for(ready, "test $(busctl tree --list org.torchtuned1 | grep -c /gpus/) = 2")
    ready.plug("screen", node=0)
    wait_for(ready, "lspci -n | grep -q 1234:")
    assert ready.check("busctl tree --list org.torchtuned1 | grep -c /gpus/").strip() == "2"
