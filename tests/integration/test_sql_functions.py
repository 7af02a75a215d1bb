"""The functions of the SQL inbox: what they write, what they refuse, and who may call them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from delayer.amqp.properties import Properties
from delayer.format.inbox import delivery_of_row
from delayer.store import upgrades
from tests.integration.rights import PAGE
from tests.support.postgres import Postgres
from tests.support.postgres_kinds import pgbouncer
from tests.support.processes import StartFailed

TEXT = "text/plain; charset=utf-8"


@asynccontextmanager
async def plain(url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection as an application's, with asyncpg's own types."""
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def sent(connection: asyncpg.Connection, statement: str, *values: object) -> dict[str, Any]:
    """Call a function, and return its row, with JSON decoded."""
    found = await connection.fetchval(statement, *values)
    row = dict(await connection.fetchrow("DELETE FROM delayer_inbox RETURNING *"))
    row["headers"], row["properties"] = json.loads(row["headers"]), json.loads(row["properties"])
    return row | {"returned": found}


async def test_a_literal_is_a_text_and_other_bodies_keep_their_bytes(database: str) -> None:
    async with plain(database) as connection:
        row = await sent(connection, "SELECT delayer_send('orders.eu', 'hellö')")
        assert (row["exchange"], row["routing_key"], row["headers"]) == ("delayer.in", "orders.eu", {})
        assert (row["body"], row["properties"]) == (
            "hellö".encode(),
            {"message_id": row["returned"], "content_type": TEXT},
        )
        for call, body, content_type in (
            ("routing_key => 'k', body => 'x'", b"x", TEXT),
            (r"'k', '\x00ff'::bytea", b"\x00\xff", None),
            ("'k', '{\"a\":1}'::jsonb", b'{"a": 1}', "application/json"),
            ("'k', jsonb_build_object('a', 1), content_type => 'text/json'", b'{"a": 1}', "text/json"),
            ("'k', 'x'::varchar", b"x", TEXT),
            ("'k', '{\"a\":1}'::json", b'{"a":1}', "application/json"),
            ("'k', json_build_object('a', 1)", b'{"a" : 1}', "application/json"),
            ("'k', row_to_json((SELECT x FROM (VALUES (5)) AS x (n)))", b'{"n":5}', "application/json"),
        ):
            row = await sent(connection, f"SELECT delayer_send({call})")
            assert (row["body"], row["properties"].get("content_type")) == (body, content_type), call
        row = await sent(connection, "SELECT delayer_send($1, $2, delay => $3)", "k", "x", timedelta(seconds=90))
        assert row["body"] == b"x"
        row = await sent(connection, "SELECT delayer_send($1, $2::bytea, due => $3)", "k", b"\xff", datetime.now(UTC))
        assert row["body"] == b"\xff"


async def test_arguments_become_headers_and_properties(database: str) -> None:
    async with plain(database) as connection:
        row = await sent(
            connection,
            """SELECT delayer_send('k', 'x', due => '2031-01-31 08:00:00.0001+00', exchange => 'in', key => 'order-1',
                headers => '{"h": [1, null]}', message_id => 'm-1', content_type => 't', key_mode => 'debounce',
                key_ceiling => '1 min', content_encoding => 'e', correlation_id => 'c', reply_to => 'r',
                expiration => '3 s', priority => 3, type => 'ty', app_id => 'a')""",
        )
        assert row["returned"] == "m-1"
        assert (row["exchange"], row["headers"]) == (
            "in",
            {
                "h": [1, None],
                "x-deliver-at": 1_927_612_800_001,
                "x-delay-key": "order-1",
                "x-delay-key-mode": "debounce",
                "x-delay-key-ceiling": 60_000,
            },
        )
        assert row["properties"] == {
            "message_id": "m-1", "content_type": "t", "content_encoding": "e", "correlation_id": "c", "reply_to": "r",
            "expiration": "3000", "priority": 3, "type": "ty", "app_id": "a",
        }  # fmt: skip
        row = await sent(connection, "SELECT delayer_cancel('order-1')")
        assert (row["exchange"], row["headers"], row["returned"]) == ("delayer.in", {"x-delay-cancel": "order-1"}, None)
        assert (await sent(connection, "SELECT delayer_cancel('o', exchange => 'in')"))["exchange"] == "in"
        # An earlier instant looks like seconds to the daemon.
        early = await sent(connection, "SELECT delayer_send('k', 'x', due => '1971-01-01Z')")
        assert early["headers"] == {"x-deliver-at": 10**11}


