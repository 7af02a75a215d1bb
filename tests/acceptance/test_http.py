"""Health and metrics of a running daemon: the figures match its work, and no request can stop it."""

from __future__ import annotations

import html
import re
import socket
import time

import psutil

from delayer.broker.pipelined_admin import DELAYS_FROM
from delayer.core.filters import HOW_TO_NAME
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import Parcel, Target
from delayer.format.envelope import HoldNote, envelope_properties
from tests.acceptance.own_vhost import OwnVhost, delayed
from tests.acceptance.world import BROKER_SECRET, STORE_SECRET, USER
from tests.support.daemon import DaemonProcess
from tests.support.place import counted, eventually
from tests.support.raw import Message, Props, number, text
from tests.support.servers import Postgres
from tests.support.web import Web, tokens_file

ANY_PORT = {"HTTP__LISTEN": "127.0.0.1:0"}
HOUR = 3_600_000
GROUPS = (("in.queue", "q.a"), ("in.queue", "q.b"), ("in.missing", "m"))


async def test_metrics_count_the_messages(place: OwnVhost, store: str) -> None:
    async with place.working(place.environ("store", store) | ANY_PORT) as (daemon, raw, inbox):
        web = await Web.of(daemon)
        soon = [delayed(f"soon {n}", 5_000 + n) for n in range(100)]
        later = [delayed(f"later {n}", 5 * HOUR + n) for n in range(40)]
        next_day = [delayed(f"days {n}", 50 * HOUR + n) for n in range(3)]
        lost = [delayed(f"lost {n}", 200, through="in.missing") for n in range(2)]
        broken = [Message("in", b"inbox", Props(headers=((b"x-delay", text("soon")),)), b"broken")]
        await raw.publish(*soon, *later, *next_day, *lost, *broken)
        await inbox.got(message.body for message in soon)

        async def look() -> dict[tuple[str, ...], float]:
            return await web.metrics()

        route = "route=in"

        def over(seen: dict[tuple[str, ...], float]) -> bool:
            return seen.get(("delayer_held_messages",)) == 2 and seen["delayer_released_total", route] == 100

        found = await eventually(look, over)
        assert found["delayer_parked_total", route] == 143
        assert found["delayer_refused_total", route] == 1
        assert found["delayer_held_total", "route=in.missing"] == 2
        assert found["delayer_nacked_total", "route=in.missing"] == 0
        assert found["delayer_returned_total", "route=in.missing"] == 2
        assert found["delayer_lateness_seconds_count", route] == 100
        assert 0 <= found["delayer_lateness_seconds_sum", route] < 100
        assert found["delayer_waiting_messages",] == 43
        assert found["delayer_lanes",] == 4
        assert found["delayer_queue_messages", "queue=delays.refused", "role=refused"] in {0, 1}  # some seconds ago
        assert found["delayer_store_up",] == found["delayer_broker_up",] == found["delayer_ready",] == 1
        for of in ("batch_messages_sum", "claim_seconds_count", "settle_seconds_count", "publish_seconds_count"):
            assert any(name == f"delayer_{of}" and value > 0 for (name, *_), value in found.items()), of

        counted = await eventually(look, lambda seen: seen.get(("delayer_backlog_messages", "due=week", route)) == 3)
        assert counted["delayer_backlog_messages", "due=day", route] == 40
        assert counted["delayer_store_messages_total", "kind=parked"] == 145
        assert await daemon.stop() == 0
        assert not [one for one in daemon.events if one["level"] == "error"]


