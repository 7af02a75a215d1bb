"""Scenes for comparisons of brokers: declaring, routing and consuming, as far as delayer relies on them."""

from __future__ import annotations

from typing import Any

from pamqp.commands import Basic, Exchange, Queue

from tests.conformance.broker_scene import KINDS, Scene, scene
from tests.support.raw import TYPES, Props, array, number, text

# Declarations


@scene
async def declarations_that_differ(it: Scene) -> None:
    await it.queue("q", message_ttl=1000, dead_letter_exchange="dead")
    await it.queue("q", message_ttl=1000, dead_letter_exchange="dead")
    await it.queue("q", message_ttl=2000, dead_letter_exchange="dead")
    await it.queue("q", message_ttl=1 << 40, dead_letter_exchange="dead")
    await it.queue("q", dead_letter_exchange="dead")
    await it.queue("q", message_ttl=1000, dead_letter_exchange="other")
    await it.queue("q", message_ttl=1000, dead_letter_exchange="dead", single_active_consumer=True)
    await it.queue("q", "classic", message_ttl=1000, dead_letter_exchange="dead")
    await it.queue("q", message_ttl=1000, dead_letter_exchange="dead", delivery_limit=3)
    await it.ask(Queue.Declare(queue="q", durable=False))
    await it.ask(Queue.Declare(queue="q", durable=True, auto_delete=True))
    await it.exchange("x", "topic")
    await it.exchange("x", "topic")
    await it.exchange("x", "fanout")
    await it.exchange("x", "topic", alternate_exchange="y")
    await it.ask(Exchange.Declare(exchange="x", exchange_type="topic"))
    await it.ask(Exchange.Declare(exchange="x", exchange_type="topic", durable=True, internal=True))


@scene
async def declarations_that_are_wrong(it: Scene) -> None:
    await it.queue("a", message_ttl="1000")
    await it.queue("b", message_ttl=-1)
    await it.queue("c", dead_letter_exchange=5)
    await it.queue("d", dead_letter_routing_key="k")
    await it.queue("e", "other")
    await it.queue("f", single_active_consumer=1)
    await it.queue("g", max_priority=5)
    await it.queue("h", queue_mode="lazy")
    await it.ask(Queue.Declare(queue="i", durable=False, arguments={"x-queue-type": "quorum"}))
    await it.ask(Queue.Declare(queue="j", durable=True, exclusive=True, arguments={"x-queue-type": "quorum"}))
    await it.ask(Queue.Declare(queue="k", durable=True, auto_delete=True, arguments={"x-queue-type": "quorum"}))
    await it.queue("amq.q", "classic")
    await it.exchange("amq.x")
    await it.exchange("", "direct")
    for name in "abcdefghijk":
        await it.ask(Queue.Declare(queue=name, passive=True))


@scene
async def what_does_not_exist(it: Scene) -> None:
    await it.queue("q")
    await it.exchange("x")
    await it.ask(Queue.Declare(queue="missing", passive=True))
    await it.ask(Exchange.Declare(exchange="missing", passive=True))
    await it.ask(Exchange.Declare(exchange="", passive=True))
    await it.bind("missing", "x")
    await it.bind("q", "missing")
    await it.bind("q", "")
    await it.ask(Exchange.Bind(destination="x", source="missing"))
    await it.ask(Exchange.Bind(destination="missing", source="x"))
    await it.ask(Queue.Unbind(queue="q", exchange="x", routing_key="k"))
    await it.ask(Queue.Unbind(queue="missing", exchange="x", routing_key="k"))
    await it.ask(Queue.Unbind(queue="q", exchange="missing", routing_key="k"))
    await it.ask(Exchange.Unbind(destination="x", source="missing"))
    await it.ask(Queue.Delete(queue="missing"))
    await it.ask(Exchange.Delete(exchange="missing"))
    await it.ask(Exchange.Delete(exchange=""))
    await it.ask(Exchange.Delete(exchange="amq.direct"))
    await it.ask(Queue.Purge(queue="missing"))
    await it.get("missing")
    await it.ask(Basic.Consume(queue="missing", consumer_tag="c"))
    await it.ask(Basic.Cancel(consumer_tag="missing"))


