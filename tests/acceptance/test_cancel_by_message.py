"""x-delay-cancel against the clock: a confirmed cancel means that the message is not delivered; a late cancel is
reported as too late. Two daemons share one store: mostly one process reads a cancel and the other releases the message.
"""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from tests.acceptance.own_vhost import OwnVhost, cancel, delayed
from tests.support.daemon import DaemonProcess
from tests.support.place import eventually

MESSAGES = 600
WINDOW_MS = 3_000
"""All messages are due within this window, and all are cancelled while they are being released."""


@pytest.mark.deadline(120)
async def test_cancelled_messages_are_not_delivered_and_late_cancels_are_reported(place: OwnVhost, store: str) -> None:
    place.things.queue("answers")
    environ = place.environ("store", store)
    chance = random.Random(20)
    async with DaemonProcess(environ) as one, DaemonProcess(environ) as other, await place.raw() as raw:
        inbox, answers = await raw.inbox("inbox"), await raw.inbox("answers")
        await one.ready()
        await other.ready()
        keys = [f"order-{n}" for n in range(MESSAGES)]
        await raw.publish(*(delayed(key, 4_000 + chance.randrange(WINDOW_MS), under=key) for key in keys))
        for portion in range(30):
            some = [keys.pop() for _ in range(MESSAGES // 30)]
            await raw.publish(*map(cancel, some))
            await inbox.until(
                lambda so_many=3 * portion: len(inbox.arrivals) >= so_many, 10
            )  # Messages fall due between portions.
        assert await answers.until(lambda: len(answers.arrivals) == MESSAGES, 40)
        said = {
            arrival.props.correlation_id.decode(): json.loads(arrival.delivery.body)["outcome"]
            for arrival in answers.arrivals
        }
        assert len(said) == MESSAGES, "each heard one answer, its own"
        late = {key for key, outcome in said.items() if outcome == "too late"}
        await inbox.got(key.encode() for key in late)
        assert await one.stop() == 0
        assert await other.stop() == 0
        await raw.round_trip()
        delivered = {body.decode(): count for body, count in inbox.counts.items()}
        assert set(delivered.values()) <= {1}
        outcomes = Counter(said.values())
        assert min(outcomes["cancelled"], outcomes["too late"]) > MESSAGES / 20, f"a race that was none: {outcomes}"
        assert outcomes.total() == outcomes["cancelled"] + outcomes["too late"]
        assert set(delivered) == late, "the messages with a late cancel are delivered, and no others"


async def test_cancels_without_a_waiting_message_or_a_reader(place: OwnVhost, store: str) -> None:
    place.things.queue("answers")
    async with place.working(place.environ("store", store)) as (daemon, raw, inbox):
        answers = await raw.inbox("answers")
        await raw.publish(cancel("never there"), cancel("nobody listens", b"no such queue"), cancel("ours", b"delays"))
        await raw.publish(delayed("held", 100, under="held"), delayed("after all of that", 300))
        assert await answers.until(lambda: len(answers.arrivals) == 1, 30)
        (arrival,) = answers.arrivals
        assert json.loads(arrival.delivery.body) == {"outcome": "too late", "key": "never there"}
        assert (await daemon.event("reply not confirmed"))["replies"] == 1
        await inbox.got([b"after all of that", b"held"])
        await eventually(lambda: place.things.depth("delays") == 0)
        assert await daemon.stop() == 0
        assert not [one for one in daemon.events if one["level"] == "error"]
