"""Route checks: whether and where a broker would route waiting messages. Nothing is published.

The prediction is pure and follows RabbitMQ: an exchange gives a message to every binding that matches. Without a match
it gives the message to its alternate exchange. Each exchange is visited once, and a message is routed if it reaches a
queue. :func:`ask` gathers exchanges and bindings from the broker for every distinct destination.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any, Final, Self
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


@dataclass(frozen=True, slots=True)
class RouteMatch:
    """The queues and exchanges to which one exchange routes a key. ``depends``: only headers decide some bindings."""

    queues: frozenset[str] = frozenset()
    exchanges: frozenset[str] = frozenset()
    depends: bool = False

    @property
    def empty(self) -> bool:
        return not (self.queues or self.exchanges or self.depends)


@dataclass(frozen=True, slots=True)
class ExchangeInfo:
    """An exchange in the management API. ``alternate`` may come from its arguments or a policy."""

    name: str
    type: str
    internal: bool = False
    alternate: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


_DELAYED: Final = "x-delayed-message"
"""The delayed-message plugin's type. It routes like the type in ``x-delayed-type``."""

Bindings = Iterable[tuple[Binding, Mapping[str, Any]]]


def matcher(exchange: ExchangeInfo, bindings: Bindings) -> Callable[[bytes], RouteMatch] | None:
    """A function that routes a key like ``exchange``, without visiting every binding. None for an unknown
    type."""
    kind = str(exchange.arguments.get("x-delayed-type", "")) if exchange.type == _DELAYED else exchange.type
    match kind:
        case "direct":
            by_key: dict[bytes, list[Binding]] = {}
            for binding, _ in bindings:
                by_key.setdefault(binding.key.encode(), []).append(binding)
            targets = {one: _targets(some) for one, some in by_key.items()}
            return lambda key: targets.get(key, RouteMatch())
        case "fanout":
            everywhere = _targets(binding for binding, _ in bindings)
            return lambda _: everywhere
        case "topic":
            return Topics(binding for binding, _ in bindings).matched
        case "headers":
            certain = _headers(bindings)
            return lambda _: certain
        case _:
            return None


def _targets(bindings: Iterable[Binding], *, depends: bool = False) -> RouteMatch:
    queues: set[str] = set()
    exchanges: set[str] = set()
    for binding in bindings:
        (queues if binding.destination_kind == "queue" else exchanges).add(binding.destination)
    return RouteMatch(frozenset(queues), frozenset(exchanges), depends)


def _headers(bindings: Bindings) -> RouteMatch:
    """The targets of a headers exchange. Without a message's headers, only bindings without wanted headers are certain:
    they match every message (``all``) or none (``any``)."""
    certain, depends = [], False
    for binding, arguments in bindings:
        how = str(arguments.get("x-match", "all"))
        names = set(arguments) - {"x-match"}
        wanted = names if how.endswith("-with-x") else {name for name in names if not name.startswith("x-")}
        if wanted:
            depends = True
        elif how.startswith("all"):
            certain.append(binding)
    return _targets(certain, depends=depends)


@dataclass(slots=True)
class _Node:
    next: dict[bytes, _Node] = field(default_factory=dict)
    bindings: list[Binding] = field(default_factory=list)
    hash: bool = False


class Topics:
    """Patterns of a topic exchange as a tree of words, as in the broker. The cost of a key depends on its words and the
    matching branches, not on the number of bindings."""

    def __init__(self, bindings: Iterable[Binding]) -> None:
        self._root = _Node()
        for binding in bindings:
            node = self._root
            for word in _words(binding.key.encode()):
                node = node.next.setdefault(word, _Node(hash=word == b"#"))
            node.bindings.append(binding)

    def matched(self, key: bytes) -> RouteMatch:
        nodes = _with_hashes([self._root])
        for word in _words(key):
            after: list[_Node] = []
            for node in nodes.values():
                if node.hash:  # It matches one word more.
                    after.append(node)
                after += [node.next[step] for step in {word, b"*"} if step in node.next and step != b"#"]
            nodes = _with_hashes(after)
        return _targets(binding for node in nodes.values() for binding in node.bindings)


def _words(key: bytes) -> list[bytes]:
    """The words of a key. Empty words count, but an empty key has none."""
    return key.split(b".") if key else []


def _with_hashes(nodes: Iterable[_Node]) -> dict[int, _Node]:
    """These nodes, and all nodes that follow if every ``#`` matches no word."""
    found: dict[int, _Node] = {}
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if id(node) not in found:
            found[id(node)] = node
            if b"#" in node.next:
                todo.append(node.next[b"#"])
    return found


