"""An import into delayer's own cascade, for native mode: what is imported is published there, and confirmed.

The state of the run is in the store all the same, and so is what a cascade cannot take: what is held, has a key, is due
in more than 8.5 years, or is too large for the broker. A batch is published first and noted then: a kill between these
repeats it, with the same message ids, as every fault may repeat what is in flight.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from delayer.core.cascade import MAX_SECONDS, Cascade, routing_key
from delayer.core.delay import seconds_until
from delayer.core.importing import Batch, Item, Phase, Run
from delayer.core.message import Confirmed, Outcome, Outgoing, Parcel
from delayer.faultpoint import reach
from delayer.legacy.ports import ImportImpossible
from delayer.store.importing import ImportStore

AT_ONCE: Final = 500
LARGEST_BODY: Final = 16_000_000
"""Bytes. RabbitMQ 4 closes the channel over more than 16 MiB, unless it is told otherwise."""
Envelop = Callable[[Parcel, bytes], bytes]
"""The properties of the carrier that takes a message through the cascade, under an id."""


class Publisher(Protocol):
    """What services.ports.Publisher has of it."""

    @property
    def max_properties(self) -> int: ...

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]: ...


class CascadeBook:
    """Satisfies ports.Book: over the store's, with another place for the messages."""

    def __init__(
        self, book: ImportStore, publisher: Publisher, cascade: Cascade, due_queue: str, envelop: Envelop
    ) -> None:
        self._book = book
        self._publisher = publisher
        self._cascade = cascade
        self._due_queue = due_queue.encode()
        self._envelop = envelop

    async def now_ms(self) -> int:
        """See the port."""
        return await self._book.now_ms()

    async def unfinished(self) -> Run | None:
        """See the port."""
        return await self._book.unfinished()

    async def begin(self, source: str, parameters: Mapping[str, object], who: str) -> Run:
        """See the port."""
        return await self._book.begin(source, parameters, who, into="cascade")

    async def staged(self, run: Run, messages: int | None) -> Run:
        """See the port."""
        return await self._book.staged(run, messages)

    async def finish(self, run: Run, phase: Phase) -> Run:
        """See the port."""
        return await self._book.finish(run, phase)

    async def commit(self, run: Run, batch: Batch) -> Run:
        """See the port: published and confirmed, then noted."""
        now_ms = await self._book.now_ms()
        kept: list[Item] = []
        outgoing: list[Outgoing] = []
        for item in batch.items:
            carrier = None if item.hold is not None else self._carrier(item.parcel, now_ms)
            if carrier is None:
                kept.append(item)
            else:
                outgoing.append(carrier)
        for start in range(0, len(outgoing), AT_ONCE):
            await self._publish(outgoing[start : start + AT_ONCE])
        reach("import.published")
        return await self._book.commit(run, Batch(kept, batch.progress, batch.again), published=len(outgoing))

    def _carrier(self, parcel: Parcel, now_ms: int) -> Outgoing | None:
        """None for what a cascade cannot take."""
        seconds = seconds_until(parcel.due_ms, now_ms)
        if parcel.key is not None or seconds > MAX_SECONDS or len(parcel.body) > LARGEST_BODY:
            return None
        id_ = uuid.uuid4().hex.encode()
        properties = self._envelop(parcel, id_)
        if len(properties) > self._publisher.max_properties:
            return None
        key = routing_key(seconds, self._due_queue)
        return Outgoing(self._cascade.entry(seconds).encode(), key, properties, parcel.body, id_)

    async def _publish(self, some: Sequence[Outgoing]) -> None:
        """Raises BrokerLost, ImportImpossible."""
        for outcome in await self._publisher.publish(some):
            if not isinstance(outcome, Confirmed):
                raise ImportImpossible(
                    f"the cascade did not take a message ({outcome}): the batch is not committed. Next: `delayer "
                    "topology apply`, then run it again; what was taken of the batch is repeated"
                )
