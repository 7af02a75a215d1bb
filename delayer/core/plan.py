"""Decide what happens to one message. Every input has exactly one answer, and no input raises.

    decide(request, route, policy, now_ms) -> EnterCascade | Park | AtOnce | Soon | TooLate | Cancel | Refuse | Retry

To understand the system, start here: this module decides the way of each new message, and others carry it out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar

from delayer.amqp.values import SHORT_STRING
from delayer.core import nservicebus, retry_policy
from delayer.core.cascade import MAX_SECONDS, NAME_BYTES, strip_prefix
from delayer.core.delay_headers import (
    BY_SQL,
    CANCEL,
    DELIVER_AT,
    EXCHANGE,
    KEY,
    KEY_CEILING,
    KEY_MODE,
    OWN_SOURCES,
    ROUTING_KEY,
    Asked,
    DelayRequest,
    Source,
    UnreadableDelay,
    closest_delay_header,
    due_and_start_ms,
    in_words,
    quote_value,
    read_delay_ms,
    whole_seconds_until,
)
from delayer.core.delay_sources import CONSULTED, DEFAULT_FORMS, HEADER, header_of, is_lasting, source_of
from delayer.core.hold import Hold, too_late
from delayer.core.marks import is_over
from delayer.core.message import (
    COPY_HEADERS,
    DIRECT_REPLY,
    LONGEST_EXPIRATION_MS,
    OCCURRENCE,
    REPLACE,
    KeyMode,
    Target,
    as_bytes,
    as_text,
    is_direct_reply,
    is_occurrence,
)
from delayer.core.operations import Cancel
from delayer.core.retry_policy import FailedAttempt, NoFailure, RetryPolicy, failure, wait_ms
from delayer.core.units import LATEST_MS

_INTEGER: Final = re.compile(rb"[+-]?[0-9]{1,255}")
_DUE_BY_SQL: Final = (DELIVER_AT.decode(), OWN_SOURCES[DELIVER_AT.decode()], False)
T = TypeVar("T")


class Mode(StrEnum):
    """Where new delays wait: in the broker's cascade, or in the store."""

    NATIVE = "native"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class Route:
    """One ``[[route]]``: a source exchange and the rules for its messages."""

    source: bytes
    to: bytes
    routing_key: bytes = b""
    delay_from: tuple[str, ...] = DEFAULT_FORMS
    default_delay_ms: int = 0
    allow_exchanges: tuple[str, ...] = ()
    exchange_from_reply_to: bool = False
    """Whether ``reply_to`` names the destination exchange, as ``x-delay-exchange`` does."""
    late_limit_ms: int | None = None
    """The daemon holds messages later than this instead of delivering them; None means no limit."""
    retry: RetryPolicy | None = None
    paced: bool = False
    """Whether the route has ``max_rate``. If so, store mode parks all of its messages, even those due now."""
    require_delay: bool = False
    """Whether the daemon refuses messages without a delay."""
    routing_key_header: bytes = b""
    """The header that names a message's routing key, in addition to ``x-delay-routing-key``."""
    key_from: str = ""
    """The source of the key if ``x-delay-key`` is missing: a property, or ``header:NAME``. Empty means none."""
    sources: tuple[tuple[str, Source, bool], ...] = field(init=False, repr=False, compare=False)
    """The forms of ``delay_from``, each with its reader, and whether a release leaves it in the message."""
    named: frozenset[bytes] = field(init=False, repr=False, compare=False)
    """The headers that ``delay_from`` and ``routing_key_header`` name. They are removed like other delay headers."""
    consulted: frozenset[bytes] = field(init=False, repr=False, compare=False)
    """The headers that a plan reads, including ``named``. The daemon decodes only these."""
    key_header: bytes = field(init=False, repr=False, compare=False)
    """The header that ``key_from`` names; a release keeps it. Empty if ``key_from`` names a property."""
    sagas: bool = field(init=False, repr=False, compare=False)
    """Whether it reads NServiceBus timeouts. Each names its destination. A saga (a workflow) can cancel its own."""

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "sources", tuple((form, source_of(form), is_lasting(form)) for form in self.delay_from)
        )
        named = frozenset(filter(None, (self.routing_key_header, *map(header_of, self.delay_from))))
        object.__setattr__(self, "named", named)
        key_header = self.key_from.removeprefix(HEADER).encode() if self.key_from.startswith(HEADER) else b""
        object.__setattr__(self, "key_header", key_header)
        read = CONSULTED | named | {key_header} - {b""} if self.retry is None else retry_policy.RETRY_HEADERS
        object.__setattr__(self, "consulted", read)
        object.__setattr__(self, "sagas", nservicebus.TIMEOUT_FORM in self.delay_from)


