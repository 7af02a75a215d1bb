"""`delayer backlog export` writes what waits as data: pyarrow, DuckDB and delta-rs read back what the store has."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import duckdb
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from delayer.amqp.properties import entry, long_string
from delayer.audit import dataset
from delayer.cli.errors import ExitCode
from delayer.core.units import DAY_MS
from delayer.format.rows import checksum as checksum_of
from tests.support.daemon import EXECUTABLE
from tests.support.rows import Row, compact, everything, put, rows
from tests.support.store import sql

Run = Callable[..., "subprocess.CompletedProcess[str]"]
ROUTES = (b"mail.in", b"", b"odd/route[1]{a}* =%&\xc3\xa4", b"no\xff-utf-8")


@pytest.fixture
def delayer(database: str) -> Run:
    """One process per command, because the export handles signals."""

    def run(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        words = (str(EXECUTABLE), "--config", os.devnull, "--store-url", database, *arguments)
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == expect, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


def _short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def _properties(number: int) -> bytes:
    """All properties but the user's, and three headers."""
    table = entry(b"x-delay", b"I" + (3_600).to_bytes(4, "big")) + entry(b"n\xc3\xa4me", long_string(b"caf\xc3\xa9"))
    table += entry(b"traceparent", long_string(b"00-aa-bb-01"))
    headers = len(table).to_bytes(4, "big") + table
    return b"".join((
        (0b1111_1111_1110_1100).to_bytes(2, "big"), _short(b"text/plain"), _short(b"gzip"), headers, b"\x02", b"\x05",
        _short(b"corr-%d" % number), _short(b"answers"), _short(b"60000"), _short(b"msg-%d" % number),
        (1_700_000_000).to_bytes(8, "big"), _short(b"order"), _short(b"shop"), _short(b"cluster"),
    ))  # fmt: skip


def of_routes(plain: Sequence[Row]) -> list[Row]:
    """The same messages, from several routes, with properties."""
    found = []
    for one in plain:
        properties, route = _properties(one.id), ROUTES[one.id % len(ROUTES)]
        checksum = checksum_of(one.exchange, one.routing_key, properties, one.body)
        found.append(one._replace(route=route, properties=properties, checksum=checksum))
    return found


async def fill(admin: asyncpg.Connection, count: int = 2_000) -> dict[int, Row]:
    """Rows of two days, and segments of a third and fourth one."""
    now = await admin.fetchval("SELECT now()")
    first = now // DAY_MS * DAY_MS + 100 * DAY_MS
    await put(admin, of_routes(rows(count, first, span_ms=4 * DAY_MS)))
    await compact(admin, after_ms=first + 2 * DAY_MS)
    assert await admin.fetchval("SELECT count(*) FROM segment")
    return await everything(admin)


