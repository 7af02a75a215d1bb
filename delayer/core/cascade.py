"""The cascade: 28 levels of TTL queues, 2^27 seconds down to one, and the routing keys that lead through them. Pure.

At level L the exchange looks at bit L of the delay, the word number 27 - L of the routing key: 1 leads into the level's
queue, which gives the message to the next exchange after 2^L seconds; 0 leads to the next exchange at once. So a
message waits exactly its delay, enters at its highest set bit, and comes out at the delivery exchange::

    1.0.1.address      level 2 ──wait 4 s──> level 1 ──> level 0 ──wait 1 s──> delivery ──> *.*.*.address

Other systems built the same cascade under other names. Takeovers and imports empty theirs: names and arguments are
exactly the owner's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from delayer.core.message import SHORT_STRING
from delayer.core.topology import Arguments, Binding, Exchange, Queue, Topology, Value, arguments

LEVELS = 28
MAX_SECONDS = (1 << LEVELS) - 1
ADDRESS_BYTES = SHORT_STRING - 2 * LEVELS
"""What a routing key leaves for the address: a digit and a dot for every level are gone."""

NAME_BYTES = 127
"""AMQP 0-9-1's limit for names of exchanges, as for their letters. RabbitMQ takes more, its client libraries do not."""

# RabbitMQ 4's default limit of 20 deletes a message after 21 lost connections, and -1 deletes it after one on 3.10.
DELIVERY_LIMIT = 1_000_000
"""Of queues that the daemon consumes: past it the broker moves a message to the refused queue."""
LOOKS = (1 << 53) - 1
"""The delivery limit of queues that people look at. Each look counts as a delivery up to RabbitMQ 4.2, and such a queue
gives nothing up: at 100 looks a second this many take 2.8 million years. JSON holds no larger integer exactly."""

Kind = Literal["delayer", "nservicebus-v2", "nservicebus-v1", "celery"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_NAMES_BEGIN = re.compile(r"[A-Za-z0-9_.:-]*")
_PREFIX = re.compile(rb"(?:[01]\.){28}")
_QUORUM: dict[str, Value] = {
    "x-queue-type": "quorum",
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",  # at-least-once silently becomes at-most-once under any other overflow rule
}


class Level(NamedTuple):
    """One level: exchange and queue share ``name``; ``next`` is the exchange that follows."""

    number: int
    name: str
    ttl_ms: int
    next: str


class _Family(NamedTuple):
    level: str  # format of a level's name
    delivery: str
    arguments: dict[str, Value]  # of a level's queue, besides TTL and dead-letter exchange


_FAMILIES: dict[Kind, _Family] = {
    "delayer": _Family("{prefix}delay-level-{level:02d}", "{prefix}delay-delivery", _QUORUM),
    "nservicebus-v2": _Family("nsb.v2.delay-level-{level:02d}", "nsb.v2.delay-delivery", _QUORUM),
    # No x-queue-type: the vhost's default type. RabbitMQ 4.3 refuses x-queue-mode, and with it this whole family.
    "nservicebus-v1": _Family("nsb.delay-level-{level:02d}", "nsb.delay-delivery", {"x-queue-mode": "lazy"}),
    "celery": _Family("celery_delayed_{level}", "celery_delayed_delivery", _QUORUM),
}


@dataclass(frozen=True, slots=True)
class Cascade:
    """``prefix`` begins the names of our own cascade (kind "delayer") and means nothing for the others.

    ``owner``: what kombu, from 5.7 on, puts before the names of Celery's if it is told to; of that kind only."""

    kind: Kind = "delayer"
    prefix: str = "delayer."
    owner: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown kind, and for a prefix that the broker would not take in a name."""
        if self.kind not in KINDS:
            raise ValueError(f"cascade: expected one of {', '.join(KINDS)}, found {self.kind!r}")
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
        """The cascade belongs to another system."""
        return self.kind != "delayer"

    @property
    def counts_deliveries(self) -> bool:
        """Whether its level queues do, and give up what was delivered too often: quorum queues. Of what is delivered
        again by these, what ``x-delivery-count`` says is the broker's word."""
        return _FAMILIES[self.kind].arguments.get("x-queue-type") == "quorum"

    @property
    def delivery(self) -> str:
        """Name of the delivery exchange, where every path through the cascade ends."""
        return self._owned(_FAMILIES[self.kind].delivery.format(prefix=self.prefix))

    @property
    def strays(self) -> str:
        """Name of the queue, and of the exchange before it, that takes what no address is bound for.

        "" for another system's cascade, which has none.
        """
        return "" if self.shared else f"{self.prefix}delay-strays"

    def level(self, number: int) -> str:
        """Name of the exchange and of the queue of level 0..27."""
        if not 0 <= number < LEVELS:
            raise ValueError(f"level: expected 0 to {LEVELS - 1}, found {number}")
        return self._owned(_FAMILIES[self.kind].level.format(prefix=self.prefix, level=number))

    def _owned(self, name: str) -> str:
        return f"{self.owner}_{name}" if self.owner else name

    def levels(self) -> Iterator[Level]:
        """From 27 down to 0, the way that messages go."""
        for number in reversed(range(LEVELS)):
            yield Level(
                number,
                self.level(number),
                (1 << number) * 1000,
                self.level(number - 1) if number else self.delivery,
            )

    def entry(self, seconds: int) -> str:
        """Name of the exchange to publish to: the level of the highest set bit; level 0 for no delay at all."""
        _check(seconds)
        return self.level(max(seconds.bit_length() - 1, 0))

    def topology(self) -> Topology:
        """29 exchanges, 28 queues, 56 bindings; our own has strays besides: an exchange, a queue and a binding more.

        Without strays about 32 messages that nothing is bound for stop a level for everybody.
        """
        exchanges, queues, bindings = [], [], []
        for level in self.levels():
            exchanges.append(Exchange(level.name, "topic", shared=self.shared, closed=not self.shared))
            queues.append(Queue(level.name, self._queue_arguments(level), shared=self.shared))
            words = "*." * (LEVELS - 1 - level.number)
            bindings.append(Binding(level.name, level.name, "queue", f"{words}1.#"))
            bindings.append(Binding(level.name, level.next, "exchange", f"{words}0.#"))
        alternate: Arguments = ()
        if self.strays:
            alternate = arguments({"alternate-exchange": self.strays})
        exchanges.append(Exchange(self.delivery, "topic", arguments=alternate, shared=self.shared))
        whole = Topology(tuple(exchanges), tuple(queues), tuple(bindings))
        return whole + catch_all_topology(self.strays) if self.strays else whole

    def _queue_arguments(self, level: Level) -> Arguments:
        own: dict[str, Value] = {"x-message-ttl": level.ttl_ms, "x-dead-letter-exchange": level.next}
        return arguments(_FAMILIES[self.kind].arguments | own)


def _check(seconds: int) -> None:
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"delay: expected 0 to {MAX_SECONDS} seconds, found {seconds}")


