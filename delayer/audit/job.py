"""The steps of `delayer audit --deep`: extract, judge, ask the broker."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from delayer.audit import coming, extract, past, rules, tasks
from delayer.audit import spark as sessions
from delayer.audit.coming import RELEASE_RATE
from delayer.audit.findings import AuditReport
from delayer.core.readable import Say, counted
from delayer.core.secret import SecretUrl
from delayer.store import schema
from delayer.store.admin import setup
from delayer.store.admin.stats import RESTORED_MS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from delayer.broker.route_check import CheckedTarget
    from delayer.config.model import AuditRuleTable


@dataclass(frozen=True, slots=True)
class Options:
    """The options of an audit. ``broker``, ``management``: where to check destinations. ``work``: a path, or a URL of
    shared storage. ``sample``: the share of the store to read, above 0 and up to 1. ``release_rate``: messages per
    second. ``restored_ms``: how long before its first due instant a segment must be restored. ``paced``: messages per
    second of each limited route. ``own_rules``: the users' rules, for the deep audit."""

    store: SecretUrl
    broker: SecretUrl | None = None
    management: SecretUrl | None = None
    work: str | None = None
    sample: float = 1.0
    release_rate: float = RELEASE_RATE
    restored_ms: int = RESTORED_MS
    paced: Mapping[bytes, int] = field(default_factory=dict)
    own_rules: tuple[AuditRuleTable, ...] = ()


def check(options: Options) -> None:
    """Check, before a JVM starts, that the store is usable. Raises StoreLost, BadStoreUrl, SchemaOutdated."""
    if wrong := schema.find_mismatch(asyncio.run(setup.schema_of(options.store.reveal()))):
        raise wrong


def run(spark: SparkSession, options: Options, say: Say) -> AuditReport:
    """Run one audit. Raises StoreLost, JobMisused, JobFailed."""
    began = time.monotonic()
    if not tasks.is_remote(spark):
        sessions.check_work(spark.sparkContext.master, options.work)  # spark-submit's master is unknown until now.
    watching = tasks.watcher(spark, say)
    if options.own_rules:
        extract.show_empty(spark)
        rules.check_own(spark, options.own_rules)
    tasks.check_executor(spark, say)
    with extract.workplace(options.work, spark) as place:
        store = extract.write_extract(spark, options.store, place, watching, sample=options.sample)
        with watching("judging"):
            report = rules.judge(store, options)
        with watching("reading the past"):
            report = replace(report, past=past.build_history_report(store, report.calendar))
        with watching("gathering destinations"):
            # Check at most 100,000 destinations, soonest due first.
            targets = coming.targets(store, 100_000)
        if threading.current_thread() is threading.main_thread():
            # With PySpark's Ctrl-C handler, asyncio could not cancel its task.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        unread = report.calendar.unread
        unseen = [f"those of {counted(unread, 'message')} in unreadable segments"] if unread else []
        report = check_destinations(report, targets, options, unseen)
    return replace(report, seconds=round(time.monotonic() - began, 3))


def check_destinations(
    report: AuditReport, targets: list[CheckedTarget], options: Options, unseen: Iterable[str] = ()
) -> AuditReport:
    """Add the broker's verdicts, and why some are missing. ``unseen``: destinations not in ``targets``."""
    from delayer.broker import route_check  # noqa: PLC0415 - only with a broker

    if options.broker is None:
        answers = route_check.skip_targets(targets, "destinations are not checked on the broker (--no-broker)")
    else:
        management = options.management.reveal() if options.management else None
        answers = asyncio.run(route_check.check_targets(options.broker.reveal(), management, targets))
    return rules.with_destinations(report, answers, unseen)
