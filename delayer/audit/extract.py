"""The extract: the store, or a sample of it, as files of one instant, with views over these files.

The job writes the extract first, so that it holds the snapshot only while it reads. The extract contains keys and
destinations, but no bodies or headers. Only this user can read its directory, which is removed at the end.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from delayer.audit import faults, tasks
from delayer.audit import spark as sessions
from delayer.core.message import OCCURRENCES
from delayer.core.secret import SecretUrl
from delayer.store.statements import IS_OWNED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# A replica that is streaming and has replayed all it received is up to date. Otherwise it has reached the last commit
# it replayed, or the checkpoint it started from.
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
LANES: Final = f"""
SELECT l.number, l.owner, CASE WHEN pg_is_in_recovery() THEN NULL ELSE {IS_OWNED} END AS alive
FROM lane AS l
ORDER BY l.number
"""
# Taken before the snapshot, so that no partition is dropped in between.
LOCK: Final = (
    "LOCK TABLE message, held, message_key, schedule, delayer_inbox, lane, counter, segment IN ACCESS SHARE MODE"
)
_LOCK_ALL: Final = LOCK.replace("segment", "segment, history")
COUNTERS: Final = "SELECT lane, kind, n FROM counter ORDER BY lane, kind"
_FIRST, _END = (key.decode() for key in OCCURRENCES)
# Schedules whose waiting occurrence is not where it should be: the fault, how many, the soonest, and five names.
SCHEDULES: Final = f"""
SELECT fault, count(*), (extract(epoch FROM min(due_at)) * 1000)::bigint, (array_agg(name ORDER BY name))[:5]
FROM (
    SELECT coalesce(s.name, encode(substring(k.key FROM {len(_FIRST) + 1}), 'escape')) AS name, k.due_at,
        CASE WHEN s.state = 'active' AND (k.id IS NULL OR NOT EXISTS (
                 SELECT FROM message AS m WHERE m.lane = k.lane AND m.due_at = k.due_at AND m.id = k.id
             )) THEN '{faults.UNPLANNED}'
             WHEN s.state = 'active' AND k.id <> s.waiting_id THEN '{faults.ASTRAY}'
             WHEN s.state IS DISTINCT FROM 'active' AND k.id IS NOT NULL THEN '{faults.UNSCHEDULED}' END AS fault
    FROM schedule AS s
    FULL JOIN (
        SELECT * FROM message_key WHERE key >= '{_FIRST}' AND key < '{_END}'
    ) AS k ON k.key = '{_FIRST}'::bytea || convert_to(s.name, 'UTF8')
) AS looked_at WHERE fault IS NOT NULL GROUP BY fault ORDER BY fault
"""
INBOX: Final = """
SELECT count(*), (extract(epoch FROM min(sent_at)) * 1000)::bigint
FROM delayer_inbox WHERE sent_at < clock_timestamp() - interval '1 minute'
"""
_MAY_BE_EMPTY: Final = ("held", "segment", "message_key", "history")
_EMPTY: Final = f"SELECT {', '.join(f'NOT EXISTS (SELECT FROM {table})' for table in _MAY_BE_EMPTY)}"


class LaneState(NamedTuple):
    """``alive``: whether a daemon holds the lane's lock; None on a replica, which does not show locks."""

    number: int
    owner: str
    alive: bool | None


@dataclass(frozen=True, slots=True)
class AuditedStore:
    """The figures that both audits read at one instant. ``now_ms``: the store's clock then; on a replica that lags by
    ``behind_ms``, the instant it had reached. ``counters``: by lane and kind. ``schedules``: rows of SCHEDULES.
    ``unread``: the number of rows that are in the SQL inbox for more than a minute, and when the first was sent (epoch
    ms)."""

    now_ms: int
    lanes: tuple[LaneState, ...]
    counters: Mapping[tuple[int, str], int]
    behind_ms: int
    schedules: tuple[Any, ...]
    unread: tuple[int, int | None]

    @classmethod
    def of(
        cls,
        instants: Sequence[Any],
        lanes: Sequence[Any],
        counters: Sequence[Any],
        schedules: Sequence[Any],
        inbox: Sequence[Any],
    ) -> AuditedStore:
        """Build from the rows of INSTANTS, LANES, COUNTERS, SCHEDULES and INBOX."""
        [(now_ms, reached_ms)] = instants
        counted = {(lane, kind): n for lane, kind, n in counters}
        owned = tuple(LaneState(*row) for row in lanes)
        [(messages, first_ms)] = inbox
        schedules = tuple(map(tuple, schedules))
        return AuditedStore(reached_ms, owned, counted, now_ms - reached_ms, schedules, (messages, first_ms))


