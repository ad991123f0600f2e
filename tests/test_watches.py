"""Ends of processes, as the loop has them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time

from torchtuned.watches import TURN_S, Watches

MANY, COST_S = 200, 0.005


def test_others_are_answered_while_many_jobs_end_together() -> None:
    """Each end costs something (a line on the bus, a line in the journal), a thousand of them two seconds."""
    told: list[str] = []
    turns: list[int] = []

    def ended(job_id: str) -> None:
        assert job_id not in watches  # noticed
        time.sleep(COST_S)
        told.append(job_id)

    async def story() -> None:
        shell = subprocess.Popen(
            ["sh", "-c", f"for i in $(seq {MANY}); do sleep 600 & echo $!; done"], stdout=subprocess.PIPE
        )
        assert shell.stdout is not None
        with shell.stdout:
            pids = [int(shell.stdout.readline()) for _ in range(MANY)]
        shell.wait()
        for number, pid in enumerate(pids):
            watches.process(str(number), os.pidfd_open(pid))
        for pid in pids:
            os.kill(pid, 9)
        while len(told) < MANY:
            before = len(told)
            await asyncio.sleep(0)
            turns.append(len(told) - before)

    watches = Watches(ended)
    asyncio.run(story())
    watches.close()
    assert sorted(map(int, told)) == [*range(MANY)]
    assert max(turns) <= TURN_S / COST_S + 1


def test_an_end_that_cannot_be_told_keeps_no_other_from_being_told() -> None:
    told: list[str] = []

    def ended(job_id: str) -> None:
        told.append(job_id)
        if len(told) == 1:
            raise OSError("no")

    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
        for number, one in enumerate(sleepers):
            watches.process(str(number), os.pidfd_open(one.pid))
        for one in sleepers:
            one.kill()
            one.wait()
        async with asyncio.timeout(20):
            while len(told) < 3:
                await asyncio.sleep(0.01)

    watches = Watches(ended)
    asyncio.run(story())
    watches.close()
