"""polkit, logind and power-profiles-daemon for tests, on a private bus.

    python tests/fakes/desktop.py ADDRESS polkit|logind|ppd|tuned ...

Prints "ready" when it owns the names. org.torchtuned1.Test.Set(key, JSON) on /test steers it and Get reads: `allowed`
(action ids), `modes` (of inhibitors, that logind knows), `challenge` (answers "challenge"), `hang` (members that are
never answered), `calls` ((member, arguments) so far), `inhibitors` (what is inhibited now), `holds` (power profile
holds).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from dbus_next import Message, MessageType, Variant
from dbus_next.aio import MessageBus

NAMES = {
    "polkit": ["org.freedesktop.PolicyKit1"],
    "logind": ["org.freedesktop.login1"],
    "ppd": ["org.freedesktop.UPower.PowerProfiles", "net.hadess.PowerProfiles"],
    "tuned": ["com.redhat.tuned"],
}
MODES = ["block", "block-weak", "delay"]  # as of systemd 257; before it there was no block-weak
SIGNATURES = {
    "CheckAuthorization": "(sa{sv})sa{ss}us",
    "CancelCheckAuthorization": "s",
    "Inhibit": "ssss",
    "SetUserLinger": "ubb",
    "HoldProfile": "sss",
    "ReleaseProfile": "u",
}


def plain(value: Any) -> Any:
    if isinstance(value, Variant):
        return plain(value.value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


class Desktop:
    def __init__(self, bus: MessageBus) -> None:
        self.bus = bus
        self.knobs: dict[str, Any] = {"allowed": [], "challenge": False, "hang": [], "modes": MODES}
        self.calls: list[Any] = []
        self.inhibitors: dict[int, str] = {}
        self.holds: dict[int, list[str]] = {}
        self.count = 0

    def receive(self, message: Message) -> bool:
        if message.message_type is not MessageType.METHOD_CALL:
            return False
        member, body = message.member, plain(message.body)
        if message.interface == "org.torchtuned1.Test":
            self.test(message)
            return True
        self.calls.append([member, body])
        if member in self.knobs["hang"]:
            return True
        if SIGNATURES.get(member) != message.signature:
            self.bus.send(Message.new_error(message, "org.freedesktop.DBus.Error.UnknownMethod", f"no {member}"))
            return True
        if member in self.knobs.get("refuse", ()):
            self.bus.send(Message.new_error(message, "org.freedesktop.DBus.Error.AccessDenied", "Permission denied"))
            return True
        if member == "Inhibit" and body[3] not in self.knobs["modes"]:
            self.bus.send(Message.new_error(message, "org.freedesktop.DBus.Error.InvalidArgs", f"no mode {body[3]}"))
            return True
        signature, values, fds = getattr(self, member)(*body)
        self.bus.send(Message.new_method_return(message, signature, values, fds)).add_done_callback(
            lambda _: [os.close(fd) for fd in fds]
        )
        return True

    def test(self, message: Message) -> None:
        if message.member == "Set":
            self.knobs[message.body[0]] = json.loads(message.body[1])
            self.bus.send(Message.new_method_return(message))
            return
        values = {**self.knobs, "calls": self.calls, "holds": list(self.holds.values()),
                  "inhibitors": list(self.inhibitors.values())}  # fmt: skip
        self.bus.send(Message.new_method_return(message, "s", [json.dumps(values[message.body[0]])]))

    def CheckAuthorization(self, subject: Any, action: str, details: Any, flags: int, cancel: str) -> Any:
        assert subject[0] == "system-bus-name"
        assert subject[1]["name"].startswith(":")
        allowed = action in self.knobs["allowed"]
        return "(bba{ss})", [[allowed, bool(not allowed and self.knobs["challenge"]), {}]], []

    def CancelCheckAuthorization(self, cancel: str) -> Any:
        return "", [], []

    def Inhibit(self, what: str, who: str, why: str, mode: str) -> Any:
        ours, theirs = os.pipe()
        self.inhibitors[ours] = what
        asyncio.get_running_loop().add_reader(ours, self.released, ours)
        return "h", [0], [theirs]

    def SetUserLinger(self, *_: Any) -> Any:
        return "", [], []

    def released(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        del self.inhibitors[fd]

    def HoldProfile(self, profile: str, reason: str, app: str) -> Any:
        self.count += 1
        self.holds[self.count] = [profile, reason, app]
        return "u", [self.count], []

    def ReleaseProfile(self, cookie: int) -> Any:
        del self.holds[cookie]
        return "", [], []


async def main() -> None:
    bus = await MessageBus(sys.argv[1], negotiate_unix_fd=True).connect()
    bus.add_message_handler(Desktop(bus).receive)
    for part in sys.argv[2:]:
        for name in NAMES[part]:
            await bus.request_name(name)
    print("ready", flush=True)
    await bus.wait_for_disconnect()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except EOFError:
        pass  # the bus went first