READ: Final = (INSTANTS, LANES, COUNTERS, SCHEDULES, INBOX)
"""The statements for :meth:`AuditedStore.of`."""


class HeldSnapshot(NamedTuple):
    """A snapshot that other sessions read by its ``id``, with the small tables, and the names of ``empty`` tables."""

    id: str
    store: AuditedStore
    empty: frozenset[str]


@contextmanager
def hold_snapshot(url: SecretUrl) -> Iterator[HeldSnapshot]:
    """Take a snapshot and keep it until the block ends. Raises StoreLost."""
    from delayer.audit.connection import reading  # noqa: PLC0415 - needs the extra

    with reading(url, _LOCK_ALL, 1 << 20) as own:
        [(exported,)] = own.rows("SELECT pg_export_snapshot()")
        store = AuditedStore.of(*(own.rows(sql) for sql in READ))
        [empty] = own.rows(_EMPTY)
        yield HeldSnapshot(exported, store, frozenset(compress(_MAY_BE_EMPTY, empty)))


_NAME: Final = "delayer-audit-"
"""Prefix of an extract's directory name."""
Watch = Callable[[str], AbstractContextManager[None]]
"""Shows the progress of a block under a name."""

_SAMPLED: Final = ("message", "segment_message")
"""Relations that a sample reads only in part."""

_COLUMNS: Final = (
    "id, lane, due_ms, kind, segment, route, to_exchange, to_key, key, size, faults, fingerprint, retry_ms"
)
_MESSAGES: Final = (
    f"SELECT {_COLUMNS} FROM message UNION ALL SELECT {_COLUMNS} FROM held"
    f" UNION ALL SELECT {_COLUMNS} FROM segment_message WHERE id IS NOT NULL"
)
"""The view ``messages``: all messages, whether waiting, held or in segments."""


@dataclass(frozen=True, slots=True)
class Extract(AuditedStore):
    """The store at one instant: values that the driver read, and views of files with the rest, all from one snapshot.

    ``sample``: the share of the pages of ``message`` and of the segments that was read, 0 < sample <= 1. Below 1 the
    audit skips sums, dangling keys and repeats.
    """

    spark: SparkSession
    sample: float = 1.0

    @property
    def whole(self) -> bool:
        return self.sample >= 1.0

    def rows(self, sql: str) -> list[Any]:
        """Run a query with few rows over the views. Lets Spark's errors pass."""
        return self.spark.sql(sql).collect()


def create_views(spark: SparkSession, files: Mapping[str, DataFrame]) -> None:
    """Create a view of each relation, and ``messages``."""
    for name, frame in files.items():
        frame.createOrReplaceTempView(name)
    spark.sql(_MESSAGES).createOrReplaceTempView("messages")


def show_empty(spark: SparkSession) -> None:
    """Create the views without rows."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415  (needs the extra)

    from delayer.audit import source  # noqa: PLC0415

    create_views(
        spark,
        {name: spark.createDataFrame([], from_arrow_schema(one.schema)) for name, one in source.RELATIONS.items()},
    )


def _url_of(path: str) -> str:
    """Return a file's URL as Hadoop reads it: without percent-encoding, which it would take for part of a name."""
    return f"file://{Path(path).absolute()}"


