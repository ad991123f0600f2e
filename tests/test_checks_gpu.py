"""The checks of driver and GPUs: for each code a machine that has the fault, and a machine that has not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from fakes import nvml
from fakes.nvml import GIB, FakeGpus

from torchtuned import checks
from torchtuned.checks import REGISTRY, run_checks, xid
from torchtuned.errors import InvalidRequest
from torchtuned.findings import Action, Finding, Severity, Unchecked
from torchtuned.gpus import Gpus
from torchtuned.host import Host

A, B = FakeGpus.address(0), FakeGpus.address(1)
DEVICES = "sys/bus/pci/devices"
LIB = "usr/lib/x86_64-linux-gnu"
LOADED, NEWER = "535.261.03", "550.163.01"
HEALTHY: Mapping[str, str] = {
    "sys/module/nvidia/version": f"{LOADED}\n",
    "sys/module/nvidia_uvm/refcnt": "0\n",
    "dev/nvidia-uvm": "",
    "proc/sys/kernel/osrelease": "6.1.0-18-amd64\n",
    "boot/vmlinuz-6.1.0-9-amd64": "",
    "boot/vmlinuz-6.1.0-18-amd64": "",
    "lib/modules/6.1.0-18-amd64/updates/dkms/nvidia-current.ko": f"\x7fELF\0license=NVIDIA\0version={LOADED}\0",
    "lib/modules/6.1.0-18-amd64/updates/dkms/nvidia-current-uvm.ko": "",
    f"{LIB}/libnvidia-ml.so.1": "-> /etc/alternatives/glx--libnvidia-ml.so.1",
    "etc/alternatives/glx--libnvidia-ml.so.1": f"-> /{LIB}/nvidia/current/libnvidia-ml.so.1",
    f"{LIB}/nvidia/current/libnvidia-ml.so.1": f"-> libnvidia-ml.so.{LOADED}",
    f"{LIB}/nvidia/current/libnvidia-ml.so.{LOADED}": "",
    f"{LIB}/libcuda.so.1": f"-> libcuda.so.{LOADED}",
    f"{LIB}/libcuda.so.{LOADED}": "",
    "var/log/dmesg": "[    0.000000] Linux version 6.1.0-18-amd64\n",
    "sys/devices/system/cpu/online": "0-15\n",
    "sys/devices/system/node/online": "0\n",
    "sys/devices/system/node/node0/cpulist": "0-15\n",
}
Make = Callable[..., FakeGpus]
FAMILY = [
    code
    for code, check in REGISTRY.items()
    if check.run.__module__ in (checks.driver.__name__, checks.gpu.__name__, checks.xid.__name__)
]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a healthy machine of two GPUs, persistence on, with these files changed (None: taken away)."""

    def make(files: Mapping[str, str | None] | None = None, **gpu: object) -> FakeGpus:
        fake = FakeGpus(tmp_path)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml.library()))
        monkeypatch.setenv("FAKE_NVML_STATE", str(fake.state))
        for i in range(2):
            fake.gpu(i, **({"persistence": 1} | (gpu if i == 0 else {})))
        fake.tree({name: text for name, text in {**HEALTHY, **(files or {})}.items() if text is not None})
        return fake

    return make


def check(fake: FakeGpus, *codes: str, ours: tuple[str, ...] = ()) -> tuple[list[Finding], list[Unchecked]]:
    host = Host(fake.root)
    return run_checks(host, Gpus(host, python=nvml.interpreter(), deadline_s=2.0), codes or FAMILY, ours=ours)


def only(fake: FakeGpus, code: str, **options: tuple[str, ...]) -> Finding:
    """The one finding of that code; also that no other check says anything."""
    findings, _ = check(fake, **options)
    assert [finding.code for finding in findings] == [code]
    return findings[0]


def rebind(fake: FakeGpus, driver: str | None) -> None:
    link = fake.root / DEVICES / A / "driver"
    link.unlink()
    if driver:
        link.symlink_to(f"../../../bus/pci/drivers/{driver}")


