"""Sources that are files with one record per line, read twice in constant memory: `jsonl` (our own export,
format/lines.py) and `delayed-exchange` (a dump of the delayed-message plugin).

*Staging* reads the whole file once and saves each record's place and due instant in the store. The run then reads the
records in order of due instant, so the file must not change until the run is done. Its digest is one of the parameters,
and before each batch its size and modification time must still match.

`rabbitmqctl eval`, run on each node of the broker, writes a dump (docs/importing.md). A line is a message, with fields
separated by blanks: the due instant in epoch milliseconds, then base64 of virtual host, exchange, routing keys
separated by NUL, property bytes, and body. The last line has the number of messages.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.properties import Properties, entry, long_string, splice
from delayer.core.delay_sources import routing_keys_of
from delayer.core.hold import unfit
from delayer.core.importing import ImportBatch, ImportItem, ImportSelection, Left, Run, Survey
from delayer.core.message import Parcel, Target, as_text
from delayer.core.readable import counted
from delayer.core.units import LATEST_MS
from delayer.format import lines
from delayer.format.lines import EndLine, NotALine
from delayer.format.rows import checksum
from delayer.imports.state_machine import ImportImpossible, SourceLost
from delayer.schedule.occurrence import occurrence
from delayer.schedule.record import ScheduleRecord, begin
from delayer.store.admin.importing import ImportStore


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise SourceLost for errors of the file."""
    try:
        yield
    except OSError as error:
        raise SourceLost(f"{path}: {error.strerror}") from error


def file_identity(path: Path) -> tuple[int, int, int]:
    """Return the inode, size and time of change (ns), which differ if the file was replaced or written to."""
    with reading(path):
        found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


BATCH: Final = 2_000
BATCH_BYTES: Final = 8 << 20
NAMED: Final = 10
"""Lines that a survey names per kind of remark."""
_BEFORE: Final = (-(1 << 62), -1)
"""A place before every record."""


class Unreadable(ValueError):
    """A line that is not a record. The message completes "line 7: …"."""


class SkippedRecord(NamedTuple):
    """A record left out of the import: the reason, and a remark on this record."""

    why: str
    remark: str = ""


LineReading = ImportItem | SkippedRecord | int | None
"""The meaning of a line: a message, a skipped record, the count from the last line, or None if the line is empty."""


