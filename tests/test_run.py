"""torchtuned-run as a process: what a command sees is what it would see without it, but for its place.

Without a daemon, and with a stand-in for it that is silent, refuses, or is hostile. tests/bus/ has the real one.
"""

from __future__ import annotations

import getpass
import json
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchtuned.cpuset import format_list, parse_list
from torchtuned.placement import request_from_json

TOP = Path(__file__).resolve().parent.parent
ENTRY = f"import sys; sys.path.insert(0, {str(TOP)!r}); from torchtuned.run.main import main; sys.exit(main())"
RUN = ["/usr/bin/python3", "-I", "-c", ENTRY]  # as /usr/bin/torchtuned-run starts
MINE = format_list(os.sched_getaffinity(0))
# a program with threads and a child process, each of which says its mask
MASKS = """
import os, re, subprocess, sys, threading
threads = [threading.Thread(target=threading.Event().wait, daemon=True) for _ in range(4)]
[thread.start() for thread in threads]
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
def masks(pid):
    for thread in os.listdir(f"/proc/{pid}/task"):
        yield re.search("Cpus_allowed_list:\\t(.*)", open(f"/proc/{pid}/task/{thread}/status").read())[1]
print(" ".join([*masks(os.getpid()), *masks(child.pid)]), flush=True)
sys.stdin.read()
child.kill()
"""


@pytest.fixture(autouse=True)
def _no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of its own, no bus, and none of the variables that decide something."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/no-bus")
    for name in list(os.environ):
        if name.startswith(("OMP_", "CUDA_", "NCCL_", "PYTHON_EXEC", "TORCHTUNED_", "PET_")):
            monkeypatch.delenv(name)


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *words], capture_output=True, text=True, timeout=60, **options)


