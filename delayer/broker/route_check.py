"""Route checks: whether and where a broker would route waiting messages, without publishing.

:func:`route` follows RabbitMQ: an exchange passes a message to every binding that matches its key, otherwise to its
alternate exchange. The answer is certain only for direct, fanout and topic exchanges, where headers do not decide.
:func:`check_targets` queries the broker about every distinct destination.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final
from urllib.parse import quote

from delayer.broker.admin import Admin
from delayer.broker.errors import BrokerRefused, BrokerUnreachable
from delayer.broker.management_api import Management
from delayer.broker.verify import bindings_from, policies_of
from delayer.core.message import is_direct_reply
from delayer.core.topology import Binding


class Verdict(Enum):
    """The result for the messages of one destination if they were due now."""

    ROUTED = "routed"
    ALTERNATE = "alternate"  # Only an alternate exchange accepts them. They might reach another queue, or none.
    MISSING = "missing"  # The exchange does not exist; at the default exchange, the queue does not exist.
    UNROUTABLE = "unroutable"  # The exchange exists, but does not route them to a queue.
    CLOSED = "closed"  # The exchange is internal and does not accept publishes.
    UNKNOWN = "not known"
    NOT_ASKED = "not asked"

    @property
    def bad(self) -> bool:
        """Whether the messages would be held."""
        return self in (Verdict.MISSING, Verdict.UNROUTABLE, Verdict.CLOSED)


@dataclass(frozen=True, slots=True)
class RouteVerdict:
    """A verdict. ``way``: the alternate exchange, or why the verdict is unknown, for operators; may be empty."""

    verdict: Verdict
    way: str = ""


def _words(key: bytes) -> list[bytes]:
    """Split a key into words. Words may be empty, but an empty key has none."""
    return key.split(b".") if key else []


def key_matches(pattern: bytes, key: bytes) -> bool:
    """Whether the binding ``pattern`` of a topic exchange matches ``key``."""
    words, ends = _words(key), {0}  # How many words the pattern may have matched so far.
    for step in _words(pattern):
        if step == b"#":
            ends = set(range(min(ends), len(words) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(words) and step in (b"*", words[end])}
        if not ends:
            return False
    return len(words) in ends


class ExchangeRoutes:
    """An exchange with its bindings. ``alternate`` may come from its arguments or a policy."""

    def __init__(self, kind: str, bindings: Iterable[Binding], *, internal: bool, alternate: str | None) -> None:
        self.kind, self.internal, self.alternate = kind, internal, alternate
        self._exact: dict[bytes, list[Binding]] = {}
        self._patterns: list[tuple[bytes, Binding]] = []
        for binding in bindings:
            key = b"#" if kind == "fanout" else binding.key.encode()
            if kind == "direct" or {b"*", b"#"}.isdisjoint(_words(key)):
                self._exact.setdefault(key, []).append(binding)
            else:
                self._patterns.append((key, binding))

    def matching(self, key: bytes) -> list[Binding]:
        """Return the bindings that match ``key``."""
        return [*self._exact.get(key, ()), *(one for pattern, one in self._patterns if key_matches(pattern, key))]


async def route(start: str, key: bytes, exchange_of: Callable[[str], Awaitable[ExchangeRoutes]]) -> RouteVerdict:
    """Return the verdict on a message for exchange ``start`` with ``key``. It may pass several exchanges, each once."""
    if (await exchange_of(start)).internal:
        return RouteVerdict(Verdict.CLOSED, "the exchange is internal")
    way, alternates, unknown = [start], [], []
    for name in way:
        exchange = await exchange_of(name)
        if exchange.kind not in ("direct", "fanout", "topic"):
            unknown.append(f"exchange {name!r} is of type {exchange.kind!r}")
            continue
        matching = exchange.matching(key)
        if any(one.destination_kind == "queue" for one in matching):
            return RouteVerdict(Verdict.ROUTED)
        way += sorted({one.destination for one in matching}.difference(way))
        if not matching and exchange.alternate is not None:
            alternates.append(exchange.alternate)
    if unknown:
        return RouteVerdict(Verdict.UNKNOWN, "; ".join(unknown))
    return RouteVerdict(Verdict.ALTERNATE if alternates else Verdict.UNROUTABLE, ", ".join(alternates))


NAME: Final = "delayer audit"
PATIENCE: Final = 10.0
"""Timeout of each request, in seconds."""


@dataclass(frozen=True, slots=True)
class CheckedTarget:
    """One destination, with the number of its waiting messages and the first due time. ``held``: how many of them are
    held."""

    exchange: bytes
    routing_key: bytes
    messages: int
    first_due_ms: int
    held: int = 0

    @property
    def place(self) -> tuple[bool, bytes]:
        """Whether it is a queue (at the default exchange), and the name of that queue or of the exchange."""
        return (False, self.exchange) if self.exchange else (True, self.routing_key)


@dataclass(frozen=True, slots=True)
class RouteVerdicts:
    """``routes``: every target with its verdict, in the order of due times. ``remarks``: why verdicts are unknown, for
    operators."""

    routes: tuple[tuple[CheckedTarget, RouteVerdict], ...]
    remarks: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Number of messages by verdict, without zeros."""
        found: dict[str, int] = {}
        for target, answer in self.routes:
            found[answer.verdict.value] = found.get(answer.verdict.value, 0) + target.messages
        return found