@scene
async def deletions(it: Scene) -> None:
    await it.queue("q", "classic")
    await it.exchange("x", "topic")
    await it.bind("q", "x", "#")
    await it.ask(Exchange.Delete(exchange="x", if_unused=True))
    await it.sent("k", b"1", b"2", exchange="x")
    await it.count("q", 2)
    await it.ask(Queue.Delete(queue="q", if_empty=True))
    await it.consume("q", "c")
    await it.ask(Queue.Delete(queue="q", if_unused=True), 2)
    await it.ask(Queue.Delete(queue="q"), 2)
    await it.hear()
    await it.ask(Exchange.Delete(exchange="x", if_unused=True))
    await it.queue("other")
    await it.sent("other", b"1")
    await it.count("other", 1)
    await it.ask(Queue.Purge(queue="other"))
    await it.sent("other", b"1")
    await it.count("other", 1)
    await it.ask(Queue.Delete(queue="other"))


@scene
async def a_quorum_queue_is_not_deleted_if_it_is_empty(it: Scene) -> None:
    await it.queue("q")
    await it.ask(Queue.Delete(queue="q", if_empty=True))


@scene
async def a_queue_of_another_connection(it: Scene) -> None:
    await it.ask(Queue.Declare(queue="mine", exclusive=True))
    async with Scene.open(it.url) as other:
        await other.ask(Queue.Declare(queue="mine", passive=True))
        await other.ask(Queue.Declare(queue="mine", exclusive=True))
        await other.get("mine")
        it.transcript += other.transcript
    await it.ask(Queue.Declare(queue="mine", exclusive=True))


@scene
async def missing_rights(it: Scene) -> None:
    await it.exchange("topic", "topic")
    await it.exchange("mine.topic", "topic")
    await it.queue("theirs")
    async with Scene.open(it.limited_url) as other:
        await other.queue("mine")
        await other.queue("theirs")
        await other.queue("others")
        await other.queue("mine.dead", dead_letter_exchange="topic")
        await other.exchange("others")
        await other.exchange("mine.x", alternate_exchange="topic")
        await other.bind("mine", "topic", "#")
        await other.bind("theirs", "mine.topic", "#")
        await other.bind("mine", "mine.topic", "#")
        await other.ask(Exchange.Bind(destination="topic", source="mine.topic"))
        await other.ask(Exchange.Bind(destination="mine.topic", source="topic"))
        await other.ask(Queue.Unbind(queue="mine", exchange="topic", routing_key="#"))
        await other.ask(Queue.Declare(queue="theirs", passive=True))
        await other.ask(Exchange.Declare(exchange="topic", passive=True))
        await other.ask(Queue.Delete(queue="theirs"))
        await other.ask(Queue.Purge(queue="theirs"))
        await other.ask(Exchange.Delete(exchange="topic"))
        await other.ask(Basic.Consume(queue="theirs", consumer_tag="c", arguments={"x-priority": "none"}))
        await other.get("theirs")
        for exchange in ("topic", "mine.topic", "missing", ""):
            await other.confirming()
            other.publish("theirs", b"x", exchange=exchange)
            await other.ask(Basic.Qos(0, 0))
        it.transcript += other.transcript


# Routing


