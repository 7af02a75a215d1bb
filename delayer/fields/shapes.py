"""The shapes of JSON, for programs: answers of `/api`, and `--json` on the command line. The OpenAPI document and
docs/json.md are made of them. Instants and durations end in ``_ms``: epoch milliseconds, and milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

documented = with_config(ConfigDict(use_attribute_docstrings=True))
"""Takes the text below a field as its description."""


@documented
class HeaderJson(TypedDict):
    """One header of a message."""

    name: str
    type: str
    """The name of its AMQP type, such as int64 or string."""
    value: Any


@documented
class HeldStateJson(TypedDict):
    """Why a message is held."""

    kind: str
    """returned, nacked, unanswered, closed_channel, closed_connection, late or unfit."""
    reason: str
    may_be_delivered: bool
    """Whether its queue may have it, because an attempt was never confirmed."""
    isolated: bool
    """Whether an attempt closed a connection."""
    attempts: int
    held_ms: int
    retry_ms: int | None
    """The next attempt; null: an operator decides."""


@documented
class EntryJson(TypedDict):
    """A message in the store, without its body."""

    id: str
    """delayer's name for it, such as id:48213@1795291200000."""
    due_ms: int
    parked_ms: int | None
    """When it was parked; null for a held message."""
    lane: int
    segment: int | None
    """The compacted segment that it is in."""
    route: str
    """The exchange of its route."""
    exchange: str
    """The exchange that it was published to."""
    routing_key: str
    to_exchange: str
    """The exchange that it goes to."""
    to_key: str
    """The routing key that it goes with."""
    key: str | None
    """Its x-delay-key."""
    message_id: str | int | None
    body_bytes: int
    properties: dict[str, Any]
    headers: Sequence[HeaderJson]
    """In a list over HTTP, those of the first 100 that take at most 8 KiB together."""
    header_bytes_left_out: int
    """How many bytes of the headers a list over HTTP leaves out."""
    broken: str | None
    """What is unreadable in its properties."""


@documented
class HeldEntryJson(EntryJson):
    """A held message, without its body."""

    held: HeldStateJson


@documented
class MessageJson(EntryJson):
    """A message, with the first 400 bytes of its body."""

    where: str
    """waiting, held or segment."""
    sound: bool | None
    """Whether its checksum is right; null: unknown."""
    owner: str
    """The daemon that owns its lane, or did last."""
    owner_alive: bool
    held: HeldStateJson | None
    fate: str
    """What will happen to it, in words."""
    body: str
    body_is_text: bool


@documented
class MessagesJson(TypedDict):
    """A page of waiting messages."""

    messages: list[EntryJson]
    bounded: bool
    """Whether reading stopped at its limit, so that more messages may match."""
    broken: int
    """How many segments are unreadable. More messages in these may match."""
    next: str
    """The path of the next page; "" at the end."""


@documented
class HeldMessagesJson(TypedDict):
    """A page of held messages."""

    messages: list[HeldEntryJson]
    bounded: bool
    next: str


@documented
class SetAsideEntryJson(TypedDict):
    """A refused message or a stray, with the first 400 bytes of its body. Only a refused one has ``exchange`` and
    ``routing_key``, and only a stray has ``due_ms`` to ``isolated``."""

    id: str
    message_id: str | None
    exchange: NotRequired[str | None]
    """The exchange that it was published to."""
    routing_key: NotRequired[str | None]
    due_ms: NotRequired[int | None]
    to_exchange: NotRequired[str]
    to_key: NotRequired[str]
    route: NotRequired[str]
    attempts: NotRequired[int]
    kind: NotRequired[str]
    may_be_delivered: NotRequired[bool]
    isolated: NotRequired[bool]
    properties: dict[str, Any]
    headers: Sequence[HeaderJson]
    """In a list over HTTP, those of the first 100 that take at most 8 KiB together."""
    header_bytes_left_out: int
    """How many bytes of the headers a list over HTTP leaves out."""
    reason: str
    body_bytes: int
    body: str


@documented
class SetAsideJson(TypedDict):
    """The first messages of the refused queue, or of the strays."""

    depth: int
    """How many there are."""
    delayed: int | None
    """How many the broker itself delays; null: unknown."""
    hidden: str
    """A sentence about those."""
    messages: list[SetAsideEntryJson]


@documented
class ChangeJson(TypedDict):
    """The outcome of a change of messages."""

    heading: str
    done: int
    """How many messages it changed."""
    lines: list[str]
    """Sentences about the messages that it did not change."""
    found: dict[str, str]
    """Where each message was, by the id that the request names."""


