"""Least privilege: a daemon and its commands work with the rights of docs/security.md, and fail without any of them."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from delayer.amqp.errors import BrokerLost
from delayer.broker.errors import BrokerRefused, TopologyMismatch
from delayer.broker.management_api import Management
from delayer.broker.verify import bindings_from, policies_of
from delayer.config.model import Settings
from delayer.config.topology import cascade_of, topology_of
from delayer.core.cascade import Cascade, routing_key
from tests.integration.rights import (
    DATABASE,
    MODES,
    Patterns,
    besides,
    clear,
    page,
    patterns_of,
    store,
    use,
    user_url,
    with_besides,
)
from tests.support.daemon import DaemonProcess, command
from tests.support.ledger import Ledger
from tests.support.place import eventually
from tests.support.raw import Message, Props, Raw, number, text
from tests.support.servers import Postgres, RabbitMQ
from tests.support.store import sql
from tests.support.topology import declare
from tests.support.web import Web, tokens_file

__all__ = ["page", "store"]

NSB = Cascade("nservicebus-v2")
TO_QUEUES: dict[str, Any] = {"from": "delayer.in", "to": ""}
RETRY: dict[str, Any] = {"from": "retries", "retry": {"first": "100ms", "attempts": 1, "exhausted": "parking-lot"}}
DESTINATION = {"exchange": "delayer.out", "type": "topic", "queue": "orders"}
TAKEOVER = {"cascade": "nservicebus-v2", "levels_from": 6}


class Need(NamedTuple):
    """A row of the table: its settings, and the queues and exchanges that it consumes and publishes to."""

    row: str
    settings: Mapping[str, Any]
    consumed: tuple[str, ...] = ()
    published: tuple[str, ...] = ()


NEEDS = {
    "to queues": Need("a route with `to", {"route": [TO_QUEUES]}, published=("",)),
    "retry": Need("a route from `retries`", {"route": [RETRY]}, published=("",)),
    "destination": Need("`[[destination]]`", {"destination": [DESTINATION]}),
    "takeover": Need(
        "`[[takeover]]`", {"takeover": [TAKEOVER]}, (NSB.level(6), NSB.level(10), NSB.level(27)), (NSB.delivery,)
    ),
    "send": Need("`delayer send`", {}, published=("delayer.in",)),
}


def cases() -> list[Any]:
    """Every pattern of the table; a test removes it."""
    return [
        pytest.param(name, kind, one, id=f"{name}-{kind}-{one}")
        for name, need in NEEDS.items()
        for kind, patterns in besides(need.row)._asdict().items()
        for one in patterns.split(",")
        if one
    ]


PAGES = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def without_broker(store: str, postgres: Postgres) -> None:
    """Each test has its own vhost; all tests share the store."""
    postgres.execute("UPDATE store SET has_broker = false", database=DATABASE)


@pytest.fixture(scope="module")
def vhosts(rabbitmq: RabbitMQ) -> Any:
    """A vhost for each need, with the objects that others declare."""
    names = {need: rabbitmq.add_vhost() for need in NEEDS}
    for need, name in names.items():
        rabbitmq.api("PUT", f"/api/queues/{name}/mail.inbox", {"durable": True})
        # The need "destination" declares this exchange itself.
        if need != "destination":
            rabbitmq.api("PUT", f"/api/exchanges/{name}/delayer.out", {"type": "topic", "durable": True})
        whole = topology_of(Settings.model_validate(NEEDS[need].settings))
        whole = whole + NSB.topology() if need == "takeover" else whole
        asyncio.run(declare(rabbitmq.url(name), whole))
    yield names
    for name in names.values():
        rabbitmq.drop_vhost(name)


async def use_need(url: str, need: Need) -> None:
    await use(url, Settings.model_validate(need.settings), need.consumed, need.published, b"nobody")


def patterns_for(need: Need, *, without: tuple[str, str] = ("", "")) -> Patterns:
    row, (kind, one) = besides(need.row), without
    if kind:
        left = [other for other in getattr(row, kind).split(",") if other != one]
        row = row._replace(**{kind: ",".join(left)})
    return with_besides(patterns_of(str(need.settings.get("mode", "store"))), row)


@pytest.mark.parametrize("name", NEEDS)
async def test_these_rights_are_enough(rabbitmq: RabbitMQ, vhosts: Mapping[str, str], name: str) -> None:
    url = user_url(rabbitmq, vhosts[name], patterns_for(NEEDS[name]), f"delayer-{name}")
    await use_need(url, NEEDS[name])


@pytest.mark.parametrize(("name", "kind", "one"), cases())
async def test_each_of_these_rights_is_needed(
    rabbitmq: RabbitMQ, vhosts: Mapping[str, str], name: str, kind: str, one: str
) -> None:
    patterns = patterns_for(NEEDS[name], without=(kind, one))
    url = user_url(rabbitmq, vhosts[name], patterns, f"delayer-{name}")
    with pytest.raises((BrokerRefused, TopologyMismatch, BrokerLost), match=r"ACCESS_REFUSED|refused"):
        await use_need(url, NEEDS[name])


@asynccontextmanager
async def place(rabbitmq: RabbitMQ) -> AsyncIterator[str]:
    vhost = rabbitmq.add_vhost()
    try:
        yield vhost
    finally:
        rabbitmq.drop_vhost(vhost)


def delayed(key: bytes, body: bytes, ms: int = 100) -> Message:
    return Message("delayer.in", key, Props(headers=((b"x-delay", number("I", ms)),), delivery_mode=2), body)


async def test_a_daemon_of_everything_with_these_rights(
    rabbitmq: RabbitMQ, postgres: Postgres, store: str, tmp_path: Path
) -> None:
    """Routes to queues, retries and exhausted messages, destinations, another system's levels; and `send`."""
    await asyncio.to_thread(clear, postgres)
    async with place(rabbitmq) as vhost:
        await declare(rabbitmq.url(vhost), NSB.topology())
        rabbitmq.api("PUT", f"/api/queues/{vhost}/billing", {"durable": True})
        binding = {"routing_key": "#.billing"}
        rabbitmq.api("POST", f"/api/bindings/{vhost}/e/{NSB.delivery}/q/billing", binding)
        work = {"durable": True, "arguments": {"x-dead-letter-exchange": "retries", "x-message-ttl": 100}}
        rabbitmq.api("PUT", f"/api/queues/{vhost}/work", work)
        rows = [besides(NEEDS[name].row) for name in ("to queues", "retry", "destination", "takeover", "send")]
        url = user_url(rabbitmq, vhost, with_besides(patterns_of("store"), *rows), "delayer-all")
        sections: dict[str, Any] = {
            "MODE": "store", "BROKER__URL": url, "STORE__URL": store, "ROUTE": json.dumps([TO_QUEUES, RETRY]),
            "DESTINATION": json.dumps([DESTINATION]), "TAKEOVER": json.dumps([TAKEOVER]),
        }  # fmt: skip
        config = tmp_path / "send.toml"
        config.write_text(f'[broker]\nurl = "{url}"\n')
        owned = tmp_path / "owner.toml"
        owned.write_text(f'[broker]\nurl = "{url}"\n[store]\nurl = "{postgres.url("delayer")}"\n')
        async with DaemonProcess(sections) as daemon, await Raw.connect(rabbitmq.url(vhost)) as raw:
            await daemon.ready()
            orders, billing = await raw.inbox("orders"), await raw.inbox("billing")
            parked = await raw.inbox("parking-lot")
            await raw.publish(delayed(b"orders", b"1"), Message("", b"work", Props(delivery_mode=2), b"2"))
            await orders.got([b"1"])
            await parked.got([b"2"])
            said = await command(
                config, "send", "--route", "delayer.in", "--routing-key", "orders", "--delay", "100ms", "--body", "3"
            )
            assert "Sent" in said
            await orders.got([b"1", b"3"])
            nsb = Message(NSB.level(6), routing_key(100, b"billing"), Props(delivery_mode=2), b"4")
            await raw.publish(nsb)

            async def moved() -> str:
                with suppress(RuntimeError):  # nothing was there yet
                    return await command(owned, "reschedule", "--all", "--at", "0s", "--yes")
                return ""

            await eventually(moved, lambda text: "1" in text)
            await billing.got([b"4"])
            assert await daemon.stop() == 0
            assert not [event for event in daemon.events if event["level"] in ("warning", "error")], daemon.tail()


