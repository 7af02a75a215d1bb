"""Compare a broker with a topology, leaving nothing behind on it.

What AMQP can tell: whether a thing exists (a passive declaration) and whether it is as we want it (declaring again what
exists changes nothing, or is refused). It cannot tell bindings; those come from the management API, exactly. Without
it, the zero path of our own cascade is proved by messages that travel it, and the rest is reported as not seen.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import Literal, NamedTuple

from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel as Wire
from aiormq.exceptions import ChannelClosed, ChannelNotFoundEntity, DeliveryError
from pamqp.commands import Basic

from delayer.broker.errors import BrokerRefused, BrokerUnreachable
from delayer.broker.link import Link, answered, declare_exchange, declare_queue, find_exchange, find_queue
from delayer.broker.management_api import Management, policies_in_force
from delayer.core.cascade import LEVELS, Cascade, bindable, delivery_binding, routing_key
from delayer.core.topology import Binding, Exchange, Queue, Topology

Severity = Literal["error", "note", "unknown"]

# A policy with one of these changes when, or whether, a message leaves a queue. Of two TTLs the smaller counts.
RISKY_POLICY_KEYS = frozenset(
    {"message-ttl", "expires", "max-length", "max-length-bytes", "overflow", "delivery-limit"}
    | {"dead-letter-exchange", "dead-letter-routing-key", "dead-letter-strategy"}
)


@dataclass(frozen=True, slots=True)
class Finding:
    """``severity``: "error" is off and has to be put right, "note" is worth knowing, "unknown" could not be seen."""

    kind: Literal["exchange", "queue", "binding", "policy"]
    name: str
    expected: str
    found: str
    severity: Severity = "error"

    def __str__(self) -> str:
        return f"{self.severity}: {self.kind} {self.name}: expected {self.expected}, found {self.found}"


class Verifier:
    """One comparison. ``cascade``: the one in the topology, whose zero path may be tried; None tries nothing."""

    def __init__(self, link: Link, topology: Topology, cascade: Cascade | None, management: Management | None) -> None:
        self._link = link
        self._topology = topology
        self._cascade = cascade
        self._management = management

    async def findings(self) -> list[Finding]:
        """Everything that is off or could not be seen. Raises BrokerUnreachable.

        A missing permission, or a management API that does not answer, is a finding of severity "unknown".
        """
        things = [await self._thing(exchange) for exchange in self._topology.exchanges]
        things += [await self._thing(queue) for queue in self._topology.queues]
        found = [finding for finding in things if finding is not None]
        missing = {finding.name for finding in found if finding.found == "nothing"}
        if self._management is not None:
            try:
                return found + await self._told(self._management, missing) + await self._governed(self._management)
            except (BrokerRefused, BrokerUnreachable) as error:
                found.append(self._unseen(f"{error}"))
        else:
            found.append(self._unseen("AMQP does not tell bindings, and no management_url is configured"))
        return found + await self._tried(missing)

    async def _thing(self, wanted: Exchange | Queue) -> Finding | None:
        kind: Literal["exchange", "queue"] = "exchange" if isinstance(wanted, Exchange) else "queue"
        try:
            answer = await self._ask(wanted)
        except BrokerRefused as error:
            return Finding(kind, wanted.name, str(wanted), str(error), "unknown")
        if isinstance(answer, ChannelNotFoundEntity):
            return Finding(kind, wanted.name, str(wanted), "nothing")
        return Finding(kind, wanted.name, str(wanted), str(answer)) if answer is not None else None

    async def _ask(self, wanted: Exchange | Queue) -> ChannelClosed | None:
        """Passively first: an active declaration of what is missing would make it."""
        name = wanted.name
        if isinstance(wanted, Exchange):
            exchange = wanted
            exists = await answered(self._link, lambda channel: find_exchange(channel, name))
            if isinstance(exists, ChannelClosed):
                return exists
            return await answered(self._link, lambda channel: declare_exchange(channel, exchange))
        queue = wanted
        counted = await answered(self._link, lambda channel: find_queue(channel, name))
        if isinstance(counted, ChannelClosed):
            return counted
        return await answered(self._link, lambda channel: declare_queue(channel, queue))

    async def _told(self, management: Management, missing: set[str]) -> list[Finding]:
        """Bindings, from the management API."""
        found: list[Finding] = []
        sources = dict.fromkeys([exchange.name for exchange in self._topology.exchanges])
        sources |= dict.fromkeys(binding.source for binding in self._topology.bindings)
        for source in sources:
            if source not in missing:
                rows = await management.bindings_from(source)
                # Bindings with arguments are none of ours; on topic and fanout exchanges they route all the same.
                present = {binding for binding, arguments in rows if not arguments}
                found += self._compared(source, present, {binding for binding, _ in rows}, missing)
        return found

    async def _governed(self, management: Management) -> list[Finding]:
        """Policies that change what the arguments say."""
        expected = "no policy about expiry, length or dead letters"
        policies = await management.policies()
        return [
            Finding("policy", queue.name, expected, f"{policy.name!r} with {risky}")
            for queue in self._topology.queues
            for policy in policies_in_force(policies, queue)
            if (risky := {key: value for key, value in policy.definition.items() if key in RISKY_POLICY_KEYS})
        ]

    def _compared(
        self, source: str, present: set[Binding], everything: set[Binding], missing: set[str]
    ) -> list[Finding]:
        wanted = {binding for binding in self._topology.bindings if binding.source == source}
        found = [
            Finding("binding", source, str(binding), "nothing")
            for binding in self._topology.bindings
            if binding in wanted - present and binding.destination not in missing
        ]
        exchange = next((one for one in self._topology.exchanges if one.name == source), None)
        if exchange is None or exchange.shared:
            return found
        severity: Severity = "error" if exchange.closed else "note"
        for binding in sorted(everything - wanted, key=str):
            if exchange.closed or not _is_address(binding.key):
                found.append(Finding("binding", source, "no other binding", str(binding), severity))
        return found

    async def _tried(self, missing: set[str]) -> list[Finding]:
        """The zero path, from messages, where that is possible without leaving anything behind."""
        cascade = self._cascade
        if cascade is None or missing & {one.name for one in cascade.topology().exchanges}:
            return []
        try:
            answer = await answered(self._link, lambda channel: try_zero_path(channel, cascade))
        except BrokerRefused as refused:  # the daemon's user need not have the right to a queue of the probe's
            return [self._unseen(f"the zero path could not be tried: {refused}")]
        if isinstance(answer, ChannelClosed):
            return [self._unseen(f"the zero path could not be tried: {answer}")]
        found = [
            Finding("binding", "*", "no other binding", f"one that leads messages without delay into queue {queue}")
            for queue in sorted(answer.detours)
        ]
        if answer.breaks_at is not None:
            name = cascade.level(answer.breaks_at)
            wanted = next(
                b for b in cascade.topology().bindings if b.source == name and b.destination_kind == "exchange"
            )
            found.append(Finding("binding", name, str(wanted), "a message without delay is not passed on here"))
        return found

    def _unseen(self, reason: str) -> Finding:
        return Finding("binding", "*", f"{len(self._topology.bindings)} bindings", reason, "unknown")


def _is_address(key: str) -> bool:
    """A key as :func:`delayer.core.cascade.delivery_binding` makes it: an address bound by a user, as it should be."""
    stars = "*." * LEVELS
    return key.startswith(stars) and bindable(key[len(stars) :].encode())


QUIET_SECONDS = 0.3


class ZeroPath(NamedTuple):
    """``breaks_at``: the lowest level whose exchange does not pass a message without delay on, None when all do.

    ``detours``: level queues that a wrong binding led a copy of such a message through.
    """

    breaks_at: int | None
    detours: frozenset[str]


async def try_zero_path(channel: Wire, cascade: Cascade, *, patience: float = 5.0) -> ZeroPath:
    """Let one message enter at every level, addressed to a temporary queue that nobody else sees.

    ``patience``: seconds to wait for those that the broker took. Their expiration of 0 sends a copy that a wrong
    binding leads into a level's queue on at once; we stay a little to meet it, and one that is even later is a stray.
    """
    arrived: set[int] = set()
    detours: set[str] = set()
    changed = asyncio.Event()

    async def on_message(message: DeliveredMessage) -> None:
        arrived.add(int(message.body))
        detours.update(_queues_of_death(message))
        changed.set()

    address = f"delayer.probe.{uuid.uuid4().hex}"
    # Exclusive: should anything below fail, it goes with the connection.
    await channel.queue_declare(address, exclusive=True)
    await channel.queue_bind(address, cascade.delivery, delivery_binding(address))
    consumer = await channel.basic_consume(address, on_message, no_ack=True)
    key = routing_key(0, address.encode()).decode()
    taken = {level for level in range(LEVELS) if await _taken(channel, cascade.level(level), key, level)}
    try:
        async with asyncio.timeout(patience):
            while not taken <= arrived:
                await changed.wait()
                changed.clear()
            while True:
                async with asyncio.timeout(QUIET_SECONDS):
                    await changed.wait()
                changed.clear()
    except TimeoutError:
        pass  # what did not arrive by now counts as not passed on
    await channel.basic_cancel(str(consumer.consumer_tag))
    await channel.queue_delete(address)
    return ZeroPath(min(set(range(LEVELS)) - arrived, default=None), frozenset(detours))


def _queues_of_death(message: DeliveredMessage) -> list[str]:
    """The queues that the message expired in."""
    deaths = (message.header.properties.headers or {}).get("x-death")
    return [str(death["queue"]) for death in deaths if isinstance(death, dict)] if isinstance(deaths, list) else []


async def _taken(channel: Wire, exchange: str, key: str, level: int) -> bool:
    """Whether the broker routed the probe anywhere."""
    properties = Basic.Properties(delivery_mode=1, expiration="0", message_id=f"{key}.{level}")
    try:
        await channel.basic_publish(
            str(level).encode(), exchange=exchange, routing_key=key, mandatory=True, properties=properties
        )
    except DeliveryError:
        return False
    return True