def table(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "runtime/torchtuned/jobs.json"
    jobs: list[dict[str, Any]] = json.loads(path.read_text())["jobs"] if path.exists() else []
    return jobs


# What the command sees


def test_it_becomes_the_command() -> None:
    process = subprocess.Popen([*RUN, "sh", "-c", "echo $$; exit 7"], stdout=subprocess.PIPE, text=True)
    assert process.communicate()[0] == f"{process.pid}\n"
    assert process.returncode == 7


def test_death_by_a_signal_is_the_commands_own() -> None:
    process = subprocess.Popen([*RUN, "sh", "-c", "echo ready; exec sleep 60"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(10) == -signal.SIGUSR1
    process.stdout.close()


@pytest.mark.parametrize(
    "locale", [{}, {"LANG": "C"}, {"LC_ALL": "C.UTF-8"}, {"LC_CTYPE": "C"}, {"LC_CTYPE": "C.UTF-8"}]
)
def test_variables_are_the_callers_and_the_thread_count(locale: dict[str, str], tmp_path: Path) -> None:
    environ = {**{k: v for k, v in os.environ.items() if k != "LANG" and not k.startswith("LC_")}, **locale}
    environ["ODD"] = "\udcff\n="
    words = ["/usr/bin/env", "-0"]
    bare = subprocess.run(words, env=environ, stdout=subprocess.PIPE, check=True).stdout.split(b"\0")
    ours = subprocess.run([*RUN, *words], env=environ, stdout=subprocess.PIPE, check=True).stdout.split(b"\0")
    threads = table(tmp_path)[0]["grant"]["threads"]
    assert sorted(ours) == sorted([*bare, f"OMP_NUM_THREADS={threads}".encode()])


def status(*words: str) -> dict[str, str]:
    text = subprocess.run([*words, "cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    return dict(line.split(":\t") for line in text.splitlines() if ":\t" in line)


def test_signals_and_descriptors_are_the_callers() -> None:
    bare, ours = status(), status(*RUN)
    for field in ("SigBlk", "SigIgn", "Umask", "NoNewPrivs", "Seccomp"):
        assert ours[field] == bare[field]
    listing = ["ls", "/proc/self/fd"]
    assert run(*listing).stdout == subprocess.run(listing, capture_output=True, text=True).stdout


def test_an_ignored_interrupt_stays_ignored_and_broken_pipes_kill() -> None:
    ignoring = ["sh", "-c", "trap '' INT HUP; exec \"$@\"", "sh"]
    assert status(*ignoring, *RUN)["SigIgn"] == status(*ignoring)["SigIgn"]
    pipe = subprocess.run(
        ["sh", "-c", '{ "$@"; echo $? >&2; } | true', "sh", *RUN, "yes"], capture_output=True, text=True
    )
    assert pipe.stderr.splitlines()[-1] == str(128 + signal.SIGPIPE)


def test_standard_input_and_odd_words_go_through() -> None:
    assert run("cat", input="a\nb\n").stdout == "a\nb\n"
    words = ["printf", "[%s]", "", "--gpus", "--", "é\n", "-"]
    assert run(*words).stdout == "[][--gpus][--][é\n][-]"
    bytes_word = subprocess.run([*RUN, "printf", "%s", b"\xff\xfe"], stdout=subprocess.PIPE, check=True).stdout
    assert bytes_word == b"\xff\xfe"


def test_the_terminal_is_the_commands() -> None:
    """In a terminal of its own: the command is the foreground job, and Ctrl-C reaches it."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nohup and the like ignore it
        os.execv(
            RUN[0], [*RUN, "--quiet", "sh", "-c", "trap 'echo caught; exit 3' INT; tty; ps -o stat= -p $$; read x"]
        )
    seen = b""
    while b"+" not in seen and select.select([terminal], [], [], 20)[0]:
        seen += os.read(terminal, 1000)
    assert b"/dev/pts/" in seen
    os.write(terminal, b"\x03")
    _, ended = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(ended) == 3
    said = b""
    while b"caught" not in said and select.select([terminal], [], [], 20)[0]:
        said += os.read(terminal, 1000)  # the echo of ^C may come alone; OSError when there is no more
    assert b"caught" in said
    os.close(terminal)


def test_closed_descriptors_do_not_matter() -> None:
    done = subprocess.run(["sh", "-c", '"$@" 0<&- 2>&-', "sh", *RUN, "sh", "-c", "echo out"], stdout=subprocess.PIPE)
    assert (done.stdout, done.returncode) == (b"out\n", 0)


@pytest.mark.parametrize("name", ["torchtuned-run", "torchtuned"])
def test_an_interrupt_while_the_program_is_loaded_ends_it_without_a_traceback(name: str, tmp_path: Path) -> None:
    for module in ("run", "cli"):
        (tmp_path / "torchtuned" / module).mkdir(parents=True)
        (tmp_path / "torchtuned" / module / "main.py").write_text("import signal; signal.raise_signal(signal.SIGINT)\n")
        for package in (tmp_path / "torchtuned", tmp_path / "torchtuned" / module):
            (package / "__init__.py").touch()  # else an installed package goes before it
    words = ["/usr/bin/python3", str(TOP / "bin" / name)]
    options: dict[str, Any] = {"env": {**os.environ, "PYTHONPATH": str(tmp_path)}, "capture_output": True, "text": True}
    done = subprocess.run(words, check=False, **options)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    done = subprocess.run([*ignoring, *words], check=False, **options)
    assert done.returncode in (70, 125)  # it went on, and found nothing to call
    assert re.fullmatch(rf"{name}: cannot be loaded: cannot import name 'main'.*\n", done.stderr)


def test_a_script_without_a_first_line_is_for_the_shell(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("echo $0 $1\n")
    script.chmod(0o755)
    assert run(str(script), "x").stdout == f"{script} x\n"


# What can go wrong


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["no-such-command"], 127, "cannot run no-such-command: command not found"),
        (["./no/such"], 127, "no such file or directory"),
        ([""], 127, "cannot run '': command not found"),
        (["a\x1b[2J"], 127, r"cannot run 'a\x1b[2J': command not found"),
        (["."], 126, "it is a directory"),
        (["/etc/passwd"], 126, "permission denied"),
        (["/"], 126, "it is a directory"),
        ([], 125, "no command given"),
        (["--"], 125, "no command given"),
        (["--gpu=1", "true"], 125, "unknown option --gpu (did you mean --gpus?)"),
        (["--bogus", "true"], 125, "unknown option --bogus (torchtuned-run --help)"),
        (["-x", "true"], 125, "unknown option -x"),
        (["--cpus"], 125, "--cpus needs a value"),
        (["--cpus=none", "true"], 125, "--cpus"),
        (["--cpus=0", "true"], 125, "--cpus: not a number from 1"),
        (["--cpus=200%", "true"], 125, "more than 100%"),
        (["--cpus=60000", "true"], 125, "--cpus 60000"),
        (["--gpus=x", "true"], 125, "no PCI address or UUID"),
        (["--gpus=0000:ff:1f.7", "true"], 125, "no such GPU"),
        (["--policy=exclusiv", "true"], 125, "did you mean exclusive?"),
        (["--env-profile=cpu,cuda", "true"], 125, "'cuda' is none of"),
        (["--wait=soon", "true"], 125, "--wait: not a number of seconds"),
        (["--shared=1", "true"], 125, "--shared takes no value"),
        (["--ranks=1e9", "true"], 125, "--ranks: not a number from 1 to 4096: '1e9'"),
        (["--ranks=5000", "true"], 125, "--ranks: not a number from 1 to 4096: '5000'"),
        (["--gpus=5000", "true"], 125, "--gpus: not a number from 0 to 4096: '5000'"),
        (["--json", "true"], 125, "--json goes with --explain"),
        (["--require", "true"], 125, "no system bus"),
    ],
)
def test_own_failures(words: list[str], code: int, says: str, tmp_path: Path) -> None:
    done = run(*words)
    assert done.returncode == code
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("torchtuned-run: ")
    assert table(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["python", "train.py"], 127, "(python3 is there: torchtuned-run python3 ...)"),
        (["train.py"], 127, "(torchtuned-run python3 train.py)"),
        (["./train.py"], 126, "(torchtuned-run python3 ./train.py)"),
        (["other.py"], 127, "command not found\n"),
        (["--wait", "5", "true"], 127, "(--wait=5)"),
        (["--wait=1", "5", "true"], 127, "command not found\n"),
    ],
)
def test_what_a_newcomer_writes_gets_the_word_that_works(
    words: list[str], code: int, hint: str, tmp_path: Path
) -> None:
    """A Debian without `python`, and a script that is not executable."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").symlink_to("/usr/bin/python3")
    (tmp_path / "train.py").write_text("print()\n")
    done = run(*words, cwd=tmp_path, env={**os.environ, "PATH": f"{tmp_path}/bin"})
    assert done.returncode == code
    assert hint in done.stderr


def test_a_command_that_turns_out_not_to_run_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = run(str(script))
    assert done.returncode == 127
    assert f"cannot run {script}: its interpreter /no/such/interpreter: no such file or directory" in done.stderr
    assert table(tmp_path) == []


def test_where_no_file_may_be_written_the_status_says_why_all_the_same(tmp_path: Path) -> None:
    """A file too large is a deadly signal for programs, and Python's own ignoring of it is not handed on to them."""
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    assert in_bash(f'ulimit -f 0; "$@" {script} 2>{tmp_path}/errors').returncode == 127
    assert in_bash(f'ulimit -f 0; "$@" sh -c "exit 3" 2>{tmp_path}/errors').returncode == 3
    killed = in_bash(f'ulimit -f 0; "$@" sh -c "echo >{tmp_path}/x"; exit $?')
    assert killed.returncode == 128 + signal.SIGXFSZ


def test_help_fits_a_screen_and_version_is_said() -> None:
    lines = run("--help").stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert run("-h", "no-such-command").stdout == run("--help").stdout
    assert re.fullmatch(r"torchtuned-run \d+\.\d+\.\d+\S*\n", run("--version").stdout)


def test_options_end_at_the_command() -> None:
    assert run("printf", "%s", "--quiet", "--nonsense").stdout == "--quiet--nonsense"
    assert run("--quiet", "--", "echo", "-q").stdout == "-q\n"


# Places without a daemon


def test_two_jobs_are_disjoint_in_every_thread() -> None:
    jobs = [
        subprocess.Popen(
            [*RUN, "--quiet", "--cpus", "1", sys.executable, "-c", MASKS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    masks = [set(job.stdout.readline().split()) for job in jobs if job.stdout is not None]
    for job in jobs:
        job.communicate("")
    assert [len(mask) for mask in masks] == [1, 1], "every thread and child of a job has one mask"
    first, second = (parse_list(mask.pop()) for mask in masks)
    assert first
    assert second
    assert not first & second


def test_it_says_in_one_line_that_it_placed_itself() -> None:
    done = run("true")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert f"placed without torchtunedd on CPUs {MINE}" in done.stderr
    assert run("--quiet", "true").stderr == ""


BARE = """
import os, subprocess, sys
os.chroot(sys.argv[1])
os.chdir("/")
assert not os.listdir("/proc") + os.listdir("/sys")
one = {min(os.sched_getaffinity(0))}
os.sched_setaffinity(0, one)
command = [*sys.argv[2:], "python3", "-c", "import os; print(os.environ['OMP_NUM_THREADS'], os.sched_getaffinity(0))"]
print(one, flush=True)
os.execv(command[0], command)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="a chroot takes root")
def test_in_a_bare_chroot_a_job_runs_where_it_may_with_one_line(tmp_path: Path) -> None:
    """Without /proc and /sys nothing tells jobs from each other."""
    root = tmp_path / "root"
    root.mkdir()
    own = ["unshare", "-m", "--propagation", "private", "sh", "-c", f'mount --bind / {root} && exec "$@"', "sh"]
    done = subprocess.run(
        [*own, sys.executable, "-I", "-c", BARE, str(root), *RUN], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    mask, ran = done.stdout.splitlines()
    assert ran == f"1 {mask}"
    (note,) = done.stderr.splitlines()
    assert "not kept to any CPUs, because without /proc nothing tells which are free" in note


def test_nothing_free_is_said_loudly() -> None:
    holder = subprocess.Popen(
        [*RUN, "--quiet", "sh", "-c", "echo; read x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    done = run("true")
    waiting = run("--wait=0.1", "true")
    quiet = run("--wait=0.1", "--quiet", "true")
    narrow = run("--cpus=1", "grep", "Cpus_allowed_list", "/proc/self/status")
    holder.communicate(b"\n")
    [line] = done.stderr.splitlines()
    assert f"on CPUs {MINE}, shared with process {holder.pid} of {getpass.getuser()} (no core is free; --wait" in line
    assert len(line) < 160
    said = f"waited 0.1 s, no place: no core is free; process {holder.pid} of {getpass.getuser()} has CPUs {MINE}"
    assert (waiting.returncode, quiet.returncode) == (125, 125)
    lines = [f"torchtuned-run: {words}\n" for words in ("waiting: no core is free", said)]
    assert (waiting.stderr, quiet.stderr) == ("".join(lines), lines[1])
    assert len(parse_list(narrow.stdout.split()[1])) < max(2, len(parse_list(MINE)))


def test_the_callers_mask_is_kept() -> None:
    cpu = min(os.sched_getaffinity(0))
    words = ["taskset", "-c", str(cpu), *RUN, "--quiet", "grep", "Cpus_allowed_list", "/proc/self/status"]
    assert subprocess.run(words, capture_output=True, text=True).stdout.split()[1] == str(cpu)


def test_no_confinement_on_request() -> None:
    done = run("--quiet", "--cpus=1", "--confine=none", "grep", "Cpus_allowed_list", "/proc/self/status")
    assert done.stdout.split()[1] == MINE


def test_the_users_thread_count_is_kept_with_a_warning() -> None:
    done = run("sh", "-c", "echo $OMP_NUM_THREADS", env={**os.environ, "OMP_NUM_THREADS": "99"})
    assert done.stdout == "99\n"
    assert "OMP_NUM_THREADS=99 is more than" in done.stderr


def test_leftovers_are_warned_about() -> None:
    done = run("true", env={**os.environ, "CUDA_LAUNCH_BLOCKING": "1"})
    assert "CUDA_LAUNCH_BLOCKING=1 is set" in done.stderr


def limited(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_open_files_are_raised_to_the_hard_limit() -> None:
    done = run("sh", "-c", "ulimit -Sn; ulimit -Hn", preexec_fn=limited(1024, 8000))
    assert done.stdout.split() == ["8000", "8000"]
    low = run("sh", "-c", "ulimit -Sn", preexec_fn=limited(512, 1024))
    assert low.stdout == "1024\n"
    assert "/etc/security/limits.d" in low.stderr


def test_a_memory_policy_is_set_or_its_refusal_said() -> None:
    done = run("--memory=preferred", "sh", "-c", "head -c 200 /proc/self/numa_maps")
    assert done.returncode == 0
    assert "prefer" in done.stdout or "--memory=preferred" in done.stderr


def test_profiles_set_their_variables(tmp_path: Path) -> None:
    environ = {**os.environ, "HOME": str(tmp_path)}
    environ.pop("XDG_CACHE_HOME", None)
    done = run("--env-profile=cpu,memory", "--env-profile=compile", "env", env=environ)
    assert f"TORCHINDUCTOR_CACHE_DIR={tmp_path}/.cache/torchinductor" in done.stdout
    assert "PYTORCH_CUDA_ALLOC_CONF" not in done.stdout, "the last --env-profile counts"


# --explain


def test_explain_runs_nothing_and_tells_all_as_json(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    done = run("--explain", "--json", "--", "touch", str(marker), env={**os.environ, "OMP_NUM_THREADS": "1"})
    answer = json.loads(done.stdout)
    assert not marker.exists()
    assert table(tmp_path) == []
    assert {"cpus", "memory_nodes", "shared", "ranks", "warnings", "environment"} <= set(answer)
    assert answer["cpus"] == MINE
    assert set(answer["ranks"][0]) == {"rank", "gpu", "cpus", "memory_nodes", "omp_num_threads", "reasons"}
    assert answer["environment"]["OMP_NUM_THREADS"] == {"value": "1", "action": "kept", "reason": "set by you"}


def test_explain_for_people() -> None:
    text = run("--explain", "--env-profile=memory", "no-such-command").stdout
    for part in (
        "Placed by torchtuned-run",
        "Rank 0: no GPU",
        "set     OMP_NUM_THREADS=",
        "set     PYTORCH_CUDA_ALLOC_CONF",
    ):
        assert part in text
    assert "Warning: cannot run no-such-command" in text


# --report


def test_report_says_how_it_ended_with_the_same_status() -> None:
    done = run("--report", "sh", "-c", "exit 3")
    assert done.returncode == 3
    assert "sh ended with exit status 3" in done.stderr
    killed = run("--report", "sh", "-c", "kill -KILL $$")
    assert killed.returncode == -signal.SIGKILL
    assert "was killed by SIGKILL" in killed.stderr


def test_report_of_what_never_started_says_only_why(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    for word in ("no-such-command", str(script)):
        missing = run("--report", "--quiet", word)
        assert (missing.returncode, missing.stderr.count("\n")) == (127, 1)
        assert "cannot run" in missing.stderr


WAYS_TO_LOSE = pytest.mark.parametrize("lost", [">/dev/full", "> >(exec true)", ">&-"])


def in_bash(line: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in which "$@" is torchtuned-run."""
    return subprocess.run(["bash", "-c", line, "bash", *RUN], capture_output=True, text=True, timeout=60)


@WAYS_TO_LOSE
@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("--report sh -c 'sleep 0.1; exit 3'", 3),
        ("--report sh -c 'kill -USR1 $$'", 128 + signal.SIGUSR1),
        ("sh -c 'exit 4'", 4),
        ("no-such-command", 127),
        ("--gpus=7 true", 125),
        ("--no-such-option", 125),
    ],
)
def test_the_status_is_the_jobs_whatever_becomes_of_standard_error(lost: str, words: str, status: int) -> None:
    done = in_bash(f'"$@" {words} 2{lost}')
    assert done.returncode == status
    assert "Exception ignored" not in done.stderr


@WAYS_TO_LOSE
@pytest.mark.parametrize("words", ["--explain true", "--help", "--version"])
def test_an_answer_that_cannot_be_written_is_a_status_without_a_traceback(lost: str, words: str) -> None:
    done = in_bash(f'"$@" {words} 1{lost}')
    assert done.returncode == {">/dev/full": 1, "> >(exec true)": 141, ">&-": 0}[lost]
    says = "torchtuned-run: cannot write to standard output: no space left on device\n"
    assert done.stderr == (says if lost == ">/dev/full" else "")


def test_report_passes_signals_on() -> None:
    script = "trap 'echo got TERM; exit 4' TERM; echo ready; while :; do sleep 0.05; done"
    parent = subprocess.Popen([*RUN, "--report", "--quiet", "sh", "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    parent.terminate()
    assert parent.communicate(timeout=20)[0] == "got TERM\n"
    assert parent.returncode == 4


def test_report_in_a_terminal_interrupts_once() -> None:
    script = "n=0; trap 'n=$((n+1))' INT; echo ready; sleep 0.5; sleep 0.3; echo $n interrupts; exit $n"
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execv(RUN[0], [*RUN, "--report", "--quiet", "sh", "-c", script])
    seen = b""
    while b"ready" not in seen:
        seen += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    os.close(terminal)


# A daemon that is not as it should be

GRANT: dict[str, Any] = {
    "schema": 1,
    "job": "7",
    "state": "granted",
    "cpus": MINE,
    "memory_nodes": "",
    "gpus": [],
    "shared": False,
    "threads": 1,
    "cpu_max": None,
    "confinement": "affinity",
    "scope": "",
    "ranks": [
        {"rank": 0, "gpu": None, "cpus": MINE, "memory_nodes": "", "omp_num_threads": 1, "reasons": []},
    ],
    "warnings": [],
    "reasons": [],
    "omp_max_gpu": 8,
    "gpus_chosen": False,
    "gpus_alike": False,
    "gpu_indexes": None,
    "gpu_uuids": None,
}
ONE = str(min(os.sched_getaffinity(0)))
NARROW = {**GRANT, "cpus": ONE, "ranks": [{**GRANT["ranks"][0], "cpus": ONE}]}


class Fake:
    """The stand-in on a bus of its own; `calls` is what it was asked, with the caller's CPUs at that moment."""

    def __init__(self, address: str, log: Path) -> None:
        self.address, self.log = address, log
        self.process: subprocess.Popen[str] | None = None

    def play(self, **script: Any) -> None:
        words = [sys.executable, str(TOP / "tests/fakes/manager.py"), json.dumps(script), str(self.log)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    @property
    def members(self) -> list[str]:
        return [call["member"] for call in self.calls]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _no_daemon: None) -> Iterator[Fake]:
    daemon = subprocess.Popen(
        ["dbus-daemon", "--session", "--nofork", "--print-address"], stdout=subprocess.PIPE, text=True
    )
    assert daemon.stdout is not None
    found = Fake(daemon.stdout.readline().strip(), tmp_path / "calls")
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", found.address)
    yield found
    for process in (found.process, daemon):
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_register_move_commit_in_this_order(fake: Fake) -> None:
    fake.play(register=NARROW)
    done = run("--cpus=1", "sh", "-c", "echo $$; grep Cpus_allowed_list /proc/self/status; echo $OMP_NUM_THREADS")
    pid, mask, threads = done.stdout.splitlines()
    assert (mask.split()[1], threads, done.stderr) == (ONE, "1", "")
    assert fake.members == ["Register", "Commit"]
    assert [call["cpus"] for call in fake.calls] == [MINE, ONE], "it has moved when it commits"
    assert fake.calls[0]["pid"] == int(pid)
    request = fake.calls[0]["request"]
    assert (request["cpus"], request["command"][0], request["schema"]) == ("1", "sh", 1)


def test_what_commit_says_in_the_end_counts(fake: Fake) -> None:
    fake.play(register={**NARROW, "confinement": "cpuset"}, commit={**NARROW, "warnings": ["no scope here"]})
    done = run("grep", "Cpus_allowed_list", "/proc/self/status")
    assert done.stdout.split()[1] == ONE
    assert done.stderr == "torchtuned-run: no scope here\n"


def test_a_command_of_several_lines_is_shown_in_one(fake: Fake) -> None:
    fake.play(register=NARROW)
    done = run("sh", "-c", "echo one\necho \x1b[1mtwo")
    assert (done.stdout, done.returncode) == ("one\n\x1b[1mtwo\n", 0)
    request = fake.calls[0]["request"]
    assert request["command"] == ["sh", "-c", "echo one?echo ?[1mtwo"]
    assert request_from_json(request).command == tuple(request["command"])


def test_ranks_are_told_from_the_command(fake: Fake) -> None:
    fake.play(register=GRANT, gpus=3)
    for command in ("torchrun --nproc-per-node=2 t.py", "torchrun --nproc-per-node=gpu t.py", "python3 t.py"):
        run("--explain", *command.split())
    run("--explain", "--gpus=none", "torchrun", "--nproc-per-node=auto", "t.py")
    assert [call["request"]["ranks"] for call in fake.calls if call["member"] == "Register"] == [2, 3, None, None]
    assert fake.members.count("Release") == 4


@pytest.mark.parametrize(
    "bad",
    [
        "not json",
        {},
        {**GRANT, "cpus": "0-70000"},
        {**GRANT, "cpus": "60000"},
        {**GRANT, "gpus": ["; rm -rf /"]},
        {**GRANT, "ranks": [{**GRANT["ranks"][0], "cpus": "../../etc"}]},
    ],
)
def test_a_grant_that_is_not_right_is_not_used(fake: Fake, bad: object) -> None:
    fake.play(register=bad)
    done = run("grep", "Cpus_allowed_list", "/proc/self/status")
    assert done.stdout.split()[1] == MINE
    assert "placed without torchtunedd" in done.stderr
    assert fake.members == ["Register", "Release"]


def test_a_bad_answer_to_commit_gives_the_mask_back(fake: Fake) -> None:
    fake.play(register=NARROW, commit="nonsense")
    assert run("grep", "Cpus_allowed_list", "/proc/self/status").stdout.split()[1] == MINE
    assert fake.members == ["Register", "Commit", "Release"]


def test_a_hostile_owner_gets_nothing_executed_loaded_or_obeyed(fake: Fake, tmp_path: Path) -> None:
    library = tmp_path / "evil.so"
    fake.play(
        register={
            **GRANT,
            "environment": {"LD_PRELOAD": str(library), "PATH": str(tmp_path)},
            "LD_PRELOAD": str(library),
            "command": ["/bin/false"],
            "env_profiles": ["cpu"],
            "warnings": ["\x1b]0;owned\x07\x1b[2J"],
        }
    )
    bare = subprocess.run(["env"], capture_output=True, text=True).stdout.splitlines()
    done = run("env")
    more = {line.partition("=")[0] for line in set(done.stdout.splitlines()) - set(bare)}
    assert more <= {"OMP_NUM_THREADS", "THP_MEM_ALLOC_ENABLE", "LD_PRELOAD"}
    assert str(tmp_path / "evil") not in done.stdout
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize("error", ["Failed", "NotAuthorized", "Unheard"])
def test_refusals_lead_to_a_place_of_ones_own(fake: Fake, error: str) -> None:
    fake.play(error=error)
    done = run("true")
    assert done.returncode == 0
    assert "because the test says so; placed without torchtunedd" in done.stderr
    assert run("--require", "true").returncode == 125


@pytest.mark.parametrize("error", ["Busy", "Unplaceable", "NoSuchGpu", "InvalidRequest"])
def test_what_the_daemon_says_of_the_request_is_final(fake: Fake, error: str, tmp_path: Path) -> None:
    fake.play(error=error)
    done = run("true")
    assert (done.returncode, done.stderr) == (125, "torchtuned-run: because the test says so\n")
    assert table(tmp_path) == []


@pytest.mark.parametrize("how", ["silent", "stopped"])
def test_silence_is_not_waited_out(fake: Fake, how: str) -> None:
    fake.play(register=GRANT, silent=["Register"])
    assert fake.process is not None
    if how == "stopped":
        fake.process.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    done = run("true")
    assert (done.returncode, time.monotonic() - start < 10) == (0, True)
    assert "torchtunedd did not answer; placed without torchtunedd" in done.stderr


def test_a_daemon_that_dies_in_between(fake: Fake) -> None:
    fake.play(register=NARROW, silent=["Commit"])
    job = subprocess.Popen([*RUN, "nproc"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "Commit" not in fake.members:
        assert job.poll() is None
        time.sleep(0.02)
    assert fake.process is not None
    fake.process.kill()
    out, err = job.communicate(timeout=20)
    assert "placed without torchtunedd on CPUs " + MINE in err
    assert (job.returncode, out.strip()) == (0, str(len(os.sched_getaffinity(0))))


@pytest.mark.parametrize("files", range(5, 9))
def test_few_descriptors_lead_to_a_place_of_ones_own(fake: Fake, files: int) -> None:
    """However far it comes with asking: to connect, to make a pidfd, to send it."""
    fake.play(grant=GRANT)
    done = in_bash(f'ulimit -n {files}; "$@" sh -c "exit 3"')
    assert done.returncode == 3
    assert "internal error" not in done.stderr


def test_a_queued_job_waits_for_its_own_signal(fake: Fake) -> None:
    queued = {**GRANT, "state": "queued", "cpus": "", "ranks": [], "threads": 0, "warnings": ["1 job is before it"]}
    fake.play(register=queued, late=NARROW, commit=NARROW)
    done = run("--wait", "grep", "Cpus_allowed_list", "/proc/self/status")
    assert done.stdout.split()[1] == ONE
    assert done.stderr == "torchtuned-run: waiting: 1 job is before it\n"
    assert [call["cpus"] for call in fake.calls if call["member"] == "Commit"] == [ONE]
    assert fake.calls[0]["request"]["wait"] == 0


def test_waiting_ends_in_time_and_gives_the_turn_back(fake: Fake) -> None:
    queued = {**GRANT, "state": "queued", "cpus": "", "ranks": [], "threads": 0, "warnings": []}
    fake.play(register=queued)
    done = run("--wait=0.2", "true")
    assert (done.returncode, fake.members) == (125, ["Register", "Release"])
    assert re.search(r"waited (0\.[2-9]|\d\.\d) s, no place: nothing is free$", done.stderr, re.MULTILINE)


def test_interrupting_the_wait_ends_it_at_once(fake: Fake) -> None:
    queued = {**GRANT, "state": "queued", "cpus": "", "ranks": [], "threads": 0, "warnings": []}
    fake.play(register=queued)
    job = subprocess.Popen([*RUN, "--wait", "true"], stderr=subprocess.PIPE, text=True)
    assert job.stderr is not None
    assert "waiting" in job.stderr.readline()
    job.send_signal(signal.SIGINT)
    assert job.wait(10) == -signal.SIGINT
    assert job.stderr.read() == ""
    job.stderr.close()


def test_a_command_that_cannot_run_is_not_registered_or_given_back(fake: Fake, tmp_path: Path) -> None:
    fake.play(register=GRANT)
    assert run("no-such-command").returncode == 127
    assert fake.members == []
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    assert run(str(script)).returncode == 127
    assert fake.members == ["Register", "Commit", "Release"]


def test_a_huge_or_odd_command_is_told_in_short(fake: Fake) -> None:
    fake.play(register=GRANT)
    words: list[str | bytes] = ["true", b"\xff\xfe", "\U0001f600" * 300, *["x" * 300] * 200]
    done = subprocess.run([*RUN, *words], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    told = fake.calls[0]["request"]["command"]
    assert told[:2] == ["true", "??"]
    assert sum(map(len, told)) <= 4096
