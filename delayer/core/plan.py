"""The decision about one message. Total: every input has exactly one answer, and no input raises.

    decide(request, policy, now_ms) -> EnterCascade | Park | AtOnce | Soon | TooLate | Cancel | Refuse

Start here to understand the system: this module decides, and all other modules carry out its decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from delayer.core import nservicebus
from delayer.core.cascade import MAX_SECONDS, NAME_BYTES, delay_in_key, strip_prefix
from delayer.core.delay_headers import (
    ABSOLUTE,
    CANCEL,
    DEFAULT_FORMS,
    DELAY,
    DELIVER_AT,
    EXCHANGE,
    HEADERS,
    JSON,
    KEY,
    LAST_DUE,
    NSERVICEBUS,
    NSERVICEBUS_TIMEOUT,
    OPT_DELAY,
    OPT_TIME,
    RECEIVED_AT,
    RELATIVE,
    ROUTING_KEY,
    ROUTING_KEY_BITS,
    DelayRequest,
    UnreadableDelay,
    counted,
    in_words,
    instant_in_json_ms,
    read_delay_ms,
    read_delivery_time_ms,
    read_instant_ms,
    seconds_until,
    shown,
)
from delayer.core.hold import Hold, too_late
from delayer.core.levels import ETA, eta_ms
from delayer.core.message import SHORT_STRING, KeyGroup, Target, as_bytes, is_direct_reply
from delayer.core.retry_policy import Failure, NoFailure, Retry, failure, wait_ms

LATEST_MS: Final = 253_402_300_799_999
"""The end of the year 9999. Not every store, and not every program that reads one, accepts later times."""
CONSULTED: Final = (
    frozenset({DELAY, DELIVER_AT, OPT_DELAY, OPT_TIME, ROUTING_KEY, EXCHANGE, KEY, CANCEL, RECEIVED_AT, LAST_DUE})
    | frozenset({ETA})
    | nservicebus.CONSULTED
)
"""The headers that :func:`decide` reads. Routes with ``retry`` also read retry_policy.CONSULTED."""


class Mode(StrEnum):
    """The place of new delays: the broker's cascade, or the store."""

    NATIVE = "native"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class Route:
    """One ``[[route]]``: a source exchange, and the rules for its messages."""

    source: bytes
    to: bytes
    routing_key: bytes = b""
    delay_from: tuple[str, ...] = DEFAULT_FORMS
    default_delay_ms: int = 0
    allow_exchanges: tuple[str, ...] = ()
    late_limit_ms: int | None = None
    """The daemon holds later messages instead of delivering them; None: no message is too late."""
    retry: Retry | None = None
    paced: bool = False
    """Whether its messages are released at a limited rate. In store mode all of them are parked, also those due now."""
    sagas: bool = field(init=False)
    """Whether it reads NServiceBus timeouts, which have sagas and addresses of their own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sagas", NSERVICEBUS_TIMEOUT in self.delay_from)


@dataclass(frozen=True, slots=True)
class Policy:
    """The part of the configuration that decisions depend on. A reload replaces the whole value.

    Messages must not go to ``own_queues`` and ``own_exchanges``, which are delayer's own. A client could otherwise
    block a cascade level for all messages, or put an envelope with a destination of its own into the due queue.

    ``publishing`` is False while the broker accepts no publishes. In store mode all messages are parked then, so that
    no message waits behind others that cannot be published.

    Messages that are due within ``keep_ms`` are kept in memory: to park them would make them late, and the cascade
    counts whole seconds.
    """

    mode: Mode
    routes: Mapping[bytes, Route]
    intake_queue: bytes
    max_delay_ms: int
    park_beyond_ms: int = 0
    keep_ms: int = 0
    longest_native_ms: int = MAX_SECONDS * 1000
    """The longest wait inside the broker."""
    has_store: bool = True
    publishing: bool = True
    own_queues: frozenset[bytes] = frozenset()
    own_exchanges: frozenset[bytes] = frozenset()
    targets: dict[tuple[bytes, bytes], Target] = field(init=False, repr=False, compare=False, default_factory=dict)
    """The targets of messages that ask for none of their own, by exchange and routing key (see :func:`target_of`)."""


class Refused(Exception):
    """An internal exception with a reason; decide() turns it into a Refuse."""


class EnterCascade(NamedTuple):
    """Publish to where the broker keeps the message until it is due, in ``seconds`` and ``rest_ms`` from now: the TTL
    cascade or, on RabbitMQ 4.4, a queue.

    ``failed``, here and below: the message is a queue's dead letter, and gets a note of the failure.
    """

    due_ms: int
    seconds: int
    target: Target
    failed: Failure | None = None
    rest_ms: int = 0


class Park(NamedTuple):
    """Write to the store. A message with a ``key`` replaces the waiting one of that key."""

    due_ms: int
    target: Target
    key: bytes | None = None
    failed: Failure | None = None


class AtOnce(NamedTuple):
    """The message is already due: publish it to the destination."""

    due_ms: int
    target: Target
    failed: Failure | None = None


class Soon(NamedTuple):
    """The message is due within moments: keep it in memory, unacknowledged, and publish it at its instant."""

    due_ms: int
    target: Target
    failed: Failure | None = None


class TooLate(NamedTuple):
    """The message is later than the ``late_limit`` of its route allows: hold it."""

    due_ms: int
    target: Target
    hold: Hold


@dataclass(frozen=True, slots=True)
class Cancel:
    """Delete the waiting message of this key, or those of this group of keys. The cancel itself is not delivered."""

    key: bytes | KeyGroup


@dataclass(frozen=True, slots=True)
class Refuse:
    """Move the message to the refused queue, for this reason."""

    reason: str


Plan = EnterCascade | Park | AtOnce | Soon | TooLate | Cancel | Refuse


def has_key(plan: Plan) -> bool:
    """Whether the order of arrival matters: the message replaces or cancels an earlier one."""
    return isinstance(plan, Cancel) or (isinstance(plan, Park) and plan.key is not None)


def decide(request: DelayRequest, policy: Policy, now_ms: int, now_lower_ms: int | None = None) -> Plan:
    """The plan for one message.

    A delay counts from ``now_ms``: the upper bound of the clock when the message was read, so it is never too short. A
    message is due by ``now_lower_ms``, the lower bound of the clock now, so nothing is early. None: the same.
    """
    try:
        return _decide(request, policy, now_ms, now_ms if now_lower_ms is None else now_lower_ms)
    except Refused as refused:
        return Refuse(str(refused))


def _decide(request: DelayRequest, policy: Policy, now_ms: int, now_lower_ms: int) -> Plan:
    headers = request.headers
    route = policy.routes.get(request.exchange)
    if route is None:
        expected = ", ".join(map(_name, sorted(policy.routes)))
        raise Refused(f"no route for exchange {_name(request.exchange)}: expected one of {expected}")
    if route.retry is not None:
        return _retried(request, route, route.retry, policy, now_ms=now_ms, now_lower_ms=now_lower_ms)
    if CANCEL in headers:
        return Cancel(key_of(CANCEL, request, policy))
    if route.sagas and (saga := cleared_of(request, policy)) is not None:
        return Cancel(saga)
    due = due_ms, from_ms = due_of(request, route, policy, now_ms, now_lower_ms)
    target = target_of(request, route, policy)
    if KEY in headers:
        # This holds for a message that is due at once too: only the store can delete the waiting one exactly.
        return Park(due_ms, target, key_of(KEY, request, policy))
    if route.sagas and policy.mode is Mode.STORE and due_ms > from_ms:
        key = saga_key_of(request, due_ms)
        if key is not None:
            return Park(due_ms, target, key)
    return _carried(due, target, route, request, policy)


def _carried(
    due: tuple[int, int],
    target: Target,
    route: Route,
    request: DelayRequest,
    policy: Policy,
    *,
    failed: Failure | None = None,
) -> Plan:
    """The plan for a message that may wait in the cascade or in the store."""
    due_ms, from_ms = due
    stored = policy.mode is Mode.STORE
    wait_ms = due_ms - from_ms
    if stored and (route.paced or not policy.publishing):
        return Park(due_ms, target, None, failed)
    if wait_ms <= 0:
        return (
            _due_already(due_ms, from_ms, target, route, request) if failed is None else AtOnce(due_ms, target, failed)
        )
    if wait_ms <= policy.keep_ms:
        return Soon(due_ms, target, failed)
    if stored and (wait_ms > policy.park_beyond_ms or wait_ms > policy.longest_native_ms):
        return Park(due_ms, target, None, failed)
    plan = _cascade(due_ms, from_ms, target, policy)
    return plan if failed is None else plan._replace(failed=failed)


def _retried(
    request: DelayRequest, route: Route, retry: Retry, policy: Policy, *, now_ms: int, now_lower_ms: int
) -> Plan:
    """Send a dead letter back to the queue that dead-lettered it, or, if exhausted, to the queue for those."""
    try:
        failed = failure(request.headers, retry)
    except NoFailure as none:
        raise Refused(str(none)) from none
    target = Target(b"", retry.exhausted if failed.exhausted else failed.queue)
    # A retry goes to this one queue only: the keys of CC are ignored.
    check_not_ours(target.exchange, target.routing_key, request._replace(copies=frozenset()), policy)
    due_ms = now_ms if failed.exhausted else now_ms + wait_ms(retry, failed.retries, request.chance)
    return _carried((due_ms, max(now_ms, now_lower_ms)), target, route, request, policy, failed=failed)


def _due_already(due_ms: int, now_ms: int, target: Target, route: Route, request: DelayRequest) -> Plan:
    hold = too_late(due_ms, now_ms, route.late_limit_ms)
    if hold is None or wants_no_delay(request, route.delay_from, route.default_delay_ms):
        return AtOnce(due_ms, target)
    return TooLate(due_ms, target, hold)


def _cascade(due_ms: int, now_ms: int, target: Target, policy: Policy) -> EnterCascade:
    seconds = seconds_until(due_ms, now_ms)
    if (wait_ms := due_ms - now_ms) > policy.longest_native_ms:
        found = f"expected at most {MAX_SECONDS} s, found {-(-wait_ms // 1000)} s"
        raise Refused(f"the delay is too long for the cascade: {found}")
    return EnterCascade(due_ms, seconds, target, None, due_ms - now_ms - seconds * 1000)


def due_of(request: DelayRequest, route: Route, policy: Policy, now_ms: int, now_lower_ms: int) -> tuple[int, int]:
    """The due time, and the time from which the wait for it counts, both in epoch ms."""
    form = ""
    try:
        for form in route.delay_from:
            if (due := _declared(form, request, now_ms, now_lower_ms)) is not None:
                break
        else:
            due = counted(route.default_delay_ms, request, now_ms, now_lower_ms)
    except UnreadableDelay as unreadable:
        raise Refused(f"{form}: {unreadable}") from unreadable
    due_ms, from_ms = due
    if due_ms - from_ms > policy.max_delay_ms or due_ms > LATEST_MS:
        longest_ms = min(policy.max_delay_ms, LATEST_MS - from_ms)
        found = in_words(due_ms - from_ms)
        raise Refused(f"the delay is too long: expected at most {in_words(longest_ms)}, found {found}")
    # A delay of minus a googol milliseconds is valid and means "at once"; as a time it would fit no header and no row.
    return (due_ms if due_ms > 0 else 0), from_ms


def _declared(form: str, request: DelayRequest, now_ms: int, now_lower_ms: int) -> tuple[int, int] | None:
    """The same two times in this form; None if the message does not have it. Raises UnreadableDelay."""
    header = HEADERS.get(form)
    if header is None:
        return _of_others(form, request, now_ms, now_lower_ms)
    if (value := request.headers.get(header, _ABSENT)) is _ABSENT:
        return None
    if form in ABSOLUTE:
        return (read_delivery_time_ms if header == OPT_TIME else read_instant_ms)(value), now_lower_ms
    return counted(read_delay_ms(value), request, now_ms, now_lower_ms)


_ABSENT: Final = object()


def wants_no_delay(request: DelayRequest, forms: Sequence[str], default_delay_ms: int) -> bool:
    """Whether the message asks for a delay of 0 or less: it is meant to be delivered at once, and is never too late.

    The message's headers must be readable.
    """
    form = next((form for form in forms if _declared(form, request, 0, 0) is not None), "")
    if form in RELATIVE:
        return read_delay_ms(request.headers[HEADERS[form]]) <= 0
    seconds = 1
    if form == NSERVICEBUS:
        seconds = nservicebus.delay_seconds(request.headers) or 0
    elif form == ROUTING_KEY_BITS:
        seconds = delay_in_key(request.routing_key) or 0
    return seconds <= 0 if form else default_delay_ms <= 0


def _of_others(form: str, request: DelayRequest, now_ms: int, now_lower_ms: int) -> tuple[int, int] | None:
    """The due time in other systems' forms; None if the form is absent."""
    due_ms: int | None = None
    match form:
        case "timestamp":
            due_ms = None if request.timestamp is None else request.timestamp * 1000
        case "nservicebus":
            seconds = nservicebus.delay_seconds(request.headers)
            due_ms = nservicebus.delayed_until_ms(request.headers)
            if due_ms is None and seconds is not None:
                return counted(seconds * 1000, request, now_ms, now_lower_ms)
        case "nservicebus-timeout":
            timeout = nservicebus.timeout(request.headers)
            due_ms = None if timeout is None else timeout.due_ms
        case "routing-key-bits":
            seconds = delay_in_key(request.routing_key)
            return None if seconds is None else counted(seconds * 1000, request, now_ms, now_lower_ms)
        case "celery-eta":
            due_ms = eta_ms(request.headers.get(ETA))
        case _:
            due_ms = instant_in_json_ms(request.body, form.removeprefix(JSON), request.content_encoding)
    return None if due_ms is None else (due_ms, now_lower_ms)


