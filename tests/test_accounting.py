"""Figures from made trees: cgroups with all controllers, with few, gone; and of real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes.tree import make_tree

from torchtuned import processes
from torchtuned.host import Host
from torchtuned.reports import accounting, journal, postmortem
from torchtuned.reports.inotify import Inotify
from torchtuned.reports.jobrecord import Left
from torchtuned.reports.store import Name

SCOPE = "torchtuned-job-7.scope"
SLICE = "/user.slice/user-1000.slice"
BASE = f"sys/fs/cgroup{SLICE}/{SCOPE}"


def test_the_cgroup_of_a_scope_is_found_beside_the_session_and_above_the_process(tmp_path: Path) -> None:
    host = Host(make_tree(tmp_path, {f"{BASE}/cgroup.procs": "", "proc/self/cgroup": f"0::{SLICE}/session-3.scope\n"}))
    assert accounting.cgroup_of(host, 42, SCOPE) == f"{SLICE}/{SCOPE}"
    (tmp_path / "proc/self/cgroup").write_text(f"0::{SLICE}/{SCOPE}\n")
    assert accounting.cgroup_of(host, 42, SCOPE) == f"{SLICE}/{SCOPE}"
    (tmp_path / "proc/self/cgroup").write_text(f"0::{SLICE}/{SCOPE}/payload\n")
    assert accounting.cgroup_of(host, 42, SCOPE) == f"{SLICE}/{SCOPE}"
    assert accounting.cgroup_of(host, 42, "torchtuned-job-8.scope") == ""
    assert accounting.cgroup_of(host, 42, "") == ""


def test_what_a_kernel_lacks_is_left_out(tmp_path: Path) -> None:
    host = Host(make_tree(tmp_path, {f"{BASE}/cpu.stat": "usage_usec 5000000\n"}))
    cgroup = f"{SLICE}/{SCOPE}"
    assert accounting.of_cgroup(host, cgroup) == {"of": "cgroup", "cpu": {"usage_s": 5.0}, "memory": {}}
    make_tree(tmp_path, {f"{BASE}/memory.peak": "12\n", f"{BASE}/memory.swap.current": "3\n", f"{BASE}/io.stat": "",
                         f"{BASE}/pids.current": "4\n", f"{BASE}/memory.numa_stat": "anon N0=7\n",
                         f"{BASE}/memory.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=9\n"})  # fmt: skip
    found = accounting.of_cgroup(host, cgroup)
    assert found["memory"] == {"peak": 12, "swap": 3, "nodes": {"0": 7}}
    assert (found["io"], found["tasks"]) == ({"read_bytes": 0, "write_bytes": 0}, 4)
    assert found["pressure"] == {"memory": {"some_s": 9e-06, "some_10": 0.0}}
    assert accounting.of_cgroup(host, "/gone.scope") == {}


def test_out_of_memory_counts_up_the_tree(tmp_path: Path) -> None:
    files = {f"sys/fs/cgroup{SLICE}/memory.events": "oom 1\noom_kill 4\n", f"{BASE}/memory.events": "oom_kill 1\n"}
    host = Host(make_tree(tmp_path, files))
    assert list(accounting.oom_kills(host, f"{SLICE}/{SCOPE}").items()) == [(f"{SLICE}/{SCOPE}", 1), (SLICE, 4)]
    assert accounting.oom_kills(host, "/gone") == {}


def test_a_tree_of_real_processes() -> None:
    program = """
