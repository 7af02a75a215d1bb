"""Messages and schedules as lines of JSON, for `delayer export` and `delayer import jsonl`. Exact to the byte. Pure.

A line is an object. Programs that write such lines may omit fields with a default::

    {"v": 1, "due_ms": 1795604393876, "route": "mail.in", "exchange": "mail.in", "routing_key": "outbox",
     "to_exchange": "mail.out", "to_key": "outbox", "key": "order-7", "properties_b64": "EAAC", "body": "hello",
     "since_ms": 1795604093876, "crc": 3735928559, "token": "30a6aca3c8ea4ae8a9a83c9bd2a3c2ab",
     "held": {"kind": "nacked", "text": "nacked", "may_be_delivered": true, "isolated": false}}

A byte string that is not UTF-8 is in base64, and its name ends with ``_b64``. ``properties_b64`` is the payload of the
content header after class, weight and body size; the default is only delivery mode 2 (persistent). Unknown fields are
errors, since a misspelt ``body`` would give an empty message. ``crc`` is the store's checksum over exchange, routing
key, properties and body. A line with a wrong ``crc`` is held, not sent. ``since_ms``, only with ``key``, is when the
message, or the first one of its burst (KeyMode), was parked. ``token``, only with ``held``, is the ``x-delayer-id`` of
a message published and held before it waited (core/hold.py), so its copies have that id. Other imported messages get
new ids, because ids of one store mean other messages in another.

A line with ``schedule``, a name, is a schedule, with how far it has come. It also represents the occurrence that waits,
which has no separate line. Its fields are those of the table ``schedule``. The last line, such as ``{"v": 1,
"messages": 1000}``, has the number of messages and schedules, so that a reader detects a truncated file.
"""

from __future__ import annotations

import base64
import difflib
import json
from dataclasses import asdict
from typing import Any, Final, NamedTuple
from uuid import UUID

from delayer.amqp.values import SHORT_STRING
from delayer.core.delay_headers import quote_value
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import Parcel, Target
from delayer.core.readable import escaped, parser_error
from delayer.core.units import LATEST_MS
from delayer.format.rows import reason_text
from delayer.schedule.record import ScheduleRecord
from delayer.schedule.rhythm import Cron, Every, Rhythm
from delayer.schedule.schedule import ONCE, Schedule, ScheduleState, problems

VERSION: Final = 1
_ANY: Final = 1 << 40  # No limit.
PERSISTENT: Final = b"\x10\x00\x02"
_NAMES: Final = ("route", "exchange", "routing_key", "to_exchange", "to_key", "key", "body")
_FIELDS: Final = frozenset(
    (
        "v",
        "due_ms",
        *_NAMES,
        *(f"{name}_b64" for name in (*_NAMES, "properties", "token")),
        "since_ms",
        "crc",
        "held",
        "token",
    )
)
_HELD_FIELDS: Final = frozenset(("kind", "text", "may_be_delivered", "isolated"))
_END_FIELDS: Final = frozenset(("v", "messages"))
_OF_SCHEDULE: Final = ("to_exchange", "to_key", "properties", "body")
_COUNTS: Final = ("made", "missed", "settled_ms", "waiting_ms", "made_ms", "late_ms")
_RHYTHM: Final = ("cron", "zone", "period_ms", "first_ms", "last_ms", "catch_up", "jitter_ms", "max")
_TEXTS: Final = ("schedule", "id", "state", "why", "cron", "zone")
_SCHEDULE_FIELDS: Final = frozenset(
    ("v", *_TEXTS, *_RHYTHM, *_COUNTS, *_OF_SCHEDULE, *(f"{name}_b64" for name in _OF_SCHEDULE))
)


class NotALine(ValueError):
    """A line is not in this format. The text names the expected and the found value."""


class Line(NamedTuple):
    """A message, its optional checksum, and why it was held, if it was."""

    parcel: Parcel
    crc: int | None = None
    held: Hold | None = None


class EndLine(NamedTuple):
    """The last line, with the number of messages."""

    messages: int


