"""Messages and schedules for programs, the same for `--json` on the command line and for `/api`."""

from __future__ import annotations

from typing import Any

from delayer.core.filters import Token
from delayer.core.message import as_text
from delayer.format import reading
from delayer.schedule.record import ScheduleRecord
from delayer.schedule.rhythm import Cron, Every, rhythm_in_words
from delayer.store.admin.detail import FullMessage, predict
from delayer.store.held_messages import HeldEntry
from delayer.store.waiting import Entry


def entry(entry: Entry, *, held: bool = False) -> dict[str, Any]:
    """Convert an entry of a list. The store no longer has the time at which a held message was parked."""
    said = reading.decode_properties(entry.properties)
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
        "headers": [one._asdict() for one in said.headers],
        "broken": said.broken or None,
    }


def held(one: HeldEntry) -> dict[str, Any]:
    return {**entry(one.entry, held=True), "held": one.held._asdict()}


def standing(found: FullMessage) -> str:
    """Say where the message is: its place, its lane, and the lane's owner."""
    where = found.where.value + ("" if found.entry.place.segment is None else f" {found.entry.place.segment}")
    owner = f"{found.owner}, running" if found.owned else f"free, last of {found.owner}" if found.owner else "free"
    return f"{where}, lane {found.entry.place.lane} ({owner})"


def message(found: FullMessage) -> dict[str, Any]:
    """Convert a message, with the beginning of its body."""
    held, body = found.held, found.entry.body
    return {
        **entry(found.entry, held=held is not None),
        "where": found.where.value,
        "sound": found.entry.sound,
        "owner": found.owner,
        "owner_alive": found.owned,
        "held": None if held is None else held._asdict(),
        "fate": predict(found),
        "body": reading.preview(body),
        "body_is_text": body[: reading.PREVIEW].hex(" ") != reading.preview(body),
    }


def schedule(record: ScheduleRecord) -> dict[str, Any]:
    """Convert a schedule, with the beginning of its body."""
    one, rhythm = record.schedule, record.schedule.rhythm
    said = reading.decode_properties(one.properties)
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
        "sent_ms": record.made_ms,
        "late_ms": record.late_ms,
        "settled_ms": record.settled_ms,
        "added_ms": record.added_ms,
        "changed_ms": record.changed_ms,
        "to_exchange": as_text(one.target.exchange),
        "to_key": as_text(one.target.routing_key),
        "properties": said.properties,
        "headers": [header._asdict() for header in said.headers],
        "body": reading.preview(one.body),
        "body_bytes": len(one.body),
    }
