"""The API of a running daemon, with its broker and its store: messages arrive, requests take effect once."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from delayer.config.tokens import parse_tokens
from delayer.store import requests
from tests.acceptance.own_vhost import OwnVhost
from tests.support.daemon import DaemonProcess
from tests.support.odd import Clock, program
from tests.support.place import eventually
from tests.support.proxy import Proxy
from tests.support.raw import Inbox, text
from tests.support.servers import Postgres
from tests.support.store import sql
from tests.support.web import Answer, Web, tokens_file

TOKEN = "a-token-for-this-test-alone"
SHOP = "another-token-for-this-test"
ALLOWED = {"Authorization": f"Bearer {TOKEN}"}
HOUR = 3_600_000
ROOT = Path(__file__).parents[2]
README_BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
[OF_README] = [one for one in README_BLOCKS if "DELAYER_HTTP__TOKENS_FILE" in one]


class Shop:
    """A client of the API, and the arrivals at its queue."""

    def __init__(self, web: Web, inbox: Inbox, daemon: DaemonProcess) -> None:
        self.web, self.inbox, self.daemon = web, inbox, daemon

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        kind = {"Content-Type": "application/json"} if body is not None else {}
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.web.ask(method, path, content, {**ALLOWED, **kind, **named})

    async def send_keyed(self, body: str, **more: Any) -> Answer:
        message = {"exchange": "in", "routing_key": "inbox", "body": body, "delay": 0, "key": "order", **more}
        return await self.ask("POST", "/api/messages", message)

    async def send(self, body: str, delay: int | str = 0, key: str = "", **more: Any) -> Answer:
        once = {"Idempotency-Key": key} if key else {}
        message = {"exchange": "in", "routing_key": "inbox", "body": body, "delay": delay, **more}
        return await self.ask("POST", "/api/messages", message, **once)


@asynccontextmanager
async def shop(
    place: OwnVhost, mode: str, store: str = "", program: Sequence[str] | None = None, **more: str
) -> AsyncIterator[Shop]:
    tokens = {"HTTP__LISTEN": "127.0.0.1:0", "HTTP__TOKENS_FILE": tokens_file(TOKEN, f"shop publish {SHOP}")}
    async with place.working(place.environ(mode, store) | tokens | more, program=program) as (daemon, _, inbox):
        yield Shop(await Web.of(daemon), inbox, daemon)


@pytest.mark.parametrize("ahead_ms", [HOUR, -HOUR])
async def test_an_instant_from_now_counts_from_the_stores_clock(
    place: OwnVhost, store: str, tmp_path: Path, ahead_ms: int
) -> None:
    """The daemon's host is an hour off. Its messages would be early or late by an hour."""
    (clock := Clock(tmp_path / "clock")).set(ahead_ms)
    route = json.dumps([{"from": "in", "to": "out", "delay_from": ["x-deliver-at"]}])
    async with shop(place, "store", store, program(clock=clock.path), ROUTE=route) as this:

        async def there(due_ms: int) -> dict[str, Any]:
            async def waiting() -> list[dict[str, Any]]:
                answer = await this.ask("GET", "/api/messages?due_after=30m&due_before=150m")
                return answer.json["messages"]

            [one] = await eventually(
                waiting, lambda found: [abs(due_ms - one["due_ms"]) < 60_000 for one in found] == [True]
            )
            return one

        now_ms = time.time_ns() // 1_000_000
        sent = await this.send("late", "1h", message_id="m-1")
        assert (sent.status, now_ms + HOUR <= sent.json["due_ms"]) == (202, True)
        await there(now_ms + HOUR)
        moved = await this.ask("PATCH", "/api/messages?message_id=m-1", {"delay": "2h"})
        assert (moved.status, moved.json["done"]) == (200, 1), moved.text
        one = await there(now_ms + 2 * HOUR)
        assert one["due_ms"] >= now_ms + 2 * HOUR
        form = {"verb": "reschedule", "id": one["id"], "at": "1h"}
        moved = await this.web.post("/actions/messages", form, Accept="application/json", **ALLOWED)
        assert moved.json["done"] == 1, moved.text
        assert (await there(now_ms + HOUR))["due_ms"] >= now_ms + HOUR
        assert (await this.ask("PUT", "/api/schedules/s", {"every": "1h", "to": "out"})).status == 200
        times = (await this.ask("GET", "/api/schedules/s/preview?count=1")).json["times"]
        assert now_ms <= times[0]["at_ms"] <= now_ms + 2 * HOUR


