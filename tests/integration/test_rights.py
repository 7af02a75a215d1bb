"""Least privilege: a whole daemon with the rights that docs/security.md grants, in broker and store, and no more."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.faults.place import eventually
from tests.integration.rights import DATABASE, MODES, clear, page, patterns_of, store, user_url
from tests.support.daemon import DaemonProcess, command
from tests.support.ledger import Ledger
from tests.support.raw import Message, Props, Raw, number, text
from tests.support.servers import Postgres, RabbitMQ
from tests.support.web import Web

__all__ = ["page", "store"]


@asynccontextmanager
async def ledger_at(url: str) -> AsyncIterator[Ledger]:
    async with Ledger.open(url, random.Random(3)) as ledger:
        yield ledger


@pytest.mark.parametrize("mode", MODES)
async def test_the_daemon_with_these_rights(
    rabbitmq: RabbitMQ, postgres: Postgres, store: str, mode: str, tmp_path: Path
) -> None:
    """Messages come back, and nothing is ever refused to it."""
    await asyncio.to_thread(clear, postgres)
    vhost = rabbitmq.add_vhost()
    try:
        url = user_url(rabbitmq, vhost, patterns_of(mode), f"delayer-{mode}")
        environ = {"MODE": mode, "BROKER__URL": url} | ({"STORE__URL": store} if mode == "store" else {})
        config = tmp_path / "delayer.toml"
        lines = [f'mode = "{mode}"', "[broker]", f"url = {json.dumps(url)}"]
        config.write_text("\n".join([*lines, *(["[store]", f'url = "{store}"'] if mode == "store" else [])]) + "\n")
        async with DaemonProcess(environ) as daemon:
            await daemon.ready()
            async with ledger_at(rabbitmq.url(vhost)) as ledger:
                await ledger.publish(300, longest_ms=1_500)
                await ledger.all_back()
                ledger.verdict().assert_kept()
            assert "error" not in (await command(config, "status")).lower()
            await command(config, "check")
            shown = (await command(config, "topology", "show")).split("\n")
            assert any(line.split() == ["delays", "0"] for line in shown), shown
            assert not any("hidden" in line or "missing" in line for line in shown), shown
            if mode == "store" and rabbitmq.hides_queues:
                with pytest.raises(RuntimeError, match="ACCESS_REFUSED"):
                    await command(config, "drain", "--to", "store", "--dry-run")
            assert await daemon.stop() == 0
        assert not [event for event in daemon.events if event["level"] in ("warning", "error")], daemon.tail()
    finally:
        rabbitmq.drop_vhost(vhost)


@pytest.mark.words
async def test_the_page_of_a_daemon_with_these_rights(rabbitmq: RabbitMQ, postgres: Postgres, page: str) -> None:
    """Its buttons, for messages that wait, are held and are refused; the last need one more right."""
    await asyncio.to_thread(clear, postgres)
    vhost = rabbitmq.add_vhost()
    http = {"HTTP__LISTEN": "127.0.0.1:0", "HTTP__TOKEN": "open-sesame-open-sesame"}
    allowed = {"Authorization": "Bearer open-sesame-open-sesame", "Accept": "application/json"}
    try:
        url = user_url(rabbitmq, vhost, patterns_of("store"), "delayer-page")
        environ = {"MODE": "store", "BROKER__URL": url, "STORE__URL": page} | http
        async with DaemonProcess(environ) as daemon, await Raw.connect(rabbitmq.url(vhost)) as raw:
            web = await Web.of(await daemon.ready())

            async def told(path: str, **form: str) -> dict[str, Any]:
                answer = await web.post(path, form, **allowed)
                assert answer.status == 200, answer.text
                return dict(answer.json)

            async def held() -> list[int]:
                connection = await asyncpg.connect(postgres.url(DATABASE))
                found = await connection.fetch("SELECT id FROM held")
                await connection.close()
                return [number for (number,) in found]

            for delay in (3_600_000, 3_600_000, 1):
                props = Props(headers=((b"x-delay", number("I", delay)),), delivery_mode=2)
                await raw.publish(Message("delayer.in", b"nobody", props, b"body"))
            props = Props(headers=((b"x-delay", text("soon")),), delivery_mode=2)
            await raw.publish(Message("delayer.in", b"nobody", props, b"body"))
            (lost,) = await eventually(held, lambda ids: len(ids) == 1)
            all_waiting = {"verb": "reschedule", "by": "1h", "all": "yes"}
            await eventually(lambda: told("/actions/filtered", **all_waiting), lambda answer: answer["matched"] == 2)
            assert (await told("/actions/filtered", verb="reschedule", by="1h", all="yes", confirmed="yes"))[
                "done"
            ] == 2
            assert (await told("/actions/filtered", verb="cancel", route="delayer.in", confirmed="yes"))["done"] == 2
            assert (await told("/actions/held", verb="drop", id=str(lost)))["done"] == 1
            row = re.search(r'data-label="id" class="wide">([^<]+)<', (await web.get("/refused")).text)
            assert row is not None
            stays = await told("/actions/refused", verb="retry", id=row[1])
            assert stays["done"] == 0
            assert "ACCESS_REFUSED" in str(stays["lines"])
            whole = patterns_of("store")
            user_url(rabbitmq, vhost, whole._replace(write=whole.write.replace("(", r"(delayer\.in|")), "delayer-page")
            assert (await told("/actions/refused", verb="retry", id=row[1]))["done"] == 1
            assert (await web.get("/audit-log")).status == 200
            assert await daemon.stop() == 0
    finally:
        rabbitmq.drop_vhost(vhost)
