"""The waiting messages as Parquet files in hive directories, ``due_day=2027-01-31/route=mail.in/``.

`delayer backlog export` writes one file per partition, named after the digest of its messages
(store/admin/exporting.py). So a repeated export writes only partitions whose digest changed. It becomes visible in one
step: a plain dataset by exchanging two directories, a Delta table by one commit to its log.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import date, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.parquet as pq

from delayer.audit.files import replacing
from delayer.core.message import as_text
from delayer.format import reading
from delayer.store.admin.actions import IdBitset
from delayer.store.admin.exporting import Digest
from delayer.store.waiting import Entry

VERSION: Final = 1
"""The version of the columns. Files of another version are rewritten."""
_EPOCH: Final = date(1970, 1, 1)
LAST_DAY: Final = (date.max - _EPOCH).days
_LAST_SECOND: Final = LAST_DAY * 86_400
NO_ROUTE: Final = "__HIVE_DEFAULT_PARTITION__"
"""The directory of messages that came straight to the queue. Readers turn it into null."""
_INSTANT, _INT, _TEXT = pa.timestamp("us", "UTC"), pa.int64(), pa.string()
_PROPERTIES: Final = {
    "message_id": _TEXT, "correlation_id": _TEXT, "content_type": _TEXT, "content_encoding": _TEXT,
    "delivery_mode": _INT, "priority": _INT, "reply_to": _TEXT, "expiration": _TEXT, "timestamp": _INSTANT,
    "type": _TEXT, "user_id": _TEXT, "app_id": _TEXT, "cluster_id": _TEXT,
}  # fmt: skip
COLUMNS: Final = pa.schema({
    "id": _INT, "due_at": _INSTANT, "parked_at": _INSTANT, "exchange": _TEXT, "routing_key": _TEXT,
    "to_exchange": _TEXT, "to_key": _TEXT, "key": _TEXT, "body_bytes": _INT, **_PROPERTIES, "headers": _TEXT,
    "x_delay": _INT, "traceparent": _TEXT, "fault": _TEXT,
})  # fmt: skip
"""The columns of a file; a column ``body`` may follow. ``headers``: a JSON object. ``x_delay``: the header, if an
integer. ``fault``: why properties or headers could not be decoded. Bytes that are not UTF-8 are backslash escapes."""
BODY: Final = pa.field("body", pa.binary())
_ROWS: Final = 20_000
"""Messages per row group of a file."""
_BYTES: Final = 32 << 20
"""Once the open files together have this many bytes in memory, all of them are written."""
_ASCII: Final = re.compile(r"[\x00-\x7f]+")
_NAME: Final = re.compile(r"v(\d+)-(\d+)-([0-9a-f]{16})-(plain|bodies)-\d+\.parquet")


class Unfit(Exception):
    """The directory or its file system cannot hold the dataset. The text says what was expected and found."""


class DatasetNotWritten(Exception):
    """A file could not be written. Not an OSError, because the store's session reports an OSError as its own."""


class Partition(NamedTuple):
    """The messages of one due day (since 1970) and route."""

    day: int
    route: str

    @classmethod
    def of(cls, day: int, route: bytes) -> Partition:
        """Return the partition of this day and route. Days beyond the calendar go to its first or last day."""
        return cls(min(max(day, 0), LAST_DAY), as_text(route))

    @property
    def values(self) -> dict[str, str | None]:
        """The values of the partition's columns, as Delta writes them."""
        return {"due_day": str(_EPOCH + timedelta(days=self.day)), "route": self.route or None}

    @property
    def directory(self) -> str:
        # Spark would turn each escape into one character, so characters beyond ASCII stay unescaped. It takes []{} in
        # the paths of a Delta table's files for a pattern.
        route = _ASCII.sub(lambda some: quote(some[0], safe=" !#$&'()+,;@^~"), self.route or NO_ROUTE)
        if len(route.encode()) > 200:  # A name is at most 255 bytes.
            route = f"{quote(self.route[:20], safe='')}~{sha256(self.route.encode()).hexdigest()[:16]}"
        return f"due_day={self.values['due_day']}/route={route}"


def name_of(digest: Digest, *, bodies: bool, now_ms: int) -> str:
    """Name a file of these messages, written at ``now_ms``."""
    kind = "bodies" if bodies else "plain"
    return f"v{VERSION}-{digest.messages}-{digest.total % (1 << 64):016x}-{kind}-{now_ms}.parquet"