def format_line(line: Line) -> bytes:
    """Format one line, with its line end."""
    parcel = line.parcel
    record: dict[str, Any] = {"v": VERSION, "due_ms": parcel.due_ms}
    values = (
        parcel.route, parcel.exchange, parcel.routing_key, parcel.target.exchange, parcel.target.routing_key,
        parcel.key, parcel.body,
    )  # fmt: skip
    for name, value in zip(_NAMES, values, strict=True):
        if value is not None:
            _put(record, name, value)
    record["properties_b64"] = base64.b64encode(parcel.properties).decode()
    if parcel.since_ms is not None:
        record["since_ms"] = parcel.since_ms
    if line.crc is not None:
        record["crc"] = line.crc
    if line.held is not None:
        record["held"] = asdict(line.held)
        if parcel.token:
            _put(record, "token", parcel.token)
    return _dumped(record)


def format_schedule_line(record: ScheduleRecord) -> bytes:
    """Format the line of a schedule, with its line end."""
    schedule, rhythm = record.schedule, record.schedule.rhythm
    cron, zone, period_ms = (
        (None, None, rhythm.period_ms) if isinstance(rhythm, Every) else (rhythm.expression, rhythm.zone, None)
    )
    values = (
        cron, zone, period_ms, rhythm.first_ms, schedule.last_ms, schedule.catch_up, schedule.jitter_ms,
        schedule.max_occurrences,
    )  # fmt: skip
    numbers = dict(zip(_RHYTHM, values, strict=True)) | {name: getattr(record, name) for name in _COUNTS}
    line: dict[str, Any] = {"v": VERSION, "schedule": record.name, "id": str(schedule.id), "state": record.state}
    line |= {name: value for name, value in (numbers | {"why": record.why or None}).items() if value is not None}
    for name, raw in zip(_OF_SCHEDULE, (*schedule.target, schedule.properties, schedule.body), strict=True):
        _put(line, name, raw)
    return _dumped(line)


def format_end_line(messages: int) -> bytes:
    return _dumped({"v": VERSION, "messages": messages})


def _dumped(record: dict[str, Any]) -> bytes:
    return escaped(json.dumps(record, ensure_ascii=False, separators=(",", ":"))).encode() + b"\n"


def _put(record: dict[str, Any], name: str, value: bytes) -> None:
    try:
        record[name] = value.decode()
    except UnicodeDecodeError:
        record[f"{name}_b64"] = base64.b64encode(value).decode()


def parse_line(text: bytes) -> Line | ScheduleRecord | EndLine:
    """Parse a line into a message, a schedule or the end. Raises NotALine."""
    try:
        record = json.loads(text)
    except ValueError as error:
        raise NotALine(f"expected a JSON object, found something else: {parser_error(error)}") from None
    except RecursionError:
        raise NotALine("expected a JSON object, found one that is nested too deeply") from None
    if not isinstance(record, dict):
        raise NotALine(f"expected a JSON object, found {_kind(record)}")
    if record.get("v") != VERSION:
        raise NotALine(f"expected version {VERSION} of the format, found {record.get('v')!r}")
    if "messages" in record and "due_ms" not in record:
        _known(record, _END_FIELDS)
        return EndLine(_integer(record, "messages"))
    if "schedule" in record:
        return _schedule(record)
    _known(record, _FIELDS)
    exchange, routing_key = _get(record, "exchange", b""), _get(record, "routing_key", b"")
    parcel = Parcel(
        _integer(record, "due_ms"),
        _get(record, "route", b""),
        exchange,
        routing_key,
        Target(_get(record, "to_exchange", exchange), _get(record, "to_key", routing_key)),
        _get(record, "properties", PERSISTENT, _ANY),
        _get(record, "body", b"", _ANY),
        _get(record, "key", b"") if "key" in record or "key_b64" in record else None,
        _get(record, "token", b""),
        since_ms=_integer(record, "since_ms") if "since_ms" in record else None,
    )
    crc = _integer(record, "crc") if "crc" in record else None
    held = _hold(record["held"]) if "held" in record else None
    if parcel.token and held is None:
        raise NotALine("token: expected beside held, found without it")
    return Line(parcel, crc, held)


