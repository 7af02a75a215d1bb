"""The checks of one message by executors, before they drop its body and its headers."""

from __future__ import annotations

from typing import Any

import pytest

from delayer.amqp.properties import encode_headers
from delayer.audit.faults import CHECKSUM, PROPERTIES, UNKNOWN_FORMAT
from delayer.audit.source import StoredMessage, check_message, misplaced
from delayer.core.units import DAY_MS
from delayer.format.rows import FORMAT, checksum
from delayer.store.rows.partitions import name_of
from tests.audit.rows import DAY, NOW, properties


def message(**other: Any) -> StoredMessage:
    """A message with a message id and these columns changed; its checksum matches them unless given."""
    made = StoredMessage(
        format=1,
        checksum=0,
        due_ms=NOW,
        exchange=b"in",
        routing_key=b"orders",
        to_exchange=b"delayer.out",
        to_key=b"orders",
        key=None,
        properties=properties(b"order-1"),
        body=b"body",
    )
    made = made._replace(**other)
    fits = checksum(made.exchange, made.routing_key, made.properties, made.body)
    return made._replace(checksum=other.get("checksum", fits))


@pytest.mark.parametrize(
    ("changed", "faults"),
    [
        ({}, []),
        ({"properties": encode_headers()}, []),
        ({"checksum": 18}, [CHECKSUM]),
        ({"format": FORMAT + 1}, [UNKNOWN_FORMAT]),
        ({"format": 0}, [UNKNOWN_FORMAT]),
        ({"format": FORMAT + 1, "checksum": 18, "properties": b""}, [UNKNOWN_FORMAT]),
        ({"properties": b"\x00\x80\x09id"}, [PROPERTIES]),
        ({"properties": b"\x20\x00\x00\x00\x00\x02\x07x"}, [PROPERTIES]),
        ({"properties": b"\x00\x80\x09id", "checksum": 18}, [CHECKSUM, PROPERTIES]),
    ],
)
def test_defects_of_one_message(changed: dict[str, Any], faults: list[str]) -> None:
    wrong = message(**changed)
    found = check_message(wrong)
    assert found.faults == faults
    assert found.size == len(wrong.properties) + len(wrong.body)


@pytest.mark.parametrize(
    "other",
    [
        {"due_ms": NOW + 1},
        {"to_key": b"other"},
        {"to_exchange": b"other"},
        {"to_exchange": b"delayer.outo", "to_key": b"rders"},
        {"body": b"other"},
        {"properties": properties(b"order-2")},
    ],
)
def test_other_messages_have_other_fingerprints(other: dict[str, Any]) -> None:
    assert (
        check_message(message()).fingerprint
        == check_message(message(exchange=b"another way here")).fingerprint
        is not None
    )
    assert check_message(message(**other)).fingerprint not in (None, check_message(message()).fingerprint)


@pytest.mark.parametrize("other", [{"key": b"k"}, {"properties": encode_headers()}, {"properties": properties(b"")}])
def test_messages_without_a_fingerprint(other: dict[str, Any]) -> None:
    assert check_message(message(**other)).fingerprint is None


@pytest.mark.parametrize(
    ("home", "due_ms", "expected"),
    [
        (name_of(DAY), DAY * DAY_MS, False),
        (name_of(DAY), (DAY + 1) * DAY_MS - 1, False),
        (name_of(DAY), (DAY + 1) * DAY_MS, True),
        (name_of(DAY), DAY * DAY_MS - 1, True),
        ("message_default", DAY * DAY_MS + 5, True),
        ("message_default", (DAY + 500) * DAY_MS, False),
    ],
)
def test_rows_outside_their_partition(home: str, due_ms: int, expected: bool) -> None:
    assert misplaced(due_ms, home, {DAY, DAY + 1}) is expected
