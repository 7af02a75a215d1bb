"""The log of replies that the broker does not confirm."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import pytest

from delayer.amqp.errors import BrokerLost
from delayer.amqp.values import CONFIRMED, Outgoing, Pace
from delayer.config import logs
from delayer.core.backoff import LINES
from delayer.core.hold import NACKED, Outcome
from delayer.intake.replies import send_replies
from tests.support.fakes import ScriptedPublisher
from tests.support.logged import logging_as_it_was

ANSWERS = [Outgoing(b"", b"nowhere", b"\0\0", b"", b"id-%d" % n) for n in range(3)]


@pytest.mark.parametrize("lost", [False, True])
async def test_replies_that_nobody_confirms_do_not_flood_the_log(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_limited", logs._Limited())
    publisher, stream = ScriptedPublisher(), io.StringIO()

    async def publish(batch: Sequence[Outgoing], _pace: Pace | None = None) -> list[Outcome]:
        if lost:
            raise BrokerLost("gone")
        return [CONFIRMED, *[NACKED] * (len(batch) - 1)]

    monkeypatch.setattr(publisher, "publish", publish)
    with logging_as_it_was():
        logs.configure("json", "info", stream)
        for _ in range(5 * LINES):
            await send_replies(publisher, ANSWERS)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == LINES
    assert [(one["event"], one["id"], one["replies"]) for one in lines] == [
        ("reply not confirmed", "id-0" if lost else "id-1", 3 if lost else 2)
    ] * LINES
