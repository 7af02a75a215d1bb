"""Takeovers: every message in another system's cascade arrives, never early, and twice only after a fault.

The daemon parks some of them; the rest run through the cascade while the daemon is down.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

from delayer.amqp.values import Delivery, Outgoing
from delayer.broker.admin import Admin
from delayer.core.cascade import Cascade, routing_key
from delayer.core.topology import Binding, Exchange, Topology
from tests.faults.fleet import Fleet
from tests.support.account import Arrival, Owed
from tests.support.ledger import Ledger
from tests.support.letters import Letter, text
from tests.support.proxy import Listener, deaf
from tests.support.raw import Props, content, integer, number, wire_instant
from tests.support.topology import declare

CASCADE: Final = Cascade("nservicebus-v2")
ENDPOINT: Final = "Billing"
LEVELS_FROM: Final = 1
ENVIRON: Final = {"TAKEOVER": json.dumps([{"cascade": CASCADE.kind, "levels_from": LEVELS_FROM}])}
_NOBODYS: Final = b"0" * 32
"""The id of a message that the cascade delivered without a daemon: it has no ``x-delayer-id``."""
_PAST = (b"x-first-death-", b"x-last-death-")


class Foreign(Ledger):
    """Publishes as an endpoint does. ``by_itself``: arrivals without any daemon."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more | {"exchange": ENDPOINT})
        self.by_itself = 0

    async def declare(self) -> None:
        """Declare the cascade, and the endpoint with its owner's binding."""
        endpoint = Topology(
            (Exchange(ENDPOINT, "topic"),), (), (Binding(CASCADE.delivery, ENDPOINT, "exchange", f"#.{ENDPOINT}"),)
        )
        await declare(self._url, CASCADE.topology() + endpoint)
        await super().declare()

    def letter(self, number_: int, owed: Owed) -> Letter:
        seconds, letter = owed.delay_ms // 1000, super().letter(number_, owed)
        headers = [
            (b"NServiceBus.TimeSent", text(wire_instant(owed.sent_ms).encode())),
            (b"NServiceBus.DeliverAt", text(wire_instant(owed.due_ms).encode())),
            (b"NServiceBus.Transport.RabbitMQ.DelayInSeconds", b"".join(number("I", seconds))),
        ]
        # Everything of the letter except its own delay headers.
        shape = [one for one in letter.said if one[0] not in (b"x-delay", b"x-deliver-at")]
        key = routing_key(seconds, ENDPOINT.encode())
        return letter._replace(routing_key=key, said=[*headers, *shape], kept=[*headers, *shape])

    def _compose(self, now_ms: int, delay_ms: int, absolute: bool | None) -> Outgoing:
        """Delays of whole seconds, at least two: the daemon does not take over shorter delays."""
        seconds = 2 + delay_ms // 1000
        one = super()._compose(now_ms, seconds * 1000, absolute=False)
        return one._replace(exchange=CASCADE.entry(seconds).encode())

    def listener(self) -> Listener:
        """Ignore readings: a message that the cascade delivers without a daemon has no reading."""
        return deaf

    def judge(self, number_: int, delivery: Delivery, at_ms: float) -> bool:
        owed = self.account.owed(number_)
        letter, props = self.letter(number_, owed), Props.decode(delivery.properties)
        sent = Props.decode(letter.properties)
        left = props.without(b"x-delayer-id", b"x-delayer-due", b"x-death", b"x-delivery-count", prefixes=_PAST)
        ids, dues = props.all(b"x-delayer-id"), props.all(b"x-delayer-due")
        if (
            delivery.body != letter.body
            or delivery.routing_key != letter.routing_key
            or sorted(left.headers or ()) != sorted(sent.headers or ())
            or _bare(left) != _bare(sent)
        ):
            self.account.take_changed(number_, at_ms, f"message {number_}: sent {letter}, received {delivery}")
            return True
        self.by_itself += not ids
        id, due_ms = (content(ids[0]), integer(dues[0])) if ids else (_NOBODYS, owed.due_ms)
        self.account.take(number_, Arrival(at_ms, id, due_ms, delivery.redelivered))
        return True


def _bare(props: Props) -> Props:
    """Without headers, and without the properties that the broker removes each time a message leaves a level."""
    return replace(props, headers=None, expiration=None)


async def levels_standing(fleet: Fleet) -> dict[str, int]:
    """The depth of each level of the other system that is not empty."""
    async with await Admin.connect(fleet.place.broker) as admin:
        depths = await admin.depths(level.name for level in CASCADE.levels())
    return {name: depth for name, depth in depths.items() if depth}
