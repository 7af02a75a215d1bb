"""delayer cancel, reschedule; and what every command that changes messages does: count them, prompt, change them, and
report the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from delayer.cli.errors import ExitCode
from delayer.cli.list import say_native
from delayer.cli.options import (
    confirm,
    messages_of,
    read_as,
    request_of,
    selected,
    store_url,
    stored_change_options,
    whoami,
)
from delayer.cli.output import note, note_no_match, print_json, progress
from delayer.config.texts import instant_ms, shift_ms, target_text
from delayer.store.admin.actions import NewDue
from delayer.store.admin.changes import OF_HELD, ChangeResult, StoredChange
from delayer.store.session import clock_ms

if TYPE_CHECKING:
    from delayer.set_aside.change import SetAsideChange


def carry_out(
    context: click.Context,
    change: StoredChange | SetAsideChange,
    question: str,
    *,
    named: bool,
    everything: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> NoReturn:
    """Change the messages, print the outcome, and exit. Does not prompt if the messages are ``named``.

    ``question``: with "{}" for the number of messages. For the rest, see options.change_options.
    """
    if named and not dry_run:
        _end(context, asyncio.run(change.carry_out(whoami())), as_json=as_json)
    counted = asyncio.run(change.count())
    some = counted.messages > 0
    if dry_run or not some:
        if not (some or named or everything):
            note_no_match("delayer held list" if change.verb in ("cancel", "reschedule") else "delayer list")
        _end(context, counted._replace(complete=counted.complete and (some or everything)), as_json=as_json)
    for line in counted.lines:
        note(line)
    if not confirm(question.format(counted.number), yes=yes):
        context.exit(ExitCode.DONE)
    with progress(doing := "changing messages") as bar:
        done = change.carry_out(whoami(), counted, lambda done: bar(doing, done, counted.messages))
        result = asyncio.run(done)
    _end(context, result, as_json=as_json)


def _end(context: click.Context, result: ChangeResult, *, as_json: bool) -> NoReturn:
    if as_json:
        print_json(result.as_dict())
    else:
        click.echo(f"{result.heading}.")
        for line in result.lines:
            note(line)
    context.exit(ExitCode.DONE if result.complete else ExitCode.FOUND)


def change_stored(
    context: click.Context,
    verb: str,
    names: Sequence[str],
    when_of: Callable[[str], NewDue] | None = None,
    *,
    everything: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **filters: Any,
) -> NoReturn:
    """Change messages in the store, by name or by filter. ``when_of``: the new instant, by the store's URL."""
    wanted = selected(names, filters, everything=everything)
    settings = request_of(context).settings()
    url = store_url(settings)
    say_native(settings)
    when = when_of and when_of(url)
    tokens = messages_of(url, names) if names else None
    change = StoredChange(url, verb, wanted, tokens, when)
    noun, target = "held messages" if verb in OF_HELD else "messages", "" if when is None else target_text(*when)
    options = {"everything": everything, "dry_run": dry_run, "yes": yes, "as_json": as_json}
    carry_out(context, change, f"{verb.capitalize()} {{}} {noun}{target}?", named=bool(names), **options)


@click.command(short_help="Cancel messages: they are not delivered.")
@stored_change_options
def cancel(context: click.Context, /, *, names: Sequence[str], **given: Any) -> None:
    """Cancel messages by their ids, or all that match a filter (--delay-key, --route, --due-before, …; --all for all).
    `delayer list --help` says what an ID is.

    A cancelled message is not delivered. The command waits for messages that are being delivered at this moment, and
    reports messages that were delivered already. There are three exceptions. After a crash between a delivery and its
    commit, a cancel prevents the second copy only. The daemon parks a message again that a crash left in the intake
    queue. A held message whose queue did not answer ("no confirm") may be in that queue: see `delayer held list`.

    A filter matches waiting messages, in segments too. Cancel a held message by its id, or with `delayer held drop`.
    `delayer audit-log` shows every cancel. With ids, the field "found" of --json says where each message was:
    "waiting", "held" or "segment" means cancelled. Exit code 1 if an id was not found, or if nothing matched the
    filter.

    \b
    Examples:
      delayer cancel id:48213@1795291200000
      delayer cancel order-4711
      delayer cancel --delay-key order-4711
      delayer cancel --route mail.in --due-after 7d --dry-run
    """
    change_stored(context, "cancel", names, **given)


def _checked(text: str) -> str:
    """An instant, which counts from the store's clock if it is one from now. Raises Expected."""
    instant_ms(text, 0)
    return text


@click.command(short_help="Give messages another due instant.")
@click.option(
    "--at", callback=read_as(_checked), metavar="INSTANT", help="The new instant: RFC 3339, or how long from now."
)
@click.option(
    "--by", "by_ms", callback=read_as(shift_ms), metavar="DURATION", help="Later by this, or earlier with a -."
)
@stored_change_options
def reschedule(
    context: click.Context, /, *, names: Sequence[str], at: str | None, by_ms: int | None, **given: Any
) -> None:
    """Give messages another due instant, by their ids (see `delayer list --help`) or by a filter: --at INSTANT, or --by
    DURATION.

    A message keeps its id; the part after the @ in `delayer list` is the new instant. The daemon tries a held message
    again at that instant. For a held message that waits for an operator (late, unfit), --by counts from now, or from
    its due instant if that is later. Do not repeat --by after exit code 3, because it may move some messages twice.
    --at is safe to repeat. `delayer audit-log` shows every reschedule. With ids, the field "found" of --json says where
    each message was. Exit code 1 if an id was not found, or if nothing matched the filter.

    \b
    Examples:
      delayer reschedule id:48213@1795291200000 --at 2031-01-31T08:00:00Z
      delayer reschedule --route mail.in --due-before 1h --by 30m
      delayer reschedule --delay-key order-4711 --at 0s
    """
    if (at is None) == (by_ms is None):
        raise click.UsageError("expected a new instant: either --at or --by")

    def when(url: str) -> NewDue:
        if at is None:
            return NewDue(by_ms=by_ms or 0)
        return NewDue(instant_ms(at, asyncio.run(clock_ms(url, "reschedule"))))

    change_stored(context, "reschedule", names, when, **given)