@pytest.mark.parametrize("deep", [f"{'[' * 64}1{']' * 64}", '{"i":' * 64 + "1" + "}" * 64])
async def test_what_it_lets_pass_can_be_encoded(database: str, deep: str) -> None:
    async with plain(database) as connection:
        await connection.execute("SELECT delayer_send('k', 'x', headers => $1)", f'{{"h": {deep}, "n": 1e308}}')
        row = await connection.fetchrow("SELECT * FROM delayer_inbox")
    assert Properties.parse(delivery_of_row(1, row).properties).get(b"h").value


async def test_a_delay_counts_from_the_call_not_from_the_transaction(database: str) -> None:
    async with plain(database) as connection, connection.transaction():
        await connection.fetchval("SELECT pg_sleep(0.3)")
        row = await sent(connection, "SELECT delayer_send('k', 'x', '10 seconds')")
        now = await connection.fetchval("SELECT extract(epoch FROM clock_timestamp()) * 1000")
        assert 9_900 < row["headers"]["x-deliver-at"] - now < 10_001


NULL, WRONG = "22004", "22023"


@pytest.mark.parametrize(
    ("call", "state", "text"),
    [
        ("NULL, 'x'", NULL, "routing_key: expected text, found null"),
        ("'k', NULL", NULL, "body: expected bytea, text or json, found null"),
        ("'k', NULL::jsonb", NULL, "body: expected"),
        ("'k', 'x', exchange => NULL", NULL, "exchange: expected"),
        ("'k', 'x', headers => NULL", NULL, "headers: expected"),
        ("'k', 'x', delay => '1 s', due => now()", WRONG, "expected delay or due, found both"),
        ("'k', 'x', delay => '-1 ms'", WRONG, "delay: expected zero or more, found -00:00:00.001"),
        ("'k', 'x', due => 'infinity'", WRONG, "due: expected an instant before the year 10000, found infinity"),
        ("'k', 'x', delay => '8000 years'", WRONG, "due: expected an instant before the year 10000"),
        ("'k', 'x', delay => '300000 years'", WRONG, "delay: expected at most 10000 years, found 300000 years"),
        ("'k', 'x', delay => '-300000 years'", WRONG, "delay: expected zero or more, found -300000 years"),
        ("'k', 'x', expiration => '10 years'", WRONG, "expiration: expected at most 3650 days, found 10 years"),
        ("'k', 'x', reply_to => 'amq.rabbitmq.reply-to'", WRONG, "reply_to: expected a queue, found the direct reply"),
        ("'k', 'x', headers => '{\"CC\": \"a\"}'", WRONG, "headers: expected arrays of routing keys in CC and BCC"),
        ("'k', 'x', headers => '{\"BCC\": null}'", WRONG, "headers: expected arrays of routing keys in CC and BCC"),
        ("repeat('k', 256), 'x'", WRONG, "routing_key: expected at most 255 bytes, found 256"),
        ("repeat('ü', 128), 'x'", WRONG, "routing_key: expected at most 255 bytes, found 256"),
        ("'k', 'x', exchange => repeat('ü', 128)", WRONG, "exchange: expected at most 255 bytes, found 256"),
        ("'k', repeat('x', 16777217)", WRONG, "body: expected at most 16777216 bytes, found 16777217"),
        ("'k', 'x', key => ''", WRONG, "key: expected 1 to 255 bytes, found 0"),
        ("'k', 'x', key => repeat('k', 256)", WRONG, "key: expected 1 to 255 bytes, found 256"),
        ("'k', 'x', key => 'delayer.schedule/x'", WRONG, "key: expected a key of your own"),
        ("'k', 'x', key => 'a', key_mode => 'merge'", WRONG, "key_mode: expected replace, keep or debounce"),
        ("'k', 'x', key_mode => 'keep'", NULL, "key: expected a key, because key_mode is set"),
        ("'k', 'x', key => 'a', key_mode => 'debounce'", NULL, "key_ceiling: expected an interval"),
        ("'k', 'x', key => 'a', key_ceiling => '1 s'", WRONG, "key_mode: expected debounce"),
        ("'k', 'x', key => 'a', key_mode => 'debounce', key_ceiling => '-1 s'", WRONG, "key_ceiling: expected zero"),
        (
            "'k', 'x', key => 'a', key_mode => 'debounce', key_ceiling => '10001 years'",
            WRONG,
            "key_ceiling: expected at most 10000 years, found 10001 years",
        ),
        ("'k', 'x', expiration => '-1 s'", WRONG, "expiration: expected zero or more"),
        ("'k', 'x', priority => 256", WRONG, "priority: expected 0 to 255, found 256"),
        ("'k', 'x', headers => '[]'", WRONG, "headers: expected an object, found array"),
        ("'k', 'x', headers => jsonb_build_object('h', repeat('x', 65536))", WRONG, "headers: expected at most 65536"),
        ("'k', 'x', headers => jsonb_build_object(repeat('x', 256), 1)", WRONG, "headers: expected names of 1 to 255"),
        ("'k', 'x', headers => '{\"\": 1}'", WRONG, "headers: expected names of 1 to 255"),
        ("'k', 'x', headers => '{\"h\": 1e400}'", WRONG, "headers: expected names of 1 to 255"),
        ("'k', 'x', headers => '{\"h\": [{\"i\": -1e400}]}'", WRONG, "headers: expected names of 1 to 255"),
        ("'k', 'x', headers => '{\"h\": [{\"\": 1}]}'", WRONG, "headers: expected names of 1 to 255"),
        (f"'k', 'x', headers => '{{\"h\": {'[' * 65}{']' * 65}}}'", WRONG, "headers: expected at most 64 levels"),
        ("'k', 'x', '1 s', headers => '{\"x-delay\": 1}'", WRONG, "headers: expected no delay next to delay or due"),
        ("'k', 'x', key => 'a', headers => '{\"x-delay-key\": \"b\"}'", WRONG, "headers: expected no x-delay-key"),
        ("'k', 'x', message_id => repeat('m', 256)", WRONG, "message_id: expected at most 255 bytes, found 256"),
        ("'k', 'x', app_id => repeat('m', 256)", WRONG, "app_id: expected at most 255 bytes, found 256"),
    ],
)
async def test_a_mistake_is_an_error_at_once(database: str, call: str, state: str, text: str) -> None:
    async with plain(database) as connection:
        with pytest.raises(asyncpg.PostgresError) as caught:
            await connection.execute(f"SELECT delayer_send({call})")
        assert caught.value.sqlstate == state
        assert str(caught.value.args[0]).startswith(f"delayer_send: {text}"), caught.value
        assert caught.value.hint
        assert not await connection.fetchval("SELECT count(*) FROM delayer_inbox")


