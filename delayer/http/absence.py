"""Why a message that was sent is not found, and the next step: for 404. Pure."""

from __future__ import annotations

from typing import NamedTuple

from delayer.config.model import Settings
from delayer.http.view import DaemonState


class Absence(NamedTuple):
    detail: str
    next_step: str


def why_absent(which: str, settings: Settings, state: DaemonState) -> Absence:
    """``which``: how the message was asked for, such as ``with the message_id "m-1"``."""
    text = f"No message waits {which}: it is not parked yet, was delivered, cancelled, replaced or held, or never came."
    if settings.mode == "native":
        text += ' In native mode a message without a key waits in the broker (`where` is "broker"): nothing finds it.'
    elif settings.store.park_beyond_ms:
        text += ' A delay up to `park_beyond` waits in the broker (`where` is "broker"): nothing finds it there.'
    step = "if it was sent within the last seconds, repeat this request; else look at /api/held and /api/refused"
    if not state.usable or not state.consuming.get(settings.intake.queue, False):
        step = f"this daemon does not park what is in {settings.intake.queue!r} now: see /health/ready for the reason"
    return Absence(text, step)
