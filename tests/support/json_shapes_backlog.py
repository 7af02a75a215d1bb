"""The shapes of `--json` of the commands for the stored backlog: audit, export, compact and restore."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict

from delayer.fields.shapes import documented


@documented
class AuditTotals(TypedDict):
    waiting: int
    """Rows found."""
    expected: int
    """Waiting messages by the counters; another number than waiting and packed together is a finding."""
    held: int
    segments: int
    packed: int
    """Messages that wait in the segments."""
    size: int
    """Bytes of all bodies and properties."""
    packed_bytes: int
    """Bytes of the segments as stored."""
    keyed: int
    """Waiting messages that have a key."""
    first_due_ms: int | None
    last_due_ms: int | None


@documented
class AuditLane(TypedDict):
    number: int
    owner: str
    """The daemon that owns it, or did last."""
    alive: bool | None
    """null: unknown, because a replica shows no locks."""
    counters: dict[str, int]
    """Since the store exists: parked, restored, released, cancelled, compacted; held now."""
    waiting: int
    """Rows, counted one by one."""
    held: int
    packed: int
    """Messages that wait in its segments."""


@documented
class AuditBar(TypedDict):
    """The messages that are due in a span of time."""

    start_ms: int
    width_ms: int
    messages: int
    size: int
    """Bytes of their bodies and properties."""
    unread: int
    """How many of them are in unreadable segments, whose hours are estimated."""


@documented
class AuditPeak(TypedDict):
    """A second, minute or hour in which many messages are due."""

    start_ms: int
    width_ms: int
    messages: int
    size: int
    """Bytes of their bodies and properties."""
    drain_seconds: float
    """How long their release takes at the release_rate."""


@documented
class AuditShare(TypedDict):
    """The messages of a route, or of a destination. Only a destination has to_exchange, to_key, verdict and way."""

    messages: int
    size: int
    """Bytes of their bodies and properties."""
    first_due_ms: int
    last_due_ms: int
    route: str
    """The exchange of the route."""
    to_exchange: str
    to_key: str
    verdict: str
    """How the broker would treat them now; "" if it did not answer."""
    way: str
    """Through which binding, or why not; "" if the broker did not answer."""


@documented
class AuditCalendar(TypedDict):
    """Messages by due time, and their destinations. Minutes and hours cover the near future, days everything."""

    release_rate: float
    """Messages a second, by which drain_seconds are computed."""
    minutes: list[AuditBar]
    hours: list[AuditBar]
    days: list[AuditBar]
    peaks: list[AuditPeak]
    routes: list[AuditShare]
    """The largest."""
    routes_more: int
    """How many others there are."""
    destinations: list[AuditShare]
    """The largest."""
    destinations_more: int
    """How many others there are."""


@documented
class AuditOutput(TypedDict):
    """`version` grows if a field changes its meaning."""

    version: int
    store_now_ms: int
    seconds: float
    sample: float | None
    """The share of rows read; null: all."""
    quick: bool
    behind_ms: int
    """How far a replica lags."""
    totals: AuditTotals
    lanes: list[AuditLane]
    calendar: AuditCalendar
    rules: list[dict[str, Any]]
    """Each rule with its violations, warnings, `skipped` (why it did not run), `unlisted` and `count`."""
    findings: list[dict[str, Any]]
    """Each with rule, severity, subject, count, first_due_ms, details and `next`, the next step."""
    past: dict[str, Any] | None
    """From the history; null without one."""


@documented
class ExportOutput(TypedDict):
    store_now_ms: int
    """The store's clock at the snapshot."""
    messages: int
    """All that wait, as in the directory now."""
    came: int
    """Messages that are new since the last export."""
    left: int
    """Messages of the last export that no longer wait."""
    written: int
    """Partitions that are new, or whose messages changed."""
    kept: int
    """Partitions that are as the last export wrote them."""
    removed: int
    """Partitions without messages now."""
    broken_segments: int | list[str]
    """Those that could not be read; 0 if none."""


@documented
class CompactForecast(TypedDict):
    messages: int
    """Messages that would be packed."""
    segments: int
    """About how many segments they would make."""
    few: int
    """Messages that would stay rows, because too few are due together."""
    keyed: int
    """How many of messages have a key."""
    large: int
    """Messages of more than 1 MiB, which would stay rows too."""
    raw_bytes: int
    """Bytes of the bodies and properties of messages."""
    disk_bytes: int
    """Bytes of all waiting rows on disk, including those due sooner, and of their indexes."""
    after_ms: int
    """Messages due later than this instant would be packed."""
    windows: int
    """The parts into which the work would be cut: each a lane and a span of due times."""
    packed_bytes: int
    """About how many bytes the segments would have."""
    saved_bytes: int
    """About how many bytes would be saved on disk, and in each backup that copies files."""
    log_bytes: int
    """About how many bytes the log (WAL) would grow now, and again when the messages are restored."""
    pays_after_ms: int | None
    """How long a message must wait for packing to pay off, if archived log is kept for a week; null: never."""


@documented
class CompactOutput(TypedDict):
    segments: int
    messages: int
    raw_bytes: int
    packed_bytes: int
    seconds: float
    shrink_seconds: float
    disk_bytes: dict[str, int]
    """before and after."""
    partitions: dict[str, list[str]]
    """dropped, vacuumed, left."""
    lost: list[str]
    broken: list[str]


@documented
class RestoreForecast(TypedDict):
    messages: int
    """Messages that would become rows again."""
    segments: int
    """The segments that they are in."""
    packed_bytes: int
    """Bytes of these segments as stored."""
    raw_bytes: int
    """Bytes of the bodies and properties when unpacked."""
    broken: int
    """How many of these segments are unreadable, and would stay."""
    next_due_ms: int | None
    """When the first of the messages is due."""


@documented
class RestoreOutput(TypedDict):
    messages: int
    segments: int
    gone: int
    """Segments that others restored or emptied first."""
    seconds: float
    lost: list[str]
    broken: list[str]