def target_of(request: DelayRequest, route: Route, policy: Policy) -> Target:
    if request.copies or route.sagas or not _TARGETS.isdisjoint(request.headers):
        return _target_of(request, route, policy)
    usual = request.exchange, request.routing_key
    target = policy.targets.get(usual)
    if target is None:
        if len(policy.targets) >= MOST_TARGETS:
            policy.targets.clear()
        target = policy.targets[usual] = _target_of(request, route, policy)
    return target


_TARGETS: Final = frozenset({ROUTING_KEY, EXCHANGE})
MOST_TARGETS: Final = 4096
"""Targets that a policy remembers."""


def _target_of(request: DelayRequest, route: Route, policy: Policy) -> Target:
    exchange, routing_key = route.to, route.routing_key or (route.sagas and _address(request)) or request.routing_key
    if routing_key.startswith((b"0.", b"1.")):
        routing_key = strip_prefix(routing_key)
    if ROUTING_KEY in request.headers:
        routing_key = _short_string(ROUTING_KEY, request.headers[ROUTING_KEY])
    if EXCHANGE in request.headers:
        # RabbitMQ 4 has no valid reply for a longer name of a missing exchange: it ends the whole connection.
        exchange = _short_string(EXCHANGE, request.headers[EXCHANGE], NAME_BYTES)
        if exchange != route.to and not _allowed(exchange, route.allow_exchanges):
            raise Refused(
                f"x-delay-exchange: exchange {_name(exchange)} is forbidden on this route: "
                f"expected a match of allow_exchanges {list(route.allow_exchanges)}"
            )
    check_not_ours(exchange, routing_key, request, policy)
    return Target(exchange, routing_key)


