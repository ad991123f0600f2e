"""Small machines with the faults that real sysfs trees have, one at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from fakes.tree import CPU, NODE, PCI, machine, machine_a, machine_of, make_tree, mask, on_nodes, pairs, pci_device

from torchtuned import config, cpulimits, discover
from torchtuned.cpuset import format_list, parse_list
from torchtuned.host import Host
from torchtuned.placement import Request, place
from torchtuned.topology import GpuFacts, Topology

Files = Mapping[str, str | bytes | None]
A_CORES = pairs(0, 16, 16)
HALVES = {0: "0-7,16-23", 1: "8-15,24-31"}


def read(folder: Path, files: Files) -> Topology:
    return discover.topology(Host(make_tree(folder, files)))


def cores(found: Topology) -> list[str]:
    return [format_list(core.cpus) for core in found.cores]


def nodes(found: Topology) -> dict[int, str]:
    return {node.id: format_list(node.cpus) for node in found.nodes}


def as_maps(files: Files, *lists: str) -> dict[str, str | bytes | None]:
    """The same tree with masks for these lists."""
    names = {"cpulist": "cpumap", "thread_siblings_list": "thread_siblings", "shared_cpu_list": "shared_cpu_map"}
    changed: dict[str, str | bytes | None] = {}
    for path, content in files.items():
        name = path.rsplit("/", 1)[-1]
        if name in lists:
            assert isinstance(content, str)
            changed[path.removesuffix(name) + names[name]] = mask(content.strip()) + "\n"
        else:
            changed[path] = content
    return changed


def test_a_plain_server(tmp_path: Path) -> None:
    found = read(tmp_path, machine_a())
    assert format_list(found.online) == format_list(found.allowed) == "0-31"
    assert cores(found) == [format_list(parse_list(core)) for core in A_CORES]
    assert [format_list(cpus) for cpus in found.packages] == list(HALVES.values())
    assert found.l3 == found.llc == found.packages
    assert nodes(found) == HALVES
    assert found.nodes[1].distances == {0: 21, 1: 10}
    assert [core.package for core in found.cores] == [0] * 8 + [1] * 8
    assert {core.kind for core in found.cores} == {0}


@pytest.mark.parametrize(
    "lists", [("cpulist",), ("thread_siblings_list",), ("cpulist", "thread_siblings_list", "shared_cpu_list")]
)
def test_masks_instead_of_lists(tmp_path: Path, lists: tuple[str, ...]) -> None:
    files = as_maps(machine_a(), *lists)
    assert any(path.endswith(("cpumap", "thread_siblings")) for path in files)
    assert read(tmp_path / "maps", files) == read(tmp_path / "lists", machine_a())


@pytest.mark.parametrize("name", ["core_cpus_list", "core_cpus", "thread_siblings"])
def test_every_name_for_the_threads_of_a_core(tmp_path: Path, name: str) -> None:
    files: dict[str, str | bytes | None] = {f"{CPU}/online": "0-3"}
    for cpu in range(4):
        pair = "0,2" if cpu % 2 == 0 else "1,3"
        files[f"{CPU}/cpu{cpu}/topology/{name}"] = pair if name.endswith("list") else mask(pair)
    assert cores(read(tmp_path, files)) == ["0,2", "1,3"]


def test_nul_bytes_and_empty_files(tmp_path: Path) -> None:
    files = machine_a()
    for path, content in machine_a().items():
        if isinstance(content, str) and path.endswith("list"):
            files[path] = content.encode() + b"\0"
    files |= {f"{CPU}/cpu{cpu}/topology/core_cpus": "" for cpu in range(32)}
    files |= {f"{CPU}/cpu{cpu}/cpufreq/cpuinfo_max_freq": "" for cpu in range(32)}
    assert read(tmp_path / "bytes", files) == read(tmp_path / "plain", machine_a())


def test_four_thousand_cpus(tmp_path: Path) -> None:
    files = as_maps(machine_of(4096), "cpulist", "thread_siblings_list", "shared_cpu_list")
    for path in list(files):  # of the second threads no more is asked for than this, and making files takes long
        cpu = re.match(rf"{CPU}/cpu(\d+)/(?!topology/physical_package_id)", path)
        if cpu and int(cpu[1]) >= 2048:
            del files[path]
    found = read(tmp_path, files)
    assert (len(found.online), len(found.cores), len(found.packages), len(found.l3)) == (4096, 2048, 4, 1024)
    assert format_list(found.nodes[15].cpus) == "1920-2047,3968-4095"
    assert [format_list(gpu.local_cpus) for gpu in found.gpus] == [format_list(node.cpus) for node in found.nodes]
    assert (
        read(tmp_path / "maps", as_maps(machine_of(4096), "cpulist", "thread_siblings_list", "shared_cpu_list"))
        == found
    )


def test_a_core_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps a large machine fast: the files of each core, package and cache are read for one of its CPUs."""
    host = Host(make_tree(tmp_path, machine_of(256)))
    asked: list[str] = []
    read = Host.read

    def noted(self: Host, path: str) -> str:
        asked.append(path)
        return read(self, path)

    monkeypatch.setattr(Host, "read", noted)
    found = discover.topology(host)
    siblings = [path for path in asked if path.endswith("/topology/thread_siblings_list")]
    assert len(siblings) == len(found.cores) == 128
    assert len([path for path in asked if path.endswith("/cache/index3/level")]) == len(found.l3) == 64


