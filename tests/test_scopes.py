"""Who may be moved into a scope, and who is left where somebody put it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.tree import make_tree

from torchtuned import scopes
from torchtuned.host import Host

SESSION = "/user.slice/user-1000.slice/session-3.scope"
TERMINAL = "/user.slice/user-1000.slice/user@1000.service/app.slice/app-org.gnome.Terminal.slice/vte-spawn-1.scope"
TOP = "sys/fs/cgroup"


def host(folder: Path, release: str = "6.12.0-1-amd64", **files: str) -> Host:
    """A machine with a unified hierarchy. Files are named by cgroup, with "__" before the attribute."""
    tree = {f"{TOP}/cgroup.controllers": "cpuset cpu io memory pids\n", "proc/sys/kernel/osrelease": release + "\n"}
    return Host(make_tree(folder, tree | files))


def limit(cgroup: str, name: str, value: str) -> dict[str, str]:
    return {f"{TOP}{cgroup}/{name}": value + "\n"}


@pytest.mark.parametrize("cgroup", [SESSION, "/user.slice/user-1000.slice/session-c2.scope", TERMINAL])
def test_sessions_and_desktop_terminals_move_to_the_user_slice(tmp_path: Path, cgroup: str) -> None:
    free = limit(cgroup, "memory.max", "max") | limit(cgroup, "cpu.max", "max 100000") | limit(cgroup, "io.max", "")
    assert scopes.move(host(tmp_path, **free), cgroup) == scopes.Move(slice="user-1000.slice")


@pytest.mark.parametrize(
    ("cgroup", "why"),
    [
        ("/system.slice/ssh.service", "not a login session"),
        ("/system.slice/cron.service", "not a login session"),
        ("/system.slice/docker-0123.scope", "not a login session"),
        ("/system.slice/slurmstepd.scope/job_7/step_0/user/task_0", "not a login session"),
        ("/system.slice/run-r12.scope", "not a login session"),
        ("/machine.slice/machine-a.scope/init.scope", "not a login session"),
        ("/user.slice/user-1000.slice/torchtuned-job-7.scope", "not a login session"),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service", "a service of its user"),
        ("/user.slice/user-1000.slice/user@1000.service/init.scope/x", "a service of its user"),
        ("/system.slice/docker-0123.scope/user.slice/user-1000.slice/session-3.scope", "inside of docker-0123.scope"),
        ("/machine.slice/machine-a.scope/payload/user.slice/user-1000.slice/session-3.scope", "inside of machine-a"),
        ("/session-3.scope", "no slice"),
        ("/", "no unit"),
        ("", "no unit"),
    ],
)
def test_everything_else_stays(tmp_path: Path, cgroup: str, why: str) -> None:
    found = scopes.move(host(tmp_path), cgroup)
    assert isinstance(found, str)
    assert why in found


@pytest.mark.parametrize(
    ("cgroup", "at", "name", "value"),
    [
        (SESSION, SESSION, "memory.max", "1073741824"),
        (SESSION, SESSION, "memory.high", "0"),
        (SESSION, SESSION, "cpu.max", "50000 100000"),
        (SESSION, SESSION, "cpuset.cpus", "0-3"),
        (SESSION, SESSION, "cpuset.mems", "0"),
        (SESSION, SESSION, "io.max", "8:0 rbps=1 wbps=max riops=max wiops=max"),
        (SESSION, SESSION, "pids.max", "100"),
        (SESSION, SESSION, "io.latency", "8:0 target=75000"),
        (SESSION, SESSION, "io.prio.class", "idle"),
        (SESSION, SESSION, "cpu.weight", "10"),
        (SESSION, SESSION, "cpu.idle", "1"),
        (SESSION, SESSION, "io.weight", "default 50"),
        (SESSION, SESSION, "cpu.uclamp.max", "50.00"),
        (SESSION, SESSION, "hugetlb.2MB.max", "0"),
        (SESSION, SESSION, "misc.max", "sev 1"),
        (SESSION, SESSION, "rdma.max", "mlx5_0 hca_handle=2 hca_object=max"),
        (TERMINAL, TERMINAL, "memory.swap.max", "0"),
        (TERMINAL, "/user.slice/user-1000.slice/user@1000.service/app.slice", "memory.max", "4096"),
        (TERMINAL, "/user.slice/user-1000.slice/user@1000.service", "cpu.max", "100000 100000"),
    ],
)
def test_becoming_a_job_is_no_way_out_of_a_limit(tmp_path: Path, cgroup: str, at: str, name: str, value: str) -> None:
    found = scopes.move(host(tmp_path, **limit(at, name, value)), cgroup)
    assert isinstance(found, str)
    assert name in found
    assert at.rpartition("/")[2] in found


def test_files_that_limit_nothing(tmp_path: Path) -> None:
    """As a kernel and systemd leave them; a heavier weight is no limit."""
    free = {
        **{"memory.max": "max", "memory.high": "max", "pids.max": "max", "cpu.max": "max 100000", "cpu.weight": "200"},
        **{"io.weight": "default 100", "io.max": "", "io.latency": "", "io.prio.class": "no-change", "cpu.idle": "0"},
        **{"cpu.uclamp.max": "max", "hugetlb.2MB.max": "max", "hugetlb.1GB.rsvd.max": "max", "misc.max": "sev max"},
        **{"rdma.max": "mlx5_0 hca_handle=max hca_object=max", "cpuset.cpus": "", "cpuset.mems": ""},
    }
    files = {path: text for name, value in free.items() for path, text in limit(SESSION, name, value).items()}
    assert scopes.move(host(tmp_path, **files), SESSION) == scopes.Move(slice="user-1000.slice")


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        (SESSION, "etc/systemd/system/session-.scope.d/net.conf"),
        (SESSION, "etc/systemd/system/scope.d/net.conf"),
        (SESSION, "run/systemd/system.control/session-3.scope.d/50-IPAddressDeny.conf"),
        (TERMINAL, "etc/systemd/system/user@.service.d/net.conf"),
        (TERMINAL, "etc/systemd/system/user@1000.service.d/net.conf"),
    ],
)
def test_what_systemd_enforces_by_programs_is_a_limit(tmp_path: Path, cgroup: str, file: str) -> None:
    """IPAddressDeny= and its like have no file in the cgroup."""
    found = scopes.move(host(tmp_path, **{file: "[Scope]\nIPAddressDeny=any\n"}), cgroup)
    assert isinstance(found, str)
    assert f"IPAddressDeny= in /{file}" in found


def test_other_settings_of_the_administrator_are_none(tmp_path: Path) -> None:
    file = "etc/systemd/system/user@.service.d/delegate.conf"
    tree = host(tmp_path, **{file: "[Service]\nDelegate=cpu cpuset io memory pids\n#IPAddressDeny=any\n"})
    assert scopes.move(tree, TERMINAL) == scopes.Move(slice="user-1000.slice")


def test_limits_of_the_slice_and_above_go_on_holding_and_do_not_matter(tmp_path: Path) -> None:
    above = limit("/user.slice/user-1000.slice", "memory.max", "4096") | limit("/user.slice", "pids.max", "10")
    assert scopes.move(host(tmp_path, **above), SESSION) == scopes.Move(slice="user-1000.slice")


def test_a_task_limit_goes_along(tmp_path: Path) -> None:
    files = limit(TERMINAL, "pids.max", "4000")
    files |= limit("/user.slice/user-1000.slice/user@1000.service", "pids.max", "9000")
    assert scopes.move(host(tmp_path, **files), TERMINAL) == scopes.Move(slice="user-1000.slice", tasks_max=4000)


def test_without_a_unified_hierarchy_nobody_is_moved(tmp_path: Path) -> None:
    tree = Host(make_tree(tmp_path, {"sys/fs/cgroup/unified/cgroup.controllers": ""}))
    assert scopes.move(tree, SESSION) == "there is no unified cgroup hierarchy"
    assert not scopes.has_cpuset(tree)


@pytest.mark.parametrize(
    ("release", "admin", "asked", "mode", "warned"),
    [
        ("6.12.0-1-amd64", "auto", None, "cpuset", ""),
        ("6.2.0", "auto", None, "cpuset", ""),
        ("6.1.0-37-amd64", "auto", None, "affinity", ""),
        ("6.1.0-37-amd64", "auto", "cpuset", "affinity", "before 6.2"),
        ("6.1.0-37-amd64", "cpuset", None, "cpuset", ""),
        ("6.1.0-37-amd64", "cpuset", "cpuset", "cpuset", ""),
        ("6.12.0", "affinity", None, "affinity", ""),
        ("6.12.0", "affinity", "cpuset", "cpuset", ""),
        ("6.12.0", "auto", "affinity", "affinity", ""),
        ("6.12.0", "auto", "none", "none", ""),
        ("6.12.0", "none", None, "none", ""),
        ("nonsense", "auto", None, "affinity", ""),
    ],
)
def test_the_kernel_the_admin_and_the_user(
    tmp_path: Path, release: str, admin: str, asked: str | None, mode: str, warned: str
) -> None:
    found = scopes.confinement(host(tmp_path, release), SESSION, admin=admin, asked=asked)
    assert found.mode == mode
    assert (found.move is None) == (mode == "none")
    assert warned in found.warning
    assert bool(warned) == bool(found.warning)


def test_without_systemd_or_controller_the_mask_must_do(tmp_path: Path) -> None:
    machine = host(tmp_path)
    found = scopes.confinement(machine, SESSION, admin="auto", asked=None, hindrance="there is no systemd")
    assert found == scopes.Confinement(mode="affinity")
    found = scopes.confinement(machine, SESSION, admin="auto", asked="cpuset", hindrance="there is no systemd")
    assert found == scopes.Confinement(mode="affinity", warning="no cpuset: there is no systemd")
    (tmp_path / f"{TOP}/cgroup.controllers").write_text("cpu memory pids\n")
    found = scopes.confinement(machine, SESSION, admin="auto", asked="cpuset")
    assert found.mode == "affinity"
    assert found.move == scopes.Move(slice="user-1000.slice")
    assert "no cpuset controller" in found.warning