async def check_targets(
    broker_url: str,
    management_url: str | None,
    targets: Iterable[CheckedTarget],
    *,
    name: str = NAME,
    seconds: float = 60.0,
    most: int = 100_000,
) -> RouteVerdicts:
    """Query the broker about at most ``most`` targets, for at most ``seconds``. If it is unreachable or refuses, the
    verdict is "not asked" or "not known", with a remark. Raises ValueError for an invalid URL."""
    inquiry = _Inquiry(_unasked(targets), Management.beside(broker_url, management_url, timeout=PATIENCE))
    checked = list(inquiry.verdicts)[:most]
    if len(inquiry.verdicts) > most:
        inquiry.remarks.append(f"checked only the {most:,} soonest of {len(inquiry.verdicts):,} destinations")
    if inquiry.management is None and any(one.exchange for one in checked):
        inquiry.remarks.append("no broker.management_url is configured, so the routing of these keys is unknown")
    try:
        async with asyncio.timeout(seconds), await Admin.connect(broker_url, name=name, patience=PATIENCE) as admin:
            await inquiry.check(admin, checked)
    except TimeoutError:
        inquiry.remarks.append(f"the time limit of {seconds:g} s ended before all destinations were checked")
    except (BrokerUnreachable, BrokerRefused) as error:
        inquiry.remarks.append(f"the broker could not be asked: {error}")
    return RouteVerdicts(tuple(inquiry.verdicts.items()), tuple(inquiry.remarks))


def skip_targets(targets: Iterable[CheckedTarget], reason: str) -> RouteVerdicts:
    """Return verdicts without querying the broker, for this reason."""
    return RouteVerdicts(tuple(_unasked(targets).items()), (reason,))


def _unasked(targets: Iterable[CheckedTarget]) -> dict[CheckedTarget, RouteVerdict]:
    soonest_first = sorted(targets, key=lambda one: (one.first_due_ms, one.exchange, one.routing_key))
    return dict.fromkeys(soonest_first, RouteVerdict(Verdict.NOT_ASKED))


@dataclass(slots=True)
class _Inquiry:
    """The results of one check so far. ``management``: None if it is not configured, or failed."""

    verdicts: dict[CheckedTarget, RouteVerdict]
    management: Management | None
    remarks: list[str] = field(default_factory=list)
    _places: dict[tuple[bool, bytes], RouteVerdict | None] = field(default_factory=dict)
    _exchanges: dict[str, ExchangeRoutes] = field(default_factory=dict)

    async def check(self, admin: Admin, targets: Sequence[CheckedTarget]) -> None:
        """Find the verdicts on targets. Raises BrokerUnreachable."""
        for n, one in enumerate(targets):
            if one.place not in self._places:
                self._places[one.place] = await _verdict_on(admin, *one.place)
            self.verdicts[one] = self._places[one.place] or await self._routed(one)
            if n % 1000 == 0:
                await asyncio.sleep(0)  # The time limit may end the check here.

    async def _routed(self, target: CheckedTarget) -> RouteVerdict:
        """Return the verdict on a key of an existing exchange."""
        if self.management is not None:
            try:
                return await route(target.exchange.decode(), target.routing_key, self._exchange)
            except (BrokerRefused, BrokerUnreachable) as error:
                self.management = None
                self.remarks.append(f"bindings could not be read: {error}")
        return RouteVerdict(Verdict.UNKNOWN, "the exchange exists; its bindings could not be read")

    async def _exchange(self, name: str) -> ExchangeRoutes:
        """Return the exchange with its bindings. Raises BrokerRefused, BrokerUnreachable."""
        if name not in self._exchanges:
            assert self.management is not None
            self._exchanges[name] = await _read_exchange(self.management, name)
        return self._exchanges[name]


async def _verdict_on(admin: Admin, is_queue: bool, name: bytes) -> RouteVerdict | None:
    """Return the verdict on a queue or an exchange; None for an existing exchange, because its bindings decide. Raises
    BrokerUnreachable."""
    if is_queue and is_direct_reply(b"", name):
        return RouteVerdict(Verdict.UNKNOWN, "a direct reply works only while the requester stays connected")
    if not name or b"\n" in name or b"\r" in name:
        # RabbitMQ removes line ends from a name, so a passive declaration would name something else. An empty queue
        # name means the queue that the channel declared last.
        return RouteVerdict(Verdict.MISSING)
    try:
        exists = await (admin.queue_exists if is_queue else admin.exchange_exists)(name.decode())
    except UnicodeDecodeError:
        return RouteVerdict(Verdict.UNKNOWN, "the name is not UTF-8, so the broker cannot be asked")
    except BrokerRefused as refused:
        return RouteVerdict(Verdict.UNKNOWN, str(refused))
    if not exists:
        return RouteVerdict(Verdict.MISSING)
    return RouteVerdict(Verdict.ROUTED) if is_queue else None


async def _read_exchange(management: Management, name: str) -> ExchangeRoutes:
    """An alternate exchange by argument has priority over that of a policy."""
    shape = {"type": str, "internal": bool, "arguments": dict, "policy": str | None}
    path = f"exchanges/{management.vhost}/{quote(name, safe='')}?columns={','.join(shape)}"
    type_, internal, arguments, policy = await management.get(path, shape)
    alternate = arguments.get("alternate-exchange")
    if alternate is None and policy:
        policies = await policies_of(management)
        in_force = [one for one in policies if one.name == policy and not one.by_operator]
        alternate = next((one.definition.get("alternate-exchange") for one in in_force), None)
    bindings = [binding for binding, _ in await bindings_from(management, name)]
    return ExchangeRoutes(type_, bindings, internal=internal, alternate=alternate)
