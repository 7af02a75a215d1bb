"""The broker's side of one connection: login, channels, heartbeats, alarms and the close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, cast

from pamqp import commands
from pamqp.base import Frame

from tests.simulation.broker import wire
from tests.simulation.broker.access import User
from tests.simulation.broker.channel import ServerChannel
from tests.simulation.broker.vhost import VirtualHost
from tests.simulation.broker.wire import Code, Frames, Publish, Refusal

if TYPE_CHECKING:
    from tests.simulation.broker.broker import SimulatedBroker

VERSION: Final = "3.10.8"
CHANNEL_MAX: Final = 2047
_CAPABILITIES: Final = (
    "publisher_confirms", "exchange_exchange_bindings", "basic.nack", "consumer_cancel_notify", "connection.blocked",
    "consumer_priorities", "authentication_failure_close", "per_consumer_qos", "direct_reply_to",
)  # fmt: skip
CLOSE_SECONDS: Final = 3.0
"""How long a client may take to answer a close."""


class ServerConnection(asyncio.Protocol):
    def __init__(self, broker: SimulatedBroker) -> None:
        self.broker = broker
        self.user = User("", "")
        self.vhost: VirtualHost = broker.vhosts["/"]
        self.capabilities: dict[str, Any] = {}
        self.properties: dict[str, Any] = {}
        self.channels: dict[int, ServerChannel] = {}
        self.is_open = False
        self.gone = False
        self._greeted = False
        self._closing = False
        self._blocked = False
        self._frames = Frames()
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._contents: dict[int, _Content] = {}
        self._heartbeat = 0.0
        self._heard_at = self._said_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._listener: Callable[[bytes], object] = bool

    @property
    def name(self) -> str:
        """What the client calls the connection."""
        return str(self.properties.get("connection_name", ""))

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.broker.connections.append(self)
        if not self.broker.running:
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def data_received(self, data: bytes) -> None:
        self._heard_at = self.broker.now()
        self._frames.feed(data)
        self._read()

    def _read(self) -> None:
        if not self._greeted:
            self._greet()
        if not self._greeted or self.gone:
            return
        try:
            with closing(self._frames.read()) as frames:
                for kind, channel, payload in frames:
                    self._handle(kind, channel, payload)
                    if self._blocked or self.gone:
                        break
        except Refusal as refusal:
            self.close(refusal)

    def _greet(self) -> None:
        greeting = self._frames.take(len(wire.GREETING))
        if greeting == wire.GREETING:
            self._greeted = True
            properties = {
                "product": "RabbitMQ",
                "version": VERSION,
                "platform": "Erlang/OTP 25",
                "cluster_name": self.broker.name,
                "capabilities": dict.fromkeys(_CAPABILITIES, True),
            }
            self.send(
                wire.method(
                    0,
                    commands.Connection.Start,
                    server_properties=properties,
                    mechanisms="AMQPLAIN PLAIN",
                    locales="en_US",
                )
            )
        elif greeting and self._transport is not None:
            self._transport.write(wire.GREETING)
            self._transport.close()

    # Frames.

    def _handle(self, kind: int, number: int, payload: bytes) -> None:
        if kind == wire.METHOD:
            self._handle_method(number, payload)
        elif kind != wire.HEARTBEAT:
            self._handle_content(kind, number, payload)

    def _handle_method(self, number: int, payload: bytes) -> None:
        method, channel = wire.read_method(payload), self.channels.get(number)
        if number == 0:
            if isinstance(method, Frame):
                self._handle_own(method)
        elif isinstance(method, commands.Channel.Open):
            self._open_channel(number)
        elif channel is None:
            if not self._closing:
                raise Refusal(Code.CHANNEL_ERROR, "expected 'channel.open'")
        elif isinstance(method, Publish):
            self._contents[number] = _Content(method)
        else:
            channel.handle(method, payload)

    def _handle_content(self, kind: int, number: int, payload: bytes) -> None:
        content, channel = self._contents.get(number), self.channels.get(number)
        if content is None or channel is None:
            if not self._closing:
                raise Refusal(Code.UNEXPECTED_FRAME, f"expected method frame, got frame of type {kind} instead")
            return
        if kind == wire.HEADER:
            header = wire.read_header(payload)
            content.properties, content.missing = header.properties, header.size
            if self.broker.alarmed:
                self._block()
        else:
            content.pieces.append(payload)
            content.missing -= len(payload)
        if not content.missing:
            del self._contents[number]
            channel.handle((content.method, content.properties, b"".join(content.pieces)), b"")

    def _open_channel(self, number: int) -> None:
        if self._closing:
            return
        if number in self.channels or number > CHANNEL_MAX:
            raise Refusal(Code.CHANNEL_ERROR, "second 'channel.open' seen")
        self.channels[number] = ServerChannel(self, number)
        self.send(wire.method(number, commands.Channel.OpenOk))

    def _handle_own(self, method: Frame) -> None:
        if isinstance(method, commands.Connection.CloseOk):
            self._hang_up()
        elif isinstance(method, commands.Connection.Close):
            self._leave_channels()
            self.send(wire.method(0, commands.Connection.CloseOk))
            self._hang_up()
        elif self._closing:
            pass
        elif isinstance(method, commands.Connection.StartOk):
            self._log_in(method)
        elif isinstance(method, commands.Connection.TuneOk):
            self._heartbeat = float(method.heartbeat or 0)
            if self._heartbeat:
                self._said_at = self._heard_at = self.broker.now()
                self._beat()
        elif isinstance(method, commands.Connection.Open):
            self._enter(str(method.virtual_host))

    def _log_in(self, hello: commands.Connection.StartOk) -> None:
        self.properties = dict(hello.client_properties or {})
        found = self.properties.get("capabilities")
        self.capabilities = dict(found) if isinstance(found, dict) else {}
        _, name, password = str(hello.response).split("\0") if hello.mechanism == "PLAIN" else ("", "", "")
        user = self.broker.users.get(name)
        if user is None or user.password != password:
            if not self.capabilities.get("authentication_failure_close"):
                self.cut()
                return
            text = "Login was refused using authentication mechanism PLAIN. For details see the broker logfile."
            raise Refusal(Code.ACCESS_REFUSED, text)
        self.user = user
        self._listener = self.broker.overhears(self)
        tune = {"channel_max": CHANNEL_MAX, "frame_max": wire.FRAME_MAX, "heartbeat": self.broker.pace.heartbeat}
        self.send(wire.method(0, commands.Connection.Tune, **tune))

    def _enter(self, name: str) -> None:
        vhost = self.broker.vhosts.get(name)
        if vhost is None:
            raise Refusal(Code.NOT_ALLOWED, f"vhost {name} not found")
        refused = f"access to vhost '{name}' refused for user '{self.user.name}'"
        if name not in self.user.permissions:
            raise Refusal(Code.NOT_ALLOWED, refused)
        there = sum(one.vhost is vhost and one.is_open for one in self.broker.connections)
        if there >= vhost.most_connections:
            raise Refusal(Code.NOT_ALLOWED, f"{refused}: connection limit ({vhost.most_connections:g}) is reached")
        self.vhost = vhost
        self.is_open = True
        self.send(wire.method(0, commands.Connection.OpenOk))

    # Alarms.

    def _block(self) -> None:
        self._blocked = True
        if self.capabilities.get("connection.blocked"):
            reason = f"low on {self.broker.alarmed}"
            self.send(wire.method(0, commands.Connection.Blocked, reason=reason))

    def unblock(self) -> None:
        """The alarm is over: read on."""
        if self._blocked:
            self._blocked = False
            if self.capabilities.get("connection.blocked"):
                self.send(wire.method(0, commands.Connection.Unblocked))
            self._read()

    # Heartbeats.

    def _beat(self) -> None:
        now, half = self.broker.now(), self._heartbeat / 2
        if now - self._said_at >= half:
            self.send(wire.HEARTBEAT_FRAME)
        if now - self._heard_at > 2 * self._heartbeat and not self._blocked:
            self.cut()
        else:
            self._timer = self.broker.after(half, self._beat)

    # Writing, and the end.

    def send(self, data: bytes) -> None:
        """Write at the end of this iteration of the loop, in one write with everything else."""
        if self.gone:
            return
        if not self._out:
            self.broker.loop.call_soon(self._flush)
        self._out.append(data)

    def _flush(self) -> None:
        data, self._out = b"".join(self._out), []
        if data and self._transport is not None and not self._transport.is_closing():
            self._said_at = self.broker.now()
            self._listener(data)
            self._transport.write(data)

    def end(self, code: Code, text: str) -> None:
        """Close with a reason."""
        self.close(Refusal(code, text))

    def close(self, refusal: Refusal) -> None:
        if self._closing or self.gone:
            return
        self._closing = True
        self._blocked = False
        self._leave_channels()
        self.send(wire.close(0, refusal))
        self.broker.after(CLOSE_SECONDS, self._hang_up)

    def _hang_up(self) -> None:
        self._flush()
        if self._transport is not None:
            self._transport.close()
        self._leave()

    def cut(self) -> None:
        """End without a goodbye."""
        self._leave()
        if self._transport is not None:
            self._transport.abort()

    def _leave_channels(self) -> None:
        channels, self.channels = self.channels, {}
        for channel in channels.values():
            channel.leave()

    def _leave(self) -> None:
        if self.gone:
            return
        self.gone = True
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        self._leave_channels()
        for queue in [one for one in self.vhost.queues.values() if one.exclusive is self]:
            self.vhost.delete_queue(queue)
        if self in self.broker.connections:
            self.broker.connections.remove(self)


class _Content:
    """A publish whose frames are arriving."""

    __slots__ = ("method", "missing", "pieces", "properties")

    def __init__(self, method: Publish) -> None:
        self.method = method
        self.properties = b""
        self.missing = 0
        self.pieces: list[bytes] = []
