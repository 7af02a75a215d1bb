"""The confirms of one channel: which publishes the queues have answered, joined as RabbitMQ joins them."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.broker import wire


class Confirms:
    """``send`` writes frames; ``soon`` runs a function at the end of this iteration of the loop."""

    def __init__(
        self, number: int, send: Callable[[bytes], object], soon: Callable[[Callable[[], None]], object]
    ) -> None:
        self._channel = number
        self._send = send
        self._soon = soon
        self._next = 1
        self._missing: dict[int, int] = {}
        self._refused: set[int] = set()
        self._acked: list[int] = []
        self._nacked: list[int] = []

    def expect(self, answers: int) -> int:
        """The number of the next publish, which this many queues will answer."""
        number, self._next = self._next, self._next + 1
        self._missing[number] = answers
        if not answers:
            self._settle(number, self._acked)
        return number

    def answer(self, number: int, took: bool) -> None:
        self._missing[number] -= 1
        if not took:
            self._refused.add(number)
        if not self._missing[number]:
            refused = number in self._refused
            self._refused.discard(number)
            self._settle(number, self._nacked if refused else self._acked)

    def _settle(self, number: int, into: list[int]) -> None:
        if not self._acked and not self._nacked:
            self._soon(self._flush)
        del self._missing[number]
        into.append(number)

    def _flush(self) -> None:
        acked, nacked = sorted(self._acked), sorted(self._nacked)
        self._acked, self._nacked = [], []
        self._join(nacked, min(acked, default=self._next), positive=False)
        self._join(acked, self._next, positive=True)

    def _join(self, numbers: list[int], below: int, *, positive: bool) -> None:
        """One frame for all that nothing unanswered precedes, and one for each of the rest."""
        cutoff = min(below, min(self._missing, default=self._next))
        joined = [number for number in numbers if number < cutoff]
        if joined:
            self._send(wire.confirm(self._channel, joined[-1], multiple=True, positive=positive))
        for number in numbers[len(joined) :]:
            self._send(wire.confirm(self._channel, number, multiple=False, positive=positive))
