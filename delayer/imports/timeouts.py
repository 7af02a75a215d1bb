"""Converts a timeout stored by NServiceBus's timeout manager into the message its transport would publish. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from delayer.amqp.properties import Properties, changed, encode_headers, entry, long_string
from delayer.amqp.values import SHORT_STRING
from delayer.core import nservicebus
from delayer.core.delay_headers import UnreadableDelay
from delayer.core.hold import Hold, unfit
from delayer.core.importing import ImportItem, ImportSelection
from delayer.core.message import Parcel, Target
from delayer.core.readable import parser_error
from delayer.core.units import LATEST_MS

RELATED: Final = "NServiceBus.RelatedToTimeoutId"
"""The header that the timeout manager adds when it dispatches."""
SAVED_REPLY_TO: Final = "NServiceBus.Timeout.ReplyToAddress"
"""Where timeout managers of core 3 to 5 saved the reply address; they restored it when they dispatched."""
UNREAD: Final = b"x-delayer-import-headers"
"""Carries an unreadable headers column, or a queue name that is too long, unchanged."""
NET_TYPE: Final = "$type"
_EXPIRE: Final = nservicebus.EXPIRE.decode()
_REPLY_TO_ADDRESS: Final = nservicebus.REPLY_TO.decode()
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - the columns have no zone, and mean UTC


class StoredTimeout(NamedTuple):
    """A stored timeout. ``headers``: the column's JSON. ``address``: the destination as stored."""

    id: str
    address: str
    due_ms: int
    headers: str | Mapping[str, object] | None
    body: bytes


def epoch_ms(moment: datetime) -> int:
    """Convert a column's instant (UTC, without a zone) to epoch ms, rounded up."""
    return -((_EPOCH - moment.replace(tzinfo=None)) // timedelta(milliseconds=1))


def moment_of(epoch: int) -> datetime:
    """The inverse of :func:`epoch_ms`."""
    return _EPOCH + timedelta(milliseconds=epoch)


def item_of(timeout: StoredTimeout, source: bytes, meant: ImportSelection) -> ImportItem:
    """Build the message for its queue, through the default exchange. ``meant`` renames the queue and the reply address.
    A defect of the timeout becomes the message's Hold."""
    address = timeout.address.encode("utf-8", "surrogateescape")
    queue = meant.retargeted(Target(b"", address)).routing_key
    headers: Mapping[str, object] = {}
    hold, raw = None, b""
    try:
        headers = _headers(timeout.headers)
    except ValueError as error:
        hold = unfit(f"its headers cannot be read: {parser_error(error)}")
        raw = str(timeout.headers).encode("utf-8", "surrogateescape")
    if (invalid := misnamed(queue)) is not None:
        hold, raw = invalid, raw or queue
        queue = queue[:SHORT_STRING]
    due_ms = min(max(_due_ms(timeout.due_ms, headers), 0), LATEST_MS)
    properties = _properties(timeout.id, headers, raw, meant)
    parcel = Parcel(due_ms, source, b"", address[:SHORT_STRING], Target(b"", queue), properties, timeout.body)
    return ImportItem(parcel, hold)


def misnamed(queue: bytes) -> Hold | None:
    """Return a hold if no queue can have this name."""
    if 0 < len(queue) <= SHORT_STRING:
        return None
    return unfit(f"its destination has {len(queue)} bytes, expected 1 to {SHORT_STRING}")


def _headers(given: str | Mapping[str, object] | None) -> Mapping[str, object]:
    """Raises ValueError."""
    if given is None or given == "":
        return {}
    found = json.loads(given) if isinstance(given, str) else given
    if isinstance(found, list):
        # .NET's serializer writes a dictionary as a list of pairs by default.
        if not all(isinstance(one, dict) and {"Key", "Value"} <= one.keys() for one in found):
            raise ValueError("expected pairs of Key and Value in the list, found something else")
        found = {str(one["Key"]): one["Value"] for one in found}
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {type(found).__name__}")  # noqa: TRY004 - of data, not of code
    if NET_TYPE in found:  # Json.NET adds its type on request; it is not a header.
        found = {name: value for name, value in found.items() if name != NET_TYPE}
    longest = max(map(len, found), default=0)
    if longest > SHORT_STRING // 4 and any(len(name.encode("utf-8", "surrogatepass")) > SHORT_STRING for name in found):
        raise ValueError(f"a name has more than {SHORT_STRING} bytes")
    return found


def _due_ms(column_ms: int, headers: Mapping[str, object]) -> int:
    """Return the column's instant, or the header's if it is the same but more exact."""
    expire = headers.get(_EXPIRE)
    if expire is None:
        return column_ms
    try:
        exact = nservicebus.read_wire_instant_ms(expire)
    except UnreadableDelay:
        return column_ms
    # Databases round the due instant, SQL Server to 3 ms and MySQL to a second. The header is exact.
    return exact if 0 < exact - column_ms <= 1_000 else column_ms


def _properties(id_: str, headers: Mapping[str, object], raw: bytes, meant: ImportSelection) -> bytes:
    """Build the properties as NServiceBus does: headers as strings, also in the AMQP properties that match."""
    texts = {name: _text(value) for name, value in headers.items()}
    texts.setdefault(RELATED, id_)
    if SAVED_REPLY_TO in texts and (saved := texts.pop(SAVED_REPLY_TO)):
        texts[_REPLY_TO_ADDRESS] = saved
    if answer := texts.get(_REPLY_TO_ADDRESS):
        texts[_REPLY_TO_ADDRESS] = meant.renamed(answer)
    table = [entry(_bytes(name), long_string(_bytes(text))) for name, text in texts.items()]
    encoded = b"".join([*table, entry(UNREAD, long_string(raw))] if raw else table)
    said = {
        "content_type": texts.get("NServiceBus.ContentType", "application/octet-stream"),
        "correlation_id": texts.get("NServiceBus.CorrelationId", ""),
        "reply_to": texts.get(_REPLY_TO_ADDRESS, ""),
        "message_id": texts.get("NServiceBus.MessageId", "") or id_,
        "type": texts.get("NServiceBus.EnclosedMessageTypes", "").partition(";")[0].partition(",")[0].strip(),
    }
    values = {
        name: bytes((len(value),)) + value
        for name, text in said.items()
        if 0 < len(value := _bytes(text)) <= SHORT_STRING
    }
    return changed(Properties.parse(encode_headers(encoded)), values)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON can contain half of a surrogate pair.


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)
