"""Queues that never answer: their process is suspended, which looks like a quorum queue without its majority."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.rabbitmq import RabbitMQ

_PROCESS = (
    '{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"{vhost}">>, queue, <<"{queue}">>)), '
    "Pid = case amqqueue:get_pid(Q) of {{Name, _}} -> whereis(Name); One -> One end, "
)


@asynccontextmanager
async def silent(rabbitmq: RabbitMQ, vhost: str, queue: str) -> AsyncIterator[None]:
    """Suspend the queue's process. If it were killed, the broker could not delete the queue or its vhost."""
    process = _PROCESS.format(vhost=vhost, queue=queue)
    await asyncio.to_thread(rabbitmq.ctl, "eval", f"{process}sys:suspend(Pid).")
    try:
        yield
    finally:
        await asyncio.to_thread(rabbitmq.ctl, "eval", f"{process}sys:resume(Pid).")
