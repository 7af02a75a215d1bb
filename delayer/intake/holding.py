"""Holds messages that a destination did not take, in the store if there is one.

Without a store such a message returns to the cascade, in an envelope that counts the attempts. After
:data:`MAX_ATTEMPTS`, or where only a person can decide, it goes to the strays queue (``delayer strays``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from delayer.amqp.edits import HoldNote, into_broker, to_strays
from delayer.core.backoff import pause_ms
from delayer.core.counters import Counters
from delayer.core.delay_headers import whole_seconds_until
from delayer.core.errors import NotTaken, Unconfirmed
from delayer.core.hold import Confirmed, Hold, Outcome
from delayer.core.message import Delivery, Outgoing, Parcel
from delayer.core.publisher import Publisher
from delayer.held import report_held
from delayer.intake.ports import Backlog, IntakeSettings

MAX_ATTEMPTS: Final = 10
"""Attempts after which a message in the cascade goes to the strays queue."""


class Objection(NamedTuple):
    """A message to hold, and why."""

    delivery: Delivery
    parcel: Parcel
    hold: Hold
    earlier: HoldNote | None = None


class MessageHolder:
    """Holds messages in the store, or in the broker."""

    def __init__(
        self,
        publisher: Publisher,
        backlog: Backlog,
        live: IntakeSettings,
        counters: Counters,
        *,
        new_id: Callable[[], bytes],
        pause_ms: Callable[[int, int], int] = pause_ms,
    ) -> None:
        """``pause_ms(attempts, number)``: the pause before a retry; ``number`` selects the jitter."""
        self._publisher = publisher
        self._backlog = backlog
        self._live = live
        self._counters = counters
        self.new_id = new_id
        self._pause_ms = pause_ms

    async def hold(self, objections: Sequence[Objection], on_held: Callable[[Sequence[Objection]], object]) -> None:
        """Hold these. ``on_held`` is called with those that the store or the broker has. Raises BrokerLost, StoreLost;
        NotTaken if the cascade or the strays queue does not take one."""
        if self._live.holds_in_store:
            await self._backlog.hold(
                [(one.parcel, one.hold.after(one.earlier and one.earlier.hold)) for one in objections]
            )
            self._report_held(objections, on_held)
            return
        begin = 0
        while begin < len(objections):
            end = begin + self._publisher.batch_limit
            await self._hold_in_broker(objections[begin:end], on_held)
            begin = end

    async def _hold_in_broker(
        self, objections: Sequence[Objection], on_held: Callable[[Sequence[Objection]], object]
    ) -> None:
        now_ms, names = self._live.now_lower_ms(), self._live.names()
        batch: list[Outgoing] = []
        for one in objections:
            token = one.parcel.token or self.new_id()
            note = self._note(one, token, now_ms)
            if note.retry_ms is None:
                batch.append(to_strays(one.parcel, token, note, names))
            else:
                seconds = whole_seconds_until(note.retry_ms, now_ms)
                batch.append(into_broker(one.parcel, token, note.retry_ms, seconds, names, held=note))
        lost: Unconfirmed | None = None
        outcomes: Sequence[Outcome | None]
        try:
            outcomes = await self._publisher.publish(batch)
        except Unconfirmed as late:
            lost, outcomes = late, late.outcomes
        each = list(zip(objections, outcomes, strict=True))
        self._report_held([one for one, outcome in each if isinstance(outcome, Confirmed)], on_held)
        if lost is not None:
            raise lost
        for outgoing, outcome in zip(batch, outcomes, strict=True):
            if outcome is not None and not isinstance(outcome, Confirmed):
                exchange = outgoing.exchange.decode()
                raise NotTaken(f"exchange {exchange} did not take a message to hold: {outcome.text}")

    def _report_held(self, objections: Sequence[Objection], on_held: Callable[[Sequence[Objection]], object]) -> None:
        """Report these as held: no later failure repeats them."""
        on_held(objections)
        held = [(parcel.token, parcel, hold, _attempts(earlier)) for _, parcel, hold, earlier in objections]
        report_held(held, self._counters)

    def _note(self, one: Objection, token: bytes, now_ms: int) -> HoldNote:
        """A note with one more attempt."""
        attempts = _attempts(one.earlier) + 1
        hold = one.hold.after(one.earlier and one.earlier.hold)
        if hold.for_a_person or attempts >= MAX_ATTEMPTS:
            return HoldNote(hold, attempts, None)
        return HoldNote(hold, attempts, now_ms + self._pause_ms(attempts, int.from_bytes(token[-8:], "big")))


def _attempts(earlier: HoldNote | None) -> int:
    return 0 if earlier is None else earlier.attempts
