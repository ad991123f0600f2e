"""Ends of processes, as the loop has them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time

from torchtuned.watches import Watches

MANY, COST_S = 200, 0.005


def test_others_are_answered_while_many_jobs_end_together() -> None:
    """Each end costs something (a line on the bus, a line in the journal), a thousand of them two seconds."""
    told: list[str] = []
    gaps: list[float] = []

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
            before = time.monotonic()
            await asyncio.sleep(0)
            gaps.append(time.monotonic() - before)

    watches = Watches(ended)
    asyncio.run(story())
    watches.close()
    assert sorted(map(int, told)) == [*range(MANY)]
    assert max(gaps) < MANY * COST_S / 2
