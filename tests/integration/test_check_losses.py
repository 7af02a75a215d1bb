"""`delayer check` reports causes of message loss elsewhere, and the things it could not see."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import quote, urlsplit

import aio_pika
import asyncpg
import pytest

from delayer.broker.management_api import Management
from delayer.core.cascade import Cascade
from delayer.store import pool
from tests.faults.test_clocks import _SKEW
from tests.integration.cli import Run, channel_to, destination, rows
from tests.support import ports
from tests.support.place import eventually
from tests.support.servers import Postgres, RabbitMQ
from tests.support.store import sql

UNSEEN = "bindings, policies and the copies of queues cannot be seen"
HOUR_MS = 3_600_000


@pytest.fixture
def managed(rabbitmq: RabbitMQ) -> dict[str, str]:
    return {"DELAYER_BROKER__MANAGEMENT_URL": rabbitmq.management_url}


async def in_place(delayer: Run, vhost: str, *options: str) -> None:
    await destination(vhost)
    delayer(*options, "topology", "apply")


async def test_check_names_what_it_cannot_see(delayer: Run, vhost: str, managed: dict[str, str]) -> None:
    await in_place(delayer, vhost)
    (row,) = rows(delayer, "topology")
    assert (row["result"], UNSEEN in row["found"], "management_url" in row["advice"]) == ("note", True, True)
    told = delayer("topology", "verify")
    assert "Everything" not in told.stdout
    assert UNSEEN in told.stdout
    (row,) = rows(delayer, "topology", **managed)
    assert (row["result"], row["found"]) == ("ok", "everything is as it should be")
    assert "Everything is as it should be." in delayer("topology", "verify", **managed).stdout


@pytest.mark.parametrize("works", [True, False])
async def test_every_address_that_fails_is_named(delayer: Run, vhost: str, works: bool) -> None:
    await in_place(delayer, vhost)
    dead = urlsplit(vhost)._replace(netloc=f"guest:guest@127.0.0.1:{ports.reserve()}").geturl()
    urls = [dead, vhost.replace("guest:guest", "guest:wrong"), *([vhost] if works else [])]
    broker, *notes = rows(delayer, "broker", expect=0 if works else 3, DELAYER_BROKER__URL=",".join(urls))
    assert broker["result"] == ("ok" if works else "refused")
    assert [row["result"] for row in notes] == ["note", "note"]
    for reason, step in (("no connection to", "the broker runs"), ("ACCESS_REFUSED", "check user and password")):
        (row,) = [row for row in notes if reason in row["found"]]
        assert step in row["advice"]


async def test_expired_messages_that_a_level_keeps_are_noted(
    delayer: Run, vhost: str, rabbitmq: RabbitMQ, managed: dict[str, str]
) -> None:
    """Here because the next exchange is missing. AMQP does not count them."""
    native = {"DELAYER_MODE": "native", **managed}
    await in_place(delayer, vhost, "--mode", "native")
    assert not [row for row in rows(delayer, "cascade", **native) if "forwarded" in row["found"]]
    level, delivery = Cascade().level(0), Cascade().delivery
    async with channel_to(vhost) as channel:
        await channel.exchange_delete(delivery)
        await channel.default_exchange.publish(aio_pika.Message(b"late"), level)
    api = Management(rabbitmq.management_url, urlsplit(vhost).path[1:])
    await eventually(lambda: api.delayed([level]), lambda counts: counts == {level: 1})
    (row,) = rows(delayer, "cascade", **native)
    assert (row["result"], f'1 expired messages are not forwarded yet, in "{level}"' == row["found"]) == ("note", True)
    assert level in delayer("status", **native).stdout


async def test_lost_queues_are_always_reported(delayer: Run, vhost: str) -> None:
    await in_place(delayer, vhost, "--mode", "native")
    async with channel_to(vhost) as channel:
        await channel.queue_delete("delayer.delay-level-05")
    missing, unseen = rows(delayer, "topology", options=("--mode", "native"))
    assert missing["found"].startswith("1 missing: queue delayer.delay-level-05")
    assert "What the broker loses" in missing["advice"]
    assert UNSEEN in unseen["found"]
    assert not any("nothing" in row["advice"] for row in (missing, unseen))


async def test_a_hidden_part_does_not_count_as_correct(delayer: Run, vhost: str, rabbitmq: RabbitMQ) -> None:
    await in_place(delayer, vhost)
    await asyncio.to_thread(rabbitmq.add_user, "onlooker", "onlooker", vhost=urlsplit(vhost).path[1:], read=".*")
    url = vhost.replace("guest:guest", "onlooker:onlooker")
    found = rows(delayer, "topology", expect=1, DELAYER_BROKER__URL=url)
    assert not any(row["result"] == "ok" for row in found)
    assert any("delays" in row["found"] and "docs/security.md" in row["advice"] for row in found)


OF_DELAYS: dict[str, Any] = {"x-queue-type": "quorum", "x-delivery-limit": 1_000_000, "x-single-active-consumer": True}


@pytest.mark.parametrize(
    ("durable", "arguments"),
    [
        (False, {}),
        (True, {"x-single-active-consumer": True}),  # classic
        (True, OF_DELAYS | {"x-message-ttl": 60_000}),
        (True, OF_DELAYS | {"x-expires": 600_000}),
        (True, OF_DELAYS | {"x-max-length": 1_000}),
        (True, OF_DELAYS | {"x-max-length": 1_000, "x-overflow": "drop-head"}),
        (True, OF_DELAYS | {"x-max-length-bytes": 1_000_000}),
    ],
)
async def test_a_queue_that_drops_is_off(delayer: Run, vhost: str, durable: bool, arguments: dict[str, Any]) -> None:
    """The daemon does not start with it either: it declares the same."""
    await destination(vhost)
    async with channel_to(vhost) as channel:
        await channel.declare_queue("delays", durable=durable, arguments=arguments)
    found = [row for row in rows(delayer, "topology", expect=1) if row["result"] == "off"]
    assert [row["found"].partition(":")[0] for row in found] == ["queue delays"]
    assert found[0]["advice"]


@pytest.mark.parametrize("kind", ["policies", "operator-policies"])
@pytest.mark.parametrize(
    "definition", [{"message-ttl": 60_000}, {"expires": 60_000}, {"max-length": 9}, {"max-length-bytes": 9}]
)
async def test_a_policy_that_drops_is_off(
    delayer: Run, vhost: str, rabbitmq: RabbitMQ, managed: dict[str, str], kind: str, definition: dict[str, int]
) -> None:
    await in_place(delayer, vhost)
    at = f"/api/{kind}/{quote(urlsplit(vhost).path[1:], safe='')}/drops"
    body = {"pattern": "^delays$", "definition": definition, "apply-to": "queues"}
    await asyncio.to_thread(rabbitmq.api, "PUT", at, body)
    (row,) = rows(delayer, "topology", expect=1, **managed)
    assert (row["result"], "'drops'" in row["found"]) == ("off", True)
    assert "does not match this queue" in row["advice"]
    assert UNSEEN in rows(delayer, "topology")[0]["found"]


@pytest.mark.parametrize("kind", ["quorum", "classic"])
async def test_queues_with_a_single_copy_in_a_cluster_are_reported(
    delayer: Run, vhost: str, rabbitmq: RabbitMQ, managed: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker is real, and its list of nodes is longer."""
    more = managed | {"DELAYER_INTAKE__QUEUE_TYPE": kind}
    await destination(vhost)
    delayer("topology", "apply", **more)
    assert [row["result"] for row in rows(delayer, "topology", **more)] == ["ok"]
    get = Management.get

    async def longer(self: Management, path: str, *how: Any) -> Any:
        return [{"name": f"node{n}"} for n in range(3)] if path == "nodes?columns=name" else await get(self, path, *how)

    monkeypatch.setattr(Management, "get", longer)
    found = rows(delayer, "topology", expect=1, **more)
    assert [row["found"].partition(":")[0] for row in found] == ["queue delays", "queue delays.refused"]
    assert all("the cluster's 3 nodes, found one copy" in row["found"] for row in found)
    assert all("rabbitmq-queues grow" in row["advice"] for row in found)
    delayer("topology", "verify", expect=1, **more)


