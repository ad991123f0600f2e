"""Real processes: which one a descriptor means, and that a PID given again is not taken for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from torchtuned import processes
from torchtuned.errors import InvalidRequest

ROOT = os.geteuid() == 0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def pidfd(sleeper: subprocess.Popen[bytes]) -> Iterator[int]:
    fd = os.pidfd_open(sleeper.pid)
    yield fd
    os.close(fd)


def test_identify(sleeper: subprocess.Popen[bytes], pidfd: int) -> None:
    found = processes.identify(pidfd)
    assert (found.pid, found.uid) == (sleeper.pid, os.getuid())
    assert found.start == processes.start_time(sleeper.pid) >= processes.start_time(os.getpid())


def test_a_name_with_brackets_and_spaces_does_not_confuse_the_start_time() -> None:
    script = "open('/proc/self/comm','w').write(') R 1 2 (x'); input()"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    try:
        while open(f"/proc/{process.pid}/comm").read() != ") R 1 2 (x\n":
            pass
        ticks = processes.start_time(process.pid)
        assert 0 <= ticks - processes.start_time(os.getpid()) < 600 * os.sysconf("SC_CLK_TCK")
    finally:
        process.kill()
        process.communicate()


def test_an_ended_process_is_refused_also_as_a_zombie(sleeper: subprocess.Popen[bytes], pidfd: int) -> None:
    sleeper.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
    assert processes.ended(pidfd)
    with pytest.raises(InvalidRequest, match="ended"):
        processes.identify(pidfd)
    sleeper.wait()
    with pytest.raises(InvalidRequest, match="ended"):
        processes.identify(pidfd)


def test_other_descriptors_are_refused() -> None:
    read, write = os.pipe()
    with open("/dev/null") as null, open("/proc/self/status") as status:
        for fd in (read, null.fileno(), status.fileno()):
            with pytest.raises(InvalidRequest, match="not a pidfd"):
                processes.identify(fd)
    os.close(read)
    os.close(write)
    with pytest.raises(InvalidRequest, match="cannot be looked at"):
        processes.identify(read)


def test_a_folder_of_proc_is_no_pidfd() -> None:
    fd = os.open(f"/proc/{os.getpid()}", os.O_RDONLY)
    with pytest.raises(InvalidRequest, match="not a pidfd"):
        processes.identify(fd)
    os.close(fd)


@pytest.mark.skipif(not ROOT, reason="needs root to be two users at once")
def test_a_process_that_is_half_another_user_is_refused() -> None:
    script = "import os; os.setresuid(65534, 0, 0); print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    fd = os.pidfd_open(process.pid)
    try:
        with pytest.raises(InvalidRequest, match="changes its user"):
            processes.identify(fd)
    finally:
        os.close(fd)
        process.communicate(b"\n")


def test_reopen_knows_the_same_process_only(sleeper: subprocess.Popen[bytes], pidfd: int) -> None:
    known = processes.identify(pidfd)
    again = processes.reopen(known)
    assert again is not None
    assert processes.lives(known)
    assert not processes.lives(replace(known, start=known.start - 1))
    os.close(again)
    before = len(os.listdir("/proc/self/fd"))
    assert processes.reopen(replace(known, start=known.start - 1)) is None  # that PID, given to somebody else since
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert processes.reopen(known) is None
    sleeper.wait()
    assert processes.reopen(known) is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_family_ancestors_and_masks() -> None:
    script = "import os, time; os.fork(); os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pids = {int(process.stdout.readline()), int(process.stdout.readline())}
    try:
        assert set(processes.family(process.pid)) == pids
        [child] = pids - {process.pid}
        assert processes.ancestors(child)[:2] == [process.pid, os.getpid()]
        assert processes.masks(child) == {child: frozenset(os.sched_getaffinity(child))}
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    assert processes.family(process.pid) == []
    assert processes.ancestors(process.pid) == []
    assert processes.masks(process.pid) == {}


@pytest.mark.skipif(not ROOT, reason="needs root to make a PID namespace")
def test_ancestors_without_end_are_not_counted() -> None:
    """Who is the last of thousands would have them all read for each call of Register."""
    script = "import os, time\nfor _ in range(300):\n if os.fork():\n  time.sleep(600)\nprint(os.getpid(), flush=True)"
    chain = subprocess.Popen(
        [sys.executable, "-SEc", script + "\ntime.sleep(600)"], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert chain.stdout is not None
        assert len(processes.ancestors(int(chain.stdout.readline()))) == processes.DEEPEST
    finally:
        os.killpg(chain.pid, signal.SIGKILL)
        chain.communicate()


def test_a_container_is_known_by_its_pid_namespace() -> None:
    command = ["unshare", "--pid", "--fork", "--kill-child", "sleep", "600"]
    process = subprocess.Popen(command)
    try:
        while len(family := processes.family(process.pid)) < 2 or open(f"/proc/{family[1]}/comm").read() != "sleep\n":
            pass
        assert processes.in_container(family[1])
        assert not processes.in_container(process.pid)
    finally:
        process.kill()
        process.wait()
    assert not processes.in_container(process.pid)


def test_a_thread_is_no_process() -> None:
    entered, leave = threading.Event(), threading.Event()
    ids: list[int] = []

    def work() -> None:
        ids.append(threading.get_native_id())
        entered.set()
        leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    try:
        fd = os.pidfd_open(ids[0], os.O_EXCL)  # PIDFD_THREAD, Linux 6.9
    except OSError:
        fd = -1
    try:
        if fd >= 0:
            with pytest.raises(InvalidRequest, match="of a thread"):
                processes.identify(fd)
        assert processes.masks(os.getpid()).keys() >= {ids[0]}
    finally:
        leave.set()
        thread.join()
        if fd >= 0:
            os.close(fd)


@pytest.mark.skipif(not ROOT, reason="needs root, to hide /proc")
def test_without_proc_nothing_is_said_of_it_by_others() -> None:
    """psutil prints a traceback as soon as it is imported there."""
    hide = "mount --make-private /proc && mount -t tmpfs none /proc"  # in a chroot / is no mount to make private
    words = f"{hide} && exec \"$0\" -c 'import torchtuned.cli.main'"
    alone = ["unshare", "--mount", "--propagation=unchanged", "sh", "-c"]
    done = subprocess.run([*alone, words, sys.executable], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
