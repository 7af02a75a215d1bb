"""The model of bench/limits.py: each part's rate follows from its cost, and the smallest is where it stops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.limits import BOTH, DRAIN, PARK, RELEASE, STEADY, Costs, Layout, limits, on_one_machine, stop, total_us

COSTS = Costs(
    publisher_us=5, broker_in_us=10, broker_park_us=10, daemon_park_us=20, database_park_us=10, daemon_release_us=20,
    database_release_us=10, broker_release_us=20, broker_out_us=10, queue_us=40, queue_log_us=15, log_park_bytes=1000,
    log_release_bytes=250, claim_messages=500, sync_ms=2.5,
)  # fmt: skip
LAYOUT = Layout(daemons=1, lanes=4, broker_cores=4, database_cores=4, log_mb=100)


def test_each_part_is_full_when_it_has_spent_its_capacity() -> None:
    assert limits(COSTS, STEADY, LAYOUT) == pytest.approx({
        "daemon": 25_000, "lane": 400_000 / 3, "database": 200_000, "database log": 80_000, "broker": 80_000,
        "queue": 25_000, "queue log": 1e6 / 30,
    })  # fmt: skip


def test_only_the_intake_does_not_spread_over_daemons() -> None:
    rates = [limits(COSTS, STEADY, replace(LAYOUT, daemons=n, lanes=2 * n))["daemon"] for n in (1, 2, 16)]
    assert rates == pytest.approx([25_000, 100_000 / 3, 1e6 / 21.25])
    rates = [limits(COSTS, DRAIN, replace(LAYOUT, daemons=n, lanes=2 * n))["daemon"] for n in (1, 2, 16)]
    assert rates == pytest.approx([50_000, 100_000, 800_000])


def test_a_daemon_without_a_lane_adds_nothing() -> None:
    four, sixteen = (limits(COSTS, DRAIN, replace(LAYOUT, daemons=n)) for n in (4, 16))
    assert four == sixteen


def test_a_lane_handles_two_claims_at_a_time_and_writes_one() -> None:
    assert COSTS.lane_rate == pytest.approx(500 / 0.015)  # Each takes 25 ms of CPU, and two syncs.
    assert replace(COSTS, daemon_release_us=100).lane_rate == pytest.approx(1e6 / 100)


def test_more_destinations_help_a_drain_and_not_the_one_queue_of_the_intake() -> None:
    many = replace(LAYOUT, queues=8)
    assert limits(COSTS, DRAIN, many)["queue"] == pytest.approx(200_000)
    assert limits(COSTS, STEADY, many)["queue"] == pytest.approx(25_000)


def test_one_machine_shares_its_cores() -> None:
    assert total_us(COSTS, BOTH) == 105
    assert on_one_machine(COSTS, RELEASE, 1, 2) == pytest.approx({"cores": 40_000, "daemon": 50_000})
    assert on_one_machine(COSTS, PARK, 2, 2) == pytest.approx({"cores": 50_000, "daemon": 50_000})
    assert on_one_machine(COSTS, BOTH, 2, 2) == pytest.approx({"cores": 2e6 / 105, "daemon": 100_000 / 3})


def test_it_stops_at_the_part_with_the_smallest_rate() -> None:
    assert stop({"daemon": 3.0, "queue": 2.0, "broker": 4.0}) == ("queue", 2.0)
