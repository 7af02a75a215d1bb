"""delayer export: waiting and held messages, as lines of JSON."""

from __future__ import annotations

import asyncio
import errno
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any, NamedTuple

import click

from delayer.audit.files import replacing
from delayer.cli.errors import CommandFailed, Misused, OutOfReach
from delayer.cli.options import LocalPath, filter_of, filter_options, request_of, store_url
from delayer.cli.output import note
from delayer.core.filters import Filter
from delayer.core.readable import counted
from delayer.format import lines
from delayer.format.lines import Line
from delayer.store import held_messages
from delayer.store.admin import exporting
from delayer.store.admin.actions import IdBitset
from delayer.store.admin.exporting import BrokenSegments
from delayer.store.schedules import reading

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
_NOTHING_KEPT = "nothing of it is kept. Next: make room, or name another place, and run it again"


@click.command("export", short_help="Write waiting and held messages to a file.")
@click.argument("file", type=LocalPath(path_type=Path, dir_okay=False, allow_dash=True), metavar="FILE")
@filter_options
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@click.pass_context
def export(context: click.Context, /, *, file: Path, force: bool, **given: Any) -> None:
    """Write the messages of the store to FILE (- for stdout), a line of JSON each, exact to the byte: bodies,
    properties, keys, due instants. `delayer import jsonl` reads it, into any store.

    The soonest messages come first; then, without a filter, the held messages with their reasons. Without a filter, the
    schedules come before them all; each also represents its waiting message. The file is one snapshot of the store,
    taken when the export begins. Nothing is removed, and daemons, compaction and restore may go on. To move a backlog,
    stop the daemons first. The file holds messages in the clear, so protect it.

    Exit code 1 if a segment is unreadable; all others are written. Exit code 1 if the reader of a pipe has gone; the
    pipe did not get the last line, which has the number of messages. Exit code 3 if FILE cannot take more; FILE is then
    unchanged. Symlinks are followed. A named pipe or a device is written into and not replaced.

    \b
    Examples:
      delayer export backlog.jsonl
      delayer export --route mail.in --due-after 7d - | zstd > mail.jsonl.zst
    """
    wanted = filter_of(given)
    with_held = wanted.everything
    url = store_url(request_of(context).settings())
    to_stdout = str(file) == "-"
    opened = False
    try:
        if not to_stdout and file.is_file() and not force:
            raise Misused(f"{file} exists already: --force replaces it")
        with nullcontext(sys.stdout.buffer) if to_stdout else replacing(file, mode=0o600) as out:
            opened = True
            written, broken = asyncio.run(_write(url, wanted, out, with_held=with_held))
            out.flush()  # Before the command reports them as written.
    except (NotWritten, OSError) as error:
        where = f"{'stdout' if to_stdout else file}: {error.strerror or error}"
        if error.errno == errno.EPIPE:  # As with every other verb.
            raise CommandFailed(f"{where}: the reader closed the pipe before the last message") from error
        if not opened and error.errno not in _FULL:
            raise Misused(where) from error
        kept = not to_stdout and (file.is_file() or not file.exists())
        raise OutOfReach(f"{where}: {_NOTHING_KEPT if kept else 'the output is incomplete'}") from error
    schedules = f" and {counted(written.schedules, 'schedule')}" if written.schedules else ""
    note(f"Written: {counted(written.messages, 'message')}{schedules}.")
    if broken is not None:
        raise CommandFailed(str(broken))


class NotWritten(Exception):
    """The file or the pipe accepts no more. Not an OSError, which the store's session would report as the store's."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.errno, self.strerror = error.errno, error.strerror


class WrittenRecords(NamedTuple):
    messages: int
    schedules: int


async def _write(
    url: str, wanted: Filter, out: IO[bytes], *, with_held: bool
) -> tuple[WrittenRecords, BrokenSegments | None]:
    count = schedules = 0
    broken = None
    occurrences = IdBitset()
    async with exporting.snapshot(url) as connection:
        if with_held:
            async for page in reading.pages(connection):
                for record in page:
                    _append(out, lines.format_schedule_line(record))
                occurrences.update(record.waiting_id for record in page if record.waiting_id is not None)
                schedules += len(page)
        try:
            async for messages in exporting.read_portions(connection, wanted):
                alone = [one for one in messages if one.place.id not in occurrences]
                for one in alone:
                    parcel = one.parcel()
                    if one.key is not None:
                        parcel = parcel._replace(since_ms=one.parked_ms)
                    _append(out, lines.format_line(Line(parcel, one.checksum)))
                count += len(alone)
        except BrokenSegments as error:
            broken = error
        if with_held:
            async for held in held_messages.read_all(connection):
                for (one, state), token in held:
                    _append(out, lines.format_line(Line(one.parcel(token), one.checksum, state.hold)))
                count += len(held)
    _append(out, lines.format_end_line(count + schedules))
    return WrittenRecords(count, schedules), broken


def _append(out: IO[bytes], text: bytes) -> None:
    try:
        out.write(text)
    except OSError as error:
        raise NotWritten(error) from error