def test_without_cpu_online(tmp_path: Path) -> None:
    """Some capture tools leave the lists out; the folders of the CPUs tell then, and offline ones have no topology."""
    files = machine(cores=["0,2", "1,3", "4"], online="0-2,4")
    del files[f"{CPU}/online"]
    assert format_list(read(tmp_path / "flags", files).online) == "0-2,4"
    bare = {path: content for path, content in files.items() if not path.endswith("/online")}
    assert format_list(read(tmp_path / "bare", bare | {f"{CPU}/cpu3": None}).online) == "0-2,4"
    assert format_list(read(tmp_path / "offline", {**bare, f"{CPU}/offline": "1\n"}).online) == "0,2,4"
    nothing = {f"{CPU}/cpu0": None, f"{CPU}/cpu1": None, f"{CPU}/cpufreq": None}
    found = read(tmp_path / "nothing", nothing)
    assert cores(found) == ["0", "1"]
    assert found.packages == (frozenset({0, 1}),)


def test_offline_cpus_that_other_files_still_name(tmp_path: Path) -> None:
    files = machine_a() | {f"{CPU}/online": "0-2,4-31\n"}
    found = read(tmp_path, files)
    assert cores(found)[3] == "4,20"
    assert "19" in cores(found)
    assert nodes(found)[0] == "0-2,4-7,16-23"
    assert all(3 not in group for group in (*found.packages, *found.l3, *found.llc))


def test_no_numa(tmp_path: Path) -> None:
    found = read(tmp_path, machine(cores=["0", "1"], nodes={}))
    assert (found.nodes, found.allowed_nodes) == ((), frozenset())


def test_sparse_node_ids_without_cpus_and_cpus_without_node(tmp_path: Path) -> None:
    files = machine(
        cores=[str(cpu) for cpu in range(6)],
        nodes={250: "", 33: "0-1", 8: "2-3"},
        distances={250: "20 28 10", 33: "40 10 28", 8: "10 40 20"},
    )
    files |= {f"{NODE}/online": "8,33,250\n", f"{NODE}/possible": "0-255\n", f"{NODE}/has_cpu": "8,33\n"}
    found = read(tmp_path, files)
    assert nodes(found) == {8: "2-3", 33: "0-1", 250: ""}
    assert found.nodes[2].distances == {8: 20, 33: 28, 250: 10}
    assert [node.id for node in found.nearest_nodes(250)] == [8, 33]
    assert 4 not in found.node_of


