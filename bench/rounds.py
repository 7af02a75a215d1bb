"""The cost of the daemon's round of each minute: `python -m bench.rounds` prints it for both modes."""

from __future__ import annotations

import asyncio
import time

from bench.figures import median
from delayer.amqp.address import Address
from delayer.amqp.connection import Connection
from delayer.broker.pipelined_admin import PATIENCE, PipelinedAdmin
from delayer.config.model import Settings
from delayer.config.topology import topology_of
from delayer.daemon.drift import DeclaredTopology
from tests.support.servers import RabbitMQ

ROUNDS = 50


async def main(url: str, management_url: str) -> None:
    for mode in ("store", "native"):
        for managed in (None, management_url):
            settings = Settings.model_validate({"mode": mode, "broker": {"url": url, "management_url": managed}})
            connection = await Connection.open(Address.parse(url), name="rounds")
            topology, wall, work = DeclaredTopology(), [], []
            for _ in range(ROUNDS + 1):
                began, worked = time.perf_counter(), time.process_time()
                seen = await topology.look(settings)
                async with PipelinedAdmin(connection, PATIENCE) as broker:
                    await topology.keep(broker, settings, seen)
                wall.append(1000 * (time.perf_counter() - began))
                work.append(1000 * (time.process_time() - worked))
            await connection.close()
            whole = topology_of(settings)
            looks = len(whole.exchanges) + len(whole.queues)
            print(
                f"{mode}, {'with' if managed else 'no'} management_url: {2 * looks + len(whole.bindings)} requests, "
                f"{median(wall[1:]):.1f} ms, of these {median(work[1:]):.1f} ms of the daemon's processor"
            )


if __name__ == "__main__":
    with RabbitMQ() as rabbitmq:
        asyncio.run(main(rabbitmq.url(), rabbitmq.management_url))
