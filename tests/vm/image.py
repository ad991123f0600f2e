"""Builds the disks of the emulated machines: a whole Debian with systemd, once per suite and recipe.

The machines have no network, so what torchtuned depends on is in the image, and torchtuned itself is not: installing
it is the first test. Other tuners lie in it as packages, for the tests that install them beside it. alice and bob are
the two users who run jobs; ssh to localhost gives them real login sessions.

Needs, from Debian: mmdebstrap e2fsprogs openssh-client. Run as root. A build takes about 2 minutes on two cores.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CACHE = Path(os.environ.get("TORCHTUNED_CACHE", "/var/cache/torchtuned-tests"))
SUITES = ("bookworm", "trixie")
USERS = ("alice", "bob")
PACKAGES = (
    "linux-image-amd64 systemd systemd-sysv dbus udev kmod polkitd python3 iproute2 procps initramfs-tools pciutils "
    "numactl util-linux linux-cpupower bash-completion man-db libpam-systemd dbus-user-session sudo openssh-server "
    "openssh-client python3-dbus-next python3-psutil python3-pyudev python3-rich python3-systemd"
)
NEIGHBOURS = ("tuned", "power-profiles-daemon", "irqbalance", "tlp")
SHELF = "srv/neighbours"  # a folder each, with all that it depends on: apt-get install /srv/neighbours/tuned/*.deb
FETCH = f"""set -e
for name in {" ".join(NEIGHBOURS)}; do
  mkdir -p "$1/{SHELF}/$name/partial"
  APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" apt-get -qq -y --no-install-recommends --download-only \\
    -o Dir::Cache::archives="$1/{SHELF}/$name" install "$name"
done
"""

AGENT = """#!/bin/bash
exec 3<>/dev/virtio-ports/testbed
echo ready >&3
while read -r n <&3; do
  (cd /root; exec bash /mnt/testbed/.cmd-$n) </dev/null >/mnt/testbed/.out-$n 2>&1
  echo "$n $?" >&3
done
"""
AGENT_UNIT = """[Unit]
Description=Runs the host's commands
RequiresMountsFor=/mnt/testbed
After=multi-user.target dbus.service
[Service]
ExecStart=/usr/local/sbin/testbed-agent
KillMode=process
[Install]
WantedBy=multi-user.target
"""
AUTOLOGIN = "[Service]\nExecStart=\nExecStart=-/sbin/agetty --autologin root --noclear %I 115200 linux\n"
FSTAB = """/dev/vda / ext4 defaults 0 1
testbed /mnt/testbed 9p trans=virtio,version=9p2000.L,cache=none 0 0
"""
MODULES = "acpi-cpufreq\n9pnet_virtio\n9p\n"


def build(suite: str) -> Path:
    """Return the folder with disk.img, vmlinuz and initrd for this suite, building it if it is not cached."""
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    out = CACHE / f"{suite}-{recipe}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{suite}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / "disk.img").exists():
            print(f"# building the {suite} machine (about 2 minutes)", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                _build(suite, Path(scratch), out)
    return out


def _build(suite: str, scratch: Path, out: Path) -> None:
    root, parts = scratch / "root", scratch / "image"
    parts.mkdir()
    subprocess.run(
        [
            *("mmdebstrap", "--quiet", "--variant=minbase", "--components=main"),
            *(f"--include={PACKAGES}", f"--customize-hook={FETCH}", suite, root),
        ],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    (root / "etc/fstab").write_text(FSTAB)
    (root / "mnt/testbed").mkdir()
    (root / "etc/hostname").write_text("testbed\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost testbed\n")
    (root / "etc/modules-load.d/testbed.conf").write_text(MODULES)
    agent = root / "usr/local/sbin/testbed-agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    units = root / "etc/systemd/system"
    (units / "testbed-agent.service").write_text(AGENT_UNIT)
    (units / "multi-user.target.wants").mkdir(exist_ok=True)
    (units / "multi-user.target.wants/testbed-agent.service").symlink_to("../testbed-agent.service")
    (units / "serial-getty@ttyS0.service.d").mkdir()
    (units / "serial-getty@ttyS0.service.d/autologin.conf").write_text(AUTOLOGIN)
    shadow = root / "etc/shadow"
    shadow.write_text(re.sub(r"^root:[^:]*:", "root::", shadow.read_text(), flags=re.M))
    _users(root)
    for name in ("vmlinuz", "initrd"):
        newest = sorted((root / "boot").glob(name + "*"))[-1]
        shutil.copy(newest, parts / name)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", root, parts / "disk.img", "8G"], check=True)
    if out.exists():
        shutil.rmtree(out)
    os.rename(parts, out)


def _users(root: Path) -> None:
    """Make the users; root may log in as each of them by key, and they may become root by sudo."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", root / "root/.ssh-key"], check=True)
    for user in USERS:
        subprocess.run(["chroot", root, "useradd", "--create-home", "--shell", "/bin/bash", user], check=True)
        ssh = root / "home" / user / ".ssh"
        ssh.mkdir(mode=0o700)
        shutil.copy(root / "root/.ssh-key.pub", ssh / "authorized_keys")
        subprocess.run(["chroot", root, "chown", "-R", f"{user}:{user}", f"/home/{user}/.ssh"], check=True)
    (root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
    (root / "root/.ssh/config").write_text(
        "Host localhost\n  IdentityFile /root/.ssh-key\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
        "  LogLevel ERROR\n"
    )
    sudoers = root / "etc/sudoers.d/testbed"
    sudoers.write_text("".join(f"{user} ALL=(ALL) NOPASSWD: ALL\n" for user in USERS))
    sudoers.chmod(0o440)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or SUITES:
        print(build(wanted))
