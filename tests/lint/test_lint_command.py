"""The command line: exit status, places, forms, silencing, and files that are no Python."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from torchtuned.cli import main as cli
from torchtuned.lint import main

TOP = Path(__file__).resolve().parents[2]
FAULT = "import torch\ntorch.autograd.set_detect_anomaly(True)\n"


def test_nothing_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text("import torch\n")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing found in 1 file\n"


def test_finding_says_where_what_why_and_what_instead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.py"
    path.write_text(FAULT)
    assert main([str(path)]) == 1
    first, why, instead, last = capsys.readouterr().out.splitlines()
    assert first == f"{path}:2:1: TL012 sure: anomaly detection is left on"
    assert why.startswith("    why: ")
    assert instead.startswith("    instead: ")
    assert last == "1 finding in 1 file"


def test_columns_count_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text(
        'import torch\nx = "äöü€"; torch.autograd.set_detect_anomaly(True)\n', encoding="utf-8"
    )
    main([str(tmp_path)])
    assert ":2:13: TL012" in capsys.readouterr().out


@pytest.mark.parametrize("mark", ["\f", "\v", "\x1c", "\x85", "\u2028"])
def test_lines_are_those_of_python(tmp_path: Path, capsys: pytest.CaptureFixture[str], mark: str) -> None:
    """A form feed and its like, in a comment, end a line for str.splitlines() alone."""
    text = f"import torch\n# part{mark} 2 {mark}\nx = 'äöü€'; torch.autograd.set_detect_anomaly(True)\n"
    (tmp_path / "a.py").write_text(text, encoding="utf-8")
    main([str(tmp_path)])
    assert ":3:13: TL012" in capsys.readouterr().out


@pytest.mark.parametrize("end", ["\r", "\r\n"])
def test_lines_that_end_as_on_other_systems(tmp_path: Path, end: str) -> None:
    (tmp_path / "a.py").write_bytes((FAULT.rstrip("\n") + "  # noqa: TL012\n").replace("\n", end).encode())
    assert main([str(tmp_path)]) == 0


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text(FAULT)
    (tmp_path / "b.py").write_text("def f(:\n")
    assert main(["--json", str(tmp_path)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert document["files"] == 2
    (finding,) = document["findings"]
    assert set(finding) == {"file", "line", "column", "code", "name", "certainty", "message", "why", "instead"}
    assert (finding["line"], finding["column"], finding["code"], finding["certainty"]) == (2, 1, "TL012", "sure")
    (error,) = document["errors"]
    assert (Path(error["file"]).name, error["line"], error["column"]) == ("b.py", 1, 7)


@pytest.mark.parametrize(
    ("comment", "status"),
    [
        ("# noqa", 0),
        ("# NOQA", 0),
        ("# noqa: TL012", 0),
        ("# noqa:TL001,TL012", 0),
        ("# noqa: E501 TL012", 0),
        ("# fine here  # noqa: TL012", 0),
        ("# noqa: TL001", 1),
        ("# noqa: E501", 1),
        ("# noqas", 1),
        ("; x = '# noqa'", 1),
    ],
)
def test_noqa(tmp_path: Path, comment: str, status: int) -> None:
    (tmp_path / "a.py").write_text(FAULT.rstrip("\n") + f"  {comment}\n")
    assert main([str(tmp_path)]) == status


def test_noqa_on_any_line_of_a_long_call(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    text = "import torch\ntorch.autograd.set_detect_anomaly(\n    True,\n)  # noqa: TL012\n"
    path.write_text(text)
    assert main([str(path)]) == 0
    path.write_text(text.replace("  # noqa: TL012", "\nx = 1  # noqa: TL012"))
    assert main([str(path)]) == 1


BROKEN = {
    "syntax": (b"x = 1\nif x\n    pass\n", ":2:5: syntax error"),
    "python2": (b"print 'a'\n", ":1:1: syntax error"),
    "null": (b"x = '\0'\n", ":1:"),
    "latin": (b"x = '\xe4'\n", ":1:1: not readable as text"),
    "encoding": (b"# coding: nonsense\n", ":1:1: not readable as text"),
    "deep": (b"x = " + b"-" * 100_000 + b"1\n", ":1:1: cannot be parsed: nested too deeply"),
    "utf16": ("x = 1".encode("utf-16"), ":1:1: not readable as text"),
    "parentheses": (b"x = " + b"(" * 300 + b")" * 300, ":1:"),
    "tabs": (b"if 1:\n\tx\n        y\n", ":3:"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_has_a_place_and_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    data, expected = BROKEN[name]
    (tmp_path / "broken.py").write_bytes(data)
    (tmp_path / "good.py").write_text(FAULT)
    assert main([str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert f"broken.py{expected}" in out
    assert "good.py:2:1: TL012" in out
    assert "Traceback" not in out + err


def test_a_notebook_is_not_read_as_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.ipynb"
    path.write_text('{"cells": []}')
    assert main([str(path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{path}: a notebook")
    assert out.endswith("nothing found in 0 files, 1 not readable\n")
    assert main([str(tmp_path)]) == 2  # a folder is searched for Python files
    out, err = capsys.readouterr()
    assert (out, "no Python file to read" in err, "nbconvert" in err) == ("", True, True)


def test_very_large_files_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.py").write_bytes(b"x = 1\n" * 800_000)
    assert main([str(tmp_path)]) == 1
    assert "larger than 4 MiB" in capsys.readouterr().out


def test_what_comes_through_a_pipe() -> None:
    words = ["bash", "-c", f"{sys.executable} -m torchtuned.lint <(printf %s {shlex.quote(FAULT)})"]
    run = subprocess.run(words, cwd=TOP, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, "")
    assert ":2:1: TL012" in run.stdout


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import torch\n" + "torch.autograd.set_detect_anomaly(True)\n" * 5000)
    words = ["bash", "-c", f"{sys.executable} -m torchtuned.lint {shlex.quote(str(tmp_path))} | head -1"]
    run = subprocess.run(words, cwd=TOP, capture_output=True, text=True, check=False)
    assert (run.stdout.count("\n"), run.stderr) == (1, "")


def test_imported_broken_file_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "a.py").write_text("import broken\nbroken.f()\n")
    assert main([str(tmp_path / "a.py")]) == 0


def test_long_expressions_do_not_end_in_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "import torch\nfor x in loader:\n    loss = net(x.cuda())\n    loss.backward()\n    y = loss"
        + " + 1" * 3000
        + "\n"
    )
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "good.py").write_text(FAULT)
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "a.py:1:1: " in out  # the parser, or the check, says that it is too deep
    assert "good.py:2:1: TL012" in out


@pytest.mark.parametrize("arguments", [[], ["missing.py"], ["--wrong", "."], [".", "nowhere"]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "torchtuned lint" in err


def test_rules_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rules"]) == 0
    text = capsys.readouterr().out
    assert "TL001 loader-without-workers (likely)" in text
    assert main(["--rules", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rules"]) == text.count("instead: ")


def test_folders_that_are_nobody_s_code(tmp_path: Path) -> None:
    for folder in (".git", "__pycache__", "build", "env"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(FAULT)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    assert main([str(tmp_path)]) == 2  # nothing to read
    assert main([str(tmp_path / "build" / "a.py")]) == 1  # named by the user


def test_what_is_no_regular_file_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert main([str(tmp_path)]) == 2
    (tmp_path / "a.py").write_text("import torch\n")
    assert main([str(tmp_path)]) == 0


def test_a_pipe_beside_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "a.py").write_text("import torch\n")
    words = [sys.executable, "-m", "torchtuned.lint", str(tmp_path / "a.py")]
    assert subprocess.run(words, cwd=TOP, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("cookie", ["rot13", "hex", "zlib", "undefined", "punycode", "idna", "utf_16"])
def test_one_file_in_an_encoding_of_no_text_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cookie: str
) -> None:
    (tmp_path / "a.py").write_text(f"# coding: {cookie}\nx = 1\n")
    (tmp_path / "b.py").write_text(FAULT)
    assert main([str(tmp_path)]) == 1
    assert "b.py:2:1: TL012" in capsys.readouterr().out


@pytest.mark.parametrize("program", ["torchtuned.lint", "torchtuned lint"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_names_of_files_are_data(tmp_path: Path, program: str, encoding: str) -> None:
    """Those of other people's, on any terminal: no commands for it, and no line that starts a new one."""
    name = os.fsencode(tmp_path) + b"/\x1b[2J\n\xc2\x9b1m\xff\xe2\x82\xac.py"
    with open(name, "w") as file:
        file.write(FAULT)
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    words = [sys.executable, "-m", *program.split(), str(tmp_path)]
    text, document = (
        subprocess.run([*words, *form], cwd=TOP, env=env, capture_output=True, check=False) for form in ([], ["--json"])
    )
    assert (text.returncode, text.stderr, document.returncode, document.stderr) == (1, b"", 1, b"")
    [first, *_] = text.stdout.decode(encoding).split("\n")
    assert first.isprintable()
    assert "TL012" in first
    [found] = json.loads(document.stdout)["findings"]
    assert os.fsencode(found["file"]) == name


