"""How a job ended: which facts win, and that nothing is claimed which they do not show."""

from __future__ import annotations

import pytest

from torchtuned.reports.ending import Facts, OomKill, ending, kills_of, oom_kill

LINE = (
    "oom-kill:constraint={},nodemask=(null),cpuset=user.slice,mems_allowed=0-1,oom_memcg=/user.slice,"
    "task_memcg=/user.slice/a.scope,task={},pid=42,uid=1000"
)
KILL = OomKill(constraint="CONSTRAINT_NONE", task="python", pid=42, of="/a.scope", limited="")


def test_the_kernel_s_line() -> None:
    kill = oom_kill(LINE.format("CONSTRAINT_MEMCG", "python3"))
    assert kill == OomKill(
        constraint="CONSTRAINT_MEMCG", task="python3", pid=42, of="/user.slice/a.scope", limited="/user.slice"
    )
    assert oom_kill("Out of memory: Killed process 42 (python)") is None


@pytest.mark.parametrize("name", ["x,pid=7,uid=0", "task_memcg=/b,", "a b task=c"])
def test_a_process_s_name_forges_nothing(name: str) -> None:
    kill = oom_kill(LINE.format("CONSTRAINT_NONE", name))
    assert kill is not None
    assert (kill.pid, kill.of) == (42, "/user.slice/a.scope")


@pytest.mark.parametrize("place", ["cpuset=user.slice", "task_memcg=/user.slice/a.scope"])
def test_a_cgroup_s_name_forges_nothing(place: str) -> None:
    """Users name cgroups below their own: what dies there is no kill of somebody else's job."""
    name = f"{place}/x,task_memcg=/user.slice/torchtuned-job-7.scope"
    assert oom_kill(LINE.format("CONSTRAINT_MEMCG", "python").replace(place, name)) is None


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        ("CONSTRAINT_NONE", "the machine was out of memory"),
        ("CONSTRAINT_MEMCG", "the memory limit of /user.slice was reached"),
        ("CONSTRAINT_CPUSET", "the memory nodes that it may use were full"),
    ],
)
def test_which_memory_was_short(constraint: str, why: str) -> None:
    kill = oom_kill(LINE.format(constraint, "python"))
    assert kill is not None
    assert ending(Facts(leader=42, kills=(kill,))).sentence.endswith(f"(python, process 42): {why}.")


def test_whose_a_kill_was() -> None:
    inside = OomKill(constraint="", task="", pid=5, of="/s/job.scope/workers", limited="")
    beside = OomKill(constraint="", task="", pid=6, of="/s/job.scope2", limited="")
    assert kills_of([inside, beside], "/s/job.scope", frozenset({6})) == [inside]
    assert kills_of([inside, beside], "", frozenset({6})) == [beside]


@pytest.mark.parametrize(
    ("status", "cause", "words"),
    [
        (0, "exited", "with exit status 0, which means success."),
        (1, "exited", "by itself with exit status 1."),
        (137, "exited", "as a shell does whose command was killed by SIGKILL; neither the kernel's"),
        (143, "exited", "as a shell does whose command was killed by SIGTERM."),
        (200, "exited", "by itself with exit status 200."),
        (-2, "killed", "SIGINT: somebody interrupted it (Ctrl-C)."),
        (-1, "killed", "SIGHUP: its terminal or session was closed."),
        (-7, "crashed", "SIGBUS: often /dev/shm was full"),
        (-11, "crashed", "It crashed with SIGSEGV."),
        (-40, "killed", "signal 40: somebody sent it."),
    ],
)
def test_what_a_parent_tells(status: int, cause: str, words: str) -> None:
    found = ending(Facts(status=status))
    assert found.cause == cause
    assert words in found.sentence


def test_a_job_that_outlived_a_kill_of_its_worker_ended_by_itself() -> None:
    found = ending(Facts(status=0, oom_kills=1, kills=(KILL,), leader=1))
    assert found.cause == "exited"
    assert "Before that: the kernel's out-of-memory killer killed one of its processes (python" in found.sentence
    assert ending(Facts(status=0, oomd="memory pressure")).cause == "exited"


def test_who_is_cleared_of_a_kill_9() -> None:
    assert "perhaps the kernel's" in ending(Facts(status=-9, around=("/user.slice", 2))).sentence
    assert (
        "the journal, where systemd-oomd would say so, cannot be read"
        in ending(Facts(status=-9, journal=False)).sentence
    )


def test_xids_of_its_gpus_are_told() -> None:
    xid = "Xid 79 of GPU 0000:01:00.0: the GPU has fallen off the bus"
    found = ending(Facts(status=1, xids=(xid,)))
    assert found.sentence.endswith(f"The NVIDIA driver reported meanwhile: {xid}.")


def test_unknown_says_what_was_looked_at() -> None:
    assert "no out-of-memory kill was seen, the journal cannot be read" in ending(Facts(journal=False)).sentence
    assert ending(Facts()).cause == "unknown"
    assert ending(Facts(released=True, oom_kills=3)).cause == "released"
