"""The one place that acknowledges."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from delayer.core.message import Delivery
from delayer.faultpoint import reach
from delayer.services.ports import Subscription


class Settler:
    """Turns accepted deliveries into acknowledgements, as few as possible.

    Batches finish out of order (several parks are in flight), and ``basic.ack multiple`` settles everything up to a
    tag; so an acknowledgement waits until everything before it is accepted too. The price is that a crash repeats the
    finished batches behind the oldest unfinished one; what it buys is one frame for thousands of deliveries.

    What is never accepted is given back: by closing the channel, which is the broker's own way to requeue.
    """

    def __init__(self, subscription: Subscription, progress: Callable[[], None] = lambda: None) -> None:
        """``progress`` is called whenever something is accepted: a batch may take many publishes, one after another."""
        self._subscription = subscription
        self._progress = progress
        self._order: deque[int] = deque()
        self._accepted: set[int] = set()
        self.accepted_any = False

    @property
    def outstanding(self) -> int:
        """Deliveries read and not acknowledged yet."""
        return len(self._order)

    def read(self, deliveries: Iterable[Delivery]) -> None:
        """Note deliveries in the order in which the broker sent them."""
        self._order.extend(delivery.tag for delivery in deliveries)

    def accept(self, tags: Iterable[int]) -> None:
        """These are safe: in the store, in the cascade, at their destination, or in the refused queue."""
        self._accepted.update(tags)
        self.accepted_any = self.accepted_any or bool(self._accepted)
        self._progress()
        last = None
        while self._order and self._order[0] in self._accepted:
            last = self._order.popleft()
            self._accepted.remove(last)
        if last is not None:
            self._subscription.ack(last, multiple=True)
            reach("intake.acked")

    def flush(self) -> None:
        """Acknowledge one by one what was accepted behind something that was not. The session is over after this:
        without it, closing the channel would requeue, and so repeat, messages that are safe already."""
        for tag in sorted(self._accepted):
            self._subscription.ack(tag, multiple=False)
        self._order = deque(tag for tag in self._order if tag not in self._accepted)
        self._accepted.clear()