@scene
async def exchanges_of_every_kind(it: Scene) -> None:
    for name in ("a", "b", "c", "d"):
        await it.queue(name, "classic")
    await it.exchange("top", "topic", alternate_exchange="rest")
    await it.exchange("rest", "fanout")
    await it.exchange("heads", "headers")
    await it.exchange("direct", "direct")
    await it.bind("a", "top", "one.*")
    await it.bind("b", "top", "#.end")
    await it.bind("b", "top", "one.#")
    await it.bind("c", "rest")
    await it.bind("d", "heads", "", x_match="any", colour="red", size=5)
    await it.bind("a", "heads", "", x_match="all", colour="red", size=5)
    await it.bind("d", "direct", "k")
    await it.ask(Exchange.Bind(destination="heads", source="top", routing_key="heads"))
    await it.ask(Exchange.Bind(destination="top", source="heads"))
    await it.confirming()
    red, five = (b"colour", text("red")), (b"size", number("I", 5))
    for key, exchange, headers in (
        ("one.two", "top", None), ("one.two.end", "top", None), ("nothing", "top", None), ("heads", "top", (red,)),
        ("", "heads", (five, red)), ("", "heads", (number_of(5),)), ("k", "direct", None), ("K", "direct", None),
        ("heads", "top", ((b"CC", array(text("one.x"), text("d"))),)), ("a", "", ((b"BCC", array(text("b"))),)),
        ("nowhere", "", ((b"CC", array(text("c"))),)), ("nowhere", "", None),
    ):  # fmt: skip
        it.publish(key, key.encode() + b" to " + exchange.encode(), Props(headers=headers), exchange=exchange,
                   mandatory=True)  # fmt: skip
    await it.confirmed()
    for name in ("a", "b", "c", "d"):
        await it.consume(name, f"of {name}")
        await it.ask(Basic.Cancel(consumer_tag=f"of {name}"))
        await it.take(f"of {name}", 0)


def number_of(value: int) -> tuple[bytes, Any]:
    return b"size", number("l", value)


@scene
async def refused_publishes(it: Scene) -> None:
    await it.queue("q")
    await it.ask(Exchange.Declare(exchange="inner", exchange_type="direct", durable=True, internal=True))
    for props, exchange in (
        (Props(), "missing"), (Props(), "inner"), (Props(user_id=b"somebody"), ""), (Props(expiration=b"soon"), ""),
        (Props(expiration=b"-1"), ""), (Props(expiration=b""), ""), (Props(delivery_mode=3), ""),
        (Props(headers=((b"CC", text("q")),)), ""), (Props(user_id=b"guest", expiration=b"100000"), ""),
    ):  # fmt: skip
        await it.confirming()
        it.publish("q", b"x", props, exchange=exchange)
        await it.ask(Basic.Qos(0, 0))
    await it.count("q", 1)


@scene
async def a_number_that_erlang_does_not_have(it: Scene) -> None:
    await it.queue("q")
    await it.confirming()
    it.publish("q", b"good")
    await it.confirmed()
    it.publish("q", b"bad", Props(headers=((b"rate", number("d", float("nan"))),)))
    await it.hear()


@scene
async def messages_come_as_they_went(it: Scene) -> None:
    for kind in KINDS:
        await it.queue(kind, kind)
        full = Props(b"t", b"e", TYPES, 2, 5, b"c", b"r", b"100000", b"m", 1_700_000_000, b"ty", b"guest", b"a", b"cl")
        await it.confirming()
        for count, props in enumerate((Props(), full, Props(headers=()), Props(headers=((b"a", text("1")),) * 2))):
            it.publish(kind, b"%d" % count, props)
        it.publish(kind, b"")
        it.publish(kind, bytes(300_000))
        await it.confirmed()
        await it.consume(kind, kind, 6, channel=2)
        tags = await it.take(kind, 6, channel=2)
        it.nack(tags[-1], multiple=True, channel=2)
        await it.take(kind, 6, channel=2)
        await it.close_channel(2)


# Consuming


@scene
async def settling(it: Scene) -> None:
    for kind in KINDS:
        await it.queue(kind, kind, **({"delivery_limit": 9} if kind == "quorum" else {}))
        await it.sent(kind, *(b"%d" % n for n in range(12)))
        await it.consume(kind, "c", 5, channel=2)
        tags = await it.take("c", 5, channel=2)
        it.ack(tags[1], multiple=True, channel=2)
        tags += await it.take("c", 2, channel=2)
        it.nack(tags[3], channel=2)
        tags += await it.take("c", 1, channel=2)
        it.reject(tags[4], requeue=False, channel=2)
        tags += await it.take("c", 1, channel=2)
        await it.ask(Basic.Cancel(consumer_tag="c"), 2)
        await it.count(kind, 4)
        it.ack(tags[5], channel=2)
        await it.close_channel(2)
        await it.count(kind, 8, 0)
        for _ in range(9):
            await it.get(kind)


