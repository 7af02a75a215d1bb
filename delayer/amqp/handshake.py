"""Opening a connection: our answers to the broker, and the limits that both sides agree on. Pure."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from pamqp import commands

from delayer.amqp.address import Address
from delayer.amqp.errors import AccessRefused
from delayer.amqp.framing import DEFAULT_FRAME_MAX, MIN_FRAME_MAX

_CAPABILITIES = ("publisher_confirms", "consumer_cancel_notify", "connection.blocked", "basic.nack")


class ConnectionLimits(NamedTuple):
    """The agreed limits: open channels, bytes of a frame, and seconds between heartbeats (0 means none)."""

    channel_max: int
    frame_max: int
    heartbeat: float


def start_ok(
    start: commands.Connection.Start, address: Address, name: str, product: str, version: str
) -> commands.Connection.StartOk:
    """Build our login with our capabilities. Raises AccessRefused if the broker does not offer our login mechanism."""
    offered = str(start.mechanisms).split()
    if address.auth_mechanism not in offered:
        text = f"the broker offers {' '.join(offered)}, expected {address.auth_mechanism}"
        raise AccessRefused(0, text)
    plain = address.auth_mechanism == "PLAIN"
    return commands.Connection.StartOk(
        client_properties={
            "product": product,
            "version": version,
            "platform": "Python",
            "connection_name": name,
            "capabilities": dict.fromkeys((*_CAPABILITIES, "authentication_failure_close"), True),
        },
        mechanism=address.auth_mechanism,
        response=f"\0{address.user}\0{address.password}" if plain else "",
        locale="en_US",
    )


def server_version(properties: object) -> tuple[int, ...]:
    """The broker's version, such as (4, 3, 6); empty if the broker does not send it."""
    version = properties.get("version") if isinstance(properties, dict) else None
    return tuple(int(part) for part in re.findall(r"\d{1,9}", version)[:3]) if isinstance(version, str) else ()


def agree(tune: commands.Connection.Tune, heartbeat: float) -> ConnectionLimits:
    """Combine the broker's limits and the shorter heartbeat. 0 from the broker means ours; 0 from us means none."""
    both = [seconds for seconds in (float(tune.heartbeat), heartbeat) if seconds > 0 and heartbeat > 0]
    frame_max = tune.frame_max or DEFAULT_FRAME_MAX
    return ConnectionLimits(tune.channel_max or 65535, max(frame_max, MIN_FRAME_MAX), min(both, default=0.0))


def tune_ok(limits: ConnectionLimits) -> commands.Connection.TuneOk:
    """Build our answer. The protocol has whole seconds, so the promised heartbeat is rounded up."""
    return commands.Connection.TuneOk(limits.channel_max, limits.frame_max, math.ceil(limits.heartbeat))
