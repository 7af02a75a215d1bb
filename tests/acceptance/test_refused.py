"""Refused messages: set aside with a log line and all that they came with; no other message stops for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest

from delayer.amqp.errors import BrokerLost
from tests.acceptance.test_fidelity import FULL
from tests.acceptance.world import MODES, NATIVE, STORE, World
from tests.support.place import eventually
from tests.support.raw import VOID, Header, Message, Props, Raw, Value, array, content, number, table, text

PLAIN = Props(delivery_mode=2)
LONGEST = 2**28 - 1
"""Seconds that the cascade can hold."""
GAINED = (b"x-delayer-id", b"x-delayer-refused", b"x-delayer-exchange", b"x-delayer-routing-key")
MOVED = (b"x-delayer-expiration", b"x-delayer-user-id")


@dataclass(frozen=True)
class Bad:
    """``reason``: a pattern for the header x-delayer-refused."""

    headers: tuple[Header, ...]
    reason: str
    modes: tuple[str, ...] = MODES
    through: str = "in"
    key: bytes = b"inbox"
    rest: Props = PLAIN

    @property
    def props(self) -> Props:
        return replace(self.rest, headers=self.headers)


def said(name: str, value: Value, reason: str) -> Bad:
    return Bad(((name.encode(), value),), f"{name}: .*{reason}")


def deep(levels: int) -> Value:
    value = array()
    for _ in range(levels):
        value = array(value)
    return value


DAYS = 86_400_000
CASES: Mapping[str, Bad] = {
    "x-delay words": said("x-delay", text("ten minutes"), "found 'ten minutes'"),
    "x-delay not UTF-8": said("x-delay", text(b"\xff12"), "expected milliseconds"),
    "x-delay bool": said("x-delay", number("t", True), "found True"),
    "x-delay void": said("x-delay", VOID, "found None"),
    "x-deliver-at words": said("x-deliver-at", text("tomorrow"), "found 'tomorrow'"),
    "x-deliver-at greatest": Bad(((b"x-deliver-at", number("l", 2**63 - 1)),), "these are nanoseconds"),
    "x-opt-delivery-time words": said("x-opt-delivery-time", text("never"), "found text: 'never'"),
    "x-opt-delivery-time text": said("x-opt-delivery-time", text("2026-11-28T04:00:00Z"), "found text"),
    "x-opt-delivery-delay words": said("x-opt-delivery-delay", text("long"), "found 'long'"),
    "unreadable first form, readable second": Bad(
        ((b"x-deliver-at", number("l", 0)), (b"x-delay", text("?"))), "x-delay: .*found '\\?'"
    ),
    "a misspelt header": Bad(((b"X-Delay", number("I", 5)),), "the message has no delay, but .* expected 'x-delay'"),
    "no delay": Bad((), "the message has no delay", through="in.header"),
    "too long": Bad(((b"x-delay", number("l", 3650 * DAYS + 60_000)),), "too long"),
    "too long, far instant": Bad(((b"x-deliver-at", text("9999-12-31T23:59:59Z")),), "too long"),
    "too long for the cascade": Bad(
        ((b"x-delay", number("l", (LONGEST + 1) * 1000)),), f"too long.*{LONGEST} s", (NATIVE,)
    ),
    "unknown route": Bad((), "no route for exchange 'stranger'", through="stranger"),
    "forbidden exchange": Bad(((b"x-delay-exchange", text("side.open")),), "'side.open' is forbidden"),
    "not a match of the pattern": Bad(
        ((b"x-delay-exchange", text("sideways")),), "'sideways' is forbidden.*side\\.\\*", through="in.allowed"
    ),
    "exchange that is no name": Bad(((b"x-delay-exchange", number("I", 5)),), "expected a string, found 5"),
    "routing key that is no string": Bad(((b"x-delay-routing-key", VOID),), "expected a string"),
    "routing key of 256 bytes": Bad(((b"x-delay-routing-key", text("k" * 256)),), "at most 255 bytes, found 256"),
    "key without a store": Bad(((b"x-delay-key", text("k")),), "x-delay-key: .*need a store", (NATIVE,)),
    "cancel without a store": Bad(((b"x-delay-cancel", text("k")),), "x-delay-cancel: .*need a store", (NATIVE,)),
    "empty key": Bad(((b"x-delay-key", text("")),), "expected a key", (STORE,)),
    "key that is a number": Bad(((b"x-delay-key", number("I", 1)),), "expected a string", (STORE,)),
    "nested too deep to read": Bad(((b"x-delay", deep(100)),), "malformed header table: .*64 levels"),
    "with every property": Bad(((b"x-delay", text("?")), (b"n", number("s", 1))), "x-delay", rest=FULL),
    "with an expiration": Bad(((b"x-delay", text("?")),), "x-delay", rest=Props(delivery_mode=2, expiration=b"600000")),
    "refused before": Bad(
        (
            (b"x-delayer-refused", text("older")),
            (b"x-delayer-exchange", text("older")),
            (b"x-delayer-routing-key", text("older")),
            (b"x-delay", text("?")),
        ),
        "x-delay: ",
    ),
    "reason longer than its room": Bad(((b"x-delay-exchange", text("\u00e9" * 63)),), "forbidden"),
    "with a death behind it": Bad(
        ((b"x-death", array(table((b"queue", text("q"))))), (b"x-delay", text("?"))), "x-delay: "
    ),
}


def body_of(case: str) -> bytes:
    return b"bad: " + case.encode()


def sent_in(world: World) -> dict[str, Bad]:
    """The cases of this mode. A broker that delays messages itself has no limit of the cascade's."""
    unlimited = {"too long for the cascade"} if world.rabbitmq.delays_messages else set()
    return {case: bad for case, bad in CASES.items() if world.mode in bad.modes and case not in unlimited}