async def test_health(place: OwnVhost, store: str) -> None:
    async with DaemonProcess(place.environ("store", store) | ANY_PORT) as daemon:
        web = await Web.of(await daemon.ready())
        assert (await web.get("/health/live")).json == {"alive": True, "reasons": []}

        async def ready() -> int:
            return (await web.get("/health/ready")).status

        await eventually(ready, lambda status: status == 200)
        # Without its queue the daemon is not ready: the queue is gone, and the daemon may not declare another one.
        place.rabbitmq.add_user(USER, BROKER_SECRET, vhost=place.vhost, configure="^$", read=".*", write=".*")
        place.things._call("DELETE", "queues", "delays")
        answer = await eventually(lambda: web.get("/health/ready"), lambda answer: len(answer.json["reasons"]) == 2)
        assert answer.status == 503
        consumed, declared = answer.json["reasons"]
        assert consumed == "queue 'delays' is not consumed"
        assert declared.startswith("the topology is not in place: exchange 'in': ACCESS_REFUSED")
        for secret in (BROKER_SECRET, STORE_SECRET):
            assert secret not in answer.text + (await web.get("/metrics")).text
        place.rabbitmq.add_user(USER, BROKER_SECRET, vhost=place.vhost, configure=".*", read=".*", write=".*")
        await eventually(ready, lambda status: status == 200)


async def test_the_store_is_a_condition_in_store_mode_only(place: OwnVhost) -> None:
    with Postgres() as postgres:
        name = postgres.add_store()
        for mode, status in (("store", 503), ("native", 200)):
            async with DaemonProcess(place.environ(mode, postgres.url(name)) | ANY_PORT) as daemon:
                web = await Web.of(await daemon.ready())
                await eventually(lambda: web.get("/health/ready"), lambda answer: answer.status == 200)  # noqa: B023
                postgres.stop()

                async def store_up() -> float:
                    return (await web.metrics())["delayer_store_up",]  # noqa: B023

                await eventually(store_up, lambda up: up == 0)
                answer = await web.get("/health/ready")
                assert answer.status == status, answer.text
                assert (await web.get("/health/live")).status == 200
                postgres.start()
                await eventually(lambda: web.get("/health/ready"), lambda answer: answer.status == 200)  # noqa: B023
                assert await daemon.stop() == 0


async def test_without_a_store_the_log_names_the_author_of_a_drop(place: OwnVhost) -> None:
    """Without a store there is no audit log. The daemon's stderr is its log, and contains only events."""
    token = "a-token-for-this-test-alone"
    environ = place.environ("native") | ANY_PORT | {"HTTP__TOKENS_FILE": tokens_file(token)}
    async with DaemonProcess(environ) as daemon, await place.raw() as raw:
        web = await Web.of(await daemon.ready())
        for name in (b"one", b"other"):
            props = Props(headers=((b"x-delay", text("soon")),), message_id=name)
            await raw.publish(Message("in", b"inbox", props, name))
        assert (await daemon.event("message refused"))["message_id"] in ("one", "other")
        ids = ["one"]
        allowed = {"Authorization": f"Bearer {token}", "X-Delayer-Who": "nightly"}
        done = await web.post("/actions/refused", {"verb": "drop", "id": ids}, **allowed)
        assert done.status == 200, done.text
        told = await daemon.event("set aside acted on")
        assert (told["verb"], told["messages"], told["ids"]) == ("drop", 1, ids)
        assert told["who"] == "nightly (token ops, http, 127.0.0.1)"
        await daemon.stop()
        assert daemon.stray_lines == []


