"""delayer compact, restore: pack far-future rows into compressed segments, and turn segments back into rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from delayer.cli.errors import ExitCode, Misused, OutOfReach
from delayer.cli.options import (
    Stoppable,
    as_json,
    check_remote,
    conf_option,
    dry_run_option,
    duration,
    master_option,
    remote_option,
    request_of,
    store_url,
)
from delayer.cli.output import note, per_second, print_json, progress, when
from delayer.core.readable import counted, size
from delayer.core.readable import duration as readable_duration
from delayer.core.secret import SecretUrl
from delayer.store.segments.compact import FEWEST

if TYPE_CHECKING:
    from delayer.audit import compact as compaction
    from delayer.audit import restore as restoration


def _tell(figures: dict[str, Any], text: str, *, as_json: bool) -> None:
    if as_json:
        print_json(figures, one_line=True)
    else:
        click.echo(text)


def _end(context: click.Context, broken: Sequence[str], lost: Sequence[str], kept: str, parts: str) -> None:
    """Report broken segments and lost parts, in sentences that begin with ``kept`` and ``parts``. Exits with 1 or 3 if
    there are any."""
    for reason in broken:
        note(f"{kept}: {reason}.")
    if lost:
        raise OutOfReach(
            f"{parts}: {lost[0].rstrip('.')}. Next: run `{context.command_path}` again; it resumes where this one "
            "stopped."
        )
    if broken:
        context.exit(ExitCode.FOUND)


@click.command(cls=Stoppable, short_help="Pack messages of the far future into compressed segments.")
@click.option(
    "--after",
    "after_ms",
    default="7d",
    show_default=True,
    callback=duration,
    metavar="DURATION",
    help="Pack messages that are due later than this from now. Must be longer than store.restore_ahead.",
)
@click.option(
    "--rows",
    type=click.IntRange(100, 100_000),
    default=10_000,
    show_default=True,
    help="Messages in a segment, approximately.",
)
@click.option("--dry-run", is_flag=True, help="Estimate the gain and the cost, and change nothing. Needs no Spark.")
@as_json
@master_option
@remote_option
@conf_option
@click.pass_context
def compact(
    context: click.Context,
    *,
    after_ms: int,
    rows: int,
    dry_run: bool,
    as_json: bool,
    master: str | None,
    remote: SecretUrl | None,
    conf: dict[str, str],
) -> None:
    """Pack the messages that are due in the far future into segments: compressed, inside the store.

    Daemons restore them in time (store.restore_ahead), and `delayer restore` does it in bulk. These stay rows: messages
    of more than 1 MiB, and those with less than 300 of their lane within a week. Daemons may keep running.
    The command may be interrupted and repeated: every message is either a row or in exactly one segment. At the end it
    drops emptied partitions.

    Exit code 1 if a written segment was unreadable (its messages stayed rows). Exit code 3 if the store is unreachable,
    Java is missing, or Spark gave up.

    \b
    Examples:
      delayer compact --dry-run
      delayer compact --after 30d
      delayer compact --master spark://cluster:7077 --conf spark.cores.max=4 --json
      delayer compact --remote sc://cluster:15002
    """
    from delayer.audit import compact as job  # noqa: PLC0415 - only this verb needs it
    from delayer.audit import tasks  # noqa: PLC0415
    from delayer.audit.remote import job_session  # noqa: PLC0415

    if remote is not None:
        check_remote(remote, master)
    settings = request_of(context).settings()
    url = store_url(settings)
    job.check_after(after_ms, settings.store.restore_ahead_ms)
    planned = asyncio.run(job.plan(url, after_ms, rows, min(FEWEST, rows // 2)))
    if dry_run:
        found = asyncio.run(job.numbers(url, planned, rows))
        counts = {"after_ms": planned.after_ms, "windows": len(planned.windows), **found.gain._asdict()}
        figures = {name: value for name, value in found._asdict().items() if name != "gain"}
        _tell(figures | counts, _forecast(found), as_json=as_json)
        return
    if not planned.windows:  # An earlier job may have died before it shrank the partitions.
        done = job.finish(url, planned, (), 0.0, lambda _done, _of: None)
    else:
        tasks.step_back()
        with progress() as say, job_session("delayer compact", master, remote, conf, handing_out=True) as session:
            done = job.run(session, url, planned, rows, say)
    _tell_packed(done, as_json=as_json)
    parts = f"not packed, or perhaps not: {counted(len(done.lost), 'window')}"
    _end(context, done.broken, done.lost, "A written segment was unreadable, so its messages stayed rows", parts)


def _forecast(found: compaction.Numbers) -> str:
    gain = found.gain
    text = (
        f"{counted(found.messages, 'message')} ({size(found.raw_bytes)}) would go into about "
        f"{counted(found.segments, 'segment')}; "
        f"{found.large:,} of more than 1 MiB and {counted(found.few, 'other')} would stay.\n"
        f"On disk: {size(found.disk_bytes)}, the messages that are due sooner among them."
    )
    if not found.messages:
        return text
    if gain.pays_after_ms is None:
        return f"{text}\nThe segments would be no smaller than the rows: do not compact this store."
    wait = readable_duration(gain.pays_after_ms / 1000)
    return (
        f"{text} About {size(gain.saved_bytes)} less with segments of {size(gain.packed_bytes)}.\n"
        f"The log (WAL) would grow by about {size(gain.log_bytes)} now, and by as much when they are restored.\n"
        f"If the archived log is kept for a week, this pays off for messages that wait {wait} or longer: see --after."
    )


def _tell_packed(done: compaction.CompactionResult, *, as_json: bool) -> None:
    shrunk = done.shrunk
    totals = done.totals
    figures = {
        **totals,
        "seconds": round(done.seconds, 3),
        "shrink_seconds": round(done.shrink_seconds, 3),
        "disk_bytes": {"before": shrunk.bytes_before, "after": shrunk.bytes_after},
        "partitions": {"dropped": shrunk.dropped, "vacuumed": shrunk.vacuumed, "left": shrunk.left},
        "lost": sorted(set(done.lost)),
        "broken": done.broken,
    }
    text = "Nothing to pack."
    if messages := totals["messages"]:
        took = f"{done.seconds:.1f} s, {per_second(messages, done.seconds)}"
        of, now = size(totals["raw_bytes"]), size(totals["packed_bytes"])
        packed = f"{counted(messages, 'message')} ({of}) into {counted(totals['segments'], 'segment')} ({now})"
        text = f"Packed: {packed}; {took}."
    rows = f"Rows on disk: {size(shrunk.bytes_before)} before, {size(shrunk.bytes_after)} now"
    partitions = f"{counted(len(shrunk.dropped), 'partition')} dropped, {len(shrunk.vacuumed)} vacuumed"
    _tell(figures, f"{text}\n{rows}; {partitions}.", as_json=as_json)
    if shrunk.left and not as_json:
        note(f"{len(shrunk.left)} partitions keep their room, as other sessions held them. The next run frees it.")


@click.command(cls=Stoppable, short_help="Bring segments back in bulk; daemons do it by themselves, in time.")
@click.option(
    "--within",
    "within_ms",
    callback=duration,
    metavar="DURATION",
    help="Restore the segments whose first message is due within this from now.",
)
@click.option("--all", "everything", is_flag=True, help="Restore all of them.")
@dry_run_option
@as_json
@click.pass_context
def restore(context: click.Context, *, within_ms: int | None, everything: bool, dry_run: bool, as_json: bool) -> None:
    """Turn segments back into rows: all of them, or those that are due within some time.

    Daemons restore each segment in time by themselves. Use this command for many at once, such as before a return to a
    version without segments. Daemons may keep running, and the command may be interrupted and repeated.
    Segments that are marked as broken are tried again.

    Exit code 1 if a segment is broken. Exit code 3 if the store is unreachable, or delayer[segments] is missing.

    \b
    Examples:
      delayer restore --all --dry-run
      delayer restore --within 30d
    """
    from delayer.audit import restore as job  # noqa: PLC0415 - only this verb needs it
    from delayer.audit import tasks  # noqa: PLC0415

    if everything == (within_ms is not None):
        raise Misused("say what to restore: either --within DURATION or --all")
    url = store_url(request_of(context).settings())
    planned = asyncio.run(job.plan(url, within_ms))
    if dry_run:
        _tell_to_restore(planned, as_json=as_json)
        return
    tasks.step_back()
    with progress() as say:
        done = asyncio.run(job.run(url, planned, say))
    _tell_restored(planned, done, as_json=as_json)
    parts = f"the store was lost, so not restored, or perhaps not: {counted(len(done.lost), 'segment')}"
    _end(context, done.broken, done.lost, "Broken, and kept as it is", parts)


def _tell_to_restore(planned: restoration.RestorePlan, *, as_json: bool) -> None:
    segments = planned.segments
    figures = {
        "messages": planned.messages,
        "segments": len(segments),
        "packed_bytes": sum(one.packed_bytes for one in segments),
        "raw_bytes": sum(one.raw_bytes for one in segments),
        "broken": sum(one.broken is not None for one in segments),
        "next_due_ms": segments[0].first_due_ms if segments else None,
    }
    text = (
        f"{counted(planned.messages, 'message')} in {counted(len(segments), 'segment')} "
        f"({size(figures['packed_bytes'] or 0)}, broken: {figures['broken']}) would be restored; "
        f"the first is due {when(figures['next_due_ms'], planned.now_ms)}."
    )
    _tell(figures, text, as_json=as_json)


def _tell_restored(planned: restoration.RestorePlan, done: restoration.RestoreResult, *, as_json: bool) -> None:
    figures = asdict(done) | {"seconds": round(done.seconds, 3), "lost": sorted(set(done.lost))}
    quicker = f"; restored or emptied by others: {counted(done.gone, 'segment')}" if done.gone else ""
    text = (
        f"Restored: {counted(done.messages, 'message')} of {counted(done.segments, 'segment')}; {done.seconds:.1f} s, "
        f"{per_second(done.messages, done.seconds)}{quicker}."
    )
    _tell(figures, text if planned.segments else "There is nothing to restore.", as_json=as_json)