def _address(request: DelayRequest) -> bytes | None:
    """The queue that a timeout names; None for any other message."""
    if nservicebus.EXPIRE not in request.headers:
        return None
    try:
        timeout = nservicebus.timeout(request.headers)
    except UnreadableDelay as unreadable:  # If another form gave the due time, nothing has read this one before.
        raise Refused(f"{NSERVICEBUS_TIMEOUT}: {unreadable}") from unreadable
    if timeout is not None and len(timeout.address) > SHORT_STRING:
        raise Refused(
            f"{NSERVICEBUS_TIMEOUT}: expected an address of at most {SHORT_STRING} bytes, found {len(timeout.address)}"
        )
    return None if timeout is None else timeout.address


def check_not_ours(exchange: bytes, routing_key: bytes, request: DelayRequest, policy: Policy) -> None:
    """Raise Refused if the message would return at once and for ever, enter delayer's own queues, or end our
    connection."""
    if exchange != b"":
        if exchange == request.exchange:
            raise Refused(_leads(exchange, routing_key, "back into the intake queue"))
        if exchange in policy.own_exchanges:
            raise Refused(_leads(exchange, routing_key, "into delayer's own exchanges"))
        return
    # At the default exchange every key is a queue, also the keys of CC.
    for key in (routing_key, *sorted(request.copies)):
        if key == policy.intake_queue:
            raise Refused(_leads(exchange, key, "back into the intake queue"))
        if key in policy.own_queues:
            raise Refused(_leads(exchange, key, "into delayer's own queues"))
        if is_direct_reply(exchange, key):
            # Up to RabbitMQ 4.x an invalid key of this kind ends the connection, with all publishes in flight. A valid
            # one is delivered, but the broker reports it as unroutable.
            raise Refused(_leads(exchange, key, "to a direct reply, not to a queue"))


