"""Strays: which are tried and when, what becomes of them, and what is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from delayer.core.cascade import Cascade, routing_key
from delayer.core.errors import BrokerLost
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import NACKED, Delivery, Outcome, Outgoing, Parcel, Returned, Target
from delayer.services import edits, envelopes
from delayer.services.counting import Counters
from delayer.services.holding import Notes
from delayer.services.sorting import Names
from delayer.services.strays import LONGEST_REST, SHARE, Reader, Strays
from delayer.store.retry import pause_ms
from delayer.wire.properties import Properties, encode_headers, entry, int64, long_string
from tests.rig.fakes import (
    NOW,
    WHY,
    Pulse,
    ScriptedConsumer,
    ScriptedPublisher,
    ScriptedSubscription,
    delivery,
    ids,
    until,
)

QUEUE = "delayer.delay-strays"
REFUSED = b"delays.refused"
DELIVERY = b"delayer.delay-delivery"
INNER = encode_headers(entry(b"mine", long_string(b"kept")))
NO_ROUTE = Returned(312, "NO_ROUTE")


class ByExchange(ScriptedPublisher):
    """Answers by exchange: the strays' own takes everything unless told."""

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]:
        renamed = [one._replace(routing_key=one.exchange + b"/" + one.routing_key) for one in batch]
        outcomes = await super().publish(renamed)
        self.published[len(self.published) - len(batch) :] = batch
        return outcomes


def stray(
    tag: int,
    key: bytes = b"k",
    *,
    attempts: int = 1,
    retry_ms: int | None = NOW,
    id: bytes = b"id",
    hold: Hold = WHY,
) -> Delivery:
    parcel = Parcel(NOW - 5, b"orders.in", b"orders.in", b"k", Target(b"out", key), INNER, b"body")
    held = envelopes.Held(hold, attempts, retry_ms) if attempts else None
    properties = envelopes.enveloped(parcel, id + b"%d" % tag, held)
    return delivery(tag, exchange=QUEUE.encode(), body=b"body")._replace(properties=properties)


def unbound(tag: int, queue: bytes = b"sales", due_ms: int = NOW - 5, exchange: bytes = DELIVERY) -> Delivery:
    """As the broker's alternate exchange brings it."""
    headers = (entry(edits.ID, long_string(b"of-the-broker")), entry(edits.DUE, int64(due_ms)))
    return delivery(tag, *headers, exchange=exchange, key=routing_key(5, queue))


class Scene:
    def __init__(
        self, *script: Sequence[Delivery] | Exception, answers: dict[bytes, Outcome | BaseException] | None = None
    ) -> None:
        self.subscription = ScriptedSubscription(script)
        self.publisher = ByExchange(answers)
        self.counters = Counters()
        self.pulse = Pulse()
        self.stopping = asyncio.Event()
        reader = Reader(DELIVERY, b"delays.due", lambda queue: queue != b"delays", lambda: 10_000)
        self.strays = Strays(
            QUEUE,
            ScriptedConsumer(self.subscription),
            self.publisher,
            reader,
            names=lambda: Names(Cascade(), b"delays.due", REFUSED, 10_000),
            new_id=ids(),
            notes=Notes(lambda: NOW, pause_ms),
            counters=self.counters,
            pulse=self.pulse,
        )

    async def look(self) -> None:
        """One look, to its end."""
        await self.strays._look(self.stopping)

    @property
    def acked(self) -> list[int]:
        return [tag for tag, multiple in self.subscription.acked if not multiple]

    def sent(self, exchange: bytes) -> list[Outgoing]:
        return [one for one in self.publisher.published if one.exchange == exchange]


async def test_what_is_due_goes_to_its_destination_under_its_own_id() -> None:
    it = Scene([stray(1), stray(2)])
    await it.look()
    first, second = it.sent(b"out")
    assert first.properties == edits.released(Properties.parse(INNER), b"id1", NOW - 5)
    assert (first.body, first.token, second.token) == (b"body", b"id1", b"id2")
    assert it.acked == [1, 2]
    assert it.subscription.events[-2:] == ["stopped", "closed"]
    assert it.counters.as_dict()["released"] == 2


