"""Releasing a lane: released rows, held rows, rolled-back rows, and the sleep of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from delayer.amqp.channel import seconds_until_due
from delayer.amqp.errors import BrokerLost
from delayer.amqp.properties import Properties, encode_headers, entry, long_string
from delayer.amqp.values import Confirmed, Outgoing, Pace
from delayer.core.counters import Counters
from delayer.core.delay_headers import DelayRequest
from delayer.core.errors import LaneLost, StoreLost
from delayer.core.hold import NACKED, Hold, HoldKind, Limits, Outcome, returned, too_late
from delayer.core.plan import AtOnce, Mode, Park, Policy, Route, TooLate
from delayer.core.publisher import Isolated
from delayer.release.loop import MOST_CONFIRMED, SLICE_SECONDS, LaneRelease, Release, prepare_outgoing
from tests.support.fakes import NOW, Heartbeat, ScriptedLane, ScriptedLive, ScriptedPublisher, due, until
from tests.support.planning import decide, request


class Scene:
    def __init__(
        self,
        lane: ScriptedLane,
        publisher: ScriptedPublisher | None = None,
        limits: Limits | None = None,
        confirmed: dict[Release, None] | None = None,
    ) -> None:
        self.lane = lane
        self.publisher = publisher or ScriptedPublisher()
        self.heartbeat = Heartbeat()
        self.counters = Counters()
        self.release = LaneRelease(
            lane,
            self.publisher,
            ScriptedLive(now=NOW + 10_000, limits=limits) if limits else ScriptedLive(width=25),
            heartbeat=self.heartbeat,
            counters=self.counters,
            confirmed={} if confirmed is None else confirmed,
        )

    def count(self, kind: str) -> int:
        return self.counters.as_dict()[kind]


async def run_dry(it: Scene) -> None:
    """Release until the lane has nothing to claim, or the release ends."""
    stopping = asyncio.Event()
    running_ = asyncio.create_task(it.release.run(stopping))
    dry = asyncio.create_task(it.lane.sleeping.wait())
    await asyncio.wait([running_, dry], return_when=asyncio.FIRST_COMPLETED)
    dry.cancel()
    stopping.set()
    it.lane.note_parked(NOW)
    await running_


async def test_messages_leave_at_their_instant_and_held_rows_first() -> None:
    rows = [due(1), due(2), due(3, attempts=1)]
    rows = [row._replace(due_ms=NOW + at) for row, at in zip(rows, (20, 30, -9_000), strict=True)]
    it = Scene(ScriptedLane(claims=[rows]))
    await run_dry(it)
    [pace] = it.publisher.paces
    assert [message.body for message in it.publisher.published] == [b"3", b"1", b"2"]
    assert pace.due_ms == [NOW - 9_000, NOW + 20, NOW + 30]
    assert seconds_until_due(pace, -1) == 0.03


async def test_the_next_claim_overlaps_with_the_publish_of_the_last() -> None:
    publisher = Gated()
    it = Scene(ScriptedLane(claims=[[due(1)], [due(2)]]), publisher)
    it.lane.claimers *= 2
    async with running(it):
        await publisher.asked.wait()
        await until(lambda: it.lane.events == ["claim", "claim"])
        assert len(publisher.paces) == 1
        publisher.paces[0].on_written()
        await until(lambda: len(publisher.paces) == 2)
        assert publisher.published == []
        publisher.gate.set()
        await it.lane.sleeping.wait()
        await until(lambda: len(it.lane.settled) == 2)


async def test_a_failed_publish_holds_the_message_with_its_reason() -> None:
    publisher = ScriptedPublisher({b"gone": returned(312, "NO_ROUTE"), b"full": NACKED})
    rows = [due(1), due(2, key=b"gone"), due(3, key=b"full", attempts=4)]
    it = Scene(ScriptedLane(claims=[rows]), publisher)
    await run_dry(it)
    assert it.lane.settled == [([rows[0]], [(rows[1], returned(312, "NO_ROUTE")), (rows[2], NACKED)])]
    assert it.count("released") == 1
    assert it.count("held") == 1  # the third message was held before


@pytest.mark.words
async def test_an_unfit_message_is_held_and_the_others_leave() -> None:
    long_ = encode_headers(entry(b"x", long_string(b"x" * ScriptedPublisher.max_properties)))
    broken = encode_headers(b"\x05broken")
    rows = [
        due(1, sound=False),
        due(2, properties=b"\xff"),
        due(3, properties=broken),
        due(4, properties=long_),
        due(5, key=b"q" * 256),
        due(6, properties=b"\x01\x00\x04soon"),
        due(7, key=b"q" * 255),
    ]
    it = Scene(ScriptedLane(claims=[rows]))
    await run_dry(it)
    [(released, held)] = it.lane.settled
    assert released == [rows[6]]
    assert [row for row, _ in held] == rows[:6]
    assert {hold.kind for _, hold in held} == {HoldKind.UNFIT}
    says = ["checksum", "malformed properties", "malformed properties", "properties are too long"]
    for (_, hold), said in zip(
        held, [*says, "routing key is too long", "the broker would close the channel: expiration: "], strict=True
    ):
        assert said in hold.text


@pytest.mark.parametrize("late_limits", [{}, {b"orders.in": 0}])
async def test_flags_of_an_earlier_hold_stay(late_limits: dict[bytes, int]) -> None:
    """An unanswered publish may arrive, and a message that closed a connection would close one again."""
    earlier = Hold(HoldKind.NACKED, "why", may_be_delivered=True, isolated=True)
    rows = [due(1, sound=False, attempts=1)._replace(hold=earlier), due(2, sound=False)]
    rows.append(due(3, attempts=1, key=b"gone")._replace(hold=earlier))
    it = Scene(ScriptedLane(claims=[rows]), ScriptedPublisher({b"gone": returned(312, "NO_ROUTE")}), late_limits)
    await run_dry(it)
    [(_, held)] = it.lane.settled
    assert {row.id: (hold.may_be_delivered, hold.isolated) for row, hold in held} == {
        1: (True, True), 2: (False, False), 3: (True, True),
    }  # fmt: skip
    assert [isinstance(one, Isolated) for one in it.publisher.published] == ([] if late_limits else [True])


def test_a_row_leaves_under_its_number_and_its_due_instant() -> None:
    row = due(77, properties=encode_headers(entry(b"mine", long_string(b"kept"))))
    outgoing = prepare_outgoing(row, 1000)
    assert not isinstance(outgoing, str)
    assert outgoing[:2] == row.parcel.target
    assert outgoing.token == b"77"
    again = prepare_outgoing(row._replace(parcel=row.parcel._replace(token=b"earlier")), 10_000)
    assert isinstance(again, Outgoing)
    assert again.token == b"earlier"  # its id from before the hold
    assert b"earlier" in again.properties
    found = {field.name: field.value for field in Properties.parse(outgoing.properties).headers_items()}
    assert found == {b"mine": "kept", b"x-delayer-id": "77", b"x-delayer-due": NOW - 5}


@pytest.mark.parametrize("failure", [BrokerLost("in doubt"), ZeroDivisionError(), asyncio.CancelledError()])
async def test_unconfirmed_rows_are_rolled_back(failure: Exception) -> None:
    it = Scene(ScriptedLane(claims=[[due(1)]]), ScriptedPublisher({b"k": failure}))
    release = asyncio.create_task(it.release.run(asyncio.Event()))
    await until(lambda: len(it.lane.events) >= 2)
    it.lane.leave()
    await asyncio.wait([release])
    assert isinstance(release.exception(), ZeroDivisionError | None)
    assert it.lane.events == ["claim", "give up", "release"]
    assert it.count("released") == 0


async def test_only_a_message_that_was_not_due_when_parked_has_a_lateness() -> None:
    due_ms = due(1).due_ms
    rows = [due(1 + at)._replace(parked_ms=due_ms + late_ms) for at, late_ms in enumerate((-1, 0, 3 * 10**10))]
    rows.append(due(4, attempts=1))
    it = Scene(ScriptedLane(claims=[rows]))
    await run_dry(it)
    assert it.count("released") == 4
    assert [(route, tally.count) for route, tally in it.counters.lateness.items()] == [(b"orders.in", 1)]


async def test_a_commit_in_doubt_does_not_count_as_a_release() -> None:
    it = Scene(ScriptedLane(claims=[[due(1)]]))
    it.lane.fail_settle = StoreLost("in doubt")
    await run_dry(it)
    assert it.count("released") == 0


@asynccontextmanager
async def running(it: Scene) -> AsyncIterator[None]:
    """Run the loop until the end of the block."""
    stopping = asyncio.Event()
    task = asyncio.create_task(it.release.run(stopping))
    yield
    stopping.set()
    it.lane.note_parked(NOW)
    await task


async def test_the_loop_beats_while_it_sleeps_and_stops_within_a_slice() -> None:
    stopping, slept = asyncio.Event(), list[float]()
    it = Scene(ScriptedLane(hint=3600.0))

    async def wait(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 5:
            stopping.set()

    it.lane.wait = wait  # type: ignore[method-assign]
    await it.release.run(stopping)
    assert slept == [SLICE_SECONDS] * len(it.heartbeat.beats) == [SLICE_SECONDS] * 5
    assert it.lane.events == ["release"]


@pytest.mark.parametrize("loss", [LaneLost("another process's"), StoreLost("gone")])
async def test_a_lost_lane_ends_the_loop_and_is_dropped(loss: Exception) -> None:
    it = Scene(ScriptedLane(claims=[loss]))
    await it.release.run(asyncio.Event())
    assert it.lane.events == ["claim", "release"]
    assert it.publisher.closed == 1


async def test_a_lane_that_needs_an_operator_is_kept_and_tried_again() -> None:
    """Every process would meet the same refusal. Pauses grow as after other losses."""
    pauses: list[int] = []
    it = Scene(ScriptedLane(claims=[StoreLost("denied", "grant it"), StoreLost("denied", "grant it"), [due(1)]]))

    def pause(attempt: int, _random: float) -> float:
        pauses.append(attempt)
        return 0.001

    stopping = asyncio.Event()
    with capture_logs() as logs:
        task = asyncio.create_task(it.release.run(stopping, pause))
        await it.lane.sleeping.wait()
    stopping.set()
    it.lane.note_parked(NOW)
    await task
    assert (pauses, len(it.lane.settled)) == ([0, 1], 1)
    assert [(one["event"], one["next_step"]) for one in logs] == [("release interrupted", "grant it")] * 2


async def test_confirmed_messages_are_settled_without_another_publish() -> None:
    """While a table is locked, each settlement fails. A rescheduled message is another release."""
    lane = ScriptedLane(claims=[[due(1), due(2)], [due(1), due(2)._replace(due_ms=NOW - 1), due(3)], [due(1)]])
    it = Scene(lane)
    lane.fail_settle = StoreLost("settle: statement timeout", "see what locks the table")

    def pause(attempt: int, _random: float) -> float:
        lane.fail_settle = None
        return 0.001

    stopping = asyncio.Event()
    task = asyncio.create_task(it.release.run(stopping, pause))
    await lane.sleeping.wait()
    stopping.set()
    lane.note_parked(NOW)
    await task
    # The last 1 is a release after the first was settled.
    assert [int(one.token) for one in it.publisher.published] == [1, 2, 3, 2, 1]
    assert [sorted(row.id for row in released) for released, _ in lane.settled] == [[1, 2, 3], [1]]
    assert it.count("released") == 4


async def test_a_lane_that_is_taken_again_does_not_repeat_what_was_confirmed() -> None:
    """The server ends the sessions of a process that gets no processor time, and the process takes its lanes again."""
    confirmed: dict[Release, None] = {}
    lost = Scene(ScriptedLane(claims=[[due(1), due(2)]]), confirmed=confirmed)
    lost.lane.fail_settle = LaneLost("terminating connection due to idle-in-transaction timeout")
    await run_dry(lost)
    again = Scene(ScriptedLane(claims=[[due(1), due(2), due(3)]]), confirmed=confirmed)
    await run_dry(again)
    assert [int(one.token) for one in (*lost.publisher.published, *again.publisher.published)] == [1, 2, 3]
    assert [sorted(row.id for row in released) for released, _ in again.lane.settled] == [[1, 2, 3]]
    assert confirmed == {}


async def test_the_oldest_confirmed_messages_are_forgotten() -> None:
    """Others may have settled them."""
    confirmed: dict[Release, None] = dict.fromkeys((id, NOW, 0) for id in range(100, 100 + MOST_CONFIRMED))
    it = Scene(ScriptedLane(claims=[[due(1)]]), confirmed=confirmed)
    it.lane.fail_settle = LaneLost("gone")
    await run_dry(it)
    assert [id for id, _, _ in confirmed] == [*range(101, 100 + MOST_CONFIRMED), 1]


async def test_a_claim_has_at_most_the_publishers_batch() -> None:
    it = Scene(ScriptedLane(claims=[[due(1)]]))
    it.publisher.batch_limit = 3
    await run_dry(it)
    assert it.lane.limits == [3]


async def test_a_bug_is_not_swallowed() -> None:
    it = Scene(ScriptedLane(claims=[ZeroDivisionError()]))
    with pytest.raises(ZeroDivisionError):
        await it.release.run(asyncio.Event())
    assert it.lane.closed.is_set()
    assert it.publisher.closed == 1


class Gated(ScriptedPublisher):
    """Confirms no message before its gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()

    async def publish(self, batch: Sequence[Outgoing], pace: Pace | None = None) -> list[Outcome]:
        self.asked.set()
        self.paces += [] if pace is None else [pace]
        await self.gate.wait()
        return await super().publish(batch)


