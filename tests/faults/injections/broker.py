"""Faults of the broker."""

from __future__ import annotations

import asyncio
import subprocess
import time
from contextlib import suppress

import aio_pika

from delayer.amqp.connection import Connection
from delayer.amqp.errors import BrokerLost
from tests.faults.fault import Fault, Missed, Untouched
from tests.faults.fleet import USER, Fleet
from tests.support.place import eventually
from tests.support.proxy import Proxy

LOSSES = 50
A_PORTION = 0.4
"""Seconds within which a consumer other than the daemons gets a message, at ten publishes a second."""
MOST_LOSSES = 25
"""At least this many of them must have been given a message: more than the default delivery limit of 20."""

NOBODY = "the broker knew of no connection of the daemons"


async def killed(fleet: Fleet, fault: Fault) -> None:
    """Kill all its processes, and start it again after ``seconds``."""
    with suppress(RuntimeError):
        await asyncio.to_thread(fleet.rabbitmq.settle)
    await asyncio.to_thread(fleet.rabbitmq.kill)
    await asyncio.sleep(fault.seconds)
    await asyncio.to_thread(fleet.rabbitmq.start)


async def stopped(fleet: Fleet, fault: Fault) -> None:
    await fleet.paused(fleet.rabbitmq, fault.seconds)


async def memory_alarm(fleet: Fleet, fault: Fault) -> None:
    """The broker blocks every publisher for ``seconds``."""
    await _alarm(fleet, fault, "mem_alarm", "set_vm_memory_high_watermark", "0.0000001", "0.4")


async def disk_alarm(fleet: Fleet, fault: Fault) -> None:
    await _alarm(fleet, fault, "disk_free_alarm", "set_disk_free_limit", "1000000GB", "10MB")


async def _alarm(fleet: Fleet, fault: Fault, alarm: str, limit: str, low: str, usual: str) -> None:
    """Set a limit that is too low; ``seconds`` are measured from the broker's report of the alarm."""

    async def said() -> bool:
        return any(node.get(alarm) for node in await fleet.api("GET", "/api/nodes"))

    await _ctl(fleet, limit, low)
    try:
        await eventually(said)
        await asyncio.sleep(fault.seconds)
    finally:
        await _ctl(fleet, limit, usual)


async def _ctl(fleet: Fleet, *words: str) -> None:
    """Run rabbitmqctl, again after a failure: a node that is busy with other faults may not answer in time."""
    for last in (False, False, True):
        try:
            await asyncio.to_thread(fleet.rabbitmq.ctl, *words)
        except (RuntimeError, subprocess.TimeoutExpired):
            if last:
                raise
        else:
            return


async def connections_closed(fleet: Fleet, fault: Fault) -> None:
    """An operator closes all connections of the daemons."""
    if not await fleet.close_connections():
        raise Untouched(NOBODY)


async def permissions_taken(fleet: Fleet, fault: Fault) -> None:
    """The daemons' user has no rights for ``seconds``; the broker checks them again as its connections are closed."""
    await fleet.permit("^$")
    try:
        if not await fleet.close_connections():
            raise Missed(NOBODY)
        await asyncio.sleep(fault.seconds)
    finally:
        await fleet.permit()


async def destination_deleted(fleet: Fleet, fault: Fault) -> float:
    """Delete the exchange: a publish to it closes the channel. It is declared again ``seconds`` later."""
    await fleet.settled()
    before, begin_ms = fleet.told("message held"), time.time() * 1000
    async with await aio_pika.connect(fleet.place.broker) as connection:
        await (await connection.channel()).exchange_delete("delayer.out")
    await asyncio.sleep(fault.seconds)
    await fleet.ledger.declare()
    if fleet.told("message held") == before:
        raise Missed("no daemon published to it meanwhile")
    return begin_ms


async def queue_deleted(fleet: Fleet, fault: Fault) -> float:
    """Delete the intake queue under its consumers while it is empty: messages deleted with it would be lost."""
    async with fleet.ledger.silent():
        await eventually(fleet.place.standing, lambda standing: not set(standing) - fleet.aside, timeout=90)
        await fleet.settled()
        begin_ms = time.time() * 1000
        async with await aio_pika.connect(fleet.place.broker) as connection:
            await (await connection.channel()).queue_delete("delays")
        await eventually(lambda: _exists(fleet, "delays"), bool, timeout=60)
    await fleet.settled()
    return begin_ms


async def _exists(fleet: Fleet, queue: str) -> bool:
    queues = await fleet.api("GET", f"/api/queues/{fleet.quoted_vhost}?disable_stats=true&enable_queue_totals=true")
    return any(one["name"] == queue for one in queues)


async def lost_again_and_again(fleet: Fleet, fault: Fault) -> None:
    """Cut fifty connections in a row, each just after a delivery from the queue ``detail``, to reach delivery
    limits."""
    lost = 0
    # The intake queue has a single active consumer, and for now that is not a daemon.
    away = fleet.daemons if fault.detail == "delays" else []
    for daemon in away:
        await daemon.broker.refuse()
    async with Proxy(fleet.rabbitmq.port) as proxy:
        url = fleet.rabbitmq.url(fleet.vhost, port=proxy.port)
        try:
            for _ in range(LOSSES):
                with suppress(BrokerLost, TimeoutError):
                    await take_and_lose(url, proxy, fault.detail, max(fault.seconds / LOSSES, A_PORTION))
                    lost += 1
        finally:
            for daemon in away:
                await daemon.broker.accept()
    if lost < MOST_LOSSES:
        raise Missed(f"of {LOSSES} connections {lost} were given a message of {fault.detail}")


async def take_and_lose(url: str, proxy: Proxy, queue: str, patience: float, *, messages: int = 1) -> None:
    """Consume ``messages`` of the queue on a connection, and cut it. Raises TimeoutError if they do not arrive."""
    connection = await Connection.open(url, name=f"{USER} lost")
    try:
        given = asyncio.Semaphore(0)
        channel = await connection.channel()
        await channel.qos(200)
        await channel.consume(queue, lambda _: given.release(), given.release)
        async with asyncio.timeout(patience):
            for _ in range(messages):
                await given.acquire()
    finally:
        proxy.cut()
        await connection.close()
