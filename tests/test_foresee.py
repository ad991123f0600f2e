"""What torchtuned-run says before a job starts about what would end it, on machines in folders and on this one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fakes.tree import make_tree
from test_run import RUN, _no_daemon, run

from torchtuned.run import foresee, rlimits

__all__ = ["_no_daemon"]  # a fixture for every test here

SESSION = "/user.slice/user-1000.slice/session-3.scope"
GIB = 1 << 30
UNSHARE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=$0 shm /dev/shm && exec "$@"']


def grant(cpus: str, *, ranks: int = 1) -> dict[str, Any]:
    return {"cpus": cpus, "ranks": [{"cpus": cpus} for _ in range(ranks)]}


def cgroups(place: str, **pids: tuple[str, str]) -> dict[str, str | bytes | None]:
    """A unified hierarchy: for each named folder ("" is the root) its pids.max and pids.current."""
    files: dict[str, str | bytes | None] = {"proc/self/cgroup": f"0::{place}\n"}
    parts = place.split("/")[1:]
    for name, (most, used) in pids.items():
        folder = "/".join(["sys/fs/cgroup", *parts[: parts.index(name) + 1]])
        files |= {f"{folder}/pids.max": f"{most}\n", f"{folder}/pids.current": f"{used}\n"}
    return files


# Processes and threads (P17)


def tasks(root: Path, found: dict[str, Any], threads: int, *, workers: int = 0, nproc: int = -1) -> list[str]:
    return foresee.tasks(found, threads, {"workers": workers} if workers else {}, nproc=nproc, root=str(root))


def test_every_cgroup_above_the_job_counts(tmp_path: Path) -> None:
    # 24 + 8 + 8 threads where 30 may be
    above = {"user-1000.slice": ("900", "870"), "session-3.scope": ("max", "12")}
    root = make_tree(tmp_path, cgroups(SESSION, **above))
    (said,) = tasks(root, grant("0-7"), 8)
    assert "/sys/fs/cgroup/user.slice/user-1000.slice/pids.max is 900, 870 are in use" in said
    assert "systemctl set-property user-1000.slice TasksMax=infinity" in said
    assert str(root) not in said


def test_many_workers_on_many_cpus_in_a_small_container(tmp_path: Path) -> None:
    """pids.max 1024 where 384 CPUs are seen (vast-ai/base-image#214)."""
    container = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/pids.max": "1024\n", "sys/fs/cgroup/pids.current": "9\n"}
    root = make_tree(tmp_path, {**container})
    (said,) = tasks(root, grant("0-383"), 192, workers=8)
    assert "8 DataLoader workers" in said
    assert "--pids-limit" in said
    assert tasks(root, grant("0-7"), 8, workers=8) == []


def test_ranks_multiply_and_the_tightest_is_named(tmp_path: Path) -> None:
    places = {"user.slice": ("400", "0"), "user-1000.slice": ("300", "0"), "session-3.scope": ("350", "0")}
    root = make_tree(tmp_path, cgroups(SESSION, **places))
    assert tasks(root, grant("0-7"), 8) == []
    (said,) = tasks(root, grant("0-7", ranks=8), 8)
    assert said.startswith("about 320 processes and threads (8 ranks, each with 8 threads and 8 CPUs)")
    assert "user-1000.slice/pids.max is 300" in said


def test_the_old_hierarchy_counts_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:pids:/docker/ab\n1:name=systemd:/docker/ab\n0::/\n",
        "sys/fs/cgroup/pids/docker/ab/pids.max": "30\n",
        "sys/fs/cgroup/pids/docker/ab/pids.current": "1\n",
    }
    (said,) = tasks(make_tree(tmp_path, {**files}), grant("0-3"), 4)
    assert "/sys/fs/cgroup/pids/docker/ab/pids.max is 30" in said


@pytest.mark.parametrize("text", ["", "nonsense", "max", "-1"])
def test_what_cannot_be_read_is_no_limit(tmp_path: Path, text: str) -> None:
    files = {"proc/self/cgroup": f"0::{SESSION}\n", f"sys/fs/cgroup{SESSION}/pids.max": text}
    assert tasks(make_tree(tmp_path, {**files}), grant("0-3"), 4) == []
    assert tasks(tmp_path / "nothing", grant("0-3"), 4) == []


def test_the_limit_on_the_users_tasks_counts_what_is_there(tmp_path: Path) -> None:
    files: dict[str, str | bytes | None] = {f"proc/7/task/{thread}": None for thread in range(30)}
    root = make_tree(tmp_path, {**files, "proc/self/cgroup": "0::/\n", "proc/uptime": "1\n"})
    need = foresee.OWN_THREADS + 8
    assert tasks(root, grant("0-3"), 4, nproc=need + 30) == []
    (said,) = tasks(root, grant("0-3"), 4, nproc=need + 29)
    assert f"this user may have {need + 29} (ulimit -u), 30 are in use" in said
    assert "/etc/security/limits.d" in said
    assert tasks(root, grant("0-3"), 4, nproc=-1) == []


