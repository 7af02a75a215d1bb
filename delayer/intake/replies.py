"""Replies to cancels with a ``reply_to``. They state the outcome:

- ``cancelled``: a message waited under the key, and will not be delivered.
- ``too late``: no message waits under the key. It was delivered, cancelled, or never published.

The daemon publishes a reply after the cancel is committed and acknowledged. A fault in between costs the reply.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import structlog

from delayer.amqp.errors import BrokerLost
from delayer.amqp.properties import Properties, changed, encode_headers, entry, long_string
from delayer.amqp.values import Confirmed, Outgoing
from delayer.core.marks import ID
from delayer.core.message import as_text, is_direct_reply
from delayer.core.publisher import Publisher

log = structlog.get_logger(__name__)

OUTCOME: Final = b"x-delayer-outcome"
KEY: Final = b"x-delayer-key"


def build_reply(properties: Properties, key: bytes, token: bytes, *, cancelled: bool) -> Outgoing | None:
    """Build the reply to a cancel, which goes directly to its queue. None without a ``reply_to``, or if that is a
    direct reply, which is not a queue."""
    reply_to = properties.short("reply_to")
    if not reply_to or is_direct_reply(b"", reply_to):
        return None
    outcome = "cancelled" if cancelled else "too late"
    headers = entry(ID, long_string(token)) + entry(OUTCOME, long_string(outcome.encode()))
    raw = encode_headers(headers + entry(KEY, long_string(key)))
    shorts = {"content_type": b"application/json"}
    if correlation_id := properties.short("correlation_id") or properties.short("message_id"):
        shorts["correlation_id"] = correlation_id
    raw = changed(Properties.parse(raw), {name: bytes((len(value),)) + value for name, value in shorts.items()})
    body = json.dumps({"outcome": outcome, "key": as_text(key)}).encode()
    return Outgoing(b"", reply_to, raw, body, token)


async def send_replies(publisher: Publisher, answers: Sequence[Outgoing]) -> None:
    """Publish replies. Logs unconfirmed replies, and does not retry them."""
    failed, reason = list(answers), "the broker accepts no publishes"
    if publisher.ready:
        try:
            outcomes = await publisher.publish(answers)
        except BrokerLost as lost:
            reason = str(lost)
        else:
            holds = {at: outcome for at, outcome in enumerate(outcomes) if not isinstance(outcome, Confirmed)}
            failed, reason = [answers[at] for at in holds], next((hold.text for hold in holds.values()), "")
    if failed:  # With an id, because the log bounds only lines about messages.
        log.info("reply not confirmed", id=as_text(failed[0].token), replies=len(failed), reason=reason)
