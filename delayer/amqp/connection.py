"""One AMQP connection as an asyncio protocol: its channels, its heartbeats, and the broker's resource alarm. It handles
each incoming frame synchronously, without an await."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Self, TypeVar, cast

from pamqp import commands
from pamqp.base import Frame
from pamqp.frame import marshal

from delayer.amqp import framing
from delayer.amqp.address import Address
from delayer.amqp.channel import Channel
from delayer.amqp.errors import AccessRefused, ConnectionLost, NoFreeChannel, ProtocolError, ReplyCode, fresh_copy
from delayer.amqp.framing import (
    DEFAULT_FRAME_MAX,
    HEARTBEAT_FRAME,
    PROTOCOL_HEADER,
    WRITE_BYTES,
    Parser,
    Replies,
    ReturnedMessage,
)
from delayer.amqp.handshake import ConnectionLimits, agree, server_version, start_ok, tune_ok
from delayer.amqp.values import Delivery

_Reply = TypeVar("_Reply", bound=Frame)


# With these reply codes a broker rejects a login for good: bad path, access refused, not allowed (no such vhost).
_REFUSALS = frozenset({402, ReplyCode.ACCESS_REFUSED, ReplyCode.NOT_ALLOWED})


@dataclass(eq=False)
class HeartbeatTimer:
    """Sends a heartbeat if nothing was written for half of ``heartbeat`` seconds. Calls ``lost`` once if nothing was
    read for twice ``heartbeat``. The connection sets ``reading``, ``read_at`` and ``written_at`` (loop time)."""

    _loop: asyncio.AbstractEventLoop
    _write: Callable[[bytes], None]
    _lost: Callable[[str], None]
    reading: bool = True
    read_at: float = 0.0
    written_at: float = 0.0
    _heartbeat: float = 0.0
    _timer: asyncio.TimerHandle | None = None
    _overdue: bool = False

    def start(self, heartbeat: float) -> None:
        """Start sending and checking; 0 means no heartbeats."""
        self._heartbeat = heartbeat
        if heartbeat:
            self._look()

    def stop(self) -> None:
        """Safe to call twice, or without start."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._heartbeat = 0.0

    def _look(self) -> None:
        now = self._loop.time()
        half, deadline = self._heartbeat / 2, 2 * self._heartbeat
        if now - self.written_at >= half:
            self._write(HEARTBEAT_FRAME)
        due = self.written_at + half
        next_look = due if due > now else now + half  # A closing transport does not accept writes.
        if not self.reading:
            self._overdue = False  # Reading is paused, so silence means nothing.
        elif now - self.read_at < deadline:
            self._overdue = False
            next_look = min(next_look, self.read_at + deadline)
        elif self._overdue:
            self._lost(f"nothing was received from the broker for {now - self.read_at:.1f} s")
            return
        else:
            # After a pause of the whole process, this timer may run before asyncio reads the socket, so wait once more.
            self._overdue = True
            next_look = now + self._heartbeat / 10
        if self._heartbeat:
            self._timer = self._loop.call_at(next_look, self._look)


# How long a peer may take to confirm a close, in seconds; after that we cut the connection.
_CLOSE_SECONDS = 5.0


