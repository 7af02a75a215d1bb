"""Publishing on behalf of deliveries: what got through is accepted, what could not be routed is held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import structlog

from delayer.core.errors import BrokerLost, Unconfirmed
from delayer.core.hold import Hold, hold_for
from delayer.core.message import (
    Confirmed,
    Delivery,
    Outcome,
    Outgoing,
    Parcel,
)
from delayer.faultpoint import reach
from delayer.services.counting import Counters, host_ms
from delayer.services.ports import Holder, Publisher
from delayer.services.settle import Settler

log = structlog.get_logger(__name__)


class NotTaken(BrokerLost):
    """The cascade, the refused or the strays queue did not take what it must take. The delivery is given back."""


class Publication(NamedTuple):
    """A publish on behalf of a delivery.

    ``parcel`` is what to hold if the broker will not route it; None where it must get through (cascade, refused
    queue), and the delivery is given back otherwise. ``refusal`` is the reason if this is a refused message.
    """

    delivery: Delivery
    outgoing: Outgoing
    parcel: Parcel | None = None
    refusal: str = ""


class Dispatch:
    """Publishes, holds, accepts."""

    def __init__(
        self, publisher: Publisher, holder: Holder, counters: Counters, *, now_ms: Callable[[], int] = host_ms
    ) -> None:
        """``now_ms``: the clock that lateness is measured by."""
        self._now_ms = now_ms
        self._publisher = publisher
        self._holder = holder
        self._counters = counters

    async def __call__(self, publications: Sequence[Publication], settler: Settler) -> None:
        """Settle the delivery of every publication, as many at a time as the publisher wants: what is settled is not
        repeated when a later part is in doubt.

        Raises BrokerLost, StoreLost; NotTaken after everything else is settled; Unconfirmed after what is known is.
        """
        stuck: list[str] = []
        begin = 0
        while begin < len(publications):
            end = begin + self._publisher.batch_limit
            stuck += await self._settle(publications[begin:end], settler)
            begin = end
        if stuck:
            raise NotTaken(f"{len(stuck)} of {len(publications)} messages were not taken; the first by {stuck[0]}")

    async def hold(self, late: Sequence[tuple[Delivery, Parcel, Hold]], settler: Settler) -> None:
        """Hold messages without a publish. Raises BrokerLost, StoreLost."""
        if late:
            await self._holder.hold([(parcel, hold) for _, parcel, hold in late])
            settler.accept(delivery.tag for delivery, _, _ in late)

    async def reply(self, answers: Sequence[Outgoing]) -> None:
        """Publish replies to cancels. The daemon logs a reply that is not confirmed, and does not retry it.

        The broker may return a direct reply that its client got, so the daemon logs those too.
        """
        if not answers:
            return
        failed, reason = len(answers), "the broker takes no publishes"
        if self._publisher.ready:
            try:
                outcomes = await self._publisher.publish(answers)
            except BrokerLost as lost:
                reason = str(lost)
            else:
                unhappy = [hold_for(outcome).text for outcome in outcomes if not isinstance(outcome, Confirmed)]
                failed, reason = len(unhappy), unhappy[0] if unhappy else ""
        if failed:
            log.info("reply not confirmed", replies=failed, reason=reason)

    async def _settle(self, publications: Sequence[Publication], settler: Settler) -> list[str]:
        """Returns by whom what was not taken that had to be."""
        began = perf_counter()
        try:
            outcomes = await self._publisher.publish([publication.outgoing for publication in publications])
        except Unconfirmed as late:
            # What is known of the others is true: they are not repeated because of one that was not answered.
            pairs = zip(publications, late.outcomes, strict=True)
            await self._take([(one, outcome) for one, outcome in pairs if outcome is not None], settler)
            raise
        reach("intake.confirmed")
        self._counters.took("publish", perf_counter() - began)
        self._counters.batch("publish", len(publications))
        return await self._take(list(zip(publications, outcomes, strict=True)), settler)

    async def _take(self, answered: Sequence[tuple[Publication, Outcome]], settler: Settler) -> list[str]:
        through: list[Publication] = []
        astray: list[tuple[Publication, Parcel, Hold]] = []
        stuck: list[str] = []
        for publication, outcome in answered:
            if isinstance(outcome, Confirmed):
                through.append(publication)
                continue
            self._counters.objected(outcome, _route(publication))
            if publication.parcel is not None:
                parcel = publication.parcel._replace(token=publication.outgoing.token)
                astray.append((publication, parcel, hold_for(outcome)))
            else:
                exchange = publication.outgoing.exchange.decode("utf-8", "replace")
                stuck.append(f"exchange {exchange!r}: {hold_for(outcome).text}")
        settler.accept(publication.delivery.tag for publication in through)
        self._count(through)
        if astray:
            await self._holder.hold([(parcel, hold) for _, parcel, hold in astray])
            settler.accept(publication.delivery.tag for publication, _, _ in astray)
        return stuck

    def _count(self, through: Sequence[Publication]) -> None:
        for publication in through:
            if publication.refusal:
                log.warning(
                    "message refused",
                    reason=publication.refusal,
                    exchange=publication.delivery.exchange,
                    routing_key=publication.delivery.routing_key,
                )
        kinds = [_kind(publication) for publication in through]
        for kind, count in Counter(kinds).items():
            self._counters.add(kind, count)
            self._counters.add_routes(
                kind, [_route(one) for one, its in zip(through, kinds, strict=True) if its == kind]
            )
        out = [(one.parcel.due_ms, one.parcel.route) for one in through if one.parcel is not None and not one.refusal]
        self._counters.delivered(out, self._now_ms())


def _kind(publication: Publication) -> str:
    if publication.refusal:
        return "refused"
    return "cascaded" if publication.parcel is None else "released"


def _route(publication: Publication) -> bytes:
    return publication.delivery.exchange if publication.parcel is None else publication.parcel.route
