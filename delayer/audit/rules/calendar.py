"""The calendar: what is due when, for whom, and how long the peaks take. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from delayer.audit.findings import Bar, Calendar, Finding, Peak, Share, Standout
from delayer.audit.rules import standouts
from delayer.audit.rules.evidence import Evidence
from delayer.audit.rules.summary import SECOND_MS, WIDTHS

RULE: Final = "peaks"
RELEASE_RATE: Final = 14_000.0
"""Messages a second that one daemon released on two cores shared with broker and database, 512 bytes each
(docs/performance.md). Whoever knows the own rate says so."""
SLOW_SECONDS: Final = 60.0
"""A peak that takes longer than this to release is worth a warning: the last of its messages are that late."""
_UNITS: Final = {"second": SECOND_MS, "minute": WIDTHS["minute"].ms, "hour": WIDTHS["hour"].ms}
_LATEST_MS = 253_402_300_799_000  # the last instant that datetime has


def calendar(evidence: Evidence, release_rate: float) -> Calendar:
    """``release_rate`` in messages a second. Raises ValueError unless it is above zero."""
    if not release_rate > 0:
        raise ValueError(f"release rate: expected messages a second, more than 0, found {release_rate:g}")
    return Calendar(
        release_rate=release_rate,
        minutes=_bars(evidence, "minute"),
        hours=_bars(evidence, "hour"),
        days=_bars(evidence, "day"),
        peaks=_peaks(evidence, release_rate),
        oldest=_standouts(evidence, "oldest"),
        farthest=_standouts(evidence, "farthest"),
        largest=_standouts(evidence, "largest"),
        routes=_shares(evidence, "route"),
        routes_more=evidence.more("route"),
        destinations=_shares(evidence, "target"),
        destinations_more=evidence.more("target"),
    )


def findings(calendar: Calendar) -> list[Finding]:
    """Peaks that take longer than SLOW_SECONDS."""
    return [
        Finding(
            RULE,
            "warning",
            f"{instant(peak.start_ms)}: {peak.messages:,} due in {peak.width_ms // 1000:,} s",
            peak.messages,
            peak.start_ms,
            {"drain_seconds": peak.drain_seconds, "release_rate": calendar.release_rate},
        )
        for peak in calendar.peaks
        if peak.drain_seconds - peak.width_ms / 1000 > SLOW_SECONDS
    ]


def instant(ms: int) -> str:
    """RFC 3339 where the year has four digits."""
    if not 0 <= ms <= _LATEST_MS:
        return f"{ms} ms"
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _bars(evidence: Evidence, name: str) -> tuple[Bar, ...]:
    width = WIDTHS[name].ms
    return tuple(
        Bar(key.number * width, width, tally.messages, tally.size) for key, tally in evidence.of(f"{name} bar")
    )


def _peaks(evidence: Evidence, rate: float) -> tuple[Peak, ...]:
    """The PEAKS fullest seconds, minutes and hours, those first that take longest beyond their own width. A minute is
    listed only if it has much more than each listed second of it, or every peak would be there three times."""
    found: list[Peak] = []
    for name, width in _UNITS.items():
        for key, tally in evidence.of(name):
            start = key.number * width
            inside = (p.messages for p in found if start <= p.start_ms < start + width)
            if 2 * max(inside, default=0) < tally.messages:
                found.append(Peak(start, width, tally.messages, tally.size, round(tally.messages / rate, 3)))
    found.sort(key=lambda peak: (peak.width_ms / 1000 - peak.drain_seconds, peak.start_ms))
    return tuple(found)


def _standouts(evidence: Evidence, kind: str) -> tuple[Standout, ...]:
    return tuple(standouts.standout(key) for key, _ in evidence.of(kind))


def _shares(evidence: Evidence, kind: str) -> tuple[Share, ...]:
    return tuple(
        Share(tally.messages, tally.size, tally.first_due_ms, tally.last_due_ms, key.first)
        if kind == "route"
        else Share(
            tally.messages,
            tally.size,
            tally.first_due_ms,
            tally.last_due_ms,
            exchange=key.first,
            routing_key=key.second,
        )
        for key, tally in evidence.of(kind)
    )