async def test_nodes_that_cannot_be_seen(delayer: Run, vhost: str, rabbitmq: RabbitMQ) -> None:
    await in_place(delayer, vhost)
    name = urlsplit(vhost).path[1:]
    await asyncio.to_thread(rabbitmq.add_user, "small", "small", vhost=name)
    await asyncio.to_thread(rabbitmq.api, "PUT", "/api/users/small", {"password": "small", "tags": "management"})
    url = rabbitmq.management_url.replace("guest:guest", "small:small")
    (row,) = rows(delayer, "topology", DELAYER_BROKER__MANAGEMENT_URL=url)
    assert row["result"] == "note"
    assert "whether the broker is a cluster cannot be seen" in row["found"]
    assert "`monitoring`" in row["found"]


@pytest.mark.parametrize("setting", ["fsync", "full_page_writes"])
async def test_a_database_that_loses_commits_is_off(delayer: Run, vhost: str, setting: str) -> None:
    await in_place(delayer, vhost)
    with Postgres(settings={setting: "off"}) as postgres:
        url = postgres.url(postgres.add_store())
        (row,) = rows(delayer, "durability", expect=1, DELAYER_STORE__URL=url)
        assert (row["result"], f"off in Postgres: {setting};" in row["found"]) == ("off", True)
        assert f"ALTER SYSTEM SET {setting} = on" in row["advice"]
        postgres.execute(f"ALTER SYSTEM SET {setting} = on")
        postgres.execute("SELECT pg_reload_conf()")
        async with sql(url) as admin:
            while await admin.fetchval(f"SHOW {setting}") != "on":  # noqa: ASYNC110 - the server reads it when it likes
                await asyncio.sleep(0.02)
        assert not rows(delayer, "durability", DELAYER_STORE__URL=url)


