"""Short requests to a broker with delayer's own AMQP client, pipelined: declare, check, and count.

pamqp accepts only the names that AMQP 0-9-1 allows. RabbitMQ accepts any 255 bytes of UTF-8, and users need them, so
these frames leave the check to the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

from pamqp.base import Frame
from pamqp.commands import Exchange as ExchangeMethods
from pamqp.commands import Queue as QueueMethods

from delayer.amqp.address import Address
from delayer.amqp.channel import Channel
from delayer.amqp.connection import Connection
from delayer.amqp.errors import ACCESS_REFUSED, AccessRefused, ChannelClosed
from delayer.broker.errors import BrokerRefused, BrokerUnreachable
from delayer.core.cascade import LEVELS, Cascade
from delayer.core.topology import Binding, Exchange, Queue, Topology


@dataclass(frozen=True, slots=True)
class LevelState:
    """One level of a cascade. ``depth``: messages ready in its queue, None if the queue is missing."""

    level: int
    name: str
    ttl_ms: int
    depth: int | None


@dataclass(frozen=True, slots=True)
class CascadeDepths:
    """The output of ``topology show``. ``queues``: depths of the queues around the cascade, None for a missing one.
    ``hidden``: queues that the broker does not show to this user; their depths are None too."""

    kind: str
    delivery: str
    levels: tuple[LevelState, ...]
    queues: dict[str, int | None]
    hidden: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The fields as a dict, for ``--json``."""
        return asdict(self)


class _Unjudged:
    """A frame without pamqp's check of names; the broker checks them."""

    def validate(self) -> None:
        return


class ExchangeDeclare(_Unjudged, ExchangeMethods.Declare): ...


class ExchangeDelete(_Unjudged, ExchangeMethods.Delete): ...


class ExchangeBind(_Unjudged, ExchangeMethods.Bind): ...


class ExchangeUnbind(_Unjudged, ExchangeMethods.Unbind): ...


class QueueDeclare(_Unjudged, QueueMethods.Declare): ...


class QueueDelete(_Unjudged, QueueMethods.Delete): ...


class QueueBind(_Unjudged, QueueMethods.Bind): ...


class QueueUnbind(_Unjudged, QueueMethods.Unbind): ...


def exchange_frame(wanted: Exchange) -> ExchangeDeclare:
    return ExchangeDeclare(
        exchange=wanted.name, exchange_type=wanted.type, durable=wanted.durable, arguments=dict(wanted.arguments)
    )


def queue_frame(wanted: Queue) -> QueueDeclare:
    """A declaration. pamqp sends an integer in the smallest type that holds it: 64 bits for the TTLs from level 22 up.

    The broker compares values without their integer types, so declarations of other systems' clients are equal to ours.
    """
    return QueueDeclare(queue=wanted.name, durable=wanted.durable, arguments=dict(wanted.arguments))


def binding_frame(wanted: Binding) -> QueueBind | ExchangeBind:
    if wanted.destination_kind == "queue":
        return QueueBind(queue=wanted.destination, exchange=wanted.source, routing_key=wanted.key)
    return ExchangeBind(destination=wanted.destination, source=wanted.source, routing_key=wanted.key)


def unbinding_frame(wanted: Binding) -> QueueUnbind | ExchangeUnbind:
    if wanted.destination_kind == "queue":
        return QueueUnbind(queue=wanted.destination, exchange=wanted.source, routing_key=wanted.key)
    return ExchangeUnbind(destination=wanted.destination, source=wanted.source, routing_key=wanted.key)


def exchange_look(name: str) -> ExchangeDeclare:
    return ExchangeDeclare(exchange=name, passive=True)


def queue_look(name: str) -> QueueDeclare:
    return QueueDeclare(queue=name, passive=True)


T = TypeVar("T")

PATIENCE: Final = 30.0
"""Seconds without an answer after which the broker counts as unreachable. A quorum queue waits for an election."""
CHANNELS: Final = 32
"""The most open channels for questions that the broker may answer by closing the channel."""


