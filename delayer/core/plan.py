"""What to do with one message. Total: every input has exactly one answer, and no input raises.

    decide(ask, policy, now_ms) -> Cascade | Park | AtOnce | TooLate | Cancel | Refuse

Start here to understand the system: this is what the daemon decides; everything else carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from delayer.core import request
from delayer.core.cascade import MAX_SECONDS
from delayer.core.delay import seconds_until
from delayer.core.forms import CANCEL, CONSULTED, DEFAULT_FORMS, DELAY, DELAY_FORMS, KEY, Ask
from delayer.core.hold import Hold, too_late
from delayer.core.message import Target
from delayer.core.request import LATEST_MS, SHORT_STRING, Mode, Policy, Refused, Route
from delayer.core.retrying import Failure, NoFailure, Retry, failure, wait_ms
from delayer.core.values import KeyGroup

__all__ = [
    "CONSULTED", "DEFAULT_FORMS", "DELAY", "DELAY_FORMS", "LATEST_MS", "SHORT_STRING", "Ask", "AtOnce", "Cancel",
    "Cascade", "Mode", "Park", "Plan", "Policy", "Refuse", "Route", "TooLate",
    "decide", "has_key",
]  # fmt: skip


class Cascade(NamedTuple):
    """Publish into the broker's TTL cascade: ``seconds`` from now, towards ``target``.

    ``failed``, here and below: the message is a queue's dead letter, and goes on with a note of that.
    """

    due_ms: int
    seconds: int
    target: Target
    failed: Failure | None = None


class Park(NamedTuple):
    """Write to the store; a message with a ``key`` replaces the one that waits under it."""

    due_ms: int
    target: Target
    key: bytes | None = None
    failed: Failure | None = None


class AtOnce(NamedTuple):
    """Due already: publish to the destination."""

    due_ms: int
    target: Target
    failed: Failure | None = None


class TooLate(NamedTuple):
    """Later than the ``late_limit`` of its route allows: hold it."""

    due_ms: int
    target: Target
    hold: Hold


@dataclass(frozen=True, slots=True)
class Cancel:
    """Delete the waiting message of this key, or those of this group of keys; this message itself is delivered to
    nobody."""

    key: bytes | KeyGroup


@dataclass(frozen=True, slots=True)
class Refuse:
    """Set aside in the refused queue, for this reason."""

    reason: str


Plan = Cascade | Park | AtOnce | TooLate | Cancel | Refuse


def has_key(plan: Plan) -> bool:
    """Whether the order of arrival matters: it replaces or cancels what arrived before it."""
    return isinstance(plan, Cancel) or (isinstance(plan, Park) and plan.key is not None)


def decide(ask: Ask, policy: Policy, now_ms: int, sure_ms: int | None = None) -> Plan:
    """The plan for one message.

    The clock that rules stands between ``sure_ms`` and ``now_ms``; None says that it is known exactly. A delay counts
    from the later one, so it is never short; what is due by the earlier one is due, so nothing is early.
    """
    try:
        return _decide(ask, policy, now_ms, now_ms if sure_ms is None else sure_ms)
    except Refused as refused:
        return Refuse(str(refused))


def _decide(ask: Ask, policy: Policy, now_ms: int, sure_ms: int) -> Plan:
    headers = ask.headers
    route = request.route_of(ask, policy)
    if route.retry is not None:
        return _retried(ask, route, route.retry, policy, now_ms)
    if CANCEL in headers:
        return Cancel(request.key_of(CANCEL, ask, policy))
    saga = request.cleared_of(ask, route, policy)
    if saga is not None:
        return Cancel(saga)
    due_ms, from_ms = request.due_of(ask, route, policy, now_ms, sure_ms)
    target = request.target_of(ask, route, policy)
    if KEY in headers:
        # Also when it is due at once: only the store can take the waiting one out exactly.
        return Park(due_ms, target, request.key_of(KEY, ask, policy))
    if policy.mode is Mode.STORE and due_ms > from_ms:
        key = request.saga_key_of(ask, route, due_ms)
        if key is not None:
            return Park(due_ms, target, key)
    return _carried((due_ms, from_ms), target, route, ask, policy)


def _carried(
    due: tuple[int, int], target: Target, route: Route, ask: Ask, policy: Policy, *, failed: Failure | None = None
) -> Plan:
    """Where a message waits that may wait anywhere."""
    due_ms, from_ms = due
    if policy.mode is Mode.STORE and (route.paced or not policy.publishing):
        return Park(due_ms, target, failed=failed)
    wait_ms = due_ms - from_ms
    if wait_ms <= 0:
        return _due_already(due_ms, from_ms, target, route, ask) if failed is None else AtOnce(due_ms, target, failed)
    if policy.mode is Mode.STORE and (wait_ms > policy.park_beyond_ms or wait_ms > MAX_SECONDS * 1000):
        return Park(due_ms, target, failed=failed)
    plan = _cascade(due_ms, from_ms, target)
    return plan if failed is None else plan._replace(failed=failed)


def _retried(ask: Ask, route: Route, retry: Retry, policy: Policy, now_ms: int) -> Plan:
    """A dead letter goes back to the queue that gave it up, or to where the exhausted ones are kept."""
    try:
        failed = failure(ask.headers, retry)
    except NoFailure as none:
        raise Refused(str(none)) from none
    target = Target(b"", retry.exhausted if failed.exhausted else failed.queue)
    # To this one queue: of what CC names nothing goes along.
    request.check_not_ours(target.exchange, target.routing_key, ask._replace(copies=frozenset()), policy)
    due_ms = now_ms if failed.exhausted else now_ms + wait_ms(retry, failed.retries, ask.chance)
    return _carried((due_ms, now_ms), target, route, ask, policy, failed=failed)


def _due_already(due_ms: int, now_ms: int, target: Target, route: Route, ask: Ask) -> Plan:
    hold = too_late(due_ms, now_ms, route.late_limit_ms)
    if hold is None or request.wants_no_delay(ask, route):
        return AtOnce(due_ms, target)
    return TooLate(due_ms, target, hold)


def _cascade(due_ms: int, now_ms: int, target: Target) -> Cascade:
    seconds = seconds_until(due_ms, now_ms)
    if seconds > MAX_SECONDS:
        raise Refused(f"the delay is too long for the cascade: expected at most {MAX_SECONDS} s, found {seconds} s")
    return Cascade(due_ms, seconds, target)
