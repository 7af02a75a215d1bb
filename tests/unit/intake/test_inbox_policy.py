"""The policy for rows of the SQL inbox."""

from __future__ import annotations

from unittest.mock import MagicMock

from delayer.core.counters import Counters
from delayer.core.plan import Mode, Policy, Route
from delayer.core.retry_policy import RetryPolicy
from delayer.intake.inbox import InboxHandler


def policy_for_rows(policy: Policy) -> Policy:
    live = MagicMock()
    live.policy.return_value = policy
    handler = InboxHandler(live, MagicMock(), MagicMock(), Counters())
    handler.begin(MagicMock(prefetch=100, acks=MagicMock(kept=0, kept_bytes=0)))
    return handler._policy()


def test_rows_take_no_route_with_retry() -> None:
    retry = RetryPolicy(1000, 2.0, 60_000, 0.0, 3, b"failed")
    routes = {one.source: one for one in (Route(b"in", b"out"), Route(b"retries", b"", retry=retry))}
    assert set(policy_for_rows(Policy(Mode.STORE, routes, max_delay_ms=1000)).routes) == {b"in"}


def test_a_row_with_a_key_waits_for_the_store_in_native_mode() -> None:
    routes = {b"in": Route(b"in", b"out")}
    assert policy_for_rows(Policy(Mode.NATIVE, routes, max_delay_ms=1000, has_store=False)).has_store
