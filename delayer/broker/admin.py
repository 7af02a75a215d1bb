"""Administration of a broker over aio-pika: verify, inspect, remove. Not for the hot path.

Parts that another system owns (``shared``) are never removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self
from urllib.parse import quote
from uuid import uuid4

from pamqp.base import Frame
from pamqp.commands import Basic as BasicMethods
from pamqp.commands import Exchange as ExchangeMethods
from pamqp.commands import Queue as QueueMethods

from delayer.amqp.errors import ChannelClosed, ReplyCode
from delayer.amqp.framing import unchecked
from delayer.broker.admin_connection import AdminConnection
from delayer.broker.errors import BrokerRefused, BrokerUnreachable, TopologyFinding
from delayer.broker.management_api import Management, delayed_in, delayed_reason
from delayer.broker.pipelined_admin import (
    DELAYS_FROM,
    PATIENCE,
    Questions,
    QueueDelete,
    QueueState,
    accepted,
    check_exchange,
    check_queue,
)
from delayer.broker.verify import Verifier
from delayer.core.clocks import ClockOffset
from delayer.core.readable import COUNTS_AGE
from delayer.core.topology import Binding, Exchange, Topology

ExchangeDelete = unchecked(ExchangeMethods.Delete)
ExchangeUnbind = unchecked(ExchangeMethods.Unbind)
QueueUnbind = unchecked(QueueMethods.Unbind)


def _unbinding(binding: Binding) -> Frame:
    source, key, destination = binding.source, binding.key, binding.destination
    if binding.destination_kind == "queue":
        return QueueUnbind(queue=destination, exchange=source, routing_key=key)
    return ExchangeUnbind(destination=destination, source=source, routing_key=key)


@dataclass(slots=True)
class Removal:
    """The result of a removal. ``left``: the parts of the topology that still exist, with the reason."""

    removed: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


@dataclass
class Remover:
    """One removal of a topology; see :meth:`Admin.remove`.

    Quorum queues do not support "delete if empty": the broker closes the connection. So this counts the messages first,
    and removes each exchange before the last count of its queue.
    """

    admin: Admin
    topology: Topology
    force: bool
    result: Removal = field(default_factory=Removal)

    async def run(self) -> Removal:
        exchanges = [one for one in self.topology.exchanges if self._ours(f"exchange {one.name}", one.shared)]
        queues = dict.fromkeys(one.name for one in self.topology.queues if self._ours(f"queue {one.name}", one.shared))
        if not self.force and (reasons := await self._reasons_against(list(queues))):
            self.result.left |= reasons
            return self.result
        for exchange in exchanges:
            await self._remove_exchange(exchange)
            if exchange.name in queues and not await self._remove_queue(exchange.name):
                return self.result
            queues.pop(exchange.name, None)
        if not self.force and (reasons := await self._delayed_in(queues)):
            # A publisher may have sent them until the exchanges were removed.
            self.result.left |= reasons
            return self.result
        for queue in queues:
            if not await self._remove_queue(queue):
                return self.result
        return self.result

    def _ours(self, what: str, shared: bool) -> bool:
        if shared:
            self.result.left[what] = "shared with another system"
        return not shared

    async def _reasons_against(self, queues: list[str]) -> dict[str, str]:
        states = {name: await self.admin.state(name, doubtful=self.force) for name in queues}
        reasons = {name: _reason(state) for name, state in states.items() if state is not None}
        found = {f"queue {name}": reason for name, reason in reasons.items() if reason}
        return found or await self._unproven(reasons) or await self._delayed_in(reasons)

    async def _unproven(self, queues: Collection[str]) -> dict[str, str]:
        """AMQP counts no message in a queue whose members are down, so try to get a message, and count again."""
        for name in queues:
            try:
                if await self.admin.connection.has_message(name):
                    return {f"queue {name}": "holds a message"}
                if (state := await self.admin.state(name)) is not None and (reason := _reason(state)):
                    return {f"queue {name}": reason}
            except BrokerUnreachable as silent:
                return {f"queue {name}": f"does not answer what needs a majority of its members: {silent}"}
        return {}

    async def _delayed_in(self, queues: Collection[str]) -> dict[str, str]:
        levels = [one.name for one in self.topology.queues if one.forwards]
        delayed = await self.admin.delayed(queues, levels)
        return {f"queue {name}": reason for name, count in delayed.items() if (reason := delayed_reason(count))}

    async def _remove_exchange(self, exchange: Exchange) -> None:
        if isinstance(await self.admin.connection.ask(check_exchange(exchange.name)), ChannelClosed):
            return
        for binding in self.topology.bindings:
            if binding.source == exchange.name:
                accepted(
                    await self.admin.connection.ask(_unbinding(binding))
                )  # If its destination is gone, the binding is gone too.
        answer = await self.admin.connection.ask(ExchangeDelete(exchange=exchange.name, if_unused=not self.force))
        if isinstance(answer, ChannelClosed):
            self.result.left[f"exchange {exchange.name}"] = answer.text
        else:
            self.result.removed.append(f"exchange {exchange.name}")

    async def _remove_queue(self, name: str) -> bool:
        """Remove a queue. Returns False if it has new messages, and so stays."""
        state = await self.admin.state(name, doubtful=self.force)
        if state is None:
            return True
        if not self.force and (reason := _reason(state)):
            self.result.left[f"queue {name}"] = reason
            return False
        if not self.force and (reasons := await self._unproven([name])):
            self.result.left |= reasons
            return False
        # Also deletes the queue's messages, because quorum queues do not have "if empty".
        accepted(await self.admin.connection.ask(QueueDelete(queue=name)))
        self.result.removed.append(f"queue {name}")
        return True


def _reason(state: QueueState) -> str:
    if state.messages:
        return f"holds {state.messages} message{'s' * (state.messages != 1)}"
    return f"has {state.consumers} consumers" if state.consumers else ""


@dataclass
class Admin(Questions):
    """One connection to one vhost. Every method may raise BrokerUnreachable and BrokerRefused."""

    connection: AdminConnection
    management: Management | None

    @classmethod
    async def connect(
        cls, urls: str, *, management_url: str | None = None, name: str = "delayer admin", patience: float = PATIENCE
    ) -> Self:
        """Connect to one of ``urls``, whose parameters configure TLS. ``patience``: timeout of each call, in seconds.

        ``management_url`` (``http://user:password@host:15672``) lets verify() read bindings and policies, with the TLS
        settings of ``urls``. Raises BrokerUnreachable, BrokerRefused.
        """
        management = Management.beside(urls, management_url, timeout=patience)
        return cls(await AdminConnection.open(urls, name=name, patience=patience), management)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.connection.close()

    @property
    def clock(self) -> ClockOffset | None:
        """The broker's clock by the last answer of the management API, if any."""
        return None if self.management is None else self.management.clock

    async def verify(self, topology: Topology) -> list[TopologyFinding]:
        """Compare the broker with the topology, without changes. They match if no finding has severity "error".

        Declares each part passively, then actively. A part deleted in the microseconds between is created again.
        """
        return await Verifier(self.connection, topology, self.management).findings()

    async def depths(self, queues: Iterable[str]) -> dict[str, int | None]:
        """Return the number of messages ready in each queue; None if it is missing, or exclusive to another
        connection."""
        states = {name: await self.state(name) for name in queues}
        return {name: state.messages if state else None for name, state in states.items()}

    async def state(self, queue: str, *, doubtful: bool = False) -> QueueState | None:
        """Messages and consumers of a queue; None as in :meth:`depths`. ``doubtful``: see :meth:`states`."""
        state = (await self.states([queue], self.connection.patience, doubtful=doubtful))[queue]
        return state if isinstance(state, QueueState) else None

    async def ask(self, questions: Sequence[Frame]) -> list[Frame | ChannelClosed]:
        return [await self.connection.ask(one) for one in questions]

    async def delayed(
        self, queues: Collection[str], levels: Collection[str] = (), *, fresh: bool = True
    ) -> dict[str, int | None]:
        """Count the messages of each queue that the broker itself delays or, from ``levels``, is forwarding. AMQP does
        not report them. None if unknown, because the management API is not configured or unreachable.

        ``fresh``: wait until the broker's counts are no older than this call.
        """
        asked = [name for name in queues if name in levels or self.connection.version >= DELAYS_FROM]
        if not asked:
            return dict.fromkeys(queues, 0)
        await asyncio.sleep(COUNTS_AGE if fresh and self.management is not None else 0)
        return dict.fromkeys(queues, 0) | await delayed_in(asked, self.management)

    async def may_consume(self, queue: str) -> bool:
        """Whether this user may read the queue; True if it is missing. Reads no message: the broker checks the
        permission first, and then rejects the invalid priority of this request."""
        try:
            await self.connection.ask(BasicMethods.Consume(queue=queue, arguments={"x-priority": "none"}))
        except BrokerRefused:
            return False
        return True

    async def may_bind(self, binding: Binding) -> bool:
        """Whether this user may write to the destination and read from the source, without a change: it removes a
        binding that does not exist."""
        try:
            await self.connection.ask(_unbinding(replace(binding, key=f"delayer.check-{uuid4()}")))
        except BrokerRefused:
            return False
        return True

    async def alarms(self) -> list[str]:
        """The resource alarms of the broker's nodes; empty without a management API."""
        kinds = ("mem_alarm", "disk_free_alarm")
        shape = [{"name": str, **dict.fromkeys(kinds, bool | None)}]
        path = f"nodes?columns=name,{','.join(kinds)}"
        rows = [] if self.management is None else await self.management.get(path, shape)
        return [f"{kind} on {name}" for name, *on in rows for kind, is_on in zip(kinds, on, strict=True) if is_on]

    async def sources_of(self, queue: str) -> set[str]:
        """The exchanges that ``queue`` is bound to; empty without a management API, or without the queue."""
        if self.management is None or not await self.queue_exists(queue):
            return set()
        path = f"queues/{self.management.vhost}/{quote(queue, safe='')}/bindings"
        return {binding.source for binding, _ in await self.management.bindings(path)}

    async def queue_exists(self, name: str) -> bool:
        answer = await self.connection.ask(check_queue(name))
        return (isinstance(answer, ChannelClosed) and answer.code == ReplyCode.RESOURCE_LOCKED) or accepted(answer)

    async def remove(self, topology: Topology, *, force: bool = False) -> Removal:
        """Remove our parts in the order of the topology: a cascade from its top, each exchange before its queue. So a
        message cannot enter a level after its queue is gone.

        Without ``force``, removes nothing while a queue has consumers, messages, or possibly hidden messages. An
        exchange with foreign bindings stays. If a message enters a level during the removal, its queue and all levels
        below stay; call this again when the message has left. AMQP does not count unacknowledged messages, so stop the
        daemon first. It does not count messages that a level is forwarding either, so without a management API the
        levels stay.
        """
        return await Remover(self, topology, force).run()
