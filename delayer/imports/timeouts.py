"""A timeout that NServiceBus's timeout manager stored, as the message that its transport would publish. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

from delayer.amqp.properties import FLAGS, entry, long_string
from delayer.core import nservicebus
from delayer.core.delay_headers import UnreadableDelay
from delayer.core.hold import Hold, unfit
from delayer.core.importing import Item, Rewrite
from delayer.core.message import SHORT_STRING, Parcel, Target
from delayer.core.plan import LATEST_MS

RELATED: Final = "NServiceBus.RelatedToTimeoutId"
"""The header that the timeout manager adds when it dispatches."""
SAVED_REPLY_TO: Final = "NServiceBus.Timeout.ReplyToAddress"
"""The header where timeout managers of core 3 to 5 kept the reply address; they restored it when they dispatched."""
UNREAD: Final = b"x-delayer-import-headers"
"""The header for an unreadable headers column, or for a queue name that is too long, unchanged."""
NET_TYPE: Final = "$type"
_ALWAYS: Final = FLAGS["headers"] | FLAGS["delivery_mode"]
_CONTENT_TYPE: Final = FLAGS["content_type"]
# Other properties of a timeout, in the order of the wire. All of them follow the delivery mode.
_CORRELATION_ID, _REPLY_TO, _MESSAGE_ID, _TYPE = (
    FLAGS[name] for name in ("correlation_id", "reply_to", "message_id", "type")
)
_PERSISTENT: Final = b"\2"
_BYTE: Final = tuple(bytes((n,)) for n in range(SHORT_STRING + 1))
_U16: Final = Struct(">H")
_U32: Final = Struct(">I")
_EXPIRE: Final = nservicebus.EXPIRE.decode()
_REPLY_TO_ADDRESS: Final = nservicebus.REPLY_TO.decode()
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - the columns have no zone, and mean UTC


class Timeout(NamedTuple):
    """A stored timeout: ``headers`` is the JSON of the column, ``address`` the destination as it was stored."""

    id: str
    address: str
    due_ms: int
    headers: str | Mapping[str, object] | None
    body: bytes


def epoch_ms(moment: datetime) -> int:
    """A column's instant (UTC, without a zone) in epoch ms, rounded up."""
    since = (moment if moment.tzinfo is None else moment.replace(tzinfo=None)) - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1000 + -(-since.microseconds // 1000)


def moment_of(epoch: int) -> datetime:
    """The inverse of :func:`epoch_ms`."""
    return _EPOCH + timedelta(milliseconds=epoch)


def item_of(timeout: Timeout, source: bytes, queue: bytes, replies: Sequence[Rewrite] = ()) -> Item:
    """The message, for ``queue`` through the default exchange. ``replies`` rename the reply address. A defect of the
    timeout becomes the message's Hold."""
    headers, unread = _read(timeout.headers)
    raw = str(timeout.headers).encode("utf-8", "surrogateescape") if unread else b""
    hold = _hold(unread, queue)
    if not _is_name(queue):
        raw = raw or queue
        queue = queue[:SHORT_STRING]
    due_ms = min(max(_due_ms(timeout.due_ms, headers), 0), LATEST_MS)
    properties = _properties(timeout.id, headers, raw, replies)
    address = timeout.address.encode("utf-8", "surrogateescape")[:SHORT_STRING]
    return Item(Parcel(due_ms, source, b"", address, Target(b"", queue), properties, timeout.body), hold)


def problem_of(headers: str | Mapping[str, object] | None, queue: bytes) -> str:
    """Why the import would hold the message; "" where it would not."""
    hold = _hold(_read(headers)[1], queue)
    return "" if hold is None else hold.text


def _hold(unread: str, queue: bytes) -> Hold | None:
    if not _is_name(queue):
        return unfit(f"its destination has {len(queue)} bytes, expected 1 to {SHORT_STRING}")
    return unfit(f"its headers cannot be read: {unread}") if unread else None


def _is_name(queue: bytes) -> bool:
    return 0 < len(queue) <= SHORT_STRING


def _read(given: str | Mapping[str, object] | None) -> tuple[Mapping[str, object], str]:
    """The headers; or none, and why they cannot be read."""
    try:
        return _headers(given), ""
    except ValueError as error:
        return {}, str(error)


def _headers(given: str | Mapping[str, object] | None) -> Mapping[str, object]:
    """Raises ValueError."""
    if given is None or given == "":
        return {}
    found = json.loads(given) if isinstance(given, str) else given
    if isinstance(found, list):
        # The serializer of .NET writes a dictionary as a list of pairs by default.
        if not all(isinstance(one, dict) and {"Key", "Value"} <= one.keys() for one in found):
            raise ValueError("expected pairs of Key and Value in the list, found something else")
        found = {str(one["Key"]): one["Value"] for one in found}
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {type(found).__name__}")  # noqa: TRY004 - of data, not of code
    if NET_TYPE in found:  # Json.NET writes its type on request; it is no header.
        found = {name: value for name, value in found.items() if name != NET_TYPE}
    longest = max(map(len, found), default=0)
    if longest > SHORT_STRING // 4 and any(len(name.encode("utf-8", "surrogatepass")) > SHORT_STRING for name in found):
        raise ValueError(f"a name has more than {SHORT_STRING} bytes")
    return found


def _due_ms(column_ms: int, headers: Mapping[str, object]) -> int:
    """The column's instant, or that of the header, if it is the same one and more exact."""
    expire = headers.get(_EXPIRE)
    if expire is None:
        return column_ms
    try:
        exact = nservicebus.read_wire_instant_ms(expire)
    except UnreadableDelay:
        return column_ms
    # Databases round the due instant: SQL Server to 3 ms, MySQL to a second. The header has it exactly.
    return exact if 0 < exact - column_ms <= 1_000 else column_ms


def _properties(id_: str, headers: Mapping[str, object], raw: bytes, replies: Sequence[Rewrite]) -> bytes:
    """The properties as NServiceBus's transport for RabbitMQ fills them in: headers as strings, and properties as well
    where AMQP has one."""
    texts: dict[str, str] = {name: value if type(value) is str else _text(value) for name, value in headers.items()}
    texts.setdefault(RELATED, id_)
    if SAVED_REPLY_TO in texts and (saved := texts.pop(SAVED_REPLY_TO)):
        texts[_REPLY_TO_ADDRESS] = saved
    if replies and (answer := texts.get(_REPLY_TO_ADDRESS)):
        for rewrite in replies:
            answer = rewrite(answer)
        texts[_REPLY_TO_ADDRESS] = answer
    parts: list[bytes] = []
    for name, text in texts.items():
        value = text.encode("utf-8", "surrogatepass")  # JSON can contain half of a surrogate pair.
        parts += (_head(name), _U32.pack(len(value)), value)
    if raw:
        parts.append(entry(UNREAD, long_string(raw)))
    table = b"".join(parts)
    get = texts.get
    kind = get("NServiceBus.EnclosedMessageTypes", "").partition(";")[0].partition(",")[0].strip()
    flags = _ALWAYS
    before = behind = b""
    for bit, text in (
        (_CONTENT_TYPE, get("NServiceBus.ContentType", "application/octet-stream")),
        (_CORRELATION_ID, get("NServiceBus.CorrelationId", "")),
        (_REPLY_TO, get(_REPLY_TO_ADDRESS, "")),
        (_MESSAGE_ID, get("NServiceBus.MessageId", "") or id_),
        (_TYPE, kind),
    ):
        value = text.encode("utf-8", "surrogatepass")
        if 0 < len(value) <= SHORT_STRING:
            flags |= bit
            if bit == _CONTENT_TYPE:
                before = _BYTE[len(value)] + value
            else:
                behind += _BYTE[len(value)] + value
    return b"".join((_U16.pack(flags), before, _U32.pack(len(table)), table, _PERSISTENT, behind))


@lru_cache(maxsize=1 << 12)
def _head(name: str) -> bytes:
    """The bytes before the length of a string header of this name. A system uses a few dozen names."""
    key = name.encode("utf-8", "surrogatepass")
    return b"%c%bS" % (len(key), key)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)
