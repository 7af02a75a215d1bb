"""Least privilege: delayer works with the rights that docs/security.md grants, and with none of them less.

The commands are read from the page, so it cannot grow stale.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import pytest
from structlog.testing import capture_logs

from delayer.audit import compact as compaction
from delayer.broker.admin import Admin
from delayer.broker.errors import BrokerRefused, TopologyMismatch
from delayer.broker.management import Management
from delayer.core.errors import BrokerLost, StoreLost
from delayer.core.filters import Filter, Token
from delayer.core.message import Confirmed, Outgoing, Returned
from delayer.core.segment import Broken, Restored
from delayer.settings import Settings
from delayer.store import acting, acts, cancelling, dropping, heldback, partitions, retry, roles, session, upgrades
from delayer.store.cancelling import Found
from delayer.store.errors import SchemaOutdated
from delayer.store.partitions import DAY_MS
from delayer.store.postgres import PostgresStore
from delayer.store.rescheduling import When
from delayer.store.status import overview
from delayer.wire.address import Address
from delayer.wire.connection import Connection
from delayer.wiring import cascade_of, topology_of
from tests.conformance.store_contract import claim_when_due, owned, parcel, release_all
from tests.faults.place import eventually
from tests.integration.test_store_lane import sql
from tests.rig.daemon import DaemonProcess, command
from tests.rig.ledger import Ledger
from tests.rig.raw import Message, Props, Raw, number, text
from tests.rig.rows import compact, put, row
from tests.rig.servers import Postgres, RabbitMQ
from tests.rig.web import Web

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
DATABASE, OWNER, DAEMON = "delayer", "delayer_owner", "delayer"
MODES = ("store", "native")
TABLES = "message, held, message_key, lane, counter, segment, segment_cancelled, act"

# ---- Postgres


def statements_of(block: int) -> list[str]:
    """The statements of the page's SQL block number ``block``."""
    found = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)[block]
    return [one.strip() for one in found.split(";") if one.strip()]


class Right(NamedTuple):
    """One privilege on one thing, to be taken away and given back."""

    take: str
    give: str

    def __str__(self) -> str:
        return self.take


def rights() -> list[Right]:
    """Every privilege of the daemon's role, one by one."""
    owner = Right(f"ALTER TABLE message OWNER TO {OWNER}", f"ALTER TABLE message OWNER TO {DAEMON}")
    return [owner, *_granted([*statements_of(1), *statements_of(2)])]


def _granted(statements: list[str]) -> list[Right]:
    found = []
    for statement in statements:
        if match := re.fullmatch(r"GRANT (.+) ON (.+) TO delayer(?:, delayer_owner)?", statement):
            for privilege in match[1].split(", "):
                what = f"{privilege} ON {match[2]}"
                found.append(Right(f"REVOKE {what} FROM {DAEMON}", f"GRANT {what} TO {DAEMON}"))
    return found


@pytest.fixture(scope="module")
def store(postgres: Postgres) -> Iterator[str]:
    """A store set up as the page says; the URL of the daemon's role."""
    for statement in statements_of(0):
        postgres.execute(statement)
    for statement in statements_of(1):
        postgres.execute(statement, database=DATABASE)
    owner = postgres.url(DATABASE, user=OWNER)
    asyncio.run(upgrades.upgrade(owner))
    asyncio.run(as_owner(owner, statements_of(2)))
    yield postgres.url(DATABASE, user=DAEMON)
    postgres.drop_database(DATABASE)
    for role in (OWNER, DAEMON):
        postgres.execute(f"DROP ROLE {role}")


