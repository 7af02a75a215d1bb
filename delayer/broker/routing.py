"""Where a broker would route a message, from what it tells of its exchanges. Pure.

The rules are RabbitMQ's: an exchange gives the message to every binding that matches, an exchange without a match gives
it to its alternate exchange, each exchange is visited once, and the message is routed if a queue was reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Self

from delayer.core.topology import Binding


class Verdict(Enum):
    """What would become of the messages of one destination if they were due now."""

    ROUTED = "routed"
    ALTERNATE = "alternate"
    """Only an alternate exchange takes them: delivered, though perhaps not where somebody expects them."""
    MISSING = "missing"
    """There is no such exchange, or, at the default exchange, no such queue: they would be held."""
    UNROUTABLE = "unroutable"
    """The exchange is there and no queue is reached: they would be held."""
    CLOSED = "closed"
    """The exchange is internal, nobody may publish to it: they would be held."""
    DEPENDS = "depends on headers"
    UNKNOWN = "not known"
    NOT_ASKED = "not asked"

    @property
    def bad(self) -> bool:
        """Whether the messages would not be delivered."""
        return self in (Verdict.MISSING, Verdict.UNROUTABLE, Verdict.CLOSED)


@dataclass(frozen=True, slots=True)
class Route:
    """``way``: the alternate exchange that took it, or why nothing is known; for people, may be empty."""

    verdict: Verdict
    way: str = ""


@dataclass(frozen=True, slots=True)
class ExchangeTold:
    """An exchange as the management API tells it. ``alternate`` may come from its arguments or a policy."""

    name: str
    type: str
    internal: bool = False
    alternate: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Matched:
    """What one exchange gives a key to. ``depends``: there are bindings that only the headers can decide."""

    queues: frozenset[str] = frozenset()
    exchanges: frozenset[str] = frozenset()
    depends: bool = False

    @property
    def empty(self) -> bool:
        return not (self.queues or self.exchanges or self.depends)


_DELAYED: Final = "x-delayed-message"
"""The delayed-message plugin's type: what it lets pass, it routes as the type in ``x-delayed-type`` would."""

Bindings = Iterable[tuple[Binding, Mapping[str, Any]]]


def matcher(told: ExchangeTold, bindings: Bindings) -> Callable[[bytes], Matched] | None:
    """What ``told`` does with a routing key, without going through every binding. None for a type not known here."""
    kind = str(told.arguments.get("x-delayed-type", "")) if told.type == _DELAYED else told.type
    match kind:
        case "direct":
            return _Direct(bindings).matched
        case "fanout":
            return _Always(_targets(binding for binding, _ in bindings)).matched
        case "topic":
            return Topics(binding for binding, _ in bindings).matched
        case "headers":
            return _Always(_headers(bindings)).matched
        case _:
            return None


def _targets(bindings: Iterable[Binding], *, depends: bool = False) -> Matched:
    queues: set[str] = set()
    exchanges: set[str] = set()
    for binding in bindings:
        (queues if binding.destination_kind == "queue" else exchanges).add(binding.destination)
    return Matched(frozenset(queues), frozenset(exchanges), depends)


class _Always:
    def __init__(self, answer: Matched) -> None:
        self._answer = answer

    def matched(self, _key: bytes) -> Matched:
        return self._answer


class _Direct:
    def __init__(self, bindings: Bindings) -> None:
        by_key: dict[bytes, list[Binding]] = {}
        for binding, _ in bindings:
            by_key.setdefault(binding.key.encode(), []).append(binding)
        self._by_key = {key: _targets(some) for key, some in by_key.items()}

    def matched(self, key: bytes) -> Matched:
        return self._by_key.get(key, Matched())


def _headers(bindings: Bindings) -> Matched:
    """Without the headers only the extremes are certain: asking for no header at all matches every message (``all``) or
    none (``any``)."""
    certain, depends = [], False
    for binding, arguments in bindings:
        how = str(arguments.get("x-match", "all"))
        names = set(arguments) - {"x-match"}
        wanted = names if how.endswith("-with-x") else {name for name in names if not name.startswith("x-")}
        if wanted:
            depends = True
        elif how.startswith("all"):
            certain.append(binding)
    return _targets(certain, depends=depends)


@dataclass(slots=True)
class _Node:
    next: dict[bytes, _Node] = field(default_factory=dict)
    bindings: list[Binding] = field(default_factory=list)
    hash: bool = False