def test_nodes_by_links_when_they_have_no_lists(tmp_path: Path) -> None:
    files: dict[str, str | bytes | None] = {f"{CPU}/online": "0-2"}
    files |= {f"{NODE}/node0/cpu0": "-> ../../cpu/cpu0", f"{NODE}/node0/cpu2": "-> ../../cpu/cpu2"}
    files |= {f"{NODE}/node1/cpu1": "-> ../../cpu/cpu1", f"{NODE}/node1/cpufreq": None}
    assert nodes(read(tmp_path, files)) == {0: "0,2", 1: "1"}


def test_overlapping_nodes_are_kept_as_told(tmp_path: Path) -> None:
    found = read(tmp_path, machine(cores=["0", "1"], nodes={0: "0-1", 1: "0-1"}))
    assert nodes(found) == {0: "0-1", 1: "0-1"}
    assert found.node_of == {0: 0, 1: 0}


def test_distances_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    files = machine(cores=["0", "1"], nodes={0: "0", 1: "1"}, distances={0: "10", 1: "x 10"})
    assert [node.distances for node in read(tmp_path, files).nodes] == [{}, {}]


def test_the_last_level_of_cache_need_not_be_the_third(tmp_path: Path) -> None:
    files = machine(cores=["0", "1", "2", "3"])
    for cpu in range(4):
        folder = f"{CPU}/cpu{cpu}/cache"
        files |= {f"{folder}/index0/level": "1", f"{folder}/index0/type": "Data"}
        files |= {f"{folder}/index0/shared_cpu_list": str(cpu), f"{folder}/index9/type": "Instruction"}
        files |= {f"{folder}/index9/level": "4", f"{folder}/index9/shared_cpu_list": "0-3"}
        files |= {f"{folder}/index2/level": "2", f"{folder}/index2/type": "Unified"}
        files |= {f"{folder}/index2/shared_cpu_list": "0-1" if cpu < 2 else "2-3", f"{folder}/uevent": ""}
    found = read(tmp_path, files)
    assert found.l3 == ()
    assert [format_list(group) for group in found.llc] == ["0-1", "2-3"]


# Unlike cores


def kinds(found: Topology) -> str:
    return "".join(str(core.kind) for core in found.cores)


def test_the_two_sides_of_hybrid_intel_parts(tmp_path: Path) -> None:
    files = machine(cores=["0-1", "2-3", "4", "5", "6"])
    files |= {"sys/devices/cpu_core/cpus": "0-3\n", "sys/devices/cpu_atom/cpus": "4-6\n"}
    assert kinds(read(tmp_path / "two", files)) == "00111"
    clocks = ["5000000"] * 4 + ["3800000"] * 2 + ["2500000"]
    files |= {f"{CPU}/cpu{cpu}/cpufreq/cpuinfo_max_freq": clock for cpu, clock in enumerate(clocks)}
    assert kinds(read(tmp_path / "three", files)) == "00112"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1024", "1024", "718", "718"], "0011"),
        (["280", "855", "1024", "280"], "2102"),
        (["1024", "997", "1005", "1024"], "0000"),
        (["1024", "1024", "1024", "1024"], "0000"),
    ],
)
def test_capacities(tmp_path: Path, values: list[str], expected: str) -> None:
    files = machine(cores=["0", "1", "2", "3"])
    files |= {f"{CPU}/cpu{cpu}/cpu_capacity": value for cpu, value in enumerate(values)}
    assert kinds(read(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["3450000", "3000000", "3000000", "3450000"], "0110"),  # 15 % exactly
        (["3440000", "3000000", "3000000", "3440000"], "0000"),
        (["5700000", "5600000", "5500000", "5400000"], "0000"),  # favoured cores
        (["3900000", "2808000", "3354000", "2808000"], "0212"),
        (["x", "3000000", "4000000", "3000000"], "0101"),
    ],
)
def test_clocks(tmp_path: Path, values: list[str], expected: str) -> None:
    files = machine(cores=["0", "1", "2", "3"])
    files |= {f"{CPU}/cpu{cpu}/cpufreq/cpuinfo_max_freq": value for cpu, value in enumerate(values)}
    files |= {f"{CPU}/cpu{cpu}/cpu_capacity": "1024" for cpu in range(4)}
    assert kinds(read(tmp_path, files)) == expected


