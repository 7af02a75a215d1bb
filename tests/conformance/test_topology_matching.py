"""The audit and the model of the cascade match keys of a topic exchange as a broker does."""

from __future__ import annotations

import itertools

import aio_pika
import pytest
from aio_pika.exceptions import DeliveryError

from delayer.core.cascade import LEVELS
from tests.conformance.broker_world import Place
from tests.unit.core.test_cascade_law import matches

WORDS = ("a", "b", "")
PATTERNS = [
    ".".join(words)
    for length in (1, 2, 3)
    for words in itertools.product(("a", "b", "*", "#", ""), repeat=length)
    if words.count("#") <= 2  # the newest brokers refuse more
]
KEYS = [".".join(words) for length in (1, 2, 3) for words in itertools.product(WORDS, repeat=length)]
STARS = "*." * LEVELS
DIGITS = "0." * (LEVELS - 1) + "1."
LONG = [
    (STARS + "sales", DIGITS + "sales"),
    (STARS + "sales", DIGITS + "eu.sales"),
    ("#.sales", DIGITS + "eu.sales"),
    (STARS, DIGITS),
    (STARS + "x" * 199, DIGITS + "x" * 199),
    ("*." * 27 + "1.#", DIGITS + "a.b"),
    ("*." * 27 + "0.#", DIGITS + "a.b"),
]


async def broker_says(vhost: str, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], bool]:
    """Whether the broker routes each message, with one binding at a time."""
    found = {}
    connection = await aio_pika.connect(vhost)
    async with connection, connection.channel(on_return_raises=True) as channel:
        queue = await channel.declare_queue(exclusive=True)
        exchange = await channel.declare_exchange("matching", "topic", auto_delete=True)
        await queue.bind(exchange, "keeps the exchange alive")
        for pattern, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
            await queue.bind(exchange, pattern)
            for pair in group:
                try:
                    await exchange.publish(aio_pika.Message(b""), pair[1], mandatory=True)
                    found[pair] = True
                except DeliveryError:
                    found[pair] = False
            await queue.unbind(exchange, pattern)
    return found


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(LONG, id="cascade"),
        pytest.param([(p, k) for p in PATTERNS for k in KEYS if len(p) + len(k) <= 6], id="every-short-one"),
    ],
)
async def test_topics_are_matched_as_the_broker_does(place: Place, pairs: list[tuple[str, str]]) -> None:
    answers = await broker_says(place.url, pairs)
    assert {pair: matches(*pair) for pair in pairs} == answers
