"""torchtuned-run: gets a place for a command, moves into it, and becomes the command.

No parent stays: process id, exit status, signals, terminal and standard input are the command's own. It asks
torchtunedd, and where that is absent, refuses or is silent it places itself. Everything here runs before every job, so
what is imported is counted in milliseconds: modules that only some runs need are imported where they are needed.

Exit status: the command's; 125 when torchtuned-run itself fails, 126 when the command cannot be run, 127 when it is
not found, as env(1). What is only printed (--explain, --help, --version) ends with 1 when it cannot be written and 141
when the reader has gone, as all of `torchtuned`.
"""

from __future__ import annotations

import os
import signal
import sys

from torchtuned import errors
from torchtuned.environment import Decision, Facts, decide, leftovers
from torchtuned.run import foresee, launchers
from torchtuned.run import options as run_options
from torchtuned.run.place import confine, find_place, quoted, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from torchtuned.run.options import Options

FAILED, NOT_RUN, NOT_FOUND = 125, 126, 127
NOT_WRITTEN, READER_GONE = 1, 141


class CannotRun(errors.TorchtunedError):
    """The command cannot be started: 126, or 127 when there is none of that name."""

    def __init__(self, name: str, why: str, status: int, hint: str = "") -> None:
        super().__init__(f"cannot run {quoted(name)}: {why}", hint=hint)
        self.status = status


def main() -> int:
    """The whole command line; returns an exit status only when nothing was started, or with --report."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # the script in bin/ has done it earlier
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
    except MemoryError:
        say("out of memory (ulimit -v says how much there may be)")
    except Exception as error:  # whatever it is, the user gets a line and 125, and no traceback
        say(f"internal error, please report it: {type(error).__name__}: {error}")
    return FAILED


def act(options: Options) -> int:
    """Do what the options say."""
    if options.help:
        return answer(run_options.help_text())
    if options.version:
        from torchtuned import __version__

        return answer(f"torchtuned-run {__version__}")
    if options.explain:
        return answer(explain(options))
    if not options.command:
        raise errors.InvalidRequest("no command given", hint="torchtuned-run --help")
    if options.report:
        from torchtuned.run.parent import supervise

        return supervise(lambda: start(options), options.command)
    return start(options)


def answer(text: str) -> int:
    """Print what was asked for; the exit status. What cannot be written must not stay in the buffer: the interpreter
    would try once more, complain, and end with a status of its own.
    """
    if sys.stdout is None:
        return 0
    try:
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            return READER_GONE
        say(f"cannot write to standard output: {str(error.strerror).lower()}")
        return NOT_WRITTEN
    return 0


def start(options: Options) -> int:
    """Place this process and become the command."""
    environ = original_environ()
    command = options.command
    program = find_program(command[0], environ, waits=options.wait == 0)
    launcher = launchers.recognise(command, environ, foresee.read)
    refused: list[str] = []
    lingers = False
    if options.linger:
        refused = foresee.linger(os.getuid())
        lingers = not refused
    place = find_place(options, environ, launcher)
    try:
        grant = place.grant
        notes = [*refused, *grant["warnings"], *leftovers(environ), *confine(grant)]
        decisions = decisions_for(options, environ, grant, launcher)
        notes += [decision.warning for decision in decisions.values() if decision.warning]
        from torchtuned.run import rlimits
        from torchtuned.run import setup as run_setup

        notes += rlimits.apply(grant.get("limits", {}))
        notes += run_setup.prospects(command, grant, decisions, lingers=lingers)
        notes += run_setup.memory(options.memory, grant["memory_nodes"])
        if not options.quiet:
            for note in notes:
                say(note)
        for name, decision in decisions.items():
            if decision.action == "set" and decision.value is not None:
                environ[name] = decision.value
        command = with_rank_door(command, launcher, decisions)
        become(program, command, environ)
    except BaseException:
        place.give_back()
        raise
    raise AssertionError("exec returned")


def become(program: str, command: list[str], environ: dict[str, str]) -> None:
    """exec; a script without a #! line goes to the shell, as execvp(3) does it. Raises CannotRun."""
    import errno

    ignored = (signal.SIGPIPE, signal.SIGXFSZ)  # by Python, and exec would hand that on
    try:
        for number in ignored:
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execve(program, command, environ)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            os.execve("/bin/sh", ["/bin/sh", program, *command[1:]], environ)
    except (OSError, ValueError) as error:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        why = str(error.strerror if isinstance(error, OSError) else error).lower()
        missing = isinstance(error, FileNotFoundError)
        if missing and os.path.exists(program):
            why = f"{interpreter(program)}: {why}"
        raise CannotRun(command[0], why, NOT_FOUND if missing else NOT_RUN) from None


