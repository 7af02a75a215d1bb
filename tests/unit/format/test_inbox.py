"""A row of the SQL inbox becomes the delivery that a publisher of the same message causes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from delayer.amqp.properties import Properties
from delayer.amqp.values import Outgoing
from delayer.core.message import Target
from delayer.core.plan import Mode, Park, Policy, Refuse, Route
from delayer.format.inbox import delivery_of_row
from delayer.format.refusal import NO_EDITS, EntryPoints, RetryEdits, build_retry, refused_properties
from delayer.format.release import released_properties
from delayer.intake.handle import classify


def row(headers: object = None, properties: object = None, **more: Any) -> dict[str, Any]:
    found = {"exchange": "in", "routing_key": "kéy", "body": b"\x00body"}
    return found | {"headers": json.dumps(headers or {}), "properties": json.dumps(properties or {})} | more


def test_every_kind_of_value_is_encoded() -> None:
    headers = {
        "s": "ünï", "i": 2**63 - 1, "large": 2**63, "f": 1.5, "t": True, "n": None, "a": [1, "x", [False]],
        "o": {"k": {"v": 1}},
    }  # fmt: skip
    properties = {"message_id": "m", "content_type": "text/plain", "priority": 7, "expiration": "3000", "type": "t"}
    delivery = delivery_of_row(3, row(headers, properties))
    found = Properties.parse(delivery.properties)
    assert {one.name.decode(): one.value for one in found.headers_items()} == headers | {"large": 2.0**63}
    assert {name: found.short(name) for name in ("message_id", "content_type", "expiration", "type")} == {
        name: str(value).encode() for name, value in properties.items() if name != "priority"
    }
    spans = found.spans
    assert delivery.properties[slice(*spans["priority"])] == b"\x07"
    assert delivery.properties[slice(*spans["delivery_mode"])] == b"\x02"
    assert delivery[:4] == (3, False, b"in", "kéy".encode())
    assert delivery.body == b"\x00body"


OTHER_FORMS = ("x-delay", "json:/at")
ENTRIES = EntryPoints(b"delays", frozenset({b"in"}))


def test_a_due_time_by_sql_counts_on_every_route_and_again_after_a_retry() -> None:
    """A retry sends the message to the exchange, where another handler reads it. Nothing may be early then."""
    policy = Policy(Mode.STORE, {b"in": Route(b"in", b"out", delay_from=OTHER_FORMS)}, 10**9)
    body = b'{"at": "1970-01-01T00:05:00Z"}'
    first = delivery_of_row(1, row({"x-deliver-at": 10**11}, body=body))
    refused, _ = refused_properties(first, "why", b"t", 1 << 16)
    again = build_retry(first._replace(properties=refused), ENTRIES, 1 << 16, NO_EDITS)
    assert isinstance(again, Outgoing)
    for one in (first, first._replace(properties=again.properties)):
        assert classify(one, policy, 10**11 - 5_000, 1 << 16)[2] == Park(10**11, Target(b"out", "kéy".encode()))
    released = released_properties(Properties.parse(again.properties), b"1", 10**11, 10_000)
    assert not {b"x-delayer-sql", b"x-deliver-at"} & {*Properties.parse(released).names()}


def test_a_delay_that_an_operator_sets_replaces_that_due_time() -> None:
    policy = Policy(Mode.STORE, {b"in": Route(b"in", b"out", delay_from=OTHER_FORMS)}, 10**9)
    first = delivery_of_row(1, row({"x-deliver-at": 10**11}))
    refused, _ = refused_properties(first, "why", b"t", 1 << 16)
    edits = RetryEdits.of(7_000, {}, [], {})
    again = build_retry(first._replace(properties=refused), ENTRIES, 1 << 16, edits)
    assert isinstance(again, Outgoing)
    plan = classify(first._replace(properties=again.properties), policy, 0, 1 << 16)[2]
    assert plan == Park(7_000, Target(b"out", "kéy".encode()))


DEEP = json.loads("[" * 100 + "]" * 100)


@pytest.mark.parametrize(
    ("headers", "properties"),
    [
        ([1], {}), ({"x" * 256: 1}, {}), ({"large": 10**400}, {}), ({"deep": DEEP}, {}), ({"surrogate": "\ud800"}, {}),
        ({}, [1]), ({}, {"priority": 256}), ({}, {"priority": "high"}), ({}, {"message_id": 3}),
        ({}, {"message_id": "x" * 256}), ({"x-death": []}, {}), ({}, {"unknown": "x"}),
    ],
)  # fmt: skip
def test_a_row_that_amqp_cannot_express_is_refused(headers: object, properties: object) -> None:
    policy = Policy(Mode.STORE, {b"in": Route(b"in", b"out")}, 10**9)
    _, _, plan = classify(delivery_of_row(1, row(headers, properties)), policy, 0, 1 << 16)
    assert isinstance(plan, Refuse)
    assert plan.reason.startswith("malformed properties")
