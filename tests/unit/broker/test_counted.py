"""A count of 0 is not believed while a queue's leader is slow, nor while another one is elected."""

from __future__ import annotations

import pytest

from delayer.broker import pipelined_admin
from delayer.broker.errors import BrokerUnreachable
from delayer.broker.pipelined_admin import counted

LONG = 60.0


async def ask(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], slow: list[bool], *, election: float, patience: float = LONG
) -> int:
    """Count a queue that gives these counts, each slowly or not. The last answers are repeated."""

    async def look() -> int:
        return counts.pop(0) if len(counts) > 1 else counts[0]

    async def is_slow(*_: object) -> bool:
        return slow.pop(0) if len(slow) > 1 else slow[0]

    async def ask_line() -> None: ...

    monkeypatch.setattr(pipelined_admin, "slow", is_slow)
    monkeypatch.setattr(pipelined_admin, "ELECTION_SECONDS", election)
    monkeypatch.setattr(pipelined_admin, "LEADER_SECONDS", 0.001)
    return await counted(patience, look, ask_line, lambda found: [] if found else ["q"])


async def test_a_quick_0_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await ask(monkeypatch, [0, 500], [False], election=LONG) == 0


async def test_a_quick_0_after_a_slow_one_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker counts 0 at once while it elects a leader."""
    assert await ask(monkeypatch, [0, 0, 0, 500], [True, False], election=LONG) == 500


async def test_0_counts_after_the_election(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await ask(monkeypatch, [0], [True, False], election=0.005) == 0


async def test_a_leader_that_stays_slow_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BrokerUnreachable, match="queue 'q' did not answer"):
        await ask(monkeypatch, [0], [True], election=LONG, patience=0.01)
