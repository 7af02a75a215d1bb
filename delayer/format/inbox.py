"""Rows of the SQL inbox as deliveries: the properties that a publisher of the same message would have encoded. Pure.

A row has its headers and its other properties as JSON. ``delayer_send`` has checked them (migrations/versions/0002). A
row that cannot be encoded, such as one written by hand, becomes a delivery with malformed properties, which the intake
refuses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from delayer.amqp.values import Delivery
from delayer.core.delay_headers import BY_SQL, DELIVER_AT
from delayer.format.from_json import encode_properties

UNENCODABLE: Final = b""
"""Properties that no delivery can have."""


def delivery_of_row(tag: int, row: Mapping[str, Any]) -> Delivery:
    """Build the delivery of a row: ``exchange``, ``routing_key``, ``headers``, ``properties`` and ``body``."""
    try:
        properties = _encode(json.loads(row["headers"]), json.loads(row["properties"]))
    except (ValueError, LookupError, OverflowError, RecursionError, AttributeError, TypeError):
        properties = UNENCODABLE
    return Delivery(tag, False, row["exchange"].encode(), row["routing_key"].encode(), properties, row["body"])


def _encode(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> bytes:
    """Raises what :func:`encode_properties` raises."""
    if "x-death" in headers:
        raise ValueError("no broker has dead-lettered a row: a retry would believe the queue that this names")
    if DELIVER_AT.decode() in headers:
        headers = {**headers, BY_SQL.decode(): True}
    return encode_properties(headers, properties)
