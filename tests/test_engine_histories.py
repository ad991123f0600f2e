"""Random histories of a machine: policies come and go, others change knobs, CPUs go offline, steps fail, the process
is killed and the machine reboots. At the end undo leaves what the machine would have had without torchtuned."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fakes.fuzz import often
from fakes.kernel import CPUFREQ, EPP, Kernel, policy
from fakes.policy import Desk, by_knob
from hypothesis import example, given
from hypothesis import strategies as st

from torchtuned.errors import Failed, HostError, Refused
from torchtuned.policy import Outcome, Row

SWAPPINESS = "/proc/sys/vm/swappiness"
SUPPLY = "/sys/class/power_supply/BAT0"
FILES = {
    f"{SUPPLY}/type": "Battery",
    f"{SUPPLY}/status": "Full",
    "/proc/sys/vm/swappiness": "60",
    "/proc/sys/vm/dirty_bytes": "0",
    "/proc/sys/vm/dirty_ratio": "20",
    "/proc/sys/net/core/somaxconn": "128",
    **policy(0, "amd-pstate-epp", "powersave", governors="performance powersave schedutil", epp="balance_power"),
    **policy(1, "intel_pstate", "powersave", governors="performance powersave schedutil", epp="balance_power"),
    **policy(2, "acpi-cpufreq", "userspace"),
    f"{CPUFREQ}/policy0/boost": "1",
    f"{CPUFREQ}/policy1/boost": "0",
    "/sys/firmware/acpi/platform_profile": "balanced",
    "/sys/firmware/acpi/platform_profile_choices": "low-power balanced performance",
    "/sys/block/sda/queue/scheduler": "[none] mq-deadline kyber bfq",
    "/sys/block/sda/queue/nr_requests": "333",
    "/sys/block/sda/queue/read_ahead_kb": "128",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
    "/proc/sys/vm/min_free_kbytes": "30000",
}
MACHINES = (FILES, FILES | {f"{CPUFREQ}/boost": "1"})
"""Boost is a knob of each policy, or there is one switch for all."""
PREFER = "energy_performance_preference = balance_performance"
TEXTS = (
    "[cpu]\ngovernor = performance\n[sysctl]\nvm.swappiness = <=10\nnet.core.somaxconn = >=4096\n",
    f"[cpu]\ngovernor = performance @jobs\n{PREFER}\n[sysctl]\nvm.dirty_bytes = 500000000 @jobs\nvm.swappiness = 20\n",
    f"[cpu]\n{PREFER} @jobs\n[sysctl]\nvm.dirty_ratio = 40\nnet.core.somaxconn = >=2048 @jobs\n",
    "[cpu]\nboost = off\nplatform_profile = performance @jobs\n[memory]\ntransparent_hugepage = madvise @jobs\n"
    "[block:a]\ndevice = sda\nread_ahead_kb = >=4096\nscheduler = mq-deadline @jobs\n",
    "[cpu]\nboost = off\ngovernor = ondemand|performance\n[memory]\ntransparent_hugepage = always\n",
    "[cpu]\nboost = off @jobs\nplatform_profile = performance\ngovernor = performance\n"
    "[block:a]\ndevice = sda\nread_ahead_kb = 1024\nscheduler = bfq|mq-deadline\n",
    "[cpu]\ngovernor = keep\n",
)
KNOBS = ("cpu", "cpu/policy0/governor", "sysctl", "sysctl/vm.dirty_*", f"cpu/*/{EPP}", "cpu/*boost", "block/*")
OTHERS = (
    ("/proc/sys/vm/swappiness", "30"),
    ("/proc/sys/vm/swappiness", "60"),
    ("/proc/sys/vm/dirty_bytes", "77777777"),
    ("/proc/sys/vm/dirty_ratio", "15"),
    ("/proc/sys/net/core/somaxconn", "512"),
    (f"{CPUFREQ}/policy0/scaling_governor", "schedutil"),
    (f"{CPUFREQ}/policy1/scaling_governor", "schedutil"),
    (f"{CPUFREQ}/policy0/scaling_governor", "powersave"),
    (f"{CPUFREQ}/policy0/{EPP}", "power"),
    (f"{CPUFREQ}/policy1/{EPP}", "power"),
    (f"{CPUFREQ}/policy1/boost", "1"),
    ("/sys/firmware/acpi/platform_profile", "low-power"),
    ("/sys/block/sda/queue/scheduler", "kyber"),
    ("/sys/block/sda/queue/read_ahead_kb", "64"),
)
"""What others write. None of it is a value of ours: nobody could tell those apart."""

COUPLED = (
    {"sysctl/vm.dirty_bytes", "sysctl/vm.dirty_ratio"},
    *({f"cpu/policy{n}/governor", f"cpu/policy{n}/{EPP}"} for n in (0, 1)),
    {"cpu/boost", "cpu/policy0/boost", "cpu/policy1/boost"},
)


class Killed(BaseException):
    """The process ends here."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong during one operation, at the step of that number; `times` further steps, too."""

    kind: str
    at: int
    times: int = 1
    number: int = errno.EINVAL


