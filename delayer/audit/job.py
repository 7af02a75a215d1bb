"""The steps of `delayer audit`: extract, judge, ask the broker, keep the findings."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from delayer.audit import coming, extract, rules
from delayer.audit import spark as sessions
from delayer.audit.coming import RELEASE_RATE
from delayer.audit.errors import JobFailed
from delayer.audit.findings import AuditReport
from delayer.audit.tasks import Say, StageWatcher
from delayer.core.secret import SecretUrl
from delayer.store import schema
from delayer.store.admin import setup
from delayer.store.admin.stats import RESTORED_MS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from delayer.audit.extract import Extract

_COLUMNS: Final = ("rule", "severity", "subject", "count", "first_due_ms")
FINDINGS: Final = (
    "audited_ms bigint, rule string, severity string, subject string, count bigint, first_due_ms bigint, details string"
)
"""Columns of the findings as Parquet; ``details`` is JSON."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of an audit. ``broker``, ``management``: where to ask about destinations. ``work``, ``out``: a path,
    or a URL of shared storage. ``sample``: the share of the store to read, above 0 and up to 1. ``release_rate``:
    messages a second. ``restored_ms``: how long before its first due instant a segment must be restored. ``paced``:
    messages a second of each limited route."""

    store: SecretUrl
    broker: SecretUrl | None = None
    management: SecretUrl | None = None
    work: str | None = None
    out: str | None = None
    sample: float = 1.0
    seed: int = 0
    release_rate: float = RELEASE_RATE
    restored_ms: int = RESTORED_MS
    paced: Mapping[bytes, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Audited:
    """A finished audit. ``remarks``: why questions have no answer, for people. ``unkept``: why the findings are not in
    ``out``."""

    report: AuditReport
    remarks: tuple[str, ...] = ()
    unkept: JobFailed | None = None


def check(options: Options) -> None:
    """Check before a JVM starts that the store can be read and has our schema. Raises StoreLost, BadStoreUrl,
    SchemaOutdated."""
    if wrong := schema.outdated(asyncio.run(setup.schema_of(options.store.reveal()))):
        raise wrong


def run(spark: SparkSession, options: Options, say: Say) -> Audited:
    """One audit. Raises StoreLost, JobMisused, JobFailed."""
    began = time.monotonic()
    sessions.check_work(spark.sparkContext.master, options.work)  # Only now is spark-submit's master known.
    watching = StageWatcher(spark, say)
    with extract.workplace(options.work, spark) as place:
        store = extract.take(spark, options.store, place, watching, sample=options.sample, seed=options.seed)
        with watching("judging"):
            report = rules.judge(
                store, release_rate=options.release_rate, restored_ms=options.restored_ms, paced=options.paced
            )
        report, remarks = _asked(report, store, options, watching)
    report = replace(report, seconds=round(time.monotonic() - began, 3))
    unkept = None
    if options.out is not None:
        try:
            with watching("writing the findings"):
                add_findings(spark, report, options.out)
        except JobFailed as error:
            unkept = error
    return Audited(report, remarks, unkept)


def add_findings(spark: SparkSession, report: AuditReport, out: str) -> None:
    """Add this audit's findings to the Parquet files there; ``audited_ms`` tells audits apart. Spark's errors pass."""
    rows = [
        (report.store_now_ms, *(getattr(one, name) for name in _COLUMNS), json.dumps(one.details, default=str))
        for one in report.findings
    ]
    spark.createDataFrame(rows, FINDINGS).coalesce(1).write.mode("append").parquet(out)


def _asked(
    report: AuditReport, store: Extract, options: Options, watching: StageWatcher
) -> tuple[AuditReport, tuple[str, ...]]:
    """The report with the broker's answers, and the reasons why some are missing."""
    from delayer.broker import route_check  # noqa: PLC0415 - only with a broker

    with watching("gathering destinations"):
        # The broker is asked about 100,000 destinations at most, the soonest due.
        targets = coming.targets(store, 100_000)
    if options.broker is None:
        asked = route_check.not_asked(targets, "the broker was not asked about destinations (--no-broker)")
    else:
        management = options.management.reveal() if options.management else None
        asked = asyncio.run(route_check.ask(options.broker.reveal(), management, targets))
    return rules.with_destinations(report, asked), asked.remarks