@dataclass(frozen=True, slots=True)
class Policy:
    """The part of the configuration that decisions depend on. A reload replaces the whole value.

    ``own_queues`` and ``own_exchanges`` are delayer's own, and forbidden as destinations. Otherwise a client could
    block a cascade level for all messages, or put an envelope with any destination into the due queue.

    ``publishing`` is False while the broker accepts no publishes. Store mode then parks every message to deliver, so
    that none waits behind messages that cannot be published.

    Messages due within ``keep_ms`` stay in memory, because parking would make them late and the cascade counts whole
    seconds. ``no_keys``: why this configuration refuses keys and cancels; "" if it accepts them."""

    mode: Mode
    routes: Mapping[bytes, Route]
    max_delay_ms: int
    park_beyond_ms: int = 0
    keep_ms: int = 0
    longest_native_ms: int = MAX_SECONDS * 1000  # the longest delay inside the broker
    has_store: bool = True
    no_keys: str = ""
    no_store: str = "a store, but none is configured"  # what keys lack if has_store is false
    publishing: bool = True
    unrouted: str = "correct the publisher, or give all daemons of this queue the same routes"
    """What to do about a message whose exchange has no route."""
    own_queues: frozenset[bytes] = frozenset()
    own_exchanges: frozenset[bytes] = frozenset()


class Unacceptable(Exception):
    """Why a message is refused; decide() turns it into a Refuse."""


class EnterCascade(NamedTuple):
    """Publish to the TTL cascade, or to the due queue of RabbitMQ 4.4. The broker keeps the message for ``seconds``,
    then the daemon keeps it for another ``rest_ms``. ``undelayed``: the message asked for no delay."""

    due_ms: int
    seconds: int
    target: Target
    rest_ms: int = 0
    undelayed: bool = False


class Park(NamedTuple):
    """Write to the store. A message with a ``key`` replaces the waiting or held message of that key, or does what
    ``mode`` says."""

    due_ms: int
    target: Target
    key: bytes | None = None
    undelayed: bool = False
    mode: KeyMode = REPLACE


class AtOnce(NamedTuple):
    """Publish to the destination, because the message is already due."""

    due_ms: int
    target: Target
    undelayed: bool = False


class Soon(NamedTuple):
    """Keep the message in memory, unacknowledged, and publish it at its due time, moments from now."""

    due_ms: int
    target: Target
    undelayed: bool = False


class TooLate(NamedTuple):
    """Hold the message, because it is later than the ``late_limit`` of its route allows."""

    due_ms: int
    target: Target
    hold: Hold
    undelayed: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    """Move the message to the refused queue, for this reason."""

    reason: str
    undelayed = False


Plan = EnterCascade | Park | AtOnce | Soon | TooLate | Cancel | Refuse


class Retry(NamedTuple):
    """Write the failure into the dead letter, then follow ``plan``."""

    failed: FailedAttempt
    plan: Plan


def closes_channel(reply_to: bytes | None, expiration: bytes | None, headers: Mapping[bytes, object]) -> str:
    """Say why the broker closes the channel over a publish with these properties; "" if it does not. The broker never
    let such a message in, so only SQL, HTTP, schedules, imports and other protocols bring one."""
    if reply_to == DIRECT_REPLY:
        return f"reply_to: expected a queue, found the direct reply {quote_value(as_text(reply_to))} without a consumer"
    if expiration is not None and not (
        _INTEGER.fullmatch(expiration) and 0 <= int(expiration) <= LONGEST_EXPIRATION_MS
    ):
        expected = f"expected 0 to {LONGEST_EXPIRATION_MS} milliseconds in digits"
        return f"expiration: {expected}, found {quote_value(as_text(expiration))}"
    for name in COPY_HEADERS & headers.keys():
        if not isinstance(headers[name], list):
            return f"{name.decode()}: expected an array of routing keys, found {quote_value(headers[name])}"
    return ""


def decide(
    request: DelayRequest, route: Route | None, policy: Policy, now_ms: int, now_lower_ms: int | None = None
) -> Plan | Retry:
    """Return the plan for one message. ``route`` is that of its exchange; None if the exchange has none. A delay is
    measured from ``now_ms``, the upper bound of the clock when the message was read, so it is never too short. A
    message is due once ``now_lower_ms``, the clock's lower bound (by default ``now_ms``), reaches its due time."""
    try:
        return _decide(request, route, policy, now_ms, now_ms if now_lower_ms is None else now_lower_ms)
    except Unacceptable as reason:
        return Refuse(str(reason))


