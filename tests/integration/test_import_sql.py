"""`delayer import nservicebus-sql` and `-nhibernate`, from a real PostgreSQL and MariaDB, into one store and two."""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from delayer.amqp.properties import Properties
from delayer.core import importing
from delayer.imports.databases import database_url
from delayer.imports.sql import SqlTimeouts
from tests.integration.cli import Run
from tests.integration.test_import_jsonl import other_store
from tests.support.daemon import EXECUTABLE
from tests.support.mariadb import MariaDB
from tests.support.place import eventually
from tests.support.rows import conserved
from tests.support.servers import Postgres
from tests.support.store import sql

CREATE = {
    "postgresql": """CREATE TABLE "{name}" ("Id" uuid PRIMARY KEY, "Destination" character varying(200),
        "SagaId" uuid, "State" bytea, "Time" timestamp, "Headers" text, "PersistenceVersion" character varying(23))""",
    "mysql": """CREATE TABLE `{name}` (Id varchar(38) NOT NULL, Destination nvarchar(200), SagaId varchar(38),
        State longblob, Time datetime, Headers json NOT NULL, PersistenceVersion varchar(23) NOT NULL, PRIMARY KEY (Id),
        INDEX Index_Time (Time))""",
}
NHIBERNATE = {
    # As NHibernate creates it, with unquoted names.
    "postgresql": """CREATE TABLE TimeoutEntity (Id uuid PRIMARY KEY, Destination varchar(1024), SagaId uuid,
        State bytea, Endpoint varchar(440), Time timestamp, Headers varchar(4000))""",
    "mysql": """CREATE TABLE TimeoutEntity (Id varchar(40) NOT NULL PRIMARY KEY, Destination varchar(1024),
        SagaId varchar(40), State longblob, Endpoint varchar(440), Time datetime, Headers longtext)""",
}
NOON = datetime.now(UTC).replace(microsecond=0, hour=12, tzinfo=None) + timedelta(days=30)


@dataclass
class Source:
    """A database with timeouts in it. ``url``: as an operator would write it."""

    kind: str
    url: str

    def quoted(self, name: str) -> str:
        quote = '"' if self.kind == "postgresql" else "`"
        return f"{quote}{name}{quote}"

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[AsyncConnection]:
        engine = create_async_engine(database_url(self.url))
        try:
            async with engine.begin() as connection:
                yield connection
        finally:
            await engine.dispose()

    async def create(self, name: str) -> None:
        async with self.connected() as connection:
            await connection.execute(text(CREATE[self.kind].format(name=name)))

    async def put(self, name: str, rows: list[dict[str, Any]]) -> None:
        columns = ", ".join(map(self.quoted, rows[0]))
        values = ", ".join(f":{one}" for one in rows[0])
        async with self.connected() as connection:
            await connection.execute(text(f"INSERT INTO {self.quoted(name)} ({columns}) VALUES ({values})"), rows)

    async def rows(self, name: str) -> list[tuple[Any, ...]]:
        async with self.connected() as connection:
            found = await connection.execute(text(f"SELECT * FROM {self.quoted(name)}"))
            return sorted((tuple(row) for row in found), key=repr)

    async def tables(self) -> list[str]:
        async with self.connected() as connection:
            from sqlalchemy import inspect

            return sorted(await connection.run_sync(lambda sync: inspect(sync).get_table_names()))

    def timeout(self, n: int, due: datetime, destination: str = "sales", **more: Any) -> dict[str, Any]:
        id_ = uuid.UUID(int=n)
        headers = {"NServiceBus.MessageId": f"m-{n}", "NServiceBus.EnclosedMessageTypes": "Shop.Remind, Shop"}
        return {
            "Id": id_ if self.kind == "postgresql" else str(id_),
            "Destination": destination,
            "SagaId": uuid.UUID(int=0) if self.kind == "postgresql" else str(uuid.UUID(int=0)),
            "State": b"\0body %d \xff" % n,
            "Time": due,
            "Headers": json.dumps(headers, indent=2),
            "PersistenceVersion": "4.0.0.0",
        } | more


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaDB]:
    with MariaDB() as server:
        yield server