def test_same_file_named_twice_is_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.py"
    path.write_text(FAULT)
    main([str(path), str(tmp_path)])
    assert capsys.readouterr().out.count("TL012") == 1


def test_code_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(9)\n")
    assert main([str(tmp_path)]) == 0
    assert not (tmp_path / "ran").exists()


def test_as_a_module_and_without_torch(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(FAULT)
    script = (
        "import sys, torchtuned.lint as l\n"
        "assert not {m for m in sys.modules if m.startswith('torchtuned.lint.')}\n"
        f"status = l.main([{str(tmp_path)!r}])\n"
        "assert 'torch' not in sys.modules\nsys.exit(status)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=TOP, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, "")
    words = [sys.executable, "-m", "torchtuned.lint", str(tmp_path)]
    assert subprocess.run(words, cwd=TOP, capture_output=True, text=True, check=False).stdout == run.stdout


def test_as_a_command_of_torchtuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text(FAULT)
    assert cli.main(["lint", str(tmp_path)]) == main([str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert text == text[: len(text) // 2] * 2
    assert cli.main(["lint", "--json", "--hints", str(tmp_path)]) == 1
    assert [one["code"] for one in json.loads(capsys.readouterr().out)["findings"]] == ["TL012"]
    assert cli.main(["lint"]) == 2
    loaded = "import sys, torchtuned.cli.main; print([m for m in sys.modules if m.startswith('torchtuned.lint')])"
    run = subprocess.run([sys.executable, "-c", loaded], cwd=TOP, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


SLOW = "TL001 TL001 TL004 TL007 TL012 TL015 TL016 TL018 TL019"


def test_the_example_that_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", str(TOP / "examples/slow_train.py")]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert sorted(one["code"] for one in found) == SLOW.split()
    assert main([str(TOP / "examples/fast_train.py")]) == 0
