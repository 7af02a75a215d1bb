"""Sources that are files, a record a line, read twice, in constant memory: `jsonl` (our own export, core/lines.py) and
`delayed-exchange` (a dump of what the delayed-message plugin holds).

*Staging* reads the whole file once and notes in the store where each record stands and when it is due; the run then
reads the records in that order. The file itself is never changed, and must stay as it is until the run is done: its
digest stands among the parameters, and before a batch is given out its size and the time of its last change must be
those of when the digest was made.

A dump is made on each node of the broker by one `rabbitmqctl eval` (docs/importing.md). A line is a message, fields
between blanks: the due instant in epoch milliseconds, then base64 of virtual host, exchange, routing keys with NUL
between them, property bytes, and body. The last line says how many there are.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from delayer.amqp.properties import MalformedProperties, MalformedTable, Properties, entry, long_string, splice
from delayer.core import lines
from delayer.core.hold import Hold, unfit
from delayer.core.importing import UNREADABLE, Batch, Item, Meant, Rewrite, Run, Survey, redirected, rewriting
from delayer.core.lines import End, Line, NotALine
from delayer.core.message import Parcel, Target
from delayer.core.plan import LATEST_MS
from delayer.imports.state_machine import ImportImpossible, Notes, SourceLost
from delayer.store.rows.envelope import checksum


def opened(path: Path) -> BufferedReader:
    """At its beginning."""
    try:
        return path.open("rb")
    except OSError as error:
        raise SourceLost(f"{path}: {error.strerror}") from error


def lines_in(path: Path) -> Iterator[bytes]:
    """All of them, with their ends."""
    with opened(path) as file:
        try:
            yield from file
        except OSError as error:
            raise SourceLost(f"{path}: {error.strerror}") from error


def seen_now(path: Path) -> tuple[int, int, int]:
    """What differs where the file is another one, or was written to."""
    try:
        found = path.stat()
    except OSError as error:
        raise SourceLost(f"{path}: {error.strerror}") from error
    return found.st_ino, found.st_size, found.st_mtime_ns


def digest(path: Path) -> str:
    """By which it is known again."""
    with opened(path) as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise SourceLost(f"{path}: {error.strerror}") from error


BATCH: Final = 2_000
BATCH_BYTES: Final = 8 << 20
NAMED: Final = 10
"""Unreadable lines that are told one by one."""
_BEFORE: Final = (-(1 << 62), -1)
"""Before every record's place."""
BEFORE_DUE: Final = "due before the cutoff"
BEYOND_LIMIT: Final = "beyond the limit"


class Unreadable(ValueError):
    """A line that is no record. The message completes "line 7: …"."""


class Skipped(NamedTuple):
    """A record that is not meant, and why."""

    why: str


Reading = Item | Skipped | None
"""What a line is; None for one that says nothing."""


