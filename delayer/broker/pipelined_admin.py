"""Short requests to a broker with delayer's own AMQP client, pipelined: declare, count, probe.

For the daemon, whose switch of mode waits for them, and for commands that an operator waits for.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self, TypeVar

from pamqp.base import Frame
from pamqp.commands import Basic as BasicMethods
from pamqp.commands import Exchange as ExchangeMethods
from pamqp.commands import Queue as QueueMethods

from delayer.amqp.address import Address
from delayer.amqp.channel import Channel
from delayer.amqp.connection import Connection
from delayer.amqp.errors import AccessRefused, BrokerLost, ChannelClosed, ConnectionLost, ReplyCode
from delayer.amqp.framing import unchecked
from delayer.amqp.properties import encode_headers, entry, int64
from delayer.amqp.values import Delivery, Outgoing
from delayer.broker.addresses import CONNECT_SECONDS, addresses_of, connect, first_success
from delayer.broker.errors import UNDECLARED, BrokerRefused, BrokerUnreachable, TopologyFinding, TopologyMismatch
from delayer.core.cascade import ONE_CONSUMER
from delayer.core.delay_headers import OPT_TIME
from delayer.core.marks import ID
from delayer.core.topology import Binding, Exchange, Queue, Topology, TopologyPart, arguments

ExchangeDeclare = unchecked(ExchangeMethods.Declare)
ExchangeBind = unchecked(ExchangeMethods.Bind)
QueueDeclare = unchecked(QueueMethods.Declare)
QueueDelete = unchecked(QueueMethods.Delete)
QueueBind = unchecked(QueueMethods.Bind)
BasicGet = unchecked(BasicMethods.Get)
_ANSWERS: Final[dict[type[Frame], type[Frame]]] = {
    ExchangeDeclare: ExchangeMethods.DeclareOk,
    ExchangeBind: ExchangeMethods.BindOk,
    QueueDeclare: QueueMethods.DeclareOk,
    QueueDelete: QueueMethods.DeleteOk,
    QueueBind: QueueMethods.BindOk,
    BasicMethods.Qos: BasicMethods.QosOk,
    BasicGet: BasicMethods.GetOk,
}


def declaration(wanted: TopologyPart) -> Frame:
    """Build the method that declares a part of a topology.

    pamqp sends an integer argument in the smallest type that holds it: 64 bits for the TTLs from level 22 up. The
    broker compares values without their integer types, so declarations of other systems' clients are equal to ours.
    """
    if isinstance(wanted, Exchange):
        return ExchangeDeclare(
            exchange=wanted.name, exchange_type=wanted.type, durable=True, arguments=dict(wanted.arguments)
        )
    if isinstance(wanted, Queue):
        return QueueDeclare(queue=wanted.name, durable=True, arguments=dict(wanted.arguments))
    if wanted.destination_kind == "queue":
        return QueueBind(queue=wanted.destination, exchange=wanted.source, routing_key=wanted.key)
    return ExchangeBind(destination=wanted.destination, source=wanted.source, routing_key=wanted.key)


def check(part: Exchange | Queue) -> Frame:
    """Build the method that checks whether a part exists."""
    return check_queue(part.name) if isinstance(part, Queue) else check_exchange(part.name)


def check_exchange(name: str) -> ExchangeMethods.Declare:
    return ExchangeDeclare(exchange=name, passive=True)


def check_queue(name: str) -> QueueMethods.Declare:
    return QueueDeclare(queue=name, passive=True)


T = TypeVar("T")

PATIENCE: Final = 30.0
"""Seconds without an answer after which the broker counts as unreachable. A quorum queue waits for an election."""
DELAYS_FROM: Final = (4, 3)
"""The first version of RabbitMQ whose quorum queues delay messages: returned ones, and from 4.4 on published ones."""
LEADER_SECONDS: Final = 0.25
"""If the leader of a quorum queue does not answer within this time, RabbitMQ counts 0 messages."""
LINE: Final = BasicMethods.Qos()
"""A method that changes nothing and needs no queue, so the time of its answer is that of the connection alone."""
ELECTION_SECONDS: Final = 5.0
"""How long the election of a leader may take."""
JITTER_SECONDS: Final = 0.1
"""How many seconds after the previous answer the next answer may arrive on a connection."""
MAJORITY_SECONDS: Final = 10.0
"""How long the members of a quorum queue may take to agree, an election included."""
MOST_AT_ONCE: Final = 256
"""Maximum number of unanswered requests."""
PROBE_MS: Final = 500
"""Delay of the message that probes whether the broker delays messages."""
PROBE_LATE_MS: Final = 10_000
"""How late that message may be on a busy broker. If it is later, the broker counts as unable to delay messages. A
broker that ignores the time delivers the message immediately, so this timeout costs nothing there."""


class QueueState(NamedTuple):
    messages: int  # Messages ready for delivery.
    consumers: int


class Questions(ABC):
    """What each administration asks the broker. Every method may raise BrokerLost."""

    @abstractmethod
    async def ask(self, questions: Sequence[Frame]) -> list[Frame | ChannelClosed]:
        """Return the answers in order, including refusals."""

    async def states(
        self, queues: Iterable[str], patience: float, *, doubtful: bool = False
    ) -> dict[str, QueueState | ChannelClosed]:
        """Return the state of each queue, or the broker's refusal. Asks again while queues seem empty because a leader
        is slow, or was slow a moment ago: until another leader is elected, the broker counts 0 at once. With
        ``doubtful``, does not ask again, so 0 may mean any number. Raises BrokerUnreachable after ``patience``
        seconds."""
        names, empty = list(queues), [""]
        ends, sure_from = time.monotonic() + patience, 0.0
        while (began := time.monotonic()) < ends:
            answers = await self.ask([check_queue(name) for name in names])
            found = dict(zip(names, map(_state, answers), strict=True))
            empty = [name for name, state in found.items() if isinstance(state, QueueState) and not state.messages]
            if doubtful or not empty:
                return found
            if await self._was_slow(began):
                sure_from = time.monotonic() + ELECTION_SECONDS
            elif began >= sure_from:
                return found
            else:
                await asyncio.sleep(LEADER_SECONDS)
        which = f"queue {empty[0]!r}" if len(empty) == 1 else f"one of the queues {', '.join(map(repr, empty))}"
        text = f"{which} did not answer within {LEADER_SECONDS * 1000:.0f} ms, so its messages are not known"
        raise BrokerUnreachable(text, advice="see which broker node hangs: `rabbitmq-queues quorum_status QUEUE`")

    async def _was_slow(self, began: float) -> bool:
        """Whether an answer to a request sent at ``began`` took so long that a 0 in it may not be a count. The answer
        to LINE shows whether the connection is slow or the leader."""
        if (took := time.monotonic() - began) < LEADER_SECONDS:
            return False
        began = time.monotonic()
        await self.ask([LINE])
        return took - (time.monotonic() - began) >= LEADER_SECONDS - JITTER_SECONDS

    async def exchange_exists(self, name: str) -> bool:
        """Whether the exchange exists. Raises BrokerRefused if this user may not see it."""
        return not name or accepted(*await self.ask([check_exchange(name)]))


def _state(answer: Frame | ChannelClosed) -> QueueState | ChannelClosed:
    if isinstance(answer, ChannelClosed):
        return answer
    assert isinstance(answer, QueueMethods.DeclareOk)
    return QueueState(answer.message_count or 0, answer.consumer_count or 0)


def accepted(answer: Frame | ChannelClosed) -> bool:
    """Whether the broker accepted; False if the part is missing. Raises BrokerRefused for any other refusal."""
    if isinstance(answer, ChannelClosed) and answer.code != ReplyCode.NOT_FOUND:
        raise BrokerRefused(answer.text, answer.advice) from answer
    return not isinstance(answer, ChannelClosed)


@dataclass
class PipelinedAdmin(Questions):
    """One connection; see :func:`pipelined_admin`. Every method may raise BrokerLost.

    ``async with`` closes its channel, on a connection that also has other users.
    """

    connection: Connection
    patience: float
    _channel: Channel | None = field(default=None, init=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._channel is not None:
            await self._channel.close()

    @property
    def may_delay(self) -> bool:
        """Whether quorum queues of this version can delay messages."""
        return self.connection.version >= DELAYS_FROM

    async def declare(self, wanted: Topology) -> None:
        """Declare the topology; existing parts stay as they are.

        Raises TopologyMismatch with every part that differs. Then nothing is bound, because bindings between wrong
        parts could route messages anywhere. Raises BrokerRefused if a part has just been removed, a queue's node is
        down, or the broker has reached a limit. Then a retry may help.
        """
        wrong = await self._different([*wanted.exchanges, *wanted.queues])
        if different := wrong or await self._different(wanted.bindings):
            raise TopologyMismatch(different)

    async def _different(self, parts: Sequence[TopologyPart]) -> list[TopologyFinding]:
        found: dict[TopologyPart, TopologyFinding] = {}
        for part, answer in zip(parts, await self.ask([declaration(one) for one in parts]), strict=True):
            if isinstance(answer, ChannelClosed):
                name = part.source if isinstance(part, Binding) else part.name
                if answer.code not in (ReplyCode.PRECONDITION_FAILED, ReplyCode.RESOURCE_LOCKED):
                    raise BrokerRefused(f"{part.kind} {name!r}: {answer.text}", answer.advice) from answer
                found[part] = TopologyFinding(part.kind, name, str(part), answer.text)
        # A part that does not exist does not differ: the broker has reached a limit.
        missing = await self.missing([part for part in found if not isinstance(part, Binding)])
        if missing and len(missing) == len(found):
            why = found[missing[0]].found
            raise BrokerRefused(f"{len(missing)} queues or exchanges are missing and not declared: {why}", UNDECLARED)
        return [finding for part, finding in found.items() if part not in missing]

    async def missing(self, parts: Sequence[Exchange | Queue]) -> list[Exchange | Queue]:
        """Return the parts that do not exist, without parts that this user may not see."""
        answers = await self.ask([check(one) for one in parts])
        return [
            part
            for part, answer in zip(parts, answers, strict=True)
            if isinstance(answer, ChannelClosed) and answer.code == ReplyCode.NOT_FOUND
        ]

    async def exists(self, queue: str) -> bool:
        """Whether the queue exists and no other connection owns it. RabbitMQ 4.3 shows a queue only to users with the
        configure permission; for others it counts as missing."""
        [answer] = await self.ask([check_queue(queue)])
        return not isinstance(answer, ChannelClosed)

    async def depths(self, queues: Iterable[str]) -> dict[str, int | ChannelClosed]:
        """Messages ready in each queue, or the broker's refusal. Raises BrokerUnreachable if a queue's leader stays
        slow."""
        states = await self.states(queues, self.patience)
        return {name: state.messages if isinstance(state, QueueState) else state for name, state in states.items()}

    async def why_no_delays(self, exchange: str, name: str) -> str:
        """Return why the broker cannot delay messages for us, or "" if a message delayed by 0.5 s returned on time.

        The message goes through ``exchange`` to a dedicated queue, ``name`` and a number, which lasts at most a minute.
        """
        if not self.may_delay:
            return f"RabbitMQ {'.'.join(map(str, self.connection.version))} delays no messages"
        probe = Queue(f"{name}-{secrets.token_hex(8)}", arguments({"x-queue-type": "quorum", "x-expires": 60_000}))
        try:
            await self.declare(Topology((), (probe,), (Binding(exchange, probe.name, "queue", probe.name),)))
            late_ms = await self._probed(exchange, probe.name)
            await self.ask([QueueDelete(queue=probe.name)])
        except BrokerRefused as refused:
            return str(refused)
        except ChannelClosed as closed:
            if not closed.caused_by_client:
                raise
            return str(closed)
        if late_ms is None:
            return "a message that the broker delayed by half a second did not come back in time"
        return "" if late_ms >= 0 else "the broker delays no messages, or its clock is ahead of ours"

    async def _probed(self, exchange: str, queue: str) -> int | None:
        """Return how late a delayed message arrived, in milliseconds; None if it did not arrive in time."""
        came_ms: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def on_delivery(_: Delivery) -> None:
            if not came_ms.done():
                came_ms.set_result(_now_ms())

        channel = await self._answer(self.connection.channel(token_header=ID))
        await self._answer(channel.consume(queue, on_delivery, on_cancelled=lambda: None))
        due_ms = _now_ms() + PROBE_MS
        properties = encode_headers(entry(OPT_TIME, int64(due_ms)))
        message = Outgoing(exchange.encode(), queue.encode(), properties, b"", b"")
        await channel.publish([message], timeout=self.patience)
        try:
            async with asyncio.timeout((due_ms + PROBE_LATE_MS - _now_ms()) / 1000):
                return await came_ms - due_ms
        except TimeoutError:
            return None

    async def ask(self, questions: Sequence[Frame]) -> list[Frame | ChannelClosed]:
        # A refusal closes the channel, and later requests go over a new one. So after a refusal send one request, then
        # two, then four, because most would be sent in vain.
        answers: list[Frame | ChannelClosed] = []
        at_once = MOST_AT_ONCE
        while len(answers) < len(questions):
            if self._channel is None or self._channel.closed.done():
                self._channel = await self._answer(self.connection.channel())
            rest = questions[len(answers) : len(answers) + at_once]
            calls = [asyncio.ensure_future(self._channel.call(one, _ANSWERS[type(one)])) for one in rest]
            try:
                for call in calls:
                    answers.append(await self._answer(call))
                at_once = min(2 * at_once, MOST_AT_ONCE)
            except ChannelClosed as refused:
                answers.append(refused)
                at_once = 1
            finally:
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
        return answers

    async def _answer(self, question: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self.patience):
                return await question
        except TimeoutError as late:
            raise BrokerUnreachable(f"no answer within {self.patience:g} s") from late


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


async def open_connection(address: Address, name: str, patience: float) -> Connection:
    """Open a connection, which the caller closes. Raises BrokerLost, and BrokerRefused for login, vhost or limits."""
    try:
        return await connect(address, name=name, timeout=min(patience, CONNECT_SECONDS))
    except AccessRefused as refused:
        raise BrokerRefused(f"{address}: {refused}", refused.advice) from refused


@asynccontextmanager
async def pipelined_admin(urls: str, name: str, *, patience: float = PATIENCE) -> AsyncIterator[PipelinedAdmin]:
    """Connect to one of these URLs, whose parameters configure TLS. ``patience``: seconds without any answer.

    Raises as :func:`open_connection`.
    """
    connection = await first_success(addresses_of(urls), lambda address: open_connection(address, name, patience))
    try:
        yield PipelinedAdmin(connection, patience)
    finally:
        await connection.close()


async def why_silent(urls: str, queue: Queue) -> str | None:
    """Return why the queue, which exists with these arguments, counts as one without a majority of its members; "" if
    it does not, or is of another kind; None if the broker could not be asked.

    A quorum queue with a single active consumer refuses ``basic.get``, but only after a majority of its members logged
    the request. So this takes no message and changes nothing. It has its own connection, because without a majority the
    broker closes that, after 25 s.
    """
    if queue.argument("x-queue-type") != "quorum" or not queue.argument(ONE_CONSUMER):
        return ""
    found: str | None = None
    with suppress(BrokerLost, BrokerRefused):  # Closing the connection may fail too.
        async with pipelined_admin(urls, "delayer majority", patience=MAJORITY_SECONDS) as broker:
            await broker.ask([LINE])
            try:
                await broker.ask([BasicGet(queue=queue.name)])
                found = ""
            except (BrokerUnreachable, ConnectionLost) as lost:
                if isinstance(lost, BrokerUnreachable) or lost.code == ReplyCode.INTERNAL_ERROR:
                    found = f"queue {queue.name!r} does not answer what needs a majority of its members"
    return found
