"""Releasing a lane: what is forgotten, what is held, what comes back, and how long the loop sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from delayer.amqp.properties import Properties, encode_headers, entry, long_string
from delayer.core.counters import Counters
from delayer.core.errors import BrokerLost, LaneLost, StoreLost
from delayer.core.hold import Hold, HoldKind, hold_for
from delayer.core.message import NACKED, Outcome, Outgoing, Returned
from delayer.release import loop as module
from delayer.release.loop import COALESCE_SECONDS, Portion, Release, prepared
from tests.support.fakes import NOW, Heartbeat, ScriptedLane, ScriptedLive, ScriptedPublisher, due, until


class Scene:
    def __init__(self, lane: ScriptedLane, publisher: ScriptedPublisher | None = None) -> None:
        self.lane = lane
        self.publisher = publisher or ScriptedPublisher()
        self.heartbeat = Heartbeat()
        self.counters = Counters()
        self.release = Release(
            lane,
            self.publisher,
            ScriptedLive(),
            portion=Portion(10, 1000),
            heartbeat=self.heartbeat,
            counters=self.counters,
        )

    def count(self, kind: str) -> int:
        return self.counters.as_dict()[kind]


async def test_a_tick_publishes_in_order_and_forgets_what_is_confirmed() -> None:
    rows = [due(3), due(1), due(2)]
    it = Scene(ScriptedLane(claims=[rows], hint=7.5))
    assert await it.release.tick() == COALESCE_SECONDS
    assert [message.body for message in it.publisher.published] == [b"3", b"1", b"2"]
    assert it.lane.settled == [(rows, [])]
    assert it.count("released") == 3


async def test_a_tick_without_anything_due_publishes_nothing() -> None:
    it = Scene(ScriptedLane(hint=3.0))
    assert await it.release.tick() == 3.0
    assert it.publisher.batches == 0
    assert it.lane.settled == [([], [])]


async def test_with_more_to_do_there_is_no_sleep() -> None:
    it = Scene(ScriptedLane(claims=[[due(1)], [due(2)]]))
    assert await it.release.tick() == 0.0


async def test_objections_hold_the_message_with_the_reason() -> None:
    publisher = ScriptedPublisher({b"gone": Returned(312, "NO_ROUTE"), b"full": NACKED})
    rows = [due(1), due(2, key=b"gone"), due(3, key=b"full", attempts=4)]
    it = Scene(ScriptedLane(claims=[rows]), publisher)
    await it.release.tick()
    assert it.lane.settled == [
        (
            [rows[0]],
            [(rows[1], hold_for(Returned(312, "NO_ROUTE"))), (rows[2], hold_for(NACKED))],
        )
    ]
    assert it.count("released") == 1
    assert it.count("held") == 1  # the third was held before


async def test_an_unfit_message_is_held_and_others_go_on() -> None:
    long_ = encode_headers(entry(b"x", long_string(b"x" * ScriptedPublisher.max_properties)))
    broken = encode_headers(b"\x05broken")
    rows = [
        due(1, sound=False),
        due(2, properties=b"\xff"),
        due(3, properties=broken),
        due(4, properties=long_),
        due(5, key=b"q" * 256),
        due(6, key=b"q" * 255),
    ]
    it = Scene(ScriptedLane(claims=[rows]))
    await it.release.tick()
    [(released, held)] = it.lane.settled
    assert released == [rows[5]]
    assert [row for row, _ in held] == rows[:5]
    assert {hold.kind for _, hold in held} == {HoldKind.UNFIT}
    says = ["checksum", "malformed properties", "malformed properties", "properties are too long"]
    for (_, hold), said in zip(held, [*says, "destination is too long"], strict=True):
        assert said in hold.text


@pytest.mark.parametrize("late_limits", [{}, {b"orders.in": 0}])
async def test_flags_of_an_earlier_hold_stay(late_limits: dict[bytes, int]) -> None:
    """An unanswered publish may arrive, and a message that closed a connection would close one again."""
    earlier = Hold(HoldKind.NACKED, "why", may_be_delivered=True, isolated=True)
    rows = [due(1, sound=False, attempts=1)._replace(hold=earlier), due(2, sound=False)]
    rows.append(due(3, attempts=1, key=b"gone")._replace(hold=earlier))
    lane, publisher = ScriptedLane(claims=[rows]), ScriptedPublisher({b"gone": Returned(312, "NO_ROUTE")})
    await Release(
        lane, publisher, ScriptedLive(now=NOW + 10_000, limits=late_limits),
        portion=Portion(10, 1000), heartbeat=Heartbeat(), counters=Counters(),
    ).tick()  # fmt: skip
    [(_, held)] = lane.settled
    assert {row.id: (hold.may_be_delivered, hold.isolated) for row, hold in held} == {
        1: (True, True), 2: (False, False), 3: (True, True),
    }  # fmt: skip
    assert [one.isolated for one in publisher.published] == ([] if late_limits else [True])


def test_a_row_leaves_under_its_number_and_its_due_instant() -> None:
    row = due(77, properties=encode_headers(entry(b"mine", long_string(b"kept"))))
    outgoing = prepared(row, 1000)
    assert not isinstance(outgoing, str)
    assert outgoing[:2] == row.parcel.target
    assert outgoing.token == b"77"
    again = prepared(row._replace(parcel=row.parcel._replace(token=b"earlier")), 10_000)
    assert isinstance(again, Outgoing)
    assert again.token == b"earlier"  # as it was published before it was held
    assert b"earlier" in again.properties
    found = {field.name: field.value for field in Properties.parse(outgoing.properties).headers_items()}
    assert found == {b"mine": "kept", b"x-delayer-id": "77", b"x-delayer-due": NOW - 5}


@pytest.mark.parametrize("failure", [BrokerLost("in doubt"), ZeroDivisionError(), asyncio.CancelledError()])
async def test_unconfirmed_rows_are_rolled_back(failure: Exception) -> None:
    it = Scene(ScriptedLane(claims=[[due(1)]]), ScriptedPublisher({b"k": failure}))
    with pytest.raises(type(failure)):
        await it.release.tick()
    assert it.lane.events == ["claim", "give up"]
    assert it.count("released") == 0


async def test_a_commit_in_doubt_counts_nothing() -> None:
    it = Scene(ScriptedLane(claims=[[due(1)]]))
    it.lane.fail_settle = StoreLost("in doubt")
    with pytest.raises(StoreLost):
        await it.release.tick()
    assert it.count("released") == 0


async def running(it: Scene, stopping: asyncio.Event) -> asyncio.Task[None]:
    task = asyncio.create_task(it.release.run(stopping))
    await it.lane.sleeping.wait()
    return task


async def test_the_loop_sleeps_until_it_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE", 3600.0)
    stopping = asyncio.Event()
    it = Scene(ScriptedLane(hint=3600.0))
    task = await running(it, stopping)
    it.lane._claims.append([due(1)])
    it.lane.note_parked(NOW)
    await until(lambda: bool(it.publisher.published))
    stopping.set()
    it.lane.note_parked(NOW)
    await task
    assert it.lane.events[-1] == "release"
    assert it.heartbeat.forgotten == ["lane 1"]


async def test_the_loop_beats_while_it_sleeps_and_stops_within_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE", 0.002)
    stopping = asyncio.Event()
    it = Scene(ScriptedLane(hint=3600.0))
    task = await running(it, stopping)
    await until(lambda: len(it.heartbeat.beats) >= 5)
    assert it.lane.events.count("claim") == 1  # slices of one sleep: nobody asks the store again
    stopping.set()
    await task


@pytest.mark.parametrize("loss", [LaneLost("somebody else's"), StoreLost("gone")])
async def test_a_lost_lane_ends_the_loop_and_is_let_go(loss: Exception) -> None:
    it = Scene(ScriptedLane(claims=[loss]))
    await it.release.run(asyncio.Event())
    assert it.lane.events == ["claim", "release"]


async def test_a_publisher_that_wants_few_gets_few() -> None:
    it = Scene(ScriptedLane(claims=[[due(1)], [due(2)]]))
    await it.release.tick()
    it.publisher.batch_limit = 3
    await it.release.tick()
    assert it.lane.limits == [10, 3]


async def test_the_channel_is_given_back_with_the_lane() -> None:
    it = Scene(ScriptedLane(claims=[LaneLost("somebody else's")]))
    await it.release.run(asyncio.Event())
    assert it.publisher.closed == 1


async def test_a_bug_is_not_swallowed() -> None:
    it = Scene(ScriptedLane(claims=[ZeroDivisionError()]))
    with pytest.raises(ZeroDivisionError):
        await it.release.run(asyncio.Event())
    assert it.lane.released.is_set()
    assert it.publisher.closed == 1


async def test_a_lost_broker_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayer.broker.retry.pause", lambda *_: 0.0001)
    publisher = ScriptedPublisher({b"k": BrokerLost("gone")})
    it = Scene(ScriptedLane(claims=[[due(1)]] * 100), publisher)
    stopping = asyncio.Event()
    task = asyncio.create_task(it.release.run(stopping))
    await until(lambda: publisher.batches >= 2)
    publisher.answers.clear()
    await until(lambda: bool(publisher.published))
    assert it.lane.events[:4] == ["claim", "give up", "claim", "give up"]
    stopping.set()
    it.lane.note_parked(NOW)
    await task


class Gated(ScriptedPublisher):
    """Confirms nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]:
        self.asked.set()
        await self.gate.wait()
        return await super().publish(batch)