async def test_a_program_with_the_token_finds_a_message(place: OwnVhost, store: str) -> None:
    token = "a-token-for-this-test-alone"
    allowed = {"Authorization": f"Bearer {token}"}
    environ = place.environ("store", store) | ANY_PORT | {"HTTP__TOKENS_FILE": tokens_file(token)}
    async with place.working(environ) as (daemon, raw, _):
        web = await Web.of(daemon)
        hour = ((b"x-delay", number("I", HOUR)),)
        named = [Message("in", b"inbox", Props(headers=hour, message_id=id_), id_) for id_ in (b"m/1", b"m-2", b"m-2")]
        await raw.publish(delayed("keyed", HOUR, under="order-1"), *named)

        async def listed(query: str) -> list[dict[str, str]]:
            found: list[dict[str, str]] = (await web.get(f"/api/messages?{query}", **allowed)).json["messages"]
            return found

        rows = await eventually(lambda: listed(""), lambda rows: len(rows) == 4)
        (one,) = await listed("message_id=m/1")
        assert one in rows and await listed("key=order-1") == [row for row in rows if row["key"] == "order-1"]
        for name, body in ((one["id"], "m/1"), (one["id"].partition("@")[0], "m/1"), ("m%2F1", "m/1")):
            found = (await web.get(f"/api/messages/{name}", **allowed)).json
            assert (found["body"], found["where"]) == (body, "waiting")
            file = await web.get(f"/body/{name}")
            assert (file.status, file.text) == (200, body)
            assert file.headers["content-type"] == "application/octet-stream"
            assert file.headers["x-content-type-options"] == "nosniff"
            assert re.fullmatch(r'attachment; filename="\d+\.bin"', file.headers["content-disposition"])
        large = Message("in", b"inbox", Props(headers=hour, message_id=b"large"), b"\0" * ((1 << 20) + 1))
        await raw.publish(large)
        await eventually(lambda: listed(""), lambda rows: len(rows) == 5)
        assert (await web.get("/body/large")).status == 413
        assert "delayer show" in (await web.get("/message/large")).text
        wrong = {"/api/messages/m-2": 404, "/api/held?rout=x": 400, "/api/messages/nobody": 404,
                 "/api/messages/id:999": 404, "/api/messages/order-1": 404, "/api/messages/1": 404,
                 "/api/messages?rout=x": 400}  # fmt: skip
        for path, status in wrong.items():
            answer = await web.get(path, **allowed)
            assert (answer.status, answer.json["status"]) == (status, status)
        assert (await web.get("/api/messages/order-1")).status == 401
        assert (await web.get("/find?id=m/1")).headers["location"] == "/message/m%2F1"
        assert (await web.get("/message/m%2F1")).status == 200
        assert (await web.get("/message/m-2")).headers["location"] == "/waiting?message_id=m-2"
        assert (await web.get("/message/id:c0ffee")).status == 404


async def test_a_group_of_held_messages_is_retried_or_dropped_once_confirmed(place: OwnVhost, store: str) -> None:
    token = "open-sesame-open-sesame"
    environ = place.environ("store", store) | ANY_PORT | {"HTTP__TOKENS_FILE": tokens_file(token)}
    async with place.working(environ) as (daemon, raw, _):
        web = await Web.of(daemon)
        await raw.publish(*(delayed(f"inbox {n}", 10) for n in range(50)), *(delayed("x", HOUR) for n in range(2)))
        lost = [delayed(f"{key} {n}", 10, through=to, key=key) for to, key in GROUPS for n in range(2)]
        await raw.publish(*lost, delayed("other", 10, through="in.missing", key="c"))
        counted = '<a href="/held" aria-current="page">Held <span class="count">7</span></a>'
        # The rows of the list are of an earlier instant than its count, which is cached for seconds.
        page = await eventually(
            lambda: web.get("/held"), lambda page: (counted in page.text, page.text.count("/message/")) == (True, 7)
        )
        allowed = {"Authorization": f"Bearer {token}"}
        there = (await web.get("/api/held", **allowed)).json
        assert (len(there["messages"]), there["bounded"], there["next"]) == (7, False, "")
        there = (await web.get("/api/held?to_key=q.a&kind=returned", **allowed)).json["messages"]
        assert [(one["to_key"], one["held"]["kind"]) for one in there] == [("q.a", "returned")] * 2
        assert '<a href="/held?route=in.queue">4</a>' in (await web.get("/")).text
        group = "to_exchange=amq.default&amp;to_key=q.a"
        assert f'<a href="/held?{group}">2</a>' in (await web.get("/")).text, "the row of its destination"
        assert (await web.get(f"/held?{group}".replace("&amp;", "&"))).text.count("/message/") == 2
        row = await eventually(lambda: destination(web, "out / inbox"), lambda row: row[-1:] not in ([], ["0"]))
        assert (row[0], row[1], row[3]) == ("out / inbox", "2", "0")
        assert row[2].startswith("in ")
        place.things.queue("q.a")
        session = await web.post("/login", {"who": "ada", "token": token})
        ada = {"Cookie": session.headers["set-cookie"].partition(";")[0]}
        link = "/held?kind=returned&amp;to_exchange=amq.default&amp;to_key=q.a"
        assert f'<a href="{link}">2</a>' in page.text
        assert (await web.get(link.replace("&amp;", "&"))).text.count("/message/") == 2

        async def act(verb: str, **fields: str) -> str:
            answer = await web.post("/actions/messages", {"verb": verb, **fields}, **ada)
            if answer.status == 303:
                answer = await web.get(answer.headers["location"], **ada)
                return re.findall('role="status"><strong>(.*?)</strong>', answer.text)[0]
            return re.findall("<h1>(.*)</h1>", answer.text)[0]

        fields = {"kind": "returned", "to_exchange": "", "to_key": "q.a"}
        assert await act("retry", **fields) == "Retry 2 messages?"
        assert await act("retry", **fields, confirmed="yes") == "To be tried again now: 2"
        await eventually(lambda: web.get("/held"), lambda page: page.text.count("/message/") == 5)
        # Without a filter the operator must type the number.
        everything = {"all": "yes", "counted": "5", "confirmed": "yes"}
        assert await act("drop", **everything) == "Drop 5 messages?"
        assert await act("drop", **everything, typed="4") == "Drop 5 messages?"
        assert await act("drop", to_exchange="missing", confirmed="yes") == "Dropped: 3"
        assert await act("drop", **everything, typed="5") == "Dropped: 2 of 5"
        assert await act("drop", tu="missing") == "Not understood"