@dataclass(eq=False, repr=False, kw_only=True)
class FileSource(ABC):
    """Satisfies state_machine.ImportSource; subclasses add :meth:`read`. ``notes`` keeps the order of the records."""

    name: ClassVar[str]
    counted: ClassVar[bool] = True
    """Whether a file's last line has the number of its messages."""
    path: Path
    notes: ImportStore
    meant: ImportSelection

    def __post_init__(self) -> None:
        self._parameters: dict[str, object] | None = None
        self._state: tuple[int, int, int] | None = None
        self._file: BufferedReader | None = None
        self._run: Run | None = None
        self._after = _BEFORE
        self._to_come = 0
        """Staged records that no batch has returned yet."""
        self._survey: Survey | None = None

    def more_parameters(self) -> Mapping[str, object]:
        """Parameters, other than the file, that change how its lines are read."""
        return {}

    @abstractmethod
    def read(self, line: bytes) -> LineReading:
        """Parse a line without its line end, and rename its destination. Raises Unreadable."""

    @property
    def parameters(self) -> dict[str, object]:
        """See ImportSource. Raises SourceLost."""
        if self._parameters is None:
            self._state = file_identity(self.path)
            with reading(self.path), self.path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            said = {"file": str(self.path.resolve()), "sha256": digest}
            self._parameters = {**said, **self.more_parameters(), **self.meant.as_dict()}
        return self._parameters

    async def survey(self, unfinished: Run | None = None) -> Survey:
        """See ImportSource. Reads every line; skips and reports unreadable records."""
        if self._survey is None:
            self._survey = self._look()
            if unfinished is None:
                brought = await self.notes.find_finished(self.name, str(self.parameters["sha256"]))
                if brought:
                    said = ", ".join(
                        f"import {earlier} brought {counted(messages, 'message')}" for earlier, messages in brought
                    )
                    twice = f"{said} of this very file: messages of both are delivered twice"
                    self._survey.doubt(twice)
                    self._survey.brought = f"{twice}. Next: --again, if they are gone by now, or shall come twice"
        return self._survey

    def _look(self) -> Survey:
        """Count the whole file, including messages beyond the limit. Raises ImportImpossible if the file was cut."""
        survey, limit = Survey(), self.meant.limit
        ends: list[int] = []
        for number, _, _, found in self._lines():
            if isinstance(found, int):
                ends.append(found)
            elif isinstance(found, SkippedRecord):
                survey.leave(found.why)
                if found.remark and len(survey.doubts) < NAMED:
                    survey.doubt(f"line {number} is unreadable: {found.remark}")
            elif found is not None and found.schedule is not None:
                survey.schedules += 1
                survey.expect(found.parcel.target, 1, found.parcel.due_ms)
            elif found is not None:
                problem = "" if found.hold is None else found.hold.text
                survey.add(found.parcel.target, found.parcel.due_ms, problem)
                if problem and len(survey.remarks) < NAMED:
                    survey.remarks.append(f"line {number}: will be held: {problem}")
        messages = survey.messages + survey.schedules + sum(survey.left.values())
        if limit is not None and survey.messages > limit:
            survey.leave(Left.BEYOND_LIMIT, survey.messages - limit)
            survey.messages = limit
        if self.counted and not ends:
            survey.doubt("the file does not have the number of its messages, so it may have been cut")
        elif self.counted and sum(ends) != messages:
            raise ImportImpossible(
                f"{self.path}: expected {counted(sum(ends), 'message')} by its last line, found {messages}: "
                "it was cut, or lines are missing"
            )
        return survey

    def _lines(self) -> Iterator[tuple[int, int, int, LineReading]]:
        """Yield the number, place, length and meaning of each line."""
        position = 0
        with reading(self.path), self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield number, position, len(line), self._checked(line)
                position += len(line)

    def _checked(self, line: bytes) -> LineReading:
        try:
            found = self.read(line.rstrip(b"\r\n"))
        except Unreadable as why:
            return SkippedRecord(Left.UNREADABLE, str(why))
        if not isinstance(found, ImportItem):
            return found
        due_ms = found.parcel.due_ms
        if not 0 <= due_ms <= LATEST_MS:
            return SkippedRecord(Left.UNREADABLE, f"expected a due instant of 0 to {LATEST_MS} ms, found {due_ms}")
        return found if self.meant.includes(due_ms) else SkippedRecord(Left.BEFORE_CUTOFF)

    async def stage(self, run: Run) -> int:
        schedules = 0

        def records() -> Iterator[tuple[int, int, int]]:
            nonlocal schedules
            for _, position, size, found in self._lines():
                if isinstance(found, ImportItem):
                    schedules += found.schedule is not None
                    yield _turn(found), position, size

        count = await self.notes.write_items(run, records())
        return count if self.meant.limit is None else min(count, self.meant.limit + schedules)

    async def resume(self, run: Run) -> None:
        """See ImportSource. Removes nothing, and skips committed records."""
        self._run = run
        self._to_come = (run.staged or 0) - run.committed
        if run.progress is not None:
            due_ms, position = json.loads(run.progress)
            self._after = (due_ms, position)

    async def next_batch(self) -> ImportBatch | None:
        assert self._run is not None
        places = await self.notes.read_items(self._run, self._after, min(BATCH, self._to_come))
        if not places:
            return None
        items: list[ImportItem] = []
        size = 0
        for due_ms, position, length in places:
            found = self._read_at(position, length)
            if not isinstance(found, ImportItem) or _turn(found) != due_ms:
                raise ImportImpossible(f"{self.path}: it changed since it was staged (at byte {position})")
            items.append(found)
            self._after = (due_ms, position)
            size += length
            if size >= BATCH_BYTES:
                break
        if self._state not in (None, file_identity(self.path)):
            raise ImportImpossible(f"{self.path}: it changed since it was staged")
        self._to_come -= len(items)
        return ImportBatch(items, json.dumps(self._after))

    def _read_at(self, position: int, length: int) -> LineReading:
        with reading(self.path):
            if self._file is None:
                self._file = self.path.open("rb")
            self._file.seek(position)
            return self._checked(self._file.read(length))

    async def remove(self, batch: ImportBatch) -> int:
        """See ImportSource. The file stays unchanged."""
        return len(batch.items) + batch.again

    async def finish(self) -> dict[str, int]:
        return dict((await self.survey()).left)

    async def put_back(self, run: Run) -> int:
        """See ImportSource. Nothing was taken."""
        return (run.staged or 0) - run.committed

    async def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


NOT_SOUND = unfit("the bytes do not fit the checksum that was exported with them")


