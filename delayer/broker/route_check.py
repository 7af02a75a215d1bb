"""Route checks: whether and where a broker would route waiting messages. Nothing is published.

The prediction is pure and follows RabbitMQ: an exchange gives a message to every binding that matches. Without a match
it gives the message to its alternate exchange. Each exchange is visited once, and a message is routed if it reaches a
queue. :func:`ask` gathers exchanges and bindings from the broker for every distinct destination.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any, Final
from urllib.parse import quote

from delayer.amqp.address import Address
from delayer.broker.admin import Admin
from delayer.broker.errors import BrokerRefused, BrokerUnreachable
from delayer.broker.management_api import Management
from delayer.broker.verify import bindings_from, policies_of
from delayer.core.message import is_direct_reply
from delayer.core.topology import Binding


class Verdict(Enum):
    """The result for the messages of one destination if they were due now."""

    ROUTED = "routed"
    ALTERNATE = "alternate"
    """Only an alternate exchange takes them. They would be delivered, but perhaps to another queue than intended."""
    MISSING = "missing"
    """There is no such exchange, or, at the default exchange, no such queue: they would be held."""
    UNROUTABLE = "unroutable"
    """The exchange exists, but routes to no queue: they would be held."""
    CLOSED = "closed"
    """The exchange is internal and takes no publishes: they would be held."""
    DEPENDS = "depends on headers"
    UNKNOWN = "not known"
    NOT_ASKED = "not asked"

    @property
    def bad(self) -> bool:
        """Whether the messages would not be delivered."""
        return self in (Verdict.MISSING, Verdict.UNROUTABLE, Verdict.CLOSED)


@dataclass(frozen=True, slots=True)
class RouteVerdict:
    """A verdict. ``way``: the alternate exchange that took it, or why nothing is known; for people, may be empty."""

    verdict: Verdict
    way: str = ""


_DELAYED: Final = "x-delayed-message"
"""The delayed-message plugin's type. It routes like the type in ``x-delayed-type``."""
_EVERYTHING: Final = b"#"


def _words(key: bytes) -> list[bytes]:
    """The words of a key. Empty words count, but an empty key has none."""
    return key.split(b".") if key else []


