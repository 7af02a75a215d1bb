"""The harness itself: a daemon with a bug in it must not pass. One bug for each promise."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import aio_pika
import pytest

from tests.faults.doomed import refused
from tests.faults.fleet import Fleet
from tests.faults.kinds import KINDS, schedule
from tests.support.ledger import Ledger
from tests.support.place import eventually
from tests.support.servers import Postgres, RabbitMQ
from tests.support.verdict import Verdict

SEED = 6_000
MESSAGES = 1_000
CASCADE = {"NATIVE__STRATEGY": "cascade"}


Opened = Callable[..., AbstractAsyncContextManager[Fleet]]


@pytest.fixture
def fleet_with(rabbitmq: RabbitMQ, postgres: Postgres, tmp_path: Path) -> Opened:
    """Opens a fleet whose daemons have this bug."""

    def open_fleet(
        bug: str, mode: str = "store", environ: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[Fleet]:
        return Fleet.open(rabbitmq, postgres, tmp_path, mode=mode, seed=SEED, bug=bug, environ=environ)

    return open_fleet


async def passed(ledger: Ledger, *, all_back: bool = True) -> Verdict:
    await ledger.publish(MESSAGES, longest_ms=1_500)
    if all_back:
        await ledger.all_back()
    return ledger.verdict()


@asynccontextmanager
async def killed_at(fleet: Fleet, point: str) -> AsyncIterator[None]:
    """The only daemon reaches this point with the messages of the block, and another replaces it."""
    first, second = fleet.daemons
    async with first.meant(), second.meant():
        await second.kill()
        await first.start(point)
        yield
        await first.process.wait()
        await first.start()
        await second.start()


@pytest.mark.parametrize(
    ("bug", "broken"), [("early", "early"), ("twice", "came more than once"), ("narrow", "changed")]
)
@pytest.mark.parametrize("mode", ["store", "native"])
async def test_a_bug_that_needs_no_fault_is_found(mode: str, bug: str, broken: str, fleet_with: Opened) -> None:
    async with fleet_with(bug, mode=mode) as fleet:
        verdict = await passed(fleet.ledger)
        with pytest.raises(AssertionError, match=broken):
            verdict.assert_kept()


async def test_acknowledging_too_soon_is_found(fleet_with: Opened) -> None:
    """Killed between COPY and commit: under this bug the broker already has the acknowledgement."""
    async with fleet_with("acknowledge first") as fleet:
        async with killed_at(fleet, "park.copied:1"):
            await fleet.ledger.publish(MESSAGES, delay_ms=1_000)
        await fleet.daemons[0].ready()
        with pytest.raises(AssertionError, match="lost"):
            await fleet.ledger.all_back(timeout=5)
        with pytest.raises(AssertionError, match="lost"):
            fleet.ledger.verdict().assert_kept(repeats=True)


@pytest.mark.parametrize("mode", ["store", "native"])
async def test_forgetting_returned_messages_is_found(mode: str, fleet_with: Opened) -> None:
    """The destination routes to no queue for a while: returned messages must be held, not forgotten."""
    async with fleet_with("forgetful", mode=mode) as fleet:
        await bind(fleet, away=True)
        await fleet.ledger.publish(MESSAGES, delay_ms=500)
        await eventually(lambda: forgotten(fleet), lambda count: count == MESSAGES)
        await bind(fleet)
        await passed(fleet.ledger, all_back=False)
        account = fleet.ledger.account
        await fleet.ledger.until(lambda: account.back >= MESSAGES, timeout=60)
        with pytest.raises(AssertionError, match="lost"):
            await fleet.ledger.all_back(timeout=1)
        with pytest.raises(AssertionError, match=f"{MESSAGES} of {2 * MESSAGES} lost"):
            fleet.ledger.verdict().assert_kept(repeats=True)


async def forgotten(fleet: Fleet) -> int:
    return sum(daemon.told["forgotten"] for daemon in fleet.daemons)


async def bind(fleet: Fleet, *, away: bool = False) -> None:
    """Bind the ledger's queue to the destination, or unbind it."""
    async with await aio_pika.connect(fleet.place.broker) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(fleet.ledger.queue, passive=True)
        await (queue.unbind if away else queue.bind)("delayer.out", "#")


def test_every_bug_replaces_existing_code() -> None:
    plant = "from tests.support.odd import BUGS, OF_FEATURES\nfor bug in (BUGS | OF_FEATURES).values(): bug()"
    subprocess.run([sys.executable, "-c", plant], check=True, timeout=60)