class FileSource(ABC):
    """Satisfies ports.Source, but for :meth:`read`. ``more``: the parameters that reading depends on."""

    def __init__(
        self,
        name: str,
        path: Path,
        meant: Meant,
        rewrites: Sequence[Rewrite] = (),
        more: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.path = path
        self.records = 0
        """Lines that are not empty, as the last look found them."""
        self._meant = meant
        self._rewrites = rewrites
        self._more = {**more, **rewriting(rewrites)}
        self._parameters: dict[str, object] | None = None
        self._state: tuple[int, int, int] | None = None
        self._notes: Notes | None = None
        self._file: BufferedReader | None = None
        self._run: Run | None = None
        self._after = _BEFORE
        self._survey: Survey | None = None

    @abstractmethod
    def read(self, line: bytes) -> Reading:
        """The message of a line, without its end. Raises Unreadable."""

    def noting(self, notes: Notes) -> FileSource:
        """With the place where the order of the records is noted; a survey needs none."""
        self._notes = notes
        return self

    @property
    def parameters(self) -> dict[str, object]:
        """Raises SourceLost."""
        if self._parameters is None:
            self._state = seen_now(self.path)
            self._parameters = {
                "file": str(self.path.resolve()),
                "sha256": digest(self.path),
                **self._more,
                **self._meant.as_dict(),
            }
        return self._parameters

    async def survey(self, unfinished: Run | None = None, *, thorough: bool = False) -> Survey:
        """See the port. What cannot be read is left, and told. Every line is read at any rate."""
        if self._survey is None:
            self._survey = self.look()
            if unfinished is None and self._notes is not None:
                for earlier, messages in await self._notes.brought(self.name, str(self.parameters["sha256"])):
                    self._survey.brought.append(earlier)
                    self._survey.doubt(
                        f"import {earlier} brought {messages:,} messages of this very file: what both are meant to "
                        "bring comes in twice, and is delivered twice"
                    )
            if thorough and self._notes is not None:
                await self._add_superseded(self._survey, self._notes, unfinished)
        return self._survey

    async def _add_superseded(self, survey: Survey, notes: Notes, unfinished: Run | None) -> None:
        """Count what would not be parked, as a message waits under its key; of a limit all of the file."""
        done = _BEFORE if unfinished is None or unfinished.progress is None else tuple(json.loads(unfinished.progress))
        portion: list[tuple[int, bytes]] = []
        for number, position, _, reading in self._records(None):
            if not isinstance(reading, Item) or reading.hold is not None or reading.parcel.key is None:
                continue
            parcel = reading.parcel
            if self._meant.includes(parcel.due_ms) and (parcel.due_ms, position) > done:
                portion.append((number, reading.parcel.key))
            # Records that are noted at once.
            if len(portion) == 10_000:
                await self._supersede(survey, notes, portion)
                portion = []
        await self._supersede(survey, notes, portion)

    async def _supersede(self, survey: Survey, notes: Notes, portion: Sequence[tuple[int, bytes]]) -> None:
        waiting = await notes.waiting_under({key for _, key in portion}) if portion else set()
        found = [(number, key) for number, key in portion if key in waiting]
        for number, key in found[: max(0, NAMED - survey.superseded)]:
            survey.remarks.append(f"line {number}: will not be imported: a message waits under its key {_shown(key)}")
        survey.superseded += len(found)

    def look(self) -> Survey:
        """Read it all, and count."""
        survey = Survey()
        limit = self._meant.limit
        soonest: list[_Seen] = []
        found = self.records = 0
        for number, position, _, reading in self._records(survey):
            if isinstance(reading, Item) and self._meant.includes(reading.parcel.due_ms):
                found += 1
                parcel = reading.parcel
                seen = _Seen(-parcel.due_ms, -position, number, parcel.target, reading.hold)
                # Records that a look keeps in mind at most, to tell of the soonest only. Of a limit beyond that it
                # tells what all of the file has.
                if limit is None or limit > 100_000:
                    seen.tell(survey)
                elif len(soonest) < limit:
                    heappush(soonest, seen)
                else:
                    heappushpop(soonest, seen)
            elif isinstance(reading, Item):
                survey.leave(BEFORE_DUE)
            elif reading is not None:
                survey.leave(reading.why)
        for seen in sorted(soonest, reverse=True):
            seen.tell(survey)
        if limit is not None and found > limit:
            survey.leave(BEYOND_LIMIT, found - limit)
            survey.messages = limit
        return survey

    def _records(self, survey: Survey | None) -> Iterator[tuple[int, int, int, Reading]]:
        """Every line's number, place, length, and what it is. ``survey`` hears of the unreadable ones."""
        position = 0
        unreadable = 0
        for number, line in enumerate(lines_in(self.path), 1):
            self.records += bool(line.strip())
            try:
                yield number, position, len(line), self._checked(line)
            except Unreadable as why:
                unreadable += 1
                if survey is not None:
                    survey.leave(UNREADABLE)
                    if unreadable <= NAMED:
                        survey.doubt(f"line {number} is unreadable: {why}")
            position += len(line)

    def _checked(self, line: bytes) -> Reading:
        reading = self.read(line.rstrip(b"\r\n"))
        if not isinstance(reading, Item):
            return reading
        if not 0 <= reading.parcel.due_ms <= LATEST_MS:
            raise Unreadable(f"expected a due instant of 0 to {LATEST_MS} ms, found {reading.parcel.due_ms}")
        return redirected(reading, self._rewrites)

    async def stage(self, run: Run) -> int:
        """See the port."""
        notes = self._noted()
        count = await notes.write_items(run, self._portions())
        if self._meant.limit is not None and count > self._meant.limit:
            count = await notes.keep_items(run, self._meant.limit)
        return count

    async def _portions(self) -> AsyncIterator[Sequence[tuple[int, int, int]]]:
        portion: list[tuple[int, int, int]] = []
        for _, position, size, reading in self._records(None):
            if isinstance(reading, Item) and self._meant.includes(reading.parcel.due_ms):
                portion.append((reading.parcel.due_ms, position, size))
                if len(portion) == 10_000:
                    yield portion
                    portion = []
        if portion:
            yield portion

    async def resume(self, run: Run) -> None:
        """See the port. Nothing is removed: what is committed is passed over."""
        self._run = run
        if run.progress is not None:
            due_ms, position = json.loads(run.progress)
            self._after = (due_ms, position)

    async def next_batch(self) -> Batch | None:
        """See the port."""
        assert self._run is not None
        places = await self._noted().read_items(self._run, self._after, BATCH)
        if not places:
            return None
        items: list[Item] = []
        size = 0
        for due_ms, position, length in places:
            reading = self._read_at(position, length)
            if not isinstance(reading, Item) or reading.parcel.due_ms != due_ms:
                raise ImportImpossible(f"{self.path}: it changed since it was staged (at byte {position})")
            items.append(reading)
            self._after = (due_ms, position)
            size += length
            if size >= BATCH_BYTES:
                break
        if self._state not in (None, seen_now(self.path)):
            raise ImportImpossible(f"{self.path}: it changed since it was staged")
        return Batch(items, json.dumps(self._after))

    def _read_at(self, position: int, length: int) -> Reading:
        if self._file is None:
            self._file = opened(self.path)
        try:
            self._file.seek(position)
            return self._checked(self._file.read(length))
        except Unreadable:
            return None
        except OSError as error:
            raise SourceLost(f"{self.path}: {error.strerror}") from error

    async def remove(self, batch: Batch) -> int:
        """See the port. The file stays as it is."""
        return len(batch.items) + batch.again

    async def finish(self) -> dict[str, int]:
        """See the port."""
        return dict((await self.survey()).left)

    async def put_back(self, run: Run) -> int:
        """See the port. Nothing was taken."""
        return (run.staged or 0) - run.committed

    async def close(self) -> None:
        """See the port."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _noted(self) -> Notes:
        if self._notes is None:
            raise RuntimeError("a source of a file was staged without a place for its notes")
        return self._notes


def _shown(key: bytes) -> str:
    return repr(key.decode(errors="replace"))


class _Seen(NamedTuple):
    """A record that is meant; the least of several is the one that is due last."""

    minus_due_ms: int
    minus_position: int
    number: int
    target: Target
    hold: Hold | None

    def tell(self, survey: Survey) -> None:
        problem = "" if self.hold is None else self.hold.text
        survey.add(self.target, -self.minus_due_ms, problem=problem)
        if problem and len(survey.remarks) < NAMED:
            survey.remarks.append(f"line {self.number}: will be held: {problem}")


JSONL = "jsonl"
NOT_SOUND = unfit("the bytes do not fit the checksum that was exported with them")


def read_exported(text: bytes) -> Item | End | None:
    """The message of one line. Raises Unreadable."""
    if not text.strip():
        return None
    try:
        line = lines.read(text)
        if isinstance(line, End):
            return line
        Properties.parse(line.parcel.properties)
    except (NotALine, MalformedProperties) as error:
        raise Unreadable(str(error)) from error
    return Item(line.parcel, _hold(line))


def _hold(line: Line) -> Hold | None:
    parcel = line.parcel
    if line.crc not in (None, checksum(parcel.exchange, parcel.routing_key, parcel.properties, parcel.body)):
        return NOT_SOUND.after(line.held)
    return line.held


class JsonLines(FileSource):
    """The file, and what its last line says of it."""

    def __init__(self, path: Path, meant: Meant, rewrites: Sequence[Rewrite] = ()) -> None:
        super().__init__(JSONL, path, meant, rewrites)
        self._ends: list[int] = []

    def read(self, line: bytes) -> Reading:
        """See FileSource."""
        found = read_exported(line)
        if isinstance(found, End):
            self._ends.append(found.messages)
            return None
        return found

    def look(self) -> Survey:
        """See FileSource. Raises ImportImpossible for a file that was cut."""
        self._ends.clear()
        survey = super().look()
        found = self.records - len(self._ends)
        if not self._ends:
            survey.doubt("the file does not say how many messages it has: whether it was cut is not known")
        elif sum(self._ends) != found:
            raise ImportImpossible(
                f"{self.path}: expected {sum(self._ends)} messages by its last line, found {found}: it was cut, or "
                "lines are missing"
            )
        return survey


DELAYED_EXCHANGE: Final = "delayed-exchange"
_NOTHING: Final = (b"", b"ok")


@dataclass(frozen=True, slots=True)
class Plan:
    """What of a dump is meant, and where it goes: messages of ``vhost``; those of an exchange in ``exchanges`` to the
    target there (an empty key keeps the message's own), those of any other to the exchange of the same name."""

    vhost: bytes
    exchanges: Mapping[bytes, Target] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        to = {
            _text(name): [_text(target.exchange), _text(target.routing_key)] for name, target in self.exchanges.items()
        }
        return {"vhost": _text(self.vhost), "exchanges": to}

    def target(self, exchange: bytes, routing_key: bytes) -> Target:
        found = self.exchanges.get(exchange)
        return (
            Target(exchange, routing_key) if found is None else Target(found.exchange, found.routing_key or routing_key)
        )


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def read_dumped(line: bytes, plan: Plan) -> Item | Skipped | int | None:
    """The message of a line; the number that the last one says; None for one that says nothing. Raises Unreadable."""
    if line.strip() in _NOTHING:
        return None
    if line.strip().isdigit():
        return int(line)
    fields = line.split(b" ")
    if len(fields) != 6:
        raise Unreadable(f"expected {6} fields between blanks, found {len(fields)}")
    if not fields[0].isdigit():
        raise Unreadable("expected the due instant in milliseconds in the first field")
    try:
        vhost, exchange, keys, properties, body = (base64.b64decode(text, validate=True) for text in fields[1:])
    except (binascii.Error, ValueError):
        raise Unreadable("expected base64 behind the first field") from None
    if vhost != plan.vhost:
        return Skipped(f"of virtual host {_text(vhost)!r}")
    routing_keys = keys.split(b"\0")
    if max(map(len, (exchange, *routing_keys))) > 255:
        raise Unreadable(f"expected names of at most {255} bytes")
    try:
        properties = _with_blind_copies(properties, routing_keys[1:])
    except (MalformedProperties, MalformedTable) as error:
        raise Unreadable(f"the property bytes are broken: {error}") from error
    target = plan.target(exchange, routing_keys[0])
    return Item(Parcel(int(fields[0]), exchange, exchange, routing_keys[0], target, properties, body))


def _with_blind_copies(properties: bytes, more_keys: Sequence[bytes]) -> bytes:
    """A message has more keys than one by its headers CC and BCC. The broker took the second away when it came in."""
    found = Properties.parse(properties)
    field_of_copies = found.get(b"CC")
    told = field_of_copies.value if field_of_copies is not None else []
    copies = {one.encode() if isinstance(one, str) else one for one in told} if isinstance(told, list) else set()
    blind = [key for key in more_keys if key not in copies]
    if not blind:
        return properties
    content = b"".join(map(long_string, blind))
    return splice(found, append=entry(b"BCC", b"A" + len(content).to_bytes(4, "big") + content))


class DelayedExchange(FileSource):
    """The dump; several of several nodes may be put one behind the other."""

    def __init__(self, path: Path, plan: Plan, meant: Meant, rewrites: Sequence[Rewrite] = ()) -> None:
        super().__init__(DELAYED_EXCHANGE, path, meant, rewrites, plan.as_dict())
        self._plan = plan
        self._ends: list[int] = []

    def read(self, line: bytes) -> Reading:
        """See FileSource."""
        found = read_dumped(line, self._plan)
        if isinstance(found, int):
            self._ends.append(found)
            return None
        return found

    def look(self) -> Survey:
        """See FileSource. Raises ImportImpossible for a dump that was cut."""
        self._ends.clear()
        survey = super().look()
        found = (survey.messages or 0) + sum(survey.left.values())
        if not self._ends:
            survey.doubt("the dump does not say how many messages it has: whether it was cut is not known")
        elif sum(self._ends) != found:
            raise ImportImpossible(
                f"{self.path}: expected {sum(self._ends)} messages by its last line, found {found}: it was cut"
            )
        return survey
