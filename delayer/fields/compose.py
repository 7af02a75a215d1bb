"""Messages as a publisher sends them: to the exchange of a route, with the headers that say what is wanted. Made
of fields, for `delayer send` and for HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

from delayer.amqp.properties import Properties, changed
from delayer.amqp.values import SHORT_STRING
from delayer.config.errors import format_found
from delayer.config.model import RouteTable, Settings
from delayer.config.texts import Scalar
from delayer.core.delay_sources import header_of
from delayer.format.from_json import encode_properties

USUAL: Final = "delayer.in"
"""The exchange of the sample configuration."""
SHOWN: Final = 5
"""How many routes an error names."""
_YEAR_10000: Final = 253_402_300_800
_RELATIVE: Final = ("x-delay", "x-opt-delivery-delay")
_ABSOLUTE: Final = ("x-deliver-at", "x-opt-delivery-time")


class Unsendable(ValueError):
    """``field`` cannot be sent: ``text`` says what is expected, and what was found."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}")
        self.field, self.text = field, text


class MessageFields(Protocol):
    """A message's fields. Times are in milliseconds. ``properties``: by their AMQP names."""

    @property
    def exchange(self) -> str | None: ...
    @property
    def routing_key(self) -> str: ...
    @property
    def key(self) -> str | None: ...
    @property
    def key_mode(self) -> str | None: ...
    @property
    def key_ceiling(self) -> int | None: ...
    @property
    def delay(self) -> int | None: ...
    @property
    def due(self) -> int | None: ...
    @property
    def headers(self) -> Mapping[str, Any]: ...
    @property
    def message_id(self) -> str | None: ...
    @property
    def content(self) -> bytes:
        """The body."""


class Publishable(NamedTuple):
    """A message to publish."""

    exchange: str
    routing_key: str
    properties: bytes
    body: bytes


def compose(
    settings: Settings, draft: MessageFields, now_ms: int, properties: Mapping[str, str | int] | None = None
) -> Publishable:
    """Compose a message for these settings. Raises Unsendable."""
    route, key = _route(settings, draft.exchange), draft.routing_key
    headers = dict(draft.headers)
    for name in ("key", "key_mode", "key_ceiling"):
        if (given := getattr(draft, name)) is not None:
            headers[f"x-delay-{name.replace('_', '-')}"] = given
    if draft.key_mode == "debounce" and "x-delay-key-ceiling" not in headers:
        raise Unsendable("key_ceiling", "expected a duration, because key_mode is debounce, found none")
    if not route.from_:
        # Straight to the intake queue, a header has the destination's key.
        if key:
            headers.setdefault("x-delay-routing-key", key)
        key = settings.intake.queue
    message_id = draft.message_id or str(uuid.uuid4())
    named = {"routing_key": key, "message_id": message_id, "key": draft.key or "", "key_mode": draft.key_mode or ""}
    for name, value in named.items():
        _check_short(name, value)
    timestamp = _ask(headers, route, draft, now_ms=now_ms)
    more = {name: one for name, one in (properties or {}).items() if one != ""}
    for name, one in more.items():
        _check_short(name, str(one))
    encoded = encode_properties(headers, {**more, "message_id": message_id})
    if timestamp is not None:
        encoded = changed(Properties.parse(encoded), {"timestamp": timestamp.to_bytes(8, "big")})
    return Publishable(route.from_, key, encoded, draft.content)


def _check_short(name: str, value: str) -> None:
    try:
        size = len(value.encode())
    except UnicodeEncodeError:  # An argument may have other bytes.
        raise Unsendable(name, "expected UTF-8, found something else") from None
    if size > SHORT_STRING:
        raise Unsendable(name, f"expected at most {SHORT_STRING} bytes, found {size}")


def _route(settings: Settings, name: str | None) -> RouteTable:
    routes = {route.from_: route for route in settings.routes}
    if name in routes:
        return routes[name]
    if name is None and (len(routes) == 1 or USUAL in routes):
        return routes.get(USUAL, settings.routes[0])
    known = ", ".join(map(format_found, list(routes)[:SHOWN]))
    if len(routes) > SHOWN:
        known += f", … ({len(routes):,} in all)"
    if name is None:
        raise Unsendable("exchange", f"expected one, because there are several routes: {known}; found none")
    raise Unsendable("exchange", f"expected one that a route comes from ({known}), found {format_found(name)}")


def _ask(headers: dict[str, Scalar], route: RouteTable, draft: MessageFields, *, now_ms: int) -> int | None:
    """Put the delay into ``headers``, in the first form that the route reads, or return it as a timestamp, in seconds.
    Without a delay, the message's own headers apply. Raises Unsendable if no form is possible."""
    if draft.delay is None and draft.due is None:
        return None
    field = "due" if draft.delay is None else "delay"
    forms = set(route.delay_from)
    relative = next((form for form in _RELATIVE if form in forms), None)
    absolute = next((form for form in _ABSOLUTE if form in forms), None)
    if clash := sorted({header_of(form).decode() or form for form in forms} & set(headers)):
        raise Unsendable("headers", f"expected the delay once, as a field or in a header, found it also in {clash[0]}")
    due_ms = draft.due if draft.due is not None else now_ms + (draft.delay or 0)
    if draft.delay is not None and relative is not None:
        headers[relative] = draft.delay
    elif absolute is not None:
        headers[absolute] = due_ms
    elif "timestamp" in forms:
        seconds = -(-due_ms // 1000)
        if not 0 <= seconds < _YEAR_10000:  # Clients decode it to their dates.
            why = f"because route {format_found(route.from_)} reads timestamps"
            raise Unsendable(field, f"expected an instant from 1970 to 9999, {why}")
        return seconds
    else:
        reads = ", ".join(route.delay_from) or "none"
        found = "an instant" if draft.delay is None else "a duration"
        raise Unsendable(field, f"expected what route {format_found(route.from_)} reads ({reads}), found {found}")
    return None
