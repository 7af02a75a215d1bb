"""Design, 4.3: every form of saying a delay, in every type, in every mode. Never early, and exactly once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

import pytest

from tests.acceptance.world import World
from tests.support.raw import Header, Message, Props, Value, decimal, now_ms, number, text

SOON = 1200


@dataclass(frozen=True)
class Said:
    """``due_ms``: the due instant; if ``exact`` is false it is measured from the read, so it is the earliest
    possible."""

    headers: tuple[Header, ...]
    due_ms: int
    exact: bool = False
    timestamp: int | None = None
    through: str = "in"
    turned: Value | None = None


Make = Callable[[int], Said]


def delay(value: Value, milliseconds: int, turned: Value | None = None, through: str = "in") -> Make:
    """``x-delay``; ``turned``: its value at the destination, unchanged if None."""
    return lambda now: Said(((b"x-delay", value),), now + milliseconds, through=through, turned=turned or value)


def opt_delay(value: Value, milliseconds: int) -> Make:
    return lambda now: Said(((b"x-opt-delivery-delay", value),), now + milliseconds)


def at(name: str, make: Callable[[int], tuple[Value, int]]) -> Make:
    """A header with an instant; ``make(now)`` gives its value and the due instant."""

    def said(now: int) -> Said:
        value, due_ms = make(now)
        return Said(((name.encode(), value),), due_ms, exact=True)

    return said


def instants(name: str) -> dict[str, Make]:
    """A value of each number type that an absolute form accepts."""
    forms: dict[str, Callable[[int], tuple[Value, int]]] = {
        "int64": lambda now: (number("l", now + SOON), now + SOON),
        "int64 past": lambda now: (number("l", now - 5000), now - 5000),
        "int32 of 1970": lambda now: (number("I", 86_400_000), 86_400_000),
        "timestamp": lambda now: (number("T", now // 1000 + 2), (now // 1000 + 2) * 1000),
        "timestamp past": lambda now: (number("T", now // 1000 - 9), (now // 1000 - 9) * 1000),
    }
    return {f"{name} {form}": at(name, make) for form, make in forms.items()}


def written(now: int) -> tuple[Value, int]:
    """An instant as text; tests/unit/core/test_delay.py has every way to write one."""
    stamp = now + SOON
    moment = datetime.fromtimestamp(stamp // 1000, timezone(timedelta(hours=5, minutes=30)))
    return text(moment.strftime("%Y-%m-%dT%H:%M:%S") + f".{stamp % 1000:03d}1+05:30"), stamp + 1


def stamped(ago_ms: int) -> Make:
    """A delay of two seconds that began so long ago."""

    def said(now: int) -> Said:
        headers = ((b"timestamp_in_ms", number("l", now - ago_ms)), (b"x-delay", number("I", 2000)))
        return Said(headers, now - ago_ms + 2000, exact=True, turned=number("I", -2000))

    return said


def stale_stamp(now: int) -> Said:
    headers = (
        (b"timestamp_in_ms", number("l", now - 60_000)),
        (b"x-delayer-due", number("l", now - 30_000)),
        (b"x-delayer-id", text("4711")),
        (b"x-delay", number("I", SOON)),
    )
    return Said(headers, now + SOON, turned=number("I", -SOON))


def property_timestamp(now: int) -> Said:
    seconds = now // 1000 + 2
    headers = ((b"x-delay", number("I", 1)),)
    return Said(headers, seconds * 1000, True, seconds, "in.timestamp", number("I", -1))


def order(through: str, *present: str, first: str) -> Make:
    """All forms at once: the route's first form wins, and the rest have a delay that is far too long."""

    def said(now: int) -> Said:
        far = 400 * 86_400_000
        headers = []
        for name in present:
            milliseconds = SOON if name == first else far
            relative = name in ("x-delay", "x-opt-delivery-delay")
            headers.append((name.encode(), number("l", milliseconds + (0 if relative else now))))
        relative = first in ("x-delay", "x-opt-delivery-delay")
        turned = dict(headers).get(b"x-delay")
        if turned is not None:
            turned = Value(b"l", (-int.from_bytes(turned.raw, "big")).to_bytes(8, "big", signed=True))
        return Said(tuple(headers), now + SOON, exact=not relative, through=through, turned=turned)

    return said


