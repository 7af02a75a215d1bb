"""The methods of a channel that declare, bind and delete."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal

from pamqp import commands
from pamqp.base import Frame

from tests.simulation.broker.declared import NOT_QUORUM, check_arguments, check_flags, check_same, check_same_queue
from tests.simulation.broker.message import arguments_of
from tests.simulation.broker.queue import Queue
from tests.simulation.broker.routing import KINDS, Binding
from tests.simulation.broker.routing import Exchange as ExchangeHere
from tests.simulation.broker.wire import Code, Refusal, declared_table
from tests.support.raw import Value

if TYPE_CHECKING:
    from tests.simulation.broker.channel import ServerChannel
    from tests.simulation.broker.vhost import VirtualHost

COUNT_SECONDS: Final = 0.25
"""How long a declaration waits for a queue that does not answer, before it counts 0 messages."""


class Declaring:
    """Those methods of one channel, whose last declared queue may be meant by an empty name."""

    def __init__(self, channel: ServerChannel) -> None:
        self._channel = channel
        self._last = ""
        self._methods: dict[type[Frame], Callable[[Any, bytes], None]] = {
            commands.Exchange.Declare: self._declare_exchange,
            commands.Exchange.Delete: self._delete_exchange,
            commands.Exchange.Bind: self._bind_exchange,
            commands.Exchange.Unbind: self._bind_exchange,
            commands.Queue.Declare: self._declare_queue,
            commands.Queue.Delete: self._delete_queue,
            commands.Queue.Bind: self._bind_queue,
            commands.Queue.Unbind: self._bind_queue,
            commands.Queue.Purge: self._purge,
        }

    def handle(self, method: Frame, payload: bytes) -> bool:
        found = self._methods.get(type(method))
        if found is not None:
            found(method, payload)
        return found is not None

    def named(self, name: str | None) -> str:
        """The name, without line ends; "" means the queue that this channel declared last."""
        return (name or self._last).replace("\r", "").replace("\n", "")

    @property
    def _vhost(self) -> VirtualHost:
        return self._channel.connection.vhost

    def _check(self, right: Literal["configure", "write", "read"], kind: str, name: str) -> None:
        self._channel.connection.user.check(right, kind, name, self._vhost.name)

    def _reply(self, method: Frame, kind: type[Frame], **fields: Any) -> None:
        if not getattr(method, "nowait", False):
            self._channel.reply(kind, **fields)

    # Exchanges.

    def _declare_exchange(self, method: commands.Exchange.Declare, payload: bytes) -> None:
        name, vhost = method.exchange or "", self._vhost
        where = vhost.described("exchange", name)
        arguments = arguments_of(declared_table(payload, 2))
        if method.passive and name:
            vhost.exchange(name)
        else:
            _check_name("exchange", name, vhost.exchanges)
            self._check("configure", "exchange", name)
            alternate = arguments.get("alternate-exchange")
            if alternate is not None:
                self._check("read", "exchange", name)
                self._check("write", "exchange", alternate.raw[4:].decode())
            kind = method.exchange_type or ""
            if kind not in KINDS:
                raise Refusal(Code.COMMAND_INVALID, f"invalid exchange type '{kind}'")
            flags = {"durable": bool(method.durable), "auto_delete": bool(method.auto_delete),
                     "internal": bool(method.internal)}  # fmt: skip
            found = vhost.exchanges.get(name)
            if found is None:
                vhost.exchanges[name] = ExchangeHere(name, kind, **flags, arguments=arguments)
            else:
                if found.kind != kind:
                    text = f"received '{kind}' but current is '{found.kind}'"
                    raise Refusal(Code.PRECONDITION_FAILED, f"inequivalent arg 'type' for {where}: {text}")
                check_flags(where, {one: getattr(found, one) for one in flags}, flags)
                check_same(where, found.arguments, arguments, ("alternate-exchange",))
        self._reply(method, commands.Exchange.DeclareOk)

    def _delete_exchange(self, method: commands.Exchange.Delete, _: bytes) -> None:
        name, vhost = method.exchange or "", self._vhost
        if not name:
            raise Refusal(Code.ACCESS_REFUSED, "operation not permitted on the default exchange")
        if name.startswith("amq."):
            text = f"deletion of system {vhost.described('exchange', name)} not allowed"
            raise Refusal(Code.ACCESS_REFUSED, text)
        self._check("configure", "exchange", name)
        found = vhost.exchanges.get(name)
        if found is not None:
            if method.if_unused and found.bindings:
                raise Refusal(Code.PRECONDITION_FAILED, f"{vhost.described('exchange', name)} in use")
            vhost.delete_exchange(found)
        self._reply(method, commands.Exchange.DeleteOk)

    # Bindings.

    def _bind_exchange(self, method: commands.Exchange.Bind | commands.Exchange.Unbind, _: bytes) -> None:
        destination = method.destination or ""
        self._change(method, "exchange", destination, method.source or "")
        is_bind = isinstance(method, commands.Exchange.Bind)
        self._reply(method, commands.Exchange.BindOk if is_bind else commands.Exchange.UnbindOk)

    def _bind_queue(self, method: commands.Queue.Bind | commands.Queue.Unbind, _: bytes) -> None:
        self._change(method, "queue", self.named(method.queue), method.exchange or "")
        is_bind = isinstance(method, commands.Queue.Bind)
        self._reply(method, commands.Queue.BindOk if is_bind else commands.Queue.UnbindOk)

    def _change(self, method: Any, kind: Literal["queue", "exchange"], destination: str, source: str) -> None:
        vhost, key = self._vhost, (method.routing_key or "").encode()
        self._check("write", kind, destination)
        if not source or (kind == "exchange" and not destination):
            raise Refusal(Code.ACCESS_REFUSED, "operation not permitted on the default exchange")
        self._check("read", "exchange", source)
        exchange = vhost.exchanges.get(source)
        if exchange is not None and exchange.kind == "topic":
            self._channel.connection.user.check_topic("read", source, key, vhost.name)
        exists = exchange is not None and destination in (vhost.queues if kind == "queue" else vhost.exchanges)
        if not exists and isinstance(method, commands.Queue.Unbind | commands.Exchange.Unbind):
            return
        if kind == "queue":
            self._channel.queue(destination)
        else:
            vhost.exchange(destination)
        exchange = vhost.exchange(source)
        arguments = tuple(sorted((name, _as_value(value)) for name, value in (method.arguments or {}).items()))
        binding = Binding(kind, destination, key, arguments)
        if isinstance(method, commands.Queue.Bind | commands.Exchange.Bind):
            vhost.bind(exchange, binding)
        else:
            vhost.unbind(exchange, binding)

    # Queues.

    def _declare_queue(self, method: commands.Queue.Declare, payload: bytes) -> None:
        connection, vhost = self._channel.connection, self._vhost
        name = self.named(method.queue) if method.passive else (method.queue or "")
        name = name.replace("\r", "").replace("\n", "")
        if method.passive:
            self._count(method, vhost.queue(name, connection))
            return
        if name:
            _check_name("queue", name, vhost.queues)
        else:
            name = connection.broker.new_name("amq.gen")
        self._check("configure", "queue", name)
        where = vhost.described("queue", name)
        arguments = arguments_of(declared_table(payload, 1))
        if name in vhost.queues:
            found = vhost.queue(name, connection)
            flags = {"durable": found.durable, "exclusive": found.exclusive is not None,
                     "auto_delete": found.auto_delete}  # fmt: skip
            check_flags(where, flags, {one: bool(getattr(method, one)) for one in flags})
            check_same_queue(where, found.arguments, arguments)
            self._count(method, found)
            return
        dead_letters = arguments.get("x-dead-letter-exchange")
        check_arguments(where, arguments)
        if dead_letters is not None:
            self._check("read", "queue", name)
            self._check("write", "exchange", dead_letters.raw[4:].decode())
        queue = Queue(
            vhost,
            name,
            arguments,
            durable=bool(method.durable),
            auto_delete=bool(method.auto_delete),
            exclusive=connection if method.exclusive else None,
        )
        if queue.quorum:
            _check_quorum(where, queue)
        vhost.queues[name] = queue
        self._count(method, queue)

    def _count(self, method: commands.Queue.Declare, queue: Queue) -> None:
        self._last = queue.name
        queue.touch()

        def answer() -> None:
            messages, consumers = queue.counts() if queue.available else (0, 0)
            fields = {"queue": queue.name, "message_count": messages, "consumer_count": consumers}
            self._reply(method, commands.Queue.DeclareOk, **fields)

        if queue.available:
            answer()
        else:
            done = self._channel.wait()
            self._channel.connection.broker.after(COUNT_SECONDS, lambda: done() and answer())

    def _delete_queue(self, method: commands.Queue.Delete, _: bytes) -> None:
        name, vhost = self.named(method.queue), self._vhost
        self._check("configure", "queue", name)
        count = 0
        if name in vhost.queues:
            queue = self._channel.queue(name)
            for flag, is_set, is_kept in (("if-unused", method.if_unused, queue.counts()[1]),
                                          ("if-empty", method.if_empty, queue.counts()[0])):  # fmt: skip
                if is_set and queue.quorum:
                    text = f"cannot delete {vhost.described('queue', name)}. queue.delete operations with {flag} flag"
                    raise Refusal(Code.NOT_IMPLEMENTED, f"{text} set are not supported by quorum queues")
                if is_set and is_kept:
                    what = "in use" if flag == "if-unused" else "not empty"
                    raise Refusal(Code.PRECONDITION_FAILED, f"{vhost.described('queue', name)} {what}")
            if not queue.available:
                done = self._channel.wait()
                queue.submit(lambda: self._delete_waiting(method, queue) if done() else None)
                return
            count = vhost.delete_queue(queue)
        self._reply(method, commands.Queue.DeleteOk, message_count=count)

    def _delete_waiting(self, method: commands.Queue.Delete, queue: Queue) -> None:
        self._reply(method, commands.Queue.DeleteOk, message_count=self._vhost.delete_queue(queue))

    def _purge(self, method: commands.Queue.Purge, _: bytes) -> None:
        name = self.named(method.queue)
        self._check("read", "queue", name)
        queue = self._channel.queue(name)
        done = self._channel.wait()

        def purge() -> None:
            count = queue.purge()
            if done():
                self._reply(method, commands.Queue.PurgeOk, message_count=count)

        queue.submit(purge)


def _check_name(kind: str, name: str, known: object) -> None:
    if kind == "exchange" and not name:
        raise Refusal(Code.ACCESS_REFUSED, "operation not permitted on the default exchange")
    if name.startswith("amq.") and name not in known:  # type: ignore[operator]
        raise Refusal(Code.ACCESS_REFUSED, f"{kind} name '{name}' contains reserved prefix 'amq.*'")


def _check_quorum(where: str, queue: Queue) -> None:
    for flag, value in (("non-durable", not queue.durable), ("auto-delete", queue.auto_delete),
                        ("exclusive-owner", queue.exclusive is not None)):  # fmt: skip
        if value:
            raise Refusal(Code.PRECONDITION_FAILED, f"invalid property '{flag}' for {where}")
    for name in NOT_QUORUM:
        if name in queue.arguments:
            text = f"invalid arg '{name}' for {where} of queue type rabbit_quorum_queue"
            raise Refusal(Code.PRECONDITION_FAILED, text)


def _as_value(value: Any) -> Value:
    """An argument of a binding, for comparisons with a message's headers."""
    from tests.support.raw import VOID, number, text

    if value is None:
        return VOID
    if isinstance(value, bool):
        return number("t", value)
    if isinstance(value, int):
        return number("I" if -(2**31) <= value < 2**31 else "l", value)
    return text(value)
