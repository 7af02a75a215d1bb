"""delayer schedule import: schedules of a crontab, and of Celery beat."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, NoReturn
from uuid import uuid4

import click

from delayer.cli.errors import ExitCode, Misused
from delayer.cli.options import as_json, joined, whoami
from delayer.cli.output import note, print_json
from delayer.cli.schedule_looking import change, url_of_schedules
from delayer.core.message import Target, raw
from delayer.core.readable import counted
from delayer.fields.schedules import texts_of
from delayer.imports.beat import translate_beat
from delayer.imports.beat_files import BeatUnreadable, read_beat_file, read_beat_settings
from delayer.imports.crontab import translate_crontab
from delayer.imports.translation import Translation
from delayer.schedule.rhythm import rhythm_in_words
from delayer.schedule.wall import UnknownZone, check_zone
from delayer.store.schedules import changes

_options = joined(
    click.option("--dry-run", is_flag=True, help="Print the schedules, and change nothing."),
    click.option("--prefix", default="", metavar="TEXT", help="Put this before each name, such as `web1-`."),
    as_json,
    click.pass_context,
)


@click.group("import", short_help="Bring in a crontab, or the entries of Celery beat.")
def import_() -> None:
    """Bring in the schedules of another system. What cannot be translated is named, and is not brought in.

    The rest are added in one transaction, or nothing is, if the store has another schedule of one of these names. Look
    at them with --dry-run first, and stop the other system before the import, or messages come twice. Exit code 1 if
    something was not translated.
    """


@import_.command()
@click.argument("file", type=click.File("rb"))
@click.option("--zone", required=True, metavar="ZONE", help="The zone of the host that has the crontab.")
@click.option("--to", "exchange", required=True, metavar="EXCHANGE", help="The exchange of the messages.")
@click.option("--routing-key", default="", metavar="KEY", help="Their routing key.")
@click.option("--system", is_flag=True, help="Each line names a user, as in /etc/crontab and /etc/cron.d.")
@_options
def crontab(
    context: click.Context,
    /,
    *,
    file: IO[bytes],
    zone: str,
    exchange: str,
    routing_key: str,
    system: bool,
    dry_run: bool,
    prefix: str,
    as_json: bool,
) -> None:
    """Bring in a crontab: each command becomes the body of a message, for a consumer that runs it.

    Text behind a % is in the header x-cron-stdin, and the user of --system in x-cron-user. Names come from the
    programs. A line CRON_TZ=ZONE sets the zone of the lines after it. Missed occurrences are skipped, as cron does.

    \b
    Examples:
      crontab -l | delayer schedule import crontab - --zone Europe/Berlin --to jobs --dry-run
      delayer schedule import crontab - --zone UTC --to jobs --routing-key cron --system --prefix web1-
    """
    text = file.read().decode("utf-8", "surrogateescape")
    target = Target(raw(exchange), raw(routing_key))
    read = partial(translate_crontab, text=text, target=target, zone=_checked(zone), is_system=system)
    _bring(context, read, dry_run=dry_run, prefix=prefix, as_json=as_json)


@import_.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--zone", metavar="ZONE", help="The application's timezone. [default: as FILE says, else UTC]")
@click.option("--queue", metavar="NAME", help="Its task_default_queue. [default: as FILE says, else celery]")
@_options
def beat(
    context: click.Context,
    /,
    *,
    file: Path,
    zone: str | None,
    queue: str | None,
    dry_run: bool,
    prefix: str,
    as_json: bool,
) -> None:
    """Bring in the entries of Celery beat: each becomes a schedule whose messages are tasks that a worker takes.

    FILE is beat's own file (celerybeat-schedule), or a settings module that ends in .py and has beat_schedule. The
    module is run, its tasks are not. Celery need not be installed. Missed occurrences are sent once, as beat does.

    \b
    Examples:
      delayer schedule import beat celerybeat-schedule --dry-run
      delayer schedule import beat shop/celeryconfig.py --queue shop
    """
    try:
        found = (read_beat_settings if file.suffix == ".py" else read_beat_file)(file)
    except BeatUnreadable as unreadable:
        raise Misused(str(unreadable)) from None
    if zone is None and found.zone is None and not found.is_utc:
        raise Misused(f"--zone: expected the zone of beat's host, because enable_utc is off and {file} has no timezone")
    read = partial(
        translate_beat,
        entries=found.entries,
        zone=_checked(zone or found.zone or "UTC"),
        queue=queue or found.queue or "celery",
    )
    _bring(context, read, dry_run=dry_run, prefix=prefix, as_json=as_json)


def _checked(zone: str) -> str:
    try:
        check_zone(zone)
    except UnknownZone as wrong:
        raise Misused(f"--zone: {wrong}") from None
    return zone


def _bring(
    context: click.Context, read: Callable[[Translation], None], *, dry_run: bool, prefix: str, as_json: bool
) -> NoReturn:
    """Translate, add the schedules, name what has no equal, and exit."""
    url_of_schedules(context)
    result = Translation(time.time_ns() // 1_000_000, uuid4, prefix=prefix)
    read(result)
    apply = partial(changes.apply, wanted=result.schedules, who=whoami(), only_new=True, dry_run=dry_run)
    found = change(context, "import schedules", apply)
    if as_json:
        added = [{"name": one.name, **texts_of(one)} for one in found.added]
        missing = [one._asdict() for one in result.untranslated]
        same = [one.name for one in found.same]
        print_json({"dry_run": dry_run, "added": added, "same": same, "untranslated": missing})
    else:
        for one in found.added:
            click.echo(f"+ {one.name}: {rhythm_in_words(one.rhythm)}")
        there = f"; there already: {len(found.same):,}" if found.same else ""
        click.echo(f"{'Would be added' if dry_run else 'Added'}: {counted(len(found.added), 'schedule')}{there}.")
    for missing_one in result.untranslated:
        note(f"Not translated: {missing_one.where}: {missing_one.why}.")
    context.exit(ExitCode.FOUND if result.untranslated else ExitCode.DONE)
