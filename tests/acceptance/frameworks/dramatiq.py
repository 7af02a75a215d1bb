"""A worker and its publisher, in one process."""
# ruff: noqa: F821

import json
import threading
import time

arrivals = []
over = threading.Event()


@dramatiq.actor(queue_name="mail")
def remind(name):
    arrivals.append([name, round((time.time() - began) * 1000)])
    if len(arrivals) == 2:
        over.set()


worker = dramatiq.Worker(dramatiq.get_broker(), worker_timeout=100)
worker.start()
print("ready", flush=True)
input()
began = time.time()
remind.send_with_options(args=("later",), delay=DELAY_MS)
remind.send("now")
over.wait()
worker.stop()
print(json.dumps(arrivals), flush=True)