@pytest.mark.parametrize("bug", ["", "lenient"])
async def test_dropping_doomed_messages_is_found(bug: str, fleet_with: Opened) -> None:
    async with fleet_with(bug) as fleet:
        await fleet.ledger.publish(100, longest_ms=500, doomed_ones=20)
        await fleet.ledger.all_back()
        await fleet.finish()
        found = await refused(fleet)
    assert found.sent == 20
    assert found.kept is (not bug)
    assert found.again == 0
    assert len(found.missing) == (20 if bug else 0)


async def test_a_copy_with_a_new_id_is_found(fleet_with: Opened) -> None:
    """Killed between publish and commit: copies share one x-delayer-id. Under this bug a message has more ids than
    readings, and the store's counter differs."""
    async with fleet_with("new id") as fleet:
        async with killed_at(fleet, "release.published:1"):
            await fleet.ledger.publish(MESSAGES, delay_ms=1_000)
        await came_twice(fleet)
        counters = await fleet.place.conserved()
        assert fleet.ledger.account.rows_back > counters["released"]


async def test_a_new_id_at_the_end_of_the_cascade_is_found(fleet_with: Opened) -> None:
    """Killed between the confirm of the destination and the acknowledgement of the due queue: the same, without a store
    to count the names."""
    async with fleet_with("new id", mode="native", environ=CASCADE) as fleet:
        first, second = fleet.daemons
        async with first.meant(), second.meant():
            await second.kill()
            await fleet.ledger.publish(MESSAGES, delay_ms=8_000)
            # Only once each has left the intake queue, because no count includes unacknowledged messages.
            await eventually(fleet.place.standing, lambda standing: sum(standing.values()) == MESSAGES)
            assert await first.process.stop() == 0
            await eventually(lambda: fleet.place.depth("delays.due"), lambda depth: depth >= MESSAGES)
            await first.start("intake.confirmed:1")
            await first.process.wait()
            await first.start()
            await second.start()
        await came_twice(fleet)


async def came_twice(fleet: Fleet) -> None:
    """Check that some messages came twice, with more ids than readings."""
    ledger = fleet.ledger
    await ledger.until(lambda: ledger.total() > ledger.account.sent)
    await ledger.all_back()
    await fleet.finish()
    with pytest.raises(AssertionError, match=r"more than they were read: .* (ids|rows)"):
        ledger.verdict().assert_kept(repeats=True)


@pytest.mark.parametrize("fault", [False, True], ids=["calm", "killed"])
@pytest.mark.parametrize("mode", ["store", "native"])
async def test_sorted_headers_are_found(mode: str, fault: bool, rabbitmq: RabbitMQ, fleet_with: Opened) -> None:
    """Brokers before 4.0 sort the headers of some redelivered messages only, so the original order of these is unknown.
    The order of all others is known."""
    if rabbitmq.sorts_headers:
        pytest.skip("RabbitMQ sorts every header table from 4.0 on, before a daemon can")
    async with fleet_with("sorts headers", mode=mode) as fleet:
        ledger = fleet.ledger
        if fault:
            async with killed_at(fleet, "park.copied:1" if mode == "store" else "intake.confirmed:1"):
                await ledger.publish(MESSAGES, longest_ms=1_500)
        verdict = await passed(ledger)
        again = sum(ledger.account.readings.again(number) for number in range(verdict.sent))
        print(f"{verdict}; {again} were delivered again")
        assert (again > 0) is fault
        with pytest.raises(AssertionError, match="headers came sorted"):
            verdict.assert_kept(repeats=fault)


async def test_an_id_of_two_messages_is_found(fleet_with: Opened) -> None:
    async with fleet_with("same id") as fleet:
        verdict = await passed(fleet.ledger)
        verdict.assert_kept()
        with pytest.raises(AssertionError, match="have the x-delayer-id of another"):
            verdict.assert_apart()


def test_a_schedule_repeats_by_its_seed_and_has_every_kind() -> None:
    plan = schedule(1, 600.0, 15.0)
    assert plan == schedule(1, 600.0, 15.0) != schedule(2, 600.0, 15.0)
    assert len(plan) >= 120
    assert {planned.fault.kind for planned in plan} == set(KINDS)
    assert plan == sorted(plan, key=lambda planned: planned.at)
    assert 15.0 <= plan[0].at <= plan[-1].at <= 585.0
