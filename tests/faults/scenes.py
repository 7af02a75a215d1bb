"""The crash tables as scenes: every row's daemon comes to its point, something dies there, and all go on.

A scene plays all rows at the same time, each in a place of its own, because most of their time is waiting; the broker
and Postgres die once for all of them. Who dies:

    daemon      SIGKILL at the point, then a new daemon
    broker      the daemon stops at the point (SIGSTOP), the broker is killed and started again, the daemon goes on
    postgres    the same with the store
    broker cut  the daemon stops at the point, its connections to the broker are reset, it goes on
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

from delayer.core.errors import BrokerLost
from tests.faults.place import Place, eventually, killed_by_fault, stopped
from tests.support.daemon import DaemonProcess
from tests.support.ledger import Arrival, Ledger, Verdict
from tests.support.proxy import Proxy
from tests.support.servers import Postgres, RabbitMQ

DAEMON, BROKER, POSTGRES, BROKER_CUT, STORE_CUT = "daemon", "broker", "postgres", "broker cut", "store cut"

WORKER = {"dead_letter_worker_publisher_confirm_timeout": 10_000}
"""Milliseconds, where RabbitMQ has three minutes: so long may wait what falls due in the cascade while the broker comes
back, because it is tried before the bindings are there again (docs/brokers.md)."""

Copies = tuple[int, int]
"""How often a message arrives: at least, at most."""
ONCE, TWICE, PERHAPS_TWICE = (1, 1), (2, 2), (1, 2)


@dataclass(frozen=True)
class Row:
    """A row of a crash table. ``fault`` is the point and which time it counts; ``after`` what stands where when the
    daemon is dead and its servers have noticed (``store``, ``out`` for what has arrived, else a queue); ``copies`` what
    is delivered in the end, by who died. ``same_id``: copies, if any, have one x-delayer-id, else different ones.
    ``prepared``: "compacted" if the messages are in a segment when the daemon that comes to the point starts.
    """

    mode: str
    fault: str
    copies: Mapping[str, Copies]
    after: Mapping[str, int] = field(default_factory=dict)
    same_id: bool = False
    absolute: bool = True
    delay_ms: int = 1_000
    messages: int = 1
    prefetch: int = 5_000
    prepared: Literal["", "compacted"] = ""


@dataclass(frozen=True)
class Outcome:
    """How a row ended. ``resumed_ms`` is when the new daemon was started, or the old one went on."""

    verdict: Verdict
    arrivals: Mapping[int, Sequence[Arrival]]
    resumed_ms: float
    counters: Mapping[str, int]


class Barrier:
    """Lets ``act`` happen once, when everybody has come, or will not come any more."""

    def __init__(self, parties: Iterable[str], act: Callable[[], Awaitable[None]]) -> None:
        self._missing = set(parties)
        self._act = act
        self._everybody = asyncio.Event()
        self._acted = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Whatever goes wrong goes wrong for everybody who came."""
        await self._everybody.wait()
        try:
            self._acted.set_result(await self._act())
        except (RuntimeError, OSError) as error:
            self._acted.set_exception(error)

    def leave(self, name: str) -> None:
        self._missing.discard(name)
        if not self._missing:
            self._everybody.set()

    async def come(self, name: str) -> None:
        self.leave(name)
        await asyncio.shield(self._acted)


async def nothing() -> None:
    """What happens when everybody is ready."""


