"""The rights that docs/security.md grants, read from the page, so that it cannot grow stale; and users with them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from delayer.amqp.address import Address
from delayer.amqp.connection import Connection
from delayer.amqp.values import Outgoing
from delayer.config.model import Settings
from delayer.config.topology import topology_of
from delayer.core.hold import HoldKind
from delayer.core.marks import ID
from delayer.store import upgrades
from tests.support.fakes import kind_of
from tests.support.raw import Props, text
from tests.support.servers import Postgres, RabbitMQ
from tests.support.store import sql
from tests.support.topology import declare

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
DATABASE, OWNER, DAEMON = "delayer", "delayer_owner", "delayer"
MODES = ("store", "native")
TABLES = "message, held, message_key, counter, segment, schedule, delayer_inbox, audit_log"


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


def granted(statements: list[str]) -> list[Right]:
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


async def as_owner(url: str, statements: list[str]) -> None:
    async with sql(url) as connection:
        for statement in statements:
            await connection.execute(statement)


@pytest.fixture
def page(store: str, postgres: Postgres) -> Iterator[str]:
    """The same role with the additional rights of the page's buttons."""
    owner = postgres.url(DATABASE, user=OWNER)
    asyncio.run(as_owner(owner, statements_of(3)))
    yield store
    asyncio.run(as_owner(owner, [right.take for right in granted(statements_of(3))]))


def clear(postgres: Postgres) -> None:
    """Empty the store and drop all partitions but the default one, as a superuser."""
    postgres.execute(f"TRUNCATE {TABLES}", database=DATABASE)
    drop = (
        "DO $$ DECLARE name text; BEGIN FOR name IN SELECT inhrelid::regclass FROM pg_inherits"
        " WHERE inhparent = 'message'::regclass AND inhrelid <> 'message_default'::regclass"
        " LOOP EXECUTE 'DROP TABLE ' || name; END LOOP; END $$"
    )
    postgres.execute(drop, database=DATABASE)


class Patterns(NamedTuple):
    configure: str
    write: str
    read: str


def patterns_of(mode: str) -> Patterns:
    found = re.findall(r"set_permissions -p / delayer \\\n\s+'(.*)' \\\n\s+'(.*)' \\\n\s+'(.*)'", PAGE)
    assert len(found) == len(MODES)
    return Patterns(*found[MODES.index(mode)])


def besides(what: str) -> Patterns:
    """The patterns of the page's table in the row that begins with ``what``, without anchors."""
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {what}")]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    return Patterns(*(",".join(re.findall("`([^`]+)`", cell)) for cell in cells))


def with_besides(whole: Patterns, *more: Patterns) -> Patterns:
    """The page's patterns, with those of these rows of its table added."""
    joined = []
    for kind in Patterns._fields:
        added = [one for row in more for one in getattr(row, kind).split(",") if one]
        joined.append(getattr(whole, kind).removesuffix(")$") + "".join(f"|{one}" for one in added) + ")$")
    return Patterns(*joined)


def user_url(rabbitmq: RabbitMQ, vhost: str, patterns: Patterns, user: str = "delayer-rights") -> str:
    rabbitmq.add_user(user, user, vhost=vhost, **patterns._asdict())
    return rabbitmq.url(vhost, user=f"{user}:{user}")


async def use(url: str, settings: Settings, consumed: Iterable[str], published: Iterable[str], key: bytes) -> None:
    """Declare, bind, consume and publish as a daemon of these settings does. Raises the broker's error."""
    await declare(url, topology_of(settings))
    connection = await Connection.open(Address.parse(url), name="test")
    try:
        channel = await connection.channel(token_header=ID)
        for queue in consumed:
            await channel.consume(queue, lambda _: None, lambda: None)
        batch = []
        for index, name in enumerate(published):
            # The publisher recognises a returned message by its id.
            props = Props(headers=((b"x-delayer-id", text(str(index))),), delivery_mode=2)
            batch.append(Outgoing(name.encode(), key, props.encode(), b"", b"%d" % index))
        for outcome in await channel.publish(batch, timeout=10):
            assert kind_of(outcome) in (None, HoldKind.RETURNED)
    finally:
        await connection.close()