def interpreter(program: str) -> str:
    """What exec misses when it calls a file missing that is there."""
    try:
        with open(program, "rb") as file:
            line = file.read(256).partition(b"\n")[0]
    except OSError:
        line = b""
    words = os.fsdecode(line[2:]).split() if line.startswith(b"#!") else []
    return f"its interpreter {quoted(words[0])}" if words else "the loader that it needs"


def find_program(name: str, environ: dict[str, str], *, waits: bool = False) -> str:
    """The file that exec would run, looked for before anything is registered. Raises CannotRun.

    `waits`: --wait stood there without a number, so a command that is a number was meant as its seconds.
    """
    path, refused = search(name, environ)
    if path:
        return path
    if refused:
        raise CannotRun(name, refused, NOT_RUN, meant(name, environ))
    hint = f"--wait={name}" if waits and name.isascii() and name.isdigit() else meant(name, environ)
    raise CannotRun(name, "no such file or directory" if "/" in name else "command not found", NOT_FOUND, hint)


def search(name: str, environ: dict[str, str]) -> tuple[str, str]:
    """The file of a command, or why the one that is there cannot be run; both empty when there is none."""
    folders = [""] if "/" in name else environ.get("PATH", os.defpath).split(":")
    refused = ""
    for folder in folders if name else ():
        path = os.path.join(folder or ".", name) if "/" not in name else name
        if os.path.isdir(path):
            refused = refused or ("it is a directory" if "/" in name or name in (".", "..") else "")
        elif os.access(path, os.X_OK, effective_ids=True):
            return path, ""
        elif os.path.exists(path):
            refused = "permission denied"
    return "", refused


def meant(name: str, environ: dict[str, str]) -> str:
    """What to write instead: Debian has no `python`, and a script that cannot be executed needs its interpreter."""
    if name == "python" and search("python3", environ)[0]:
        return "python3 is there: torchtuned-run python3 ..."
    if name.endswith(".py") and os.path.isfile(name):
        return f"torchtuned-run python3 {name}"
    return ""


def original_environ() -> dict[str, str]:
    """The variables as they came: under a C locale Python sets its own LC_CTYPE, which is not the user's wish."""
    environ = dict(os.environ)
    if environ.get("LC_CTYPE") in ("C.UTF-8", "C.utf8", "UTF-8"):
        try:
            with open("/proc/self/environ", "rb") as file:
                came = [entry for entry in file.read().split(b"\0") if entry.startswith(b"LC_CTYPE=")]
        except OSError:
            return environ  # no /proc: then it stays
        del environ["LC_CTYPE"]
        if came:
            environ["LC_CTYPE"] = os.fsdecode(came[-1].partition(b"=")[2])
    return environ


def decisions_for(
    options: Options, environ: dict[str, str], grant: dict[str, Any], launcher: launchers.Launcher | None
) -> dict[str, Decision]:
    """Every variable's decision, with the facts of this machine that they need."""
    profiles = tuple(dict.fromkeys([*grant.get("env_profiles", ()), *options.env_profile]))
    facts = Facts()
    if profiles or (launcher is not None and len(grant["ranks"]) > 1):
        from torchtuned.run import setup as run_setup

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


def explain(options: Options) -> str:
    """What the command would get."""
    environ = original_environ()
    launcher = launchers.recognise(options.command, environ, foresee.read)
    place = find_place(options, environ, launcher)
    decisions = decisions_for(options, environ, place.grant, launcher)
    notes = leftovers(environ) + [decision.warning for decision in decisions.values() if decision.warning]
    if options.command:
        try:
            find_program(options.command[0], environ, waits=options.wait == 0)
        except CannotRun as error:
            notes.append(str(error))
    from torchtuned.run import explain as run_explain
    from torchtuned.run import setup as run_setup

    notes += run_setup.prospects(options.command, place.grant, decisions)
    return run_explain.text(place.grant, place.by, decisions, notes, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