# GPUs

SERVER = machine_a(gpus=())


def with_gpu(facts: Mapping[str, str], more: Files | None = None) -> dict[str, str | bytes | None]:
    return {**SERVER, **(more or {}), **pci_device("0000:05:00.0", facts)}


def bridge(address: str, facts: Mapping[str, str]) -> dict[str, str | bytes | None]:
    return pci_device(address, {"vendor": "0x8086", "class": "0x060400", **facts})


@pytest.mark.parametrize(
    ("facts", "more", "cpus", "locality"),
    [
        ({"numa_node": "1", "local_cpulist": "0-31"}, {}, HALVES[1], "numa_node"),
        ({"local_cpulist": HALVES[1]}, {}, HALVES[1], "local_cpulist"),
        ({"local_cpus": mask("8-11")}, {}, "8-11", "local_cpulist"),
        ({"local_cpulist": "0-31"}, {}, "", "unknown"),
        ({"local_cpulist": "", "local_cpus": ""}, {}, "", "unknown"),
        ({"numa_node": "7"}, {}, "", "unknown"),
        ({"numa_node": "none"}, {}, "", "unknown"),
        ({"parents": "0000:00:01.0"}, bridge("0000:00:01.0", {"numa_node": "1"}), HALVES[1], "parent"),
        (
            {"parents": "0000:00:01.0 0000:04:00.0", "local_cpulist": "0-31"},
            {
                **bridge("0000:04:00.0", {"parents": "0000:00:01.0", "local_cpulist": "0-31"}),
                **bridge("0000:00:01.0", {"local_cpulist": HALVES[0]}),
            },
            HALVES[0],
            "parent",
        ),
        ({"parents": "0000:00:01.0"}, bridge("0000:00:01.0", {}), "", "unknown"),
    ],
)
def test_where_a_gpu_is(tmp_path: Path, facts: Mapping[str, str], more: Files, cpus: str, locality: str) -> None:
    (gpu,) = read(tmp_path, with_gpu(facts, more)).gpus
    assert (format_list(gpu.local_cpus), gpu.locality) == (cpus, locality)


def test_the_driver_s_word_comes_last(tmp_path: Path) -> None:
    facts = {"0000:05:00.0": GpuFacts(uuid="GPU-1", name="Board", cpus=parse_list(HALVES[1]), mig=("MIG-1",))}
    host = Host(make_tree(tmp_path / "unknown", with_gpu({})))
    (gpu,) = discover.topology(host, gpus=facts).gpus
    assert (format_list(gpu.local_cpus), gpu.locality) == (HALVES[1], "nvml")
    assert (gpu.uuid, gpu.name, gpu.mig) == ("GPU-1", "Board", ("MIG-1",))
    host = Host(make_tree(tmp_path / "known", with_gpu({"numa_node": "0"})))
    assert discover.topology(host, gpus=facts).gpus[0].locality == "numa_node"
    everything = {"0000:05:00.0": GpuFacts(cpus=parse_list("0-31"))}
    host = Host(tmp_path / "unknown")
    assert discover.topology(host, gpus=everything).gpus[0].locality == "unknown"


@pytest.mark.parametrize("nodes", [{0: "0-3"}, {}, {0: "0-3", 1: ""}, {0: "0-3", 1: "0-3"}])
def test_one_node_is_everywhere(tmp_path: Path, nodes: Mapping[int, str]) -> None:
    files = machine(cores=["0", "1", "2", "3"], nodes=nodes, gpus=on_nodes(-1))
    (gpu,) = read(tmp_path, files).gpus
    assert (format_list(gpu.local_cpus), gpu.locality, gpu.numa_node) == ("0-3", "single-node", None)