async def test_messages_left_in_the_cascade_are_off_without_its_rights(
    rabbitmq: RabbitMQ, postgres: Postgres, store: str, tmp_path: Path
) -> None:
    """The daemon would not be ready. The check does not consume from the queue."""
    async with place(rabbitmq) as vhost, await Raw.connect(rabbitmq.url(vhost)) as raw:
        rabbitmq.api("PUT", f"/api/exchanges/{vhost}/delayer.out", {"type": "topic", "durable": True})
        await declare(rabbitmq.url(vhost), topology_of(Settings.model_validate({"mode": "native"})))
        await raw.publish(Message("", b"delays.due", Props(delivery_mode=2), b"1"))
        url = user_url(rabbitmq, vhost, patterns_of("store"), "delayer-after")
        config = tmp_path / "delayer.toml"
        config.write_text(f'[broker]\nurl = "{url}"\n[store]\nurl = "{store}"\n')
        if rabbitmq.hides_queues:  # this broker hides queues from users without the right to configure them
            assert "may not consume" not in await command(config, "check", "--json")
        else:
            with pytest.raises(RuntimeError, match=r"may not consume it: \S+delays\.due"):
                await command(config, "check", "--json")
        user_url(rabbitmq, vhost, patterns_of("native"), "delayer-after")
        assert "may not consume" not in await command(config, "check", "--json")
        (message,) = (await raw.inbox("delays.due"),)
        await message.got([b"1"])
        assert not message.only(b"1").delivery.redelivered


