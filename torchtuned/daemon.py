"""torchtunedd: puts the parts together, and lives from the first signal of PID 1 to the last.

The order is what matters. The name on the bus is taken when the interface can answer, which needs no driver; then the
policy is applied, so a slow driver never holds up the boot. The bus going away ends the daemon with an error, and
systemd starts it with the bus. On SIGTERM PID 1 is asked why: values are given back when the unit is stopped, and stay
for the next daemon when it is restarted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from systemd import journal  # type: ignore[attr-defined]
from torchtuned import __version__, discover
from torchtuned.bus import Bus, CallFailed
from torchtuned.configfiles import read_config
from torchtuned.dbusapi import NAME, Api
from torchtuned.engine import Engine
from torchtuned.errors import Failed, TorchtunedError
from torchtuned.findings import Finding
from torchtuned.gpus import Gpus
from torchtuned.host import Host
from torchtuned.hostchecks import HostChecks
from torchtuned.hostpolicy import HostPolicy
from torchtuned.hotplug import Batch, Hotplug
from torchtuned.jobs import Jobs
from torchtuned.leases import Leases
from torchtuned.ledger import Ledger
from torchtuned.logind import Desktop
from torchtuned.manager import Manager
from torchtuned.newcomers import Newcomers
from torchtuned.notify import Notifier, kept
from torchtuned.policy import Outcome, Row
from torchtuned.polkit import Polkit
from torchtuned.reports.keeper import Reports
from torchtuned.reports.store import FOLDER, Store
from torchtuned.systemd1 import Systemd
from torchtuned.tasks import Tasks
from torchtuned.topology import Topology
from torchtuned.tunables.owners import BUS_NAMES, PPD, UNITS
from torchtuned.wording import count

log = logging.getLogger("torchtuned")

INHIBITOR = "inhibitor"  # its name in systemd's FD store; other names there are those of knobs
STATUS_S = 0.1
IDLE_S = 1.0  # without a job until what is meant for jobs is given back


class Daemon:
    """One run of torchtunedd. `held` are the descriptors that systemd kept for us, by name."""

    def __init__(
        self, host: Host, bus: Bus, notifier: Notifier, *, run_dir: Path, state_dir: Path, held: dict[str, int]
    ) -> None:
        self.host, self.bus, self.notifier = host, bus, notifier
        self.gpus = Gpus(host)
        self.systemd = Systemd(bus)
        self.api = Api(bus, Polkit(bus))
        self.desktop = Desktop(
            bus,
            kept=held.pop(INHIBITOR, None),
            keep=partial(notifier.keep, INHIBITOR),
            forget=partial(notifier.forget, INHIBITOR),
        )
        ledger = Ledger(run_dir / "ledger.json")
        self.engine = Engine(host, ledger, on_hold=notifier.keep, on_release=notifier.forget)
        for knob, fd in held.items():
            self.engine.adopt(knob, fd)
        choice = state_dir / "profile"
        self.policy = HostPolicy(
            self.engine,
            read=partial(read_config, host, chosen="/" + os.path.relpath(choice, host.root)),
            choice=choice,
            tuners=self._tuners,
        )
        self.policy.beside = self.desktop.rows
        self.reports = Reports(host, Store(state_dir / FOLDER), self.api, self.gpus.sample, self._findings)
        self.manager = Manager(
            host,
            Jobs(run_dir / "jobs.json"),
            self.policy,
            self.systemd,
            self.reports,
            lent=Leases(host, self.gpus),
            jobs_active=self._jobs_active,
        )
        self.api.host_checks = HostChecks(
            host,
            self.gpus,
            jobs=lambda: self.manager.jobs,
            ours=lambda: self.engine.ledger.entries,
            watch=lambda: self.policy.config.gpu.watch,
        )
        self._newcomers = Newcomers(host, self.gpus, self.policy, self._survey)
        self._hotplug: Hotplug | None = None
        self._watched: tuple[tuple[str, str], ...] = ()
        self._surveying = asyncio.Lock()
        self._tasks = Tasks()
        self._status: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Until SIGTERM (exit status 0) or the loss of the bus (1). Raises what keeps the daemon from starting."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._tasks.spawn(self._reload()))
        await self.systemd.start(self.manager.scope_ended)
        await self.policy.start()
        self.manager.topology = await asyncio.to_thread(self._read_topology)
        self.api.start(self.manager, self.policy, self.reports, changed=self._tell_status)
        await self.reports.load()
        await self.manager.adopt()
        self.reports.recover()
        self.api.serve()
        await self.bus.request_name(NAME)
        self.notifier.send("READY=1")
        log.info("torchtunedd %s is on the bus", __version__)
        self._tasks.spawn(self._tune())
        lost = asyncio.ensure_future(self.bus.closed())
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((lost, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if lost.done():
            log.error("%s", lost.result())
            await self._end(give_back=False)
            return 1
        lost.cancel()
        why = await self.systemd.own_job()
        self.notifier.send(f"STOPPING=1\nSTATUS=Ending ({why or 'killed'})")
        await self._end(give_back=why in ("stop", ""))  # killed by hand, nobody comes after us either
        return 0

    async def _end(self, *, give_back: bool) -> None:
        if self._hotplug is not None:
            self._hotplug.stop()
        for timer in (self._status, self._idle):
            if timer is not None:
                timer.cancel()
        await self._tasks.close()
        for part in (self.manager.close, self.reports.close):
            try:
                await part()
            except Exception:  # no fault of theirs keeps the machine from its values
                log.exception("unexpected")
        await self.policy.stop(give_back=give_back)
        await self.desktop.close()
        await self.bus.close()

    # -- the machine -------------------------------------------------------------------------------------------------

    async def _tune(self) -> None:
        """What comes after the name: the policy, then what only drivers know, then following the machine."""
        try:
            await self._follow_tuners()
            await self.policy.apply()
        except TorchtunedError as e:
            log.error("the policy could not be applied: %s", e)
            self.policy.failed_to_start(e)
        except Exception:
            log.exception("the policy could not be applied")
            self.policy.failed_to_start(None)
        self.policy.reconfigured = lambda: self._tasks.spawn(self._reconfigure())
        self.policy.touched = self._touched
        if self.host.real:
            await self.desktop.follow_sleep(lambda: self._tasks.spawn(self._newcomers.woke()))
        await self._reconfigure()

    async def _reconfigure(self) -> None:
        """Follow what the configuration says of the machine itself: which devices count, how jobs are placed."""
        watch = self.policy.config.gpu.watch
        if self.host.real and (self._hotplug is None or watch != self._watched):
            self._watched = watch
            self._follow_machine()
        await self._survey()

    def _touched(self, rows: Sequence[Row]) -> None:
        """Look at the GPUs again after their knobs were written."""
        if any(row.knob.startswith("gpu/") and row.outcome is Outcome.APPLIED for row in rows):
            self._tasks.spawn(self._survey())

    async def _follow_tuners(self) -> None:
        self.systemd.follow_units(UNITS, self._tuner_moved)
        for name, unit in BUS_NAMES.items():
            await self.bus.follow(name, partial(self._owner_moved, unit))

    def _tuner_moved(self, unit: str) -> None:
        self._tasks.spawn(self._newcomers.tuner_moved(unit))

    def _owner_moved(self, unit: str, _owner: str) -> None:
        self._tuner_moved(unit)
        if unit == PPD:
            self.desktop.profiles_moved()

    def _follow_machine(self) -> None:
        if self._hotplug is not None:
            self._hotplug.stop()
        self._hotplug = Hotplug(self.host, self._hotplugged, watch=self._watched)
        try:
            self._hotplug.start()
        except OSError as e:
            self.policy.fault("hotplug", f"devices that come and go are not seen: {e.strerror}")

    def _hotplugged(self, batch: Batch) -> None:
        self._tasks.spawn(self._newcomers.changed(batch))

    async def _survey(self, *, cpus_moved: bool = False) -> None:
        async with self._surveying:
            topology = await asyncio.to_thread(self._read_topology, drivers=True)
            samples = await asyncio.to_thread(self.gpus.sample)
            self.manager.topology_changed(topology, cpus_moved=cpus_moved)
            self.api.gpus_changed(topology, samples)

    def _read_topology(self, *, drivers: bool = False) -> Topology:
        """Without `drivers` NVML is not asked: it may take seconds."""
        facts = self.gpus.facts() if drivers else {}
        return discover.topology(self.host, gpus=facts, watch=self.policy.config.gpu.watch)

    async def _findings(self) -> list[Finding]:
        found, _ = await self.api.host_checks.look()
        return found

    async def _tuners(self) -> frozenset[str]:
        """The units of other tuners that run, also of those that were started by hand."""
        owners = {unit for name, unit in BUS_NAMES.items() if self.bus.owner(name)}
        try:
            return await self.systemd.active(UNITS) | owners
        except CallFailed as e:
            if not e.absent:
                log.warning("systemd does not say which other tuners run: %s", e)
            return frozenset(owners)

    def _jobs_active(self, active: bool) -> None:  # noqa: FBT001
        """Set knobs and holds for jobs at once, and give them back a moment after the last job: the next may come."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if active:
            self._set_active(active=True)
        else:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, partial(self._set_active, active=False))

    def _set_active(self, *, active: bool) -> None:
        self.policy.jobs(active=active)
        self.desktop.jobs(active=active, wishes=self.policy.config.session)

    # -- what systemd is told ----------------------------------------------------------------------------------------

    async def _reload(self) -> None:
        self.notifier.send("RELOADING=1")
        try:
            await self.policy.reload()
        except TorchtunedError as e:
            log.error("the configuration stays as it was:\n%s", e)
        finally:
            self.notifier.send("READY=1")

    def _tell_status(self) -> None:
        if self._status is None:
            self._status = asyncio.get_running_loop().call_later(STATUS_S, self._send_status)

    def _send_status(self) -> None:
        self._status = None
        jobs = len(self.manager.jobs)
        text = f"{self.policy.state}, profile {self.policy.config.profile}, {count(jobs, 'job')}"
        reasons = "; ".join(self.policy.degraded).splitlines()
        self.notifier.status(text + (f": {reasons[0]}" if reasons else ""))


