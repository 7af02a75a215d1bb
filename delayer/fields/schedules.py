"""The fields of a schedule as operators write them: the options of `delayer schedule add` and `edit`, and the keys of a
TOML file. Every field is read by the same function, and a schedule is changed by the fields that were given."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from datetime import date, datetime
from types import MappingProxyType
from typing import Any, Final
from uuid import uuid4

from delayer.amqp.properties import Properties, changed, encode_headers
from delayer.amqp.values import SHORT_STRING
from delayer.config.errors import Expected, format_found
from delayer.config.texts import check_headers, duration_text, instant_ms, read_base64
from delayer.config.values import duration_ms
from delayer.core.message import Target, as_text, raw
from delayer.core.readable import instant, parser_error
from delayer.format import reading
from delayer.format.from_json import encode_property, encode_table
from delayer.schedule.rhythm import Cron, Every, Rhythm
from delayer.schedule.schedule import MOST_CAUGHT_UP, NAME, ONCE, SKIP, Schedule, is_name, problems
from delayer.store.errors import ScheduleRefused

NEVER: Final = "never"
MOST_DIGITS: Final = 19
_CATCH_UP: Final = {"skip": SKIP, "once": ONCE, "all": MOST_CAUGHT_UP}
_SHORT: Final = (
    "content_type", "content_encoding", "correlation_id", "reply_to", "expiration", "type", "app_id",
)  # fmt: skip
_PROPERTIES: Final = (*_SHORT, "priority")
_EITHER: Final = (("cron", "every"), ("body", "body_b64"))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise Expected("a text")
    try:
        raw(value)
    except UnicodeEncodeError:  # JSON may have half of a surrogate pair.
        raise Expected("a text in UTF-8") from None
    return value


def _instant(value: object) -> int:
    if isinstance(value, datetime | date):  # a time of TOML
        value = value.isoformat()
    return instant_ms(value if isinstance(value, str) else "")


def _last(value: object) -> int | None:
    return None if value == NEVER else _instant(value)


def _whole(value: object) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) <= MOST_DIGITS:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 10**MOST_DIGITS:
        raise Expected(f"a whole number of at most {MOST_DIGITS} digits")
    return value


def _catch_up(value: object) -> int:
    if isinstance(value, str) and value in _CATCH_UP:
        return _CATCH_UP[value]
    try:
        return _whole(value)
    except Expected:
        raise Expected(f"skip, once, all (up to {MOST_CAUGHT_UP:,}), or a number") from None


def _body(value: object) -> bytes:
    return raw(_text(value))


def _properties(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Expected("a table of properties")
    return {name: _property(name, one) for name, one in value.items()}


def _property(name: str, value: object) -> str | int:
    """A property of the message; "" means none."""
    if name not in _PROPERTIES:
        raise Expected(f"properties of {', '.join(_PROPERTIES)}, found {format_found(name)}")
    if value == "":
        return ""
    if name == "priority":
        if (number := _whole(value)) > SHORT_STRING:
            raise Expected("a priority of 0 to 255")
        return number
    try:  # An argument may have bytes that are not UTF-8.
        fits = isinstance(value, str) and len(_text(value).encode()) <= SHORT_STRING
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise Expected(f"{name} as UTF-8 text of at most {SHORT_STRING} bytes")
    return str(value)


FIELDS: Final[Mapping[str, Callable[[object], Any]]] = {
    "cron": _text, "every": duration_ms, "zone": _text, "first": _instant, "last": _last, "to": _text,
    "routing_key": _text, "headers": check_headers, "properties": _properties, "body": _body, "body_b64": read_base64,
    "catch_up": _catch_up, "jitter": duration_ms, "max": _whole,
}  # fmt: skip
"""The reader of each field. It raises Expected."""


def name_of(text: str) -> str:
    """Check that a schedule can have this name. Raises Expected."""
    if not is_name(text):
        raise Expected(f"the name of a schedule: {NAME}")
    return text


def name_or_none(text: str) -> str:
    """The name after which a list begins; "" for its beginning. Raises Expected."""
    return name_of(text) if text else ""


def read_fields(table: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, str]]:
    """Read each field by FIELDS. Returns the values, and what is wrong with the others, both by name."""
    given: dict[str, Any] = {}
    unread: dict[str, str] = {}
    for name, value in table.items():
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(FIELDS)}"
            unread[name] = f"expected a known field, found this one ({hint})"
            continue
        try:
            given[name] = FIELDS[name](value)
        except Expected as expected:
            found = "" if ", found " in str(expected) else f", found {format_found(value)}"
            unread[name] = f"expected {expected}{found}"
    return given, unread


def mistakes(unread: Mapping[str, str]) -> list[str]:
    return [f"{name}: {what}" for name, what in unread.items()]


def new_schedule(name: str, given: Mapping[str, Any], unread: Mapping[str, str] = MappingProxyType({})) -> Schedule:
    """Compose a schedule of the fields given. ``unread``: as from :func:`read_fields`. If anything is wrong, raises
    ScheduleRefused with that, and with all that the rules find in the rest."""
    wrong, known = mistakes(unread), given.keys() | unread.keys()
    if "to" not in known:
        wrong.append("to: expected the exchange of its messages, found none")
    if not {"cron", "every"} & known:
        wrong.append("cron: expected a rhythm, by cron or every, found neither")
    plain = Schedule(uuid4(), name, Target(b"", b""), Cron("@daily"), encode_headers())
    wrong += _conflicts(known, plain.rhythm)
    if not wrong:
        return with_fields(plain, given)
    unfit = {one.partition(":")[0] for one in wrong}
    unfit |= {other for one, other in _EITHER if one in unfit}
    rest = {name: value for name, value in given.items() if name not in unfit}
    raise ScheduleRefused([*wrong, *problems(with_fields(plain, rest), 0)])


def _conflicts(names: Collection[str], rhythm: Rhythm) -> list[str]:
    """What is wrong with giving these fields together to a schedule of this rhythm."""
    wrong = [f"{one}: expected {one} or {other}, found both" for one, other in _EITHER if {one, other} <= {*names}]
    if "zone" in names and "cron" not in names and ("every" in names or isinstance(rhythm, Every)):
        wrong.append("zone: expected with cron only, because an interval is elapsed time, found it here")
    return wrong


def with_fields(schedule: Schedule, given: Mapping[str, Any]) -> Schedule:
    """``schedule`` with these fields, which were read by FIELDS. Raises ScheduleRefused."""
    if wrong := _conflicts(given, schedule.rhythm):
        raise ScheduleRefused(wrong)
    target = schedule.target
    if "to" in given:
        target = target._replace(exchange=raw(given["to"]))
    if "routing_key" in given:
        target = target._replace(routing_key=raw(given["routing_key"]))
    names = {"last": "last_ms", "catch_up": "catch_up", "jitter": "jitter_ms", "body": "body", "body_b64": "body"}
    values = {names[name]: value for name, value in given.items() if name in names}
    if "max" in given:
        values["max_occurrences"] = given["max"] or None
    if "headers" in given or "properties" in given:
        values["properties"] = _encode(schedule.properties, given.get("headers"), given.get("properties", {}))
    return replace(schedule, rhythm=_rhythm(schedule.rhythm, given), target=target, **values)


def _rhythm(before: Rhythm, given: Mapping[str, Any]) -> Rhythm:
    first_ms = given.get("first", before.first_ms)
    if "every" in given or (isinstance(before, Every) and "cron" not in given):
        period_ms = given.get("every", before.period_ms if isinstance(before, Every) else 0)
        return Every(period_ms, first_ms)
    expression, zone = (before.expression, before.zone) if isinstance(before, Cron) else ("", "UTC")
    return Cron(given.get("cron", expression), given.get("zone", zone), first_ms)


def _encode(before: bytes, headers: Mapping[str, Any] | None, named: Mapping[str, Any]) -> bytes:
    """Replace the whole table of headers, unless that is None, and each property that is named."""
    given = {name: value for name, value in named.items() if value != ""}
    values = {name: encode_property(name, one) for name, one in given.items()}
    if headers is not None:
        values["headers"] = encode_table(headers)
    return changed(Properties.parse(before), values, named.keys() - given.keys())


def read_schedules(text: bytes) -> list[Schedule]:
    """Read the tables [schedule.NAME] of a TOML file. Raises ScheduleRefused with every mistake."""
    try:
        content = tomllib.loads(text.decode())
    except ValueError as error:
        raise ScheduleRefused([f"expected TOML, found something else: {parser_error(error)}"]) from None
    except RecursionError:
        raise ScheduleRefused(["expected TOML, found something else: too many levels"]) from None
    wrong = [f"{name}: expected nothing but tables [schedule.NAME], found it" for name in content if name != "schedule"]
    tables = content.get("schedule", {})
    if not isinstance(tables, dict):
        tables, wrong = {}, [*wrong, f"schedule: expected tables [schedule.NAME], found {format_found(tables)}"]
    found = []
    for name, table in tables.items():
        if not isinstance(table, dict):
            wrong.append(f"schedule.{name}: expected a table, found {format_found(table)}")
            continue
        try:
            found.append(new_schedule(name, *read_fields(table)))
        except ScheduleRefused as refused:
            wrong += [f"{name}: {mistake}" for mistake in refused.problems]
    if wrong:
        raise ScheduleRefused([*wrong, *(f"{one.name}: {what}" for one in found for what in problems(one, 0))])
    return found


def texts_of(schedule: Schedule) -> dict[str, str]:
    """The fields of a schedule, each as text; without those that have their default."""
    rhythm, said = schedule.rhythm, reading.decode_properties(schedule.properties, whole=True)
    names = {number: name for name, number in _CATCH_UP.items()}
    texts = {
        "cron": rhythm.expression if isinstance(rhythm, Cron) else "",
        "every": duration_text(rhythm.period_ms) if isinstance(rhythm, Every) else "",
        "zone": rhythm.zone if isinstance(rhythm, Cron) else "",
        "first": instant(rhythm.first_ms) if rhythm.first_ms else "",
        "last": "" if schedule.last_ms is None else instant(schedule.last_ms),
        "to": as_text(schedule.target.exchange),
        "routing_key": as_text(schedule.target.routing_key),
        "headers": json.dumps({one.name: one.value for one in said.headers}) if said.headers else "",
        "properties": json.dumps({name: one for name, one in said.properties.items() if name != "delivery_mode"}),
        "body": reading.preview(schedule.body),
        "catch_up": names.get(schedule.catch_up, str(schedule.catch_up)),
        "jitter": duration_text(schedule.jitter_ms) if schedule.jitter_ms else "",
        "max": "" if schedule.max_occurrences is None else str(schedule.max_occurrences),
    }
    return {name: text for name, text in texts.items() if text not in ("", "{}")}


def differences(before: Schedule, after: Schedule) -> Iterator[tuple[str, str, str]]:
    """The fields that differ: each with its text before and after. Texts may be equal where only a type, or the rest
    of a long body differs."""
    old, new = texts_of(before), texts_of(after)
    found = [(name, old.get(name, "-"), new.get(name, "-")) for name in FIELDS if old.get(name) != new.get(name)]
    yield from found
    if before.body != after.body and not any(name == "body" for name, *_ in found):
        yield "body", f"{len(before.body)} bytes", f"{len(after.body)} other bytes"
    if before.properties != after.properties and not any(name in ("headers", "properties") for name, *_ in found):
        yield "headers", "the same values", "of other types"
