"""Messages rejected by their destination are kept somewhere visible, with the reason, and do not block others."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from delayer.core.cascade import Cascade, delivery_binding, routing_key
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import Parcel, Target
from delayer.format.envelope import HoldNote, envelope_properties
from tests.acceptance.own_vhost import OwnVhost
from tests.acceptance.world import STORE, USER, World, secret_broker_url
from tests.support.daemon import DaemonProcess, answered, command
from tests.support.place import eventually
from tests.support.raw import Message, Props, number, text

GOOD = 200


class Astray(NamedTuple):
    through: str
    key: bytes
    reason: str
    delay: int


CASES: Mapping[str, Astray] = {
    "no queue": Astray("in.narrow", b"nowhere.yet", "312 NO_ROUTE", 1000),
    "no queue, at once": Astray("in.narrow", b"nowhere.yet", "312 NO_ROUTE", 0),
    "no exchange": Astray("in.missing", b"k", "404 NOT_FOUND", 1000),
    "no exchange, at once": Astray("in.missing", b"k", "404 NOT_FOUND", 0),
    "no permission": Astray("in.closed", b"k", "403 ACCESS_REFUSED", 1000),
    "no permission, at once": Astray("in.closed", b"k", "403 ACCESS_REFUSED", 0),
}


def body_of(case: str) -> bytes:
    return b"astray: " + case.encode()


def sound(n: int) -> bytes:
    return b"sound: %d" % n


@pytest.fixture(scope="module")
def played(any_world: World) -> World:
    """Bad messages among good ones that are due at the same instants."""
    messages = []
    for n in range(GOOD):
        headers = ((b"x-delay", number("I", 1000 * (n % 2))),)
        messages.append(Message("in", b"inbox", Props(headers=headers, delivery_mode=2), sound(n)))
    for index, (case, one) in enumerate(CASES.items()):
        headers = ((b"x-delay", number("I", one.delay)), (b"kept", number("s", 1)))
        props = Props(headers=headers, expiration=b"600000", user_id=b"guest")
        messages.insert(20 + 25 * index, Message(one.through, one.key, props, body_of(case)))
    any_world.run(any_world.raw.publish(*messages))
    any_world.wait(*map(sound, range(GOOD)))
    any_world.run(eventually(lambda: held(any_world) == len(CASES)))
    return any_world


def held(this: World) -> int:
    """Messages in the store, or on their way through the cascade to their next attempt."""
    if this.native:
        return len({event["id"] for event in this.daemon.events if event["event"] == "message held"})
    return int(this.postgres.execute("SELECT FROM held", database=this.database).split()[-1])


def test_good_messages_around_a_bad_one_arrive_once_each(played: World) -> None:
    for n in range(GOOD):
        arrival = played.inbox.only(sound(n))
        assert arrival.at_ms >= arrival.due_ms


@pytest.mark.words
@pytest.mark.parametrize("case", CASES)
def test_an_unroutable_message_is_held_with_its_reason(played: World, case: str) -> None:
    one = CASES[case]

    def reasons() -> list[str]:
        events = [event for event in played.daemon.events if event["event"] == "message held"]
        return [event["reason"] for event in events if event["route"] == one.through]

    played.run(eventually(lambda: len(reasons()) >= 2))
    assert all(one.reason in reason for reason in reasons()), reasons()


def test_held_messages_leave_by_themselves_once_they_can(played: World) -> None:
    """The test repairs each destination; the next attempt follows within twenty seconds."""
    things = played.things
    things.bind("narrow", "inbox", "nowhere.yet")
    things.exchange("missing")
    things.bind("missing", "inbox")
    played.rabbitmq.api(
        "PUT", f"/api/permissions/{played.vhost}/{USER}", {"configure": ".*", "write": ".*", "read": ".*"}
    )
    played.wait(*map(body_of, CASES), timeout=60)
    missing = [case for case in CASES if not played.inbox.of(body_of(case))]
    assert not missing, f"{missing}; the log ends:\n{played.daemon.tail(60)}"
    for case in CASES:
        arrival = played.inbox.only(body_of(case))
        assert arrival.at_ms >= arrival.due_ms
        assert arrival.props.expiration == b"600000"
        assert arrival.props.one(b"x-delayer-user-id") == text("guest")
    if played.mode == STORE:
        played.run(eventually(lambda: held(played) == 0))
    secret_broker_url(played.rabbitmq, played.vhost)


def test_a_queue_may_appear_before_the_message_is_due(any_world: World) -> None:
    name = f"late.{any_world.mode}"
    props = Props(headers=((b"x-delay", number("I", 2500)),), delivery_mode=2)
    any_world.run(any_world.raw.publish(Message("in.narrow", name.encode(), props, b"for a late queue")))
    any_world.run(any_world.raw.publish(Message("in", b"inbox", Props(), b"behind the late one")))
    any_world.wait(b"behind the late one")
    any_world.things.queue(name)
    any_world.things.bind("narrow", name, name)
    any_world.boxes[name] = any_world.run(any_world.raw.inbox(name))
    any_world.wait(b"for a late queue", box=name)
    arrival = any_world.boxes[name].only(b"for a late queue")
    assert arrival.at_ms >= arrival.due_ms


async def strays(config: Path) -> list[dict[str, Any]]:
    return list((await answered(config, "strays", "list"))["messages"])


@pytest.mark.words
async def test_the_broker_found_no_queue_at_the_end_of_the_cascade(place: OwnVhost, tmp_path: Path) -> None:
    """The binding of the due queue is gone: the message is visible as a stray, and an operator can retry it. A daemon
    starts only then, because a running one restores the binding each time it begins to consume."""
    config = tmp_path / "delayer.toml"
    place.write(config, "native", {})
    await command(config, "topology", "apply")
    unbind = f"/api/bindings/{place.vhost}/e/delayer.delay-delivery/q/delays.due/{delivery_binding('delays.due')}"
    place.rabbitmq.api("DELETE", unbind)
    due_ms = time.time_ns() // 1_000_000 + 1_000
    parcel = Parcel(due_ms, b"in", b"in", b"inbox", Target(b"out", b"inbox"), b"\0\0", b"lost on the way")
    envelope = envelope_properties(parcel, b"0815")
    async with await place.raw() as raw:
        inbox = await raw.inbox("inbox")
        await raw.publish(Message(Cascade().entry(1), routing_key(1, b"delays.due"), envelope, parcel.body))

        [row] = await eventually(lambda: strays(config), lambda rows: len(rows) == 1)
        assert row["reason"] == "the broker found no queue for it at the end of the cascade"
        assert "On their way again: 1 of 1.\n" in await command(config, "strays", "retry", row["id"])
        assert await strays(config) == []
        async with DaemonProcess(place.environ("native")) as daemon:
            await inbox.got([b"lost on the way"])
            assert await daemon.stop() == 0


async def test_after_ten_attempts_a_message_waits_for_an_operator(place: OwnVhost, tmp_path: Path) -> None:
    """Nine attempts were made before it leaves the cascade. Then an operator retries it, and it is delivered."""
    config = tmp_path / "delayer.toml"
    place.write(config, "native", {})
    now_ms = time.time_ns() // 1_000_000
    parcel = Parcel(now_ms, b"in.missing", b"in.missing", b"inbox", Target(b"missing", b"inbox"), b"\0\0", b"doomed")
    held = HoldNote(Hold(HoldKind.RETURNED, "returned: 312 NO_ROUTE"), 9, now_ms)
    async with place.working(place.environ("native")) as (daemon, raw, inbox):
        await raw.publish(Message("", b"delays.due", envelope_properties(parcel, b"0815", held), parcel.body))

        [row] = await eventually(lambda: strays(config), lambda rows: len(rows) == 1)
        assert (row["id"], row["attempts"], row["kind"]) == ("id:0815", 10, "closed_channel")
        place.things.exchange("missing")
        place.things.bind("missing", "inbox")
        await command(config, "strays", "retry", "--all", "--yes")
        await inbox.got([b"doomed"])
        assert await daemon.stop() == 0
