"""`delayer audit` without Spark: it finds the defects that counters, indexes and headers show, and names the rest."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from delayer.audit import coming, faults, quick
from delayer.audit.findings import AuditReport
from delayer.audit.job import Options
from delayer.cli.main import cli
from delayer.core.secret import SecretUrl
from delayer.store.schedules import changes
from delayer.store.statements import read
from tests.audit.planting import CANCELLED, FAR, NEAR, SEGMENTS, Planting, build
from tests.audit.rows import said
from tests.support.daemon import EXECUTABLE
from tests.support.schedules import schedule
from tests.support.servers import Postgres
from tests.support.store import blocked, sql

pytestmark = pytest.mark.deadline(120)
UNSEEN = ("segments", "integrity", "repeats", "keys", "peaks", "destinations")


async def audited(database: str, **more: object) -> AuditReport:
    options = replace(Options(store=SecretUrl(database)), **more)
    return await asyncio.to_thread(quick.run, options)


async def test_a_sound_store_has_no_findings_and_unchecked_rules_are_named(database: str) -> None:
    await build(database)
    report = await audited(database)
    assert said(report) == []
    assert tuple(run.rule for run in report.rules if run.skipped) == UNSEEN
    totals, coming = report.totals, report.calendar
    assert (totals.segments, totals.held) == (SEGMENTS, 3)
    async with sql(database) as connection:
        keyed = await connection.fetchval("SELECT count(*) FROM message_key WHERE segment IS NULL")
    assert totals.keyed == keyed, "of rows only"
    assert totals.waiting == totals.expected
    assert totals.waiting + totals.packed == FAR - CANCELLED + NEAR + 5 + 5 == sum(bar.messages for bar in coming.days)
    assert sum(one.messages for one in coming.destinations) == totals.waiting, "a small store is all of its sample"
    slow = [one.subject for one in (await audited(database, release_rate=0.001)).findings]
    assert any(subject.endswith("1 due in 1 s") for subject in slow), "an hour with many messages is read by the second"
    assert {lane.number: lane.alive for lane in report.lanes} == dict.fromkeys((1, 2, 3, 4), False)


async def test_a_sample_of_waiting_messages_still_reads_all_held_messages(database: str) -> None:
    await build(database)
    async with sql(database) as connection:
        *destinations, whole = await connection.fetch(read("audit_sample"), 1e-12, 1.0)
    assert sum(one["messages"] for one in destinations) == whole["messages"] == 3


def test_a_segment_until_the_year_9999_costs_no_more_than_its_messages() -> None:
    far = SimpleNamespace(first_due_ms=0, last_due_ms=253_402_300_799_999, messages=3)
    assert list(coming.spread([far]).values()) == [1, 1, 1]


async def test_headers_and_counters_show_their_violations(database: str) -> None:
    await build(database)
    async with sql(database) as connection:
        planted = await Planting(connection).everything()
    shown = (faults.LATE, faults.MARKED, faults.NEWER, faults.UNREADABLE, faults.PARTITION, "all segments")
    expected = [
        (rule, severity, subject.replace(faults.UNREADABLE, faults.NUMBER), count)
        for rule, severity, subject, count in planted
        if rule not in {"repeats", "keys", "destinations"} and not subject.startswith("segments of")
        and (rule not in {"segments", "integrity"} or any(text in subject for text in shown))
    ]  # fmt: skip
    found = await audited(database)
    assert sorted(said(found)) == sorted(expected)


@pytest.mark.parametrize(("change", "code"), [("SELECT", 2), ("INSERT INTO counter VALUES (1, 'held', 1)", 1)])
def test_a_failed_page_hides_no_report(
    postgres: Postgres, database: str, tmp_path: Path, change: str, code: int
) -> None:
    """The command still prints the report, and violations decide the exit code before the failure."""
    postgres.execute(change, database=urlsplit(database).path[1:])
    words = ["--store-url", database, "audit", "--json", "--no-broker", "--html", str(tmp_path / ("x" * 300))]
    result = CliRunner().invoke(cli, words, prog_name="delayer")
    found = any(run["violations"] for run in json.loads(result.stdout)["rules"])
    assert (result.exit_code, found) == (code, code == 1), result.output
    assert "name too long" in result.stderr


async def test_a_quick_audit_needs_neither_spark_nor_pyarrow(database: str) -> None:
    await build(database)
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('pyspark', 'pyarrow', 'pandas', 'adbc_driver_manager')));"
        "from delayer.cli.main import main; main()"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, "--store-url", database, "audit", "--no-broker",
        env={"PATH": "/nowhere", "DELAYER_CONFIG": "/dev/null"}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    told, _ = await process.communicate()
    assert process.returncode == 0
    assert b"Integrity, not checked: bytes" in told


@pytest.mark.parametrize(
    ("number", "code", "line"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")]
)
async def test_a_stopped_audit_ends_with_one_line(database: str, number: int, code: int, line: str) -> None:
    async with sql(database) as other, sql(database) as admin:
        await other.execute("BEGIN; LOCK TABLE counter")
        process = await asyncio.create_subprocess_exec(
            str(EXECUTABLE), "--store-url", database, "audit", "--no-broker",
            env={"DELAYER_CONFIG": "/dev/null"}, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        await blocked(admin, "LOCK TABLE message%")
        process.send_signal(number)
        _, told = await process.communicate()
    assert (process.returncode, told.decode()) == (code, f"delayer: {line}\n")


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ("DELETE FROM message", faults.UNPLANNED),
        ("DELETE FROM message_key", faults.UNPLANNED),
        ("UPDATE schedule SET waiting_id = 4711 WHERE name = 'tick'", faults.ASTRAY),
        ("UPDATE schedule SET state = 'paused', waiting_id = NULL, waiting_at = NULL", faults.UNSCHEDULED),
        ("DELETE FROM schedule", faults.UNSCHEDULED),
    ],
)
async def test_a_schedule_that_does_not_agree_with_its_occurrence(database: str, damage: str, fault: str) -> None:
    async with sql(database) as connection:
        await changes.add(connection, schedule(), who="test")
        await changes.add(connection, schedule("paused"), paused=True, who="test")
        assert not [one for one in (await audited(database)).findings if one.rule == "schedules"]
        await connection.execute(damage)
    [found] = [one for one in (await audited(database)).findings if one.rule == "schedules"]
    assert (found.subject, found.count, found.details["schedules"]) == (fault, 1, ["tick"])