@pytest.mark.parametrize("mode", ["native", "store"])
async def test_a_message_sent_by_http_arrives_when_it_is_due(place: OwnVhost, store: str, mode: str) -> None:
    async with shop(place, mode, store if mode == "store" else "") as this:
        sent = [await this.send("now"), await this.send("soon", 1_500), await this.send("later", "1h")]
        assert [one.status for one in sent] == [202, 202, 202], sent
        lines = b'{"exchange": "in", "routing_key": "inbox", "body": "x"}\n' * 3
        answer = await this.ask("POST", "/api/messages", lines, Content_Type="application/x-ndjson")
        assert (answer.status, answer.json["sent"]) == (202, 3)
        await this.inbox.got([b"now", b"soon", b"x", b"x", b"x"])
        arrived = this.inbox.only(b"soon")
        assert arrived.props.message_id == sent[1].json["message_id"].encode()
        assert arrived.at_ms >= sent[1].json["due_ms"] - 50


async def test_keys_cancel_and_reschedule_what_waits(place: OwnVhost, store: str) -> None:
    async with shop(place, "store", store) as this:
        assert (await this.send("old", HOUR, **{"message_id": "m-1"})).status == 202
        message = {"exchange": "in", "routing_key": "inbox", "key": "order-1", "delay": "1h"}
        for body in ("first", "second"):
            assert (await this.ask("POST", "/api/messages", {**message, "body": body})).status == 202
        reserved = await this.ask("POST", "/api/messages", {**message, "key": "delayer.schedule/tick"})
        assert (reserved.status, "belong to schedules" in reserved.json["detail"]) == (422, True), reserved.text

        async def there() -> list[str | None]:
            return [one["key"] for one in (await this.ask("GET", "/api/messages")).json["messages"]]

        await eventually(there, lambda keys: sorted(map(str, keys)) == ["None", "order-1"])
        moved = await this.ask("PATCH", "/api/messages?key=order-1", {"delay": 0})
        assert (moved.status, moved.json["done"]) == (200, 1), moved.text
        await this.inbox.got([b"second"])
        gone = await this.ask("DELETE", "/api/messages?message_id=m-1", X_Delayer_Who="nightly")
        assert (gone.status, gone.json["done"]) == (200, 1), gone.text
        for path in ("/api/messages?message_id=m-1", "/api/messages?key=order-1"):
            again = await this.ask("DELETE", path)
            assert (again.status, "was delivered, cancelled, replaced or held" in again.json["detail"]) == (404, True)
        async with sql(store) as connection:
            who = await connection.fetchval("SELECT who FROM audit_log WHERE verb = 'cancel' AND messages > 0")
        assert who == "nightly (token ops, http, 127.0.0.1)"


