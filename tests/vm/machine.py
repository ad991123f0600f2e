"""A whole Debian machine to try the package on: systemd, NUMA, cpufreq, PCI hotplug.

QEMU emulates it in software (no KVM, no GPU, no network), so it runs anywhere: several NUMA nodes, a real acpi-cpufreq
driver, a mains adapter and a battery (all out of ACPI tables made for it), cgroup v2 under a real systemd, and on any
NUMA node display controllers with AMD's vendor number, which is all that a GPU is to discovery. No driver binds to
them; they come and go through sysfs, and other display devices can be plugged into, and pulled from, a root port while
the machine runs.

    with Machine(image.build("bookworm")) as machine:
        machine.put("dist/torchtuned.deb")          # appears as /mnt/testbed/torchtuned.deb
        machine.check("apt-get install -y /mnt/testbed/torchtuned.deb")
        machine.login("alice", "torchtuned-run python3 train.py")
        machine.power_cut(); machine.boot()         # the disk keeps what had reached it

    machine.py [--suite S] [--deb X.deb ...] run SCRIPT     # a bash script as root
    machine.py [--suite S] [--deb X.deb ...] shell          # a root shell on the serial console (needs socat)

Needs, from Debian: qemu-system-x86 qemu-utils acpica-tools, and what image.py needs. A boot takes about a minute.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import image
from acpi import tables

SHARE = "/mnt/testbed"
HANG_S = 60  # a machine that has had no sign of life for this long after a command's time is up stands still


class MachineError(Exception):
    """The machine itself, not what runs in it, did not do what it should."""


class MachineHangs(MachineError):
    """The whole emulated machine is gone or stands still: its kernel ended, or its own clock ends no command.

    A test that meets this says nothing about the package.
    """


class Machine:
    """One emulated machine. Its disk is a throw-away overlay that survives power_cut()."""

    def __init__(
        self,
        base: Path,
        *,
        nodes: int = 4,
        cpus_per_node: int = 2,
        gpus: Sequence[int] = (),
        node_mib: int = 768,
        cpufreq: bool = True,
        boot_timeout_s: float = 300,
    ) -> None:
        """gpus: the node of each GPU, one a node at most, free to change between boots; node_mib: MiB of each."""
        self.base, self.nodes, self.cpus_per_node, self.gpus = base, nodes, cpus_per_node, gpus
        self.node_mib, self.cpufreq, self.boot_timeout_s = node_mib, cpufreq, boot_timeout_s
        self.dir = Path(tempfile.mkdtemp(prefix="torchtuned-vm-"))
        self.share = self.dir / "share"
        self.share.mkdir()
        self.disk = self.dir / "disk.qcow2"
        self._process: subprocess.Popen[bytes] | None = None
        self._agent: socket.socket | None = None
        self._count = 0
        self.stands_still = False
        subprocess.run(
            ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", base / "disk.img", self.disk], check=True
        )

    def __enter__(self) -> Machine:
        try:
            self.boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the machine and forget its disk."""
        self.power_cut()
        shutil.rmtree(self.dir, ignore_errors=True)

    def boot(self) -> float:
        """Start the machine and wait until its agent answers; returns the seconds that took.

        One that stands still is started once more: that is the emulator's doing and none of the package's.
        """
        start = time.monotonic()
        try:
            self._start()
        except MachineHangs as error:
            print(f"# {self.base.name}, starting it once more: {error}", file=sys.stderr, flush=True)
            self.power_cut()
            self._start()
        seconds = time.monotonic() - start
        print(f"# {self.base.name} up after {seconds:.0f} s", file=sys.stderr, flush=True)
        return seconds

    def _start(self) -> None:
        with open(self.dir / "qemu.log", "w") as log:
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log
            )
        self._agent = self._connect("agent")
        if self._answer(self.boot_timeout_s) != "ready":
            raise MachineError("the machine did not come up: " + (self.dir / "qemu.log").read_text())

    def power_cut(self) -> None:
        """Pull the plug: what the guest had not yet written is lost."""
        self.stands_still = False
        if self._agent:
            self._agent.close()
            self._agent = None
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def reboot(self, timeout_s: float = 300) -> float:
        """Reboot in an orderly way; returns the seconds from start to agent, as boot() does."""
        self.check("systemctl --no-block reboot")
        if not self._process:
            raise MachineError("the machine is off")
        self._process.wait(timeout_s)
        self.power_cut()
        return self.boot()

    def put(self, *files: Path) -> None:
        """Show files in the machine, under /mnt/testbed."""
        for file in files:
            shutil.copy(file, self.share / file.name)

    def sh(self, script: str, timeout_s: float = 300) -> tuple[int, str]:
        """Run a bash script as root in the machine; returns its exit status and its output (both streams).

        The machine itself ends a script that takes longer (status 124), so silence after that is the machine's.
        """
        if not self._agent:
            raise MachineError("the machine is off")
        self._count += 1
        number = self._count
        (self.share / f".script-{number}").write_text(script + "\n")
        (self.share / f".cmd-{number}").write_text(
            f"exec timeout --kill-after=5 {timeout_s} bash {SHARE}/.script-{number}\n"
        )
        self._agent.sendall(f"{number}\n".encode())
        answer = self._answer(timeout_s + HANG_S).split()
        if answer[0] != str(number):
            raise MachineError(f"out of step: {answer} for command {number}")
        return int(answer[1]), (self.share / f".out-{number}").read_text(errors="replace")

    def check(self, script: str, timeout_s: float = 300) -> str:
        """Run a script that must succeed; returns its output."""
        status, output = self.sh(script, timeout_s)
        if status:
            raise AssertionError(f"exit {status} from: {script}\n{output}")
        return output

    def login(self, user: str, script: str, timeout_s: float = 300) -> str:
        """Run a script that must succeed in a new login session of a user (its own session-N.scope)."""
        return self.check(f"ssh {user}@localhost {shlex.quote(script)}", timeout_s)

    def plug(self, name: str, *, node: int) -> None:
        """Hot-plug a display controller that is no GPU (PCI class 0380, vendor 1234) into the free port of a node."""
        self._monitor(f"device_add secondary-vga,id={name},bus=slot{node}.0")

    def unplug(self, name: str) -> None:
        """Press the attention button; the guest lets the device go within about 5 s."""
        self._monitor(f"device_del {name}")

    def _monitor(self, command: str) -> str:
        with self._connect("monitor") as link:
            link.settimeout(2)
            link.sendall(command.encode() + b"\n")
            time.sleep(0.5)
            return link.recv(1 << 20).decode(errors="replace")

    def _connect(self, name: str) -> socket.socket:
        link = socket.socket(socket.AF_UNIX)
        deadline = time.monotonic() + 30
        while True:
            try:
                link.connect(str(self.dir / name))
                return link
            except OSError as error:
                if self._process is None or self._process.poll() is not None:
                    raise MachineError("qemu ended: " + (self.dir / "qemu.log").read_text()) from error
                if time.monotonic() > deadline:
                    raise MachineError(f"no socket {name}: {error}") from error
                time.sleep(0.1)

    def _answer(self, timeout_s: float) -> str:
        if not self._agent:
            raise MachineError("the machine is off")
        self._agent.settimeout(timeout_s)
        data = b""
        while not data.endswith(b"\n"):
            try:
                got = self._agent.recv(1)
            except TimeoutError as error:
                self.stands_still = True
                where = re.findall(r"[RE]IP=\w+", self._monitor("info registers -a"))
                raise MachineHangs(f"it stands still; its CPUs are at {' '.join(where)}") from error
            if not got:
                self._gone()
            data += got
        return data.decode().strip()

    def _gone(self) -> NoReturn:
        console = (self.dir / "console.log").read_text(errors="replace")
        last_words = re.search(r"(?:BUG:|Oops:|Kernel panic).*", console)
        if last_words:
            self.stands_still = True
            raise MachineHangs(f"its kernel ended: {last_words[0].strip()}")
        status = self._process.wait(10) if self._process else None
        raise MachineError(f"the machine went away, QEMU with {status}: {(self.dir / 'qemu.log').read_text()}")

    def _command(self) -> list[str]:
        cpus = self.nodes * self.cpus_per_node
        # One host thread takes turns with all emulated CPUs. With a thread for each, QEMU 10 loses timers, and then the
        # machine, when devices come and go, and QEMU before 8.1 sees breakpoints that its kernel has taken back.
        # Tests that are killed take their machines with them.
        line = ["setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", "-machine", "q35"]
        line += ["-accel", "tcg,thread=single"]
        # acpi-cpufreq refuses QEMU's default AMD family 15; this model number is only a label.
        line += ["-cpu", "max,vendor=GenuineIntel,family=6,model=85,stepping=4"]
        line += ["-m", f"{self.nodes * self.node_mib}M", "-smp", f"{cpus},sockets={self.nodes}"]
        line += ["-display", "none", "-vga", "none", "-net", "none", "-no-reboot"]
        for node in range(self.nodes):
            first = node * self.cpus_per_node
            span = f"{first}-{first + self.cpus_per_node - 1}"
            line += ["-object", f"memory-backend-ram,id=m{node},size={self.node_mib}M"]
            line += ["-numa", f"node,nodeid={node},cpus={span},memdev=m{node}"]
            line += ["-device", f"pxb-pcie,id=pxb{node},bus_nr={0x20 * (node + 1)},numa_node={node},bus=pcie.0"]
            for slot in range(2):
                number = node * 16 + slot + 1
                port = f"id=slot{node}.{slot},bus=pxb{node},chassis={number},slot={number}"
                line += ["-device", f"pcie-root-port,{port}"]
        for node in self.gpus:
            line += ["-device", f"ati-vga,bus=slot{node}.1,romfile="]
        if self.cpufreq:
            line += ["-acpitable", f"file={tables(self.dir, cpus)}"]
        line += ["-kernel", str(self.base / "vmlinuz"), "-initrd", str(self.base / "initrd")]
        # Guards against leaks through real caches cost an emulated processor half of its time at boot.
        words = "root=/dev/vda rw console=ttyS0 quiet panic=-1 mitigations=off modprobe.blacklist=amdgpu,radeon"
        line += ["-append", words]
        line += ["-drive", f"file={self.disk},if=none,id=disk,format=qcow2,cache=unsafe"]
        line += ["-device", "virtio-blk-pci,drive=disk,bus=pcie.0"]
        line += ["-fsdev", f"local,id=share,path={self.share},security_model=none"]
        line += ["-device", "virtio-9p-pci,fsdev=share,mount_tag=testbed,bus=pcie.0"]
        line += ["-device", "virtio-serial-pci,bus=pcie.0"]
        line += ["-chardev", f"socket,id=agent,path={self.dir / 'agent'},server=on,wait=off"]
        line += ["-device", "virtserialport,chardev=agent,name=testbed"]
        line += ["-monitor", f"unix:{self.dir / 'monitor'},server=on,wait=off"]
        console = f"path={self.dir / 'console'},server=on,wait=off,logfile={self.dir / 'console.log'}"
        line += ["-chardev", f"socket,id=console,{console}", "-serial", "chardev:console"]
        return line


def main() -> int:
    """Run a script, or a shell, in a fresh machine."""
    parser = argparse.ArgumentParser(description="a fresh emulated machine")
    parser.add_argument("--suite", default="bookworm", choices=image.SUITES)
    parser.add_argument("--deb", action="append", default=[], type=Path)
    parser.add_argument("--no-cpufreq", action="store_true")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("run").add_argument("script", type=Path)
    verbs.add_parser("shell")
    options = parser.parse_args()
    with Machine(image.build(options.suite), cpufreq=not options.no_cpufreq) as machine:
        machine.put(*options.deb)
        for deb in options.deb:
            print(machine.check(f"apt-get install -y {SHARE}/{deb.name}"))
        if options.verb == "shell":
            console = f"UNIX-CONNECT:{machine.dir / 'console'}"
            return subprocess.call(["socat", "STDIO,raw,echo=0,escape=0x1d", console])
        status, output = machine.sh(options.script.read_text(), 3600)
        print(output, end="")
        return status


if __name__ == "__main__":
    sys.exit(main())
