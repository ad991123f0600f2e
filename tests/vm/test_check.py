"""`torchtuned check` on a Debian as it was installed, by its user, by root and by the daemon in its sandbox."""

from __future__ import annotations

import json
from typing import Any

from inside import JOB, start, stop
from machine import Machine


def check(machine: Machine, *, user: str = "") -> dict[str, Any]:
    command = "torchtuned check --json || test $? = 1"
    document: dict[str, Any] = json.loads(machine.login(user, command) if user else machine.check(command))
    return document


def codes(document: dict[str, Any], *, jobs: bool = False) -> set[str]:
    return {item["code"] for item in document["findings"] if jobs or not item.get("job")}


def test_nothing_is_wrong_with_a_fresh_debian(ready: Machine) -> None:
    seen = check(ready)
    assert codes(seen) == set(), seen["findings"]
    assert not [item for item in seen["unchecked"] if "torchtuned's own" in item["because"]]


def test_a_user_needs_no_root(ready: Machine) -> None:
    seen = check(ready, user="alice")
    assert codes(seen) == set(), seen["findings"]
    assert not [item for item in seen["unchecked"] if "does not answer" in item["because"]]


def test_a_job_s_findings_name_it(ready: Machine) -> None:
    job = start(ready, "a", f"exec torchtuned-run --cpus 1 {JOB}", user="alice")
    seen = check(ready, user="alice")
    named = [item for item in seen["findings"] if item["code"] == "TT048" and item.get("job")]
    assert named, seen["findings"]
    assert "TT048" not in codes(check(ready, user="bob"), jobs=True)
    stop(ready, job)


def test_a_fault_is_found_and_mended_by_its_command(ready: Machine) -> None:
    ready.check("sysctl -w vm.overcommit_memory=2")
    try:
        [finding] = [item for item in check(ready)["findings"] if item["code"] == "TT025"]
        ready.check(finding["fix"].replace("sudo ", ""))
        assert "TT025" not in codes(check(ready))
    finally:
        ready.check("rm -f /etc/sysctl.d/90-overcommit.conf; sysctl -w vm.overcommit_memory=0")


def test_a_report_of_this_machine_replays_here(ready: Machine) -> None:
    ready.check("rm -rf /root/bug && mkdir /root/bug && cd /root/bug && torchtuned bug-report --output report.tar.gz")
    ready.check("cd /root/bug && tar xzf report.tar.gz")
    again = json.loads(ready.check("cd /root/bug && torchtuned check --json --sysroot torchtuned-2* || test $? = 1"))
    assert codes(again) == set(), again["findings"]
    assert ready.sh("cd /root/bug && grep -rlE '(^|[^a-z])(alice|bob)([^a-z]|$)' torchtuned-2*")[0] == 1
    ready.check("rm -r /root/bug")  # which has the name that a purge leaves nowhere
