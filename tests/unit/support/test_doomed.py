"""The judge of refused messages finds every change by a daemon: the tests plant one mutation of each kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Final

import pytest

from delayer.amqp.values import Delivery
from tests.faults.doomed import COUNTED, Doomed, Judge
from tests.support.letters import NUMBER, SHAPES, doomed
from tests.support.raw import VOID, Props, number, octets, text
from tests.support.readings import Readings

INTO: Final = b"delayer.in"
SENT: Final = 16
AWAITED: Final = 11
"""Its letter has every property that a letter may have, and a header table of several entries."""
IDS: Final = [text(b"%032x" % one) for one in range(SENT + 1)]


def of(one: int, *, id: int | None = None) -> tuple[Delivery, Props]:
    """The delivery as it must appear in the refused queue, and its properties."""
    letter = doomed(one)
    sent = Props.decode(letter.properties)
    gained = [
        (b"x-delayer-id", IDS[one if id is None else id]),
        (b"x-delayer-refused", text(f"x-delay: expected milliseconds, found 'in {one} moments'")),
        (b"x-delayer-exchange", text(INTO)),
        (b"x-delayer-routing-key", text(letter.routing_key)),
    ]
    if sent.expiration is not None:
        gained.append((b"x-delayer-expiration", text(sent.expiration)))
    props = replace(sent.adding(*gained), expiration=None)
    return Delivery(1, False, b"delays.refused", letter.routing_key, props.encode(), letter.body), props


def readings(*, again: bool = False, times: int = 1) -> Readings:
    heard = Readings(INTO)
    for one in range(SENT):
        for _ in range(times):
            heard._handed(again, INTO, doomed(one).routing_key, doomed(one).body)
    return heard


def judged(changed: Delivery, *, sorts: bool = False, again: bool = False) -> Doomed:
    """The judgement of all messages in the refused queue, with this delivery for the awaited one."""
    others = [of(one)[0] for one in range(SENT) if one != AWAITED]
    if sorts:
        others = [other._replace(properties=by_name(Props.decode(other.properties)).encode()) for other in others]
    return Judge(SENT, readings(again=again), sorts=sorts)([*others, changed])


def by_name(props: Props) -> Props:
    return props.sorted_if(True)


def test_the_awaited_letter_has_every_property() -> None:
    sent = Props.decode(doomed(AWAITED).properties)
    assert sent.expiration is not None
    assert {field.name for field in fields(sent) if getattr(sent, field.name) is not None} == {
        "content_type", "headers", "delivery_mode", "priority", "correlation_id", "expiration", "message_id",
    }  # fmt: skip
    assert by_name(sent) != sent, "sorted headers must be visible"
    timed = Props.decode(doomed(4).properties)
    assert (timed.timestamp, timed.app_id) == (1_700_000_000, b"ledger")
    assert len(SHAPES) <= SENT, "every shape of headers is among them"


def changes() -> Iterator[tuple[str, Props, bool]]:
    """Every change of the properties by a daemon: its name, the changed properties, and whether it is hidden by a
    broker that sorts headers and keeps one of each name."""
    props = of(AWAITED)[1]
    headers, own = props.headers or (), len(Props.decode(doomed(AWAITED).properties).headers or ())
    for field in fields(props):
        had = getattr(props, field.name)
        wrong: object = 1 if isinstance(had, int) or field.name in ("timestamp", "priority") else b"evil"
        for value in (None,) if field.name == "headers" else (wrong,) if had is None else (wrong, None):
            yield f"{field.name} is {value!r}", replace(props, **{field.name: value}), False
    for at, (name, had) in enumerate(headers):
        before, behind = headers[:at], headers[at + 1 :]
        for value in (VOID, text(""), number("l", 6), *([octets(had.raw[4:])] if at < own else [])):
            yield f"{name!r} is {value}", replace(props, headers=(*before, (name, value), *behind)), False
        yield f"no {name!r}", replace(props, headers=before + behind), False
        yield f"{name!r} twice", replace(props, headers=(headers[at], *headers)), True
    for name, value in ((b"junk", text("x")), (COUNTED[0], number("l", 1))):
        yield f"{name!r} too", props.adding((name, value)), False
    for name, value in (
        (b"x-delayer-id", IDS[3]), (b"x-delayer-id", text("7")),
        (b"x-delayer-refused", text("x-delay: expected a number, found 'in 3 moments'")),
        (b"x-delayer-exchange", text("delays.refused")), (b"x-delayer-routing-key", text("doomed.0")),
    ):  # fmt: skip
        changed = tuple((one, value if one == name else had) for one, had in headers)
        yield f"{name!r} of another: {value}", replace(props, headers=changed), False
    yield "turned", replace(props, headers=tuple(reversed(headers))), True
    yield "by name", by_name(props), True
    yield "gained headers first", replace(props, headers=headers[own:] + headers[:own]), True


CHANGES = [pytest.param(changed, hidden, id=name) for name, changed, hidden in changes()]


@pytest.mark.parametrize(("changed", "hidden"), CHANGES)
def test_every_change_of_a_refused_message_is_found(changed: Props, hidden: bool) -> None:
    for sorts in [False] if hidden else [False, True]:
        delivery = of(AWAITED)[0]._replace(properties=(by_name(changed) if sorts else changed).encode())
        found = judged(delivery, sorts=sorts)
        assert [one.split(":")[0] for one in found.wrong] == [f"doomed {AWAITED}"]
        assert not found.kept


@pytest.mark.parametrize(
    "change", [{"body": NUMBER.pack(AWAITED) + b"Doomed"}, {"routing_key": b"doomed.0"}], ids=["body", "key"]
)
def test_another_body_or_key_is_found(change: Mapping[str, bytes]) -> None:
    found = judged(of(AWAITED)[0]._replace(**change))
    assert len(found.wrong) == 1
    assert found.missing == [AWAITED]


def test_an_unchanged_message_is_right() -> None:
    delivery, props = of(AWAITED)
    assert judged(delivery) == (SENT, [], 0, [])
    assert judged(delivery._replace(properties=by_name(props).encode()), sorts=True) == (SENT, [], 0, [])


@pytest.mark.parametrize("name", COUNTED)
def test_redelivery_headers_are_allowed_on_redelivered_messages_only(name: bytes) -> None:
    delivery, props = of(AWAITED)
    sent = Props.decode(doomed(AWAITED).properties).headers or ()
    gained = (props.headers or ())[len(sent) :]
    counted = sorted((*sent, (name, number("l", 3))))
    resorted = delivery._replace(properties=replace(props, headers=(*counted, *gained)).encode())
    assert judged(resorted, again=True).kept
    assert not judged(resorted).kept
    # With headers in the published order, no broker delivered it again.
    unsorted = replace(props, headers=((name, number("l", 3)), *sent, *gained))
    assert not judged(delivery._replace(properties=unsorted.encode()), again=True).kept


def test_missing_foreign_and_repeated_refusals() -> None:
    deliveries = [of(one)[0] for one in range(SENT)]
    twice = of(0, id=SENT)[0]
    stranger = deliveries[1]._replace(body=b"something else")
    once, more = Judge(SENT, readings()), Judge(SENT, readings(times=2))
    assert once(deliveries[1:]).missing == [0]
    assert [text[:30] for text in once([*deliveries, stranger]).wrong] == ["refused and none of the doomed"]
    assert once([*deliveries, twice], faults=True).wrong == ["doomed 0: was refused 2 times, and read 1 times"]
    assert more([*deliveries, twice]).wrong == ["doomed 0: is there 2 times, and nothing broke"]
    assert more([*deliveries, twice], faults=True) == (SENT, [], 1, [])
    assert once([*deliveries, deliveries[0]], faults=True) == (SENT, [], 1, []), "one refusal, published again in doubt"
    assert once([*deliveries, deliveries[0]]).wrong == ["doomed 0: is there 2 times, and nothing broke"]