@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize("name", ["delay", "key_ceiling", "expiration"])
async def test_an_infinite_interval_is_an_error(database: str, name: str, sign: str) -> None:
    """Postgres has none before 17."""
    more = ", key => 'a', key_mode => 'debounce'" if name == "key_ceiling" else ""
    async with plain(database) as connection:
        with pytest.raises(asyncpg.PostgresError) as caught:
            await connection.execute(f"SELECT delayer_send('k', 'x', {name} => '{sign}infinity'{more})")
        if connection.get_server_version().major < 17:
            assert caught.value.sqlstate == "22007"
        else:
            assert caught.value.sqlstate == WRONG
            assert str(caught.value.args[0]).startswith(f"delayer_send: {name}: expected")
            assert str(caught.value.args[0]).endswith(f"found {sign}infinity")


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        ("'k', 'x', delay => '-5 s'", "pass '0 seconds' to send at once"),  # without a delay, a default_delay applies
        ("'k', 'x', key => 'a', key_mode => 'throttle'", "keep throttles"),
    ],
)
async def test_a_hint_names_what_to_pass(database: str, call: str, hint: str) -> None:
    async with plain(database) as connection:
        with pytest.raises(asyncpg.InvalidParameterValueError) as caught:
            await connection.execute(f"SELECT delayer_send({call})")
        assert hint in (caught.value.hint or "")
        # An application's developer has psql, and perhaps none of delayer's files.
        sources = [one for (one,) in await connection.fetch("SELECT prosrc FROM pg_proc WHERE proname ~ '^delayer_'")]
        assert not [one for one in sources if "docs/" in one]


