"""Describes to a publisher where the daemon's plan puts the message that it sent. `delayer send --json` and POST
/api/messages give the same answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from delayer.amqp.properties import Properties
from delayer.core.message import as_text
from delayer.core.operations import Cancel
from delayer.core.plan import AtOnce, EnterCascade, Park, Plan, Soon, TooLate
from delayer.core.readable import instant
from delayer.fields.compose import Publishable
from delayer.fields.shapes import SentJson

_PLACES: Final[Mapping[type, Literal["store", "broker", "destination", "held"]]] = {
    Park: "store", EnterCascade: "broker", AtOnce: "destination", Soon: "destination", TooLate: "held",
}  # fmt: skip


def sent(made: Publishable, plan: Plan) -> SentJson:
    """``plan``: not a Refuse, because such a message is not sent."""
    due_ms = getattr(plan, "due_ms", None)
    return {
        "message_id": as_text(Properties.parse(made.properties).short("message_id") or b""),
        "exchange": made.exchange,
        "routing_key": made.routing_key,
        "due_ms": due_ms,
        "due": None if due_ms is None else instant(due_ms, exact=True),
        "cancels": as_text(plan.key) if isinstance(plan, Cancel) and isinstance(plan.key, bytes) else None,
        "where": _PLACES.get(type(plan)),
    }
