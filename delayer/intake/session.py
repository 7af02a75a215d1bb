"""The work in flight of one subscription: its tasks, its acknowledgements, and whether anything is settled."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Final, TypeVar

from delayer.amqp.values import Delivery
from delayer.core.errors import Rejected
from delayer.core.faultpoint import reach
from delayer.core.heartbeat import STUCK_SECONDS
from delayer.intake.ports import Subscription
from delayer.retry import LOSSES, raise_first, take_failures

T = TypeVar("T")

KEPT_BYTES: Final = 16 << 20
"""A session reads no batch while it keeps this many bytes. It keeps large messages, and those not due yet."""
LARGE_BYTES: Final = 1 << 20
"""A delivery with a larger body counts as kept. The number of batches in flight bounds the memory of smaller
deliveries."""


class AckTracker:
    """Acknowledges accepted deliveries in as few frames as possible.

    Several batches are in flight and finish out of order, and ``basic.ack multiple`` settles everything up to a tag. So
    an acknowledgement waits until every delivery before it is accepted, and one frame settles thousands. The cost is
    that a crash repeats the finished batches after the oldest unfinished one.

    A kept delivery (large, or not due yet) would hold up all that follow, so while one is kept, the later ones are
    acknowledged one by one.

    Deliveries that are never accepted return to the queue when the channel closes.
    """

    def __init__(self, subscription: Subscription, progress: Callable[[], None] = lambda: None) -> None:
        """``progress`` is called with each acceptance, because a batch may take many publishes."""
        self._subscription = subscription
        self._progress = progress
        self._order: deque[int] = deque()
        self._accepted: set[int] = set()
        self._single: set[int] = set()  # Acknowledged one by one, although an earlier one is not accepted.
        self._kept: dict[int, int] = {}
        self.kept_bytes = 0
        self.has_accepted = self.has_postponed = False

    @property
    def outstanding(self) -> int:
        """Number of deliveries not acknowledged yet."""
        return len(self._order) - len(self._single)

    @property
    def kept(self) -> int:
        """Number of kept deliveries that are not accepted yet."""
        return len(self._kept)

    def add(self, deliveries: Iterable[Delivery]) -> None:
        """Add deliveries, in the order in which the broker sent them. Large deliveries count as kept."""
        for delivery in deliveries:
            self._order.append(delivery.tag)
            if len(delivery.body) > LARGE_BYTES:
                self.keep(delivery)

    def keep(self, delivery: Delivery) -> None:
        """Note that this delivery stays in memory, which KEPT_BYTES bounds."""
        size = len(delivery.body) + len(delivery.properties)
        self.kept_bytes += size - self._kept.get(delivery.tag, 0)
        self._kept[delivery.tag] = size

    def forget_kept(self, tags: Iterable[int]) -> None:
        """Forget kept deliveries that are accepted, or return to the queue."""
        for tag in self._kept.keys() & set(tags):
            self.kept_bytes -= self._kept.pop(tag)

    def accept(self, tags: Iterable[int]) -> None:
        """Accept deliveries whose messages are safe: in the store, the cascade, their destination or the refused
        queue."""
        accepted = set(tags)
        self._accepted |= accepted
        self.forget_kept(accepted)
        if accepted:
            self._progress()
        self.has_accepted = self.has_accepted or bool(self._accepted)
        last = None
        while self._order and (self._order[0] in self._accepted or self._order[0] in self._single):
            tag = self._order.popleft()
            if tag in self._single:
                self._single.remove(tag)
            else:
                self._accepted.remove(tag)
                last = tag
        if last is not None:
            self._subscription.ack(last, multiple=True)
            reach("intake.acked")
        if self._accepted and self._order and self._order[0] in self._kept:
            self.flush()
            reach("intake.acked")

    def postpone(self, tags: Sequence[int]) -> None:
        """Note deliveries that none of our own queues took. If possible, the next session reads others first."""
        if tags and self._subscription.postpone(tags):
            self.has_postponed = True

    def flush(self) -> None:
        """Acknowledge accepted deliveries one by one, although one before them is not accepted. At the end of a session
        the closing channel would requeue them."""
        for tag in sorted(self._accepted):
            self._subscription.ack(tag, multiple=False)
        self._single |= self._accepted
        self._accepted.clear()


@dataclass
class Unsettled:
    """Outlives sessions: after a loss the broker delivers the same messages again, and they may get stuck again."""

    _clock: Callable[[], float] = monotonic
    _since: float | None = None

    def begin(self) -> None:
        """Work begins."""
        self._since = self._clock() if self._since is None else self._since

    def settle(self, *, busy: bool) -> None:
        """Note that some work was settled, or that there is none. ``busy``: whether more is under way."""
        self._since = self._clock() if busy else None

    @property
    def stuck_seconds(self) -> float:
        """How long nothing was settled; 0 unless that is too long."""
        seconds = 0.0 if self._since is None else self._clock() - self._since
        return seconds if seconds > STUCK_SECONDS else 0.0


class Session:
    """The work for the deliveries of one subscription."""

    def __init__(
        self, subscription: Subscription, beat: Callable[[], None], in_flight: int, unsettled: Unsettled | None = None
    ) -> None:
        self.acks = AckTracker(subscription, self._note_accepted)
        self._beat = beat
        self._unsettled = unsettled or Unsettled()
        self.prefetch = subscription.prefetch
        """Maximum number of deliveries without an acknowledgement."""
        self._in_flight = in_flight
        self._tasks: set[asyncio.Task[None]] = set()
        self._punctual: set[asyncio.Task[None]] = set()
        self._lost: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.has_succeeded = False
        """Whether some work succeeded. The reader sets it back."""
        self.has_failed = False
        """Whether a failure of the work was raised."""

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks or self._punctual or self.acks.kept)

    def start(self, work: Coroutine[None, None, None], *, punctual: bool = False) -> None:
        """Start ``work``, which accepts its deliveries. The first failure ends the session. ``punctual`` work does not
        count as a batch in flight, and a lost subscription cancels it."""
        tasks = self._punctual if punctual else self._tasks
        task = asyncio.create_task(work, name="deliveries")
        self._unsettled.begin()
        tasks.add(task)
        task.add_done_callback(partial(self._on_done, tasks))

    def _on_done(self, tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if task.cancelled() or task.exception() is not None:
            self._lost.add(task)
        else:
            self.has_succeeded = True
            self.note_progress()
        self._changed.set()

    def _note_accepted(self) -> None:
        self._beat()
        self._unsettled.settle(busy=True)

    def note_progress(self) -> None:
        """Note that some work was settled, or that there is none."""
        self._unsettled.settle(busy=bool(self._tasks or self._punctual))

    async def wait_for_room(self, is_full: Callable[[], bool] = lambda: False) -> None:
        """Wait until another batch may begin, and the handler is not full. Raises the first failure."""
        await self._wait_until(
            lambda: len(self._tasks) < self._in_flight and self.acks.kept_bytes < KEPT_BYTES and not is_full()
        )

    async def wait_until_idle(self) -> None:
        """Wait until all work is done, and no delivery is kept. Raises the first failure."""
        await self._wait_until(lambda: not self.is_busy)

    async def wait_while(self, is_waiting: Callable[[], bool]) -> None:
        """Wait while ``is_waiting`` holds, even after a failure."""
        while is_waiting():
            self._changed.clear()
            await self._changed.wait()

    async def _wait_until(self, is_reached: Callable[[], bool]) -> None:
        while True:
            self._changed.clear()
            if self._lost:
                lost, self._lost = self._lost, set()
                self.has_failed = True
                raise_first(take_failures(lost))
            if is_reached():
                return
            await self._changed.wait()

    def cancel(self, *, only_punctual: bool = False) -> None:
        """Cancel work. Its deliveries return to the queue, as after a crash."""
        for task in self._punctual if only_punctual else self._tasks | self._punctual:
            task.cancel()

    async def finish(self) -> None:
        """Wait for work in progress. Raises every error that is not in LOSSES."""
        while tasks := self._tasks | self._punctual:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # The callbacks of the tasks run now.
        raise_first(take_failures(self._lost), unless=LOSSES)


async def write_by_halves(
    items: Sequence[T],
    write: Callable[[Sequence[T]], Awaitable[None]],
    write_rejected: Callable[[T, Rejected], Awaitable[None]],
) -> None:
    """Write items at once. If the database rejects them, write each half separately, in order, down to the item at
    fault, which ``write_rejected`` gets with the error. Raises the other errors of both."""
    try:
        return await write(items)
    except Rejected as error:
        rejected = error
    if len(items) == 1:
        return await write_rejected(items[0], rejected)
    del rejected
    middle = len(items) // 2
    await write_by_halves(items[:middle], write, write_rejected)
    await write_by_halves(items[middle:], write, write_rejected)
