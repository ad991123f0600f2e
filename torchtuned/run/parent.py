"""torchtuned-run --report: stay as the command's parent, pass signals on, and say how it ended.

The terminal sends Ctrl-C to both, so what comes from the kernel is not passed on; what a process sent is. The exit
status is the command's own, and a command killed by a signal kills this process by the same one. The daemon hears it
too: nobody but a parent can know.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import time

from torchtuned.run.place import quoted, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SI_KERNEL = 128  # si_code of a signal that no process sent: the terminal's
_OWN = {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
_BY_TERMINAL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


def supervise(start: Callable[[], int], command: Sequence[str]) -> int:
    """Fork; the child does what `start` says (and becomes the command), the parent waits. The exit status.

    A command that never started has said why already, and ended in no way that is worth a line.
    """
    began = time.monotonic()
    failed = mmap.mmap(-1, 1)  # both see it; a pipe would need descriptors, of which there may be few
    handled = signal.valid_signals() - _OWN
    before = signal.pthread_sigmask(signal.SIG_BLOCK, handled)  # nothing is lost between fork and wait
    on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would leave nothing to wait for
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGCHLD, on_child)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        status = 1
        try:
            from torchtuned.run.main import outcome

            status = outcome(start)
        finally:
            failed[0] = 1
            os._exit(status)
    started = _start_time(child)
    status, usage = _wait(child, handled)
    if not failed[0]:
        _tell(child, started, status)
        _say(command, status, usage, time.monotonic() - began)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # one dump is enough
        os.kill(os.getpid(), number)
    return os.waitstatus_to_exitcode(status) & 0xFF


def _wait(child: int, handled: set[signal.Signals]) -> tuple[int, resource.struct_rusage]:
    while True:
        came = signal.sigwaitinfo(handled)
        if came.si_signo == signal.SIGCHLD:
            pid, status, usage = os.wait4(child, os.WNOHANG | os.WUNTRACED)
            if pid and not os.WIFSTOPPED(status):
                return status, usage
            if pid and os.WSTOPSIG(status) in _BY_TERMINAL:
                os.kill(os.getpid(), signal.SIGSTOP)  # so that the shell sees the job stopped
                os.kill(child, signal.SIGCONT)  # and here it was continued
        elif came.si_code != SI_KERNEL and came.si_pid != child and came.si_signo != signal.SIGCONT:
            try:
                os.kill(child, came.si_signo)
            except ProcessLookupError:
                pass


def _start_time(child: int) -> int:
    """Clock ticks after boot, which with the process id name a process for good; 0 when it cannot be read."""
    from torchtuned.errors import HostError
    from torchtuned.host import Host

    try:
        return int(Host().read(f"/proc/{child}/stat").rpartition(")")[2].split()[19])
    except (HostError, ValueError, IndexError):
        return 0


def _tell(child: int, started: int, status: int) -> None:
    """Let the daemon know, for `torchtuned report`. A job that is not the daemon's is none of its business."""
    from torchtuned.client import MANAGER, ROOT, Client
    from torchtuned.errors import TorchtunedError

    try:
        with Client() as daemon:
            daemon.call(ROOT, MANAGER, "Ended", "uti", child, started, os.waitstatus_to_exitcode(status))
    except TorchtunedError:
        pass


def _say(command: Sequence[str], status: int, usage: resource.struct_rusage, seconds: float) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        ended = f"was killed by {signal.Signals(number).name if number in signal.valid_signals() else number}"
    else:
        ended = f"ended with exit status {os.WEXITSTATUS(status)}"
    say(
        f"{quoted(command[0])} {ended} after {seconds:.1f} s; CPU time {usage.ru_utime:.1f} s, in the kernel"
        f" {usage.ru_stime:.1f} s; at most {usage.ru_maxrss >> 10} MiB in one process"
    )
