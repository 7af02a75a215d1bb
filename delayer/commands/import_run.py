"""What surrounds a run of an import: where its messages go, and what an error of it says."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from delayer.broker.publisher import RelayPublisher
from delayer.broker.relay import Relay
from delayer.commands.errors import Failure, Misused, Off, Unreached
from delayer.core.importing import Run
from delayer.legacy.brokers import HEARTBEAT, NAME
from delayer.legacy.carrying import CascadeBook
from delayer.legacy.ports import BadSource, ImportImpossible, Source, SourceLost
from delayer.services import envelopes
from delayer.settings import Settings
from delayer.store.importing import ImportBusy, ImportStore
from delayer.wire.address import Address
from delayer.wiring import cascade_of

GARBAGE_THRESHOLD = 200_000


def into_of(unfinished: Run | None, told: str | None, settings: Settings) -> str:
    """Where the messages go: of a run that goes on where they went. Raises ImportImpossible where that differs."""
    begun = "" if unfinished is None else unfinished.into
    if begun and told not in (None, begun):
        raise ImportImpossible(
            f"the unfinished import was begun into the {begun}, and --into {told} is said now. Next: go on with --into "
            f"{begun}, or `abort`"
        )
    return begun or told or ("cascade" if settings.mode == "native" else "store")


@asynccontextmanager
async def cascade_book(settings: Settings, source: Source, book: ImportStore) -> AsyncIterator[CascadeBook]:
    """Into the cascade of ``[native]``. Raises ImportImpossible for what would come out of it just to go in again."""
    here, cascade = Address.parse(settings.broker_url), cascade_of(settings)
    said = source.parameters
    prefix = cascade.owner if cascade.shared else cascade.prefix
    own = {"broker": str(here), "cascade": cascade.kind, "prefix": prefix}
    if source.name == "cascade" and {name: said.get(name, "") for name in own} == own:
        raise ImportImpossible("these messages wait in this cascade already. Next: say --into store")
    relay = Relay(here, NAME, heartbeat=HEARTBEAT)
    relay.start()
    publisher = RelayPublisher(relay)
    try:
        yield CascadeBook(book, publisher, cascade, settings.native.due_queue, envelopes.enveloped)
    finally:
        await publisher.close()
        await relay.close()


def failure_of(error: Exception) -> Failure:
    """With its exit code, and what to do next."""
    match error:
        case SourceLost():
            return Unreached(
                f"the source is out of reach: {error}. Next: mend that, and run the same again; "
                "an import that had begun goes on where it stopped."
            )
        case BadSource():
            return Misused(f"{error}.")
        case ImportBusy() | ImportImpossible():
            return Off(f"{error}.")
        case _:
            return Off(f"the counts differ: {error}. Nothing is lost; see docs/importing.md.")


@contextmanager
def few_collections() -> Iterator[None]:
    """Messages make no cycles, and a batch of them is more than Python's collector waits for before it looks through
    all that lives: as in the daemon (app.py)."""
    before = gc.get_threshold()
    gc.set_threshold(GARBAGE_THRESHOLD, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)
