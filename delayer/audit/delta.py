"""A Delta table as the dataset of `delayer backlog export --format delta`. Needs the extra ``delta``.

The files are those of audit/dataset.py. One commit to the table's log adds new files and removes replaced files.
Removed files stay for readers of earlier versions until the table's owner vacuums it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from delayer.audit.dataset import BODY, COLUMNS, Partition, Unfit, messages_of, sync

PARTITIONED_BY: Final = pa.schema({"due_day": pa.date32(), "route": pa.string()})


class DeltaDataset:
    """A table in place of a PlainDataset, with the same attributes and methods. Created by :func:`delta`."""

    def __init__(self, path: Path, *, bodies: bool) -> None:
        self.root = self.former_root = path
        self._table = DeltaTable(path) if DeltaTable.is_deltatable(str(path)) else None
        columns = COLUMNS.append(BODY) if bodies else COLUMNS
        self._schema = Schema.from_arrow(pa.schema([*columns, *PARTITIONED_BY]))
        self.former: dict[str, Path] = {}
        if self._table is not None:
            if self._table.schema() != self._schema:
                raise Unfit(
                    f"{path}: expected a table with the same columns: of this version, with or without --bodies"
                )
            found = pa.table(self._table.get_add_actions())
            for place in found["path"].to_pylist():
                file = Path(unquote(place))  # The log contains URLs.
                self.former[str(file.parent)] = file

    def commit(self, kept: Iterable[Path], written: Mapping[Partition, Path], gone: Iterable[Path]) -> None:
        """Commit to the log. Raises Unfit if another writer committed first."""
        now_ms = time.time_ns() // 1_000_000
        added = [
            AddAction(
                str(path.relative_to(self.root)),
                path.stat().st_size,
                partition.values,
                now_ms,
                True,
                json.dumps({"numRecords": messages_of(path.name)}),
            )
            for partition, path in written.items()
        ]
        removed = [RemoveAction(str(file), data_change=True, deletion_timestamp=now_ms) for file in gone]
        names = PARTITIONED_BY.names
        # Sync only the directories of new files, because a VACUUM may be removing others.
        sync({directory for path in written.values() for directory in path.parents[:3]})
        try:
            if self._table is None:
                create_table_with_add_actions(str(self.root), self._schema, added, partition_by=names)
            elif added or removed:
                self._table.create_write_transaction([*added, *removed], "append", self._schema, names)
        except DeltaError as error:
            raise Unfit(f"{self.root}: {error}") from None


@contextmanager
def delta(path: Path, *, bodies: bool) -> Iterator[DeltaDataset]:
    """Open the table at ``path``, or a new one. Raises OSError, Unfit."""
    path.mkdir(mode=0o700, parents=False, exist_ok=True)
    if not DeltaTable.is_deltatable(str(path)) and any(path.iterdir()):
        raise Unfit(
            f"{path}: expected a new directory or a Delta table of an earlier export. Next: name a new directory. If "
            "the first export to this one did not end, delete it, and run the export again"
        )
    try:
        yield DeltaDataset(path, bodies=bodies)
    except DeltaError as error:
        raise Unfit(f"{path}: {error}") from None
