"""The broker's side of one channel: publishing, consuming and settling."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from pamqp import commands
from pamqp.base import Frame

from tests.simulation.broker import wire
from tests.simulation.broker.confirms import Confirms
from tests.simulation.broker.message import counted, receive
from tests.simulation.broker.queue import Consumer, Entry, Queue
from tests.simulation.broker.topology import Declaring
from tests.simulation.broker.wire import Code, Publish, Refusal, Settlement

if TYPE_CHECKING:
    from tests.simulation.broker.connection import ServerConnection

SILENT_SECONDS: Final = 25.0
"""After this long without a majority of a queue's members, a channel that waits for them crashes its connection."""

Published = tuple[Publish, bytes, bytes]


class ServerChannel:
    def __init__(self, connection: ServerConnection, number: int) -> None:
        self.connection = connection
        self.number = number
        self.closed = False
        self._declaring = Declaring(self)
        self._confirms: Confirms | None = None
        self._prefetch = 0
        self._tag = 0
        self._unacked: dict[int, tuple[Queue, Consumer, int]] = {}
        self._consumers: dict[bytes, tuple[Queue, Consumer]] = {}
        self._holders: dict[Consumer, Queue] = {}
        """Every consumer of this channel that a queue knows."""
        self._getters: dict[Queue, Consumer] = {}
        self._waiting: deque[tuple[Any, bytes]] = deque()
        self._busy: object = None

    # Methods, one after the other.

    def handle(self, method: Frame | Settlement | Published, payload: bytes) -> None:
        if isinstance(method, commands.Channel.CloseOk):
            self.connection.channels.pop(self.number, None)
        elif isinstance(method, commands.Channel.Close):
            self.leave()
            self.connection.channels.pop(self.number, None)
            self.reply(commands.Channel.CloseOk)
        elif self.closed:
            pass
        elif self._busy is not None:
            self._waiting.append((method, payload))
        else:
            self._run(method, payload)

    def _run(self, method: Frame | Settlement | Published, payload: bytes) -> None:
        try:
            if isinstance(method, Settlement):
                self._settle(method)
            elif isinstance(method, tuple):
                self._publish(*method)
            else:
                self._handle(method, payload)
        except Refusal as refusal:
            if refusal.ends_connection:
                self.connection.close(refusal)
            else:
                self.close(refusal)

    def wait(self) -> Callable[[], bool]:
        """Handle nothing more until the returned function is called. That returns whether the channel still waits, and
        so whether to answer."""
        silent = Refusal(Code.INTERNAL_ERROR)
        timer = self._busy = self.connection.broker.after(SILENT_SECONDS, lambda: self.connection.close(silent))

        def done() -> bool:
            timer.cancel()
            if self.closed or self._busy is not timer:
                return False
            self._busy = None
            self.connection.broker.loop.call_soon(self._catch_up)
            return True

        return done

    def _catch_up(self) -> None:
        while self._waiting and self._busy is None and not self.closed:
            self._run(*self._waiting.popleft())

    def _handle(self, method: Frame, payload: bytes) -> None:
        if isinstance(method, commands.Basic.Qos):
            if method.global_:
                raise Refusal(Code.NOT_IMPLEMENTED, "global qos is not simulated")
            self._prefetch = method.prefetch_count or 0
            self.reply(commands.Basic.QosOk)
        elif isinstance(method, commands.Confirm.Select):
            if self._confirms is None:
                self._confirms = Confirms(self.number, self._send, self.connection.broker.loop.call_soon)
            self.reply(commands.Confirm.SelectOk)
        elif isinstance(method, commands.Basic.Consume):
            self._consume(method, payload)
        elif isinstance(method, commands.Basic.Cancel):
            self._cancel(method)
        elif isinstance(method, commands.Basic.Get):
            self._get(method)
        elif isinstance(method, commands.Basic.CancelOk):
            pass
        elif isinstance(method, commands.Channel.Flow):
            self.reply(commands.Channel.FlowOk, active=True)
        elif not self._declaring.handle(method, payload):
            raise Refusal(Code.NOT_IMPLEMENTED, f"{method.name} is not simulated")

    def reply(self, kind: type[Frame], **fields: Any) -> None:
        self._send(wire.method(self.number, kind, **fields))

    def _send(self, data: bytes) -> None:
        self.connection.send(data)

    # Publishing.

    def _publish(self, method: Publish, properties: bytes, body: bytes) -> None:
        connection = self.connection
        vhost, user = connection.vhost, connection.user
        name = method.exchange.decode("utf-8", "replace")
        user.check("write", "exchange", name, vhost.name)
        exchange = vhost.exchange(name)
        if exchange.internal:
            text = f"cannot publish to internal {vhost.described('exchange', name)}"
            raise Refusal(Code.ACCESS_REFUSED, text)
        if exchange.kind == "topic":
            user.check_topic("write", name, method.key, vhost.name)
        message = receive(method.exchange, method.key, properties, body, user.name)
        queues = vhost.route(exchange, message)
        if not queues and method.mandatory:
            self._send(wire.returned(self.number, method.exchange, method.key))
            self._send(wire.content(self.number, properties, body))
        confirms = self._confirms
        if confirms is None:
            for queue in queues:
                queue.publish(message, bool)
            return
        number = confirms.expect(len(queues))
        for queue in queues:
            queue.publish(message, lambda took: confirms.answer(number, took))

    # Consuming.

    def queue(self, name: str) -> Queue:
        return self.connection.vhost.queue(self._declaring.named(name), self.connection)

    def _consume(self, method: commands.Basic.Consume, payload: bytes) -> None:
        name = self._declaring.named(method.queue)
        vhost = self.connection.vhost
        self.connection.user.check("read", "queue", name, vhost.name)
        queue = self.queue(name)
        priority = (method.arguments or {}).get("x-priority", 0)
        if not isinstance(priority, int):
            where = vhost.described("queue", name)
            text = f"invalid arg 'x-priority' for {where}: \"expected integer, got longstr\""
            raise Refusal(Code.PRECONDITION_FAILED, text)
        tag = (method.consumer_tag or self.connection.broker.new_name("amq.ctag")).encode()
        if tag in self._consumers:
            raise Refusal(Code.NOT_ALLOWED, f"attempt to reuse consumer tag '{tag.decode()}'")
        if method.exclusive and not queue.quorum and queue.counts()[1]:
            raise Refusal(Code.ACCESS_REFUSED, f"{vhost.described('queue', name)} in exclusive use")
        consumer = Consumer(self, tag, self._prefetch, bool(method.no_ack))
        done = self.wait()

        def started() -> None:
            if self.closed:
                queue.leave(consumer)
            elif done() and not method.nowait:
                self.reply(commands.Basic.ConsumeOk, consumer_tag=tag.decode())

        self._consumers[tag] = (queue, consumer)
        self._holders[consumer] = queue
        queue.consume(consumer, started)

    def _cancel(self, method: commands.Basic.Cancel) -> None:
        tag = str(method.consumer_tag)
        queue, consumer = self._consumers.pop(tag.encode(), (None, None))
        if queue is None or consumer is None:
            self.reply(commands.Basic.CancelOk, consumer_tag=tag)
            return
        done = self.wait()
        queue.end(consumer, lambda: done() and self.reply(commands.Basic.CancelOk, consumer_tag=tag))

    def _get(self, method: commands.Basic.Get) -> None:
        name = self._declaring.named(method.queue)
        vhost = self.connection.vhost
        self.connection.user.check("read", "queue", name, vhost.name)
        queue = self.queue(name)
        queue.touch()
        consumer = self._getters.setdefault(queue, Consumer(self, b"", 0, no_ack=False))
        if method.no_ack:
            consumer = Consumer(self, b"", 0, no_ack=True)
        done = self.wait()

        def answer(entry: Entry | None, left: int) -> None:
            if not done():
                if entry is not None:
                    queue.leave(consumer)
            elif entry is None:
                self.reply(commands.Basic.GetEmpty, cluster_id="")
            else:
                if not method.no_ack:
                    self._holders[consumer] = queue
                tag = self._hold(queue, consumer, entry)
                message = entry.message
                self._send(wire.got(self.number, tag, entry.returns > 0, message.exchange, message.key, left))
                # A quorum queue states the count here, even if it is 0.
                properties = counted(message.properties, entry.returns) if queue.quorum else message.properties
                self._send(wire.content(self.number, properties, message.body))

        def refuse() -> None:
            if done():
                text = f"cannot obtain access to locked {vhost.described('queue', name)}. basic.get operations are not "
                self.close(
                    Refusal(Code.RESOURCE_LOCKED, f"{text}supported by quorum queues with single active consumer")
                )

        if queue.single_active and queue.quorum:
            queue.submit(refuse)
        else:
            queue.get(consumer, answer)

    def deliver(self, consumer: Consumer, entry: Entry) -> None:
        queue = self._holders.get(consumer)
        if self.closed or queue is None:
            return
        tag = self._hold(queue, consumer, entry)
        message = entry.message
        head = wire.deliver(self.number, consumer.tag, tag, entry.returns > 0, message.exchange, message.key)
        self._send(head)
        self._send(wire.content(self.number, _properties(queue, entry), message.body))

    def _hold(self, queue: Queue, consumer: Consumer, entry: Entry) -> int:
        self._tag += 1
        if not consumer.no_ack:
            self._unacked[self._tag] = (queue, consumer, entry.place)
        return self._tag

    def cancelled(self, consumer: Consumer) -> None:
        if not self.closed and self._consumers.pop(consumer.tag, None) is not None:
            self._holders.pop(consumer, None)
            if self.connection.capabilities.get("consumer_cancel_notify"):
                self.reply(commands.Basic.Cancel, consumer_tag=consumer.tag.decode(), nowait=True)

    # Settling.

    def _settle(self, method: Settlement) -> None:
        tags = self._tags(method)
        held: dict[tuple[Queue, Consumer], list[int]] = {}
        for tag in tags:
            queue, consumer, place = self._unacked.pop(tag)
            held.setdefault((queue, consumer), []).append(place)
        for (queue, consumer), places in held.items():
            if method.positive:
                queue.settle(consumer, places)
            else:
                queue.reject(consumer, places, requeue=method.requeue)

    def _tags(self, method: Settlement) -> Iterable[int]:
        if method.multiple and not method.tag:
            return list(self._unacked)
        if method.tag not in self._unacked:
            raise Refusal(Code.PRECONDITION_FAILED, f"unknown delivery tag {method.tag}")
        if not method.multiple:
            return [method.tag]
        found = []
        for tag in self._unacked:  # in the order of the tags
            if tag > method.tag:
                break
            found.append(tag)
        return found

    # The end.

    def close(self, refusal: Refusal) -> None:
        """Close the channel with a reason. The client's frames are ignored until it answers."""
        self.leave()
        self._send(wire.close(self.number, refusal))

    def leave(self) -> None:
        """What the channel holds returns to its queues."""
        if self.closed:
            return
        self.closed = True
        self.connection.broker.cancel(self._busy)
        self._waiting.clear()
        self._unacked.clear()
        if self.connection.broker.running:
            for consumer, queue in self._holders.items():
                queue.leave(consumer)
        self._holders.clear()


def _properties(queue: Queue, entry: Entry) -> bytes:
    properties = entry.message.properties
    return counted(properties, entry.returns) if queue.quorum and entry.returns else properties
