"""Cgroups and units by the text of /proc/PID/cgroup."""

from __future__ import annotations

import pytest

from torchtuned import units

USER = "/user.slice/user-1000.slice/user@1000.service/app.slice"


@pytest.mark.parametrize(
    ("path", "unit", "service"),
    [
        ("/user.slice/user-1000.slice/session-3.scope", "session-3.scope", ""),
        ("/user.slice/user-1000.slice/torchtuned-job-7.scope/x", "torchtuned-job-7.scope", ""),
        (f"{USER}/vte.service", "user@1000.service", ""),
        (f"{USER}/torchtuned-job-7.scope", "user@1000.service", ""),
        ("/system.slice/train.service/worker", "train.service", "train.service"),
        ("/system.slice", "", ""),
        ("/docker/ab", "", ""),
        ("/", "", ""),
    ],
)
@pytest.mark.parametrize(
    "form", ["0::{}\n", "9:pids:/\n1:name=systemd:{}\n0::/", "1:name=systemd:{}", "0::{}\n1:cpu:/"]
)
def test_the_unit_by_each_kind_of_hierarchy(form: str, path: str, unit: str, service: str) -> None:
    text = form.format(path)
    assert (units.unit(text), units.service(text)) == (unit, service)


def test_the_path_by_controller() -> None:
    text = "9:pids:/a\n4:cpu,cpuacct:/b:c\n1:name=systemd:/d\n0::/e"
    assert units.cgroups(text) == {"pids": "/a", "cpu": "/b:c", "cpuacct": "/b:c", "name=systemd": "/d", "": "/e"}


@pytest.mark.parametrize("end", ["\r", "\v", "\f", "\x1c", "\x85", "\u2028"])
def test_a_name_that_a_user_gave_is_no_line(end: str) -> None:
    path = f"{USER}/x{end}0::/system.slice/sshd.service"
    assert units.cgroups(f"0::{path}") == {"": path}
    assert units.service(f"0::{path}") == ""


@pytest.mark.parametrize("text", ["", "\n", "0", "0:", "0::", "x::/a", "0::a"])
def test_what_is_no_line_of_the_kernels(text: str) -> None:
    assert units.cgroups(text) == {}
    assert units.unit(text) == ""


@pytest.mark.parametrize("name", ["session-3.scope", "torchtuned-job-7", "torchtuned-job-.scope", "x-job-7.scope", ""])
def test_units_that_are_no_jobs(name: str) -> None:
    assert units.job_of(name) == ""


def test_the_scope_of_a_job() -> None:
    assert units.job_of(units.scope_of("7")) == "7"
    assert units.scope_of("7") == "torchtuned-job-7.scope"
