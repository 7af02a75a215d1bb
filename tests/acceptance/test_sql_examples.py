"""docs/sql.md and the README: their examples run against a daemon's store, and work as described."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from tests.support.place import Place, eventually
from tests.support.postgres import Postgres
from tests.support.store import sql

ROOT = Path(__file__).parents[2]
PAGE, README = (ROOT / "docs" / "sql.md").read_text(), (ROOT / "README.md").read_text()
RECIPE, FROM_SHOP = re.findall(r"```psql\n(.*?)```", PAGE, flags=re.S)
[OWN_SCHEMA] = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.S)
[FIRST] = re.findall(r"```sql\n(.*?)```", PAGE, flags=re.S)
PSYCOPG, *SQLALCHEMY = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
[OF_README] = [one for one in re.findall(r"```sql\n(.*?)```", README, flags=re.S) if "delayer_send" in one]
HALF_AN_HOUR = 1_800_000
_WAITING = """
SELECT convert_from(key, 'UTF8') AS key, convert_from(body, 'UTF8') AS body, convert_from(to_key, 'UTF8') AS to_key,
       (extract(epoch FROM due_at - parked_at) * 1000)::float8 AS delay_ms
FROM message ORDER BY key
"""


async def psql(postgres: Postgres, url: str, script: str) -> None:
    child = await asyncio.create_subprocess_exec(
        str(postgres.programs / "psql"), "--no-psqlrc", "--set=ON_ERROR_STOP=1", url, stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    await child.communicate(script.encode())
    assert child.returncode == 0


async def python(url: str, example: str) -> None:
    """Run an example as a program of its own."""
    with_driver = [url.replace("postgresql:", f"postgresql+{driver}:") for driver in ("psycopg", "asyncpg")]
    values = dict(zip(("DATABASE_URL", "SQLALCHEMY_URL", "ASYNC_URL"), (url, *with_driver), strict=True))
    program = "".join(f"{name} = {value!r}\n" for name, value in values.items()) + example
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await child.wait() == 0


async def waiting(url: str) -> list[dict[str, Any]]:
    async with sql(url) as admin:
        return [dict(row) for row in await admin.fetch(_WAITING)]


async def keys(url: str) -> list[str]:
    return [row["key"] for row in await waiting(url)]


async def test_the_examples_send_if_and_only_if_they_commit(vhost: str, database: str, postgres: Postgres) -> None:
    place = await Place("store", vhost, database).declare()
    async with place.working():
        await psql(postgres, database, FIRST)
        await eventually(lambda: keys(database), lambda found: found == ["reminder-4711"])
        [first] = await waiting(database)
        assert (first["body"], first["to_key"]) == ("pay order 4711", "orders.reminder")
        assert HALF_AN_HOUR - 5_000 < first["delay_ms"] <= HALF_AN_HOUR

        await psql(postgres, database, RECIPE)
        await eventually(lambda: keys(database), lambda found: not found)
        async with sql(database) as admin:
            assert [tuple(row) for row in await admin.fetch("SELECT * FROM orders")] == [(4711, "paid")]

        await python(database, PSYCOPG)
        await python(database, "\n".join(SQLALCHEMY))
        await eventually(lambda: keys(database), lambda found: found == [f"reminder-{n}" for n in (1, 2, 3)])
        for number, row in enumerate(await waiting(database), 1):
            assert json.loads(row["body"]) == {"order": number}
            assert HALF_AN_HOUR - 5_000 < row["delay_ms"] <= HALF_AN_HOUR
        async with sql(database) as admin:
            assert [one for (one,) in await admin.fetch("SELECT id FROM orders ORDER BY id")] == [1, 2, 3, 4711]
        counters = await place.conserved()
        assert (counters["parked"], counters["cancelled"]) == (5, 2), "the rolled-back reminder never existed"


async def test_the_readme_s_example_comes_after_ten_seconds(vhost: str, database: str, postgres: Postgres) -> None:
    place = await Place("store", vhost, database).declare()
    async with place.ledger(), place.working():
        await psql(postgres, database, OF_README.replace("10 seconds", "1 second"))
        # The laws of conservation hold only in one snapshot, and the daemon works.
        ended = "SELECT coalesce(sum(n), 0) FROM counter WHERE kind IN ('released', 'held')"
        await eventually(lambda: place.ask(ended), lambda count: count == 1)


async def test_a_schema_of_its_own_lies_next_to_tables_of_the_same_names(
    vhost: str, empty_database: str, postgres: Postgres
) -> None:
    """The application has a table for each of delayer's. Its message comes, and its tables stay empty."""
    names = ("message", "schedule", "history", "request", "store", "lane", "held", "counter", "message_id")
    await psql(postgres, empty_database, "".join(f"CREATE TABLE {name} (n integer);" for name in names))
    path = ":".join((str(Path(sys.executable).parent), str(postgres.programs), os.environ["PATH"]))
    script = OWN_SCHEMA.replace("postgresql:///shop", empty_database)
    child = await asyncio.create_subprocess_exec("bash", "-ec", script, env=os.environ | {"PATH": path})
    assert await child.wait() == 0

    [query] = re.findall(r"postgresql:///shop(\?[^']*)", OWN_SCHEMA)
    place = await Place("store", vhost, empty_database + query).declare()
    async with place.ledger(consume=False), place.working():
        await psql(postgres, empty_database, FROM_SHOP)
        await place.ready(1, "ledger")
        assert await place.bodies("ledger") == [b"pay order 4711"]
    await place.conserved()
    async with sql(empty_database) as shop:
        assert not any([await shop.fetchval(f"SELECT count(*) FROM public.{name}") for name in names])
