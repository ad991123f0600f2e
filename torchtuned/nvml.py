"""The child process that talks to NVML: the only code that imports pynvml.

gpus.py runs the *text* of this file in an interpreter of its own, one per operation. So a call that hangs in the
driver hangs there and not in the daemon; nothing of the driver stays open or mapped between operations (an open
handle blocks a driver reload, and a library that outlives an upgrade no longer fits the module); and the code is the
daemon's own even while a package upgrade replaces the file. Hence it uses nothing else of the package.

One JSON request on stdin: {"addresses": [...], "fields": [...]} reads, {"address", "knob", "value"} writes. Answers
are JSON lines, flushed one by one, so that what came before a hang is not lost:
    {"failed": STATE, "text": ...}                       NVML as a whole cannot be used
    {"system": {"driver", "nvml", "cuda"}}               it can
    {"begin": ADDRESS}  {"gpu": ADDRESS, "values": {...}, "errors": {FIELD: [CODE, TEXT]}}
    {"written": VALUE AFTERWARDS} or {"error": [CODE, TEXT]}
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

# nvmlReturn_t, as nvml.h numbers them
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, DRIVER_NOT_LOADED = 3, 4, 6, 9
LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST, LIB_RM_VERSION_MISMATCH = 12, 13, 15, 18
CPU_WORDS = 128  # 64 CPUs each
STATES = {
    LIBRARY_NOT_FOUND: "no-library",
    DRIVER_NOT_LOADED: "no-driver",
    LIB_RM_VERSION_MISMATCH: "mismatch",
    NO_PERMISSION: "denied",
}
COMPUTE_MODES = ["default", "exclusive_thread", "prohibited", "exclusive_process"]


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def fault(error: Exception) -> list[Any]:
    return [int(getattr(error, "value", -1)), text(error)]


def affinity(nvml: Any, gpu: Any) -> str:
    words = nvml.nvmlDeviceGetCpuAffinity(gpu, CPU_WORDS)
    return format(sum(int(word) << 64 * i for i, word in enumerate(words)), "x")


def mig(nvml: Any, gpu: Any) -> dict[str, Any]:
    current, pending = nvml.nvmlDeviceGetMigMode(gpu)
    uuids = []
    for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu) if current else 0):
        try:
            uuids.append(text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, i))))
        except nvml.NVMLError as error:
            if fault(error)[0] != NOT_FOUND:  # a slot without a device
                raise
    return {"current": bool(current), "pending": bool(pending), "uuids": uuids}


def throttle(nvml: Any, gpu: Any) -> int:
    """The clocks event reasons. The old name is asked first: every driver and binding so far has it."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
    except (nvml.NVMLError, AttributeError) as error:
        newer = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        if newer is None or (isinstance(error, nvml.NVMLError) and fault(error)[0] != FUNCTION_NOT_FOUND):
            raise
        return int(newer(gpu))


def processes(nvml: Any, gpu: Any) -> list[list[int]]:
    return [[int(p.pid), int(p.usedGpuMemory or 0)] for p in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)]


def rows(nvml: Any, gpu: Any) -> dict[str, Any]:
    correctable, uncorrectable, pending, failure = nvml.nvmlDeviceGetRemappedRows(gpu)
    return {
        "correctable": int(correctable),
        "uncorrectable": int(uncorrectable),
        "pending": bool(pending),
        "failure": bool(failure),
    }


class FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t; pynvml 11.525 has another, wrong length for the first field."""

    _fields_ = (
        ("cluster", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint32),
        ("clique", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
    )


def fabric(nvml: Any, gpu: Any) -> dict[str, int]:
    info = FabricInfo()
    nvml.nvmlDeviceGetGpuFabricInfo(gpu, ctypes.byref(info))
    return {"state": int(info.state), "status": int(info.status)}


def memory(nvml: Any, gpu: Any) -> list[int]:
    info = nvml.nvmlDeviceGetMemoryInfo(gpu)
    return [int(info.used), int(info.total)]


FIELDS: dict[str, Callable[[Any, Any], Any]] = {
    "name": lambda n, g: text(n.nvmlDeviceGetName(g)),
    "uuid": lambda n, g: text(n.nvmlDeviceGetUUID(g)),
    "affinity": affinity,
    "mig": mig,
    "persistence_mode": lambda n, g: bool(n.nvmlDeviceGetPersistenceMode(g)),
    "power": lambda n, g: int(n.nvmlDeviceGetPowerUsage(g)),
    "power_limit": lambda n, g: int(n.nvmlDeviceGetPowerManagementLimit(g)),
    "power_default": lambda n, g: int(n.nvmlDeviceGetPowerManagementDefaultLimit(g)),
    "power_enforced": lambda n, g: int(n.nvmlDeviceGetEnforcedPowerLimit(g)),
    "power_range": lambda n, g: [int(limit) for limit in n.nvmlDeviceGetPowerManagementLimitConstraints(g)],
    "temperature": lambda n, g: int(n.nvmlDeviceGetTemperature(g, n.NVML_TEMPERATURE_GPU)),
    "utilization": lambda n, g: int(n.nvmlDeviceGetUtilizationRates(g).gpu),
    "memory": memory,
    "pstate": lambda n, g: int(n.nvmlDeviceGetPerformanceState(g)),
    "throttle": throttle,
    "sm_clock": lambda n, g: int(n.nvmlDeviceGetClockInfo(g, n.NVML_CLOCK_SM)),
    "sm_clock_max": lambda n, g: int(n.nvmlDeviceGetMaxClockInfo(g, n.NVML_CLOCK_SM)),
    "application_clock": lambda n, g: [
        int(n.nvmlDeviceGetApplicationsClock(g, n.NVML_CLOCK_SM)),
        int(n.nvmlDeviceGetDefaultApplicationsClock(g, n.NVML_CLOCK_SM)),
    ],
    "compute_mode": lambda n, g: COMPUTE_MODES[int(n.nvmlDeviceGetComputeMode(g))],
    "processes": processes,
    "rows": rows,
    "retired_pending": lambda n, g: bool(n.nvmlDeviceGetRetiredPagesPendingStatus(g)),
    "link": lambda n, g: [int(n.nvmlDeviceGetCurrPcieLinkGeneration(g)), int(n.nvmlDeviceGetCurrPcieLinkWidth(g))],
    "link_max": lambda n, g: [int(n.nvmlDeviceGetMaxPcieLinkGeneration(g)), int(n.nvmlDeviceGetMaxPcieLinkWidth(g))],
    "fabric": fabric,
    "compute_capability": lambda n, g: [int(part) for part in n.nvmlDeviceGetCudaComputeCapability(g)],
}


def set_clocks(nvml: Any, gpu: Any, value: str) -> None:
    if value == "unlocked":
        nvml.nvmlDeviceResetGpuLockedClocks(gpu)
    else:
        low, _, high = value.partition("-")
        nvml.nvmlDeviceSetGpuLockedClocks(gpu, int(low), int(high or low))


KNOBS: dict[str, Callable[[Any, Any, str], Any]] = {
    "persistence_mode": lambda n, g, value: n.nvmlDeviceSetPersistenceMode(g, int(value == "on")),
    "power_limit": lambda n, g, value: n.nvmlDeviceSetPowerManagementLimit(g, int(value)),
    "compute_mode": lambda n, g, value: n.nvmlDeviceSetComputeMode(g, COMPUTE_MODES.index(value)),
    "locked_clocks": set_clocks,
}


def handle(nvml: Any, address: str) -> Any:
    # by PCI address NVML wakes no other GPU than this one; by index or UUID it looks at others too
    return nvml.nvmlDeviceGetHandleByPciBusId(address.encode())


def read(nvml: Any, addresses: list[str], fields: list[str]) -> None:
    for address in addresses:
        say(begin=address)
        values: dict[str, Any] = {}
        errors: dict[str, list[Any]] = {}
        try:
            gpu = handle(nvml, address)
        except nvml.NVMLError as error:
            say(gpu=address, values={}, errors={"handle": fault(error)})
            continue
        for field in fields:
            try:
                values[field] = FIELDS[field](nvml, gpu)
            # AttributeError: a binding older than the function; IndexError: a mode newer than this code
            except (nvml.NVMLError, AttributeError, IndexError, ValueError) as error:
                errors[field] = fault(error)
        say(gpu=address, values=values, errors=errors)


def write(nvml: Any, gpu: Any, knob: str, value: str) -> None:
    KNOBS[knob](nvml, gpu, value)
    say(written=FIELDS[knob](nvml, gpu) if knob in FIELDS else None)


def main() -> None:
    request = json.load(sys.stdin)
    try:
        import pynvml as nvml  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        say(failed="no-pynvml", text=str(error))
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        code, words = fault(error)
        say(failed=STATES.get(code, "failed"), text=words)
        return
    try:
        say(
            system={
                "driver": text(nvml.nvmlSystemGetDriverVersion()),
                "nvml": text(nvml.nvmlSystemGetNVMLVersion()),
                "cuda": int(nvml.nvmlSystemGetCudaDriverVersion()),
            }
        )
        if "knob" in request:
            write(nvml, handle(nvml, request["address"]), request["knob"], request["value"])
        else:
            read(nvml, request["addresses"], request["fields"])
    except nvml.NVMLError as error:
        say(error=fault(error))
    finally:
        nvml.nvmlShutdown()


if __name__ == "__main__":
    main()