async def test_a_repeated_request_takes_effect_once(place: OwnVhost, store: str) -> None:
    async with shop(place, "store", store) as this:
        first = await this.send("once", key="k-1")
        again = await this.send("once", key="k-1")
        assert (first.status, again.status, again.json) == (202, 202, first.json)
        other = await this.send("twice", key="k-1")
        assert (other.status, "the same request" in other.json["detail"]) == (422, True)
        both = await asyncio.gather(*(this.send("many", key="k-2") for _ in range(20)))
        done = [one for one in both if one.status == 202]
        assert {one.status for one in both} <= {202, 409} and done
        assert len({one.json["message_id"] for one in done}) == 1
        mine = {"Authorization": f"Bearer {SHOP}"}
        message = {"exchange": "in", "routing_key": "inbox", "body": "shop's", "delay": 0}
        answer = await this.ask("POST", "/api/messages", message, **mine, **{"Idempotency-Key": "k-1"})
        assert answer.status == 202, "each token has keys of its own"
        assert answer.json["message_id"] != first.json["message_id"]
        await this.inbox.got([b"once", b"many", b"shop's"])
        await this.send("end")
        await this.inbox.got([b"once", b"many", b"shop's", b"end"])
        assert {*this.inbox.counts.values()} == {1}
        async with sql(store) as connection:
            ours = "FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'delayer act'"
            assert 1 <= await connection.fetchval(f"SELECT count(*) {ours}") <= 4, "requests share a few connections"
            await connection.execute(f"SELECT pg_terminate_backend(pid) {ours}")
            await eventually(lambda: this.send("many", key="k-2"), lambda answer: answer.status == 202)
            await connection.execute("UPDATE request SET at = at - interval '2 days'")
            await requests.run_upkeep(connection)
            assert await connection.fetchval("SELECT count(*) FROM request") == 0


async def test_odd_values_reach_the_consumer_as_they_are(place: OwnVhost, store: str) -> None:
    odd = "\r\nX: y\0\u2028\u202e" + "ü" * 40
    names = ("correlation_id", "reply_to", "type", "app_id", "content_type", "content_encoding", "message_id")
    async with shop(place, "store", store) as this:
        more = dict.fromkeys(names, odd) | {"headers": {odd: odd, "n": -(1 << 63), "f": 3.4e38}, "priority": 255}
        answer = await this.send(odd, expiration="4294967295", **more)
        assert answer.status == 202, answer.text
        await this.inbox.got([odd.encode()])
        props = this.inbox.only(odd.encode()).props
        assert {getattr(props, name) for name in names} == {odd.encode()}
        assert props.one(odd.encode()) == text(odd)
        assert [one["event"] for one in this.daemon.events if one["level"] in ("warning", "error")] == []


async def test_what_the_broker_took_in_part_is_sent_in_part_again(place: OwnVhost, store: str) -> None:
    """The exchange of one route is unbound: the broker returns its messages."""
    async with shop(place, "store", store) as this:
        place.things.unbind("in.queue", "delays")
        one = {"routing_key": "inbox", "delay": 0}
        lines = [{**one, "exchange": "in", "body": "a"}, {**one, "exchange": "in.queue", "body": "b"}]
        body = "\n".join(map(json.dumps, lines)).encode()
        headers = {"Content-Type": "application/x-ndjson", "Idempotency-Key": "part"}
        answer = await this.web.ask("POST", "/api/messages", body, ALLOWED | headers)
        assert answer.status == 503, answer.text
        assert [bool(one["sent"]) for one in answer.json["results"]] == [True, False]
        place.things.bind("in.queue", "delays")

        async def repeated() -> int:
            return (await this.web.ask("POST", "/api/messages", body, ALLOWED | headers)).status

        await eventually(repeated, lambda status: status == 202)
        await this.inbox.got([b"a", b"b"])
        await this.send("end")
        await this.inbox.got([b"end"])
        assert {*this.inbox.counts.values()} == {1}


async def test_without_a_store_the_api_says_what_needs_one(place: OwnVhost) -> None:
    async with shop(place, "native") as this:
        for method, path, body in (
            ("DELETE", "/api/messages?key=a", None), ("PATCH", "/api/messages?key=a", {"delay": 1}),
            ("GET", "/api/messages", None), ("GET", "/api/schedules", None),
            ("POST", "/api/schedules", {"name": "a", "every": "1h", "to": "out"}),
        ):  # fmt: skip
            answer = await this.ask(method, path, body)
            assert (answer.status, "No store is configured" in answer.json["detail"]) == (404, True), answer.text
        keyed = await this.send("a", key="k")
        assert (keyed.status, "needs a store" in keyed.json["detail"]) == (400, True)


