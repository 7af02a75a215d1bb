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
from delayer.audit.watching import Watching
from delayer.core.errors import StoreLost
from delayer.settings.secret import SecretUrl
from delayer.store.partitions import DAY_MS
from tests.audit.rows import brief
from tests.audit.test_job import audit
from tests.audit.test_reading import execute, fetch, load
from tests.conformance.store_contract import owned, parcel
from tests.integration.test_store_lane import opened, sql
from tests.rig.postgres import Postgres
from tests.rig.rows import compact

PAGE = 8192
ROWS, HELD = 900, 3
ON_PAGE = 3
LARGE = 5_000
"""Of a body that lies out of line; every tenth."""


class Stores(NamedTuple):
    """Copies of one store, by what is damaged in them."""

    urls: dict[str, str]
    partition: str
    """The one with rows."""
    on_page: list[int]
    """Ids of the rows on its page ON_PAGE."""


@pytest.fixture(scope="module")
def stores() -> Iterator[Stores]:
    """The server is stopped once, and all of them get their damage."""
    with Postgres() as server:
        template = server.add_database()
        asyncio.run(fill(server.url(template)))
        [(rows,)] = fetch(server.url(template), "SELECT DISTINCT tableoid::regclass::text FROM message")
        on_page = f"SELECT id FROM {rows} WHERE ctid >= '({ON_PAGE},0)' AND ctid < '({ON_PAGE + 1},0)'"
        ids = [id_ for (id_,) in fetch(server.url(template), on_page)]
        damages = {
            "rows": (f"'{rows}'", ON_PAGE, b"\xff" * PAGE),
            "values": (toast_of(rows), 4, bytes(PAGE)),
            "segment": (toast_of("segment"), 2, bytes(PAGE)),
            "segments": ("'segment'", 0, b"\xff" * PAGE),
            "held": (toast_of("held"), 0, bytes(PAGE)),
            "counters": ("'counter'", 0, b"\xff" * PAGE),
        }
        urls = {name: server.url(server.add_database(template=template)) for name in damages}
        files = {name: path_of(urls[name], relation) for name, (relation, _, _) in damages.items()}
        server.stop()
        for name, (_, page, content) in damages.items():
            with (Path(server.data) / files[name]).open("r+b") as file:
                file.seek(page * PAGE)
                file.write(content)
        server.start()
        yield Stores(urls, rows, ids)


