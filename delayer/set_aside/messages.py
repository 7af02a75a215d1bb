"""The values of a pass through a queue of messages that wait for an operator: its messages, its filter, its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from delayer.amqp.values import Delivery
from delayer.broker.management_api import delayed_reason
from delayer.core.filters import names_of, own_name
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import Target, as_text
from delayer.core.readable import COUNTS_AGE
from delayer.format import reading
from delayer.format.envelope import Envelope, HoldNote
from delayer.format.refusal import Refusal

SetAsideName = Literal["refused", "strays"]
"""One of the two queues."""
UNKNOWN: Final = Hold(HoldKind.RETURNED, "the broker found no queue for it at the end of the cascade")


class SetAsideMessage(NamedTuple):
    """A refused message or a stray, with the beginning of its body."""

    id: str
    """The id in the form for operators; "" if the message has none."""
    message_id: str
    exchange: bytes | None
    """The exchange that it was published to; None if unknown."""
    place: str
    """Where a refused message was published, or where a stray goes, for operators."""
    reason: str
    properties: bytes
    head: bytes
    size: int
    more: Mapping[str, Any]
    """JSON fields that only one of the two queues has."""

    @classmethod
    def refused(cls, delivery: Delivery, refusal: Refusal) -> SetAsideMessage:
        exchange, key = refusal.exchange, refusal.routing_key
        more = {
            "exchange": None if exchange is None else as_text(exchange),
            "routing_key": None if key is None else as_text(key),
        }
        place = "?" if exchange is None else reading.address(exchange, key or b"")
        names = refusal.id, refusal.message_id
        return cls(*names, exchange, place, refusal.reason, delivery.properties, *_head(delivery), more)

    @classmethod
    def stray(cls, delivery: Delivery, read: Envelope | str) -> SetAsideMessage:
        """``read``: the envelope, or why there is none."""
        if isinstance(read, str):
            more = _stray_facts(None, Target(b"", b""), b"", HoldNote(Hold(HoldKind.UNFIT, read), 0, None))
            return cls("", "", b"", "?", read, delivery.properties, *_head(delivery), more)
        parcel, held = read.parcel, read.held or HoldNote(UNKNOWN, 0, None)
        id, message_id = own_name(as_text(read.id)), as_text(reading.message_id(parcel.properties) or b"")
        place = reading.address(parcel.target.exchange, parcel.target.routing_key)
        more = _stray_facts(parcel.due_ms, parcel.target, parcel.route, held)
        content = parcel.properties, *_head(delivery)
        return cls(id, message_id, parcel.exchange, place, held.hold.text, *content, more)

    @property
    def names(self) -> frozenset[str]:
        """The ids that an operator may use for it."""
        return names_of(self.id, self.message_id)

    def as_dict(self, *, whole: bool) -> dict[str, Any]:
        """For JSON. ``whole``: with all headers."""
        read = reading.decode_properties(self.properties, whole=whole)
        return {
            "id": self.id,
            "message_id": self.message_id or None,
            **self.more,
            "properties": read.properties,
            "headers": [header._asdict() for header in read.headers],
            "header_bytes_left_out": read.left_out,
            "reason": self.reason,
            "body_bytes": self.size,
            "body": reading.preview(self.head),
        }


def _head(delivery: Delivery) -> tuple[bytes, int]:
    """Return the beginning of the body, and its size."""
    # One byte more than is shown, so that a cut shows. A copy, because a slice would keep the whole body in memory.
    return bytes(delivery.body[: reading.PREVIEW + 1]), len(delivery.body)


def _stray_facts(due_ms: int | None, to: Target, route: bytes, held: HoldNote) -> dict[str, Any]:
    return {
        "due_ms": due_ms,
        "to_exchange": as_text(to.exchange),
        "to_key": as_text(to.routing_key),
        "route": as_text(route),
        "attempts": held.attempts,
        "kind": held.hold.kind,
        "may_be_delivered": held.hold.may_be_delivered,
        "isolated": held.hold.isolated,
    }


class Selection(NamedTuple):
    """A filter of messages. An empty selection matches all."""

    ids: frozenset[str] = frozenset()
    reason: str = ""
    exchange: str | None = None
    kind: str | None = None
    """The kind of a stray's hold. Refused messages have none."""

    def matches(self, one: SetAsideMessage) -> bool:
        named = not self.ids or not self.ids.isdisjoint(one.names)
        from_there = self.exchange is None or one.exchange == self.exchange.encode("utf-8", "surrogateescape")
        of_kind = self.kind in (None, one.more.get("kind"))
        return named and from_there and of_kind and self.reason in one.reason

    def as_dict(self) -> dict[str, Any]:
        """For the audit log."""
        given = {name: it for name, it in self._asdict().items() if it != self._field_defaults[name]}
        return given | ({"ids": sorted(self.ids)} if self.ids else {})


ANY: Final = Selection()


@dataclass(slots=True)
class Result:
    """The outcome of a pass.

    ``depth``: messages ready at the beginning; ``looked``: how many were read; ``unread``: how many the broker did not
    deliver. ``delayed``: messages that the broker itself delays, which no pass finds; None if unknown. ``may_delay``:
    whether the broker can delay messages.

    ``matched``: how many match. ``found``: the first MAX_LISTED of them, for a list. ``changed``: how many a change
    removed from the queue. ``remaining``: the first MAX_NAMED of those it left, each with the reason. ``missing``: the
    wanted ids that no message had.
    """

    depth: int
    delayed: int | None = 0
    looked: int = 0
    unread: int = 0
    matched: int = 0
    changed: int = 0
    missing: set[str] = field(default_factory=set)
    found: list[SetAsideMessage] = field(default_factory=list)
    remaining: list[tuple[SetAsideMessage, str]] = field(default_factory=list)
    may_delay: bool = False

    def count_match(self, wanted: Selection, one: SetAsideMessage) -> bool:
        """Count the message if it matches. Returns whether it does."""
        if not wanted.matches(one):
            return False
        self.matched += 1
        self.missing -= one.names
        return True

    @property
    def hidden(self) -> str:
        """Describe the messages that no pass finds, for operators; "" if there are none. The broker's count lacks the
        latest messages, so after a pass without a match the text states how old the count may be."""
        if self.may_delay and self.delayed == 0 and not self.matched:
            return f"The broker itself delayed none there up to {COUNTS_AGE:.0f} s ago; later ones are not counted yet."
        why = delayed_reason(self.delayed)
        return f"The queue {why}." if why else ""

    def as_dict(self, *, whole: bool) -> dict[str, Any]:
        """For JSON. ``whole``: with all headers of each message."""
        messages = [one.as_dict(whole=whole) for one in self.found]
        return {"depth": self.depth, "delayed": self.delayed, "hidden": self.hidden, "messages": messages}
