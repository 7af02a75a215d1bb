"""The report of held messages, which the intake and the release share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import structlog

from delayer.core.backoff import first_of_each
from delayer.core.counters import Counters
from delayer.core.hold import Hold
from delayer.core.message import Parcel

log = structlog.get_logger(__name__)

HELD: Final = "`delayer held list` has the reasons; correct their cause, then `delayer held retry` or `drop`"


def report_held(held: Collection[tuple[object, Parcel, Hold, int]], counters: Counters) -> None:
    """Count and log held messages, given as (id, message, hold, earlier attempts). A retry does not count again."""
    counters.add("held", [parcel.route for _, parcel, _, attempts in held if not attempts])
    for (id, parcel, hold, attempts), more in first_of_each(held, lambda one: one[1].target.exchange):
        why = {"kind": hold.kind, "reason": hold.text, "attempts": attempts + 1}
        log.warning("message held", id=id, **why, **parcel.names, more=more, next_step=HELD)
