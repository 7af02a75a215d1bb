"""An import killed at every step, on a real store: the next run resumes it, and every message exists once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from delayer.cli.main import cli
from delayer.core.message import Parcel, Target
from delayer.format import lines
from delayer.format.lines import Line
from delayer.imports import files
from tests.integration.test_import_sql import NOON, Source, mariadb, source_of
from tests.support.json_shapes import check
from tests.support.logged import logging_as_it_was
from tests.support.rows import conserved
from tests.support.servers import Postgres
from tests.support.store import sql

__all__ = ["mariadb"]

COUNT = 50
BATCH = 20
FAR_MS = 4_000_000_000_000
PROGRAM = f"""
import sys
from delayer.imports import files, queues, sql
queues.BATCH = files.BATCH = sql.BATCH = {BATCH}
from delayer.cli.main import main
main()
"""


def write(path: Path) -> list[bytes]:
    bodies = [b"%d" % n for n in range(COUNT)]
    made = [
        Line(Parcel(FAR_MS - n % 7, b"", b"", b"", Target(b"", b"q"), b"\x10\0\2", body))
        for n, body in enumerate(bodies)
    ]
    path.write_bytes(b"".join(map(lines.format_line, made)) + lines.format_end_line(COUNT))
    return bodies


async def delayer(
    store: str, *arguments: str, fault: str = "", at_stop: Callable[[], None] | None = None, **more: str
) -> tuple[int, str, str]:
    """Run a command: its exit code, output and errors. Only a command with a fault gets its own process: a new
    interpreter takes a second. ``at_stop`` is called while a fault stops the command, which then resumes."""
    nothing = {name: None for name in os.environ if name.startswith("DELAYER_")}
    environ = {"DELAYER_CONFIG": os.devnull, "DELAYER_STORE__URL": store, **more}
    if not fault:
        call = partial(CliRunner().invoke, cli, arguments, env=nothing | environ, prog_name="delayer")
        result = await asyncio.to_thread(call)
        return result.exit_code, result.stdout, result.stderr
    whole = {name: value for name, value in os.environ.items() if name not in nothing} | environ
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, *arguments, env=whole | {"DELAYER_FAULT": fault},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    if at_stop is not None:
        await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        at_stop()
        process.send_signal(signal.SIGCONT)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    with logging_as_it_was():
        yield


STEPS = [
    ("import.begun", 0),
    ("import.staged", 0),
    ("import.taken:2", BATCH),
    ("park.copied:2", BATCH),
    ("import.committed:2", 2 * BATCH),
    ("import.removed:2", 2 * BATCH),
    ("import.emptied", COUNT),
]


def of_steps(*default: str, steps: Sequence[tuple[str, int]] = STEPS) -> list[Any]:
    """All steps; those not in ``default`` are marked ``long``."""
    return [pytest.param(*step, marks=() if step[0] in default else pytest.mark.long) for step in steps]


async def gone(store: str) -> None:
    """Wait until the server has noticed that the import died."""
    async with sql(store) as admin:
        while await admin.fetchval("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'delayer import'"):
            pass


async def killed(store: str, *arguments: str, fault: str, **more: str) -> None:
    code, out, told = await delayer(store, *arguments, fault=fault, **more)
    assert code == -signal.SIGKILL, (out, told)
    await gone(store)


async def report(store: str, *arguments: str, expect: int = 0, **more: str) -> Any:
    """The command's output with --json."""
    code, out, told = await delayer(store, *arguments, **more)
    assert code == expect, told
    return json.loads(out)


async def parked(store: str) -> list[bytes]:
    """The bodies in the store, after a check that its counters agree."""
    async with sql(store) as admin:
        bodies = sorted(body for (body,) in await admin.fetch("SELECT body FROM message"))
        assert (await conserved(admin))["parked"] == len(bodies)
    return bodies