ALL = ("x-opt-delivery-delay", "x-opt-delivery-time", "x-deliver-at", "x-delay")
CASES: Mapping[str, Make] = {
    "x-delay int8": delay(number("b", 100), 100, number("b", -100)),
    "x-delay uint8": delay(number("B", 200), 200, number("s", -200)),
    "x-delay int16": delay(number("s", 1200), 1200, number("s", -1200)),
    "x-delay uint16": delay(number("u", 1200), 1200, number("I", -1200)),
    "x-delay int32": delay(number("I", 1200), 1200, number("I", -1200)),
    "x-delay uint32": delay(number("i", 1200), 1200, number("l", -1200)),
    "x-delay int64": delay(number("l", 1200), 1200, number("l", -1200)),
    "x-delay float": delay(number("f", 1000.5), 1001, number("f", -1000.5)),
    "x-delay double": delay(number("d", 1000.25), 1001, number("d", -1000.25)),
    "x-delay decimal": delay(decimal(2, 120_050), 1201, decimal(2, -120_050)),
    "x-delay text": delay(text("1200"), 1200, text("-1200")),
    "x-delay text plus": delay(text("+1200"), 1200, text("-1200")),
    "x-delay text fraction": delay(text("1000.001"), 1001, text("-1000.001")),
    "x-delay across two levels": delay(number("I", 3100), 3100, number("I", -3100)),
    "x-delay zero": delay(number("I", 0), 0),
    "x-delay zero text": delay(text("0"), 0),
    "x-delay zero double": delay(number("d", 0.0), 0),
    "x-delay negative int8": delay(number("b", -100), -100),
    "x-delay negative int32": delay(number("I", -86_400_000), -86_400_000),
    "x-delay negative int64": delay(number("l", -1), -1),
    "x-delay negative text": delay(text("-7"), -7),
    "x-delay negative double": delay(number("d", -0.5), -1),
    "x-opt-delivery-delay int32": opt_delay(number("I", SOON), SOON),
    "x-opt-delivery-delay uint32": opt_delay(number("i", SOON), SOON),
    "x-opt-delivery-delay int64": opt_delay(number("l", SOON), SOON),
    "x-opt-delivery-delay text": opt_delay(text(str(SOON)), SOON),
    "x-opt-delivery-delay double": opt_delay(number("d", SOON - 0.5), SOON),
    "x-opt-delivery-delay zero": opt_delay(number("i", 0), 0),
    "x-opt-delivery-delay negative": opt_delay(number("l", -9), -9),
    **instants("x-deliver-at"),
    "x-deliver-at text": at("x-deliver-at", written),
    **instants("x-opt-delivery-time"),
    "timestamp property where asked": property_timestamp,
    # Far away: it would not arrive in this test.
    "timestamp property where not asked": lambda now: Said((), now, timestamp=now // 1000 + 100_000),
    "timestamp property absent": delay(number("I", SOON), SOON, number("I", -SOON), "in.timestamp"),
    "another header": lambda now: Said(((b"wait", text("1")),), now + 1000, through="in.header"),
    "nothing": lambda now: Said((), now),
    "nothing, default delay": lambda now: Said((), now + 1200, through="in.default"),
    "x-delay before default delay": delay(number("I", 0), 0, through="in.default"),
    "straight to the queue": delay(number("I", SOON), SOON, number("I", -SOON), ""),
    "timestamp_in_ms": stamped(1000),
    "timestamp_in_ms long ago": stamped(9000),
    "timestamp_in_ms of an earlier trip": stale_stamp,
    "timestamp_in_ms and default delay": lambda now: Said(
        ((b"timestamp_in_ms", number("l", now - 200)),), now - 200 + 1200, exact=True, through="in.default"
    ),
    "default order: all": order("in", *ALL, first="x-delay"),
    "default order: second": order("in", *ALL[:3], first="x-deliver-at"),
    "default order: third": order("in", *ALL[:2], first="x-opt-delivery-time"),
    "own order: all": order("in.order", *ALL, first="x-opt-delivery-delay"),
    "own order: second": order("in.order", *ALL[1:], first="x-deliver-at"),
    "own order: third": order("in.order", "x-opt-delivery-time", "x-delay", first="x-delay"),
    "own order: last": order("in.order", "x-opt-delivery-time", first="x-opt-delivery-time"),
    "the first of a repeated header": lambda now: Said(
        ((b"x-delay", number("I", SOON)), (b"x-delay", number("l", 900_000_000))), now + SOON
    ),
}


HIDDEN = ("default order: all", "default order: second", "own order: all", "own order: second", "own order: third")
"""Cases with x-opt-delivery-time in which another form wins: RabbitMQ 4.4 hides the message until that time."""


def body_of(case: str) -> bytes:
    return b"form: " + case.encode()


@pytest.fixture(scope="module")
def played(any_world: World) -> tuple[World, dict[str, Said]]:
    """All cases go through together."""
    said = {case: make(now_ms()) for case, make in CASES.items()}
    messages = []
    for case, one in said.items():
        key = b"delays" if one.through == "" else b"inbox"
        props = Props(headers=one.headers or None, delivery_mode=2, timestamp=one.timestamp)
        messages.append(Message(one.through, key, props, body_of(case)))
    any_world.run(any_world.raw.publish(*messages))
    any_world.wait(*map(body_of, CASES))
    return any_world, said


@pytest.mark.parametrize("case", CASES)
def test_a_delay_form(played: tuple[World, dict[str, Said]], case: str) -> None:
    this, said = played[0], played[1][case]
    if case in HIDDEN and this.rabbitmq.delays_messages:
        pytest.skip("this broker acts on x-opt-delivery-time before the daemon sees the message")
    arrival = this.inbox.only(body_of(case))
    assert arrival.due_ms == said.due_ms if said.exact else arrival.due_ms >= said.due_ms
    assert arrival.at_ms >= arrival.due_ms
    props = arrival.props
    if said.turned is not None:
        assert props.all(b"x-delay") == [said.turned]
    for form in (b"x-deliver-at", b"x-opt-delivery-time", b"x-opt-delivery-delay", b"wait"):
        assert not props.all(form)
    assert props.all(b"timestamp_in_ms") == [value for name, value in said.headers if name == b"timestamp_in_ms"]
    assert props.timestamp == said.timestamp
    assert len(props.all(b"x-delayer-id")) == 1
    assert props.one(b"x-delayer-id") != text("4711")
