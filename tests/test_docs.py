"""Docs that agree with the program: options in parsers, manual pages and completion; commands in the README."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from torchtuned.cli import main as cli
from torchtuned.cli.changes_page import page
from torchtuned.cli.command import Command
from torchtuned.config_keys import BLOCK, PROFILE_ONLY, SECTIONS, TIMING
from torchtuned.configfiles import profiles
from torchtuned.dbusapi import GPU, JOB, Api
from torchtuned.host import Host
from torchtuned.run import options as run_options

TOP = Path(__file__).resolve().parent.parent
MAN = TOP / "share/man"
PAGES = sorted(MAN.glob("man*/*"))
COMPLETIONS = TOP / "share/bash-completion/completions"
README = (TOP / "README.md").read_text(encoding="utf-8")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def plain(text: str) -> str:
    """Roff as a reader sees it, near enough for looking for words."""
    return re.sub(r"\\f.|\\\(..", "", text.replace(r"\-", "-").replace(r"\ ", " "))


def sections(path: Path, macro: str) -> dict[str, str]:
    """The text below each heading of one level, by the first word of the heading."""
    text = plain(path.read_text(encoding="utf-8"))
    parts = re.split(rf"^\.(?:{macro}|SH) (.*)$", text, flags=re.MULTILINE)
    return {parts[i].split()[0].strip("[]"): parts[i + 1] for i in range(1, len(parts), 2)}


def options(command: Command) -> set[str]:
    found = {text for action in cli.parser(command)._actions for text in action.option_strings}
    return {text for text in found if text.startswith("--")}


def complete(program: str, *words: str) -> set[str]:
    """What bash offers for the last word, by the real completion file."""
    script = f"""
        source /usr/share/bash-completion/bash_completion
        source {COMPLETIONS / program}
        COMP_WORDS=({shlex.join([program, *words])})
        COMP_CWORD={len(words)}
        COMP_LINE={shlex.quote(" ".join([program, *words]))}
        COMP_POINT=${{#COMP_LINE}}
        compopt() {{ :; }}
        _{program.replace("-", "_")}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], text=True, capture_output=True, timeout=60, check=False)
    assert not done.stderr
    return set(done.stdout.split())


# torchtuned(1)


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_manual_page_has_every_option(command: Command) -> None:
    text = sections(MAN / "man1/torchtuned.1", "SS")[command.name]
    documented = set(OPTION.findall(text))
    if command.name == "verify":
        assert "Options as for" in text
    assert documented == options(command) - {"--help"}


def test_manual_page_has_every_command_in_order() -> None:
    text = (MAN / "man1/torchtuned.1").read_text()
    assert [line.split()[1] for line in text.splitlines() if line.startswith(".SS ")] == [c.name for c in cli.COMMANDS]


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_completion_has_every_option(command: Command) -> None:
    assert complete("torchtuned", command.name, "--") == options(command)


def test_completion_has_every_command() -> None:
    assert complete("torchtuned", "") == {command.name for command in cli.COMMANDS} | {"--help", "--version"}
    assert complete("torchtuned", "pl") == {"plan", "place"}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("profile", "s"), {"show", "set"}),
        (("place", "--policy", ""), {"exclusive", "node", "socket", "core-complex"}),
        (("place", "--gpus", ""), {"none"}),
    ],
)
def test_completion_of_values(words: tuple[str, ...], offered: set[str]) -> None:
    assert complete("torchtuned", *words) == offered


# torchtuned-run(1)


def run_option_names() -> set[str]:
    return {f"--{name}" for name, *_ in run_options.TABLE}


def test_manual_page_of_the_wrapper() -> None:
    text = sections(MAN / "man1/torchtuned-run.1", "SH")["OPTIONS"]
    tags = [line for line in text.splitlines() if line.startswith((".BI --", ".BR --", ".B --", ".BR -"))]
    assert {option for line in tags for option in OPTION.findall(line)} == run_option_names()
    for short in run_options.SHORT:
        assert re.search(rf"^\.BR {short} ", text, flags=re.MULTILINE)


def test_completion_of_the_wrapper() -> None:
    assert {word.rstrip("=") for word in complete("torchtuned-run", "--")} == run_option_names()


@pytest.mark.parametrize("name", [name for name, _, choices, _ in run_options.TABLE if choices])
def test_completion_of_the_wrappers_values(name: str) -> None:
    choices = next(set(choices) for known, _, choices, _ in run_options.TABLE if known == name)
    assert complete("torchtuned-run", f"--{name}", "") == choices


# the other pages


