"""Keys, cancels, retries, takeovers, the border between cascade and store, limited rates and late messages, each under
a handful of faults. Each feature judges every number by its own rule (tests/faults/features). A daemon with a bug in a
feature must not pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest

from tests.faults.features import cancels, foreign, keys, modes, overdue, peace, rates, retries
from tests.faults.features.peace import HOUR_MS, meanwhile
from tests.faults.features.striking import finished, handful, numbers_in, opened, strike
from tests.faults.fleet import Fleet
from tests.faults.scenes import WORKER
from tests.support.account import Verdict
from tests.support.flow import flowing
from tests.support.ledger import Ledger
from tests.support.servers import Postgres, RabbitMQ

SEED, BUGS_SEED = 7_000, 7_600
STORE, NATIVE = MODES = ("store", "native")
Servers = tuple[RabbitMQ, Postgres]
LONG = pytest.mark.long
SHORT = 2
"""The number of faults in the short form of a test."""


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """Servers that these tests may kill."""
    with RabbitMQ(hidden=WORKER) as rabbitmq, Postgres() as postgres:
        yield rabbitmq, postgres


def kept(verdict: Verdict) -> None:
    """Nothing is early or changed; copies appear only after a fault, and are marked. Each feature judges losses
    itself."""
    print(verdict)
    verdict = replace(verdict, missing=())
    verdict.assert_kept(repeats=True)
    verdict.assert_apart()


# ---- keys


@LONG
@pytest.mark.deadline(500)
@pytest.mark.parametrize("mode", MODES)
async def test_keys(mode: str, servers: Servers, tmp_path: Path) -> None:
    """One daemon reads. First it takes in everything before anything is due; then it reads while others become due.
    Native mode has no faults of the store: there a key is refused while the store is down."""
    async with opened(*servers, tmp_path, keys.Keyed, mode=mode, seed=SEED, daemons=1) as fleet:
        ledger = fleet.ledger
        assert isinstance(ledger, keys.Keyed)
        with_store = mode == STORE
        await ledger.publish(10 * keys.KEYS, delay_ms=HOUR_MS)
        struck = await strike(fleet, handful(SEED, daemons=1, store=with_store), rate=100, delay_ms=HOUR_MS)
        waiting = await peace.keys_waiting(fleet, handful(SEED + 1, daemons=1, store=with_store)[:3])
        live, ledger.order = ledger.account.sent, []
        struck += 3 + await strike(fleet, handful(SEED + 2, daemons=1, store=with_store), rate=300, longest_ms=1_500)
        await ledger.publish(keys.KEYS, longest_ms=1_500)
        counters = await finished(fleet)
        refused = set(await numbers_in(fleet, "delays.refused"))
        judgement = keys.judged_live(ledger, live, refused)
        print(
            f"{mode}: {struck} faults, {ledger.account.sent} sent, {live} before any was due;",
            f"{len(judgement.again)} read again behind later ones",
            counters,
        )
        waiting.assert_kept()
        judgement.assert_kept()
        kept(ledger.verdict())
        # If a fault prevents the commit of a release, the row may be replaced before its next release.
        assert counters["released"] <= await fleet.rows_back() <= counters["released"] + counters["cancelled"]
        assert counters["cancelled"] >= live - keys.KEYS - len(refused)


@pytest.mark.deadline(500)
@pytest.mark.parametrize(
    ("mode", "faults"),
    [(STORE, SHORT), pytest.param(STORE, None, marks=LONG), pytest.param(NATIVE, None, marks=LONG)],
    ids=["short", STORE, NATIVE],
)
async def test_key_modes(mode: str, faults: int | None, servers: Servers, tmp_path: Path) -> None:
    """Keys that throttle and keys that debounce, while messages become due; first in peace. As with keys, native mode
    has no faults of the store."""
    async with opened(*servers, tmp_path, modes.Modal, mode=mode, seed=SEED + 70, daemons=1) as fleet:
        peaceful = await peace.modes_in_peace(fleet, seconds=4.0)
        peaceful.assert_kept()
        assert peaceful.dropped
        ledger = fleet.ledger
        assert isinstance(ledger, modes.Modal)
        chosen = handful(SEED + 70, daemons=1, store=mode == STORE)[:faults]
        struck = await strike(fleet, chosen, rate=300, longest_ms=1_500)
        await ledger.publish(2 * keys.KEYS, longest_ms=1_500)
        counters = await finished(fleet)
        judgement = modes.judged(ledger, set(await numbers_in(fleet, "delays.refused")))
        print(f"{mode}: {struck} faults, {ledger.account.sent} sent, {judgement.dropped} dropped", counters)
        judgement.assert_kept()
        assert judgement.dropped > peaceful.dropped
        kept(ledger.verdict())
        assert counters["released"] <= await fleet.rows_back() <= counters["released"] + counters["cancelled"]


# ---- cancels


@LONG
@pytest.mark.deadline(500)
@pytest.mark.parametrize("mode", MODES)
async def test_cancels(mode: str, servers: Servers, tmp_path: Path) -> None:
    """Messages cancel a third, commands some, while they become due; first in peace, when no exception is allowed."""
    async with opened(*servers, tmp_path, cancels.Cancelling, mode=mode, seed=SEED + 10, daemons=1) as fleet:
        peaceful = await peace.cancelled_in_peace(fleet, seconds=4.0)
        peaceful.assert_kept()
        assert peaceful.cancelled > 50
        ledger = fleet.ledger
        assert isinstance(ledger, cancels.Cancelling)
        async with peace.cancelling(fleet):
            struck = await strike(fleet, handful(SEED + 10, daemons=1, store=mode == STORE), rate=150, longest_ms=3_000)
        counters = await finished(fleet)
        refused = await numbers_in(fleet, "delays.refused")
        assert mode == NATIVE or not refused
        judgement = cancels.judged(ledger.account, ledger.asked, ledger.told, refused)
        print(f"{mode}: {struck} faults, {ledger.account.sent} sent; {judgement}", counters)
        judgement.assert_kept()
        verdict = ledger.verdict()
        kept(verdict)
        # A row may be delivered, rolled back by a fault, and then cancelled or replaced when its message is read a
        # second time.
        uncounted = len(judgement.out) + len(judgement.read) + len(judgement.unsure)
        uncounted += verdict.taken_in_twice + verdict.nameless
        assert counters["released"] <= await fleet.rows_back() <= counters["released"] + uncounted


# ---- retries


@pytest.mark.deadline(500)
@pytest.mark.parametrize(
    ("mode", "faults"),
    [(STORE, SHORT), pytest.param(STORE, None, marks=LONG), pytest.param(NATIVE, None, marks=LONG)],
    ids=["short", STORE, NATIVE],
)
async def test_retries(mode: str, faults: int | None, servers: Servers, tmp_path: Path) -> None:
    """Messages fail up to six times; the route allows three retries. First in peace, when nothing may be delivered
    twice."""
    async with opened(*servers, tmp_path, retries.Failing, mode=mode, seed=SEED + 20, environ=retries.ENVIRON) as fleet:
        peaceful = await peace.retried_in_peace(fleet, 300)
        peaceful.assert_kept()
        assert not peaceful.copies
        ledger = fleet.ledger
        assert isinstance(ledger, retries.Failing)
        struck = await strike(fleet, handful(SEED + 20, store=mode == STORE)[:faults], rate=60)
        await ledger.publish(100)
        judgement = await peace.retried(fleet)
        counters = await finished(fleet)
        print(f"{mode}: {struck} faults, {ledger.account.sent} sent, {judgement.copies} copies", counters)
        judgement.assert_kept()
        assert not ledger.wrong, ledger.wrong[0]


# ---- takeovers


@LONG
@pytest.mark.deadline(500)
@pytest.mark.parametrize("mode", MODES)
async def test_a_takeover(mode: str, servers: Servers, tmp_path: Path) -> None:
    """Messages that stood in the cascade before the daemons started, and messages published while faults strike."""
    async with opened(*servers, tmp_path, foreign.Foreign, mode=mode, seed=SEED + 30, environ=foreign.ENVIRON) as fleet:
        ledger = fleet.ledger
        assert isinstance(ledger, foreign.Foreign)
        await peace.taken_over_in_peace(fleet, 500)
        ledger.verdict().assert_kept()
        struck = await strike(fleet, handful(SEED + 30, adopted=True), rate=100, longest_ms=8_000)
        await ledger.all_back(timeout=90)
        await ledger.drained()
        standing = await foreign.levels_standing(fleet)
        counters = await finished(fleet)
        print(f"{mode}: {struck} faults, {ledger.by_itself} by the cascade itself", counters)
        ledger.verdict(standing).assert_kept(repeats=True)
        kept(ledger.verdict())
        assert counters["released"] == await fleet.rows_back() > ledger.account.sent // 2


# ---- the border between cascade and store


@LONG
@pytest.mark.deadline(500)
async def test_park_beyond_changes_between_cascade_and_store(servers: Servers, tmp_path: Path) -> None:
    """``park_beyond`` moves up and down during the run, and each message is on one side of it."""
    async with opened(*servers, tmp_path, seed=SEED + 40) as fleet:
        ledger, borders = fleet.ledger, cycle(("3s", "0s", "1s", "2s"))

        async def move() -> None:
            fleet.more = f'[store]\npark_beyond = "{next(borders)}"\n'
            fleet.switch(STORE)
            await asyncio.sleep(1.0)  # not to wait for anything: this is the pace of the changes

        async with meanwhile(move):
            await ledger.publish(500, longest_ms=4_000)
            await ledger.all_back()
            ledger.verdict().assert_kept()
            struck = await strike(fleet, handful(SEED + 40, adopted=True), rate=150, longest_ms=4_000)
        await ledger.publish(300, longest_ms=4_000)
        await ledger.all_back()
        counters = await finished(fleet)
        print(f"{struck} faults; {ledger.verdict()}", counters)
        ledger.verdict().assert_kept(repeats=True)
        ledger.verdict().assert_apart()
        assert ledger.account.sent * 0.2 < await fleet.rows_back() == counters["released"] < ledger.account.sent * 0.9


# ---- limited rates


@LONG
@pytest.mark.deadline(500)
async def test_a_limited_rate(servers: Servers, tmp_path: Path) -> None:
    """3,000 messages are due at once, and another route does not wait for them; then the faults."""
    async with (
        opened(*servers, tmp_path, seed=SEED + 50, environ=rates.ENVIRON) as fleet,
        rates.paced(fleet, SEED + 51) as flood,
    ):
        await peace.flooded_in_peace(fleet, flood, 3_000)
        flood.verdict().assert_kept()
        fleet.ledger.verdict().assert_kept()
        async with flowing(flood, 100, longest_ms=1_000):
            struck = await strike(fleet, handful(SEED + 50), rate=100, longest_ms=1_000)
        await flood.all_back(timeout=120)
        await fleet.ledger.all_back()
        counters = await finished(fleet)
        await flood.drained()
        print(f"{struck} faults; {flood.verdict()}; {fleet.ledger.verdict()}", counters)
        flood.verdict().assert_kept(repeats=True)
        fleet.ledger.verdict().assert_kept(repeats=True)


# ---- late messages


@LONG
@pytest.mark.deadline(500)
@pytest.mark.parametrize("mode", MODES)
async def test_late_messages_are_held(mode: str, servers: Servers, tmp_path: Path) -> None:
    """Faults make messages late, and some are late when published. Each is delivered or held; only a fault may cause
    both. A held message is delivered after an operator retries it."""
    async with opened(*servers, tmp_path, mode=mode, seed=SEED + 60, environ=overdue.ENVIRON) as fleet:
        ledger = fleet.ledger
        peaceful = await overdue.late_in_peace(fleet, 200)
        peaceful.assert_kept()
        assert ledger.account.back == 0, "not even late"
        async with meanwhile(lambda: overdue.publish_overdue(ledger, 1)):
            struck = await strike(fleet, handful(SEED + 60), rate=150)
        held = await overdue.everywhere(fleet)
        judgement = overdue.judged(ledger.account, held.all)
        print(
            f"{mode}: {struck} faults, {ledger.account.sent} sent, {len(held.all)} late and held,",
            f"{len(held.strays)} among the strays; {len(judgement.excused)} came and are held",
        )
        judgement.assert_kept()
        await overdue.let_go(fleet)
        counters = await finished(fleet)
        print(ledger.verdict(), counters)
        ledger.verdict().assert_kept(repeats=True)
        ledger.verdict().assert_apart()
        assert not (unmarked := overdue.unmarked(ledger.account)), f"copies that nothing marks: {unmarked[:10]}"


# ---- the harnesses themselves: a daemon with a bug in a feature must not pass

Opened = Callable[..., AbstractAsyncContextManager[Fleet]]


@pytest.fixture
def buggy(rabbitmq: RabbitMQ, postgres: Postgres, tmp_path: Path) -> Opened:
    """Opens a fleet whose daemons have a ``bug``."""
    return partial(opened, rabbitmq, postgres, tmp_path, seed=BUGS_SEED)


@LONG
async def test_a_missing_replacement_is_found(buggy: Opened) -> None:
    async with buggy(keys.Keyed, daemons=1, bug="keyless") as fleet:
        await fleet.ledger.publish(keys.KEYS, delay_ms=peace.HOUR_MS)
        judgement = await peace.keys_waiting(fleet, [])
        with pytest.raises(AssertionError, match=f"{keys.KEYS} came though they were replaced"):
            judgement.assert_kept()


@LONG
@pytest.mark.parametrize(("bug", "broken"), [("forgets keep", "dropped for nothing"), ("forgets ceilings", "ceiling")])
async def test_a_mode_without_effect_is_found(buggy: Opened, bug: str, broken: str) -> None:
    async with buggy(modes.Modal, daemons=1, bug=bug) as fleet:
        judgement = await peace.modes_in_peace(fleet, 2.0)
        with pytest.raises(AssertionError, match=broken):
            judgement.assert_kept()


@LONG
async def test_a_cancel_without_effect_is_found(buggy: Opened) -> None:
    async with buggy(cancels.Cancelling, daemons=1, bug="deaf to cancels") as fleet:
        judgement = await peace.cancelled_in_peace(fleet, 2.0)
        with pytest.raises(AssertionError, match="came though cancelled"):
            judgement.assert_kept()


@LONG
@pytest.mark.parametrize(
    ("mode", "bug", "broken"),
    [
        (STORE, "impatient", "before their pause"),  # the cascade has whole seconds: half of 1.2 s is one
        (STORE, "once more", "came too often"),
        (NATIVE, "once more", "came too often"),
    ],
)
async def test_a_retry_too_soon_or_too_often_is_found(buggy: Opened, mode: str, bug: str, broken: str) -> None:
    async with buggy(retries.Failing, mode=mode, environ=retries.ENVIRON, bug=bug) as fleet:
        judgement = await peace.retried_in_peace(fleet, 60)
        with pytest.raises(AssertionError, match=broken):
            judgement.assert_kept()


@LONG
@pytest.mark.parametrize(
    ("bug", "kind", "environ"),
    [("hurried", foreign.Foreign, foreign.ENVIRON), ("at the border", Ledger, {"STORE__PARK_BEYOND": "2s"})],
    ids=["a takeover with too short delays", "early at park_beyond"],
)
async def test_early_messages_are_found(buggy: Opened, bug: str, kind: type[Ledger], environ: dict[str, str]) -> None:
    async with buggy(kind, environ=environ, bug=bug) as fleet:
        await fleet.ledger.publish(100, longest_ms=4_000)
        await fleet.ledger.all_back()
        with pytest.raises(AssertionError, match="early"):
            fleet.ledger.verdict().assert_kept()


@LONG
async def test_twice_the_rate_is_found(buggy: Opened) -> None:
    async with buggy(environ=rates.ENVIRON, bug="unlimited") as fleet, rates.paced(fleet, BUGS_SEED) as flood:
        with pytest.raises(AssertionError, match="faster than it may"):
            await peace.flooded_in_peace(fleet, flood, 3_000)


@LONG
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("bug", "found"), [("never too late", "came after the limit"), ("lenient at intake", "came though they were")]
)
async def test_late_messages_are_found(buggy: Opened, mode: str, bug: str, found: str) -> None:
    async with buggy(mode=mode, environ=overdue.ENVIRON, bug=bug) as fleet:
        judgement = await overdue.late_in_peace(fleet, 50)
        with pytest.raises(AssertionError, match=found):
            judgement.assert_kept()