def _log_to(stream: Any) -> None:
    """The journal with its levels and fields when stderr goes there, plain lines elsewhere."""
    handler: logging.Handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    with contextlib.suppress(OSError):
        status = os.fstat(stream.fileno())
        if os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}":
            handler = journal.JournalHandler(SYSLOG_IDENTIFIER="torchtunedd")
            handler.setFormatter(logging.Formatter("%(message)s"))  # the level is a field of its own there
    logging.basicConfig(level=logging.INFO, handlers=[handler])


async def _main(options: argparse.Namespace) -> int:
    host = Host(options.sysroot)
    run_dir = options.run_dir or host.root / "run/torchtuned"
    state_dir = options.state_dir or host.root / "var/lib/torchtuned"
    try:
        run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as e:
        raise Failed("a file is in the way of this folder", where=str(run_dir), hint="move the file away") from e
    bus = await Bus.connect()
    notifier = Notifier()
    try:
        return await Daemon(host, bus, notifier, run_dir=run_dir, state_dir=state_dir, held=kept()).run()
    finally:
        notifier.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="torchtunedd", description="Tunes this machine; see torchtuned(8)")
    parser.add_argument("--sysroot", default="/", metavar="DIR", help="the folder that stands for the machine")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="instead of /run/torchtuned")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="instead of /var/lib/torchtuned")
    parser.add_argument("--version", action="version", version=f"torchtunedd {__version__}")
    options = parser.parse_args(arguments)
    _log_to(sys.stderr)
    try:
        return asyncio.run(_main(options))
    except TorchtunedError as e:
        log.error("%s", e)
    except OSError as e:
        log.error("%s: %s", e.filename, e.strerror)
    return 1


if __name__ == "__main__":
    sys.exit(main())