def same(name: str, other: str) -> bool:
    """Whether two files of one partition have the same messages and columns."""
    return name.rpartition("-")[0] == other.rpartition("-")[0]


def messages_of(name: str) -> int:
    """Read the number of messages from a file's name."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[2])


def row(one: Entry, *, bodies: bool) -> list[Any]:
    """List a message's values in the order of the columns."""
    decoded = reading.decode_properties(one.properties, whole=True)
    headers = {header.name: header.value for header in decoded.headers}
    properties: dict[str, Any] = dict(decoded.properties)
    if (seconds := properties.pop("timestamp", None)) is not None and seconds <= _LAST_SECOND:
        properties["timestamp"] = seconds * 1000
    addresses = one.exchange, one.routing_key, one.to_exchange, one.to_key
    delay, trace = headers.get("x-delay"), headers.get("traceparent")
    values = [
        one.place.id,
        one.place.due_ms,
        one.parked_ms,
        *map(as_text, addresses),
        None if one.key is None else as_text(one.key),
        one.size,
        *(properties.get(name) for name in _PROPERTIES),
        json.dumps(headers, ensure_ascii=False),
        delay if type(delay) is int and -(1 << 63) <= delay < 1 << 63 else None,
        trace if isinstance(trace, str) else None,
        decoded.broken or None,
    ]
    return [*values, one.body] if bodies else values