@pytest.mark.parametrize("call", ["'k', 'x', delay => 10", "'k', 5", "'k', ARRAY['x']"])
async def test_another_type_finds_no_function(database: str, call: str) -> None:
    async with plain(database) as connection:
        with pytest.raises(asyncpg.UndefinedFunctionError, match=r"function delayer_send\(.* does not exist"):
            await connection.execute(f"SELECT delayer_send({call})")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("NULL", "key, exchange: expected text, found null"),
        ("''", "key: expected 1 to 255 bytes, found 0"),
        ("repeat('k', 256)", "key: expected 1 to 255 bytes, found 256"),
        ("'delayer.schedule/x'", "key: expected a key of your own, found 'delayer.schedule/x'"),
        ("'k', repeat('e', 256)", "exchange: expected at most 255 bytes, found 256"),
    ],
)
async def test_a_wrong_cancel_is_an_error_at_once(database: str, call: str, text: str) -> None:
    async with plain(database) as connection:
        with pytest.raises(asyncpg.PostgresError, match=f"^delayer_cancel: {text}\n") as caught:
            await connection.execute(f"SELECT delayer_cancel({call})")
        assert caught.value.sqlstate in (NULL, WRONG)
        assert caught.value.hint


async def test_what_is_urgent_notifies_once_at_the_commit(database: str) -> None:
    heard: list[str] = []
    async with plain(database) as listener, plain(database) as connection:
        await listener.add_listener("delayer_inbox", lambda *_: heard.append("x"))
        async with connection.transaction():
            await connection.execute("SELECT delayer_send('k', 'x'), delayer_send('k', 'y'), delayer_cancel('k')")
            await listener.execute("SELECT")
            assert not heard
        await connection.execute("SELECT delayer_send('k', 'x', '1 hour')")
        await listener.execute("SELECT pg_sleep(0.2)")
        assert heard == ["x"]


async def test_a_prepared_transaction_can_send_what_is_not_urgent() -> None:
    """Postgres prepares no transaction with a notification."""
    server = Postgres(settings={"max_prepared_transactions": "5"})
    try:
        name = await asyncio.to_thread(lambda: server.start().add_store())
        async with plain(server.url(name)) as connection:
            for call in ("delayer_send('k', 'x')", "delayer_send('k', 'x', '4 s')", "delayer_cancel('k')"):
                await connection.execute(f"BEGIN; SELECT {call}")
                with pytest.raises(asyncpg.PostgresError, match="NOTIFY"):
                    await connection.execute("PREPARE TRANSACTION 'two'")
            await connection.execute("BEGIN; SELECT delayer_send('k', 'x', '1 minute'); PREPARE TRANSACTION 'two'")
            await connection.execute("COMMIT PREPARED 'two'")
            assert await connection.fetchval("SELECT count(*) FROM delayer_inbox") == 1
    finally:
        await asyncio.to_thread(server.close)


async def test_pgbouncer_in_transaction_mode(postgres: Postgres, database: str) -> None:
    """More clients than connections of the server share these, transaction by transaction."""
    name = database.rpartition("/")[2]

    async def client(url: str, number: int) -> None:
        connection = await asyncpg.connect(url, statement_cache_size=0)
        try:
            for turn in range(4):
                transaction = connection.transaction()
                await transaction.start()
                await connection.execute("SELECT delayer_send('k', $1, '1 hour', key => $1)", f"{number} {turn}")
                await connection.execute("SELECT delayer_cancel($1)", f"{number} {turn}")
                await (transaction.commit() if turn % 2 else transaction.rollback())
        finally:
            await connection.close()

    try:
        with pgbouncer(postgres, "transaction") as port:
            url = postgres.url(name, port=port)
            await asyncio.gather(*(client(url, number) for number in range(40)))
    except StartFailed as missing:
        pytest.skip(str(missing))
    async with plain(database) as connection:
        rows = await connection.fetch("SELECT headers ->> 'x-delay-key' AS sent FROM delayer_inbox ORDER BY id")
        assert {row["sent"] for row in rows} == {None, *(f"{n} {turn}" for n in range(40) for turn in (1, 3))}
        assert len(rows) == 2 * 40 * 2


# ---- rights

ROLE = "shop"


