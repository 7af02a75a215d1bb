"""Says why a message was not found, and what to do next: the body of a 404. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from delayer.config.model import Settings
from delayer.http.view import DaemonState

_IN_BROKER: Final = ' waits in the broker (`where` is "broker"), and cannot be looked up.'


class Absence(NamedTuple):
    detail: str
    next_step: str


def held_instead(which: str, query: str) -> Absence:
    """Why a change found no waiting message, though a held one matches. ``query``: the filter, for a URL."""
    text = f"No waiting message {which} was found, but at least one is held, and this does not change held messages."
    return Absence(text, f"see /api/held?{query}; POST /actions/messages with the verb retry or drop changes them")


def why_absent(which: str, settings: Settings, state: DaemonState) -> Absence:
    """``which``: how the message was asked for, such as ``with the message_id "m-1"``."""
    text = (
        f"No waiting message {which} was found. Either it is not parked yet, or it was delivered, cancelled, replaced "
        "or held, or it never came."
    )
    if settings.mode == "native":
        text += " In native mode a message without a key" + _IN_BROKER
    elif settings.store.park_beyond_ms:
        text += " A message delayed by at most `park_beyond`" + _IN_BROKER
    step = "if it was sent within the last seconds, repeat this request; else look at /api/held and /api/refused"
    if not state.usable or not state.consuming.get(settings.intake.queue, False):
        step = f"this daemon does not park what is in {settings.intake.queue!r} now: see /health/ready for the reason"
    return Absence(text, step)
