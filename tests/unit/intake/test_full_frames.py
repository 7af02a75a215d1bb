"""Messages whose properties are as long as a frame allows: each publish of ours fits, or the message is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from delayer.amqp.properties import entry, int64, long_string
from delayer.amqp.values import Delivery, Outgoing
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import Parcel, Target
from delayer.core.operations import Cancel
from delayer.core.plan import Mode, Park, Policy, Route
from delayer.core.retry_policy import RetryPolicy
from delayer.format.envelope import HoldNote, envelope_properties
from delayer.format.headers import ROOM
from delayer.intake.dispatch import Objection
from delayer.intake.handle import batch_plan, classify, replies_to
from tests.support.fakes import NOW, ids
from tests.support.raw import Props, array, number, table, text
from tests.unit.intake.test_classify import NAMES
from tests.unit.intake.test_handle import Scene

LONG = b"n" * 255
MAX = 131_052
FULL = replace(NAMES, max_properties=MAX)
RETRY = RetryPolicy(5_000, 2, 3_600_000, 0.1, 10, b"parked")
ROUTES = {LONG: Route(LONG, LONG[1:], routing_key=LONG), b"retry": Route(b"retry", b"", retry=RETRY)}
NATIVE = Policy(Mode.NATIVE, ROUTES, 10**12, keep_ms=1_000)
STORE = Policy(Mode.STORE, ROUTES, 10**12)


def repeated(count: int, delay: bytes = b"b\x05") -> bytes:
    return entry(b"x-delay", long_string(b"0" * 40 + b"50")) + entry(b"x-delay", delay) * count


DEAD = Props(
    headers=(
        (b"x-death", array(table((b"reason", text("r" * 400)), (b"queue", text("q" * 255))))),
        (b"CC", array(text("copy"))),
        (b"x-delayer-failed-in", text("q" * 255)),
        (b"x-delayer-retries", number("l", 1)),
    )
).encode()[6:]
HEADERS: Mapping[str, bytes] = {
    "at once": b"",
    "soon": entry(b"x-delay", int64(500)),
    "cascade": entry(b"x-delay", int64(50_000)),
    "repeated delays": repeated(8_000),
    "repeated delays at once": entry(b"x-delay", int64(0)) + repeated(8_000),
    "repeated bytes": entry(b"x-delay", b"B\x05") * 11_000,
    "cancel": entry(b"x-delay-cancel", long_string(LONG)),
    "refused": entry(b"x-delay", long_string(b"?" * 400)),
    "dead letter": DEAD,
}


def full(headers: bytes, length: int) -> bytes:
    """Properties of ``length`` bytes with these headers, a user_id, a correlation_id and a reply_to."""
    shorts = b"".join(bytes((len(value),)) + value for value in (LONG, LONG, b"guest"))
    size = length - 6 - len(shorts) - len(headers) - len(entry(b"x", long_string(b"")))
    table_ = headers + entry(b"x", long_string(b"v" * max(size, 0)))
    return b"\x26\x10" + len(table_).to_bytes(4, "big") + table_ + shorts


@pytest.mark.parametrize("length", [MAX - ROOM, MAX - ROOM - 300, MAX])
@pytest.mark.parametrize("policy", [NATIVE, STORE], ids=["native", "store"])
@pytest.mark.parametrize("exchange", [LONG, b"retry"], ids=["route", "retry"])
@pytest.mark.parametrize("case", HEADERS)
def test_whatever_arrives_fits_every_publish_at_intake(case: str, exchange: bytes, policy: Policy, length: int) -> None:
    raw = full(HEADERS[case], length)
    delivery = Delivery(1, False, exchange, LONG, raw, b"")
    one = classify(delivery, policy, NOW, MAX)
    planned, sent = one[2], list[Outgoing]()
    if isinstance(planned, Cancel):
        sent = replies_to([one], frozenset(), frozenset(), ids())
    elif isinstance(planned, Park):
        assert len(one[0].properties) + ROOM <= MAX
    else:
        work = batch_plan([one], FULL, ids())
        sent = [publication.outgoing for publication in (*work.publications, *(kept for _, kept in work.kept))]
        parcels = [one.parcel for one in work.publications if one.parcel is not None]
        it = Scene()
        it.live.places = FULL
        hold = Hold(HoldKind.UNANSWERED, "w" * 600)
        for note in (None, HoldNote(hold, 9, NOW)):
            sent += it.dispatch._build_retries([Objection(delivery, parcel, hold, note) for parcel in parcels])
    assert sent or isinstance(planned, Park)
    for message in sent:
        assert len(message.properties) <= MAX
        assert max(len(message.exchange), len(message.routing_key)) <= 255


@pytest.mark.parametrize("case", HEADERS)
async def test_whatever_is_due_fits_its_publish(case: str) -> None:
    it = Scene()
    it.live.places = FULL
    raw = full(HEADERS[case], MAX - ROOM)
    parcel = Parcel(NOW - 1, LONG, LONG, LONG, Target(LONG, LONG), raw, b"")
    later = parcel._replace(due_ms=NOW + 5_000)
    hold = HoldNote(Hold(HoldKind.UNANSWERED, "w" * 600), 9, NOW)
    envelopes = [envelope_properties(one, b"i" * 32, note) for one in (parcel, later) for note in (None, hold)]
    await it.carry(*(Delivery(tag, False, b"x", b"k", one, b"") for tag, one in enumerate(envelopes, 1)))
    assert len(it.publisher.published) == 4
    assert max(len(one.properties) for one in it.publisher.published) <= MAX


def test_a_message_beyond_a_lowered_limit_is_refused() -> None:
    """The connection may be new since the message was planned, and its frames shorter."""
    one = classify(Delivery(1, False, LONG, LONG, full(b"", 4_000), b""), NATIVE, NOW, MAX)
    [refused] = batch_plan([one], replace(FULL, max_properties=3_000), ids()).publications
    assert refused.refusal.startswith("the properties are too long: expected at most 3000 bytes, found 4")
    assert len(refused.outgoing.properties) <= 3_000
