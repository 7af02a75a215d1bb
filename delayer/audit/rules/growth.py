"""Growth since the last audit. Pure."""

from __future__ import annotations

from delayer.audit.findings import Growth, Report


def growth(now: Report, before: Report) -> Growth | None:
    """What changed; None where the two cannot be compared: a sample, or a last audit that is not earlier."""
    seconds = (now.store_now_ms - before.store_now_ms) / 1000
    if now.sample is not None or before.sample is not None or seconds <= 0:
        return None
    parked, released = (_counted(now, kind) - _counted(before, kind) for kind in ("parked", "released"))
    return Growth(
        since_ms=before.store_now_ms,
        seconds=seconds,
        waiting=now.totals.waiting - before.totals.waiting,
        held=now.totals.held - before.totals.held,
        packed=now.totals.packed - before.totals.packed,
        size=now.totals.size - before.totals.size,
        parked=parked,
        released=released,
        parked_rate=round(parked / seconds, 3),
        released_rate=round(released / seconds, 3),
    )


def _counted(report: Report, kind: str) -> int:
    return sum(lane.counters.get(kind, 0) for lane in report.lanes)