@pytest.fixture(scope="module")
def played(any_world: World) -> World:
    """A good message follows each bad one."""
    cases = sent_in(any_world)
    any_world.things.bind("stranger", "delays")
    messages = []
    for case, bad in cases.items():
        messages.append(Message(bad.through, bad.key, bad.props, body_of(case)))
        messages.append(Message("in", b"inbox", Props(), b"good, behind " + body_of(case)))
    any_world.run(any_world.raw.publish(*messages))
    any_world.wait(*map(body_of, cases), box="delays.refused")
    any_world.wait(*(b"good, behind " + body_of(case) for case in cases))
    return any_world


@pytest.mark.words
@pytest.mark.parametrize("case", CASES)
def test_a_bad_message_is_refused_with_its_reason_and_everything_it_had(played: World, case: str) -> None:
    bad = CASES[case]
    if case not in sent_in(played):
        pytest.skip("not refused in this mode")
    arrival = played.refused.only(body_of(case))
    props = arrival.props
    reason = content(props.one(b"x-delayer-refused")).decode()
    assert re.search(bad.reason, reason), reason
    assert content(props.one(b"x-delayer-exchange")) == bad.through.encode()
    assert content(props.one(b"x-delayer-routing-key")) == bad.key
    assert arrival.delivery.routing_key == bad.key
    # Either property would make the broker drop the message or close the channel, so each becomes a header.
    moved = [value for value in (bad.props.expiration, bad.props.user_id) if value is not None]
    assert [content(value) for name in MOVED for value in props.all(name)] == moved
    sent = bad.props.sorted_if(played.rabbitmq.sorts_headers)
    expected = replace(sent, expiration=None, user_id=None).without(*GAINED)
    assert props.without(*GAINED, *MOVED).encode() == expected.encode()
    assert not played.inbox.of(body_of(case))
    played.inbox.only(b"good, behind " + body_of(case))  # no other message stops for it


def test_each_refused_message_is_logged(played: World) -> None:
    """The log has a line for each, or counts it."""

    def reported() -> int:
        refused = [event for event in played.daemon.events if event["event"] == "message refused"]
        assert all(event["reason"] for event in refused)
        counted = (event for event in played.daemon.events if event.get("of") == "message refused")
        return len(refused) + sum(event["lines"] for event in counted)

    played.run(eventually(lambda: reported() >= len(sent_in(played))))


