"""The last minutes in `delayer status`: the daemon's answer, or the reason why there is none."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from delayer.cli import check, status
from delayer.cli.check import CheckReport
from delayer.config.model import Settings
from tests.unit.http.inside import Inside, served


def settings(listen: str) -> Settings:
    return Settings.model_validate({"http": {"listen": listen}})


async def test_status_shows_an_alarm_of_the_broker(capsys: pytest.CaptureFixture[str]) -> None:
    async with served(Inside()) as web:
        found = await status.look(settings(web.address))
    status.show(found | {"blocked": True})
    assert "BLOCKED: a resource alarm of the broker" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ({"broker": {"url": "amqp://broker/orders"}}, {"broker": {"url": "amqp://me:secret@BROKER:5672/orders"}}, True),
        ({"broker": {"url": "amqp://broker/orders"}}, {"broker": {"url": "amqp://broker/mail"}}, False),
        ({"store": {"url": "postgresql://one/delayer"}}, {}, True),
    ],
)
async def test_another_broker_is_an_error(ours: dict[str, Any], theirs: dict[str, Any], same: bool) -> None:
    """Two daemons of one host, or a copied port: the other daemon's rates are not ours."""
    async with served(Inside(**theirs)) as web:
        native = {"mode": "native", "http": {"listen": web.address}}
        found = await status.look(Settings.model_validate(native | ours))
        wrong = f"the daemon at {web.address} works with another broker, virtual host or queue"
        assert found["error"] == (None if same else wrong)
        assert bool(found["last"]) == same


async def test_check_does_not_ask_for_a_daemon_that_runs() -> None:
    report = CheckReport()
    report.add("intake", "note", "no consumer reads delays", check.STARTING)
    async with served(Inside()) as web:
        await check._daemon(report, settings(web.address))
        assert report[0].advice == check.WAITING
    report[0] = report[0]._replace(advice=check.STARTING)
    await check._daemon(report, settings(web.address))
    assert report[0].advice == check.STARTING


async def test_status_shows_a_mode_that_was_not_reloaded() -> None:
    async with served(Inside(mode="native")) as web:
        found = await status.look(settings(web.address))
    assert status.mode_text("native", found) == "mode: native   intake: active"
    assert status.mode_text("native", {"error": "no daemon"}) == "mode: native"
    assert status.mode_text("store", found).startswith("mode: store in the file; the daemon works in native mode.")


@pytest.mark.parametrize("listens", [True, False], ids=["silent", "refused"])
async def test_a_missing_answer_is_reported(listens: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        if not listens:
            silent.close()
        found = await status.look(settings(address), patience=0.05)
    assert found["error"].startswith(f"no daemon answers at {address}: ")


async def test_status_names_a_daemon_without_a_page() -> None:
    assert (await status.look(settings("")))["error"] == "[http] listen is off"


ANSWERS = [
    b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 403 Forbidden\r\n\r\n",
    b"hello\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n[]",
    b"",
]


@pytest.mark.parametrize("answer", ANSWERS)
async def test_another_program_is_an_error(answer: bytes) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(other, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        found = await status.look(settings(f"{host}:{port}"))
        assert found["error"]
        assert found["last"] == {}
        [row] = await checked({"listen": f"{host}:{port}"})
        assert (row.result, "not a daemon of this version" in row.found) == ("note", True)


async def checked(http: dict[str, str], **more: Any) -> CheckReport:
    report = CheckReport()
    await check._daemon(report, Settings.model_validate({"http": http, **more}))
    return report


@pytest.mark.parametrize("broken", [True, False])
@pytest.mark.parametrize(
    ("listen", "metrics_only"), [("127.0.0.1:0", False), ("127.0.0.1:0", True), ("0.0.0.0:0", False)]
)
async def test_check_asks_the_daemon_where_it_answers(listen: str, metrics_only: bool, broken: bool) -> None:
    """Without the token, which the readiness does not need."""
    inside = Inside(listen)
    inside.blocked = broken
    async with served(inside, metrics_only=metrics_only) as web:
        http = {"listen": "", "metrics_listen": web.address} if metrics_only else {"listen": web.address.split()[0]}
        rows = await checked(http)
    assert [(row.result, "accepts no publishes" in row.found) for row in rows] == ([("off", True)] if broken else [])


async def test_check_notes_a_daemon_that_needs_a_restart() -> None:
    inside = Inside()
    inside.restart_needed = ["takeover", "store.url"]
    async with served(inside) as web:
        rows = await checked({"listen": web.address})
    assert [tuple(row) for row in rows] == [
        ("daemon", "note", "the running daemon needs a restart for: takeover, store.url", "restart the daemon")
    ]


async def test_check_notes_a_daemon_of_another_broker() -> None:
    async with served(Inside(broker={"url": "amqp://broker/mail"})) as web:
        [row] = await checked({"listen": web.address})
    assert (row.result, "another broker, virtual host or queue" in row.found) == ("note", True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_only_a_refused_connection_means_no_daemon(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        found = await status.readiness(settings(""), f"{host}:{port}", patience=0.05)
        assert found is not None
        [reason] = found.reasons
        assert reason == "it accepts connections, but does not answer: nothing within 0.05 s"
    assert await checked({"listen": f"{host}:{port}"}) == []
    assert await checked({"listen": "", "metrics_listen": ""}) == []
    [row] = await checked({"listen": f"nowhere.invalid:{port}"})
    assert (row.result, "cannot be asked" in row.found) == ("note", True)