def _decide(request: DelayRequest, route: Route | None, policy: Policy, now_ms: int, now_lower_ms: int) -> Plan | Retry:
    headers = request.headers
    if route is None:
        expected = ", ".join(map(_name, sorted(policy.routes)))
        raise Unacceptable(
            f"no route for exchange {_name(request.exchange)}: expected one of {expected}; {policy.unrouted}"
        )
    properties = request.properties
    if wrong := closes_channel(properties.short("reply_to"), properties.short("expiration"), headers):
        raise Unacceptable(wrong)
    if route.retry is not None:
        return _retried(request, route, route.retry, policy, now_ms=now_ms, now_lower_ms=now_lower_ms)
    if CANCEL in headers:
        return Cancel(key_of(CANCEL, headers[CANCEL], policy))
    if route.sagas and (cleared := _of_timeout(nservicebus.cleared_timeouts, headers)) is not None:
        _check_keys(nservicebus.CLEAR_TIMEOUTS, policy)
        return Cancel(cleared)
    found = delay_of(request, route, now_ms)
    asked = (route.default_delay_ms, None) if found is None else found
    due_ms, start_ms = _due(asked, request, policy, now_ms, now_lower_ms)
    target = target_of(request, route, policy)
    key = _key(request, route, policy, due_ms, start_ms)
    mode = _key_mode(headers, key) if KEY_MODE in headers or KEY_CEILING in headers else REPLACE
    if key is not None:
        # Park even a message that is already due, because only the store can delete the message that it replaces.
        return Park(due_ms, target, key, found is None, mode)
    # A message that asks for a delay of zero or less is never too late. (None means that it names a due time.)
    delay_ms, _ = asked
    late_limit_ms = route.late_limit_ms if delay_ms is None or delay_ms > 0 else None
    plan = _placed(due_ms, start_ms, target, route, policy, late_limit_ms=late_limit_ms)
    return plan if found is not None else plan._replace(undelayed=True)


def _placed(
    due_ms: int, start_ms: int, target: Target, route: Route, policy: Policy, *, late_limit_ms: int | None
) -> Park | AtOnce | TooLate | Soon | EnterCascade:
    """Return the plan for a message that may wait in the cascade or in the store."""
    stored = policy.mode is Mode.STORE
    wait_ms = due_ms - start_ms
    if stored and (route.paced or not policy.publishing):
        return Park(due_ms, target)
    if wait_ms <= 0:
        hold = too_late(due_ms, start_ms, late_limit_ms)
        return AtOnce(due_ms, target) if hold is None else TooLate(due_ms, target, hold)
    if wait_ms <= policy.keep_ms:
        return Soon(due_ms, target)
    if stored and (wait_ms > policy.park_beyond_ms or wait_ms > policy.longest_native_ms):
        return Park(due_ms, target)
    if wait_ms > policy.longest_native_ms:
        expected = f"expected at most {policy.longest_native_ms // 1000} s, found {-(-wait_ms // 1000)} s"
        raise Unacceptable(f'the delay is too long for the cascade: {expected}; shorten it, or use mode = "store"')
    seconds = whole_seconds_until(due_ms, start_ms)
    return EnterCascade(due_ms, seconds, target, wait_ms - seconds * 1000)


def _retried(
    request: DelayRequest, route: Route, retry: RetryPolicy, policy: Policy, *, now_ms: int, now_lower_ms: int
) -> Retry:
    """Send a dead letter back to the queue it failed in, or to ``retry.exhausted`` after its last retry."""
    try:
        failed = failure(request.headers, retry)
    except NoFailure as none:
        raise Unacceptable(str(none)) from none
    # A retry goes to this queue only, so the keys of CC are ignored.
    queue = retry.exhausted if failed.exhausted else failed.queue
    target = _checked(b"", queue, request.exchange, policy.own_queues, policy.own_exchanges)
    due_ms = now_ms if failed.exhausted else now_ms + wait_ms(retry, failed.retries, request.chance)
    return Retry(failed, _placed(due_ms, max(now_ms, now_lower_ms), target, route, policy, late_limit_ms=None))


def delay_of(request: DelayRequest, route: Route, now_ms: int) -> Asked | None:
    """Read the first form of delay present, except those left by an earlier trip; None without. Raises Unacceptable."""
    sources = (_DUE_BY_SQL, *route.sources) if BY_SQL in request.headers else route.sources
    for form, read, lasting in sources:
        try:
            asked = read(request)
        except UnreadableDelay as unreadable:
            raise Unacceptable(f"{form}: {unreadable}") from unreadable
        if asked is not None and not (lasting and is_over(asked[1], request.headers, now_ms)):
            return asked
    if wrong := _misspelt(request.properties.names()[:100], route):  # A message may have ten thousand headers.
        raise Unacceptable(wrong)
    if route.require_delay:
        raise Unacceptable(f"the message has no delay: expected one, by {', '.join(route.delay_from)} (require_delay)")
    return None


