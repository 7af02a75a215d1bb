"""Pages that Postgres cannot read: each is found by its table and its place, and everything else is judged."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from pyspark.sql import SparkSession

from delayer.audit import job
from delayer.audit.findings import Finding, Report
from delayer.core.errors import StoreLost
from delayer.core.secret import SecretUrl
from delayer.store.rows.partitions import DAY_MS
from tests.audit.rows import brief
from tests.audit.test_job import audit
from tests.audit.test_reading import execute, fetch
from tests.conformance.store_contract import owned, parcel
from tests.integration.test_store_lane import opened, sql
from tests.support.fakes import WHY
from tests.support.postgres import Postgres
from tests.support.rows import compact

PAGE = 8192
ROWS, HELD = 900, 3
ON_PAGE = 3
LARGE = 5_000
"""Of a body that lies out of line; every tenth."""


class Stores(NamedTuple):
    """Copies of one store, by what is damaged in them."""

    urls: dict[str, str]
    first: str
    """The partition of the first day, and of the second."""
    second: str
    on_page: list[int]
    """Ids of the rows on the first one's page ON_PAGE."""


@pytest.fixture(scope="module")
def stores() -> Iterator[Stores]:
    """The server is stopped once, and all of them get their damage. An audit takes its time, and places do not disturb
    each other: so one store has most of them."""
    with Postgres() as server:
        template = server.add_database()
        asyncio.run(fill(server.url(template)))
        tables = fetch(server.url(template), "SELECT DISTINCT tableoid::regclass::text FROM message ORDER BY 1")
        [(first,), (second,)] = tables
        on_page = f"SELECT id FROM {first} WHERE ctid >= '({ON_PAGE},0)' AND ctid < '({ON_PAGE + 1},0)'"
        ids = [id_ for (id_,) in fetch(server.url(template), on_page)]
        damages = {
            "places": [
                (f"'{first}'", ON_PAGE, b"\xff" * PAGE),
                (toast_of(second), 4, bytes(PAGE)),
                (toast_of("segment"), 2, bytes(PAGE)),
                (toast_of("held"), 0, bytes(PAGE)),
            ],
            "segments": [("'segment'", 0, b"\xff" * PAGE)],
            "counters": [("'counter'", 0, b"\xff" * PAGE)],
            "indexes": [(key_of(table), 0, b"\xff" * PAGE) for table in (first, "segment")],
            "index of counters": [(key_of("counter"), 0, b"\xff" * PAGE)],
        }
        urls = {name: server.url(server.add_database(template=template)) for name in damages}
        files = [
            (path_of(urls[name], relation), page, content)
            for name, places in damages.items()
            for relation, page, content in places
        ]
        server.stop()
        for path, page, content in files:
            with (Path(server.data) / path).open("r+b") as file:
                file.seek(page * PAGE)
                file.write(content)
        server.start()
        yield Stores(urls, first, second, ids)


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
    """The file of ``relation`` (what gives its name, as SQL), with everything in it."""
    [(path,)] = fetch(url, f"SELECT pg_relation_filepath({relation})")
    execute(url, "CHECKPOINT")
    return str(path)


def toast_of(table: str) -> str:
    return f"(SELECT reltoastrelid FROM pg_class WHERE oid = '{table}'::regclass)"


def key_of(table: str) -> str:
    return f"(SELECT indexrelid FROM pg_index WHERE indrelid = '{table}'::regclass AND indisprimary)"


def unreadable(report: Report) -> dict[str, Finding]:
    """By the table."""
    found = {one.subject: one for one in report.findings if one.rule == "integrity"}
    assert len(found) == sum(one.rule == "integrity" for one in report.findings)
    return {subject.removeprefix("table ").partition(":")[0]: one for subject, one in found.items()}


def test_places_of_every_kind(spark: SparkSession, stores: Stores) -> None:
    """Each damaged table is told, with the pages that were not read; all other tables are judged."""
    report = audit(spark, stores.urls["places"]).report
    by_table = unreadable(report)
    assert set(by_table) == {stores.first, stores.second, "segment", "held"}
    assert {brief(one)[:2] for one in by_table.values()} == {("integrity", "violation")}
    page = by_table[stores.first]
    assert (page.subject, page.count) == (f"table {stores.first}: the database cannot read it", 1)
    assert page.details["places"] == ["page 0 and all behind it"]
    assert f"block {ON_PAGE}" in page.details["reasons"][0]
    assert {one.rule for one in report.findings} <= {"integrity", "segments"}, "rows not read are not missing"
    skipped = {run.rule: run.skipped for run in report.rules if run.skipped}
    assert set(skipped) == {"conservation", "repeats", "keys", "destinations"}
    assert "could not be read as a whole" in skipped["conservation"]


@pytest.mark.long
def test_a_page_of_segments(spark: SparkSession, stores: Stores) -> None:
    url = stores.urls["segments"]
    report = audit(spark, url).report
    assert [brief(found) for found in report.findings] == [
        ("integrity", "violation", "table segment: the database cannot read it", 1),
    ]
    assert report.totals.waiting == 2 * ROWS


def test_a_damaged_index_is_told_and_can_be_made_anew(spark: SparkSession, stores: Stores) -> None:
    url = stores.urls["indexes"]
    report = audit(spark, url).report
    assert set(unreadable(report)) == {stores.first, "segment"}
    assert report.totals.waiting == ROWS
    assert {one.rule for one in report.findings} == {"integrity"}, "rows that nobody could read are not missing"
    execute(url, f"REINDEX INDEX {stores.first}_pkey; REINDEX INDEX segment_pkey")
    assert fetch(url, "SELECT count(*) FROM message") == [(2 * ROWS,)]
    assert fetch(url, "SELECT count(*) FROM segment WHERE id > 0") == [(3,)]


@pytest.mark.parametrize(
    ("name", "told", "advice"),
    [
        ("counters", "read the counters: .*invalid page", "Damage"),
        ("index of counters", "read the counters: .*invalid page", "REINDEX"),
    ],
)
def test_damage_read_by_the_driver_is_a_named_error(
    spark: SparkSession, stores: Stores, name: str, told: str, advice: str
) -> None:
    """Without lanes and counters there is nothing to judge by."""
    with pytest.raises(StoreLost, match=told) as raised:
        job.run(spark, job.Options(store=SecretUrl(stores.urls[name])), lambda *_: None)
    assert advice in raised.value.advice
