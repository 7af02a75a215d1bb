"""Would the broker take what waits? Asked of every distinct destination, before it is due and without publishing.

AMQP tells whether an exchange or a queue exists (a passive declaration changes nothing; to a queue with ``x-expires``
it counts as use). Bindings are told by the management API; without it, what an existing exchange does with a key is not
known. What cannot be seen from outside: a missing permission to write, and queues that a message's ``CC`` names.

The questions are bounded in number, in time and in how many are asked at once. The soonest due is asked first, so what
is left over is what can wait. A broker out of reach ends the questions, never who asks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from delayer.amqp.address import Address
from delayer.broker.admin import Admin
from delayer.broker.errors import BrokerRefused, BrokerUnreachable
from delayer.broker.management_api import Management
from delayer.broker.routing import Route, Stop, Verdict, route

NAME: Final = "delayer audit"
_KEYS_AT_A_STRETCH: Final = 1000
"""Keys that are matched before the loop gets its turn."""
_DIRECT_REPLY: Final = b"amq.rabbitmq.reply-to."


@dataclass(frozen=True, slots=True)
class Target:
    """One distinct destination: how many messages are for it, in rows and segments and held, and when the first is due.
    ``held``: how many of them are held."""

    exchange: bytes
    routing_key: bytes
    messages: int
    first_due_ms: int
    held: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """``seconds`` for all questions together, ``patience`` for each; ``at_once`` connections; ``targets`` and
    ``exchanges`` (on the way from one destination) are as many as are looked at."""

    seconds: float = 60.0
    patience: float = 10.0
    at_once: int = 4
    targets: int = 100_000
    exchanges: int = 1_000


@dataclass(frozen=True, slots=True)
class Asked:
    """``routes`` has a row for every target given, soonest due first. ``remarks``: what kept questions from being asked
    or answered, for people."""

    routes: tuple[tuple[Target, Route], ...]
    remarks: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Messages by verdict, only the verdicts that occur."""
        found: dict[str, int] = {}
        for target, answer in self.routes:
            found[answer.verdict.value] = found.get(answer.verdict.value, 0) + target.messages
        return found


async def ask(
    broker_url: str,
    management_url: str | None,
    targets: Iterable[Target],
    limits: Limits = Limits(),
    *,
    name: str = NAME,
) -> Asked:
    """Ask the broker about every target. Never raises for a broker that is out of reach or refuses: then the verdict is
    "not asked" or "not known", and a remark says why. Raises ValueError for a URL that is none.
    """
    waiting = sorted(targets, key=lambda one: (one.first_due_ms, one.exchange, one.routing_key))
    management = None
    if management_url:
        management = Management(management_url, Address.parse(broker_url).vhost, timeout=limits.patience)
    inquiry = _Inquiry(management, limits, name)
    if len(waiting) > limits.targets:
        inquiry.remark(f"only the {limits.targets:,} soonest of {len(waiting):,} destinations were asked about")
    try:
        async with asyncio.timeout(limits.seconds):
            await inquiry.ask(broker_url, waiting[: limits.targets])
    except TimeoutError:
        inquiry.remark(f"the time for questions, {limits.seconds:g} s, was over before all were asked")
    not_asked = Route(Verdict.NOT_ASKED)
    return Asked(tuple((one, inquiry.answers.get(one, not_asked)) for one in waiting), tuple(inquiry.remarks))


def not_asked(targets: Iterable[Target], reason: str) -> Asked:
    """Nobody was asked, and why: no broker wanted, say."""
    waiting = sorted(targets, key=lambda one: (one.first_due_ms, one.exchange, one.routing_key))
    return Asked(tuple((one, Route(Verdict.NOT_ASKED)) for one in waiting), (reason,))


@dataclass(frozen=True, slots=True)
class _Question:
    """An exchange with all its targets, or one queue, behind the default exchange, with its one."""

    name: str
    is_queue: bool
    targets: tuple[Target, ...]


