"""The crash tables as scenes: each row's daemon reaches its point, a process or connection dies, and the rest continue.

A scene plays all rows at the same time, each in its own place, because they mostly wait. The broker
and Postgres die once for all of them. The deaths:

    daemon      SIGKILL at the point, then a new daemon
    broker      the daemon stops at the point (SIGSTOP), the broker is killed and restarted, the daemon resumes
    postgres    the same with the store
    broker cut  the daemon stops at the point, its connections to the broker are reset, it resumes
    store cut   the same with its connections to the store
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Literal

import uvloop

from delayer.amqp.errors import BrokerLost
from tests.support.daemon import DaemonProcess
from tests.support.ledger import Arrival, Ledger, Verdict
from tests.support.place import STRATEGY, Place, eventually, killed_by_fault, stopped
from tests.support.proxy import Proxy
from tests.support.servers import Postgres, RabbitMQ
from tests.support.sql_ledger import SqlLedger

DAEMON, BROKER, POSTGRES, BROKER_CUT, STORE_CUT = "daemon", "broker", "postgres", "broker cut", "store cut"

WORKER = {"dead_letter_worker_publisher_confirm_timeout": 10_000}
"""Milliseconds, where RabbitMQ has three minutes. A message that falls due while the broker restarts may be this late,
because the broker tries it before it has recovered the bindings (docs/versions.md)."""

Copies = tuple[int, int]
"""How often a message arrives: at least, at most."""
ONCE, TWICE, PERHAPS_TWICE = (1, 1), (2, 2), (1, 2)


@dataclass(frozen=True)
class Row:
    """A row of a crash table. ``fault``: the point, and the pass that counts. ``after``: the messages by place after
    the death (``store``, ``out`` for arrivals, else a queue). ``copies``: the deliveries in the end, by death.
    ``same_id``: copies, if any, share one x-delayer-id, otherwise they have different ids. ``step_ms``: how much later
    each message is due than the one before. One more message goes through before them, so that the daemon knows the
    exchange; otherwise it would publish the first message alone. ``prepared``: "compacted" if the messages are in a
    segment before the daemon that reaches the point starts. ``by_sql``: the messages are sent by SQL.
    """

    mode: str
    fault: str
    copies: Mapping[str, Copies]
    after: Mapping[str, int] = field(default_factory=dict)
    same_id: bool = False
    absolute: bool = True
    delay_ms: int = 1_000
    step_ms: int = 0
    messages: int = 1
    prefetch: int = 5_000
    strategy: str = STRATEGY
    prepared: Literal["", "compacted"] = ""
    by_sql: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a row ended. ``resumed_ms`` is when the new daemon was started, or the old one went on."""

    verdict: Verdict
    arrivals: Mapping[int, Sequence[Arrival]]
    resumed_ms: float
    counters: Mapping[str, int]


