"""The shapes of `--json` that the API does not have, and those of each command. Tests check real outputs by them."""

from __future__ import annotations

import json
from typing import Any, Literal, NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from delayer.fields import shapes
from delayer.fields.shapes import (
    EntryJson,
    HeldEntryJson,
    MessageJson,
    RunJson,
    ScheduleJson,
    ScheduleRemovedJson,
    SentJson,
    SetAsideJson,
    TimesJson,
    documented,
)
from tests.support.json_shapes_backlog import (
    AuditOutput,
    CompactForecast,
    CompactOutput,
    ExportOutput,
    RestoreForecast,
    RestoreOutput,
)


@documented
class CheckRow(TypedDict):
    what: str
    """What was checked."""
    result: str
    """ok, off, note, or unknown."""
    found: str
    advice: str
    """The next step; "" if there is none."""


@documented
class CheckOutput(TypedDict):
    ok: bool
    checks: list[CheckRow]


@documented
class TopologyLevel(TypedDict):
    level: int
    name: str
    ttl_ms: int
    depth: int | None
    """Ready messages; null: there is no such queue."""


@documented
class TopologyShown(TypedDict):
    kind: str
    delivery: str
    """The exchange that the lowest level leads to."""
    levels: list[TopologyLevel]
    queues: dict[str, int | None]
    """Ready messages by queue; null: there is no such queue."""
    hidden: list[str]
    """Queues whose messages the broker itself delays, in an unknown number."""
    delayed: dict[str, int | None]
    """Messages that the broker itself delays, by queue; null: unknown."""


@documented
class TopologyFinding(TypedDict):
    severity: Literal["error", "note", "unknown"]
    kind: Literal["exchange", "queue", "binding", "policy"]
    """What is missing or differs."""
    name: str
    """Its name; of a binding, its source; * for several at once."""
    expected: str
    found: str


@documented
class TopologyVerified(TypedDict):
    ok: bool
    findings: list[TopologyFinding]


@documented
class SchemaOutput(TypedDict):
    found: str | None
    """The store's revision; null: none."""
    needed: str
    current: bool
    advice: str | None


@documented
class LaneOutput(TypedDict):
    lane: int
    route: str | None
    """The route with max_rate that it belongs to."""
    released: int
    owner: str
    alive: bool
    stuck_ms: int | None
    """For how long it has had due messages and released none."""
    waiting: int
    held: int
    next_due_ms: int | None
    next_retry_ms: int | None


@documented
class CascadeLevel(TypedDict):
    level: int
    queue: str
    ttl_ms: int
    depth: int | None


@documented
class BrokerStatus(TypedDict):
    error: str | None
    """Why it is out of reach. Then the other fields are missing."""
    queues: NotRequired[dict[str, int | None]]
    cascade: NotRequired[list[CascadeLevel]]
    delayed: NotRequired[dict[str, int | None]]


@documented
class SegmentsStatus(TypedDict):
    count: int
    messages: int
    next_due_ms: int | None
    broken: int
    broken_messages: int
    late: int
    """Segments that should be restored already."""
    late_messages: int


@documented
class InboxStatus(TypedDict):
    messages: int
    """Sent by SQL, and not moved by a daemon yet."""
    age_ms: int
    """Since the oldest of them was sent."""
    read: bool
    """Whether a daemon reads them."""


@documented
class StoreStatus(TypedDict):
    error: str | None
    """Why it is out of reach. Then the other fields are missing."""
    upgrade_pending: NotRequired[bool]
    advice: NotRequired[str]
    schema: NotRequired[str | None]
    waiting: NotRequired[int]
    held: NotRequired[int]
    counters: NotRequired[dict[str, int]]
    """Since the store exists: parked, restored, released, cancelled, compacted; held now."""
    next_due_ms: NotRequired[int | None]
    store_now_ms: NotRequired[int]
    lanes: NotRequired[list[LaneOutput]]
    segments: NotRequired[SegmentsStatus]
    inbox: NotRequired[InboxStatus | None]
    foreign_locks: NotRequired[list[str]]
    """Sessions of other roles that have locks of the store, or wait for them."""


@documented
class LiveStatus(TypedDict):
    error: str | None
    """Why no daemon of this configuration answers."""
    last: dict[str, shapes.LatenessJson]
    """By seconds: 60, 300, 900."""
    mode: NotRequired[str]
    blocked: NotRequired[bool]
    intake: NotRequired[str]


@documented
class StatusOutput(TypedDict):
    """With --watch, one object on each line."""

    names: dict[str, str]
    """label, broker, virtual_host, database."""
    mode: Literal["native", "store"]
    broker: BrokerStatus
    store: StoreStatus | None
    """null: none is configured."""
    live: LiveStatus


@documented
class ListOutput(TypedDict):
    messages: list[EntryJson]
    after: str | None
    """Where the next page begins, for --after; null at the end."""
    bounded: bool
    """Whether reading stopped at its limit."""
    broken_segments: list[str]


@documented
class HeldListOutput(TypedDict):
    messages: list[HeldEntryJson]
    after: str | None
    """Where the next page begins, for --after; null at the end."""
    bounded: bool
    """Whether reading stopped at its limit, so that more messages may match."""


@documented
class ChangeOutput(TypedDict):
    heading: str
    done: NotRequired[int]
    """How many messages were changed."""
    matched: NotRequired[int]
    """In place of done, if nothing was changed: a dry run, or no message matched."""
    lines: list[str]
    """About the others, in words."""
    found: dict[str, str]
    """Where each message was that was named: waiting, held, segment, nowhere or unreadable."""


