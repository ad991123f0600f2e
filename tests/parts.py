"""Runs the parts of the test suite side by side where that pays, and sums them up; tests/run starts it.

A part is a list of commands. Its output goes to a file, and is shown when something in it fails. pytest says what it
ran in a JUnit file; a skipped test counts as a failed one, because nobody reads a skip. Every other command counts
as one test. The last line, alone, is "N passed, N failed".
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

TOP = Path(__file__).resolve().parent.parent
PARTS = ("lint", "unit", "bus", "package", "vm")
SUITES = ("bookworm", "trixie")
BIN = Path(sys.executable).parent
DEB = TOP / "dist/torchtuned.deb"


@dataclass(frozen=True)
class Result:
    """What one part did."""

    passed: int
    failed: int


class Log:
    """Lines about the parts, from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start = time.monotonic()

    def __call__(self, text: str) -> None:
        with self._lock:
            print(f"[{time.monotonic() - self._start:4.0f} s] {text}", flush=True)


class Runner:
    """Runs commands for a part and counts."""

    def __init__(self, folder: Path, scratch: Path, log: Log) -> None:
        self._folder, self.scratch, self._log = folder, scratch, log

    def part(self, name: str, *steps: Callable[[Path], Result]) -> Result:
        """Run the steps one after another, all of them, even when one fails."""
        output = self._folder / f"{name}.log"
        start = time.monotonic()
        self._log(f"{name} …")
        results = [step(output) for step in steps]
        total = Result(sum(r.passed for r in results), sum(r.failed for r in results))
        verdict = f"{name}: {total.passed} passed, {total.failed} failed in {time.monotonic() - start:.0f} s"
        if total.failed:
            text = output.read_text(errors="replace")
            self._log(f"{verdict}\n--- what {name} printed ---\n{text}--- end of {name} ---")
        else:
            self._log(verdict)
        return total

    def command(self, *words: str | Path, **environment: str) -> Callable[[Path], Result]:
        """Make a step that is one test: the command exits 0."""

        def step(output: Path) -> Result:
            status = self._run(words, output, environment)
            return Result(1, 0) if status == 0 else Result(0, 1)

        return step

    def pytest(self, name: str, *words: str | Path, **environment: str) -> Callable[[Path], Result]:
        """Make a step that runs pytest and counts its tests; no test at all is a failure."""

        def step(output: Path) -> Result:
            report = self._folder / f"{name}.xml"
            line: list[str | Path] = [BIN / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5"]
            status = self._run([*line, f"--junitxml={report}", *words], output, environment)
            if not report.exists():
                return Result(0, 1)
            counts = [suite.attrib for suite in ElementTree.parse(report).getroot().iter("testsuite")]
            ran = sum(int(count["tests"]) for count in counts)
            bad = sum(int(count[kind]) for count in counts for kind in ("failures", "errors", "skipped"))
            return Result(max(ran - bad, 0), bad if bad or status == 0 else 1)

        return step

    def _run(self, words: Sequence[str | Path], output: Path, environment: dict[str, str]) -> int:
        own = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # as users have it
        with open(output, "a") as stream:
            stream.write(f"$ {' '.join(str(word) for word in words)}\n")
            stream.flush()
            return subprocess.run(
                words,
                cwd=TOP,
                env={**own, **environment},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            ).returncode


def run(parts: Sequence[str], suites: Sequence[str], runner: Runner) -> list[Result]:
    """Run the parts: first what needs no machine, beside the building of images; then the machines."""

    def packaged() -> list[Result]:
        results = []
        if "package" in parts or "vm" in parts:
            results.append(runner.part("deb", runner.command(TOP / "debian/make-deb", DEB), runner.command(*lintian)))
        if "package" in parts:
            results.append(runner.part("build", runner.pytest("build", "tests/package/test_build.py", **deb)))
            for suite in suites:
                chroot = runner.pytest(suite, "tests/package/test_chroot.py", **deb, TORCHTUNED_SUITE=suite)
                results.append(runner.part(f"package-{suite}", chroot))
        return results

    def sources() -> list[Result]:
        results = []
        if "lint" in parts:
            ruff = runner.command(BIN / "ruff", "check", ".")
            mypy = runner.command(BIN / "mypy", "--strict", *typed, MYPYPATH="tests")
            # program.py stands on an example that is untyped on purpose
            measured = [
                path
                for path in sorted((TOP / "benchmarks").iterdir())
                if path.name not in ("program.py", "__pycache__")
            ]
            scripts = ("--follow-imports=silent", "--scripts-are-modules")
            paths = "tests:tests/bus:tests/vm:benchmarks"
            measuring = runner.command(BIN / "mypy", "--strict", *scripts, *measured, MYPYPATH=paths)
            results.append(runner.part("lint", ruff, mypy, measuring))
        if "unit" in parts:
            others = [f"--ignore=tests/{name}" for name in ("bus", "package", "vm")]
            results.append(runner.part("unit", runner.pytest("unit", "tests", *others, **memory)))
        if "bus" in parts:
            results.append(runner.part("bus", runner.pytest("bus", "tests/bus", **memory)))
        return results

    def images() -> list[Result]:
        if "vm" not in parts:
            return []
        return [runner.part("images", runner.command(BIN / "python", "tests/vm/image.py", *suites))]

    def machine(suite: str) -> list[Result]:
        # A test whose whole machine stands still is run once more: that is the emulator's doing.
        again = ("--reruns", "1", "--only-rerun", "^MachineHangs:", "-rR")
        boot = runner.pytest(f"vm-{suite}", "tests/vm", *again, **deb, TORCHTUNED_SUITE=suite)
        return [runner.part(f"vm-{suite}", boot)]

    # not --fail-on: lintian 2.116 counts there what its own screens have masked
    silent = 'hints=$(lintian --allow-root --display-info "$1") && echo "$hints" && [ -z "$hints" ]'
    lintian = ("sh", "-c", silent, "lintian", DEB)
    deb = {"TORCHTUNED_DEB": str(DEB)}
    memory = {"TMPDIR": str(runner.scratch)}
    typed = ("torchtuned", "examples/train.py", "tests/parts.py", "tests/vm", "tests/package")
    with ThreadPoolExecutor() as pool:
        first = [pool.submit(chain) for chain in (packaged, sources, images)]
        results = [result for chain in first for result in chain.result()]
        if "vm" in parts:
            results += [result for chain in pool.map(machine, suites) for result in chain]
    return results


@contextlib.contextmanager
def _in_memory(folder: Path) -> Iterator[Path]:
    """A place for the tests' own files in memory, as /run is on a real machine; on the disk where none can be mounted.

    What the daemon syncs there costs nothing; on a disk that others use thousands of syncs take minutes.
    """
    folder.chmod(0o755)  # tests with a second user go through it
    scratch = folder / "memory"
    scratch.mkdir(0o755)
    mounted = not subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755,size=50%", "tmpfs", scratch]).returncode
    try:
        yield scratch
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", scratch], check=True)


def main() -> int:
    """Run what was asked for; the exit status is 0 when nothing failed."""
    parser = argparse.ArgumentParser(prog="tests/run", description="install what the tests need, and run them")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--suite", choices=SUITES, help="only this Debian release for package and vm")
    options = parser.parse_args()
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"no part {part}: choose from {', '.join(PARTS)}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torchtuned-tests-") as folder, _in_memory(Path(folder)) as scratch:
        runner = Runner(Path(folder), scratch, Log())
        results = run(options.parts or PARTS, [options.suite] if options.suite else SUITES, runner)
    passed, failed = sum(r.passed for r in results), sum(r.failed for r in results)
    print(f"whole run: {time.monotonic() - start:.0f} s\n\n{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
