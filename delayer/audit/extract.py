"""The extract: the whole store, or a sample of it, as files of one instant; and the views over these files.

The job first writes the extract and then works on it, so that it holds the snapshot only while it reads. The extract
has keys and destinations, but neither bodies nor headers. Its directory is for this user only, and is removed at the
end.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from delayer.audit import spark as sessions
from delayer.core.secret import SecretUrl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# While a replica streams, and has replayed all that it received, it is up to date. Otherwise it has come as far as the
# last commit that it replayed, or the checkpoint that it started from.
INSTANTS: Final = """
SELECT floor(extract(epoch FROM now) * 1000)::bigint,
       floor(extract(epoch FROM least(now, reached)) * 1000)::bigint
FROM (
    SELECT clock_timestamp() AS now, CASE
        WHEN NOT pg_is_in_recovery() OR (pg_last_wal_receive_lsn() <= pg_last_wal_replay_lsn()
            AND (SELECT coalesce(status, 'streaming') = 'streaming' FROM pg_stat_wal_receiver))
        THEN NULL
        ELSE coalesce(pg_last_xact_replay_timestamp(), (SELECT checkpoint_time FROM pg_control_checkpoint()))
    END AS reached
) AS seen
"""
LANES: Final = """
SELECT l.number, l.owner,
       CASE WHEN pg_is_in_recovery() THEN NULL ELSE EXISTS (
           SELECT FROM pg_locks AS k
           WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2
             AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
             AND k.classid = 'lane'::regclass AND k.objid = l.number::int::oid
       ) END AS alive
FROM lane AS l
ORDER BY l.number
"""
# Before the snapshot, so that no partition goes in between.
LOCK: Final = "LOCK TABLE message, held, message_key, lane, counter, segment IN ACCESS SHARE MODE"
_LOCK_ALL: Final = LOCK.replace("segment", "segment, history")
COUNTERS: Final = "SELECT lane, kind, n FROM counter ORDER BY lane, kind"
_MAY_BE_EMPTY: Final = ("held", "segment", "message_key", "history")
_EMPTY: Final = f"SELECT {', '.join(f'NOT EXISTS (SELECT FROM {table})' for table in _MAY_BE_EMPTY)}"


class LaneState(NamedTuple):
    """``alive``: whether a daemon holds the lane's lock; None on a replica, which does not show locks."""

    number: int
    owner: str
    alive: bool | None


@dataclass(frozen=True, slots=True)
class AuditedStore:
    """What both audits know of one instant. ``now_ms``: the store's clock then; on a replica that is ``behind_ms``
    behind, the instant that it had reached. ``counters``: by lane and kind."""

    now_ms: int
    lanes: tuple[LaneState, ...]
    counters: Mapping[tuple[int, str], int]
    behind_ms: int

    @classmethod
    def of(cls, instants: Sequence[Any], lanes: Sequence[Any], counters: Sequence[Any]) -> AuditedStore:
        """From the rows of INSTANTS, LANES and COUNTERS."""
        [(now_ms, reached_ms)] = instants
        counted = {(lane, kind): n for lane, kind, n in counters}
        return AuditedStore(reached_ms, tuple(LaneState(*row) for row in lanes), counted, now_ms - reached_ms)


class HeldSnapshot(NamedTuple):
    """A snapshot for others to read on by its ``id``; the small tables on it; and names of ``empty`` tables."""

    id: str
    store: AuditedStore
    empty: frozenset[str]


@contextmanager
def hold_snapshot(url: SecretUrl) -> Iterator[HeldSnapshot]:
    """Take the snapshot and keep it until the end of the block. Raises StoreLost."""
    from delayer.audit.connection import reading  # noqa: PLC0415 - needs the extra

    with reading(url, _LOCK_ALL, 1 << 20) as own:
        [(exported,)] = own.rows("SELECT pg_export_snapshot()")
        store = AuditedStore.of(*(own.rows(sql) for sql in (INSTANTS, LANES, COUNTERS)))
        [empty] = own.rows(_EMPTY)
        yield HeldSnapshot(exported, store, frozenset(compress(_MAY_BE_EMPTY, empty)))


_NAME: Final = "delayer-audit-"
"""The beginning of the name of an extract's directory."""
Watch = Callable[[str], AbstractContextManager[None]]
"""Shows the progress of a block under a name."""

