"""Store mode: messages of up to three minutes, or of hours in a long run, while daemons, broker and store fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import detangle

from tests.faults.features import cancels, keys, modes
from tests.faults.features.striking import excused
from tests.simulation import drained, imported, inbox, memory, operated, packed, refused, scheduled
from tests.simulation.faults import OF_STORE, Plan, Trouble
from tests.simulation.run import Outcome
from tests.simulation.store.process import ClockedPostgres
from tests.simulation.store.server import URL
from tests.simulation.traffic import Traffic
from tests.simulation.watch import Watch
from tests.simulation.whereabouts import Whereabouts
from tests.simulation.world import Node, World
from tests.support.ledger import Ledger
from tests.support.sql_ledger import SqlLedger

DAEMONS: Final = 2
FREQUENT: Final = ("cut", "cut", "cut", "store cut")
"""These faults are more frequent than the others, because each is short and meets little."""
REPLACED_MS: Final = 3_000
"""So long after a newer letter was read, the older one is replaced, or out."""
LONGEST_MS: Final = 180_000
RECENT_SECONDS: Final = 20
"""Cancels are for messages of about so many last seconds."""
FEW_LETTERS: Final = 1_000
"""A run with fewer may drop none."""
REST: Final = 300.0
"""Everything that is owed comes so many seconds after the last fault and its due instant."""


class Beside(NamedTuple):
    world: World
    nodes: Sequence[Node]
    stopping: asyncio.Event


@dataclass(frozen=True)
class Feature:
    """What is sent, and its verdict. ``judge`` raises AssertionError."""

    ledger: type[Ledger]
    send: Callable[[Any, Traffic], Awaitable[None]]
    judge: Callable[[Any], object]
    all_come: bool = False
    """Whether everything that is sent comes."""
    begin: Callable[[Any], Awaitable[None]] | None = None
    finish: Callable[[Any], Awaitable[None]] | None = None
    """What goes before the faults, and after them."""
    beside: Callable[[Beside], Awaitable[None]] | None = None
    """What an operator does meanwhile, until told to stop."""


class TimedKeys(keys.Keyed):
    """``read_ms``: when each letter was read last."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.read_ms: dict[int, float] = {}

    def _read(self, number: int) -> None:
        super()._read(number)
        self.read_ms[number] = time.time() * 1000

    def came_though_replaced(self) -> list[int]:
        """Letters that arrived long after a newer letter of their key was read, and met no fault."""
        newest: dict[int, int] = {}
        found = []
        for number in sorted(self.read_ms, key=self.last_read.__getitem__, reverse=True):
            newer = newest.get(number % keys.KEYS)
            for arrival in self.account.arrivals_of(number) if newer is not None else ():
                late = arrival.at_ms > self.read_ms[newer] + REPLACED_MS
                if late and not excused(self.account, number, arrival.at_ms):
                    found.append(number)
            newest[number % keys.KEYS] = number
        return found


async def _publish(ledger: Ledger, traffic: Traffic) -> None:
    await ledger.publish(traffic.count(), longest_ms=detangle.choice([5_000, 30_000, 60_000, traffic.longest_ms]))


