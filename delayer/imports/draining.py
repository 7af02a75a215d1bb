"""The rules of a drain between store and cascade: the new form of each message, and the messages that stay. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from delayer.amqp import edits
from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.properties import Properties
from delayer.core import cascade
from delayer.core.cascade import MAX_SECONDS, Cascade
from delayer.core.delay_headers import seconds_until
from delayer.core.message import Delivery, Due, Outgoing, Parcel
from delayer.store.admin.draining import Standing

AGAIN: Final = "the same once more"


class Left(NamedTuple):
    """Messages that stay, and why. ``next_step``: how they leave. ``by_itself``: they leave without help."""

    messages: int
    where: str
    why: str
    next_step: str
    by_itself: bool = False


def left_in_store(now: Standing, unsound: int, *, keys_too: bool) -> list[Left]:
    """The messages that a drain into the cascade leaves, or would leave. ``unsound``: rows with a wrong checksum."""
    keyed = Left(
        now.keyed,
        "store",
        "they have a key, and the cascade knows no keys",
        "none: the daemon releases them when due; or --keys-too, and then they cannot be replaced or cancelled",
        by_itself=True,
    )
    others = now.rows - now.soon - unsound - (0 if keys_too else now.keyed)
    found = [
        Left(0, "", "", "") if keys_too else keyed,
        Left(now.soon, "store", "they are due within a minute", "none: the daemon releases them", by_itself=True),
        Left(unsound, "store", "their bytes do not fit their checksum", "delayer audit"),
        Left(others, "store", "they came in meanwhile, or another session had them locked", AGAIN),
        Left(now.packed, "segments", "they are compacted", f"delayer restore, and {AGAIN}"),
        Left(now.broken, "segments", "their segments do not read back", "docs/backlog.md"),
        Left(now.held, "held", "their destination did not take them", "delayer held list; retry or drop"),
    ]
    return [one for one in found if one.messages > 0]


def left_in_cascade(levels: Mapping[int, int], due: int, strays: int, lowest: int) -> list[Left]:
    """The messages that a drain into the store leaves. ``levels`` are depths by number; the drain emptied those from
    ``lowest`` on."""
    below = sum(depth for level, depth in levels.items() if level < lowest)
    above = sum(depth for level, depth in levels.items() if level >= lowest)
    found = [
        Left(below, "cascade", "they are due within a minute", "none: they come out by themselves", by_itself=True),
        Left(above, "cascade", "they came in, or down a level, meanwhile", AGAIN),
        Left(due, "due queue", "they are due", "none: the daemon delivers them", by_itself=True),
        Left(strays, "strays", "their destination did not take them", "delayer strays list; retry or drop"),
    ]
    return [one for one in found if one.messages > 0]


def left_delayed(delayed: Mapping[str, int | None]) -> list[Left]:
    """The messages of each queue that the broker itself delays, so that a drain cannot read them."""
    why, step = "the broker itself delays them", "none: they come out when they are due"
    return [Left(count, f"queue {name}", why, step, by_itself=True) for name, count in delayed.items() if count]


def into_cascade(due: Due, levels: Cascade, due_queue: bytes, now_ms: int) -> Outgoing:
    """The publish that moves a row, in an envelope, to the daemon's due queue. It keeps its id. A message whose delay
    exceeds the cascade's longest passes the due queue and enters the cascade again."""
    seconds = min(seconds_until(due.due_ms, now_ms), MAX_SECONDS)
    token = b"%d" % due.id
    key = cascade.routing_key(seconds, due_queue)
    return Outgoing(levels.entry(seconds).encode(), key, edits.enveloped(due.parcel, token), due.parcel.body, token)


def carried(delivery: Delivery, due_queue: bytes, max_properties: int) -> Parcel | None:
    """The message in an envelope from a level of our own cascade; None without an envelope.

    Only a message on its way to the daemon's own due queue is an envelope. Any other message is a publisher's, on its
    way to some queue, and its headers prove nothing.
    """
    if not cascade.leads_to(delivery.routing_key, due_queue):
        return None
    try:
        return edits.opened(Properties.parse(delivery.properties), delivery.body, max_properties).parcel
    except (edits.NoEnvelope, MalformedProperties, MalformedTable):
        return None
