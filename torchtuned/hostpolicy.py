"""Host policy as the daemon has it: which configuration is in force, what became of it, one change at a time.

The engine blocks (a knob may hang in the kernel), so it runs in a thread of its own. One lock orders the changes:
while one is being made, the next waits; the last wish about jobs wins, so a storm of short jobs does not flap knobs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchtuned.config import Config, builtin
from torchtuned.engine import Engine
from torchtuned.errors import Failed, TorchtunedError
from torchtuned.files import replace_file
from torchtuned.policy import DEGRADING, Row

log = logging.getLogger(__name__)

MAX_NAMED = 5  # knobs that a reason for being degraded names
RETRY_S, MAX_RETRY_S = 1.0, 60.0  # until what failed is tried again: twice as long each time
STOP_S = 20.0  # for giving back all at the end; PID 1 kills a daemon that takes 30 s


class HostPolicy:
    """The policy in force.

    `read` reads the configuration for a profile (None: the one kept in the file `choice`, "": the one that the files
    name, which also counts where none is kept); `tuners` asks which other tuners run.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        read: Callable[[str | None], Config],
        choice: Path,
        tuners: Callable[[], Awaitable[frozenset[str]]],
    ) -> None:
        self.config = builtin()
        self.last_applied = 0  # microseconds after 1970, 0 for never
        self.changed: Callable[[], None] = lambda: None  # after each change of what the properties below say
        self.reconfigured: Callable[[], object] = lambda: None  # after another configuration came into force
        self.touched: Callable[[Sequence[Row]], None] = lambda rows: None  # with what apply or undo made of the knobs
        self.beside: Callable[[Config], list[Row]] = lambda config: []  # rows of what others than the engine see to
        self._engine, self._read, self._choice, self._tuners = engine, read, choice, tuners
        self._faults: dict[str, str] = {}
        self._bad: dict[str, Row] = {}  # knobs that went wrong when last applied
        self._starting, self._given_back = True, False
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="policy")
        self._looks: dict[str, asyncio.Future[list[Row]]] = {}
        self._jobs_wanted = self._jobs_active = False
        self._following: asyncio.Task[None] | None = None
        self._retrying: asyncio.Task[None] | None = None
        self._waiting: dict[str, bool] = {}  # knobs whose fault may pass, and whether they are to be reasserted then

    @property
    def state(self) -> str:
        """starting, ready, degraded, or stopped (given back by Undo, until the next Apply)."""
        if self._starting:
            return "starting"
        if self._given_back:
            return "stopped"
        return "degraded" if self._faults else "ready"

    @property
    def degraded(self) -> list[str]:
        return list(self._faults.values())

    def fault(self, about: str, text: str) -> None:
        """Say, or with "" take back, why all is not as it should be."""
        if text:
            self._faults[about] = text
        else:
            self._faults.pop(about, None)
        self.changed()

    # -- looking -----------------------------------------------------------------------------------------------------

    async def plan(self) -> list[Row]:
        return await self._look("plan")

    async def verify(self) -> list[Row]:
        return await self._look("verify")

    async def _look(self, what: str) -> list[Row]:
        """Those who ask while an answer is being worked out share it: looking is free for all, work is not."""
        if what not in self._looks:
            look = asyncio.ensure_future(self._ask(what))
            self._looks[what] = look
            look.add_done_callback(lambda _: self._looks.pop(what))
        return await asyncio.shield(self._looks[what])

    async def _ask(self, what: str) -> list[Row]:
        tuners = await self._tuners()
        method = self._engine.plan if what == "plan" else self._engine.verify
        rows: list[Row] = await self._off_loop(method, self.config, jobs_active=self._jobs_active, tuners=tuners)
        return rows + self.beside(self.config)

    # -- changing ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the configuration; a bad one leaves profile observe in force, and says so."""
        try:
            self.config = await self._load(None)
        except TorchtunedError as e:
            log.error("the configuration cannot be used, so nothing is changed:\n%s", e)
            self._faults["configuration"] = f"configuration: {e}"

    def failed_to_start(self, error: TorchtunedError | None) -> None:
        """Say that the first `apply` did not come off; None stands for what nobody foresaw."""
        self._starting = False
        self.fault("start", f"the policy was not applied: {error or 'internal error, see the journal'}")

    async def apply(self, *, only: Sequence[str] | None = None, reassert: bool = False) -> list[Row]:
        """Bring the machine to the policy. `only` and `reassert` are the engine's, for devices that just came."""
        async with self._lock:
            if self._given_back and only is not None:
                return []  # a newcomer is no reason to take back what was undone on purpose
            return await self._apply(only=only, reassert=reassert)

    async def undo(self, knobs: Sequence[str]) -> list[Row]:
        """Give back these knobs, or with none all; then nothing is applied again until somebody says so."""
        async with self._lock:
            rows: list[Row] = await self._off_loop(self._engine.undo, tuple(knobs), tuners=await self._tuners())
            if not knobs:
                self._given_back = True
                self._bad.clear()
                self._waiting.clear()
            self._judge(rows, complete=False)
            self.touched(rows)
            return rows

    async def reload(self) -> None:
        """Read the configuration again and apply it. InvalidConfig, with the old one in force, when it is bad."""
        async with self._lock:
            await self._take()
            await self._apply()

    async def set_profile(self, profile: str) -> None:
        """Choose a profile and apply it; "" leaves the choice to the files again. Kept over reboots. InvalidConfig."""
        async with self._lock:
            await self._load(profile)
            try:
                await self._off_loop(self._keep_choice, profile)
            except OSError as e:
                raise Failed(f"the choice cannot be kept: {e.strerror}", where=str(self._choice)) from e
            await self._take()
            await self._apply()

    def jobs(self, *, active: bool) -> None:
        """Tell whether a job runs; knobs meant for jobs follow."""
        self._jobs_wanted = active
        if self._following is None or self._following.done():
            self._following = asyncio.ensure_future(self._follow_jobs())

    async def _follow_jobs(self) -> None:
        try:
            async with self._lock:
                while self._jobs_wanted != self._jobs_active and not self._given_back and not self._starting:
                    self._jobs_active = self._jobs_wanted
                    families = sorted({w.knob.partition("/")[0] for w in self.config.wishes if w.when == "jobs"})
                    if families:
                        await self._apply(only=families)
        except Exception:
            log.exception("knobs for jobs could not be set or given back")

    async def stop(self, *, give_back: bool) -> None:
        """End. `give_back`: the daemon is stopped for good, so undo all; else leave everything for the next one."""
        if self._following is not None:
            await self._following
        async with self._lock:
            if self._retrying is not None:  # it sleeps, or waits for this lock
                self._retrying.cancel()
            if give_back:
                tuners = await self._tuners()
                rows: list[Row] = await self._off_loop(self._engine.undo, tuners=tuners, seconds=STOP_S)
                left = [f"{row.knob} ({row.reason})" for row in rows if row.outcome in DEGRADING]
                if left:
                    log.error("not given back, torchtuned undo tries it again: %s", "; ".join(left))
        self._thread.shutdown(wait=False)

    async def _apply(self, *, only: Sequence[str] | None = None, reassert: bool = False) -> list[Row]:
        if only is None:  # else what is for jobs has yet to follow, in turn
            self._jobs_active = self._jobs_wanted
        tuners = await self._tuners()
        rows: list[Row] = await self._off_loop(
            self._engine.apply, self.config, jobs_active=self._jobs_active, only=only, tuners=tuners, reassert=reassert
        )
        self._starting = False
        if only is None:
            self._given_back = False
            self._faults.pop("start", None)
            self.last_applied = time.time_ns() // 1000
        self._judge(rows, complete=only is None, reassert=reassert)
        if self._waiting and (self._retrying is None or self._retrying.done()):
            self._retrying = asyncio.ensure_future(self._retry())
        self.touched(rows)
        return rows

    async def _retry(self) -> None:
        """Apply what failed until its fault has passed: nobody tells when a full /run has room, or when the kernel
        answers again. By folders, as one knob may decide what becomes of those beside it.
        """
        wait = RETRY_S
        try:
            while True:
                await asyncio.sleep(wait)
                async with self._lock:
                    waiting, self._waiting = self._waiting, {}  # some may have gone with their devices
                    for reassert in (True, False):
                        folders = {knob.rpartition("/")[0] for knob, lost in waiting.items() if lost is reassert}
                        if folders:
                            await self._apply(only=sorted(folders), reassert=reassert)
                    if not self._waiting:
                        return
                wait = min(2 * wait, MAX_RETRY_S)
        except Exception:
            log.exception("what failed could not be tried again")

    def _judge(self, rows: Sequence[Row], *, complete: bool, reassert: bool = False) -> None:
        if complete:
            self._bad.clear()
            self._waiting.clear()
        for row in rows:
            self._bad.pop(row.knob, None)
            self._waiting.pop(row.knob, None)
            if row.passing:
                self._waiting[row.knob] = reassert
            if row.outcome in DEGRADING:
                self._bad[row.knob] = row
        bad = list(self._bad.values())
        named = ", ".join(f"{row.knob} ({row.outcome}: {row.reason})" for row in bad[:MAX_NAMED])
        more = f" and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
        self.fault("knobs", f"knobs: {named}{more}" if bad else "")

    async def _take(self) -> None:
        try:
            self.config = await self._load(None)
        except TorchtunedError as e:
            self.fault("configuration", f"configuration: {e}")
            raise
        self.fault("configuration", "")
        self.reconfigured()

    async def _load(self, profile: str | None) -> Config:
        config: Config = await self._off_loop(self._read, profile)
        return config

    def _keep_choice(self, profile: str) -> None:
        if not profile:
            self._choice.unlink(missing_ok=True)
            return
        self._choice.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        replace_file(self._choice, f"{profile}\n", mode=0o644, sync=True)  # for all to read; it outlasts a power cut

    async def _off_loop(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **named))