async def _publish_in_bursts(ledger: keys.Keyed, traffic: Traffic) -> None:
    """Now and then the same keys follow closely, even in one batch."""
    await _publish(ledger, traffic)
    if detangle.flip(0.1 * min(1, traffic.rate)):
        longest_ms = detangle.choice([5_000, traffic.longest_ms])
        for _ in range(detangle.randint(2, 6)):
            await ledger.publish(detangle.randint(keys.KEYS // 2, keys.KEYS * 3 // 2), longest_ms=longest_ms)


async def _publish_and_cancel(ledger: cancels.Cancelling, traffic: Traffic) -> None:
    await _publish(ledger, traffic)
    if ledger.account.sent and detangle.flip(0.5):
        recent = max(1, round(RECENT_SECONDS * traffic.rate))
        await ledger.cancel({detangle.randint(max(0, ledger.account.sent - recent), ledger.account.sent - 1)})


async def _nothing() -> None:
    """No operator."""


async def _pack(beside: Beside) -> None:
    await packed.pack_now_and_then(beside.stopping)


async def _change_refused(beside: Beside) -> None:
    await beside.world.ledger.operate(beside.nodes[0].settings, beside.stopping)


async def _drain(beside: Beside) -> None:
    await drained.drain_back_and_forth(beside.nodes, beside.stopping)


async def _move_through_files(beside: Beside) -> None:
    await beside.world.ledger.move_through_files(beside.stopping)


def _judge_plain(_: Ledger) -> None:
    """The ledger's own verdict says all."""


def _judge_keys(ledger: TimedKeys) -> None:
    keys.judged_live(ledger, 0).assert_kept()
    assert not (stale := ledger.came_though_replaced()), f"{len(stale)} came though they were replaced: {stale[:5]}"


def _judge_modes(ledger: modes.Modal) -> None:
    """A fault may take longer than a letter may wait. A quiet run drops nothing."""
    found = modes.judged(ledger)
    assert found.dropped or ledger.account.sent < FEW_LETTERS, "nothing was dropped"
    late = [number for number in found.late if not excused(ledger.account, number, time.time() * 1000)]
    replace(found, late=late).assert_kept()


def _judge_cancels(ledger: cancels.Cancelling) -> None:
    cancels.judged(ledger.account, ledger.asked, ledger.told).assert_kept()


FEATURES: Final = {
    "store": Feature(Ledger, _publish, _judge_plain, all_come=True),
    "keys": Feature(TimedKeys, _publish_in_bursts, _judge_keys),
    "modes": Feature(modes.Modal, _publish_in_bursts, _judge_modes),
    "cancels": Feature(cancels.Cancelling, _publish_and_cancel, _judge_cancels),
    "operator": Feature(operated.Operated, operated.send, operated.judge, beside=_pack),
    "segments": Feature(TimedKeys, _publish_in_bursts, _judge_keys, beside=_pack),
    "refused": Feature(refused.Refusing, refused.send, refused.judge, all_come=True, beside=_change_refused),
    "drain": Feature(Ledger, _publish, _judge_plain, all_come=True, beside=_drain),
    "import": Feature(imported.Exported, _publish, imported.judge, beside=_move_through_files),
    "sql": Feature(SqlLedger, _publish, _judge_plain, all_come=True),
    "sql cancels": Feature(inbox.SqlCancelling, inbox.send, inbox.judge),
    "schedules": Feature(
        scheduled.Scheduling,
        scheduled.send,
        scheduled.judge,
        all_come=True,
        begin=scheduled.begin,
        finish=scheduled.Scheduling.finish,
    ),
}


async def stored(feature: Feature, postgres: ClockedPostgres, plan: Plan, seconds: float, rate: float) -> Outcome:
    """Publish for so many seconds, then wait until nothing is owed any more. Raises AssertionError."""
    async with World.open(postgres, ledger=feature.ledger) as world:
        tables = {"mode": "store", "store": {"url": URL, "lanes": 4}}
        nodes = [world.node(f"delayer-{number}", **tables) for number in range(DAEMONS)]
        for node in nodes:
            store = node.settings.store.model_copy(update={"restore_ahead_ms": packed.AHEAD_MS})
            node.settings = node.settings.model_copy(update={"store": store})
        for node in nodes:
            await node.start()
            await node.consuming()
        if feature.begin:
            await feature.begin(world.ledger)
        trouble = Trouble(world, nodes, plan)
        whereabouts = Whereabouts(world, has_store=True) if feature.all_come else None
        watch = Watch(world.store, nodes, trouble, whereabouts)
        faults = trouble.run(OF_STORE, kinds_of(plan, seconds), seconds)
        traffic = Traffic.over(seconds, rate, longest_ms=LONGEST_MS)
        work = asyncio.create_task(_work(feature, world, nodes, faults, watch, seconds, traffic))
        looking = asyncio.create_task(watch.run())
        await asyncio.wait([work, looking], return_when=asyncio.FIRST_COMPLETED)
        for task in (looking, work):
            if task.done():
                task.result()
        looking.cancel()
        for node in nodes:
            await node.stop()
        verdict = world.ledger.verdict(world.standing() | watch.standing())
        verdict.assert_apart()
        assert not verdict.early, f"early: {verdict.early.first}"
        assert not verdict.changed, f"changed: {verdict.changed.first}"
        assert not verdict.unexcused, f"came twice without a fault: {verdict.unexcused[:5]}"
        feature.judge(world.ledger)
        if feature.all_come:
            verdict.assert_kept(repeats=True)
        return Outcome(str(verdict), trouble.counts, world.ledger.account.sent)


def kinds_of(plan: Plan, seconds: float) -> list[str]:
    """Draw the faults of a run: none, some or many; many if their kinds are given."""
    often = round(seconds / 45)
    count = often if plan.kinds else detangle.choice([0, round(seconds / 180), often])
    return [detangle.choice([*(plan.kinds or (*OF_STORE, *FREQUENT))]) for _ in range(count)]


async def _work(
    feature: Feature,
    world: World,
    nodes: Sequence[Node],
    trouble: Coroutine[Any, Any, None],
    watch: Watch,
    seconds: float,
    traffic: Traffic,
) -> None:
    loop, ledger = asyncio.get_running_loop(), world.ledger
    ends = loop.time() + seconds
    faults = asyncio.create_task(trouble)
    stopping = asyncio.Event()
    beside = asyncio.create_task(feature.beside(Beside(world, nodes, stopping)) if feature.beside else _nothing())
    quiet = detangle.flip(0.3)
    while loop.time() < ends:
        await _phase(feature, ledger, traffic, min(ends, loop.time() + detangle.uniform(10.0, 60.0)), quiet=quiet)
        for node in nodes:
            node.check()
    await faults
    stopping.set()
    await beside
    if feature.finish:
        await feature.finish(ledger)
    if feature.all_come:
        await ledger.all_back(timeout=traffic.longest_ms / 1000 + REST)
    await _nothing_left(world, watch, traffic)
    await ledger.drained()
    watch.look()
    for node in nodes:
        await memory.check_rest(node)


async def _phase(feature: Feature, ledger: Ledger, traffic: Traffic, ends: float, *, quiet: bool) -> None:
    """Send at one pace until that time. In a quiet run lanes may sleep long."""
    loop, pause = asyncio.get_running_loop(), 10.0 if quiet else detangle.choice([0.3, 1.0, 1.0, 10.0])
    while (now := loop.time()) < ends:
        await feature.send(ledger, traffic if pause < 10.0 else traffic._replace(rate=1))
        await asyncio.sleep(max(0.0, min(pause, ends - now) - (loop.time() - now)))


async def _nothing_left(world: World, watch: Watch, traffic: Traffic) -> None:
    """Wait until store and queues are empty, twice in a row: meanwhile a daemon may have had the last message."""
    loop = asyncio.get_running_loop()
    ends, empty = loop.time() + traffic.longest_ms / 1000 + REST, 0
    while empty < 3:
        await asyncio.sleep(1.0)
        left = {name: count for name, count in (world.standing() | watch.standing()).items() if count}
        empty = 0 if left else empty + 1
        assert loop.time() < ends, f"left standing: {left}"
