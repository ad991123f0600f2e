"""A private bus, the real daemon on it, fake services beside it, and real processes that do as a test tells them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes.tree import machine, make_tree

from torchtuned.bus import Bus

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
POLICY = REPOSITORY / "share/dbus-1/system.d/org.torchtuned1.conf"
FAKES = REPOSITORY / "tests/fakes"
USER, OTHER = pwd.getpwnam("nobody").pw_uid, pwd.getpwnam("daemon").pw_uid  # the bus takes only users that exist
Request = dict[str, Any] | str | None
MANAGER = "org.torchtuned1.Manager"
JOB = "org.torchtuned1.Job"
GPU = "org.torchtuned1.Gpu"
ROOT = "/org/torchtuned1"
PROPERTIES = "org.freedesktop.DBus.Properties"
CONFIG = """\
<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/>
    <deny own="*"/>
    <deny send_type="method_call"/>
    <allow send_type="signal"/>
    <allow send_requested_reply="true" send_type="method_return"/>
    <allow send_requested_reply="true" send_type="error"/>
    <allow receive_type="method_call"/>
    <allow receive_type="method_return"/>
    <allow receive_type="error"/>
    <allow receive_type="signal"/>
    <allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus"/>
    <allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus.Introspectable"/>
    <allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus.Properties"/>
    <allow send_destination="org.freedesktop.login1" send_interface="org.freedesktop.login1.Manager"
           send_member="SetUserLinger"/>
  </policy>
  <policy user="root">
    <allow own_prefix="org.freedesktop"/>
    <allow own_prefix="net.hadess"/>
    <allow own="com.redhat.tuned"/>
    <allow send_destination_prefix="org.freedesktop"/>
    <allow send_destination="net.hadess.PowerProfiles"/>
    <allow send_interface="org.torchtuned1.Test"/>
  </policy>
  <include>{policy}</include>
</busconfig>
"""


HAND_OVER = """\
import os, sys
fds = [os.dup(int(fd)) for fd in sys.argv[1].split(",")]
for i, fd in enumerate(fds):
    os.dup2(fd, 3 + i)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2], sys.argv[2:])
"""
PROFILE = """\
[cpu]
governor = performance
[sysctl]
vm.swappiness = 10
net.core.somaxconn = >=4096
kernel.numa_balancing = 0 @jobs
"""


def small_machine(folder: Path, *, session: str = "/user.slice/user-1000.slice/session-3.scope") -> Path:
    """Two nodes of four CPUs, two GPUs, two cpufreq policies, a login session in a unified hierarchy, kernel 6.12, and
    profiles `training` (sets something) and `observe`."""
    files: dict[str, str | bytes | None] = {
        **machine(
            cores=[str(cpu) for cpu in range(8)],
            packages=["0-3", "4-7"],
            nodes={0: "0-3", 1: "4-7"},
            gpus={
                "0000:01:00.0": {"vendor": "0x10de", "device": "0x2330", "class": "0x030200", "numa_node": "0"},
                "0000:81:00.0": {"vendor": "0x10de", "device": "0x2330", "class": "0x030200", "numa_node": "1"},
            },
        ),
        "proc/self/cgroup": f"0::{session}\n",
        "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
        "proc/sys/kernel/osrelease": "6.12.0-1-amd64\n",
        "proc/sys/kernel/numa_balancing": "1\n",
        "proc/sys/vm/swappiness": "60\n",
        "proc/sys/net/core/somaxconn": "128\n",
        "sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n",
        f"sys/fs/cgroup{session}/memory.max": "max\n",
        f"sys/fs/cgroup{session}/pids.max": "max\n",
        "usr/share/torchtuned/profiles/training.conf": PROFILE,
        "usr/share/torchtuned/profiles/observe.conf": "[policy]\ndescription = changes nothing\n",
    }
    for number, governor in enumerate(("powersave", "schedutil")):
        policy = f"sys/devices/system/cpu/cpufreq/policy{number}"
        files |= {
            f"{policy}/scaling_governor": f"{governor}\n",
            f"{policy}/scaling_available_governors": "performance powersave schedutil\n",
            f"{policy}/scaling_driver": "acpi-cpufreq\n",
            f"{policy}/affected_cpus": f"{number * 4}\n",
        }
    return make_tree(folder / "machine", files)


def run(work: Any) -> Any:
    """Play a coroutine in a loop of its own, and leave no task behind."""

    async def whole() -> Any:
        result = await work
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"
        return result

    return asyncio.run(whole())


class PrivateBus:
    """A dbus-daemon of system type with the packaged policy, in a folder that every user can reach."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"unix:path={folder}/bus"
        self.environment = {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": self.address, "PYTHONPATH": str(REPOSITORY)}
        self.environment.pop("JOURNAL_STREAM", None)
        config = folder / "bus.conf"
        config.write_text(CONFIG.format(socket=folder / "bus", policy=POLICY))
        command = ["dbus-daemon", f"--config-file={config}", "--nofork", "--nopidfile", "--print-address=1"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=(folder / "bus.log").open("wb"))
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), (folder / "bus.log").read_text()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    async def connect(self) -> Bus:
        return await Bus.connect(self.address)

    def call(self, path: str, interface: str, member: str, signature: str = "", *body: Any, to: str = "") -> list[Any]:
        """One call as root, from a connection of its own."""

        async def once() -> list[Any]:
            bus = await self.connect()
            try:
                return await bus.call(to or "org.torchtuned1", path, interface, member, signature, list(body))
            finally:
                await bus.close()

        return list(run(once()))

    def get(self, path: str, interface: str, name: str) -> Any:
        return self.call(path, PROPERTIES, "Get", "ss", interface, name)[0]

    def managed(self) -> dict[str, Any]:
        found: dict[str, Any] = self.call(ROOT, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects")[0]
        return found

    def user(self, uid: int = 0) -> Puppet:
        return Puppet(self, uid)


class Service:
    """A fake service beside the bus, steered through org.torchtuned1.Test."""

    def __init__(self, bus: PrivateBus, name: str, *command: str) -> None:
        self.bus, self.name = bus, name
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, env=bus.environment, cwd=REPOSITORY
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def set(self, key: str, value: Any) -> None:
        self.bus.call("/test", "org.torchtuned1.Test", "Set", "ss", key, json.dumps(value), to=self.name)

    def get(self, key: str) -> Any:
        return json.loads(self.bus.call("/test", "org.torchtuned1.Test", "Get", "s", key, to=self.name)[0])

    def call_remove(self, scope: str) -> None:
        """Of PID 1: the last process of a scope has left it."""
        self.bus.call("/test", "org.torchtuned1.Test", "Remove", "s", scope, to=self.name)

    def calls(self, member: str) -> list[Any]:
        return [arguments for name, arguments in self.get("calls") if name == member]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Puppet:
    """A process of some user that does as it is told (puppet.py); its own pidfd is what it registers."""

    def __init__(self, bus: PrivateBus, uid: int) -> None:
        command = [sys.executable, "-I", str(HERE / "puppet.py"), str(REPOSITORY)]
        if uid:
            command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *command]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=bus.environment, text=True
        )
        self.pid = self.do("pid")

    def __enter__(self) -> Puppet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def do(self, what: str, *arguments: Any) -> Any:
        """Have it do one thing and return the answer; errors of the bus are raised as RuntimeError("NAME: text")."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def register(self, request: Request = None, pid: int | None = None) -> tuple[str, dict[str, Any]]:
        text = request if isinstance(request, str) else json.dumps({"schema": 1, **(request or {})})
        path, grant = self.do("register", pid or self.pid, text)
        return path, json.loads(grant)

    def commit(self, path: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.do("call", ROOT, MANAGER, "Commit", "o", path)[0])
        return document

    def start(self, request: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """What torchtuned-run does: register, confine itself, commit."""
        path, grant = self.register(request)
        if grant["confinement"] == "affinity":
            self.do("pin", grant["cpus"])
        return path, self.commit(path)

    def release(self, path: str) -> None:
        self.do("call", ROOT, MANAGER, "Release", "o", path)

    def kill(self) -> None:
        """SIGKILL, reaped; its children of `fork` too."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


