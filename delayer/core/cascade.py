"""The cascade: 28 levels of TTL queues, from 2^27 seconds down to one, and the routing keys through them. Pure.

Word 27 - L of the routing key is bit L of the delay, and the exchange of level L routes by it. A 1 routes to the
level's queue, which dead-letters the message to the next exchange after 2^L seconds. A 0 routes straight to the next
exchange. So a message enters at its highest set bit, waits exactly its delay, and leaves at the delivery exchange::

    1.0.1.address      level 2 ──wait 4 s──> level 1 ──> level 0 ──wait 1 s──> delivery ──> *.*.*.address

Other systems use the same cascade under other names. Takeovers and imports empty those cascades, so names and arguments
here match the owner's exactly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from delayer.amqp.values import SHORT_STRING
from delayer.core.topology import DEAD_LETTER_STRATEGY, ArgumentValue, Binding, Exchange, Queue, Topology, arguments

LEVELS = 28
MAX_SECONDS = (1 << LEVELS) - 1
ADDRESS_BYTES = SHORT_STRING - 2 * LEVELS
"""Room for the address in a routing key; the digits and dots of all levels take the rest."""

NAME_BYTES = 127
"""AMQP 0-9-1's limit for exchange names. RabbitMQ allows longer names; its client libraries do not."""

# RabbitMQ 4's default of 20 deletes a message after 21 lost connections; on 3.10, -1 deletes it after one.
DELIVERY_LIMIT = 1_000_000
"""Delivery limit of queues that the daemon consumes. Beyond it, the broker moves a message to the refused queue."""
LOOKS = (1 << 53) - 1
"""Delivery limit of queues that operators inspect: up to RabbitMQ 4.2, each inspection counts as a delivery. At 100 a
second it lasts 2.8 million years. JSON cannot hold larger integers exactly."""

Kind = Literal["delayer", "nservicebus-v2", "nservicebus-v1", "celery"]
CASCADE_KINDS: tuple[Kind, ...] = get_args(Kind)

_NAMES_BEGIN = re.compile(r"[A-Za-z0-9_.:-]*")
_PREFIX = re.compile(rb"(?:[01]\.){28}")
ONE_CONSUMER = "x-single-active-consumer"
"""The queue argument that makes the broker deliver to one consumer at a time; the rest stand by."""
_QUORUM: dict[str, ArgumentValue] = {
    "x-queue-type": "quorum",
    DEAD_LETTER_STRATEGY: "at-least-once",
    "x-overflow": "reject-publish",  # Any other value silently turns at-least-once into at-most-once.
}


class Level(NamedTuple):
    """One level. Its exchange and its queue share ``name``; ``next`` is the next exchange."""

    number: int
    name: str
    ttl_ms: int
    next: str


class _Family(NamedTuple):
    level: str  # The format of a level's name.
    delivery: str
    arguments: dict[str, ArgumentValue]  # The arguments of a level's queue, except TTL and dead-letter exchange.


_FAMILIES: dict[Kind, _Family] = {
    "delayer": _Family("{prefix}delay-level-{level:02d}", "{prefix}delay-delivery", _QUORUM),
    "nservicebus-v2": _Family("nsb.v2.delay-level-{level:02d}", "nsb.v2.delay-delivery", _QUORUM),
    # Without x-queue-type the vhost's default applies. RabbitMQ 4.3 rejects x-queue-mode, and so this whole kind.
    "nservicebus-v1": _Family("nsb.delay-level-{level:02d}", "nsb.delay-delivery", {"x-queue-mode": "lazy"}),
    "celery": _Family("celery_delayed_{level}", "celery_delayed_delivery", _QUORUM),
}


