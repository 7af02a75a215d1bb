"""What a cancel hears that names a queue in its ``reply_to``: whether it came in time. Pure.

``cancelled``   a message waited under the key, and is not delivered
``too late``    nothing waits under it: delivered, cancelled before, or never there
``unknown``     nothing waits under it, but this cancel was read before, and may have done it then; or a message was
                held under it whose publish was never answered: it is not tried again, but its queue perhaps has it

A reply is sent after the cancel is committed and acknowledged: a fault in between costs the reply, and never makes it
wrong. It is sent once; but a direct reply perhaps twice, the same, where another one ended their connection.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from delayer.core.message import Delivery, Outgoing
from delayer.core.values import TakenOut
from delayer.services.edits import ID
from delayer.services.refusals import with_short
from delayer.wire.properties import Properties, encode_headers, entry, long_string

OUTCOME: Final = b"x-delayer-outcome"
KEY: Final = b"x-delayer-key"
CANCELLED, TOO_LATE, UNKNOWN = "cancelled", "too late", "unknown"


class Asked(NamedTuple):
    """A cancel that wants to hear: where, and by which ``correlation_id`` it knows the answer."""

    key: bytes
    reply_to: bytes
    correlation_id: bytes | None
    redelivered: bool


def asked(delivery: Delivery, properties: Properties, key: bytes) -> Asked | None:
    """What a cancel says about hearing the outcome; None if it does not want to."""
    reply_to = properties.short("reply_to")
    if not reply_to:
        return None
    correlation_id = properties.short("correlation_id") or properties.message_id
    return Asked(key, reply_to, correlation_id, delivery.redelivered)


def outcome(ask: Asked, taken_out: TakenOut) -> str:
    """What became of it, if the messages of the keys ``taken_out`` were cancelled."""
    if ask.key in taken_out.unsure:
        return UNKNOWN
    if ask.key in taken_out.keys:
        return CANCELLED
    return UNKNOWN if ask.redelivered else TOO_LATE


def reply(ask: Asked, said: str, token: bytes) -> Outgoing:
    """The message that says it, straight to the queue."""
    headers = entry(ID, long_string(token)) + entry(OUTCOME, long_string(said.encode()))
    raw = encode_headers(headers + entry(KEY, long_string(ask.key)))
    raw = with_short(raw, "content_type", b"application/json")
    if ask.correlation_id is not None:
        raw = with_short(raw, "correlation_id", ask.correlation_id)
    body = json.dumps({"outcome": said, "key": ask.key.decode("utf-8", "backslashreplace")}).encode()
    return Outgoing(b"", ask.reply_to, raw, body, token)
