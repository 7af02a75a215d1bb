"""Forms and query strings: their fields, and the filters, instants and message ids in them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import parse_qs

from starlette.requests import ClientDisconnect, Request

from delayer.config.errors import Expected, format_found
from delayer.config.texts import instant_ms, shift_ms, typed_header
from delayer.config.values import duration_ms
from delayer.core import readable
from delayer.core.filters import Filter, Token, read_place, read_token
from delayer.core.hold import HoldKind
from delayer.core.message import raw
from delayer.fields.schedules import name_or_none
from delayer.format.refusal import RetryEdits
from delayer.http.problems import HttpProblem, WrongField, in_words, unknown_field, wrong_field
from delayer.schedule.schedule import ScheduleState
from delayer.store.admin.actions import NewDue

_RAW: Final = ("route", "to_exchange", "to_key", "key", "message_id")
FIELDS: Final = (*_RAW, "header", "due_after", "due_before")
"""A filter's field names in forms and query strings."""
HELD_FIELDS: Final = ("kind", *FIELDS)
"""Field names for held messages, with the kind of the hold."""
NAMES: Final = ("route", "to_exchange", "to_key")
"""Fields that may be empty: messages without a route, the default exchange, the empty routing key."""
DEFAULT_EXCHANGE: Final = "amq.default"
"""Means the default exchange in a search, where an empty field means any. Named as in RabbitMQ's management."""
FIRST: Final = "-"
"""Where the first page begins, in a trail."""
MOST_PAGES: Final = 100
"""Maximum number of pages in a trail, which fit into a URL of 8 KB."""
MOST_NAMED: Final = 1_000
"""Maximum number of messages that a form names."""
MOST_SCHEDULES: Final = 100
"""Maximum number of schedules that a form names."""
BODY_SECONDS: Final = 20.0
"""The longest time for a body to come in."""
T = TypeVar("T")


class FieldError(ValueError):
    """An unreadable field. The text names the field, the value expected and the value found. ``wrong``: the same for
    programs, None if the text names no field."""

    def __init__(self, text: str, wrong: WrongField | None = None) -> None:
        super().__init__(text)
        where, _, expected = text.partition(": expected ")
        self.wrong = wrong_field(where, expected) if wrong is None and expected else wrong


class Search(NamedTuple):
    """A filter, and its values for the form and for links."""

    wanted: Filter
    given: Mapping[str, str]


def searched(query: Mapping[str, str], now_ms: int, fields: Sequence[str] = FIELDS) -> Search:
    """Parse a search's filter. An empty field means any. Raises FieldError."""
    reject_unknown(query, (*fields, "after", "trail", "id"))
    return _read({name: text for name in fields if (text := query.get(name, "").strip())}, now_ms)


class Trail(NamedTuple):
    """The way to a page of a list: the positions after which the full pages before it began, "" for the first page.
    None if unknown, as after a page that ended at its limit."""

    before: tuple[str, ...] | None
    after: str

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Trail:
        after, trail = query.get("after", ""), query.get("trail", "")
        return cls(tuple(trail.split(",")) if trail else () if not after else None, "" if after == FIRST else after)

    def next(self, after: str, *, full: bool) -> dict[str, str]:
        """Build the fields of the next page, which begins after ``after``. ``full``: this page has all its rows."""
        known_way = full and self.before is not None and len(self.before) < MOST_PAGES
        return {"after": after, "trail": ",".join((*(self.before or ()), self.after or FIRST)) if known_way else ""}

    @property
    def previous(self) -> dict[str, str] | None:
        """The fields of the previous page; None on the first page, or if the way is unknown."""
        if not self.before:
            return None
        *before, last = self.before
        return {"after": "" if last == FIRST else last, "trail": ",".join(before)}

    def numbers(self, rows: int, each: int) -> tuple[int, int] | None:
        """Return the numbers of the first and last of these rows in the whole list, with ``each`` rows per page."""
        if self.before is None or not rows:
            return None
        return len(self.before) * each + 1, len(self.before) * each + rows


