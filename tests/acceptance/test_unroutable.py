"""What its destination would not take stands somewhere visible, with the reason, and is in nobody's way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pytest

from tests.acceptance.world import FORBIDDEN, NATIVE_BROKER, STORE, USER, World, secret_broker_url, wait_for
from tests.rig.raw import Message, Props, content, number, text

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
    """Each bad one in the middle of good ones that are due at the same instants."""
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
    if any_world.native:
        any_world.wait(*map(body_of, CASES), box="delayer.delay-strays")
    else:
        any_world.run(wait_for(lambda: held(any_world) == len(CASES)))
    return any_world


def held(this: World) -> int:
    return int(this.postgres.execute("SELECT FROM held", database=this.database).split()[-1])


def test_the_good_ones_around_arrive_once_each(played: World) -> None:
    for n in range(GOOD):
        arrival = played.inbox.only(sound(n))
        assert arrival.at_ms >= arrival.due_ms


@pytest.mark.parametrize("case", CASES)
def test_it_is_held_with_its_reason(played: World, case: str) -> None:
    one = CASES[case]

    def reasons() -> list[str]:
        events = [event for event in played.daemon.events if event["event"] == "message held"]
        return [event["reason"] for event in events if event["route"] == one.through]

    played.run(wait_for(lambda: len(reasons()) >= 2))
    assert all(one.reason in reason for reason in reasons()), reasons()
    if played.native:
        stray = played.boxes["delayer.delay-strays"].only(body_of(case))
        assert one.reason in content(stray.props.one(b"x-delayer-held-text")).decode()
        assert stray.props.expiration is None
        assert not stray.props.all(b"x-death")
        inner = Props.decode(content(stray.props.one(b"x-delayer-properties")))
        assert (inner.expiration, inner.user_id, inner.all(b"kept")) == (b"600000", b"guest", [number("s", 1)])


def test_held_messages_leave_by_themselves_once_they_can(played: World) -> None:
    """What stood in the way is mended; the next attempt comes within ten seconds."""
    if played.mode != STORE:
        pytest.skip("this test takes the strays itself: tests/faults/test_held.py leaves them there")
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
    played.run(wait_for(lambda: held(played) == 0))
    secret_broker_url(played.rabbitmq, played.vhost)


def test_a_queue_that_appears_before_the_message_is_due(any_world: World) -> None:
    """Also where the broker finishes and had nothing to bind at first."""
    name = f"late.{any_world.mode}"
    through = "in" if any_world.mode == NATIVE_BROKER else "in.narrow"
    props = Props(headers=((b"x-delay", number("I", 2500)),), delivery_mode=2)
    any_world.run(any_world.raw.publish(Message(through, name.encode(), props, b"for a late queue")))
    any_world.run(any_world.raw.publish(Message("in", b"inbox", Props(), b"behind the late one")))
    any_world.wait(b"behind the late one")
    any_world.things.queue(name)
    any_world.things.bind("narrow", name, name)
    any_world.boxes[name] = any_world.run(any_world.raw.inbox(name))
    any_world.wait(b"for a late queue", box=name)
    arrival = any_world.boxes[name].only(b"for a late queue")
    assert arrival.at_ms >= arrival.due_ms


def test_the_user_may_write_everywhere_but_there(any_world: World) -> None:
    """The premise of "no permission"."""
    user = any_world.rabbitmq.api("GET", f"/api/permissions/{any_world.vhost}/{USER}")
    assert FORBIDDEN in user["write"]