async def test_an_upgrade_as_the_daemon_is_noticed_and_can_be_undone(store: str, postgres: Postgres) -> None:
    """It may create tables, so it succeeds; the rest of the page does too, and grants the owner of all nothing."""
    del store  # its roles
    name = "upgraded_by_mistake"
    postgres.execute(f"CREATE DATABASE {name} OWNER {OWNER}")
    try:
        for statement in statements_of(1):
            postgres.execute(statement.replace(f"DATABASE {DATABASE}", f"DATABASE {name}"), database=name)
        daemon, owner = postgres.url(name, user=DAEMON), postgres.url(name, user=OWNER)
        await upgrades.upgrade(daemon)
        await as_owner(owner, statements_of(2))
        assert await roles.mistaken(daemon) == await roles.mistaken(owner) == (DAEMON, OWNER)
        reassign, list_them = re.findall(r"`(REASSIGN .*?;)` then `(.*?) \\gexec`", " ".join(PAGE.split()))[0]
        await as_owner(owner, [reassign])
        async with sql(owner) as connection:
            await as_owner(owner, [alter for (alter,) in await connection.fetch(list_them)])
            assert await connection.fetchval("SELECT tableowner FROM pg_tables WHERE tablename = 'message'") == DAEMON
        await as_owner(owner, statements_of(2))
        assert await roles.mistaken(daemon) is None
    finally:
        postgres.drop_database(name)


async def as_owner(url: str, statements: list[str]) -> None:
    connection = await asyncpg.connect(url)
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


@pytest.fixture
def page(store: str, postgres: Postgres) -> Iterator[str]:
    """The same role with what the page's buttons need besides."""
    owner = postgres.url(DATABASE, user=OWNER)
    asyncio.run(as_owner(owner, statements_of(3)))
    yield store
    asyncio.run(as_owner(owner, [right.take for right in _granted(statements_of(3))]))


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_MS", 1)