class JsonLines(FileSource):
    """A file of `delayer export`."""

    name = "jsonl"

    def read(self, line: bytes) -> LineReading:
        if not line.strip():
            return None
        try:
            found = lines.parse_line(line)
            if isinstance(found, EndLine):
                return found.messages
            if isinstance(found, ScheduleRecord):
                return self.meant.redirected(_of_schedule(found, line, self.meant.cutoff_ms))
            parcel = found.parcel
            Properties.parse(parcel.properties)
        except (NotALine, MalformedProperties) as error:
            raise Unreadable(str(error)) from error
        crc = checksum(parcel.exchange, parcel.routing_key, parcel.properties, parcel.body)
        hold = found.held if found.crc in (None, crc) else NOT_SOUND.after(found.held)
        return self.meant.redirected(ImportItem(parcel, hold))


def _turn(item: ImportItem) -> int:
    """The order of the import: by due instant, but schedules first, because all of them come."""
    return item.parcel.due_ms if item.schedule is None else 0


def _of_schedule(record: ScheduleRecord, line: bytes, cutoff_ms: int | None) -> ImportItem:
    """A schedule as an item, which is due with its waiting occurrence, if one waits. If that is due before the cutoff,
    it is left out, and the schedule continues with the first time from the cutoff on."""
    if cutoff_ms is not None and record.due_ms is not None and record.due_ms < cutoff_ms:
        record = begin(record, cutoff_ms - 1).record
        line = lines.format_schedule_line(record)
    parcel = occurrence(record.schedule, record.waiting_ms or 0)
    return ImportItem(parcel if record.waiting_ms is not None else parcel._replace(due_ms=LATEST_MS), None, line)


_NOTHING: Final = (b"", b"ok")
_NUMBER: Final = re.compile(rb"[0-9]{1,18}")


def _with_blind_copies(properties: bytes, more_keys: Sequence[bytes]) -> bytes:
    """Add a BCC header with the keys missing from CC, because the broker removed BCC when the message came in."""
    found = Properties.parse(properties)
    shown = found.get(b"CC")
    copies = frozenset() if shown is None else routing_keys_of(shown.value)
    blind = [key for key in more_keys if key not in copies]
    if not blind:
        return properties
    content = b"".join(map(long_string, blind))
    return splice(found, append=entry(b"BCC", b"A" + len(content).to_bytes(4, "big") + content))


@dataclass(eq=False, repr=False, kw_only=True)
class DelayedExchange(FileSource):
    """A dump, or several nodes' dumps concatenated. Imports only messages of ``vhost``. ``exchanges``: targets by
    exchange, where an empty key keeps the message's own; other messages go to the exchange of the same name."""

    name = "delayed-exchange"
    vhost: bytes
    exchanges: Mapping[bytes, Target] = field(default_factory=dict)

    def more_parameters(self) -> Mapping[str, object]:
        to = {
            as_text(name): [as_text(target.exchange), as_text(target.routing_key)]
            for name, target in self.exchanges.items()
        }
        return {"vhost": as_text(self.vhost), "exchanges": to}

    def read(self, line: bytes) -> LineReading:
        if line.strip() in _NOTHING:
            return None
        if _NUMBER.fullmatch(line.strip()):
            return int(line)
        fields = line.split(b" ")
        if len(fields) != 6:
            raise Unreadable(f"expected 6 fields between blanks, found {len(fields)}")
        if not _NUMBER.fullmatch(fields[0]):
            raise Unreadable("expected the due instant in milliseconds in the first field")
        try:
            vhost, exchange, keys, properties, body = (base64.b64decode(one, validate=True) for one in fields[1:])
        except (binascii.Error, ValueError):
            raise Unreadable("expected base64 behind the first field") from None
        if vhost != self.vhost:
            return SkippedRecord(f"of virtual host {as_text(vhost)!r}")
        routing_key, *more_keys = keys.split(b"\0")
        if max(map(len, (exchange, routing_key, *more_keys))) > 255:
            raise Unreadable("expected names of at most 255 bytes")
        try:
            properties = _with_blind_copies(properties, more_keys)
        except (MalformedProperties, MalformedTable) as error:
            raise Unreadable(f"the property bytes are broken: {error}") from error
        to = self.exchanges.get(exchange, Target(exchange, b""))
        target = to if to.routing_key else to._replace(routing_key=routing_key)
        parcel = Parcel(int(fields[0]), exchange, exchange, routing_key, target, properties, body)
        return self.meant.redirected(ImportItem(parcel))
