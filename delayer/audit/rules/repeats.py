"""Repeats: the same message parked more than once, and the same id in more than one place. Pure.

A publisher's ``message_id`` makes two messages the same one, if destination, due instant and body are the same too.
Without one nothing can be said: equal messages may well be meant. Two of them are a warning, because promise G3 allows
them after a fault. One id in two places is a violation: the store gives each id once, and compacting and restoring move
a message, so somebody will get it twice.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct

from delayer.audit.findings import Finding, Severity
from delayer.audit.rules.evidence import Evidence
from delayer.audit.rules.message import Message
from delayer.audit.rules.tally import Key, Tally
from delayer.wire.properties import Properties

RULE = "repeats"
MESSAGE, ID = "repeat", "id"
"""Kinds of keys. ``first`` of a repeat is its fingerprint, ``number`` of the other the id."""

_HEAD = Struct(">qIII")


def fingerprint(message: Message, properties: Properties | None) -> bytes | None:
    """16 bytes that two messages share if they are the same one; None if that cannot be said. A message with a key is
    not asked: there the key says what is the same."""
    if properties is None or message.key is not None:
        return None
    message_id = properties.message_id
    if not message_id:
        return None
    exchange, routing_key = message.to_exchange, message.to_key
    head = _HEAD.pack(message.due_ms, len(message_id), len(exchange), len(routing_key))
    return blake2b(head + message_id + exchange + routing_key + message.body_digest, digest_size=16).digest()


def repeated(key: Key, tally: Tally) -> bool:
    """Are these, counted under one key, more than one message? One id that stands twice is no repeat of itself."""
    if key.kind == ID:
        return tally.messages > 1
    return tally.messages > 1 and len(tally.examples) > 1


def findings(evidence: Evidence) -> list[Finding]:
    found = []
    kinds: tuple[tuple[str, Severity, str], ...] = (
        (ID, "violation", "one id, more than one message"),
        (MESSAGE, "warning", "the same message more than once"),
    )
    for kind, severity, subject in kinds:
        total = evidence.total(kind)
        if total is None:
            continue
        groups = evidence.of(kind)
        details = {
            "groups": total.size,
            "surplus": total.messages - total.size,
            "examples": [list(tally.examples) if kind == MESSAGE else key.number for key, tally in groups],
        }
        found.append(Finding(RULE, severity, subject, total.messages, total.first_due_ms, details))
    return found
