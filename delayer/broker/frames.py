"""The methods for the things of a topology, as frames: for the driver's channels and for the wire's.

pamqp checks names, and holds to the letter of AMQP 0-9-1: a few ASCII characters, 127 of them for an exchange. RabbitMQ
takes any 255 bytes of UTF-8, and people use them: their queues are our addresses. So it is left to the broker to judge.
"""

from __future__ import annotations

from pamqp.commands import Exchange as ExchangeMethods
from pamqp.commands import Queue as QueueMethods

from delayer.core.topology import Binding, Exchange, Queue


class _Unjudged:
    """The broker judges."""

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


def exchange(wanted: Exchange) -> ExchangeDeclare:
    return ExchangeDeclare(
        exchange=wanted.name, exchange_type=wanted.type, durable=wanted.durable, arguments=dict(wanted.arguments)
    )


def queue(wanted: Queue) -> QueueDeclare:
    """pamqp sends an integer in the smallest type that holds it: 64 bits for the TTLs from level 22 up.

    The broker compares all integer types as one, so the declarations of other systems' clients stay equal to ours.
    """
    return QueueDeclare(queue=wanted.name, durable=wanted.durable, arguments=dict(wanted.arguments))


def binding(wanted: Binding) -> QueueBind | ExchangeBind:
    if wanted.destination_kind == "queue":
        return QueueBind(queue=wanted.destination, exchange=wanted.source, routing_key=wanted.key)
    return ExchangeBind(destination=wanted.destination, source=wanted.source, routing_key=wanted.key)


def unbinding(wanted: Binding) -> QueueUnbind | ExchangeUnbind:
    if wanted.destination_kind == "queue":
        return QueueUnbind(queue=wanted.destination, exchange=wanted.source, routing_key=wanted.key)
    return ExchangeUnbind(destination=wanted.destination, source=wanted.source, routing_key=wanted.key)


def look_at_exchange(name: str) -> ExchangeDeclare:
    return ExchangeDeclare(exchange=name, passive=True)


def look_at_queue(name: str) -> QueueDeclare:
    return QueueDeclare(queue=name, passive=True)
