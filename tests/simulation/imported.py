"""`delayer export` and `delayer import jsonl` in a simulation. An operator exports the store, cancels some of the
messages, and imports those from the file."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import detangle

from delayer.cli.export import _write
from delayer.core.filters import Filter
from delayer.core.importing import ImportSelection
from delayer.format import lines
from delayer.format.lines import Line
from delayer.imports import state_machine
from delayer.imports.brokers import Destinations
from delayer.imports.files import JsonLines
from delayer.imports.state_machine import ImportImpossible
from delayer.retry import first_set
from delayer.store.admin import actions
from delayer.store.admin.detail import ABSENT
from delayer.store.admin.importing import ImportStore
from tests.simulation.drained import AGAIN, until_done
from tests.simulation.store.server import URL
from tests.simulation.world import URL as BROKER_URL
from tests.support.ledger import Ledger
from tests.support.letters import NUMBER

PATIENCE: Final = 3600.0
"""The faults of a run leave broker and store alone for long enough before."""
_ROWS: Final = "SELECT id, body FROM message UNION ALL SELECT id, body FROM held ORDER BY id"


class Exported(Ledger):
    """``in_doubt``: numbers of the messages whose cancel gave no answer. ``imported``: how many went through a file."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.in_doubt: set[int] = set()
        self.imported = 0

    async def move_through_files(self, stopping: asyncio.Event) -> None:
        with tempfile.TemporaryDirectory() as directory:
            while not await first_set(stopping, seconds=detangle.uniform(5.0, 40.0)):
                chosen: list[bytes] = []
                with suppress(*AGAIN):
                    async with asyncio.timeout(60):
                        chosen = await self._take_some()
                if chosen:
                    await self._bring_back(Path(directory) / "backlog.jsonl", chosen)

    async def _take_some(self) -> list[bytes]:
        """Export everything, and cancel some of it. Returns the lines of what was cancelled."""
        file = BytesIO()
        before = await _numbers()
        await _write(URL, Filter(), file, with_held=True)
        after = await _numbers()
        exported = {number: line for line in file.getvalue().splitlines() if (number := _number_in(line)) is not None}
        left_out = [id_ for id_ in before.keys() & after.keys() if before[id_] not in exported]
        assert not left_out, f"{len(left_out)} rows are not in the export: {sorted(left_out)[:5]}"
        known = sorted(id_ for id_, number in after.items() if number in exported)
        if not known:
            return []
        ids = {detangle.choice(known) for _ in range(detangle.randint(1, 30))}
        numbers = {after[id_] for id_ in ids}
        self.in_doubt |= numbers
        async with actions.change_connection(URL, "cancel") as connection:
            found = await actions.cancel(connection, sorted(ids))
        self.in_doubt -= numbers
        return [exported[after[id_]] for id_, where in found.items() if where not in ABSENT]

    async def _bring_back(self, path: Path, chosen: list[bytes]) -> None:
        _save(path, chosen)

        async def run() -> state_machine.ImportReport:
            async with ImportStore.open(URL) as book:
                source = JsonLines(path=path, notes=book, meant=ImportSelection())
                judge = Destinations(BROKER_URL, None, verified=True)
                try:
                    return await state_machine.run(source, book, judge, "test", lambda *_: None, again=True)
                finally:
                    await source.close()

        async with asyncio.timeout(PATIENCE):
            report = await until_done(run, ImportImpossible)  # The broker does not answer now whether it takes them.
        assert report.run.committed == len(chosen), f"{report.run.committed} of {len(chosen)} were imported"
        self.imported += len(chosen)


async def _numbers() -> Mapping[int, int]:
    """The letters of all rows, by id."""
    async with actions.change_connection(URL, "look") as connection:
        return {row["id"]: NUMBER.unpack_from(row["body"])[0] for row in await connection.fetch(_ROWS)}


def _save(path: Path, chosen: Sequence[bytes]) -> None:
    path.write_bytes(b"".join(line + b"\n" for line in chosen) + lines.format_end_line(len(chosen)))


def _number_in(line: bytes) -> int | None:
    found = lines.parse_line(line)
    return NUMBER.unpack_from(found.parcel.body)[0] if isinstance(found, Line) else None


def judge(ledger: Exported) -> None:
    lost = [one for one in ledger.account.missing() if one not in ledger.in_doubt]
    assert not lost, f"{len(lost)} are lost, such as {lost[:5]}"