def _misspelt(names: Iterable[bytes], route: Route) -> str:
    """Report a header that nearly spells a delay header, as the reason to refuse the message; "" if there is none."""
    for name in names:
        right = None if name in route.named or name == route.key_header else closest_delay_header(name)
        if right is not None and (right.decode() in route.delay_from or right.decode() not in OWN_SOURCES):
            return f"the message has no delay, but a header {_name(name)}: expected {_name(right)}"
    return ""


def _due(asked: Asked, request: DelayRequest, policy: Policy, now_ms: int, now_lower_ms: int) -> tuple[int, int]:
    """Return the due time, and the time from which the wait is measured, both in epoch ms. Raises Unacceptable."""
    due_ms, start_ms = due_and_start_ms(asked, request, now_ms, now_lower_ms)
    if due_ms - start_ms > policy.max_delay_ms or due_ms > LATEST_MS:
        longest_ms = min(policy.max_delay_ms, LATEST_MS - start_ms)
        found = in_words(due_ms - start_ms)
        step = "send a shorter delay" + ", or raise max_delay" * (policy.max_delay_ms == longest_ms)
        raise Unacceptable(f"the delay is too long: expected at most {in_words(longest_ms)}, found {found}; {step}")
    # A delay of minus a googol ms is valid and means "at once", but as a time it would not fit a header or a row.
    return (due_ms if due_ms > 0 else 0), start_ms


def target_of(request: DelayRequest, route: Route, policy: Policy) -> Target:
    """Return the destination that the message asks for, or else that of its route. Raises Unacceptable."""
    headers = request.headers
    named = ROUTING_KEY if ROUTING_KEY in headers else route.routing_key_header
    if named in headers:
        routing_key = _short_string(named, headers[named])
    else:
        timeout = _of_timeout(nservicebus.timeout_address, headers) if route.sagas and not route.routing_key else None
        routing_key = route.routing_key or timeout or request.routing_key
        if routing_key.startswith((b"0.", b"1.")):  # It may be another cascade's prefix before the key.
            routing_key = strip_prefix(routing_key)
    exchange, by = route.to, EXCHANGE
    # RabbitMQ 4 closes the whole connection for a missing exchange whose name is longer than NAME_BYTES.
    if EXCHANGE in headers:
        exchange = _short_string(by, headers[EXCHANGE], NAME_BYTES)
    elif route.exchange_from_reply_to and (reply_to := request.properties.short("reply_to")):
        by = b"reply_to"
        exchange = _short_string(by, reply_to, NAME_BYTES)
    if exchange != route.to and not _allowed(exchange, route.allow_exchanges):
        raise Unacceptable(
            f"{by.decode()}: exchange {_name(exchange)} is forbidden on this route: "
            f"expected a match of allow_exchanges {list(route.allow_exchanges)}"
        )
    for copy in sorted(request.copies) if exchange == b"" else ():  # Keys at the default exchange are queues.
        _checked(b"", copy, request.exchange, policy.own_queues, policy.own_exchanges)
    return _checked_again(exchange, routing_key, request.exchange, policy.own_queues, policy.own_exchanges)


def _checked(
    exchange: bytes, routing_key: bytes, source: bytes, own_queues: frozenset[bytes], own_exchanges: frozenset[bytes]
) -> Target:
    """Build the target. Raises Unacceptable if it would loop, enter delayer's own queues, or close our connection."""
    if exchange != b"" and exchange == source:
        where = "back into the intake queue"
    elif exchange != b"" and exchange in own_exchanges:
        where = "into delayer's own exchanges"
    elif exchange == b"" and routing_key in own_queues:
        where = "into delayer's own queues"
    elif is_direct_reply(exchange, routing_key):
        # Up to RabbitMQ 4.x an invalid key of this kind closes the connection and fails every publish on it. A valid
        # key is delivered, but the broker reports it as unroutable.
        where = "to a direct reply, not to a queue"
    else:
        return Target(exchange, routing_key)
    raise Unacceptable(f"the destination (exchange {_name(exchange)}, key {_name(routing_key)}) leads {where}")


_checked_again: Final = lru_cache(maxsize=4096)(_checked)  # Not for keys of CC, which may be long.


def _allowed(exchange: bytes, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(exchange.decode("utf-8", "surrogateescape"), pattern) for pattern in patterns)


