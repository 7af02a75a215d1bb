"""The edits of a message on its way to its destination. All other bytes stay unchanged."""

from __future__ import annotations

from struct import Struct
from typing import Final

from delayer.amqp.errors import MalformedTable
from delayer.amqp.properties import (
    Cut,
    Properties,
    changed,
    decoded,
    edited,
    elements,
    entry,
    int64,
    long_string,
    negated,
    sized,
    splice,
    timestamp,
    value_at,
)
from delayer.core.delay_headers import DELAY, REQUEST_HEADERS, UnreadableDelay, read_delay_ms
from delayer.core.marks import ID, LAST_DUE, X_DEATH
from delayer.core.message import COPY_HEADERS
from delayer.core.plan import closes_channel
from delayer.core.retry_policy import FAILED_IN, RETRIES, FailedAttempt
from delayer.format.headers import ADDED_TO_REFUSED, COUNTED, DEATHS, REFUSED, ROOM, USER_ID, header_text


class Unpublishable(Exception):
    """These properties are well-formed, but they do not fit a frame, or the broker would close the channel over them.
    The text has the whole reason."""


_HISTORY: Final = b"x-delayer-history"
_ERROR: Final = b"x-delayer-error"
_COPIES: Final = b"x-delayer-cc"
_FIRST_FAILURES: Final = 1
_LAST_FAILURES: Final = 19
"""The history keeps this many failures: the first shows the origin, and the last ones the recent past."""


def note_failure(properties: Properties, failure: FailedAttempt, max_properties: int) -> bytes:
    """Note a dead letter's failures in its properties: their number, place and reason of the last, and a history.

    ``x-death`` is removed, because the broker would continue its count; the history has its facts. ``CC`` is renamed,
    because only the queue that dead-lettered the message gets it again; other queues have their copies. A history that
    is too long is left out. Raises MalformedTable.
    """
    history = properties.get(_HISTORY)
    # Delayer did not write a header of this name with another type, so its content is dropped.
    past = elements(history.content) if history is not None and history.type == ord("A") else []
    if failure.retries == 1:
        past = []  # The history is from another queue.
    now = sized(
        b"F",
        entry(b"queue", long_string(failure.queue))
        + entry(b"reason", long_string(failure.reason.encode("utf-8", "surrogateescape")))
        + entry(b"time", timestamp(failure.at))
        + entry(b"exchange", long_string(failure.exchange))
        + entry(b"routing-key", long_string(failure.routing_key)),
    )
    past = [*past[:_FIRST_FAILURES], *past[_FIRST_FAILURES:][1 - _LAST_FAILURES :], now]
    error = f"{failure.reason} in queue {failure.queue.decode('utf-8', 'replace')}"
    counted = (
        entry(RETRIES, int64(failure.retries))
        + entry(FAILED_IN, long_string(failure.queue))
        + entry(_ERROR, long_string(header_text(error)))
    )
    whole = _noted(properties, counted + entry(_HISTORY, sized(b"A", b"".join(past))))
    return whole if len(whole) + ROOM <= max_properties else _noted(properties, counted)


def _noted(properties: Properties, append: bytes) -> bytes:
    remove = {RETRIES, FAILED_IN, _ERROR, _HISTORY, X_DEATH} | COUNTED | COPY_HEADERS
    copies = properties.get(b"CC")
    if copies is not None:
        remove |= {_COPIES}
        append = entry(_COPIES, copies.type_and_value) + append
    return splice(properties, remove=remove, remove_prefixes=DEATHS, append=append)


# The entries of the two headers that every message gets, without their values.
_ID_HEAD: Final = entry(ID, long_string(b""))[:-4]
_DUE_HEAD: Final = entry(LAST_DUE, int64(0))[:-8]
_U32: Final = Struct(">I")
_I64: Final = Struct(">q")

# If x-death stayed, RabbitMQ before 4.0 would see a dead-letter cycle on the next trip through a cascade, and silently
# drop the message.
_REMOVED: Final = REQUEST_HEADERS | COUNTED | {X_DEATH, ID, LAST_DUE}
_CUT: Final = _REMOVED | ADDED_TO_REFUSED | {DELAY}
_DEATH: Final = b"-death-"


def released_properties(properties: Properties, id: bytes, due_ms: int, max_properties: int) -> bytes:
    """Edit the properties of a message as it leaves for its destination. ``x-delay`` becomes negative, which is the
    delay plugin's mark for a delay that is over. Raises MalformedTable, and Unpublishable: decide() has not seen a
    message that was imported or taken over, and the broker's limit may have changed since."""
    if wrong := why_unpublishable(properties):
        raise Unpublishable(wrong)
    append = b"".join((_ID_HEAD, _U32.pack(len(id)), id, _DUE_HEAD, _I64.pack(due_ms)))
    wanted = _CUT
    if "user_id" in properties.places:
        append += entry(USER_ID, long_string(properties.short("user_id") or b""))
        wanted |= {USER_ID}
        properties = Properties.parse(changed(properties, {}, ("user_id",)))
    raw = properties.raw
    # Searching the raw bytes is cheap, and few messages were ever dead letters.
    found = properties.entries(None if _DEATH in raw else wanted)
    refused = any(name == REFUSED for name, _, _ in found)
    cuts: list[Cut] = []
    is_turned = False
    for name, type_at, stop in found:
        if name == DELAY and is_turned:
            # The first delay that is not a mark has delayed this message. A later one would delay it again if it comes
            # back, and a copy of the first could be longer, so that thousands of them would exceed the frame.
            cuts.append((type_at - 1 - len(name), stop, b""))
        elif name == DELAY:
            if turned := _turned(raw, type_at, stop):
                cuts.append((type_at, stop, turned))
                is_turned = True
        elif name in ADDED_TO_REFUSED:
            if refused:
                cuts.append((type_at - 1 - len(name), stop, b""))
        elif name in wanted or name.startswith(DEATHS):
            cuts.append((type_at - 1 - len(name), stop, b""))
    released = edited(properties, cuts, append)
    if len(released) > max_properties:
        raise Unpublishable(
            f"the properties are too long: expected at most {max_properties} bytes, found {len(released)}"
        )
    return released


def why_unpublishable(properties: Properties) -> str:
    """Say why the broker closes the channel over a publish with these properties; "" if it does not."""
    places, copied = properties.places, b"CC" in properties.raw
    if not (copied or "reply_to" in places or "expiration" in places):
        return ""
    copies = decoded(properties, COPY_HEADERS) if copied else {}
    wrong = closes_channel(properties.short("reply_to"), properties.short("expiration"), copies)
    return wrong and f"the broker would close the channel: {wrong}"


def _turned(raw: bytes, type_at: int, stop: int) -> bytes:
    """Flip the sign of the delay. Return b"" if the value stays, because it is not positive and so a mark already, or
    because it is unreadable and did not delay this message."""
    try:
        positive = read_delay_ms(value_at(raw, type_at, stop)) > 0
    except (UnreadableDelay, MalformedTable):
        return b""
    return negated(raw[type_at], raw[type_at + 1 : stop]) if positive else b""
