"""Administration of a broker, over aio-pika: verify, inspect, remove. Not for the hot path.

It reads topologies as values. Parts that another system owns (``shared``) are never removed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from aiormq.exceptions import ChannelClosed, ChannelLockedResource, ChannelNotFoundEntity
from pamqp.commands import Basic as BasicMethods
from pamqp.commands import Exchange as ExchangeMethods
from pamqp.commands import Queue as QueueMethods

from delayer.amqp.framing import UncheckedMethod
from delayer.broker.admin_connection import AdminConnection
from delayer.broker.errors import BrokerRefused, BrokerUnreachable, TopologyFinding
from delayer.broker.management_api import Management, delayed_in, delayed_reason
from delayer.broker.pipelined_admin import DELAYS_FROM, PATIENCE, QueueDelete, exchange_look, queue_look
from delayer.broker.verify import Verifier
from delayer.core.clocks import ClockOffset
from delayer.core.readable import COUNTS_AGE
from delayer.core.topology import Binding, Exchange, Topology


class ExchangeDelete(UncheckedMethod, ExchangeMethods.Delete): ...


class ExchangeUnbind(UncheckedMethod, ExchangeMethods.Unbind): ...


class QueueUnbind(UncheckedMethod, QueueMethods.Unbind): ...


class QueueState(NamedTuple):
    messages: int  # Messages ready for delivery.
    consumers: int


@dataclass(slots=True)
class Removal:
    """The result of a removal. ``left`` gives a reason for every part of the topology that still exists."""

    removed: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


LEADER_SECONDS: Final = 0.25
"""If the leader of a quorum queue does not answer for so long, RabbitMQ counts 0 messages."""
LEADER_TRIES: Final = 40


class Remover:
    """One removal of a topology; see :meth:`Admin.remove`.

    Quorum queues do not support the broker's "delete if empty"; they close the connection. So this counts the messages
    first, and removes each exchange before the last count of its queue.
    """

    def __init__(self, admin: Admin, topology: Topology, *, force: bool) -> None:
        self._admin = admin
        self._ask = admin.connection.ask
        self._topology = topology
        self._force = force
        self._result = Removal()

    async def run(self) -> Removal:
        exchanges = [one for one in self._topology.exchanges if self._ours(f"exchange {one.name}", one.shared)]
        queues = dict.fromkeys(one.name for one in self._topology.queues if self._ours(f"queue {one.name}", one.shared))
        if not self._force and (reasons := await self._reasons_against(list(queues))):
            self._result.left |= reasons
            return self._result
        for exchange in exchanges:
            await self._remove_exchange(exchange)
            if exchange.name in queues and not await self._remove_queue(exchange.name):
                return self._result
            queues.pop(exchange.name, None)
        if not self._force and (reasons := await self._delayed_in(queues)):
            # A publisher may have sent them until the exchanges were removed.
            self._result.left |= reasons
            return self._result
        for queue in queues:
            if not await self._remove_queue(queue):
                return self._result
        return self._result

    def _ours(self, what: str, shared: bool) -> bool:
        if shared:
            self._result.left[what] = "shared with another system"
        return not shared

    async def _state(self, name: str) -> QueueState | None:
        """The state of a queue, asked again while its leader is slow. Raises BrokerUnreachable if it stays slow."""
        for _ in range(LEADER_TRIES):
            began = time.monotonic()
            state = await self._admin.state(name)
            if state is None or state.messages or self._force or time.monotonic() - began < LEADER_SECONDS:
                return state
        slow = f"queue {name!r} did not answer within {LEADER_SECONDS * 1000:.0f} ms, so its messages are not known"
        raise BrokerUnreachable(f"{slow}; on a slow line use --force")

    async def _reasons_against(self, queues: list[str]) -> dict[str, str]:
        states = {name: await self._state(name) for name in queues}
        reasons = {name: _reason(state) for name, state in states.items() if state is not None}
        found = {f"queue {name}": reason for name, reason in reasons.items() if reason}
        return found or await self._delayed_in(reasons)

    async def _delayed_in(self, queues: Collection[str]) -> dict[str, str]:
        delayed = await self._admin.delayed(queues)
        return {f"queue {name}": reason for name, count in delayed.items() if (reason := delayed_reason(count))}

    async def _remove_exchange(self, exchange: Exchange) -> None:
        if isinstance(await self._ask(exchange_look(exchange.name)), ChannelClosed):
            return
        for binding in self._topology.bindings:
            if binding.source == exchange.name:
                await self._unbind(binding)
        answer = await self._ask(ExchangeDelete(exchange=exchange.name, if_unused=not self._force))
        if isinstance(answer, ChannelClosed):
            self._result.left[f"exchange {exchange.name}"] = str(answer)
        else:
            self._result.removed.append(f"exchange {exchange.name}")

    async def _unbind(self, binding: Binding) -> None:
        """Remove a binding. If its destination is gone, the binding is gone too."""
        source, key, destination = binding.source, binding.key, binding.destination
        _accepted(
            await self._ask(
                QueueUnbind(queue=destination, exchange=source, routing_key=key)
                if binding.destination_kind == "queue"
                else ExchangeUnbind(destination=destination, source=source, routing_key=key)
            )
        )

    async def _remove_queue(self, name: str) -> bool:
        """Remove a queue. Returns False if it has new messages, and so stays."""
        state = await self._state(name)
        if state is None:
            return True
        if not self._force and (reason := _reason(state)):
            self._result.left[f"queue {name}"] = reason
            return False
        # This deletes the queue's messages too: quorum queues have no "if empty".
        _accepted(await self._ask(QueueDelete(queue=name)))
        self._result.removed.append(f"queue {name}")
        return True


def _reason(state: QueueState) -> str:
    if state.messages:
        return f"holds {state.messages} message{'s' * (state.messages != 1)}"
    return f"has {state.consumers} consumers" if state.consumers else ""


class Admin:
    """One connection to one vhost. Every method may raise BrokerUnreachable and BrokerRefused."""

    def __init__(self, connection: AdminConnection, management: Management | None) -> None:
        self.connection = connection
        self._management = management

    @classmethod
    async def connect(
        cls, urls: str, *, management_url: str | None = None, name: str = "delayer admin", patience: float = PATIENCE
    ) -> Self:
        """Connect to one of ``urls``; scheme and query configure TLS. ``patience``: seconds, for each call.

        ``management_url`` (``http://user:password@host:15672``) lets verify() see bindings and policies; it uses the
        TLS settings of ``urls``. Raises BrokerUnreachable, BrokerRefused.
        """
        management = Management.beside(urls, management_url, timeout=patience)
        return cls(await AdminConnection.open(urls, name=name, patience=patience), management)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.connection.close()

    @property
    def clock(self) -> ClockOffset | None:
        """The broker's clock, by the last answer of the management API; None without one."""
        return None if self._management is None else self._management.clock

    async def verify(self, topology: Topology) -> list[TopologyFinding]:
        """Compare the broker with the topology, without changes. All is well if no finding has severity "error".

        Each part is declared passively, and then actively. A part deleted in the microseconds between is created again.
        """
        return await Verifier(self.connection, topology, self._management).findings()

    async def depths(self, queues: Iterable[str]) -> dict[str, int | None]:
        """Messages ready in each queue; None if it is missing, or another connection owns it exclusively."""
        states = {name: await self.state(name) for name in queues}
        return {name: state.messages if state else None for name, state in states.items()}

    async def state(self, queue: str) -> QueueState | None:
        """Messages and consumers of a queue; None as in :meth:`depths`."""
        answer = await self.connection.ask(queue_look(queue))
        if not isinstance(answer, QueueMethods.DeclareOk):
            return None
        return QueueState(answer.message_count or 0, answer.consumer_count or 0)

    async def delayed(self, queues: Collection[str], *, fresh: bool = True) -> dict[str, int | None]:
        """The messages of each queue that the broker itself delays, which AMQP does not show. None: unknown, because
        the management API is not configured, or out of reach.

        ``fresh``: wait until the broker's counts are no older than this call.
        """
        if not queues or self.connection.version < DELAYS_FROM:
            return dict.fromkeys(queues, 0)
        await asyncio.sleep(COUNTS_AGE if fresh and self._management is not None else 0)
        return await delayed_in(queues, self._management)

    async def may_consume(self, queue: str) -> bool:
        """Whether this user may read the queue, without reading a message. The broker checks the permission first, and
        then refuses the invalid priority of this request. True if the queue is missing."""
        try:
            await self.connection.ask(BasicMethods.Consume(queue=queue, arguments={"x-priority": "none"}))
        except BrokerRefused:
            return False
        return True

    async def queue_exists(self, name: str) -> bool:
        answer = await self.connection.ask(queue_look(name))
        return isinstance(answer, ChannelLockedResource) or _accepted(answer)

    async def exchange_exists(self, name: str) -> bool:
        return not name or _accepted(await self.connection.ask(exchange_look(name)))

    async def remove(self, topology: Topology, *, force: bool = False) -> Removal:
        """Remove our parts in the order of the topology: a cascade from its top, each exchange before its queue. So no
        message enters a level after its queue is gone.

        Without ``force`` this removes nothing while a queue has consumers or messages. The same holds for a queue that
        may have hidden messages. An exchange stays if others bound something to it. If a message enters a level
        meanwhile, its queue and all levels below stay; call this again when the message has left. The broker's counts
        do not include unacknowledged messages, and those in a dead-letter worker, so stop the daemon first.
        """
        return await Remover(self, topology, force=force).run()


def _accepted(answer: object) -> bool:
    """Whether the broker did as asked; False if the part is missing. Raises BrokerRefused for any other refusal."""
    if isinstance(answer, ChannelClosed) and not isinstance(answer, ChannelNotFoundEntity):
        raise BrokerRefused(str(answer)) from answer
    return not isinstance(answer, ChannelNotFoundEntity)
