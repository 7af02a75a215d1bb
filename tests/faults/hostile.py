"""Messages that try to do harm, or only look like it, and the place where each must end up.

delivered   at its destination, once, not early, with every header that is not delayer's business
refused     in the refused queue, with this reason
held        in the store, or among the strays, with this reason
turned away by the broker itself: the publisher's channel or connection is closed, and delayer never sees it

A case that only some brokers accept names the ability that it needs (RabbitMQ).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from tests.support.rabbitmq import RabbitMQ
from tests.support.raw import TYPES, VOID, Header, Message, Props, Value, array, nested, number, octets, table, text

STORE, NATIVE = "store", "native"
MODES = (STORE, NATIVE)
IMPERSONATOR = "impersonator"
"""The user who may publish with another user's id."""


class End(Enum):
    DELIVERED = "delivered"
    REFUSED = "refused"
    HELD = "held"
    TURNED_AWAY = "turned away"


@dataclass(frozen=True)
class Hostile:
    """``reason`` is a pattern. ``props`` None: only ``headers`` and persistence. ``size``: bytes of the body, at least
    those of the name."""

    end: End
    reason: str = ""
    headers: tuple[Header, ...] = ()
    props: Props | bytes | None = None
    through: str = "h.in"
    key: bytes = b"inbox"
    size: int = 0
    modes: tuple[str, ...] = MODES
    impersonated: bool = False
    content_class: int = 60
    arrives_as: bytes | None = None
    """The routing key at the destination, if it is another one."""
    needs: str = ""
    """The ability that a broker needs to accept it (RabbitMQ); other brokers turn it away."""

    def message(self, body: bytes) -> Message:
        props = self.props
        if props is None:
            props = Props(headers=self.headers, delivery_mode=2)
        return Message(self.through, self.key, props, body.ljust(self.size, b"\xce"))

    def at(self, broker: RabbitMQ) -> Hostile:
        """The case with its end at this broker."""
        return replace(self, end=End.TURNED_AWAY, reason="") if self.needs and not getattr(broker, self.needs) else self


def delivered(*headers: Header, **more: object) -> Hostile:
    return replace(Hostile(End.DELIVERED, headers=headers), **more)


def refused(reason: str, *headers: Header, **more: object) -> Hostile:
    return replace(Hostile(End.REFUSED, reason, headers), **more)


def held(reason: str, through: str, delay: int = 0) -> Hostile:
    return Hostile(End.HELD, reason, (x_delay(number("I", delay)),), through=through)


def turned_away(*headers: Header, **more: object) -> Hostile:
    return replace(Hostile(End.TURNED_AWAY, headers=headers), **more)


def x_delay(value: Value) -> Header:
    return (b"x-delay", value)


def deliver_at(value: Value) -> Header:
    return (b"x-deliver-at", value)


def cc(*keys: str) -> Header:
    return (b"CC", array(*map(text, keys)))


SECOND = x_delay(number("I", 1000))
SIX_SECONDS = x_delay(number("I", 6000))
FORGED_LINE = 'k\r\n{"timestamp": "2026-01-01T00:00:00Z", "level": "info", "event": "ready"}\n\x1b[31m\x1b]0;owned\x07'
NO_REPLY = "amq.rabbitmq.reply-to.g2EF.k"
"""A key that closes the connection at the default exchange: the broker reads a number, and expects a process."""
ENVELOPE: tuple[Header, ...] = (
    (b"x-delayer-envelope", number("l", 1)),
    (b"x-delayer-route", text("h.in")),
    (b"x-delayer-exchange", text("h.in")),
    (b"x-delayer-routing-key", text("inbox")),
    (b"x-delayer-to", text("h.private")),
    (b"x-delayer-to-key", text("stolen")),
    (b"x-delayer-properties", octets(b"\0\0")),
)
"""The envelope that the daemon puts around messages in the cascade, with a destination that no route allows."""