@documented
class ScheduleJson(TypedDict):
    """A schedule."""

    name: str
    id: str
    state: Literal["active", "paused", "ended", "failed"]
    why: str | None
    """Why it ended or failed."""
    rhythm: str
    """The rhythm in words."""
    cron: str | None
    zone: str | None
    every_ms: int | None
    first_ms: int | None
    last_ms: int | None
    catch_up: int
    """How many late occurrences are sent."""
    jitter_ms: int
    max: int | None
    next_ms: int | None
    """The next time of the rhythm."""
    next_due_ms: int | None
    """The same with the jitter."""
    next_message: str | None
    """The message that waits for it."""
    sent: int
    """How many occurrences were sent or held."""
    missed: int
    held: int | None
    """How many of its messages are held now, of the first 100,000 held ones; null in the answer to a change."""
    sent_ms: int | None
    late_ms: int | None
    settled_ms: int | None
    added_ms: int
    changed_ms: int
    to_exchange: str
    to_key: str
    properties: dict[str, Any]
    headers: Sequence[HeaderJson]
    """In a list over HTTP, those of the first 100 that take at most 8 KiB together."""
    header_bytes_left_out: int
    """How many bytes of the headers a list over HTTP leaves out."""
    body: str
    body_bytes: int


@documented
class SchedulesJson(TypedDict):
    """A page of schedules."""

    schedules: list[ScheduleJson]
    next: str


@documented
class TimeJson(TypedDict):
    """One time of a rhythm."""

    at_ms: int
    local: str
    utc: str
    after_ms: int | None
    """The distance from the time before."""


@documented
class TimesJson(TypedDict):
    """The next times of a schedule."""

    name: str
    rhythm: str
    zone: str
    times: list[TimeJson]


@documented
class RunJson(TypedDict):
    """A message of a schedule that was parked, due now."""

    id: str


@documented
class ScheduleRemovedJson(TypedDict):
    """A schedule that was deleted with its waiting occurrence."""

    removed: str
    held: int
    """How many of its messages stay held, of the first 100,000 held messages."""


@documented
class SentJson(TypedDict):
    """A message that the broker has confirmed."""

    message_id: str
    exchange: str
    """The exchange that it was published to."""
    routing_key: str
    due_ms: int | None
    """When it is due; null for a cancel. A relative delay counts from when the broker has it, so the instant in the
    store is a few milliseconds later."""
    due: str | None
    """The same as text."""
    cancels: str | None
    """The key whose message it cancels, by the header x-delay-cancel."""
    where: Literal["store", "broker", "destination", "held"] | None
    """Where the daemon puts the message, by its current settings. store: you can find, cancel and reschedule it once it
    is parked. broker: it waits in the broker, where you cannot find it. destination: it is due now or in moments. held:
    it is too late for its route. null: it is a cancel."""


@documented
class SentLineJson(TypedDict):
    """The result of a line."""

    line: int
    sent: SentJson | None
    """null: the broker has not confirmed it."""
    error: str | None


@documented
class SentLinesJson(TypedDict):
    """The results of JSON lines."""

    sent: int
    failed: int
    results: list[SentLineJson]


@documented
class LatenessJson(TypedDict):
    """Rates in messages per second, and lateness and durations in seconds."""

    seconds: float
    rates: dict[str, float]
    p50: float | None
    p99: float | None
    worst: float | None
    slowest: dict[str, float | None]
    """Upper bounds of the slowest claim, settle, park, publish and loop_lag; null if there was none."""


@documented
class LiveJson(TypedDict):
    """What this daemon did in the last quarter of an hour."""

    series: dict[str, list[float | None]]
    """Columns of a chart, five seconds a step; ``t`` has epoch seconds."""
    last: dict[str, LatenessJson]
    """By seconds: 60, 300, 900."""
    blocked: bool
    """Whether the broker blocks this daemon's publishes."""
    intake: str
    """active, standby, or "" if it does not consume."""
    service: str
    """The same for all daemons of one broker, virtual host and intake queue."""
    mode: Literal["native", "store"]


@documented
class BarsJson(TypedDict):
    """Counts of waiting messages, in steps from now on."""

    step: int
    """Milliseconds of a step."""
    bars: list[int]


@documented
class BacklogJson(TypedDict):
    """Counts of waiting messages by due time."""

    taken_ms: int
    note: str
    series: dict[str, BarsJson]