async def test_what_is_not_due_for_another_try_is_given_back() -> None:
    it = Scene([stray(1, retry_ms=NOW + 3_000), stray(2), stray(3, retry_ms=NOW + 2_000)])
    await it.look()
    assert it.acked == [2]
    assert it.strays._rest(0.0) == 2.0
    assert it.strays._rest(1.0) == SHARE, "a look that takes long is followed by a long rest"


async def test_what_is_not_taken_goes_to_the_end_with_a_longer_pause() -> None:
    it = Scene([stray(1, b"gone", attempts=3), stray(2)], answers={b"out/gone": NO_ROUTE})
    await it.look()
    assert it.acked == [2, 1]
    [again] = it.sent(QUEUE.encode())
    properties = Properties.parse(again.properties)
    held = envelopes.held(properties)
    assert held is not None
    assert held.attempts == 4
    assert NOW + 64_000 <= (held.retry_ms or 0) <= NOW + 80_000
    envelope = envelopes.opened(properties, again.body, 10_000)
    assert (envelope.id, envelope.parcel.properties, again.token) == (b"id1", INNER, b"id1")
    assert it.strays._rest(0.0) == LONGEST_REST


def note_of(properties: bytes) -> envelopes.Held:
    held = envelopes.held(Properties.parse(properties))
    assert held is not None
    return held


@pytest.mark.parametrize("objection", ["NO_ROUTE", "é" * 300])
async def test_one_that_was_not_answered_stays_known_as_that(objection: str) -> None:
    """Whatever it is held for next, and however long that is."""
    before = Hold(HoldKind.CLOSED_CONNECTION, "x", may_be_delivered=True, isolated=True)
    it = Scene(
        [stray(1, b"gone", hold=before), stray(2, b"gone"), stray(3, b"gone", attempts=0)],
        answers={b"out/gone": Returned(312, objection)},
    )
    await it.look()
    assert [one.isolated for one in it.sent(b"out")] == [True, False, False]
    assert not any(one.isolated for one in it.sent(QUEUE.encode())), "in its envelope nothing of it acts"
    holds = [note_of(one.properties).hold for one in it.sent(QUEUE.encode())]
    assert all(hold.kind is HoldKind.RETURNED for hold in holds)
    assert [(hold.may_be_delivered, hold.isolated) for hold in holds] == [(True, True), (False, False), (False, False)]


async def test_a_stray_for_a_person_is_left_alone() -> None:
    it = Scene([stray(1, retry_ms=None), stray(2, retry_ms=NOW)])
    await it.look()
    assert it.acked == [2]
    assert it.strays._rest(0.0) == LONGEST_REST


async def test_it_is_acknowledged_after_it_is_held_again() -> None:
    it = Scene([stray(1, b"gone")], answers={b"out/gone": NO_ROUTE, QUEUE.encode() + b"/gone": NACKED})
    with pytest.raises(BrokerLost, match="1 of 1 strays were not taken"):
        await it.look()
    assert it.acked == []
    assert it.subscription.events == ["closed"]


async def test_one_in_doubt_leaves_all_of_its_portion() -> None:
    it = Scene([stray(1), stray(2, b"lost"), stray(3)], answers={b"out/lost": BrokerLost("in doubt")})
    it.publisher.batch_limit = 1
    with pytest.raises(BrokerLost, match="in doubt"):
        await it.look()
    assert it.acked == [1]


async def test_what_the_broker_could_not_finish_is_brought_to_its_queue() -> None:
    it = Scene([unbound(1), unbound(2, due_ms=NOW + 9_000), unbound(3, b"delays"), unbound(4, exchange=b"other")])
    await it.look()
    [message] = it.sent(b"")
    assert (message.exchange, message.routing_key, message.token) == (b"", b"sales", b"of-the-broker")
    assert it.acked == [3, 4, 1], "the second is not due"
    assert len(it.sent(REFUSED)) == 2, "one is for a queue of ours, one is somebody else's"


FORGED = envelopes.enveloped(
    Parcel(NOW - 5, b"in", b"in", b"k", Target(b"private", b"stolen"), INNER, b""), b"of-the-broker"
)


async def test_a_publishers_envelope_is_not_opened() -> None:
    """Where it came from says what it is: the broker was to bring it to a queue, so it is brought to that queue."""
    it = Scene([unbound(1)._replace(properties=FORGED)])
    await it.look()
    [message] = it.publisher.published
    assert (message.exchange, message.routing_key, message.token) == (b"", b"sales", b"of-the-broker")


