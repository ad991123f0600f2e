"""NVIDIA GPUs through NVML: the door to the driver, as Host is the door to the kernel.

NVML is asked per operation in a child process with a deadline (nvml.py says why), and never about a GPU that sleeps
(power/runtime_status suspended: a question would wake a laptop's GPU) or that another driver than nvidia holds.
Everything here works, and says so in words, without pynvml, without the library, without the driver, with versions
that differ, with a GPU that fell off the bus.

How the others use it (all calls block for up to the deadline, so the daemon runs them off its loop):
    gpus = Gpus(host)
    gpus.facts()                  {address: GpuFacts} for discover.topology(host, gpus=...); kept until forget()
    gpus.sample()                 {address: Sample}: what `torchtuned gpus` and the D-Bus Gpu objects show
    gpus.busy()                   {address: (Process, ...)}: compute processes, whoever started them
    gpus.read(addresses, fields)  {address: Reading}: for checks
    gpus.get(address, knob), gpus.set(address, knob, value): for tunables/gpu.py
    gpus.status                   NvmlStatus of the last operation: what to say, what to install
    gpus.forget()                 after a hotplug event
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import Any

from torchtuned.cpuset import parse_mask
from torchtuned.errors import HostError, Missing, Refused, Unreadable
from torchtuned.host import Host
from torchtuned.nvidia import LockedClocks, asleep, functions
from torchtuned.pci import driver
from torchtuned.topology import GpuFacts

CHILD = Path(__file__).with_name("nvml.py").read_text(encoding="utf-8")

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST = 3, 4, 6, 13, 15
WORDS = {
    "ok": "",
    "no-gpu": "no GPU runs on the nvidia driver",
    "asleep": "all NVIDIA GPUs sleep; asking would wake them",
    "off": "NVML is not asked about a machine in a folder",
    "no-pynvml": "pynvml is missing: apt install python3-pynvml (Debian contrib), or nvidia-ml-py from PyPI",
    "no-library": "libnvidia-ml.so.1 is missing: apt install libnvidia-ml1 (of the driver's version)",
    "no-driver": "the NVIDIA library is there and the kernel module is not loaded",
    "mismatch": "the NVIDIA library and the loaded kernel module are of different versions: reboot or reload it",
    "denied": "the driver does not let this user ask",
    "hung": "the driver does not answer",
    "failed": "NVML failed",
}
FACTS = ("name", "uuid", "affinity", "mig")
SAMPLE = ("persistence_mode", "power", "power_limit", "temperature", "utilization", "memory", "pstate", "processes")


@dataclass(frozen=True, kw_only=True)
class NvmlStatus:
    """How NVML answered last. `state` is a key of WORDS, `text` one line for people ("" when fine).

    `driver` and `library` are versions, `cuda` the newest CUDA that the driver speaks (12.2 is 12020).
    """

    state: str
    text: str = ""
    driver: str = ""
    library: str = ""
    cuda: int = 0


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What NVML said about one GPU. A field is in `values` or in `errors` (nvmlReturn_t, words).

    `state` is "ok", "lost" (fell off the bus), "hung", "asleep", "unbound" (no or another driver) or "unknown".
    """

    address: str
    state: str
    values: Mapping[str, Any] = field(default_factory=dict)
    errors: Mapping[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Process:
    """A compute process on a GPU, and the GPU memory it holds in bytes (0: not told)."""

    pid: int
    memory: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A moment of one GPU; None is not known. Watts, degrees Celsius, per cent, bytes.

    A utilization of 100 says that a kernel was always resident, not that the GPU was busy.
    """

    address: str
    state: str
    driver_version: str = ""
    persistence: bool | None = None
    power: float | None = None
    power_limit: float | None = None
    temperature: int | None = None
    utilization: int | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    pstate: int | None = None
    processes: tuple[Process, ...] | None = None


class Gpus:
    """The NVIDIA GPUs of a machine. Thread-safe.

    A GPU that says nothing for `deadline_s` seconds hangs; without persistence mode a sound one may take three to
    wake. `python` is the interpreter, with options, that runs the child; given one, NVML is asked even for a machine
    that is a folder.
    """

    def __init__(self, host: Host, *, deadline_s: float = 10.0, python: Sequence[str] | None = None) -> None:
        self.host = host
        self.deadline_s = deadline_s
        self.status = NvmlStatus(state="no-gpu", text=WORDS["no-gpu"])
        self._python = (sys.executable, "-I") if python is None and host.real else python
        self._lock = threading.Lock()
        self._stuck: list[subprocess.Popen[bytes]] = []
        self._facts: dict[str, GpuFacts] = {}
        self.locked = LockedClocks(host)

    def addresses(self) -> tuple[str, ...]:
        """The PCI addresses of the NVIDIA GPUs here, in PCI order, whatever holds them."""
        return tuple(function.address for function in functions(self.host) if function.is_gpu)

    def forget(self) -> None:
        """Drop the facts that are kept: a GPU came or went, or its driver started anew."""
        with self._lock:
            self._facts.clear()

    def facts(self, addresses: Sequence[str] | None = None) -> dict[str, GpuFacts]:
        """Name, UUID, near CPUs and MIG devices. GPUs that NVML could not be asked about are left out."""
        wanted = self.addresses() if addresses is None else tuple(addresses)
        with self._lock:
            known = {address: self._facts[address] for address in wanted if address in self._facts}
        missing = [address for address in wanted if address not in known]
        for address, reading in self.read(missing, FACTS).items() if missing else ():
            if reading.state == "ok":
                known[address] = _facts(reading.values)
        with self._lock:
            self._facts |= known
        return known

    def sample(self, addresses: Sequence[str] | None = None) -> dict[str, Sample]:
        """Power, temperature, utilization, memory, persistence, processes. Every GPU asked for is in the answer."""
        readings = self.read(self.addresses() if addresses is None else addresses, SAMPLE)
        return {address: _sample(reading, self.status.driver) for address, reading in readings.items()}

    def busy(self, addresses: Sequence[str] | None = None) -> dict[str, tuple[Process, ...]]:
        """The compute processes on each GPU. GPUs that NVML could not be asked about are left out."""
        readings = self.read(self.addresses() if addresses is None else addresses, ("processes",))
        return {a: _processes(r.values) for a, r in readings.items() if "processes" in r.values}

    def get(self, address: str, knob: str) -> str:
        """The value of a knob: persistence_mode "on" or "off", power_limit, power_default and power_range (LOW-HIGH)
        in watts, compute_mode. Missing when this GPU, driver or pynvml does not have it or NVML cannot be asked;
        Unreadable when asking failed, with EBUSY when the GPU sleeps.
        """
        return self.value(self.read([address], (knob,))[address], knob)

    def value(self, reading: Reading, knob: str) -> str:
        """The value of a knob in what read() brought; errors as get()."""
        if knob in reading.values:
            return _text(knob, reading.values[knob])
        raise _error(reading.address, knob, reading, self.status, Unreadable)

    def set(self, address: str, knob: str, value: str) -> str:
        """Give a knob a value; returns what the driver says it is afterwards. locked_clocks ("MHZ" or "MHZ-MHZ" or
        "unlocked") cannot be read back: it is noted in `locked` first and returned as written. Missing as for get();
        Refused when the driver does not take the value, or says yes and has another one afterwards.
        """
        reading = Reading(address=address, state=self._state(address))
        if reading.state == "ok":
            number = str(round(float(value) * 1000)) if knob == "power_limit" else value
            before = self.locked.get(address)
            if knob == "locked_clocks":
                self.locked.put(address, value)
            answers, status = self._ask({"address": address, "knob": knob, "value": number})
            answer = answers[-1] if answers else {}
            if "written" in answer:
                after = value if knob == "locked_clocks" else _text(knob, answer["written"])
                if after != value:
                    raise Refused(f"{value} was accepted and {after} is in force", where=f"GPU {address} {knob}")
                return after
            if knob == "locked_clocks":
                self.locked.put(address, before)
            errors = {knob: (answer["error"][0], answer["error"][1])} if "error" in answer else {}
            reading = Reading(address=address, state=status.state, errors=errors)
        raise _error(address, knob, reading, self.status, Refused)

    def read(self, addresses: Sequence[str], fields: Sequence[str]) -> dict[str, Reading]:
        """Ask for fields (FIELDS of nvml.py) of GPUs. Every address is in the answer; a GPU that hangs costs itself
        only, as the others are asked again without it.
        """
        readings = {a: Reading(address=a, state=self._state(a)) for a in addresses}
        pending = [a for a in addresses if readings[a].state == "ok"]
        if not pending:
            sleeping = any(reading.state == "asleep" for reading in readings.values())
            self.status = _status("asleep" if sleeping else "no-gpu")
        while pending:
            answers, status = self._ask({"addresses": pending, "fields": list(fields)})
            for answer in answers:
                if "gpu" in answer:
                    readings[answer["gpu"]] = _reading(answer)
                    pending.remove(answer["gpu"])
            silent = "hung" if status.state == "hung" else "unknown"  # unknown: the child died, or could not begin
            culprit = next((a["begin"] for a in answers if a.get("begin") in pending), "")
            readings |= {a: Reading(address=a, state=silent) for a in ([culprit] if culprit else pending)}
            if not culprit:
                return readings
            pending.remove(culprit)
        return readings

    def _state(self, address: str) -> str:
        if driver(self.host, address) != "nvidia":
            return "unbound"
        return "asleep" if asleep(self.host, address) else "ok"

    def _ask(self, request: Mapping[str, Any]) -> tuple[list[dict[str, Any]], NvmlStatus]:
        """Run the child: the lines that came in time, and how it went (also kept as `status`)."""
        lines: list[dict[str, Any]] = []
        if self._python is None:
            status = _status("off")
        elif pid := self._hanging():  # more children would only queue up behind the same lock in the driver
            status = _status("hung", f"the driver does not answer: an earlier call (process {pid}) still hangs")
        else:
            command = [*self._python, "-c", CHILD]
            child = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
            try:
                output, complaint, in_time = _talk(child, json.dumps(request).encode(), self.deadline_s)
            finally:
                self._end(child)
            lines = [json.loads(line) for line in output.split(b"\n")[:-1]]
            status = _judge(lines, complaint) if in_time else _status("hung", f"no answer within {self.deadline_s:g} s")
        self.status = status
        return lines, status

    def _hanging(self) -> int:
        """The process id of a child that SIGKILL did not end, or 0."""
        with self._lock:
            self._stuck = [child for child in self._stuck if child.poll() is None]
            return self._stuck[0].pid if self._stuck else 0

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        child.kill()
        try:
            child.wait(0.5)
        except subprocess.TimeoutExpired:  # it is in the kernel, where no signal reaches it
            with self._lock:
                self._stuck.append(child)


def _talk(child: subprocess.Popen[bytes], request: bytes, patience: float) -> tuple[bytes, bytes, bool]:
    """Hand over the request and collect stdout and stderr until they close, or are silent for `patience` seconds."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:
        child.stdin.write(request)
    streams = {child.stdout: bytearray(), child.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, streams[stream])
        while selector.get_map() and (ready := selector.select(patience)):
            for key, _ in ready:
                if data := os.read(key.fd, 65536):
                    key.data.extend(data)
                else:
                    selector.unregister(key.fileobj)
        in_time = not selector.get_map()
    for stream in streams:
        assert stream is not None
        stream.close()
    output, complaint = streams.values()
    return bytes(output), bytes(complaint), in_time


def _status(state: str, text: str = "", **versions: Any) -> NvmlStatus:
    return NvmlStatus(state=state, text=text or WORDS[state], **versions)


def _judge(lines: Sequence[Mapping[str, Any]], complaint: bytes) -> NvmlStatus:
    first = lines[0] if lines else {}
    if "system" in first:
        system = first["system"]
        return _status("ok", driver=system["driver"], library=system["nvml"], cuda=system["cuda"])
    if "failed" in first and first["failed"] != "failed":
        return _status(first["failed"])
    said = first.get("text") or complaint.decode(errors="replace").strip().rpartition("\n")[2] or "no answer"
    return _status("failed", f"{WORDS['failed']}: {said}")


def _error(address: str, knob: str, reading: Reading, status: NvmlStatus, kind: type[HostError]) -> HostError:
    where = f"GPU {address} {knob}"
    code, words = reading.errors.get(knob, reading.errors.get("handle", (0, "")))
    if reading.state == "asleep":
        return kind("the GPU sleeps and is not woken for this", where=where, errno=errno.EBUSY)
    if reading.state == "unbound":
        return Missing("the GPU is not bound to the nvidia driver", where=where)
    if reading.state == "hung":
        return kind(status.text, where=where, errno=errno.ETIMEDOUT)
    if status.state == "denied":
        return kind(status.text, where=where, errno=errno.EACCES, hint="this needs root")
    if code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND, NOT_FOUND):
        return Missing(f"this GPU or driver does not have it ({words})", where=where)
    if code == NO_PERMISSION:
        return kind(words, where=where, errno=errno.EACCES, hint="this needs root")
    if code:
        return kind(words, where=where, errno=errno.EIO)
    return Missing(status.text or "NVML did not say", where=where)


