"""What a form asks for: filters, instants, names of messages. Pure: texts in, values or sentences out."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, NamedTuple

from delayer.core.filters import Filter, Token, read_token
from delayer.settings import duration_ms

FIELDS: Final = ("route", "to", "to_key", "key", "header", "due_after", "due_before")
"""The names of a filter's fields in forms and query strings."""


class Wrong(ValueError):
    """A field that cannot be understood; the text says which, what was expected, and what was found."""


class Asked(NamedTuple):
    """A filter, and the texts that it was made of: for the form, and for links."""

    wanted: Filter
    given: Mapping[str, str]


def asked(form: Mapping[str, str], now_ms: int) -> Asked:
    """The filter of a form's fields; empty ones say nothing. Raises Wrong."""
    given = {name: text for name in FIELDS if (text := form.get(name, "").strip())}
    headers: tuple[tuple[bytes, str], ...] = ()
    if "header" in given:
        name, equals, value = given["header"].partition("=")
        if not equals or not name:
            raise Wrong(f"Header: expected NAME=VALUE, found {given['header']!r}")
        headers = ((_raw(name), value),)
    wanted = Filter(
        route=_raw(given["route"]) if "route" in given else None,
        exchange=_raw(given["to"]) if "to" in given else None,
        routing_key=_raw(given["to_key"]) if "to_key" in given else None,
        key=_raw(given["key"]) if "key" in given else None,
        due_from_ms=instant(given["due_after"], now_ms, "Due after") if "due_after" in given else None,
        due_before_ms=instant(given["due_before"], now_ms, "Due before") if "due_before" in given else None,
        headers=headers,
    )
    return Asked(wanted, given)


def instant(text: str, now_ms: int, name: str) -> int:
    """Epoch milliseconds: RFC 3339, or how long from now ("2h", "-30m"). Without an offset it is UTC. Raises Wrong."""
    text = text.strip()
    sign, amount = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    try:
        return now_ms + sign * duration_ms(amount)
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise Wrong(
            f"{name}: expected an instant such as 2031-01-31T08:00:00Z, or how long from now, such as 2h; "
            f"found {text!r}"
        ) from None
    since = (found if found.tzinfo else found.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1000 + -(-since.microseconds // 1000)


def later(text: str) -> int:
    """Milliseconds that something is moved by: "30m", "-1h". Raises Wrong."""
    text = text.strip()
    try:
        return -duration_ms(text[1:]) if text.startswith("-") else duration_ms(text.removeprefix("+"))
    except ValueError as error:
        raise Wrong(f"By: expected {error}, or the same with a - before it; found {text!r}") from None


def token(text: str) -> Token:
    """The name of a message. Raises Wrong."""
    try:
        return read_token(text)
    except ValueError as error:
        raise Wrong(f"Id: expected {error}; found {text[:80]!r}") from None


def place(text: str) -> tuple[int, int] | None:
    """Where a page of a list begins, as :func:`place_text` wrote it; None for its beginning. Raises Wrong."""
    if not text:
        return None
    due, dot, number = text.partition(".")
    try:
        if dot:
            return int(due), int(number)
    except ValueError:
        pass
    raise Wrong(f"Page: expected what a link of this page says, found {text[:80]!r}")


def place_text(after: tuple[int, int]) -> str:
    return f"{after[0]}.{after[1]}"


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