FAULTS = st.none() | st.builds(
    Fault,
    st.sampled_from(["kill", "refuse", "full"]),
    st.integers(0, 30),
    st.sampled_from([1, 1, 3, 100]),
    st.sampled_from([errno.EINVAL, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EIO]),
)
OPERATIONS = st.one_of(
    st.tuples(st.just("apply"), st.sampled_from(TEXTS), st.booleans(), FAULTS),
    st.tuples(st.just("apply"), st.sampled_from(TEXTS), st.booleans(), FAULTS),
    st.tuples(st.just("newcomer"), st.sampled_from(TEXTS), st.sampled_from(KNOBS), FAULTS),
    st.tuples(
        st.just("undo"),
        st.sampled_from([(), *((knob,) for knob in KNOBS)]),
        st.sampled_from([(), (), ("tuned",), ("auto-cpufreq",)]),
        FAULTS,
    ),
    st.tuples(st.just("verify"), st.sampled_from(TEXTS)),
    st.tuples(st.just("tuner"), st.sampled_from(TEXTS), st.sampled_from(["tuned", "auto-cpufreq"]), FAULTS),
    st.tuples(st.just("visit"), st.sampled_from(TEXTS), st.sampled_from(["stays", "undo", "restart"]), FAULTS),
    st.tuples(st.just("battery"), st.booleans()),
    st.tuples(st.just("other"), st.sampled_from(OTHERS)),
    st.tuples(st.just("offline"), st.sampled_from([0, 1])),
    st.tuples(st.just("online"), st.sampled_from([0, 1])),
    st.tuples(st.just("restart")),
    st.tuples(st.just("reboot")),
)


