"""torchtunedd beside Debian's TuneD in one emulated machine: memory, wakeups, seconds to ready, apply.

usage: sudo .venv/bin/python benchmarks/beside_tuned.py --deb dist/torchtuned.deb [--suite trixie] [--quick] [--json]

Both daemons run on the same kernel, never at the same time, and take turns. Memory is the PSS of all processes of the
unit, wakeups are the voluntary context switches of all their threads while nobody asks anything, ready is the time from
systemctl start until the kernel has the governor and the swappiness that both policies want, apply that of one change
of the whole policy over D-Bus (Undo and Apply; from balanced to throughput-performance). The machine is emulated in
software: seconds are longer than on a real one, for both, so ratios are what counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests/vm")]

import image  # noqa: E402
from machine import SHARE, Machine  # noqa: E402

INSIDE = '''\
"""In the machine: ROUNDS IDLE-SECONDS."""
import glob, json, statistics, subprocess, sys, time
ROUNDS, IDLE_S = int(sys.argv[1]), float(sys.argv[2])
UNITS = {"torchtuned": "tuned", "tuned": "torchtuned"}
OURS = ["org.torchtuned1", "/org/torchtuned1", "org.torchtuned1.Manager"]
THEIRS = ["com.redhat.tuned", "/Tuned", "com.redhat.tuned.control"]
def applied():
    """By the kernel: both policies want these."""
    paths = glob.glob("/sys/devices/system/cpu/cpufreq/policy*/scaling_governor")
    governors = [open(path).read().strip() for path in paths]
    return set(governors) == {"performance"} and open("/proc/sys/vm/swappiness").read().strip() == "10"
def run(words):
    return subprocess.run(words, capture_output=True, text=True)
def call(words):
    start = time.monotonic()
    done = run(["busctl", "--timeout=120", "call", *words])
    assert not done.returncode, (words, done.stderr)
    return time.monotonic() - start
def threads(unit):
    pids = open(f"/sys/fs/cgroup/system.slice/{unit}.service/cgroup.procs").read().split()
    assert pids, unit
    return pids, [task for pid in pids for task in glob.glob(f"/proc/{pid}/task/*")]
def pss(unit):
    texts = [open(f"/proc/{pid}/smaps_rollup").read() for pid in threads(unit)[0]]
    return sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("Pss:")) / 1024
def switches(unit):
    texts = [open(f"{task}/status").read() for task in threads(unit)[1]]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("voluntary_ctxt")]
    return sum(int(line.split()[1]) for line in lines)
found = {unit: {"memory": [], "wakeups in 30 idle seconds": [], "ready after start": [], "apply": []} for unit in UNITS}
for _ in range(ROUNDS):
    for unit, other in UNITS.items():
        figures = found[unit]
        assert not applied(), f"{other} has left its values"
        start = time.monotonic()
        assert not run(["systemctl", "start", unit]).returncode
        while not applied():
            assert time.monotonic() < start + 120, unit
            time.sleep(0.1)
        figures["ready after start"].append(time.monotonic() - start)
        if unit == "tuned":
            call([*THEIRS, "switch_profile", "s", "balanced"])
            figures["apply"].append(call([*THEIRS, "switch_profile", "s", "throughput-performance"]))
        else:
            call([*OURS, "Undo", "as", "0"])
            figures["apply"].append(call([*OURS, "Apply"]))
        time.sleep(5)
        before, begun = switches(unit), time.monotonic()
        time.sleep(IDLE_S)
        rate = (switches(unit) - before) / (time.monotonic() - begun)
        figures["wakeups in 30 idle seconds"].append(rate * 30)
        figures["memory"].append(pss(unit))
        assert not run(["systemctl", "stop", unit]).returncode
print(json.dumps({what: [statistics.median(found[unit][what]) for unit in UNITS] for what in found["tuned"]}))
'''
UNITS = {"memory": "MB PSS", "wakeups in 30 idle seconds": "switches", "ready after start": "s", "apply": "s"}


def measure(machine: Machine, deb: Path, *, quick: bool) -> dict[str, list[float]]:
    """[ours, theirs] of each row, in a machine that is up and has neither."""
    (machine.share / "torchtuned.deb").write_bytes(deb.read_bytes())
    (machine.share / "inside.py").write_text(INSIDE)
    apt = "DEBIAN_FRONTEND=noninteractive apt-get install -q -y"
    # one after the other: each would take what the other has set for the machine's own
    machine.check(f"{apt} /{image.SHELF}/tuned/*.deb", 900)
    machine.check("systemctl start tuned; tuned-adm profile throughput-performance; systemctl stop tuned", 300)
    machine.check(f"{apt} {SHARE}/torchtuned.deb; systemctl stop torchtuned", 900)
    rounds, idle = (1, 3) if quick else (3, 30)
    figures: dict[str, list[float]] = json.loads(
        machine.check(f"python3 {SHARE}/inside.py {rounds} {idle}", 1200).splitlines()[-1]
    )
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description="torchtunedd beside TuneD in an emulated machine")
    parser.add_argument("--suite", choices=image.SUITES, default="trixie")
    parser.add_argument("--deb", type=Path, required=True, help="the package, as debian/make-deb builds it")
    parser.add_argument("--quick", action="store_true", help="only whether it runs; the figures say nothing")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    options = parser.parse_args()
    with Machine(image.build(options.suite)) as machine:
        figures = measure(machine, options.deb, quick=options.quick)
    if options.json:
        document = {"schema": 1, "suite": options.suite, "quick": options.quick, "figures": figures}
        print(json.dumps(document, indent=2))
        return 0
    print(f"{options.suite}, emulated{', quick: the figures say nothing' if options.quick else ''}")
    print(f"{'':28}{'torchtuned':>12}{'TuneD':>10}{'ratio':>9}  unit")
    for what, (ours, theirs) in figures.items():
        ratio = f"{ours / theirs:9.3f}" if theirs else f"{'':9}"
        print(f"{what:28}{ours:12.2f}{theirs:10.2f}{ratio}  {UNITS[what]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
