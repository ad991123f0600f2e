"""Two GPUs, one on node 1 and one on node 3: places next to them, leases, hot removal. No driver, no CUDA."""

from __future__ import annotations

import json
import os

import pytest
from inside import JOB, MANAGER, cpus_of, listed, start, stop, wait_for
from machine import Machine

GPUS = ("0000:42:00.0", "0000:82:00.0")
NODE_1, NODE_3 = {2, 3}, {6, 7}
SHOWN = "busctl tree --list org.torchtuned1 | grep -c /gpus/"
STORM = int(os.environ.get("TORCHTUNED_STORM", "100"))  # times that a GPU goes and comes
# The storm is on one GPU's own bus. After it comes the other one, which nothing that lags behind can show too early.
STORM_SCRIPT = r"""
cd /sys/bus/pci/devices; daemon=$(systemctl show -P MainPID torchtuned); one={one} two={two} path={path}
ms() {{ echo $(($(date +%s%N) / 1000000 - from)); }}
echo 1 >$one/remove
until [ "$(busctl tree --list org.torchtuned1 | grep -c /gpus/)" = 1 ]; do sleep 0.2; done
from=0; from=$(ms); cpu() {{ cut -d ' ' -f 14,15 /proc/$daemon/stat; }}; set -- $(cpu)
for i in $(seq {rounds}); do echo 1 >$two/remove; echo 1 >/sys/class/pci_bus/0000:82/rescan; done
echo "storm_ms $(ms)"
echo 1 >/sys/bus/pci/rescan
from=0; from=$(ms); (udevadm settle; echo "udev_ms $(ms)" >/run/udev_ms) &
show() {{ busctl get-property org.torchtuned1 $path org.torchtuned1.Gpu Job; }}
until show >/dev/null 2>&1 || [ $(ms) -gt 60000 ]; do :; done
echo "shown_ms $(ms)"
wait; cat /run/udev_ms
set -- $1 $2 $(cpu); echo "daemon_cpu_ms $((($3 + $4 - $1 - $2) * 10))"
grep VmRSS /proc/$daemon/status | sed 's/:\s*/_kib /; s/ kB//'
"""


@pytest.fixture(scope="module", autouse=True)
def gpus(machine: Machine) -> None:
    """GPUs, where no earlier file has given any to the machine."""
    if machine.gpus != (1, 3):
        machine.check("sync")
        machine.power_cut()
        machine.gpus = (1, 3)
        machine.boot()


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


def test_a_lease_ends_with_its_gpu_and_its_job_stays_where_it_is(ready: Machine) -> None:
    job = start(ready, "a", f"exec torchtuned-run --gpus {GPUS[1]} {JOB}", user="alice")
    ready.check(f"echo 1 >/sys/bus/pci/devices/{GPUS[1]}/remove")
    wait_for(ready, "torchtuned jobs --json | grep 'is gone'")
    (row,) = listed(ready)
    assert (row["gpus"], row["state"], row["pid"]) == ([], "running", job.pid)
    ready.check("echo 1 >/sys/bus/pci/rescan")
    wait_for(ready, f"test $({SHOWN}) = 2")
    assert cpus_of(ready, job) == NODE_3
    ready.login("bob", f"torchtuned-run --quiet --gpus {GPUS[1]} true")
    stop(ready, job)


def test_a_newcomer_after_a_storm_of_hotplug_is_usable_at_once(ready: Machine, suite: str) -> None:
    """Within two seconds of the time when udev, which all events go through, is done with what came before it."""
    path = f"/org/torchtuned1/gpus/{GPUS[0].replace(':', '_').replace('.', '_')}"
    script = STORM_SCRIPT.format(one=GPUS[0], two=GPUS[1], path=path, rounds=STORM)
    took = dict(line.split() for line in ready.check(script, 300 + 3 * STORM).splitlines())
    print(f"{suite}, {STORM} removes and rescans: {took}")
    assert ready.check(SHOWN).strip() == "2"
    ready.login("alice", f"torchtuned-run --quiet --gpus {GPUS[0]} true")
    assert int(took["shown_ms"]) < int(took["udev_ms"]) + 2000


def test_gpus_come_and_go_on_the_bus(ready: Machine) -> None:
    ready.check(f"echo 1 >/sys/bus/pci/devices/{GPUS[1]}/remove")
    wait_for(ready, f"test $({SHOWN}) = 1")
    ready.check("echo 1 >/sys/bus/pci/rescan")
    wait_for(ready, f"test $({SHOWN}) = 2")
    ready.plug("screen", node=0)
    wait_for(ready, "lspci -n | grep -q 1234:")
    assert ready.check(SHOWN).strip() == "2"
