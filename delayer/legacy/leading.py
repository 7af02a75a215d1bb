"""Whether a queue's dead letters can have come into another queue, by what a broker tells of both. Pure.

A consumer that sends a message again as it had got it keeps the broker's notes of what the message went through before.
Such a note tells nothing of when the message came to where it stands now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from delayer.broker.routing import ExchangeTold, Stop, queues_of
from delayer.core.topology import Binding
from delayer.core.values import Timestamp

Death = Mapping[str, object]
"""An entry of ``x-death``, decoded."""
MOST_KNOWN: Final = 10_000


class Leads:
    """``queues``: the arguments of every queue, a policy's among them."""

    def __init__(
        self,
        queues: Mapping[str, Mapping[str, Any]],
        exchanges: Iterable[ExchangeTold],
        bindings: Sequence[tuple[Binding, Mapping[str, Any]]],
    ) -> None:
        out_of: dict[str, list[tuple[Binding, Mapping[str, Any]]]] = defaultdict(list)
        for binding, arguments in bindings:
            out_of[binding.source].append((binding, arguments))
        self._queues = queues
        # The default exchange is bound to every queue by its name, and the queues are known.
        self._stops = {told.name: Stop.of(told, out_of[told.name]) for told in exchanges if told.name}
        self._known: dict[tuple[str, bytes], frozenset[str]] = {}

    def came_at(self, death: Death, queue: str) -> int | None:
        """The second, rounded down, in which a message came into ``queue`` whose last note this is; None where the note
        does not tell.

        What expired before was let out of a queue such as this one and sent again since, by nobody knows whom; and of
        what happened several times only the first time is noted.
        """
        at, given_up_by = death.get("time"), death.get("queue")
        if death.get("reason") == "expired" or death.get("count") != 1:
            return None
        if not isinstance(at, Timestamp) or not isinstance(given_up_by, str):
            return None
        return int(at) if queue in self._next(given_up_by, death) else None

    def _next(self, queue: str, death: Death) -> frozenset[str]:
        """Where this queue's dead letters go."""
        arguments = self._queues.get(queue, {})
        exchange = arguments.get("x-dead-letter-exchange")
        if not isinstance(exchange, str):
            return frozenset()
        key = arguments.get("x-dead-letter-routing-key")
        keys = [key] if isinstance(key, str) else death.get("routing-keys")
        if not isinstance(keys, list):
            return frozenset()
        return frozenset().union(*(self._reached(exchange, one) for one in keys if isinstance(one, str)))

    def _reached(self, exchange: str, key: str) -> frozenset[str]:
        if not exchange:
            return frozenset({key})
        raw = key.encode("utf-8", "surrogateescape")
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        if (exchange, raw) not in self._known:
            self._known[exchange, raw] = frozenset(queues_of(exchange, raw, self._stops))
        return self._known[exchange, raw]
