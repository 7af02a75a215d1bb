"""Scenes for comparisons of brokers: messages that are rejected, that expire, or that a full queue drops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pamqp.commands import Exchange, Queue

from tests.conformance.broker_scene import KINDS, Scene, scene
from tests.support.raw import Props, array, number, text


async def dead_letters_of(it: Scene, kind: str, **arguments: Any) -> None:
    await it.exchange("dead", "fanout")
    await it.queue("grave", "classic")
    await it.bind("grave", "dead")
    await it.queue(f"{kind} q", kind, dead_letter_exchange="dead", **arguments)


OWN = Props(
    content_type=b"text", headers=((b"z", number("I", 1)), (b"CC", array(text("nowhere"))), (b"a", text("2"))),
    delivery_mode=2, message_id=b"m",
)  # fmt: skip


@scene
async def rejected_messages(it: Scene) -> None:
    for kind in KINDS:
        await dead_letters_of(it, kind)
        await it.sent(f"{kind} q", b"1", b"2", props=OWN)
        await it.sent(f"{kind} q", b"3")
        await it.consume(f"{kind} q", "c", channel=2)
        tags = await it.take("c", 3, channel=2)
        it.reject(tags[0], requeue=False, channel=2)
        await it.count("grave", 1)
        it.nack(tags[2], multiple=True, requeue=False, channel=2)
        await it.count("grave", 3)
        for _ in range(3):
            await it.get("grave")
        await it.close_channel(2)


@scene
async def expired_messages(it: Scene) -> None:
    for kind in KINDS:
        await dead_letters_of(it, kind, message_ttl=200, dead_letter_routing_key="late")
        await it.sent(f"{kind} q", b"1", props=OWN)
        await it.sent(f"{kind} q", b"2", props=replace(OWN, expiration=b"100"))
        await it.sent(f"{kind} q", b"3", props=Props(expiration=b"100000"))
        await it.count("grave", 3)
        for _ in range(3):
            await it.get("grave")


@scene
async def messages_delivered_too_often(it: Scene) -> None:
    await dead_letters_of(it, "quorum", delivery_limit=2)
    await it.sent("quorum q", b"1", b"2", props=OWN)
    await it.consume("quorum q", "c", 1, channel=2)
    for _ in range(3):
        [tag] = await it.take("c", 1, channel=2)
        it.nack(tag, channel=2)
    [tag] = await it.take("c", 1, channel=2)
    await it.count("grave", 1)
    it.ack(tag, channel=2)
    await it.get("grave")
    await it.close_channel(2)
    await it.count("quorum q", 0, 0)


@scene
async def a_full_queue(it: Scene) -> None:
    for kind in KINDS:
        await dead_letters_of(it, kind, max_length=2)
        await it.queue(f"{kind} no", kind, max_length=2, overflow="reject-publish")
        for number_ in range(4):
            await it.sent(f"{kind} q", b"%d" % number_)
        await it.count("grave", 2)
        for _ in range(2):
            await it.get("grave")
        await it.count(f"{kind} q", 2)


@scene
async def a_full_classic_queue_refuses(it: Scene) -> None:
    await it.queue("q", "classic", max_length=2, overflow="reject-publish")
    for number_ in range(4):
        await it.sent("q", b"%d" % number_)
    await it.count("q", 2)


@scene
async def a_cascade(it: Scene) -> None:
    """Two levels that forward at least once, to an exchange with an alternate, and again through the first."""
    await it.exchange("end", "topic", alternate_exchange="strays")
    await it.exchange("strays", "fanout")
    await it.queue("strays", "classic")
    await it.queue("goal", "classic")
    await it.bind("strays", "strays")
    await it.bind("goal", "end", "*.*.goal")
    for name, to, key in (("one", "zero", "1.#"), ("zero", "end", "*.1.#")):
        await it.exchange(name, "topic")
        level = {"message_ttl": 150, "dead_letter_exchange": to, "dead_letter_strategy": "at-least-once"}
        await it.queue(name, **level, overflow="reject-publish")
        await it.bind(name, name, key)
    await it.ask(Exchange.Bind(destination="zero", source="one", routing_key="0.#"))
    await it.ask(Exchange.Bind(destination="end", source="zero", routing_key="*.0.#"))
    for key in ("1.1.goal", "0.1.goal", "1.0.goal", "0.0.goal", "1.1.nobody"):
        await it.sent(key, key.encode(), exchange="one", props=OWN)
    await it.count("goal", 4)
    await it.count("strays", 1)
    await it.consume("goal", "c", channel=2)
    it.transcript[:] = it.transcript[:-2]
    await it.take("c", 4, channel=2)
    it.transcript[-1] = sorted(it.transcript[-1][1], key=lambda one: one[2])
    await it.get("strays")


@scene
async def a_message_dies_in_one_queue_again(it: Scene) -> None:
    for kind in KINDS:
        await dead_letters_of(it, kind, message_ttl=50)
        await it.queue("wait", "classic", message_ttl=50, dead_letter_exchange="", dead_letter_routing_key=f"{kind} q")
        await it.bind(f"{kind} q", "dead", "unused")
        await it.queue("back", kind, message_ttl=20, dead_letter_exchange="", dead_letter_routing_key="back 2")
        await it.queue("back 2", kind, dead_letter_exchange="", dead_letter_routing_key="back")
        await it.sent("back", b"x", props=OWN)
        await it.consume("back 2", "c", channel=2)
        for _ in range(3):
            [tag] = await it.take("c", 1, channel=2)
            it.reject(tag, requeue=False, channel=2)
        await it.take("c", 1, channel=2)
        await it.close_channel(2)
        await it.count("back 2", 1, 0)
        for name in ("back", "back 2", "wait"):
            await it.ask(Queue.Delete(queue=name))


@scene
async def a_circle_of_expired_messages_ends(it: Scene) -> None:
    for kind in KINDS:
        await it.queue(f"{kind} a", kind, message_ttl=250, dead_letter_exchange="", dead_letter_routing_key=f"{kind} b")
        await it.queue(f"{kind} b", kind, message_ttl=250, dead_letter_exchange="", dead_letter_routing_key=f"{kind} a")
        await it.sent(f"{kind} a", b"x")
        await it.count(f"{kind} b", 1)
        await it.count(f"{kind} b", 0)
        await it.count(f"{kind} a", 0)
