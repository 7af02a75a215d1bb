"""Take a topology off a broker, without losing a message by accident."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from aiormq.channel import Channel as Wire
from aiormq.exceptions import ChannelClosed, ChannelNotFoundEntity

from delayer.broker.calls import delete_exchange, delete_queue, find_exchange, find_queue, unbind
from delayer.broker.errors import BrokerRefused
from delayer.broker.link import Link, answered
from delayer.core.topology import Binding, Exchange, Topology


class QueueState(NamedTuple):
    messages: int  # ready for delivery
    consumers: int


async def queue_state(link: Link, name: str) -> QueueState | None:
    """None where the queue is missing, or locked by a connection that owns it alone."""
    answer = await answered(link, lambda channel: find_queue(channel, name))
    if isinstance(answer, ChannelClosed):
        return None
    return QueueState(answer.message_count or 0, answer.consumer_count or 0)


@dataclass(slots=True)
class Removal:
    """What was done. ``left`` gives a reason for every thing of the topology that still stands."""

    removed: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


class Remover:
    """One removal; see :meth:`delayer.broker.admin.Admin.remove`.

    The broker offers "delete if empty", but quorum queues do not support it and answer by closing the connection.
    So we look first, and close the way in before we look for the last time.
    """

    def __init__(self, link: Link, topology: Topology, *, force: bool) -> None:
        self._link = link
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
        for queue in queues:
            if not await self._remove_queue(queue):
                return self._result
        return self._result

    def _ours(self, what: str, shared: bool) -> bool:
        if shared:
            self._result.left[what] = "shared with another system"
        return not shared

    async def _reasons_against(self, queues: list[str]) -> dict[str, str]:
        states = {name: await queue_state(self._link, name) for name in queues}
        reasons = {f"queue {name}": _reason(state) for name, state in states.items() if state is not None}
        return {what: reason for what, reason in reasons.items() if reason}

    async def _remove_exchange(self, exchange: Exchange) -> None:
        if isinstance(await answered(self._link, lambda channel: find_exchange(channel, exchange.name)), ChannelClosed):
            return
        for binding in self._topology.bindings:
            if binding.source == exchange.name:
                await self._unbind(binding)
        answer = await answered(self._link, self._delete_exchange(exchange.name))
        if isinstance(answer, ChannelClosed):
            self._result.left[f"exchange {exchange.name}"] = str(answer)
        else:
            self._result.removed.append(f"exchange {exchange.name}")

    def _delete_exchange(self, name: str) -> Callable[[Wire], Awaitable[object]]:
        return lambda channel: delete_exchange(channel, name, if_unused=not self._force)

    async def _unbind(self, binding: Binding) -> None:
        """A destination that is gone already took the binding with it."""
        _raise_unless_gone(await answered(self._link, lambda channel: unbind(channel, binding)))

    async def _remove_queue(self, name: str) -> bool:
        """False when it filled up meanwhile and stays."""
        state = await queue_state(self._link, name)
        if state is None:
            return True
        if not self._force and (reason := _reason(state)):
            self._result.left[f"queue {name}"] = reason
            return False
        _raise_unless_gone(await answered(self._link, lambda channel: delete_queue(channel, name)))
        self._result.removed.append(f"queue {name}")
        return True


def _reason(state: QueueState) -> str:
    if state.messages:
        return f"holds {state.messages} message{'s' * (state.messages != 1)}"
    return f"has {state.consumers} consumers" if state.consumers else ""


def _raise_unless_gone(answer: object) -> None:
    if isinstance(answer, ChannelClosed) and not isinstance(answer, ChannelNotFoundEntity):
        raise BrokerRefused(str(answer)) from answer
