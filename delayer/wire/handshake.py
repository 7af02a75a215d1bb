"""What both sides agree on before the first channel: who we are, and the limits of the conversation."""

from __future__ import annotations

import math
from typing import NamedTuple

import delayer
from delayer.wire.address import Address
from delayer.wire.errors import AccessRefused
from delayer.wire.framing import DEFAULT_FRAME_MAX, MIN_FRAME_MAX
from delayer.wire.methods import commands

# Reply codes with which a broker turns us away for good: bad path, access refused, not allowed (no such vhost).
REFUSALS = frozenset({402, 403, 530})
_MAX_CHANNELS = 65535
_CAPABILITIES = ("publisher_confirms", "consumer_cancel_notify", "connection.blocked", "basic.nack")


class Limits(NamedTuple):
    """``heartbeat`` in seconds, 0 for none."""

    channel_max: int
    frame_max: int
    heartbeat: float


def start_ok(start: commands.Connection.Start, address: Address, name: str) -> commands.Connection.StartOk:
    """Our credentials and capabilities. Raises AccessRefused if the broker does not offer our way to log in."""
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


def cluster_of(start: commands.Connection.Start) -> str:
    """The name of the broker's cluster; "" where it does not say."""
    said = start.server_properties.get("cluster_name") if isinstance(start.server_properties, dict) else None
    return said if isinstance(said, str) else ""


def agree(tune: commands.Connection.Tune, heartbeat: float) -> Limits:
    """The broker's limits, and the shorter of both heartbeats; none where we want none, as the protocol has it."""
    both = [seconds for seconds in (float(tune.heartbeat), heartbeat) if seconds > 0 and heartbeat > 0]
    frame_max = tune.frame_max or DEFAULT_FRAME_MAX
    return Limits(tune.channel_max or _MAX_CHANNELS, max(frame_max, MIN_FRAME_MAX), min(both, default=0.0))


def tune_ok(limits: Limits) -> commands.Connection.TuneOk:
    """Our answer. The protocol has whole seconds: what we promise is never shorter than what we watch for."""
    return commands.Connection.TuneOk(limits.channel_max, limits.frame_max, math.ceil(limits.heartbeat))
