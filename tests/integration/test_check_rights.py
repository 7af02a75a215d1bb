"""`delayer check` names rights that the daemon's user lacks on the broker, alarms, and bindings without a route."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.integration.cli import Run, channel_to, destination, rows
from tests.integration.rights import MODES, Patterns, patterns_of, user_url
from tests.support.place import eventually
from tests.support.servers import RabbitMQ


def without(patterns: Patterns, kind: str, name: str) -> Patterns:
    """The page's patterns; ``kind`` does not match ``name``."""
    return patterns._replace(**{kind: f"^(?!{name}$){getattr(patterns, kind).removeprefix('^')}"})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("", ""),
        ("configure", "delays"),
        ("write", "delays"),
        ("write", r"delays\.refused"),
        ("write", r"delayer\.out"),
        ("read", "delays"),
        ("read", r"delayer\.in"),
        ("all", ""),
    ],
)
async def test_a_missing_right_is_off(
    delayer: Run, vhost: str, rabbitmq: RabbitMQ, mode: str, kind: str, name: str
) -> None:
    """Checking changes nothing, so the bindings are as before."""
    await destination(vhost)
    delayer("--set", f"mode={mode}", "topology", "apply")
    allowed = patterns_of(mode)
    allowed = Patterns("^$", "^$", "^$") if kind == "all" else without(allowed, kind, name) if kind else allowed
    before = await asyncio.to_thread(rabbitmq.api, "GET", f"/api/bindings/{urlsplit(vhost).path[1:]}")
    url = await asyncio.to_thread(user_url, rabbitmq, urlsplit(vhost).path[1:], allowed)
    found = rows(
        delayer, "topology", "rights", expect=1 if kind else 0, options=("--set", f"mode={mode}"),
        DELAYER_BROKER__URL=url,
    )  # fmt: skip
    off = [row for row in found if row["result"] == "off"]
    assert bool(off) == bool(kind)
    assert all("docs/security.md" in row["advice"] for row in off)
    assert await asyncio.to_thread(rabbitmq.api, "GET", f"/api/bindings/{urlsplit(vhost).path[1:]}") == before


async def test_a_binding_without_a_route_is_noted(delayer: Run, vhost: str, rabbitmq: RabbitMQ) -> None:
    await destination(vhost)
    delayer("topology", "apply")
    managed = {"DELAYER_BROKER__MANAGEMENT_URL": rabbitmq.management_url}
    assert not [row for row in rows(delayer, "intake", **managed) if "bound to" in row["found"]]
    async with channel_to(vhost) as channel:
        exchange = await channel.declare_exchange("orders.in", "topic", durable=True)
        await (await channel.get_queue("delays")).bind(exchange, "#")
    [row] = [row for row in rows(delayer, "intake", **managed) if "bound to" in row["found"]]
    assert (row["result"], "'orders.in'" in row["found"] or "orders.in" in row["found"]) == ("note", True)
    assert "same routes" in row["advice"]


@pytest.fixture
def alarmed(rabbitmq: RabbitMQ) -> Iterator[RabbitMQ]:
    rabbitmq.ctl("set_vm_memory_high_watermark", "0.0000001")
    yield rabbitmq
    rabbitmq.ctl("set_vm_memory_high_watermark", "0.4")


async def test_a_resource_alarm_is_off_and_send_names_it(
    delayer: Run, vhost: str, alarmed: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    await destination(vhost)
    delayer("topology", "apply")
    managed = {"DELAYER_BROKER__MANAGEMENT_URL": alarmed.management_url}
    # The API learns of it within five seconds.
    await eventually(lambda: alarmed.api("GET", "/api/nodes?columns=name,mem_alarm")[0].get("mem_alarm"))
    [row] = rows(delayer, "alarms", expect=1, **managed)
    assert (row["result"], row["found"].split(" ")[0]) == ("off", "mem_alarm")
    monkeypatch.setattr("delayer.cli.send.PATIENCE", 3.0)
    # The broker may read one small message before it blocks the connection.
    told = delayer("send", "--delay", "1m", "--body-file", "-", stdin=b"x" * 300_000, expect=3).stderr
    assert "the broker blocks publishers" in told
    assert "broker.url" not in told
