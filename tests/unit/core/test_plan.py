"""decide(): a row for every branch and for both sides of every boundary."""

from __future__ import annotations

import re
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.amqp.values import Timestamp
from delayer.core.delay_headers import DelayRequest
from delayer.core.delay_sources import CONSULTED
from delayer.core.message import Target
from delayer.core.plan import LATEST_MS, AtOnce, Cancel, EnterCascade, Mode, Park, Policy, Refuse, Route, Soon
from tests.support.planning import decide, request

NOW = 1_800_000_000_000
DAY = 86_400_000
LONGEST = 268_435_455

ORDERS = Route(b"orders.in", b"orders.out")
MAIL = Route(b"mail.in", b"")
FIXED = Route(b"fixed.in", b"", routing_key=b"mail.inbox", default_delay_ms=5000)
STAMPED = Route(b"stamped.in", b"orders.out", delay_from=("timestamp", "x-delay"))
OPEN = Route(b"open.in", b"orders.out", allow_exchanges=("shop.*", "r\udcffw"))
STRAIGHT = Route(b"", b"orders.out")
REPLY = Route(b"reply.in", b"orders.out", allow_exchanges=("shop.*",), exchange_from_reply_to=True)
STRICT = Route(b"strict.in", b"orders.out", require_delay=True)

STORE = Policy(
    Mode.STORE,
    {route.source: route for route in (ORDERS, MAIL, FIXED, STAMPED, OPEN, STRAIGHT, STRICT, REPLY)},
    max_delay_ms=3650 * DAY,
    own_queues=frozenset({b"delays", b"delays.due", b"level-00"}),
    own_exchanges=frozenset({b"shop.cascade"}),
)
NATIVE = replace(STORE, mode=Mode.NATIVE)
NO_STORE = replace(NATIVE, has_store=False)
SHARED = replace(STORE, no_keys="several consumers")
MIXED = replace(STORE, park_beyond_ms=10_000)

OUT = Target(b"orders.out", b"k")


def ask(exchange: bytes = b"orders.in", routing_key: bytes = b"k", **more: Any) -> DelayRequest:
    """A message; ``says={"x-delay": 5}`` are its headers."""
    headers = {name.encode(): value for name, value in more.pop("says", {}).items()}
    return request(exchange, routing_key, headers, **more)


def says(**headers: object) -> DelayRequest:
    """A message with these headers, underscores for hyphens."""
    return ask(says={name.replace("_", "-"): value for name, value in headers.items()})


def stamped(stamp: object, **headers: object) -> DelayRequest:
    """A message with these headers and the broker's ``timestamp_in_ms``."""
    said = {name.replace("_", "-"): value for name, value in headers.items()}
    return ask(says=said | {"timestamp_in_ms": stamp})


def in_ms(delay: int) -> int:
    return NOW + delay


def named(value: object) -> str:
    """Like repr, but with sorted sets: all processes of a run must agree on the name of a test."""
    return re.sub(
        r"frozenset\(\{(.*?)\}\)", lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}", repr(value)
    )