@pytest.mark.parametrize(
    ("fault", "committed"), of_steps("import.staged", "park.copied:2", "import.committed:2", "import.emptied")
)
async def test_run_again(store: str, tmp_path: Path, fault: str, committed: int) -> None:
    assert files.BATCH > BATCH
    path = tmp_path / "backlog.jsonl"
    bodies = write(path)
    ask = ("--unverified", "--json")
    arguments = ("import", "jsonl", "run", str(path), "--yes", *ask)
    await killed(store, *arguments, fault=fault)
    assert len(await parked(store)) == committed
    if committed == COUNT:
        refused, _, told = await delayer(store, *arguments, "--limit", "49")
        assert (refused, "limit: begun with 'nothing', now 49" in told) == (1, True), told
        seen = await report(store, "import", "jsonl", "preview", str(path), *ask, "--limit", "49", expect=1)
        assert "begun with other parameters" in seen["refused"]
        elsewhere = {"DELAYER_IMPORT_URL": "postgresql://127.0.0.1:1/sales"}
        refused, _, told = await delayer(store, "import", "nservicebus-sql", "abort", "--yes", **elsewhere)
        assert (refused, "import 1 from jsonl is not finished" in told) == (1, True), told
    else:  # and killed once more after it resumes
        await killed(store, *arguments, fault="import.committed:1")
        committed += min(BATCH, COUNT - committed)
    done = await report(store, *arguments)
    assert (done["resumed"], done["parked"]) == (True, COUNT)
    assert done["this_time"]["parked"] == COUNT - committed
    assert await parked(store) == sorted(bodies)


@pytest.mark.parametrize(("fault", "committed"), of_steps("import.committed:2")[1:5:3])
async def test_abort_instead(store: str, tmp_path: Path, fault: str, committed: int) -> None:
    path = tmp_path / "backlog.jsonl"
    write(path)
    arguments = (str(path), "--unverified", "--yes", "--json")
    await killed(store, "import", "jsonl", "run", *arguments, fault=fault)
    _, out, _ = await delayer(store, "import", "jsonl", "abort", *arguments)
    done = check("import … abort", out)
    assert (done["phase"], done["parked"]) == ("aborted", committed)
    assert len(await parked(store)) == committed
    async with sql(store) as admin:
        assert await admin.fetchval("SELECT count(*) FROM import_item") == 0
    if committed:  # the whole file again would import these messages twice
        code, _, told = await delayer(store, "import", "jsonl", "run", *arguments)
        assert code == 1
        assert "Next: --again" in told
    # From the beginning: that is a new import.
    assert (await report(store, "import", "jsonl", "run", *arguments, "--again"))["parked"] == COUNT
    code, _, told = await delayer(store, "import", "jsonl", "abort", *arguments)
    assert (code, "there is no unfinished import to abort" in told) == (1, True), told


TABLES = ("A_TimeoutData", "B_TimeoutData")


@pytest.fixture(params=["postgresql", pytest.param("mysql", marks=pytest.mark.long)])
def source(request: pytest.FixtureRequest, postgres: Postgres) -> Iterator[Source]:
    yield from source_of(request.param, request, postgres)


RUN = ("import", "nservicebus-sql", "run", "--unverified", "--yes", "--json")


async def fill(source: Source) -> list[bytes]:
    rows = [source.timeout(n, NOON + timedelta(seconds=n % 7)) for n in range(COUNT)]
    for name, some in zip(TABLES, (rows[::3], [row for n, row in enumerate(rows) if n % 3]), strict=True):
        await source.create(name)
        await source.put(name, some)
    return sorted(row["State"] for row in rows)