def test_a_node_without_cpus_means_the_nearest_that_has_some(tmp_path: Path) -> None:
    def files(distance: str) -> Files:
        rows = {0: "10 12 20", 1: "12 10 20", 2: distance}
        return machine(cores=["0", "1"], nodes={0: "0", 1: "1", 2: ""}, distances=rows, gpus=on_nodes(2))

    for distance, cpus in (("20 12 10", "1"), ("12 20 10", "0"), ("17 17 10", "0")):
        (gpu,) = read(tmp_path / distance.replace(" ", "-"), files(distance)).gpus
        assert (format_list(gpu.local_cpus), gpu.locality, gpu.numa_node) == (cpus, "nearest-node", 2)


@pytest.mark.parametrize(
    ("vendor", "kind", "counts"),
    [
        ("0x10de", "0x030000", True),
        ("0x10de", "0x030200", True),
        ("0x1002", "0x030000", True),
        ("0x1002", "0x038000", True),
        ("0x1002", "0x120000", True),
        ("0x10DE", "0x030200", True),
        ("0x10de", "0x040300", False),  # its audio function
        ("0x10de", "0x068000", False),  # NVSwitch
        ("0x10de", "0x0c0330", False),  # its USB function
        ("0x1002", "0x030200", False),
        ("0x1a03", "0x030000", False),  # ASPEED, the VGA of a management chip
        ("0x102b", "0x030000", False),  # Matrox
        ("0x1af4", "0x030000", False),  # virtio
        ("0x8086", "0x030000", False),
        ("0x8086", "0x0b4000", False),
        ("", "", False),
    ],
)
def test_what_is_a_gpu(tmp_path: Path, vendor: str, kind: str, counts: bool) -> None:  # noqa: FBT001
    found = read(tmp_path, with_gpu({"vendor": vendor, "class": kind}))
    assert bool(found.gpus) == counts
    if counts:
        assert (found.gpus[0].vendor, found.gpus[0].device) == (vendor.lower(), "0x20b0")


def test_more_kinds_can_be_watched(tmp_path: Path) -> None:
    host = Host(make_tree(tmp_path, with_gpu({"vendor": "0x8086", "class": "0x0b4000", "numa_node": "1"})))
    assert discover.topology(host, watch=config.load([("x.conf", "[gpu]\n")]).gpu.watch).gpus == ()
    wanted = config.load([("x.conf", "[gpu]\nwatch = 1234:0380 8086:0B40\n")])
    (device,) = discover.topology(host, watch=wanted.gpu.watch).gpus
    assert device.address == "0000:05:00.0"


def test_gpus_come_in_pci_order_and_virtual_functions_not_at_all(tmp_path: Path) -> None:
    files: dict[str, str | bytes | None] = dict(SERVER)
    for address in ("10000:01:00.0", "0000:b1:00.0", "0001:01:00.0", "0000:0a:00.0", "0000:0a:00.4"):
        files |= pci_device(address, {})
    files["sys/devices/pci0000:0a/0000:0a:00.4/physfn"] = "-> ../0000:0a:00.0"
    folder = make_tree(tmp_path, files)
    assert (folder / PCI / "0000:0a:00.4").is_dir()
    found = discover.topology(Host(folder))
    assert [gpu.address for gpu in found.gpus] == ["0000:0a:00.0", "0000:b1:00.0", "0001:01:00.0", "10000:01:00.0"]


def test_folders_instead_of_links(tmp_path: Path) -> None:
    files = {**SERVER, f"{PCI}/0000:05:00.0/vendor": "0x10de", f"{PCI}/0000:05:00.0/class": "0x030200\0"}
    (gpu,) = read(tmp_path, files).gpus
    assert (gpu.device, gpu.numa_node, gpu.locality, gpu.driver) == ("", None, "unknown", "")


# What a process may use


def limits(folder: Path, files: Files, pid: int = 42) -> cpulimits.Limits:
    return cpulimits.limits(Host(make_tree(folder, files)), pid)