@dataclass(frozen=True, slots=True)
class Stop:
    """An exchange on the way of a message. ``matched`` is None for an unknown type. ``leads``: the exchanges that it
    may route messages to."""

    exchange: ExchangeInfo
    matched: Callable[[bytes], RouteMatch] | None
    leads: frozenset[str] = frozenset()

    @classmethod
    def of(cls, exchange: ExchangeInfo, bindings: Sequence[tuple[Binding, Mapping[str, Any]]]) -> Self:
        """The stop for an exchange and its bindings in the management API."""
        leads = {one.destination for one, _ in bindings if one.destination_kind == "exchange"}
        if exchange.alternate is not None:
            leads.add(exchange.alternate)
        return cls(exchange, matcher(exchange, bindings), frozenset(leads))


@dataclass(slots=True)
class _Walk:
    """The state of a walk. ``alternates`` are those that were needed."""

    queue: bool = False
    queue_by_alternate: bool = False
    depends: bool = False
    unknown: list[str] = field(default_factory=list)
    alternates: list[str] = field(default_factory=list)


def route(start: str, key: bytes, stops: Mapping[str, Stop]) -> RouteVerdict:
    """The route of a message for exchange ``start`` with ``key``. ``stops``: every exchange that ``start`` leads to,
    with alternates; a missing one does not exist. Never raises."""
    if start not in stops:
        return RouteVerdict(Verdict.MISSING)
    if stops[start].exchange.internal:
        return RouteVerdict(Verdict.CLOSED, "the exchange is internal")
    return _judged(_walked(start, key, stops))


def _walked(start: str, key: bytes, stops: Mapping[str, Stop]) -> _Walk:
    walk = _Walk()
    todo, seen = [(start, False)], {start}
    while todo:
        name, alternate = todo.pop()
        if not name:
            walk.unknown.append("an alternate exchange is the default exchange")
            continue
        stop = stops.get(name)
        if stop is None:
            continue
        if stop.matched is None:
            walk.unknown.append(f"exchange {name!r} is of type {stop.exchange.type!r}")
            continue
        found = stop.matched(key)
        walk.depends |= found.depends
        if found.queues:
            walk.queue, walk.queue_by_alternate = walk.queue or not alternate, walk.queue_by_alternate or alternate
        leads = [(one, alternate) for one in sorted(found.exchanges)]
        if found.empty and stop.exchange.alternate is not None:
            walk.alternates.append(stop.exchange.alternate)
            leads = [(stop.exchange.alternate, True)]
        for lead in leads:
            if lead[0] not in seen:
                seen.add(lead[0])
                todo.append(lead)
    return walk


def _judged(walk: _Walk) -> RouteVerdict:
    """Certain verdicts first, then possible ones, then unknown ones."""
    if walk.queue:
        return RouteVerdict(Verdict.ROUTED)
    if walk.depends:
        return RouteVerdict(Verdict.DEPENDS)
    if walk.unknown:
        return RouteVerdict(Verdict.UNKNOWN, "; ".join(walk.unknown))
    if walk.queue_by_alternate:
        return RouteVerdict(Verdict.ALTERNATE, ", ".join(walk.alternates))
    return RouteVerdict(Verdict.UNROUTABLE, f"nor does its alternate {walk.alternates[0]!r}" if walk.alternates else "")


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
        self._stops: dict[str, Stop | None] = {}
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

    async def _reachable(self, admin: Admin, management: Management, start: str) -> dict[str, Stop]:
        """``start``, and every exchange that its bindings and alternates lead to."""
        found: dict[str, Stop] = {}
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

    async def _stop(self, admin: Admin, management: Management, name: str) -> Stop | None:
        """The stop of an exchange; None if it does not exist, since an alternate exchange may be missing."""
        if not await admin.exchange_exists(name):
            return None
        return Stop.of(await exchange_info(management, name), await bindings_from(management, name))


async def exchange_info(management: Management, name: str) -> ExchangeInfo:
    """An exchange, which must exist. An alternate exchange by argument has priority over one by policy."""
    columns = "type,internal,arguments,policy"
    row = await management.get(f"exchanges/{management.vhost}/{quote(name, safe='')}?columns={columns}")
    alternate = row["arguments"].get("alternate-exchange")
    if alternate is None and row.get("policy"):
        in_force = [one for one in await policies_of(management) if one.name == row["policy"] and not one.by_operator]
        alternate = next((one.definition.get("alternate-exchange") for one in in_force), None)
    return ExchangeInfo(name, row["type"], row["internal"], alternate, row["arguments"])
