"""Python files as data: parsed once, never run. Everything else works on what this module returns.

A file that cannot be read or parsed is one error with its place, never a traceback: training code is often
half-finished, and one broken file must not hide the findings in its neighbours.
"""

from __future__ import annotations

import ast
import io
import os
import re
import sys
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

# Generated or third-party trees: findings there are nobody's to fix.
SKIPPED_DIRS = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages", "build", "dist"})
_NOQA = re.compile(r"#\s*noqa\b(?P<codes>\s*:\s*(?P<list>[A-Z]+[0-9]+(?:[\s,]+[A-Z]+[0-9]+)*))?", re.IGNORECASE)
MAX_BYTES = 4 << 20


class Unparsed(Exception):
    """A file that could not be read as Python; `line` and `column` start at 1 (0: no place within the file)."""

    def __init__(self, file: str, line: int, column: int, message: str) -> None:
        super().__init__(message)
        self.file, self.line, self.column, self.message = file, line, column, message


@dataclass(frozen=True, eq=False)
class Source:
    """One parsed file. `shown` is the path as the user wrote it."""

    path: Path
    shown: str
    text: str = field(repr=False)
    tree: ast.Module
    parents: dict[ast.AST, ast.AST] = field(repr=False)
    nodes: tuple[ast.AST, ...] = field(repr=False)  # the tree in the order of ast.walk, but for operators and contexts

    @cached_property
    def calls(self) -> tuple[ast.Call, ...]:
        return tuple(node for node in self.nodes if isinstance(node, ast.Call))

    @cached_property
    def lines(self) -> tuple[str, ...]:
        return tuple(re.split(r"\r\n|\r|\n", self.text))  # as Python counts: a form feed ends no line

    @cached_property
    def comments(self) -> dict[int, str]:
        """The comment of each line that has one. Found on demand: most files have no findings to be silenced."""
        return _comments(self.text)

    @property
    def for_tests(self) -> bool:
        """Whether the file is a test by its name or its folder's: what it does once is nobody's training."""
        stem, folder = self.path.stem, self.path.resolve().parent.name
        return stem.startswith("test_") or stem.endswith(("_test", "_tests")) or folder in ("tests", "unittests")

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around `node`, innermost first, ending with the module."""
        while (up := self.parents.get(node)) is not None:
            yield up
            node = up

    def column(self, node: ast.expr | ast.stmt) -> int:
        """The node's column in characters, from 1; ast counts UTF-8 bytes from 0."""
        line = self.lines[node.lineno - 1] if node.lineno <= len(self.lines) else ""
        return len(line.encode("utf-8", "surrogatepass")[: node.col_offset].decode("utf-8", "ignore")) + 1

    def silenced(self, node: ast.expr | ast.stmt, code: str) -> bool:
        """Whether a `# noqa` on one of the node's own lines names the code, or names none."""
        if not _NOQA.search(self.text):
            return False
        last = node.end_lineno or node.lineno
        if not isinstance(node, ast.expr) and getattr(node, "body", None):
            last = node.lineno  # a comment deep in a loop's body is not about the loop
        for number in range(node.lineno, last + 1):
            match = _NOQA.search(self.comments.get(number, ""))
            if match and (match["codes"] is None or code in re.split(r"[\s,]+", match["list"].upper())):
                return True
        return False


def read(path: Path, shown: str) -> Source:
    """Parse one file. Raises Unparsed, with the place, for anything that is not readable Python."""
    try:
        if path.suffix == ".ipynb":
            raise Unparsed(shown, 0, 0, "a notebook: `jupyter nbconvert --to script` makes a Python file of it")
        if path.stat().st_size > MAX_BYTES:
            raise Unparsed(shown, 0, 0, f"larger than {MAX_BYTES >> 20} MiB: not read")
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except OSError as error:
        raise Unparsed(shown, 0, 0, error.strerror or str(error)) from error
    except (SyntaxError, LookupError, ValueError) as error:  # LookupError: "coding: rot13" is an encoding, of no text
        raise Unparsed(shown, 1, 1, f"not readable as text: {error}") from error
    text = text.removeprefix("\ufeff")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like are not this tool's business
            tree = ast.parse(text, filename=shown)
        nodes, parents = _walked(tree)
    except SyntaxError as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        message = f"syntax error: {error.msg} (read with the grammar of Python {version})"
        raise Unparsed(shown, error.lineno or 1, max(error.offset or 1, 1), message) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unparsed(shown, 1, 1, f"cannot be parsed: {str(error) or 'nested too deeply'}") from error
    return Source(path, shown, text, tree, parents, nodes)


def _walked(tree: ast.Module) -> tuple[tuple[ast.AST, ...], dict[ast.AST, ast.AST]]:
    """All nodes and their parents in one go: ast.walk and ast.iter_child_nodes take most of a run otherwise."""
    nodes: list[ast.AST] = [tree]
    parents: dict[ast.AST, ast.AST] = {}
    for node in nodes:  # grows while it is read
        for name in node._fields:
            if name in ("ctx", "op", "ops"):
                continue
            value = getattr(node, name, None)
            if isinstance(value, ast.AST):
                parents[value] = node
                nodes.append(value)
            elif isinstance(value, list):
                for item in value:
                    if isinstance(item, ast.AST):
                        parents[item] = node
                        nodes.append(item)
    return tuple(nodes), parents


def _comments(text: str) -> dict[int, str]:
    found: dict[int, str] = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(text, newline=None).readline):
            if token.type == tokenize.COMMENT:
                found[token.start[0]] = token.string
    except (tokenize.TokenError, SyntaxError):
        pass  # parsed already: at worst comments after this point are not seen
    return found


def identity(path: Path) -> Path:
    """The same path for the same file, however it was named. A pipe (`lint <(...)`) has no other name than its own."""
    return path.resolve() if path.is_file() or path.is_dir() else path.absolute()


def python_files(folder: Path) -> Iterator[Path]:
    """The .py files under a folder, in a stable order, without hidden, generated and virtual-environment folders."""
    for where, dirs, files in os.walk(folder):
        here = Path(where)
        dirs[:] = sorted(
            name
            for name in dirs
            if not name.startswith(".") and name not in SKIPPED_DIRS and not (here / name / "pyvenv.cfg").exists()
        )
        for name in sorted(files):
            if name.endswith(".py") and (here / name).is_file():
                yield here / name
