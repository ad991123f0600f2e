"""torchtuned-run --linger asks logind, as the user whose job it is; a refusal is told and the job starts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

from harness import REPOSITORY, USER, PrivateBus, Service

ENTRY = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from torchtuned.run.main import main; sys.exit(main())"
Services = Callable[..., Service]


def run(bus: PrivateBus, *options: str) -> str:
    """What torchtuned-run says to a user; the command runs in any case."""
    words = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "/usr/bin/python3", "-I", "-c", ENTRY]
    runtime = bus.folder / "runtime"  # where it notes that it placed itself
    runtime.mkdir(mode=0o700, exist_ok=True)
    os.chown(runtime, USER, USER)
    environ = {**bus.environment, "XDG_RUNTIME_DIR": str(runtime)}
    done = subprocess.run([*words, *options, "echo", "ran"], env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ran\n"
    return done.stderr


def test_linger_is_asked_of_logind_for_the_user_only_on_request(bus: PrivateBus, services: Services) -> None:
    logind = services("logind")
    assert "linger" not in run(bus)
    assert logind.get("calls") == []
    assert "linger" not in run(bus, "--linger")
    assert logind.get("calls") == [["SetUserLinger", [USER, True, True]]]


def test_a_refusal_is_told(bus: PrivateBus, services: Services) -> None:
    logind = services("logind")
    logind.set("refuse", ["SetUserLinger"])
    said = run(bus, "--linger")
    assert "--linger: Permission denied; ask an administrator for loginctl enable-linger nobody" in said


def test_no_logind(bus: PrivateBus) -> None:
    assert "--linger: systemd-logind does not answer" in run(bus, "--linger")
