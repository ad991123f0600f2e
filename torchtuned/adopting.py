"""When self-placed jobs (selfplaced.py) are looked for, so that looking keeps nobody else from an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from torchtuned.host import Host
from torchtuned.jobs import Job, Jobs, State
from torchtuned.selfplaced import Tables
from torchtuned.topology import Topology
from torchtuned.turns import Rest

FREE_S = 0.01  # what reading the tables may take, before others come first
BATCH = 64  # jobs in one go


class Adopting:
    """`adopt` takes one over, and says False when it is to be tried again."""

    def __init__(self, host: Host, jobs: Jobs, adopt: Callable[[Job], bool]) -> None:
        self._tables, self._jobs, self._adopt = Tables(host), jobs, adopt
        self._reading, self._rest = asyncio.Lock(), Rest(FREE_S)

    async def look(self, machine: Topology) -> None:
        """Take over those that found no daemon, or one that did not answer.

        Who makes a table that takes long to read, and registers all the time, is not to keep others from an answer.
        """
        async with self._reading:
            if self._rest.left():
                return
            begun = time.thread_time()
            listed = await asyncio.to_thread(self._tables.read, machine)
            running = {job.process for job in self._jobs if job.state is State.RUNNING}
            for number, found in enumerate([one for one in listed if one.process not in running], start=1):
                if not self._adopt(found):
                    self._tables.forget(found.process.uid)
                if number % BATCH == 0:  # a table may hold a thousand, and others wait for an answer
                    await asyncio.sleep(0)
            self._rest.after(self._tables.cost_s + time.thread_time() - begun)
