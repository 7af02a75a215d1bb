"""`delayer audit` from its first to its last step: extract, judge, ask the broker, compare with the last time, keep."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from delayer.audit import extract
from delayer.audit import spark as sessions
from delayer.audit.errors import JobFailed, JobMisused
from delayer.audit.findings import Report
from delayer.audit.rules import judge
from delayer.audit.rules.judge import growth_of
from delayer.audit.tasks import Say, Watching
from delayer.core.files import replacing
from delayer.core.secret import SecretUrl
from delayer.store import schema
from delayer.store.admin.stats import RESTORED_MS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from delayer.audit.frames import Frames

FINDINGS: Final = (
    "audited_ms bigint, rule string, severity string, subject string, count bigint, first_due_ms bigint, details string"
)
"""Columns of the findings as Parquet; ``details`` is JSON."""


def check_places(state: Path | None, out: str | None) -> None:
    """Try what will be written. ``out`` is only looked at where it is a path of this machine.

    Raises JobMisused.
    """
    if state is not None:
        _try(Path(os.path.realpath(state)).parent, f"--state {state}")
    if out is not None and not urlsplit(out).scheme:
        try:
            Path(out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise JobMisused(f"--out {out}: {error.strerror}") from error
        _try(Path(out), f"--out {out}")


def _try(directory: Path, option: str) -> None:
    if not directory.is_dir():
        raise JobMisused(f"{option}: there is no directory {directory}")
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise JobMisused(f"{option}: no file can be made in {directory}: {error.strerror}") from error


def last_report(state: Path | None) -> tuple[Report | None, tuple[str, ...]]:
    """The report kept in ``state``, and a remark if what stands there is none. Raises JobMisused if it cannot be read,
    now and not at the end of an hour's work."""
    if state is None:
        return None, ()
    try:
        return Report.from_json(state.read_text(encoding="ascii")), ()
    except FileNotFoundError:
        return None, ()
    except (ValueError, UnicodeDecodeError) as error:
        return None, (f"{state} tells nothing of the last audit, it is written anew: {error}",)
    except OSError as error:
        raise JobMisused(f"--state {state}: {error.strerror}") from error


def keep(state: Path, report: Report) -> None:
    """Let ``state`` hold this report, all of it or what was there before. Raises JobMisused."""
    try:
        with replacing(state) as out:
            out.write(report.to_json().encode("ascii"))
    except OSError as error:
        raise JobMisused(f"--state {state}: {error.strerror}") from error


def grown(report: Report, before: Report | None) -> Report:
    """The report with its growth since the last one, if there is one to compare with."""
    return report if before is None else replace(report, growth=growth_of(report, before))


def add_findings(spark: SparkSession, report: Report, out: str) -> None:
    """Add this audit's findings to the Parquet files there; ``audited_ms`` tells audits apart. Spark's errors pass."""
    at = report.store_now_ms
    rows = [
        (at, one.rule, one.severity, one.subject, one.count, one.first_due_ms, json.dumps(one.details, default=str))
        for one in report.findings
    ]
    spark.createDataFrame(rows, FINDINGS).coalesce(1).write.mode("append").parquet(out)


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
    check_places(options.state, options.out)
    last_report(options.state)
    if wrong := schema.outdated(asyncio.run(schema.current(options.store.reveal()))):
        raise wrong


def run(spark: SparkSession, options: Options, say: Say) -> Audited:
    """One audit. Raises StoreLost, BadStoreUrl, SchemaOutdated, JobMisused, JobFailed."""
    began = time.monotonic()
    sessions.check_work(spark.sparkContext.master, options.work)  # spark-submit's master is known only now
    watching = Watching(spark, say)
    before, remarks = last_report(options.state)
    with extract.workplace(options.work, spark) as place:
        frames = extract.take(spark, options.store, place, watching, sample=options.sample, seed=options.seed)
        report = _judged(frames, options, watching)
        report, asked = _asked(report, frames, options, watching)
    report = grown(replace(report, seconds=round(time.monotonic() - began, 3)), before)
    return Audited(report, (*remarks, *asked), tuple(_unkept(spark, report, options, watching)))


def _unkept(
    spark: SparkSession, report: Report, options: Options, watching: Watching
) -> Iterator[JobFailed | JobMisused]:
    """Write the report to where it is to be kept. What failed."""
    if options.out is not None:
        try:
            with watching("writing the findings"):
                add_findings(spark, report, options.out)
        except JobFailed as error:
            yield error
    if options.state is not None and report.sample is None:
        try:
            keep(options.state, report)
        except JobMisused as error:
            yield error


def _judged(frames: Frames, options: Options, watching: Watching) -> Report:
    from delayer.audit import judging  # noqa: PLC0415 - Spark

    rate = judge.RELEASE_RATE if options.release_rate is None else options.release_rate
    with watching("judging"):
        return judging.run(frames, release_rate=rate, restored_ms=options.restored_ms, paced=options.paced)


def _asked(report: Report, frames: Frames, options: Options, watching: Watching) -> tuple[Report, tuple[str, ...]]:
    """The report with the broker's answers, and what kept it from answering."""
    from delayer.audit import destination_findings  # noqa: PLC0415
    from delayer.broker import route_check  # noqa: PLC0415 - only with a broker

    with watching("gathering destinations"):
        # Destinations that the broker is asked about at most, the soonest due.
        targets = destination_findings.targets(frames, 100_000)
    if options.broker is None:
        asked = route_check.not_asked(targets, "the broker was not asked about destinations, as it was told")
    else:
        management = options.broker.management_url
        asked = asyncio.run(
            route_check.ask(options.broker.url.reveal(), management.reveal() if management else None, targets)
        )
    return destination_findings.with_destinations(report, asked), asked.remarks