STATUS = "Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t0-5,8\nMems_allowed_list:\t1\n"
V2 = "cgroup /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n"


def test_limits_of_a_process(tmp_path: Path) -> None:
    group = "/user.slice/user-1000.slice/session-1.scope"
    found = limits(
        tmp_path,
        {
            "proc/42/status": STATUS,
            "proc/42/cgroup": f"0::{group}\n",
            "proc/mounts": V2,
            f"sys/fs/cgroup{group}/cpu.max": "max 100000\n",
            "sys/fs/cgroup/user.slice/user-1000.slice/cpu.max": "350000 100000\n",
            "sys/fs/cgroup/user.slice/cpu.max": "800000 100000\n",
        },
    )
    assert (format_list(found.affinity), format_list(found.memory_nodes)) == ("0-5,8", "1")
    assert (found.cpu_max, found.cgroup) == (3, group)


def test_t04_an_ancestor_s_quota_under_a_child_without(tmp_path: Path) -> None:
    found = limits(
        tmp_path,
        {
            "proc/42/status": "Cpus_allowed_list:\t0-63\n",
            "proc/42/cgroup": "0::/pod/box\n",
            "proc/mounts": V2,
            "sys/fs/cgroup/pod/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
        },
    )
    assert (len(found.affinity), found.cpu_max) == (64, 2)


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [
        ("50000 100000", 1),
        ("199999 100000", 1),
        ("200000 100000", 2),
        ("1000000 250000", 4),
        ("max 100000", None),
        ("", None),
        ("300000", 3),
    ],
)
def test_quotas_are_rounded_down_to_whole_cpus(tmp_path: Path, quota: str, cpus: int | None) -> None:
    files = {"proc/42/cgroup": "0::/a\n", "proc/42/status": STATUS, "sys/fs/cgroup/a/cpu.max": quota}
    assert limits(tmp_path, files).cpu_max == cpus


def test_quota_of_cgroup_v1(tmp_path: Path) -> None:
    found = limits(
        tmp_path,
        {
            "proc/42/status": STATUS,
            "proc/42/cgroup": "5:cpu,cpuacct:/docker/box\n3:memory:/other\n0::/init.scope\n",
            "proc/mounts": "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/box/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/box/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_quota_us": "450000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_period_us": "100000\n",
        },
    )
    assert (found.cpu_max, found.cgroup) == (4, "/init.scope")


def test_a_container_sees_its_own_part_of_the_hierarchy(tmp_path: Path) -> None:
    """Without a cgroup namespace /proc/self/cgroup names the host's path, and only that part is mounted."""
    mounts = "30 25 0:26 /docker/box /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
    files = {"proc/42/status": STATUS, "proc/self/mountinfo": mounts, "sys/fs/cgroup/cpu.max": "200000 100000\n"}
    assert limits(tmp_path / "own", {**files, "proc/42/cgroup": "0::/docker/box\n"}).cpu_max == 2
    inner = {**files, "proc/42/cgroup": "0::/docker/box/job\n", "sys/fs/cgroup/job/cpu.max": "100000 100000\n"}
    assert limits(tmp_path / "inner", inner).cpu_max == 1
    assert limits(tmp_path / "outside", {**files, "proc/42/cgroup": "0::/../other\n"}).cpu_max == 2


def test_mount_points_with_spaces(tmp_path: Path) -> None:
    files = {"proc/mounts": "none /my\\040groups cgroup2 rw 0 0\n", "my groups/cpu.max": "100000 100000\n"}
    assert limits(tmp_path, files).cpu_max == 1


def test_a_process_that_is_gone_has_no_limits(tmp_path: Path) -> None:
    found = limits(tmp_path, {"sys/x": ""})
    assert (found.affinity, found.cpu_max, found.cgroup) == (frozenset(), None, "")


