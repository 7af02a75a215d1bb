"""The message of one occurrence. Pure: equal schedules and times give equal messages, whoever computes them."""

from __future__ import annotations

from typing import Final
from uuid import UUID, uuid5

from delayer.amqp.properties import Properties, changed, entry, long_string, splice
from delayer.core.message import Parcel
from delayer.schedule.schedule import SCHEDULE, Schedule

MESSAGE_ID: Final = b"{{the message_id of the occurrence}}"
"""Stands for the occurrence's message id in a schedule's properties, for frameworks that need it in a header too. It is
as long as one. It is no UUID, because an application may have any of these in a header of its own."""


def message_id(schedule: UUID, at: int | str) -> str:
    """The message id of a schedule's occurrence of the rhythm's time ``at``: a copy after a fault has the same id.

    >>> message_id(UUID(int=1), 1_795_604_400_000)
    '09018670-5c65-5988-bb09-990f8edafef1'
    """
    return str(uuid5(schedule, str(at)))


def due_ms(schedule: Schedule, at_ms: int) -> int:
    """When the occurrence of the rhythm's time ``at_ms`` is due: never earlier, and later by a part of the jitter."""
    if not schedule.jitter_ms:
        return at_ms
    return at_ms + uuid5(schedule.id, f"jitter {at_ms}").int % (schedule.jitter_ms + 1)


def occurrence(schedule: Schedule, at_ms: int) -> Parcel:
    """Compose the message of the rhythm's time ``at_ms``. The release adds ``x-delayer-id`` and ``x-delayer-due``."""
    return _compose(schedule, due_ms(schedule, at_ms), message_id(schedule.id, at_ms))


def extra_message(schedule: Schedule, id_: int, now_ms: int) -> Parcel:
    """Compose a message that is no occurrence. ``id_``: its id in the store, from which it has its message id."""
    return _compose(schedule, now_ms, message_id(schedule.id, f"run {id_}"))


def _compose(schedule: Schedule, at_ms: int, message_id: str) -> Parcel:
    own = message_id.encode()
    properties = Properties.parse(schedule.properties.replace(MESSAGE_ID, own))
    with_id = changed(properties, {"message_id": bytes((len(own),)) + own})
    return Parcel(
        at_ms,
        b"",
        schedule.target.exchange,
        schedule.target.routing_key,
        schedule.target,
        splice(with_id, append=entry(SCHEDULE, long_string(schedule.name.encode()))),
        schedule.body,
    )