async def work(url: str) -> None:
    """Everything that a daemon does with its store. Fails, one way or another, where it may not."""
    store = await PostgresStore.connect(url)
    try:
        async with owned(store, 2) as lanes:
            assert len(lanes) == 2, "one that is there may be taken, and no further one made"
            lane = lanes[0]
            now = store.now_ms()
            await upkeep(url, store, now // DAY_MS)
            await store.park(lane, [parcel(now - 1), parcel(now + 3 * DAY_MS), parcel(now + 401 * DAY_MS)], [])
            await store.park(lane, [parcel(now + 500, key=b"k"), parcel(now - 1, key=b"released")], [])
            await store.park(lane, [parcel(now + 600, key=b"k")], [])
            await store.park(lane, [], [b"k"])
            await store.hold(lane, [(parcel(now), "why")])
            first, *rest = await claim_when_due(lane)
            await lane.settle(rest, [(first, "why")])
            again = await claim_when_due(lane)
            await lane.settle([], [(due, "why") for due in again])
            await claim_when_due(lane)
            await lane.give_up()
            await release_all(lane)
            assert isinstance(await store.restore(lane, now + 2 * DAY_MS), Broken)
            assert isinstance(await store.restore(lane, now + 2 * DAY_MS), Restored)
            assert await store.restore(lane, now + 2 * DAY_MS) is None
            await lane.look_back()
            await store.adopt(1)
    finally:
        await store.close()
    await overview(url)


async def upkeep(url: str, store: PostgresStore, today: int) -> None:
    """Partitions are made and dropped; what cannot be done there is a warning, so the catalog is asked."""
    connection = await session.connect(url, "test")
    try:
        await partitions.make(connection, today - 5, today - 10)
        assert today - 5 in await partitions.existing(connection)
        await store.maintain()
        assert await partitions.existing(connection) >= set(range(today, today + 8))
        assert today - 5 not in await partitions.existing(connection)
        await connection.execute(f"INSERT INTO message {_ROW}", today * DAY_MS + 401 * DAY_MS)
        assert await partitions.make(connection, today + 401, today) is partitions.Making.DONE
    finally:
        await session.close(connection)


_ROW = (
    "(due_at, checksum, lane, format, route, exchange, routing_key, to_exchange, to_key, properties, body)"
    " VALUES ($1, 0, 99, 1, '', '', '', '', '', '', '')"
)


async def prepare(postgres: Postgres) -> None:
    """A store without partitions, and with two segments as the jobs leave them: one broken, of the other a message was
    cancelled."""
    await asyncio.to_thread(clear, postgres)
    owner = await session.connect(postgres.url(DATABASE, user=OWNER), "test")
    try:
        now_ms = await owner.fetchval("SELECT now()")
        for number in range(2):
            await put(owner, [row(2 * number + n, now_ms + DAY_MS + number) for n in (1, 2)])
            assert await compact(owner)
        await owner.execute("UPDATE segment SET packed = '' WHERE id = (SELECT min(id) FROM segment)")
        await owner.execute("INSERT INTO segment_cancelled (segment, id) SELECT max(id), 4 FROM segment")
        await owner.execute("UPDATE segment SET cancelled = 1 WHERE id = (SELECT max(id) FROM segment)")
    finally:
        await session.close(owner)


def clear(postgres: Postgres) -> None:
    """An empty store without partitions but the default one, as whoever may do that."""
    postgres.execute(f"TRUNCATE {TABLES}", database=DATABASE)
    drop = (
        "DO $$ DECLARE name text; BEGIN FOR name IN SELECT inhrelid::regclass FROM pg_inherits"
        " WHERE inhparent = 'message'::regclass AND inhrelid <> 'message_default'::regclass"
        " LOOP EXECUTE 'DROP TABLE ' || name; END LOOP; END $$"
    )
    postgres.execute(drop, database=DATABASE)


@pytest.mark.usefixtures("soon")
async def test_the_store_works_with_these_rights(store: str, postgres: Postgres) -> None:
    await prepare(postgres)
    await work(store)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("right", rights(), ids=str)
async def test_the_store_needs_each_of_them(store: str, postgres: Postgres, right: Right) -> None:
    await prepare(postgres)
    await asyncio.to_thread(postgres.execute, right.take, database=DATABASE)
    try:
        with pytest.raises((StoreLost, SchemaOutdated, asyncpg.PostgresError, AssertionError)):
            await asyncio.wait_for(work(store), 20)
    finally:
        await asyncio.to_thread(postgres.execute, right.give, database=DATABASE)


async def press(url: str) -> None:
    """Everything that the page's buttons do. Fails, one way or another, where it may not."""
    store = await PostgresStore.connect(url)
    try:
        async with owned(store) as [lane]:
            due_ms = store.now_ms() + 3 * DAY_MS
            await store.park(lane, [parcel(due_ms, key=b"k"), parcel(due_ms), parcel(due_ms)], [])
            await store.hold(lane, [(parcel(store.now_ms()), "why") for _ in range(3)])
    finally:
        await store.close()
    async with acting.acting(url, "test") as connection:
        waiting = [Token(number) for (number,) in await connection.fetch("SELECT id FROM message ORDER BY id")]
        segment = [Token(3)]  # see prepare()
        first, second, third = [number for (number,) in await connection.fetch("SELECT id FROM held ORDER BY id")]
        act = await acts.begin(connection, "ada", "cancel", {})
        move = acting.rescheduler(When(None, DAY_MS))
        assert await acting.named(connection, move, waiting, act) == {one.id: Found.WAITING for one in waiting}
        assert await acting.named(connection, cancelling.cancel, segment, act) == {3: Found.SEGMENT}
        done = await acting.every(connection, cancelling.cancel, Filter(), None, act=act, say=lambda _: None)
        assert done[Found.WAITING] == 3
        assert await acting.named(connection, move, [Token(first)], act) == {first: Found.HELD}
        assert await heldback.retry(connection, [second], act) == 1
        assert await heldback.drop(connection, await heldback.named(connection, [third]), act) == 1
        (written,) = await acts.listed(connection, 10)
        assert (written.who, written.messages) == ("ada", 3 + 1 + 3 + 1 + 1 + 1)


async def test_the_page_s_buttons_work_with_its_rights(page: str, postgres: Postgres) -> None:
    await prepare(postgres)
    await press(page)


@pytest.mark.parametrize("right", _granted(statements_of(3)), ids=str)
async def test_the_page_s_buttons_need_each_of_them(page: str, postgres: Postgres, right: Right) -> None:
    await prepare(postgres)
    await asyncio.to_thread(postgres.execute, right.take, database=DATABASE)
    with pytest.raises((StoreLost, asyncpg.PostgresError, AssertionError)):
        await asyncio.wait_for(press(page), 20)


@pytest.mark.parametrize("statement", ["UPDATE act SET who = 'eve'", "DELETE FROM act", "TRUNCATE act"])
async def test_with_the_page_s_rights_the_trail_is_added_to_and_no_more(page: str, statement: str) -> None:
    connection = await session.connect(page, "test")
    try:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(statement)
    finally:
        await session.close(connection)


@pytest.mark.parametrize(
    "statement",
    ["DROP TABLE held", "ALTER TABLE lane ADD COLUMN mine int", "UPDATE delayer_schema_version SET version_num = '9'",
     "CREATE SCHEMA mine", "TRUNCATE counter", "DELETE FROM lane"],
)  # fmt: skip
async def test_what_the_daemon_s_role_may_not_do(store: str, statement: str) -> None:
    connection = await session.connect(store, "test")
    try:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(statement)
    finally:
        await session.close(connection)


async def test_the_owner_can_go_on_upgrading_beside_the_daemon_s_partitions(store: str, postgres: Postgres) -> None:
    """The right to alter what the daemon made, which a later upgrade may need."""
    await asyncio.to_thread(clear, postgres)
    daemon = await PostgresStore.connect(store)
    try:
        await daemon.maintain()
    finally:
        await daemon.close()
    connection = await session.connect(postgres.url(DATABASE, user=OWNER), "test")
    try:
        await connection.execute("ALTER TABLE message ADD COLUMN later int")
        await connection.execute("ALTER TABLE message DROP COLUMN later")
    finally:
        await session.close(connection)


async def test_the_daemon_looks_after_days_that_its_owner_made(store: str, postgres: Postgres) -> None:
    """An import or a bulk restore parks as the owner of the schema."""
    await asyncio.to_thread(clear, postgres)
    owner = await PostgresStore.connect(postgres.url(DATABASE, user=OWNER))
    try:
        today = owner.now_ms() // DAY_MS
        async with owned(owner) as [lane]:
            await owner.park(lane, [parcel((today + 20) * DAY_MS)], [])
    finally:
        await owner.close()
    connection = await session.connect(store, "test")
    try:
        assert await dropping.drop_passed(connection, today + 30) == [], "it has a row"
        await connection.execute("DELETE FROM message")
        assert await dropping.drop_passed(connection, today + 30) == [partitions.name_of(today + 20)]
    finally:
        await session.close(connection)


async def test_a_day_that_is_somebody_else_s_keeps_no_other_from_being_dropped(store: str, postgres: Postgres) -> None:
    await asyncio.to_thread(clear, postgres)
    connection = await session.connect(store, "test")
    try:
        for day in (100, 101, 102):
            await partitions.make(connection, day, 0)
        theirs = partitions.name_of(101)
        await asyncio.to_thread(postgres.execute, f"ALTER TABLE {theirs} OWNER TO postgres", database=DATABASE)
        with capture_logs() as logged:
            dropped = await dropping.drop_passed(connection, 200)
        assert dropped == [partitions.name_of(100), partitions.name_of(102)]
        assert [entry["partition"] for entry in logged if entry["event"] == "partition not dropped"] == [theirs]
    finally:
        await session.close(connection)


async def test_compaction_without_the_right_says_so_before_the_work(store: str) -> None:
    with pytest.raises(StoreLost, match="the role delayer may not write segments") as refused:
        await compaction.plan(store, 7 * DAY_MS, 10_000)
    assert "owns the schema" in refused.value.advice


# ---- RabbitMQ


class Patterns(NamedTuple):
    configure: str
    write: str
    read: str


def patterns_of(mode: str) -> Patterns:
    found = re.findall(r"set_permissions -p / delayer \\\n\s+'(.*)' \\\n\s+'(.*)' \\\n\s+'(.*)'", PAGE)
    assert len(found) == len(MODES)
    return Patterns(*found[MODES.index(mode)])


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


def user_url(rabbitmq: RabbitMQ, vhost: str, patterns: Patterns, user: str = "delayer-rights") -> str:
    rabbitmq.add_user(user, user, vhost=vhost, **patterns._asdict())
    return rabbitmq.url(vhost, user=f"{user}:{user}")


async def use(url: str, mode: str) -> None:
    """Declare, consume and publish whatever a daemon of this mode does."""
    settings = Settings.model_validate({"mode": mode})
    async with await Admin.connect(url) as admin:
        await admin.declare(topology_of(settings))
    consumed, published = ["delays"], ["delayer.out", "delays.refused"]
    if mode == "native":
        cascade = cascade_of(settings)
        consumed.append("delays.due")
        published += [level.name for level in cascade.levels()] + [str(cascade.strays)]
    connection = await Connection.open(Address.parse(url), name="test")
    try:
        channel = await connection.channel()
        for queue in consumed:
            await channel.consume(queue, lambda _: None, lambda: None)
        await channel.confirm_select()
        batch = [
            Outgoing(
                name.encode(),
                b"0." * 28 + b"nobody",
                Props(headers=((b"x-delayer-id", text(str(index))),), delivery_mode=2).encode(),
                b"",
                b"%d" % index,
            )
            for index, name in enumerate(published)
        ]
        for outcome in await channel.publish(batch, timeout=10):
            assert isinstance(outcome, Confirmed | Returned)
    finally:
        await connection.close()


@pytest.mark.parametrize("mode", MODES)
async def test_the_broker_is_used_with_these_rights(rabbitmq: RabbitMQ, vhost_name: str, mode: str) -> None:
    await use(user_url(rabbitmq, vhost_name, patterns_of(mode)), mode)


@pytest.mark.parametrize(("mode", "kind", "name"), TAKEN)
async def test_each_of_them_is_needed(rabbitmq: RabbitMQ, vhost_name: str, mode: str, kind: str, name: str) -> None:
    whole = patterns_of(mode)
    pattern = getattr(whole, kind).replace("^", f"^(?!{re.escape(name)}$)", 1)
    url = user_url(rabbitmq, vhost_name, whole._replace(**{kind: pattern}))
    with pytest.raises((BrokerRefused, TopologyMismatch, BrokerLost), match=r"ACCESS_REFUSED|refused"):
        await use(url, mode)


async def test_the_management_api_shows_what_is_asked_of_it(rabbitmq: RabbitMQ, vhost_name: str) -> None:
    """To a user with the tag ``management`` who may do nothing at all in the virtual host."""
    user = "delayer-monitor"
    rabbitmq.add_user(user, user, vhost=vhost_name)
    rabbitmq.api("PUT", f"/api/users/{user}", {"password": user, "tags": "management"})
    management = Management(rabbitmq.management_url.replace("guest:guest", f"{user}:{user}"), vhost_name)
    await management.bindings_from("delayer.out")
    await management.policies()


# ---- the whole daemon, with both


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
            assert (await told("/deeds/filtered", verb="reschedule", by="1h", all="yes", confirmed="yes"))["done"] == 2
            assert (await told("/deeds/filtered", verb="cancel", route="delayer.in", confirmed="yes"))["done"] == 2
            assert (await told("/deeds/held", verb="drop", id=str(lost)))["done"] == 1
            row = re.search(r'data-label="id" class="wide">([^<]+)<', (await web.get("/refused")).text)
            assert row is not None
            stays = await told("/deeds/refused", verb="retry", id=row[1])
            assert stays["done"] == 0
            assert "ACCESS_REFUSED" in str(stays["lines"])
            whole = patterns_of("store")
            user_url(rabbitmq, vhost, whole._replace(write=whole.write.replace("(", r"(delayer\.in|")), "delayer-page")
            assert (await told("/deeds/refused", verb="retry", id=row[1]))["done"] == 1
            assert (await web.get("/acts")).status == 200
            assert await daemon.stop() == 0
    finally:
        rabbitmq.drop_vhost(vhost)