def test_a_healthy_machine(make: Make) -> None:
    assert check(make()) == ([], [])


def test_no_gpu_nothing_to_say(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    host = Host(tmp_path)
    assert run_checks(host, Gpus(host), FAMILY) == ([], [])


def test_tt001_nouveau(make: Make) -> None:
    fake = make()
    rebind(fake, "nouveau")
    finding = only(fake, "TT001")
    assert (finding.severity, finding.action) == (Severity.ERROR, Action.ASK)
    assert A in finding.evidence
    assert "nouveau" in finding.evidence
    assert finding.fix.startswith("sudo apt install nvidia-driver")
    (fake.root / DEVICES / A / "device").write_text("0x2b85\n")  # no driver of Debian's knows this one
    assert "sudo apt install nvidia-open" in only(fake, "TT001").fix


def test_tt001_no_driver_at_all(make: Make) -> None:
    gone = {"sys/module/nvidia/version": None, "sys/module/nvidia_uvm/refcnt": None}
    fake = make({**gone, "sys/module/usbcore/refcnt": "1\n"})
    rebind(fake, None)
    assert "module is not loaded" in only(fake, "TT001").evidence


def test_tt001_a_folder_without_modules(make: Make) -> None:
    fake = make({"sys/module/nvidia/version": None, "sys/module/nvidia_uvm/refcnt": None})
    rebind(fake, None)
    findings, unchecked = check(fake, "TT001")
    assert findings == []
    assert "no /sys/module" in unchecked[0].because


def test_tt001_passed_to_a_virtual_machine(make: Make) -> None:
    fake = make()
    rebind(fake, "vfio-pci")
    assert check(fake) == ([], [])


def test_tt002_upgraded_without_reboot(make: Make) -> None:
    """T01: one error with both versions; nothing is written, and NVML's refusal is not the end."""
    library = {f"{LIB}/libcuda.so.1": f"-> libcuda.so.{NEWER}", f"{LIB}/libcuda.so.{NEWER}": ""}
    library[f"{LIB}/nvidia/current/libnvidia-ml.so.1"] = f"-> libnvidia-ml.so.{NEWER}"
    library[f"{LIB}/nvidia/current/libnvidia-ml.so.{NEWER}"] = ""
    fake = make(library)
    fake.fail("nvmlInitWithFlags", 18)
    before = fake.state.read_text()
    findings, unchecked = check(fake)
    (finding,) = findings
    assert (finding.code, finding.severity) == ("TT002", Severity.ERROR)
    assert LOADED in finding.evidence
    assert NEWER in finding.evidence
    assert "without a reboot" in finding.title
    assert "reboot" in finding.fix
    assert any("different versions" in item.because for item in unchecked)
    assert fake.state.read_text() == before


def test_tt002_only_the_file_is_newer(make: Make) -> None:
    module = "lib/modules/6.1.0-18-amd64/updates/dkms/nvidia-current.ko"
    finding = only(make({module: f"\x7fELF\0version={NEWER}\0srcversion=X\0"}), "TT002")
    assert finding.severity is Severity.NOTICE
    assert f"module on disk {NEWER}" in finding.evidence


def test_tt002_gpudirect_storage_is_not_the_driver(make: Make) -> None:
    findings, _ = check(make({"var/lib/dkms/nvidia-fs/2.22.3/6.1.0-18-amd64/x86_64/log/make.log": ""}))
    assert findings == []


def test_tt002_the_version_that_dkms_built(make: Make) -> None:
    finding = only(make({f"var/lib/dkms/nvidia-current/{NEWER}/6.1.0-18-amd64/x86_64/log/make.log": ""}), "TT002")
    assert f"module on disk {NEWER}" in finding.evidence


def test_tt002_without_libraries(make: Make) -> None:
    fake = make(
        {f"{LIB}/libnvidia-ml.so.1": None, f"{LIB}/libcuda.so.1": None, f"{LIB}/nvidia/current/libnvidia-ml.so.1": None}
    )
    findings, (unchecked,) = check(fake, "TT002")
    assert (findings, unchecked.code) == ([], "TT002")


@pytest.mark.parametrize("name", ["nvidia-current.ko", "nvidia.ko.xz", "nvidia-current-open.ko", "nvidia-tesla-470.ko"])
def test_tt003_the_next_kernel_has_its_module(make: Make, name: str) -> None:
    """T33: Debian's name of the module, or NVIDIA's."""
    assert check(
        make({"boot/vmlinuz-6.1.0-100-amd64": "", f"lib/modules/6.1.0-100-amd64/updates/dkms/{name}": ""})
    ) == ([], [])


def test_tt003_found_through_modules_dep(make: Make) -> None:
    files = {"boot/vmlinuz-6.9": "", "lib/modules/6.9/kernel/nvidia-535/nvidia.ko": ""}
    assert check(make({**files, "lib/modules/6.9/modules.dep": "kernel/nvidia-535/nvidia.ko: kernel/x.ko\n"})) == (
        [],
        [],
    )


@pytest.mark.parametrize("others", [["nvidia-current-uvm.ko"], ["nvidia-drm.ko", "nvidia-current-modeset.ko.xz"], []])
def test_tt003_the_next_kernel_has_none(make: Make, others: list[str]) -> None:
    modules = {f"lib/modules/6.1.0-100-amd64/updates/dkms/{name}": "" for name in others}
    finding = only(make({"boot/vmlinuz-6.1.0-100-amd64": "", **modules}), "TT003")
    assert "6.1.0-100-amd64" in finding.evidence
    assert "next boot has no NVIDIA module" in finding.title


def test_tt003_without_boot(make: Make) -> None:
    findings, unchecked = check(make({"boot/vmlinuz-6.1.0-9-amd64": None, "boot/vmlinuz-6.1.0-18-amd64": None}))
    assert (findings, [item.code for item in unchecked]) == ([], ["TT003"])


def test_tt004_no_uvm(make: Make) -> None:
    finding = only(make({"dev/nvidia-uvm": None}), "TT004")
    assert finding.action is Action.AUTO
    assert "nvidia-modprobe" in finding.fix


def test_tt005_persistence_off(make: Make) -> None:
    fake = make(persistence=0)
    assert "does not run" in only(fake, "TT005").evidence
    fake.tree({"run/nvidia-persistenced/nvidia-persistenced.pid": "812\n", "proc/812/comm": "nvidia-persiste\n"})
    assert "nvidia-persistenced runs" in only(fake, "TT005").evidence
    fake.tree({f"{DEVICES}/{A}/boot_vga": "1\n"})
    assert check(fake) == ([], [])  # a display keeps the driver awake


def test_tt005_asleep_is_unchecked(make: Make) -> None:
    fake = make({f"{DEVICES}/{A}/power/runtime_status": "suspended\n"}, persistence=0)
    findings, unchecked = check(fake, "TT005")
    assert findings == []
    assert unchecked == [Unchecked(code="TT005", because=f"GPU {A} sleeps and is not woken for this")]
    assert 0 not in {gpu for _, gpu in fake.calls()}


def test_tt006_idle_proves_nothing(make: Make) -> None:
    """T07: an idle GPU in P8 runs its link at Gen1."""
    findings, unchecked = check(make(pstate=8, link_gen=1, link_width=16))
    assert findings == []
    assert [item.code for item in unchecked] == ["TT006"]
    assert "idle" in unchecked[0].because


def test_tt006_narrow_under_load(make: Make) -> None:
    """T07: the same GPU at work has 8 of 16 lanes; the ports on the way are named."""
    fake = make(pstate=0, utilization=98, link_gen=4, link_width=8)
    bridge = "sys/devices/pci0000:00/0000:00:01.0"
    (fake.root / DEVICES / A).rename(fake.root / "moved")
    files = {f"{bridge}/current_link_width": "8", f"{bridge}/max_link_width": "16"}
    files[f"{DEVICES}/0000:00:01.0"] = "-> ../../../devices/pci0000:00/0000:00:01.0"
    fake.tree({**files, f"{bridge}/{A}/current_link_width": "8", f"{bridge}/{A}/max_link_width": "16"})
    for item in (fake.root / "moved").iterdir():
        item.rename(fake.root / bridge / A / item.name)
    (fake.root / DEVICES / A).symlink_to(f"../../../devices/pci0000:00/0000:00:01.0/{A}")
    finding = only(fake, "TT006")
    assert "x8 of x16" in finding.title
    assert f"{A} x8 of x16, 0000:00:01.0 x8 of x16" in finding.evidence


def test_tt006_slow_under_load(make: Make) -> None:
    assert "Gen1 of Gen4" in only(make(utilization=98, link_gen=1), "TT006").title


@pytest.mark.parametrize(
    ("reasons", "severity", "word"),
    [
        (0x08, Severity.ERROR, "power or heat"),
        (0x48, Severity.ERROR, "too hot"),
        (0x88, Severity.ERROR, "power brake"),
        (0x20, Severity.WARNING, "driver slows down"),
    ],
)
def test_tt007_alarms(make: Make, reasons: int, severity: Severity, word: str) -> None:
    finding = only(make(utilization=99, throttle=hex(reasons)), "TT007")
    assert (finding.severity, word in finding.title) == (severity, True)


@pytest.mark.parametrize("reasons", [0x1, 0x2, 0x4, 0x10, 0x100, 0x0])
def test_tt007_normal_cases(make: Make, reasons: int) -> None:
    """Idle, application clocks at full speed, a power cap at the default limit, sync boost, display clocks."""
    assert check(make(utilization=99, throttle=hex(reasons), sm_clock=1400)) == ([], [])


def test_tt008_capped(make: Make) -> None:
    fake = make(power_limit=250_000, power_enforced=250_000)
    finding = only(fake, "TT008")
    assert (finding.severity, finding.action) == (Severity.NOTICE, Action.ASK)
    assert "limit 250 W" in finding.evidence
    fake.gpu(0, utilization=99, throttle="0x4", sm_clock=1400)
    assert only(fake, "TT008").severity is Severity.WARNING
    assert check(fake, ours=(f"gpu/{A}/power_limit_w",)) == ([], [])


def test_tt008_enforced_below_what_is_set(make: Make) -> None:
    fake = make(power_enforced=200_000)
    assert "in force 200 W" in only(fake, "TT008").evidence
    assert only(fake, "TT008", ours=(f"gpu/{A}/power_limit_w",)).code == "TT008"
    fake.gpu(0, power_enforced=390_000)
    assert check(fake) == ([], [])


def test_tt009_clocks_left_behind(make: Make) -> None:
    fake = make(utilization=99, throttle="0x2", sm_clock=900)
    assert "900 MHz under load" in only(fake, "TT009").evidence
    assert check(fake, ours=(f"gpu/{A}/clocks_mhz",)) == ([], [])
    fake.gpu(0, utilization=0)
    assert check(fake) == ([], [])  # idle: a slow clock says nothing
    fake.gpu(0, app_clock=705, app_clock_default=1215)
    assert "application clock 705" in only(fake, "TT009").evidence
    fake.gpu(0, app_clock=1215, utilization=99, sm_clock=1200)  # below the boost clock, as this card is delivered
    assert check(fake) == ([], [])


def test_tt010_xids_told_apart(make: Make) -> None:
    """T31: 79 is hardware or power, 13 the application's fault, 45 follows from a killed job."""
    log = (
        "[ 1.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.261.03\n"
        "[ 9.1] NVRM: Xid (PCI:0000:01:00): 13, pid=4711, name=python3, Graphics SM Warp Exception\n"
        "[ 9.2] NVRM: Xid (PCI:0000:01:00): 13, pid=4712, name=python3, Graphics SM Warp Exception\n"
        "[ 9.3] NVRM: Xid (PCI:0000:01:00): 45, pid=4711, name=python3, Ch 00000008\n"
        "[ 9.4] NVRM: Xid (PCI:0000:02:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
        "[ 9.5] NVRM: Xid (0000:02:00): 999, something new\n"
    )
    findings, unchecked = check(make({"var/log/dmesg": log}), "TT010")
    assert unchecked == []
    by_code = {int(re.search(r"Xid (\d+)", f.title)[1]): f for f in findings}  # type: ignore[index]
    assert set(by_code) == {13, 45, 79, 999}
    assert (by_code[13].severity, "application fault" in by_code[13].title) == (Severity.NOTICE, True)
    assert f"GPU {A}, 2 times" in by_code[13].evidence
    assert (by_code[79].severity, "hardware or power" in by_code[79].title) == (Severity.ERROR, True)
    assert B in by_code[79].evidence
    assert "power cables" in by_code[79].fix
    assert by_code[45].severity is Severity.NOTICE
    assert "catalogue" in by_code[999].title


def test_tt010_memory_and_driver() -> None:
    sides = {code: meaning.side for code, meaning in xid.XIDS.items()}
    assert {sides[code] for code in (48, 63, 64, 94, 95)} == {xid.Side.MEMORY}
    assert {sides[code] for code in (119, 120)} == {xid.Side.DRIVER}
    assert {sides[code] for code in (13, 31, 43)} == {xid.Side.JOB}
    assert all("ADDRESS" in meaning.fix or meaning.fix for meaning in xid.XIDS.values())


def test_tt010_no_log(make: Make) -> None:
    findings, unchecked = check(make({"var/log/dmesg": None}))
    assert (findings, [item.code for item in unchecked]) == ([], ["TT010"])


def test_tt011_row_remap(make: Make) -> None:
    fake = make(rows="0,2,1,0")
    finding = only(fake, "TT011")
    assert finding.severity is Severity.WARNING
    assert "drain" in finding.fix
    assert "pending yes" in finding.evidence
    fake.gpu(0, rows="0,9,0,1")
    assert (only(fake, "TT011").severity, "replaced" in only(fake, "TT011").fix) == (Severity.ERROR, True)
    fake.gpu(0, rows="3,0,0,0")  # remapped and done
    assert check(fake) == ([], [])
    fake.gpu(0, rows=None, retired_pending=1)
    assert "pages pending yes" in only(fake, "TT011").evidence


def test_tt012_fallen_off_the_bus(make: Make) -> None:
    fake = make()
    fake.fail("nvmlDeviceGetHandleByPciBusId_v2", 15, gpu=0)
    findings, unchecked = check(fake)
    assert [finding.code for finding in findings] == ["TT012"]
    assert "fallen off the bus" in findings[0].title
    assert {item.code for item in unchecked} >= {"TT005", "TT006", "TT007"}


def test_tt012_hanging(make: Make) -> None:
    fake = make()
    fake.hang("nvmlDeviceGetPersistenceMode", gpu=0)
    findings, _ = check(fake)
    assert [(f.code, f.title) for f in findings] == [("TT012", "the driver does not answer for this GPU")]


def nvswitch(driver: str = "nvidia-nvswitch", device: str = "0x1af1") -> dict[str, str]:
    path = f"{DEVICES}/0000:c3:00.0"
    files = {"vendor": "0x10de", "class": "0x068000", "device": device, "driver": f"-> ../{driver}"}
    return {f"{path}/{name}": text for name, text in files.items()}


def test_tt013_nvswitch_without_fabric_manager(make: Make) -> None:
    fake = make(nvswitch())
    assert "0000:c3:00.0" in only(fake, "TT013").evidence
    fake.tree({"proc/900/comm": "nv-fabricmanage\n"})
    assert check(fake) == ([], [])


def test_tt013_as_the_gpus_tell_it(make: Make) -> None:
    """Hopper and newer know themselves whether the fabric is up, whatever processes there are."""
    fake = make({**nvswitch(device="0x22a3"), "proc/900/comm": "nv-fabricmanage\n"}, fabric_state=1)
    fake.gpu(1, fabric_state=3)
    assert (only(fake, "TT013").severity, A in only(fake, "TT013").evidence) == (Severity.ERROR, True)
    fake.gpu(0, fabric_state=2)
    assert only(fake, "TT013").severity is Severity.NOTICE
    fake.gpu(0, fabric_state=3)
    assert check(fake) == ([], [])


def test_tt013_no_nvswitch_needs_none(make: Make) -> None:
    assert check(make(nvswitch(driver="none", device="0x0d9d"))) == ([], [])  # an old chipset's bridge


def test_tt014_mig(make: Make) -> None:
    fake = make(mig_pending=1)
    assert "MIG is off and will be on after a reset" in only(fake, "TT014").title
    fake.gpu(0, mig_current=1)
    assert "has no device" in only(fake, "TT014").title
    fake.gpu(0, **{"mig.0": "MIG-x"})
    assert check(fake) == ([], [])


def test_tt015_compute_mode(make: Make) -> None:
    fake = make(compute_mode=3)
    assert only(fake, "TT015").severity is Severity.WARNING
    assert check(fake, ours=(f"gpu/{A}/compute_mode",)) == ([], [])
    fake.gpu(0, compute_mode=2)
    assert only(fake, "TT015").severity is Severity.ERROR


def test_tt016_locality_unknown(make: Make) -> None:
    """T05: two nodes, numa_node -1 everywhere, NVML silent: said, and never node 0."""
    nodes = {
        "sys/devices/system/node/online": "0-1\n",
        "sys/devices/system/node/node0/cpulist": "0-7\n",
        "sys/devices/system/node/node1/cpulist": "8-15\n",
    }
    unknown = {f"{DEVICES}/{address}/numa_node": "-1\n" for address in (A, B)}
    fake = make({**nodes, **unknown}, affinity=None)
    fake.gpu(1, affinity="0")
    finding = only(fake, "TT016")
    assert f"{A}, {B}" in finding.evidence
    fake.gpu(0, affinity="ff")
    fake.gpu(1, affinity="ff00")
    assert check(fake) == ([], [])


def test_without_nvml_the_files_still_speak(make: Make) -> None:
    fake = make({"dev/nvidia-uvm": None}, memory_used=GIB)
    host = Host(fake.root)
    findings, unchecked = run_checks(host, Gpus(host, python=nvml.interpreter("")), FAMILY)
    assert [finding.code for finding in findings] == ["TT004"]
    assert {item.code for item in unchecked} >= {"TT005", "TT006", "TT007", "TT008", "TT014", "TT015"}
    assert any("python3-pynvml" in item.because for item in unchecked)


def test_only_some_and_unknown_codes(make: Make) -> None:
    fake = make({"dev/nvidia-uvm": None}, persistence=0)
    assert [finding.code for finding in check(fake, "TT005")[0]] == ["TT005"]
    with pytest.raises(InvalidRequest, match=r"did you mean TT\d{3}"):
        check(fake, "TT05")


def test_every_check_explains_itself_and_has_a_test() -> None:
    tests = Path(__file__).read_text()
    for code in REGISTRY:
        assert re.fullmatch(r"TT\d{3}", code)
        assert len(REGISTRY[code].explanation) > 60
        if REGISTRY[code].run.__module__ in (checks.driver.__name__, checks.gpu.__name__, checks.xid.__name__):
            assert f"def test_{code.lower()}" in tests


def test_documents(make: Make) -> None:
    document = only(make({"dev/nvidia-uvm": None}), "TT004").document()
    assert document["class"] == "AUTO"
    assert set(document) == {"code", "severity", "class", "title", "evidence", "cost", "fix", "source", "about"}
    assert Unchecked(code="TT001", because="x").document() == {"code": "TT001", "because": "x"}
