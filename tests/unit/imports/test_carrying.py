"""What an import into a cascade publishes there, and what of it has to wait in the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from delayer.amqp.envelopes import enveloped, opened
from delayer.amqp.properties import Properties
from delayer.core.cascade import MAX_SECONDS, Cascade
from delayer.core.importing import Batch, Item, Phase, Run
from delayer.core.message import CONFIRMED, NACKED, Outcome, Outgoing, Parcel, Target
from delayer.imports import cascade
from delayer.imports.cascade import CascadeBook
from delayer.imports.state_machine import ImportImpossible

NOW = 1_900_000_000_000
SMALL = Parcel(NOW + 60_000, b"r", b"x", b"k", Target(b"", b"q"), b"\0\0", b"body")
RUN = Run(1, "jsonl", {}, Phase.RUNNING, "me", 0, staged=9)


class Store:
    """What CascadeBook needs of ImportStore."""

    def __init__(self) -> None:
        self.kept: list[Item] = []
        self.published = 0

    async def now_ms(self) -> int:
        return NOW

    async def commit(self, run: Run, batch: Batch, published: int = 0) -> Run:
        self.kept += batch.items
        self.published += published
        return replace(run, parked=run.parked + published + len(batch.items), progress=batch.progress)


class Broker:
    max_properties = 1_000

    def __init__(self, outcome: Outcome = CONFIRMED) -> None:
        self.outcome = outcome
        self.taken: list[Outgoing] = []

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]:
        self.taken += batch
        return [self.outcome] * len(batch)


def book(store: Store, broker: Broker) -> CascadeBook:
    return CascadeBook(store, broker, Cascade(), "delays.due", enveloped)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "item",
    [
        Item(SMALL, "there is no such queue"),
        Item(SMALL._replace(key=b"key")),
        Item(SMALL._replace(due_ms=NOW + MAX_SECONDS * 1000 + 1)),
        Item(SMALL._replace(body=b"x" * 101)),
        Item(SMALL._replace(properties=bytes(1_000))),
    ],
)
async def test_what_a_cascade_cannot_take(item: Item, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of these among others stops nobody: it waits in the store."""
    monkeypatch.setattr(cascade, "LARGEST_BODY", 100)
    store, broker = Store(), Broker()
    run = await book(store, broker).commit(RUN, Batch([Item(SMALL), item, Item(SMALL)], "progress"))
    assert (run.parked, run.progress) == (3, "progress")
    assert (store.kept, store.published) == ([item], 2)
    for one in broker.taken:
        assert opened(Properties.parse(one.properties), one.body, 10_000).parcel == SMALL


async def test_the_largest_goes() -> None:
    store, broker = Store(), Broker()
    parcel = SMALL._replace(due_ms=NOW + MAX_SECONDS * 1000)
    broker.max_properties = len(enveloped(parcel, b"0" * 32))
    await book(store, broker).commit(RUN, Batch([Item(parcel)], ""))
    assert (store.kept, len(broker.taken)) == ([], 1)


async def test_nothing_is_noted_of_what_was_not_confirmed() -> None:
    store, broker = Store(), Broker(NACKED)
    with pytest.raises(ImportImpossible, match="the batch is not committed"):
        await book(store, broker).commit(RUN, Batch([Item(SMALL)], ""))
    assert (store.kept, store.published) == ([], 0)
