"""Doomed messages: each ends up in the refused queue, unchanged, with its reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from delayer.amqp.values import Delivery
from tests.faults.fleet import Fleet
from tests.support.letters import NUMBER, Letter, doomed, said_by_doomed
from tests.support.raw import Header, Inbox, Props, Raw, content, text
from tests.support.readings import Readings

REASON: Final = b"x-delayer-refused"
GAINED: Final = (b"x-delayer-id", REASON, b"x-delayer-exchange", b"x-delayer-routing-key", b"x-delayer-expiration")
"""Headers in this order. Only messages with an expiration, which would act in the refused queue, gain the last one."""
COUNTED: Final = (b"x-delivery-count", b"x-acquired-count")
"""Headers that a broker adds to a redelivery."""
_ID: Final = re.compile(rb"[0-9a-f]{32}")


class Doomed(NamedTuple):
    """``again``: how many were found more than once. ``wrong``: a note for each message that changed, or was refused
    more often than read."""

    sent: int
    missing: list[int]
    again: int
    wrong: list[str]

    @property
    def kept(self) -> bool:
        return not (self.missing or self.wrong)


async def refused(fleet: Fleet) -> Doomed:
    """Read the refused queue to its end, with the daemons stopped."""
    found = [one.delivery for one in (await emptied(fleet, "delays.refused")).arrivals]
    account = fleet.ledger.account
    assert account.readings is not None, "this account records no readings"
    judge = Judge(fleet.ledger.doomed, account.readings, sorts=fleet.rabbitmq.sorts_headers)
    return judge(found, faults=account.windows is None or bool(account.windows))


async def emptied(fleet: Fleet, queue: str) -> Inbox:
    """Read all messages of a queue."""
    depth = (await fleet.ledger.depths(queue))[queue]
    async with await Raw.connect(fleet.place.broker) as raw:
        inbox = await raw.inbox(queue)
        await inbox.until(lambda: len(inbox.arrivals) >= depth)
        return inbox


class Judge:
    """Judges ``sent`` messages published to ``exchange``, with their ``readings``. ``sorts``: see
    RabbitMQ.sorts_headers. Pure."""

    def __init__(self, sent: int, readings: Readings, *, sorts: bool = False, exchange: bytes = b"delayer.in") -> None:
        self._sent = sent
        self._readings = readings
        self._sorts = sorts
        self._exchange = exchange

    def __call__(self, found: Iterable[Delivery], *, faults: bool = False) -> Doomed:
        """``faults``: whether a fault may have repeated messages.

        Each read assigns a message an ``x-delayer-id``. Copies with one id are one refusal published again; that
        happens only after a fault, once for each unconfirmed publish.
        """
        counts: Counter[int] = Counter()
        ids: dict[bytes, int] = {}
        wrong = []
        for one in found:
            number = NUMBER.unpack_from(one.body)[0] if len(one.body) >= NUMBER.size else self._sent
            if number >= self._sent:
                wrong.append(f"refused and none of the doomed: {one}")
                continue
            try:
                id = self._id_of(number, one)
            except AssertionError as error:
                wrong.append(f"doomed {number}: {error}")
                continue
            if ids.setdefault(id, number) != number:
                wrong.append(f"doomed {number}: its x-delayer-id is that of {ids[id]}")
            counts[number] += 1
        wrong += self._too_many(counts, Counter(ids.values()), faults)
        missing = [number for number in range(self._sent) if number not in counts]
        return Doomed(self._sent, missing, sum(count > 1 for count in counts.values()), wrong)

    def _too_many(self, counts: Counter[int], refusals: Counter[int], faults: bool) -> Iterator[str]:
        for number, count in sorted(counts.items()):
            if refusals[number] > (read := self._readings.doomed(number)):
                yield f"doomed {number}: was refused {refusals[number]} times, and read {read} times"
            elif count > 1 and not faults:
                yield f"doomed {number}: is there {count} times, and nothing broke"

    def _id_of(self, number: int, found: Delivery) -> bytes:
        """Its ``x-delayer-id``. Raises AssertionError if anything but the headers of a refusal changed."""
        letter = doomed(number)
        sent, came = Props.decode(letter.properties), Props.decode(found.properties)
        assert found.body == letter.body, f"its body is {found.body!r}"
        assert found.routing_key == letter.routing_key, f"its routing key is {found.routing_key!r}"
        gained = {name: came.all(name) for name in GAINED}
        assert all(len(gained[name]) == 1 for name in GAINED[:4]), f"its headers are {came.headers}"
        id, reason = (content(gained[name][0]) for name in GAINED[:2])
        assert _ID.fullmatch(id), f"its x-delayer-id is {id!r}"
        said = repr(said_by_doomed(number).decode()).encode()
        assert reason.startswith(b"x-delay: expected ") and said in reason, f"its reason is {reason!r}"
        expected = [replace(sent, headers=table, expiration=None) for table in self._tables(letter, sent, came, number)]
        assert found.properties in [one.encode() for one in expected], f"its properties are {came}, not {expected[0]}"
        return id

    def _tables(self, letter: Letter, sent: Props, came: Props, number: int) -> Iterator[tuple[Header, ...]]:
        """The header tables that it may have now."""
        values = [came.one(GAINED[0]), came.one(REASON), text(self._exchange), text(letter.routing_key)]
        if sent.expiration is not None:
            values.append(text(sent.expiration))
        had, gained = sent.headers or (), tuple(zip(GAINED, values, strict=False))
        tables = [(had, gained)]
        if self._readings.doomed_again(number):
            # Only the broker has these counts, and it sorts the headers of a redelivery.
            counts = [(name, came.one(name)) for name in COUNTED if came.all(name)]
            tables.append((tuple(sorted((*had, *counts))), gained))
        for before, behind in tables:
            yield tuple(sorted((*before, *behind))) if self._sorts else (*before, *behind)