async def test_a_key_waits_for_a_store_that_is_away(place: OwnVhost, store: str, postgres: Postgres) -> None:
    """The daemon in native mode would refuse the message now, and would not once the store is back."""
    async with Proxy(postgres.port) as proxy:
        database = store.rpartition("/")[2]
        async with shop(place, "native", postgres.url(database, port=proxy.port)) as this:
            assert (await this.send_keyed("1")).status == 202
            await this.inbox.got([b"1"])
            await proxy.refuse()
            await this.daemon.event("store unreachable")
            away = await this.send_keyed("2")
            assert (away.status, away.headers["retry-after"]) == (503, "5"), away.text
            assert "need the store" in away.json["detail"] and away.json["next"]
            wrong = await this.send_keyed("3", headers={"x-delay-key-mode": "lost"})
            assert wrong.status == 422, "it would be refused with the store too"
            assert (await this.send("4")).status == 202
            await this.inbox.got([b"4"])
            await proxy.accept()
            await eventually(lambda: this.send_keyed("2"), lambda answer: answer.status == 202)
            await this.inbox.got([b"2"])


async def test_schedules_over_http(place: OwnVhost, store: str) -> None:
    async with shop(place, "store", store) as this:
        new = {"name": "tick", "every": "1h", "to": "out", "routing_key": "inbox", "body": "tick"}
        added = await this.ask("POST", "/api/schedules", new)
        assert (added.status, added.headers["location"], added.json["state"]) == (201, "/api/schedules/tick", "active")
        assert (await this.ask("POST", "/api/schedules", new)).status == 409
        wrong = await this.ask("POST", "/api/schedules", {**new, "name": "b", "every": "1ms"})
        assert (wrong.status, wrong.json["errors"][0]["where"]) == (422, "every")
        for zone, name in (("Europe/Nowhere", "tick"), ("Europe/Nowhere", "zone")):
            cron = {"cron": "0 7 * * MON", "zone": zone, "to": "out"}
            wrong = await this.ask("PUT", f"/api/schedules/{name}", cron)
            assert (wrong.status, [one["where"] for one in wrong.json["errors"]]) == (422, ["zone"]), wrong.text
        wrong = await this.ask("PUT", "/api/schedules/long", {"cron": "1," * 50_000, "to": "out"})
        assert (wrong.status, "at most 200 characters" in wrong.json["detail"]) == (422, True), wrong.text[:300]
        assert (await this.ask("POST", "/api/schedules", {"name": "b"})).status == 422
        for field, value in (
            ("max", 1 << 63),
            ("max", 10**30),
            ("name", "a\0b"),
            ("last", "9999-12-31T23:59:59-23:59"),
        ):
            wrong = await this.ask("POST", "/api/schedules", {"name": "b", "every": "1h", "to": "out", field: value})
            assert (wrong.status, wrong.json["errors"][0]["where"]) == (422, field)
        for path in ("/tick%00", "/%FF", "/tick%00/preview"):
            assert (await this.ask("GET", f"/api/schedules{path}")).status == 404
        for path in ("?after=tick%00", "?after=%FF"):
            assert (await this.ask("GET", f"/api/schedules{path}")).status == 400
        assert (await this.ask("PATCH", "/api/schedules/tick", {"max": 1 << 63})).status == 422
        assert (await this.ask("POST", "/api/schedules/tick/run")).status == 202
        await this.inbox.got([b"tick"])
        times = await this.ask("GET", "/api/schedules/tick/preview?count=3")
        assert [one["after_ms"] for one in times.json["times"]] == [None, HOUR, HOUR]
        assert (await this.ask("PATCH", "/api/schedules/tick", {"every": "2h"})).json["every_ms"] == 2 * HOUR
        assert (await this.ask("PATCH", "/api/schedules/tick", {"state": "paused"})).json["state"] == "paused"
        assert (await this.ask("PATCH", "/api/schedules/tick", {"state": "active"})).json["state"] == "active"
        assert (await this.ask("PATCH", "/api/schedules/tick", {})).status == 422
        cron = {"cron": "0 7 * * MON", "zone": "Europe/Berlin", "to": "out"}
        put = await this.ask("PUT", "/api/schedules/tick", cron)
        assert (put.status, put.json["cron"], put.json["body"]) == (200, "0 7 * * MON", "")
        listed = (await this.ask("GET", "/api/schedules")).json
        assert (listed["schedules"], listed["next"]) == ([{**put.json, "held": 0}], "")
        assert (await this.ask("GET", "/api/schedules/tick")).json == listed["schedules"][0]
        removed = await this.ask("DELETE", "/api/schedules/tick")
        assert (removed.status, removed.json) == (200, {"removed": "tick", "held": 0})
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/run"), ("GET", "/preview")):
            gone = await this.ask(method, f"/api/schedules/tick{path}")
            assert (gone.status, "`delayer " in gone.json["detail"]) == (404, False)


