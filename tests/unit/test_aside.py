"""What is listened for is bounded, and nobody is stuck while nothing answers. tests/integration asks a real broker."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from delayer.broker import aside as module
from delayer.broker.aside import Aside
from delayer.broker.doubts import Destination
from delayer.broker.relay import Relay
from delayer.broker.trials import LINGERING, LINGERING_BYTES, Places, Trials
from delayer.core.message import CONFIRMED, Outgoing
from delayer.wire.address import Address
from tests.rig import ports


class Mute:
    """A connection on which no channel is ever opened."""

    blocked = False
    closed = property(lambda self: asyncio.get_running_loop().create_future())
    channel_max = free_channels = 2047

    async def channel(self) -> Any:
        await asyncio.get_running_loop().create_future()


def nowhere() -> Relay:
    """A relay to a port where nobody listens."""
    return Relay(Address.parse(f"amqp://127.0.0.1:{ports.reserve()}/"), "aside", heartbeat=20, timeout=0.2)


def message(number: int, size: int = 1) -> Outgoing:
    return Outgoing(b"x", b"%d" % number, b"\0\0", bytes(size), b"%d" % number)


def mute(*, shared: bool = False) -> tuple[Trials, Places]:
    it, connection = Trials(lambda *_: None), Mute()
    return it, it.places(connection, shared=shared)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 1 << 20, LINGERING_BYTES * 2])
async def test_what_is_listened_for_is_bounded(size: int) -> None:
    it, places = mute()
    for number in range(2 * LINGERING if size < LINGERING_BYTES else 3):
        one = Destination(b"x", b"%d" % number)
        trial = it.begin(one, message(number, size), places)
        assert it.begin(one, message(number, size), places) is trial
        await trial.out
        it.miss(one, trial)
        assert sum(len(trial.message.body) for _, trial in it._lingering()) <= max(LINGERING_BYTES, size)
        assert it.silence(one) is not None
    left = len(it.tasks())
    assert left == min(LINGERING, max(1, LINGERING_BYTES // size))
    assert it.silence(Destination(b"x", b"0")) is not None  # though it was let go of
    assert it.room(places) == 0
    for task in it.tasks():
        task.cancel()
    await asyncio.sleep(0.01)
    assert not it.tasks()


async def test_nobody_is_let_go_of_who_is_waited_for() -> None:
    """Not by another batch, which tries its own destinations side by side."""
    it, places = mute()
    waited_for = [Destination(b"w", b"%d" % number) for number in range(LINGERING + 20)]
    for number, one in enumerate(waited_for):
        it.begin(one, message(number), places)
    for number in range(2 * LINGERING):
        one = Destination(b"x", b"%d" % number)
        trial = it.begin(one, message(number), places)
        await trial.out
        it.miss(one, trial)
    assert [one for one in waited_for if one not in it] == []
    for task in it.tasks():
        task.cancel()


async def test_without_a_connection_everything_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECTING", 0.1)
    it = Aside(nowhere(), timeout=8.0)
    assert not it.alert
    batch = [message(number) for number in range(3)]
    it.suspect(batch[:2])
    it.given_up(batch, [None, None, CONFIRMED])
    assert it.alert
    known = it.known(batch)
    assert known == {2: CONFIRMED}
    doubtful = it.doubtful(batch, known)
    assert sorted(doubtful.values()) == [[0], [1]]
    outcomes = dict(known)
    silent = await it.ask(batch, doubtful, 0.5, outcomes)
    assert silent == doubtful
    assert await it.verdicts(batch, silent) == {}
    assert outcomes == known
    await it.close()
    await it.close()


async def test_nobody_is_stuck_unless_others_were_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that stands still answers nobody, and what it confirmed before says nothing."""
    for name in ("PATIENCE", "BRIEF", "LONELY", "CONNECTING"):
        monkeypatch.setattr(module, name, 0.1)
    it = Aside(nowhere(), timeout=8.0)
    connection: Any = Mute()
    one = Destination(b"x", b"1")
    it.confirmed(time.monotonic())
    await asyncio.sleep(0.01)  # so that it begins later, by any clock
    trial = it._trials.begin(one, message(1), it._trials.places(connection, shared=False))
    assert await it._answer(one, trial, trial.began + 1.0) is None
    assert await it.verdicts([message(1)], {one: [0]}) == {}
    it.confirmed(trial.began + 0.05)
    assert list(await it.verdicts([message(1)], {one: [0]})) == [0]
    await it.close()