async def test_pages_of_a_list_link_to_the_next_and_the_previous_one(place: OwnVhost, store: str) -> None:
    async with place.working(place.environ("store", store) | ANY_PORT) as (daemon, raw, _):
        web = await Web.of(daemon)
        await raw.publish(*(delayed(f"{n}", HOUR + n, key="ab"[n % 13 == 0]) for n in range(130)))
        await raw.publish(*(delayed(f"lost {n}", 10, through="in.missing") for n in range(53)))

        async def page(path: str) -> tuple[str, list[str], dict[str, str]]:
            """The numbers above the list, the ids in it, and the links to its other pages."""
            text = html.unescape((await web.get(path)).text)
            numbers = re.search(r'<p class="pages"><span>(.*?)</span>', text)
            links = re.findall(r'<a href="([^"]*)"[^>]*>(First page|Previous page|Next page)</a>', text)
            ids = re.findall(r'data-label="id"><a href="/message/(id:\d+)', text)
            return numbers[1] if numbers else "", ids, {name: link for link, name in links}

        for path, of in (("/waiting", 130), ("/waiting?to_key=a", 120), ("/held", 53)):
            _, seen, there = await eventually(lambda: page(path), lambda seen: seen[0] == f"1–50 of {of}")  # noqa: B023
            assert there.keys() == {"Next page"}
            pages, at = [seen], path
            while "Next page" in there:
                at = there["Next page"]
                numbers, seen, there = await page(at)
                first = len(pages) * 50 + 1
                assert numbers == f"{first}–{min(first + 49, of)} of {of}"
                pages.append(seen)
            assert len({id for ids in pages for id in ids}) == of
            assert (await page(there["First page"]))[1] == pages[0]
            for before in reversed(pages[:-1]):
                numbers, seen, there = await page(there["Previous page"])
                assert seen == before
            assert there.keys() == {"Next page"}, "on the first page"
        assert (await web.get("/waiting?after=1.2&trail=x")).status == 200
        assert (await web.get("/waiting?after=x")).status == 400