class Daemon:
    """torchtunedd on a private bus. `ready` and `status` come through its NOTIFY_SOCKET, as systemd has them."""

    def __init__(self, bus: PrivateBus, *arguments: str, keep: Mapping[str, int] | None = None) -> None:
        self.bus, self.folder = bus, bus.folder
        self.run_dir, self.state_dir = bus.folder / "run", bus.folder / "state"
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.settimeout(20)
        name = str(bus.folder / f"notify-{len(list(bus.folder.iterdir()))}")
        self.notify.bind(name)
        self.log = bus.folder / "daemon.log"
        self.kept: dict[str, int] = {}
        self.said: list[str] = []
        keep, extra = keep or {}, {"NOTIFY_SOCKET": name}
        command = [sys.executable, "-m", "torchtuned.daemon", f"--run-dir={self.run_dir}"]
        if keep:  # as PID 1 hands them over: from descriptor 3 on, for this very process
            command = [sys.executable, "-c", HAND_OVER, ",".join(map(str, keep.values())), *command]
            extra |= {"LISTEN_FDS": str(len(keep)), "LISTEN_FDNAMES": ":".join(keep)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, f"--state-dir={self.state_dir}", *arguments],
                env={**bus.environment, **extra},
                pass_fds=list(keep.values()),
                stderr=log,
                umask=0o077,  # as the unit has it
            )

    def wait_for(self, text: str) -> str:
        """The next notification that holds `text`."""
        while True:
            if self.process.poll() is not None:
                pytest.fail(f"torchtunedd ended with {self.process.returncode}:\n{self.log.read_text()}")
            message = self._receive()
            if text in message:
                return message

    def _receive(self) -> str:
        data, fds, _, _ = socket.recv_fds(self.notify, 4096, 4)
        message = data.decode()
        self.said.append(message)
        fields = dict(line.split("=", 1) for line in message.splitlines())
        for fd in fds:
            self.kept[fields.get("FDNAME", "")] = fd
        if "FDSTOREREMOVE" in fields and fields["FDNAME"] in self.kept:
            os.close(self.kept.pop(fields["FDNAME"]))
        return message

    def drain(self) -> list[str]:
        """All notifications that have arrived."""
        self.notify.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._receive()
        self.notify.settimeout(20)
        return self.said

    def stop(self, how: int = signal.SIGTERM) -> int:
        """End it, and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"torchtunedd did not end:\n{self.log.read_text()}")
        finally:
            self.close()

    def close(self) -> None:
        """Take the last notifications and let go of what systemd would keep."""
        with contextlib.suppress(OSError):
            self.drain()
        self.notify.close()
        for fd in self.kept.values():
            os.close(fd)
        self.kept.clear()