[BLOCK] = re.findall(r"```\n(CREATE ROLE shop.*?) \\gexec\n```", PAGE, re.DOTALL)
*GRANTS, EXECUTE = (one.strip() for one in BLOCK.partition(";")[2].split(";"))
"""The page's statements that let a role send, without CREATE ROLE; and the query for the rest, each by \\gexec."""


@pytest.fixture
def role(postgres: Postgres) -> Iterator[str]:
    postgres.execute(BLOCK.partition(";")[0])
    yield ROLE
    postgres.execute(f"DROP ROLE {ROLE}")


@pytest.fixture(params=["public", "Delayed Work"])
def schema(request: pytest.FixtureRequest, postgres: Postgres) -> Iterator[tuple[str, str]]:
    """A store in this schema, with a sender: the database, and the schema."""
    name = postgres.add_database()
    postgres.execute("REVOKE ALL ON SCHEMA public FROM PUBLIC", database=name)
    if request.param != "public":
        postgres.execute(f'CREATE SCHEMA "{request.param}"', database=name)
        postgres.execute(f'ALTER DATABASE "{name}" SET search_path = "{request.param}"')
    asyncio.run(upgrades.upgrade(postgres.url(name)))
    postgres.execute(f'ALTER DATABASE "{name}" RESET search_path')
    yield name, request.param
    postgres.drop_database(name)


async def let_send(connection: asyncpg.Connection, schema: str) -> None:
    database = await connection.fetchval("SELECT current_database()")
    for statement in GRANTS:
        here = statement.replace("DATABASE delayer", f'DATABASE "{database}"')
        await connection.execute(here.replace("SCHEMA public", f'SCHEMA "{schema}"'))
    granted = await connection.fetch(EXECUTE.replace("'public'", f"""'"{schema}"'"""))
    assert len(granted) == 5
    for (statement,) in granted:
        await connection.execute(statement)


