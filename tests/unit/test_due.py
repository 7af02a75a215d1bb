"""What comes out of the cascade: on time, early by a moment, early by much, and junk."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from delayer.core.cascade import MAX_SECONDS, Cascade, routing_key
from delayer.core.message import NACKED, Delivery, Parcel, Returned, Target
from delayer.core.plan import LATEST_MS
from delayer.services import edits, envelopes
from delayer.services.counting import Counters
from delayer.services.dispatch import Dispatch
from delayer.services.due import MOMENT_MS, DueCarrier
from delayer.services.settle import Settler
from delayer.services.sorting import Names
from delayer.wire.properties import Properties, encode_headers, entry, int64, long_string
from tests.rig.fakes import NOW, Acks, ScriptedHolder, ScriptedPublisher, delivery, ids

INNER = encode_headers(entry(b"mine", long_string(b"kept")))


class Scene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, publisher: ScriptedPublisher | None = None) -> None:
        self.now = NOW
        self.slept: list[float] = []
        self.publisher = publisher or ScriptedPublisher()
        self.holder = ScriptedHolder()
        self.counters = Counters()
        self.acks = Acks()
        names = Names(Cascade(), b"delays.due", b"delays.refused", 10_000)
        self.carrier = DueCarrier(
            now_ms=lambda: self.now,
            names=lambda: names,
            dispatch=Dispatch(self.publisher, self.holder, self.counters),
            new_id=ids(),
        )
        self.short_by = 0
        monkeypatch.setattr("delayer.services.due.asyncio.sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        """Sleep by the script's clock; the first time less than asked: a little, as event loops do, or by much, where
        the clock is set back."""
        if seconds:
            self.slept.append(seconds)
            self.now += round(seconds * 1000) - self.short_by
            self.short_by = 0

    async def carry(self, *batch: Delivery) -> None:
        settler = Settler(self.acks)
        settler.read(batch)
        await self.carrier(batch, settler)


Make = Callable[..., Scene]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda publisher=None: Scene(monkeypatch, publisher)


def carried(tag: int, due_ms: int, key: bytes = b"k") -> Delivery:
    parcel = Parcel(due_ms, b"orders.in", b"orders.in", b"k", Target(b"orders.out", key), INNER, b"")
    return delivery(tag, body=b"body")._replace(
        properties=envelopes.enveloped(parcel, b"id"), exchange=b"delayer.delivery"
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
    assert it.now >= NOW + 10


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
    envelopes.enveloped(Parcel(NOW, b"", b"", b"", Target(b"", b""), b"\xff", b""), b"id"),
    envelopes.enveloped(Parcel(NOW, b"", b"", b"", Target(b"", b""), encode_headers(b"\x03bad"), b""), b"id"),
    envelopes.enveloped(Parcel(1 << 62, b"", b"", b"", Target(b"", b""), b"\0\0", b""), b"id"),
    envelopes.enveloped(Parcel(NOW, b"", b"", b"", Target(b"x" * 256, b""), b"\0\0", b""), b"id"),
    envelopes.enveloped(Parcel(NOW, b"", b"", b"", Target(b"", b""), bytes(9_000), b""), b"id"),
]


@pytest.mark.parametrize("raw", JUNK)
async def test_junk_is_refused_and_stops_nobody(scene: Make, raw: bytes) -> None:
    it = scene()
    await it.carry(carried(1, NOW), delivery(2)._replace(properties=raw), carried(3, NOW))
    assert [message.exchange for message in it.publisher.published] == [b"orders.out", b"delays.refused", b"orders.out"]
    assert it.acks.acked == [(3, True)]
    assert it.counters.as_dict()["refused"] == 1


@pytest.mark.parametrize("answer", [Returned(312, "NO_ROUTE"), NACKED])
async def test_what_its_destination_does_not_take_is_held(scene: Make, answer: Returned) -> None:
    it = scene(ScriptedPublisher({b"gone": answer}))
    await it.carry(carried(1, NOW, b"gone"), carried(2, NOW))
    [(parcel, _)] = it.holder.held
    assert (parcel.properties, parcel.body) == (INNER, b"body")
    assert it.acks.acked[-1] == (2, True)
