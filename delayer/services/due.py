"""The daemon's end of the cascade: messages come out of ``delays.due`` in their envelopes and go to their targets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from delayer.core.cascade import MAX_SECONDS
from delayer.core.delay import seconds_until
from delayer.core.hold import Limits, too_late
from delayer.core.message import Delivery
from delayer.core.plan import Refuse
from delayer.services import edits, envelopes
from delayer.services.dispatch import Dispatch, Publication
from delayer.services.settle import Settler
from delayer.services.sorting import Names, through_the_cascade, to_refused, to_target
from delayer.wire.properties import MalformedProperties, MalformedTable, Properties

MOMENT_MS: Final = 1000
"""What comes out of the cascade early by less than this waits here; by more, it goes back in."""


class DueCarrier:
    """Carries batches of the due queue.

    The cascade measures durations, by the broker's clock; the due instant was computed by a daemon's clock. Where they
    disagree the later one rules: never early.
    """

    def __init__(
        self,
        *,
        now_ms: Callable[[], int],
        names: Callable[[], Names],
        dispatch: Dispatch,
        new_id: Callable[[], bytes],
        late_limits: Callable[[], Limits] = dict,
    ) -> None:
        """``late_limits``: of the routes that hold what is late."""
        self._late_limits = late_limits
        self._now_ms = now_ms
        self._names = names
        self._dispatch = dispatch
        self._new_id = new_id

    async def __call__(self, batch: Sequence[Delivery], settler: Settler) -> None:
        """Settle every delivery of the batch. Raises BrokerLost, StoreLost: then some are not settled."""
        now_ms = self._now_ms()
        last_ms = now_ms
        publications, late = [], []
        limits = self._late_limits()
        for delivery in batch:
            publication, due_ms = self._publication(delivery, now_ms)
            parcel = publication.parcel
            hold = None if parcel is None else too_late(due_ms, now_ms, limits.get(parcel.route))
            if parcel is not None and hold is not None:
                late.append((delivery, parcel._replace(token=publication.outgoing.token), hold))
                continue
            publications.append(publication)
            if due_ms - now_ms <= MOMENT_MS:
                last_ms = max(last_ms, due_ms)
        while (early_ms := last_ms - now_ms) > 0:
            await asyncio.sleep(early_ms / 1000)
            now_ms = self._now_ms()  # looked at again: event loops round sleeps to milliseconds, some of them down
            if last_ms - now_ms > MOMENT_MS:
                # The clock was set back meanwhile, perhaps by hours, and whoever comes behind is not to wait for that.
                return await self(batch, settler)
        await self._dispatch.hold(late, settler)
        await self._dispatch(publications, settler)

    def _publication(self, delivery: Delivery, now_ms: int) -> tuple[Publication, int]:
        names = self._names()
        try:
            envelope = envelopes.opened(Properties.parse(delivery.properties), delivery.body, names.max_properties)
            inner = Properties.parse(envelope.parcel.properties)
            released = edits.released(inner, envelope.id, envelope.parcel.due_ms)
        except (envelopes.NoEnvelope, MalformedProperties, MalformedTable) as broken:
            reason = f"not a message of the cascade: {broken}"
            return to_refused(delivery, Refuse(reason), names, self._new_id()), now_ms
        due_ms = envelope.parcel.due_ms
        if due_ms - now_ms > MOMENT_MS:
            # One that is too far away for the whole cascade comes by here again.
            seconds = min(seconds_until(due_ms, now_ms), MAX_SECONDS)
            return through_the_cascade(delivery, envelope.parcel, envelope.id, seconds, names), due_ms
        return to_target(delivery, envelope.parcel, envelope.id, released), due_ms
