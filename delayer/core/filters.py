"""Which waiting messages somebody asks for, as a value; and the names that single messages go by."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

_TOKEN: Final = re.compile(r"([0-9]{1,19})(?:@(-?[0-9]{1,16}))?")
MAX_ID: Final = (1 << 63) - 1
FIRST_MS: Final = -210_000_000_000_000
LAST_MS: Final = 9_223_371_000_000_000
"""Instants, in epoch milliseconds, between which Postgres's calendar and a number of microseconds both reach."""


class Token(NamedTuple):
    """A message by its id, and where it is known by its due instant: with that it is found at once, whatever else
    waits; by its id alone, the index of every partition is read (some 0.25 s a million rows).

    An index on the id would find both at once, but everything that is parked would pay for it: by 8 % more WAL (842
    bytes a row instead of 777) and one more tree to write into.
    """

    id: int
    due_ms: int | None = None

    def __str__(self) -> str:
        return str(self.id) if self.due_ms is None else f"{self.id}@{self.due_ms}"


def read_token(text: str) -> Token:
    """``ID@DUE`` as lists print it, or ``ID``. Raises ValueError: what was expected."""
    found = _TOKEN.fullmatch(text.strip())
    due_ms = None if found is None or found[2] is None else int(found[2])
    if found is None or int(found[1]) > MAX_ID or (due_ms is not None and not FIRST_MS <= due_ms <= LAST_MS):
        raise ValueError("an id as `delayer list` prints it, such as 48213@1795291200000, or its part before the @")
    return Token(int(found[1]), due_ms)


@dataclass(frozen=True, slots=True)
class Filter:
    """What every message that is meant has in common. Nothing said: all of them.

    ``exchange`` and ``routing_key`` are the destination's. ``key`` is the one of ``x-delay-key``. Instants are epoch
    milliseconds, the first included, the last not. Headers are compared as text.
    """

    route: bytes | None = None
    exchange: bytes | None = None
    routing_key: bytes | None = None
    due_from_ms: int | None = None
    due_before_ms: int | None = None
    key: bytes | None = None
    headers: tuple[tuple[bytes, str], ...] = ()

    @property
    def everything(self) -> bool:
        return self == Filter()

    @property
    def narrow(self) -> bool:
        """Whether rows must be read to know which are meant: no index is ordered by any of this."""
        return bool(self.headers) or any(one is not None for one in (self.route, self.exchange, self.routing_key))

    def in_range(self, due_ms: int) -> bool:
        after = self.due_from_ms is None or due_ms >= self.due_from_ms
        return after and (self.due_before_ms is None or due_ms < self.due_before_ms)

    def as_dict(self) -> dict[str, Any]:
        """For the audit trail and for JSON: only what was said."""
        said: dict[str, Any] = {
            name: value.decode("utf-8", "backslashreplace")
            for name in ("route", "exchange", "routing_key", "key")
            if (value := getattr(self, name)) is not None
        }
        if self.due_from_ms is not None:
            said["due_from_ms"] = self.due_from_ms
        if self.due_before_ms is not None:
            said["due_before_ms"] = self.due_before_ms
        if self.headers:
            said["headers"] = {name.decode("utf-8", "backslashreplace"): value for name, value in self.headers}
        return said