def key_of(source: bytes, value: object, policy: Policy) -> bytes:
    """Return ``value``, found in ``source``, as a key. Raises Unacceptable."""
    _check_keys(source, policy)
    key = _short_string(source, value)
    if not key:
        raise Unacceptable(f"{source.decode()}: expected a key, found an empty string")
    if is_occurrence(key):
        raise Unacceptable(
            f"{source.decode()}: expected a key of the publisher's own, found {_name(key)}: keys that begin with "
            f"{_name(OCCURRENCE)} belong to schedules"
        )
    return key


def _key(request: DelayRequest, route: Route, policy: Policy, due_ms: int, start_ms: int) -> bytes | None:
    """Return the key from ``x-delay-key``, the saga or ``key_from``; None if there is none. Raises Unacceptable."""
    headers, header = request.headers, route.key_header
    if KEY in headers:
        return key_of(KEY, headers[KEY], policy)
    # A timeout's key serves only its cancel. Without keys the timeout is delivered, and a saga that ended ignores it.
    if route.sagas and policy.mode is Mode.STORE and due_ms > start_ms and not policy.no_keys:
        key = nservicebus.timeout_key(headers, request.properties.short("message_id"), due_ms)
        if key is not None:  # With another key, the saga's clear would miss its timeout.
            return key
    if not route.key_from:
        return None
    source = b"key_from " + route.key_from.encode()
    value: object = headers.get(header) if header else request.properties.short(route.key_from)
    if value in (None, "", b"") and not policy.no_keys:
        return None
    return key_of(source, str(value) if type(value) is int else value, policy)


def _key_mode(headers: Mapping[bytes, object], key: bytes | None) -> KeyMode:
    """Return the mode that the headers ask for. Raises Unacceptable."""
    if key is None:
        header = KEY_MODE if KEY_MODE in headers else KEY_CEILING
        raise Unacceptable(f"{header.decode()}: expected a key, by x-delay-key or key_from, found none")
    mode = as_bytes(headers.get(KEY_MODE, b"replace"))
    if mode == b"debounce":
        return KeyMode(ceiling_ms=_ceiling_ms(headers))
    if mode not in (b"replace", b"keep"):
        found = quote_value(headers[KEY_MODE])
        raise Unacceptable(f"x-delay-key-mode: expected replace, keep or debounce, found {found}")
    if KEY_CEILING in headers:
        raise Unacceptable(f"x-delay-key-ceiling: expected x-delay-key-mode debounce, found {mode.decode()}")
    return KeyMode(keep=mode == b"keep")


def _ceiling_ms(headers: Mapping[bytes, object]) -> int:
    """Return the ceiling of a message that debounces. Raises Unacceptable."""
    if KEY_CEILING not in headers:
        raise Unacceptable("x-delay-key-mode: debounce: expected its x-delay-key-ceiling, in milliseconds, found none")
    try:
        ceiling_ms = read_delay_ms(headers[KEY_CEILING])
    except UnreadableDelay as unreadable:
        raise Unacceptable(f"x-delay-key-ceiling: {unreadable}") from unreadable
    if ceiling_ms < 0:
        raise Unacceptable(f"x-delay-key-ceiling: expected zero or more milliseconds, found {ceiling_ms}")
    return ceiling_ms


def _check_keys(header: bytes, policy: Policy) -> None:
    """Raise Unacceptable if keys would get out of order, or if no store can track them."""
    reason = policy.no_keys
    if not reason and not policy.has_store:
        reason = f"keys and cancels need {policy.no_store}"
    if reason:
        raise Unacceptable(f"{header.decode()}: {reason}")


def _of_timeout(read: Callable[[Mapping[bytes, object]], T], headers: Mapping[bytes, object]) -> T:
    """Read headers meant for NServiceBus's timeout manager. Raises Unacceptable."""
    try:
        return read(headers)
    except UnreadableDelay as unreadable:
        raise Unacceptable(f"{nservicebus.TIMEOUT_FORM}: {unreadable}") from unreadable


def _short_string(header: bytes, value: object, most: int = SHORT_STRING) -> bytes:
    raw = as_bytes(value)
    if raw is None:
        raise Unacceptable(f"{header.decode()}: expected a string, found {quote_value(value)}")
    if len(raw) > most:
        raise Unacceptable(f"{header.decode()}: expected at most {most} bytes, found {len(raw)}")
    return raw


def _name(raw: bytes) -> str:
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in raw.decode("ascii", "backslashreplace"))
    # An escaped name may have a thousand characters; the rest of the reason must still fit.
    return f"'{text}'" if len(text) <= 160 else f"'{text[: 160 - 3]}...'"