def _reading(line: Mapping[str, Any]) -> Reading:
    errors = {name: (code, words) for name, (code, words) in line["errors"].items()}
    lost = any(code == GPU_IS_LOST for code, _ in errors.values())
    state = "lost" if lost else "unknown" if "handle" in errors else "ok"
    return Reading(address=line["gpu"], state=state, values=line["values"], errors=errors)


def _facts(values: Mapping[str, Any]) -> GpuFacts:
    return GpuFacts(
        name=values.get("name", ""),
        uuid=values.get("uuid", ""),
        cpus=parse_mask(values.get("affinity", "")),
        mig=tuple(values.get("mig", {}).get("uuids", ())),
    )


def _processes(values: Mapping[str, Any]) -> tuple[Process, ...]:
    return tuple(Process(pid=pid, memory=memory) for pid, memory in values["processes"])


def _sample(reading: Reading, version: str) -> Sample:
    values = reading.values
    power, limit = values.get("power"), values.get("power_limit")
    used, total = values.get("memory", (None, None))
    return Sample(
        address=reading.address,
        state=reading.state,
        driver_version=version if values else "",
        persistence=values.get("persistence_mode"),
        power=None if power is None else power / 1000,
        power_limit=None if limit is None else limit / 1000,
        temperature=values.get("temperature"),
        utilization=values.get("utilization"),
        memory_used=used,
        memory_total=total,
        pstate=values.get("pstate"),
        processes=_processes(values) if "processes" in values else None,
    )


def _text(knob: str, value: Any) -> str:
    if knob == "persistence_mode":
        return "on" if value else "off"
    if knob == "power_range":
        return f"{_watts(value[0])}-{_watts(value[1])}"
    return _watts(value) if knob.startswith("power") else str(value)


def _watts(milliwatts: int) -> str:
    return f"{milliwatts / 1000:.3f}".rstrip("0").rstrip(".")
