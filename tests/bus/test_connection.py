"""The connection itself: deadlines, hostile messages, a bus that is slow or gone."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from dbus_next import Message, MessageFlag, Variant
from dbus_next.signature import SignatureTree
from harness import PrivateBus, Service, run

from torchtuned.bus import MAX_CALLS, Bus, Call, CallFailed, Rejected, _plain
from torchtuned.bus.wire import MAX_ARRAY, MAX_SIGNATURES
from torchtuned.errors import Busy, Failed

Fake = Callable[..., Service]
NAME = "org.freedesktop.Mine"  # which root may own on the private bus, and call


async def pair(bus: PrivateBus, handler: Any) -> tuple[Bus, Bus]:
    """One that serves NAME, and one that calls it."""
    server, client = await bus.connect(), await bus.connect()
    server.serve(handler)
    await server.request_name(NAME)
    return server, client


def scene(bus: PrivateBus, handler: Any, story: Callable[[Bus, Bus], Awaitable[None]]) -> None:
    async def play() -> None:
        server, client = await pair(bus, handler)
        try:
            await story(server, client)
        finally:
            await client.close()
            await server.close()

    run(play())


async def ask(client: Bus, member: str = "X", signature: str = "", *body: Any, **more: Any) -> list[Any]:
    return await client.call(NAME, "/x", f"{NAME}.I", member, signature, list(body), **more)


def test_a_silent_service_costs_its_deadline_and_nothing_else(bus: PrivateBus, services: Fake) -> None:
    services("logind").set("hang", ["Inhibit"])

    async def story() -> None:
        client = await bus.connect()
        login = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")
        before = time.monotonic()
        with pytest.raises(CallFailed, match=r"no answer within 0\.1 s") as failed:
            await client.call(*login, "Inhibit", "ssss", ["", "", "", "block"], timeout_s=0.1)
        assert failed.value.dbus_name.endswith("NoReply")
        assert time.monotonic() - before < 2
        assert client._pending == {}
        with pytest.raises(CallFailed) as failed:
            await client.call("org.freedesktop.Nobody", "/x", "a.b", "C")
        assert failed.value.absent
        await client.close()

    run(story())


@pytest.mark.parametrize(
    ("error", "name", "text"),
    [
        (Busy("not now", where="GPU 1", hint="wait"), "org.torchtuned1.Error.Busy", "GPU 1: not now (wait)"),
        (Rejected("UnknownObject", "no"), "org.freedesktop.DBus.Error.UnknownObject", "no"),
        (ZeroDivisionError("secret /etc/x.py"), "org.torchtuned1.Error.Failed", "internal error, see the journal"),
        (Failed("a\0b\ud800c"), "org.torchtuned1.Error.Failed", "a\ufffdb?c"),
        (Failed("x" * 10000), "org.torchtuned1.Error.Failed", "x" * 4096),
    ],
)
@pytest.mark.parametrize("later", ["at once", "later"])
def test_errors_leave_with_a_name_and_a_sentence(
    bus: PrivateBus, error: Exception, name: str, text: str, later: str
) -> None:
    async def raising() -> Any:
        raise error

    def handler(call: Call) -> Any:
        if later == "later":
            return raising()
        raise error

    async def story(server: Bus, client: Bus) -> None:
        with pytest.raises(CallFailed) as failed:
            await ask(client)
        assert failed.value.dbus_name == name
        assert failed.value.what.startswith(text)
        assert "secret" not in failed.value.what

    scene(bus, handler, story)


def test_strings_that_would_cost_the_connection_are_mended(bus: PrivateBus) -> None:
    async def story(server: Bus, client: Bus) -> None:
        assert await ask(client) == ["a\ufffd", ["?"], {"k\ufffd": "v\ufffd"}]
        server.emit("/x", f"{NAME}.I", "S", "s", ["\0"])
        assert await ask(client)
        assert await ask(client, "X", "sa(sv)", "\0", [["\ud800", Variant("as", ["\0"])]])
        assert asked[-1] == ["\ufffd", [["?", ["\ufffd"]]]]

    values = ["a\0", ["\ud800"], {"k\0": Variant("s", "v\0")}]
    asked: list[Any] = []

    def handler(call: Call) -> Any:
        asked.append(_plain(call.body))
        return "sasa{sv}", values

    scene(bus, handler, story)


def test_a_long_array_is_refused_without_being_unpacked(bus: PrivateBus) -> None:
    seen: list[str] = []

    def handler(call: Call) -> Any:
        seen.append(call.signature)
        return "", []

    empty = [""] * (MAX_ARRAY // 2)  # 8 bytes each
    deep = Variant("av", [Variant("a{us}", {i: "x" for i in range(MAX_ARRAY // 12)})])

    async def story(server: Bus, client: Bus) -> None:
        for signature, value in (("as", empty), ("v", deep), ("a(ys)", [[1, "x" * 40]] * 10000)):
            with pytest.raises(CallFailed, match="longer than"):
                await ask(client, "X", signature, value, timeout_s=30)
        assert seen == []
        await ask(client, "X", "ay", bytes(4 * MAX_ARRAY))  # bytes are cheap
        await ask(client, "X", "as", ["x"] * 1000)
        assert seen == ["ay", "as"]

    scene(bus, handler, story)


def test_more_calls_than_the_bus_lets_us_wait_for_take_their_turn(bus: PrivateBus) -> None:
    """When hundreds of jobs began or ended at once, PID 1 was not asked for all of them."""
    here = most = 0

    async def later() -> Any:
        nonlocal here, most
        here += 1
        most = max(most, here)
        await asyncio.sleep(0.05)
        here -= 1
        return "", []

    async def story(server: Bus, client: Bus) -> None:
        await asyncio.gather(*(ask(client, timeout_s=20) for _ in range(300)))
        assert most <= 96

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchtuned.bus.MAX_CALLS", 1000)
        scene(bus, lambda call: later(), story)


def test_many_arrays_are_no_way_around_the_limit_of_one(bus: PrivateBus) -> None:
    """A signature has room for 127 of them: 32 MiB that took more than ten seconds and 600 MB to unpack."""
    seen: list[str] = []

    def handler(call: Call) -> Any:
        seen.append(call.signature)
        return "", []

    third = [""] * (MAX_ARRAY // 24)  # 8 bytes each

    async def story(server: Bus, client: Bus) -> None:
        await ask(client, "X", "asas", third, third)
        await ask(client, "X", "aasas", [third, third], [])  # those in an array are counted with it
        for signature, values in (
            ("asasasas", [third] * 4),
            ("vvvv", [Variant("as", third)] * 4),
            ("(asas)asas", [[third, third], third, third]),
        ):
            with pytest.raises(CallFailed, match="longer than"):
                await ask(client, "X", signature, *values, timeout_s=30)
        assert seen == ["asas", "aasas"]

    scene(bus, handler, story)


def test_a_long_path_is_read_and_refused(bus: PrivateBus) -> None:
    def handler(call: Call) -> Any:
        raise Rejected("UnknownObject", f"there is no object {call.path}")

    async def story(server: Bus, client: Bus) -> None:
        with pytest.raises(CallFailed, match="there is no object /x"):
            await client.call(NAME, "/x" * MAX_ARRAY, f"{NAME}.I", "X")

    scene(bus, handler, story)


def test_a_full_socket_is_not_the_end(bus: PrivateBus) -> None:
    async def story(server: Bus, client: Bus) -> None:
        large = "x" * 200_000
        answers = await asyncio.gather(*(ask(client, "Echo", "s", large, timeout_s=30) for _ in range(60)))
        assert all(answer == [large] for answer in answers)

    scene(bus, lambda call: ("s", call.body), story)


def test_one_connection_has_only_so_many_calls(bus: PrivateBus) -> None:
    gate = asyncio.Event()

    async def slow() -> Any:
        await gate.wait()
        return "", []

    async def story(server: Bus, client: Bus) -> None:
        asks = [asyncio.ensure_future(ask(client)) for _ in range(MAX_CALLS + 5)]
        refused = 0
        while refused < 5:
            await asyncio.sleep(0.005)
            refused = sum(one.done() for one in asks)
        other = await bus.connect()
        gate.set()
        await ask(other)  # others have theirs
        results = await asyncio.gather(*asks, return_exceptions=True)
        errors = [one.dbus_name for one in results if isinstance(one, CallFailed)]
        assert errors == ["org.freedesktop.DBus.Error.LimitsExceeded"] * 5
        assert server._calls == {}
        await other.close()

    scene(bus, lambda call: slow(), story)


def test_descriptors_have_one_owner(bus: PrivateBus) -> None:
    taken: list[int] = []

    def handler(call: Call) -> Any:
        if call.member == "Take":
            taken.append(call.take_fd(call.body[0]))
        return "", []

    async def story(server: Bus, client: Bus) -> None:
        read, write = os.pipe()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            await ask(client, "Drop", "h", 0, fds=[write])
        assert len(os.listdir("/proc/self/fd")) == before
        await ask(client, "Take", "h", 0, fds=[write])
        os.write(taken[0], b"here")
        assert os.read(read, 4) == b"here"
        with pytest.raises(CallFailed, match="did not come with it"):
            await ask(client, "Take", "h", 3, fds=[write])
        for fd in (read, write, taken[0]):
            os.close(fd)

    scene(bus, handler, story)


def test_signals_count_only_from_the_owner_of_the_name(bus: PrivateBus) -> None:
    async def story() -> None:
        server, client = await pair(bus, lambda call: ("", []))
        liar = await bus.connect()
        heard: list[Any] = []
        owners: list[str] = []
        client.on_signal(NAME, f"{NAME}.I", "S", heard.append)
        assert await client.follow(NAME, owners.append) == server.unique_name
        client.match(f"type='signal',sender='{NAME}'")
        lie = Message.new_signal("/x", f"{NAME}.I", "S", "s", ["lie"])
        lie.destination = client.unique_name
        await liar._bus.send(lie)
        await liar.call("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "GetId")
        server.emit("/x", f"{NAME}.I", "S", "s", ["truth"])
        while not heard:
            await asyncio.sleep(0.005)
        assert heard == [["truth"]]
        await server.close()
        while not owners:
            await asyncio.sleep(0.005)
        assert owners == [""]
        assert client.owner(NAME) == ""
        await liar.close()
        await client.close()

    run(story())


def test_matches_are_counted(bus: PrivateBus) -> None:
    async def story(server: Bus, client: Bus) -> None:
        await client.follow(NAME)
        heard: list[Any] = []
        client.on_signal(NAME, f"{NAME}.I", "S", heard.append)
        rule = f"type='signal',sender='{NAME}',member='S'"
        for step, expected in (("match", 1), ("match", 2), ("unmatch", 3), ("unmatch", 3)):
            getattr(client, step)(rule)
            await ask(client)
            server.emit("/x", f"{NAME}.I", "S", "", [])
            await ask(client)
            assert len(heard) == expected

    scene(bus, lambda call: ("", []), story)


def test_a_name_that_is_taken_is_an_error_at_once(bus: PrivateBus) -> None:
    async def story(server: Bus, client: Bus) -> None:
        with pytest.raises(Failed, match="already has an owner"):
            await client.request_name(NAME)

    scene(bus, lambda call: ("", []), story)


def test_the_bus_going_away_ends_every_call_and_is_told(bus: PrivateBus, services: Fake) -> None:
    services("logind").set("hang", ["Inhibit"])

    async def story() -> None:
        client = await bus.connect()
        login = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")
        hanging = asyncio.ensure_future(client.call(*login, "Inhibit", "ssss", ["", "", "", "block"], timeout_s=30))
        await asyncio.sleep(0.05)
        bus.stop()
        with pytest.raises(CallFailed, match="the bus went away"):
            await hanging
        assert "went away" in await client.closed()
        with pytest.raises(CallFailed, match="not connected"):
            await client.call("org.freedesktop.DBus", "/", "a.b", "C")
        client.emit("/x", "a.b", "S", "", [])
        await client.close()

    run(story())


def test_signatures_that_strangers_send_are_not_kept_for_ever(bus: PrivateBus) -> None:
    async def story(server: Bus, client: Bus) -> None:
        for i in range(MAX_SIGNATURES + 50):
            signature = "".join("ys"[int(bit)] for bit in f"{i:011b}")
            message = Message(destination=NAME, path="/x", member="X", flags=MessageFlag.NO_REPLY_EXPECTED,
                              signature=signature, body=[1 if c == "y" else "" for c in signature])  # fmt: skip
            client._send(message)
        await ask(client)
        assert len(SignatureTree._cache) <= MAX_SIGNATURES + 1

    scene(bus, lambda call: ("", []), story)
