"""What is said to a job that has waited for a place in vain: how long, for what, and who has it."""

from __future__ import annotations

from torchtuned.cpuset import CpuSet, format_list
from torchtuned.errors import Busy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

SHOWN = 3


def in_vain(seconds: float, why: str, holders: Sequence[str]) -> Busy:
    """The error for a wait of so long that has ended."""
    return Busy("; ".join([f"waited {seconds:g} s, no place: {why}", *([some(holders)] if holders else [])]))


def whose(name: str, uid: int) -> str:
    """A job or process, by `name`, and its user."""
    import pwd

    try:
        user = pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        user = f"uid {uid}"
    return f"{name} of {user}"


def some(names: Sequence[str]) -> str:
    """The first few of them, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join([*names[:SHOWN], f"and {more} more"] if more > 0 else names)


def holder(name: str, uid: int, cpus: CpuSet, gpus: Sequence[str]) -> str:
    """Who has what, in words. `name` is the job or process."""
    what = [f"CPUs {format_list(cpus)}"] if cpus else []
    what += [f"GPU {', '.join(gpus)}"] if gpus else []
    return f"{whose(name, uid)} has {' and '.join(what)}"