async def test_a_loop_leaves_during_a_long_pause() -> None:
    publisher = ScriptedPublisher({b"k": BrokerLost("gone")})
    it = Scene(ScriptedLane(claims=[[due(1)]]), publisher)
    task = asyncio.create_task(it.release.run(asyncio.Event(), lambda *_: 600.0))
    await until(lambda: "give up" in it.lane.events)
    it.lane.leave()
    async with asyncio.timeout(10.0):
        await task
    assert it.lane.closed.is_set()


# The late limit.

HOUR = 3_600_000


@pytest.mark.parametrize(
    ("late_ms", "limit_ms", "earlier", "held"),
    [
        (0, 0, None, False), (1, 0, None, True), (HOUR, HOUR, None, False), (HOUR + 1, HOUR, None, True),
        (-1, 0, None, False), (10 * HOUR, None, None, False), (2 * HOUR, HOUR, HoldKind.RETURNED, True),
        (2 * HOUR, HOUR, HoldKind.LATE, False), (2 * HOUR, HOUR, HoldKind.UNFIT, False),  # an operator retried it
    ],
)  # fmt: skip
def test_late_messages_are_held(late_ms: int, limit_ms: int | None, earlier: HoldKind | None, held: bool) -> None:
    hold = too_late(NOW - late_ms, NOW, limit_ms, None if earlier is None else Hold(earlier, "late: not"))
    assert (hold is not None) == held
    assert hold is None or (hold.kind is HoldKind.LATE and hold.for_a_person)