# The broker works with the rights of each mode, and refuses without any of them.


NAMES = {
    "store": ("delays", "delays.refused", "delayer.in", "delayer.out"),
    "native": (
        "delays", "delays.refused", "delays.due", "delayer.in", "delayer.out", "delayer.delay-level-27",
        "delayer.delay-level-00", "delayer.delay-delivery", "delayer.delay-strays",
    ),
}  # fmt: skip
TAKEN = [
    (mode, kind, name)
    for mode in MODES
    for kind, pattern in patterns_of(mode)._asdict().items()
    for name in NAMES[mode]
    if re.fullmatch(pattern, name)
]


@pytest.fixture(scope="module")
def vhost_name(rabbitmq: RabbitMQ) -> Iterator[str]:
    name = rabbitmq.add_vhost()
    rabbitmq.api("PUT", f"/api/exchanges/{name}/delayer.out", {"type": "topic", "durable": True})
    yield name
    rabbitmq.drop_vhost(name)


async def use_in(mode: str, url: str) -> None:
    """Declare, consume and publish as a daemon of this mode does."""
    settings = Settings.model_validate({"mode": mode})
    consumed, published = ["delays"], ["delayer.out", "delays.refused"]
    if mode == "native":
        cascade = cascade_of(settings)
        consumed.append("delays.due")
        published += [level.name for level in cascade.levels()] + [cascade.strays]
    await use(url, settings, consumed, published, b"0." * 28 + b"nobody")


def test_the_installation_grants_the_rights_of_store_mode() -> None:
    page = (PAGES / "install.md").read_text()
    patterns = " ".join(f"'{pattern}'" for pattern in patterns_of("store"))
    assert f"set_permissions delayer {patterns}\n" in page


@pytest.mark.parametrize("mode", MODES)
async def test_the_broker_is_used_with_these_rights(rabbitmq: RabbitMQ, vhost_name: str, mode: str) -> None:
    await use_in(mode, user_url(rabbitmq, vhost_name, patterns_of(mode)))


@pytest.mark.parametrize(("mode", "kind", "name"), TAKEN)
async def test_each_right_of_a_mode_is_needed(
    rabbitmq: RabbitMQ, vhost_name: str, mode: str, kind: str, name: str
) -> None:
    whole = patterns_of(mode)
    pattern = getattr(whole, kind).replace("^", f"^(?!{re.escape(name)}$)", 1)
    url = user_url(rabbitmq, vhost_name, whole._replace(**{kind: pattern}))
    with pytest.raises((BrokerRefused, TopologyMismatch, BrokerLost), match=r"ACCESS_REFUSED|refused"):
        await use_in(mode, url)