@pytest.fixture(params=["postgresql", "mysql"])
def source(request: pytest.FixtureRequest, postgres: Postgres) -> Iterator[Source]:
    yield from source_of(request.param, request, postgres)


def source_of(kind: str, request: pytest.FixtureRequest, postgres: Postgres) -> Iterator[Source]:
    """A fresh database there; MariaDB starts at its first use."""
    if kind == "postgresql":
        name = postgres.add_database()
        yield Source("postgresql", postgres.url(name))
        postgres.drop_database(name)
        return
    server: MariaDB = request.getfixturevalue("mariadb")
    name = server.add_database()
    yield Source("mysql", server.url(name))
    server.drop_database(name)


def run_of(delayer: Run, source: Source, *more: str) -> Callable[..., Any]:
    """Import from there, with the URL in the environment, because it has a password."""

    def call(verb: str, *arguments: str, expect: int = 0) -> Any:
        args = ("import", "nservicebus-sql", verb, *more, *arguments, "--unverified", "--json")
        args += () if verb == "preview" else ("--yes",)
        result = delayer(*args, expect=expect, DELAYER_IMPORT_URL=source.url)
        assert MariaDB.PASSWORD not in result.output
        return json.loads(result.stdout) if result.stdout else result.stderr

    return call


@pytest.mark.words
async def test_all_tables_into_the_store(delayer: Run, database: str, source: Source) -> None:
    """Every matching timeout is imported once, with its due instant and bytes; the rest stays in its table. Some rows
    are larger than a batch."""
    for name in ("Sales_TimeoutData", "Mail_Out_TimeoutData", "Orders"):
        await source.create(name)
    soon = datetime.now(UTC).replace(microsecond=0, tzinfo=None)
    exact = NOON + timedelta(microseconds=1) if source.kind == "postgresql" else NOON
    sales = [source.timeout(n, NOON - timedelta(minutes=n % 5), f"sales.{n % 3}@HOST{n}") for n in range(30)]
    sales[7]["State"] = b"x" * 9_000_000
    special = [
        source.timeout(100, exact, "exact", State=b"y" * 9_000_000),
        source.timeout(101, NOON, "no-state", State=None),
        source.timeout(102, NOON, "empty", State=b"", Headers="{}"),
        source.timeout(103, datetime(9999, 12, 31, 23, 59, 59), "never"),  # noqa: DTZ001
        source.timeout(104, NOON, "", Headers="[1"),
        source.timeout(105, NOON, "sales.0@x", Headers="[7]"),
        source.timeout(106, NOON, "unread", Headers='{"a": 1}' if source.kind == "mysql" else "{"),
    ]
    if source.kind == "mysql":
        special[4]["Headers"] = "{}"  # the column refuses it
    unread = 1 if source.kind == "mysql" else 2
    left = [source.timeout(200, soon, "overdue"), source.timeout(201, soon + timedelta(seconds=30), "soon")]
    nothing = source.timeout(202, NOON, "never")
    nothing["Time"] = None
    await source.put("Sales_TimeoutData", [*sales, *left, nothing])
    await source.put("Mail_Out_TimeoutData", special)
    await source.put("Orders", [source.timeout(300, NOON)])
    before = await source.rows("Sales_TimeoutData")
    call = run_of(delayer, source, "--rewrite-destination", "s/@.*//")
    seen = call("preview", expect=1)
    assert (seen["messages"], seen["would_be_held"]) == (37, 1)
    assert {one["routing_key"]: one["unfit"] for one in seen["destinations"] if one["unfit"]} == {"": 1}
    assert sorted(seen["left"].values()) == [1, 2]
    assert await source.rows("Sales_TimeoutData") == before
    report = call("run", expect=1)
    assert (report["parked"], report["held"], report["staged"]) == (36 - unread, 1 + unread, 37)
    assert seen["held_because"].items() < report["held_because"].items()
    assert sorted(report["left"].values()) == [1, 2]
    assert len(await source.rows("Sales_TimeoutData")) == 3
    assert await source.rows("Mail_Out_TimeoutData") == []
    assert len(await source.rows("Orders")) == 1
    assert await source.tables() == ["Mail_Out_TimeoutData", "Orders", "Sales_TimeoutData"]
    async with sql(database) as admin:
        rows = {row["body"]: row for row in await admin.fetch("SELECT * FROM message")}
        for one in sales:
            row = rows[one["State"]]
            due_ms = int(one["Time"].replace(tzinfo=UTC).timestamp() * 1000)
            assert (row["due_at"], row["to_exchange"], row["to_key"]) == (
                due_ms, b"", one["Destination"].partition("@")[0].encode(),
            )  # fmt: skip
            properties = Properties.parse(row["properties"])
            assert properties.short("message_id") == b"m-%d" % uuid.UUID(str(one["Id"])).int
            assert properties.short("type") == b"Shop.Remind"
        of = {row["to_key"]: row for row in rows.values()}
        due_ms = int(NOON.replace(tzinfo=UTC).timestamp() * 1000)
        assert of[b"exact"]["due_at"] == due_ms + (1 if source.kind == "postgresql" else 0)  # never early
        assert of[b"never"]["due_at"] == 253_402_300_799_000
        # The earliest due is first, and ids follow this order.
        dues = [row["due_at"] for row in await admin.fetch("SELECT due_at FROM message ORDER BY id")]
        assert dues == sorted(dues)
        reasons = sorted(reason for (reason,) in await admin.fetch("SELECT reason FROM held"))
        assert "destination" in reasons[0]
        assert all("headers cannot be read" in reason for reason in reasons[1:])
        assert (await conserved(admin))["parked"] == 37
        parameters = await admin.fetchval("SELECT parameters FROM import_run")
        assert MariaDB.PASSWORD not in parameters
    assert call("run")["parked"] == 0
    overdue = call("run", "--overdue-too")
    assert (overdue["parked"], list(overdue["left"].values())) == (2, [1])


