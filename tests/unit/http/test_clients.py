"""Clients of the HTTP server that are odd, slow, or too many."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import h11
import pytest

from delayer.http import server
from delayer.http.access import AT_ONCE
from delayer.http.server import HEAD_BYTES, MOST_LINES, FrugalConnection, ImpatientProtocol
from delayer.set_aside.messages import Result
from tests.support.fakes import until
from tests.support.web import Web
from tests.unit.http.inside import TOKEN, Inside, opened, served


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


async def test_a_request_that_is_not_http_takes_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Each gets an answer, and a port scanner sends many."""
    upgrade = "GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with served(Inside()) as web:
        for ask, status in ((b"\x16\x03\x01\r\n\r\n", b"400"), (upgrade.encode(), b"200")):
            reader, writer = await opened(web, ask)
            async with asyncio.timeout(10):
                assert (await reader.readline()).split()[1] == status
            writer.close()
    assert [one.getMessage() for one in caplog.records if one.name.startswith("uvicorn")] == []


CHUNKED = b"POST /api/messages HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_chunks_are_not_read() -> None:
    """Each takes h11 some 6 µs, and a megabyte has 170,000 of them."""
    connection, chunks = FrugalConnection(h11.SERVER), b"1\r\na\r\n" * 100_000
    connection.receive_data(CHUNKED + chunks)
    assert isinstance(connection.next_event(), h11.Request)
    assert (connection.next_event(), connection.unread) == (h11.PAUSED, chunks)


@pytest.mark.parametrize("path", ["/", "/metrics", "/health/live", "/api/messages"])
async def test_a_request_in_chunks_is_answered_once(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async with served(Inside()) as web:
        reader, writer = await opened(web, CHUNKED.replace(b"POST /api/messages", b"GET " + path.encode()) + b"z\r\n")
        async with asyncio.timeout(10):
            answer = await reader.read(-1)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200" if "health" in path else b"HTTP/1.1 411"), answer
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close\r\n" in answer.lower()
    assert not [one for one in caplog.records if one.levelname in ("ERROR", "CRITICAL")]


@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"])
@pytest.mark.parametrize("head", [b"a:\r\n" * MOST_LINES, b"a:" + b"b" * HEAD_BYTES + b"\r\n" + b"a:\r\n" * 10_000])
@pytest.mark.parametrize("end", [b"", b"\r\n"])
def test_a_long_head_is_no_request(before: bytes, head: bytes, end: bytes) -> None:
    """Also behind another request, and if it is not complete."""
    connection = FrugalConnection(h11.SERVER)
    connection.receive_data(before + b"GET / HTTP/1.1\r\nHost: a\r\n" + head + end)
    with pytest.raises(h11.RemoteProtocolError):
        for _ in range(2):
            while connection.next_event() not in (h11.NEED_DATA, h11.PAUSED):
                pass
            connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
            connection.send(h11.EndOfMessage())
            connection.start_next_cycle()


async def test_requests_that_nobody_reads_close_the_connection() -> None:
    """A form is read, so the requests behind it are received too, long before they are answered."""
    ask = (
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\n"
        b"Content-Length: 3\r\n\r\na=b"
    )
    async with served(Inside()) as web:
        reader, writer = await opened(web, ask)
        with suppress(ConnectionResetError, BrokenPipeError):
            async with asyncio.timeout(30):
                while not reader.at_eof():
                    writer.write(ask * 1_000)
                    await writer.drain()
        writer.close()
        assert (await web.get("/health/live")).status == 200


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
def test_a_body_may_have_many_lines(end: bytes) -> None:
    connection, body = FrugalConnection(h11.SERVER), b"\n" * 10_000
    lines = [b"POST / HTTP/1.1", b"Host: a", b"Content-Length: 10000", *[b"a:"] * 90, b""]
    connection.receive_data(b"".join(line + end for line in lines) + body)
    assert isinstance(connection.next_event(), h11.Request)
    data = connection.next_event()
    assert isinstance(data, h11.Data)
    assert data.data == body


async def test_a_client_that_names_no_host_signs_in_and_out() -> None:
    form = f"who=ada&token={TOKEN}"
    head = "POST {} HTTP/1.0\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: {}\r\n\r\n{}"
    async with served(Inside("0.0.0.0:0")) as web:
        for path, content, cookie in (("/login", form, b"delayer_session="), ("/logout", "", b'delayer_session=""')):
            reader, writer = await opened(web, head.format(path, len(content), content).encode())
            async with asyncio.timeout(10):
                answer = await reader.read(-1)
            writer.close()
            assert answer.startswith(b"HTTP/1.1 303") and b"set-cookie: " + cookie in answer, answer


async def test_a_quiet_connection_ends_after_its_answer() -> None:
    async with served(Inside()) as web:
        reader, writer = await opened(web, b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.read(-1)).startswith(b"HTTP/1.1 200")
        writer.close()


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


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[ImpatientProtocol]:
    """The server's side of every connection, with a small buffer in the kernel."""
    made: list[ImpatientProtocol] = []

    class Recorded(ImpatientProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            super().connection_made(transport)
            made.append(self)

    monkeypatch.setattr(server, "ImpatientProtocol", Recorded)
    return made


def unread(one: ImpatientProtocol) -> int:
    return one.transport.get_write_buffer_size()


ASK = b"GET /static/%s HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def deaf(web: Web, connections: list[ImpatientProtocol], asks: bytes) -> socket.socket:
    """A client that sends requests until the server cannot write any more, and reads nothing."""
    host, _, port = web.address.rpartition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    before = len(connections)
    await loop.sock_connect(client, (host, int(port)))
    await until(lambda: len(connections) > before)
    ours = connections[before]
    while not unread(ours):
        await loop.sock_sendall(client, asks)
        answered = ours.server_state.total_requests
        await until(lambda: bool(unread(ours)) or ours.server_state.total_requests > answered)  # noqa: B023
    return client


@pytest.mark.parametrize("asks", [ASK % b"icon.svg", ASK % b"uPlot.iife.min.js" * 20], ids=["one by one", "at once"])
async def test_a_client_that_reads_no_answer_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch, connections: list[ImpatientProtocol], asks: bytes
) -> None:
    """Also if what it did not read is little, and the server closed the connection already."""
    monkeypatch.setattr(server, "READ_SECONDS", 0.3)
    async with served(Inside()) as web:
        client = await deaf(web, connections, asks)
        [ours] = connections
        if ours.cycle.response_complete:
            ours.timeout_keep_alive_handler()
        await until(lambda: ours not in ours.connections)
        client.close()
        assert (await web.get("/health/live")).status == 200


async def test_a_client_that_reads_a_byte_at_a_time_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch, connections: list[ImpatientProtocol]
) -> None:
    monkeypatch.setattr(server, "READ_SECONDS", 0.3)
    async with served(Inside()) as web:
        client = await deaf(web, connections, ASK % b"uPlot.iife.min.js" * 20)
        [ours] = connections
        while ours in ours.connections:
            await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 20)
            await asyncio.sleep(0.01)
        client.close()


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET /health/live HTTP/1.1\r\nHost: localh",
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\n"
        b"Content-Length: 99\r\n\r\nw",
    ],
    ids=["idle", "head", "body"],
)
async def test_slow_clients_do_not_keep_others_out(connections: list[ImpatientProtocol], start: bytes) -> None:
    async with served(Inside()) as web:
        clients = [await opened(web, start) for _ in range(server.MOST_CONNECTIONS + 20)]
        await until(lambda: len(connections) == len(clients))
        for path in ("/health/live", "/health/ready"):
            assert (await web.get(path)).status == 200
        assert len(connections[0].connections) <= server.MOST_CONNECTIONS
        if b"POST" not in start:
            assert (await web.get("/")).status == 200
            assert connections[0] not in connections[0].connections, "the one that waited longest makes room"
        for _, writer in clients:
            writer.close()


