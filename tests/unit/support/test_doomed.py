"""The judge of what was refused finds whatever a daemon could do to it: one mutation of each kind is planted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Final

import pytest

from delayer.core.message import Delivery
from tests.faults.doomed import COUNTED, Doomed, Judge
from tests.support.letters import NUMBER, SHAPES, doomed
from tests.support.raw import Props, number, octets, text
from tests.support.readings import Readings

INTO: Final = b"delayer.in"
SENT: Final = 16
AWAITED: Final = 11
"""Its letter has every property that a letter may have, and a header table of several entries."""
IDS: Final = [text(b"%032x" % one) for one in range(SENT + 1)]


def of(one: int, *, id: int | None = None) -> tuple[Delivery, Props]:
    """As it has to stand in the refused queue, and its properties."""
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
    """All of them stand there, the awaited one like this."""
    others = [of(one)[0] for one in range(SENT) if one != AWAITED]
    if sorts:
        others = [other._replace(properties=by_name(Props.decode(other.properties)).encode()) for other in others]
    return Judge(SENT, readings(again=again), sorts=sorts)([*others, changed])


def by_name(props: Props) -> Props:
    return props.sorted_if(True)


def test_the_awaited_one_has_everything_that_could_go_wrong() -> None:
    sent = Props.decode(doomed(AWAITED).properties)
    assert sent.expiration is not None
    assert {field.name for field in fields(sent) if getattr(sent, field.name) is not None} == {
        "content_type", "headers", "delivery_mode", "priority", "correlation_id", "expiration", "message_id",
    }  # fmt: skip
    assert by_name(sent) != sent, "who sorts its headers must be seen"
    timed = Props.decode(doomed(4).properties)
    assert (timed.timestamp, timed.app_id) == (1_700_000_000, b"ledger")
    assert len(SHAPES) <= SENT, "every shape of headers is among them"


def header(name: bytes, value: object) -> Callable[[Props], Props]:
    """That header has another value."""
    return lambda props: replace(
        props, headers=tuple((one, value if one == name else had) for one, had in props.headers or ())
    )


def without(name: bytes) -> Callable[[Props], Props]:
    return lambda props: props.without(name)


def first_again(props: Props) -> Props:
    return replace(props, headers=((props.headers or ())[0], *(props.headers or ())))


def turned(props: Props) -> Props:
    return replace(props, headers=tuple(reversed(props.headers or ())))


def gained_first(props: Props) -> Props:
    had = len(Props.decode(doomed(AWAITED).properties).headers or ())
    table = props.headers or ()
    return replace(props, headers=(*table[had:], *table[:had]))


MUTATIONS: Mapping[str, Callable[[Props], Props]] = {
    "a content type less": lambda props: replace(props, content_type=None),
    "another content type": lambda props: replace(props, content_type=b"text/plain"),
    "a content encoding": lambda props: replace(props, content_encoding=b"gzip"),
    "transient": lambda props: replace(props, delivery_mode=1),
    "no delivery mode": lambda props: replace(props, delivery_mode=None),
    "another priority": lambda props: replace(props, priority=9),
    "another correlation id": lambda props: replace(props, correlation_id=b"evil"),
    "a reply to": lambda props: replace(props, reply_to=b"evil"),
    "an expiration that acts": lambda props: replace(props, expiration=b"3600000"),
    "another message id": lambda props: replace(props, message_id=b"evil"),
    "no message id": lambda props: replace(props, message_id=None),
    "a timestamp": lambda props: replace(props, timestamp=1),
    "a type": lambda props: replace(props, type=b"evil"),
    "a user id": lambda props: replace(props, user_id=b"guest"),
    "an app id": lambda props: replace(props, app_id=b"evil"),
    "a cluster id": lambda props: replace(props, cluster_id=b"evil"),
    "a header more": lambda props: props.adding((b"junk", text("x"))),
    "a header less": without(b"after"),
    "a header twice": first_again,
    "a header of another value": header(b"after", number("l", 5)),
    "a header of another width": header(b"after", number("I", AWAITED)),
    "a delay of another type": header(b"x-delay", octets(b"in %d moments" % AWAITED)),
    "no delay": without(b"x-delay"),
    "headers the other way round": turned,
    "headers in the order of their names": by_name,
    "what it gained first": gained_first,
    "no headers": lambda props: replace(props, headers=None),
    "no id": without(b"x-delayer-id"),
    "an id that is none": header(b"x-delayer-id", text("7")),
    "two ids": lambda props: props.adding((b"x-delayer-id", IDS[SENT])),
    "the id of another": header(b"x-delayer-id", IDS[3]),
    "no reason": without(b"x-delayer-refused"),
    "an empty reason": header(b"x-delayer-refused", text("")),
    "the reason of another": header(b"x-delayer-refused", text("x-delay: expected a number, found 'in 3 moments'")),
    "a reason that is no text": header(b"x-delayer-refused", number("l", 1)),
    "no exchange": without(b"x-delayer-exchange"),
    "another exchange": header(b"x-delayer-exchange", text("delays.refused")),
    "no routing key": without(b"x-delayer-routing-key"),
    "another routing key": header(b"x-delayer-routing-key", text("doomed.0")),
    "no note of the expiration": without(b"x-delayer-expiration"),
    "another expiration noted": header(b"x-delayer-expiration", text("1")),
    "counted though it came once": lambda props: props.adding((COUNTED[0], number("l", 1))),
}


HIDDEN: Final = frozenset(
    {
        "a header twice", "headers the other way round", "headers in the order of their names", "what it gained first",
        "two ids",
    }
)  # fmt: skip
"""By a broker that sorts headers, and keeps one of each name."""


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_is_found(mutation: str) -> None:
    delivery, props = of(AWAITED)
    caught(delivery, MUTATIONS[mutation](props), sorts=False)


@pytest.mark.parametrize("mutation", [name for name in MUTATIONS if name not in HIDDEN])
def test_a_mutation_is_found_behind_a_broker_that_sorts(mutation: str) -> None:
    delivery, props = of(AWAITED)
    caught(delivery, by_name(MUTATIONS[mutation](props)), sorts=True)


def caught(delivery: Delivery, changed: Props, *, sorts: bool) -> None:
    found = judged(delivery._replace(properties=changed.encode()), sorts=sorts)
    assert [one.split(":")[0] for one in found.wrong] == [f"doomed {AWAITED}"]
    assert not found.kept


@pytest.mark.parametrize(
    "change", [{"body": NUMBER.pack(AWAITED) + b"Doomed"}, {"routing_key": b"doomed.0"}], ids=["body", "key"]
)
def test_another_body_or_key_is_found(change: Mapping[str, bytes]) -> None:
    found = judged(of(AWAITED)[0]._replace(**change))
    assert len(found.wrong) == 1
    assert found.missing == [AWAITED]


def test_nothing_else_is_found() -> None:
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
    # In its own order it was not delivered again.
    unsorted = replace(props, headers=((name, number("l", 3)), *sent, *gained))
    assert not judged(delivery._replace(properties=unsorted.encode()), again=True).kept


def test_missing_foreign_and_repeated_refusals() -> None:
    deliveries = [of(one)[0] for one in range(SENT)]
    twice = of(0, id=SENT)[0]
    stranger = deliveries[1]._replace(body=b"something else")
    once, more = Judge(SENT, readings()), Judge(SENT, readings(times=2))
    assert once(deliveries[1:]).missing == [0]
    assert [text[:30] for text in once([*deliveries, stranger]).wrong] == ["refused and none of the doomed"]
    assert once([*deliveries, twice], faults=True).wrong == ["doomed 0: stands there 2 times, and was read 1 times"]
    assert more([*deliveries, twice]).wrong == ["doomed 0: stands there 2 times, and nothing broke"]
    assert more([*deliveries, twice], faults=True) == (SENT, [], 1, [])
