"""From the store into the cascade and back, message by message: what each becomes on the other side. Pure."""

from __future__ import annotations

from delayer.core import cascade
from delayer.core.cascade import MAX_SECONDS, Cascade
from delayer.core.delay import seconds_until
from delayer.core.levels import CONSULTED, due_at_level
from delayer.core.message import Delivery, Due, Outgoing, Parcel, Target
from delayer.services import edits
from delayer.wire.properties import MalformedProperties, MalformedTable, Properties, value_at


def into_cascade(due: Due, levels: Cascade, due_queue: bytes, now_ms: int) -> Outgoing:
    """A row, in an envelope, towards the daemon's due queue. It keeps its id; what is due later than the cascade is
    long comes by there, and goes in once more."""
    seconds = min(seconds_until(due.due_ms, now_ms), MAX_SECONDS)
    token = b"%d" % due.id
    key = cascade.routing_key(seconds, due_queue)
    return Outgoing(levels.entry(seconds).encode(), key, edits.enveloped(due.parcel, token), due.parcel.body, token)


def into_store(delivery: Delivery, levels: Cascade, level: int, now_ms: int, max_properties: int) -> Parcel:
    """A message that was met in a level of our own cascade: what its envelope holds; and where the broker was to finish
    it, a message that is let out where the cascade ends, by its own key."""
    try:
        return edits.opened(Properties.parse(delivery.properties), delivery.body, max_properties).parcel
    except (edits.NoEnvelope, MalformedProperties, MalformedTable):
        due_ms = due_at_level(levels, level, delivery.routing_key, _said(delivery), now_ms)
        return Parcel(
            due_ms,
            delivery.exchange,
            delivery.exchange,
            delivery.routing_key,
            Target(levels.delivery.encode(), delivery.routing_key),
            delivery.properties,
            delivery.body,
        )


def _said(delivery: Delivery) -> dict[bytes, object]:
    """The headers that say when it is due; nothing, where its bytes are broken."""
    found: dict[bytes, object] = {}
    try:
        properties = Properties.parse(delivery.properties)
        for name, type_at, stop in properties.entries():
            if name in CONSULTED and name not in found:
                found[name] = value_at(properties.raw, type_at, stop)
    except (MalformedProperties, MalformedTable):
        return {}
    return found
