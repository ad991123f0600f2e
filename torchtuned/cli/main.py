"""`torchtuned`: one table of commands, one parser made from it, and the one place where errors become words.

A new command is one row of COMMANDS; its function lives in a module beside this one. Exit status: 0 fine,
1 findings, drift or unplaceable, 2 usage, 69 daemon not reachable, 77 not authorised; 70 is a fault of torchtuned's
own, 130 an interrupt, 141 a reader of the output that went away.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn, TextIO

from torchtuned import __version__
from torchtuned.cli import bugreport as cli_bugreport
from torchtuned.cli import check as cli_check
from torchtuned.cli import config as cli_config
from torchtuned.cli import jobs as cli_jobs
from torchtuned.cli import lint as cli_lint
from torchtuned.cli import machine as cli_machine
from torchtuned.cli import policy as cli_policy
from torchtuned.cli import report as cli_report
from torchtuned.cli import top as cli_top
from torchtuned.cli.command import FINDINGS, USAGE, Command
from torchtuned.client import printable
from torchtuned.errors import TorchtunedError
from torchtuned.wording import named, nearest

PROGRAM = "torchtuned"
BUG, INTERRUPTED, READER_GONE = 70, 130, 141

COMMANDS: tuple[Command, ...] = (
    Command(
        name="status",
        summary="the daemon's state and profile, and what is not as wanted",
        run=cli_policy.status,
        examples=("torchtuned status", "torchtuned status --json"),
    ),
    Command(
        name="plan",
        summary="what applying the policy would change now; changes nothing",
        run=cli_policy.plan,
        options=cli_policy.plan_options,
        examples=("torchtuned plan", "torchtuned plan --profile quiet"),
    ),
    Command(
        name="verify",
        summary="whether every knob still has its wanted value",
        run=cli_policy.verify,
        options=cli_policy.plan_options,
        examples=("torchtuned verify", "torchtuned verify --json"),
    ),
    Command(
        name="apply",
        summary="apply the policy now",
        run=cli_policy.apply,
        examples=("sudo torchtuned apply", "sudo torchtuned apply --json"),
    ),
    Command(
        name="undo",
        summary="give back what was changed: all of it, or the knobs named",
        run=cli_policy.undo,
        options=cli_policy.undo_options,
        examples=("sudo torchtuned undo", "sudo torchtuned undo sysctl/vm.swappiness"),
    ),
    Command(
        name="reload",
        summary="read the configuration again and apply it",
        run=cli_policy.reload,
        json=False,
        examples=("sudo torchtuned reload",),
    ),
    Command(
        name="profile",
        summary="list or show profiles, or choose one",
        run=cli_config.profile,
        options=cli_config.profile_options,
        examples=("torchtuned profile", "torchtuned profile show quiet", "sudo torchtuned profile set throughput"),
    ),
    Command(
        name="config",
        summary="the merged configuration, with the file and line of each value",
        run=cli_config.config,
        options=cli_config.config_options,
        examples=("torchtuned config", "torchtuned config --json"),
    ),
    Command(
        name="why",
        summary="who wants a knob's value, what it was, what it is known to do",
        run=cli_config.why,
        options=cli_config.why_options,
        examples=("torchtuned why sysctl/vm.swappiness", "torchtuned why vm.swappiness"),
    ),
    Command(
        name="check",
        summary="what is wrong here for training, and the command that mends it",
        run=cli_check.check,
        options=cli_check.check_options,
        examples=(
            "torchtuned check",
            "torchtuned check --explain TT022",
            "torchtuned check --python ~/venv/bin/python --data /data/imagenet",
        ),
    ),
    Command(
        name="lint",
        summary="what in a training script keeps the GPU waiting; runs nothing",
        run=cli_lint.lint,
        options=cli_lint.lint_options,
        examples=("torchtuned lint train.py", "torchtuned lint --hints src/"),
    ),
    Command(
        name="jobs",
        summary="running jobs, their CPUs and GPUs",
        run=cli_jobs.jobs,
        options=cli_jobs.jobs_options,
        examples=("torchtuned jobs", "torchtuned jobs --threads"),
    ),
    Command(
        name="top",
        summary="jobs live on one screen: CPUs, GPUs, throttling, pressure",
        run=cli_top.top,
        options=cli_top.top_options,
        examples=("torchtuned top", "torchtuned top --once"),
    ),
    Command(
        name="report",
        summary="what a job got, used and waited for, and how it ended",
        run=cli_report.report,
        options=cli_report.report_options,
        examples=("torchtuned report", "torchtuned report 7"),
    ),
    Command(
        name="gpus",
        summary="GPUs, where they sit and who has them",
        run=cli_jobs.gpus,
        options=cli_jobs.gpus_options,
        examples=("torchtuned gpus", "torchtuned gpus --watch"),
    ),
    Command(
        name="map",
        summary="the machine drawn, with the jobs on it",
        run=cli_jobs.draw_map,
        options=cli_machine.sysroot_option,
        examples=("torchtuned map",),
    ),
    Command(
        name="topology",
        summary="CPUs, cores, caches, NUMA nodes and GPUs as torchtuned sees them",
        run=cli_machine.topology,
        options=cli_machine.sysroot_option,
        examples=("torchtuned topology", "torchtuned topology --sysroot ./snapshot --json"),
    ),
    Command(
        name="place",
        summary="where a job would go on an idle machine; starts nothing",
        run=cli_machine.place,
        options=cli_machine.place_options,
        examples=("torchtuned place --gpus 2", "torchtuned place --gpus none --ranks 4 --policy node"),
    ),
    Command(
        name="bug-report",
        summary="a tarball of what torchtuned sees here, without private data",
        run=cli_bugreport.bug_report,
        options=cli_bugreport.bug_report_options,
        json=False,
        examples=("torchtuned bug-report", "sudo torchtuned bug-report --output /tmp/report.tar.gz"),
    ),
    Command(
        name="version",
        summary="the versions of this command and of the daemon",
        run=cli_policy.version,
        examples=("torchtuned version",),
    ),
)


class Parser(argparse.ArgumentParser):
    """argparse, but for the wording: what was wrong, what it may have meant, where help is. No abbreviations."""

    def __init__(self, **kwargs: object) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments, all known, and no option with an empty value: it would pass for one that was not given."""
        args, extras = self.parse_known_args(words)
        options = [(text, action.dest) for action in self._actions for text in action.option_strings]
        for option, name in options:
            if getattr(args, name, None) == "":
                self.error(f"{option} needs a value, and got an empty one")
        if extras:
            extras = [word for word in extras if word != "--"] or extras
            after = words[words.index("--") :] if "--" in words else ()
            kind = "option" if extras[0].startswith("-") and extras[0] not in after else "argument"
            near = _or_rather(extras[0].partition("=")[0], [text for text, _ in options]) if kind == "option" else ""
            self.error(f"unknown {kind} {named(extras[0])}{near}")
        return args


