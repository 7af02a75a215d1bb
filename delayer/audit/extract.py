"""The extract: the whole store, or a sample of it, as files of one instant; and the frames over these files.

It is written first and worked on later, so that the snapshot is held for the reading alone. It holds no bodies (see
delayer/audit/frames.py), but keys, headers and destinations: its directory is for this user only, and goes at the end.
"""

from __future__ import annotations

import functools
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from delayer.audit import places, snapshot
from delayer.audit import spark as sessions
from delayer.audit.frames import CAME_OUT, DAMAGE, OF_SEGMENTS, SCHEMAS, Facts, Frames
from delayer.audit.snapshot import Rows
from delayer.core.secret import SecretUrl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Watch = Callable[[str], AbstractContextManager[None]]
"""Shows the progress of what runs inside, under a name."""


class _Part(NamedTuple):
    """One set of files: what the data source reads for it, from which table, and what the progress calls it."""

    relation: str
    table: str
    ddl: str
    said: str
    sampled: bool = False
    """Whether a share of it is enough for a sample."""


_PARTS: Final = {
    "messages": _Part("message", "message", SCHEMAS["messages"], "reading messages", sampled=True),
    "unpacked": _Part(
        "segment_message", "segment", f"{SCHEMAS['messages']}, {CAME_OUT}", "unpacking segments", sampled=True
    ),
    "held": _Part("held", "held", SCHEMAS["held"], "reading held messages"),
    "segments": _Part("segment", "segment", OF_SEGMENTS, "reading segments"),
    "tombstones": _Part("segment_cancelled", "segment_cancelled", SCHEMAS["tombstones"], "reading cancelled messages"),
    "keys": _Part("message_key", "message_key", SCHEMAS["keys"], "reading keys"),
}


@contextmanager
def workplace(work: str | None, spark: SparkSession | None = None) -> Iterator[str]:
    """A fresh directory below ``work`` (a path, or a URL of what the cluster shares), removed at the end; on this
    machine also what killed runs left there.

    None: below the system's directory for temporary files. ``spark`` is needed for a URL.
    """
    if work is None or not urlsplit(work).scheme:
        if work is not None:
            Path(work).mkdir(parents=True, exist_ok=True)
        with places.place(Path(work or tempfile.gettempdir()), places.EXTRACT) as made:
            try:
                yield made.as_uri()
            except (SystemExit, KeyboardInterrupt):
                # Tasks in the middle of their work would make it again, behind the back of who removes it.
                if spark is not None:
                    sessions.end_machine(spark)
                raise
        return
    assert spark is not None
    url = f"{work.rstrip('/')}/{places.EXTRACT}{uuid.uuid4().hex}"
    try:
        _make(spark, url)
        yield url
    finally:
        _remove(spark, url)


def _make(spark: SparkSession, url: str) -> None:
    """A directory for this user only, by whatever file system Spark has for it; those without rights have none."""
    jvm, (files, path) = spark._jvm, _found(spark, url)
    assert jvm is not None
    files.mkdirs(path, jvm.org.apache.hadoop.fs.permission.FsPermission("700"))


def _remove(spark: SparkSession, url: str) -> None:
    files, path = _found(spark, url)
    files.delete(path, True)


def _found(spark: SparkSession, url: str) -> tuple[Any, Any]:
    """Hadoop's file system of a URL, and its path there."""
    jvm = spark._jvm
    assert jvm is not None
    path = jvm.org.apache.hadoop.fs.Path(url)
    return path.getFileSystem(spark._jsc.hadoopConfiguration()), path


def take(
    spark: SparkSession, url: SecretUrl, place: str, watch: Watch, *, sample: float = 1.0, seed: int = 0
) -> Frames:
    """Write the extract into ``place`` (a URL of a directory) and give the frames over it.

    Raises StoreLost, BadStoreUrl, SchemaOutdated; Spark's errors, see job.translated.
    """
    from delayer.audit import source  # noqa: PLC0415  (needs the extra)

    spark.dataSource.register(source.bound(url))
    with snapshot.hold(url) as held:
        sizes = held.sizes([part.table for part in _PARTS.values() if part.table != "message"])
        parts = {name: part for name, part in _PARTS.items() if sizes.get(part.table, 1)}
        small = {"lanes": held.lanes(), "counters": held.counters(), "partitions": held.partitions()}
        for name, part in parts.items():
            share = sample if part.sampled else 1.0
            options = {"snapshot": held.id, "relation": part.relation, "sample": str(share), "seed": str(seed)}
            read = spark.read.format(source.NAME).options(**options, columns=",".join(_names(_told(part))))
            with watch(part.said):
                read.load().write.parquet(f"{place}/{name}")
        facts = replace(held.facts, sample=sample)
    files = {
        name: spark.read.schema(_told(part)).parquet(f"{place}/{name}")
        if name in parts
        else _made(spark, (), _told(part))
        for name, part in _PARTS.items()
    }
    return _frames(facts, files, {name: _made(spark, rows, SCHEMAS[name]) for name, rows in small.items()})


def _told(part: _Part) -> str:
    """The columns of its files."""
    return f"{part.ddl}, {DAMAGE}"


def _frames(facts: Facts, told: Mapping[str, DataFrame], small: Mapping[str, DataFrame]) -> Frames:
    files = {name: frame.where("damage IS NULL").drop("damage") for name, frame in told.items()}
    first, *others = (frame.select("damage") for frame in told.values())
    damage = functools.reduce(lambda one, other: one.unionByName(other), others, first)
    unpacked = files["unpacked"]
    messages = _names(SCHEMAS["messages"])
    came_out = unpacked.where("id IS NULL").selectExpr("segment AS id", *_names(CAME_OUT))
    return Frames(
        facts=facts,
        messages=files["messages"].unionByName(unpacked.where("id IS NOT NULL").select(*messages)),
        held=files["held"],
        segments=files["segments"].join(came_out, "id", "left").select(*_names(SCHEMAS["segments"])),
        tombstones=files["tombstones"],
        keys=files["keys"],
        damage=damage.where("damage IS NOT NULL")
        .selectExpr(f"from_json(damage, '{SCHEMAS['damage']}') AS told")
        .select("told.*"),
        **small,
    )


def _made(spark: SparkSession, rows: Rows | tuple[()], ddl: str) -> DataFrame:
    return spark.createDataFrame(list(rows), ddl)


def _names(ddl: str) -> list[str]:
    return [field.split()[0] for field in ddl.split(",")]