def routing_key(seconds: int, address: bytes) -> bytes:
    """28 binary digits, most significant first, each followed by a dot, then the address.

    Raises ValueError for a delay out of range and for an address of more than 199 bytes.
    """
    _check(seconds)
    if len(address) > ADDRESS_BYTES:
        raise ValueError(f"address: expected at most {ADDRESS_BYTES} bytes, found {len(address)}")
    digits = ".".join(f"{seconds:0{LEVELS}b}")
    return digits.encode() + b"." + address


def strip_prefix(key: bytes) -> bytes:
    """``key`` without the 28 digits that a cascade put before it; any other key as it is.

    One prefix, not all of them: every trip adds one and every reader takes one off, so whatever stands behind the first
    is the publisher's own key, and it is not ours to shorten.
    """
    match = _PREFIX.match(key)
    return key[match.end() :] if match else key


def leads_to(key: bytes, address: bytes) -> bool:
    """Whether ``key``, with the digits of a cascade before it, ends at ``address``.

    >>> leads_to(routing_key(5, b"delays.due"), b"delays.due"), leads_to(b"delays.due", b"delays.due")
    (True, False)
    """
    return key != address and strip_prefix(key) == address


def delivery_binding(address: str) -> str:
    """The key that binds ``address`` to a delivery exchange: one ``*`` for each digit.

    Never ``#.``: that would also match ``other.address``.
    """
    return "*." * LEVELS + address


def bindable(address: bytes) -> bool:
    """Whether :func:`delivery_binding` of ``address`` means that address and no other, and fits a binding key.

    A word that is exactly ``*`` or ``#`` would be a wildcard. Binding keys are UTF-8. RabbitMQ takes line ends out of
    the name of a queue that is to be bound, and would bind another one.
    """
    try:
        words = address.decode().split(".")
    except UnicodeDecodeError:
        return False
    return len(address) <= ADDRESS_BYTES and not {"*", "#"} & set(words) and not set(b"\r\n") & set(address)


def catch_all_topology(name: str) -> Topology:
    """A fanout exchange and a quorum queue of one name, for messages that went wrong.

    Fanout, because on topic and direct exchanges a CC header still routes.
    """
    return Topology((Exchange(name, "fanout"),), (parking_queue(name),), (Binding(name, name, "queue", ""),))


def parking_queue(name: str) -> Queue:
    """A quorum queue for messages that wait for a person, who may look at them any number of times."""
    return Queue(name, arguments({"x-queue-type": "quorum", "x-delivery-limit": LOOKS}))


def consumed_queue(name: str, refused: str) -> Queue:
    """A quorum queue that the daemon consumes: what expires or is delivered too often goes to ``refused``."""
    own: dict[str, Value] = {"x-delivery-limit": DELIVERY_LIMIT, "x-dead-letter-exchange": refused}
    return Queue(name, arguments(_QUORUM | own))


def intake_topology(
    queue: str = "delays", refused: str = "delays.refused", sources: Iterable[str] = ("delayer.in",)
) -> Topology:
    """The intake queue, the refused queue behind it, and every route's ``from`` exchange bound to the intake queue.

    ``sources`` may hold "": messages published straight to the queue, which needs nothing.
    """
    names = [source for source in sources if source]
    own = Topology(
        tuple(Exchange(name, "topic") for name in names),
        (consumed_queue(queue, refused),),
        tuple(Binding(name, queue, "queue", "#") for name in names),
    )
    return own + catch_all_topology(refused)


def due_topology(cascade: Cascade, due_queue: str = "delays.due", refused: str = "delays.refused") -> Topology:
    """The daemon's own queue at the end of ``cascade`` (whose topology is needed besides), refused behind it."""
    own = Topology(
        queues=(consumed_queue(due_queue, refused),),
        bindings=(Binding(cascade.delivery, due_queue, "queue", delivery_binding(due_queue)),),
    )
    return own + catch_all_topology(refused)
