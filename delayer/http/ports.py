"""The daemon as the HTTP server sees it: ports and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from delayer.config import Settings

State = Mapping[str, Any]
"""The state of this process:

    mode         "native" or "store"
    routes       the exchanges that the configured routes are from
    started_ms   when it began
    consuming    queue -> whether it is consumed now
    connections  use -> {"connected", "blocked", "connects"}
    store        whether one is configured
    lanes        numbers of the lanes that it releases from
    usable       whether there is a lane to park into
    stalled      names of the loops that stand still
    recent       ops.http.recent.Recent.notes
    figures      services.counting.Counters.figures()
"""


class Depths(NamedTuple):
    """Ready messages of the broker's queues, None for a missing queue. ``levels``: of the cascade, by number."""

    queues: Mapping[str, int | None]
    levels: Mapping[int, int | None]


class RefusedRow(NamedTuple):
    """A message of the refused queue, as the page shows it."""

    id: str
    came_in: str
    size: int
    message_id: str
    reason: str
    body: str
    said: Sequence[tuple[str, str]] = ()
    """Its properties and headers, each with its value."""


class Inside(Protocol):
    """The daemon."""

    @property
    def settings(self) -> Settings:
        """The settings in force."""

    def state(self) -> State:
        """See State. Cheap."""

    async def depths(self) -> Depths:
        """Ask the broker. Raises BrokerLost."""

    async def refused(self, limit: int) -> tuple[Sequence[RefusedRow], int]:
        """The first refused messages, and the number of all. Raises BrokerLost."""

    async def act_on_refused(self, verb: str, ids: frozenset[str], who: str) -> tuple[int, Sequence[tuple[str, str]]]:
        """Do "retry" or "drop". Gives the number of messages done, and the ids that stay with their reasons. Raises
        BrokerLost, StoreLost."""
