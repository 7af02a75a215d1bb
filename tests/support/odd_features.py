"""Bugs in features of routes: each breaks what one of them promises. Started as all others are, see odd.py."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final


def keyless() -> None:
    """A message with a key replaces nothing."""
    from delayer.core.message import Parcel
    from delayer.intake import handle

    parcel = handle.parcel

    def broken(delivery: Any, due_ms: int, target: Any, key: bytes | None = None) -> Parcel:
        return parcel(delivery, due_ms, target)

    handle.parcel = broken


def deaf_to_cancels() -> None:
    """Who cancels hears that it is done, and it is not."""
    from delayer.store.postgres import PostgresStore

    park = PostgresStore.park

    async def broken(self: PostgresStore, lane: Any, parcels: Any, cancels: Collection[bytes]) -> Any:
        taken = await park(self, lane, parcels, [])
        return taken._replace(keys=taken.keys | frozenset(cancels))

    PostgresStore.park = broken  # type: ignore[method-assign]


def impatient() -> None:
    """What failed comes back after half of its pause."""
    from delayer.core import plan

    wait_ms = plan.wait_ms
    plan.wait_ms = lambda *said: wait_ms(*said) // 2


def once_more() -> None:
    """What failed comes back once more than is configured."""
    from delayer.core import plan

    failure = plan.failure

    def broken(headers: Any, retry: Any) -> Any:
        failed = failure(headers, retry)
        return failed._replace(exhausted=failed.retries > retry.attempts + 1)

    plan.failure = broken


def hurried() -> None:
    """What is taken over goes out before the cascade would have let it out."""
    from delayer.intake import takeover

    due_at_level = takeover.due_at_level
    takeover.due_at_level = lambda *said: due_at_level(*said) - 1_500


def at_the_border() -> None:
    """What is too short for the store does not wait at all."""
    from delayer.core import plan

    plan._cascade = lambda due_ms, _now_ms, target: plan.AtOnce(due_ms, target)  # type: ignore[assignment]


def unlimited() -> None:
    """A limited route goes twice as fast as it may."""
    from delayer.core.rate_limit import TokenBucket as Bucket

    init = Bucket.__init__

    def broken(self: Bucket, rate: float, now: float) -> None:
        init(self, 2 * rate, now)

    Bucket.__init__ = broken  # type: ignore[method-assign]


def never_too_late() -> None:
    """What falls due too late for its route is delivered all the same."""
    from delayer.daemon.live_settings import LiveSettings

    LiveSettings.late_limits = lambda self: {}  # type: ignore[method-assign]


def lenient_at_intake() -> None:
    """What is too late when it is published is delivered all the same."""
    from delayer.core import plan

    plan._due_already = lambda due_ms, _now_ms, target, _route, _ask: plan.AtOnce(due_ms, target)


PLANTED: Final = (
    keyless, deaf_to_cancels, impatient, once_more, hurried, at_the_border, unlimited, never_too_late,
    lenient_at_intake,
)  # fmt: skip