async def fill(url: str) -> None:
    """Rows of two days, the first one as rows, the second one in three segments; bodies that do not compress."""
    chance = random.Random(1)
    async with opened(url) as store:
        day = (store.now_ms() // DAY_MS + 3) * DAY_MS
        async with owned(store) as [lane]:
            for start in (day, day + DAY_MS):
                await store.park(
                    lane,
                    [parcel(start + n * 1000, chance.randbytes(100 if n % 10 else LARGE)) for n in range(ROWS)],
                    [],
                )
            await store.hold(lane, [(parcel(day + n, chance.randbytes(LARGE)), "no queue") for n in range(HELD)])
        async with sql(url) as admin:
            await admin.execute("UPDATE held SET retry_at = now() + interval '1 day'")
            await compact(admin, after_ms=day + DAY_MS - 1, rows=300)


def path_of(url: str, relation: str) -> str:
    """The file of ``relation`` (what gives its name, as SQL), with everything in it."""
    [(path,)] = fetch(url, f"SELECT pg_relation_filepath({relation})")
    execute(url, "CHECKPOINT")
    return str(path)


def toast_of(table: str) -> str:
    return f"(SELECT reltoastrelid FROM pg_class WHERE oid = '{table}'::regclass)"


def integrity(report: Report) -> list[Finding]:
    return [found for found in report.findings if found.rule == "integrity"]


def test_a_page_of_rows(spark: SparkSession, stores: Stores) -> None:
    url = stores.urls["rows"]
    table = stores.partition
    report = audit(spark, url).report
    [found] = integrity(report)
    assert brief(found) == ("integrity", "violation", f"table {table}: the database cannot read it", 1)
    assert found.details["places"] == [f"page {ON_PAGE}"]
    assert f"block {ON_PAGE}" in found.details["reasons"][0]
    # Everything else is read and judged: what is missing now is what lay on that page.
    assert {other.rule for other in report.findings} == {"integrity", "conservation"}
    [lost] = [other for other in report.findings if other.rule == "conservation"]
    assert (lost.subject, lost.count) == ("lane 1: waiting", len(stores.on_page))
    assert report.totals.waiting == ROWS - len(stores.on_page)
    assert report.totals.packed == ROWS
    with pytest.raises(StoreLost, match=f"page {ON_PAGE}"):
        job_reads(spark, url)


def job_reads(spark: SparkSession, url: str) -> None:
    """Without the column ``damage`` nobody would hear of it."""
    with Watching(spark, lambda *_: None)("reading"):
        load(spark, url, "message", columns="id").collect()


@pytest.mark.long
def test_a_value_that_lies_out_of_line(spark: SparkSession, stores: Stores) -> None:
    """The row is there, so it counts; what is gone is a body."""
    url = stores.urls["values"]
    table = stores.partition
    report = audit(spark, url).report
    [found] = report.findings
    assert brief(found)[:3] == ("integrity", "violation", f"table {table}: the database cannot read it")
    assert 1 <= found.count <= 5, "a page has some pieces of 2 KB"
    assert len(found.details["examples"]) == found.count == len(found.details["places"])
    places = ", ".join(f"'{place}'" for place in found.details["places"])
    there = fetch(url, f"SELECT id FROM {table} WHERE ctid IN ({places}) ORDER BY id")
    assert [id_ for (id_,) in there] == found.details["examples"]
    assert report.totals.waiting == report.totals.expected == ROWS
    assert sum(share.messages for share in report.calendar.destinations) == 2 * ROWS - found.count


def test_a_segment(spark: SparkSession, stores: Stores) -> None:
    url = stores.urls["segment"]
    report = audit(spark, url).report
    by_rule = {found.rule: found for found in report.findings}
    assert set(by_rule) == {"integrity", "segments"}
    assert brief(by_rule["segments"]) == ("segments", "violation", "lane 1: does not read back", 300)
    assert brief(by_rule["integrity"]) == ("integrity", "violation", "table segment: the database cannot read it", 1)
    assert report.totals.packed == ROWS
    [segment] = by_rule["segments"].details["segments"]
    [place] = by_rule["integrity"].details["places"]
    assert fetch(url, f"SELECT id FROM segment WHERE ctid = '{place}'") == [(segment,)]
    assert sum(share.messages for share in report.calendar.destinations) == 2 * ROWS - 300


@pytest.mark.long
def test_a_page_of_segments(spark: SparkSession, stores: Stores) -> None:
    url = stores.urls["segments"]
    report = audit(spark, url).report
    assert [brief(found) for found in report.findings] == [
        ("segments", "violation", "all segments: compacted - restored", ROWS),
        ("integrity", "violation", "table segment: the database cannot read it", 1),
    ]
    assert report.totals.waiting == ROWS


@pytest.mark.long
def test_a_held_message(spark: SparkSession, stores: Stores) -> None:
    url = stores.urls["held"]
    report = audit(spark, url).report
    [found] = report.findings
    assert brief(found)[:3] == ("integrity", "violation", "table held: the database cannot read it")
    assert report.totals.held == HELD


def test_a_table_that_the_driver_reads_is_an_error_that_says_so(spark: SparkSession, stores: Stores) -> None:
    """Without lanes and counters there is nothing to judge by."""
    url = stores.urls["counters"]
    with pytest.raises(StoreLost, match="invalid page"):
        job.run(spark, job.Options(store=SecretUrl(url)), lambda *_: None)