async def destination(web: Web, name: str) -> list[str]:
    """The cells of a row of the overview's table by destination."""
    page = (await web.get("/")).text
    rows = (re.findall("<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in re.findall("<tr>(.*?)</tr>", page, re.DOTALL))
    found = ([re.sub("<[^>]*>", "", cell).strip() for cell in row] for row in rows)
    return next((row for row in found if row[:1] == [name]), [])


async def test_strays_are_retried_and_dropped(place: OwnVhost) -> None:
    token = "a-token-for-this-test-alone"
    allowed = {"Authorization": f"Bearer {token}", "Accept": "application/json", "X-Delayer-Who": "nightly"}
    told = {"HTTP__TOKENS_FILE": tokens_file(token), "BROKER__MANAGEMENT_URL": place.rabbitmq.management_url}
    async with place.working(place.environ("native") | ANY_PORT | told) as (daemon, raw, inbox):
        web = await Web.of(daemon)
        now_ms = time.time_ns() // 1_000_000
        held = HoldNote(Hold(HoldKind.RETURNED, "312 NO_ROUTE"), 10, None)
        for name, to in ((b"one", b"inbox"), (b"two", b"nowhere")):
            parcel = Parcel(now_ms, b"in", b"in", to, Target(b"", to), Props(message_id=name).encode(), name, None)
            await raw.publish(Message("", b"delayer.delay-strays", envelope_properties(parcel, name, held), name))
        page = await eventually(lambda: web.get("/strays"), lambda page: "2, the first 2 are shown" in page.text)
        found = (await web.get("/api/strays", **allowed)).json
        assert (found["depth"], [one["id"] for one in found["messages"]]) == (2, ["id:one", "id:two"])
        assert [one["reason"] for one in found["messages"]] == ["312 NO_ROUTE"] * 2
        for text_of in ("queue nowhere", "312 NO_ROUTE", "<code>two</code>"):
            assert text_of in page.text
        done = (await web.post("/actions/strays", {"verb": "retry", "id": "id:one"}, **allowed)).json
        assert done == {"heading": "On their way again: 1 of 1", "lines": [], "done": 1, "found": {}}
        await inbox.got([b"one"])
        done = (await web.post("/actions/strays", {"verb": "drop", "id": ["two", "one"]}, **allowed)).json
        assert done == {
            "heading": "Dropped: 1 of 2",
            "lines": [f"one is not in the queue. {HOW_TO_NAME}"],
            "done": 1,
            "found": {},
        }
        await counted(place.rabbitmq, place.url)
        none = "There are no strays." if place.rabbitmq.version < DELAYS_FROM else "up to 12 s ago"
        assert none in (await web.get("/strays")).text
        told = await daemon.event("set aside acted on")
        assert (told["verb"], told["ids"], told["who"]) == ("retry", ["id:one"], "nightly (token ops, http, 127.0.0.1)")
        assert (await web.post("/actions/strays", {"verb": "drop", "id": "two"})).status == 403


async def test_an_empty_listen_turns_http_off(place: OwnVhost, store: str) -> None:
    async with DaemonProcess(place.environ("store", store) | {"HTTP__LISTEN": ""}) as daemon:
        await daemon.ready()
        assert not [one for one in daemon.events if one["event"].startswith("http")]
        lines = psutil.Process(daemon.pid).net_connections(kind="inet")
        assert not [line for line in lines if line.status == psutil.CONN_LISTEN]


async def test_an_open_client_does_not_delay_a_stop(place: OwnVhost, store: str) -> None:
    """Silent connections, half of a request, and a client that never reads its answer."""
    async with DaemonProcess(place.environ("store", store) | ANY_PORT) as daemon:
        web = await Web.of(await daemon.ready())
        host, port = web.address.split(":")
        lines = [socket.create_connection((host, int(port))) for _ in range(20)]
        for line in lines[:10]:
            line.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: ")
        lines[-1].sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
        assert (await web.get("/health/live")).status == 200
        began = time.monotonic()
        assert await daemon.stop() == 0
        assert time.monotonic() - began < 10
        for line in lines:
            line.close()