async def test_a_row_in_a_timeout_managers_hands_is_passed_over(delayer: Run, source: Source) -> None:
    await source.create("Sales_TimeoutData")
    await source.put("Sales_TimeoutData", [source.timeout(n, NOON) for n in range(10)])
    call = run_of(delayer, source)
    delete = text(f"DELETE FROM {source.quoted('Sales_TimeoutData')} WHERE {source.quoted('Id')} = :id")
    async with source.connected() as manager:
        await manager.execute(delete, {"id": source.timeout(3, NOON)["Id"]})
        assert call("run")["parked"] == 9
        await manager.rollback()
    assert call("run")["parked"] == 1
    assert await source.rows("Sales_TimeoutData") == []


async def test_limit_and_cutoff_bound_a_run(delayer: Run, database: str, source: Source) -> None:
    told = run_of(delayer, source)("preview", expect=1)
    assert "no table matches *TimeoutData" in told
    await source.create("A_TimeoutData")
    await source.create("B_TimeoutData")
    await source.put("A_TimeoutData", [source.timeout(n, NOON + timedelta(hours=n)) for n in range(0, 20, 2)])
    await source.put("B_TimeoutData", [source.timeout(n, NOON + timedelta(hours=n)) for n in range(1, 20, 2)])
    cutoff = (NOON + timedelta(hours=5)).isoformat() + "Z"
    report = run_of(delayer, source, "--cutoff", cutoff, "--limit", "7")("run")
    assert (report["staged"], report["parked"]) == (7, 7)
    async with sql(database) as admin:
        bodies = [body for (body,) in await admin.fetch("SELECT body FROM message ORDER BY id")]
    assert bodies == [b"\0body %d \xff" % n for n in range(5, 12)]
    assert len(await source.rows("A_TimeoutData")) + len(await source.rows("B_TimeoutData")) == 13
    assert run_of(delayer, source, "--table", "A_*")("run")["parked"] == 7
    report = run_of(delayer, source, "--table", "C_*")("run", expect=1)
    assert "no table matches C_*" in report


