"""What comes out of the cascade: on time, early by a moment, early by much, and junk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from delayer.amqp import edits
from delayer.amqp.edits import Held
from delayer.amqp.properties import Properties, encode_headers, entry, int64, long_string
from delayer.core.cascade import MAX_SECONDS, Cascade, routing_key
from delayer.core.counters import Counters
from delayer.core.hold import too_late
from delayer.core.message import NACKED, Delivery, Parcel, Returned, Target
from delayer.core.plan import LATEST_MS
from delayer.intake.consume import AckTracker
from delayer.intake.handle import MOMENT_MS, Dispatch, DueHandler
from delayer.intake.holding import MOST_ATTEMPTS, Holding
from tests.support.fakes import NOW, WHY, Acks, ScriptedHolder, ScriptedLive, ScriptedPublisher, delivery, ids

INNER = encode_headers(entry(b"mine", long_string(b"kept")))


class Scene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, publisher: ScriptedPublisher | None = None) -> None:
        self.slept: list[float] = []
        self.publisher = publisher or ScriptedPublisher()
        self.holder = ScriptedHolder()
        self.counters = Counters()
        self.acks = Acks()
        self.live = ScriptedLive()
        holding = Holding(
            self.publisher, self.holder, self.live, self.counters, new_id=ids(), pause_ms=lambda n, _: 10_000 * n
        )
        self.handler = DueHandler(self.live, Dispatch(self.publisher, holding, self.live, self.counters))
        self.short_by = 0
        monkeypatch.setattr("delayer.intake.handle.asyncio.sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        """Sleep by the script's clock; the first time less than asked: a little, as event loops do, or by much, where
        the clock is set back."""
        if seconds:
            self.slept.append(seconds)
            self.live.now += round(seconds * 1000) - self.short_by
            self.short_by = 0

    async def carry(self, *batch: Delivery) -> None:
        acks = AckTracker(self.acks)
        acks.read(batch)
        await self.handler(batch, acks)


Make = Callable[..., Scene]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda publisher=None: Scene(monkeypatch, publisher)


def carried(tag: int, due_ms: int, key: bytes = b"k", held: Held | None = None) -> Delivery:
    parcel = Parcel(due_ms, b"orders.in", b"orders.in", b"k", Target(b"orders.out", key), INNER, b"")
    return delivery(tag, body=b"body")._replace(
        properties=edits.enveloped(parcel, b"id", held), exchange=b"delayer.delivery"
    )


@pytest.mark.parametrize("late_ms", [0, 1, 10**10])
async def test_due_goes_to_its_destination(scene: Make, late_ms: int) -> None:
    it = scene()
    await it.carry(carried(1, NOW - late_ms))
    [message] = it.publisher.published
    assert message[:2] == (b"orders.out", b"k")
    assert message.properties == edits.released(Properties.parse(INNER), b"id", NOW - late_ms)
    assert (message.body, message.token) == (b"body", b"id")
    assert it.acks.acked == [(1, True)]
    assert it.slept == []
    assert it.counters.as_dict()["released"] == 1


@pytest.mark.parametrize("early_ms", [1, 500, MOMENT_MS])
async def test_early_by_a_moment_waits_here(scene: Make, early_ms: int) -> None:
    it = scene()
    await it.carry(carried(1, NOW + early_ms), carried(2, NOW))
    assert it.slept == [early_ms / 1000]
    assert [message.exchange for message in it.publisher.published] == [b"orders.out"] * 2


async def test_a_sleep_that_ends_too_soon_is_slept_again(scene: Make) -> None:
    it = scene()
    it.short_by = 1
    await it.carry(carried(1, NOW + 10))
    assert it.slept == [0.01, 0.001]
    assert it.live.now >= NOW + 10


async def test_a_clock_that_is_set_back_meanwhile_keeps_nobody_waiting(scene: Make) -> None:
    """Hours would pass in which nothing else comes out of the cascade."""
    it = scene()
    it.short_by = 3600_000
    await it.carry(carried(1, NOW + 10), carried(2, NOW - 7200_000))
    assert it.slept == [0.01]
    again, released = it.publisher.published
    assert again.exchange == Cascade().entry(3600).encode()
    assert released.exchange == b"orders.out"
    assert it.acks.acked == [(2, True)]


@pytest.mark.parametrize(
    ("early_ms", "seconds"),
    [(MOMENT_MS + 1, 2), (3600_000, 3600), (MAX_SECONDS * 1000 + 1, MAX_SECONDS), (LATEST_MS - NOW, MAX_SECONDS)],
)
async def test_early_by_more_goes_back_in(scene: Make, early_ms: int, seconds: int) -> None:
    it = scene()
    await it.carry(carried(1, NOW + early_ms), carried(2, NOW))
    again, released = it.publisher.published
    assert again.exchange == Cascade().entry(seconds).encode()
    assert again.routing_key == routing_key(seconds, b"delays.due")
    assert again.properties == carried(1, NOW + early_ms).properties
    assert released.exchange == b"orders.out"
    assert it.slept == []


JUNK = [
    b"",
    b"\0\0",
    b"\xff\xff",
    encode_headers(b"\x03bad"),
    encode_headers(entry(b"x-delayer-envelope", int64(2))),
    edits.enveloped(Parcel(NOW, b"", b"", b"", Target(b"", b""), b"\xff", b""), b"id"),
    edits.enveloped(Parcel(NOW, b"", b"", b"", Target(b"", b""), encode_headers(b"\x03bad"), b""), b"id"),
    edits.enveloped(Parcel(1 << 62, b"", b"", b"", Target(b"", b""), b"\0\0", b""), b"id"),
    edits.enveloped(Parcel(NOW, b"", b"", b"", Target(b"x" * 256, b""), b"\0\0", b""), b"id"),
    edits.enveloped(Parcel(NOW, b"", b"", b"", Target(b"", b""), bytes(9_000), b""), b"id"),
]


@pytest.mark.parametrize("raw", JUNK)
async def test_junk_is_refused_and_stops_nobody(scene: Make, raw: bytes) -> None:
    it = scene()
    await it.carry(carried(1, NOW), delivery(2)._replace(properties=raw), carried(3, NOW))
    assert [message.exchange for message in it.publisher.published] == [b"orders.out", b"delays.refused", b"orders.out"]
    assert it.acks.acked == [(3, True)]
    assert it.counters.as_dict()["refused"] == 1


@pytest.mark.parametrize("answer", [Returned(312, "NO_ROUTE"), NACKED])
async def test_a_message_that_its_destination_does_not_take_is_held(scene: Make, answer: Returned) -> None:
    it = scene(ScriptedPublisher({b"gone": answer}))
    await it.carry(carried(1, NOW, b"gone"), carried(2, NOW))
    [(parcel, _)] = it.holder.held
    assert (parcel.properties, parcel.body) == (INNER, b"body")
    assert it.acks.acked[-1] == (2, True)


def opened(raw: bytes) -> edits.Envelope:
    return edits.opened(Properties.parse(raw), b"body", 10_000)


@pytest.mark.parametrize("attempts", range(MOST_ATTEMPTS))
async def test_without_a_store_it_goes_back_into_the_cascade_with_its_attempts_counted(
    scene: Make, attempts: int
) -> None:
    it = scene(ScriptedPublisher({b"gone": NACKED}))
    it.live.holds_in_store = False
    earlier = Held(WHY, attempts, NOW - 1) if attempts else None
    await it.carry(carried(1, NOW - 60_000, b"gone", earlier))
    _, again = it.publisher.published
    envelope = opened(again.properties)
    assert (envelope.id, envelope.parcel.due_ms, envelope.held and envelope.held.attempts) == (
        b"id", NOW - 60_000, attempts + 1,
    )  # fmt: skip
    if attempts + 1 < MOST_ATTEMPTS:
        seconds = 10 * (attempts + 1)
        assert (again.exchange, again.routing_key) == (
            Cascade().entry(seconds).encode(), routing_key(seconds, b"delays.due"),
        )  # fmt: skip
        assert envelope.next_ms == NOW + seconds * 1000
    else:
        assert again.exchange == Cascade().strays.encode()
        assert envelope.held is not None
        assert envelope.held.retry_ms is None
    assert it.acks.acked == [(1, True)]
    assert it.counters.as_dict()["held"] == (0 if attempts else 1)


async def test_a_message_is_not_tried_before_its_next_attempt(scene: Make) -> None:
    it = scene()
    early = carried(1, NOW - 60_000, held=Held(WHY, 3, NOW + 5_000))
    await it.carry(early, carried(2, NOW - 60_000, held=Held(WHY, 3, NOW + 700)))
    again, released = it.publisher.published
    assert (again.exchange, again.properties) == (Cascade().entry(5).encode(), early.properties)
    assert (released.exchange, it.slept) == (b"orders.out", [0.7])
    found = Properties.parse(released.properties).get(edits.DUE)
    assert found is not None
    assert found.value == NOW - 60_000


async def test_the_notes_of_earlier_attempts_stay(scene: Make) -> None:
    """A message that closed a connection goes by the isolation connection; a destination may have it already."""
    it = scene(ScriptedPublisher({b"gone": NACKED}))
    it.live.holds_in_store = False
    before = replace(WHY, may_be_delivered=True, isolated=True)
    await it.carry(carried(1, NOW, b"gone", Held(before, 2, NOW)))
    sent, again = it.publisher.published
    held = opened(again.properties).held
    assert sent.isolated
    assert held is not None
    assert (held.hold.kind, held.hold.may_be_delivered, held.hold.isolated) == ("nacked", True, True)


async def test_too_late_waits_for_a_person_at_once_and_is_delivered_when_one_says_so(scene: Make) -> None:
    it = scene()
    it.live.holds_in_store = False
    it.live.limits = {b"orders.in": 60_000}
    late = too_late(NOW - 70_000, NOW, 60_000)
    assert late is not None
    await it.carry(carried(1, NOW - 70_000), carried(2, NOW - 70_000, held=Held(late, 0, NOW)))
    stray, delivered = it.publisher.published
    assert (stray.exchange, opened(stray.properties).held) == (Cascade().strays.encode(), Held(late, 1, None))
    assert delivered.exchange == b"orders.out"