@dataclass
class Play:
    """One row being played. ``start`` is when all daemons are ready, ``death`` when all are at their points."""

    name: str
    row: Row
    place: Place
    died: str
    start: Barrier
    death: Barrier

    @property
    def delay_ms(self) -> int:
        """Long enough for a new daemon to be there before the message is due, where one has to start first."""
        at_once = self.died != DAEMON and not self.row.prepared
        return min(self.row.delay_ms, 1_500) if at_once else self.row.delay_ms

    async def prepare(self, ledger: Ledger) -> None:
        """Have the messages parked and compacted, with nobody at work, where the row wants it so."""
        if not self.row.prepared:
            return
        # One lane, so that the messages make one segment, in however many batches they are parked.
        async with self.place.daemon(STORE__LANES="1") as daemon:
            await daemon.ready()
            await self._publish(ledger)
            await eventually(self.place.rows, lambda rows: rows == self.row.messages)
            assert await daemon.stop() == 0, daemon.tail()
        assert await self.place.compact() == 1

    async def send(self, daemon: DaemonProcess, ledger: Ledger) -> None:
        """Publish the row's messages as soon as all daemons are ready; unless they are there, and it is at work."""
        if self.row.prepared:
            return
        await daemon.ready()
        await self.start.come(self.name)
        await self._publish(ledger)

    async def _publish(self, ledger: Ledger) -> None:
        await ledger.publish(self.row.messages, delay_ms=self.delay_ms, absolute=self.row.absolute)


class Scenes:
    """Plays a scene when its first outcome is asked for, with all rows that the death concerns."""

    def __init__(self, rows: Mapping[str, Row], rabbitmq: RabbitMQ, postgres: Postgres, template: str) -> None:
        self._rows = rows
        self._rabbitmq = rabbitmq
        self._postgres = postgres
        self._template = template
        self._played: dict[str, dict[str, Outcome | BaseException]] = {}

    def outcome(self, death: str, name: str) -> tuple[Row, Outcome]:
        """Raises what went wrong in that row."""
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
                await asyncio.to_thread(add_template, postgres, self._template)
            vhost = rabbitmq.add_vhost()
            places: dict[str, Place] = {}
            databases: dict[str, str] = {}
            for number, (name, row) in enumerate(rows.items()):
                store = None
                if row.mode == "store":
                    databases[name] = postgres.add_database(template=self._template)
                    store = postgres.url(databases[name])
                places[name] = Place(row.mode, rabbitmq.url(vhost), store, tag=f"r{number}.", prefetch=row.prefetch)
                await places[name].declare()

            async def die() -> None:
                server = rabbitmq if death == BROKER else postgres  # one of this scene's own
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)

            if death == BROKER:
                await asyncio.to_thread(rabbitmq.settle)
            start = Barrier(rows, nothing)
            dying = Barrier(rows, die if death in (BROKER, POSTGRES) else nothing)
            for barrier in (start, dying):
                stack.callback(asyncio.create_task(barrier.run()).cancel)

            async def play(name: str, row: Row) -> Outcome:
                part = Play(name, row, places[name], death, start, dying)
                try:
                    if death == DAEMON:
                        return await play_killed(part)
                    if death in (BROKER, POSTGRES):
                        return await play_stopped(part)
                    proxy = Proxy(rabbitmq.port if death == BROKER_CUT else postgres.port)
                    if death == BROKER_CUT:
                        part.place.via_broker = rabbitmq.url(vhost, port=proxy.port)
                    else:
                        part.place.via_store = postgres.url(databases[name], port=proxy.port)
                    return await play_cut(part, proxy)
                except (AssertionError, TimeoutError) as failed:
                    failed.add_note(await told(part.place))
                    raise
                finally:
                    start.leave(name)
                    dying.leave(name)

            outcomes = await asyncio.gather(*(play(name, row) for name, row in rows.items()), return_exceptions=True)
            return dict(zip(rows, outcomes, strict=True))


def add_template(server: Postgres, template: str) -> None:
    """A database with the schema, to which nobody is connected."""
    from delayer.store import upgrades  # alembic is slow to import, and only this needs it

    asyncio.run(upgrades.upgrade(server.url(server.add_database(template))))


async def play_killed(play: Play) -> Outcome:
    """The daemon kills itself at the point; a new one goes on."""
    row, place = play.row, play.place
    async with place.ledger() as ledger:
        await play.prepare(ledger)
        async with place.daemon(row.fault) as daemon:
            await play.send(daemon, ledger)
            await killed_by_fault(daemon)

        async def seen() -> dict[str, int]:
            return {where: await count(place, ledger, where) for where in row.after}

        await eventually(seen, lambda found: found == row.after)
        resumed_ms = time.time() * 1000
        async with place.daemon() as daemon:
            return await finish(play, ledger, daemon, resumed_ms)


