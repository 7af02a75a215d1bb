"""A worker and its publisher, in one process."""
# ruff: noqa: F821, PLW0603

import asyncio
import json
import time

from taskiq.receiver import Receiver

arrivals = []


@broker.task
async def remind(name: str) -> None:
    arrivals.append([name, round((time.time() - began) * 1000)])
    if len(arrivals) == 2:
        over.set()


async def main() -> None:
    global began, over
    over = asyncio.Event()
    broker.is_worker_process = True
    await broker.startup()
    receiving = asyncio.create_task(Receiver(broker, run_startup=False).listen(over))
    print("ready", flush=True)
    await asyncio.to_thread(input)
    began = time.time()
    await remind.kicker().with_labels(delay=DELAY_MS / 1000).kiq("later")
    await remind.kiq("now")
    await over.wait()
    await receiving
    await broker.shutdown()
    print(json.dumps(arrivals), flush=True)


asyncio.run(main())
