"""What a message asks for: when it is due, where it goes, under which key; and what of that is refused.

What is decided about it: plan.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from delayer.core.cascade import NAME_BYTES, strip_prefix
from delayer.core.delay import UnreadableDelay, in_words, read_delay_ms, read_instant_ms, shown
from delayer.core.message import Target
from delayer.core.values import Timestamp

SHORT_STRING: Final = 255
SHORT_NAME: Final = 160
LATEST_MS: Final = 253_402_300_799_999
"""The end of the year 9999: later instants fit neither every store nor every program that reads one."""

DELAY = b"x-delay"
DELIVER_AT = b"x-deliver-at"
OPT_DELAY = b"x-opt-delivery-delay"
OPT_TIME = b"x-opt-delivery-time"
ROUTING_KEY = b"x-delay-routing-key"
EXCHANGE = b"x-delay-exchange"
KEY = b"x-delay-key"
CANCEL = b"x-delay-cancel"
RECEIVED_AT = b"timestamp_in_ms"
LAST_DUE = b"x-delayer-due"

# The headers that decide() looks at; a caller need not decode any other.
CONSULTED: Final = frozenset(
    {DELAY, DELIVER_AT, OPT_DELAY, OPT_TIME, ROUTING_KEY, EXCHANGE, KEY, CANCEL, RECEIVED_AT, LAST_DUE}
)
RELATIVE: Final = {"x-delay": DELAY, "x-opt-delivery-delay": OPT_DELAY}
ABSOLUTE: Final = {"x-deliver-at": DELIVER_AT, "x-opt-delivery-time": OPT_TIME}
TIMESTAMP: Final = "timestamp"
HEADERS: Final = RELATIVE | ABSOLUTE
DELAY_FORMS: Final = (*RELATIVE, *ABSOLUTE, TIMESTAMP)
DEFAULT_FORMS: Final = ("x-delay", "x-deliver-at", "x-opt-delivery-time", "x-opt-delivery-delay")


class Mode(StrEnum):
    """Where new delays go."""

    NATIVE = "native"
    STORE = "store"


class Finish(StrEnum):
    """Who takes a message out of the cascade: the broker, into a queue; or the daemon, to any exchange."""

    BROKER = "broker"
    DAEMON = "daemon"


@dataclass(frozen=True, slots=True)
class Route:
    """One ``[[route]]``: the exchange that messages come through, and what becomes of them."""

    source: bytes
    to: bytes
    routing_key: bytes = b""
    delay_from: tuple[str, ...] = DEFAULT_FORMS
    default_delay_ms: int = 0
    allow_exchanges: tuple[str, ...] = ()
    finish: Finish = Finish.DAEMON


@dataclass(frozen=True, slots=True)
class Policy:
    """The part of the configuration that decisions depend on. One value, swapped whole on reload.

    ``own_queues`` and ``own_exchanges`` are delayer's own: whoever could send a message there through us could stop a
    level of the cascade for everybody, or put an envelope with a destination of its own into the due queue.

    ``publishing`` is False while the broker takes no publishes: in store mode everything is parked then, whenever it is
    due, so that nobody waits behind what cannot go out.
    """

    mode: Mode
    routes: Mapping[bytes, Route]
    intake_queue: bytes
    max_delay_ms: int
    park_beyond_ms: int = 0
    has_store: bool = True
    publishing: bool = True
    own_queues: frozenset[bytes] = frozenset()
    own_exchanges: frozenset[bytes] = frozenset()


class Ask(NamedTuple):
    """What a message says: where it came through, and its decoded headers out of :data:`CONSULTED`.

    ``timestamp`` is the property, in seconds. ``acts_later`` is true where the message carries something that must not
    act inside the cascade but act again at its destination (``expiration``, ``CC``). ``copies`` are the keys that
    ``CC`` names.
    """

    exchange: bytes
    routing_key: bytes
    headers: Mapping[bytes, object]
    timestamp: int | None = None
    acts_later: bool = False
    copies: frozenset[bytes] = frozenset()


class Refused(Exception):
    """Carries a reason out of the functions below; plan.decide() turns it into a value."""


def route_of(ask: Ask, policy: Policy) -> Route:
    """The route of the exchange that it came through. Raises Refused, as the others do."""
    route = policy.routes.get(ask.exchange)
    if route is None:
        raise Refused(f"no route for exchange {_name(ask.exchange)}: expected one of {_names(policy.routes)}")
    return route


def due_of(ask: Ask, route: Route, policy: Policy, now_ms: int, sure_ms: int) -> tuple[int, int]:
    """The due instant, and the instant from which the wait for it counts."""
    due_ms, from_ms = _said_due_ms(ask, route, now_ms, sure_ms)
    wait_ms = due_ms - from_ms
    if wait_ms > policy.max_delay_ms or due_ms > LATEST_MS:
        longest_ms = min(policy.max_delay_ms, LATEST_MS - from_ms)
        raise Refused(f"the delay is too long: expected at most {in_words(longest_ms)}, found {in_words(wait_ms)}")
    # Minus a googol milliseconds is a number too, and means "at once"; as an instant it would fit no header and no row.
    return max(due_ms, 0), from_ms


def _said_due_ms(ask: Ask, route: Route, now_ms: int, sure_ms: int) -> tuple[int, int]:
    """The first form present, in the route's order, rules; an unreadable one never falls through to the next."""
    headers = ask.headers
    form = ""
    try:
        for form in route.delay_from:
            header = HEADERS.get(form)
            if header is None:
                if ask.timestamp is not None:
                    return ask.timestamp * 1000, sure_ms
            elif header in headers:
                if form in ABSOLUTE:
                    return read_instant_ms(headers[header]), sure_ms
                return _in(read_delay_ms(headers[header]), ask, now_ms, sure_ms)
    except UnreadableDelay as unreadable:
        raise Refused(f"{form}: {unreadable}") from unreadable
    return _in(route.default_delay_ms, ask, now_ms, sure_ms)