class Play:
    """One row being played, in three steps that all rows of a scene take together."""

    def __init__(self, row: Row, place: Place, died: str, proxy: Proxy | None) -> None:
        self.row = row
        self.place = place
        self.outcome: Outcome | BaseException | None = None
        self.stack = AsyncExitStack()
        self._died = died
        self._proxy = proxy

    async def begin(self) -> None:
        """Start the daemon and wait until it is ready. With prepared messages, do not wait: it goes to its point."""
        if self._proxy:
            await self.stack.enter_async_context(self._proxy)
        consume = self._died not in (BROKER, POSTGRES)
        kind = SqlLedger if self.row.by_sql else Ledger
        self._ledger = await self.stack.enter_async_context(self.place.ledger(consume=consume, kind=kind))
        if self.row.prepared:
            await self._prepare()
        point = self.row.fault if ":" in self.row.fault else f"{self.row.fault}:1"
        fault = point if self._died == DAEMON else f"{point}:stop"
        self._daemon = await self.stack.enter_async_context(self.place.daemon(fault))
        if not self.row.prepared:
            await self._daemon.ready()
        if self.row.step_ms:
            # A message that is due sooner, and is read late, is kept in memory and leaves without the store.
            await self._ledger.publish(1, delay_ms=2_000, absolute=True)
            released = "SELECT coalesce(sum(n), 0)::int FROM counter WHERE kind = 'released'"
            await eventually(lambda: self.place.ask(released), lambda count: count == 1)

    async def _prepare(self) -> None:
        """Have the messages parked and compacted, with no daemon running."""
        # One lane, so that the messages make one segment, in any number of batches.
        async with self.place.working(STORE__LANES="1"):
            await self._publish()
            await eventually(self.place.rows, lambda rows: rows == self.row.messages)
        assert await self.place.compact() == 1

    async def _publish(self) -> None:
        row = self.row
        await self._ledger.publish(row.messages, delay_ms=row.delay_ms, absolute=row.absolute, step_ms=row.step_ms)

    async def come(self) -> None:
        """The daemon reaches its point. If it kills itself there, another daemon takes over immediately."""
        if not self.row.prepared:
            await self._publish()
        if self._died != DAEMON:
            return await stopped(self._daemon)
        await killed_by_fault(self._daemon)

        async def seen() -> dict[str, int]:
            return {where: await self._count(where) for where in self.row.after}

        await eventually(seen, lambda found: found == self.row.after)
        resumed_ms = time.time() * 1000
        async with self.place.daemon() as daemon:
            await self._finish(daemon, resumed_ms)

    async def _count(self, where: str) -> int:
        if where == "inbox":
            return await self.place.inbox()
        if where == "store":
            return await self.place.rows()
        if where == "segments":
            return await self.place.segments()
        return self._ledger.total() if where == "out" else await self.place.depth(where)

    async def go_on(self) -> None:
        """Resume the daemon stopped at its point, after a server died or the connections were reset."""
        if self._died == DAEMON:
            return
        if self._proxy:
            self._proxy.cut()
        else:
            await self._ledger.consume()
        self._daemon.signal(signal.SIGCONT)
        await self._finish(self._daemon, time.time() * 1000)

    async def _finish(self, daemon: DaemonProcess, resumed_ms: float) -> None:
        """Wait for the expected messages, and until no more can arrive; then check the account."""
        ledger, place = self._ledger, self.place
        await ledger.all_back()
        await ledger.until(lambda: ledger.total() >= self.row.messages * self.row.copies[self._died][0])
        await work_off(place, daemon)
        # The shared cascade may have messages of other places by now; this place's part was empty before.
        await ledger.drained()
        verdict = ledger.verdict(await place.standing(cascade=False))
        counters = await place.conserved() if place.store else {}
        self.outcome = Outcome(verdict, ledger.arrivals, resumed_ms, counters)


AT_ONCE = 4
"""Daemons that start together: on a busy machine, the last of thirty would be ready after a minute."""


async def together(plays: Iterable[Play], step: Callable[[Play], Awaitable[None]], at_once: int = 100) -> None:
    """Let all plays that have not failed take this step, so many of them at once."""
    left = [play for play in plays if not isinstance(play.outcome, BaseException)]
    room = asyncio.Semaphore(at_once)

    async def take(play: Play) -> None:
        async with room:
            await step(play)

    results = await asyncio.gather(*map(take, left), return_exceptions=True)
    for play, failed in zip(left, results, strict=True):
        if failed is not None:
            failed.add_note(await told(play.place))
            play.outcome = failed


