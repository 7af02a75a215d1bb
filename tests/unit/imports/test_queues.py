"""A waiting message in another system's queue: its due instant, its target, and its fingerprint."""

from __future__ import annotations

import pytest

from delayer.amqp.properties import Properties
from delayer.amqp.values import Delivery
from delayer.core.message import Target
from delayer.imports.hold_queues import HoldQueue
from delayer.imports.queues import fingerprint, was_dead_lettered
from tests.support.raw import Props, Value, array, number, table, text

NOW = 1_900_000_000_500
SECOND = 1_900_000_000


def delivery(props: Props, body: bytes = b"body", redelivered: bool = False) -> Delivery:
    return Delivery(1, redelivered, b"", b"hold", props.encode(), body)


def item(hold: HoldQueue, props: Props, now_ms: int = NOW) -> tuple[int, str]:
    one = delivery(props)
    found = hold.item(one, Properties.parse(one.properties), now_ms)
    return found.parcel.due_ms, "" if found.hold is None else found.hold.text


def died(
    seconds: int, reason: str = "rejected", *, queue: str = "work", count: int = 1, key: str = "order.new"
) -> tuple[tuple[bytes, Value], ...]:
    note = table(
        (b"count", number("l", count)), (b"reason", text(reason)), (b"queue", text(queue)),
        (b"time", number("T", seconds)), (b"exchange", text("shop")), (b"routing-keys", array(text(key))),
    )  # fmt: skip
    return ((b"x-death", array(note)),)


def hold(**how: bool) -> HoldQueue:
    return HoldQueue("hold", b"", b"work", 60_000, **how)


@pytest.mark.parametrize(
    ("ttl_ms", "props", "due_ms"),
    [
        (60_000, Props(), NOW + 60_000),
        (60_000, Props(expiration=b"5000"), NOW + 5_000),
        (60_000, Props(expiration=b"90000"), NOW + 60_000),
        (None, Props(expiration=b"5000"), NOW + 5_000),
        (60_000, Props(expiration=b"nonsense"), NOW + 60_000),
        (60_000, Props(timestamp=SECOND - 20), (SECOND - 19) * 1000 + 60_000),
        # By this timestamp it would have expired, so the timestamp is not of its arrival.
        (60_000, Props(timestamp=SECOND - 61), NOW + 60_000),
        (60_000, Props(timestamp=SECOND - 86_400), NOW + 60_000),
        (60_000, Props(timestamp=0), NOW + 60_000),
        # A timestamp in the future is also ignored.
        (60_000, Props(timestamp=SECOND + 10), NOW + 60_000),
        (60_000, Props(timestamp=(1 << 64) - 1), NOW + 60_000),
        (0, Props(), NOW),
    ],
)
def test_due(ttl_ms: int | None, props: Props, due_ms: int) -> None:
    assert item(HoldQueue("hold", b"", b"work", ttl_ms, stamped=True), props) == (due_ms, "")


STAMPED = Props(timestamp=SECOND - 20)


@pytest.mark.parametrize(
    ("hold", "props", "told"),
    [
        # Without `stamped` it may be the instant of a business event, and only an operator can tell.
        (hold(), STAMPED, False),
        (hold(stamped=True), STAMPED, True),
        # It left a queue before, and has the timestamp of its first publish.
        (hold(stamped=True), Props(timestamp=SECOND - 20, headers=died(SECOND - 30, "expired")), False),
        (hold(stamped=True), Props(timestamp=SECOND - 20, headers=died(SECOND - 20)), False),
        (hold(), Props(headers=died(SECOND - 20)), False),
        # Symfony's workers keep the timestamp of the first publish.
        (HoldQueue("delay_x__60000_retry", b"", b"work", 60_000, stamped=True), STAMPED, False),
        (HoldQueue("delay_x__60000_retry_2026-11-27", b"", b"work", 60_000, stamped=True), STAMPED, False),
        (HoldQueue("delay_x__60000_delay_2026-11-27", b"", b"work", 60_000, stamped=True), STAMPED, True),
        (HoldQueue("delay_x__60000_delay", b"", b"work", 60_000, stamped=True), STAMPED, True),
    ],
)
def test_believed_timestamps(hold: HoldQueue, props: Props, told: bool) -> None:
    assert item(hold, props) == ((SECOND - 19) * 1000 + 60_000 if told else NOW + 60_000, "")


