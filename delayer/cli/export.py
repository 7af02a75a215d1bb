"""delayer export: waiting and held messages, as lines of JSON."""

from __future__ import annotations

import asyncio
import errno
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import IO, Any

import click

from delayer.amqp import reading
from delayer.cli.errors import Failure, Misused, Off, Unreached
from delayer.cli.options import filter_of, filter_options, request_of, store_url
from delayer.cli.output import note
from delayer.core import lines
from delayer.core.files import replacing
from delayer.core.filters import Filter
from delayer.core.lines import Line
from delayer.store.admin import exporting
from delayer.store.admin.exporting import BrokenSegments, Exported

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
_NOTHING_KEPT = "nothing of it is kept. Next: make room, or name another place, and run it again"


@click.command("export", short_help="Write waiting and held messages to a file.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True), metavar="FILE")
@filter_options
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@click.pass_context
def export(context: click.Context, /, *, file: Path, force: bool, **given: Any) -> None:
    """Write the messages of the store to FILE (- for stdout), a line of JSON each, exact to the byte: bodies,
    properties, keys, due instants. `delayer import jsonl` reads it, into any store.

    The soonest messages come first; then, without a filter, the held messages with their reasons. The file is one
    snapshot of the store, taken when the export begins. Nothing is removed, and daemons, compaction and restore may go
    on. To move a backlog, stop the daemons first. The file holds messages in the clear, so protect it.

    Exit code 1 if a segment does not read back; all others are written. Exit code 3 if FILE or the pipe takes no more:
    FILE is then unchanged, and the output of a pipe lacks its last line with the number of messages. Symlinks are
    followed. A named pipe or a device is written into and not replaced.

    \b
    Examples:
      delayer export backlog.jsonl
      delayer export --route mail.in --due-after 7d - | zstd > mail.jsonl.zst
    """
    wanted = filter_of(given)
    with_held = wanted.everything
    url = store_url(request_of(context).settings())
    if str(file) == "-":
        try:
            found = _written(url, wanted, sys.stdout.buffer, with_held=with_held)
            sys.stdout.flush()  # Before the command reports them as written.
        except (NotWritten, OSError) as error:
            raise Unreached(f"stdout: {_why(error)}: the output is incomplete") from error
        _say(*found)
        return
    if file.is_file() and not force:
        raise Misused(f"{file} exists already: --force replaces it")
    opened = False
    try:
        with replacing(file, mode=0o600) as out:
            opened = True
            count, broken = _written(url, wanted, out, with_held=with_held)
    except (NotWritten, OSError) as error:
        if isinstance(error, OSError) and not opened:
            raise _not_opened(file, error) from error
        kept = _NOTHING_KEPT if file.is_file() or not file.exists() else "the output is incomplete"
        raise Unreached(f"{file}: {_why(error)}: {kept}") from error
    _say(count, broken)


class NotWritten(Exception):
    """The file or the pipe takes no more. No OSError: in the store's session that would count as the store's."""


def _why(error: NotWritten | OSError) -> str:
    return str(error) if isinstance(error, NotWritten) else error.strerror or str(error)


def _not_opened(file: Path, error: OSError) -> Failure:
    if error.errno in _FULL:
        return Unreached(f"{file}: {_why(error)}: {_NOTHING_KEPT}")
    return Misused(f"{file}: {_why(error)}")


def _say(count: int, broken: BrokenSegments | None) -> None:
    note(f"{count:,} messages were written.")
    if broken is not None:
        raise Off(str(broken))


def _written(url: str, wanted: Filter, out: IO[bytes], *, with_held: bool) -> tuple[int, BrokenSegments | None]:
    """Write the messages. Returns their number, and the segments that do not read back."""
    return asyncio.run(_write(url, wanted, out, with_held=with_held))


async def _write(url: str, wanted: Filter, out: IO[bytes], *, with_held: bool) -> tuple[int, BrokenSegments | None]:
    count = 0
    broken = None
    async with exporting.snapshot(url) as connection:
        try:
            count += await _put(exporting.waiting(connection, wanted, reading.header_test(wanted)), out)
        except BrokenSegments as error:
            broken = error
            count += error.exported
        if with_held:
            count += await _put(exporting.held(connection), out)
    _append(out, lines.write_end(count))
    return count, broken


async def _put(portions: AsyncIterator[Sequence[Exported]], out: IO[bytes]) -> int:
    count = 0
    async for portion in portions:
        for one in portion:
            _append(out, lines.write(Line(one.parcel, one.checksum, one.held)))
        count += len(portion)
    return count


def _append(out: IO[bytes], text: bytes) -> None:
    try:
        out.write(text)
    except OSError as error:
        raise NotWritten(error.strerror) from error
