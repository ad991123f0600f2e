"""What the desktop is asked for while jobs run: not to sleep, and power-profiles-daemon's performance profile.

Both end by themselves when we do: logind's inhibitor is a descriptor, and power-profiles-daemon drops the holds of a
connection that closes. So nothing is left behind by a daemon that was killed; over a restart the descriptor waits in
systemd's FD store. Neither service is started for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine

from torchtuned.bus import Bus, CallFailed
from torchtuned.config import Config, SessionConfig
from torchtuned.policy import Outcome, Row

LOGIN = "org.freedesktop.login1"
LOGIN_PATH = "/org/freedesktop/login1"
LOGIN_MANAGER = f"{LOGIN}.Manager"
PPD = (  # newest first; the name is the interface, too
    ("org.freedesktop.UPower.PowerProfiles", "/org/freedesktop/UPower/PowerProfiles"),
    ("net.hadess.PowerProfiles", "/net/hadess/PowerProfiles"),
)
WHO = "torchtuned"
WHY = "a training job runs"
DEADLINE_S = 5.0

log = logging.getLogger(__name__)


class Desktop:
    """The two holds. `kept` is an inhibitor from before a restart; `keep` and `forget` have it kept over the next."""

    def __init__(self, bus: Bus, *, kept: int | None, keep: Callable[[int], None], forget: Callable[[], None]) -> None:
        self._bus, self._inhibitor, self._keep, self._forget = bus, kept, keep, forget
        self._told: set[str] = set()
        self._refused: dict[str, CallFailed] = {}
        self._profile: tuple[str, str, int] | None = None
        self._wanted = False
        self._wishes = SessionConfig()
        self._work: asyncio.Task[None] | None = None

    async def follow_sleep(self, resumed: Callable[[], object]) -> None:
        """Have `resumed` called when the machine comes back from sleep."""
        self._bus.on_signal(LOGIN, LOGIN_MANAGER, "PrepareForSleep", lambda values: None if values[0] else resumed())
        self._bus.match(f"type='signal',sender='{LOGIN}',interface='{LOGIN_MANAGER}',member='PrepareForSleep'")
        await self._bus.follow(LOGIN)

    def jobs(self, *, active: bool, wishes: SessionConfig) -> None:
        """Tell whether a job runs, and what the configuration asks for then."""
        self._wanted, self._wishes = active, wishes
        if self._work is None or self._work.done():
            self._work = asyncio.ensure_future(self._reach())

    def profiles_moved(self) -> None:
        """power-profiles-daemon was started or stopped, and knows of no hold: ask it anew while a job runs."""
        self._profile = None
        self.jobs(active=self._wanted, wishes=self._wishes)

    async def close(self) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        if self._inhibitor is not None:
            os.close(self._inhibitor)

    def rows(self, config: Config) -> list[Row]:
        """What is wanted of the desktop and what came of it, as rows of a plan."""
        wishes = config.session
        return [
            self._row(config, "inhibit", " ".join(wishes.inhibit), held=self._inhibitor is not None),
            self._row(config, "power_profile", wishes.power_profile, held=self._profile is not None),
        ]

    def _row(self, config: Config, key: str, wanted: str, *, held: bool) -> Row:
        sources = [setting.source for setting in config.settings if (setting.section, setting.key) == ("session", key)]
        refused = self._refused.get(key)
        outcome, reason = Outcome.KEPT, f"{wanted} while a job runs"
        if wanted in ("", "keep"):
            reason = "keep"
        elif held:
            outcome, reason = Outcome.APPLIED, "held by torchtuned while jobs run"
        elif self._wanted and refused:
            outcome = Outcome.UNSUPPORTED if refused.absent else Outcome.FAILED
            reason = f"{refused.where.split()[0]} does not run" if refused.absent else str(refused)
        elif self._wanted:
            reason = "being asked for"
        return Row(
            knob=f"session/{key}",
            current=wanted if held else "",
            wanted=wanted or "keep",
            outcome=outcome,
            reason=reason,
            source=(sources or ["default"])[0],
        )

    async def _reach(self) -> None:
        reached = None
        while reached != (self._wanted, self._wishes):
            reached = self._wanted, self._wishes
            inhibit = ":".join(self._wishes.inhibit) if self._wanted else ""
            profile = "performance" if self._wanted and self._wishes.power_profile != "keep" else ""
            await self._try("inhibit", self._inhibit(inhibit))
            await self._try("power_profile", self._hold(profile))

    async def _try(self, key: str, asking: Coroutine[None, None, None]) -> None:
        self._refused.pop(key, None)
        try:
            await asking
        except CallFailed as e:
            self._refused[key] = e
            if not e.absent and e.where not in self._told:  # once: every job would say so
                log.warning("%s", e)
                self._told.add(e.where)

    async def _inhibit(self, what: str) -> None:
        if what and self._inhibitor is None:
            try:
                self._inhibitor = await self._take(what, "block-weak")
            except CallFailed as e:
                if not e.dbus_name.endswith(".InvalidArgs"):
                    raise
                self._inhibitor = await self._take(what, "block")
            self._keep(self._inhibitor)
        elif not what and self._inhibitor is not None:
            os.close(self._inhibitor)
            self._inhibitor = None
            self._forget()

    async def _take(self, what: str, mode: str) -> int:
        """Since systemd 257 "block" is also in the way of root, who may save the machine from an empty battery, and
        "block-weak" does what "block" did before."""
        [fd] = await self._call((LOGIN, LOGIN_PATH, LOGIN_MANAGER), "Inhibit", "ssss", what, WHO, WHY, mode)
        return fd

    async def _hold(self, profile: str) -> None:
        if profile and self._profile is None:
            for name, path in PPD:
                try:
                    [cookie] = await self._call((name, path, name), "HoldProfile", "sss", profile, WHY, WHO)
                except CallFailed as e:
                    if not e.absent or (name, path) == PPD[-1]:
                        raise
                else:
                    self._profile = name, path, cookie
                    return
        elif not profile and self._profile is not None:
            (name, path, cookie), self._profile = self._profile, None
            await self._call((name, path, name), "ReleaseProfile", "u", cookie)

    async def _call(self, target: tuple[str, str, str], member: str, signature: str, *values: object) -> list[int]:
        return await self._bus.call(*target, member, signature, values, timeout_s=DEADLINE_S)