SLOW = {
    "postgresql": [
        """CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql
        AS 'BEGIN PERFORM pg_sleep(1.2); RETURN old; END'""",
        """CREATE TRIGGER slow BEFORE DELETE ON "Sales_TimeoutData" FOR EACH ROW
        WHEN (old."Time" < now() + interval '1 day') EXECUTE FUNCTION slow()""",
    ],
    "mysql": [
        """CREATE TRIGGER slow BEFORE DELETE ON Sales_TimeoutData FOR EACH ROW
        DO sleep(IF(old.Time < now() + INTERVAL 1 DAY, 1.2, 0))"""
    ],
}
"""A row that is due soon is slow to move."""


async def test_a_long_move_takes_no_timeout_due_before_its_end(source: Source) -> None:
    """A timeout manager reads without locks, so it sees rows until the move commits, and takes the due ones. It may
    also store new timeouts during the move. The import repeats the move with a later limit."""
    await source.create("Sales_TimeoutData")
    async with source.connected() as connection:
        for statement in SLOW[source.kind]:
            await connection.exec_driver_sql(statement)
    soon = datetime.now(UTC).replace(microsecond=0, tzinfo=None) + timedelta(seconds=6)
    await source.put("Sales_TimeoutData", [source.timeout(n, soon) for n in range(3)])
    await source.put("Sales_TimeoutData", [source.timeout(n, NOON) for n in range(3, 9)])
    meant, name = importing.ImportSelection(), "nservicebus-sql"
    timeouts = SqlTimeouts(name=name, url=source.url, patterns=(), meant=meant, soon_ms=3_000)
    run = importing.Run(1, name, {}, importing.Phase.STAGING, "me", 0, token="1a")
    began = time.monotonic()
    try:
        moving = asyncio.create_task(timeouts.stage(run))
        await eventually(source.tables, lambda names: len(names) == 2)
        await source.put("Sales_TimeoutData", [source.timeout(9, NOON)])
        moved = await moving
    finally:
        await timeouts.close()
    assert time.monotonic() - began > 3 * 1.2, "the first move met the slow rows"
    assert moved == 7, "the second move includes the timeout that was stored during the first"
    assert len(await source.rows("Sales_TimeoutData")) == 3


@pytest.mark.words
async def test_a_preview_of_the_soonest_tells_of_no_others(delayer: Run, source: Source) -> None:
    """In two tables, with waiting or staged rows: the preview names held messages by the rules of the run."""
    for name in ("A_TimeoutData", "B_TimeoutData"):
        await source.create(name)
    rows = [source.timeout(n, NOON + timedelta(hours=n), destination="" if n % 4 == 3 else "q") for n in range(20)]
    await source.put("A_TimeoutData", rows[::2])
    await source.put("B_TimeoutData", rows[1::2])
    for limit, unfit, code in ((3, 0, 0), (4, 1, 1), (20, 5, 1)):
        seen = run_of(delayer, source, "--limit", str(limit))("preview", expect=code)
        assert (seen["messages"], seen["would_be_held"]) == (limit, unfit)
        assert sum(one["messages"] for one in seen["destinations"]) == limit
        assert seen["left"] == ({"beyond the limit": 20 - limit} if limit < 20 else {})
    words = ("import", "nservicebus-sql", "preview", "--unverified")
    told = delayer(*words, expect=1, DELAYER_IMPORT_URL=source.url).stdout
    assert "5 of them would be held, as far as can be seen:\n  5, unfit: its destination has 0 bytes" in told
    assert "5 unfit" in told


