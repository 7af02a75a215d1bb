"""The HTTP server in the test's own loop, with a stand-in for the daemon: paths, headers, stop, a taken port."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from delayer.amqp.errors import BrokerLost
from delayer.amqp.values import CONFIRMED, Delivery, Outgoing
from delayer.cli import status
from delayer.config.model import Settings
from delayer.core.hold import Outcome
from delayer.core.plan import Plan
from delayer.daemon.live_settings import policy_of
from delayer.format.refusal import NO_EDITS, RetryEdits
from delayer.http import server
from delayer.http.access import AT_ONCE, HEADERS
from delayer.http.recent import host_ms
from delayer.http.server import HttpPart
from delayer.http.view import DaemonState, Depths
from delayer.intake.handle import classify
from delayer.set_aside.messages import Result, SetAsideMessage
from delayer.store.admin.changes import ChangeResult
from tests.support.fakes import until
from tests.support.logged import capture_logs
from tests.support.web import Web, tokens_file
from tests.unit.http.states import LINE, state

TOKEN = "open-sesame-open-sesame"
EVIL = "<script>alert(1)</script>"
REFUSED = SetAsideMessage(
    "id-1 $(reboot)", EVIL, b"", f"queue {EVIL}", f"x-delay: {EVIL}", b"\0\0", EVIL.encode(), 10, {"exchange": ""}
)
STRAY = SetAsideMessage(
    "s-1", EVIL, b"", "queue q", EVIL, b"\0\0", EVIL.encode(), len(EVIL), {"due_ms": 0, "attempts": 10}
)


class Inside:
    """A daemon in native mode without a store."""

    def __init__(self, listen: str = "127.0.0.1:0", *, is_open: bool = False, **more: Any) -> None:
        http = {
            "listen": listen,
            "metrics_listen": "127.0.0.2:0",
            "tokens_file": tokens_file(TOKEN),
            "open": is_open,
            "label": "PROD",
        }
        self.settings = Settings.model_validate({"mode": "native", "http": http, **more})
        self.lost = False
        self.blocked = False
        self.done: list[tuple[str, frozenset[str], str]] = []
        self.mends: list[RetryEdits] = []
        self.looks = 0
        self.sent: list[Outgoing] = []
        self.outcomes: dict[bytes, Outcome] = {}

    def plan(self, message: Outgoing) -> Plan:
        exchange, key, properties, body, *_ = message
        delivery = Delivery(0, False, exchange, key, properties, body)
        policy = policy_of(self.settings, has_store=self.settings.store_url is not None)
        return classify(delivery, policy, host_ms(), 100_000)[2]

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]:
        if self.lost:
            raise BrokerLost("no connection")
        self.sent += batch
        return [self.outcomes.get(message.body, CONFIRMED) for message in batch]

    def state(self) -> DaemonState:
        lines = {"publish": LINE._replace(blocked=self.blocked)}
        return state(mode="native", store=False, connections=lines)

    async def depths(self) -> Depths:
        self.looks += 1
        if self.lost:
            raise BrokerLost("no connection")
        return Depths({"delays": 3, "delays.due": 0, "delays.refused": 1}, {27: 5, 0: None})

    async def look_aside(self, name: str, limit: int) -> Result:
        return Result(1, found=[REFUSED if name == "refused" else STRAY][:limit])

    async def change_aside(
        self, name: str, verb: str, ids: frozenset[str], who: str, mend: RetryEdits
    ) -> tuple[Result, int]:
        self.done.append((f"{name} {verb}", ids, who))
        self.mends.append(mend)
        return ChangeResult("Dropped", 1, len(ids), ["one stays"])


@asynccontextmanager
async def served(inside: Inside, *, metrics_only: bool = False) -> AsyncIterator[Web]:
    """Serve until the end of the block, on a port chosen by the system."""
    stopping = asyncio.Event()
    with capture_logs() as logs:
        part = asyncio.create_task(HttpPart(inside, metrics_only=metrics_only, retry_seconds=0.05).run(stopping))
        await until(lambda: bool(logs))
        told = (*logs[0].get("addresses", ()), logs[0].get("reason", ""))
        try:
            yield Web(" ".join(told).strip())
        finally:
            stopping.set()
            async with asyncio.timeout(20):
                await part


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


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Content_Length": "9999999"}, 413),
        ({"Transfer_Encoding": "chunked"}, 411),
        ({"Origin": "https://evil.example"}, 403),
        ({}, 403),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": f"Bearer {TOKEN}", "Content_Type": "text/plain"}, 400),
        ({"Authorization": f"Bearer {TOKEN}"}, 200),
    ],
    ids=range(8),
)
async def test_changes_need_the_token(headers: dict[str, str], status: int) -> None:
    inside = Inside()
    async with served(inside) as web:
        answer = await web.post("/actions/refused", {"verb": "retry", "id": "id-1"}, **headers)
        assert answer.status == status, answer.text
        who = "a program (token ops, http, 127.0.0.1)"
        assert inside.done == ([("refused retry", frozenset({"id-1"}), who)] if status == 200 else [])


@pytest.mark.parametrize(
    ("form", "mend"),
    [
        ({}, NO_EDITS),
        ({"delay": " 10s ", "set_header": "", "drop_header": ""}, RetryEdits.of(10_000, {}, [], {})),
        ({"set_header": ["tries:int=3", "who=me"], "drop_header": ["x-dealy", "b"]},
         RetryEdits.of(None, {"tries": 3, "who": "me"}, [b"x-dealy", b"b"], {})),
        ({"delay": "soon"}, "Delay: expected a duration"),
        ({"delay": ["1s", "2s"]}, "delay: expected once"),
        ({"set_header": "tries:int=x"}, "Set header: tries: expected a value of type int"),
        ({"set_headers": "a=b"}, "Unknown field"),
    ],
    ids=str,
)  # fmt: skip
async def test_a_retry_of_refused_messages_fixes_headers(form: dict[str, Any], mend: RetryEdits | str) -> None:
    inside = Inside()
    async with served(inside) as web:
        headers = {"Authorization": f"Bearer {TOKEN}", "Accept": "application/json"}
        answer = await web.post("/actions/refused", {"verb": "retry", "id": "id-1", **form}, **headers)
        if isinstance(mend, str):
            assert (answer.status, inside.done) == (400, [])
            assert mend in answer.text
        else:
            assert answer.json == {"heading": "Dropped: 1 of 1", "done": 1, "lines": ["one stays"], "found": {}}
            assert inside.mends == [mend]


async def test_a_program_with_the_token_lists_what_is_set_aside() -> None:
    inside = Inside()
    allowed = {"Authorization": f"Bearer {TOKEN}"}
    async with served(inside) as web:
        for name, one in (("refused", REFUSED), ("strays", STRAY)):
            listed = {"depth": 1, "delayed": 0, "hidden": "", "messages": [one.as_dict()]}
            assert (await web.get(f"/api/{name}", **allowed)).json == listed
        filtered = await web.get("/api/refused?reason=x", **allowed)
        assert (filtered.status, "reason: expected one of no fields" in filtered.json["detail"]) == (400, True)
        held = await web.get("/api/held", **allowed)
        assert (held.status, "No store" in held.json["detail"]) == (404, True)


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


async def test_reads_of_refused_messages_are_shared_for_seconds() -> None:
    inside = Inside()
    looks = []

    async def look(_name: str, limit: int) -> Result:
        looks.append(limit)
        return Result(len(looks))

    inside.look_aside = look  # type: ignore[method-assign]
    async with served(inside) as web:
        for _ in range(5):
            assert (await web.get("/refused")).status == 200
        assert len(looks) == 1
        await web.post("/actions/refused", {"verb": "retry", "id": "id-1"}, Authorization=f"Bearer {TOKEN}")
        assert "the first 0 are shown" in (await web.get("/refused")).text
        assert len(looks) == 2, "a change looks again"


@pytest.mark.parametrize(
    ("said", "who"),
    [("nightly-job", "nightly-job"), ("x" * 200, "x" * 80), ("a\tb\x1b[2J", "ab[2J"), (" ", "a program")],
)
async def test_a_program_names_its_user(said: str, who: str) -> None:
    inside = Inside()
    async with served(inside) as web:
        headers = {"Authorization": f"Bearer {TOKEN}", "X-Delayer-Who": said}
        await web.post("/actions/refused", {"verb": "retry", "id": "id-1"}, **headers)
        assert [one for _, _, one in inside.done] == [f"{who} (token ops, http, 127.0.0.1)"]


async def test_a_session_is_a_protected_cookie() -> None:
    inside = Inside()
    async with served(inside) as web:
        assert (await web.post("/login", {"who": "ada", "token": "wrong"})).status == 403
        assert (await web.post("/login", {"who": "", "token": TOKEN})).status == 400
        answer = await web.post("/login", {"who": "ada", "token": TOKEN})
        assert answer.status == 303
        assert TOKEN not in str(answer)
        cookie = answer.headers["set-cookie"]
        assert {"HttpOnly", "Path=/", "SameSite=strict"} <= set(re.split("; ?", cookie))
        assert cookie.startswith(f"delayer_session_{web.address.rpartition(':')[2]}=")
        session = {"Cookie": cookie.partition(";")[0]}
        asked = await web.post("/actions/refused", {"verb": "drop", "id": "id-1 $(reboot)"}, **session)
        assert (asked.status, "Drop 1 message?" in asked.text, inside.done) == (200, True, []), (
            "a person is asked first"
        )
        assert "&lt;script&gt;alert(1)&lt;/script&gt;, x-delay: " in asked.text, (
            "where it came in, and why it is refused"
        )
        for path, id in (("refused", "id-1"), ("strays", "s-1")):
            done = await web.post(f"/actions/{path}", {"verb": "drop", "id": id, "confirmed": "yes"}, **session)
            assert (done.status, done.headers["location"]) == (303, f"/{path}")
            assert "Dropped: 1 of 1" not in (await web.get(f"/{path}")).text, "for another client"
            assert "Dropped: 1 of 1" in (await web.get(f"/{path}", **session)).text
            assert "Dropped: 1 of 1" not in (await web.get(f"/{path}", **session)).text, "once"
        who = "ada (token ops, page, 127.0.0.1)"
        assert inside.done == [("refused drop", frozenset({"id-1"}), who), ("strays drop", frozenset({"s-1"}), who)]
        await web.post("/logout", {}, **session)
        assert (await web.post("/actions/refused", {"verb": "drop", "id": "id-1"}, **session)).status == 403


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


async def test_refused_clients_do_not_query_the_broker() -> None:
    inside = Inside()
    async with served(inside) as web:
        form = {"verb": "drop", "id": "id-1"}
        for more, status, looks in (
            ({}, 403, 1), ({"Authorization": "Bearer wrong"}, 401, 1), ({"Authorization": f"Bearer {TOKEN}"}, 200, 2),
        ):  # fmt: skip
            await web.get("/metrics")
            answer = await web.post("/actions/refused", form, **more)
            await web.get("/metrics")
            assert (answer.status, inside.looks) == (status, looks)
            assert ("found one that is not in" in answer.text) == ("wrong" in str(more))


async def opened(web: Web, said: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that sends these bytes and then stays silent."""
    host, _, port = web.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(said)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("metrics_only", [False, True])
