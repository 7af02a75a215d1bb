"""Which publish an ack, a nack or a return speaks of. No input or output but the futures of those who wait.

The broker numbers the publishes of a channel from 1 on, and confirms by number, one or all up to one. A batch is
written in one or more runs of consecutive numbers; a run stays here until each of its numbers is settled, also when
nobody waits for the batch any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from delayer.amqp.errors import UNEXPECTED_FRAME, ProtocolError
from delayer.amqp.framing import ReturnedMessage
from delayer.amqp.properties import MalformedProperties, MalformedTable, Properties
from delayer.core.message import CONFIRMED, NACKED, Outcome, Returned

TOKEN_HEADER = b"x-delayer-id"


class Batch:
    """A publish() call: what became of each of its messages, and the future of its caller.

    Raises ValueError if two messages have the same token: a return could not be told apart.
    """

    def __init__(self, tokens: Sequence[bytes], outcomes: asyncio.Future[list[Outcome]]) -> None:
        if len(set(tokens)) != len(tokens):
            raise ValueError("the tokens of a batch must be unique")
        self.outcomes = outcomes
        self.runs: list[_Run] = []
        self._tokens = tokens
        self._positions: dict[bytes, int] | None = None
        self._unsettled = len(tokens)
        self._nacked: list[int] = []
        self._returned: dict[int, Returned] = {}

    def position(self, token: bytes) -> int | None:
        """Where the message of that token stands in the batch. Returns are rare: the index is made for the first."""
        if self._positions is None:
            self._positions = {one: position for position, one in enumerate(self._tokens)}
        return self._positions.get(token)

    def note_returned(self, position: int, returned: Returned) -> None:
        self._returned[position] = returned

    def settle(self, count: int, nacked: Sequence[int]) -> None:
        """``count`` more messages are settled, those at the positions ``nacked`` by a nack."""
        self._nacked += nacked
        self._unsettled -= count
        if self._unsettled or self.outcomes.done():
            return
        outcomes: list[Outcome] = [CONFIRMED] * len(self._tokens)
        self._enter_others(outcomes)
        self.outcomes.set_result(outcomes)

    def so_far(self) -> list[Outcome | None]:
        """What is settled by now; None for each message that is not, or was never written."""
        outcomes: list[Outcome | None] = [None] * len(self._tokens)
        for run in self.runs:
            for at, settled in enumerate(run.settled, run.offset):
                if settled:
                    outcomes[at] = CONFIRMED
        self._enter_others(outcomes)
        return outcomes

    def _enter_others(self, outcomes: list[Outcome] | list[Outcome | None]) -> None:
        for position in self._nacked:
            outcomes[position] = NACKED
        # The broker returns a message and then confirms it: what it says about the routing is what counts.
        for position, returned in self._returned.items():
            if outcomes[position] is not None:
                outcomes[position] = returned


class _Run:
    """Consecutive numbers ``first`` .. of messages from ``offset`` on in ``batch``."""

    __slots__ = ("batch", "first", "low", "offset", "settled", "unsettled")

    def __init__(self, batch: Batch, first: int, offset: int, count: int) -> None:
        self.batch = batch
        self.first = first
        self.offset = offset
        self.settled = bytearray(count)  # 1 for each that is
        self.unsettled = count
        self.low = 0  # all before this one are settled

    def settle_one(self, number: int, *, positive: bool) -> bool:
        """False if the number was settled before."""
        at = number - self.first
        if self.settled[at]:
            return False
        self.settled[at] = 1
        self.unsettled -= 1
        self.batch.settle(1, () if positive else (self.offset + at,))
        return True

    def settle_up_to(self, number: int, *, positive: bool) -> None:
        high = min(number - self.first + 1, len(self.settled))
        if high <= self.low:
            return
        fresh = self.settled.count(0, self.low, high)
        nacked = [] if positive else [self.offset + at for at in range(self.low, high) if not self.settled[at]]
        self.settled[self.low : high] = b"\x01" * (high - self.low)
        self.low = high
        self.unsettled -= fresh
        self.batch.settle(fresh, nacked)


class Confirms:
    """The publishes of one channel that are not yet confirmed."""

    def __init__(self) -> None:
        self._next = 1
        self._runs: list[_Run] = []  # by number; as many as there are publish() calls in flight, about

    @property
    def in_flight(self) -> int:
        return sum(run.unsettled for run in self._runs)

    def written(self, batch: Batch, offset: int, count: int) -> None:
        """``count`` messages of the batch, from ``offset`` on, take the next numbers."""
        last = self._runs[-1] if self._runs else None
        if last is not None and last.batch is batch and last.offset + len(last.settled) == offset:
            last.settled += bytes(count)
            last.unsettled += count
        else:
            run = _Run(batch, self._next, offset, count)
            self._runs.append(run)
            batch.runs.append(run)
        self._next += count

    def settle(self, number: int, *, multiple: bool, positive: bool) -> None:
        """The broker acked or nacked that number, or with ``multiple`` all up to it (0: all there are).

        Raises ProtocolError for a number that was never given, or is settled already.
        """
        if number >= self._next or (number == 0 and not multiple):
            raise ProtocolError(UNEXPECTED_FRAME, f"confirm of publish {number}, the last one was {self._next - 1}")
        runs = self._runs
        if multiple:
            upto = number or self._next - 1
            for run in runs:
                if run.first > upto:
                    break
                run.settle_up_to(upto, positive=positive)
            while runs and not runs[0].unsettled:
                del runs[0]
            return
        for at, run in enumerate(runs):
            if run.first <= number < run.first + len(run.settled):
                if run.settle_one(number, positive=positive):
                    if not run.unsettled:
                        del runs[at]
                    return
                break
        raise ProtocolError(UNEXPECTED_FRAME, f"second confirm of publish {number}")

    def note_returned(self, message: ReturnedMessage) -> None:
        """The broker found no queue for a message; its confirm follows.

        Raises ProtocolError when it cannot be told which message that is: then all in flight is in doubt.
        """
        token = _token(message.properties)
        if token is None:
            raise ProtocolError(UNEXPECTED_FRAME, "a returned message carries no x-delayer-id")
        found = [
            (batch, position)
            for batch in {run.batch for run in self._runs}
            if (position := batch.position(token)) is not None
        ]
        if len(found) != 1:
            text = f"a returned message's x-delayer-id is that of {len(found)} publishes in flight"
            raise ProtocolError(UNEXPECTED_FRAME, text)
        batch, position = found[0]
        batch.note_returned(position, Returned(message.code, message.text))

    def forget(self) -> None:
        """The channel is gone: nothing will be confirmed any more."""
        self._runs.clear()

    def waiting(self) -> list[asyncio.Future[list[Outcome]]]:
        """The futures of the batches in flight."""
        return [batch.outcomes for batch in {run.batch for run in self._runs}]


def _token(properties: bytes) -> bytes | None:
    try:
        field = Properties.parse(properties).get(TOKEN_HEADER)
    except (MalformedProperties, MalformedTable) as broken:
        raise ProtocolError(UNEXPECTED_FRAME, f"a returned message cannot be read: {broken}") from broken
    return None if field is None else field.content