class Topics:
    """Patterns of a topic exchange as a tree of their words, as the broker keeps them: a key costs its own words and
    the branches that fit, not the number of bindings."""

    def __init__(self, bindings: Iterable[Binding]) -> None:
        self._root = _Node()
        for binding in bindings:
            node = self._root
            for word in _words(binding.key.encode()):
                node = node.next.setdefault(word, _Node(hash=word == b"#"))
            node.bindings.append(binding)

    def matched(self, key: bytes) -> Matched:
        nodes = _with_hashes([self._root])
        for word in _words(key):
            after: list[_Node] = []
            for node in nodes.values():
                if node.hash:  # it eats one word more
                    after.append(node)
                after += [node.next[step] for step in {word, b"*"} if step in node.next and step != b"#"]
            nodes = _with_hashes(after)
        return _targets(binding for node in nodes.values() for binding in node.bindings)


def _words(key: bytes) -> list[bytes]:
    """Empty words count, but an empty key has none."""
    return key.split(b".") if key else []


def _with_hashes(nodes: Iterable[_Node]) -> dict[int, _Node]:
    """These, and what follows them when every ``#`` there eats nothing."""
    found: dict[int, _Node] = {}
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if id(node) not in found:
            found[id(node)] = node
            if b"#" in node.next:
                todo.append(node.next[b"#"])
    return found


@dataclass(frozen=True, slots=True)
class Stop:
    """An exchange ready to be asked. ``matched`` is None for a type that is not known here. ``leads``: the exchanges
    that it may give messages to."""

    told: ExchangeTold
    matched: Callable[[bytes], Matched] | None
    leads: frozenset[str] = frozenset()

    @classmethod
    def of(cls, told: ExchangeTold, bindings: Sequence[tuple[Binding, Mapping[str, Any]]]) -> Self:
        """From what the management API tells."""
        leads = {one.destination for one, _ in bindings if one.destination_kind == "exchange"}
        if told.alternate is not None:
            leads.add(told.alternate)
        return cls(told, matcher(told, bindings), frozenset(leads))


@dataclass(slots=True)
class _Walk:
    """``alternates``: those that were needed. Each place on the way is (exchange, whether an alternate led there)."""

    queue: bool = False
    queue_by_alternate: bool = False
    queues: set[str] = field(default_factory=set)
    depends: bool = False
    unknown: list[str] = field(default_factory=list)
    alternates: list[str] = field(default_factory=list)


def route(start: str, key: bytes, stops: Mapping[str, Stop]) -> Route:
    """What becomes of a message for exchange ``start`` with ``key``. ``stops``: every exchange that ``start`` leads to,
    alternates included; one that is not there does not exist. Never raises."""
    if start not in stops:
        return Route(Verdict.MISSING)
    if stops[start].told.internal:
        return Route(Verdict.CLOSED, "the exchange is internal")
    return _judged(_walked(start, key, stops))


def queues_of(start: str, key: bytes, stops: Mapping[str, Stop]) -> set[str]:
    """The queues that certainly get a message for exchange ``start`` with ``key``; ``stops`` as above."""
    return _walked(start, key, stops).queues


def _walked(start: str, key: bytes, stops: Mapping[str, Stop]) -> _Walk:
    walk = _Walk()
    todo, seen = [(start, False)], {start}
    while todo:
        name, alternate = todo.pop()
        if not name:
            walk.unknown.append("an alternate exchange is the default exchange")
            continue
        stop = stops.get(name)
        if stop is None:
            continue
        if stop.matched is None:
            walk.unknown.append(f"exchange {name!r} is of type {stop.told.type!r}")
            continue
        found = stop.matched(key)
        walk.depends |= found.depends
        if found.queues:
            walk.queue, walk.queue_by_alternate = walk.queue or not alternate, walk.queue_by_alternate or alternate
            walk.queues |= found.queues
        leads = [(one, alternate) for one in sorted(found.exchanges)]
        if found.empty and stop.told.alternate is not None:
            walk.alternates.append(stop.told.alternate)
            leads = [(stop.told.alternate, True)]
        for lead in leads:
            if lead[0] not in seen:
                seen.add(lead[0])
                todo.append(lead)
    return walk


def _judged(walk: _Walk) -> Route:
    """What is certain first; then what may be; only then what is not."""
    if walk.queue:
        return Route(Verdict.ROUTED)
    if walk.depends:
        return Route(Verdict.DEPENDS)
    if walk.unknown:
        return Route(Verdict.UNKNOWN, "; ".join(walk.unknown))
    if walk.queue_by_alternate:
        return Route(Verdict.ALTERNATE, ", ".join(walk.alternates))
    return Route(Verdict.UNROUTABLE, f"nor does its alternate {walk.alternates[0]!r}" if walk.alternates else "")