class Connection(asyncio.Protocol):
    """An AMQP connection; :meth:`open` creates it. ``closed`` is done when the connection is gone; its result is the
    reason. Wait for it as for a :class:`Channel`'s. ``blocked`` is true while a resource alarm stops the broker from
    accepting publishes. ``receivers`` maps the channel numbers in use to channels; 0 is the connection itself."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[ConnectionLost] = loop.create_future()
        self.consumers: dict[bytes, Callable[[Delivery], None]] = {}  # Channel 0 has no consumers.
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._gone: asyncio.Future[None] = loop.create_future()
        self._loss: ConnectionLost | None = None
        self._opened = False
        self.product = ""
        """The program's name: the first part of consumer tags."""
        self.version: tuple[int, ...] = ()
        """The broker's version, such as (4, 3, 6); empty if the broker does not send it."""
        self.limits = ConnectionLimits(0, DEFAULT_FRAME_MAX, 0.0)
        self._room = asyncio.Event()
        self._room.set()
        self._soon: list[bytes | memoryview] = []
        self._pulse = HeartbeatTimer(loop, self.write, self.drop)
        self._alarm: str | None = None  # The broker's reason while it accepts no publishes.
        self._on_alarm: Callable[[str], object] = lambda _reason: None
        self._unblocked = asyncio.Event()
        self._unblocked.set()
        self.receivers: dict[int, Connection | Channel] = {0: self}
        self._parser = Parser(self.receivers)
        self._replies = Replies()
        self._abort_timer: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls,
        address: Address | str,
        *,
        name: str,
        product: str = "amqp",
        version: str = "",
        heartbeat: float = 20.0,
        timeout: float = 10.0,
    ) -> Self:
        """Connect and log in, within ``timeout`` seconds. The broker's operators see ``name``, ``product`` and
        ``version``. A heartbeat or timeout in the URL overrides the arguments. Raises ValueError for a bad URL,
        AccessRefused, and for every other failure ConnectionLost (or ProtocolError) with its cause."""
        where = Address.parse(address) if isinstance(address, str) else address
        heartbeat = heartbeat if where.heartbeat is None else where.heartbeat
        timeout = timeout if where.timeout is None else where.timeout
        connection: Self | None = None
        try:
            async with asyncio.timeout(timeout):
                _, connection = await asyncio.get_running_loop().create_connection(
                    cls,
                    where.at or where.host,
                    where.port,
                    ssl=where.tls,
                    server_hostname=(where.server_name or where.host) if where.tls else None,
                )
                connection.product = product
                await connection._log_in(where, name, version, heartbeat)
        except TimeoutError as late:
            raise ConnectionLost(0, f"no connection to {where} within {timeout:g} s") from late
        except OSError as error:
            raise ConnectionLost(0, f"no connection to {where}: {error}") from error
        finally:
            if connection is not None and not connection._opened:
                connection._abort()
                await asyncio.shield(connection._gone)
        return connection

    @property
    def free_channels(self) -> int:
        """How many more channels can be opened now."""
        return self.limits.channel_max + 1 - len(self.receivers)  # One receiver is the connection itself.

    @property
    def blocked(self) -> bool:
        return self._alarm is not None

    async def unblocked(self) -> None:
        """Wait until the broker accepts publishes. Raises ConnectionLost."""
        await self._unblocked.wait()
        self._check_open()

    def on_alarm(self, on_change: Callable[[str], object]) -> None:
        """Call ``on_change`` with the reason of each alarm, including a present one, and with "" when it ends."""
        self._on_alarm = on_change
        if self._alarm is not None:
            on_change(self._alarm)

    async def channel(self, *, token_header: bytes | None = None) -> Channel:
        """Open a channel; with ``token_header`` in confirm mode (see :class:`Channel`). Raises NoFreeChannel,
        ChannelClosed, ConnectionLost."""
        self._check_open()
        number = next(one for one in count(1) if one not in self.receivers)
        if number > self.limits.channel_max:
            raise NoFreeChannel(f"all {self.limits.channel_max} channels of the connection are in use")
        channel = self.receivers[number] = Channel(self, number, token_header)
        await channel.open()
        return channel

    def pause_reading(self) -> None:
        """Stop reading the socket, so that the broker stops once its buffers are full. Idempotent."""
        transport = self._transport
        if self._pulse.reading and self._loss is None and transport is not None and not transport.is_closing():
            self._pulse.reading = False
            transport.pause_reading()

    def resume_reading(self) -> None:
        """Continue reading. Idempotent."""
        if not self._pulse.reading and self._transport is not None:
            self._pulse.reading = True
            self._pulse.read_at = self._loop.time()
            if not self._transport.is_closing():
                self._transport.resume_reading()

    async def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Send the close, then wait up to ``seconds`` for the broker's answer, and for the socket's end. Idempotent."""
        self.abandon()
        try:
            await asyncio.wait({self._gone}, timeout=seconds)
        finally:
            self._abort()
        await asyncio.shield(self._gone)

    def abandon(self) -> None:
        """Send the close without waiting. Idempotent."""
        if self._loss is None:
            self._end(ConnectionLost(ReplyCode.SUCCESS, "closed by us"))

    def drop(self, why: str) -> None:
        """Cut the connection without a close, because an unresponsive broker would not read it."""
        self._fail(ConnectionLost(0, why))
        self._abort()

    def write(self, data: bytes) -> None:
        """Pass bytes to the transport. Does nothing while the transport is closing."""
        if self._soon:
            self._flush()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
            self._pulse.written_at = self._loop.time()

    def write_parts(self, parts: Sequence[bytes | memoryview]) -> None:
        """Pass on the pieces of many frames, joined to writes small enough not to double their memory."""
        size = start = 0
        for index, part in enumerate(parts):
            size += len(part)
            if size >= WRITE_BYTES:
                self.write(b"".join(parts[start : index + 1]))
                size, start = 0, index + 1
        if size:
            self.write(b"".join(parts[start:]))

    def write_soon(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write at the end of this iteration of the loop, in one write with the parts of other channels."""
        if not self._soon:
            self._loop.call_soon(self._flush)
        self._soon += parts

    def _flush(self) -> None:
        parts, self._soon = self._soon, []
        self.write_parts(parts)

    @property
    def writable(self) -> bool:
        """Whether a publish may be written now; see :meth:`until_writable`."""
        return self._alarm is None and self._room.is_set()

    async def until_writable(self) -> None:
        """Wait while the transport's buffer is above its high-water mark. Also wait until a resource alarm ends,
        because the broker would then publish everything in the socket. Raises ConnectionLost."""
        await self._unblocked.wait()
        await self._room.wait()
        self._check_open()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Limit the bytes in the transport before a publish waits.
        self._transport.set_write_buffer_limits(high=(1 << 20))
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        self._pulse.read_at = self._loop.time()
        if self._parser.stopped:
            return
        self._parser.read_at = time.monotonic()
        try:
            self._parser.feed(data)
        except ProtocolError as error:
            self._on_protocol_error(error)

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def connection_lost(self, exc: Exception | None) -> None:
        loss = ConnectionLost(0, f"the connection was cut: {exc}" if exc else "the broker hung up")
        loss.__cause__ = exc
        self._fail(loss)
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        if not self._gone.done():
            self._gone.set_result(None)

    def on_method(self, frame: bytes) -> None:
        method = framing.unmarshal(frame)
        if isinstance(method, commands.Connection.Close):
            self._on_close(method)
        elif isinstance(method, commands.Connection.CloseOk) and self._loss is not None:
            self._hang_up()
        elif self._loss is not None:
            pass  # We closed, so ignore all other frames until the broker answers.
        elif isinstance(method, commands.Connection.Blocked):
            self._alarm = str(method.reason)
            self._unblocked.clear()
            self._on_alarm(self._alarm)
        elif isinstance(method, commands.Connection.Unblocked):
            self._alarm = None
            self._unblocked.set()
            self._on_alarm("")
        elif not self._replies.resolve(method):
            raise ProtocolError(ReplyCode.UNEXPECTED_FRAME, f"unexpected {method.name} on channel 0")

    def on_confirm(self, tag: int, *, multiple: bool, positive: bool) -> None:
        raise ProtocolError(ReplyCode.UNEXPECTED_FRAME, "a confirm on channel 0")

    def on_returned(self, returned: ReturnedMessage) -> None:
        raise ProtocolError(ReplyCode.UNEXPECTED_FRAME, "a return on channel 0")

    def _on_close(self, close: commands.Connection.Close) -> None:
        if self._loss is None:
            refused = not self._opened and close.reply_code in _REFUSALS
            kind = AccessRefused if refused else ConnectionLost
            self._fail(kind(close.reply_code or 0, close.reply_text))
        self.write(marshal(commands.Connection.CloseOk(), 0))
        self._hang_up()

    def _on_protocol_error(self, error: ProtocolError) -> None:
        # The stream is unreadable, and so would be the broker's answer, so discard everything until the socket closes.
        self._parser.stopped = True
        if self._loss is None:
            self._end(error)
        else:
            self._hang_up()

    async def _log_in(self, address: Address, name: str, version: str, heartbeat: float) -> None:
        start = await self._ask(PROTOCOL_HEADER, commands.Connection.Start)
        self.version = server_version(start.server_properties)
        hello = start_ok(start, address, name, self.product, version)
        tune = await self._ask(marshal(hello, 0), commands.Connection.Tune)
        self.limits = agree(tune, heartbeat)
        self._parser.frame_max = self.limits.frame_max
        self.write(marshal(tune_ok(self.limits), 0))
        wish = commands.Connection.Open(virtual_host=address.vhost)
        await self._ask(marshal(wish, 0), commands.Connection.OpenOk)
        self._opened = True
        self._pulse.start(self.limits.heartbeat)

    async def _ask(self, frame: bytes, reply: type[_Reply]) -> _Reply:
        self._check_open()
        self.write(frame)
        return await self._replies.next(reply)

    def _check_open(self) -> None:
        if self._loss is not None:
            raise fresh_copy(self._loss)

    def _end(self, loss: ConnectionLost) -> None:
        """Close from our side without waiting."""
        self._fail(loss)
        self.resume_reading()  # Without this, the answer would never be read.
        self.write(marshal(commands.Connection.Close(loss.code, framing.clipped(loss.text), 0, 0), 0))
        self._abort_soon()

    def _hang_up(self) -> None:
        """Close the socket once everything is written, or after 5 s in any case."""
        self._parser.stopped = True
        if self._transport is not None:
            self._transport.close()
        self._abort_soon()

    def _abort_soon(self) -> None:
        if self._abort_timer is None and not self._gone.done():
            self._abort_timer = self._loop.call_later(_CLOSE_SECONDS, self._abort)

    def _abort(self) -> None:
        if self._transport is not None and not self._gone.done():
            self._transport.abort()

    def _fail(self, loss: ConnectionLost) -> None:
        """Fail all users of the connection. Only the first loss applies."""
        if self._loss is not None:
            return
        self._loss = loss
        self._pulse.stop()
        for channel in self.receivers.values():
            if isinstance(channel, Channel):
                channel.fail(loss)
        self._replies.fail(loss)
        self._unblocked.set()
        self._room.set()
        if not self.closed.done():
            self.closed.set_result(loss)
