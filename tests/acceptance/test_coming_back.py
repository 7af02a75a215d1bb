"""A dead-letter loop through a route, on a real broker: each pause is the route's, even if the headers still ask for
another delay."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from tests.acceptance.own_vhost import OwnVhost
from tests.support.raw import Message, Props, Value, number

PAUSE_MS = 700


def looping(place: OwnVhost) -> None:
    """Messages for ``out`` reach ``inbox`` and a queue that dead-letters each immediately, so it returns to ``in``."""
    arguments = {"x-message-ttl": 0, "x-dead-letter-exchange": "in"}
    place.rabbitmq.api("PUT", f"/api/queues/{place.vhost}/work", {"durable": True, "arguments": arguments})
    place.things.bind("out", "work")


@pytest.mark.parametrize("mode", ["store", "native"])
@pytest.mark.parametrize("delay", [number("I", 100), number("I", -60_000)])
async def test_a_message_that_comes_back_pauses_every_time(
    place: OwnVhost, store: str, mode: str, delay: Value
) -> None:
    looping(place)
    route = {"from": "in", "to": "out", "default_delay": f"{PAUSE_MS}ms"}
    environ = place.environ(mode, store) | {"ROUTE": json.dumps([route])}
    async with place.working(environ) as (_, raw, inbox):
        await raw.publish(Message("in", b"k", Props(headers=((b"x-delay", delay),), delivery_mode=2), b"again"))
        assert await inbox.until(lambda: inbox.counts[b"again"] == 4)
        gaps = [after.at_ms - before.at_ms for before, after in pairwise(inbox.of(b"again"))]
        assert sum(gaps) >= 3 * PAUSE_MS - 100, gaps  # Not each: the one before may have arrived late.
        assert [after.due_ms - before.due_ms >= PAUSE_MS for before, after in pairwise(inbox.of(b"again"))] == [
            True
        ] * 3
