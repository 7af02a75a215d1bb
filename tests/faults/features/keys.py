"""Keys: of each the last published is delivered, and what it replaced is not.

Letter n is the version n // KEYS of key n % KEYS, so the last of every key are the last KEYS letters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from delayer.core.message import Delivery
from tests.faults.features.striking import excused
from tests.support.account import Account, Owed
from tests.support.ledger import Ledger
from tests.support.letters import Letter, text

KEYS: Final = 100


def key_of(number: int) -> bytes:
    return b"key-%d" % (number % KEYS)


class Keyed(Ledger):
    """Every letter has a key. ``order`` is what arrived, one after another."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.order: list[tuple[int, float]] = []

    def letter(self, number: int, owed: Owed) -> Letter:
        letter = super().letter(number, owed)
        return letter._replace(said=[*letter.said, (b"x-delay-key", text(key_of(number)))])

    def judge(self, number: int, delivery: Delivery, at_ms: float) -> bool:
        self.order.append((number, at_ms))
        return super().judge(number, delivery, at_ms)


@dataclass(frozen=True)
class Judgement:
    """``lost``: last ones that did not come. ``stale``: replaced ones that came all the same. ``overtaken``: such as
    came behind a later one of their key, without a fault; ``again``: with one, after which it was read again.
    ``ended``: the last of their key that came, and not the last published."""

    lost: Sequence[int] = ()
    stale: Sequence[int] = ()
    overtaken: Sequence[int] = ()
    again: Sequence[int] = ()
    ended: Sequence[int] = ()

    def assert_kept(self) -> None:
        assert not self.lost, f"{len(self.lost)} keys without their last message, such as {self.lost[:5]}"
        assert not self.stale, f"{len(self.stale)} came though they were replaced, such as {self.stale[:5]}"
        assert not self.overtaken, f"{len(self.overtaken)} came after their replacement, such as {self.overtaken[:5]}"


def lasts(sent: Iterable[int], refused: Collection[int] = ()) -> dict[int, int]:
    """By key, the last that was published and taken in."""
    return {number % KEYS: number for number in sorted(sent) if number not in refused}


def judged_waiting(sent: Iterable[int], arrived: Collection[int], refused: Collection[int] = ()) -> Judgement:
    """Where every version was taken in before any was due: only the last of each comes. One that was refused may have
    been parked at its first reading: then it is later than the last one that was taken in, and comes."""
    last = lasts(sent, refused)
    came: dict[int, set[int]] = {}
    for number in arrived:
        came.setdefault(number % KEYS, set()).add(number)
    return Judgement(
        [number for key, number in last.items() if not any(one >= number for one in came.get(key, ()))],
        [one for key, numbers in came.items() for one in numbers if one < last.get(key, 0)],
    )


def judged_live(
    account: Account, first: int, order: Sequence[tuple[int, float]], refused: Collection[int] = ()
) -> Judgement:
    """Where they become due while others are taken in: any may come, but not behind a later one of its key; the last
    has to."""
    newest: dict[int, int] = {}
    latest: dict[int, int] = {}
    overtaken, again = [], []
    for number, at_ms in order:
        latest[number % KEYS] = number
        if number < newest.setdefault(number % KEYS, number):
            reread = account.readings is None or account.readings.read(number) > 1
            (again if reread and excused(account, number, at_ms) else overtaken).append(number)
        newest[number % KEYS] = max(number, newest[number % KEYS])
    last = lasts(range(first, account.sent), refused)
    lost = [number for key, number in last.items() if newest.get(key, -1) < number]
    return Judgement(lost, (), overtaken, again, [n for key, n in latest.items() if n < newest[key]])