@scene
async def unknown_tags(it: Scene) -> None:
    await it.queue("q")
    await it.sent("q", b"1", b"2")
    await it.consume("q", "c", channel=2)
    tags = await it.take("c", 2, channel=2)
    it.ack(tags[0], channel=2)
    it.ack(tags[0], channel=2)
    await it.hear(2)
    await it.count("q", 1)
    it.ack(77)
    await it.hear()
    await it.consume("q", "again", channel=2)
    await it.take("again", 1, channel=2)
    await it.ask(Basic.Consume(queue="q", consumer_tag="again"), 2)


@scene
async def an_exclusive_consumer_and_a_wrong_priority(it: Scene) -> None:
    for kind in KINDS:
        await it.queue(kind, kind)
        await it.ask(Basic.Consume(queue=kind, consumer_tag="x", arguments={"x-priority": "none"}))
        await it.consume(kind, f"{kind} c", channel=2)
        await it.ask(Basic.Consume(queue=kind, consumer_tag=f"{kind} d", exclusive=True), 3)
        await it.count(kind)


@scene
async def one_active_consumer(it: Scene) -> None:
    for kind in KINDS:
        await it.queue(kind, kind, single_active_consumer=True)
        await it.consume(kind, "first", 4, channel=2)
        await it.count(kind, 0)
        await it.consume(kind, "second", 4, channel=3)
        await it.consume(kind, "third", 40, channel=4)
        await it.count(kind, 0)
        await it.sent(kind, *(b"%d" % n for n in range(10)))
        tags = await it.take("first", 4, channel=2)
        it.ack(tags[0], channel=2)
        await it.take("first", 1, channel=2)
        await it.close_channel(2)
        tags = await it.take("second", 4, channel=3)
        it.nack(tags[1], multiple=True, channel=3)
        await it.take("second", 2, channel=3)
        if kind == "quorum":  # a classic queue does not activate the next consumer then
            await it.ask(Basic.Cancel(consumer_tag="second"), 3)
            await it.take("third", 5, channel=4)
        await it.close_channel(3)
        await it.take("third", 4 if kind == "quorum" else 9, channel=4)
        await it.close_channel(4)


@scene
async def a_get_from_a_queue_with_one_active_consumer(it: Scene) -> None:
    for kind in KINDS:
        await it.queue(kind, kind, single_active_consumer=True)
        await it.sent(kind, b"1", b"2")
        await it.get(kind)
        await it.consume(kind, "c", channel=2)
        await it.get(kind)
        await it.close_channel(2)


@scene
async def nacked_messages_of_a_queue_with_a_limit(it: Scene) -> None:
    """They return to the head; those of the rest to the end."""
    for name, arguments in (
        ("with", {"delivery_limit": 5}),
        ("without", {}),
        ("one", {"single_active_consumer": True}),
    ):
        await it.queue(name, **arguments)
        await it.sent(name, *(b"%d" % n for n in range(8)))
        await it.consume(name, "c", 4, channel=2)
        tags = await it.take("c", 4, channel=2)
        it.nack(tags[1], multiple=True, channel=2)
        tags = tags[2:] + await it.take("c", 2, channel=2)
        it.nack(tags[1], channel=2)
        tags += await it.take("c", 1, channel=2)
        await it.close_channel(2)
        await it.count(name, 8, 0)
        await it.consume(name, "d", channel=2)
        await it.take("d", 8, channel=2)
        await it.close_channel(2)


@scene
async def a_consumer_whose_queue_is_deleted(it: Scene) -> None:
    for kind in KINDS:
        await it.queue(kind, kind)
        await it.sent(kind, b"1")
        await it.consume(kind, "c", channel=2)
        tags = await it.take("c", 1, channel=2)
        await it.ask(Queue.Delete(queue=kind))
        await it.hear(2)
        it.ack(tags[0], channel=2)
        await it.ask(Basic.Qos(0, 0), 2)
        await it.close_channel(2)
