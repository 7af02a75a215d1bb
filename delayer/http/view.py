"""The daemon as the HTTP server sees it, and cached queries of store and broker that all requests share. If its page is
closed and its metrics are not scraped, the daemon does not query at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from delayer.amqp.errors import BrokerLost
from delayer.amqp.values import Outgoing
from delayer.config.model import Settings
from delayer.config.topology import cascade_of
from delayer.core.counters import Counters
from delayer.core.errors import StoreLost
from delayer.core.hold import Outcome
from delayer.core.plan import Plan
from delayer.format.refusal import RetryEdits
from delayer.http.problems import HttpProblem
from delayer.http.recent import Step
from delayer.set_aside.messages import Result, SetAsideName
from delayer.store.admin import census, stats
from delayer.store.admin.census import Census
from delayer.store.admin.changes import ChangeResult
from delayer.store.admin.stats import StoreOverview
from delayer.store.errors import BadStoreUrl, SchemaOutdated
from delayer.store.requests import Requests
from delayer.store.schedules import reading as schedules
from delayer.store.schedules.reading import ScheduleCounts
from delayer.store.session import read_connection


class ConnectionState(NamedTuple):
    """A connection to the broker. ``connects``: how often it was opened."""

    connected: bool
    blocked: bool
    connects: int


@dataclass(frozen=True, slots=True)
class DaemonState:
    """The state of this process."""

    mode: str  # "native" or "store"
    routes: Sequence[str]  # the names that metrics count the configured routes under
    started_ms: int  # epoch milliseconds
    consuming: Mapping[str, bool]  # queue -> whether the daemon consumes it
    intake: str  # "active", or "standby" if another daemon is known to get the messages; "" if it does not consume
    connections: Mapping[str, ConnectionState]  # by use: "intake", "publish" and others
    store: bool  # whether a store is configured
    lanes: Sequence[int]  # numbers of the lanes that it releases
    usable: bool  # whether there is a lane to park into
    refusal: str  # why the store refuses this daemon until an operator acts, or ""
    stalled: Sequence[str]  # names of the loops without progress
    stuck: Sequence[int]  # numbers of its lanes that have had due messages for STUCK_SECONDS and settled no claim
    unsettled: Mapping[str, float]  # queue -> seconds since which nothing read from it was settled, if more than 30
    unsteady: Mapping[str, str]  # queue -> why its consumer is interrupted again and again
    topology: str  # why the topology is not in place, or ""
    restart_needed: Sequence[str]  # keys that the last reload found changed, and that need a restart
    recent: Sequence[Step]
    counters: Counters


class Depths(NamedTuple):
    """Ready messages in the broker's queues, None if a queue is missing. ``levels``: the cascade's, by number.
    ``delayed``: messages that the broker itself delays, by queue, None if unknown; empty if it delays none."""

    queues: Mapping[str, int | None]
    levels: Mapping[int, int | None]
    delayed: Mapping[str, int | None] = {}


T = TypeVar("T")


class DaemonPort(Protocol):
    """The daemon as the server sees it."""

    @property
    def settings(self) -> Settings:
        """The settings in force."""

    def state(self) -> DaemonState:
        """Cheap."""

    def now_upper_ms(self) -> int:
        """An upper bound of the clock by which messages become due: the store's, or without one the host's."""

    def plan(self, message: Outgoing) -> Plan:
        """What the daemon would do with a message that is published like this. Cheap. Raises StoreLost if it would
        refuse the message only because the store is out of reach."""

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]:
        """Publish, and wait for every confirm, at most ``publish_seconds``. Raises BrokerLost."""

    @property
    def publish_seconds(self) -> float:
        """The longest time of a publish."""

    async def depths(self) -> Depths:
        """Query the broker. Raises BrokerLost."""

    async def look_aside(self, name: SetAsideName, limit: int) -> Result:
        """List the queue's first messages. Raises BrokerLost."""

    async def change_aside(
        self, name: SetAsideName, verb: str, ids: frozenset[str], who: str, edits: RetryEdits
    ) -> ChangeResult:
        """Apply "retry", with these fixes of refused messages, or "drop". Raises BrokerLost, StoreLost."""


ROWS: Final = 50
"""Rows of a list."""
QUERIES: Final = 4
"""Queries of the store at once, as many changes, and as many requests with an Idempotency-Key."""
IDLE: Final = 1.5
"""How many times the longest publish such a request may be idle for the store."""

BRIEFLY: Final = 0.2
"""Seconds that a page waits for the numbers in its menu."""
STORE_ERRORS: Final = (StoreLost, BadStoreUrl, SchemaOutdated)
NO_STORE: Final = (
    "No store is configured: the broker keeps the waiting messages, and they cannot be listed, moved or cancelled. "
    "Messages that no destination takes become strays after ten attempts."
)
NO_STORE_STEP: Final = "set [store] url in the configuration; without it, /api/strays lists what no destination took"