async def test_clients_that_do_not_wait_for_answers_do_not_keep_others_out(
    monkeypatch: pytest.MonkeyPatch, connections: list[ImpatientProtocol]
) -> None:
    """Those that wait, without an answer yet, stay."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 8)
    inside = Inside()
    go = asyncio.Event()

    async def look(_name: str, limit: int) -> Result:
        await go.wait()
        return Result(0)

    inside.look_aside = look  # type: ignore[method-assign]
    ask = b"GET /refused HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with served(inside) as web:
        clients = [await opened(web, ask * (1 if number % 2 else 3)) for number in range(8)]
        await until(lambda: len(connections) == 8 and all(one._answering for one in connections))
        for place, one in enumerate(connections):
            one._since = place  # The loop's clock may give several the same millisecond.
        for number in range(3):
            clients.append(await opened(web, ask))
            await until(lambda: len(connections) == 9 + number)  # noqa: B023
            there = [one in one.connections for one in connections]
            assert there == [place % 2 == 1 or place > 2 * number for place in range(9 + number)]
        assert (await web.get("/health/live")).status == 200
        go.set()
        for _, writer in clients:
            writer.close()


async def test_a_stop_does_not_wait_for_clients_that_do_not_read(connections: list[ImpatientProtocol]) -> None:
    """Each kind is cut off: idle, in a head, in a body, and in an answer."""
    async with served(Inside()) as web:
        body = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        slow = [await opened(web, start) for start in (b"", b"GET / HT", body)]
        clients = [await deaf(web, connections, ASK % name) for name in (b"icon.svg", b"uPlot.iife.min.js")]
        began = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - began < 8
    assert [unread(one) for one in connections] == [0] * 5
    for client in (*clients, *(writer for _, writer in slow)):
        client.close()