async def test_a_source_out_of_reach(delayer: Run, source: Source) -> None:
    scheme = source.url.partition(":")[0]
    nowhere = Source(source.kind, f"{scheme}://me:{MariaDB.PASSWORD}@127.0.0.1:1/x")
    told = run_of(delayer, nowhere)("run", expect=3)
    assert "the source is out of reach: C" in told, "Connect call failed; Can't connect to MySQL server"
    assert "Error" not in told and "Errno" not in told
    nonsense = Source(source.kind, f"{MariaDB.PASSWORD}::")
    assert "cannot be read" in run_of(delayer, nonsense)("run", expect=2)


async def test_a_read_only_user_can_only_preview(delayer: Run, source: Source) -> None:
    """A preview works; a run is refused with the reason, and moves nothing."""
    await source.create("Sales_TimeoutData")
    await source.put("Sales_TimeoutData", [source.timeout(n, NOON) for n in range(3)])
    user = f"looker_{uuid.uuid4().hex[:8]}"
    if source.kind == "postgresql":
        statements = [f"CREATE ROLE {user} LOGIN PASSWORD 'x'", f'GRANT SELECT ON "Sales_TimeoutData" TO {user}']
    else:
        database = source.url.rpartition("/")[2].partition("?")[0]
        statements = [f"CREATE USER {user} IDENTIFIED BY 'x'", f"GRANT SELECT ON {database}.* TO {user}"]
    async with source.connected() as connection:
        for statement in statements:
            await connection.execute(text(statement))
    url = make_url(source.url).set(username=user, password="x").render_as_string(hide_password=False)
    looker = run_of(delayer, Source(source.kind, url))
    assert looker("preview")["messages"] == 3
    told = looker("run", expect=1)
    assert "the database refuses it" in told
    assert "may SELECT, INSERT and DELETE there" in told
    assert await source.tables() == ["Sales_TimeoutData"]
    assert len(await source.rows("Sales_TimeoutData")) == 3


async def test_nhibernate(delayer: Run, database: str, source: Source) -> None:
    async with source.connected() as connection:
        await connection.execute(text(NHIBERNATE[source.kind]))
    rows = [source.timeout(n, NOON, f"billing@HOST{n}") for n in range(6)]
    for n, row in enumerate(rows):
        del row["PersistenceVersion"]
        row["Endpoint"] = "Billing" if n % 2 else "Sales"
    rows[1]["Headers"] = None
    saved = {"NServiceBus.MessageId": "m-3", "NServiceBus.Timeout.ReplyToAddress": "shop@HOST"}
    rows[3]["Headers"] = json.dumps([{"Key": key, "Value": value} for key, value in saved.items()])
    name = "timeoutentity" if source.kind == "postgresql" else "TimeoutEntity"
    if source.kind == "postgresql":
        rows = [{key.lower(): value for key, value in row.items()} for row in rows]
    await source.put(name, rows)
    args = ("import", "nservicebus-nhibernate", "run", "--endpoint", "Billing", "--rewrite-destination", "s/@.*//")
    run = delayer(*args, "--unverified", "--yes", "--json", DELAYER_IMPORT_URL=source.url)
    assert json.loads(run.stdout)["parked"] == 3
    assert len(await source.rows(name)) == 3
    async with sql(database) as admin:
        rows_here = await admin.fetch("SELECT properties, to_key FROM message")
        parsed = {
            (read := Properties.parse(raw)).short("message_id"): (key, read.short("reply_to")) for raw, key in rows_here
        }
    assert parsed == {
        str(uuid.UUID(int=1)).encode(): (b"billing", None), b"m-3": (b"billing", b"shop"), b"m-5": (b"billing", None)
    }  # fmt: skip