class _Inquiry:
    def __init__(self, management: Management | None, limits: Limits, name: str) -> None:
        self._name = name
        self._management = management
        self._limits = limits
        self._stops: dict[str, Stop | None] = {}
        self.answers: dict[Target, Route] = {}
        self.remarks: list[str] = []

    def remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)

    async def ask(self, broker_url: str, targets: list[Target]) -> None:
        questions = deque(self._questions(targets))
        if self._management is None and any(not one.is_queue for one in questions):
            self.remark("no broker.management_url is configured: whether exchanges route these keys is not known")
        workers = min(self._limits.at_once, len(questions))
        await asyncio.gather(*(self._work(broker_url, questions) for _ in range(workers)))

    def _questions(self, targets: list[Target]) -> list[_Question]:
        """In the order of their soonest message. What needs no question is answered here."""
        found = []
        by_exchange = sorted(targets, key=lambda one: one.exchange)  # stable: the soonest stays first
        for exchange, group in groupby(by_exchange, key=lambda one: one.exchange):
            some = tuple(group)
            if exchange:
                found += self._askable(exchange, some, is_queue=False)
            else:
                for one in some:
                    found += self._askable(one.routing_key, (one,), is_queue=True)
        return sorted(found, key=lambda one: one.targets[0].first_due_ms)

    def _askable(self, name: bytes, targets: tuple[Target, ...], *, is_queue: bool) -> list[_Question]:
        if is_queue and name.startswith(_DIRECT_REPLY):
            self._all(
                targets, Route(Verdict.UNKNOWN, "a direct reply: the connection that waits for it would have to last")
            )
        elif not name or b"\n" in name or b"\r" in name:
            # A passive declaration would ask for another name: the broker takes line ends out of those. An empty queue
            # name means the last one that this channel declared.
            self._all(targets, Route(Verdict.MISSING))
        else:
            try:
                return [_Question(name.decode(), is_queue, targets)]
            except UnicodeDecodeError:
                self._all(
                    targets, Route(Verdict.UNKNOWN, "the name is not UTF-8, which the clients to ask with insist on")
                )
        return []

    def _all(self, targets: Iterable[Target], answer: Route) -> None:
        for one in targets:
            self.answers[one] = answer

    async def _work(self, broker_url: str, questions: deque[_Question]) -> None:
        """Answer questions until there are no more, on a connection of its own: a "no" closes the channel."""
        try:
            async with await Admin.connect(broker_url, name=self._name, patience=self._limits.patience) as admin:
                while questions:
                    await self._answer(admin, questions.popleft())
        except (BrokerUnreachable, BrokerRefused) as error:
            self.remark(f"the broker could not be asked: {error}")

    async def _answer(self, admin: Admin, question: _Question) -> None:
        try:
            if question.is_queue:
                exists = await admin.queue_exists(question.name)
                self._all(question.targets, Route(Verdict.ROUTED if exists else Verdict.MISSING))
            elif not await admin.exchange_exists(question.name):
                self._all(question.targets, Route(Verdict.MISSING))
            else:
                await self._route(admin, question)
        except BrokerRefused as refused:
            self._all(question.targets, Route(Verdict.UNKNOWN, str(refused)))

    async def _route(self, admin: Admin, question: _Question) -> None:
        if self._management is None:
            self._all(question.targets, Route(Verdict.UNKNOWN, "the exchange exists"))
            return
        try:
            stops = await self._reachable(admin, self._management, question.name)
        except (BrokerRefused, BrokerUnreachable) as error:
            # Of the management API: the connection to the broker itself would say so at the next question.
            self.remark(f"bindings could not be read: {error}")
            self._all(question.targets, Route(Verdict.UNKNOWN, "the exchange exists; its bindings could not be read"))
            return
        for n, one in enumerate(question.targets, 1):
            self.answers[one] = route(question.name, one.routing_key, stops)
            if n % _KEYS_AT_A_STRETCH == 0:
                await asyncio.sleep(0)

    async def _reachable(self, admin: Admin, management: Management, start: str) -> dict[str, Stop]:
        """``start`` and every exchange that bindings and alternates lead to from there."""
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
            if len(seen) > self._limits.exchanges:
                raise BrokerUnreachable(f"more than {self._limits.exchanges} exchanges lie behind {start!r}")
        return found

    async def _stop(self, admin: Admin, management: Management, name: str) -> Stop | None:
        """None for an exchange that does not exist: an alternate exchange may be named and missing."""
        if not await admin.exchange_exists(name):
            return None
        return Stop.of(await management.exchange(name), await management.bindings_from(name))