def parser(command: Command) -> Parser:
    """The parser of one command's arguments."""
    examples = "".join(f"  {example}\n" for example in command.examples)
    made = Parser(
        prog=f"{PROGRAM} {command.name}",
        description=command.summary[0].upper() + command.summary[1:] + ".",
        epilog=f"examples:\n{examples}" if examples else None,
    )
    if command.options:
        command.options(made)
    if command.json:
        made.add_argument("--json", action="store_true", help="print a JSON document")
    return made


def overview() -> str:
    """What `torchtuned --help` prints: one line a command, at most one screen of 80 by 24."""
    lines = [f"usage: {PROGRAM} COMMAND [OPTION...]    more on one: {PROGRAM} COMMAND --help"]
    lines += [f"  {command.name:<11}{command.summary}" for command in COMMANDS]
    lines += [f"Start training with torchtuned-run. Manual: man {PROGRAM}. Version {__version__}."]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. Nothing gets past here but SystemExit of --help and usage errors."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us; print(file=None) would go to stdout
            setattr(sys, name, open(os.devnull, "w"))
    for stream in (sys.stdout, sys.stderr):
        _never_fail_to_encode(stream)
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # bin/torchtuned's, while this was loaded
            signal.signal(signal.SIGINT, signal.default_int_handler)  # screens, children and files want tidying up
        try:
            status = _run(sys.argv[1:] if argv is None else list(argv))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return READER_GONE
    except TorchtunedError as error:
        _say(str(error))
        return error.exit_status
    except OSError as error:
        _drop_output()
        where = f"{error.filename}: " if error.filename else ""
        _say("the current folder is gone: cd to another one" if _homeless() else f"{where}{error.strerror or error}")
        return FINDINGS
    except Exception as error:
        if os.environ.get("TORCHTUNED_TRACEBACK"):
            traceback.print_exc()
        at = traceback.extract_tb(error.__traceback__)[-1]
        _say(
            f"a fault of torchtuned's own: {type(error).__name__}: {error}"
            f" at {os.path.basename(at.filename)}:{at.lineno} (TORCHTUNED_TRACEBACK=1 shows more; please report it)"
        )
        return BUG
    return status


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        (sys.stdout if argv else sys.stderr).write(overview())
        return 0 if argv else USAGE
    if argv[0] == "--version":
        argv[0] = "version"
    command = next((command for command in COMMANDS if command.name == argv[0]), None)
    if command is None:
        kind = "option" if argv[0].startswith("-") else "command"
        near = _or_rather(argv[0], [command.name for command in COMMANDS])
        near = ", did you mean torchtuned-run?" if argv[0] == "run" else near
        _say(f"unknown {kind} {named(argv[0])}{near} (see {PROGRAM} --help)")
        return USAGE
    return command.run(parser(command).read(argv[1:]))


def _or_rather(word: str, known: Sequence[str]) -> str:
    bare = {name.lstrip("-"): name for name in known}  # dashes make all options alike
    near = nearest(word.lstrip("-"), bare)
    return f", did you mean {bare[near]}?" if near else ""


def _never_fail_to_encode(stream: TextIO | None) -> None:
    """A terminal in Latin-1 gets question marks for what it cannot show, not a traceback."""
    reconfigure = getattr(stream, "reconfigure", None)  # tests put a StringIO there
    if reconfigure:
        reconfigure(errors="replace")


def _drop_output() -> None:
    """Let what is still buffered go nowhere, or the interpreter complains once more on its way out."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):
        pass  # stdout is closed, or no file: nothing is left to go wrong


def _homeless() -> bool:
    """Whether the current folder has been deleted. Every relative path fails then, and the error names none."""
    try:
        os.getcwd()
    except OSError:
        return True
    return False


def _say(text: str) -> None:
    try:
        print(f"{PROGRAM}: {printable(text, len(text))}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass  # stderr is gone as well: the exit status still tells
