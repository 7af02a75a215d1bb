"""More silent destinations than are listened for: each has its verdict, and nobody waits for long. A made-up broker."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from delayer.broker import aside as module
from delayer.broker import trials
from delayer.broker.aside import Aside
from delayer.broker.doubts import others
from delayer.broker.trials import LINGERING
from delayer.core.message import CONFIRMED, Outgoing, Unanswered
from tests.unit.test_aside import Mute, message


class Answering(Mute):
    """A connection over which a message is confirmed at once, unless its key begins with an s."""

    closed = property(lambda self: asyncio.get_running_loop().create_future())
    published: list[bytes]

    def __init__(self) -> None:
        self.published = []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Answering:
    """Patience of fractions of a second, and a broker that answers but for what is silent."""
    for name, seconds in (("PATIENCE", 0.2), ("BRIEF", 0.1), ("LONELY", 0.4), ("SPARE", 0.05), ("SLACK", 0.02)):
        monkeypatch.setattr(module, name, seconds)
    world = Answering()

    class Probe:
        def __init__(self, connection: Any, deadline: float) -> None:
            pass

        async def publish(self, message: Outgoing) -> tuple[Any, None]:
            world.published.append(message.routing_key)
            if message.routing_key.startswith(b"s"):
                await asyncio.get_running_loop().create_future()
            return CONFIRMED, None

        def close(self) -> None:
            pass

    monkeypatch.setattr(trials, "Probe", Probe)
    monkeypatch.setattr(module, "Probe", Probe)
    return world


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


async def ask(it: Aside, batch: list[Outgoing], seconds: float = 3.0) -> dict[int, Any]:
    """As a publisher does, of a batch of which everything is doubtful or new."""
    outcomes: dict[int, Any] = it.known(batch)
    doubtful = it.doubtful(batch, outcomes)
    silent = await it.ask(batch, doubtful, seconds, outcomes)
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
