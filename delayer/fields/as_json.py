"""Messages and schedules for programs, the same for `--json` on the command line and for `/api`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise
from typing import cast
from zoneinfo import ZoneInfo

from delayer.core.filters import Token
from delayer.core.message import as_text
from delayer.core.readable import instant
from delayer.fields.shapes import (
    EntryJson,
    HeaderJson,
    HeldEntryJson,
    HeldStateJson,
    MessageJson,
    ScheduleJson,
    TimesJson,
)
from delayer.format import reading
from delayer.format.reading import DecodedProperties
from delayer.schedule.record import ScheduleRecord, next_times
from delayer.schedule.rhythm import Cron, Every, rhythm_in_words
from delayer.schedule.wall import zone_of
from delayer.store.admin.detail import FullMessage, predict
from delayer.store.held_messages import HeldEntry, HeldState
from delayer.store.waiting import Entry


def entry(entry: Entry, *, held: bool = False, whole: bool = True) -> EntryJson:
    """Convert an entry. ``whole``: with all headers, and not as in a list over HTTP. The store no longer has the time
    at which a held message was parked."""
    said = reading.decode_properties(entry.properties, whole=whole)
    return {
        "id": str(entry.place.token),
        "due_ms": entry.place.due_ms,
        "parked_ms": None if held else entry.parked_ms,
        "lane": entry.place.lane,
        "segment": entry.place.segment,
        "route": as_text(entry.route),
        "exchange": as_text(entry.exchange),
        "routing_key": as_text(entry.routing_key),
        "to_exchange": as_text(entry.to_exchange),
        "to_key": as_text(entry.to_key),
        "key": None if entry.key is None else as_text(entry.key),
        "message_id": said.properties.get("message_id"),
        "body_bytes": entry.size,
        "properties": said.properties,
        "headers": headers(said),
        "header_bytes_left_out": said.left_out,
        "broken": said.broken or None,
    }


def headers(said: DecodedProperties) -> list[HeaderJson]:
    return [cast(HeaderJson, one._asdict()) for one in said.headers]


def held(one: HeldEntry, *, whole: bool = True) -> HeldEntryJson:
    return {**entry(one.entry, held=True, whole=whole), "held": state(one.held)}


def state(held: HeldState) -> HeldStateJson:
    return cast(HeldStateJson, held._asdict())


def standing(found: FullMessage) -> str:
    """Say where the message is: its place, its lane, and the lane's owner."""
    where = found.where.value + ("" if found.entry.place.segment is None else f" {found.entry.place.segment}")
    owner = f"{found.owner}, running" if found.owned else f"free, last of {found.owner}" if found.owner else "free"
    return f"{where}, lane {found.entry.place.lane} ({owner})"


def message(found: FullMessage) -> MessageJson:
    """Convert a message, with the beginning of its body."""
    held, body = found.held, found.entry.body
    return {
        **entry(found.entry, held=held is not None),
        "where": found.where.value,
        "sound": found.entry.sound,
        "owner": found.owner,
        "owner_alive": found.owned,
        "held": None if held is None else state(held),
        "fate": predict(found),
        "body": reading.preview(body),
        "body_is_text": body[: reading.PREVIEW].hex(" ") != reading.preview(body),
    }


def schedule(record: ScheduleRecord, held: Mapping[str, int] | None = None, *, whole: bool = True) -> ScheduleJson:
    """Convert a schedule, with the beginning of its body. ``held``: how many messages of each schedule are held.
    ``whole``: with all headers, and not as in a list over HTTP."""
    one, rhythm = record.schedule, record.schedule.rhythm
    said = reading.decode_properties(one.properties, whole=whole)
    return {
        "name": one.name,
        "id": str(one.id),
        "state": record.state.value,
        "why": record.why or None,
        "rhythm": rhythm_in_words(rhythm),
        "cron": rhythm.expression if isinstance(rhythm, Cron) else None,
        "zone": rhythm.zone if isinstance(rhythm, Cron) else None,
        "every_ms": rhythm.period_ms if isinstance(rhythm, Every) else None,
        "first_ms": rhythm.first_ms or None,
        "last_ms": one.last_ms,
        "catch_up": one.catch_up,
        "jitter_ms": one.jitter_ms,
        "max": one.max_occurrences,
        "next_ms": record.waiting_ms,
        "next_due_ms": record.due_ms,
        "next_message": None if record.waiting_id is None else str(Token(record.waiting_id, record.due_ms)),
        "sent": record.made,
        "missed": record.missed,
        "held": None if held is None else held.get(one.name, 0),
        "sent_ms": record.made_ms,
        "late_ms": record.late_ms,
        "settled_ms": record.settled_ms,
        "added_ms": record.added_ms,
        "changed_ms": record.changed_ms,
        "to_exchange": as_text(one.target.exchange),
        "to_key": as_text(one.target.routing_key),
        "properties": said.properties,
        "headers": headers(said),
        "header_bytes_left_out": said.left_out,
        "body": reading.preview(one.body),
        "body_bytes": len(one.body),
    }


def times(record: ScheduleRecord, now_ms: int, count: int) -> TimesJson:
    """Compute the next times of a schedule, by the zone data of this host. Raises BadCron, UnknownZone."""
    rhythm = record.schedule.rhythm
    found = next_times(record, now_ms, count)
    zone = zone_of(rhythm.zone if isinstance(rhythm, Cron) else "UTC")
    after = [None, *(at_ms - before for before, at_ms in pairwise(found))]
    return {
        "name": record.name,
        "rhythm": rhythm_in_words(rhythm),
        "zone": zone.key,
        "times": [
            {"at_ms": at_ms, "local": _local(at_ms, zone), "utc": instant(at_ms), "after_ms": gap}
            for at_ms, gap in zip(found, after, strict=False)
        ],
    }


def _local(at_ms: int, zone: ZoneInfo) -> str:
    try:
        return datetime.fromtimestamp(at_ms // 1000, UTC).astimezone(zone).isoformat()
    except (OverflowError, ValueError):
        return instant(at_ms)  # Beyond the calendar.
