"""`delayer drain` in a simulation: after each switch of the mode the backlog follows, into the cascade and back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import detangle

from delayer.amqp.errors import BrokerLost
from delayer.cli import drain
from delayer.imports.state_machine import SourceLost
from delayer.retry import first_set
from delayer.store.admin.importing import ImportBusy
from tests.simulation.scheduled import LOST
from tests.simulation.store.server import URL
from tests.simulation.world import Node

T = TypeVar("T")
AGAIN: Final = (TimeoutError, BrokerLost, SourceLost, ImportBusy, *LOST)
"""What asks an operator to run the same command again."""
PAUSE: Final = 1.0


@contextmanager
def _silent(*_: Any) -> Iterator[Callable[..., None]]:
    yield lambda *_: None


drain.progress = _silent  # type: ignore[assignment]  # on a terminal, a thread draws it


async def drain_back_and_forth(nodes: Sequence[Node], stopping: asyncio.Event) -> None:
    """Ends in store mode, with the cascade drained."""
    while not await first_set(stopping, seconds=detangle.uniform(10.0, 90.0)):
        await switch(nodes, "native")
        _, unsound = await until_done(lambda: drain.rows_to_cascade(nodes[0].settings, URL, keys_too=False))
        assert not unsound, f"{unsound} rows must not be sent"
        await first_set(stopping, seconds=detangle.uniform(5.0, 60.0))
        await switch(nodes, "store")
        await until_done(lambda: drain.levels_to_store(nodes[0].settings, URL))


async def switch(nodes: Sequence[Node], mode: str) -> None:
    """Change the configuration of all daemons, and reload those that run."""
    for node in nodes:
        node.settings = node.settings.model_copy(update={"mode": mode})
        if node.runs:
            # It ends with the daemon, if that is killed. The next start reads the configuration.
            await asyncio.wait([asyncio.create_task(node.reload(node.settings))], timeout=60)


async def until_done(command: Callable[[], Awaitable[T]], *more: type[Exception]) -> T:
    """Run a command until it reaches broker and store. ``more``: what asks to run it again, too."""
    while True:
        try:
            return await command()
        except (*AGAIN, *more):
            await asyncio.sleep(PAUSE)
