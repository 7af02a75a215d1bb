"""Messages sent over HTTP, until the broker has confirmed them and the daemon has parked them, next to the park rate of
the same run: one message in each request, and a thousand lines in each."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.figures import median, percentile
from bench.rows import KEY
from bench.run import Bench
from bench.servers import IN, Place
from bench.watch import Counters
from tests.support.web import tokens_file

TOKEN = "a-token-for-the-bench"
CLIENTS = 16
"""Connections, each with one request at a time."""
KINDS = {"one message a request": 1, "1,000 lines a request": 1000}


def post(address: str, body: bytes, kind: str, requests: int) -> list[float]:
    """Send the same request again and again on one connection: the milliseconds of each. Raises RuntimeError."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind}
    took = []
    for _ in range(requests):
        began = time.monotonic()
        connection.request("POST", "/api/messages", body, headers)
        answer = connection.getresponse()
        said = answer.read()
        if answer.status != 202:
            raise RuntimeError(f"{answer.status}: {said[:300]!r}")
        took.append((time.monotonic() - began) * 1000)
    connection.close()
    return took


async def once(place: Place, lines: int, size: int, count: int) -> tuple[float, Sequence[float]]:
    """Start the daemon once: the rate from the first request until all are parked, and the times of the requests."""
    message = json.dumps({"exchange": IN, "routing_key": KEY, "delay": "6h", "body": "x" * size}).encode()
    body, kind = (message, "application/json") if lines == 1 else ((message + b"\n") * lines, "application/x-ndjson")
    each = max(1, count // lines // CLIENTS)
    tokens = {"HTTP__LISTEN": "127.0.0.1:0", "HTTP__TOKENS_FILE": tokens_file(f"bench publish {TOKEN}")}
    async with await Counters.open(place) as counters, place.daemon(**tokens) as daemon:
        address = (await daemon.event("http served"))["addresses"][0]
        await daemon.ready()
        began, loop = time.monotonic(), asyncio.get_running_loop()
        with ThreadPoolExecutor(CLIENTS) as threads:
            asked = [loop.run_in_executor(threads, post, address, body, kind, each) for _ in range(CLIENTS)]
            total = each * CLIENTS * lines
            await asyncio.gather(counters.follow("parked", total, daemon), *asked)
        rate = total / (time.monotonic() - began)
        await daemon.stop()
    return rate, [one for took in await asyncio.gather(*asked) for one in took]


async def run(bench: Bench) -> None:
    size = bench.options.sizes[0]
    for what, lines in KINDS.items():
        count = bench.options.count_of(size) // (1 if lines > 1 else 10)
        rates: list[float] = []
        times: list[float] = []
        for turn in range(bench.options.repeats):
            bench.say(f"{count:,} messages, {what}, turn {turn + 1}")
            rate, took = await once(await bench.place(), lines, size, count)
            rates.append(rate)
            times += took
        bench.add(what, median(rates), "msg/s", body=size)
        for share in (0.5, 0.99):
            bench.add(f"answer to {what}, p{share * 100:g}", percentile(sorted(times), share), "ms", body=size)