class History:
    """The machine, and beside it the `shadow`: the same machine had it never seen torchtuned."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self.files = files
        self.desk = Desk(Kernel(files), folder)
        self.shadow = Kernel(files)
        self.changed: set[str] = set()
        self.given_up: set[str] = set()
        self.was_full = False

    def run(self, operation: tuple) -> None:  # type: ignore[type-arg]
        match operation:
            case ("apply", text, jobs, fault):
                self.do(lambda: self.desk.apply(text, jobs=jobs), fault)
            case ("newcomer", text, knob, fault):
                self.do(lambda: self.desk.apply(text, only=[knob]), fault)
            case ("undo", knobs, tuners, fault):
                self.do(lambda: by_knob(self.desk.engine.undo(knobs, tuners=tuners)), fault)
            case ("tuner", text, tuner, fault):
                self.do(lambda: self.desk.apply(text, tuners=[tuner]), fault)
            case ("visit", text, meanwhile, fault):
                self.visit(text, meanwhile, fault)
            case ("battery", on):
                for kernel in (self.desk.kernel, self.shadow):
                    kernel.files[f"{SUPPLY}/status"] = "Discharging" if on else "Full"
            case ("verify", text):
                before = dict(self.desk.kernel.files)
                self.judge(self.desk.verify(text))
                assert self.desk.kernel.files == before
            case ("other", (path, value)):
                self.other(path, value)
            case ("offline" | "online" as what, number):
                for kernel in (self.desk.kernel, self.shadow):
                    kernel.online(number, back=what == "online")
                if what == "online" and self.files is MACHINES[1]:
                    self.given_up.add(f"cpu/policy{number}/boost")  # as the switch for all was when it came back
            case ("restart",):
                self.desk.restart()
            case ("reboot",):
                for kernel in (self.desk.kernel, self.shadow):
                    kernel.files, kernel.saved = dict(self.files), {}
                self.desk.path.unlink(missing_ok=True)
                self.changed, self.given_up = set(), set()
                self.desk.restart()

    def visit(self, text: str, meanwhile: str, fault: Fault | None) -> None:
        """TuneD comes, and when it goes it gives back what it found; the shadow's found and gave back the same."""
        self.do(lambda: self.desk.apply(text, tuners=["tuned"]), fault)
        found = self.desk.kernel.files[SWAPPINESS]
        self.desk.kernel.files[SWAPPINESS] = "33"
        match meanwhile:
            case "undo":
                self.do(lambda: by_knob(self.desk.engine.undo(tuners=["tuned"])), fault)
            case "restart":
                self.desk.restart()
        self.do(lambda: self.desk.apply(text, tuners=["tuned"]), None)
        assert self.desk.kernel.files[SWAPPINESS] == "33"
        self.desk.kernel.files[SWAPPINESS] = found

    def other(self, path: str, value: str) -> None:
        try:
            self.desk.kernel.set(path, value)
        except HostError:
            return  # they were refused, and know it
        self.shadow.set(path, value)
        if "cpufreq" in path:
            knob = "cpu/" + path.removeprefix(f"{CPUFREQ}/").replace("scaling_", "")
        elif path.startswith("/proc/sys/"):
            knob = "sysctl/" + path.removeprefix("/proc/sys/").replace("/", ".")
        else:
            knob = path.replace("/sys/firmware/acpi/", "cpu/").replace("/sys/", "").replace("/queue/", "/")
        self.changed |= next((group for group in COUPLED if knob in group), {knob})

    def do(self, action: Callable[[], dict[str, Row]], fault: Fault | None) -> None:
        steps = iter(range(10_000))

        def step(moment: str, path: str) -> None:
            number = next(steps)
            if fault is None or not fault.at <= number < fault.at + fault.times:
                return
            if fault.kind == "kill":
                raise Killed
            if moment == "before" and path == "ledger" and fault.kind == "full":
                self.was_full = True
                raise OSError(errno.ENOSPC, "No space left on device")
            if moment == "before" and path != "ledger" and fault.kind == "refuse":
                raise Refused("no", where=path, errno=fault.number)

        self.desk.kernel.step = step
        try:
            self.judge(action())
        except Killed:
            self.desk.restart()
        except Failed:
            assert fault is not None
            assert fault.kind == "full"
        finally:
            self.desk.kernel.step = lambda moment, path: None

    def exempt(self, knob: str) -> None:
        self.given_up |= next((group for group in COUPLED if knob in group), {knob})

    def judge(self, rows: dict[str, Row]) -> None:
        for row in rows.values():
            if "gave up" in row.reason:
                self.exempt(row.knob)
            if row.outcome is Outcome.DRIFTED and "left" in row.reason and row.knob not in self.given_up:
                blind = self.was_full and " again, as before" in row.reason  # a full /run kept no note of the undo
                assert row.knob in self.changed or blind, f"nobody changed {row}"

    def end(self, text: str | None) -> None:
        """All is well again: what is left has to come right."""
        for number in (0, 1):
            if not self.shadow.files[f"{CPUFREQ}/policy{number}/affected_cpus"]:
                self.run(("online", number))
        self.run(("battery", False))
        self.desk.restart()
        if text is not None:
            for row in self.desk.apply(text).values():
                drifted = row.outcome is Outcome.DRIFTED and (row.knob in self.changed | self.given_up or self.was_full)
                assert drifted or row.outcome in (Outcome.APPLIED, Outcome.KEPT), row
        self.desk.undo()
        assert self.desk.ledger() == []
        assert self.values(self.desk.kernel) == self.values(self.shadow)

    def values(self, kernel: Kernel) -> dict[str, str]:
        words = [
            word
            for knob in self.given_up
            for word in [knob.split("/", 1)[1].replace(".", "/").removesuffix("governor")]
        ]
        return {path: text for path, text in kernel.files.items() if not any(word in path for word in words)}


