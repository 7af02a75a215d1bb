"""`delayer audit` from its first to its last step: extract, judge, ask the broker, compare with the last time, keep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from delayer.audit import extract, keeping
from delayer.audit import spark as sessions
from delayer.audit.errors import JobFailed, JobMisused
from delayer.audit.findings import Report
from delayer.audit.rules import calendar
from delayer.audit.watching import Say, Watching
from delayer.core.secret import SecretUrl
from delayer.store import schema
from delayer.store.status import RESTORED_MS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from delayer.audit.frames import Frames

TARGETS: Final = 100_000
"""Destinations that the broker is asked about at most, the soonest due."""


@dataclass(frozen=True, slots=True)
class Broker:
    """Whom to ask about destinations."""

    url: SecretUrl
    management_url: SecretUrl | None


@dataclass(frozen=True, slots=True)
class Options:
    """What an audit is to do. ``work``, ``out``: a path, or a URL of what the cluster shares. ``sample``: the share of
    the store to read, above 0 and up to 1. ``release_rate``: messages a second; None for the rules' own.
    ``restored_ms``: how long before its first message is due a segment should have been restored. ``paced``: messages a
    second that routes may release, where that is limited."""

    store: SecretUrl
    broker: Broker | None = None
    work: str | None = None
    out: str | None = None
    state: Path | None = None
    sample: float = 1.0
    seed: int = 0
    release_rate: float | None = None
    restored_ms: int = RESTORED_MS
    paced: Mapping[bytes, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Audited:
    """``remarks``: what could not be asked, or compared, for people. ``unkept``: what the report could not be written
    to; hours of reading are not thrown away for that."""

    report: Report
    remarks: tuple[str, ...] = ()
    unkept: tuple[JobFailed | JobMisused, ...] = ()


def check(options: Options) -> None:
    """Look before a JVM is started: can the store be read, and has it our schema? Is there a place for what is kept?

    Raises StoreLost, BadStoreUrl, SchemaOutdated, JobMisused.
    """
    keeping.check(options.state, options.out)
    keeping.last(options.state)
    if wrong := schema.outdated(asyncio.run(schema.current(options.store.reveal()))):
        raise wrong


def run(spark: SparkSession, options: Options, say: Say) -> Audited:
    """One audit. Raises StoreLost, BadStoreUrl, SchemaOutdated, JobMisused, JobFailed."""
    began = time.monotonic()
    sessions.check_work(spark.sparkContext.master, options.work)  # spark-submit's master is known only now
    watching = Watching(spark, say)
    before, remarks = keeping.last(options.state)
    with extract.workplace(options.work, spark) as place:
        frames = extract.take(spark, options.store, place, watching, sample=options.sample, seed=options.seed)
        report = _judged(frames, options, watching)
        report, asked = _asked(report, frames, options, watching)
    report = keeping.grown(replace(report, seconds=round(time.monotonic() - began, 3)), before)
    return Audited(report, (*remarks, *asked), tuple(_unkept(spark, report, options, watching)))


def _unkept(
    spark: SparkSession, report: Report, options: Options, watching: Watching
) -> Iterator[JobFailed | JobMisused]:
    """Write the report to where it is to be kept. What failed."""
    if options.out is not None:
        try:
            with watching("writing the findings"):
                keeping.add_findings(spark, report, options.out)
        except JobFailed as error:
            yield error
    if options.state is not None and report.sample is None:
        try:
            keeping.keep(options.state, report)
        except JobMisused as error:
            yield error


def _judged(frames: Frames, options: Options, watching: Watching) -> Report:
    from delayer.audit import judging  # noqa: PLC0415 - Spark

    rate = calendar.RELEASE_RATE if options.release_rate is None else options.release_rate
    with watching("judging"):
        return judging.run(frames, release_rate=rate, restored_ms=options.restored_ms, paced=options.paced)


def _asked(report: Report, frames: Frames, options: Options, watching: Watching) -> tuple[Report, tuple[str, ...]]:
    """The report with the broker's answers, and what kept it from answering."""
    from delayer.audit import destination_findings  # noqa: PLC0415
    from delayer.broker import destinations  # noqa: PLC0415 - aio-pika, which not everybody needs

    with watching("gathering destinations"):
        targets = destination_findings.targets(frames, TARGETS)
    if options.broker is None:
        asked = destinations.not_asked(targets, "the broker was not asked about destinations, as it was told")
    else:
        management = options.broker.management_url
        asked = asyncio.run(
            destinations.ask(options.broker.url.reveal(), management.reveal() if management else None, targets)
        )
    return destination_findings.with_destinations(report, asked), asked.remarks
