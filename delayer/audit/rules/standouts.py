"""The oldest, farthest and largest messages: a few of each, found in one pass. Pure."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Final

from delayer.audit.findings import Standout
from delayer.audit.rules.message import Message
from delayer.audit.rules.tally import Key, Partial, Tally

KEPT: Final = 10
KINDS: Final = ("oldest", "farthest", "largest")
_NOTHING: Final = (-(1 << 63), 0)


def rank(kind: str, parked_ms: int, due_ms: int, size: int) -> int:
    """The higher the more it stands out."""
    return {"oldest": -parked_ms, "farthest": due_ms, "largest": size}[kind]


class Standouts:
    """The KEPT that stand out most, of each kind; of equals the lowest ids. The same message twice counts once."""

    def __init__(self) -> None:
        # Sorted, what stands out most first: (-rank, id, packed, size, due).
        self._best: dict[str, list[tuple[int, int, bytes, int, int]]] = {kind: [] for kind in KINDS}
        self._enough = dict.fromkeys(KINDS, _NOTHING)

    def add(self, message: Message, size: int) -> None:
        enough, lower = self._enough, -message.id
        if (-message.parked_ms, lower) >= enough["oldest"]:
            self._insert("oldest", -message.parked_ms, message, size)
        if (message.due_ms, lower) >= enough["farthest"]:
            self._insert("farthest", message.due_ms, message, size)
        if (size, lower) >= enough["largest"]:
            self._insert("largest", size, message, size)

    def _insert(self, kind: str, rank: int, message: Message, size: int) -> None:
        best, entry = self._best[kind], (-rank, message.id, _packed(message, size), size, message.due_ms)
        at = bisect_left(best, entry)
        if best[at : at + 1] != [entry]:
            best.insert(at, entry)
            del best[KEPT:]
        if len(best) == KEPT:
            self._enough[kind] = -best[-1][0], -best[-1][1]

    def drain(self) -> Iterator[Partial]:
        for kind, best in self._best.items():
            for _, id, packed, size, due_ms in best:
                yield Key(kind, id, packed), Tally(1, size, due_ms, due_ms)
            best.clear()
            self._enough[kind] = _NOTHING


def _packed(message: Message, size: int) -> bytes:
    """Everything about it: tallies under one key are of one message, however often somebody has it."""
    values = (message.lane, message.where, message.parked_ms, message.due_ms, size, *map(_text, _names(message)))
    return json.dumps(values).encode()


def _names(message: Message) -> tuple[bytes, bytes, bytes]:
    return message.route, message.to_exchange, message.to_key


def _text(name: bytes) -> str:
    return name.decode("latin-1")


def standout(key: Key) -> Standout:
    """The message that :class:`Standouts` handed out under this key."""
    values: list[Any] = json.loads(key.first)
    lane, where, parked_ms, due_ms, size, *names = values
    route, exchange, routing_key = (name.encode("latin-1") for name in names)
    return Standout(key.number, lane, where, parked_ms, due_ms, size, route, exchange, routing_key)


def rank_of(key: Key, _: Tally) -> tuple[int, int]:
    """To sort by, what stands out most first."""
    _lane, _where, parked_ms, due_ms, size, *_names = json.loads(key.first)
    return -rank(key.kind, parked_ms, due_ms, size), key.number
