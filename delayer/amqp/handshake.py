"""The handshake on channel 0: login, limits and virtual host. Each question waits for its answer."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from pamqp import commands
from pamqp.base import Frame

import delayer
from delayer.amqp import framing
from delayer.amqp.address import Address
from delayer.amqp.errors import AccessRefused, ConnectionLost, again
from delayer.amqp.framing import DEFAULT_FRAME_MAX, MIN_FRAME_MAX, PROTOCOL_HEADER

# With these reply codes a broker refuses a login for good: bad path, access refused, not allowed (no such vhost).
REFUSALS = frozenset({402, 403, 530})
_CAPABILITIES = ("publisher_confirms", "consumer_cancel_notify", "connection.blocked", "basic.nack")


class Limits(NamedTuple):
    """The agreed limits. ``heartbeat`` is in seconds, 0 for none."""

    channel_max: int
    frame_max: int
    heartbeat: float


def start_ok(start: commands.Connection.Start, address: Address, name: str) -> commands.Connection.StartOk:
    """Our credentials and capabilities. Raises AccessRefused if the broker does not offer our login mechanism."""
    offered = str(start.mechanisms).split()
    if address.auth_mechanism not in offered:
        text = f"the broker offers {' '.join(offered)}, expected {address.auth_mechanism}"
        raise AccessRefused(0, text)
    plain = address.auth_mechanism == "PLAIN"
    return commands.Connection.StartOk(
        client_properties={
            "product": "delayer",
            "version": delayer.__version__,
            "platform": "Python",
            "connection_name": name,
            "capabilities": dict.fromkeys((*_CAPABILITIES, "authentication_failure_close"), True),
        },
        mechanism=address.auth_mechanism,
        response=f"\0{address.user}\0{address.password}" if plain else "",
        locale="en_US",
    )


def server_text(properties: object, name: str) -> str:
    """A text in the broker's properties, such as ``cluster_name``; "" if the broker does not send it."""
    value = properties.get(name) if isinstance(properties, dict) else None
    return value if isinstance(value, str) else ""


def server_version(properties: object) -> tuple[int, ...]:
    """The broker's version, such as (4, 3, 6); empty if the broker does not send it."""
    return tuple(int(part) for part in re.findall(r"\d+", server_text(properties, "version"))[:3])


def agree(tune: commands.Connection.Tune, heartbeat: float) -> Limits:
    """The broker's limits, and the shorter heartbeat. 0 on the broker's side means ours, 0 on ours means none."""
    both = [seconds for seconds in (float(tune.heartbeat), heartbeat) if seconds > 0 and heartbeat > 0]
    frame_max = tune.frame_max or DEFAULT_FRAME_MAX
    return Limits(tune.channel_max or 65535, max(frame_max, MIN_FRAME_MAX), min(both, default=0.0))


def tune_ok(limits: Limits) -> commands.Connection.TuneOk:
    """Our answer. The protocol has whole seconds, so the promised heartbeat is rounded up."""
    return commands.Connection.TuneOk(limits.channel_max, limits.frame_max, math.ceil(limits.heartbeat))


_Reply = TypeVar("_Reply", bound=Frame)


class Dialogue:
    """The questions and answers of the handshake. Waiting calls raise ConnectionLost, and so does ``write``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, write: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._write = write
        self._reply: tuple[type[Frame], asyncio.Future[Frame]] | None = None

    async def greet(self, address: Address, name: str, heartbeat: float) -> tuple[object, Limits]:
        """Log in. Returns the broker's properties, and the limits. Raises AccessRefused."""
        start = await self._ask(PROTOCOL_HEADER, commands.Connection.Start)
        hello = start_ok(start, address, name)
        tune = await self._ask(framing.marshal(hello, 0), commands.Connection.Tune)
        return start.server_properties, agree(tune, heartbeat)

    async def enter(self, limits: Limits, vhost: str) -> None:
        """Agree to the limits, and open the virtual host."""
        self._write(framing.marshal(tune_ok(limits), 0))
        wish = commands.Connection.Open(virtual_host=vhost)
        await self._ask(framing.marshal(wish, 0), commands.Connection.OpenOk)

    async def _ask(self, frame: bytes, reply: type[_Reply]) -> _Reply:
        self._write(frame)
        future: asyncio.Future[Frame] = self._loop.create_future()
        self._reply = (reply, future)
        answer = await future
        assert isinstance(answer, reply)  # This is certain: heard() compared the types.
        return answer

    def received(self, method: Frame) -> bool:
        """Take a method of channel 0. Returns whether it is the expected answer."""
        if self._reply is None or not isinstance(method, self._reply[0]):
            return False
        _, future = self._reply
        self._reply = None
        if not future.done():
            future.set_result(method)
        return True

    def fail(self, loss: ConnectionLost) -> None:
        """Fail the waiting call: no answer will come."""
        if self._reply is not None and not self._reply[1].done():
            self._reply[1].set_exception(again(loss))
