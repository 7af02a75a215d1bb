"""Queries to brokers: to the source's own, and to the target's about destinations."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from delayer.amqp.address import Address
from delayer.amqp.errors import BrokerLost
from delayer.broker.admin import Admin
from delayer.broker.errors import BrokerRefused
from delayer.broker.route_check import CheckedTarget, Verdict, check_targets
from delayer.core.importing import MOST_GOALS, Goal
from delayer.core.message import Target
from delayer.imports.state_machine import BadSource, ImportImpossible, SourceLost

T = TypeVar("T")
HEARTBEAT: Final = 20.0
NAME: Final = "delayer import"


async def translate_broker_errors(question: Awaitable[T]) -> T:
    """Await the answer. Raises SourceLost if the broker is lost or refuses."""
    try:
        return await question
    except (BrokerLost, BrokerRefused) as error:
        raise SourceLost(str(error)) from error


async def admin_of(url: str, management_url: str | None = None) -> Admin:
    """Connect to the source's broker; the caller closes. Raises BadSource, SourceLost."""
    address_of(url)
    return await translate_broker_errors(Admin.connect(url, management_url=management_url, name=NAME))


def address_of(url: str) -> Address:
    """Parse the (first) address of a source's broker. Raises BadSource, never showing the URL."""
    try:
        return Address.parse_all(url)[0]
    except ValueError as error:
        raise BadSource(f"the source's {error}") from None


_WORDS = {
    Verdict.MISSING: "there is no such queue or exchange",
    Verdict.UNROUTABLE: "the exchange has no binding for the key",
    Verdict.CLOSED: "the exchange is internal",
}


@dataclass(slots=True)
class Destinations:
    """Checks which destinations the broker would accept. ``verified`` False: assume all, without asking."""

    broker_url: str
    management_url: str | None
    verified: bool = field(kw_only=True)
    remarks: list[str] = field(default_factory=list, init=False)
    _known: dict[Target, str] = field(default_factory=dict, init=False)

    async def problems(self, goals: Mapping[Target, Goal]) -> Mapping[Target, str]:
        """List destinations whose messages would be held, with the reason. Raises ImportImpossible if it cannot ask."""
        if len(self._known) > 2 * MOST_GOALS:
            self._known.clear()
        if self.verified:
            await self._ask({target: goal for target, goal in goals.items() if target not in self._known})
        return {target: why for target in goals if (why := self._known.get(target, ""))}

    async def _ask(self, goals: Mapping[Target, Goal]) -> None:
        if not goals:
            return
        wanted = {
            CheckedTarget(*target, goal.messages, goal.first_due_ms or 0): target for target, goal in goals.items()
        }
        asked = await check_targets(
            self.broker_url, self.management_url, wanted, name=NAME, seconds=600.0, most=len(wanted)
        )
        self.remarks += [remark for remark in asked.remarks if remark not in self.remarks]
        if any(route.verdict is Verdict.NOT_ASKED for _, route in asked.routes):
            why = "; ".join(asked.remarks) or "the broker did not answer"
            raise ImportImpossible(
                f"the broker did not say whether it takes the messages: {why}. Nothing was moved. Next: "
                "see that broker.url is right and the broker runs, or say --unverified"
            )
        for target, route in asked.routes:
            self._known[wanted[target]] = f"import: {_WORDS[route.verdict]}" if route.verdict.bad else ""