async def count(place: Place, ledger: Ledger, where: str) -> int:
    if where == "store":
        return await place.rows()
    if where == "segments":
        return await place.segments()
    return ledger.total() if where == "out" else await place.depth(where)


async def play_stopped(play: Play) -> Outcome:
    """The daemon stops at the point while a server dies."""
    async with play.place.ledger(consume=False) as ledger:
        await play.prepare(ledger)
        async with play.place.daemon(f"{point(play.row)}:stop") as daemon:
            await play.send(daemon, ledger)
            await stopped(daemon)
            await play.death.come(play.name)
            await ledger.consume()
            daemon.signal(signal.SIGCONT)
            return await finish(play, ledger, daemon, time.time() * 1000)


async def play_cut(play: Play, proxy: Proxy) -> Outcome:
    """The daemon stops at the point while its connections are reset."""
    async with proxy, play.place.ledger() as ledger:
        await play.prepare(ledger)
        async with play.place.daemon(f"{point(play.row)}:stop") as daemon:
            await play.send(daemon, ledger)
            await stopped(daemon)
            proxy.cut()
            daemon.signal(signal.SIGCONT)
            return await finish(play, ledger, daemon, time.time() * 1000)


async def told(place: Place) -> str:
    """For a row that failed: what stands where, and what its daemons said last."""
    try:
        async with asyncio.timeout(10):
            standing = str(await place.standing())
    except (TimeoutError, BrokerLost, OSError) as error:  # the servers may be what failed it
        standing = repr(error)
    said = "".join(f"\na daemon's log ends:\n{daemon.tail()}" for daemon in place.daemons)
    return f"standing: {standing}{said}"


def point(row: Row) -> str:
    """``fault`` with its count written out."""
    return row.fault if ":" in row.fault else f"{row.fault}:1"


async def finish(play: Play, ledger: Ledger, daemon: DaemonProcess, resumed_ms: float) -> Outcome:
    """Wait for what must come, and until nothing is left that could still come; then look at the account."""
    place = play.place
    await ledger.all_back()
    await ledger.until(lambda: ledger.total() >= play.row.messages * play.row.copies[play.died][0])
    await work_off(place, daemon)
    # The others' messages may be in the cascade that they share by now; ours was seen empty.
    await ledger.drained()
    verdict = ledger.verdict(await place.standing(cascade=False))
    counters = await place.conserved() if place.store else {}
    return Outcome(verdict, ledger.arrivals, resumed_ms, counters)


async def work_off(place: Place, daemon: DaemonProcess) -> None:
    """Let the daemon, and others after it, work until nothing is left that could still come: the copies that a fault
    made travel behind the messages."""
    await emptied(place, daemon)
    while await place.standing(cascade=False):
        # Given back at the stop: it had been read and not begun.
        async with place.daemon() as another:
            await emptied(place, another)


async def emptied(place: Place, daemon: DaemonProcess) -> None:
    """Let the daemon work until nothing is ready anywhere, then stop it as a person would."""
    await daemon.ready()  # before that it does not know how to stop
    await eventually(place.standing, lambda standing: not standing)
    assert await daemon.stop() == 0, daemon.tail()


def check(row: Row, outcome: Outcome, copies: Copies) -> None:
    """What every row claims: nothing lost, early or changed; as many copies as its claim allows, recognisable."""
    # Somebody died with it in hand, so it is delivered again, and a broker may sort its headers then.
    outcome.verdict.assert_kept(repeats=copies[1] > 1, redelivered=True)
    for number, arrivals in outcome.arrivals.items():
        assert copies[0] <= len(arrivals) <= copies[1], f"message {number}: expected {copies}, found {arrivals}"
        ids = {arrival.id for arrival in arrivals}
        assert len(ids) == (1 if row.same_id else len(arrivals)), arrivals
        if row.absolute or row.same_id:
            assert len({arrival.due_ms for arrival in arrivals}) == 1, arrivals
    if outcome.counters:
        assert outcome.counters["parked"] == outcome.counters["released"] > 0, outcome.counters
        assert outcome.counters["held"] == 0