async def test_the_examples_of_the_documentation(place: OwnVhost, store: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "http.md").read_text()
    api = page[page.index("## The API") : page.index("## Tokens")]
    blocks = re.findall(r"```sh\n(.*?)```", api, re.DOTALL)
    place.things.exchange("delayer.out")
    place.things.bind("delayer.out", "inbox")
    routes = json.dumps([{"from": "delayer.in", "to": "delayer.out"}])
    async with shop(place, "store", store, ROUTE=routes) as this:

        def run(block: str) -> str:
            script = block.replace("127.0.0.1:9419", this.web.address)
            done = subprocess.run(
                ["sh", "-euc", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, (block, done.stdout, done.stderr)
            return done.stdout

        [token, header] = re.findall(r"^\(umask 077; .*$", page, re.MULTILINE)
        for making, names in ((OF_README.splitlines()[0], ["shop"]), (token, ["me"])):
            await asyncio.to_thread(run, making)
            found = parse_tokens((tmp_path / "http-tokens").read_text())
            assert ([one.name for one in found.tokens], found.mistakes) == (names, ())
        (tmp_path / "http-token").write_text(TOKEN)
        (tmp_path / "http-tokens").write_text(f"shop publish {TOKEN}\n")
        await asyncio.to_thread(run, header)
        assert '"message_id"' in await asyncio.to_thread(run, OF_README.partition(" starts\n")[2])
        for block in blocks:
            if "PATCH" in block and "key=" in block:
                rows = lambda: this.ask("GET", "/api/messages?key=order-4711")  # noqa: E731
                await eventually(rows, lambda answer: len(answer.json["messages"]) == 1)
            assert await asyncio.to_thread(run, block)
        await this.inbox.got([b"one", b"two"])
        assert len(blocks) == 5
        [shown] = re.findall(r"```json\n(.*?)```", api, re.DOTALL)
        first = json.loads(await asyncio.to_thread(run, blocks[0]))
        assert list(json.loads(shown)) == list(first)


CHECKS = (
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance,
)  # fmt: skip


@pytest.mark.deadline(300)
async def test_no_request_gets_an_undocumented_answer(place: OwnVhost, store: str) -> None:
    """Requests made from the document, valid and not, leave the daemon as it was."""
    async with shop(place, "store", store) as this:
        document = (await this.web.get("/api/openapi.json")).json

        def attack() -> int:
            schema = schemathesis.openapi.from_dict(document)
            schema.config.update(base_url=f"http://{this.web.address}")
            calls = 0
            for found in schema.get_all_operations():
                operation = found.ok()

                @settings(
                    max_examples=15,
                    deadline=None,
                    database=None,
                    derandomize=True,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                def run(case: Any) -> None:
                    nonlocal calls
                    calls += 1
                    if isinstance(case.body, dict) and case.path == "/api/messages" and calls % 4:
                        case.body["exchange"] = "in"  # Invented names are no routes.
                    response = case.call(headers=ALLOWED)
                    case.validate_response(response, checks=CHECKS)

                for mode in schemathesis.GenerationMode:
                    with suppress(Unsatisfiable):  # A request without parameters cannot be wrong.
                        given(case=operation.as_strategy(generation_mode=mode))(run)()
            return calls

        assert await asyncio.to_thread(attack) > 300
        assert (await this.web.get("/health/live")).status == 200
        await this.send("still there")
        await this.inbox.got([b"still there"])
        assert not [one for one in this.daemon.events if one["level"] == "error"]
