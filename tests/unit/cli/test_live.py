"""The last minutes in `delayer status`: the daemon's answer, or the reason why there is none."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from delayer.cli import status
from delayer.config.model import Settings
from tests.unit.http.test_server import Inside, served


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
        wrong = f"the daemon at {web.address} works with another broker or virtual host"
        assert found["error"] == (None if same else wrong)
        assert bool(found["last"]) == same


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


@pytest.mark.parametrize("answer", [b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}", b"hello\r\n\r\n"])
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