@pytest.mark.words
def test_a_queue_without_a_known_time() -> None:
    assert "for how long" in item(HoldQueue("hold", b"", b"work", None), Props())[1]


def test_messages_behind_others_are_younger() -> None:
    hold = HoldQueue("hold", b"", b"work", 60_000, stamped=True)
    first, _ = item(hold, Props(timestamp=SECOND - 5))
    assert item(hold, Props(timestamp=SECOND - 30))[0] == first
    assert item(hold, Props())[0] == NOW + 60_000


@pytest.mark.words
def test_the_target_of_a_held_message() -> None:
    one = delivery(Props(expiration=b"5"))
    properties = Properties.parse(one.properties)
    assert HoldQueue("hold", b"x", b"work", 5).item(one, properties, NOW).parcel.target == Target(b"x", b"work")
    assert "to itself" in HoldQueue("hold", b"", None, 5).item(one, properties, NOW).hold.text  # type: ignore[union-attr]
    own = HoldQueue("hold", b"x", None, 5).item(one, properties, NOW).parcel
    assert (own.target, own.route, own.properties) == (Target(b"x", b"hold"), b"hold", Props().encode())


def test_cc_is_kept_only_if_the_broker_would_follow_it() -> None:
    """A queue with a dead-letter routing key drops CC."""
    copies, other = (b"CC", array(text("audit"))), (b"mine", text("x"))
    one = delivery(Props(headers=(copies, other), message_id=b"1"))
    properties = Properties.parse(one.properties)
    rerouted = HoldQueue("hold", b"x", b"work", 5).item(one, properties, NOW).parcel
    assert rerouted.properties == Props(headers=(other,), message_id=b"1").encode()
    assert HoldQueue("hold", b"x", None, 5).item(one, properties, NOW).parcel.properties == one.properties


def known(props: Props, body: bytes = b"body") -> str:
    one = delivery(props, body)
    return fingerprint(one, Properties.parse(one.properties))


def test_a_message_is_recognized_despite_the_counts_of_the_broker() -> None:
    counted = ((b"x-delivery-count", number("l", 3)), (b"x-acquired-count", number("l", 4)))
    bare = Props(message_id=b"1", delivery_mode=2)
    assert known(bare) == known(Props(message_id=b"1", delivery_mode=2, headers=counted)) != ""
    more = ((b"a", text("b")),)
    assert known(Props(message_id=b"1", headers=more)) == known(Props(message_id=b"1", headers=(*more, *counted)))
    assert known(Props(headers=((b"id", text("celery")),))) != ""


def test_a_message_is_recognized_one_level_below() -> None:
    notes = (
        *died(SECOND, "expired"),
        (b"x-first-death-queue", text("above")),
        (b"x-last-death-reason", text("expired")),
    )
    bare, fallen = (
        Delivery(1, False, exchange, b"1.work", Props(message_id=b"1", headers=headers).encode(), b"body")
        for exchange, headers in ((b"level-4", ()), (b"level-3", notes))
    )

    def known_of(one: Delivery, **how: bool) -> str:
        return fingerprint(one, Properties.parse(one.properties), **how)

    assert known_of(bare, falling=True) == known_of(fallen, falling=True) != ""
    assert known_of(bare) != known_of(fallen)
    assert was_dead_lettered(Properties.parse(fallen.properties))
    assert not was_dead_lettered(Properties.parse(bare.properties))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Props(message_id=b"1"), Props(message_id=b"2")),
        (Props(message_id=b"1"), Props(message_id=b"1", delivery_mode=2)),
        (Props(message_id=b"1", headers=((b"a", text("b")),)), Props(message_id=b"1", headers=((b"a", text("c")),))),
        (Props(message_id=b"1", headers=((b"ab", text("")),)), Props(message_id=b"1", headers=((b"a", text("b")),))),
        (
            Props(message_id=b"1", headers=((b"a", number("I", 1)),)),
            Props(message_id=b"1", headers=((b"a", number("i", 1)),)),
        ),
        (Props(message_id=b"1", type=b"x"), Props(message_id=b"1", app_id=b"x")),
    ],
)
def test_different_messages_have_different_fingerprints(one: Props, other: Props) -> None:
    assert known(one) != known(other)


def test_no_identity() -> None:
    assert known(Props()) == known(Props(headers=((b"a", text("b")),))) == ""
    assert fingerprint(delivery(Props()), None) == ""
