"""Publisher confirms: which messages of a channel are in flight, and the broker's answer to each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from delayer.amqp.errors import (
    ChannelClosed,
    ConnectionLost,
    MalformedProperties,
    MalformedTable,
    ProtocolError,
    ReplyCode,
)
from delayer.amqp.framing import ReturnedMessage, fail
from delayer.amqp.properties import Properties
from delayer.amqp.values import CONFIRMED, Answer, Nacked, Returned

_NACKED: Final = Nacked()


class Batch:
    """One publish() call: each message's answer, and the caller's future. Raises ValueError if two messages have the
    same token, because a return identifies its message only by the token."""

    def __init__(self, tokens: Sequence[bytes], answers: asyncio.Future[list[Answer]]) -> None:
        if len(set(tokens)) != len(tokens):
            raise ValueError("the tokens of a batch must be unique")
        self.answers = answers
        self.runs: list[_Run] = []
        self._tokens = tokens
        self._positions: dict[bytes, int] | None = None
        self._unsettled = len(tokens)
        self._nacked: list[int] = []
        self.returned: dict[int, Returned] = {}

    def position(self, token: bytes) -> int | None:
        """Find the message's index by its token. The first return builds this lookup."""
        if self._positions is None:
            self._positions = {one: position for position, one in enumerate(self._tokens)}
        return self._positions.get(token)

    def settle(self, count: int, nacked: Sequence[int]) -> None:
        """Count ``count`` more messages as settled, of which the broker nacked the positions ``nacked``."""
        self._nacked += nacked
        self._unsettled -= count
        if self._unsettled or self.answers.done():
            return
        answers: list[Answer] = [CONFIRMED] * len(self._tokens)
        self._enter_others(answers)
        self.answers.set_result(answers)

    def so_far(self) -> list[Answer | None]:
        """One answer for each message; None if the message is not settled, or was never written."""
        answers: list[Answer | None] = [None] * len(self._tokens)
        for run in self.runs:
            for at, settled in enumerate(run.settled, run.offset):
                if settled:
                    answers[at] = CONFIRMED
        self._enter_others(answers)
        return answers

    def _enter_others(self, answers: list[Answer] | list[Answer | None]) -> None:
        for position in self._nacked:
            answers[position] = _NACKED
        # The broker returns an unroutable message and then confirms it, so the return overrides the confirm.
        for position, returned in self.returned.items():
            if answers[position] is not None:
                answers[position] = returned


class _Run:
    """Consecutive publish numbers from ``first``, for the messages of ``batch`` from index ``offset``."""

    __slots__ = ("batch", "first", "low", "offset", "settled", "unsettled")

    def __init__(self, batch: Batch, first: int, offset: int, count: int) -> None:
        self.batch = batch
        self.first = first
        self.offset = offset
        self.settled = bytearray(count)  # One byte for each message; 1 means settled.
        self.unsettled = count
        self.low = 0  # All messages before this index are settled.

    def settle_one(self, number: int, *, positive: bool) -> bool:
        """Settle one number. Returns False if it was settled before."""
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
    """The unconfirmed publishes of one channel."""

    def __init__(self, token_header: bytes) -> None:
        self._token_header = token_header
        self._next = 1
        self._runs: list[_Run] = []  # In the order of their numbers; about one for each publish() call in flight.

    @property
    def in_flight(self) -> int:
        return sum(run.unsettled for run in self._runs)

    def written(self, batch: Batch, offset: int, count: int) -> None:
        """Assign the next numbers to ``count`` messages of the batch, from index ``offset``."""
        last = self._runs[-1] if self._runs else None
        # Another batch, already settled, may have used numbers since.
        if last is not None and last.batch is batch and last.first + len(last.settled) == self._next:
            last.settled += bytes(count)
            last.unsettled += count
        else:
            run = _Run(batch, self._next, offset, count)
            self._runs.append(run)
            batch.runs.append(run)
        self._next += count

    def settle(self, number: int, *, multiple: bool, positive: bool) -> None:
        """Settle the number that the broker acked or nacked; with ``multiple`` all numbers up to it (0 means all).
        Raises ProtocolError for an unassigned number, or a second confirm of a number."""
        if number >= self._next or (number == 0 and not multiple):
            raise ProtocolError(
                ReplyCode.UNEXPECTED_FRAME, f"confirm of publish {number}, the last was {self._next - 1}"
            )
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
        raise ProtocolError(ReplyCode.UNEXPECTED_FRAME, f"second confirm of publish {number}")

    def note_returned(self, message: ReturnedMessage) -> None:
        """Record that the broker found no queue for a message. Its confirm follows. Raises ProtocolError if the return
        does not match exactly one message, because then all in flight are in doubt."""
        token = _token(message.properties, self._token_header)
        if token is None:
            raise ProtocolError(
                ReplyCode.UNEXPECTED_FRAME, f"a returned message carries no {self._token_header.decode()}"
            )
        found = [
            (batch, position)
            for batch in {run.batch for run in self._runs}
            if (position := batch.position(token)) is not None
        ]
        if len(found) != 1:
            header = self._token_header.decode()
            text = f"a returned message's {header} is that of {len(found)} publishes in flight"
            raise ProtocolError(ReplyCode.UNEXPECTED_FRAME, text)
        batch, position = found[0]
        batch.returned[position] = Returned(message.code, message.text)

    def fail(self, loss: ChannelClosed | ConnectionLost) -> None:
        """Fail the batches in flight, because no confirm will come."""
        for batch in {run.batch for run in self._runs}:
            fail(batch.answers, loss)
        self._runs.clear()


def _token(properties: bytes, header: bytes) -> bytes | None:
    try:
        field = Properties.parse(properties).get(header)
    except (MalformedProperties, MalformedTable) as broken:
        raise ProtocolError(ReplyCode.UNEXPECTED_FRAME, f"a returned message cannot be read: {broken}") from broken
    return None if field is None else field.content
