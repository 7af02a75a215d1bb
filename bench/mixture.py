"""The load of long runs, each part in its own process, run as

    python -m bench.mixture publish '{"url": …}'

The publisher sends plain messages at a steady rate, and beside them messages with keys and cancels by key. The
consumer prints a line for each step of the run, and keeps no list of arrivals: one byte for each plain message, and
the numbers of those with keys.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bench.figures import percentile
from bench.keys import text
from bench.marks import DAEMON_HEADER, DUE, DUE_HEADER, NUMBER_HEADER, NUMBERED, Chunk
from bench.plain import Plain, message, number, properties
from bench.traffic import TICK, reads

LEAD_SECONDS = 5.0
"""Time for these processes to start, next to busy programs too."""
KEYS = 1000
KEYED_TICKS = 5
"""A message with a key goes out in every fifth tick: 20 a second."""
CANCEL_SHARE = 0.2
FIRST_KEYED = 1 << 40
"""Messages with keys are numbered from here on."""
MARGIN_MS = 10_000
"""How long a replacement or a cancel may take effect: until then the message before it may arrive or not."""


class Asked(NamedTuple):
    """A message with a key, sent at ``at_ms`` and due at ``due_ms``, or (``due_ms`` None) a cancel by key."""

    number: int
    key: int
    at_ms: int
    due_ms: int | None


class Verdict(NamedTuple):
    """How many of the messages with keys are missing, arrived though they were replaced or cancelled, or arrived
    again."""

    missing: int
    replaced: int
    repeated: int


def judge(asked: Iterable[Asked], came: Mapping[int, int], margin_ms: int = MARGIN_MS) -> Verdict:
    """Compare the arrivals, by number, with what the publisher asked. The last message of a key must arrive. A message
    that was replaced or cancelled must arrive if it was due before that, and must not if it was due after it."""
    missing = replaced = repeated = 0
    last: dict[int, Asked] = {}

    def ends(one: Asked, at_ms: float) -> None:
        nonlocal missing, replaced, repeated
        if one.due_ms is None:
            return
        times = came.get(one.number, 0)
        missing += not times and one.due_ms + margin_ms < at_ms
        replaced += times > 0 and at_ms + margin_ms < one.due_ms
        repeated += max(times - 1, 0)

    for one in asked:
        if one.key in last:
            ends(last[one.key], one.at_ms)
        last[one.key] = one
    for one in last.values():
        ends(one, float("inf"))
    return Verdict(missing, replaced, repeated)


def sent_in(rate: int, seconds: float) -> int:
    """The number of plain messages that the publisher sends: it rounds to whole ticks."""
    each = max(round(rate * TICK), 1)
    return round(seconds * rate / each) * each


def publish(order: dict[str, Any]) -> dict[str, Any]:
    """Publish ``rate`` plain messages a second with delays of 1 s to ``longest_ms`` from ``start`` (epoch s) on, and
    messages with keys beside them. The answer lists the latter, as :class:`Asked`."""
    rate, longest_ms = order["rate"], order["longest_ms"]
    each, body = max(round(rate * TICK), 1), b"x" * order["size"]
    chance, asked = random.Random(1), []
    chunk, plain = Chunk(order["exchange"], order["key"], body, each), Plain(order["url"])
    behind = 0.0
    for tick in range(sent_in(rate, order["seconds"]) // each):
        pause = order["start"] + tick * each / rate - time.time()
        if pause > 0:
            time.sleep(pause)
        behind = max(behind, -pause)
        now = int(time.time() * 1000)
        due_ms = [now + chance.randrange(1000, longest_ms + 1) for _ in range(each)]
        plain.socket.sendall(chunk.fill(due_ms, due_ms, tick * each))
        if tick % KEYED_TICKS == 0:
            one = _keyed(FIRST_KEYED + tick, now, chance, longest_ms)
            plain.socket.sendall(message(order["exchange"], order["key"], _headers(one), body))
            asked.append(one)
    plain.depth(order["queue"])  # the answer arrives after the broker has read all messages
    plain.close()
    return {"sent": sent_in(rate, order["seconds"]), "behind_ms": behind * 1000, "asked": asked}


def _keyed(number: int, now_ms: int, chance: random.Random, longest_ms: int) -> Asked:
    cancels = chance.random() < CANCEL_SHARE
    key, due_ms = chance.randrange(KEYS), now_ms + chance.randrange(1000, longest_ms + 1)
    return Asked(number, key, now_ms, None if cancels else due_ms)


def _headers(one: Asked) -> bytes:
    if one.due_ms is None:
        return properties(text("x-delay-cancel", f"order-{one.key}"))
    marks = number(DUE_HEADER, one.due_ms) + number(NUMBER_HEADER, one.number)
    return properties(number(DAEMON_HEADER, one.due_ms) + marks + text("x-delay-key", f"order-{one.key}"))


class Steps:
    """What arrived in each step of ``seconds``, from ``start`` (epoch s) on."""

    def __init__(self, start: float, seconds: float) -> None:
        self._end_ms, self._long_ms = (start + seconds) * 1000, seconds * 1000
        self._late: list[float] = []
        self._early = 0

    def take(self, late_ms: float) -> None:
        self._late.append(late_ms)
        self._early += late_ms < 0

    def ended(self, now_ms: float) -> dict[str, float] | None:
        """The step that is over by ``now_ms``, if its end was not reported yet."""
        if now_ms < self._end_ms:
            return None
        late = sorted(self._late)
        step = {"at": self._end_ms / 1000, "messages": len(late), "early": self._early}
        if late:
            shares = {"late_p50_ms": 0.5, "late_p99_ms": 0.99, "late_max_ms": 1.0}
            step |= {name: round(percentile(late, share), 2) for name, share in shares.items()}
        self._late, self._early = [], 0
        self._end_ms += self._long_ms
        return step


class Once:
    """Which of ``count`` plain messages arrived, and the arrivals of those with keys by their numbers."""

    def __init__(self, count: int) -> None:
        self._seen = bytearray(count)
        self.repeated = 0
        self.keyed: Counter[int] = Counter()

    def take(self, n: int) -> None:
        if n >= FIRST_KEYED:
            self.keyed[n] += 1
        elif self._seen[n]:
            self.repeated += 1
        else:
            self._seen[n] = 1

    @property
    def missing(self) -> int:
        return self._seen.count(0)


def consume(order: dict[str, Any]) -> dict[str, Any]:
    """Consume until no message came for ``patience`` seconds; print a line for each ``step`` seconds from ``start`` on.

    ``count``: how many plain messages there are; 0 if they have no numbers. With ``later_ms``, the answer lists the due
    time and arrival of each message that was later than that, and due from ``since_ms`` on.
    """
    plain = Plain(order["url"])
    plain.consume_from(order["queue"], 20_000)
    steps, once = Steps(order["start"], order["step"]), Once(order["count"])
    later_ms, since_ms = order.get("later_ms", float("inf")), order.get("since_ms", 0)
    later: list[tuple[int, float]] = []
    counted, early = 0, 0
    for now, found in reads(plain, NUMBERED if order["count"] else DUE, order["patience"]):
        while (step := steps.ended(now)) is not None:
            print(json.dumps(step), flush=True)
        for due, *numbers in found:
            due_ms = int.from_bytes(due, "big")
            steps.take(now - due_ms)
            early += now < due_ms
            for n in numbers:
                once.take(int.from_bytes(n, "big"))
            if due_ms >= since_ms:
                counted += 1
                if now - due_ms > later_ms:
                    later.append((due_ms, now))
    plain.close()
    return {
        "counted": counted,
        "early": early,
        "missing": once.missing,
        "repeated": once.repeated,
        "keyed": list(once.keyed.items()),
        "later": later,
    }


def main() -> None:
    verbs = {"publish": publish, "consume": consume}
    print(json.dumps(verbs[sys.argv[1]](json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