@pytest.mark.parametrize("path", ["/health/live", "/health/ready"])
@pytest.mark.parametrize(
    "ask",
    [
        "GET {} HTTP/1.0\r\n",
        "OPTIONS {} HTTP/1.0\r\n",
        "HEAD {} HTTP/1.0\r\n",
        "HEAD {} HTTP/1.1\r\nHost: 10.1.2.3:9419\r\n",
        "OPTIONS {} HTTP/1.1\r\nHost: lb.example\r\nOrigin: https://evil.example\r\n",
        "GET {}?from=lb HTTP/1.1\r\nHost:\r\nSec-Fetch-Site: cross-site\r\n",
        "GET {} HTTP/1.1\r\nHost: [broken\r\nTransfer-Encoding: chunked\r\n",
    ],
)
async def test_a_health_check_of_any_form_is_answered(ask: str, path: str, metrics_only: bool) -> None:
    async with served(Inside(), metrics_only=metrics_only) as web:
        end = "\r\n0\r\n\r\n" if "chunked" in ask else "\r\n"
        reader, writer = await opened(web, (ask.format(path) + "Connection: close\r\n" + end).encode())
        async with asyncio.timeout(10):
            head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200"), head
        assert (b"reasons" in body) == (not ask.startswith("HEAD"))


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/live", "/static/htmx.min.js", "/health/live/x", "/health"])
async def test_everything_else_keeps_its_check_of_the_host(path: str) -> None:
    async with served(Inside()) as web:
        for ask in ("GET {} HTTP/1.0\r\n\r\n", "GET {} HTTP/1.0\r\nHost: lb.example\r\n\r\n"):
            reader, writer = await opened(web, ask.format(path).encode())
            async with asyncio.timeout(10):
                assert (await reader.read(-1)).startswith(b"HTTP/1.1 421")
            writer.close()


