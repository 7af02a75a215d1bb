"""More silent destinations than are listened for, or than there are channels: each has its verdict, and nobody waits
for long. A made-up broker."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from delayer.broker import aside as module
from delayer.broker import trials
from delayer.broker.aside import Aside
from delayer.broker.doubts import Doubt, destination, others
from delayer.broker.trials import LINGERING, SHARE
from delayer.core.errors import BrokerLost
from delayer.core.message import CONFIRMED, Outgoing, Unanswered
from delayer.wire.errors import ConnectionLost, NoFreeChannel
from tests.unit.test_aside import Mute, message


class Answering(Mute):
    """A connection over which a message is confirmed at once, unless its key begins with an s. One whose key is that of
    ``ends`` ends it for all who wait there, with that code."""

    def __init__(self) -> None:
        self.channel_max = 2047
        self.published: list[bytes] = []
        self.used = self.most_used = 0
        self.waiting: set[asyncio.Future[None]] = set()
        self.ends: dict[bytes, int] = {}

    @property
    def free_channels(self) -> int:
        return self.channel_max - self.used

    def take(self) -> None:
        if not self.free_channels:
            raise NoFreeChannel("all channels of the connection are in use")
        self.used += 1
        self.most_used = max(self.most_used, self.used)

    async def silence(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self.waiting.add(waiter)
        try:
            await waiter
        finally:
            self.waiting.remove(waiter)

    def end(self, code: int) -> None:
        for waiter in self.waiting:
            waiter.set_exception(ConnectionLost(code, "ended"))
        raise ConnectionLost(code, "ended")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Answering:
    """Patience of fractions of a second, and a broker that answers but for what is silent."""
    for name, seconds in (("PATIENCE", 0.2), ("BRIEF", 0.1), ("LONELY", 0.4), ("SPARE", 0.05), ("SLACK", 0.02)):
        monkeypatch.setattr(module, name, seconds)
    world = Answering()

    class Probe:
        def __init__(self, connection: Any, deadline: float) -> None:
            self.open = False

        async def publish(self, message: Outgoing) -> tuple[Any, None]:
            world.take()
            self.open = True
            world.published.append(message.routing_key)
            if message.routing_key in world.ends:
                world.end(world.ends[message.routing_key])
            if message.routing_key.startswith(b"s"):
                await world.silence()
            return CONFIRMED, None

        def close(self) -> None:
            world.used -= self.open
            self.open = False

    monkeypatch.setattr(trials, "Probe", Probe)
    monkeypatch.setattr(module, "Probe", Probe)
    return world


class ShutOut:
    """A relay that is never let in."""

    current = None

    def start(self) -> None:
        pass

    async def connection(self, timeout: float) -> Any:
        raise BrokerLost("so many connections, and no more")

    async def close(self) -> None:
        pass


class Open:
    """A relay that is connected."""

    def __init__(self, connection: Any) -> None:
        self.current = connection

    def start(self) -> None:
        pass

    async def connection(self, timeout: float) -> Any:
        return self.current

    async def close(self) -> None:
        pass


async def ask(it: Aside, batch: list[Outgoing], seconds: float = 3.0, spare: Any = None) -> dict[int, Any]:
    """As a publisher does, of a batch of which everything is doubtful or new."""
    outcomes: dict[int, Any] = it.known(batch)
    doubtful = it.doubtful(batch, outcomes)
    silent = await it.ask(batch, doubtful, seconds, outcomes, spare)
    # Those without a doubt, or with an answer, go with the rest; what is confirmed there is a witness.
    began = time.monotonic()
    rest = [index for index in others(batch, silent, outcomes) if not batch[index].routing_key.startswith(b"s")]
    if rest:
        outcomes.update(dict.fromkeys(rest, CONFIRMED))
        it.confirmed(began)
    return outcomes | await it.verdicts(batch, silent)


def silent_ones(begin: int, end: int, exchange: bytes = b"") -> list[Outgoing]:
    return [
        message(number)._replace(exchange=exchange or b"x%d" % number, routing_key=b"s%d" % number)
        for number in range(begin, end)
    ]


@pytest.mark.parametrize("exchange", [b"", b"x"], ids=["each exchange its own", "one exchange"])
async def test_more_silent_ones_than_are_listened_for_are_all_found_out(quick: Answering, exchange: bytes) -> None:
    """Two publishers ask at a time. Every destination has its verdict, and what is listened for stays bounded."""
    it = Aside(Open(quick), timeout=8.0)  # type: ignore[arg-type]
    good = [Outgoing(b"g", b"good", b"\0\0", b"", b"good")]
    one, other = silent_ones(0, LINGERING + 20, exchange), silent_ones(1000, 1000 + LINGERING + 20, exchange)
    it.suspect(one + other)
    found = await asyncio.gather(ask(it, good + one), ask(it, good + other))
    for outcomes in found:
        assert outcomes[0] is CONFIRMED
        held = [outcome for outcome in outcomes.values() if isinstance(outcome, Unanswered)]
        assert len(held) == LINGERING + 20
    assert len(it._trials._lingering()) <= LINGERING
    await it.close()


async def test_what_is_stuck_is_held_without_a_trial_where_none_is_free(quick: Answering) -> None:
    it = Aside(Open(quick), timeout=8.0)  # type: ignore[arg-type]
    good = [Outgoing(b"g", b"good", b"\0\0", b"", b"good")]
    silent = silent_ones(0, LINGERING + 20)
    it.suspect(silent)
    await ask(it, good + silent)
    await ask(it, good + silent)  # some have their turn
    before = len(quick.published)
    began = time.monotonic()
    outcomes = await ask(it, good + silent)
    assert len(outcomes) == len(silent) + 1
    assert time.monotonic() - began < module.BRIEF
    assert len(quick.published) == before
    await it.close()


async def test_what_is_stuck_has_its_turn(quick: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without a trial of their own are tried again now and then, so that one that answers again is found."""
    monkeypatch.setattr(module, "TURN", 0.0)
    it = Aside(Open(quick), timeout=8.0)  # type: ignore[arg-type]
    good = [Outgoing(b"g", b"good", b"\0\0", b"", b"good")]
    silent = silent_ones(0, LINGERING + 20)
    it.suspect(silent)
    await ask(it, good + silent)
    quick.published.clear()
    for _ in range(5):
        await ask(it, good + silent)
    assert set(quick.published) >= {one.routing_key for one in silent[:20]}
    assert len(it._trials._lingering()) <= LINGERING
    await it.close()


