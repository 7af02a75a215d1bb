"""Retry routes: a message that fails in a queue comes back to it as often as configured and never before its pause.
After the last retry it goes to the route's queue for exhausted messages.

Letter n fails FAILS times n; its consumer relies on ``x-delayer-retries``, so a copy fails like its original.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from delayer.amqp.values import Delivery
from tests.faults.features.striking import excused
from tests.support.account import Account, Findings
from tests.support.ledger import Ledger
from tests.support.raw import Props, integer

FIRST_MS, FACTOR, ATTEMPTS = 300, 2, 3
FAILS: Final = (0, 1, 2, 3, 4, 6)
SHOP, RETRIES, PARKED = "shop", "retries", "parking-lot"
RETRY: Final = {"first": f"{FIRST_MS}ms", "factor": FACTOR, "jitter": 0.1, "attempts": ATTEMPTS, "exhausted": PARKED}
ENVIRON: Final = {"ROUTE": json.dumps([{"from": RETRIES, "retry": RETRY}])}
_ERROR: Final = b"x-delayer-error"


def fails(number: int) -> int:
    return FAILS[number % len(FAILS)]


def pause_ms(retries: int) -> int:
    """The shortest pause before it returns for the ``retries``-th time."""
    return FIRST_MS * FACTOR ** (retries - 1)


def tries(number: int) -> int:
    """The last value of ``x-delayer-retries`` with which it reaches its queue."""
    return min(fails(number), ATTEMPTS)


class Failing(Ledger):
    """Publishes to the shop, and consumes its orders: many fail. ``came``: by number and retries, when."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more | {"into": SHOP.encode(), "exchange": SHOP})
        self.came: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self.wrong = Findings()
        self.final: set[int] = set()
        self.parked: dict[int, int] = {}
        """Messages in the queue for exhausted messages: by number, the count in their header."""

    def arguments(self) -> dict[str, Any]:
        return {
            "x-queue-type": "quorum", "x-dead-letter-exchange": RETRIES, "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }  # fmt: skip

    def judge(self, number: int, delivery: Delivery, at_ms: float) -> bool:
        letter, props = self.letter(number, self.account.owed(number)), Props.decode(delivery.properties)
        retries = counted(props)
        self.came[number, retries].append(at_ms)
        if delivery.body != letter.body or b"x-death" in dict(props.headers or ()):
            self.wrong.add(f"message {number}: sent {letter}, received {delivery}")
        if bool(retries) != (_ERROR in dict(props.headers or ())):
            self.wrong.add(f"message {number}: came for the {retries}. time, and says {props.headers}")
        if retries >= tries(number):
            self.final.add(number)
        return retries >= fails(number)


def counted(props: Props) -> int:
    """How often it came back, by its header."""
    said = props.all(b"x-delayer-retries")
    return integer(said[0]) if said else 0


@dataclass(frozen=True)
class Judgement:
    """``missing``: number and retries that never came. ``beyond``: came after the last failure or the last retry.
    ``early``: came before their pause was over. ``twice``: came twice without a fault; ``copies``: with one.
    ``astray``: failed too often but not in the queue of the exhausted, or the other way round."""

    missing: Sequence[tuple[int, int]]
    beyond: Sequence[tuple[int, int]]
    early: Sequence[tuple[int, int]]
    twice: Sequence[tuple[int, int]]
    astray: Sequence[int]
    copies: int

    def assert_kept(self) -> None:
        assert not self.missing, f"{len(self.missing)} never came, such as {self.missing[:5]}"
        assert not self.beyond, f"{len(self.beyond)} came too often, such as {self.beyond[:5]}"
        assert not self.early, f"{len(self.early)} came before their pause was over, such as {self.early[:5]}"
        assert not self.twice, f"{len(self.twice)} came twice without a fault, such as {self.twice[:5]}"
        assert not self.astray, f"{len(self.astray)} ended elsewhere, such as {self.astray[:5]}"


def judged(account: Account, came: Mapping[tuple[int, int], Sequence[float]], parked: Mapping[int, int]) -> Judgement:
    """``parked``: by number, the header's count of each message in the queue for exhausted messages."""
    wanted = {(number, retries) for number in range(account.sent) for retries in range(tries(number) + 1)}
    early = [
        (number, retries)
        for (number, retries), at_ms in came.items()
        if retries and (number, retries - 1) in came and min(at_ms) < min(came[number, retries - 1]) + pause_ms(retries)
    ]
    again = [one for one, at_ms in came.items() if len(at_ms) > 1]
    twice = [one for one in again if not excused(account, one[0], max(came[one]))]
    exhausted = {number: ATTEMPTS + 1 for number in range(account.sent) if fails(number) > ATTEMPTS}
    astray = {number for number, _ in exhausted.items() ^ parked.items()}
    copies = sum(len(came[one]) - 1 for one in again)
    return Judgement(sorted(wanted - came.keys()), sorted(came.keys() - wanted), early, twice, sorted(astray), copies)
