"""Design, 4.4: the edits on the way, and no other change. The tests compare property bytes, not values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from tests.acceptance.world import World
from tests.support.raw import TYPES, VOID, Header, Message, Props, Value, array, content, number, table, text

DELAY = (b"x-delay", number("I", 700))
TURNED = (b"x-delay", number("I", -700))
OURS = (b"x-delayer-id", b"x-delayer-due")


def nested(depth: int) -> Value:
    value = text("bottom")
    for _ in range(depth):
        value = table((b"deeper", array(value)))
    return value


FULL = Props(
    content_type=b"text/plain; charset=latin1",
    content_encoding=b"gzip",
    headers=(DELAY, (b"one", number("s", 1))),
    delivery_mode=1,
    priority=7,
    correlation_id=b"c" * 255,
    reply_to=b"amq.rabbitmq.reply-to.x",
    expiration=b"600000",
    message_id=b"m-1",
    timestamp=2**33,
    type=b"order.placed",
    user_id=b"guest",
    app_id=b"\xff\xfe",
    cluster_id=b"",
)
PROPERTIES = [name for name in FULL.__dataclass_fields__ if name != "headers"]
X_DEATH = array(table((b"count", number("l", 3)), (b"reason", text("expired")), (b"queue", text("q"))))


@dataclass(frozen=True)
class Carried:
    sent: Props
    body: bytes | None = None
    key: bytes = b"inbox"
    key_out: bytes = b"inbox"
    through: str = "in"


def small(*headers: Header, **more: object) -> Props:
    return Props(headers=(DELAY, *headers), delivery_mode=2, **more)  # type: ignore[arg-type]


CASES: Mapping[str, Carried] = {
    "every field type": Carried(small(*TYPES)),
    "every field type before the delay": Carried(Props(headers=(*TYPES, DELAY), delivery_mode=2)),
    "nested forty deep": Carried(small((b"deep", nested(20)))),
    "nested a thousand deep": Carried(small((b"deep", nested(500)))),
    "duplicate names": Carried(small((b"a", number("I", 1)), (b"a", text("2")), (b"a", number("I", 1)))),
    "names that are not UTF-8": Carried(small((b"\xff\x00\x80", text("v")), (b"", VOID), (b"n" * 255, VOID))),
    "many headers": Carried(small(*((b"h%d" % n, text("v" * 90)) for n in range(900)))),
    "empty table": Carried(Props(headers=(), delivery_mode=2)),
    "no table": Carried(Props(delivery_mode=2)),
    "no property at all": Carried(Props()),
    "no property at all, delayed": Carried(Props(), through="in.default"),
    "empty table, delayed": Carried(Props(headers=()), through="in.default"),
    "all properties": Carried(FULL),
    **{f"only {name}": Carried(Props(headers=(DELAY,), **{name: getattr(FULL, name)})) for name in PROPERTIES},
    **{f"all but {name}": Carried(replace(FULL, **{name: None})) for name in PROPERTIES},
    "transient": Carried(Props(headers=(DELAY,), delivery_mode=1)),
    "no delivery mode": Carried(Props(headers=(DELAY,))),
    "zero expiration of an hour": Carried(small(expiration=b"3600000")),
    "traces of an earlier trip": Carried(
        small(
            (b"x-death", X_DEATH),
            (b"x-first-death-queue", text("a")),
            (b"x-first-death-reason", text("expired")),
            (b"x-first-death-exchange", text("b")),
            (b"x-last-death-queue", text("c")),
            (b"x-last-death-reason", text("rejected")),
            (b"x-delivery-count", number("l", 4)),
            (b"x-delayer-id", text("older")),
            (b"x-delayer-due", number("l", 1)),
            (b"x-deathly", text("kept")),
            (b"x-first-deathly", text("kept")),
        )
    ),
    "delay headers": Carried(
        small(
            (b"x-deliver-at", number("l", 0)),
            (b"x-opt-delivery-time", number("l", 0)),
            (b"x-opt-delivery-delay", number("l", 0)),
            (b"x-opt-other", number("l", 0)),
            (b"x-delayed", VOID),
        )
    ),
    "other routing key": Carried(small((b"x-delay-routing-key", text("inbox"))), key=b"somewhere.else"),
    "a cascade's prefix": Carried(small(), key=b"0." * 27 + b"1.inbox"),
    "a cascade's prefix, at once": Carried(Props(headers=()), key=b"1." * 28 + b"inbox"),
    "body of 0 bytes": Carried(small(), body=b""),
    "body of exactly a frame": Carried(small(), body=b"F" * (131_072 - 8)),
    "body of a frame and a byte": Carried(small(), body=b"G" * (131_072 - 7)),
    "body of every byte": Carried(small(), body=bytes(range(256)) * 3),
    "body of 16 MB": Carried(small(), body=hashlib.shake_256(b"16 MB").digest(16 << 20)),
    "body of 16 MB, at once": Carried(Props(), body=hashlib.shake_256(b"at once").digest(16 << 20)),
}
ONLY_OUTSIDE = {
    "prefix of 27 digits": Carried(small(), key=b"0." * 27 + b"inbox", key_out=b"0." * 27 + b"inbox"),
    "two prefixes": Carried(small(), key=b"0." * 56 + b"inbox", key_out=b"0." * 28 + b"inbox"),
    "key of 255 bytes": Carried(small(), key=b"k" * 255, key_out=b"k" * 255),
    "key that is not UTF-8": Carried(small(), key=b"\xff\xfe.x", key_out=b"\xff\xfe.x"),
    "empty key": Carried(small(), key=b"", key_out=b""),
    "key * and #": Carried(small(), key=b"*.#", key_out=b"*.#"),
}
"""Keys that name no queue here."""


def body_of(case: str) -> bytes:
    given = (CASES | ONLY_OUTSIDE)[case].body
    return b"carried: " + case.encode() if given is None else given


@pytest.fixture(scope="module")
def played(any_world: World) -> World:
    cases = {**CASES, **ONLY_OUTSIDE}
    any_world.run(
        any_world.raw.publish(*(Message(one.through, one.key, one.sent, body_of(case)) for case, one in cases.items()))
    )
    any_world.wait(*map(body_of, cases))
    return any_world


def edited(sent: Props) -> Props:
    """The edits of 4.4, written again for the test, without the added headers."""
    removed = (b"x-death", b"x-delivery-count", *OURS, b"x-delayer-user-id")
    said = (b"x-deliver-at", b"x-opt-delivery-time", b"x-opt-delivery-delay", b"x-delay-routing-key")
    kept = sent.without(*removed, *said, prefixes=(b"x-first-death-", b"x-last-death-"))
    headers = tuple(TURNED if header == DELAY else header for header in kept.headers or ())
    return replace(kept, headers=headers, user_id=None)


@pytest.mark.parametrize("case", [*CASES, *ONLY_OUTSIDE])
def test_carried_byte_for_byte(played: World, case: str) -> None:
    one = (CASES | ONLY_OUTSIDE)[case]
    arrival = played.inbox.only(body_of(case))
    props, expected = arrival.props, edited(one.sent.sorted_if(played.rabbitmq.sorts_headers))
    assert not props.all(b"x-death")
    assert not props.all(b"x-delivery-count")
    left = props.without(*OURS, b"x-delayer-user-id")
    assert arrival.delivery.routing_key == one.key_out
    assert arrival.delivery.exchange == b"out"
    assert left.encode() == expected.encode()
    assert content(props.one(b"x-delayer-id"))
    assert arrival.at_ms >= arrival.due_ms
    if one.sent.user_id is None:
        assert not props.all(b"x-delayer-user-id")
    else:
        assert props.one(b"x-delayer-user-id") == text(one.sent.user_id)


@pytest.fixture(scope="module")
def copied(any_world: World) -> World:
    """CC, alone and with an expiration that would end in the cascade and in the store."""
    copies = (b"CC", array(text("copies")))
    messages = [
        Message("in", b"inbox", small(copies), b"copied"),
        Message("in", b"inbox", small(copies, expiration=b"600000"), b"copied, expires"),
        Message("in", b"inbox", Props(headers=(copies,)), b"copied at once"),
        Message("in", b"inbox", Props(headers=((b"x-delay", number("I", 2500)),), expiration=b"1000"), b"outlived"),
    ]
    any_world.run(any_world.raw.publish(*messages))
    bodies = [message.body for message in messages]
    any_world.wait(*bodies)
    any_world.wait(*bodies[:3], box="copies")
    return any_world


@pytest.mark.parametrize("body", [b"copied", b"copied, expires", b"copied at once"])
def test_cc_routes_a_copy_at_the_destination_and_only_there(copied: World, body: bytes) -> None:
    original, copy = copied.inbox.only(body), copied.boxes["copies"].only(body)
    assert copy.at_ms >= copy.due_ms == original.due_ms
    assert original.props.one(b"CC") == copy.props.one(b"CC") == array(text("copies"))
    assert copied.refused.of(body) == []


def test_expiration_has_no_effect_on_the_way_and_is_restored(copied: World) -> None:
    """The delay is longer than the expiration: its publisher asked for one second from the release on."""
    arrival = copied.inbox.only(b"outlived")
    assert arrival.props.expiration == b"1000"
    assert arrival.at_ms >= arrival.due_ms
    assert copied.inbox.only(b"copied, expires").props.expiration == b"600000"
