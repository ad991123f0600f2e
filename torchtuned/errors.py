"""What can go wrong, as types. Raised low, worded once, printed at the top.

`name` is the last part of the D-Bus error name, `exit_status` what a command line ends with.
"""

from __future__ import annotations


class TorchtunedError(Exception):
    """Something a person can act on: what happened, where, and what to do about it.

    `where` is a file with its line, or an object and its value; `hint` is the way out.
    """

    name = "Failed"
    exit_status = 1

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.hint = what, where, hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text} ({self.hint})" if self.hint else text


class Failed(TorchtunedError):
    """An operation did not come off, and no narrower name fits."""


class InvalidRequest(TorchtunedError):
    name = "InvalidRequest"
    exit_status = 2


class InvalidConfig(TorchtunedError):
    """A configuration that cannot be used. One message may hold several lines, one per fault."""

    name = "InvalidConfig"
    exit_status = 2


class NoSuchJob(TorchtunedError):
    name = "NoSuchJob"


class NoSuchGpu(TorchtunedError):
    name = "NoSuchGpu"


class NoSuchKnob(TorchtunedError):
    name = "NoSuchKnob"


class Unplaceable(TorchtunedError):
    """No CPUs or GPUs on this machine can satisfy the request."""

    name = "Unplaceable"


class Busy(TorchtunedError):
    """It could be had, but not now."""

    name = "Busy"


class NotAuthorized(TorchtunedError):
    name = "NotAuthorized"
    exit_status = 77


class DaemonUnreachable(TorchtunedError):
    """No answer from torchtunedd: no bus, no owner of the name, or silence."""

    exit_status = 69


class NoAnswer(DaemonUnreachable):
    """The silent one: it was asked and did not answer in time, or ended meanwhile."""


class HostError(TorchtunedError):
    """A file of /sys, /proc or /dev did not do what was asked. `errno` is the kernel's, or 0."""

    def __init__(self, what: str, *, where: str, errno: int = 0, hint: str = "") -> None:
        super().__init__(what, where=where, hint=hint)
        self.errno = errno


class Missing(HostError):
    """The file is not there: this kernel or machine does not have the feature."""


class Unreadable(HostError):
    """The file is there and the kernel would not let it be read."""


class Refused(HostError):
    """The kernel did not take the value written."""


BY_NAME: dict[str, type[TorchtunedError]] = {
    cls.name: cls
    for cls in (
        *(Failed, InvalidRequest, InvalidConfig, NoSuchJob, NoSuchGpu, NoSuchKnob),
        *(Unplaceable, Busy, NotAuthorized),
    )
}
