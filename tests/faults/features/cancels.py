"""Cancels: a message reported as cancelled is not delivered, and a message reported as too late or not found is.

One exception (docs/guarantees.md): a fault may leave a message in the store though it is delivered, or in the intake
queue though it is parked. The test counts the cancelled messages that arrived, and each must have met a fault.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from delayer.amqp.values import Delivery, Outgoing
from tests.faults.features.striking import REACH, commanded, excused
from tests.faults.fleet import Fleet
from tests.support.account import Account, Owed
from tests.support.ledger import Ledger
from tests.support.letters import NUMBER, Letter
from tests.support.letters import text as said_text
from tests.support.raw import Props, content, text

OUTCOME, KEY = b"x-delayer-outcome", b"x-delayer-key"
RECONNECT_MS = 15_000
"""Until a daemon may publish again after a fault. Meanwhile the store answers cancels, and no reply leaves."""
SOME = 15
"""Messages that one command cancels."""
_ROWS = """
SELECT id, (extract(epoch FROM due_at) * 1000)::bigint AS due_ms, substring(body FOR 8) AS number
FROM message WHERE due_at > now() + interval '500 milliseconds' ORDER BY random() LIMIT $1
"""


class Told(NamedTuple):
    """An answer about a message: ``cancelled``, ``gone`` (too late, not found), or ``unknown``."""

    what: str
    at_ms: float


class Cancelling(Ledger):
    """Every letter has its own key. Letters and answers arrive in the same queue. ``asked``: numbers that a message
    asked to cancel. ``told``: by number, the answers to messages and commands."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.asked: set[int] = set()
        self.told: dict[int, list[Told]] = {}

    def letter(self, number: int, owed: Owed) -> Letter:
        letter = super().letter(number, owed)
        return letter._replace(said=[*letter.said, (b"x-delay-key", said_text(key_of(number)))])

    async def cancel(self, numbers: Collection[int]) -> None:
        """Publish a cancel of each, with ``reply_to`` for the answer."""
        asked = [Outgoing(self._into, b"cancel", self._asking(n), b"", b"%d" % _token(n)) for n in numbers]
        async with self._turn:
            await self._confirmed(asked)
        self.asked.update(numbers)

    def _asking(self, number: int) -> bytes:
        headers = ((b"x-delay-cancel", text(key_of(number))),)
        return Props(headers=headers, delivery_mode=2, reply_to=self.queue.encode()).encode()

    def _arrived(self, delivery: Delivery, at_ms: float) -> bool:
        if OUTCOME not in delivery.properties:
            return super()._arrived(delivery, at_ms)
        self._news.set()
        props = Props.decode(delivery.properties)
        number = int(content(props.one(KEY)).removeprefix(b"c-"))
        what = {b"cancelled": "cancelled", b"too late": "gone"}.get(content(props.one(OUTCOME)), "unknown")
        if what == "gone" and _token(number) in self.account.published_twice:
            what = "unknown"  # the answer may belong to the other copy of this cancel, which we published twice
        self.tell(number, Told(what, at_ms))
        return True

    def tell(self, number: int, told: Told) -> None:
        self.told.setdefault(number, []).append(told)


def key_of(number: int) -> bytes:
    return b"c-%d" % number


def _token(number: int) -> int:
    """The number of a cancel: no letter has this number."""
    return -1_000_000 - number


async def cancel_some(fleet: Fleet, ledger: Cancelling) -> int:
    """Run `delayer cancel` for a few waiting messages. Return how many it found."""
    async with fleet.connected() as connection:
        rows = await connection.fetch(_ROWS, SOME)
    if not rows:
        return 0
    tokens = {f"id:{id}@{due_ms}": NUMBER.unpack(number)[0] for id, due_ms, number in rows}
    code, output = await commanded(fleet, "cancel", "--json", *tokens)
    now_ms = time.time() * 1000
    # The store was unreachable; it may have committed the cancel before the answer was lost.
    found = dict.fromkeys(tokens, "") if code == REACH else json.loads(output)["found"]
    for token, where in found.items():
        what = {"": "unknown", "nowhere": "gone"}.get(where, "cancelled")
        ledger.tell(tokens[token], Told(what, now_ms))
    return len(found)


@dataclass(frozen=True)
class Judgement:
    """``lost``: owed, never cancelled, and did not arrive. ``denied``: reported as gone, but did not arrive, without a
    fault. ``delivered``: reported as cancelled, but arrived, without a fault. With one: ``out`` already, and not
    committed; or ``read`` again, because the broker did not get the acknowledgement after the park. ``silent``:
    requested, but never answered, without a fault. ``unsure``: arrived, and a fault cost the answer to its cancel,
    which may have found its row."""

    cancelled: int
    lost: Sequence[int]
    denied: Sequence[int]
    delivered: Sequence[int]
    silent: Sequence[int]
    out: Sequence[int]
    read: Sequence[int]
    unsure: Sequence[int]

    def assert_kept(self) -> None:
        assert not self.lost, f"{len(self.lost)} lost, such as {self.lost[:5]}"
        assert not self.denied, f"{len(self.denied)} told to be gone did not come, such as {self.denied[:5]}"
        assert not self.delivered, f"{len(self.delivered)} came though cancelled, such as {self.delivered[:5]}"
        assert not self.silent, f"{len(self.silent)} cancels were not answered, such as {self.silent[:5]}"

    def __str__(self) -> str:
        return (
            f"cancelled {self.cancelled}; came all the same, a fault between: {len(self.out)} that were out already, "
            f"{len(self.read)} that were read again"
        )


def judged(
    account: Account, asked: Collection[int], told: Mapping[int, Sequence[Told]], refused: Collection[int] = ()
) -> Judgement:
    """``refused`` are owed no more: native mode has no keys while the store is away."""
    lost, denied, delivered, silent, out, read, unsure = [], [], [], [], [], [], []
    cancelled = 0
    for number in range(account.sent):
        answers = told.get(number, ())
        words = {one.what for one in answers}
        arrivals = account.arrivals_of(number)
        last_ms = max([one.at_ms for one in (*arrivals, *answers)], default=0.0)
        if "cancelled" in words:
            cancelled += 1
            if arrivals:
                again = account.readings is not None and account.readings.read(number) > 1
                (delivered if not excused(account, number, last_ms) else read if again else out).append(number)
        elif arrivals or number in refused or "unknown" in words:
            unanswered = "gone" not in words and (number in asked or words)
            if arrivals and unanswered and excused(account, number, last_ms, RECONNECT_MS):
                unsure.append(number)
        elif words:
            # A fault may cost the answer to the first reading of a cancel, which took the message out.
            if not excused(account, number, last_ms, RECONNECT_MS):
                denied.append(number)
        elif number not in asked:
            lost.append(number)
        elif not excused(account, number, float("inf"), RECONNECT_MS):
            silent.append(number)
    return Judgement(cancelled, lost, denied, delivered, silent, out, read, unsure)