@often(1500)
@example(  # what was drifted before a tuner came has a side effect to go back
    [
        ("apply", TEXTS[0], False, None),
        ("other", (f"{CPUFREQ}/policy0/scaling_governor", "schedutil")),
        ("apply", TEXTS[0], False, None),
        ("tuner", TEXTS[0], "tuned", None),
    ],
    None,
    0,
)
@example(  # and so has what was changed before the tuner came and is set anew afterwards
    [
        ("apply", TEXTS[0], False, None),
        ("other", (f"{CPUFREQ}/policy0/scaling_governor", "schedutil")),
        ("tuner", TEXTS[0], "tuned", None),
    ],
    TEXTS[0],
    0,
)
@example(  # a crash on the way back, and then somebody changes what goes along
    [
        ("apply", TEXTS[1], True, None),
        ("apply", TEXTS[0], False, Fault("kill", 0)),
        ("apply", TEXTS[0], False, Fault("kill", 1)),
        ("other", ("/proc/sys/vm/dirty_ratio", "15")),
    ],
    TEXTS[1],
    0,
)
@example(  # the same, and a crash before the knob was touched at all
    [("apply", TEXTS[0], False, Fault("kill", 10)), ("other", (f"{CPUFREQ}/policy0/{EPP}", "power"))], TEXTS[0], 0
)
@example(  # and after a tuner has come and somebody has set back what we had set
    [
        ("apply", TEXTS[0], False, None),
        ("tuner", TEXTS[0], "tuned", None),
        ("other", (f"{CPUFREQ}/policy0/scaling_governor", "powersave")),
        ("other", (f"{CPUFREQ}/policy0/{EPP}", "power")),
    ],
    TEXTS[0],
    0,
)
@example(  # what was never written, or was handed to the governor already, is nobody else's doing under that
    [
        ("apply", TEXTS[2], True, Fault("kill", 9)),
        ("apply", TEXTS[1], True, None),
        ("undo", (f"cpu/*/{EPP}",), (), None),
    ],
    TEXTS[2],
    0,
)
@example(
    [
        ("apply", TEXTS[2], True, None),
        ("apply", TEXTS[1], True, None),
        ("offline", 0),
        ("apply", TEXTS[-1], False, None),
    ],
    TEXTS[0],
    0,
)
@example(  # a preference set anew after a tuner has gone, while the governor's side effect is still there
    [
        ("apply", TEXTS[0], False, None),
        ("other", (f"{CPUFREQ}/policy0/scaling_governor", "schedutil")),
        ("tuner", TEXTS[-1], "tuned", None),
        ("apply", TEXTS[1], False, None),
    ],
    TEXTS[1],
    0,
)
@example(  # intel_pstate brings back a preference of ours that had gone under the governor, and then out of the policy
    [
        ("apply", TEXTS[2], True, None),
        ("apply", TEXTS[1], True, None),
        ("apply", TEXTS[0], False, None),
        ("other", (f"{CPUFREQ}/policy1/scaling_governor", "schedutil")),
    ],
    TEXTS[2],
    0,
)
@example(  # a preference that is left to a tuner, while the governor that was set over it is somebody else's
    [
        ("apply", TEXTS[2], True, None),
        ("apply", TEXTS[1], True, None),
        ("other", (f"{CPUFREQ}/policy0/scaling_governor", "schedutil")),
        ("newcomer", TEXTS[1], "cpu", Fault("kill", 4)),
        ("tuner", TEXTS[2], "tuned", None),
    ],
    None,
    0,
)
@given(st.lists(OPERATIONS, max_size=14), st.none() | st.sampled_from(TEXTS), st.sampled_from([0, 1]))
def test_every_history_ends_with_the_machines_own_values(
    operations: list[tuple],  # type: ignore[type-arg]
    text: str | None,
    number: int,
) -> None:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        history = History(folder, MACHINES[number])
        for operation in operations:
            history.run(operation)
        history.end(text)
    finally:
        shutil.rmtree(folder)
