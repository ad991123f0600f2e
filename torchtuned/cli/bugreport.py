"""`torchtuned bug-report`: a tarball of what torchtuned sees here, made private, that `--sysroot` replays."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime

from torchtuned import __version__, discover
from torchtuned.bugreport import KERNEL, Recorder
from torchtuned.checks import Machine, cudastart, driver, run_checks, xid
from torchtuned.cli.command import FINE, note
from torchtuned.cli.machine import host_of, sysroot_option, watched
from torchtuned.cli.policy import local_ledger, row_document, tuners_of
from torchtuned.configfiles import read_config
from torchtuned.cpulimits import cpuset_of_folder
from torchtuned.engine import Engine
from torchtuned.errors import HostError, InvalidRequest, TorchtunedError
from torchtuned.gpus import Gpus
from torchtuned.placement.documents import topology_document
from torchtuned.wording import count

DOCUMENTS = "/.torchtuned"


def bug_report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", metavar="FILE", help="where to write it; default: torchtuned-DATE.tar.gz here")
    sysroot_option(parser)


def bug_report(args: argparse.Namespace) -> int:
    host = Recorder(host_of(args).root)
    made = datetime.now(tz=UTC)
    top = f"torchtuned-{made:%Y%m%d-%H%M%S}"
    output = args.output or f"{top}.tar.gz"
    host.add(f"{DOCUMENTS}/version", f"torchtuned {__version__}\n")
    gpus = Gpus(host)
    looks: dict[str, Callable[[], object]] = {
        "topology": lambda: topology_document(discover.topology(host, gpus=gpus.facts(), watch=watched(host))),
        "check": lambda: _check(host, gpus),
        "plan": lambda: _plan(host),
        "allowed": lambda: [sorted(found or ()) for found in cpuset_of_folder(host)],
    }
    for name, look in looks.items():
        try:
            host.add(f"{DOCUMENTS}/{name}.json", json.dumps(look(), indent=1) + "\n")
        except TorchtunedError as error:
            host.add(f"{DOCUMENTS}/{name}.error", f"{error}\n")
    _keep_module_version(host)
    _keep_cuda(host, gpus)
    try:
        host.add(xid.LOG, "".join(f"{line}\n" for line in xid.kernel_lines(host) if KERNEL.search(line)))
    except TorchtunedError as error:
        host.add(f"{DOCUMENTS}/log.error", f"{error}\n")
    try:
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise InvalidRequest("the file is there already", where=f"--output {output}") from None
    try:
        with open(fd, "wb") as file:
            written = host.write_bundle(file, top=top)
    except BaseException:  # a full disk, Ctrl-C: a part of it is of no use, and in the way of the next
        os.unlink(output)
        raise
    print(f"{output}: {count(written, 'file')}. Look through it before you pass it on: tar tzf {output}")
    print(f"It is replayed by: tar xzf {output} && torchtuned check --sysroot {top}")
    if host.unreadable:
        left_out = count(len(host.unreadable), "file")
        note(f"for root only and left out: {left_out}; sudo torchtuned bug-report has all")
    return FINE


def _keep_module_version(host: Recorder) -> None:
    """The module on disk is too large for a bundle, and its version is all that anybody looks for in it."""
    try:
        kernel = host.read("/proc/sys/kernel/osrelease")
        version = driver.module_version(host, kernel)
        for path in driver.modules(host, kernel):
            if version and path.endswith(".ko"):
                host.add(path, f"\0version={version}\0")
    except HostError:
        pass  # no module, or no kernel that tells its name


def _keep_cuda(host: Recorder, gpus: Gpus) -> None:
    """How CUDA starts here, where it can be tried without a change to anything."""
    machine = Machine(host, gpus)
    if host.real and cudastart.startable(machine) and not cudastart.sleeping(machine):
        host.add(cudastart.RESULT, cudastart.start(host).text)


def _check(host: Recorder, gpus: Gpus) -> object:
    findings, unchecked = run_checks(host, gpus, watch=watched(host))
    return {
        "findings": [finding.document() for finding in findings],
        "unchecked": [item.document() for item in unchecked],
    }


def _plan(host: Recorder) -> object:
    rows = Engine(host, local_ledger(host)).plan(read_config(host), tuners=tuners_of(host))
    return [row_document(row) for row in rows]