_SAID: Final = {
    "message": "reading messages",
    "segment_message": "unpacking segments",
    "held": "reading held messages",
    "segment": "reading segments",
    "message_key": "reading keys",
    "history": "reading the history",
}
"""The name of the reading of each relation (source.RELATIONS) in the progress."""
_SAMPLED: Final = ("message", "segment_message")
"""Relations of which a sample reads a share only."""

_COLUMNS: Final = (
    "id, lane, due_ms, kind, segment, route, to_exchange, to_key, key, size, faults, fingerprint, retry_ms"
)
_MESSAGES: Final = (
    f"SELECT {_COLUMNS} FROM message UNION ALL SELECT {_COLUMNS} FROM held"
    f" UNION ALL SELECT {_COLUMNS} FROM segment_message WHERE id IS NOT NULL"
)
"""The view ``messages``: all messages, those that wait, that are held, and that are in segments."""


@dataclass(frozen=True, slots=True)
class Extract(AuditedStore):
    """The store of one instant: values that the driver read, and views of files with the rest. All of it comes from one
    snapshot, so its figures agree. ``sample``: the share of the pages of ``message`` and of the segments that was read,
    0 < sample <= 1. Below 1 the audit does not check sums, dangling keys and repeats.
    """

    spark: SparkSession
    sample: float = 1.0

    @property
    def whole(self) -> bool:
        return self.sample >= 1.0

    def rows(self, sql: str) -> list[Any]:
        """The few rows of a query over the views. Spark's errors pass."""
        return self.spark.sql(sql).collect()


def show(spark: SparkSession, files: Mapping[str, DataFrame]) -> None:
    """Make a view of each relation, and ``messages``."""
    for name, frame in files.items():
        frame.createOrReplaceTempView(name)
    spark.sql(_MESSAGES).createOrReplaceTempView("messages")


def show_empty(spark: SparkSession) -> None:
    """Make the views without rows."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415  (needs the extra)

    from delayer.audit import source  # noqa: PLC0415

    show(
        spark,
        {name: spark.createDataFrame([], from_arrow_schema(one.schema)) for name, one in source.RELATIONS.items()},
    )


@contextmanager
def workplace(work: str | None, spark: SparkSession | None = None) -> Iterator[str]:
    """A fresh directory below ``work`` (a path, or a URL of shared storage), for this user only, removed at the end.

    ``work`` None means the system's directory for temporary files. A URL needs ``spark``.
    """
    if work is None or not urlsplit(work).scheme:
        if work is not None:
            Path(work).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=_NAME, dir=work, ignore_cleanup_errors=True) as made:
            try:
                yield Path(made).as_uri()
            except (SystemExit, KeyboardInterrupt):
                # Running tasks would make the directory again after its removal.
                if spark is not None:
                    sessions.end_machine(spark)
                raise
        return
    assert spark is not None and spark._jvm is not None
    url, hadoop = f"{work.rstrip('/')}/{_NAME}{uuid.uuid4().hex}", spark._jvm.org.apache.hadoop.fs
    path = hadoop.Path(url)
    files = path.getFileSystem(spark._jsc.hadoopConfiguration())
    try:
        files.mkdirs(path, hadoop.permission.FsPermission("700"))  # File systems without permissions ignore that.
        yield url
    finally:
        files.delete(path, True)


def take(spark: SparkSession, url: SecretUrl, place: str, watch: Watch, *, sample: float = 1.0) -> Extract:
    """Write the extract into ``place`` (a URL of a directory).

    Raises StoreLost; Spark's errors, see tasks.translated.
    """
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415  (needs the extra)

    from delayer.audit import source  # noqa: PLC0415

    spark.dataSource.register(source.bound(url))
    files = {}
    with hold_snapshot(url) as held:
        for name, relation in source.RELATIONS.items():
            columns = from_arrow_schema(relation.schema)
            if relation.table in held.empty:
                files[name] = spark.createDataFrame([], columns)
                continue
            share = sample if name in _SAMPLED else 1.0
            options = {"snapshot": held.id, "relation": name, "sample": str(share)}
            with watch(_SAID[name]):
                spark.read.format(source.NAME).options(**options).load().write.parquet(f"{place}/{name}")
            files[name] = spark.read.schema(columns).parquet(f"{place}/{name}")
    show(spark, files)
    store = held.store
    return Extract(store.now_ms, store.lanes, store.counters, store.behind_ms, spark, sample)