@pytest.mark.parametrize("tag", ["monitoring", "management"])
async def test_the_management_api_answers_a_monitoring_user(rabbitmq: RabbitMQ, vhost_name: str, tag: str) -> None:
    """The user has this tag, and no right in the virtual host. Only ``monitoring`` shows the nodes."""
    user = "delayer-monitor"
    rabbitmq.add_user(user, user, vhost=vhost_name)
    rabbitmq.api("PUT", f"/api/users/{user}", {"password": user, "tags": tag})
    management = Management(rabbitmq.management_url.replace("guest:guest", f"{user}:{user}"), vhost_name)
    await bindings_from(management, "delayer.out")
    await policies_of(management)
    with pytest.raises(BrokerRefused) if tag == "management" else nullcontext():
        await management.get("nodes?columns=name", [dict])


# A whole daemon with the rights that the page grants, in broker and store.


@pytest.mark.parametrize("mode", MODES)
async def test_the_daemon_with_these_rights(
    rabbitmq: RabbitMQ, postgres: Postgres, store: str, mode: str, tmp_path: Path
) -> None:
    """Messages are delivered, and no server denies the daemon anything."""
    await asyncio.to_thread(clear, postgres)
    async with place(rabbitmq) as vhost:
        url = user_url(rabbitmq, vhost, patterns_of(mode), f"delayer-{mode}")
        environ = {"MODE": mode, "BROKER__URL": url} | ({"STORE__URL": store} if mode == "store" else {})
        config = tmp_path / "delayer.toml"
        lines = [f'mode = "{mode}"', "[broker]", f"url = {json.dumps(url)}"]
        config.write_text("\n".join([*lines, *(["[store]", f'url = "{store}"'] if mode == "store" else [])]) + "\n")
        async with DaemonProcess(environ) as daemon:
            await daemon.ready()
            async with Ledger.open(rabbitmq.url(vhost), random.Random(3)) as ledger:
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


@pytest.mark.words
async def test_the_page_of_a_daemon_with_these_rights(rabbitmq: RabbitMQ, postgres: Postgres, page: str) -> None:
    """Its buttons for waiting, held and refused messages; those for refused ones need one more right."""
    await asyncio.to_thread(clear, postgres)
    http = {"HTTP__LISTEN": "127.0.0.1:0", "HTTP__TOKENS_FILE": tokens_file("open-sesame-open-sesame")}
    allowed = {"Authorization": "Bearer open-sesame-open-sesame", "Accept": "application/json"}
    async with place(rabbitmq) as vhost:
        url = user_url(rabbitmq, vhost, patterns_of("store"), "delayer-page")
        environ = {"MODE": "store", "BROKER__URL": url, "STORE__URL": page} | http
        async with DaemonProcess(environ) as daemon, await Raw.connect(rabbitmq.url(vhost)) as raw:
            web = await Web.of(await daemon.ready())

            async def told(path: str, **form: str) -> dict[str, Any]:
                answer = await web.post(path, form, **allowed)
                assert answer.status == 200, answer.text
                return dict(answer.json)

            async def held() -> list[int]:
                async with sql(postgres.url(DATABASE)) as connection:
                    return [number for (number,) in await connection.fetch("SELECT id FROM held")]

            for delay in (3_600_000, 3_600_000, 1):
                props = Props(headers=((b"x-delay", number("I", delay)),), delivery_mode=2)
                await raw.publish(Message("delayer.in", b"nobody", props, b"body"))
            props = Props(headers=((b"x-delay", text("soon")),), delivery_mode=2)
            await raw.publish(Message("delayer.in", b"nobody", props, b"body"))
            (lost,) = await eventually(held, lambda ids: len(ids) == 1)
            all_waiting = {"verb": "reschedule", "by": "1h", "all": "yes"}
            await eventually(lambda: told("/actions/messages", **all_waiting), lambda answer: answer["matched"] == 2)
            assert (await told("/actions/messages", verb="reschedule", by="1h", all="yes", confirmed="yes"))[
                "done"
            ] == 2
            assert (await told("/actions/messages", verb="cancel", route="delayer.in", confirmed="yes"))["done"] == 2
            assert (await told("/actions/messages", verb="drop", id=f"id:{lost}"))["done"] == 1
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
