"""Topology as a value: what to declare on a broker. To declare, verify, show, remove and test are its readers.

Names, keys and argument names are ``str``, as the broker's administration takes them. Arguments are a tuple of pairs
sorted by name, so that two equal topologies compare and hash equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

Value = str | int
Arguments = tuple[tuple[str, Value], ...]


def arguments(table: Mapping[str, Value]) -> Arguments:
    """``table`` as sorted pairs."""
    return tuple(sorted(table.items()))


@dataclass(frozen=True, slots=True)
class Exchange:
    """``shared``: other systems declare and use it too. We never remove it, nor judge the bindings of others on it.

    ``closed``: no binding but the declared ones may lead out of it.
    """

    name: str
    type: Literal["topic", "fanout", "direct", "headers"]
    durable: bool = True
    arguments: Arguments = ()
    shared: bool = False
    closed: bool = False

    def __str__(self) -> str:
        return _described(self.type, self.durable, self.arguments)


@dataclass(frozen=True, slots=True)
class Queue:
    """``shared`` as for :class:`Exchange`: its messages are not ours alone."""

    name: str
    arguments: Arguments = ()
    durable: bool = True
    shared: bool = False

    def __str__(self) -> str:
        return _described("queue", self.durable, self.arguments)

    def argument(self, name: str) -> Value | None:
        return dict(self.arguments).get(name)


@dataclass(frozen=True, slots=True)
class Binding:
    """Messages go from exchange ``source`` to the queue or exchange ``destination`` where ``key`` matches."""

    source: str
    destination: str
    destination_kind: Literal["queue", "exchange"]
    key: str

    def __str__(self) -> str:
        return f"{self.source} -> {self.destination_kind} {self.destination} with key {self.key!r}"


def _described(kind: str, durable: bool, table: Arguments) -> str:
    """A thing without its name, for people: ``durable queue (x-message-ttl=1000)``."""
    shown = ", ".join(f"{name}={value}" for name, value in table)
    return f"{'durable' if durable else 'transient'} {kind}" + (f" ({shown})" if shown else "")


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_N = TypeVar("_N", bound=_Named)


def _distinct(kind: str, things: Iterable[_N]) -> tuple[_N, ...]:
    """Equal ones once, in the order of their first mention. Two different ones of one name: ValueError."""
    known: dict[str, _N] = {}
    for thing in things:
        other = known.setdefault(thing.name, thing)
        if other != thing:
            raise ValueError(f"{kind} {thing.name!r} is wanted in two ways: {other} and {thing}")
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
        """Both together. Raises ValueError where they want one name in two ways."""
        return Topology(
            self.exchanges + other.exchanges,
            self.queues + other.queues,
            self.bindings + other.bindings,
        )