@pytest.mark.parametrize(
    ("files", "allowed", "mems"),
    [
        (
            {
                "proc/self/cgroup": "0::/step\n",
                "proc/mounts": V2,
                "sys/fs/cgroup/step/cpuset.cpus.effective": "0-5\n",
                "sys/fs/cgroup/step/cpuset.mems.effective": "0\n",
            },
            "0-5",
            "0",
        ),
        (  # the controller is not on for the leaf: what the nearest ancestor says holds
            {
                "proc/self/cgroup": "0::/step/leaf\n",
                "proc/mounts": V2,
                "sys/fs/cgroup/step/cpuset.cpus.effective": "4\n",
            },
            "4",
            "0-1",
        ),
        (  # a hybrid: the cpuset controller is with v1
            {
                "proc/self/cgroup": "7:cpuset:/job\n0::/user.slice\n",
                "proc/mounts": V2 + "cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n",
                "sys/fs/cgroup/user.slice/cpuset.cpus.effective": "0-1\n",
                "sys/fs/cgroup/cpuset/job/cpuset.cpus": "8-11,40\n",
                "sys/fs/cgroup/cpuset/job/cpuset.mems": "1\n",
            },
            "8-11",
            "1",
        ),
        ({"proc/self/cpuset": "/\n"}, "0-31", "0-1"),
        ({"proc/self/cgroup": "nonsense", "proc/mounts": "x", "proc/self/mountinfo": "1 - cgroup"}, "0-31", "0-1"),
        ({}, "0-31", "0-1"),
    ],
)
def test_a_folder_s_own_cpuset_files(tmp_path: Path, files: Files, allowed: str, mems: str) -> None:
    found = read(tmp_path, {**machine_a(), **files})
    assert (format_list(found.allowed), format_list(found.allowed_nodes)) == (allowed, mems)


def test_a_folder_s_cpuset_stands_for_any_process(tmp_path: Path) -> None:
    files = {**machine_a(), "proc/self/cgroup": "0::/step\n", "proc/mounts": V2}
    files |= {"sys/fs/cgroup/step/cpuset.cpus.effective": "0-5\n", "sys/fs/cgroup/step/cpu.max": "300000 100000\n"}
    host = Host(make_tree(tmp_path, files))
    assert format_list(cpulimits.limits(host, os.getpid()).affinity) == "0-5"
    assert cpulimits.limits(host, os.getpid()).cpu_max == 3
    assert format_list(discover.topology(host, caller=os.getpid()).allowed) == "0-5"


def test_this_machine() -> None:
    host = Host()
    found = discover.topology(host, caller=os.getpid())
    assert found.allowed == os.sched_getaffinity(0)
    assert found.allowed <= found.online
    assert frozenset().union(*(core.cpus for core in found.cores)) == found.online
    assert discover.topology(host).allowed == found.online
    assert cpulimits.limits(host, os.getpid()).affinity == os.sched_getaffinity(0)


def test_without_sysfs_a_process_knows_its_own_cpus(tmp_path: Path) -> None:
    """A chroot has /proc and often nothing else: a job there must still find its place."""
    status = f"proc/{os.getpid()}/status"
    found = discover.topology(Host(make_tree(tmp_path, {status: "Cpus_allowed_list:\t0-3\n"})), caller=os.getpid())
    assert (format_list(found.online), format_list(found.allowed)) == ("0-3", "0-3")
    assert [format_list(core.cpus) for core in found.cores] == ["0", "1", "2", "3"]
    grant = place(found, [], Request())
    assert format_list(grant.cpus) == "0-3"


def test_numbers_of_any_length_are_no_error(tmp_path: Path) -> None:
    """Python refuses to read more than 4,300 digits."""
    files = machine(cores=["0", "1"], nodes={0: "0", 1: "1"})
    found = read(
        tmp_path, {**files, f"{NODE}/node0/distance": f"10 {'9' * 5000}\n", f"{CPU}/cpu0/cpu_capacity": "9" * 5000}
    )
    assert found.nodes[0].distances == {}
    assert [core.kind for core in found.cores] == [0, 0]