@dataclass(frozen=True, slots=True)
class Cascade:
    """One cascade. ``prefix`` starts the names of our own cascade (kind "delayer"); other kinds ignore it. ``owner``,
    for kind "celery" only, is kombu's optional prefix of Celery's names, since kombu 5.7."""

    kind: Kind = "delayer"
    prefix: str = "delayer."
    owner: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown kind, and for a prefix that the broker rejects in names."""
        if self.kind not in CASCADE_KINDS:
            raise ValueError(f"cascade: expected one of {', '.join(CASCADE_KINDS)}, found {self.kind!r}")
        for begin in (self.prefix, self.owner):
            if not _NAMES_BEGIN.fullmatch(begin):
                raise ValueError(f"prefix: expected letters, digits and any of '-_.:' only, found {begin!r}")
        if self.owner and self.kind != "celery":
            raise ValueError(
                f"prefix: expected none, because cascade {self.kind} has names of its own, found {self.owner!r}"
            )
        if self.prefix.startswith("amq."):
            raise ValueError(
                f"prefix: expected any but 'amq.', which the broker keeps for itself, found {self.prefix!r}"
            )
        if len(self.level(0)) > NAME_BYTES or len(self.delivery) > NAME_BYTES:
            raise ValueError(
                f"prefix: expected names of at most {NAME_BYTES} bytes, found {self.owner or self.prefix!r}"
            )

    @property
    def shared(self) -> bool:
        """Whether the cascade belongs to another system."""
        return self.kind != "delayer"

    @property
    def counts_deliveries(self) -> bool:
        """Whether the level queues are quorum queues, so that only the broker sets ``x-delivery-count`` there."""
        return _FAMILIES[self.kind].arguments.get("x-queue-type") == "quorum"

    @property
    def delivery(self) -> str:
        """Name of the delivery exchange at the end of the cascade."""
        return self._owned(_FAMILIES[self.kind].delivery.format(prefix=self.prefix))

    @property
    def strays(self) -> str:
        """Name of the exchange and queue for messages whose address has no binding; "" for another system's cascade."""
        return "" if self.shared else f"{self.prefix}delay-strays"

    @property
    def probe(self) -> str:
        """Prefix of the names of queues that test whether the broker delays messages itself."""
        return f"{self.prefix}delay-probe"

    def level(self, number: int) -> str:
        """Name of the exchange and of the queue of a level, 0 to 27."""
        if not 0 <= number < LEVELS:
            raise ValueError(f"level: expected 0 to {LEVELS - 1}, found {number}")
        return self._owned(_FAMILIES[self.kind].level.format(prefix=self.prefix, level=number))

    def _owned(self, name: str) -> str:
        return f"{self.owner}_{name}" if self.owner else name

    def levels(self) -> Iterator[Level]:
        """All levels from 27 down to 0, in the order of a message's path."""
        for number in reversed(range(LEVELS)):
            yield Level(
                number, self.level(number), (1 << number) * 1000, self.level(number - 1) if number else self.delivery
            )

    def entry(self, seconds: int) -> str:
        """Name of the exchange to publish to: the level of the highest set bit, or level 0 without a delay."""
        _check(seconds)
        return self.level(max(seconds.bit_length() - 1, 0))

    def topology(self) -> Topology:
        """29 exchanges, 28 queues and 56 bindings. Our own cascade adds one of each for strays, because otherwise about
        32 messages without a binding would stall a level for all messages."""
        exchanges, queues, bindings = [], [], []
        for level in self.levels():
            exchanges.append(Exchange(level.name, "topic", shared=self.shared, closed=not self.shared))
            own: dict[str, ArgumentValue] = {"x-message-ttl": level.ttl_ms, "x-dead-letter-exchange": level.next}
            queues.append(Queue(level.name, arguments(_FAMILIES[self.kind].arguments | own), shared=self.shared))
            words = "*." * (LEVELS - 1 - level.number)
            bindings.append(Binding(level.name, level.name, "queue", f"{words}1.#"))
            bindings.append(Binding(level.name, level.next, "exchange", f"{words}0.#"))
        alternate = arguments({"alternate-exchange": self.strays}) if self.strays else ()
        exchanges.append(Exchange(self.delivery, "topic", arguments=alternate, shared=self.shared))
        whole = Topology(tuple(exchanges), tuple(queues), tuple(bindings))
        return whole + catch_all_topology(self.strays) if self.strays else whole


def _check(seconds: int) -> None:
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"delay: expected 0 to {MAX_SECONDS} seconds, found {seconds}")


def routing_key(seconds: int, address: bytes) -> bytes:
    """Build a key of 28 binary digits, most significant first, each followed by a dot, then the address. Raises
    ValueError for a delay out of range, or an address of more than 199 bytes."""
    _check(seconds)
    if len(address) > ADDRESS_BYTES:
        raise ValueError(f"address: expected at most {ADDRESS_BYTES} bytes, found {len(address)}")
    digits = ".".join(f"{seconds:0{LEVELS}b}")
    return digits.encode() + b"." + address