def key_matches(pattern: bytes, key: bytes) -> bool:
    """Whether the binding ``pattern`` of a topic exchange matches ``key``."""
    words, ends = _words(key), {0}  # The numbers of words that the pattern may have matched so far.
    for step in _words(pattern):
        if step == b"#":
            ends = set(range(min(ends), len(words) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(words) and step in (b"*", words[end])}
        if not ends:
            return False
    return len(words) in ends


class ExchangeRoutes:
    """An exchange with its bindings. ``known``: whether its type is. ``depends``: whether headers decide about some
    bindings. ``alternate`` may come from its arguments or a policy."""

    def __init__(
        self,
        kind: str,
        bindings: Iterable[tuple[Binding, Mapping[str, Any]]],
        *,
        arguments: Mapping[str, Any],
        internal: bool = False,
        alternate: str | None = None,
    ) -> None:
        self.kind, self.internal, self.alternate = kind, internal, alternate
        kind = str(arguments.get("x-delayed-type", "")) if kind == _DELAYED else kind
        self.known = kind in ("direct", "fanout", "topic", "headers")
        self.depends = False
        self.leads = set() if alternate is None else {alternate}
        self._exact: dict[bytes, list[Binding]] = {}
        self._patterns: list[tuple[bytes, Binding]] = []
        for binding, table in bindings:
            if binding.destination_kind == "exchange":
                self.leads.add(binding.destination)
            key = binding.key.encode()
            if kind == "fanout" or (kind == "headers" and self._is_certain(table)):
                self._patterns.append((_EVERYTHING, binding))
            elif kind == "topic" and not {b"*", b"#"}.isdisjoint(_words(key)):
                self._patterns.append((key, binding))
            elif kind != "headers":
                self._exact.setdefault(key, []).append(binding)

    def _is_certain(self, table: Mapping[str, Any]) -> bool:
        """Whether a binding of a headers exchange matches every message. Without wanted headers it matches every
        message (``all``) or none (``any``)."""
        how = str(table.get("x-match", "all"))
        names = set(table) - {"x-match"}
        if names if how.endswith("-with-x") else any(not name.startswith("x-") for name in names):
            self.depends = True
            return False
        return how.startswith("all")

    def taking(self, key: bytes) -> list[Binding]:
        """The bindings that certainly match ``key``."""
        return [*self._exact.get(key, ()), *(one for pattern, one in self._patterns if key_matches(pattern, key))]


def route(start: str, key: bytes, exchanges: Mapping[str, ExchangeRoutes]) -> RouteVerdict:
    """The route of a message for exchange ``start`` with ``key``. ``exchanges``: every one that ``start`` leads to,
    with alternates; a missing one does not exist. Certain verdicts come first, then possible ones, then unknown ones.
    """
    if start not in exchanges:
        return RouteVerdict(Verdict.MISSING)
    if exchanges[start].internal:
        return RouteVerdict(Verdict.CLOSED, "the exchange is internal")
    queue = queue_by_alternate = depends = False
    unknown: list[str] = []
    alternates: list[str] = []
    way = {start: False}  # The exchanges on the way, and whether an alternate led there.
    todo = [start]
    for name in todo:
        by_alternate, exchange = way[name], exchanges.get(name)
        if not name:
            unknown.append("an alternate exchange is the default exchange")
        elif exchange is not None and not exchange.known:
            unknown.append(f"exchange {name!r} is of type {exchange.kind!r}")
        elif exchange is not None:
            found = exchange.taking(key)
            depends |= exchange.depends
            if any(one.destination_kind == "queue" for one in found):
                queue, queue_by_alternate = queue or not by_alternate, queue_by_alternate or by_alternate
            leads = {one.destination: by_alternate for one in found if one.destination_kind == "exchange"}
            if not found and not exchange.depends and exchange.alternate is not None:
                alternates.append(exchange.alternate)
                leads = {exchange.alternate: True}
            todo += sorted(leads.keys() - way.keys())
            way = leads | way
    if queue or depends:
        return RouteVerdict(Verdict.ROUTED if queue else Verdict.DEPENDS)
    if unknown:
        return RouteVerdict(Verdict.UNKNOWN, "; ".join(unknown))
    if queue_by_alternate:
        return RouteVerdict(Verdict.ALTERNATE, ", ".join(alternates))
    return RouteVerdict(Verdict.UNROUTABLE, f"nor does its alternate {alternates[0]!r}" if alternates else "")


NAME: Final = "delayer audit"
PATIENCE: Final = 10.0
"""Seconds for each question."""
MOST_EXCHANGES: Final = 1_000
"""Exchanges on the ways from one destination."""


@dataclass(frozen=True, slots=True)
class CheckedTarget:
    """One destination: the number of its messages in rows, segments and held, and the first due time.
    ``held``: how many of them are held."""

    exchange: bytes
    routing_key: bytes
    messages: int
    first_due_ms: int
    held: int = 0


@dataclass(frozen=True, slots=True)
class RouteVerdicts:
    """``routes`` has a row for every given target, in the order of due times. ``remarks`` tell people why questions had
    no answer."""

    routes: tuple[tuple[CheckedTarget, RouteVerdict], ...]
    remarks: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Messages by verdict, only for verdicts that occur."""
        found: dict[str, int] = {}
        for target, answer in self.routes:
            found[answer.verdict.value] = found.get(answer.verdict.value, 0) + target.messages
        return found


async def ask(
    broker_url: str,
    management_url: str | None,
    targets: Iterable[CheckedTarget],
    *,
    name: str = NAME,
    seconds: float = 60.0,
    most: int = 100_000,
) -> RouteVerdicts:
    """Ask the broker about every target, but no more than ``most``, for ``seconds`` altogether. An unreachable or
    refusing broker raises nothing: the verdict is "not asked" or "not known", with a remark. Raises ValueError for an
    invalid URL."""
    waiting = sorted(targets, key=lambda one: (one.first_due_ms, one.exchange, one.routing_key))
    management = None
    if management_url:
        management = Management(management_url, Address.parse(broker_url).vhost, timeout=PATIENCE)
    inquiry = _Inquiry(management, name)
    if len(waiting) > most:
        inquiry.remark(f"checked only the {most:,} soonest of {len(waiting):,} destinations")
    try:
        async with asyncio.timeout(seconds):
            await inquiry.ask(broker_url, waiting[:most])
    except TimeoutError:
        inquiry.remark(f"the time limit of {seconds:g} s ended before all destinations were checked")
    not_asked = RouteVerdict(Verdict.NOT_ASKED)
    return RouteVerdicts(tuple((one, inquiry.answers.get(one, not_asked)) for one in waiting), tuple(inquiry.remarks))


def not_asked(targets: Iterable[CheckedTarget], reason: str) -> RouteVerdicts:
    """Verdicts without a question to the broker, with the reason."""
    waiting = sorted(targets, key=lambda one: (one.first_due_ms, one.exchange, one.routing_key))
    return RouteVerdicts(tuple((one, RouteVerdict(Verdict.NOT_ASKED)) for one in waiting), (reason,))


@dataclass(frozen=True, slots=True)
class _Question:
    """An exchange with all its targets, or one queue with its one target."""

    name: str
    is_queue: bool
    targets: tuple[CheckedTarget, ...]


class _Inquiry:
    def __init__(self, management: Management | None, name: str) -> None:
        self._name = name
        self._management = management
        self._stops: dict[str, ExchangeRoutes | None] = {}
        self.answers: dict[CheckedTarget, RouteVerdict] = {}
        self.remarks: list[str] = []

    def remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)

    async def ask(self, broker_url: str, targets: list[CheckedTarget]) -> None:
        questions = deque(self._questions(targets))
        if self._management is None and any(not one.is_queue for one in questions):
            self.remark("no broker.management_url is configured, so the routing of these keys is unknown")
        connections = min(4, len(questions))
        await asyncio.gather(*(self._work(broker_url, questions) for _ in range(connections)))

    def _questions(self, targets: list[CheckedTarget]) -> list[_Question]:
        """The questions, in the order of their soonest message. Targets that need none are answered here."""
        found = []
        by_exchange = sorted(targets, key=lambda one: one.exchange)  # The sort is stable: the soonest stays first.
        for exchange, group in groupby(by_exchange, key=lambda one: one.exchange):
            some = tuple(group)
            if exchange:
                found += self._askable(exchange, some, is_queue=False)
            else:
                for one in some:
                    found += self._askable(one.routing_key, (one,), is_queue=True)
        return sorted(found, key=lambda one: one.targets[0].first_due_ms)

    def _askable(self, name: bytes, targets: tuple[CheckedTarget, ...], *, is_queue: bool) -> list[_Question]:
        if is_queue and is_direct_reply(b"", name):
            self._all(
                targets, RouteVerdict(Verdict.UNKNOWN, "a direct reply works only while the requester stays connected")
            )
        elif not name or b"\n" in name or b"\r" in name:
            # RabbitMQ removes line ends from a name, so a passive declaration would ask for another name. An empty
            # queue name means the queue that the channel declared last.
            self._all(targets, RouteVerdict(Verdict.MISSING))
        else:
            try:
                return [_Question(name.decode(), is_queue, targets)]
            except UnicodeDecodeError:
                self._all(
                    targets, RouteVerdict(Verdict.UNKNOWN, "the name is not UTF-8, so the broker cannot be asked")
                )
        return []

    def _all(self, targets: Iterable[CheckedTarget], answer: RouteVerdict) -> None:
        for one in targets:
            self.answers[one] = answer

    async def _work(self, broker_url: str, questions: deque[_Question]) -> None:
        """Answer questions until there are no more. Each worker has its own connection: a refusal closes a channel."""
        try:
            async with await Admin.connect(broker_url, name=self._name, patience=PATIENCE) as admin:
                while questions:
                    await self._answer(admin, questions.popleft())
        except (BrokerUnreachable, BrokerRefused) as error:
            self.remark(f"the broker could not be asked: {error}")

    async def _answer(self, admin: Admin, question: _Question) -> None:
        try:
            if question.is_queue:
                exists = await admin.queue_exists(question.name)
                self._all(question.targets, RouteVerdict(Verdict.ROUTED if exists else Verdict.MISSING))
            elif not await admin.exchange_exists(question.name):
                self._all(question.targets, RouteVerdict(Verdict.MISSING))
            else:
                await self._route(admin, question)
        except BrokerRefused as refused:
            self._all(question.targets, RouteVerdict(Verdict.UNKNOWN, str(refused)))

    async def _route(self, admin: Admin, question: _Question) -> None:
        if self._management is None:
            self._all(question.targets, RouteVerdict(Verdict.UNKNOWN, "the exchange exists"))
            return
        try:
            stops = await self._reachable(admin, self._management, question.name)
        except (BrokerRefused, BrokerUnreachable) as error:
            # This is an error of the management API. An error of the broker's connection would end the next question.
            self.remark(f"bindings could not be read: {error}")
            self._all(
                question.targets, RouteVerdict(Verdict.UNKNOWN, "the exchange exists; its bindings could not be read")
            )
            return
        for n, one in enumerate(question.targets, 1):
            self.answers[one] = route(question.name, one.routing_key, stops)
            if n % 1000 == 0:
                await asyncio.sleep(0)  # Other tasks of the loop run now.

    async def _reachable(self, admin: Admin, management: Management, start: str) -> dict[str, ExchangeRoutes]:
        """``start``, and every exchange that its bindings and alternates lead to."""
        found: dict[str, ExchangeRoutes] = {}
        todo, seen = [start], {start}
        while todo:
            name = todo.pop()
            if name not in self._stops:
                self._stops[name] = await self._stop(admin, management, name)
            stop = self._stops[name]
            if stop is None:
                continue
            found[name] = stop
            todo += sorted(stop.leads - seen - {""})
            seen |= stop.leads
            if len(seen) > MOST_EXCHANGES:
                raise BrokerUnreachable(f"more than {MOST_EXCHANGES} exchanges follow {start!r}")
        return found

    async def _stop(self, admin: Admin, management: Management, name: str) -> ExchangeRoutes | None:
        """The exchange with its bindings; None if it does not exist, since an alternate exchange may be missing. An
        alternate exchange by argument has priority over one by policy."""
        if not await admin.exchange_exists(name):
            return None
        columns = "type,internal,arguments,policy"
        row = await management.get(f"exchanges/{management.vhost}/{quote(name, safe='')}?columns={columns}")
        alternate = row["arguments"].get("alternate-exchange")
        if alternate is None and row.get("policy"):
            policies = await policies_of(management)
            in_force = [one for one in policies if one.name == row["policy"] and not one.by_operator]
            alternate = next((one.definition.get("alternate-exchange") for one in in_force), None)
        bindings = await bindings_from(management, name)
        return ExchangeRoutes(
            row["type"], bindings, arguments=row["arguments"], internal=row["internal"], alternate=alternate
        )
