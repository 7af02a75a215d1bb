"""Pages that Postgres cannot read abort an audit, and the message names the next step."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from delayer.audit import job
from delayer.core.errors import StoreLost
from delayer.core.secret import SecretUrl
from delayer.core.units import DAY_MS
from tests.audit.test_reading import execute, fetch
from tests.support.fakes import WHY
from tests.support.postgres import Postgres
from tests.support.rows import compact
from tests.support.store import opened, owned, parcel, sql

PAGE = 8192
ROWS, HELD = 900, 3
LARGE = 5_000
"""Bytes of every tenth body, which Postgres stores out of line."""


@pytest.fixture(scope="module")
def stores() -> Iterator[dict[str, str]]:
    """The URLs of copies of one store, by the damaged part. The server stops once, and then all copies are damaged."""
    with Postgres() as server:
        template = server.add_database()
        asyncio.run(fill(server.url(template)))
        [(first,), *_] = fetch(server.url(template), "SELECT DISTINCT tableoid::regclass::text FROM message ORDER BY 1")
        damages = {
            "rows": (f"'{first}'", 3, b"\xff" * PAGE),
            "bytes of segments": (toast_of("segment"), 2, bytes(PAGE)),
            "counters": ("'counter'", 0, b"\xff" * PAGE),
            "index of counters": (key_of("counter"), 0, b"\xff" * PAGE),
        }
        urls = {name: server.url(server.add_database(template=template)) for name in damages}
        files = [(path_of(urls[name], relation), page, content) for name, (relation, page, content) in damages.items()]
        server.stop()
        for path, page, content in files:
            with (Path(server.data) / path).open("r+b") as file:
                file.seek(page * PAGE)
                file.write(content)
        server.start()
        yield urls


async def fill(url: str) -> None:
    """Rows of three days, those of the last one in three segments; bodies that do not compress."""
    chance = random.Random(1)
    async with opened(url) as store:
        day = (store.now_upper_ms() // DAY_MS + 3) * DAY_MS
        async with owned(store) as [lane]:
            for start in (day, day + DAY_MS, day + 2 * DAY_MS):
                await store.park(
                    lane,
                    [parcel(start + n * 1000, chance.randbytes(100 if n % 10 else LARGE)) for n in range(ROWS)],
                    [],
                )
            await store.hold(lane, [(parcel(day + n, chance.randbytes(LARGE)), WHY) for n in range(HELD)])
        async with sql(url) as admin:
            await admin.execute("UPDATE held SET retry_at = now() + interval '1 day'")
            await compact(admin, after_ms=day + 2 * DAY_MS - 1, rows=300)


def path_of(url: str, relation: str) -> str:
    """The file of ``relation``, an SQL expression for its name, after a checkpoint."""
    [(path,)] = fetch(url, f"SELECT pg_relation_filepath({relation})")
    execute(url, "CHECKPOINT")
    return str(path)


def toast_of(table: str) -> str:
    return f"(SELECT reltoastrelid FROM pg_class WHERE oid = '{table}'::regclass)"


def key_of(table: str) -> str:
    return f"(SELECT indexrelid FROM pg_index WHERE indrelid = '{table}'::regclass AND indisprimary)"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("rows", "invalid page"),
        ("bytes of segments", "(missing|unexpected) chunk|invalid page"),
        ("counters", "invalid page"),
        ("index of counters", "invalid page"),
    ],
)
def test_an_unreadable_page_ends_the_audit_with_the_next_step(
    spark: SparkSession, stores: dict[str, str], name: str, told: str
) -> None:
    with pytest.raises(StoreLost, match=told) as raised:
        job.run(spark, job.Options(store=SecretUrl(stores[name])), lambda *_: None)
    assert "Damage" in raised.value.advice
    assert "REINDEX" in raised.value.advice