def test_manual_page_of_the_daemon() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torchtuned.daemon", "--help"], text=True, capture_output=True, cwd=TOP, check=True
    )
    text = sections(MAN / "man8/torchtunedd.8", "SH")["OPTIONS"]
    assert set(OPTION.findall(text)) | {"--help"} == set(OPTION.findall(done.stdout))


@pytest.mark.parametrize("section", [*SECTIONS, "block:NAME"])
def test_manual_page_of_the_configuration(section: str) -> None:
    found = sections(MAN / "man5/torchtuned.conf.5", "SH")
    keys = BLOCK if section == "block:NAME" else SECTIONS[section]
    if section == "policy":
        keys = {**keys, **PROFILE_ONLY}
    tags = re.findall(r"^\.T[PQ]\n\.[BIR]+ ([^=\n]*)", found[section], flags=re.MULTILINE)
    documented = {word for tag in tags for word in re.findall(r"[a-z_]{2,}", tag)}
    assert documented | TIMING.keys() == keys.keys() | TIMING.keys()
    assert TIMING.keys() <= set(re.findall(r"[a-z_]{2,}", found["KEYS"]))


def test_manual_page_of_the_bus() -> None:
    found = sections(MAN / "man5/org.torchtuned1.5", "SH")
    manager = Api.__new__(Api)._interface()
    for interface, heading in ((manager, "MANAGER"), (JOB, "JOB"), (GPU, "GPU")):
        assert dict(re.findall(r"\b([A-Z]\w+) \" ([a-z]+)[\",]", found[heading])) == interface.properties
    text = found["MANAGER"]
    for name, method in manager.methods.items():
        line = next(line for line in text.splitlines() if f'{name} "(' in line)
        takes = ", ".join(f"{signature} {argument}" for argument, signature in method.takes)
        assert f"({takes})" in line
        assert all(signature in line.partition(")")[2] for _, signature in method.gives)
    for name, arguments in manager.signals.items():
        assert f'{name} " ({", ".join(f"{signature} {argument}" for argument, signature in arguments)})"' in text


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_manual_pages_are_clean_and_complete(path: Path) -> None:
    done = subprocess.run(
        ["man", "--warnings", "-E", "UTF-8", "-l", str(path)],
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "MANWIDTH": "80"},
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert not done.stderr
    for heading in ("NAME", "DESCRIPTION", "EXAMPLES", "SEE ALSO"):
        assert f"\n{heading}\n" in done.stdout
    for reference in re.findall(r"^\.BR ([\w.\\-]+) \((\d)\)", path.read_text(), flags=re.MULTILINE):
        name = plain(reference[0])
        if name.startswith(("torchtuned", "org.torchtuned")):
            assert (MAN / f"man{reference[1]}/{name}.{reference[1]}").exists()


# README and the page made from the profiles


def shell_lines(text: str) -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [line.partition(" # ")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def man_examples() -> list[str]:
    blocks = [
        block for path in PAGES for block in re.findall(r"^\.nf\n(.*?)^\.fi", path.read_text(), flags=re.M | re.S)
    ]
    lines = [plain(line) for block in blocks for line in block.splitlines()]
    return [line for line in lines if re.match(r"(sudo )?torchtuned(-run)? ", line)]


@pytest.mark.parametrize("line", [*shell_lines(README), *man_examples()])
def test_commands_in_the_docs_exist(line: str) -> None:
    words = shlex.split(line.removeprefix("sudo "), comments=True)
    if words[0] == "torchtuned":
        command = next(command for command in cli.COMMANDS if command.name == words[1])
        cli.parser(command).parse_args(words[2:])
    elif words[0] == "torchtuned-run":
        assert run_options.parse(words[1:]).command
    elif "/" in words[0]:
        assert (TOP / words[0]).exists(), words[0]
    else:
        assert words[0] in {"apt", "busctl", "systemctl", "journalctl", "man", "git", "cd"}, words[0]


def test_links_of_the_readme_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    for link in links:
        assert (TOP / link).exists(), link


def test_readme_warns_of_the_other_name() -> None:
    assert "torchtune`" in README


def test_the_page_of_changes_is_that_of_the_profiles(tmp_path: Path) -> None:
    (tmp_path / "usr/share").mkdir(parents=True)
    (tmp_path / "usr/share/torchtuned").symlink_to(TOP / "share/torchtuned")
    host = Host(tmp_path)
    made = page(host, [profile.name for profile in profiles(host)])
    kept = TOP / "share/doc/torchtuned/what-it-changes.md"
    if os.environ.get("TORCHTUNED_UPDATE"):
        kept.write_text(made, encoding="utf-8")
    assert kept.read_text(encoding="utf-8") == made, "TORCHTUNED_UPDATE=1 pytest tests/test_docs.py makes it anew"
