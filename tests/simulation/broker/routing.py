"""Exchanges, their bindings, and which queues a message reaches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

from tests.simulation.broker.declared import plain
from tests.simulation.broker.message import Message
from tests.support.raw import VOID, Value

KINDS: Final = ("direct", "fanout", "topic", "headers")
PREDECLARED: Final = {"amq.direct": "direct", "amq.fanout": "fanout", "amq.topic": "topic", "amq.headers": "headers",
                      "amq.match": "headers"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Binding:
    """``arguments``: for a headers exchange."""

    kind: Literal["queue", "exchange"]
    destination: str
    key: bytes
    arguments: tuple[tuple[str, Value], ...] = ()


@dataclass(eq=False)
class Exchange:
    name: str
    kind: str
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: Mapping[str, Value] = field(default_factory=dict)
    bindings: dict[Binding, None] = field(default_factory=dict)

    def matching(self, message: Message) -> Iterator[Binding]:
        if self.kind == "headers":
            headers = message.headers
            yield from (one for one in self.bindings if _has_headers(one.arguments, headers))
        elif self.kind == "fanout":
            yield from self.bindings
        elif self.kind == "topic":
            keys = [_words(key) for key in message.keys]
            yield from (one for one in self.bindings if any(_match(_pattern(one.key), words) for words in keys))
        else:
            yield from (one for one in self.bindings if one.key in message.keys)

    @property
    def alternate(self) -> str:
        found = self.arguments.get("alternate-exchange")
        return found.raw[4:].decode() if found else ""


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A binding's words. ``fixed``: those before the first ``#`` that must be equal, with their places."""

    words: list[bytes]
    before: int
    fixed: tuple[tuple[int, bytes], ...]


@lru_cache(4096)
def _pattern(key: bytes) -> _Pattern:
    words = _words(key)
    before = words.index(b"#") if b"#" in words else len(words)
    return _Pattern(words, before, tuple((at, one) for at, one in enumerate(words[:before]) if one != b"*"))


def _words(key: bytes) -> list[bytes]:
    return key.split(b".") if key else []


def matches(pattern: bytes, key: bytes) -> bool:
    """Whether a topic exchange's binding matches a routing key."""
    return _match(_pattern(pattern), _words(key))


def _match(pattern: _Pattern, words: list[bytes]) -> bool:
    before, wanted = pattern.before, pattern.words
    if len(words) < before or (before == len(wanted) and len(words) > before):
        return False
    if any(words[at] != one for at, one in pattern.fixed):
        return False
    # After the first "#": which numbers of words can the pattern so far have consumed?
    if wanted[before:] in ([], [b"#"]):
        return True
    reached = {before}
    for one in wanted[before:]:
        if one == b"#":
            reached = set(range(min(reached, default=0), len(words) + 1)) if reached else reached
        else:
            reached = {at + 1 for at in reached if at < len(words) and one in (b"*", words[at])}
    return len(words) in reached


def _has_headers(wanted: tuple[tuple[str, Value], ...], headers: Mapping[bytes, Value]) -> bool:
    rule = dict(wanted).get("x-match", VOID).raw[4:]
    has = [
        (found := headers.get(name.encode())) is not None and (value == VOID or plain(found) == plain(value))
        for name, value in wanted
        if not name.startswith("x-")
    ]
    return any(has) if rule == b"any" else all(has)


def route(exchanges: Mapping[str, Exchange], first: Exchange, message: Message) -> list[str]:
    """The names of the queues that a message reaches, each once, through exchanges that are bound to each other."""
    queues: dict[str, None] = {}
    seen, work = {first.name}, [first]
    while work:
        exchange = work.pop(0)
        if not exchange.name:
            queues |= dict.fromkeys(key.decode("utf-8", "surrogateescape") for key in message.keys)
            continue
        further = []
        found = False
        for binding in exchange.matching(message):
            found = True
            if binding.kind == "queue":
                queues[binding.destination] = None
            else:
                further.append(binding.destination)
        if not found and exchange.alternate:
            further.append(exchange.alternate)
        for name in further:
            if name not in seen and name in exchanges:
                seen.add(name)
                work.append(exchanges[name])
    return list(queues)