def test_the_wrapper_says_it_and_runs_the_job() -> None:
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "prlimit", "--nproc=20:20", *RUN]
    done = subprocess.run([*words, "echo", "ran"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ran\n"
    assert "will not fit: this user may have 20 (ulimit -u)" in done.stderr


def test_root_has_no_limit_on_tasks() -> None:
    assert os.geteuid() == 0
    assert rlimits.current() == -1


# Shared memory (T03)

EIGHT = "train.py --num-workers 8 --batch-size 64"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (f"python {EIGHT}", {"workers": 8, "batch": 64}),
        ("python3.12 -u train.py -j8 -b 256 --img-size=512", {"workers": 8, "batch": 256, "edge": 512}),
        ("torchrun --nproc-per-node=2 train.py data.num_workers=4 data.batch_size=32", {"workers": 4, "batch": 32}),
        ("./train.py --workers=2 --prefetch_factor=4", {"workers": 2, "prefetch": 4}),
        ("python train.py --num-workers", {}),
        ("python train.py --num-workers many --batch-size -1", {}),
        ("make -j8", {}),
        ("", {}),
    ],
)
def test_what_a_command_line_tells(command: str, told: dict[str, int]) -> None:
    assert foresee.told(command.split()) == told


def test_t03_the_estimate() -> None:
    told = foresee.told(f"python {EIGHT}".split())
    (said,) = foresee.short_of(64 << 20, 64 << 20, 1, told)
    assert "8 DataLoader workers hold about 588 MiB (2 batches of 64 x 3 x 224 x 224 float32 each)" in said
    assert "--shm-size=1g" in said
    assert foresee.short_of(8 * GIB, 8 * GIB, 1, told) == []
    assert "left, and 8 DataLoader workers" in foresee.short_of(8 * GIB, GIB // 2, 1, told)[0]
    assert "16 ranks, each with 8 DataLoader workers" in foresee.short_of(8 * GIB, 8 * GIB, 16, told)[0]


def test_without_workers_told_only_a_small_or_full_one_is_said() -> None:
    assert "docker run --shm-size=" in foresee.short_of(64 << 20, 60 << 20, 1, {})[0]
    assert "1 of 8192 MiB left" in foresee.short_of(8 * GIB, 1 << 20, 1, {})[0]
    assert foresee.short_of(GIB, GIB, 1, {}) == []
    assert foresee.short_of(64 << 20, 64 << 20, 1, {"workers": 0}) == []
    assert foresee.shared_memory(1, {}, path="/no/such/folder") == [
        "/no/such/folder is not there; DataLoader workers need it"
    ]


@pytest.mark.parametrize(("size", "says"), [("64m", "/dev/shm has 64 MiB, and 8 DataLoader workers"), ("8g", "")])
def test_t03_in_the_jobs_own_mount_namespace(tmp_path: Path, size: str, says: str) -> None:
    program = tmp_path / "train.py"
    program.write_text("#!/bin/sh\necho ran\n")
    program.chmod(0o755)
    words = [*UNSHARE, size, *RUN, str(program), *EIGHT.split()[1:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ran\n"
    assert says in done.stderr
    assert ("DataLoader" in done.stderr) == bool(says)


def test_explain_says_it_too() -> None:
    words = [*UNSHARE, "64m", *RUN, "--explain", "--json", "true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert "/dev/shm has 64 MiB" in done.stdout


# Logging out (T10)

KEPT = "var/lib/systemd/linger/ann"
CONF = "etc/systemd/logind.conf"


def logout(tmp_path: Path, uid: int = 1000, place: str = SESSION) -> list[str]:
    return foresee.logout(uid, "ann", root=str(make_tree(tmp_path, {"proc/self/cgroup": f"0::{place}\n"})))


def test_t10_a_session_without_linger(tmp_path: Path) -> None:
    (said,) = logout(tmp_path)
    assert "RemoveIPC" in said
    assert "torchtuned-run --linger" in said


@pytest.mark.parametrize(
    ("uid", "place"),
    [
        (999, SESSION),
        (0, SESSION),
        (1000, "/system.slice/train.service"),
        (1000, "/"),
    ],
)
def test_t10_nothing_is_taken_from_others(tmp_path: Path, uid: int, place: str) -> None:
    assert logout(tmp_path, uid, place) == []


def test_t10_linger_and_the_administrators_word(tmp_path: Path) -> None:
    make_tree(tmp_path, {"proc/self/cgroup": f"0::{SESSION}\n", KEPT: ""})
    assert foresee.logout(1000, "ann", root=str(tmp_path)) == []
    assert foresee.logout(1000, "bob", root=str(tmp_path)) != []
    make_tree(tmp_path, {CONF: "[Login]\n#RemoveIPC=no\n"})
    assert foresee.logout(1000, "bob", root=str(tmp_path)) != []
    make_tree(tmp_path, {"run/systemd/logind.conf.d/50-a.conf": "[Login]\nRemoveIPC=no\n"})
    assert foresee.logout(1000, "bob", root=str(tmp_path)) == []
    make_tree(tmp_path, {"etc/systemd/logind.conf.d/50-a.conf": "[Login]\nRemoveIPC = yes\n"})
    assert foresee.logout(1000, "bob", root=str(tmp_path)) != [], "/etc wins over /run by file name"


@pytest.mark.parametrize(
    "place",
    [
        "/user.slice/user-1000.slice/user@1000.service/app.slice/app-term.scope",
        "/user.slice/user-1000.slice/torchtuned-job-7.scope",
    ],
)
def test_t10_other_places_of_a_login(tmp_path: Path, place: str) -> None:
    assert len(logout(tmp_path, place=place)) == 1
    assert "KillUserProcesses" not in logout(tmp_path / "b", place=place)[0]


def test_t10_killed_processes_are_killed_lingering_or_not(tmp_path: Path) -> None:
    make_tree(tmp_path, {"proc/self/cgroup": f"0::{SESSION}\n", KEPT: "", CONF: "[Login]\nKillUserProcesses=yes\n"})
    (said,) = foresee.logout(1000, "ann", root=str(tmp_path))
    assert "KillUserProcesses" in said
    assert "systemd-run --user --scope" in said
    assert len(foresee.logout(1000, "bob", root=str(tmp_path))) == 2


# --linger


def test_linger_without_logind_says_what_to_do() -> None:
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *RUN, "--linger", "echo", "ran"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ran\n"
    assert "--linger: systemd-logind does not answer" in done.stderr


def test_linger_has_nothing_to_do_for_root() -> None:
    done = run("--linger", "echo", "ran")
    assert done.stdout == "ran\n"
    assert "linger" not in done.stderr


# Limits (T27)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"etc/security/limits.conf": "@train hard nofile 2048\n"}, "raise it in /etc/security/limits.conf ('@train"),
        ({"etc/security/limits.d/90-x.conf": "* - nofile 2048\n"}, "raise it in /etc/security/limits.d/90-x.conf"),
        ({"etc/security/limits.conf": "#* hard nofile 2048\n"}, "'* hard nofile 524288' in /etc/security/limits.d/"),
        (
            {"proc/self/cgroup": "0::/system.slice/train.service\n"},
            "systemctl edit train.service: LimitNOFILE=524288 below [Service]",
        ),
        (
            {"proc/self/cgroup": "1:name=systemd:/system.slice/train.service\n0::/\n"},
            "systemctl edit train.service: LimitNOFILE=524288 below [Service]",
        ),
        (  # a service of the user's, whose manager nobody restarts without ending the desktop
            {"proc/self/cgroup": "0::/user.slice/user-1000.slice/user@1000.service/app.slice/vte.service\n"},
            "'* hard nofile 524288' in /etc/security/limits.d/",
        ),
        ({"proc/self/cgroup": "0::/\n"}, "docker run --ulimit nofile=524288"),
    ],
)
def test_t27_what_to_edit(tmp_path: Path, files: dict[str, str], says: str) -> None:
    assert says in rlimits.where("nofile", "524288", str(make_tree(tmp_path, {**files})))


def unprivileged(code: str, *prlimit: str) -> str:
    """What a program of ours prints as nobody, under some limits."""
    words = ["prlimit", *prlimit, "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3"]
    top = Path(__file__).resolve().parent.parent
    start = f"import resource as r, sys; sys.path.insert(0, {str(top)!r}); from torchtuned.run.rlimits import *; "
    done = subprocess.run([*words, "-I", "-c", start + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_the_configuration_wants_beyond_the_hard_limit() -> None:
    memlock = unprivileged(
        "print(apply({'memlock': 'infinity'}), r.getrlimit(r.RLIMIT_MEMLOCK))", "--memlock=4096:8192"
    )
    assert "the limit memlock is 8192, not infinity as the configuration wants" in memlock
    assert "(8192, 8192)" in memlock
    assert "'* hard memlock unlimited'" in memlock
    code = "print(apply({'core': '0', 'memlock': '5000'}), r.getrlimit(r.RLIMIT_CORE), r.getrlimit(r.RLIMIT_MEMLOCK))"
    assert unprivileged(code, "--core=9000:9000", "--memlock=4096:8192") == "[] (0, 9000) (5000, 8192)\n"
    kept = unprivileged("print(apply({'core': 'keep'}), r.getrlimit(r.RLIMIT_CORE))", "--core=9000:9000")
    assert kept == "[] (9000, 9000)\n"


def test_oom_preference_is_raised_and_its_refusal_said() -> None:
    assert (
        unprivileged("print(apply({'oom_score_adj': '500'}), open('/proc/self/oom_score_adj').read())") == "[] 500\n\n"
    )
    said = unprivileged("print(apply({'oom_score_adj': '-500'}))")
    assert "oom_score_adj is not set to -500: Permission denied (OOMScoreAdjust=-500 of its unit)" in said