def meant(form: Mapping[str, Sequence[str]], now_ms: int, fields: Sequence[str] = FIELDS) -> Search:
    """Parse a change's filter. Only ``all=yes`` matches everything, and an empty name is the empty name, as on the
    command line. Raises FieldError."""
    reject_duplicates([name for name, texts in form.items() for _ in texts])
    given = {name: form[name][0].strip() for name in fields if name in form}
    for name, text in given.items():
        if not text and name not in NAMES:
            raise FieldError(f"{name}: expected a value, found nothing; leave the field out, or say all=yes")
    everything = form.get("all", [""])[0]
    if everything not in ("", "yes"):
        raise FieldError(f"all: expected yes, found {everything[:40]!r}")
    if bool(given) == bool(everything):
        found = "both" if given else "none"
        wanted = f"ids, a filter ({', '.join(fields)}), or all=yes for all"
        wrong: WrongField = {"where": "the whole form", "expected": wanted, "found": found}
        raise FieldError(f"Choose messages by {wanted}; found {found}", wrong)
    return _read(given, now_ms)


def reject_unknown(form: Collection[str], names: Collection[str]) -> None:
    """Reject unknown fields, because a misspelt filter would match too much. Raises FieldError."""
    if strange := [name for name in form if name not in names]:
        wrong = unknown_field(strange[0], names)
        text = in_words([wrong])
        raise FieldError(text[0].upper() + text[1:], wrong)


def reject_duplicates(names: Sequence[str]) -> None:
    """Reject repeated fields. Raises FieldError."""
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise FieldError(f"{twice[0][:40]}: expected once, found {names.count(twice[0])} times")


def _read(given: Mapping[str, str], now_ms: int) -> Search:
    wanted: dict[str, Any] = {name: raw(given[name]) for name in _RAW if name in given}
    if given.get("to_exchange") == DEFAULT_EXCHANGE:
        wanted["to_exchange"] = b""
    if "header" in given:
        name, equals, value = given["header"].partition("=")
        if not equals or not name:
            raise FieldError(f"header: expected NAME=VALUE, found {format_found(given['header'])}")
        wanted["headers"] = ((raw(name), value),)
    if "due_after" in given:
        wanted["due_from_ms"] = instant(given["due_after"], now_ms, "due_after")
    if "due_before" in given:
        wanted["due_before_ms"] = instant(given["due_before"], now_ms, "due_before")
    if "kind" in given and given["kind"] not in list(HoldKind):
        raise FieldError(f"kind: expected one of {', '.join(HoldKind)}, found {format_found(given['kind'])}")
    return Search(Filter(**wanted, kind=given.get("kind")), given)


def with_absolute_times(asked: Search) -> dict[str, str]:
    """Format the same filter with absolute instants: "2h" becomes the instant that it means now. Pure."""
    instants = {"due_after": asked.wanted.due_from_ms, "due_before": asked.wanted.due_before_ms}
    return {
        **asked.given,
        **{name: readable.instant(at, exact=True) for name, at in instants.items() if at is not None},
    }


def instant(text: str, now_ms: int, name: str) -> int:
    """Parse an RFC 3339 instant (without offset: in UTC) or a duration from now to epoch ms. Raises FieldError."""
    return _understood(name, text, lambda stated: instant_ms(stated, now_ms, UTC))


def later(text: str) -> int:
    """Parse a shift, such as "30m" or "-1h", to milliseconds. Raises FieldError."""
    return _understood("by", text, shift_ms)


def token(text: str) -> Token:
    """Parse a message's id. Raises FieldError."""
    return _understood("id", text, read_token)


def _understood(name: str, text: str, read: Callable[[str], T]) -> T:
    try:
        return read(text)
    except ValueError as error:
        raise FieldError(f"{name}: expected {error}; found {format_found(text)}") from None


def place(text: str) -> tuple[int, int] | None:
    """Parse the start of a list's page; None means the first page. Raises FieldError."""
    return _understood("after", text, read_place) if text else None


def number(text: str) -> int | None:
    """Parse the number of the entry before a list's page; None means the first page. Raises FieldError."""
    if text and not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise FieldError(f"before: expected a number, found {format_found(text)}")
    return int(text) if text else None


