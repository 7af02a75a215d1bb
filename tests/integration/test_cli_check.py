"""delayer check: whether anybody is at work, and what is told about it."""

from __future__ import annotations

import json
from pathlib import Path

import aio_pika

from tests.conformance.store_contract import owned, parcel
from tests.integration.cli import Run, channel_to
from tests.integration.test_store_lane import opened
from tests.support.daemon import DaemonProcess
from tests.support.rabbitmq import RabbitMQ


def rows(run: Run, what: str, *, expect: int = 0, **more: str) -> list[dict[str, str]]:
    told = run("check", "--json", expect=expect, **more).stdout
    return [row for row in json.loads(told)["checks"] if row["what"] == what]


async def test_a_queue_that_nobody_consumes_is_told(delayer: Run, vhost: str) -> None:
    async with channel_to(vhost) as channel:
        await channel.declare_exchange("delayer.out", aio_pika.ExchangeType.TOPIC, durable=True)
        assert rows(delayer, "intake") == [], "the queue is not there yet"
        delayer("topology", "apply")
        await channel.default_exchange.publish(aio_pika.Message(b""), "delays")
        (row,) = rows(delayer, "intake")
        assert (row["result"], row["found"]) == ("note", 'no consumer reads "delays"; 1 wait in it')

        async def keep(_message: object) -> None:
            """Let it wait."""

        await (await channel.get_queue("delays")).consume(keep)
        assert rows(delayer, "intake") == []


async def test_overdue_messages_of_a_lane_without_owner_are_off(delayer: Run, vhost: str, database: str) -> None:
    """All daemons are gone: an exit code of 0 would be the wrong answer to "is it well?"."""
    async with channel_to(vhost) as channel:
        await channel.declare_exchange("delayer.out", aio_pika.ExchangeType.TOPIC, durable=True)
    async with opened(database) as store, owned(store) as [lane]:
        await store.park(lane, [parcel(store.now_upper_ms() - 90_000, b"overdue")], [])
        (row,) = rows(delayer, "lanes")
        assert row["result"] == "ok", "somebody is about to release it"
        assert row["found"].startswith("1 owned by ")
    (row,) = rows(delayer, "lanes", expect=1)
    assert row["result"] == "off"
    assert row["found"].startswith("messages are overdue by 0:01:3")
    assert row["found"].endswith("in lane 1 that no daemon owns")


async def test_lanes_of_another_virtual_host_are_off(
    delayer: Run, vhost: str, rabbitmq: RabbitMQ, database: str
) -> None:
    """A daemon says whose messages it has: two of one store for two virtual hosts would adopt each other's lanes."""
    name = rabbitmq.add_vhost()
    elsewhere = rabbitmq.url(name)
    for url in (vhost, elsewhere):
        async with channel_to(url) as channel:
            await channel.declare_exchange("delayer.out", aio_pika.ExchangeType.TOPIC, durable=True)
    async with DaemonProcess({"BROKER__URL": elsewhere, "STORE__URL": database}) as daemon:
        await daemon.event("lane taken")
        await daemon.event("ready")
        assert {row["result"] for row in rows(delayer, "lanes", DELAYER_BROKER__URL=elsewhere)} == {"ok"}
        owned_by, shared = rows(delayer, "lanes", expect=1)
        assert (owned_by["result"], shared["result"]) == ("ok", "off")
        assert "for another broker or virtual host" in shared["found"]
        assert "a database of its own" in shared["advice"]
    rabbitmq.drop_vhost(name)


def test_a_destination_that_the_daemon_declares_is_not_off(delayer: Run, tmp_path: Path) -> None:
    """Its absence is a note, as of everything that the daemon makes at its start; that of another one is off."""
    file = tmp_path / "delayer.toml"
    file.write_text("""
[[route]]
from = "orders"
to = "orders.due"
[[destination]]
exchange = "orders.due"
queue = "orders.eu"
""")
    seen = json.loads(delayer("--config", str(file), "check", "--json").stdout)["checks"]
    assert [row["result"] for row in seen if row["what"] == "destination"] == []
    assert any("orders.due" in row["found"] for row in seen if (row["what"], row["result"]) == ("topology", "note"))
    file.write_text(file.read_text().replace('exchange = "orders.due"', 'exchange = "other"'))
    seen = json.loads(delayer("--config", str(file), "check", "--json", expect=1).stdout)["checks"]
    assert [row["result"] for row in seen if row["what"] == "destination"] == ["off"]


def test_a_route_that_makes_messages_late_and_holds_them_is_told(delayer: Run) -> None:
    both = {"max_rate": 100, "late_limit": "3s", "late_action": "hold"}
    routes = [{"from": "both", **both}, {"from": "paced", "max_rate": 100}, {"from": "late", **both, "max_rate": 0}]
    told = {"DELAYER_ROUTE": json.dumps(routes)}
    seen = json.loads(delayer("check", "--offline", "--json", **told).stdout)["checks"]
    [row] = [one for one in seen if one["what"] == "routes"]
    assert row["result"] == "note"
    assert row["found"].startswith('"both" holds messages that wait longer than late_limit (3s)')


def test_an_address_that_others_reach_is_told(delayer: Run) -> None:
    for listen, told in (("127.0.0.1:9419", []), ("[::1]:9419", []), ("", []), ("0.0.0.0:9419", ["note"])):
        seen = json.loads(delayer("check", "--offline", "--json", DELAYER_HTTP__LISTEN=listen).stdout)["checks"]
        assert [row["result"] for row in seen if row["what"] == "http"] == told
