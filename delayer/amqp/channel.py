"""One channel of a connection: consuming, settling, publishing with confirms."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from pamqp import commands
from pamqp.base import Frame
from pamqp.frame import marshal

from delayer.amqp import framing
from delayer.amqp.errors import (
    ChannelClosed,
    ConfirmTimeout,
    ConnectionLost,
    MalformedProperties,
    MalformedTable,
    ProtocolError,
    ReplyCode,
    fresh_copy,
)
from delayer.amqp.framing import WRITE_BYTES, Replies, ReturnedMessage, fail
from delayer.amqp.properties import Properties
from delayer.amqp.values import CONFIRMED, Answer, Delivery, Nacked, Outgoing, Pace, Returned

if TYPE_CHECKING:
    from delayer.amqp.connection import Connection

_Reply = TypeVar("_Reply", bound=Frame)
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


_CLOSE_SECONDS = 5.0
CLUMP_MS: Final = 2
"""Messages of a pace due within this time are written together, because a wake-up costs more than a message."""


class Channel:
    """An AMQP channel; :meth:`Connection.channel` opens it.

    ``closed`` is done when the channel is gone; its result is the reason (a ChannelClosed or ConnectionLost), which
    every method then raises. Wait for it with ``asyncio.wait`` or ``asyncio.shield``, because cancelling a task that
    awaits the future directly cancels the future. ``number_freed`` is done when the number is free again. A channel
    that we closed ignores all frames until then."""

    def __init__(self, connection: Connection, number: int, token_header: bytes | None) -> None:
        """``token_header``: the header that has each publish's token; with it the channel opens in confirm mode."""
        self.number = number
        self.consumers: dict[bytes, Callable[[Delivery], None]] = {}
        """Delivery callbacks, by consumer tag."""
        self.number_freed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed: asyncio.Future[ChannelClosed | ConnectionLost] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._loss: ChannelClosed | ConnectionLost | None = None
        self._replies = Replies()
        self._cancelled_by_broker: dict[bytes, Callable[[], None]] = {}
        self._tags = 0
        self._confirming = token_header is not None
        self._confirms = Confirms(token_header or b"")

    async def open(self) -> None:
        """Open the channel at the broker. The connection calls this once."""
        try:
            await self.call(commands.Channel.Open(), commands.Channel.OpenOk)
            if self._confirming:
                await self.call(commands.Confirm.Select(), commands.Confirm.SelectOk)
        except BaseException:
            self.abandon()  # No caller has this channel, so its number would never be free again.
            raise

    async def qos(self, prefetch: int) -> None:
        """Limit the unsettled deliveries of each consumer that starts after this call; 0 means no limit."""
        await self.call(commands.Basic.Qos(prefetch_count=prefetch), commands.Basic.QosOk)

    async def consume(
        self, queue: str, on_delivery: Callable[[Delivery], None], on_cancelled: Callable[[], None]
    ) -> str:
        """Start to consume; return the consumer tag. The read loop calls ``on_delivery``, perhaps before this method
        returns; an exception from it closes the connection. If the broker cancels the consumer, ``on_cancelled`` is
        called once."""
        self._tags += 1
        tag = f"{self._connection.product}.{self._tags}".encode()
        # Set the callbacks before the request, because the first delivery may directly follow the broker's answer.
        self.consumers[tag] = on_delivery
        self._cancelled_by_broker[tag] = on_cancelled
        await self.call(framing.Consume(queue=queue, consumer_tag=tag.decode()), commands.Basic.ConsumeOk)
        return tag.decode()

    async def cancel(self, tag: str) -> None:
        """Stop the consumer. Deliveries arrive until this returns; the caller can still settle them."""
        await self.call(commands.Basic.Cancel(consumer_tag=tag), commands.Basic.CancelOk)
        self._forget(tag.encode())

    async def call(self, method: Frame, reply: type[_Reply]) -> _Reply:
        """Send a method and wait for its answer. Calls may overlap; the channel sends them in order."""
        self._write(marshal(method, self.number))
        return await self._replies.next(reply)

    def ack(self, tag: int, multiple: bool = False) -> None:
        """Acknowledge the delivery, or all unsettled ones up to it."""
        self._write(framing.ack(self.number, tag, multiple=multiple))

    def nack(self, tag: int, multiple: bool = False, requeue: bool = True) -> None:
        """Return the delivery to its queue; without ``requeue`` the broker drops or dead-letters it."""
        self._write(framing.nack(self.number, tag, multiple=multiple, requeue=requeue))

    async def publish(
        self,
        batch: Sequence[Outgoing],
        *,
        timeout: float,
        pace: Pace | None = None,
        reach: Callable[[str], object] = bool,
    ) -> list[Answer]:
        """Publish with the mandatory flag and wait for every confirm. Returns one answer for each message, in order.

        With a ``pace``, each message is written when it is due, and ``timeout`` is measured from the last write.
        Several calls may be in flight. Raises ValueError before anything is written. Raises ChannelClosed
        (ConfirmTimeout after ``timeout`` seconds) or ConnectionLost, with the known answers, if some answers are in
        doubt. A cancelled call leaves the channel usable, and its written messages are published.

        ``reach`` lets a test stop the process at a step. It is called with "publish.begun" if some messages are written
        and others are not, and with "publish.written" before the wait for confirms.
        """
        if not self._confirming:
            raise RuntimeError("publish needs a channel in confirm mode")
        self._check_open()
        if not batch:
            return []
        self._check_fits(batch)
        answers: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        # A call cancelled while it writes never awaits this future, so retrieve a failure for asyncio.
        answers.add_done_callback(lambda one: one.cancelled() or one.exception())
        waiting = Batch([outgoing.token for outgoing in batch], answers)
        try:
            await self._write_batch(batch, waiting, pace, timeout, reach)
            reach("publish.written")
            async with asyncio.timeout(timeout):
                return await answers
        except TimeoutError:
            late = ConfirmTimeout(0, f"{self._confirms.in_flight} confirms were missing after {timeout:g} s")
            self._end(ConfirmTimeout(late.code, late.text))
            late.answers = waiting.so_far()
            raise late from None
        except (ChannelClosed, ConnectionLost) as lost:
            lost.answers = waiting.so_far()
            raise
        finally:
            # An exception from here refers to this frame, the frame to these objects, and they to the exception. This
            # cycle would keep the bodies of the batch in memory until the garbage collector runs, which is rare.
            waiting.runs.clear()
            del answers, waiting

    def _check_fits(self, batch: Sequence[Outgoing]) -> None:
        limit = framing.header_limit(self._connection.limits.frame_max)
        for index, (exchange, routing_key, properties, _, _) in enumerate(batch):
            if len(properties) > limit:
                text = f"content header of {len(properties)} bytes, a frame carries {limit}"
                raise ValueError(f"message {index} of the batch: {text}")
            if len(exchange) > 255 or len(routing_key) > 255:
                raise ValueError(f"message {index} of the batch: exchange and routing key hold 255 bytes each")

    async def _write_batch(
        self,
        batch: Sequence[Outgoing],
        waiting: Batch,
        pace: Pace | None,
        timeout: float,
        reach: Callable[[str], object],
    ) -> None:
        index, due = 0, len(batch) if pace is None else 0
        while index < len(batch):
            while pace is not None and index == due:
                now_ms = pace.now_ms()
                due = bisect_right(pace.due_ms, now_ms, index)
                if index == due:
                    await asyncio.sleep(_clump_seconds(pace.due_ms[index], now_ms))
            if not self._connection.writable:
                async with asyncio.timeout(timeout):
                    await self._connection.until_writable()
            self._check_open()
            if index:
                reach("publish.begun")
            start, frame_max = index, self._connection.limits.frame_max
            parts, index = framing.publish(self.number, frame_max, batch, range(start, due), WRITE_BYTES)
            self._confirms.written(waiting, start, index - start)
            if pace is not None:
                pace.written_ms |= dict.fromkeys(range(start, index), pace.now_ms())
            more_later = pace is not None and index == due < len(batch)
            (self._connection.write_soon if more_later else self._connection.write_parts)(parts)
        if pace is not None:
            pace.on_written()

    async def close(self) -> None:
        """Close, and wait up to 5 s for the answer. Unsettled deliveries return to their queues. Idempotent."""
        self.abandon()
        await asyncio.wait({self.number_freed}, timeout=_CLOSE_SECONDS)

    def abandon(self) -> None:
        """Close without waiting for the broker's answer, which frees the number. Idempotent."""
        self._end(ChannelClosed(ReplyCode.SUCCESS, "closed by us"))

    def _end(self, loss: ChannelClosed) -> None:
        """Close from our side without waiting. The number stays in use until the broker answers."""
        if self._loss is None:
            close = commands.Channel.Close(loss.code or ReplyCode.SUCCESS, framing.clipped(loss.text), 0, 0)
            self._connection.write(marshal(close, self.number))
            self.fail(loss)

    def fail(self, loss: ChannelClosed | ConnectionLost) -> None:
        """Mark the channel as gone and fail all waiting calls. A lost connection also calls this."""
        if isinstance(loss, ConnectionLost):
            self._release()
        if self._loss is not None:
            return
        self._loss = loss
        # Ignore deliveries still on their way: closing the channel returns them to their queue.
        self.consumers = dict.fromkeys(self.consumers, lambda _delivery: None)
        self._cancelled_by_broker.clear()
        self._replies.fail(loss)
        self._confirms.fail(loss)
        self.closed.set_result(loss)

    def _release(self) -> None:
        if not self.number_freed.done():
            self.number_freed.set_result(None)

    # The parser calls these methods.

    def on_method(self, frame: bytes) -> None:
        method = framing.unmarshal(frame)
        if isinstance(method, commands.Channel.Close):
            if not self._connection.closed.done():
                self._connection.write(marshal(commands.Channel.CloseOk(), self.number))
            if self._loss is None:  # Otherwise both sides closed at once, and each waits for the other's answer.
                self._forget_number()
                self.fail(ChannelClosed(method.reply_code or 0, method.reply_text))
        elif self._loss is not None:
            if isinstance(method, commands.Channel.CloseOk):
                self._forget_number()
        elif isinstance(method, commands.Basic.Cancel):
            self._on_cancel(method)
        elif not self._replies.resolve(method):
            raise ProtocolError(ReplyCode.UNEXPECTED_FRAME, f"unexpected {method.name} on channel {self.number}")

    def _forget_number(self) -> None:
        self._connection.receivers.pop(self.number, None)
        self._release()

    def _on_cancel(self, method: commands.Basic.Cancel) -> None:
        tag = method.consumer_tag or ""
        if not method.nowait:
            answer = commands.Basic.CancelOk(consumer_tag=tag)
            self._connection.write(marshal(answer, self.number))
        on_cancelled = self._forget(tag.encode())
        if on_cancelled is not None:
            on_cancelled()

    def on_confirm(self, tag: int, *, multiple: bool, positive: bool) -> None:
        if self._loss is None:
            self._confirms.settle(tag, multiple=multiple, positive=positive)

    def on_returned(self, returned: ReturnedMessage) -> None:
        if self._loss is None:
            self._confirms.note_returned(returned)

    def _write(self, frame: bytes) -> None:
        self._check_open()
        self._connection.write(frame)

    def _check_open(self) -> None:
        if self._loss is not None:
            raise fresh_copy(self._loss)

    def _forget(self, tag: bytes) -> Callable[[], None] | None:
        self.consumers.pop(tag, None)
        return self._cancelled_by_broker.pop(tag, None)


def seconds_until_due(pace: Pace | None, index: int) -> float:
    """Seconds until this message of the batch is due; 0.0 if it is."""
    return 0.0 if pace is None else max(0.0, (pace.due_ms[index] - pace.now_ms()) / 1000)


def _clump_seconds(due_ms: int, now_ms: float) -> float:
    """Seconds until this message's clump is written: the clumps of all channels are due together, every CLUMP_MS.
    Rounds up to whole milliseconds, because uvloop rounds, and would not sleep at all for less than half of one."""
    return math.ceil(due_ms + -due_ms % CLUMP_MS - now_ms) / 1000
