"""Messages forged to look like delayer's or the broker's: they go nowhere that the configuration does not allow.

A publisher of one intake exchange must not reach h.private. Neither a forged envelope among real ones nor a false note
on a refused message may help it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from delayer.core.cascade import Cascade, routing_key
from tests.faults.hostile import ENVELOPE
from tests.faults.villain import STRAYS
from tests.support.place import Place, eventually
from tests.support.raw import Header, Message, Props, Raw, array, number, table, text
from tests.support.servers import RabbitMQ
from tests.support.store import sql

ATTACKER = "delayer-attacker"
"""May write to delayer.in and nowhere else. The password is its name."""
ROUTES = json.dumps([{"from": "delayer.in", "to": ""}, {"from": "other.in", "to": "h.private"}])
BY_US: tuple[Header, ...] = ((b"x-delayer-id", text("1")), (b"x-delayer-due", number("l", 4_000_000_000_000)))


@pytest.fixture(autouse=True)
def furnished(rabbitmq: RabbitMQ, vhost_name: str) -> None:
    """With h.private, and h.stolen behind it."""
    rabbitmq.api("PUT", f"/api/exchanges/{vhost_name}/h.private", {"type": "topic", "durable": True})
    for queue in ("h.stolen", "mine"):
        rabbitmq.api("PUT", f"/api/queues/{vhost_name}/{queue}", {"durable": True})
    rabbitmq.api("POST", f"/api/bindings/{vhost_name}/e/h.private/q/h.stolen", {"routing_key": "#"})
    rabbitmq.add_user(ATTACKER, ATTACKER, vhost=vhost_name, configure="^$", read="^$", write=r"^delayer\.in$")


@asynccontextmanager
async def attacker(rabbitmq: RabbitMQ, vhost: str) -> AsyncIterator[Raw]:
    async with await Raw.connect(rabbitmq.url(vhost, user=f"{ATTACKER}:{ATTACKER}")) as raw:
        yield raw


def forged(body: bytes, *headers: Header, key: bytes = b"mine", **more: Any) -> Message:
    return Message("delayer.in", key, Props(headers=headers, delivery_mode=2, **more), body)


def met_in_a_level(body: bytes, seconds: int) -> Message:
    """A message with the headers of an envelope, in a level, on its way to the queue mine."""
    props = Props(headers=(*ENVELOPE, *BY_US), delivery_mode=2)
    return Message(Cascade().entry(seconds), routing_key(seconds, b"mine"), props, body)


@pytest.mark.words
async def test_a_stray_envelope_is_not_opened(vhost: str) -> None:
    """No binding routes to the queue mine, so the message joins the daemon's own envelopes among the strays. The
    command reports that it is not an envelope of ours, and sends it nowhere."""
    place = await Place("native", vhost).declare()
    async with await Raw.connect(place.broker) as raw:
        await raw.publish(met_in_a_level(b"old", 1))
    await eventually(place.standing, lambda standing: standing == {STRAYS: 1})
    [row] = json.loads(await place.delayer("strays", "list", "--json", ROUTE=ROUTES))["messages"]
    assert (row["id"], row["body"], row["reason"][:26]) == ("", "old", "not an envelope of ours: e")
    with pytest.raises(RuntimeError, match="On their way again: 0"):
        await place.delayer("strays", "retry", "--all", "--yes", ROUTE=ROUTES)
    assert await place.bodies("h.stolen") == []
    assert await place.standing() == {STRAYS: 1}


@pytest.mark.parametrize("verb", [("drain", "--to", "store"), ("import", "cascade", "run")], ids=["drain", "import"])
async def test_an_envelope_in_a_level_is_not_opened(vhost: str, store: str, verb: tuple[str, ...]) -> None:
    """The two commands that empty levels park it as a message for the queue mine."""
    place = Place("native", vhost, store)
    await place.declare()
    async with await Raw.connect(place.broker) as raw:
        await raw.publish(met_in_a_level(b"old", 3_600))
    await place.delayer(*verb, "--yes", MODE="store", ROUTE=ROUTES)
    async with sql(store) as connection:
        [row] = await connection.fetch("SELECT to_exchange, to_key FROM message")
    assert row["to_exchange"] in (b"", Cascade().delivery.encode())
    assert row["to_key"].endswith(b"mine")


def died(queue: str, exchange: str) -> Header:
    note = (
        (b"count", number("l", 1)), (b"exchange", text(exchange)), (b"queue", text(queue)),
        (b"reason", text("expired")), (b"routing-keys", array(text("stolen"))),
    )  # fmt: skip
    return (b"x-death", array(table(*note)))


def says(exchange: str) -> tuple[Header, ...]:
    return (
        (b"x-delayer-refused", text("x-delay: expected milliseconds, found 'soon'")),
        (b"x-delayer-exchange", text(exchange)),
        (b"x-delayer-routing-key", text("stolen")),
    )


async def test_refused_messages_go_back_to_the_intake_queue(rabbitmq: RabbitMQ, vhost_name: str, vhost: str) -> None:
    """No daemon runs, so the broker itself sets them aside, with all headers of their publisher."""
    place = await Place("native", vhost).declare()
    messages = {
        b"our headers": says("h.private"),
        b"a level of the cascade": says("delayer.delay-level-03"),
        b"another route": says("other.in"),
        b"a note of another queue": (died("orders", "h.private"),),
        b"a note of the intake queue": (died("delays", "h.private"),),
        b"nothing": (),
    }
    async with attacker(rabbitmq, vhost_name) as raw:
        for body, headers in messages.items():
            await raw.publish(forged(body, *headers, expiration=b"1"))
    async with await Raw.connect(place.broker) as raw:
        named = Props(headers=(), expiration=b"1", user_id=b"guest", delivery_mode=2)
        await raw.publish(Message("delayer.in", b"mine", named, b"with a user id"))
    await place.ready(len(messages) + 1, "delays.refused")
    try:
        told = await place.delayer("refused", "retry", "--all", "--yes", ROUTE=ROUTES)
    except RuntimeError as stays:
        told = str(stays)
    assert "exit 1\n" in told, told
    assert await place.bodies("h.stolen") == []
    back = await place.bodies("delays")
    assert {b"nothing", b"with a user id"} <= set(back), told
    # Before RabbitMQ 4.0, the broker keeps writing into death notes supplied by a publisher.
    assert set(back) - {b"nothing", b"with a user id"} <= {b"a note of another queue", b"a note of the intake queue"}
    left = await place.bodies("delays.refused")
    assert sorted(back + left) == sorted([*messages, b"with a user id"]), told
