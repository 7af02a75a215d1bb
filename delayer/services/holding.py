"""Setting aside what its destination would not take: in the store, without one in the strays queue, or in the refused
queue where there are no strays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from delayer.core.hold import Hold, hold_for
from delayer.core.message import Confirmed, Outgoing, Parcel
from delayer.services import edits, envelopes
from delayer.services.counting import Counters
from delayer.services.dispatch import NotTaken
from delayer.services.ports import Holder, Publisher

log = structlog.get_logger(__name__)


def report(items: Sequence[tuple[Parcel, Hold]], counters: Counters) -> None:
    """Count and log messages that are held now."""
    counters.add("held", len(items))
    counters.add_routes("held", [parcel.route for parcel, _ in items])
    for parcel, hold in items:
        log.warning(
            "message held",
            kind=hold.kind,
            reason=hold.text,
            exchange=parcel.target.exchange,
            routing_key=parcel.target.routing_key,
            route=parcel.route,
        )


@dataclass(frozen=True, slots=True)
class Notes:
    """What is noted on a stray. ``pause_ms``: the pause after so many attempts, spread by a number of its own."""

    now_ms: Callable[[], int]
    pause_ms: Callable[[int, int], int]

    def note(self, id: bytes, hold: Hold, attempts: int) -> envelopes.Held:
        """It was tried ``attempts`` times, the last time now."""
        again_ms = self.now_ms() + self.pause_ms(attempts, int.from_bytes(id[-8:], "big"))
        return envelopes.Held(hold, attempts, hold.retry_ms(again_ms))


class StraysHolder:
    """Holds in a queue of the broker: the strays queue of our own cascade.

    The message goes there in its envelope, so nothing of it acts or expires while it waits to be tried again
    (delayer/services/strays.py).
    """

    def __init__(
        self, publisher: Publisher, exchange: bytes, new_id: Callable[[], bytes], counters: Counters, notes: Notes
    ) -> None:
        self._publisher = publisher
        self._exchange = exchange
        self._new_id = new_id
        self._counters = counters
        self._notes = notes

    async def hold(self, items: Sequence[tuple[Parcel, Hold]]) -> None:
        begin = 0
        while begin < len(items):
            end = begin + self._publisher.batch_limit
            await self._hold(items[begin:end])
            begin = end

    async def _hold(self, items: Sequence[tuple[Parcel, Hold]]) -> None:
        batch = []
        for parcel, hold in items:
            token = parcel.token or self._new_id()
            properties = envelopes.enveloped(parcel, token, self._notes.note(token, hold, 1))
            batch.append(Outgoing(self._exchange, parcel.target.routing_key, properties, parcel.body, token))
        for outcome in await self._publisher.publish(batch):
            if not isinstance(outcome, Confirmed):
                raise NotTaken(
                    f"exchange {self._exchange.decode()} did not take a message to hold: {hold_for(outcome).text}"
                )
        report(items, self._counters)


class RefusedHolder:
    """Where there is neither a store nor a strays queue, beside a shared cascade: refuses, with the reason, so that a
    person can list it and send it again (``delayer refused``)."""

    def __init__(self, publisher: Publisher, exchange: bytes, new_id: Callable[[], bytes], counters: Counters) -> None:
        self._publisher = publisher
        self._exchange = exchange
        self._new_id = new_id
        self._counters = counters

    async def hold(self, items: Sequence[tuple[Parcel, Hold]]) -> None:
        begin = 0
        while begin < len(items):
            end = begin + self._publisher.batch_limit
            await self._refuse(items[begin:end])
            begin = end

    async def _refuse(self, items: Sequence[tuple[Parcel, Hold]]) -> None:
        batch = []
        for parcel, hold in items:
            id = parcel.token or self._new_id()
            properties, token = edits.undelivered(parcel, hold.text, id, self._publisher.max_properties)
            batch.append(Outgoing(self._exchange, parcel.routing_key, properties, parcel.body, token))
        for outcome in await self._publisher.publish(batch):
            if not isinstance(outcome, Confirmed):
                raise NotTaken(
                    f"exchange {self._exchange.decode()} did not take a message to refuse: {hold_for(outcome).text}"
                )
        self._counters.add("refused", len(items))
        self._counters.add_routes("refused", [parcel.route for parcel, _ in items])
        for parcel, hold in items:
            log.warning("message refused", reason=hold.text, exchange=parcel.exchange, routing_key=parcel.routing_key)


class Holding:
    """Holds in the store where there is one to reach, else in the broker's queues; satisfies ports.Holder."""

    def __init__(self, store: Holder, store_usable: Callable[[], bool], strays: Holder) -> None:
        self._store = store
        self._store_usable = store_usable
        self._strays = strays

    async def hold(self, items: Sequence[tuple[Parcel, Hold]]) -> None:
        await (self._store if self._store_usable() else self._strays).hold(items)
