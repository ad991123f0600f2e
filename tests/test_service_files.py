"""The unit and the policies: what they promise, held against the programs that read them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

TOP = Path(__file__).resolve().parents[1]
UNIT = TOP / "systemd/torchtuned.service"
LEFT_OFF = (
    "ProtectKernelTunables", "PrivateDevices", "DeviceAllow", "PrivateNetwork", "PrivateUsers", "ProcSubset",
    "ProtectProc", "User", "CAP_SYS_ADMIN", "CAP_SYS_NICE", "CAP_SYS_RESOURCE",
)  # fmt: skip


def setting(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_exposure_is_at_most_two_and_a_half() -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=25", str(UNIT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Unknown" not in result.stderr


def test_each_protection_left_off_has_its_line() -> None:
    comments = [line for line in UNIT.read_text().splitlines() if line.startswith("#")]
    for name in LEFT_OFF:
        assert any(name in line for line in comments), name
        assert name.startswith("CAP_") or not setting(name)


def test_it_lives_as_the_design_says() -> None:
    assert setting("Type") == ["dbus"]
    assert setting("BusName") == ["org.torchtuned1"]
    assert setting("RuntimeDirectoryPreserve") == ["yes"]
    assert setting("NotifyAccess") == ["main"]
    assert setting("Restart") == ["on-failure"]
    assert int(setting("FileDescriptorStoreMax")[0]) >= 4
    assert not (TOP / "share/dbus-1/system-services").exists()  # nothing is activated


def test_only_register_may_carry_a_descriptor() -> None:
    rules = ElementTree.parse(TOP / "share/dbus-1/system.d/org.torchtuned1.conf").getroot()
    allowed = rules.findall("policy[@context='default']/allow")
    assert {rule.get("max_fds") for rule in allowed if rule.get("send_member") is None} == {"0"}
    assert [(r.get("send_member"), r.get("max_fds")) for r in allowed if r.get("send_member")] == [("Register", "1")]
    owners = [policy.get("user") for policy in rules.findall("policy") if policy.find("allow[@own]") is not None]
    assert owners == ["root"]


def test_polkit_has_an_action_for_each_verb_that_is_asked_about() -> None:
    policy = ElementTree.parse(TOP / "share/polkit-1/actions/org.torchtuned1.policy").getroot()
    ids = {action.get("id", "") for action in policy.findall("action")}
    source = (TOP / "torchtuned/dbusapi.py").read_text()
    assert {f"org.torchtuned1.{verb}" for verb in re.findall(r'_allow\(call, "(\w+)"\)', source)} == ids
    for default in policy.iter("defaults"):
        assert [kind.text for kind in default] == ["auth_admin", "auth_admin", "auth_admin_keep"]