class PipelinedAdmin:
    """One connection; see :func:`pipelined_admin`. Every method may raise BrokerLost."""

    def __init__(self, connection: Connection, patience: float) -> None:
        self._connection = connection
        self._patience = patience

    async def declared(self, wanted: Topology) -> bool:
        """Declare a topology, the bindings last. Returns False if the broker refused a part: then earlier parts exist
        and later ones do not. Admin.declare reports the reason."""
        channel = await self._channel()
        methods: list[tuple[Frame, type[Frame]]] = []
        methods += [(exchange_frame(one), ExchangeMethods.DeclareOk) for one in wanted.exchanges]
        methods += [(queue_frame(one), QueueMethods.DeclareOk) for one in wanted.queues]
        for binding in wanted.bindings:
            frame = binding_frame(binding)
            answer = QueueMethods.BindOk if isinstance(frame, QueueBind) else ExchangeMethods.BindOk
            methods.append((frame, answer))
        answers = await self._all([channel.call(*method) for method in methods])
        await channel.close()
        return not any(isinstance(one, ChannelClosed) for one in answers)

    async def exists(self, queue: str) -> bool:
        """Whether the queue exists and no other connection owns it. RabbitMQ 4.3 shows a queue only to users with the
        configure permission; for others it counts as missing."""
        return isinstance((await self.depths([queue]))[queue], int)

    async def cascade_depths(self, cascade: Cascade, queues: Iterable[str] = ()) -> CascadeDepths:
        """Levels with their depths, and the depths of ``queues`` and of the strays queue.

        A cascade without its first and its last level counts as missing, because the broker logs each request for a
        missing queue. Queues without permission are hidden: in store mode the daemon has no rights in the cascade, and
        RabbitMQ 4.3 then hides it. Raises BrokerRefused if all queues are hidden.
        """
        wanted = list(queues)
        first, last = cascade.level(LEVELS - 1), cascade.level(0)
        around = [*wanted, *([cascade.strays] if cascade.strays else [])]
        every = [*(level.name for level in cascade.levels()), *around]
        inner = [level.name for level in cascade.levels() if level.name not in (first, last)]
        answers = await self.depths(name for name in every if name not in inner)
        if all(_forbidden(one) for one in answers.values()):
            raise BrokerRefused(str(answers[first]))
        there = isinstance(answers[first], int) or isinstance(answers[last], int)
        answers |= await self.depths(inner) if there else dict.fromkeys(inner, answers[first])
        hidden = [name for name in every if _forbidden(answers[name])]
        depths = {name: None if isinstance(one, ChannelClosed) else one for name, one in answers.items()}
        levels = (LevelState(one.number, one.name, one.ttl_ms, depths[one.name]) for one in cascade.levels())
        return CascadeDepths(
            cascade.kind, cascade.delivery, tuple(levels), {name: depths[name] for name in around}, tuple(hidden)
        )

    async def depths(self, queues: Iterable[str]) -> dict[str, int | ChannelClosed]:
        """Messages ready in each queue, or the broker's refusal."""
        names = list(queues)
        room = asyncio.Semaphore(min(CHANNELS, self._connection.channel_max))

        async def look(queue: str) -> int:
            async with room:
                channel = await self._connection.channel()
                found = await channel.call(queue_look(queue), QueueMethods.DeclareOk)
                await channel.close()
                return found.message_count or 0

        return dict(zip(names, await self._all([look(name) for name in names]), strict=True))

    async def _channel(self) -> Channel:
        opened = (await self._all([self._connection.channel()]))[0]
        if isinstance(opened, ChannelClosed):
            raise opened
        return opened

    async def _all(self, questions: Iterable[Coroutine[Any, Any, T]]) -> list[T | ChannelClosed]:
        """The answers in order; a refusal is an answer. Raises the error that ended the connection."""
        tasks = [asyncio.create_task(question) for question in questions]
        waiting = set(tasks)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, timeout=self._patience, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise BrokerUnreachable(f"no answer within {self._patience:g} s")
        finally:
            for task in waiting:
                task.cancel()
            lost = [error for task in tasks if (error := _loss(task)) is not None]
        if lost:
            raise lost[0]
        return [_answer(task) for task in tasks]


def _forbidden(answer: int | ChannelClosed) -> bool:
    return isinstance(answer, ChannelClosed) and answer.code == ACCESS_REFUSED


def _loss(task: asyncio.Task[object]) -> BaseException | None:
    """The error that ended this question without an answer. A refusal (ChannelClosed) is an answer."""
    error = task.exception() if task.done() and not task.cancelled() else None
    return None if isinstance(error, ChannelClosed) else error


def _answer(task: asyncio.Task[T]) -> T | ChannelClosed:
    error = task.exception()
    return error if isinstance(error, ChannelClosed) else task.result()


@asynccontextmanager
async def pipelined_admin(url: str, name: str, *, patience: float = PATIENCE) -> AsyncIterator[PipelinedAdmin]:
    """Connect; the URL's scheme and query configure TLS. ``patience``: seconds without any answer.

    Raises BrokerLost, BrokerRefused (for login or vhost), and ValueError for an invalid URL.
    """
    address = Address.parse(url)
    try:
        connection = await Connection.open(address, name=name, timeout=patience)
    except AccessRefused as refused:
        raise BrokerRefused(f"{address}: {refused}") from refused
    try:
        yield PipelinedAdmin(connection, patience)
    finally:
        await connection.close()
