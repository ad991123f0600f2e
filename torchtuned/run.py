"""torchtuned-run: gets a place for a command, moves into it, and becomes the command.

No parent stays: process id, exit status, signals, terminal and standard input are the command's own. It asks
torchtunedd, and where that is absent, refuses or is silent it places itself. Everything here runs before every job, so
what is imported is counted in milliseconds: modules that only some runs need are imported where they are needed.

Exit status: the command's; 125 when torchtuned-run itself fails, 126 when the command cannot be run, 127 when it is
not found, as env(1).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from torchtuned import errors, launchers, run_options
from torchtuned.client import MANAGER, ROOT, Client
from torchtuned.cpuset import format_list, parse_list
from torchtuned.environment import Decision, Facts, decide, leftovers
from torchtuned.trust import trusted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from torchtuned.run_options import Options

FAILED, NOT_RUN, NOT_FOUND = 125, 126, 127
COMMIT_S = 10.0  # PID 1 makes a scope meanwhile, and a busy one takes its time
POLL_S = 5.0
SHOWN = 4096  # characters of the command that the daemon is told, to show
JOB = "org.torchtuned1.Job"
# the request itself is what is wrong; placing without the daemon would fail too, or go against the administrator
FINAL = (errors.InvalidRequest, errors.NoSuchGpu, errors.Unplaceable, errors.Busy)


class CannotRun(errors.TorchtunedError):
    """The command cannot be started: 126, or 127 when there is none of that name."""

    def __init__(self, name: str, why: str, status: int) -> None:
        super().__init__(f"cannot run {name}: {why}")
        self.status = status


class InsideJob(errors.TorchtunedError):
    """This very process is a job already: a script that was started by torchtuned-run execs torchtuned-run."""


class Place:
    """A grant (checked, or our own), who gave it, and how to give it back when the command cannot be started."""

    __slots__ = ("by", "give_back", "grant")

    def __init__(self, grant: dict[str, Any], by: str, give_back: Callable[[], None]) -> None:
        self.grant, self.by, self.give_back = grant, by, give_back


def main() -> int:
    """The whole command line; returns an exit status only when nothing was started, or with --report."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the wait as it ends any program
    return outcome(lambda: act(run_options.parse(sys.argv[1:])))


def outcome(work: Callable[[], int]) -> int:
    """The exit status of a piece of work, with what went wrong said in a line."""
    try:
        return work()
    except CannotRun as error:
        say(str(error))
        return error.status
    except errors.TorchtunedError as error:
        say(str(error))
    except (OSError, MemoryError, RecursionError) as error:
        say(f"unexpected: {error}")
    return FAILED


def act(options: Options) -> int:
    """Do what the options say."""
    if options.help:
        print(run_options.help_text())
    elif options.version:
        from torchtuned import __version__

        print(f"torchtuned-run {__version__}")
    elif options.explain:
        return explain(options)
    elif not options.command:
        raise errors.InvalidRequest("no command given", hint="torchtuned-run --help")
    elif options.report:
        from torchtuned.run_report import supervise

        return supervise(lambda: start(options), options.command)
    else:
        return start(options)
    return 0