def policy(limit_ms: int | None, mode: Mode = Mode.STORE, **more: Any) -> Policy:
    route = Route(b"in", b"out", late_limit_ms=limit_ms, delay_from=("x-delay", "x-deliver-at", "timestamp"))
    return Policy(mode, {b"in": route}, 100 * 24 * HOUR, **more)


def ask(timestamp: int | None = None, **headers: object) -> DelayRequest:
    names = {"x-" + name.replace("_", "-"): value for name, value in headers.items()}
    names = {"timestamp_in_ms" if name == "x-stamp" else name: value for name, value in names.items()}
    return request(b"in", b"k", {name.encode(): value for name, value in names.items()}, timestamp=timestamp)


OLD = NOW - 2 * HOUR
PLANS = [
    ("an instant that passed", ask(deliver_at=OLD), HOUR, TooLate),
    ("an instant that passed just now", ask(deliver_at=NOW - HOUR), HOUR, AtOnce),
    ("no limit", ask(deliver_at=OLD), None, AtOnce),
    ("a delay that the queue waited out", ask(delay=HOUR // 2, stamp=OLD), HOUR, TooLate),
    ("a delay that the queue waited out in time", ask(delay=HOUR, stamp=OLD), HOUR, AtOnce),
    ("at once", ask(delay=0), 0, AtOnce),
    ("the plugin's mark for a delayed message", ask(delay=-2 * HOUR), HOUR, AtOnce),
    ("no delay at all", ask(), 0, AtOnce),
    ("the timestamp property", ask(timestamp=OLD // 1000), HOUR, TooLate),
    ("the future", ask(deliver_at=NOW + HOUR), 0, Park),
]


@pytest.mark.parametrize(("asked", "limit_ms", "plan"), [row[1:] for row in PLANS], ids=[row[0] for row in PLANS])
def test_the_plan_of_a_late_message(asked: DelayRequest, limit_ms: int | None, plan: type) -> None:
    assert isinstance(decide(asked, policy(limit_ms), NOW), plan)


def test_a_late_message_with_a_key_is_parked() -> None:
    keyed = request(b"in", b"k", {b"x-deliver-at": OLD, b"x-delay-key": "a"})
    assert isinstance(decide(keyed, policy(HOUR), NOW), Park)


@pytest.mark.parametrize("outcome", [Confirmed(), BrokerLost("in doubt")])
async def test_it_counts_how_long_the_broker_took(outcome: Confirmed | BrokerLost) -> None:
    """Also if no confirm came: that took longest."""
    publisher = ScriptedPublisher({b"k": outcome})
    it = Scene(ScriptedLane(claims=[[due(1)]]), publisher)
    publisher.written_ms = {0: it.release.live.now_lower_ms() - 400}
    await run_dry(it)
    took = it.counters.seconds
    assert (took["claim"].count, took["publish"].count, took["publish"].total) == (1, 1, pytest.approx(0.4))
    assert took["settle"].count == isinstance(outcome, Confirmed)