def _in(delay_ms: int, ask: Ask, now_ms: int, sure_ms: int) -> tuple[int, int]:
    """For a relative delay: the due instant, and the instant from which the wait for it counts."""
    if delay_ms <= 0:
        # No delay at all means this instant, and not one that the clock may be yet to reach.
        return sure_ms + delay_ms, sure_ms
    stamp = _received_ms(ask)
    return (now_ms + delay_ms, now_ms) if stamp is None else (stamp + delay_ms, sure_ms)


def _received_ms(ask: Ask) -> int | None:
    """The broker's ``timestamp_in_ms`` where present: a relative delay counts from it, so that a wait in the intake
    queue does not add up. Else None: it counts from now.

    A message that was delayed before may still carry the stamp of its first arrival (the broker's interceptor does not
    overwrite by default), and counting from that would be early.
    """
    stamp = ask.headers.get(RECEIVED_AT)
    if stamp is None:
        return None
    if LAST_DUE in ask.headers or not isinstance(stamp, int) or isinstance(stamp, bool | Timestamp) or stamp <= 0:
        return None
    return stamp


def target_of(ask: Ask, route: Route, policy: Policy) -> Target:
    exchange, routing_key = route.to, route.routing_key or strip_prefix(ask.routing_key)
    if ROUTING_KEY in ask.headers:
        routing_key = _short_string(ROUTING_KEY, ask.headers[ROUTING_KEY])
    if EXCHANGE in ask.headers:
        # Of a longer name RabbitMQ 4 cannot say that there is no such exchange: it ends the whole connection.
        exchange = _short_string(EXCHANGE, ask.headers[EXCHANGE], NAME_BYTES)
        if exchange != route.to and not _allowed(exchange, route.allow_exchanges):
            raise Refused(
                f"x-delay-exchange: exchange {_name(exchange)} is forbidden on this route: "
                f"expected a match of allow_exchanges {list(route.allow_exchanges)}"
            )
    _check_not_ours(exchange, routing_key, ask, policy)
    return Target(exchange, routing_key)


def _check_not_ours(exchange: bytes, routing_key: bytes, ask: Ask, policy: Policy) -> None:
    """Raise Refused where the message would come straight back, due at once, for ever; or enter what is our own."""
    if exchange != b"":
        if exchange == ask.exchange:
            raise Refused(_leads(exchange, routing_key, "back into the intake queue"))
        if exchange in policy.own_exchanges:
            raise Refused(_leads(exchange, routing_key, "into delayer's own exchanges"))
        return
    # At the default exchange every key is a queue, those of CC too.
    for key in (routing_key, *sorted(ask.copies)):
        if key == policy.intake_queue:
            raise Refused(_leads(exchange, key, "back into the intake queue"))
        if key in policy.own_queues:
            raise Refused(_leads(exchange, key, "into delayer's own queues"))


def _leads(exchange: bytes, routing_key: bytes, where: str) -> str:
    return f"the destination (exchange {_name(exchange)}, key {_name(routing_key)}) leads {where}"


def _allowed(exchange: bytes, patterns: tuple[str, ...]) -> bool:
    name = exchange.decode("utf-8", "surrogateescape")
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def key_of(header: bytes, ask: Ask, policy: Policy) -> bytes:
    if not policy.has_store:
        raise Refused(f"{header.decode()}: keys and cancels need a store, and none is configured and in reach")
    key = _short_string(header, ask.headers[header])
    if not key:
        raise Refused(f"{header.decode()}: expected a key, found an empty string")
    return key


def _short_string(header: bytes, value: object, most: int = SHORT_STRING) -> bytes:
    match value:
        case str():
            raw = value.encode("utf-8", "surrogateescape")
        case bytes():
            raw = value
        case _:
            raise Refused(f"{header.decode()}: expected a string, found {shown(value)}")
    if len(raw) > most:
        raise Refused(f"{header.decode()}: expected at most {most} bytes, found {len(raw)}")
    return raw


def _name(raw: bytes) -> str:
    text = raw.decode("ascii", "backslashreplace")
    # A name of other letters may take a thousand: what is wrong with it must still fit behind it in a reason.
    return f"'{text}'" if len(text) <= SHORT_NAME else f"'{text[: SHORT_NAME - 3]}...'"


def _names(raw: Mapping[bytes, Route]) -> str:
    return ", ".join(_name(source) for source in sorted(raw))
