"""Refused messages in a simulation: an operator drops some, and corrects the delay of the rest."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import detangle

from delayer.amqp.properties import Properties
from delayer.amqp.values import Delivery, Outgoing
from delayer.broker.errors import BrokerRefused, QueueMissing
from delayer.config.model import Settings
from delayer.format.refusal import NO_EDITS, RetryEdits
from delayer.retry import first_set
from delayer.set_aside.change import SetAsideChange, find_messages
from delayer.set_aside.messages import ANY, Selection
from tests.simulation.drained import AGAIN
from tests.simulation.traffic import Traffic
from tests.support.ledger import PAUSE, Ledger
from tests.support.letters import DOOMED_KEYS, NUMBER

LOST = (BrokerRefused, QueueMissing, *AGAIN)


class Refusing(Ledger):
    """``came``: the times at which each corrected message arrived. ``dropped``: what a command said that it dropped.
    ``in_doubt``: it gave no answer, or did not find them all."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.came: dict[int, list[float]] = {}
        self.dropped: set[int] = set()
        self.in_doubt: set[int] = set()
        self.wrong: list[str] = []
        self.sent_ms: list[float] = []

    def _compose_doomed(self) -> Outgoing:
        self.sent_ms.append(time.time() * 1000)
        return super()._compose_doomed()

    def _arrived(self, delivery: Delivery, at_ms: float) -> bool:
        if not delivery.routing_key.startswith(DOOMED_KEYS):
            return super()._arrived(delivery, at_ms)
        number: int = NUMBER.unpack_from(delivery.body)[0]
        properties = Properties.parse(delivery.properties)
        after, due = properties.get(b"after"), properties.get(b"x-delayer-due")
        if delivery.body != NUMBER.pack(number) + b"doomed" or after is None or after.value != number:
            self.wrong.append(f"message {number} has changed: {delivery}")
        if due is None or not isinstance(due.value, int) or due.value > at_ms:
            self.wrong.append(f"message {number} came early")
        self.came.setdefault(number, []).append(at_ms)
        return True

    async def operate(self, settings: Settings, stopping: asyncio.Event) -> None:
        while not await first_set(stopping, seconds=detangle.uniform(2.0, 30.0)):
            with suppress(*LOST):
                async with asyncio.timeout(60):
                    if detangle.flip(0.3):
                        await self._drop_some(settings)
                    else:
                        await _retry(settings, detangle.choice([None, 0, 1_000, 60_000]))
        while True:
            with suppress(*LOST):
                await _retry(settings, 1_000)
                if not (await find_messages(settings, "refused", limit=0)).depth:
                    return
            await asyncio.sleep(PAUSE)

    async def _drop_some(self, settings: Settings) -> None:
        found = (await find_messages(settings, "refused")).found
        chosen = {one.id: NUMBER.unpack_from(one.head)[0] for one in found if detangle.flip(0.3)}
        if not chosen:
            return
        fresh = set(chosen.values()) - self.in_doubt
        self.in_doubt |= fresh
        change = SetAsideChange(settings, "refused", "drop", Selection(frozenset(chosen)))
        if (await change.carry_out("test")).complete:
            self.in_doubt -= fresh
            self.dropped |= fresh


async def _retry(settings: Settings, delay_ms: int | None) -> None:
    edits = NO_EDITS if delay_ms is None else RetryEdits.of(delay_ms, {}, (), {})
    await SetAsideChange(settings, "refused", "retry", ANY, edits).carry_out("test")


async def send(ledger: Refusing, traffic: Traffic) -> None:
    longest_ms = detangle.choice([5_000, 30_000])
    await ledger.publish(traffic.count(), longest_ms=longest_ms, doomed_ones=detangle.randint(0, 3))


def judge(ledger: Refusing) -> None:
    assert not ledger.wrong, f"{len(ledger.wrong)} are wrong, such as {ledger.wrong[:3]}"
    gone = ledger.came.keys() | ledger.dropped | ledger.in_doubt
    lost = [one for one in range(ledger.doomed) if one not in gone]
    assert not lost, f"{len(lost)} of {ledger.doomed} refused messages are lost, such as {lost[:5]}"
    again = [one for one, times in ledger.came.items() if len(times) > 1 and not _excused(ledger, one, max(times))]
    assert not again, f"{len(again)} refused messages came twice without a fault, such as {again[:5]}"
    came = [one for one in ledger.dropped & ledger.came.keys() if not _excused(ledger, one, max(ledger.came[one]))]
    assert not came, f"{len(came)} came though they were dropped, such as {came[:5]}"


def _excused(ledger: Refusing, number: int, last_ms: float) -> bool:
    if -1 - number in ledger.account.published_twice:
        return True
    windows = ledger.account.windows or ()
    return any(window.begin_ms <= last_ms and window.end_ms >= ledger.sent_ms[number] for window in windows)
