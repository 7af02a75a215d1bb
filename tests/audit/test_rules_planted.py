"""A real store with every violation planted once: the audit finds each of them and nothing else, and nothing before
they are planted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aio_pika
import pytest

from delayer.audit import faults, job
from delayer.audit.findings import AuditReport
from delayer.core.secret import SecretUrl
from tests.audit.planting import CANCELLED, FAR, NEAR, SEGMENTS, Planting, build
from tests.audit.rows import said
from tests.support.rabbitmq import RabbitMQ
from tests.support.store import sql

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.deadline(600)


async def declare(vhost: str) -> None:
    """The destination of the sound messages, an exchange closed to publishers, and one with only an alternate."""
    async with await aio_pika.connect(vhost) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("orders", durable=True)
        out = await channel.declare_exchange("delayer.out", "topic", durable=True)
        await queue.bind(out, "orders.eu")
        await channel.declare_exchange("inside", "fanout", durable=True, internal=True)
        await queue.bind("inside")
        last = await channel.declare_exchange("last", "fanout", durable=True)
        await queue.bind(last)
        await channel.declare_exchange("spared", "topic", durable=True, arguments={"alternate-exchange": "last"})


async def audited(spark: SparkSession, database: str, rabbitmq: RabbitMQ, vhost: str, work: str) -> AuditReport:
    options = job.Options(
        store=SecretUrl(database), broker=SecretUrl(vhost), management=SecretUrl(rabbitmq.management_url), work=work
    )
    return await asyncio.to_thread(job.run, spark, options, lambda _what, _done, _of: None)


async def test_nothing_is_found_in_a_sound_store(
    spark: SparkSession, database: str, rabbitmq: RabbitMQ, vhost: str, work: str
) -> None:
    await build(database)
    await declare(vhost)
    report = await audited(spark, database, rabbitmq, vhost, work)
    assert said(report) == []
    assert not any(run.skipped or run.unlisted for run in report.rules)
    totals = report.totals
    assert totals.segments == SEGMENTS
    assert (totals.waiting, totals.held, totals.keyed) == (totals.expected, 3, FAR // 4 - CANCELLED + 5)
    assert totals.waiting + totals.packed == FAR - CANCELLED + NEAR + 5 + 5
    assert sum(bar.messages for bar in report.calendar.days) == totals.waiting + totals.packed
    assert {lane.number: lane.alive for lane in report.lanes} == dict.fromkeys((1, 2, 3, 4), False)


async def test_every_violation_planted_once_is_found_and_nothing_else(
    spark: SparkSession, database: str, rabbitmq: RabbitMQ, vhost: str, work: str
) -> None:
    await build(database)
    await declare(vhost)
    async with sql(database) as connection:
        planted = await Planting(connection).everything()
    report = await audited(spark, database, rabbitmq, vhost, work)
    assert sorted(said(report)) == sorted(planted)
    clean = [run.rule for run in report.rules if not run.violations and not run.warnings]
    assert clean == ["peaks"]
    [asked] = [run.skipped for run in report.rules if run.rule == "destinations"]
    assert asked == f"those of {report.calendar.unread:,} messages in unreadable segments"
    assert all(one.next for one in report.findings)
    # The plan contains every finding of the rule of segments.
    known = (
        faults.CHANGED, faults.NEWER, faults.UNREADABLE, faults.DUE, faults.IDS, faults.SIZE, faults.LATE,
        faults.MARKED,
    )  # fmt: skip
    assert all(any(fault in subject for _, _, subject, _ in planted) for fault in known)
