"""The harnesses of tests/faults/features: a daemon with a bug in a feature must not pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.features import cancels, foreign, keys, overdue, peace, rates, retries
from tests.faults.features.striking import opened
from tests.support.servers import Postgres, RabbitMQ

SEED = 7_600

pytestmark = pytest.mark.long


async def test_a_message_that_replaces_nothing_is_found(rabbitmq: RabbitMQ, postgres: Postgres, tmp_path: Path) -> None:
    async with opened(rabbitmq, postgres, tmp_path, keys.Keyed, seed=SEED, daemons=1, bug="keyless") as fleet:
        await fleet.ledger.publish(keys.KEYS, delay_ms=peace.HOUR_MS)
        judgement = await peace.keys_waiting(fleet, [])
        with pytest.raises(AssertionError, match=f"{keys.KEYS} came though they were replaced"):
            judgement.assert_kept()


async def test_a_cancel_that_is_only_said_is_found(rabbitmq: RabbitMQ, postgres: Postgres, tmp_path: Path) -> None:
    async with opened(
        rabbitmq, postgres, tmp_path, cancels.Cancelling, seed=SEED, daemons=1, bug="deaf to cancels"
    ) as fleet:
        judgement = await peace.cancelled_in_peace(fleet, 2.0)
        with pytest.raises(AssertionError, match="came though cancelled"):
            judgement.assert_kept()


@pytest.mark.parametrize("mode", ["store", "native"])
@pytest.mark.parametrize(("bug", "broken"), [("impatient", "before their pause"), ("once more", "came too often")])
async def test_a_retry_too_soon_or_too_often_is_found(
    mode: str, bug: str, broken: str, rabbitmq: RabbitMQ, postgres: Postgres, tmp_path: Path
) -> None:
    if mode == "native" and bug == "impatient":
        pytest.skip("the cascade has whole seconds: half of 1.2 s is one")
    environ = retries.ENVIRON
    async with opened(
        rabbitmq, postgres, tmp_path, retries.Failing, mode=mode, seed=SEED, environ=environ, bug=bug
    ) as fleet:
        judgement = await peace.retried_in_peace(fleet, 60)
        with pytest.raises(AssertionError, match=broken):
            judgement.assert_kept()


async def test_a_takeover_with_too_short_delays_is_found(
    rabbitmq: RabbitMQ, postgres: Postgres, tmp_path: Path
) -> None:
    environ = foreign.ENVIRON
    async with opened(
        rabbitmq, postgres, tmp_path, foreign.Foreign, seed=SEED, environ=environ, bug="hurried"
    ) as fleet:
        await fleet.ledger.publish(100, longest_ms=3_000)
        await fleet.ledger.all_back()
        with pytest.raises(AssertionError, match="early"):
            fleet.ledger.verdict().assert_kept()


async def test_early_messages_at_park_beyond_are_found(rabbitmq: RabbitMQ, postgres: Postgres, tmp_path: Path) -> None:
    environ = {"STORE__PARK_BEYOND": "2s"}
    async with opened(rabbitmq, postgres, tmp_path, seed=SEED, environ=environ, bug="at the border") as fleet:
        await fleet.ledger.publish(100, longest_ms=4_000)
        await fleet.ledger.all_back()
        with pytest.raises(AssertionError, match="early"):
            fleet.ledger.verdict().assert_kept()


async def test_twice_the_rate_is_found(rabbitmq: RabbitMQ, postgres: Postgres, tmp_path: Path) -> None:
    environ = rates.ENVIRON
    async with (
        opened(rabbitmq, postgres, tmp_path, seed=SEED, environ=environ, bug="unlimited") as fleet,
        rates.paced(fleet, SEED) as flood,
    ):
        with pytest.raises(AssertionError, match="faster than it may"):
            await peace.flooded_in_peace(fleet, flood, 3_000)


@pytest.mark.parametrize("mode", ["store", "native"])
@pytest.mark.parametrize(
    ("bug", "found"), [("never too late", "came after the limit"), ("lenient at intake", "came though they were")]
)
async def test_late_messages_are_found(
    mode: str, bug: str, found: str, rabbitmq: RabbitMQ, postgres: Postgres, tmp_path: Path
) -> None:
    environ = overdue.ENVIRON
    async with opened(rabbitmq, postgres, tmp_path, mode=mode, seed=SEED, environ=environ, bug=bug) as fleet:
        judgement = await overdue.late_in_peace(fleet, 50)
        with pytest.raises(AssertionError, match=found):
            judgement.assert_kept()