def test_a_fixed_message_is_delivered_without_traces_of_its_refusal(played: World) -> None:
    """The headers name the exchange and the key, as the README says."""
    refused = played.refused.only(body_of("with every property"))
    headers = (*refused.props.without(b"x-delay").headers, (b"x-delay", number("I", 700)))  # type: ignore[misc]
    exchange, key = (content(refused.props.one(name)) for name in (b"x-delayer-exchange", b"x-delayer-routing-key"))
    body = b"mended: with every property"
    again = Message(exchange.decode(), key, replace(refused.props, headers=headers), body)
    played.run(played.raw.publish(again))
    played.wait(body)
    arrived = played.inbox.only(body).props
    assert content(arrived.one(b"x-delayer-id"))
    for name in (b"x-delayer-refused", b"x-delayer-exchange", b"x-delayer-routing-key"):
        assert not arrived.all(name)
    assert arrived.one(b"n") == number("s", 1)
    assert [content(arrived.one(name)) for name in MOVED] == [b"600000", b"guest"]


def test_the_longest_delay(any_world: World) -> None:
    """The longest delays are taken: 2^28 - 1 s in native mode, 3650 d by the store; and an address of 199 bytes."""
    seconds = [2**27, LONGEST] if any_world.native else [2**27, LONGEST, LONGEST + 1, 3650 * 86_400]
    headers = [((b"x-delay", number("l", 1000 * each)),) for each in seconds]
    messages = [
        Message("in", b"inbox", Props(headers=header, delivery_mode=2), b"long: %d" % each)
        for header, each in zip(headers, seconds, strict=True)
    ]
    address = b"a" * 199
    any_world.things.bind("out", "inbox", address.decode())
    messages.append(Message("in", address, Props(headers=((b"x-delay", number("I", 500)),)), b"address of 199"))
    any_world.run(any_world.raw.publish(*messages))
    any_world.wait(b"address of 199")
    assert any_world.inbox.only(b"address of 199").delivery.routing_key == address
    if any_world.native:
        queue = "delays.due" if any_world.rabbitmq.delays_messages else "delayer.delay-level-27"
        depth: Callable[[], bool] = lambda: any_world.things.depth(queue) == len(seconds)  # noqa: E731
        any_world.run(eventually(depth))
    else:
        any_world.run(eventually(lambda: any_world.parked_beyond(2**27 - 60) == len(seconds)))
    assert not [each for each in seconds if any_world.refused.of(b"long: %d" % each)]


BROKEN: Mapping[str, bytes] = {
    "a table longer than the header": b"\x20\x00\x00\x00\x00\xff\x01aV",
    "a table whose entry runs over": b"\x20\x00\x00\x00\x00\x05\x03abcS",
    "an unknown type": b"\x20\x00\x00\x00\x00\x05\x03abc?",
    "a name longer than the table": b"\x20\x00\x00\x00\x00\x02\xffa",
    "a string cut short": b"\x80\x00\xffabc",
    "bytes behind the last property": b"\x10\x00\x02\x02",
    "flags that mean nothing": b"\x10\x02\x02",
    "flags that go on": b"\x10\x01\x00\x00\x02",
    "a float that is no number": b"\x20\x00\x00\x00\x00\x0c\x02nanf\x7f\xc0\x00\x00VV",
    "a double without end": b"\x20\x00\x00\x00\x00\x0d\x03infd\x7f\xf0\x00\x00\x00\x00\x00\x00",
    "a bool that is neither": b"\x20\x00\x00\x00\x00\x06\x03boot\x02",
    "a table in a table that runs over": b"\x20\x00\x00\x00\x00\x0a\x01aF\x00\x00\x00\x09\x01bV",
    "flags alone, for a string": b"\x80\x00",
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_header_bytes_do_not_stop_other_messages(any_world: World, case: str) -> None:
    """The broker rejects most of them; the accepted ones arrive, or are refused. The daemon keeps running."""
    bad, good = b"broken: " + case.encode(), b"good, after broken: " + case.encode()
    before = len(any_world.daemon.events)

    async def send() -> bool:
        try:
            async with await Raw.connect(any_world.rabbitmq.url(any_world.vhost)) as raw:
                await raw.publish(Message("in", b"inbox", BROKEN[case], bad))
        except BrokerLost:
            return False
        return True

    taken = any_world.run(send())
    any_world.run(any_world.raw.publish(Message("in", b"inbox", Props(), good)))
    any_world.wait(good)
    any_world.inbox.only(good)
    if taken:
        any_world.run(eventually(lambda: any_world.inbox.counts[bad] + any_world.refused.counts[bad]))
    assert not [event for event in any_world.daemon.events[before:] if event["level"] == "error"]
