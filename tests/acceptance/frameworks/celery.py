"""The worker and its publisher, in one process."""
# ruff: noqa: F821, PLW0603

import json
import threading
import time

from celery.signals import worker_ready
from celery.worker import state

app.conf.worker_redirect_stdouts = False
arrivals = []


@app.task
def remind(name):
    arrivals.append([name, round((time.time() - began) * 1000)])
    if len(arrivals) == 2:
        print(json.dumps(arrivals), flush=True)
        state.should_stop = 0


def publish():
    global began
    input()
    began = time.time()
    remind.apply_async(("later",), countdown=DELAY_MS // 1000)
    remind.delay("now")


@worker_ready.connect
def start(**_):
    print("ready", flush=True)
    threading.Thread(target=publish).start()


app.worker_main(["worker", "--pool=solo", "--loglevel=warning", "--without-mingle", "--without-gossip"])
