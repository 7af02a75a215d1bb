"""Dead letters: at most once, and at least once through a worker that waits for the next queue's confirm."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from tests.simulation.broker.message import Death, Message, dead, goes_in_a_circle

if TYPE_CHECKING:
    from tests.simulation.broker.queue import Queue

IN_FLIGHT: Final = 32
"""Messages that a worker forwards at once."""
RETRY_SECONDS: Final = 180.0
"""After that time the worker forwards what no queue took or confirmed again."""


class DeadLetters:
    """The dead letters of one queue. ``waiting`` and ``flying`` are those of the worker."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        values = queue.values
        self._at_least_once = (
            queue.quorum
            and values.get("x-dead-letter-strategy") == "at-least-once"
            and values.get("x-overflow") == "reject-publish"
        )
        self.waiting: deque[tuple[Message, Death]] = deque()
        self.flying: dict[int, tuple[Message, Death]] = {}
        self._numbers = 0
        self._life = 0
        self._doubtful: list[int] = []

    @property
    def count(self) -> int:
        return len(self.waiting) + len(self.flying)

    def take(self, messages: Sequence[Message], death: Death) -> None:
        if self._at_least_once:
            self.waiting.extend((message, death) for message in messages)
            self._forward()
            return
        vhost = self._queue.vhost
        for message in messages:
            letter = dead(message, death)
            for target in vhost.targets(letter):
                if not target.available and vhost.broker.chance(2):
                    continue  # Nobody confirms it, so it may be lost while the next queue's node starts.
                if death.reason == b"rejected" or not goes_in_a_circle(letter, target.name.encode()):
                    target.publish(letter, lambda _: None)

    def die(self) -> None:
        """The node dies: no answer reaches the worker any more."""
        self._life += 1
        self._doubtful = list(self.flying)

    def start(self) -> None:
        """A new worker forwards again what the old one did not settle."""
        for number in self._doubtful:
            self._send(number)
        self._forward()

    def _forward(self) -> None:
        while self.waiting and len(self.flying) < IN_FLIGHT:
            self._numbers += 1
            self.flying[self._numbers] = self.waiting.popleft()
            self._send(self._numbers)

    def _send(self, number: int) -> None:
        if number not in self.flying or self._queue.gone:
            return
        message, death = self.flying[number]
        letter = dead(message, death)
        targets = [
            one
            for one in self._queue.vhost.targets(letter)
            if death.reason == b"rejected" or not goes_in_a_circle(letter, one.name.encode())
        ]
        life, missing, all_took = self._life, len(targets), True

        def answered(took: bool) -> None:
            nonlocal missing, all_took
            if life != self._life:
                return
            missing -= 1
            all_took &= took
            if not missing and all_took and number in self.flying:
                self._queue.submit(lambda: self._settle(number))
            elif not missing and not all_took:
                self._retry(number)

        for target in targets:
            target.publish(letter, answered)
        if not targets:
            self._retry(number)

    def _retry(self, number: int) -> None:
        life = self._life
        self._queue.vhost.broker.after(RETRY_SECONDS, lambda: life == self._life and self._send(number))

    def _settle(self, number: int) -> None:
        self.flying.pop(number, None)
        self._forward()
