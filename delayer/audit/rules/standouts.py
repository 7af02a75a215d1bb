"""The oldest, farthest and largest messages: a few of each, found in one pass. Pure."""

from __future__ import annotations

import heapq
import json
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
    """The KEPT that stand out most, of each kind; of equals the lowest ids."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[int, int, Message, int]]] = {kind: [] for kind in KINDS}
        self._enough = dict.fromkeys(KINDS, _NOTHING)

    def add(self, message: Message, size: int) -> None:
        enough, lower = self._enough, -message.id
        if (-message.parked_ms, lower) > enough["oldest"]:
            self._push("oldest", -message.parked_ms, message, size)
        if (message.due_ms, lower) > enough["farthest"]:
            self._push("farthest", message.due_ms, message, size)
        if (size, lower) > enough["largest"]:
            self._push("largest", size, message, size)

    def _push(self, kind: str, rank: int, message: Message, size: int) -> None:
        heap, entry = self._heaps[kind], (rank, -message.id, message, size)
        if len(heap) < KEPT:
            heapq.heappush(heap, entry)
        else:
            heapq.heapreplace(heap, entry)
        if len(heap) == KEPT:
            self._enough[kind] = heap[0][:2]

    def drain(self) -> Iterator[Partial]:
        for kind, heap in self._heaps.items():
            for _, _, message, size in heap:
                yield Key(kind, message.id, _packed(message)), Tally(1, size, message.due_ms, message.due_ms)
            heap.clear()
            self._enough[kind] = _NOTHING


def _packed(message: Message) -> bytes:
    values = (message.lane, message.where, message.parked_ms, *map(_text, _names(message)))
    return json.dumps(values).encode()


def _names(message: Message) -> tuple[bytes, bytes, bytes]:
    return message.route, message.to_exchange, message.to_key


def _text(name: bytes) -> str:
    return name.decode("latin-1")


def standout(key: Key, tally: Tally) -> Standout:
    """The message that :class:`Standouts` handed out as this key and tally."""
    values: list[Any] = json.loads(key.first)
    lane, where, parked_ms, *names = values
    route, exchange, routing_key = (name.encode("latin-1") for name in names)
    return Standout(key.number, lane, where, parked_ms, tally.first_due_ms, tally.size, route, exchange, routing_key)


def rank_of(key: Key, tally: Tally) -> tuple[int, int]:
    """To sort by, what stands out most first."""
    return -rank(key.kind, json.loads(key.first)[2], tally.first_due_ms, tally.size), key.number
