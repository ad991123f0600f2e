"""Calls of every member with whatever arguments, from root and from a user: answered by a value or a named error.

The daemon must not end, nor show a traceback, nor keep a descriptor; and the next good call is answered as ever.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from fakes.fuzz import often
from harness import GPU, JOB, MANAGER, PROPERTIES, ROOT, USER, Daemon, PrivateBus, Puppet
from hypothesis import given
from hypothesis import strategies as st

from torchtuned.bus import CallFailed

OBJECTS = "org.freedesktop.DBus.ObjectManager"
MEMBERS = {
    MANAGER: (
        *("Plan", "Apply", "Verify", "Undo", "SetProfile", "Check", "Register", "Commit", "Release", "Ended"),
        *("Report", "Reports", "Reload", "Nothing"),
    ),
    PROPERTIES: ("Get", "GetAll", "Set"),
    OBJECTS: ("GetManagedObjects",),
    "org.freedesktop.DBus.Introspectable": ("Introspect",),
    "org.freedesktop.DBus.Peer": ("Ping", "GetMachineId"),
    JOB: ("X",),
    GPU: ("X",),
}
REAL = {"Undo": "as", "SetProfile": "s", "Register": "hs", "Commit": "o", "Release": "o", "Ended": "uti", "Report": "s"}
REAL |= {"Get": "ss", "GetAll": "s"}
TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        [
            *("", "\0", "..", "../../etc/passwd", "/", "\n", "a" * 70000, "{}", "null", "[" * 2000, "\x1b[2J", "1"),
            *("cpu/*", "cpu/policy0/governor", "sysctl/../../x", "training", "observe", MANAGER, "State"),
            *('{"schema":1}', '{"schema":1,"cpus":"1"}', '{"schema":1,"gpus":1,"wait":0}'),
        ]
    ),
    st.fixed_dictionaries(
        {"schema": st.just(1)},
        optional={
            key: st.none() | st.integers(-5, 99) | st.text(max_size=9) | st.booleans() | st.lists(st.text(max_size=9))
            for key in ("gpus", "cpus", "ranks", "wait", "shared", "memory", "confine", "policy", "command")
        },
    ).map(json.dumps),
)
PATHS = st.sampled_from(
    [ROOT, f"{ROOT}/jobs/1", f"{ROOT}/jobs/999", f"{ROOT}/jobs", "/", "/x", f"{ROOT}/gpus/0000_01_00_0"]
)
BASIC: dict[str, st.SearchStrategy[Any]] = {
    "s": TEXTS,
    "o": PATHS,
    "b": st.booleans(),
    "y": st.integers(0, 255),
    "u": st.integers(0, 2**32 - 1),
    "i": st.integers(-(2**31), 2**31 - 1),
    "t": st.integers(0, 2**64 - 1),
    "x": st.integers(-(2**63), 2**63 - 1),
    "d": st.floats(allow_nan=False, allow_infinity=False),
    "h": st.integers(0, 3),
    "as": st.lists(TEXTS, max_size=5),
    "ao": st.lists(PATHS, max_size=3),
    "aas": st.lists(st.lists(st.text(max_size=5), max_size=3), max_size=3),
    "a{ss}": st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
}


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, str, str, str, list[Any]]:
    """Path, interface, member, signature and arguments; the signature is the right one two times of three."""
    interface = draw(st.sampled_from(sorted(MEMBERS)))
    member = draw(st.sampled_from(MEMBERS[interface]))
    wrong = draw(st.integers(0, 2)) == 0
    signature = "".join(draw(st.lists(st.sampled_from(sorted(BASIC)), max_size=4))) if wrong else REAL.get(member, "")
    kinds, rest = [], signature
    while rest:
        kind = next(kind for kind in sorted(BASIC, key=len, reverse=True) if rest.startswith(kind))
        kinds.append(kind)
        rest = rest[len(kind) :]
    path = ROOT if draw(st.integers(0, 3)) else draw(PATHS)
    return path, interface, member, signature, [draw(BASIC[kind]) for kind in kinds]


def ask(who: Puppet, call: tuple[str, str, str, str, list[Any]]) -> str:
    """The name of the error, or ""."""
    path, interface, member, signature, body = call
    try:
        if "h" in signature:
            who.do("with_fds", path, interface, member, signature, body)
        else:
            who.do("call", path, interface, member, signature, *body)
    except RuntimeError as e:
        return str(e)
    return ""


def test_every_call_is_answered(bus: PrivateBus, daemon: Callable[..., Daemon], tree: Path) -> None:
    one = daemon("--sysroot", tree)
    one.wait_for("ready")
    process = psutil.Process(one.process.pid)
    with bus.user(USER) as user, bus.user(0) as root:
        bus.managed()
        kept = process.num_fds()

        @often(250)
        @given(st.booleans(), calls())
        def calling(as_root: bool, call: tuple[str, str, str, str, list[Any]]) -> None:  # noqa: FBT001
            said = ask(root if as_root else user, call)
            name = said.partition(":")[0]
            assert not name or name.startswith(("org.torchtuned1.Error.", "org.freedesktop.DBus.Error.")), said
            assert "NoReply" not in name, said
            assert "Traceback" not in said, said
            assert "internal error" not in said, said
            assert one.process.poll() is None

        calling()
        for path in [path for path in bus.managed() if "/jobs/" in path]:
            root.release(path)
        assert process.num_fds() <= kept + 2, os.listdir(f"/proc/{one.process.pid}/fd")
        assert user.start({"cpus": "1"})[1]["state"] == "running"
    log = one.log.read_text()
    assert "unexpected" not in log
    assert CallFailed.__name__ not in log