def expected(row: Row, *, bodies: bool) -> dict[str, Any]:
    def at(us: int) -> datetime:
        return datetime.fromtimestamp(us // 1000 / 1000, UTC)

    text = row.route.decode("utf-8", "backslashreplace")
    found = {
        "id": row.id, "due_at": at(row.due_us), "parked_at": at(row.parked_us), "exchange": "delayer.in",
        "routing_key": "orders.eu", "to_exchange": "delayer.out", "to_key": "orders.eu",
        "key": None if row.key is None else row.key.decode(),
        "body_bytes": len(row.body), "message_id": f"msg-{row.id}", "correlation_id": f"corr-{row.id}",
        "content_type": "text/plain", "content_encoding": "gzip", "delivery_mode": 2, "priority": 5,
        "reply_to": "answers", "expiration": "60000", "timestamp": datetime.fromtimestamp(1_700_000_000, UTC),
        "type": "order", "user_id": None, "app_id": "shop", "cluster_id": "cluster",
        "headers": {"x-delay": 3600, "näme": "café", "traceparent": "00-aa-bb-01"}, "x_delay": 3600,
        "traceparent": "00-aa-bb-01", "fault": None, "due_day": str(at(row.due_us).date()), "route": text or None,
    }  # fmt: skip
    return found | ({"body": row.body} if bodies else {})


def by_id(found: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    for one in found:
        one["headers"] = json.loads(one["headers"])
        one["due_day"] = str(one["due_day"])
    by_id = {one["id"]: one for one in found}
    assert len(by_id) == len(found), "each once"
    return by_id


def assert_same(found: dict[int, dict[str, Any]], wanted: dict[int, dict[str, Any]]) -> None:
    assert found.keys() == wanted.keys()
    for id_, row in wanted.items():
        assert found[id_] == row


def read(path: Path) -> dict[int, dict[str, Any]]:
    """The dataset, by pyarrow."""
    return by_id(ds.dataset(path, partitioning="hive").to_table().to_pylist())


@pytest.mark.deadline(180)
@pytest.mark.parametrize("bodies", [False, True])
async def test_readers_find_what_the_store_has(database: str, delayer: Run, tmp_path: Path, bodies: bool) -> None:
    async with sql(database) as admin:
        there = await fill(admin)
    where = tmp_path / "backlog"
    [line] = delayer("backlog", "export", str(where), "--json", *(["--bodies"] * bodies)).stdout.splitlines()
    told = json.loads(line)
    assert (told["messages"], told["came"], told["left"]) == (len(there), len(there), 0)
    wanted = {id_: expected(row, bodies=bodies) for id_, row in there.items()}
    assert_same(read(where), wanted)
    assert (where.stat().st_mode & 0o777, {one.stat().st_mode & 0o777 for one in where.glob("*/*/*")}) == (
        0o700,
        {0o600},
    )

    instants = ("due_at", "parked_at", "timestamp")  # DuckDB needs an extension to show time zones.
    columns = ", ".join(f"epoch_us({name}) AS {name}" for name in instants)
    query = f"SELECT * REPLACE ({columns}) FROM read_parquet(?, hive_partitioning = true, hive_types_autocast = false)"
    with duckdb.connect() as duck:
        found = duck.sql(query, params=[f"{where}/*/*/*.parquet"]).to_arrow_table().to_pylist()
    for one in found:
        one |= {name: datetime.fromtimestamp(one[name] / 1e6, UTC) for name in instants}
    assert_same(by_id(found), wanted)


def found_in(path: Path, names: str = ".*") -> list[str]:
    """The names of the files that match; by default the names an export works with."""
    return [one.name for one in path.glob(names)]


def files(path: Path) -> dict[Path, int]:
    """The data files and their inodes."""
    return {file.relative_to(path): file.stat().st_ino for file in path.glob("*/*/*.parquet")}


@pytest.mark.deadline(180)
async def test_a_second_export_writes_what_changed(database: str, delayer: Run, tmp_path: Path) -> None:
    where = tmp_path / "backlog"
    async with sql(database) as admin:
        there = await fill(admin)
        delayer("backlog", "export", str(where))
        before = files(where)
        assert len(before) == 16

        await compact(admin)  # Moves messages, and changes none.
        told = json.loads(delayer("backlog", "export", str(where), "--json").stdout)
        assert (told["written"], told["kept"], told["came"], told["left"]) == (0, 16, 0, 0)
        assert files(where) == before

        # One is delivered, one comes, and one is rescheduled to a new day.
        segment_free = [row for row in there.values() if row.route == b"mail.in"]
        moved, late = segment_free[0].id, 50 * DAY_MS
        delayer("reschedule", f"id:{moved}", "--by", "50d", "--yes")
        delayer("cancel", f"id:{segment_free[1].id}", "--yes")
        new = rows(1, min(row.due_us for row in there.values()) // 1000, first_id=99_999)
        await put(admin, of_routes(new))
        now = await everything(admin)
        told = json.loads(delayer("backlog", "export", str(where), "--json").stdout)
    assert (told["messages"], told["came"], told["left"]) == (len(there), 1, 1)
    assert told["removed"] == 0
    assert_same(read(where), {id_: expected(row, bodies=False) for id_, row in now.items()})
    assert now[moved].due_us == there[moved].due_us + late * 1000
    after = files(where)
    assert set(after.items()) & set(before.items()), "unchanged files stay"
    assert 2 <= len(set(after.items()) - set(before.items())) == told["written"] <= 4
    with (where / dataset.LEFT).open(newline="") as file:
        [gone] = csv.DictReader(file)
    due_at = datetime.fromtimestamp(segment_free[1].due_us // 1000 / 1000, UTC)
    assert gone == {
        "id": str(segment_free[1].id),
        "due_at": due_at.isoformat(timespec="milliseconds"),
        "route": "mail.in",
    }
    assert not found_in(tmp_path), "nothing else stays"


async def test_an_empty_store_empties_the_dataset(database: str, delayer: Run, tmp_path: Path) -> None:
    where = tmp_path / "backlog"
    async with sql(database) as admin:
        there = await fill(admin, 500)
        delayer("backlog", "export", str(where))
        await admin.execute("DELETE FROM message; DELETE FROM segment")
    told = json.loads(delayer("backlog", "export", str(where), "--json").stdout)
    assert (told["messages"], told["left"], files(where)) == (0, len(there), {})
    delayer("backlog", "export", str(tmp_path / "new"))
    assert files(tmp_path / "new") == {}


@pytest.mark.deadline(180)
async def test_delta_has_a_version_for_each_export(database: str, delayer: Run, tmp_path: Path) -> None:
    where = tmp_path / "table"
    async with sql(database) as admin:
        there = await fill(admin)
        delayer("backlog", "export", str(where), "--format", "delta")

        def at(version: int) -> dict[int, dict[str, Any]]:
            found = DeltaTable(where, version=version).to_pyarrow_dataset().to_table()
            return by_id(found.to_pylist())

        assert_same(at(0), {id_: expected(row, bodies=False) for id_, row in there.items()})
        gone = next(iter(there))
        delayer("cancel", f"id:{gone}", "--yes")
        told = json.loads(delayer("backlog", "export", str(where), "--format", "delta", "--json").stdout)
        assert (told["came"], told["left"], told["written"]) == (0, 1, 1)
        assert_same(at(1), {id_: expected(row, bodies=False) for id_, row in there.items() if id_ != gone})
        assert set(at(0)) == set(there)
    refused = delayer("backlog", "export", str(where), "--format", "delta", "--bodies", expect=ExitCode.USAGE)
    assert "expected a table with the same columns" in refused.stderr


def test_a_foreign_directory_is_left_alone(database: str, delayer: Run, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("mine")
    for form in ("parquet", "delta"):
        refused = delayer("backlog", "export", str(tmp_path), "--format", form, expect=ExitCode.USAGE)
        assert "expected a new directory" in refused.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["other.txt"]
    refused = delayer("backlog", "export", "/proc", expect=ExitCode.USAGE)
    assert "found its mount point" in refused.stderr


@pytest.mark.deadline(180)
@pytest.mark.parametrize("form", ["parquet", "delta"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
async def test_a_stopped_export_leaves_the_former_state(
    database: str, delayer: Run, tmp_path: Path, form: str, number: signal.Signals, code: int
) -> None:
    """It is stopped while it writes."""
    where = tmp_path / "backlog"

    def seen() -> set[int]:
        return set(read(where)) if form == "parquet" else set(DeltaTable(where).to_pyarrow_table()["id"].to_pylist())

    async with sql(database) as admin:
        # As in a new process: this one may ignore the signal, and its children with it.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        there = await fill(admin)
        delayer("backlog", "export", str(where), "--format", form)
        await put(admin, of_routes(rows(20_000, min(row.due_us for row in there.values()) // 1000, first_id=100_000)))
        words = ("--config", os.devnull, "--store-url", database, "backlog", "export", str(where), "--format", form)
        process = await asyncio.create_subprocess_exec(str(EXECUTABLE), *words, stderr=asyncio.subprocess.PIPE)
        signal.signal(signal.SIGINT, before)
        known = files(where)

        def begun() -> bool:
            return any(one for one in tmp_path.glob("**/*.parquet") if one.stat().st_ino not in known.values())

        while not begun():
            assert process.returncode is None
            await asyncio.sleep(0.01)
        process.send_signal(number)
        async with asyncio.timeout(60.0):
            _, told = await process.communicate()
        assert process.returncode == code, told
        assert "Traceback" not in told.decode()
        assert seen() == set(there)
        if number != signal.SIGKILL:
            assert files(where) == known
            assert not found_in(tmp_path)
        delayer("backlog", "export", str(where), "--format", form)
        assert seen() == set(await everything(admin))
        assert not found_in(tmp_path), "the next export removes what the killed one left"


async def test_a_full_disk_leaves_the_former_state(database: str, tmp_path: Path) -> None:
    async with sql(database) as admin:
        await fill(admin, 500)
    words = ("--config", os.devnull, "--store-url", database, "backlog", "export", str(tmp_path / "backlog"))
    limited = f"ulimit -f 1; exec {EXECUTABLE} {' '.join(words)}"
    process = await asyncio.create_subprocess_exec("bash", "-c", limited, stderr=asyncio.subprocess.PIPE)
    _, told = await process.communicate()
    assert (process.returncode, "the dataset is as it was" in told.decode()) == (ExitCode.OUT_OF_REACH, True), told
    assert not found_in(tmp_path, "*")


async def test_a_broken_segment_is_named_and_all_others_are_written(
    database: str, delayer: Run, tmp_path: Path
) -> None:
    async with sql(database) as admin:
        there = await fill(admin)
        [first, *_] = await admin.fetch("SELECT id, ids FROM segment ORDER BY id")
        await admin.execute(
            "UPDATE segment SET packed = set_byte(packed, 50, 255 - get_byte(packed, 50)) WHERE id = $1", first["id"]
        )
    told = delayer("backlog", "export", str(tmp_path / "backlog"), expect=ExitCode.FOUND)
    assert f"segments {first['id']} are unreadable" in told.stderr
    assert set(read(tmp_path / "backlog")) == set(there) - set(first["ids"])


def test_what_a_killed_first_export_left_has_a_next_step(database: str, delayer: Run, tmp_path: Path) -> None:
    """It may as well be a dataset of Parquet files, whose readers would find each message twice."""
    left = tmp_path / "table" / "due_day=2027-01-31" / "route=mail.in"
    left.mkdir(parents=True)
    refused = delayer("backlog", "export", str(tmp_path / "table"), "--format", "delta", expect=ExitCode.USAGE)
    assert "If the first export to this one did not end, delete it" in refused.stderr
    assert left.exists()


async def test_rows_that_no_counter_counts_are_exported_and_cancelled(
    database: str, delayer: Run, tmp_path: Path
) -> None:
    """Their lane is in neither table, as after an UPDATE by hand. The audit reports that; nothing may lose them."""
    where, file = tmp_path / "backlog", tmp_path / "backlog.jsonl"
    async with sql(database) as admin:
        there = await fill(admin, 500)
        await admin.execute(
            "UPDATE message SET lane = CASE WHEN id % 2 = 0 THEN 9 ELSE 30000 END"
            " WHERE id IN (SELECT id FROM message ORDER BY due_at LIMIT 3)"
        )
        told = json.loads(delayer("backlog", "export", str(where), "--json").stdout)
        assert told["messages"] == len(there)
        assert set(read(where)) == set(there)
        assert f"Written: {len(there)} messages" in delayer("export", str(file)).stderr
        delayer("cancel", "--all", "--yes")
        assert await admin.fetchval("SELECT count(*) FROM message") == 0


def test_one_export_at_a_time_writes_a_dataset(tmp_path: Path) -> None:
    killed, target, other = tmp_path / ".data.part" / "new", tmp_path / "data", tmp_path / "data.old"
    (killed / "due_day=2027-01-31").mkdir(parents=True)
    with dataset.plain(other), dataset.plain(target):
        assert not list(killed.iterdir())
        with pytest.raises(dataset.Unfit, match="another export is writing it"), dataset.plain(target):
            pass
    assert not list(tmp_path.iterdir())


def test_long_and_odd_routes_have_names_of_files() -> None:
    for route in (b"/" * 255, b"\xff" * 255, "ä".encode() * 127, b".", b"..", b"a=b"):
        partition = dataset.Partition.of(1, route)
        assert len(Path(partition.directory).parts) == 2
        assert all(len(part.encode()) <= 255 for part in Path(partition.directory).parts)
    assert dataset.Partition.of(10**9, b"").values["due_day"] == "9999-12-31"
    assert dataset.Partition.of(-1, b"").values["due_day"] == "1970-01-01"
