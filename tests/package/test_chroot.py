"""Install, use, upgrade, remove and purge in a fresh Debian without systemd, as in a container."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.deb import with_version

if "TORCHTUNED_DEB" not in os.environ:
    pytest.skip("needs a built package: tests/run package", allow_module_level=True)

TOP = Path(__file__).resolve().parents[2]
DEB = Path(os.environ["TORCHTUNED_DEB"])
SUITE = os.environ["TORCHTUNED_SUITE"]
UNIT_TESTS_NEED = "python3-pytest python3-hypothesis dbus gcc libc6-dev bash-completion man-db procps"
APT = "DEBIAN_FRONTEND=noninteractive apt-get -q -y"


class Chroot:
    """A fresh Debian in a folder; commands see only its own processes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def sh(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a script as root in the chroot; both streams come as stdout."""
        mounts = (
            'cd "$1" && mount -t proc proc proc && mount -t sysfs -o ro sysfs sys && mount -t devpts devpts dev/pts'
            " && cp -a /dev/cpu_dma_latency dev/"
        )
        enter = f'{mounts} && exec chroot "$1" /bin/bash -c "$2"'
        # Tests that are killed take what runs in here with them.
        alone = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"]
        return subprocess.run(
            [*alone, "sh", "-c", enter, "sh", self.root, script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": "/root"},
        )

    def check(self, script: str) -> str:
        """Run a script that must succeed; returns its output."""
        done = self.sh(script)
        assert done.returncode == 0, f"exit {done.returncode} from: {script}\n{done.stdout}"
        return done.stdout

    def files(self) -> set[str]:
        """Return every path but those that apt, dpkg and the C library's caches keep for themselves."""
        own = ("/proc", "/sys", "/dev", "/tmp", "/var/cache", "/var/log", "/var/lib/apt", "/var/lib/dpkg")
        skip = " -o ".join(f"-path {path}" for path in own)
        return set(self.check(f"find / \\( {skip} \\) -prune -o -print").splitlines())


@pytest.fixture(scope="module")
def chroot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chroot]:
    """A minimal chroot of the suite, main alone, with the packages in /debs and nothing installed yet."""
    root = tmp_path_factory.mktemp("chroot") / "root"
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=apt", "--components=main", SUITE, root],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    # How this host reaches its mirror (proxy, certificates) is how the chroot does.
    settings = subprocess.run(["apt-config", "dump", "Acquire"], check=True, capture_output=True, text=True).stdout
    (root / "etc/apt/apt.conf.d/99host").write_text(settings)
    (root / "debs").mkdir()
    shutil.copy(DEB, root / "debs/torchtuned.deb")
    with_version(DEB, "0.0.1", root / "debs/older.deb")
    yield Chroot(root)
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def clean(chroot: Chroot) -> set[str]:
    """The files before torchtuned comes, with everything that it depends on there already."""
    depends = subprocess.run(["dpkg-deb", "-f", DEB, "Depends"], check=True, capture_output=True, text=True).stdout
    chroot.check(f"{APT} update && {APT} install --no-install-recommends {UNIT_TESTS_NEED}")
    chroot.check(f"{APT} satisfy '{depends.strip()}, polkitd'")
    return chroot.files()


@pytest.fixture
def installed(chroot: Chroot, clean: set[str]) -> Chroot:
    """The chroot with the package in it."""
    chroot.check(f"{APT} install --allow-downgrades /debs/torchtuned.deb")
    return chroot


def test_installs_from_main_alone(installed: Chroot) -> None:
    assert installed.check("dpkg-query -W -f '${db:Status-Status}' torchtuned") == "installed"
    assert installed.check("dpkg --verify torchtuned") == ""


def test_the_commands_answer_without_a_daemon(installed: Chroot) -> None:
    topology = json.loads(installed.check("torchtuned topology --json"))
    assert topology["online"]
    status = installed.sh("torchtuned status")
    assert status.returncode == 69, status.stdout
    assert "Traceback" not in status.stdout


def test_a_job_places_itself_and_says_so_in_one_line(installed: Chroot) -> None:
    lines = installed.check("torchtuned-run sh -c 'echo $OMP_NUM_THREADS'").splitlines()
    assert len(lines) == 2, lines
    assert lines[0].startswith("torchtuned-run: ")
    assert int(lines[1]) >= 1


@pytest.mark.parametrize(
    ("words", "status"),
    [("--no-such-option true", 125), ("/etc/passwd", 126), ("no-such-command", 127), ("sh -c 'exit 7'", 7)],
)
def test_exit_statuses_are_those_of_env(installed: Chroot, words: str, status: int) -> None:
    done = installed.sh(f"torchtuned-run {words}")
    assert done.returncode == status, done.stdout
    assert "Traceback" not in done.stdout


if SUITE == "trixie":  # its Python is not the one that all other tests run on

    def test_unit_tests_pass_on_the_installed_package(installed: Chroot) -> None:
        copy = installed.root / "source"
        shutil.copytree(TOP, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "dist", "build"))
        try:
            print(installed.check("cd /source && AUTOPKGTEST_TMP=$(mktemp -d) timeout 1200 sh debian/tests/unit"))
        finally:
            shutil.rmtree(copy)
            (installed.root / "run/systemd/systemd-units-load").unlink(missing_ok=True)  # systemd-analyze's, of a test


def test_upgrade_keeps_the_administrators_configuration(chroot: Chroot, clean: set[str]) -> None:
    chroot.check(f"{APT} install --allow-downgrades /debs/older.deb")
    chroot.check("echo '# mine' >> /etc/torchtuned/torchtuned.conf")
    chroot.check(f"{APT} install /debs/torchtuned.deb")
    assert chroot.check("tail -n 1 /etc/torchtuned/torchtuned.conf") == "# mine\n"


def test_remove_keeps_only_configuration_and_purge_nothing(installed: Chroot, clean: set[str]) -> None:
    installed.check("mkdir -p /var/lib/torchtuned /run/torchtuned && touch /var/lib/torchtuned/profile")
    installed.check(f"{APT} remove torchtuned")
    kept = (
        *("/etc", "/run/torchtuned", "/run/lock/torchtuned-", "/var/lib/torchtuned"),
        "/var/lib/systemd/deb-systemd-helper-enabled",
    )
    assert {path for path in installed.files() - clean if not path.startswith(kept)} == set()
    assert installed.sh("test -e /etc/torchtuned/torchtuned.conf").returncode == 0
    installed.check(f"{APT} purge torchtuned")
    assert installed.files() - clean == set()
    assert clean - installed.files() == set()
