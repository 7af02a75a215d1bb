"""How a table of timeouts is laid out, what of it is meant, and what the one beside it is called. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

SUFFIX: Final = "_delayer"
"""Behind a table's name, with the run's token: where its timeouts wait to be imported."""
LONGEST: Final = 60
"""Bytes of such a name, so that its index's fits as well: PostgreSQL has room for 63, and cuts without a word."""
_STAGED: Final = re.compile(rf"(.+){SUFFIX}(?:_[0-9a-f]+)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which column is what. ``endpoint``: whose timeout it is, where one table has those of many."""

    id: str = "Id"
    destination: str = "Destination"
    state: str = "State"
    time: str = "Time"
    headers: str = "Headers"
    endpoint: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.id, self.destination, self.state, self.time, self.headers)

    def of(self, columns: Sequence[str]) -> Layout:
        """As a table spells them: NHibernate quotes no name, and PostgreSQL makes such names lower case. Raises
        KeyError for one that is missing."""
        spelled = {name.lower(): name for name in columns}
        id_, destination, state, time, headers = (spelled[name.lower()] for name in self.names)
        endpoint = None if self.endpoint is None else spelled[self.endpoint.lower()]
        return Layout(id_, destination, state, time, headers, endpoint)


@dataclass(frozen=True, slots=True)
class Pick:
    """Which rows are meant: due after ``after`` (and not in it), due from ``since`` on, of this endpoint."""

    after: datetime | None = None
    since: datetime | None = None
    endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A row's place in the order of due instants."""

    time: datetime
    id: Any


def staged_name(name: str, token: str) -> str:
    """Of the table beside the one of this name, for the run of this token; "": of a run that began before there were
    tokens.

    >>> staged_name("Sales_TimeoutData", "5f0c9a7e41d2")
    'Sales_TimeoutData_delayer_5f0c9a7e41d2'
    """
    suffix = f"{SUFFIX}_{token}" if token else SUFFIX
    room = LONGEST - len(suffix)
    if len(name.encode()) > room:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name.encode()[: room - len(digest) - 1].decode('utf-8', 'ignore')}_{digest}"
    return name + suffix


def is_staged(name: str) -> bool:
    """Whether it is such a name."""
    return _STAGED.fullmatch(name) is not None


def staged_beside(name: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that may stand beside the table ``name``, whosever they are."""
    return [
        one
        for one in names
        if (found := _STAGED.fullmatch(one)) is not None
        and one == staged_name(name, one[len(found[1]) + len(SUFFIX) + 1 :])
    ]