@pytest.mark.parametrize(
    ("asked", "due_ms"),
    [
        (says(), NOW),
        (says(x_delay=1), in_ms(1)),
        (says(x_delay="1500"), in_ms(1500)),
        (says(x_delay=0.5), in_ms(1)),
        (says(x_deliver_at=NOW + 7), in_ms(7)),
        (says(x_deliver_at="2027-01-15T08:00:00.0001Z"), in_ms(1)),
        (says(x_deliver_at=Timestamp(NOW // 1000 + 1)), in_ms(1000)),
        (says(x_opt_delivery_delay=3), in_ms(3)),
        (says(x_opt_delivery_time=NOW + 3), in_ms(3)),
        # The order of a route is x-delay, x-deliver-at, x-opt-delivery-time, x-opt-delivery-delay.
        (says(x_delay=1, x_deliver_at=NOW + 2, x_opt_delivery_time=NOW + 3, x_opt_delivery_delay=4), in_ms(1)),
        (says(x_deliver_at=NOW + 2, x_opt_delivery_time=NOW + 3, x_opt_delivery_delay=4), in_ms(2)),
        (says(x_opt_delivery_time=NOW + 3, x_opt_delivery_delay=4), in_ms(3)),
        # The timestamp property is used only on a route that reads it, where it comes first.
        (ask(timestamp=NOW // 1000 + 9), NOW),
        (ask(b"stamped.in", timestamp=NOW // 1000 + 9, says={"x-delay": 4}), in_ms(9000)),
        (ask(b"stamped.in", says={"x-delay": 4}), in_ms(4)),
        (ask(b"stamped.in", says={"x-deliver-at": NOW + 4}), NOW),
        (ask(b"fixed.in"), in_ms(5000)),
        (ask(b"fixed.in", says={"x-delay": 7000}), in_ms(7000)),
        (ask(b"fixed.in", says={"x-delay": 0}), NOW),
        # Relative delays are measured from the broker's stamp; absolute times ignore it.
        (stamped(NOW - 400, x_delay=1000), in_ms(600)),
        (stamped(NOW - 400, x_opt_delivery_delay=1000), in_ms(600)),
        (stamped(NOW - 400, x_deliver_at=NOW + 9), in_ms(9)),
        (stamped(NOW - 1000, x_delay=1000), NOW),
        (stamped(NOW - 1001, x_delay=1000), in_ms(-1)),
        (stamped(NOW, x_delay=1000), in_ms(1000)),
        # A stamp ahead of the clock is of another clock, or of no broker.
        (stamped(NOW + 1, x_delay=1000), in_ms(1000)),
        (stamped(NOW + 3_600_000, x_delay=1000), in_ms(1000)),
        (ask(b"fixed.in", says={"timestamp_in_ms": NOW - 400}), in_ms(4600)),
        # An invalid stamp is ignored.
        *(
            (stamped(stamp, x_delay=1000), in_ms(1000))
            for stamp in (0, -1, True, "1800000000000", 1.8e12, None, Timestamp(1_700_000_000))
        ),
        # A message delayed before may carry the stamp of an earlier publish: any stamp up to its last release.
        (stamped(NOW - 400, x_delay=1000, x_delayer_due=NOW - 400), in_ms(1000)),
        (stamped(NOW - 400, x_delay=1000, x_delayer_due=NOW - 100), in_ms(1000)),
        (stamped(NOW - 400, x_delay=1000, x_delayer_due=NOW - 401), in_ms(600)),
        (stamped(NOW - 400, x_delay=1000, x_delayer_due="junk"), in_ms(1000)),
        # Zero means immediately, even if the broker's clock is ahead.
        (stamped(NOW + 5000, x_delay=0), NOW),
        (says(x_delay=0), NOW),
        (says(x_delay=-0.0), NOW),
        # A due instant must fit its field.
        (says(x_deliver_at=-(1 << 63)), 0),
        (says(x_deliver_at="0000-01-01T00:00:00Z"), 0),
    ],
    ids=named,
)
def test_the_due_instant_of_a_message(asked: DelayRequest, due_ms: int) -> None:
    plan = decide(asked, STORE, NOW)
    assert isinstance(plan, AtOnce if due_ms <= NOW else Park), plan
    assert plan.due_ms == due_ms


@pytest.mark.parametrize(
    ("asked", "plan"),
    [
        (says(x_delay=5), Park(in_ms(5), OUT)),
        (says(), AtOnce(NOW, OUT, undelayed=True)),
        (ask(b"strict.in", says={"x-delay": 0}), AtOnce(NOW, OUT)),
        # The target: the route's exchange and key, or else the message's; headers win.
        (ask(b"mail.in", b"inbox", says={"x-delay": 5}), Park(in_ms(5), Target(b"", b"inbox"))),
        (ask(b"fixed.in", b"k"), Park(in_ms(5000), Target(b"", b"mail.inbox"), undelayed=True)),
        (ask(b"", b"delays", says={"x-delay": 5}), Park(in_ms(5), Target(b"orders.out", b"delays"))),
        (says(x_delay_routing_key="other"), AtOnce(NOW, Target(b"orders.out", b"other"), undelayed=True)),
        (says(x_delay_routing_key=b"\xff"), AtOnce(NOW, Target(b"orders.out", b"\xff"), undelayed=True)),
        (says(x_delay_routing_key=""), AtOnce(NOW, Target(b"orders.out", b""), undelayed=True)),
        (says(x_delay_routing_key="r" * 255), AtOnce(NOW, Target(b"orders.out", b"r" * 255), undelayed=True)),
        (ask(b"fixed.in", says={"x-delay-routing-key": "other", "x-delay": 0}), AtOnce(NOW, Target(b"", b"other"))),
        (ask(b"open.in", says={"x-delay-exchange": "shop.eu"}), AtOnce(NOW, Target(b"shop.eu", b"k"), undelayed=True)),
        (ask(b"open.in", says={"x-delay-exchange": b"r\xffw"}), AtOnce(NOW, Target(b"r\xffw", b"k"), undelayed=True)),
        (ask(b"reply.in", reply_to=b"shop.eu", says={"x-delay": 5}), Park(in_ms(5), Target(b"shop.eu", b"k"))),
        (ask(b"reply.in", reply_to=b"no", says={"x-delay": 5, "x-delay-exchange": "orders.out"}), Park(in_ms(5), OUT)),
        (ask(b"open.in", reply_to=b"shop.eu", says={"x-delay": 5}), Park(in_ms(5), OUT)),
        (says(x_delay_exchange="orders.out"), AtOnce(NOW, OUT, undelayed=True)),  # the route's own is allowed
        (
            ask(copies=frozenset({b"delays"}), says={"x-delay": 5}),
            Park(in_ms(5), OUT),
        ),  # on an exchange, a key is not one of our queues
        # The plan removes 28 digits of a cascade before the key; it keeps every other key.
        (ask(routing_key=b"0." * 28 + b"a.b"), AtOnce(NOW, Target(b"orders.out", b"a.b"), undelayed=True)),
        (ask(routing_key=b"0." * 29 + b"a.b"), AtOnce(NOW, Target(b"orders.out", b"0.a.b"), undelayed=True)),
        (ask(routing_key=b"0." * 27 + b"a.b"), AtOnce(NOW, Target(b"orders.out", b"0." * 27 + b"a.b"), undelayed=True)),
        # Keys and cancels always go to the store, with every delay.
        (says(x_delay=5, x_delay_key="o-1"), Park(in_ms(5), OUT, b"o-1")),
        (says(x_delay_key=b"\x00"), Park(NOW, OUT, b"\x00", undelayed=True)),
        (says(x_delay=0, x_delay_key="o-1"), Park(NOW, OUT, b"o-1")),
        (says(x_delay=5, x_delay_key="k" * 255), Park(in_ms(5), OUT, b"k" * 255)),
        (says(x_delay_cancel="o-1"), Cancel(b"o-1")),
        (says(x_delay_cancel="o-1", x_delay_key="o-2", x_delay="junk"), Cancel(b"o-1")),
        # The longest delay, and the end of time.
        (says(x_delay=3650 * DAY), Park(in_ms(3650 * DAY), OUT)),
        (says(x_deliver_at=in_ms(3650 * DAY)), Park(in_ms(3650 * DAY), OUT)),
    ],
    ids=named,
)
def test_in_store_mode(asked: DelayRequest, plan: object) -> None:
    assert decide(asked, STORE, NOW) == plan


@pytest.mark.words
@pytest.mark.parametrize(
    ("asked", "policy", "reason"),
    [
        (ask(b"else"), STORE, "no route for exchange 'else': expected one of '', 'fixed.in', 'mail.in'"),
        (ask(b"\xff"), STORE, r"no route for exchange '\xff'"),
        (says(x_delay="soon"), STORE, "x-delay: expected milliseconds as an integer, a numeric string or a float"),
        (says(x_delay=float("nan")), STORE, "x-delay: expected milliseconds as an integer"),
        (says(x_delay=True, x_deliver_at=NOW), STORE, "x-delay: expected"),  # does not fall through to the next form
        (says(x_deliver_at="1800000000000"), STORE, "x-deliver-at: expected an instant"),
        (says(x_opt_delivery_time="never"), STORE, "x-opt-delivery-time: expected an instant"),
        (says(x_opt_delivery_time="2027-01-15T08:00:00Z"), STORE, "found text"),
        (says(x_opt_delivery_delay=[]), STORE, "x-opt-delivery-delay: expected milliseconds"),
        (ask(b"strict.in"), STORE, "the message has no delay: expected one, by x-delay, x-deliver-at,"),
        (says(x_delay=3650 * DAY + 1), STORE, "too long: expected at most 3650 days, found 3650 days, 0:00:01;"),
        (says(x_delay=3650 * DAY + 1), STORE, "; send a shorter delay, or raise max_delay"),
        (says(x_deliver_at=in_ms(3650 * DAY + 1)), STORE, "the delay is too long"),
        (says(x_delay=1e300), STORE, "the delay is too long"),
        (ask(b"stamped.in", timestamp=(1 << 64) - 1), STORE, "the delay is too long"),
        (says(x_deliver_at=LATEST_MS + 1), replace(STORE, max_delay_ms=1 << 62), "the delay is too long"),
        (says(x_delay_routing_key=5), STORE, "x-delay-routing-key: expected a string, found 5"),
        (says(x_delay_exchange="ü" * 64), STORE, "x-delay-exchange: expected at most 127 bytes, found 128"),
        (says(x_delay_routing_key="r" * 256), STORE, "x-delay-routing-key: expected at most 255 bytes, found 256"),
        (says(x_delay_routing_key="ü" * 128), STORE, "x-delay-routing-key: expected at most 255 bytes, found 256"),
        (says(x_delay_exchange="shop.eu"), STORE, "x-delay-exchange: exchange 'shop.eu' is forbidden on this route"),
        (says(x_delay_exchange=""), STORE, "x-delay-exchange: exchange '' is forbidden"),
        (ask(b"reply.in", reply_to=b"no", says={"x-delay": 5}), STORE, "reply_to: exchange 'no' is forbidden"),
        (ask(b"open.in", says={"x-delay-exchange": "Shop.eu"}), STORE, "exchange 'Shop.eu' is forbidden"),
        (ask(b"open.in", says={"x-delay-exchange": None}), STORE, "x-delay-exchange: expected a string, found None"),
        # Loops.
        (ask(b"mail.in", b"delays"), STORE, "leads into delayer's own queues"),
        (ask(b"mail.in", says={"x-delay-routing-key": "delays"}), STORE, "leads into delayer's own queues"),
        (ask(b"open.in", says={"x-delay-exchange": "open.in"}), replace(
            STORE, routes={b"open.in": replace(OPEN, allow_exchanges=("*",))}), "leads back into the intake queue"),
        (ask(b"mail.in", copies=frozenset({b"x", b"delays"})), STORE, "key 'delays') leads into delayer's own queues"),
        # Delayer's own queues: a message could block a level for all the rest, or forge an envelope.
        (ask(b"mail.in", b"delays.due"), STORE, "key 'delays.due') leads into delayer's own queues"),
        (ask(b"mail.in", b"1." * 28 + b"level-00"), NATIVE, "key 'level-00') leads into delayer's own queues"),
        (ask(b"mail.in", says={"x-delay-routing-key": "level-00"}), STORE, "leads into delayer's own queues"),
        (ask(b"mail.in", copies=frozenset({b"level-00"})), NATIVE, "leads into delayer's own queues"),
        (ask(b"open.in", says={"x-delay-exchange": "shop.cascade"}), STORE, "leads into delayer's own exchanges"),
        # A target that can end the publishing connection.
        (ask(b"mail.in", b"amq.rabbitmq.reply-to.g2EF.k"), STORE, "g2EF.k') leads to a direct reply, not to a queue"),
        (ask(b"mail.in", says={"x-delay-routing-key": "amq.rabbitmq.reply-to.a"}), NATIVE, "leads to a direct reply"),
        (ask(b"mail.in", copies=frozenset({b"amq.rabbitmq.reply-to.a"})), STORE, "-to.a') leads to a direct reply"),
        (ask(b"mail.in", b"amq.rabbitmq.reply-to"), STORE, "leads to a direct reply"),
        # Properties over which the broker would close the channel.
        (ask(reply_to=b"amq.rabbitmq.reply-to"), STORE, "reply_to: expected a queue, found the direct reply 'amq."),
        (ask(expiration=b"soon"), NATIVE, "expiration: expected 0 to 315360000000 milliseconds in digits, found"),
        (ask(says={"x-delay-cancel": "k"}, expiration=b"soon"), STORE, "expiration: expected"),
        (says(CC="a"), STORE, "CC: expected an array of routing keys, found 'a'"),
        (ask(says={"x-delay": 5, "BCC": None}), STORE, "BCC: expected an array of routing keys, found None"),
        # Keys and cancels.
        (says(x_delay_key=""), STORE, "x-delay-key: expected a key, found an empty string"),
        (says(x_delay_key=5), STORE, "x-delay-key: expected a string"),
        (says(x_delay_key="k" * 256), STORE, "x-delay-key: expected at most 255 bytes"),
        (says(x_delay_cancel=None), STORE, "x-delay-cancel: expected a string"),
        (says(x_delay_key="o-1"), NO_STORE, "x-delay-key: keys and cancels need a store, but none is configured"),
        (says(x_delay_cancel="o-1"), NO_STORE, "x-delay-cancel: keys and cancels need a store"),
        (says(x_delay_key="o-1"), SHARED, "x-delay-key: several consumers"),
        (says(x_delay_cancel="o-1"), SHARED, "x-delay-cancel: several consumers"),
        (says(x_delay_cancel="o-1"), replace(NO_STORE, no_keys="several consumers"), "several consumers"),
        # The cascade's own limits.
        (says(x_delay=LONGEST * 1000 + 1000), NATIVE, "for the cascade: expected at most 268435455 s, found 268435456"),
    ],
    ids=named,
)  # fmt: skip
def test_refused(asked: DelayRequest, policy: Policy, reason: str) -> None:
    plan = decide(asked, policy, NOW)
    assert isinstance(plan, Refuse)
    assert reason in plan.reason


def cascade(seconds: int, due_ms: int, target: Target = OUT) -> EnterCascade:
    return EnterCascade(due_ms, seconds, target, due_ms - NOW - seconds * 1000)


INBOX = Target(b"", b"inbox")


@pytest.mark.parametrize(
    ("asked", "plan"),
    [
        (says(x_delay=0), AtOnce(NOW, OUT)),
        (says(x_delay=1), cascade(0, in_ms(1))),
        (says(x_delay=1000), cascade(1, in_ms(1000))),
        (says(x_delay=1001), cascade(1, in_ms(1001))),
        (says(x_delay=(1 << 27) * 1000), cascade(1 << 27, in_ms((1 << 27) * 1000))),
        (says(x_delay=LONGEST * 1000), cascade(LONGEST, in_ms(LONGEST * 1000))),
        (ask(b"mail.in", b"inbox", says={"x-delay": 1}), cascade(0, in_ms(1), INBOX)),
        (ask(b"mail.in", b"a" * 255, says={"x-delay": 1}),
         cascade(0, in_ms(1), Target(b"", b"a" * 255))),
        (ask(b"open.in", says={"x-delay": 1, "x-delay-exchange": "shop.eu"}),
         cascade(0, in_ms(1), Target(b"shop.eu", b"k"))),
        (ask(b"mail.in", b"", says={"x-delay": 0}), AtOnce(NOW, Target(b"", b""))),
        (ask(b"mail.in", b"a" * 200, says={"x-delay": 0}), AtOnce(NOW, Target(b"", b"a" * 200))),
        (ask(b"mail.in", b"a.*", says={"x-delay": 1}), cascade(0, in_ms(1), Target(b"", b"a.*"))),
        (ask(b"mail.in", b"#", says={"x-delay": 1}), cascade(0, in_ms(1), Target(b"", b"#"))),
        (ask(b"mail.in", b"\xff", says={"x-delay": 1}), cascade(0, in_ms(1), Target(b"", b"\xff"))),
        # A header names a queue on a route to an exchange; an exchange's key may have any length.
        (ask(says={"x-delay": 1}, routing_key=b"k" * 255), cascade(0, in_ms(1), Target(b"orders.out", b"k" * 255))),
        (says(x_delay=1, x_delay_key="o-1"), Park(in_ms(1), OUT, b"o-1")),
        (says(x_delay_cancel="o-1"), Cancel(b"o-1")),
    ],
    ids=named,
)  # fmt: skip
def test_in_native_mode(asked: DelayRequest, plan: object) -> None:
    assert decide(asked, NATIVE, NOW) == plan


def test_max_delay_is_the_only_limit_if_the_broker_delays_messages() -> None:
    policy = replace(NATIVE, longest_native_ms=LATEST_MS, max_delay_ms=20 * 365 * DAY)
    wait_ms = 10 * 365 * DAY
    assert decide(says(x_delay=wait_ms), policy, NOW) == cascade(wait_ms // 1000, in_ms(wait_ms))
    assert isinstance(decide(says(x_delay=20 * 365 * DAY + 1), policy, NOW), Refuse)


@pytest.mark.words
@pytest.mark.parametrize("header", ["x_deliver_at", "x_opt_delivery_time"])
@pytest.mark.parametrize("policy", [NATIVE, STORE], ids=["native", "store"])
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (NOW // 1000, "these are seconds"),
        (NOW * 1000, "these are microseconds"),
        (NOW * 1_000_000, "these are nanoseconds"),
        (str(NOW + 5000), "expected an instant"),
        (Decimal(NOW + 5000), "expected an instant"),
        (float(NOW + 5000), "expected an instant"),
        (Timestamp(NOW), "these are milliseconds"),
    ],
)
def test_an_instant_in_another_unit_or_form_is_refused(header: str, policy: Policy, value: object, reason: str) -> None:
    plan = decide(says(**{header: value}), policy, NOW)
    assert isinstance(plan, Refuse) and reason in plan.reason


@pytest.mark.parametrize(
    ("delay_ms", "plan"),
    [
        (0, AtOnce(NOW, OUT)),
        (1, cascade(0, in_ms(1))),
        (9_999, cascade(9, in_ms(9_999))),
        (10_000, cascade(10, in_ms(10_000))),
        (10_001, Park(in_ms(10_001), OUT)),
        (LONGEST * 1000 + 1, Park(in_ms(LONGEST * 1000 + 1), OUT)),
    ],
)
def test_delays_up_to_park_beyond_enter_the_cascade(delay_ms: int, plan: object) -> None:
    assert decide(says(x_delay=delay_ms), MIXED, NOW) == plan


@pytest.mark.parametrize("policy", [STORE, MIXED])
@pytest.mark.parametrize("delay_ms", [0, 1, 20_000])
def test_a_blocked_broker_parks_every_message(policy: Policy, delay_ms: int) -> None:
    assert decide(says(x_delay=delay_ms), replace(policy, publishing=False), NOW) == Park(in_ms(delay_ms), OUT)


def test_a_blocked_broker_does_not_change_plans_in_native_mode() -> None:
    blocked = replace(NATIVE, publishing=False)
    assert decide(says(x_delay=0), blocked, NOW) == AtOnce(NOW, OUT)
    assert decide(says(x_delay=1), blocked, NOW) == cascade(0, in_ms(1))


def test_a_store_parks_delays_too_long_for_the_cascade() -> None:
    policy = replace(STORE, park_beyond_ms=1 << 50)
    assert decide(says(x_delay=LONGEST * 1000), policy, NOW) == cascade(LONGEST, in_ms(LONGEST * 1000))
    assert decide(says(x_delay=LONGEST * 1000 + 1), policy, NOW) == Park(in_ms(LONGEST * 1000 + 1), OUT)


numbers = st.integers(-(1 << 63), (1 << 64) - 1)
# Near the limits, and anywhere.
delays = (
    st.integers(-5, 5) | st.integers(-2, 2).map(lambda n: n + LONGEST * 1000) | st.integers(0, 3650 * DAY) | numbers
)
values = st.one_of(
    delays,
    delays.map(lambda delay: NOW + delay),
    numbers.map(abs).map(Timestamp),
    st.floats(),
    st.decimals(),
    st.text(max_size=9),
    st.text("0123456789.-+T:Z", max_size=12),
    st.sampled_from([b"", b"key", b"k" * 255, b"k" * 256, "ü" * 128]),
    st.none(),
    st.booleans(),
    st.lists(st.none()),
)
asks = st.builds(
    request,
    st.sampled_from([*STORE.routes, b"else", b"\xff"]),
    st.sampled_from([b"", b"k", b"\xff", b"a.#", b"a" * 199, b"a" * 200, b"delays", b"0." * 28 + b"inbox"]),
    st.dictionaries(st.sampled_from(sorted(CONSULTED)), values, max_size=4),
    timestamp=st.none() | st.integers(0, (1 << 64) - 1),
)
policies = st.builds(
    replace,
    st.sampled_from([STORE, NATIVE, NO_STORE, SHARED]),
    max_delay_ms=st.integers(0, 1 << 62),
    park_beyond_ms=st.integers(0, 1 << 62),
    keep_ms=st.sampled_from([0, 150, 999]),
)


@given(asks, policies, st.integers(0, LATEST_MS))
def test_every_message_has_a_plan_that_can_be_carried_out(asked: DelayRequest, policy: Policy, now_ms: int) -> None:
    plan = decide(asked, policy, now_ms)
    if isinstance(plan, Park | EnterCascade | AtOnce | Soon):
        assert 0 <= plan.due_ms <= LATEST_MS
        assert plan.due_ms - now_ms <= policy.max_delay_ms
        assert max(map(len, plan.target)) <= 255
    if isinstance(plan, EnterCascade):
        assert 0 <= plan.seconds <= LONGEST
        assert plan.due_ms - now_ms == plan.seconds * 1000 + plan.rest_ms  # never early
        assert 0 <= plan.rest_ms < 1000
    if isinstance(plan, AtOnce):
        assert plan.due_ms <= now_ms
    if isinstance(plan, Soon):
        assert 0 < plan.due_ms - now_ms <= policy.keep_ms
    if isinstance(plan, Park):
        assert policy.has_store
    if isinstance(plan, Refuse):
        assert plan.reason.isascii()
        assert plan.reason.isprintable()


@pytest.mark.parametrize("policy", [STORE, NATIVE, MIXED])
@pytest.mark.parametrize(("delay_ms", "kept"), [(0, False), (1, True), (150, True), (151, False)])
def test_messages_that_are_due_soon_are_kept_in_memory(policy: Policy, delay_ms: int, kept: bool) -> None:
    plan = decide(says(x_delay=delay_ms), replace(policy, keep_ms=150), NOW)
    assert isinstance(plan, Soon) is kept


def test_messages_that_only_a_store_can_order_or_limit_are_not_kept_in_memory() -> None:
    policy = replace(STORE, keep_ms=150)
    assert decide(says(x_delay=100, x_delay_key="o-1"), policy, NOW) == Park(in_ms(100), OUT, b"o-1")
    paced = replace(policy, routes={b"orders.in": replace(policy.routes[b"orders.in"], paced=True)})
    assert decide(says(x_delay=100), paced, NOW) == Park(in_ms(100), OUT)
    assert decide(says(x_delay=100), replace(policy, publishing=False), NOW) == Park(in_ms(100), OUT)


def test_a_relative_delay_counts_from_an_old_reading() -> None:
    assert decide(says(x_delay=1_000), STORE, NOW - 400, NOW) == Park(NOW + 600, OUT)
    assert decide(says(x_delay=1_000), NATIVE, NOW - 1_400, NOW) == AtOnce(NOW - 400, OUT)
    assert decide(says(x_delay=3_000), NATIVE, NOW - 400, NOW) == cascade(2, NOW + 2_600)


def test_the_lower_bound_decides_what_is_due_and_the_upper_bound_starts_a_delay() -> None:
    """The store's clock is between the two. A message due only by the later clock may be early."""
    at = says(x_deliver_at=NOW - 5)
    assert isinstance(decide(at, STORE, NOW, now_lower_ms=NOW - 10), Park)
    assert isinstance(decide(at, STORE, NOW, now_lower_ms=NOW - 5), AtOnce)
    delayed = decide(says(x_delay=1_000), STORE, NOW, now_lower_ms=NOW - 10)
    assert isinstance(delayed, Park)
    assert delayed.due_ms == NOW + 1_000


@given(st.integers(0, 3650 * DAY), st.sampled_from(["x-delay", "x-opt-delivery-delay"]), policies)
def test_a_plan_is_never_earlier_than_asked(delay_ms: int, header: str, policy: Policy) -> None:
    plan = decide(ask(says={header: delay_ms}), policy, NOW)
    assert isinstance(plan, Refuse) or plan.due_ms == NOW + delay_ms  # type: ignore[union-attr]