def strip_prefix(key: bytes) -> bytes:
    """Remove one cascade prefix (each trip adds one). The rest, or a key without a prefix, is the publisher's own."""
    match = _PREFIX.match(key)
    return key[match.end() :] if match else key


def delay_in_key(routing_key: bytes) -> int | None:
    """The whole delay of a cascade's routing key, in seconds; None for any other key.

    >>> delay_in_key(b"0." * 26 + b"1.1.Sales.Orders"), delay_in_key(b"Sales.Orders")
    (3, None)
    """
    found = _PREFIX.match(routing_key)
    return None if found is None else int(found[0].replace(b".", b""), 2)


def leads_to(key: bytes, address: bytes) -> bool:
    """Whether ``key`` is the digits of a cascade followed by ``address``.

    >>> leads_to(routing_key(5, b"delays.due"), b"delays.due"), leads_to(b"delays.due", b"delays.due")
    (True, False)
    """
    return key != address and strip_prefix(key) == address


def delivery_binding(address: str) -> str:
    """The key that binds ``address`` to a delivery exchange. A prefix of ``#.`` would also match ``other.address``."""
    return "*." * LEVELS + address


def bindable(address: bytes) -> bool:
    """Whether :func:`delivery_binding` of ``address`` is a valid binding key that matches only this address. A word
    that is exactly ``*`` or ``#`` would be a wildcard. Binding keys are UTF-8. RabbitMQ removes line ends from the name
    of a queue to bind, and would bind another queue."""
    try:
        words = address.decode().split(".")
    except UnicodeDecodeError:
        return False
    return len(address) <= ADDRESS_BYTES and not {"*", "#"} & set(words) and not set(b"\r\n") & set(address)


def catch_all_topology(name: str) -> Topology:
    """A quorum queue for refused messages or strays, and its fanout exchange: other types also route by a CC header."""
    return Topology((Exchange(name, "fanout"),), (parking_queue(name),), (Binding(name, name, "queue", ""),))


def parking_queue(name: str) -> Queue:
    """A quorum queue for messages that wait for an operator, who may inspect them any number of times."""
    return Queue(name, arguments({"x-queue-type": "quorum", "x-delivery-limit": LOOKS}))


def consumed_queue(name: str, refused: str) -> Queue:
    """A quorum queue that the daemon consumes. Expired messages, and those delivered too often, go to ``refused``."""
    own: dict[str, ArgumentValue] = {"x-delivery-limit": DELIVERY_LIMIT, "x-dead-letter-exchange": refused}
    return Queue(name, arguments(_QUORUM | own))


def intake_topology(
    queue: str = "delays",
    refused: str = "delays.refused",
    sources: Iterable[str] = ("delayer.in",),
    *,
    classic: bool = False,
    shared: bool = False,
) -> Topology:
    """The intake queue, its refused queue, and the ``from`` exchange of every route, bound to the intake queue.

    ``sources`` may contain "" for messages published directly to the queue; it needs no exchange. A ``classic`` queue
    has one copy, and RabbitMQ 4.4 does not delay messages in it. Only a ``shared`` queue has several active consumers.
    """
    names = [source for source in sources if source]
    one_copy = Queue(queue, arguments({"x-queue-type": "classic", "x-dead-letter-exchange": refused}))
    intake = one_copy if classic else consumed_queue(queue, refused)
    if not shared:
        intake = Queue(queue, arguments(dict(intake.arguments) | {ONE_CONSUMER: True}))
    own = Topology(
        tuple(Exchange(name, "topic") for name in names),
        (intake,),
        tuple(Binding(name, queue, "queue", "#") for name in names),
    )
    return own + catch_all_topology(refused)


def due_topology(cascade: Cascade, due_queue: str = "delays.due", refused: str = "delays.refused") -> Topology:
    """The daemon's due queue at the end of ``cascade``, and its refused queue, without the cascade itself."""
    own = Topology(
        queues=(consumed_queue(due_queue, refused),),
        bindings=(Binding(cascade.delivery, due_queue, "queue", delivery_binding(due_queue)),),
    )
    return own + catch_all_topology(refused)