async def test_a_quiet_connection_ends_after_its_answer() -> None:
    async with served(Inside()) as web:
        reader, writer = await opened(web, b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.read(-1)).startswith(b"HTTP/1.1 200")
        writer.close()


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


async def test_slow_queries_run_one_after_another() -> None:
    inside = Inside()
    began, go, at_once = asyncio.Event(), asyncio.Event(), []

    async def look(_name: str, limit: int) -> Result:
        at_once.append(1)
        began.set()
        await go.wait()
        return Result(0)

    inside.look_aside = look  # type: ignore[method-assign]

    async def status(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        answer = await reader.read(-1)
        writer.close()
        return int(answer.split()[1])

    ask = b"GET /refused HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    async with served(inside) as web:
        asking = [await opened(web, ask) for _ in range(AT_ONCE - 2)]
        await began.wait()
        assert (await web.get("/health/live")).status == 200
        more = [asyncio.create_task(status(*await opened(web, ask))) for _ in range(20)]
        done, _ = await asyncio.wait(more, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result() for task in done} == {503}, "more at once than the limit"
        assert len(at_once) == 1
        go.set()
        assert {await status(*one) for one in asking} == {200}
        await asyncio.wait(more)


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET /health/live HTTP/1.1\r\nHost: localh",
        b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",
    ],
    ids=range(3),
)
async def test_a_slow_client_loses_its_connection(monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.3)
    async with served(Inside()) as web:
        reader, writer = await opened(web, start)

        async def drip() -> None:
            while True:
                writer.write(b"o")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip()) if start else None
        with suppress(ConnectionResetError):
            async with asyncio.timeout(4):
                await reader.read(-1)
        if dripping is not None:
            dripping.cancel()
        writer.close()
        assert (await web.get("/health/live")).status == 200


async def test_a_client_that_reads_no_answer_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READ_SECONDS", 0.3)
    ask = b"GET /static/uPlot.iife.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with served(Inside()) as web:
        _, writer = await opened(web)
        writer.transport.pause_reading()
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(20):
                while True:
                    writer.write(ask * 20)
                    await writer.drain()
                    await asyncio.sleep(0.01)
        assert (await web.get("/health/live")).status == 200


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