def _leads(exchange: bytes, routing_key: bytes, where: str) -> str:
    return f"the destination (exchange {_name(exchange)}, key {_name(routing_key)}) leads {where}"


def _allowed(exchange: bytes, patterns: tuple[str, ...]) -> bool:
    name = exchange.decode("utf-8", "surrogateescape")
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def key_of(header: bytes, request: DelayRequest, policy: Policy) -> bytes:
    if not policy.has_store:
        raise Refused(f"{header.decode()}: {_NEEDS_STORE}")
    key = _short_string(header, request.headers[header])
    if not key:
        raise Refused(f"{header.decode()}: expected a key, found an empty string")
    return key


_SAGA: Final = b"nservicebus-saga:%b:"
_NEEDS_STORE: Final = "keys and cancels need a store, but none is configured, or it is unreachable"


def cleared_of(request: DelayRequest, policy: Policy) -> KeyGroup | None:
    """The key group of a saga whose timeouts the message clears; None for any other message."""
    if nservicebus.CLEAR_TIMEOUTS not in request.headers:
        return None
    try:
        saga = nservicebus.cleared_saga(request.headers)
    except UnreadableDelay as unreadable:
        raise Refused(f"{NSERVICEBUS_TIMEOUT}: {unreadable}") from unreadable
    if saga is None:
        return None
    if not policy.has_store:
        raise Refused(f"{nservicebus.CLEAR_TIMEOUTS.decode()}: {_NEEDS_STORE}")
    return KeyGroup(_SAGA % saga)


def saga_key_of(request: DelayRequest, due_ms: int) -> bytes | None:
    """The key of a saga's timeout, by which a saga can clear it. None without a saga, or without a message id: two
    timeouts would share the key, and one of them would be lost."""
    if nservicebus.EXPIRE not in request.headers or not request.message_id:
        return None
    saga = nservicebus.saga_of(request.headers)
    if saga is None:
        return None
    key = (_SAGA % saga) + b"%b:%d" % (request.message_id, due_ms)
    return key if len(key) <= SHORT_STRING else None


def _short_string(header: bytes, value: object, most: int = SHORT_STRING) -> bytes:
    raw = as_bytes(value)
    if raw is None:
        raise Refused(f"{header.decode()}: expected a string, found {shown(value)}")
    if len(raw) > most:
        raise Refused(f"{header.decode()}: expected at most {most} bytes, found {len(raw)}")
    return raw


def _name(raw: bytes) -> str:
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in raw.decode("ascii", "backslashreplace"))
    # An escaped name may have a thousand characters; the rest of the reason must still fit.
    return f"'{text}'" if len(text) <= 160 else f"'{text[: 160 - 3]}...'"
