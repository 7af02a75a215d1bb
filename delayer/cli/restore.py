"""delayer restore: segments back into rows, in bulk."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from delayer.audit.words import size
from delayer.cli.errors import FOUND, Misused, Unreached
from delayer.cli.options import as_json, conf_option, duration, master_option, request_of, store_url
from delayer.cli.output import note, per_second, print_json, progress, when

if TYPE_CHECKING:
    from delayer.audit.restore import Done, Plan


@click.command(short_help="Bring segments back in bulk; daemons do it by themselves, in time.")
@click.option(
    "--within",
    "within_ms",
    callback=duration,
    metavar="DURATION",
    help="Restore the segments whose first message is due within this from now.",
)
@click.option("--all", "everything", is_flag=True, help="Restore all of them.")
@click.option("--dry-run", is_flag=True, help="Count the messages to restore, and change nothing. Needs no Spark.")
@as_json
@master_option
@conf_option
@click.pass_context
def restore(
    context: click.Context,
    *,
    within_ms: int | None,
    everything: bool,
    dry_run: bool,
    as_json: bool,
    master: str | None,
    conf: dict[str, str],
) -> None:
    """Make rows of segments again, all of them or those that are due within some time.

    Daemons restore each segment in time by themselves. Use this command for many at once, such as before a return to a
    version without segments. Daemons may go on working meanwhile, and the command may be interrupted and repeated.
    Segments that are marked as broken are tried again.

    Exit code 1 if a segment is broken. Exit code 3 if the store is out of reach, Java is missing, or Spark gave up.

    \b
    Examples:
      delayer restore --all --dry-run
      delayer restore --within 30d
    """
    from delayer.audit import restore as job  # noqa: PLC0415 - only the job's own verbs need it
    from delayer.audit import spark, tasks  # noqa: PLC0415 - Spark

    if everything == (within_ms is not None):
        raise Misused("say what to restore: either --within DURATION or --all")
    url = store_url(request_of(context).settings())
    planned = asyncio.run(job.plan(url, within_ms))
    if dry_run:
        _tell_plan(planned, as_json=as_json)
        return
    if not planned.segments:
        done = job.Done((), 0.0)
    else:
        tasks.step_back()
        with progress() as say, spark.session("delayer restore", master=master, more=conf, handing_out=True) as session:
            done = job.run(session, url, planned, say)
    _tell(done, as_json=as_json)
    _end(context, done)


def _tell_plan(planned: Plan, *, as_json: bool) -> None:
    segments = planned.segments
    first_ms = segments[0].first_due_ms if segments else None
    packed = sum(one.packed_bytes for one in segments)
    broken = sum(one.broken is not None for one in segments)
    if as_json:
        print_json(
            {
                "messages": planned.messages,
                "segments": len(segments),
                "packed_bytes": packed,
                "raw_bytes": sum(one.raw_bytes for one in segments),
                "broken": broken,
                "next_due_ms": first_ms,
            }
        )
        return
    click.echo(
        f"{planned.messages:,} messages in {len(segments):,} segments ({size(packed)}, broken: {broken}) would be "
        f"restored; the first is due {when(first_ms, planned.now_ms)}."
    )


def _tell(done: Done, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "messages": done.messages,
                "segments": done.segments,
                "gone": done.gone,
                "seconds": round(done.seconds, 3),
                "lost": sorted(set(done.lost)),
                "broken": done.broken,
            }
        )
        return
    if not done.back:
        click.echo("There is nothing to restore.")
        return
    quicker = f"; {done.gone:,} segments were restored or emptied by others" if done.gone else ""
    click.echo(
        f"{done.messages:,} messages of {done.segments:,} segments are rows again; {done.seconds:.1f} s, "
        f"{per_second(done.messages, done.seconds)}{quicker}."
    )


def _end(context: click.Context, done: Done) -> None:
    for reason in done.broken:
        note(f"Broken, and kept as it is: {reason}.")
    if done.lost:
        raise Unreached(
            f"the store was lost in {len(done.lost)} segments, which are not restored, or perhaps not: {done.lost[0]}. "
            "Next: run `delayer restore` again; it goes on where this one stopped."
        )
    if done.broken:
        context.exit(FOUND)
