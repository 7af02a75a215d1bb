"""Source `cascade`: the messages in the level queues of a cascade, NServiceBus's, Celery's or delayer's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.framing import DEFAULT_FRAME_MAX, header_limit
from delayer.amqp.properties import Properties, decoded
from delayer.amqp.values import Delivery
from delayer.broker.admin import Admin
from delayer.core.cascade import LEVELS, Cascade, leads_to, strip_prefix
from delayer.core.importing import ImportItem, given
from delayer.core.levels import LEVEL_HEADERS, due_at_level
from delayer.core.message import Parcel, Target, as_text
from delayer.core.units import LATEST_MS
from delayer.format.envelope import Envelope, InvalidEnvelope, read_envelope
from delayer.imports.queues import Queues, Reader

ARRIVED: Final = b"0." * LEVELS
"""Prefix of a routing key whose delay is over; the address follows."""


@dataclass(frozen=True, slots=True)
class LevelReader:
    """Satisfies queues.Reader for one level's queue."""

    cascade: Cascade
    number: int
    to_exchange: bytes | None
    due_queue: bytes

    @property
    def queue(self) -> str:
        return self.cascade.level(self.number)

    @property
    def target(self) -> None:
        """See the port. Each message's routing key contains its address."""
        return None

    def latest_ms(self, now_ms: int) -> int:
        """See the port. Adds this level's time, all the levels below, and the second that Celery's workers wait."""
        return now_ms + (2 << self.number) * 1000

    def item(self, delivery: Delivery, properties: Properties | None, now_ms: int) -> ImportItem:
        """See the port. An envelope contains its message's due instant and destination. A message between two attempts
        is imported as held, with its id and the flags of its hold."""
        if (inside := self._inside(delivery, properties)) is not None:
            if inside.held is None:
                return ImportItem(inside.parcel)
            return ImportItem(inside.parcel._replace(token=inside.id), inside.held.hold)
        headers = decoded(properties, LEVEL_HEADERS)
        due_ms = min(due_at_level(self.cascade, self.number, delivery.routing_key, headers, now_ms), LATEST_MS)
        target = self._target(strip_prefix(delivery.routing_key))
        return ImportItem(
            Parcel(
                due_ms, self.cascade.delivery.encode(), delivery.exchange, delivery.routing_key, target,
                delivery.properties, delivery.body,
            )
        )  # fmt: skip

    def _inside(self, delivery: Delivery, properties: Properties | None) -> Envelope | None:
        """Parse the envelope of delayer's own cascade; None if there is none. Only messages on their way to the
        daemon's due queue are envelopes. Other messages are from publishers, so their headers prove nothing."""
        ours = self.cascade.kind == "delayer" and leads_to(delivery.routing_key, self.due_queue)
        if properties is None or not ours:
            return None
        try:
            return read_envelope(properties, delivery.body, header_limit(DEFAULT_FRAME_MAX))
        except (InvalidEnvelope, MalformedProperties, MalformedTable):
            return None

    def _target(self, address: bytes) -> Target:
        """Celery's addresses are routing keys, bound to its delivery exchange. Other addresses are queues."""
        if self.to_exchange is not None:
            return Target(self.to_exchange, address)
        if self.cascade.kind == "celery":
            return Target(self.cascade.delivery.encode(), ARRIVED + address)
        return Target(b"", address)


@dataclass(eq=False, repr=False, kw_only=True)
class CascadeLevels(Queues):
    """Reads the levels from the lowest up, so that the soonest messages come first, then from the top down, to meet
    messages that fell in the meantime. ``due_queue``: delayer's own cascade's. ``lowest``: the lowest level to read."""

    name = "cascade"
    falling = True
    cascade: Cascade
    due_queue: bytes
    to_exchange: bytes | None
    lowest: int = 0

    @property
    def besides(self) -> Sequence[str]:
        return (self.due_queue.decode(errors="surrogateescape"),) if self.cascade.kind == "delayer" else ()

    def more_parameters(self) -> Mapping[str, object]:
        kind, owner = self.cascade.kind, self.cascade.owner or None
        to_exchange = None if self.to_exchange is None else as_text(self.to_exchange)
        return given(cascade=kind, prefix=self.cascade.prefix if kind == "delayer" else owner, to_exchange=to_exchange)

    def reached_from(self, queue: str, readers: Sequence[Reader]) -> list[Reader]:
        """See Queues. The message is in that level or below."""
        levels = {reader.queue: reader for reader in readers}
        downwards = [self.cascade.level(number) for number in reversed(range(LEVELS))]
        return [levels[name] for name in downwards[downwards.index(queue) :] if name in levels]

    async def readers(self, admin: Admin) -> list[Reader]:
        up = [
            LevelReader(self.cascade, level, self.to_exchange, self.due_queue) for level in range(self.lowest, LEVELS)
        ]
        return [*up, *reversed(up[:-1])]