@pytest.mark.parametrize(("fault", "committed"), of_steps("import.committed:2", "import.emptied"))
async def test_tables_are_in_one_place_only(store: str, source: Source, fault: str, committed: int) -> None:
    """After a kill each timeout is in its table, staged, or in the store; after another run it is in the store."""
    states = await fill(source)
    url = {"DELAYER_IMPORT_URL": source.url}
    await killed(store, *RUN, fault=fault, **url)
    assert len(await parked(store)) == committed
    # The preview shows an operator the remaining messages, and the unfinished import.
    seen = await report(store, "import", "nservicebus-sql", "preview", *RUN[3::2], **url)
    at_least, at_most = COUNT - committed, COUNT - max(0, committed - BATCH)
    assert at_least <= seen["messages"] <= at_most
    assert seen["unfinished"]["parked"] == committed
    assert (await report(store, *RUN, **url))["parked"] == COUNT
    assert await parked(store) == states
    assert await source.tables() == list(TABLES)
    assert [await source.rows(name) for name in TABLES] == [[], []]


async def test_a_removal_undone_by_a_source_crash_imports_nothing_twice(store: str, source: Source) -> None:
    """The store records the progress in every table, not only in those of the last batch, so nothing is imported
    twice."""
    rows = [source.timeout(n, NOON + timedelta(seconds=n)) for n in range(COUNT)]
    for name, some in zip(TABLES, (rows[:BATCH], rows[BATCH:]), strict=True):
        await source.create(name)
        await source.put(name, some)
    url = {"DELAYER_IMPORT_URL": source.url}
    await killed(store, *RUN, fault="import.committed:2", **url)
    [staged] = [name for name in await source.tables() if name.startswith(f"{TABLES[0]}_delayer_")]
    assert await source.rows(staged) == []
    await source.put(staged, rows[:BATCH])
    assert (await report(store, *RUN, **url))["this_time"]["parked"] == COUNT - 2 * BATCH
    assert await parked(store) == sorted(row["State"] for row in rows)


@pytest.mark.parametrize(
    ("meanwhile", "differs"),
    [
        ("DELETE FROM {staged} WHERE {first}", "50 messages were staged, but 49 are committed"),
        ("CREATE RULE kept AS ON DELETE TO {staged} WHERE old.{first} DO INSTEAD NOTHING", "but 49 could be removed"),
    ],
    ids=["a row is gone", "a row cannot be removed"],
)
async def test_counts_that_differ_stop_the_import(store: str, postgres: Postgres, meanwhile: str, differs: str) -> None:
    name = postgres.add_database()
    source = Source("postgresql", postgres.url(name))
    await fill(source)
    url = {"DELAYER_IMPORT_URL": source.url}
    await killed(store, *RUN, fault="import.taken:1", **url)
    [staged] = [name for name in await source.tables() if name.startswith(f"{TABLES[0]}_delayer_")]
    first = f""""Id" = '{uuid.UUID(int=0)}'"""
    postgres.execute(meanwhile.format(staged=source.quoted(staged), first=first), database=name)
    code, _, told = await delayer(store, *RUN, **url)
    assert (code, differs in told) == (1, True), told
    postgres.drop_database(name)


@pytest.mark.parametrize(("fault", "committed"), of_steps("import.committed:2")[:-1])
async def test_tables_get_the_rest_back(store: str, source: Source, fault: str, committed: int) -> None:
    states = await fill(source)
    before = [await source.rows(name) for name in TABLES]
    arguments = ("--unverified", "--yes", "--json")
    url = {"DELAYER_IMPORT_URL": source.url}
    await killed(store, "import", "nservicebus-sql", "run", *arguments, fault=fault, **url)
    if committed:  # the abort is killed too: all rows are back in their tables, but the store has not recorded it
        await killed(store, "import", "nservicebus-sql", "abort", *arguments, fault="import.emptied", **url)
        code, _, told = await delayer(store, "import", "nservicebus-sql", "run", *arguments, **url)
        assert (code, "Next: `abort`, with the same parameters" in told) == (1, True), told
    done = await report(store, "import", "nservicebus-sql", "abort", *arguments, **url)
    assert done["parked"] == committed
    after = [await source.rows(name) for name in TABLES]
    assert all(set(map(repr, rest)) <= set(map(repr, all_)) for rest, all_ in zip(after, before, strict=True))
    there = [row[3] for rest in after for row in rest]
    assert sorted([*await parked(store), *there]) == states
    assert await source.tables() == list(TABLES)
