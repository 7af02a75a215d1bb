"""The harness itself: a daemon with a bug in it must not pass. One bug for each promise."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.faults.fault import Fault, Missed
from tests.faults.fleet import Fleet
from tests.faults.kinds import KINDS, Kind, Planned, schedule
from tests.rig.account import Account, Verdict
from tests.rig.ledger import Ledger
from tests.rig.odd import BUGS
from tests.rig.servers import Postgres, RabbitMQ
from tests.soak.run import Options, Soak

SEED = 6_000
MESSAGES = 1_000


@asynccontextmanager
async def fleet_with(bug: str, rabbitmq: RabbitMQ, postgres: Postgres, directory: Path) -> AsyncIterator[Fleet]:
    async with Fleet.open(rabbitmq, postgres, directory, mode="store", seed=SEED, bug=bug) as fleet:
        yield fleet


async def passed(ledger: Ledger, *, all_back: bool = True) -> Verdict:
    await ledger.publish(MESSAGES, longest_ms=1_500)
    if all_back:
        await ledger.all_back()
    return ledger.verdict()


@pytest.mark.parametrize(
    ("bug", "broken"), [("early", "early"), ("twice", "came more than once"), ("narrow", "changed")]
)
async def test_a_bug_that_needs_no_fault_is_found(
    bug: str, broken: str, rabbitmq: RabbitMQ, postgres: Postgres, tmp_path: Path
) -> None:
    async with fleet_with(bug, rabbitmq, postgres, tmp_path) as fleet:
        verdict = await passed(fleet.ledger)
        with pytest.raises(AssertionError, match=broken):
            verdict.assert_kept()


async def test_acknowledging_too_soon_is_found(rabbitmq: RabbitMQ, postgres: Postgres, tmp_path: Path) -> None:
    """Killed between COPY and commit: the broker has been told that it is safe."""
    async with fleet_with("acknowledge first", rabbitmq, postgres, tmp_path) as fleet:
        first, second = fleet.daemons
        async with first.meant(), second.meant():
            await second.kill()
            await first.start("park.copied:1")
            await fleet.ledger.publish(MESSAGES, delay_ms=1_000)
            await first.process.wait()
            await first.start()
            await first.ready()
            with pytest.raises(AssertionError, match="lost"):
                await fleet.ledger.all_back(timeout=5)
            with pytest.raises(AssertionError, match="lost"):
                fleet.ledger.verdict().assert_kept(repeats=True)


async def test_a_new_name_for_a_copy_is_found(rabbitmq: RabbitMQ, postgres: Postgres, tmp_path: Path) -> None:
    """Killed between publish and commit: what comes twice has one x-delayer-id, or the store counts otherwise."""
    async with fleet_with("new id", rabbitmq, postgres, tmp_path) as fleet:
        first, second = fleet.daemons
        async with first.meant(), second.meant():
            await second.kill()
            await first.start("release.published:1")
            await fleet.ledger.publish(MESSAGES, delay_ms=1_000)
            await first.process.wait()
            await first.start()
            await second.start()
        await fleet.ledger.until(lambda: fleet.ledger.total() > fleet.ledger.account.sent)
        await fleet.ledger.all_back()
        await fleet.finish()
        counters = await fleet.place.conserved()
        assert fleet.ledger.account.rows_back > counters["released"]


def test_every_bug_is_planted_somewhere() -> None:
    assert set(BUGS) == {"early", "twice", "narrow", "acknowledge first", "new id"}


def test_a_schedule_repeats_by_its_seed_and_has_every_kind() -> None:
    plan = schedule(1, 600.0, 15.0)
    assert plan == schedule(1, 600.0, 15.0) != schedule(2, 600.0, 15.0)
    assert len(plan) >= 120
    assert {planned.fault.kind for planned in plan} == set(KINDS)
    assert plan == sorted(plan, key=lambda planned: planned.at)
    assert 15.0 <= plan[0].at <= plan[-1].at <= 585.0
    assert all(isinstance(kind, Kind) and kind.often >= 1 for kind in KINDS.values())


class Nothing:
    """As much of a fleet as a fault needs that breaks nothing."""

    def __init__(self) -> None:
        self.surprises: list[str] = []
        self.ledger = SimpleNamespace(account=Account())
        self.ledger.account.windows = []

    @asynccontextmanager
    async def holding(self, things: Iterable[str]) -> AsyncIterator[None]:
        """Nobody else is here."""
        yield


@pytest.mark.parametrize(
    ("raised", "counts"),
    [(None, (1, 0, 0)), (Missed("no connection"), (0, 1, 0)), (RuntimeError("it broke"), (0, 0, 1))],
)
async def test_only_a_fault_that_broke_something_counts(
    raised: Exception | None, counts: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_fleet: object, _fault: Fault) -> None:
        if raised is not None:
            raise raised

    monkeypatch.setattr("tests.soak.run.KINDS", {"broken": Kind(broken, ["store"], (0.0, 0.0), 1)})
    monkeypatch.setattr("tests.faults.kinds.KINDS", {"broken": Kind(broken, ["store"], (0.0, 0.0), 1)})
    soak, fleet = Soak(Options(60.0, 1, tmp_path)), Nothing()
    await soak._inject(fleet, Planned(0.0, Fault("broken")))  # type: ignore[arg-type]
    assert (soak.faults.total(), soak.missed.total(), len(fleet.surprises)) == counts
    soak._log.close()
    assert len(fleet.ledger.account.windows) == 1, "also of one that missed: something may have been killed for it"