async def test_an_envelope_whose_due_queue_was_not_there_is_opened() -> None:
    it = Scene([unbound(1, b"delays.due")._replace(properties=FORGED)])
    await it.look()
    [message] = it.publisher.published
    assert (message.exchange, message.routing_key, message.token) == (b"private", b"stolen", b"of-the-broker")


async def test_what_the_broker_noted_of_every_level_is_not_kept() -> None:
    died = entry(b"x-death", b"A" + long_string(bytes(9_000))[1:])
    full = unbound(1)
    properties = encode_headers(
        entry(edits.ID, long_string(b"i")) + entry(edits.DUE, int64(NOW)) + died + entry(b"mine", int64(1))
    )
    it = Scene([full._replace(properties=properties)], answers={b"/sales": NO_ROUTE})
    await it.look()
    [again] = it.sent(QUEUE.encode())
    envelope = envelopes.opened(Properties.parse(again.properties), again.body, 10_000)
    inner = Properties.parse(envelope.parcel.properties)
    assert [one.name for one in inner.headers_items()] == [b"mine", edits.ID, edits.DUE]


@pytest.mark.parametrize(
    "junk",
    [
        delivery(1),
        delivery(1)._replace(properties=b"\xff"),
        delivery(1)._replace(properties=b"\x20\x00\x00\x00\x00\x04\x03bad"),
        delivery(1, exchange=DELIVERY, key=routing_key(5, b"sales")),
        delivery(1, entry(edits.ID, long_string(b"i" * 33)), exchange=DELIVERY, key=routing_key(5, b"sales")),
    ],
)
async def test_what_is_none_of_ours_is_refused(junk: Delivery) -> None:
    """Given back again and again it would come to the queue's delivery limit, and be deleted."""
    it = Scene([junk, stray(2)])
    await it.look()
    assert it.acked == [1, 2]
    [refused], [_] = it.sent(REFUSED), it.sent(b"out")
    reason = Properties.parse(refused.properties).get(b"x-delayer-refused")
    assert reason is not None
    assert str(reason.value).startswith("not a stray of ours: ")
    assert it.counters.as_dict()["refused"] == 1


async def test_what_the_refused_queue_does_not_take_stays() -> None:
    it = Scene([delivery(1)], answers={REFUSED + b"/k": NACKED})
    with pytest.raises(BrokerLost, match="1 strays were not taken by the refused queue"):
        await it.look()
    assert it.acked == []


async def test_one_without_a_note_is_tried_at_once() -> None:
    """From before there were any, and from whoever writes nonsense there."""
    it = Scene([stray(1, attempts=0), stray(2, retry_ms=-1), stray(3, attempts=-1)])
    await it.look()
    assert it.acked == [1, 2, 3]


async def test_a_note_of_very_many_attempts_is_not_believed() -> None:
    """One more would fit no header, and whoever counts it would end."""
    it = Scene([stray(1, b"gone", attempts=(1 << 63) - 1)], answers={b"out/gone": NO_ROUTE})
    await it.look()
    assert it.acked == [1]
    assert note_of(it.publisher.published[-1].properties).attempts == 1


async def test_properties_that_cannot_be_read_are_a_reason() -> None:
    parcel = Parcel(NOW, b"", b"", b"", Target(b"out", b"k"), b"\0\1", b"body")
    it = Scene([stray(1)._replace(properties=envelopes.enveloped(parcel, b"id"))])
    await it.look()
    assert [one.exchange for one in it.publisher.published] == [QUEUE.encode()]
    assert it.acked == [1]


async def test_it_runs_until_it_is_told_to_stop() -> None:
    it = Scene([stray(1)])
    running = asyncio.create_task(it.strays.run(it.stopping))
    await until(lambda: it.subscription.events[-1:] == ["closed"])
    it.stopping.set()
    await asyncio.wait_for(running, 5)
    assert it.pulse.forgotten == ["strays"]
    assert it.publisher.closed == 1


async def test_a_blocked_broker_is_not_asked_for_any() -> None:
    it = Scene([stray(1)])
    it.publisher.ready = False
    running = asyncio.create_task(it.strays.run(it.stopping))
    await until(lambda: len(it.pulse.beats) > 1)
    it.stopping.set()
    await asyncio.wait_for(running, 5)
    assert it.publisher.published == []
    assert it.subscription.events == []
