"""What the owner of a lane knows of when its rows are due.

The *watermark* is a due instant before which this lane has no rows. Claims start there, so they never read again what
they deleted: dead index entries at the head are what makes other Postgres queues slow. It only moves at three places:

    settle     to the last row of a batch; after an empty one to the next row that is due, or to the store's now (by its
               lower bound) if that is sooner
    note       back to the row that was parked, or moved there by hand (telling.py), before it; what is noted during a
               claim is kept until its end
    look back  once a minute the lane is read from its beginning, for rows that were put there without a note; on
               another connection, since that one does read the dead entries, at some 4 us each. Where routes are
               claimed apart, such a row may be behind a backlog of others: it is searched for through that, so many
               rows a minute (outlook.py), on and on

Where it stands is written down every few seconds, so that the next owner need not begin with such a reading either.
What is written may be wrong by rows that were parked late, seconds before a crash: the first look back comes soon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from delayer.core.message import Parcel
from delayer.core.pace import Scope
from delayer.store import session, telling
from delayer.store.claiming import BEGINNING, Claim
from delayer.store.clock import StoreClock
from delayer.store.marks import Marks, Place
from delayer.store.outlook import MOST_HALVINGS, SOON_MS, Behind, Outlook, Search, Start
from delayer.store.retries import NEVER_MS, Retries
from delayer.store.telling import Told


class Seen(NamedTuple):
    """What was known when a look back began: what it finds before that was put there without a note."""

    watermark: int
    fars: dict[Scope, Place]


class Foresight:
    """No connection: lane.py says what was claimed, and asks for what is not known here."""

    def __init__(self, start: Start, clock: StoreClock) -> None:
        self._clock = clock
        self._clock_steps = clock.steps
        self.woken = asyncio.Event()
        """Set when something is due sooner than was known."""
        self.watermark = start.watermark
        self.noted = NEVER_MS  # soonest row parked since the last claim began
        self.retries = Retries(start.retry_ms)
        self.marks = Marks()
        self.held = Marks()
        """The same of held rows, by when they are tried again. The look back, once a minute, takes them back."""
        self.more = True
        self.next: int | None = None  # when the next row is due that the last claim saw, if it took none
        self._searched: Place = BEGINNING  # where the last search for rows behind their marks came to
        self._halvings = 0  # of what the next search reads at once
        self._quiet_until = session.BEGINNING_MS  # nothing is due by then, as far as was asked

    @property
    def idle(self) -> bool:
        """See ports.Lane. The look back asks; an answer that is old, or from before the clock was set, says less."""
        return self._quiet_until - self._clock.now_ms() > SOON_MS

    @property
    def clock_stepped(self) -> bool:
        """The store's clock was set, and :meth:`forget_after_step` not called yet."""
        return self._clock_steps != self._clock.steps

    @property
    def hurries(self) -> bool:
        """Whether to claim again at once."""
        return self.more and not self.marks  # of limited routes there may be more, and no reason to hurry

    @property
    def read_to_ms(self) -> int:
        """Where the next row is looked for that nobody noted."""
        return self.marks.highest_ms if self.marks else self.watermark

    def pace(self, scopes: Sequence[Scope]) -> None:
        """See ports.Lane. The watermark stays what it is: a place before which there is nothing of any scope."""
        self.marks.begin(scopes, self.watermark)
        self.held.begin(scopes, session.BEGINNING_MS)
        self.retries.again()

    def claiming(self) -> None:
        """A claim begins."""
        self.forget_after_step()
        self.noted, self.next = NEVER_MS, None

    def settled(self, claim: Claim) -> None:
        """It is committed."""
        if claim.scope is None:
            self.watermark = min(claim.watermark_after, self.noted)
        else:
            self.marks.passed(claim.scope, claim.place_after)
            if claim.held_after is not None:
                self.held.passed(claim.scope, claim.held_after)
            self.watermark = self.marks.lowest_ms
        self.more = claim.full
        self.next = claim.next_ms

    def next_ms(self, soonest: int | None) -> int:
        """When something is due next, if the next row that was not noted is due at ``soonest``."""
        noted = min(self.noted, self.marks.noted_ms)  # a claim of one scope forgets what was noted of another
        return min(noted, self.next_retry_ms(), NEVER_MS if soonest is None else soonest)

    def next_retry_ms(self) -> int:
        """From when on asking for held rows is worth it."""
        return self.retries.next_ms(self._clock.now_ms(), paced=bool(self.marks))

    def forget_after_step(self) -> None:
        """A watermark taken from a clock that was set back since is worth nothing."""
        if self._clock_steps != self._clock.steps:
            self._clock_steps = self._clock.steps
            self.watermark = session.BEGINNING_MS
            self.marks.again(session.BEGINNING_MS)
            self.held.again(session.BEGINNING_MS)
            self.retries.again()
            self.more = True

    def note_parked(self, due_ms: int) -> None:
        """See ports.Lane."""
        self.marks.note(due_ms)
        self._note(due_ms)

    def note_parcels(self, parcels: Sequence[Parcel]) -> None:
        """As :meth:`note_parked`, of what is known: who is not meant does not look for it."""
        self.marks.note_rows((parcel.route, parcel.due_ms) for parcel in parcels)
        self._note(min(parcel.due_ms for parcel in parcels))

    def _note(self, due_ms: int) -> None:
        self._quiet_until = session.BEGINNING_MS
        self.watermark = min(self.watermark, due_ms)
        if due_ms < self.noted:
            self.noted = due_ms
            self.woken.set()

    def note_held(self, retry_ms: int) -> None:
        """A message was put straight into held, to be tried again at ``retry_ms``."""
        self.retries.again()
        self.held.note(retry_ms)
        self.expect_retry(retry_ms)

    def expect_retry(self, retry_ms: int) -> None:
        """A held row is to be tried again then."""
        self._quiet_until = session.BEGINNING_MS
        if self.retries.expect(retry_ms):
            self.woken.set()

    def hear(self, told: Told) -> None:
        """Somebody else put something into the lane, by hand."""
        if told.kind == telling.WAITING:
            self.note_parked(told.at_ms)
        else:
            self.note_held(told.at_ms)

    def looking(self) -> Seen:
        """A look back begins, or its search. What it is to be judged by."""
        return Seen(self.watermark, self.marks.fars)

    @property
    def search(self) -> Search | None:
        """What is to be searched, where routes are claimed apart."""
        fars = self.marks.fars
        # As far as any scope has been; to begin with, and after each round, from the beginning.
        return Search(self._searched, max(fars.values())[0] // 1000, self._halvings) if fars else None

    def saw(self, found: Outlook, seen: Seen) -> None:
        """What a look back found."""
        if found.first_ms is not None and found.first_ms < min(seen.watermark, self.watermark):
            self.note_parked(found.first_ms)
        if found.retry_ms is not None:
            self.note_held(found.retry_ms)
        self._quiet_until = found.horizon_ms if found.empty else session.BEGINNING_MS

    def searched(self, found: Behind, seen: Seen) -> None:
        """What its search found. One that was too slow goes on with half as much at once, any other with more again."""
        if (missed_ms := self.marks.missed(found.routes, seen.fars)) < NEVER_MS:
            self._note(missed_ms)
        self._searched = found.searched or BEGINNING
        self._halvings = min(self._halvings + 1, MOST_HALVINGS) if found.slow else max(self._halvings - 1, 0)