async def test_a_role_that_commits_asynchronously_makes_no_difference(postgres: Postgres, database: str) -> None:
    name = urlsplit(database).path[1:]
    postgres.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = off')
    plain = await asyncpg.connect(database)
    assert await plain.fetchval("SHOW synchronous_commit") == "off"
    await plain.close()
    ours = await pool.connect(database, "test")
    assert await ours.fetchval("SHOW synchronous_commit") == "on"
    await ours.close()


async def test_clocks_that_agree(delayer: Run, vhost: str, managed: dict[str, str]) -> None:
    await in_place(delayer, vhost)
    (row,) = rows(delayer, "clocks", **managed)
    assert (row["result"], row["found"][:40]) == ("ok", "this machine, the broker, the database: ")
    (row,) = rows(delayer, "clocks")
    assert (row["result"], row["found"]) == ("note", "could not be seen: the clock of the broker")
    assert "management_url" in row["advice"]


@pytest.mark.parametrize("ahead_ms", [HOUR_MS, -HOUR_MS, 5_000])
async def test_the_databases_clock_is_off(
    delayer: Run, vhost: str, database: str, managed: dict[str, str], ahead_ms: int
) -> None:
    await in_place(delayer, vhost)
    name = urlsplit(database).path[1:]
    async with sql(database) as admin:
        await admin.execute(f"{_SKEW}; UPDATE skew SET ms = {ahead_ms}")
        await admin.execute(f'ALTER DATABASE "{name}" SET search_path = public, pg_catalog')
    found = [row["found"] for row in rows(delayer, "clocks", expect=1, **managed)]
    pairs = {("this machine", "the database"), ("the broker", "the database")}
    if ahead_ms > 0:
        pairs = {(other, one) for one, other in pairs}
    assert len(found) == len(pairs)
    for ahead, behind in pairs:
        assert any(text.startswith(f"the clock of {ahead} is ") and f"of {behind}'s" in text for text in found)


async def test_this_machines_clock_is_off(
    delayer: Run, vhost: str, managed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await in_place(delayer, vhost)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    found = rows(delayer, "clocks", expect=1, **managed)
    of = [f"the clock of this machine is 60 min ahead of {other}'s" for other in ("the broker", "the database")]
    assert [row["found"] for row in found] == of
    assert all("chronyc tracking" in row["advice"] for row in found)
