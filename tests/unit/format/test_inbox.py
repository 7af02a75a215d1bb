"""A row of the SQL inbox becomes the delivery that a publisher of the same message causes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from delayer.amqp.properties import Properties
from delayer.core.plan import Mode, Policy, Refuse, Route
from delayer.format.inbox import delivery_of_row
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