def _pattern_of(url: str) -> str:
    """Return the pattern that matches only ``url``: Spark's readers take the path of a URL for a pattern, its writers
    do not.

    >>> print(_pattern_of("file:///tmp/a[1]{b}*?"), _pattern_of("hdfs://[::1]:9000/tmp"))
    file:///tmp/a\\[1\\]\\{b\\}\\*\\? hdfs://[::1]:9000/tmp
    """
    # The host, which is not part of the path, or a sign of patterns.
    return re.sub(r"\A[^/]*//[^/]*|([\\*?{}\[\]])", lambda found: f"\\{found[1]}" if found[1] else found[0], url)


@contextmanager
def workplace(work: str | None, spark: SparkSession | None = None) -> Iterator[str]:
    """Create a directory below ``work`` (a path, or a URL of shared storage) for this user only; remove it on exit.
    ``work`` None means the system's temporary directory. A URL needs ``spark``. On a Spark Connect server the directory
    has the permissions that the server gives it. Raises JobMisused."""
    if spark is not None and tasks.is_remote(spark):
        with _workplace_of_server(str(work), spark) as url:
            yield url
        return
    if work is None or not sessions.is_url(work):
        with sessions.make_directory(_NAME, work) as made:
            try:
                yield _url_of(made)
            except (SystemExit, KeyboardInterrupt):
                # Running tasks would recreate the directory after its removal.
                if spark is not None:
                    sessions.end_machine(spark)
                raise
        return
    assert spark is not None and spark._jvm is not None
    url, hadoop = f"{work.rstrip('/')}/{_NAME}{uuid.uuid4().hex}", spark._jvm.org.apache.hadoop.fs
    path = hadoop.Path(url)
    files = path.getFileSystem(spark._jsc.hadoopConfiguration())
    try:
        files.mkdirs(path, hadoop.permission.FsPermission("700"))  # Ignored by file systems without permissions.
        yield url
    finally:
        files.delete(path, True)


@contextmanager
def _workplace_of_server(work: str, spark: SparkSession) -> Iterator[str]:
    """Create a directory by SQL: a client cannot reach the server's file system, but a database has a directory, and
    takes all its files along."""
    from pyspark.errors import PySparkException  # noqa: PLC0415  (needs the extra)

    name = f"delayer_audit_{uuid.uuid4().hex}"
    base = work.rstrip("/") if sessions.is_url(work) else _url_of(work)
    url = f"{base}/{_NAME}{name.rpartition('_')[2]}"
    quoted = url.replace("\\", "\\\\").replace("'", "\\'")
    spark.sql(f"CREATE DATABASE {name} LOCATION '{quoted}'")
    drop = f"DROP DATABASE {name} CASCADE"
    try:
        yield url
    except BaseException:
        with suppress(PySparkException):  # It would hide the first error, such as a lost server.
            spark.sql(drop)
        raise
    spark.sql(drop)


def write_extract(spark: SparkSession, url: SecretUrl, place: str, watch: Watch, *, sample: float = 1.0) -> Extract:
    """Write the extract into ``place`` (a directory URL). Raises StoreLost; for Spark's errors see tasks.translated."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415  (needs the extra)

    from delayer.audit import source  # noqa: PLC0415

    spark.dataSource.register(source.data_source_for(url))
    files = {}
    with hold_snapshot(url) as held:
        for name, relation in source.RELATIONS.items():
            columns = from_arrow_schema(relation.schema)
            if relation.table in held.empty:
                files[name] = spark.createDataFrame([], columns)
                continue
            share = sample if name in _SAMPLED else 1.0
            options = {"snapshot": held.id, "relation": name, "sample": str(share)}
            with watch(f"reading {name}"):
                spark.read.format(source.NAME).options(**options).load().write.parquet(f"{place}/{name}")
            files[name] = spark.read.schema(columns).parquet(_pattern_of(f"{place}/{name}"))
    create_views(spark, files)
    store = held.store
    small = (store.now_ms, store.lanes, store.counters, store.behind_ms, store.schedules, store.unread)
    return Extract(*small, spark, sample)