TABLES = ("A_TimeoutData", "B_TimeoutData")
COUNT = 60
# A lock that lets all sessions read the tables, but not delete from them; and a query for the sessions that wait.
HOLD = {
    "postgresql": 'LOCK TABLE "A_TimeoutData", "B_TimeoutData" IN EXCLUSIVE MODE',
    "mysql": "LOCK TABLES A_TimeoutData READ, B_TimeoutData READ",
}
WAITING = {
    "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'INSERT INTO%'"
    " AND datname = current_database()",
    "mysql": "SELECT count(*) FROM information_schema.processlist WHERE db = database() AND info LIKE 'INSERT INTO%'",
}


async def import_into(store: str, source: Source) -> tuple[int, dict[str, Any], str]:
    process = await asyncio.create_subprocess_exec(
        EXECUTABLE, "import", "nservicebus-sql", "run", "--unverified", "--yes", "--json",
        env={
            "PATH": os.environ["PATH"], "DELAYER_CONFIG": os.devnull, "DELAYER_STORE__URL": store,
            "DELAYER_IMPORT_URL": source.url,
        },
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, json.loads(out or "{}"), said.decode()


async def test_each_timeout_is_in_one_store(source: Source, postgres: Postgres) -> None:
    """Both imports check and create their tables before either takes anything."""
    rows = [source.timeout(n, NOON + timedelta(seconds=n)) for n in range(COUNT)]
    for name, some in zip(TABLES, (rows[::2], rows[1::2]), strict=True):
        await source.create(name)
        await source.put(name, some)
    async with other_store(postgres) as one, other_store(postgres) as other:
        async with source.connected() as holder:
            await holder.execute(text(HOLD[source.kind]))

            async def waiting() -> int:
                assert not (ended := [one.result() for one in imports if one.done()]), f"did not wait: {ended}"
                async with source.connected() as watcher:
                    count: int = (await watcher.execute(text(WAITING[source.kind]))).scalar_one()
                return count

            imports = [asyncio.create_task(import_into(store, source)) for store in (one, other)]
            await eventually(waiting, lambda count: count == 2)
            if source.kind == "mysql":
                await holder.execute(text("UNLOCK TABLES"))
        ended = await asyncio.gather(*imports)
        assert [code for code, _, _ in ended] == [0, 0], ended
        brought = []
        for store, (_, report, _) in zip((one, other), ended, strict=True):
            async with sql(store) as admin:
                bodies = [body for (body,) in await admin.fetch("SELECT body FROM message")]
                assert len(bodies) == report["parked"] == report["staged"] == (await conserved(admin))["parked"]
                brought += bodies
        assert sorted(brought) == sorted(row["State"] for row in rows)
    assert [await source.rows(name) for name in TABLES] == [[], []]
    assert await source.tables() == list(TABLES)


@pytest.mark.parametrize("source", ["postgresql", pytest.param("mysql", marks=pytest.mark.long)], indirect=True)
async def test_a_later_import_is_refused(source: Source, postgres: Postgres) -> None:
    """The import reports rows staged by another store's import, and takes neither them nor later rows."""
    await source.create(TABLES[0])
    await source.put(TABLES[0], [source.timeout(n, NOON) for n in range(3)])
    async with source.connected() as connection:
        staged = f"{TABLES[0]}_delayer_0123456789ab"
        theirs = source.quoted(TABLES[0])
        await connection.execute(text(f"CREATE TABLE {source.quoted(staged)} AS SELECT * FROM {theirs}"))
        await connection.execute(text(f"DELETE FROM {theirs}"))
    await source.put(TABLES[0], [source.timeout(9, NOON)])
    async with other_store(postgres) as store:
        code, _, told = await import_into(store, source)
        assert code == 1
        assert f"table {staged} holds timeouts of another store's import" in told
    assert (len(await source.rows(TABLES[0])), len(await source.rows(staged))) == (1, 3)