def table(rows: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.Table:
    """Build a table from values in the order of ``schema``; instants are epoch milliseconds."""
    arrays = [
        pa.array(column, pa.timestamp("ms", "UTC")).cast(_INSTANT)
        if field.type == _INSTANT
        else pa.array(column, field.type)
        for field, column in zip(schema, zip(*rows, strict=True), strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


class _File:
    """An open file of one partition."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._out = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
        self._parquet = pq.ParquetWriter(self._out, schema, compression="zstd")
        self._schema = schema
        self.rows: list[Sequence[Any]] = []
        self.messages = 0

    def flush(self) -> None:
        if self.rows:
            self._parquet.write_table(table(self.rows, self._schema))
            self.messages += len(self.rows)
            self.rows = []

    def finish(self) -> None:
        self.flush()
        self._parquet.close()
        self._out.flush()
        os.fsync(self._out.fileno())
        self._out.close()


class PartitionWriter:
    """Writes messages, in order of their due instants, to the files of their partitions, so only one day's files are
    open at a time. ``wanted``: the path of each partition to write. Skips messages of other partitions."""

    def __init__(self, wanted: Mapping[Partition, Path], *, bodies: bool) -> None:
        self.ids = IdBitset()
        """The ids of all messages written."""
        self.messages = 0
        self._wanted = wanted
        self._bodies = bodies
        self._schema = COLUMNS.append(BODY) if bodies else COLUMNS
        self._day = -1
        self._open: dict[Partition, _File] = {}
        self._waiting = 0  # Bytes.

    def add(self, day: int, one: Entry) -> None:
        """Add a message that is due on ``day`` (since 1970). Raises OSError."""
        partition = Partition.of(day, one.route)
        if partition not in self._wanted:
            return
        if partition.day != self._day:
            self.finish()
            self._day = partition.day
        file = self._open.get(partition)
        if file is None:
            file = self._open[partition] = _File(self._wanted[partition], self._schema)
        file.rows.append(row(one, bodies=self._bodies))
        self.ids.update([one.place.id])
        self.messages += 1
        self._waiting += 1_000 + len(one.properties) + len(one.body)
        if self._waiting > _BYTES:
            for other in self._open.values():
                other.flush()
            self._waiting = 0
        elif len(file.rows) >= _ROWS:
            file.flush()

    def finish(self) -> None:
        """Finish the open files. Raises OSError."""
        for partition, file in self._open.items():
            file.finish()
            expected = messages_of(self._wanted[partition].name)
            assert file.messages == expected, f"{partition}: expected {expected} messages, wrote {file.messages}"
        self._open, self._waiting = {}, 0


class PlainDataset:
    """A directory of Parquet files. Created by :func:`plain`. ``root``: the directory for new files. ``former``: each
    partition's present file, by the partition's directory, relative to ``former_root``."""

    def __init__(self, path: Path, root: Path) -> None:
        self.root, self.former_root = root, path
        self.former = {str(file.parent): file for file in _files(path)}

    def commit(self, kept: Iterable[Path], written: Mapping[Partition, Path], gone: Iterable[Path]) -> None:
        """Sync the ``kept`` and ``written`` files to disk, then make them visible: link the kept files into the new
        directory, and exchange both directories. ``gone``: files that were replaced, or whose partition is now empty.
        Raises OSError, Unfit."""
        for file in kept:
            (self.root / file.parent).mkdir(parents=True, exist_ok=True)
            os.link(self.former_root / file, self.root / file)
        sync(Path(directory) for directory, _, _ in os.walk(self.root))
        if self.former_root.exists():
            shutil.copymode(self.former_root, self.root)
            exchange(self.root, self.former_root)
        else:
            self.root.rename(self.former_root)
        sync([self.former_root.parent])


def _files(path: Path) -> list[Path]:
    """List a dataset's files, relative to it. Raises Unfit if the folder contains anything else."""
    if not path.exists():
        return []
    found = [file.relative_to(path) for file in path.glob("**/*") if not file.is_dir()]
    for file in found:
        if not (_NAME.fullmatch(file.name) and file.parts[0].startswith("due_day=")) and str(file) != LEFT:
            raise Unfit(f"{path}: expected a new directory or one of an earlier export, found {file} in it")
    return [file for file in found if str(file) != LEFT]


LEFT: Final = "_left.csv"
"""Lists the ids of messages that left since the last export. Dataset readers ignore names with a leading underscore."""


@contextmanager
def plain(path: Path) -> Iterator[PlainDataset]:
    """Open the dataset at ``path``, or a new one. On exit, removes uncommitted files. Raises OSError, Unfit."""
    if path.exists() and not path.is_dir():
        raise Unfit(f"{path}: expected a directory, found a file")
    target = Path(os.path.realpath(path))
    if target.is_mount():
        raise Unfit(f"{path}: expected a directory in a file system, found its mount point: name a directory in it")
    work = target.with_name(f".{target.name}.part")
    work.mkdir(mode=0o700, exist_ok=True)
    with ExitStack() as stack:
        lock = os.open(work, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, lock)
        if not _lock(lock, work):
            raise Unfit(f"{target}: another export is writing it")
        stack.callback(shutil.rmtree, work, ignore_errors=True)  # After the commit it contains the former state.
        for left in work.iterdir():  # From an export that was killed.
            shutil.rmtree(left)
        new, other = work / "new", work / "other"
        new.mkdir(mode=0o700)
        other.mkdir(mode=0o700)
        exchange(new, other)  # Fails before the work if the file system cannot do this.
        other.rmdir()
        yield PlainDataset(target, new)


def _lock(number: int, directory: Path) -> bool:
    """Lock an open directory; False if another export has locked or removed it."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.path.samestat(os.fstat(number), directory.stat())


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def exchange(one: Path, other: Path) -> None:
    """Exchange two directories in one step. Raises OSError, and Unfit if the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise Unfit(f"{one.parent}: expected a file system that exchanges two directories, such as ext4 or XFS")
        raise OSError(number, os.strerror(number), str(one))


def sync(directories: Iterable[Path]) -> None:
    """Sync these directories, because syncing a file need not include its name. Raises OSError."""
    for directory in directories:
        number = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)


@contextmanager
def removed_unless_complete(paths: Iterable[Path]) -> Iterator[None]:
    """Remove the files at ``paths`` if the block fails."""
    try:
        yield
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise


@contextmanager
def writing() -> Iterator[None]:
    """Raise DatasetNotWritten for an OSError."""
    try:
        yield
    except OSError as error:
        raise DatasetNotWritten(f"{error.filename or 'the dataset'}: {error.strerror or error}") from error


def write_left(root: Path, files: Iterable[Path], ids: IdBitset) -> int:
    """Write the messages in ``files`` that are not in ``ids`` to a CSV file in ``root``, and return their number.
    Routes come from directory names, so long routes are shortened. Raises OSError, Unfit."""
    count = 0
    with replacing(root / LEFT, mode=0o600) as out:
        out.write(b"id,due_at,route\r\n")
        for file in files:
            route = unquote(file.parent.name.removeprefix("route=")).replace('"', '""')
            tail = '""' if route == NO_ROUTE else f'"{route}"'
            for id_, due_at in _messages_in(file):
                if id_ not in ids:
                    out.write(f"{id_},{due_at.isoformat(timespec='milliseconds')},{tail}\r\n".encode())
                    count += 1
    return count


def _messages_in(file: Path) -> Iterator[tuple[int, datetime]]:
    try:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(columns=["id", "due_at"]):
                yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
    except pa.ArrowException as error:
        raise Unfit(f"{file}: expected a Parquet file of an earlier export: {error}") from None
