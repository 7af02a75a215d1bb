"""delayer backlog export: the waiting messages as Parquet files or a Delta table, for a data team."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from delayer.cli.errors import CommandFailed, Misused, OutOfReach
from delayer.cli.options import LocalPath, Stoppable, as_json, check_package, request_of, store_url
from delayer.cli.output import print_json, progress
from delayer.core.filters import Filter
from delayer.core.readable import Say, counted
from delayer.core.units import DAY_MS
from delayer.store.admin import exporting
from delayer.store.admin.exporting import BrokenSegments

if TYPE_CHECKING:
    from delayer.audit.dataset import Partition, PlainDataset
    from delayer.audit.delta import DeltaDataset


@click.group(short_help="Export the waiting messages as Parquet or Delta, for a data team.")
def backlog() -> None:
    """The waiting messages as data."""


@backlog.command("export", cls=Stoppable, short_help="Update a dataset with the waiting messages.")
@click.argument("directory", type=LocalPath(path_type=Path), metavar="DIR")
@click.option(
    "--format", "form", type=click.Choice(["parquet", "delta"]), default="parquet", show_default=True,
    help="Parquet files, or a Delta table, which needs the extra `delta`.",
)  # fmt: skip
@click.option("--bodies", is_flag=True, help="Write the bodies too, as the column `body`.")
@as_json
@click.pass_context
def export(context: click.Context, /, *, directory: Path, form: str, bodies: bool, as_json: bool) -> None:
    """Write all waiting messages (rows, and those in segments) to DIR, a directory for each due day and route:
    due_day=2027-01-31/route=mail.in/. Held messages are not among them. docs/backlog.md has the columns.

    The dataset is one snapshot of the store. A second export writes only the partitions whose messages changed.
    DIR/_left.csv lists the messages that have left since the previous export. Readers see the former dataset until the
    new one is complete, also if the export is killed.

    Needs the extra `segments`. Nothing in the store changes. The files hold messages in the clear, so protect them.

    Exit code 1 if a segment is unreadable; all other messages are written. Exit code 3 if the disk is full, or the
    store is unreachable.

    \b
    Examples:
      delayer backlog export /srv/backlog
      delayer backlog export /srv/backlog-delta --format delta --bodies --json
    """
    check_package("pyarrow", "segments")
    from delayer.audit import dataset  # noqa: PLC0415 - pyarrow

    opened: Callable[[Path], AbstractContextManager[PlainDataset | DeltaDataset]] = dataset.plain
    if form == "delta":
        check_package("deltalake", "delta")
        from delayer.audit.delta import delta  # noqa: PLC0415 - needs the extra

        opened = partial(delta, bodies=bodies)
    url = store_url(request_of(context).settings())
    try:
        with progress("reading") as say, opened(directory) as target:
            done = asyncio.run(_export(url, target, say, bodies=bodies))
    except dataset.Unfit as error:
        raise Misused(str(error)) from error
    except dataset.DatasetNotWritten as error:
        raise OutOfReach(f"{error}: the dataset is as it was. Next: make room, and run it again") from error
    except OSError as error:
        raise Misused(f"{directory}: {error.strerror or error}") from error
    if as_json:
        print_json(done, one_line=True)
    else:
        moved = "{messages:,} messages wait; {came:,} came and {left:,} left since the last export.\n".format(**done)
        files = "{} written, {kept:,} kept, {removed:,} removed.".format(counted(done["written"], "partition"), **done)
        click.echo(moved + files)
    if broken := done["broken_segments"]:
        raise CommandFailed(str(BrokenSegments(broken)))


async def _export(url: str, target: PlainDataset | DeltaDataset, say: Say, *, bodies: bool) -> dict[str, Any]:
    """Export once. Returns the messages, those that came and left since the last export, and the partitions written,
    kept and removed. Raises StoreLost, BadStoreUrl, SchemaOutdated, OSError, dataset.Unfit, dataset.DatasetNotWritten.
    """
    from delayer.audit import dataset  # noqa: PLC0415 - pyarrow

    async with exporting.snapshot(url) as connection:
        now_ms = await connection.fetchval("SELECT statement_timestamp()")
        found, broken = await exporting.digests(connection)
        digests: dict[Partition, exporting.Digest] = {}
        for (day, route), digest in found.items():  # Days beyond the calendar share a partition.
            partition = dataset.Partition.of(day, route)
            digests[partition] = digest + digests.get(partition, exporting.Digest(0, 0))
        former = dict(target.former)
        kept: list[Path] = []
        wanted: dict[Partition, Path] = {}
        for partition, digest in digests.items():
            name = dataset.name_of(digest, bodies=bodies, now_ms=now_ms)
            old = former.get(partition.directory)
            if old is not None and dataset.same(old.name, name):
                kept.append(former.pop(partition.directory))
            else:
                wanted[partition] = target.root / partition.directory / name
        gone = list(former.values())
        with dataset.removed_unless_complete(wanted.values()):
            writer = dataset.PartitionWriter(wanted, bodies=bodies)
            of = sum(dataset.messages_of(path.name) for path in wanted.values())
            for day in sorted({partition.day for partition in wanted}):
                # The calendar's first and last day are open-ended.
                before_ms = (day + 1) * DAY_MS if day < dataset.LAST_DAY else None
                due = Filter(due_from_ms=day * DAY_MS if day else None, due_before_ms=before_ms)
                with suppress(BrokenSegments):
                    async for portion in exporting.read_portions(connection, due, bodies=bodies):
                        with dataset.writing():
                            for one in portion:
                                writer.add(one.place.due_ms // DAY_MS, one)
                        say("writing messages", writer.messages, of)
            with dataset.writing():
                writer.finish()
                left = dataset.write_left(target.root, [target.former_root / file for file in gone], writer.ids)
    target.commit(kept, wanted, gone)
    before = sum(dataset.messages_of(file.name) for file in gone)
    return {
        "store_now_ms": now_ms,
        "messages": writer.messages + sum(dataset.messages_of(file.name) for file in kept),
        "came": writer.messages - (before - left),
        "left": left,
        "written": len(wanted),
        "kept": len(kept),
        "removed": len({str(file.parent) for file in gone} - {partition.directory for partition in wanted}),
        "broken_segments": broken,
    }
