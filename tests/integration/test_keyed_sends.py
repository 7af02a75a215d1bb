"""Requests with an Idempotency-Key over HTTP, with a real store and a stand-in for the daemon that publishes slowly."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import closing

from delayer.amqp.values import Outgoing
from delayer.core.hold import Outcome
from delayer.core.plan import Plan
from delayer.http.view import QUERIES, View
from delayer.store import requests
from delayer.store.schedules import changes
from tests.support.place import eventually
from tests.support.schedules import schedule
from tests.support.store import sql
from tests.unit.http.inside import TOKEN, Inside, served

ROUTES = [{"from": "delayer.in", "to": "delayer.out"}]
AUTH = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}


class SlowInside(Inside):
    """Publishes once ``go`` is set, and needs ``seconds`` to plan a message."""

    def __init__(self, database: str, seconds: float = 0.0) -> None:
        super().__init__(route=ROUTES, store={"url": database})
        self.seconds, self.waiting, self.go = seconds, 0, asyncio.Event()

    def plan(self, message: Outgoing) -> Plan:
        time.sleep(self.seconds)  # The daemon computes, and its loop stands still.
        return super().plan(message)

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]:
        self.waiting += 1
        await self.go.wait()
        return await super().publish(batch)


async def test_sends_that_wait_for_the_broker_leave_the_turns_to_other_changes(database: str) -> None:
    inside = SlowInside(database)
    async with served(inside) as web, sql(database) as admin:
        await changes.add(admin, schedule(), who="test")
        sends = [
            asyncio.create_task(web.ask("POST", "/api/messages", b"{}", {**AUTH, "Idempotency-Key": f"k-{n}"}))
            for n in range(QUERIES)
        ]
        await eventually(lambda: inside.waiting, lambda waiting: waiting == QUERIES)
        paused = await web.ask("PATCH", "/api/schedules/tick", b'{"state": "paused"}', AUTH)
        assert paused.json["state"] == "paused"
        done = await web.post("/actions/schedules", {"verb": "run", "name": "tick"}, Authorization=f"Bearer {TOKEN}")
        assert "Sent now: 1 of 1" in done.text
        assert not any(one.done() for one in sends)
        inside.go.set()
        assert [one.status for one in await asyncio.gather(*sends)] == [202] * QUERIES


async def test_many_lines_are_composed_within_one_attempt(database: str) -> None:
    """Composing takes longer than the store lets a transaction be idle."""
    inside = SlowInside(database, seconds=0.02)
    inside.publish_seconds = 1.0
    inside.go.set()
    lines = "\n".join(json.dumps({"body": str(number)}) for number in range(150)).encode()
    headers = {**AUTH, "Content-Type": "application/x-ndjson", "Idempotency-Key": "k"}
    async with served(inside) as web, sql(database) as admin:
        first = await web.ask("POST", "/api/messages", lines, headers)
        assert (first.status, first.json["sent"]) == (202, 150), first.text
        assert await admin.fetchval("SELECT count(*) FROM request") == 1
        again = await web.ask("POST", "/api/messages", lines, headers)
        assert (again.status, again.json) == (202, first.json)
        assert len(inside.sent) == 150


async def test_a_key_that_is_forgotten_sends_again(database: str) -> None:
    """A repeat by a client that was away for days has the message_id of the first time, and another request has not."""
    inside = SlowInside(database)
    inside.go.set()
    headers = {**AUTH, "Idempotency-Key": "k"}
    async with served(inside) as web, sql(database) as admin:

        async def send(body: str) -> str:
            answer = await web.ask("POST", "/api/messages", json.dumps({"body": body}).encode(), headers)
            assert answer.status == 202, answer.text
            return str(answer.json["message_id"])

        first = await send("a")
        for body, same in (("a", True), ("b", False)):
            await admin.execute("UPDATE request SET at = at - interval '25 hours'")
            await requests.run_upkeep(admin)
            assert (await send(body) == first) == same
        assert [one.body for one in inside.sent] == [b"a", b"a", b"b"]


async def test_an_attempt_outlasts_the_longest_publish(database: str) -> None:
    inside = SlowInside(database)
    inside.publish_seconds = 20.0
    with closing(View(inside).requests) as requests:
        async with requests.attempt(b"k" * 32, b"c" * 32) as attempt:
            assert await attempt.connection.fetchval("SHOW idle_in_transaction_session_timeout") == "30s"