async def read_body(request: Request) -> bytes:
    """Read the body. Raises HttpProblem if it does not come in, or not in time."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.body()
    except TimeoutError:
        late = f"The body did not come in within {BODY_SECONDS:g} s."
        raise HttpProblem(408, late, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise HttpProblem(400, "The body did not come in whole.") from None


async def parse_form(request: Request) -> dict[str, list[str]]:
    """Read a form's fields. Raises FieldError."""
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        found = format_found(request.headers.get("content-type"))
        raise FieldError(f"Content-Type: expected a form (application/x-www-form-urlencoded), found {found}")
    try:
        return parse_qs((await read_body(request)).decode(), keep_blank_values=True, max_num_fields=MOST_NAMED + 20)
    except ValueError as error:
        raise FieldError(f"Expected a form: {error}") from None


def verb(form: Mapping[str, Sequence[str]], *allowed: str) -> str:
    """Read a form's verb. Raises FieldError."""
    found = form.get("verb", [""])[0]
    if found not in allowed:
        raise FieldError(f"verb: expected one of {', '.join(allowed)}, found {format_found(found)}")
    return found


def ids(form: Mapping[str, Sequence[str]]) -> list[str]:
    """List the chosen ids, each once. Raises FieldError."""
    found = list(dict.fromkeys(form.get("id", [])))
    if not found:
        wrong: WrongField = {"where": "id", "expected": "at least one"}
        raise FieldError("Choose at least one message: expected an id, found none.", wrong)
    if len(found) > MOST_NAMED:
        raise FieldError(
            f"id: expected at most {MOST_NAMED} messages, found {len(found)}; use a filter, or the command line"
        )
    return found


def schedule_names(form: Mapping[str, Sequence[str]]) -> list[str]:
    """List the chosen schedules, each once. Raises FieldError."""
    found = list(dict.fromkeys(form.get("name", [])))
    if not 0 < len(found) <= MOST_SCHEDULES:
        raise FieldError(f"name: expected 1 to {MOST_SCHEDULES} schedules, found {len(found)}")
    return found


def schedule_name(text: str) -> str:
    """Read the name after which a list of schedules begins. Raises FieldError."""
    try:
        return name_or_none(text)
    except Expected as wrong:
        raise FieldError(f"after: expected {wrong}, found {text[:40]!r}") from None


def schedule_state(text: str) -> ScheduleState | None:
    """Read a state; None for any. Raises FieldError."""
    try:
        return ScheduleState(text) if text else None
    except ValueError:
        raise FieldError(f"state: expected one of {', '.join(ScheduleState)}, found {text[:40]!r}") from None


def new_due(form: Mapping[str, Sequence[str]], now_ms: int) -> NewDue:
    """Read a reschedule's new instant. Raises FieldError."""
    at, by = (form.get(name, [""])[0].strip() for name in ("at", "by"))
    if bool(at) == bool(by):
        expected = "expected the new instant, or in `by` how much later, not both"
        raise FieldError(f"at: {expected}, found {'both' if at else 'neither'}")
    return NewDue(instant(at, now_ms, "at")) if at else NewDue(None, later(by))


RETRY_FIELDS: Final = ("delay", "set_header", "drop_header")
"""The fields that fix refused messages. The header fields may be repeated."""


def read_retry_edits(form: Mapping[str, Sequence[str]], unread: Mapping[bytes, str]) -> RetryEdits:
    """Read the edits of a retry. Empty fields change nothing. ``unread``: see RetryEdits.of. Raises FieldError."""
    given = {name: [text for one in form.get(name, ()) if (text := one.strip())] for name in RETRY_FIELDS}
    reject_duplicates(["delay" for _ in given["delay"]])
    delay_ms = _understood("delay", given["delay"][0], duration_ms) if given["delay"] else None
    try:
        headers = dict(map(typed_header, given["set_header"]))
    except ValueError as error:
        raise FieldError(f"set_header: {error}") from None
    return RetryEdits.of(delay_ms, headers, map(raw, given["drop_header"]), unread)


def back(form: Mapping[str, Sequence[str]], list_: str) -> str:
    """Return the path to show after a form, on this server only; without a valid path, ``list_``. Browsers drop tabs
    and line ends, so "/<TAB>/host" would lead to another server."""
    wish = form.get("back", [""])[0]
    local = wish.startswith("/") and not wish.startswith(("//", "/\\")) and wish.isprintable()
    return wish if local else list_