PUBLISHER: Mapping[str, Hostile] = {
    "another user's id, believed by the broker": delivered(
        props=Props(headers=(SECOND,), user_id=b"somebody", delivery_mode=2), impersonated=True
    ),
    "another user's id": turned_away(props=Props(headers=(SECOND,), user_id=b"somebody")),
    "expiration that is no number": turned_away(props=Props(headers=(SECOND,), expiration=b"soon")),
    "expiration below zero": turned_away(props=Props(headers=(SECOND,), expiration=b"-1")),
    "expiration beyond ten years": turned_away(props=Props(headers=(SECOND,), expiration=b"315360000001")),
    "expiration shorter than the delay": delivered(
        props=Props(headers=(SIX_SECONDS,), expiration=b"5000", delivery_mode=2)
    ),
    "reply to a consumer that is not there": turned_away(props=Props(reply_to=b"amq.rabbitmq.reply-to")),
    "CC that is no list": turned_away((b"CC", text("copies"))),
    "CC that is a table": turned_away((b"CC", table((b"k", text("copies"))))),
    "BCC that is a number": turned_away((b"BCC", number("I", 5))),
    "CC of numbers": delivered(SECOND, (b"CC", array(number("I", 1), VOID))),
    "CC of 10,000 keys": delivered(SECOND, cc(*["nobody"] * 10_000)),
    "odd values in fixed places": delivered(
        props=Props(headers=(SECOND,), delivery_mode=2, priority=255, timestamp=2**64 - 1, type=b"\0" * 255)
    ),
    "a delivery mode that is none": delivered(
        props=Props(headers=(SECOND,), delivery_mode=255), needs="takes_any_delivery_mode"
    ),
    "transient": delivered(props=Props(headers=(SECOND,), delivery_mode=1)),
    "an unknown content class": turned_away(SECOND, content_class=61),
}
TABLES: Mapping[str, Hostile] = {
    "every type of field": delivered(SECOND, *TYPES),
    "nested 100 deep": delivered(SECOND, (b"deep", nested(100))),
    "a delay nested 100 deep": refused("malformed header table: .*64 levels", x_delay(nested(100))),
    "names twice": delivered(SECOND, (b"a", text("1")), (b"a", number("I", 2)), x_delay(text("?"))),
    "names and values that are not UTF-8": delivered(SECOND, (b"\xff\xfe", text(b"\xc3\x28"))),
    "a name of no bytes": delivered(SECOND, (b"", text("?"))),
    "a name of 255 bytes": delivered(SECOND, (b"n" * 255, VOID)),
    "as long as a frame": refused("too long to carry", SECOND, (b"large", text("v" * 130_000))),
    "nearly as long as a frame": delivered(SECOND, (b"large", text("v" * 128_000))),
    "1 MB": turned_away(SECOND, (b"large", text("v" * 1_000_000))),
}
DELAYS: Mapping[str, Hostile] = {
    "NaN": refused("x-delay: ", x_delay(text("NaN"))),
    "infinity": refused("x-delay: ", x_delay(text("Infinity"))),
    "minus infinity": refused("x-delay: ", x_delay(text("-inf"))),
    "10^30 as text": refused("x-delay: ", x_delay(text("1" + "0" * 30))),
    "10^30 as a double": refused("too long", x_delay(number("d", 1e30))),
    "10,000 digits": refused("x-delay: |too long", x_delay(text("9" * 10_000))),
    "below zero": delivered(x_delay(number("l", -(2**63)))),
    "far below zero": delivered(x_delay(text("-" + "9" * 20))),
    "empty": refused("x-delay: ", x_delay(text(""))),
    "a table": refused("x-delay: ", x_delay(table((b"ms", number("I", 5))))),
    "in year 0": delivered(deliver_at(text("0000-01-01T00:00:00Z"))),
    "in year -1": refused("x-deliver-at: ", deliver_at(text("-0001-01-01T00:00:00Z"))),
    "in year 0, as a number": delivered(deliver_at(number("l", -62_167_219_200_000))),
    "in year 99999": refused("x-deliver-at: ", deliver_at(text("99999-01-01T00:00:00Z"))),
    "in year 99999, as a number": refused("too long|microseconds", deliver_at(number("l", 3_093_527_980_800_000))),
    "at the last timestamp": refused("too long|x-deliver-at: ", deliver_at(number("T", 2**64 - 1))),
}
ADDRESSES: Mapping[str, Hostile] = {
    "255 bytes": delivered(SECOND, key=b"k" * 255),
    "255 bytes, for a queue that is not there": replace(held("312 NO_ROUTE", "h.queue"), key=b"k" * 255),
    "an exchange of 128 bytes in the header": refused(
        "at most 127 bytes", SECOND, (b"x-delay-exchange", text("ü" * 64)), through="h.any"
    ),
    "256 bytes in the header": refused("at most 255 bytes", SECOND, (b"x-delay-routing-key", text("k" * 256))),
    "28 digits before it": delivered(SECOND, key=b"1." * 28 + b"inbox", arrives_as=b"inbox"),
    "56 digits before it": delivered(SECOND, key=b"1.0." * 28 + b"k", arrives_as=b"1.0." * 14 + b"k"),
    "nothing but 28 digits": delivered(SECOND, key=b"0." * 28, arrives_as=b""),
    "no bytes": delivered(SECOND, key=b""),
    "a hash": delivered(SECOND, key=b"#"),
    "stars and hashes": delivered(SECOND, key=b"*.#.*"),
    "a line of the log": delivered(SECOND, key=FORGED_LINE.encode()),
    "a line of the log, refused": refused("x-delay: ", x_delay(text(FORGED_LINE)), key=FORGED_LINE.encode()),
    "a line of the log, held": replace(held("312 NO_ROUTE", "h.unbound"), key=FORGED_LINE.encode()),
    "an exchange that is a line of the log": refused("forbidden", SECOND, (b"x-delay-exchange", text(FORGED_LINE))),
    "an exchange that is not allowed": refused("forbidden", SECOND, (b"x-delay-exchange", text("h.private"))),
    "an exchange of the cascade, under a pattern that allows all": refused(
        "leads into delayer's own exchanges", (b"x-delay-exchange", text("delayer.delay-level-00")), through="h.any"
    ),
    "a level of the cascade": refused(
        "leads into delayer's own queues", SECOND, through="h.queue", key=b"delayer.delay-level-00"
    ),
    "a copy into a level of the cascade": refused(
        "leads into delayer's own queues", SECOND, cc("delayer.delay-level-00"), through="h.queue"
    ),
    "a copy into the intake queue": refused("leads into delayer's own queues", SECOND, cc("delays"), through="h.queue"),
    "the intake queue": refused(
        "leads into delayer's own queues", SECOND, (b"x-delay-routing-key", text("delays")), through="h.queue"
    ),
    "a direct reply without a consumer": refused("to a direct reply", SECOND, through="h.queue", key=NO_REPLY.encode()),
    "a direct reply, in the header": refused(
        "to a direct reply", (b"x-delay-routing-key", text(NO_REPLY)), through="h.queue"
    ),
    "a copy to a direct reply": refused("to a direct reply", SECOND, cc("inbox", NO_REPLY), through="h.queue"),
    "a forged envelope": refused("leads into delayer's own queues", *ENVELOPE, through="h.queue", key=b"delays.due"),
    "a copy of a forged envelope": refused(
        "leads into delayer's own queues", *ENVELOPE, cc("delays.due"), through="h.queue"
    ),
    "half an envelope, straight into the due queue": refused(
        "not a message of the cascade", *ENVELOPE[:3], through="", key=b"delays.due", modes=(NATIVE,)
    ),
    "no body": delivered(SECOND, key=b"no body"),
    "a body of 1 MB": delivered(SECOND, size=1_000_000),
}


