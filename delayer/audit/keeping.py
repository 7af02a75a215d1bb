"""What an audit leaves behind: its report for the next one to compare with (``--state``), its findings as Parquet
(``--out``). Whether there is a place for them is looked at before hours of work, and told without losing the report."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from delayer.audit.errors import JobMisused
from delayer.audit.findings import Report
from delayer.audit.rules.growth import growth
from delayer.writing import replaced, replacing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FINDINGS: Final = (
    "audited_ms bigint, rule string, severity string, subject string, count bigint, first_due_ms bigint, details string"
)
"""Columns of the findings as Parquet; ``details`` is JSON."""


def check(state: Path | None, out: str | None) -> None:
    """Try what will be written. ``out`` is only looked at where it is a path of this machine.

    Raises JobMisused.
    """
    if state is not None:
        _try(_beside(state), f"--state {state}")
    if out is not None and not urlsplit(out).scheme:
        try:
            Path(out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise JobMisused(f"--out {out}: {error.strerror}") from error
        _try(Path(out), f"--out {out}")


def _beside(state: Path) -> Path:
    """The directory that the file is made in: of what a symlink leads to."""
    try:
        return (replaced(state) or state).parent
    except OSError as error:
        raise JobMisused(f"--state {state}: {error.strerror}") from error


def _try(directory: Path, option: str) -> None:
    if not directory.is_dir():
        raise JobMisused(f"{option}: there is no directory {directory}")
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise JobMisused(f"{option}: no file can be made in {directory}: {error.strerror}") from error


def last(state: Path | None) -> tuple[Report | None, tuple[str, ...]]:
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
    return report if before is None else replace(report, growth=growth(report, before))


def add_findings(spark: SparkSession, report: Report, out: str) -> None:
    """Add this audit's findings to the Parquet files there; ``audited_ms`` tells audits apart. Spark's errors pass."""
    at = report.store_now_ms
    rows = [
        (at, one.rule, one.severity, one.subject, one.count, one.first_due_ms, json.dumps(one.details, default=str))
        for one in report.findings
    ]
    spark.createDataFrame(rows, FINDINGS).coalesce(1).write.mode("append").parquet(out)
