"""Asking polkit whether a caller may change the machine.

The subject is the caller's bus name, never a PID, which could be somebody else's by the time polkit looks. root needs
no polkit, so a machine without it can still be administered, and nobody else can.

Users bring their own dialogs, which need not end, and the bus lets us wait for 128 answers at a time, those of PID 1
among them. So few questions are open at once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter

from torchtuned.bus import DBUS, DBUS_PATH, Bus, CallFailed, Variant
from torchtuned.errors import Busy, NotAuthorized

SERVICE = "org.freedesktop.PolicyKit1"
PATH = "/org/freedesktop/PolicyKit1/Authority"
AUTHORITY = f"{SERVICE}.Authority"
DEADLINE_S = 10.0
DIALOG_S = 120.0  # how long a person may take to type a password
INTERACTION = 1
PER_USER, AT_ONCE = 4, 32  # questions that are open


async def uid(bus: Bus, sender: str) -> int:
    """User id of the owner of a connection. NotAuthorized when it has gone."""
    try:
        [found] = await bus.call(DBUS, DBUS_PATH, DBUS, "GetConnectionUnixUser", "s", [sender])
    except CallFailed as e:
        raise NotAuthorized("the bus does not say who is calling", where=sender) from e
    return int(found)


class Polkit:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._cancel_ids = itertools.count(1)
        self._open: Counter[int] = Counter()  # questions by user

    async def check(self, sender: str, action: str, *, interactive: bool) -> None:
        """Return when the caller may do `action`; NotAuthorized says what was missing. Busy.

        `interactive`: the caller agreed to have its person asked.
        """
        caller = await uid(self._bus, sender)
        if caller == 0:
            return
        if self._open[caller] >= PER_USER or self._open.total() >= AT_ONCE:
            raise Busy("polkit has not answered earlier questions yet", hint="answer its dialog, or use sudo")
        self._open[caller] += 1
        try:
            await self._ask(caller, sender, action, interactive=interactive)
        finally:
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]

    async def _ask(self, caller: int, sender: str, action: str, *, interactive: bool) -> None:
        cancel_id = f"torchtuned-{next(self._cancel_ids)}"
        flags = INTERACTION if interactive else 0
        subject = ["system-bus-name", {"name": Variant("s", sender)}]
        question = [subject, action, {}, flags, cancel_id]
        wait = DIALOG_S if interactive else DEADLINE_S
        try:
            [[authorized, challenge, details]] = await self._bus.call(
                SERVICE, PATH, AUTHORITY, "CheckAuthorization", "(sa{sv})sa{ss}us", question, timeout_s=wait, start=True
            )
        except CallFailed as e:
            if e.absent:
                raise NotAuthorized(
                    f"only root may do this, as polkit is not installed to ask about {action}", hint="use sudo"
                ) from e
            await self._cancel(cancel_id)
            raise NotAuthorized(f"polkit gave no answer about {action} for uid {caller}: {e.what}") from e
        if authorized:
            return
        if details.get("polkit.dismissed"):
            raise NotAuthorized(f"the request for {action} was dismissed")
        if challenge:
            hint = "use sudo, or a terminal where polkit can ask" if not interactive else "use sudo"
            raise NotAuthorized(f"{action} needs an administrator's password", hint=hint)
        raise NotAuthorized(f"uid {caller} is not allowed {action}", hint="use sudo, or add a polkit rule")

    async def _cancel(self, cancel_id: str) -> None:
        with contextlib.suppress(CallFailed):  # it was not waiting any more, or it hangs
            await self._bus.call(SERVICE, PATH, AUTHORITY, "CancelCheckAuthorization", "s", [cancel_id], timeout_s=1.0)