class Scenes:
    """Plays a scene, with all rows of its death, when a test asks for its first outcome."""

    def __init__(self, rows: Mapping[str, Row], rabbitmq: RabbitMQ, postgres: Postgres, template: str) -> None:
        self._rows = rows
        self._rabbitmq = rabbitmq
        self._postgres = postgres
        self._template = template
        self._played: dict[str, dict[str, Outcome | BaseException]] = {}

    def outcome(self, death: str, name: str) -> tuple[Row, Outcome]:
        """Raises the error of that row, if it failed."""
        if death not in self._played:
            rows = {name: row for name, row in self._rows.items() if death in row.copies}
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self._played[death] = runner.run(self._play(death, rows))
        outcome = self._played[death][name]
        if isinstance(outcome, BaseException):
            raise outcome
        return self._rows[name], outcome

    async def _play(self, death: str, rows: Mapping[str, Row]) -> dict[str, Outcome | BaseException]:
        async with AsyncExitStack() as stack:
            rabbitmq, postgres = self._rabbitmq, self._postgres
            if death == BROKER:
                rabbitmq = RabbitMQ(hidden=WORKER)
                stack.callback(rabbitmq.close)
                await asyncio.to_thread(rabbitmq.start)
            elif death == POSTGRES:
                postgres = Postgres()
                stack.callback(postgres.close)
                await asyncio.to_thread(postgres.start)
                await asyncio.to_thread(postgres.add_store, self._template)
            vhost = rabbitmq.add_vhost()
            plays: dict[str, Play] = {}
            for number, (name, row) in enumerate(rows.items()):
                place = Place(row.mode, rabbitmq.url(vhost), tag=f"r{number}.", prefetch=row.prefetch)
                place.strategy = row.strategy
                proxy = None
                if row.mode == "store" or row.by_sql:
                    database = postgres.add_database(template=self._template)
                    place.store = postgres.url(database)
                if death == BROKER_CUT:
                    proxy = Proxy(rabbitmq.port)
                    place.via_broker = rabbitmq.url(vhost, port=proxy.port)
                elif death == STORE_CUT:
                    proxy = Proxy(postgres.port)
                    place.via_store = postgres.url(database, port=proxy.port)
                await place.declare()
                plays[name] = Play(row, place, death, proxy)
                stack.push_async_callback(plays[name].stack.aclose)
            if death == BROKER:
                await asyncio.to_thread(rabbitmq.settle)
            await together(plays.values(), Play.begin, AT_ONCE)
            await together(plays.values(), Play.come)
            if death in (BROKER, POSTGRES):
                server = rabbitmq if death == BROKER else postgres  # a server of this scene only
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            await together(plays.values(), Play.go_on)
            return {name: play.outcome for name, play in plays.items() if play.outcome is not None}


async def told(place: Place) -> str:
    """For a failed row: the messages by place, and the tails of its daemons' logs."""
    try:
        async with asyncio.timeout(30):
            standing = str(await place.standing())
    except (TimeoutError, BrokerLost, OSError) as error:  # perhaps a server failed
        standing = repr(error)
    said = "".join(f"\na daemon's log ends:\n{daemon.tail()}" for daemon in place.daemons)
    return f"standing: {standing}{said}"


async def work_off(place: Place, daemon: DaemonProcess) -> None:
    """Let the daemon, and others after it, work until no more messages can arrive: copies caused by a fault travel
    after the messages."""
    await emptied(place, daemon)
    while await place.standing(cascade=False):
        # The stop gave back messages that were read and not begun.
        async with place.daemon() as another:
            await emptied(place, another)


async def emptied(place: Place, daemon: DaemonProcess) -> None:
    """Let the daemon work until no queue has a ready message, then stop it by SIGTERM."""
    await daemon.ready()  # before that it handles no signal
    await eventually(place.standing, lambda standing: not standing)
    assert await daemon.stop() == 0, daemon.tail()


def check(row: Row, outcome: Outcome, copies: Copies) -> None:
    """The claims of every row: nothing is lost, early or changed, and only the claimed copies arrive, and they are
    recognisable."""
    # A process died holding the message unacknowledged, so the broker redelivers it, and may sort its headers.
    outcome.verdict.assert_kept(repeats=copies[1] > 1, redelivered=True)
    for number, arrivals in outcome.arrivals.items():
        assert copies[0] <= len(arrivals) <= copies[1], f"message {number}: expected {copies}, found {arrivals}"
        ids = {arrival.id for arrival in arrivals}
        assert len(ids) == (1 if row.same_id else len(arrivals)), arrivals
        if row.absolute or row.same_id:
            assert len({arrival.due_ms for arrival in arrivals}) == 1, arrivals
    if outcome.counters:
        assert outcome.counters["parked"] == outcome.counters["released"], outcome.counters
        assert outcome.counters["parked"] > 0 or row.fault == "intake.kept" or row.by_sql, outcome.counters
        assert outcome.counters["held"] == 0