async def test_a_lane_is_behind_until_it_took_all_that_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEHIND", 0.0)
    publisher, stopping = Gated(), asyncio.Event()
    it = Scene(ScriptedLane(claims=[[due(1)], [due(2)]]), publisher)
    assert not it.release.behind
    task = asyncio.create_task(it.release.run(stopping))
    await publisher.asked.wait()
    assert it.release.behind
    monkeypatch.setattr(module, "BEHIND", 60.0)
    assert not it.release.behind
    it.release._busy_since -= 3600.0
    publisher.asked.clear()
    publisher.gate.set()
    await until(lambda: publisher.batches == 1)
    publisher.gate.clear()
    await publisher.asked.wait()
    assert it.release.behind, "since its first turn: the second one came without a rest"
    publisher.gate.set()
    await it.lane.sleeping.wait()
    monkeypatch.setattr(module, "BEHIND", -1.0)
    assert not it.release.behind
    stopping.set()
    it.lane.note_parked(NOW)
    await task


async def test_told_to_leave_in_a_long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayer.broker.retry.pause", lambda *_: 600.0)
    publisher = ScriptedPublisher({b"k": BrokerLost("gone")})
    it = Scene(ScriptedLane(claims=[[due(1)]]), publisher)
    task = asyncio.create_task(it.release.run(asyncio.Event()))
    await until(lambda: "give up" in it.lane.events)
    it.release.leave()
    async with asyncio.timeout(10.0):
        await task
    assert it.lane.released.is_set()


async def test_nothing_is_claimed_while_nothing_can_be_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE", 0.001)
    it = Scene(ScriptedLane(claims=[[due(1)]]))
    it.publisher.ready = False
    stopping = asyncio.Event()
    task = asyncio.create_task(it.release.run(stopping))
    await until(lambda: len(it.heartbeat.beats) >= 5)
    assert it.lane.events == []
    it.publisher.ready = True
    await it.lane.sleeping.wait()
    assert len(it.publisher.published) == 1
    stopping.set()
    it.lane.note_parked(NOW)
    await task


async def test_stopped_before_it_started() -> None:
    it = Scene(ScriptedLane(claims=[[due(1)]]))
    stopping = asyncio.Event()
    stopping.set()
    await it.release.run(stopping)
    assert it.lane.events == ["release"]
