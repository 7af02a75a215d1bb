"""A message rejected by the database is refused, and the rest of its batch continues in order. A rejected hold gets a
plain reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from delayer.amqp.values import Delivery
from delayer.core.errors import Rejected, StoreLost
from delayer.core.hold import Hold
from delayer.core.message import Parcel
from delayer.core.operations import Applied, Cancel, Operation
from delayer.intake.dispatch import Dispatch, Objection
from delayer.intake.session import write_by_halves
from tests.support.fakes import WHY, ScriptedLane, ScriptedStore, due
from tests.unit.intake.test_classify import Gathered, asks, cancel
from tests.unit.store.backlog_scene import at_work

BAD = b"7"


class Rejecting(Gathered):
    """Its store rejects BAD, and has a message under the key "a"."""

    async def apply(self, operations: Sequence[Operation]) -> Applied:
        if any(isinstance(one, Parcel) and one.body == BAD for one in operations):
            raise Rejected("park: planted")
        await super().apply(operations)
        return Applied(
            frozenset(at for at, one in enumerate(operations) if isinstance(one, Cancel) and one.key == b"a")
        )

    async def play(self, *batch: Delivery) -> None:
        await self.take(*(one._replace(exchange=b"orders.in") for one in batch))
        self.handler.flush()
        await self.session.wait_until_idle()


async def test_a_rejected_message_is_refused_and_the_others_are_parked_in_order() -> None:
    it = Rejecting()
    await it.play(*(asks(tag, 5_000) for tag in range(1, 101)))
    assert [body for park in it.parks for body in park] == [b"%d" % tag for tag in range(1, 101) if tag != 7]
    assert len(it.parks) < 10
    [refused] = it.publisher.published
    assert (refused.exchange, refused.body) == (it.live.names().refused_exchange, BAD)
    assert b"the database of the store rejects it: park: planted" in refused.properties
    assert (it.acks.acked[-1][0], it.session.acks.outstanding) == (100, 0)
    assert {kind: n for kind, n in it.counters.as_dict().items() if n} == {"parked": 99, "refused": 1}


async def test_cancels_around_a_rejected_message_keep_their_answers() -> None:
    it = Rejecting()
    await it.play(cancel(1, b"b"), asks(2, 5_000), asks(7, 5_000), cancel(4, b"a"), cancel(5, b"c"))
    answers = [json.loads(one.body) for one in it.publisher.published if one.routing_key == b"answers"]
    assert {one["key"]: one["outcome"] for one in answers} == {"a": "cancelled", "b": "too late", "c": "too late"}


async def test_a_store_lost_between_two_writes_repeats_only_the_missing_messages() -> None:
    it = Rejecting()
    apply = it.apply

    async def lost_after_four(operations: Sequence[Operation]) -> Applied:
        if it.parks:
            raise StoreLost("gone")
        return await apply(operations)

    it.apply = lost_after_four  # type: ignore[method-assign]
    with pytest.raises(StoreLost):
        await it.play(*(asks(tag, 5_000) for tag in range(1, 9)))
    assert (it.parks, it.acks.acked) == ([[b"1", b"2", b"3", b"4"]], [(4, True)])


@pytest.mark.parametrize("others", [0, 8])
@pytest.mark.parametrize("plain_too", [False, True])
async def test_a_rejected_reason_becomes_a_plain_one(others: int, plain_too: bool) -> None:
    """A message that is rejected with a plain reason too is refused. The others are held once."""
    store, refused = ScriptedStore(), list[Parcel]()
    hold = store.hold
    bad = due(9).parcel, replace(WHY, text="日")

    async def rejecting(lane: ScriptedLane, parcels: Sequence[tuple[Parcel, Hold]]) -> None:
        if any(not reason.text.isascii() or (plain_too and parcel is bad[0]) for parcel, reason in parcels):
            raise Rejected("hold: planted")
        await hold(lane, parcels)

    async def refuse(item: tuple[Parcel, Hold], _rejected: Rejected) -> None:
        refused.append(item[0])

    store.hold = rejecting  # type: ignore[method-assign]
    async with at_work(store) as it:
        await write_by_halves([*[(due(n).parcel, WHY) for n in range(others)], bad], it.backlog.hold, refuse)
    plain = replace(WHY, text="the database rejected the data of this hold (SQLSTATE unknown)")
    assert [reason for _, reason in store.held] == [WHY] * others + [plain] * (not plain_too)
    assert refused == [bad[0]] * plain_too


async def test_a_refused_cancel_is_not_answered() -> None:
    """It is still in the refused queue, and may be retried."""

    class RejectingCancels(Gathered):
        async def apply(self, operations: Sequence[Operation]) -> Applied:
            raise Rejected("park: planted")

    it = RejectingCancels()
    await it.take(cancel(1, b"a")._replace(exchange=b"orders.in"))
    it.handler.flush()
    await it.session.wait_until_idle()
    [refused] = it.publisher.published
    assert refused.exchange == it.live.names().refused_exchange


async def test_a_message_whose_hold_is_rejected_is_refused() -> None:
    class Holding(Gathered):
        async def hold(self, items: Sequence[tuple[Parcel, Hold]]) -> None:
            if any(parcel.body == BAD for parcel, _ in items):
                raise Rejected("hold: planted")
            held.extend(parcel.body for parcel, _ in items)

    it, held = Holding(), list[bytes]()
    dispatch = Dispatch(it.publisher, it, it.live, it.counters)
    batch = [asks(tag, 0) for tag in range(1, 10)]
    it.session.acks.add(batch)
    objections = [Objection(one, due(1).parcel._replace(body=one.body), WHY) for one in batch]
    await dispatch.hold(objections, it.session.acks)
    assert held == [b"%d" % tag for tag in range(1, 10) if tag != 7]
    [refused] = it.publisher.published
    assert (refused.exchange, refused.body) == (it.live.names().refused_exchange, BAD)
    assert it.session.acks.outstanding == 0
