"""The headers that delayer writes into messages, and the room that they need."""

from __future__ import annotations

from typing import Final

USER_ID: Final = b"x-delayer-user-id"
EXPIRATION: Final = b"x-delayer-expiration"

REFUSED: Final = b"x-delayer-refused"
EXCHANGE: Final = b"x-delayer-exchange"
ROUTING_KEY: Final = b"x-delayer-routing-key"
PROPERTIES: Final = b"x-delayer-properties"
DELIVERY_TIME: Final = b"x-delayer-delivery-time"
"""The ``x-opt-delivery-time`` of a refused message. RabbitMQ 4.4 would hide the message in the refused queue until
then; a time more than 292 years ahead would crash the queue."""
ADDED_TO_REFUSED: Final = frozenset({REFUSED, EXCHANGE, ROUTING_KEY, DELIVERY_TIME})
"""Headers that delayer adds to a refused message. Without ``x-delayer-refused`` they are the publisher's, and stay."""
COUNTED: Final = frozenset({b"x-delivery-count", b"x-acquired-count"})
"""The broker's counts of deliveries. RabbitMQ 4.3 and later has the second in addition to the first."""
DEATHS: Final = (b"x-first-death-", b"x-last-death-")

ROOM: Final = 2048
"""Maximum bytes that any of these edits adds: ids, names of at most 255 bytes each, a reason of at most 500."""
REASON: Final = 500


def header_text(text: str, most: int = REASON) -> bytes:
    """Cut a reason to a header value of at most ``most`` bytes."""
    # Cut between characters, because client libraries fail on strings that are not UTF-8.
    return text.encode("utf-8", "replace")[:most].decode("utf-8", "ignore").encode()
