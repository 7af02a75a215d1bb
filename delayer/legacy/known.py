"""What a delivery's bytes say, and by what it is known again. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from delayer.core.message import Delivery
from delayer.wire.properties import MalformedProperties, MalformedTable, Properties

X_DEATH: Final = b"x-death"
DEATHS: Final = (b"x-first-death-", b"x-last-death-")
COUNTED: Final = frozenset({b"x-delivery-count", b"x-acquired-count"})
"""What the broker adds of its own to a message that it delivers again; the second from 4.3 on."""


def parsed(raw: bytes) -> Properties | None:
    """None where the bytes are broken, properties or the table of headers."""
    try:
        properties = Properties.parse(raw)
        properties.entries()
    except (MalformedProperties, MalformedTable):
        return None
    return properties


def decoded(properties: Properties | None, names: Iterable[bytes]) -> dict[bytes, object]:
    """The first header of each of these names; nothing where a value is broken inside."""
    found: dict[bytes, object] = {}
    wanted = frozenset(names)
    for field in properties.headers_items() if properties is not None else ():
        if field.name in wanted and field.name not in found:
            try:
                found[field.name] = field.value
            except MalformedTable:
                continue
    return found


def fell(properties: Properties | None) -> bool:
    """Whether it was let out of another queue before."""
    return properties is not None and properties.get(X_DEATH) is not None


def fingerprint(delivery: Delivery, properties: Properties | None, *, falling: bool = False) -> str:
    """What a message is known again by: its bytes, but for the broker's count of deliveries. "" for one that has no
    identity of its own, neither a message id nor Celery's header ``id``. ``falling``: it may have gone on to another
    queue of its cascade meanwhile, with the notes that the broker makes of that."""
    if properties is None or (properties.message_id is None and properties.get(b"id") is None):
        return ""
    digest = hashlib.sha256()
    for part in (b"" if falling else delivery.exchange, delivery.routing_key, delivery.body):
        digest.update(len(part).to_bytes(8, "big") + part)
    for name, (start, end) in properties.spans.items():
        if name != "headers":
            digest.update(name.encode() + properties.raw[start:end])
    for field in properties.headers_items():
        noted = falling and (field.name == X_DEATH or field.name.startswith(DEATHS))
        if field.name not in COUNTED and not noted:
            digest.update(len(field.name).to_bytes(1, "big") + field.name + field.type_and_value)
    return digest.hexdigest()[:32]
