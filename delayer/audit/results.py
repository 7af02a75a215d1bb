"""The results of audits as a Parquet dataset: a file for each run, with a row for each rule (docs/tables.md).

One file per run makes an append atomic: the file gets its name when it is complete, and no other file changes. So any
number of audits may append at the same time, and readers need no lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from delayer import __version__
from delayer.audit.dataset import Unfit, sync, writing
from delayer.audit.files import replacing
from delayer.audit.findings import AuditReport
from delayer.core.secret import SecretUrl
from delayer.core.store_hosts import hosts_of

COLUMNS: Final = pa.schema([
    pa.field("run", pa.string(), nullable=False),
    pa.field("time", pa.timestamp("us", "UTC"), nullable=False),
    pa.field("store", pa.string(), nullable=False),
    pa.field("deep", pa.bool_(), nullable=False),
    pa.field("rule", pa.string(), nullable=False),
    pa.field("severity", pa.string()),
    pa.field("count", pa.int64(), nullable=False),
    pa.field("skipped", pa.string()),
    pa.field("rows_read", pa.int64(), nullable=False),
    pa.field("seconds", pa.float64(), nullable=False),
    pa.field("version", pa.string(), nullable=False),
])  # fmt: skip


def check(directory: Path) -> None:
    """Check, before an audit starts, that its results fit the dataset. Raises Unfit."""
    if not directory.parent.is_dir():
        raise Unfit(f"{directory}: expected a directory on this machine: there is no directory {directory.parent}")
    if directory.exists() and not directory.is_dir():
        raise Unfit(f"{directory}: expected a directory, found a file")
    for file in sorted(directory.glob("[!._]*")):  # Readers ignore other names.
        if file.suffix != ".parquet":
            raise Unfit(f"{directory}: expected a new directory or the results of earlier audits, found {file.name}")
        try:
            found = pq.read_schema(file)
        except (pa.ArrowException, OSError) as error:
            raise Unfit(
                f"{file}: expected the results of an audit, found no Parquet file: {error}. "
                "Next: move the file away, because it breaks every reader"
            ) from None
        if not found.equals(COLUMNS):
            raise Unfit(
                f"{file}: expected the columns of delayer {__version__} (docs/tables.md): {_told(COLUMNS, found)}, "
                f"found: {_told(found, COLUMNS)}. Next: name a new directory"
            )


def _told(columns: pa.Schema, other: pa.Schema) -> str:
    """Name the columns that differ from ``other``."""
    told = [f"{one.name} {one.type}{'' if one.nullable else ' not null'}" for one in columns if one not in list(other)]
    return ", ".join(told) or ("the same in another order" if len(columns) == len(other) else "no others")


def append(directory: Path, report: AuditReport, store: SecretUrl) -> None:
    """Append the rows of one audit. Raises DatasetNotWritten."""
    run = f"{datetime.fromtimestamp(report.store_now_ms / 1000, UTC):%Y%m%dT%H%M%SZ}-{os.urandom(4).hex()}"
    table = pa.Table.from_pylist(list(rows(report, run, place_of(store))), COLUMNS)
    with writing():
        directory.mkdir(exist_ok=True)
        with replacing(directory / f"{run}.parquet") as out:
            pq.write_table(table, out, compression="zstd")
        sync([directory, directory.parent])


def rows(report: AuditReport, run: str, store: str) -> Iterable[dict[str, Any]]:
    """Build a row for each rule."""
    totals = report.totals
    for rule in report.rules:
        yield {
            "run": run,
            "time": datetime.fromtimestamp(report.store_now_ms / 1000, UTC),
            "store": store,
            "deep": not report.quick,
            "rule": rule.rule,
            "severity": rule.severity,
            "count": rule.count,
            "skipped": rule.skipped or None,
            "rows_read": totals.waiting + totals.held + (0 if report.quick else totals.packed - report.calendar.unread),
            "seconds": report.seconds,
            "version": __version__,
        }


def place_of(store: SecretUrl) -> str:
    """Return hosts, ports and database of a store's URL, or a mask if a password may reach into them.

    >>> place_of(SecretUrl("postgresql://delayer:secret@db1.example:5432,db2.example/delayer?sslmode=require"))
    'db1.example:5432,db2.example/delayer'
    >>> place_of(SecretUrl("postgresql:///db?host=a,b"))
    'a,b/db'
    >>> place_of(SecretUrl("postgresql:///db?host=a,b&port=1,2")), place_of(SecretUrl("postgresql:///db?host=a&port=1"))
    ('a:1,b:2/db', 'a:1/db')
    """
    hosts = hosts_of(store.reveal())
    return ",".join(map(_host_of, hosts)) + urlsplit(str(SecretUrl(hosts[0]))).path


def _host_of(url: str) -> str:
    """Return host and port of a URL, which may have them in its query; nothing if the URL is masked as a whole."""
    shown = urlsplit(str(SecretUrl(url)))
    if shown.netloc or not shown.scheme:
        return shown.netloc.rpartition("@")[2]
    query = dict(parse_qsl(urlsplit(url).query))
    hosts, ports = (query.get(name, "").split(",") for name in ("host", "port"))
    ports = ports * len(hosts) if len(ports) == 1 else ports
    return ",".join(f"{host}:{port}" if port else host for host, port in zip(hosts, ports, strict=False))