def no_store() -> HttpProblem:
    return HttpProblem(404, NO_STORE, next_step=NO_STORE_STEP)


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[T]):
    """``value``: the last result, None if no query has succeeded. ``error``: why the last query failed, or empty."""

    value: T | None
    error: str = ""
    age: float | None = None
    """Seconds since ``value`` was read."""

    @property
    def fresh(self) -> T | None:
        """The value, unless the last query failed."""
        return None if self.error else self.value


@dataclass(eq=False, repr=False)
class Cached(Generic[T]):
    """A query, repeated at most every ``seconds``; after ``late`` seconds without an answer it is an error. After
    success it rests at least twenty times its duration; after failure only ``seconds``, because the server may be
    back."""

    look: Callable[[], Awaitable[T]]
    seconds: float
    name: str
    late: float = 5.0
    clock: Callable[[], float] = monotonic

    def __post_init__(self) -> None:
        self._began: float | None = None
        self._forgotten = False
        self._value: T | None = None
        self._error = ""
        self._seen_at: float | None = None
        self._again_at = 0.0
        self._task: asyncio.Task[None] | None = None

    async def get(self, patience: float = 3.0) -> Snapshot[T]:
        """Return a fresh result, or the last one if the query takes more than ``patience`` seconds."""
        if self.clock() >= self._again_at and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._refresh(), name=f"look at {self.name}")
        if self._task is not None:
            await asyncio.wait([self._task], timeout=patience)
            if self._task.done():
                self._task.result()  # Raises a bug.
        now = self.clock()
        waits = 0.0 if self._began is None else now - self._began
        error = self._error or (f"no answer for {waits:.0f} s" if waits > self.late else "")
        return Snapshot(self._value, error, None if self._seen_at is None else now - self._seen_at)

    def forget(self) -> None:
        """Make the next request query again, even if a query began before the change."""
        self._again_at = 0.0
        self._forgotten = True

    async def _refresh(self) -> None:
        self._began = began = self.clock()
        self._forgotten = False
        pause = self.seconds
        try:
            self._value = await self.look()
            self._error, self._seen_at = "", self.clock()
            pause = max(pause, 20.0 * (self._seen_at - began))
        except (BrokerLost, TimeoutError, *STORE_ERRORS) as error:
            self._error = str(error) or type(error).__name__
            if isinstance(error, StoreLost) and error.advice:
                self._error += f"; {error.advice}"
        finally:
            self._began = None
        self._again_at = 0.0 if self._forgotten else self.clock() + pause

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


class View:
    """The daemon, and the cached queries."""

    def __init__(self, inside: DaemonPort) -> None:
        self.inside = inside
        self.store = Cached(self._store, 2.0, "store")
        self.census = Cached(self._census, 20.0, "backlog", late=inf)
        self.schedules = Cached(self._schedules, 20.0, "schedules", late=inf)
        self.depths = Cached[Depths](inside.depths, 15.0, "queues")
        # Requests share one query, because two concurrent reads of a queue would each see half of it.
        names: tuple[SetAsideName, ...] = ("refused", "strays")
        self.requests = Requests(lambda: self.url, IDLE * inside.publish_seconds)
        self.aside = {name: Cached(partial(inside.look_aside, name, ROWS), 3.0, name, late=inf) for name in names}

    @property
    def settings(self) -> Settings:
        return self.inside.settings

    @property
    def now_ms(self) -> int:
        return self.inside.now_upper_ms()

    @property
    def _parts(self) -> Sequence[Cached[Any]]:
        return self.store, self.census, self.schedules, self.depths, *self.aside.values()

    def forget(self) -> None:
        """Make the next requests query again after a change."""
        for part in self._parts:
            part.forget()

    async def set_aside(self) -> dict[str, int | None]:
        """Count held and refused messages and strays, by the page that lists them, for the menu. None means unknown."""
        settings = self.settings
        depths = (await self.depths.get(BRIEFLY)).fresh
        queues = {} if depths is None else depths.queues
        found = {"/refused": queues.get(settings.refused.queue), "/strays": queues.get(cascade_of(settings).strays)}
        if self.has_store:
            store = (await self.store.get(BRIEFLY)).fresh
            found["/held"] = None if store is None or store.upgrade_pending else store.held
        return found

    @property
    def has_store(self) -> bool:
        return self.settings.store_url is not None

    async def close(self) -> None:
        self.requests.close()
        for part in self._parts:
            await part.close()

    @property
    def url(self) -> str:
        """The store's URL. Raises HttpProblem if none is configured."""
        url = self.settings.store_url
        if url is None:
            raise no_store()
        return url

    async def _store(self) -> StoreOverview:
        return await stats.overview(self.url, self.settings.store.restore_ahead_ms)

    async def _census(self) -> Census:
        async with read_connection(self.url, "count the backlog") as connection:
            return await census.take_census(connection)

    async def _schedules(self) -> ScheduleCounts:
        async with read_connection(self.url, "count the schedules") as connection:
            return await schedules.count(connection)