def say(text: str) -> None:
    """A line for the user. A closed standard error must not end the job."""
    if sys.stderr is not None:
        try:
            sys.stderr.write(f"torchtuned-run: {text}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass


def start(options: Options) -> int:
    """Place this process and become the command."""
    environ = original_environ()
    command = options.command
    program = find_program(command[0], environ)
    launcher = launchers.recognise(command, environ)
    place = find_place(options, environ, launcher)
    try:
        grant = place.grant
        notes = [*grant["warnings"], *leftovers(environ), *confine(grant)]
        decisions = decisions_for(options, environ, grant, launcher)
        notes += [decision.warning for decision in decisions.values() if decision.warning]
        from torchtuned import run_setup

        notes += run_setup.limits(grant.get("limits", {})) + run_setup.shared_memory()
        notes += run_setup.memory(options.memory, grant["memory_nodes"])
        if not options.quiet:
            for note in notes:
                say(note)
        for name, decision in decisions.items():
            if decision.action == "set" and decision.value is not None:
                environ[name] = decision.value
        command = with_rank_door(command, launcher, decisions)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would hand that on
            signal.signal(number, signal.SIG_DFL)
        become(program, command, environ)
    except BaseException:
        place.give_back()
        raise
    raise AssertionError("exec returned")


def become(program: str, command: list[str], environ: dict[str, str]) -> None:
    """exec; a script without a #! line goes to the shell, as execvp(3) does it. Raises CannotRun."""
    import errno

    try:
        try:
            os.execve(program, command, environ)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            os.execve("/bin/sh", ["/bin/sh", program, *command[1:]], environ)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        missing = isinstance(error, FileNotFoundError)
        raise CannotRun(command[0], str(why).lower(), NOT_FOUND if missing else NOT_RUN) from None


def find_program(name: str, environ: dict[str, str]) -> str:
    """The file that exec would run, looked for before anything is registered. Raises CannotRun."""
    folders = [""] if "/" in name else environ.get("PATH", os.defpath).split(":")
    refused = ""
    for folder in folders if name else ():
        path = os.path.join(folder or ".", name) if "/" not in name else name
        if os.path.isdir(path):
            refused = refused or ("it is a directory" if "/" in name else "")
        elif os.access(path, os.X_OK, effective_ids=True):
            return path
        elif os.path.exists(path):
            refused = "permission denied"
    if refused:
        raise CannotRun(name, refused, NOT_RUN)
    raise CannotRun(name, "no such file or directory" if "/" in name else "command not found", NOT_FOUND)


def original_environ() -> dict[str, str]:
    """The variables as they came: under a C locale Python adds LC_CTYPE to its own, which is not the user's wish."""
    environ = dict(os.environ)
    if "LC_CTYPE" in environ:
        try:
            with open("/proc/self/environ", "rb") as file:
                if b"\0LC_CTYPE=" not in b"\0" + file.read():
                    del environ["LC_CTYPE"]
        except OSError:
            pass  # no /proc: then it stays
    return environ


def wishes(options: Options, environ: dict[str, str], launcher: launchers.Launcher | None) -> dict[str, Any]:
    """The request document (share/torchtuned/schemas/request.json)."""
    words: list[str] = []
    room = SHOWN
    for word in options.command[:64]:
        words.append(word.encode("utf-8", "replace").decode()[: min(256, room)])
        room -= len(words[-1])
        if room <= 0:
            break
    visible, order = environ.get("CUDA_VISIBLE_DEVICES"), environ.get("CUDA_DEVICE_ORDER")
    ranks = options.ranks
    if ranks is None and launcher is not None:
        ranks = launcher.ranks
        if ranks is None and launcher.count in ("gpu", "auto") and options.gpus is None and visible is not None:
            ranks = len([entry for entry in visible.split(",") if entry.strip()]) or None
    return {
        "schema": 1,
        "command": words,
        "gpus": options.gpus,
        "cuda_visible_devices": None if visible is None else visible.encode("utf-8", "replace").decode(),
        "cuda_device_order": None if order is None else order.encode("utf-8", "replace").decode(),
        "ranks": ranks,
        "policy": options.policy,
        "cpus": options.cpus,
        "shared": options.shared,
        "memory": options.memory,
        "confine": options.confine,
        "wait": options.wait,
    }


def find_place(options: Options, environ: dict[str, str], launcher: launchers.Launcher | None) -> Place:
    """From the daemon, else by ourselves. Raises what is wrong with the request, or with the machine for it."""
    request = wishes(options, environ, launcher)
    # torchrun --nproc-per-node=gpu with nothing that says how many: as many as the machine has
    counted = launcher if request["ranks"] is None and request["gpus"] is None else None
    mask = os.sched_getaffinity(0)
    try:
        return from_daemon(options, request, frozenset(mask), counted)
    except FINAL:
        raise
    except errors.TorchtunedError as error:
        if options.require and not isinstance(error, InsideJob):
            raise errors.Failed(f"{error}; --require was given") from None
        if os.sched_getaffinity(0) != mask:
            os.sched_setaffinity(0, mask)
        problem = error
    from torchtuned import selfplace

    inside = isinstance(problem, InsideJob)
    per_gpu = counted is not None and counted.count in ("gpu", "auto")
    grant = selfplace.place_self(request, pid=os.getpid(), dry=options.explain or inside, per_gpu=per_gpu)
    settle_count(counted, grant["gpus_here"])
    if not options.quiet and not options.explain:
        where = f"CPUs {grant['cpus']}" + ("" if inside else ", apart from your own jobs only")
        say(f"{problem.what}; placed without it on {where}")
    return Place(grant, "torchtuned-run", lambda: selfplace.forget(os.getpid()))


def settle_count(launcher: launchers.Launcher | None, gpus: int) -> None:
    """ "auto" means one rank per CPU where there is no GPU."""
    if launcher is not None and launcher.count == "auto" and not gpus:
        launcher.count = "cpu"


def from_daemon(
    options: Options, request: dict[str, Any], mask: frozenset[int], counted: launchers.Launcher | None
) -> Place:
    """Register, move, commit; with --explain register and give it back. Raises errors as find_place takes them.

    `counted`: a launcher whose number of ranks is the machine's number of GPUs.
    """
    client = Client()
    if counted is not None and counted.count in ("gpu", "auto"):
        gpus = client.properties(ROOT, MANAGER).get("Gpus")
        gpus = min(gpus, 4096) if isinstance(gpus, int) else 0
        request = {**request, "ranks": gpus or None}
        settle_count(counted, gpus)
    pidfd = os.pidfd_open(os.getpid())
    try:
        answer = client.call(ROOT, MANAGER, "Register", "hs", pidfd, json.dumps(request, ensure_ascii=False))
    except errors.InvalidRequest:
        jobs = [interfaces.get(JOB, {}) for interfaces in client.objects().values()]
        if any(job.get("Pid") == os.getpid() for job in jobs):
            raise InsideJob("this process is a job of torchtunedd already") from None
        raise
    os.close(pidfd)
    if len(answer) != 2 or not str(answer[0]).startswith(ROOT + "/jobs/"):
        raise errors.Failed("torchtunedd's answer to Register is not understood")
    job = str(answer[0])

    def give_back() -> None:
        try:
            client.call(ROOT, MANAGER, "Release", "o", job)
        except errors.TorchtunedError:
            pass  # an uncommitted grant expires, and a committed one ends with this process

    try:
        grant = read_grant(answer[1], mask)
        if grant["state"] == "queued":
            grant = wait_for(client, job, grant, options, mask)
        if options.explain:
            give_back()
        else:
            if grant["confinement"] == "affinity":
                confine(grant)
            committed = client.call(ROOT, MANAGER, "Commit", "o", job, timeout_s=COMMIT_S)
            grant = read_grant(committed[0] if committed else None, mask)
    except BaseException:
        give_back()
        raise
    return Place(grant, "torchtunedd", give_back)


def read_grant(text: object, mask: frozenset[int]) -> dict[str, Any]:
    """The checked grant. Raises Failed."""
    try:
        document = json.loads(text if isinstance(text, str) else "")
    except (ValueError, RecursionError):
        raise errors.Failed("torchtunedd's grant is not JSON") from None
    try:
        return trusted(document, mask)
    except errors.Failed as error:
        raise errors.Failed(f"torchtunedd's grant is not accepted: {error}") from None


def wait_for(client: Client, job: str, grant: dict[str, Any], options: Options, mask: frozenset[int]) -> dict[str, Any]:
    """Wait until a queued job has its place: a signal says so; now and then the job is looked at as well, for the
    daemon may have been restarted. Raises Busy when the time is up.
    """
    deadline = time.monotonic() + options.wait if options.wait else None
    client.watch("Granted")
    why = grant["warnings"][0] if grant["warnings"] else "nothing is free"
    if options.explain:
        raise errors.Busy(why, hint="the job would wait")
    if not options.quiet:
        say(f"waiting: {why}")
    while True:
        try:
            state = client.properties(job, JOB).get("State")
        except errors.Failed:
            raise errors.Busy(f"the wait is over: {why}") from None
        if state == "granted":
            return {**grant, "confinement": "none"}  # what it got comes with Commit
        left = POLL_S if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise errors.Busy(f"no place within {options.wait:g} s: {why}")
        signalled = client.wait_signal("Granted", min(left, POLL_S))
        if signalled is not None and len(signalled) == 2 and signalled[0] == job:
            return read_grant(signalled[1], mask)


def confine(grant: dict[str, Any]) -> list[str]:
    """Make sure that this process is on the CPUs of its grant and on no other; what could not be done, as warnings."""
    cpus = parse_list(grant["cpus"])
    if grant["confinement"] == "none" or os.sched_getaffinity(0) <= cpus:
        return []
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        return [f"cannot be kept on CPUs {grant['cpus']}: {error.strerror}"]
    now = os.sched_getaffinity(0)
    return [] if now <= cpus else [f"runs on CPUs {format_list(now)} instead of {grant['cpus']}"]


def decisions_for(
    options: Options, environ: dict[str, str], grant: dict[str, Any], launcher: launchers.Launcher | None
) -> dict[str, Decision]:
    """Every variable's decision, with the facts of this machine that they need."""
    profiles = tuple(dict.fromkeys([*grant.get("env_profiles", ()), *options.env_profile]))
    facts = Facts()
    if profiles or (launcher is not None and len(grant["ranks"]) > 1):
        from torchtuned import run_setup

        facts = run_setup.facts(profiles, environ)
    return decide(
        environ,
        grant,
        env_profile=profiles,
        launcher=launcher,
        facts=facts,
        gpu_ids=options.gpu_ids,
        no_gpus=options.gpus == [],
    )


def with_rank_door(
    command: list[str], launcher: launchers.Launcher | None, decisions: dict[str, Decision]
) -> list[str]:
    """torchrun --no-python starts the program itself: there the door stands before the program."""
    door = decisions.get("PYTHON_EXEC")
    if launcher is None or launcher.program_at is None or door is None or door.action != "set" or not door.value:
        return command
    return [*command[: launcher.program_at], door.value, *command[launcher.program_at :]]


def explain(options: Options) -> int:
    """Say what the command would get, and run nothing."""
    environ = original_environ()
    launcher = launchers.recognise(options.command, environ)
    place = find_place(options, environ, launcher)
    decisions = decisions_for(options, environ, place.grant, launcher)
    notes = leftovers(environ) + [decision.warning for decision in decisions.values() if decision.warning]
    if options.command:
        try:
            find_program(options.command[0], environ)
        except CannotRun as error:
            notes.append(str(error))
    from torchtuned import run_explain

    print(run_explain.text(place.grant, place.by, decisions, notes, as_json=options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