def death(queue: str, *more: Header) -> tuple[Header, ...]:
    """The header that only a broker should write: this queue dead-lettered the message."""
    note = table((b"count", number("l", 1)), (b"reason", text("rejected")), (b"queue", text(queue)))
    return ((b"x-death", array(note)), *more)


def forged(reason: str, *headers: Header) -> Hostile:
    """Published straight to the exchange for dead letters. A broker may remove such a header as its own."""
    return refused(f"{reason}|expected x-death", *headers, through="h.retry", key=b"anything")


DEATHS: Mapping[str, Hostile] = {
    "none": forged("expected x-death"),
    "a word": forged("expected x-death", (b"x-death", text("orders"))),
    "of numbers": forged("expected x-death", (b"x-death", array(number("I", 1), VOID))),
    "of no queue": forged("expected x-death", *death("")),
    "in the intake queue": forged("leads into delayer's own queues", *death("delays")),
    "in the refused queue": forged("leads into delayer's own queues", *death("delays.refused")),
    "in the due queue, with an envelope": forged("leads into delayer's own queues", *death("delays.due"), *ENVELOPE),
    "in a level of the cascade": forged("leads into delayer's own queues", *death("delayer.delay-level-00")),
    "in a direct reply": forged("to a direct reply", *death(NO_REPLY)),
    "retried so often that no number says it": forged(
        "expected a whole number",
        *death("orders", (b"x-delayer-failed-in", text("orders")), (b"x-delayer-retries", number("l", 2**62))),
    ),
}
WHEN = (("", 1000), (", at once", 0))
DESTINATIONS: Mapping[str, Hostile] = {
    f"{what}{when}": held(reason, through, delay)
    for what, reason, through in (
        ("not there", "404 NOT_FOUND", "h.missing"),
        ("internal", "403 ACCESS_REFUSED", "h.internal"),
        ("of another type", "312 NO_ROUTE", "h.headers"),
        ("without bindings", "312 NO_ROUTE", "h.unbound"),
        ("full", "nacked", "h.full"),
        ("closed to us", "403 ACCESS_REFUSED", "h.closed"),
    )
    for when, delay in WHEN
} | {f"full, by queue name{when}": replace(held("nacked", "h.queue", delay), key=b"h.brim") for when, delay in WHEN}
SILENT: Mapping[str, Hostile] = {
    f"destination: silent{when}": held("no confirm within 8 s: exchange 'h.silent.out', key 'inbox'", "h.silent", delay)
    for when, delay in (("", 1000), (", at once", 0))
}
"""For a queue that neither confirms nor rejects: the test silences it (tests/support/silent.py)."""
FRAME, LARGEST = 4 << 20, 2 << 20
ROOMY: Mapping[str, Hostile] = {
    "table: as long as a frame": refused("too long to carry", SECOND, (b"large", text("v" * (FRAME - 1072)))),
    "table: nearly as long as a frame": delivered(SECOND, (b"large", text("v" * (FRAME - 3072)))),
    "table: 1 MB": delivered(SECOND, (b"large", text("v" * 1_000_000))),
    "address: a body of the broker's maximum": delivered(SECOND, size=LARGEST),
    "address: a body of more than that": turned_away(SECOND, size=LARGEST + 1),
}
"""For a broker that accepts frames and bodies of this many bytes. At other brokers some of these end up elsewhere."""
GROUPS = {
    "publisher": PUBLISHER,
    "table": TABLES,
    "delay": DELAYS,
    "address": ADDRESSES,
    "death": DEATHS,
    "destination": DESTINATIONS,
}
CASES: Mapping[str, Hostile] = {
    f"{group}: {name}": case for group, cases in GROUPS.items() for name, case in cases.items()
}
EMPTY = "address: no body"