import os, subprocess, sys
held = bytearray(64 << 20)
subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.1: pass"])
child = subprocess.Popen([sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"], stdin=sys.stdin)
sys.stdin.read()
"""
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = accounting.of_job(Host(), process.pid, "")
        assert process.stdin is not None
        process.stdin.close()
    assert (found["of"], len(found["pids"])) == ("processes", 2)
    assert found["memory"]["largest_peak"] >= 64 << 20
    assert found["cpu"]["usage_s"] > 0.03  # most of it of the child that has ended
    assert accounting.of_job(Host(), process.pid, "") == {}


def test_nobody_looks_for_children_of_a_process_that_has_exited(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are another's by then, and a look at all processes for each of a thousand jobs that end takes a minute."""
    monkeypatch.setattr(processes, "family", lambda pid: pytest.fail("looked for"))
    busy = "import time\nwhile time.process_time() < 0.1: pass"  # the kernel counts in ticks of up to 10 ms
    with subprocess.Popen([sys.executable, "-c", busy]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        found = accounting.of_job(Host(), process.pid, "")
    assert found["pids"] == [process.pid]
    assert found["cpu"]["usage_s"] > 0


def test_a_process_goes_on_without_its_first_thread() -> None:
    program = """
import ctypes, subprocess, sys, threading
child = subprocess.Popen(["sleep", "600"])
def stay():
    sys.stdin.read()
    child.kill()
threading.Thread(target=stay).start()
print(flush=True)
ctypes.CDLL(None).syscall(60, 0)
"""
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while processes.stat(process.pid)[0] != "Z":
            time.sleep(0.01)
        found = accounting.of_job(Host(), process.pid, "")
        process.kill()
    os.kill(found["pids"][1], 9)


def test_a_changed_file_is_told_of_once(tmp_path: Path) -> None:
    host = Host(make_tree(tmp_path, {f"{BASE}/memory.events": "oom_kill 0\n"}))
    watch = Inotify()
    watch.add(host, f"/{BASE}/memory.events", "7")
    assert watch.changed() == set()
    (tmp_path / BASE / "memory.events").write_text("oom_kill 1\n")
    assert watch.changed() == {"7"}
    assert watch.changed() == set()
    watch.remove("7")
    (tmp_path / BASE / "memory.events").write_text("oom_kill 2\n")
    assert watch.changed() == set()
    watch.close()
    assert not os.path.exists(f"/proc/self/fd/{watch.fd}")


def test_the_driver_s_errors_of_the_job_s_gpus_only() -> None:
    def said(message: str, time: int = 10) -> journal.Entry:
        return journal.Entry(time=time, by="kernel", message=message, fields={})

    entries = [
        said("NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus."),
        said("NVRM: Xid (PCI:0000:01:00): 45, pid=1, Ch 00000010"),  # every killed job makes one
        said("NVRM: Xid (PCI:0000:81:00): 31, pid=1"),
        said("NVRM: Xid (PCI:0000:01:00): 31, pid=1", time=1),
        said("input: NVRM: Xid (.:): 79 as /devices/virtual/input/input9"),  # devices have any name
    ]
    found = postmortem.xids(entries, ["00000000:01:00.0"], since=5)
    assert found == ("Xid 79 of GPU 0000:01:00.0: the GPU has fallen off the bus (hardware or power)",)


def test_of_a_flooded_journal_the_end_is_read(tmp_path: Path) -> None:
    """What ended a job is at the end, and anybody with a GPU or a disk can make the kernel say thousands of things."""
    flood = [{"_TRANSPORT": "kernel", "MESSAGE": "noise"}] * (journal.MOST + 10)
    said = {"_TRANSPORT": "kernel", "MESSAGE": "the last word"}
    early = {"_TRANSPORT": "kernel", "MESSAGE": "too early"}
    lines = [
        json.dumps(entry | {"__REALTIME_TIMESTAMP": str(number)}) for number, entry in enumerate([early, *flood, said])
    ]
    host = Host(make_tree(tmp_path, {"var/log/journal.json": "\n".join(lines)}))
    found = journal.read(host, 5)
    assert (len(found), found[-1].message) == (journal.MOST, "the last word")
    assert [entry.time for entry in found] == sorted(entry.time for entry in found)
    assert [entry.time for entry in journal.read(host, len(lines) - 2)] == [len(lines) - 2, len(lines) - 1]
    assert len(journal.read(host, 0)) == journal.MOST


def test_a_missed_end_is_looked_for_from_the_last_reading_on() -> None:
    name = Name(10**15, 7, 1000)
    document = {"pid": 5, "start": 9, "granted": {}, "measured": {}, "oom_kills_around": {}, "gpus": {}, "findings": []}
    assert Left.parse(name, document).since == 10**15 - postmortem.BEFORE
    days_later = 10**15 + 3 * 86400 * 10**6
    assert Left.parse(name, document | {"measured": {"at": days_later}}).since == days_later - postmortem.BEFORE
