"""delayer compact: many far-future rows into few compressed segments."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from delayer.audit.words import size
from delayer.cli.errors import FOUND, Unreached
from delayer.cli.options import as_json, conf_option, duration, master_option, request_of, store_url
from delayer.cli.output import note, per_second, print_json, progress

if TYPE_CHECKING:
    from delayer.audit.compact import Done, Numbers, Plan


@click.command(short_help="Pack messages of the far future into compressed segments.")
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
@click.option("--dry-run", is_flag=True, help="Count the messages to pack, and change nothing. Needs no Spark.")
@as_json
@master_option
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
    conf: dict[str, str],
) -> None:
    """Pack the messages that are due in the far future into segments: compressed, inside the store.

    Daemons restore them in time (store.restore_ahead), and `delayer restore` does it in bulk. Messages with a key, and
    messages of more than 1 MiB, stay rows. Daemons may go on working meanwhile. The command may be interrupted and
    repeated: every message is either a row or in exactly one segment. At the end it drops emptied partitions.

    Exit code 1 if a segment did not read back (its messages stayed rows). Exit code 3 if the store is out of reach,
    Java is missing, or Spark gave up.

    \b
    Examples:
      delayer compact --dry-run
      delayer compact --after 30d
      delayer compact --master spark://cluster:7077 --conf spark.cores.max=4 --json
    """
    from delayer.audit import compact as job  # noqa: PLC0415 - only the job's own verbs need it
    from delayer.audit import spark, tasks  # noqa: PLC0415 - Spark

    settings = request_of(context).settings()
    url = store_url(settings)
    job.check_after(after_ms, settings.store.restore_ahead_ms)
    planned = asyncio.run(job.plan(url, after_ms, rows))
    if dry_run:
        _tell_plan(planned, asyncio.run(job.numbers(url, planned)), rows, as_json=as_json)
        return
    if not planned.windows:
        done = job.nothing(url, planned)
    else:
        tasks.step_back()
        with progress() as say, spark.session("delayer compact", master=master, more=conf, handing_out=True) as session:
            done = job.run(session, url, planned, rows, say)
    _tell(done, as_json=as_json)
    _end(context, done)


def _tell_plan(planned: Plan, counted: Numbers, rows: int, *, as_json: bool) -> None:
    figures: dict[str, Any] = {
        "after_ms": planned.after_ms,
        "messages": counted.messages,
        "keyed": counted.keyed,
        "large": counted.large,
        "raw_bytes": counted.raw_bytes,
        "windows": len(planned.windows),
        "segments": -(-counted.messages // rows),
        "disk_bytes": counted.disk_bytes,
    }
    if as_json:
        print_json(figures)
        return
    click.echo(
        f"{counted.messages:,} messages ({size(counted.raw_bytes)}) would go into about {figures['segments']:,} "
        f"segments; {counted.keyed:,} with a key and {counted.large:,} of more than 1 MiB would stay.\n"
        f"On disk: {size(counted.disk_bytes)}, the messages that are due sooner among them."
    )


def _tell(done: Done, *, as_json: bool) -> None:
    shrunk = done.shrunk
    messages, packed = done.total("messages"), done.total("packed_bytes")
    if as_json:
        print_json(
            {
                "messages": messages,
                "segments": done.total("segments"),
                "raw_bytes": done.total("raw_bytes"),
                "packed_bytes": packed,
                "seconds": round(done.seconds, 3),
                "shrink_seconds": round(done.shrink_seconds, 3),
                "disk_bytes": {"before": shrunk.bytes_before, "after": shrunk.bytes_after},
                "partitions": {"dropped": shrunk.dropped, "vacuumed": shrunk.vacuumed, "left": shrunk.left},
                "lost": sorted(set(done.lost)),
                "broken": done.broken,
            }
        )
        return
    if not messages:
        click.echo("Nothing to pack.")
    else:
        click.echo(
            f"{messages:,} messages ({size(done.total('raw_bytes'))}) are in {done.total('segments'):,} segments "
            f"({size(packed)}); {done.seconds:.1f} s, {per_second(messages, done.seconds)}."
        )
    click.echo(
        f"Rows on disk: {size(shrunk.bytes_before)} before, {size(shrunk.bytes_after)} now; "
        f"{len(shrunk.dropped)} partitions dropped, {len(shrunk.vacuumed)} vacuumed."
    )
    if shrunk.left:
        note(f"{len(shrunk.left)} partitions keep their room, as other sessions held them. The next run frees it.")


def _end(context: click.Context, done: Done) -> None:
    for reason in done.broken:
        note(f"A segment did not read back, its messages stayed rows: {reason}.")
    if done.lost:
        raise Unreached(
            f"{len(done.lost)} windows are not packed, or perhaps not: {done.lost[0].rstrip('.')}. "
            "Next: run `delayer compact` again; it goes on where this one stopped."
        )
    if done.broken:
        context.exit(FOUND)
