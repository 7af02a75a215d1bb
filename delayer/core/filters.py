"""Filters of waiting messages, and ids of single messages."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

from delayer.core.message import as_text

OWN: Final = "id:"
"""Prefix of names that are ids of delayer's: an ``x-delayer-id`` follows. Other names are publishers' message_ids."""
HOW_TO_NAME: Final = "An id of delayer's, as in x-delayer-id, is written with id: before it, such as id:48213."
_TOKEN: Final = re.compile(OWN + r"([0-9]{1,19})(?:@(-?[0-9]{1,16}))?")
_PLACE: Final = re.compile(r"(-?[0-9]{1,19})\.(-?[0-9]{1,19})")
MAX_ID: Final = (1 << 63) - 1
EARLIEST_MS: Final = -210_000_000_000_000
LAST_MS: Final = 9_223_371_000_000_000
"""The first and last epoch milliseconds that fit both Postgres's calendar and an int64 of microseconds."""


class Token(NamedTuple):
    """A message's id, with its due time if known. With the due time the store searches one partition. With the id alone
    it searches the index of ids of every partition, and the ids of every segment."""

    id: int
    due_ms: int | None = None

    def __str__(self) -> str:
        return f"{OWN}{self.id}" if self.due_ms is None else f"{OWN}{self.id}@{self.due_ms}"


def read_token(text: str) -> Token:
    """Parse ``id:NUMBER@DUE``, as lists print it, or ``id:NUMBER``. Raises ValueError with the expected form."""
    found = _TOKEN.fullmatch(text.strip())
    due_ms = None if found is None or found[2] is None else int(found[2])
    if found is None or int(found[1]) > MAX_ID or (due_ms is not None and not EARLIEST_MS <= due_ms <= LAST_MS):
        raise ValueError("an id as `delayer list` prints it, such as id:48213@1795291200000, or its part before the @")
    return Token(int(found[1]), due_ms)


def own_name(delayer_id: str) -> str:
    """Format an ``x-delayer-id`` as operators write it; "" without one."""
    return OWN + delayer_id if delayer_id else ""


def naming_advice(name: str) -> str:
    """The end of the report that ``name`` was not found."""
    return "" if name.startswith(OWN) else f" {HOW_TO_NAME}"


def names_of(own: str, message_id: str) -> frozenset[str]:
    """The names of a message with these ids, each "" if missing. A message_id that looks like our id is not a name."""
    return frozenset((own, "" if message_id.startswith(OWN) else message_id)) - {""}


def place_text(after: tuple[int, int]) -> str:
    """Format a place in a list (due microseconds, id)."""
    return f"{after[0]}.{after[1]}"


def read_place(text: str) -> tuple[int, int]:
    """Parse the format of :func:`place_text`. Raises ValueError with the expected form."""
    found = _PLACE.fullmatch(text)
    if found is None or not EARLIEST_MS * 1000 <= int(found[1]) <= LAST_MS * 1000 or abs(int(found[2])) > MAX_ID:
        raise ValueError("the place that the page before gave")
    return int(found[1]), int(found[2])


@dataclass(frozen=True, slots=True)
class Filter:
    """What all matching messages have in common. An empty filter matches all messages.

    ``to_exchange`` and ``to_key`` are the destination's; ``key`` is the ``x-delay-key``. Times are epoch milliseconds:
    ``due_from_ms`` is included, ``due_before_ms`` is not. ``message_id`` is the property, and headers are compared as
    text. ``kind`` is that of a hold, for held messages only."""

    route: bytes | None = None
    to_exchange: bytes | None = None
    to_key: bytes | None = None
    due_from_ms: int | None = None
    due_before_ms: int | None = None
    key: bytes | None = None
    message_id: bytes | None = None
    headers: tuple[tuple[bytes, str], ...] = ()
    kind: str | None = None

    @property
    def everything(self) -> bool:
        return self == Filter()

    @property
    def narrow(self) -> bool:
        """Whether a match shows only in the rows themselves, because no index covers these fields."""
        names = (self.route, self.to_exchange, self.to_key, self.message_id)
        return bool(self.headers) or any(one is not None for one in names)

    def in_range(self, due_ms: int) -> bool:
        after = self.due_from_ms is None or due_ms >= self.due_from_ms
        return after and (self.due_before_ms is None or due_ms < self.due_before_ms)

    def as_dict(self) -> dict[str, Any]:
        """The fields that are set, for the audit log and for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["headers"] = {_text(name): value for name, value in self.headers} or None
        return {name: _text(value) for name, value in values.items() if value is not None}


def _text(value: Any) -> Any:
    return as_text(value) if isinstance(value, bytes) else value
