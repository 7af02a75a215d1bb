"""Schedules for tests."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from delayer.amqp.properties import encode_headers
from delayer.core.message import Target
from delayer.schedule.rhythm import Every
from delayer.schedule.schedule import Schedule

HOURLY = Every(3_600_000)


def schedule(**values: Any) -> Schedule:
    plain = {
        "id": UUID(int=47), "name": "tick", "target": Target(b"delayer.out", b"k"), "rhythm": HOURLY,
        "properties": encode_headers(), "body": b"tick",
    }  # fmt: skip
    return Schedule(**{**plain, **values})


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)