async def test_a_broker_that_stands_still_holds_nothing_untried(
    quick: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Aside(Open(quick), timeout=0.0)  # type: ignore[arg-type]
    good = [Outgoing(b"g", b"good", b"\0\0", b"", b"good")]
    silent = silent_ones(0, LINGERING + 20)
    it.suspect(silent)
    await ask(it, good + silent)

    async def still() -> bool:
        return False

    monkeypatch.setattr(it, "_answers", still)
    assert await ask(it, silent) == {}
    await it.close()


@pytest.mark.parametrize(
    ("channel_max", "shared", "count"), [(100, False, 60), (20, False, 16), (100, True, 30), (9, True, 3)]
)
async def test_a_connection_of_few_channels(quick: Answering, channel_max: int, shared: bool, count: int) -> None:
    """Two publishers ask again and again, as after an interruption. Some channels are always left for others, most of
    them where others publish."""
    quick.channel_max = channel_max
    it = Aside(ShutOut() if shared else Open(quick), timeout=8.0)  # type: ignore[arg-type]
    good = [Outgoing(b"g", b"good", b"\0\0", b"", b"good")]

    async def settled(batch: list[Outgoing]) -> int:
        for asked in range(1, 20):
            outcomes = await ask(it, batch, spare=quick)
            if len(outcomes) == len(batch):
                assert sum(isinstance(outcome, Unanswered) for outcome in outcomes.values()) == len(batch) - 1
                return asked
        raise AssertionError("asked again and again")

    one, other = silent_ones(0, count), silent_ones(1000, 1000 + count)
    it.suspect(one + other)
    assert max(await asyncio.gather(settled(good + one), settled(good + other))) <= 2
    most = channel_max // SHARE if shared else channel_max - min(trials.RESERVE, channel_max // 4)
    assert 1 < quick.most_used <= most
    assert len(it._trials._lingering()) <= (most if shared else channel_max) // 2
    await it.close()
    assert quick.used == 0


async def test_one_that_waits_for_a_channel_is_not_tried_yet(quick: Answering) -> None:
    """Nobody has heard its silence, and it is not published when nobody waits for it any more."""
    quick.channel_max = 4
    quick.used = 4
    it = Aside(Open(quick), timeout=8.0)  # type: ignore[arg-type]
    silent = silent_ones(0, 3)
    it.suspect(silent)
    it.confirmed(time.monotonic() + 60.0)
    assert await ask(it, silent, 0.5) == {}
    assert it._trials.tasks() == []
    quick.used = 0
    asking = asyncio.create_task(ask(it, silent[:1], 0.5))
    assert len(await asking) == 1
    assert quick.published == [silent[0].routing_key]
    await it.close()


@pytest.mark.parametrize("code", [501, 530])
async def test_one_that_ends_the_connection_frees_nobody_who_is_stuck(quick: Answering, code: int) -> None:
    """Whoever is only suspected goes with the others, where the broker objects to a message; where it allows no more
    channels, that says nothing of any."""
    it = Aside(Open(quick), timeout=8.0)  # type: ignore[arg-type]
    good = Outgoing(b"g", b"good", b"\0\0", b"", b"good")
    stuck, suspected, ending = silent_ones(0, 2), silent_ones(2, 3), message(9)
    quick.ends[ending.routing_key] = code
    it.suspect(stuck)
    assert len(await ask(it, [good, *stuck])) == 3
    it.suspect([*suspected, ending])
    outcomes = await ask(it, [good, *stuck, *suspected, ending])
    assert [isinstance(outcomes.get(index), Unanswered) for index in range(5)] == [False, True, True, False, False]
    of = [it._doubts.of(destination(one)) for one in (*stuck, *suspected, ending)]
    assert of == [Doubt.STUCK] * 2 + ([None] * 2 if code == 501 else [Doubt.SUSPECTED] * 2)
    await it.close()
