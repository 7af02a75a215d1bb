"""The HTTP server in the test's own loop, with a stand-in for the daemon: paths, pages, addresses, a taken port."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Any

import pytest

from delayer.amqp.properties import encode_headers, entry, sized
from delayer.cli import status
from delayer.config.model import Settings
from delayer.format import reading
from delayer.http import render, server, view
from delayer.http.access import HEADERS
from delayer.http.view import Depths
from delayer.set_aside.messages import Result
from delayer.store.admin.census import COMPACTED, SCHEDULES, Census, DestinationCount
from delayer.store.admin.stats import InboxCount, StoreOverview
from tests.support.web import Web, tokens_file
from tests.unit.http.inside import EVIL, NOW_MS, REFUSED, STRAY, TOKEN, Inside, served
from tests.unit.http.states import overview


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/health/live", 200, '"alive":true'),
        ("/health/ready", 200, '"ready":true'),
        ("/metrics", 200, 'delayer_queue_messages{queue="delays",role="intake"} 3.0'),
        ("/", 200, "No store is configured"),
        ("/", 200, '<a href="/login">Sign in</a>'),
        ("/parts/overview", 200, "In the cascade"),
        ("/parts/overview", 200, "<dt>Out/s</dt>"),
        ("/api/live", 200, '"blocked":false'),
        ("/api/backlog", 404, "No store is configured"),
        ("/api/backlog", 404, "set [store] url in the configuration; without it, /api/strays lists"),
        ("/waiting", 404, "No store is configured"),
        ("/find?id=zz", 303, ""),
        ("/api/messages", 401, "needs a token. Expected a token of the role read"),
        ("/api/messages/7", 401, "needs a token. Expected a token of the role read"),
        ("/api/held", 401, "needs a token. Expected a token of the role read"),
        ("/api/refused", 401, "needs a token. Expected a token of the role read"),
        ("/api/strays", 401, "needs a token. Expected a token of the role read"),
        ("/api/schedules", 401, "needs a token. Expected a token of the role read"),
        ("/api/schedules/tick", 401, "needs a token. Expected a token of the role read"),
        ("/schedules", 404, "No store is configured"),
        ("/message/7", 404, "No store is configured"),
        ("/body/7", 404, "No store is configured"),
        ("/", 200, '<a href="/refused">Refused <span class="count">1</span></a>'),
        ("/held", 404, "No store is configured"),
        ("/refused", 200, "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("/refused", 200, "delayer refused retry &#39;id-1 $(reboot)&#39; --delay 10s"),
        ("/strays", 200, "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("/", 200, '<a href="/strays">Strays</a>'),
        ("/audit-log", 404, "No store is configured"),
        ("/login", 200, "Who you are"),
        ("/static/htmx.min.js", 200, "htmx"),
        ("/static/../guard.py", 404, "There is nothing here"),
        ("/static/%2e%2e/guard.py", 404, "There is nothing here"),
        ("/nowhere", 404, "There is nothing here"),
        ("/actions/refused", 405, "Not Allowed"),
    ],
)
async def test_every_path(path: str, status: int, says: str) -> None:
    async with served(Inside()) as web:
        answer = await web.get(path)
        assert (answer.status, says in answer.text) == (status, True), answer.text
        assert EVIL not in answer.text
        for name, value in HEADERS.items():
            assert answer.headers[name.lower()] == value
        assert answer.headers["cache-control"] == (
            "public, max-age=300" if status == 200 and "/static" in path else "no-store"
        )
        assert "server" not in answer.headers


async def test_the_metrics_address_serves_only_health_and_metrics() -> None:
    async with served(Inside(), metrics_only=True) as web:
        for path in ("/health/live", "/health/ready", "/metrics", "/", "/api/live", "/refused", "/login"):
            assert (await web.get(path)).status == (200 if path.startswith(("/health", "/metrics")) else 404)


async def test_a_program_with_the_token_lists_what_is_set_aside() -> None:
    inside = Inside()
    allowed = {"Authorization": f"Bearer {TOKEN}"}
    async with served(inside) as web:
        for name, one in (("refused", REFUSED), ("strays", STRAY)):
            listed = {"depth": 1, "delayed": 0, "hidden": "", "messages": [one.as_dict(whole=True)]}
            assert (await web.get(f"/api/{name}", **allowed)).json == listed
        filtered = await web.get("/api/refused?reason=x", **allowed)
        assert (filtered.status, 'unknown field "reason". Expected no fields' in filtered.json["detail"]) == (400, True)
        held = await web.get("/api/held", **allowed)
        assert (held.status, "No store" in held.json["detail"]) == (404, True)


async def test_a_list_shows_some_of_a_messages_headers() -> None:
    """Any publisher may send sixty thousand."""
    properties = encode_headers(entry(b"header", sized(b"A", b"V")) * 9_000)
    inside = Inside()
    inside.aside = REFUSED._replace(properties=properties)
    async with served(inside) as web:
        [message] = (await web.get("/api/refused", Authorization=f"Bearer {TOKEN}")).json["messages"]
        page = await web.get("/refused")
    assert len(message["headers"]) == reading.MOST_HEADERS
    assert message["header_bytes_left_out"] == 13 * (9_000 - reading.MOST_HEADERS)
    assert "more: `delayer refused list --json`" in page.text and page.text.count("header (array)") == render.SHOWN - 1


async def test_the_page_shows_what_waits_in_the_sql_inbox(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [InboxCount(), InboxCount(5, 90_000)]

    async def look(*_: object) -> StoreOverview:
        return overview(inbox=seen[0])

    monkeypatch.setattr(view.stats, "overview", look)
    for says in ("", "SQL inbox:</strong> 5 not moved yet; the oldest was sent 90 s ago."):
        async with served(Inside(store={"url": "postgresql://127.0.0.1:1/x"})) as web:
            page = (await web.get("/parts/overview")).text
        assert "Waiting in the store" in page
        assert says in page if says else "SQL inbox" not in page, page
        del seen[0]


async def test_the_overview_names_schedules_and_what_has_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {(SCHEDULES, 0): 2.0, (b"", 0): 3.0, (b"in", 0): 4.0, (COMPACTED, 0): 5.0}
    to = {(b"out", b"report"): DestinationCount(2.0, NOW_MS), (b"", b"queue"): DestinationCount(0.0, None, 1)}
    census = Census(NOW_MS, counts, exact=True, held={SCHEDULES: 1, b"in": 1}, destinations=to)

    async def look(_: view.View) -> Census:
        return census

    monkeypatch.setattr(view.View, "_census", look)
    async with served(Inside(store={"url": "postgresql://127.0.0.1:1/x"})) as web:
        page = (await web.get("/")).text
    rows = re.findall(r"<tr>\s*<td data-label=\"(?:route|goes to)[^>]*>(.*?)</td>\s*<td[^>]*>(.*?)</td>", page)
    assert {re.sub(r"<[^>]*>", "", name): count for name, count in rows} == {
        "(schedules)": '<a href="/schedules">2</a>', "(straight to the queue)": "3", "(compacted)": "5",
        "in": '<a href="/waiting?route=in">4</a>', "out / report": "2", "queue queue": "0", "delayer.in": "0",
    }  # fmt: skip


async def test_the_menu_counts_without_reading_a_queue() -> None:
    inside = Inside()

    async def look(name: str, limit: int) -> Result:
        assert name == "strays", limit
        return Result(0)

    inside.look_aside = look  # type: ignore[method-assign]
    async with served(inside) as web:
        for path in ("/", "/login", "/strays", "/nowhere"):
            assert '<span class="count">1</span>' in (await web.get(path)).text, path
        assert inside.looks == 1, "pages share a count for seconds"
    inside.lost = True
    async with served(inside) as web:
        assert "count" not in (await web.get("/login")).text


async def test_the_page_names_an_unreachable_broker() -> None:
    inside = Inside()
    inside.lost = True
    async with served(inside) as web:
        assert "no connection" in (await web.get("/")).text
        assert "delayer_broker_up 0.0" in (await web.get("/metrics")).text


async def test_a_taken_port_is_logged_and_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        async with served(Inside(address)) as told:
            assert told.address == "Address already in use"
            taken.close()
            web = Web(address)
            async with asyncio.timeout(20):
                while True:
                    try:
                        assert (await web.get("/health/live")).status == 200
                        break
                    except ConnectionRefusedError:
                        await asyncio.sleep(0.02)


async def test_the_page_shows_an_alarm_of_the_broker() -> None:
    inside = Inside()
    async with served(inside) as web:
        assert "accepts no publishes" not in (await web.get("/")).text
        inside.blocked = True
        assert "accepts no publishes" in (await web.get("/")).text
        assert (await web.get("/api/live")).json["blocked"] is True
        answer = await web.get("/health/ready")
        assert (answer.status, "accepts no publishes" in answer.text) == (503, True)


@pytest.mark.parametrize(
    ("delayed", "shown"),
    [
        ({}, []),
        ({"delays": 0, "delays.due": 0}, ["all queues, delayed or forwarded by RabbitMQ itself up to 12 s ago 0"]),
        (
            {"delays": 7, "delays.due": 0, "delays.refused": 5},
            [
                "delays, delayed or forwarded by RabbitMQ itself 7",
                "delays.refused, delayed or forwarded by RabbitMQ itself 5",
                "all queues, delayed or forwarded by RabbitMQ itself up to 12 s ago 12",
            ],
        ),
        ({"delays": None}, ["all queues, delayed or forwarded by RabbitMQ itself unknown (see broker.management_url)"]),
    ],
)  # fmt: skip
async def test_delayed_messages_are_shown_for_every_queue(delayed: dict[str, int | None], shown: list[str]) -> None:
    inside = Inside()

    async def depths() -> Depths:
        return Depths({"delays": 3, "delays.due": 0, "delays.refused": 1}, {}, delayed)

    inside.depths = depths  # type: ignore[method-assign]
    async with served(inside) as web:
        page = (await web.get("/")).text
    rows = re.findall(r"<tr><td[^>]*>([^<]*delayed or forwarded by RabbitMQ[^<]*)</td><td[^>]*>([^<]*)</td></tr>", page)
    assert [" ".join(row) for row in rows] == shown


@pytest.mark.parametrize("name", ["refused", "strays"])
async def test_a_queue_that_hides_messages_is_not_called_empty(name: str) -> None:
    inside = Inside()

    async def look(_name: str, _limit: int) -> Result:
        return Result(0, 7)

    inside.look_aside = look  # type: ignore[method-assign]
    async with served(inside) as web:
        text = (await web.get(f"/{name}")).text
    assert "The queue holds 7 messages that the broker itself delays or forwards." in text
    assert "Nothing is refused" not in text and "There are no" not in text


async def test_reading_needs_the_token_outside_loopback() -> None:
    async with served(Inside("0.0.0.0:0")) as web:
        for path in ("/", "/parts/overview", "/api/live", "/refused"):
            answer = await web.get(path)
            status_ = 401 if path.startswith("/api") else 403
            assert (answer.status, "Reading needs a token" in answer.text) == (status_, True)
            assert (await web.get(path, Authorization=f"Bearer {TOKEN}")).status == 200
        for path in ("/health/live", "/metrics", "/login", "/static/htmx.min.js"):
            assert (await web.get(path)).status == 200
        native: dict[str, Any] = {"mode": "native", "http": {"listen": web.address, "tokens_file": tokens_file(TOKEN)}}
        assert (await status.look(Settings.model_validate(native)))["error"] is None
        del native["http"]["tokens_file"]
        assert "it needs http.tokens_file" in (await status.look(Settings.model_validate(native)))["error"]


@pytest.mark.parametrize(("listen", "told"), [("127.0.0.1:0", True), ("0.0.0.0:0", False)])
async def test_every_page_names_its_systems_to_permitted_readers(listen: str, told: bool) -> None:
    urls = {"broker": {"url": "amqp://me:hunter2@rabbit/orders"}, "store": {"url": "postgresql://me:hunter2@db/later"}}
    async with served(Inside(listen, **urls)) as web:
        for path in ("/refused", "/login", "/nowhere"):
            page = (await web.get(path)).text
            for name in ("PROD", "rabbit:5672", "orders", "later on db"):
                assert (f" · {name} · " in page, name in page.partition("<body>")[2]) == (told, told), page
            assert "hunter2" not in page


async def test_an_open_public_address_logs_a_warning() -> None:
    async with served(Inside("0.0.0.0:0", is_open=True)) as told:
        address, _, reason = told.address.partition(" ")
        assert (address.startswith("0.0.0.0:"), reason) == (True, server.OPEN)
        assert (await Web(address).get("/")).status == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1", "no-such-host.invalid"])
async def test_an_address_without_a_server_has_its_own_next_step(host: str) -> None:
    """192.0.2.1 is for documentation, and no host has it."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError) as found:
        await server.listening(f"{host}:{taken.getsockname()[1]}")
    assert (server.advice_for(found.value) == server.OTHER_ADDRESS) == (host == "127.0.0.1")