def _schedule(record: dict[str, Any]) -> ScheduleRecord:
    _known(record, _SCHEDULE_FIELDS)
    numbers = {name: _integer(record, name) for name in (*_RHYTHM[2:], *_COUNTS) if record.get(name) is not None}
    for name in _COUNTS:
        if abs(numbers.get(name, 0)) > LATEST_MS:
            raise NotALine(f"{name}: expected at most {LATEST_MS}, found {quote_value(numbers[name])}")
    texts = {name: reason_text(_text(record, name)) for name in _TEXTS}
    try:
        id_, state = UUID(texts["id"]), ScheduleState(texts["state"])
    except ValueError as wrong:
        raise NotALine(f"expected the id and the state of a schedule, found something else: {wrong}") from None
    first_ms = numbers.get("first_ms", 0)
    rhythm: Rhythm = Cron(texts["cron"], texts["zone"] or "UTC", first_ms)
    if not texts["cron"]:
        rhythm = Every(_integer(record, "period_ms"), first_ms)
    schedule = Schedule(
        id_, texts["schedule"], Target(_get(record, "to_exchange", b""), _get(record, "to_key", b"")), rhythm,
        _get(record, "properties", PERSISTENT, _ANY), _get(record, "body", b"", _ANY), numbers.get("last_ms"),
        numbers.get("catch_up", ONCE), numbers.get("jitter_ms", 0), numbers.get("max"),
    )  # fmt: skip
    if wrong_ones := problems(schedule, 0, failed=state is ScheduleState.FAILED):
        raise NotALine("; ".join(wrong_ones))
    if (state is ScheduleState.ACTIVE) != ("waiting_ms" in numbers):
        raise NotALine(f"waiting_ms: expected with an active schedule, and only then, found the state {state}")
    return ScheduleRecord(
        schedule,
        state,
        texts["why"],
        numbers.get("made", 0),
        numbers.get("missed", 0),
        numbers.get("settled_ms"),
        numbers.get("waiting_ms"),
        made_ms=numbers.get("made_ms"),
        late_ms=numbers.get("late_ms"),
    )


def _text(record: dict[str, Any], name: str) -> str:
    value = record.get(name, "")
    if not isinstance(value, str):
        raise NotALine(f"{name}: expected a string, found {_kind(value)}")
    return value


def _hold(record: object) -> Hold:
    if not isinstance(record, dict):
        raise NotALine(f"held: expected an object, found {_kind(record)}")
    _known(record, _HELD_FIELDS)
    kind, text = record.get("kind"), record.get("text", "")
    if kind not in tuple(HoldKind):
        raise NotALine(f"held.kind: expected one of {', '.join(HoldKind)}, found {kind!r}")
    if not isinstance(text, str):
        raise NotALine(f"held.text: expected a string, found {_kind(text)}")
    flags = [record.get(name, False) for name in ("may_be_delivered", "isolated")]
    if not all(type(flag) is bool for flag in flags):
        raise NotALine("held: expected true or false for may_be_delivered and isolated, found something else")
    return Hold(HoldKind(kind), text, *flags)


def _known(record: dict[str, Any], fields: frozenset[str]) -> None:
    """Check the field names. Raises NotALine for an unknown field, or for a field in both spellings."""
    for name in record:
        if name not in fields:
            near = difflib.get_close_matches(name, sorted(fields), 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(fields))}"
            raise NotALine(f"expected a known field, found {name!r} ({hint})")
        if name.endswith("_b64") and (plain := name.removesuffix("_b64")) in record:
            raise NotALine(f"expected {plain} or {name}, found both")


def _get(record: dict[str, Any], name: str, default: bytes, longest: int = SHORT_STRING) -> bytes:
    """Return the bytes of a field in either spelling. Raises NotALine."""
    spelled = f"{name}_b64" if f"{name}_b64" in record else name
    if spelled not in record:
        return default
    value = record[spelled]
    if not isinstance(value, str):
        raise NotALine(f"{spelled}: expected a string, found {_kind(value)}")
    try:
        found = value.encode() if spelled == name else base64.b64decode(value, validate=True)
    except ValueError:  # JSON can contain half of a surrogate pair.
        expected = f"characters; put other bytes into {name}_b64" if spelled == name else "base64"
        raise NotALine(f"{spelled}: expected {expected}") from None
    if len(found) > longest:
        raise NotALine(f"{spelled}: expected at most {longest} bytes, found {len(found)}")
    return found


def _integer(record: dict[str, Any], name: str) -> int:
    value = record.get(name)
    if type(value) is not int:
        raise NotALine(f"{name}: expected an integer, found {_kind(value)}")
    return value


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
