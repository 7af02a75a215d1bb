"""Topology as a value: the exchanges, queues and bindings to declare on a broker. Names and keys are ``str``, as in the
broker's administration. Arguments are pairs sorted by name, so that equal topologies compare and hash equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

ArgumentValue = str | int
DEAD_LETTER_STRATEGY = "x-dead-letter-strategy"
Arguments = tuple[tuple[str, ArgumentValue], ...]


def arguments(table: Mapping[str, ArgumentValue]) -> Arguments:
    """``table`` as sorted pairs."""
    return tuple(sorted(table.items()))


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange. ``shared``: other systems use it too, so we never remove it, and we ignore their bindings on it.
    ``closed``: only declared bindings may start from it."""

    kind: ClassVar[Literal["exchange"]] = "exchange"
    name: str
    type: Literal["topic", "fanout", "direct", "headers"]
    arguments: Arguments = ()
    shared: bool = False
    closed: bool = False

    def __str__(self) -> str:
        return _described(self.type, self.arguments)


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue. ``shared`` as for :class:`Exchange`: other systems have messages in it too."""

    kind: ClassVar[Literal["queue"]] = "queue"
    name: str
    arguments: Arguments = ()
    shared: bool = False

    def __str__(self) -> str:
        return _described("queue", self.arguments)

    def argument(self, name: str) -> ArgumentValue | None:
        return dict(self.arguments).get(name)

    @property
    def forwards(self) -> bool:
        """Whether the broker keeps an expired message in this queue until the next one has confirmed it. Until then,
        the message is neither ready nor unacknowledged."""
        has_ttl = self.argument("x-message-ttl") is not None
        return has_ttl and self.argument(DEAD_LETTER_STRATEGY) == "at-least-once"


@dataclass(frozen=True, slots=True)
class Binding:
    """A binding from exchange ``source`` to the queue or exchange ``destination``, for messages that match ``key``."""

    kind: ClassVar[Literal["binding"]] = "binding"
    source: str
    destination: str
    destination_kind: Literal["queue", "exchange"]
    key: str

    def __str__(self) -> str:
        return f"{self.source} -> {self.destination_kind} {self.destination} with key {self.key!r}"


TopologyPart = Exchange | Queue | Binding


def _described(kind: str, table: Arguments) -> str:
    """Describe without the name: ``durable queue (x-message-ttl=1000)``."""
    shown = ", ".join(f"{name}={value}" for name, value in table)
    return f"durable {kind}" + (f" ({shown})" if shown else "")


_N = TypeVar("_N", Exchange, Queue)


def _distinct(kind: str, things: Iterable[_N]) -> tuple[_N, ...]:
    """Keep each value once, in the order of first mention. Raises ValueError for two different values of one name."""
    known: dict[str, _N] = {}
    for thing in things:
        other = known.setdefault(thing.name, thing)
        if other != thing:
            raise ValueError(f"{kind} {thing.name!r} is declared in two ways: {other} and {thing}")
    return tuple(known.values())


@dataclass(frozen=True, slots=True)
class Topology:
    """Exchanges, queues and bindings, each mentioned once. A binding may name things declared elsewhere."""

    exchanges: tuple[Exchange, ...] = ()
    queues: tuple[Queue, ...] = ()
    bindings: tuple[Binding, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "exchanges", _distinct("exchange", self.exchanges))
        object.__setattr__(self, "queues", _distinct("queue", self.queues))
        object.__setattr__(self, "bindings", tuple(dict.fromkeys(self.bindings)))

    def __add__(self, other: Topology) -> Topology:
        """Merge both. Raises ValueError if they declare one name differently."""
        return Topology(self.exchanges + other.exchanges, self.queues + other.queues, self.bindings + other.bindings)
