"""Places without a daemon: jobs of one user keep apart, and nobody else can make them trust a table."""

from __future__ import annotations

import errno
import fcntl
import getpass
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.tree import machine, machine_a, make_tree, pairs

from torchtuned import configfiles, jobtables
from torchtuned.cpuset import parse_list
from torchtuned.errors import Busy, NoSuchGpu, Unreadable
from torchtuned.gpus import Gpus
from torchtuned.gpus import Process as User
from torchtuned.host import Host
from torchtuned.jobs import Job, Jobs, State
from torchtuned.placement import Grant, Request, request_to_json
from torchtuned.processes import Process
from torchtuned.run import selfplace, table

TOP = Path(__file__).resolve().parent.parent
PARENT = 1


def wishes(**changes: Any) -> dict[str, Any]:
    return {**request_to_json(Request()), **changes}


def process(
    pid: int, *, parent: int = PARENT, start: int = 1000, state: str = "S", cpus: str = "0-31"
) -> dict[str, Any]:
    fields = ["0"] * 52
    fields[0], fields[1], fields[19] = state, str(parent), str(start + pid)
    return {
        f"proc/{pid}/stat": f"{pid} (a ) (name) {' '.join(fields)}\n",
        f"proc/{pid}/status": f"Name:\tx\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t0-1\n",
        f"proc/{pid}/cgroup": "0::/\n",
    }


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder / "torchtuned"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Two sockets of eight cores with two threads, and processes 101 to 109."""
    return small_host(tmp_path / "root", gpus=())


@pytest.fixture
def gpu_host(tmp_path: Path) -> Host:
    """The same with two GPUs at each socket."""
    return small_host(tmp_path / "gpu-root", gpus=(0, 0, 1, 1))


def small_host(root: Path, *, gpus: tuple[int, ...]) -> Host:
    files = machine_a(gpus=gpus)
    for pid in range(101, 110):
        files |= process(pid)
    return Host(make_tree(root, files))


def written(runtime: Path) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = json.loads((runtime / "jobs.json").read_text())["jobs"]
    return jobs


def test_jobs_of_one_user_are_disjoint_and_in_the_table(runtime: Path, host: Host) -> None:
    first = selfplace.place_self(wishes(cpus="4"), pid=101, host=host)
    second = selfplace.place_self(wishes(cpus="4"), pid=102, host=host)
    assert len(parse_list(first["cpus"])) == len(parse_list(second["cpus"])) == 8
    assert not parse_list(first["cpus"]) & parse_list(second["cpus"])
    assert (first["confinement"], first["state"], first["threads"]) == ("affinity", "running", 4)
    assert [(job["pid"], job["start"], job["uid"]) for job in written(runtime)] == [
        (101, 1101, os.getuid()),
        (102, 1102, os.getuid()),
    ]
    assert os.stat(runtime).st_mode & 0o777 == 0o700
    assert os.stat(runtime / "jobs.json").st_mode & 0o777 == 0o600


def test_a_job_that_ended_gives_its_place_back(runtime: Path, host: Host) -> None:
    for pid, changed in ((101, None), (102, process(102, start=5000)), (103, process(103, state="Z"))):
        selfplace.place_self(wishes(cpus="2"), pid=pid, host=host)
        if changed:
            make_tree(host.root, changed)
    for name in ("stat", "status", "cgroup"):
        (host.root / f"proc/101/{name}").unlink()
    everything = selfplace.place_self(wishes(), pid=104, host=host)
    assert everything["cpus"] == "0-31"
    assert [job["pid"] for job in written(runtime)] == [104]


def test_dry_writes_nothing(runtime: Path, host: Host) -> None:
    selfplace.place_self(wishes(), pid=101, host=host, dry=True)
    assert not (runtime / "jobs.json").exists()


def test_a_process_that_asks_again_replaces_its_own_grant(runtime: Path, host: Host) -> None:
    selfplace.place_self(wishes(), pid=101, host=host)
    assert selfplace.place_self(wishes(), pid=101, host=host)["shared"] is False
    assert len(written(runtime)) == 1


def test_a_job_inside_a_job_uses_its_cpus(runtime: Path, host: Host) -> None:
    selfplace.place_self(wishes(cpus="8"), pid=101, host=host)
    make_tree(host.root, process(102, parent=101, cpus="0-7,16-23"))
    inner = selfplace.place_self(wishes(), pid=102, host=host)
    assert (inner["cpus"], inner["shared"]) == ("0-7,16-23", False)


def test_nothing_free_is_shared_loudly_or_waited_for(runtime: Path, host: Host) -> None:
    selfplace.place_self(wishes(), pid=101, host=host)
    shared = selfplace.place_self(wishes(), pid=102, host=host)
    assert shared["shared"]
    assert shared["warnings"]


def test_waiting_ends_in_time(runtime: Path, gpu_host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfplace, "RETRY_S", 0.05)
    selfplace.place_self(wishes(gpus=4), pid=101, host=gpu_host)
    start = time.monotonic()
    told: list[str] = []
    said = f"waited 0.2 s, no place: 0 of 4 GPUs are free; process 101 of {getpass.getuser()} has GPU "
    with pytest.raises(Busy, match=said):
        selfplace.place_self(wishes(gpus=1, wait=0.2), pid=102, waits=told.append, host=gpu_host)
    assert 0.2 <= time.monotonic() - start < 10
    assert told == ["0 of 4 GPUs are free"]
    with pytest.raises(Busy):
        selfplace.place_self(wishes(gpus=1), pid=102, host=gpu_host)


def test_a_gpu_on_which_somebody_computes_is_looked_at_again_and_again(
    runtime: Path, gpu_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def busy(gpus: Gpus) -> dict[str, tuple[User, ...]]:
        looks.append(len(looks))
        users = () if len(looks) > 2 else (User(pid=9999, memory=0),)
        return {address: users for address in gpus.addresses()}

    monkeypatch.setattr(selfplace, "RETRY_S", 0.01)
    monkeypatch.setattr(Gpus, "busy", busy)
    with pytest.raises(Busy):
        selfplace.place_self(wishes(gpus=1), pid=101, host=gpu_host)
    assert len(selfplace.place_self(wishes(gpus=1, wait=0), pid=102, host=gpu_host)["gpus"]) == 1
    assert len(looks) == 3


def test_a_job_inside_a_job_may_have_the_gpu_on_which_that_computes(
    runtime: Path, gpu_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = selfplace.place_self(wishes(gpus=1), pid=101, host=gpu_host)["gpus"]
    make_tree(gpu_host.root, process(102, parent=101))
    monkeypatch.setattr(
        Gpus, "busy", lambda gpus: {address: (User(pid=101, memory=0),) for address in gpus.addresses()}
    )
    assert selfplace.place_self(wishes(gpus=1), pid=102, host=gpu_host)["gpus"] == outer


def test_gpus_are_leased_and_named(runtime: Path, gpu_host: Host) -> None:
    first = selfplace.place_self(wishes(gpus=2), pid=101, host=gpu_host)
    second = selfplace.place_self(wishes(gpus=2), pid=102, host=gpu_host)
    assert not set(first["gpus"]) & set(second["gpus"])
    assert sorted([*first["gpu_indexes"], *second["gpu_indexes"]]) == [0, 1, 2, 3]
    assert (first["gpus_chosen"], first["gpus_alike"], first["gpu_uuids"]) == (True, True, None)
    with pytest.raises(NoSuchGpu):
        selfplace.place_self(wishes(gpus=["0000:99:00.0"]), pid=103, host=gpu_host)


def test_a_container_counts_only_the_gpus_it_can_open(runtime: Path, gpu_host: Host) -> None:
    files: dict[str, Any] = {"dev/nvidia0": ""}
    for minor, address in enumerate(["0000:10:00.0", "0000:20:00.0", "0000:30:00.0", "0000:40:00.0"]):
        files[f"proc/driver/nvidia/gpus/{address}/information"] = f"Model: x\nDevice Minor: \t {3 - minor}\n"
    make_tree(gpu_host.root, files)
    grant = selfplace.place_self(wishes(gpus=1), pid=101, host=gpu_host)
    assert (grant["gpus"], grant["gpu_indexes"]) == (["0000:40:00.0"], [0])


def test_a_gpu_lent_to_a_virtual_machine_is_not_counted(runtime: Path, gpu_host: Host) -> None:
    driver = gpu_host.root / "sys/bus/pci/devices/0000:10:00.0/driver"
    driver.symlink_to("../../../../bus/pci/drivers/vfio-pci")
    grant = selfplace.place_self(wishes(gpus=2), pid=101, host=gpu_host)
    assert (grant["gpus"], grant["gpu_indexes"]) == (["0000:30:00.0", "0000:40:00.0"], [1, 2])
    every = selfplace.place_self(wishes(), pid=102, ranks=one_per_gpu, host=gpu_host, dry=True)
    assert (every["gpus_here"], len(every["ranks"])) == (3, 3)


def one_per_gpu(gpus: int) -> int | None:
    return gpus or None


def test_one_rank_per_gpu(runtime: Path, gpu_host: Host) -> None:
    grant = selfplace.place_self(wishes(), pid=101, ranks=one_per_gpu, host=gpu_host)
    assert [rank["cpus"] for rank in grant["ranks"]] == ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]
    assert grant["gpus_here"] == 4


def test_the_administrators_rules_hold_here_too(runtime: Path, host: Host) -> None:
    profile = {"usr/share/torchtuned/profiles/training.conf": "[policy]\ndescription = x\n"}
    make_tree(host.root, {**profile, "etc/torchtuned/torchtuned.conf": "[jobs]\n#slots = 2\n[sysctl]\nbroken\n"})
    assert selfplace.place_self(wishes(), pid=101, host=host, dry=True)["cpus"] == "0-31", "nothing is said of jobs"
    rules = "[jobs]\nreserved = 0\nslots = 2\nlimit_core = 0\n[env]\nprofiles = memory\n"
    make_tree(host.root, {"etc/torchtuned/torchtuned.conf": rules})
    grant = selfplace.place_self(wishes(), pid=101, host=host)
    assert len(parse_list(grant["cpus"])) < 20
    assert not parse_list(grant["cpus"]) & {0, 16}
    assert (grant["limits"]["core"], grant["env_profiles"], grant["warnings"]) == ("0", ["memory"], [])


def test_a_configuration_with_faults_costs_a_warning(runtime: Path, host: Host) -> None:
    make_tree(host.root, {"etc/torchtuned/conf.d/x.conf": "[jobs]\nslotz = 2\n"})
    grant = selfplace.place_self(wishes(), pid=101, host=host)
    assert grant["cpus"] == "0-31"
    assert "the configuration is not used" in grant["warnings"][0]


def test_a_configuration_that_cannot_be_read_costs_a_warning(
    runtime: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def private(path: str) -> list[str]:
        if path == "/etc/torchtuned/conf.d":
            raise Unreadable("permission denied", where=path)
        return Host.list(host, path)

    monkeypatch.setattr(host, "list", private)
    grant = selfplace.place_self(wishes(), pid=101, host=host)
    assert grant["cpus"] == "0-31"
    assert "the configuration is not used" in grant["warnings"][0]


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, whom file modes bind")
@pytest.mark.parametrize("private", ["conf.d", "conf.d/x.conf"])
def test_a_configuration_for_root_alone_is_said_with_what_to_do(host: Host, private: str, tmp_path: Path) -> None:
    make_tree(host.root, {"etc/torchtuned/conf.d/x.conf": "[jobs]\nreserved = 0\n"})
    path = host.root / "etc/torchtuned" / private
    path.chmod(0o700 if path.is_dir() else 0o600)
    for part in (tmp_path, *tmp_path.parents[:3]):
        part.chmod(part.stat().st_mode | 0o011)
    before = os.geteuid()
    os.seteuid(65534)
    try:
        warnings: list[str] = []
        selfplace.settings(host, warnings)
    finally:
        os.seteuid(before)
    where = f"/etc/torchtuned/{private}"
    what = f"the configuration is not used: {where}: permission denied"
    assert warnings == [f"{what}; all must be able to read it: sudo chmod a+rX {where}"]


def test_the_places_of_the_configuration_are_all_looked_at() -> None:
    assert selfplace.MAIN == configfiles.MAIN
    assert set(selfplace.FOLDERS) == {*configfiles.DROP_INS, *configfiles.PROFILES}


def test_the_affinity_holds(runtime: Path, host: Host) -> None:
    make_tree(host.root, process(101, cpus="2-3,18-19"))
    assert selfplace.place_self(wishes(), pid=101, host=host)["cpus"] == "2-3,18-19"


def test_confine(runtime: Path, host: Host) -> None:
    assert selfplace.place_self(wishes(confine="none"), pid=101, host=host)["confinement"] == "none"
    cpuset = selfplace.place_self(wishes(confine="cpuset"), pid=102, host=host)
    assert cpuset["confinement"] == "affinity"
    assert any("cpuset" in warning for warning in cpuset["warnings"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"schema": 1}',
        b'{"schema": 2, "jobs": []}',
        b'{"schema": 1, "jobs": [1, null, {"pid": "101", "start": 1, "grant": {"cpus": "0-31"}}]}',
        b'{"schema": 1, "jobs": [{"pid": 101, "start": 1101, "grant": {"cpus": "0-99999999999"}}]}',
        b"[" * 100_000,
    ],
)
def test_a_broken_table_is_replaced(runtime: Path, host: Host, content: bytes) -> None:
    runtime.mkdir(mode=0o700)
    (runtime / "jobs.json").write_bytes(content)
    assert selfplace.place_self(wishes(), pid=102, host=host)["cpus"] == "0-31"
    assert [job["pid"] for job in written(runtime)] == [102]


def test_links_are_not_followed(runtime: Path, host: Host, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    runtime.mkdir(mode=0o700)
    for name in ("jobs.json", "jobs.new"):
        (runtime / name).symlink_to(precious)
    assert selfplace.place_self(wishes(), pid=101, host=host)["warnings"] == []
    assert precious.read_text() == "mine"
    (runtime / "lock").unlink()
    (runtime / "lock").symlink_to(precious)
    grant = selfplace.place_self(wishes(), pid=102, host=host)
    assert "your other jobs are not known" in grant["warnings"][-1]
    assert grant["apart"] == "nobody"


def test_a_folder_that_others_can_write_is_not_trusted(runtime: Path, host: Host) -> None:
    selfplace.place_self(wishes(), pid=101, host=host)
    runtime.chmod(0o770)
    grant = selfplace.place_self(wishes(), pid=102, host=host)
    assert grant["cpus"] == "0-31", "the job starts all the same"
    assert "open to other users" in grant["warnings"][-1]
    assert [job["pid"] for job in written(runtime)] == [101]


def test_a_folder_that_is_a_link_is_not_trusted(runtime: Path, host: Host, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    runtime.symlink_to(tmp_path / "elsewhere")
    assert "not a folder, or a link" in selfplace.place_self(wishes(), pid=101, host=host)["warnings"][-1]
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another user takes root")
def test_a_folder_of_another_user_is_not_trusted(runtime: Path, host: Host) -> None:
    runtime.mkdir(mode=0o700)
    os.chown(runtime, 65534, 65534)
    assert "owned by user 65534" in selfplace.place_self(wishes(), pid=101, host=host)["warnings"][-1]
    assert list(runtime.iterdir()) == []


def test_where_the_table_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, locks = tmp_path / "mine", tmp_path / "locks"
    mine.mkdir(mode=0o700)
    locks.mkdir()
    locks.chmod(0o1777)
    monkeypatch.setattr(jobtables, "LOCKS", str(locks))
    uid = os.getuid()
    assert jobtables.folder_path({"XDG_RUNTIME_DIR": str(mine)}, uid) == f"{mine}/torchtuned"
    assert jobtables.folder_path({"XDG_RUNTIME_DIR": str(mine)}, 4321) == f"{locks}/torchtuned-4321", "not that user's"
    assert jobtables.folder_path({"XDG_RUNTIME_DIR": "relative"}, 4321) == f"{locks}/torchtuned-4321"
    mine.chmod(0o777)
    assert jobtables.folder_path({"XDG_RUNTIME_DIR": str(mine)}, uid) == f"{locks}/torchtuned-{uid}"
    (locks / "torchtuned-4321").mkdir()
    assert jobtables.folder_path({}, 4321) == "/tmp/torchtuned-4321", "somebody else was there first"
    for mode in (0o777, 0o755):
        locks.chmod(mode)
        assert jobtables.folder_path({}, 4322) == "/tmp/torchtuned-4322", "there others could take it away"
    monkeypatch.setattr(jobtables, "LOCKS", str(tmp_path / "nothing"))
    assert jobtables.folder_path({}, 4322) == "/tmp/torchtuned-4322"


@pytest.mark.skipif(os.getuid() != 0, reason="the folder is root's")
def test_the_daemon_can_read_it_and_nobody_can_lock_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: Host
) -> None:
    """The daemon is root without the right to read what is private."""
    tmp_path.chmod(0o1777)
    for module in (jobtables, table):
        monkeypatch.setattr(module, "LOCKS", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    before = os.umask(0o077)
    try:
        selfplace.place_self(wishes(command=["secret"]), pid=101, host=host)
    finally:
        os.umask(before)
    folder = tmp_path / "torchtuned-0"
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert modes == {"torchtuned-0": 0o711, "jobs.json": 0o644, "lock": 0o600}
    assert "secret" not in (folder / "jobs.json").read_text()


def test_a_lock_that_is_never_released_costs_a_warning(
    runtime: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.mkdir(mode=0o700)
    monkeypatch.setattr(table, "LOCK_S", 0.05)
    with open(runtime / "lock", "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert "locked" in selfplace.place_self(wishes(), pid=101, host=host)["warnings"][-1]
    assert selfplace.place_self(wishes(), pid=101, host=host)["warnings"] == []


def test_a_full_disk_costs_a_warning(runtime: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    grant = selfplace.place_self(wishes(), pid=101, host=host)
    assert "No space left" in grant["warnings"][-1]
    assert [path.name for path in runtime.iterdir()] == ["lock"]


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, whom file modes bind")
def test_a_umask_that_takes_all_locks_nobody_out(host: Host, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    for part in (tmp_path, *tmp_path.parents[:3]):
        part.chmod(part.stat().st_mode | 0o011)
    script = (
        f"import os, sys; sys.path[:0] = {[str(TOP), str(TOP / 'tests')]!r}\n"
        "os.umask(0o777); from torchtuned.host import Host; from torchtuned.run import selfplace\n"
        "from test_selfplace import wishes\n"
        f"host = Host({str(host.root)!r})\n"
        "for pid in (101, 102): print(selfplace.place_self(wishes(cpus='4'), pid=pid, host=host))\n"
        "print(oct(os.umask(0)))"
    )
    code = f"import os; os.setgid(65534); os.setuid(65534)\n{script}"
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    first, second, umask = done.stdout.splitlines() or [done.stderr]
    assert ("'warnings': []" in first, "'warnings': []" in second, umask) == (True, True, "0o777")
    (folder / "torchtuned").chmod(0)
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert f"permission denied (chmod -R u+rwX {folder}/torchtuned)" in done.stdout


def test_a_table_that_nobody_would_read_is_not_written(
    runtime: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    selfplace.place_self(wishes(cpus="1"), pid=101, host=host)
    monkeypatch.setattr(table, "MAX_BYTES", 1000)
    assert "too large" in selfplace.place_self(wishes(cpus="1"), pid=102, host=host)["warnings"][-1]
    assert [job["pid"] for job in written(runtime)] == [101]


# What a daemon placed that does not answer now


def daemons(host: Host, pid: int, cpus: str, **changes: Any) -> Path:
    """The files of a daemon with one job."""
    folder = host.root / "run/torchtuned"
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    granted = Grant(cpus=parse_list(cpus), threads=1, **changes)
    process = Process(pid=pid, start=1000 + pid, uid=4321)
    jobs = Jobs(folder / "jobs.json")
    jobs.load()
    request = Request(command=("secret",))
    job = Job(id=jobs.new_id(), process=process, request=request, since=1, state=State.RUNNING, grant=granted)
    jobs.put(replace(job, warnings=("secret",)))
    return folder / "placed.json"


@pytest.mark.skipif(os.getuid() != 0, reason="the file counts when it is root's")
def test_jobs_of_a_daemon_that_is_gone_are_kept_clear_of(runtime: Path, gpu_host: Host) -> None:
    public = daemons(gpu_host, 101, "0-6,16-22", gpus=("0000:10:00.0",))
    daemons(gpu_host, 102, "8-15,24-31")
    assert public.stat().st_mode & 0o777 == 0o644
    assert "secret" not in public.read_text()
    grant = selfplace.place_self(wishes(cpus="1", gpus=[]), pid=103, host=gpu_host)
    assert (grant["cpus"], grant["shared"]) == ("7,23", False)
    assert grant["apart"] == "your own jobs and those of torchtunedd"
    make_tree(gpu_host.root, process(105, parent=101, cpus="0-6,16-22"))
    assert selfplace.place_self(wishes(gpus=[]), pid=105, host=gpu_host)["cpus"] == "0-6,16-22", "inside of it"
    assert "0000:10:00.0" not in selfplace.place_self(wishes(gpus=3), pid=104, host=gpu_host)["gpus"]
    (gpu_host.root / "proc/102/stat").unlink()
    assert parse_list(selfplace.place_self(wishes(gpus=[]), pid=106, host=gpu_host)["cpus"]) & parse_list("8-15")
    assert {job["pid"] for job in written(runtime)} == {103, 104, 105, 106}, "only its own are in a user's table"


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to other users")
def test_nobody_but_root_says_what_the_daemon_placed(runtime: Path, host: Host) -> None:
    public = daemons(host, 101, "0-15")
    public.parent.chmod(0o777)
    assert selfplace.place_self(wishes(), pid=102, host=host, dry=True)["cpus"] == "0-31"
    public.parent.chmod(0o755)
    os.chown(public.parent, 65534, -1)
    assert selfplace.place_self(wishes(), pid=102, host=host, dry=True)["cpus"] == "0-31"
    os.chown(public.parent, 0, -1)
    public.write_text("[")
    assert selfplace.place_self(wishes(), pid=102, host=host, dry=True)["cpus"] == "0-31"


def test_many_at_once_stay_apart(runtime: Path, tmp_path: Path) -> None:
    """Eight processes ask for a core each of eight, at the same moment."""
    files = machine(cores=pairs(0, 8, 8))
    root = make_tree(tmp_path / "many", files)
    script = (
        f"import os, sys; from pathlib import Path; sys.path[:0] = {[str(TOP), str(TOP / 'tests')]!r}\n"
        "from fakes.tree import make_tree; from test_selfplace import process, wishes\n"
        f"from torchtuned.run import selfplace; from torchtuned.host import Host; root = Path({str(root)!r})\n"
        "pid = os.getpid(); make_tree(root, process(pid)); sys.stdin.read(1)\n"
        "print(selfplace.place_self(wishes(cpus='1'), pid=pid, host=Host(root))['cpus'], flush=True); sys.stdin.read()"
    )
    crowd = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    for one in crowd:
        assert one.stdin is not None
        one.stdin.write("x")
        one.stdin.flush()
    found = [parse_list(one.stdout.readline()) for one in crowd if one.stdout is not None]
    for one in crowd:
        one.communicate()
    assert sorted(cpu for cpus in found for cpu in cpus) == list(range(16))


def test_placing_itself_stays_light() -> None:
    """Each takes 3 ms to import, before every job that has no daemon."""
    script = (
        f"import sys; sys.path.insert(0, {str(TOP)!r}); import torchtuned.run.main, torchtuned.run.selfplace;"
        "print(sorted({'typing', 'pathlib', 'enum', 'logging', 'psutil'} & set(sys.modules)))"
    )
    done = subprocess.run(["/usr/bin/python3", "-I", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "['enum']\n"  # of dataclasses
