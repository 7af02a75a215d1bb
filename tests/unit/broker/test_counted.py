"""A count of 0 is not trusted while a queue's leader is slow, or while a new one is being elected."""

from __future__ import annotations

import pytest
from pamqp import commands
from pamqp.base import Frame

from delayer.amqp.errors import ChannelClosed
from delayer.broker import pipelined_admin
from delayer.broker.errors import BrokerUnreachable
from delayer.broker.pipelined_admin import Questions, QueueState

LONG = 60.0


class Scripted(Questions):
    """Returns these counts, each slowly or not. The last answers are repeated."""

    def __init__(self, counts: list[int], slow: list[bool]) -> None:
        self.counts, self.slow = counts, slow

    async def ask(self, _: object) -> list[Frame | ChannelClosed]:
        count = self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]
        return [commands.Queue.DeclareOk("q", count, 0)]

    async def _was_slow(self, _: float) -> bool:
        return self.slow.pop(0) if len(self.slow) > 1 else self.slow[0]


async def ask(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], slow: list[bool], *, election: float, patience: float = LONG
) -> int:
    """Count the messages of a queue."""
    monkeypatch.setattr(pipelined_admin, "ELECTION_SECONDS", election)
    monkeypatch.setattr(pipelined_admin, "LEADER_SECONDS", 0.001)
    [state] = (await Scripted(counts, slow).states(["q"], patience)).values()
    assert isinstance(state, QueueState)
    return state.messages


async def test_a_quick_0_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await ask(monkeypatch, [0, 500], [False], election=LONG) == 0


async def test_a_quick_0_after_a_slow_one_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker immediately reports 0 while it elects a leader."""
    assert await ask(monkeypatch, [0, 0, 0, 500], [True, False], election=LONG) == 500


async def test_0_counts_after_the_election(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await ask(monkeypatch, [0], [True, False], election=0.005) == 0


async def test_a_leader_that_stays_slow_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BrokerUnreachable, match="queue 'q' did not answer"):
        await ask(monkeypatch, [0], [True], election=LONG, patience=0.01)