@documented
class ScheduleList(TypedDict):
    schedules: list[ScheduleJson]
    after: str | None


@documented
class ChangedSchedule(TypedDict):
    name: str
    fields: list[list[str]]
    """Of each field that changes: its name, and its text before and after."""


@documented
class StoppedSchedule(TypedDict):
    name: str
    state: Literal["failed", "ended"]
    why: str


@documented
class ScheduleApplied(TypedDict):
    dry_run: bool
    added: list[dict[str, str]]
    """Their names and fields, as text."""
    changed: list[ChangedSchedule]
    removed: list[str]
    held: int
    """How many messages of the removed schedules stay held, of the first 100,000 held messages."""
    same: list[str]
    stopped: list[StoppedSchedule]
    """Those of them that failed or ended, so that they send nothing."""


@documented
class UntranslatedOutput(TypedDict):
    where: str
    why: str


@documented
class ScheduleImported(TypedDict):
    dry_run: bool
    added: list[dict[str, str]]
    same: list[str]
    untranslated: list[UntranslatedOutput]


@documented
class AuditLogEntry(TypedDict):
    id: int
    at_ms: int
    who: str
    verb: str
    messages: int
    """How many it changed. It grows while the command runs. Of a changed schedule: its messages that no longer wait."""
    asked: str
    """The request, as JSON in a string."""


@documented
class DrainLeft(TypedDict):
    """Messages that stay."""

    messages: int | None
    """How many; null: unknown."""
    where: str
    """cascade, due queue, strays, store, SQL inbox, segments, held, or queue and its name."""
    why: str
    """Why they stay, in words."""
    next: str
    """The next step; it begins with none if they leave by themselves."""


@documented
class DrainOutput(TypedDict):
    moved: int
    would_be_moved: int
    """Of a dry run."""
    left: list[DrainLeft]


@documented
class ImportRun(TypedDict):
    id: int
    source: str
    parameters: dict[str, Any]
    phase: Literal["staging", "running", "done", "aborted"]
    """staging: it collects the messages of its source; running: it parks them."""
    staged: int | None
    """How many messages it collected; null: not counted yet, or never for its source."""
    parked: int
    held: int
    superseded: int
    """Messages that it did not park, because others wait under their keys."""
    who: str
    began_ms: int


@documented
class ImportDestination(TypedDict):
    exchange: str
    routing_key: str
    messages: int
    first_due_ms: int | None
    unfit: int
    problem: str | None


@documented
class ImportPreview(TypedDict):
    messages: int
    schedules: int
    """Those of an export, which all come."""
    first_due_ms: int | None
    last_due_ms: int | None
    left: dict[str, int]
    """By reason: what is not imported."""
    remarks: list[str]
    destinations: list[ImportDestination]
    would_be_held: int
    held_because: dict[str, int]
    refused: str | None
    """Why a run would be refused."""
    unfinished: ImportRun | None


@documented
class ImportOutput(ImportRun):
    resumed: bool
    this_time: dict[str, int]
    """staged, parked, held, superseded, already_committed."""
    seconds: float
    left: dict[str, int]
    held_because: dict[str, int]
    doubts: list[str]


@documented
class ImportAborted(ImportRun):
    put_back: int
    """Messages that went back into their source."""


@documented
class UnsentLine(TypedDict):
    """A line that the broker did not take."""

    line: int
    message_id: str
    error: str


@documented
class FileSent(TypedDict):
    sent: int
    failed: list[UnsentLine]
    next_line: int
    """The first line that may not have been sent."""


COMMANDS: dict[str, tuple[Any, ...]] = {
    "check": (CheckOutput,), "topology show": (TopologyShown,), "topology verify": (TopologyVerified,),
    "db current": (SchemaOutput,), "db lanes": (list[LaneOutput],), "status": (StatusOutput,),
    "send": (SentJson, FileSent), "list": (ListOutput,), "show": (MessageJson,),
    "cancel": (ChangeOutput,), "reschedule": (ChangeOutput,),
    "held list": (HeldListOutput,), "held retry": (ChangeOutput,), "held drop": (ChangeOutput,),
    "refused list": (SetAsideJson,), "refused retry": (ChangeOutput,), "refused drop": (ChangeOutput,),
    "strays list": (SetAsideJson,), "strays retry": (ChangeOutput,), "strays drop": (ChangeOutput,),
    **{f"schedule {verb}": (ScheduleJson,) for verb in ("add", "edit", "show", "pause", "resume")},
    "schedule list": (ScheduleList,), "schedule preview": (TimesJson,), "schedule run": (RunJson,),
    "schedule remove": (ScheduleRemovedJson,), "schedule apply": (ScheduleApplied,),
    "schedule import …": (ScheduleImported,), "audit-log": (list[AuditLogEntry],), "drain": (DrainOutput,),
    "audit": (AuditOutput,), "backlog export": (ExportOutput,), "compact": (CompactOutput, CompactForecast),
    "restore": (RestoreOutput, RestoreForecast), "import … preview": (ImportPreview,), "import … run": (ImportOutput,),
    "import … abort": (ImportAborted,),
}  # fmt: skip
"""Each command with --json, and the shapes of its output: the second is that of --dry-run, of `send` that of --file."""


def check(command: str, output: str, which: int = 0) -> Any:
    """Read the output of a command, which has the shape that the page gives it: of ``which`` in COMMANDS."""
    found = json.loads(output)
    TypeAdapter(COMMANDS[command][which]).validate_python(found, strict=True, extra="forbid")
    return found
