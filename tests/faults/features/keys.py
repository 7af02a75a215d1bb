"""Keys: the last letter read for a key is delivered, and the letters it replaced are not.

Letter n is the version n // KEYS of key n % KEYS. Without a fault they are read in that order. After a cut the broker
may redeliver letters after newer ones, because it may notice the cut later than the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from delayer.amqp.values import Delivery
from tests.support.account import Owed
from tests.support.ledger import Ledger
from tests.support.letters import Letter, text

KEYS: Final = 100


def key_of(number: int) -> bytes:
    return b"key-%d" % (number % KEYS)


class Keyed(Ledger):
    """Every letter has a key. ``order``: numbers in order of arrival. ``first_read`` and ``last_read``: the places of
    each letter's readings among all readings."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.order: list[int] = []
        self.first_read: dict[int, int] = {}
        self.last_read: dict[int, int] = {}
        self._readings = 0

    def listener(self) -> Callable[[bytes], None]:
        listener = super().listener()
        assert self.account.readings is not None
        self.account.readings.heard = self._read
        return listener

    def _read(self, number: int) -> None:
        self._readings += 1
        self.first_read.setdefault(number, self._readings)
        self.last_read[number] = self._readings

    def letter(self, number: int, owed: Owed) -> Letter:
        letter = super().letter(number, owed)
        return letter._replace(said=[*letter.said, (b"x-delay-key", text(key_of(number)))])

    def judge(self, number: int, delivery: Delivery, at_ms: float) -> bool:
        self.order.append(number)
        return super().judge(number, delivery, at_ms)


@dataclass(frozen=True)
class Judgement:
    """``lost``: the last letter of a key did not arrive. ``stale``: a replaced letter arrived. ``overtaken``: a letter
    arrived after a later letter of its key. ``again``: like ``overtaken``, but the letter was read again after the
    later letter."""

    lost: Sequence[int] = ()
    stale: Sequence[int] = ()
    overtaken: Sequence[int] = ()
    again: Sequence[int] = ()

    def assert_kept(self) -> None:
        assert not self.lost, f"{len(self.lost)} keys without their last message, such as {self.lost[:5]}"
        assert not self.stale, f"{len(self.stale)} came though they were replaced, such as {self.stale[:5]}"
        assert not self.overtaken, f"{len(self.overtaken)} came after their replacement, such as {self.overtaken[:5]}"


def lasts(last_read: Mapping[int, int], refused: Collection[int] = ()) -> dict[int, int]:
    """By key, the letter that was read last and not refused."""
    return {number % KEYS: number for number in sorted(last_read, key=last_read.__getitem__) if number not in refused}


def lost(
    last_read: Mapping[int, int], sent: Iterable[int], came: Collection[int], refused: Collection[int]
) -> list[int]:
    """Letters that were never read, and last letters that did not arrive. A refused letter may have been parked at its
    first read; then it may arrive instead of the last letter that was not refused."""
    latest: dict[int, int] = {}
    for number in came:
        latest[number % KEYS] = max(latest.get(number % KEYS, 0), last_read[number])
    unread = [number for number in sent if number not in last_read]
    last = lasts({number: last_read[number] for number in sent if number in last_read}, refused)
    return unread + [number for key, number in last.items() if latest.get(key, 0) < last_read[number]]


def judged_waiting(ledger: Keyed, refused: Collection[int] = ()) -> Judgement:
    """For runs that read every version before any is due: only the last letter of each key arrives."""
    came, read = set(ledger.order), ledger.last_read
    last = lasts(read, refused)
    stale = [one for one in came if one % KEYS in last and read[one] < read[last[one % KEYS]]]
    return Judgement(lost(read, range(ledger.account.sent), came, refused), stale)


def judged_live(ledger: Keyed, first: int, refused: Collection[int] = ()) -> Judgement:
    """For runs that read some versions while others become due: any may arrive, but not after a later letter of its
    key. The last must arrive."""
    newest: dict[int, int] = {}
    overtaken, again = [], []
    for number in ledger.order:
        newer = newest.setdefault(number % KEYS, number)
        if number < newer:
            (again if ledger.last_read[number] > ledger.first_read[newer] else overtaken).append(number)
        newest[number % KEYS] = max(number, newer)
    gone = lost(ledger.last_read, range(first, ledger.account.sent), ledger.order, refused)
    return Judgement(gone, (), overtaken, again)