async def test_a_role_sends_and_does_nothing_else(role: str, schema: tuple[str, str], postgres: Postgres) -> None:
    name, there = schema
    function = f'"{there}".delayer_send'
    async with plain(postgres.url(name)) as owner, plain(postgres.url(name, user=role)) as shop:
        await owner.execute(f'GRANT USAGE ON SCHEMA "{there}" TO {role}')
        for call in ("'k', 'x'", "'k', 'x'::bytea", "'k', '1'::jsonb"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await shop.execute(f"SELECT {function}({call})")
        await let_send(owner, there)
        await shop.execute(f"""SELECT {function}('k', 'x'), {function}('k', 'x'::bytea), {function}('k', '1'::jsonb)""")
        await shop.execute(f"""SELECT "{there}".delayer_cancel('k')""")
        assert await owner.fetchval(f'SELECT count(*) FROM "{there}".delayer_inbox') == 4
        tables = [one for (one,) in await owner.fetch("SELECT tablename FROM pg_tables WHERE schemaname = $1", there)]
        assert "delayer_inbox" in tables
        for table in tables:
            rights = "SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER"
            assert not await owner.fetchval(
                f'SELECT has_table_privilege($1, \'"{there}"."{table}"\', $2)', role, rights
            )
        write = f"""SELECT "{there}".delayer_write('e', 'k', '{{}}', '{{}}', '', true)"""
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await shop.execute(write)


async def test_a_hostile_search_path_changes_nothing(role: str, schema: tuple[str, str], postgres: Postgres) -> None:
    """The caller puts tables, functions and operators of the same names in front, in a schema and among the temporary
    tables. None of them is used, with the rights of the owner or otherwise."""
    name, there = schema
    async with plain(postgres.url(name)) as owner, plain(postgres.url(name, user=role)) as shop:
        await let_send(owner, there)
        await owner.execute(f"CREATE SCHEMA trap AUTHORIZATION {role}")
        await shop.execute("SET search_path = trap, pg_catalog")
        await shop.execute("""
            CREATE TABLE trap.caught (by text);
            CREATE TABLE trap.delayer_inbox
                (exchange text, routing_key text, headers jsonb, properties jsonb, body bytea);
            CREATE TEMP TABLE delayer_inbox (LIKE trap.delayer_inbox);
            CREATE FUNCTION trap.spring(by text) RETURNS boolean LANGUAGE plpgsql AS $$
                BEGIN INSERT INTO trap.caught VALUES (by); RETURN true; END $$;
            CREATE FUNCTION trap.gen_random_uuid() RETURNS uuid LANGUAGE sql AS
                $$ SELECT CASE WHEN trap.spring('uuid') THEN pg_catalog.gen_random_uuid() END $$;
            CREATE FUNCTION trap.octet_length(text) RETURNS integer LANGUAGE sql AS
                $$ SELECT CASE WHEN trap.spring('octet_length') THEN 1 END $$;
            CREATE FUNCTION trap.pg_notify(text, text) RETURNS void LANGUAGE sql AS $$ SELECT trap.spring('notify') $$;
            CREATE FUNCTION trap.delayer_write(text, text, jsonb, jsonb, bytea, boolean) RETURNS void LANGUAGE sql AS
                $$ SELECT trap.spring('write') $$;
            CREATE FUNCTION trap.joined(jsonb, jsonb) RETURNS jsonb LANGUAGE sql AS
                $$ SELECT CASE WHEN trap.spring('||') THEN $1 END $$;
            CREATE OPERATOR trap.|| (LEFTARG = jsonb, RIGHTARG = jsonb, FUNCTION = trap.joined);
        """)
        for body in ("'x'", "'x'::bytea", "'1'::jsonb"):
            await shop.execute(f"""SELECT "{there}".delayer_send('k', {body}, '1 s', key => 'a')""")
        await shop.execute(f"""SELECT "{there}".delayer_cancel('k')""")
        assert not await shop.fetchval("SELECT count(*) FROM trap.caught")
        assert not await shop.fetchval("SELECT count(*) FROM pg_temp.delayer_inbox")
        assert await owner.fetchval(f'SELECT count(*) FROM "{there}".delayer_inbox') == 4
        await shop.execute("DROP TABLE pg_temp.delayer_inbox")
        await owner.execute("DROP SCHEMA trap CASCADE")


async def test_who_may_create_in_the_schema_itself_gains_no_rights(
    role: str, schema: tuple[str, str], postgres: Postgres
) -> None:
    """There, an operator or a function with closer types than the system's own would win, if the functions looked."""
    name, there = schema
    async with plain(postgres.url(name)) as owner, plain(postgres.url(name, user=role)) as shop:
        await let_send(owner, there)
        await owner.execute(f'GRANT CREATE ON SCHEMA "{there}" TO {role}')
        await shop.execute(f"""
            SET search_path = "{there}";
            CREATE FUNCTION caught(what text) RETURNS boolean LANGUAGE plpgsql AS $$
                BEGIN RAISE EXCEPTION 'caught: % runs as %', what, current_user; END $$;
            CREATE FUNCTION times(numeric, integer) RETURNS numeric LANGUAGE sql AS
                $$ SELECT CASE WHEN "{there}".caught('*') THEN 1 END $$;
            CREATE OPERATOR * (LEFTARG = numeric, RIGHTARG = integer, FUNCTION = times);
            CREATE FUNCTION format(text, interval) RETURNS text LANGUAGE sql AS
                $$ SELECT CASE WHEN "{there}".caught('format') THEN '' END $$;
            CREATE FUNCTION delayer_write(text, text, jsonb, text, text, boolean) RETURNS void LANGUAGE sql AS
                $$ SELECT "{there}".caught('write') $$;
            CREATE FUNCTION delayer_send(text, text, interval, text) RETURNS text LANGUAGE sql AS
                $$ SELECT CASE WHEN "{there}".caught('send') THEN '' END $$;
        """)
        with pytest.raises(asyncpg.RaiseError, match=r"caught: \* runs as"):
            await shop.execute("SELECT 1.0 * 1")
        for body in ("'x'", "'x'::bytea", "'1'::jsonb"):
            await shop.execute(
                f"""SELECT "{there}".delayer_send('k', {body}, '1 s', key => 'a', key_mode => 'debounce',
                                                  key_ceiling => '1 s', expiration => '1 s')"""
            )
        with pytest.raises(asyncpg.PostgresError, match="delay: expected zero or more"):
            await shop.execute(f"""SELECT "{there}".delayer_send('k', 'x', '-1 s')""")
        await shop.execute(f"""SELECT "{there}".delayer_cancel('k')""")
        assert await owner.fetchval(f'SELECT count(*) FROM "{there}".delayer_inbox') == 4
        await shop.execute(f"DROP OWNED BY {role}")
        await owner.execute(f'REVOKE CREATE ON SCHEMA "{there}" FROM {role}')
