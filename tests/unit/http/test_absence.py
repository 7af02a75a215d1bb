"""404 for a message that was sent says why nothing finds it, and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from delayer.config.model import Settings
from delayer.http.absence import why_absent
from tests.unit.http.states import state

URL = "postgresql://nowhere/x"
AGAIN = "repeat this request"
READY = "/health/ready"


@pytest.mark.parametrize(
    ("settings", "now", "broker", "step"),
    [
        ({"mode": "store"}, {}, "", AGAIN),
        ({"mode": "store", "park_beyond": "10m"}, {}, "`park_beyond`", AGAIN),
        ({"mode": "native"}, {}, "In native mode", AGAIN),
        ({"mode": "store"}, {"usable": False}, "", READY),
        ({"mode": "store"}, {"consuming": {"delays": False}}, "", READY),
        ({"mode": "store"}, {"consuming": {}}, "", READY),
    ],
)
def test_the_cause_and_the_next_step(settings: dict[str, Any], now: dict[str, Any], broker: str, step: str) -> None:
    store = {"url": URL, **{name: value for name, value in settings.items() if name != "mode"}}
    configured = Settings.model_validate({"mode": settings["mode"], "store": store})
    found = why_absent('under the key "k"', configured, state(**now))
    assert found.detail.startswith(
        'No waiting message under the key "k" was found. Either it is not parked yet, or it was'
    )
    assert ("waits in the broker" in found.detail) == bool(broker)
    assert broker in found.detail
    assert step in found.next_step
