"""delayer held: messages that their destination did not accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from delayer.cli.changing import change_stored
from delayer.cli.options import (
    as_json,
    ask_store,
    filter_of,
    filter_options,
    kind_option,
    limit_option,
    read_as,
    request_of,
    store_url,
    stored_change_options,
)
from delayer.cli.output import note, note_no_match, print_json, print_table
from delayer.core.filters import Token, read_token
from delayer.core.message import as_text
from delayer.core.readable import instant
from delayer.fields import as_json as for_programs
from delayer.format import reading
from delayer.format.reading import address
from delayer.store import held_messages
from delayer.store.held_messages import HeldEntry


@click.group(short_help="List, retry or drop held messages.")
def held() -> None:
    """List, retry or drop held messages, which their destination did not take. The daemon retries each message with
    growing pauses. Messages that came too late for their route (late_limit) wait for a retry by hand. `delayer show ID`
    has the details of a message. `delayer list --help` says what an ID is.
    """


@held.command("list")
@filter_options
@kind_option
@limit_option
@click.option("--after", callback=read_as(read_token), metavar="ID", help="Begin after this id.")
@as_json
@click.pass_context
def list_(context: click.Context, /, *, limit: int, after: Token | None, as_json: bool, **given: Any) -> None:
    """List held messages in the order of their arrival. Shows the reason and the next attempt.

    \b
    Examples:
      delayer held list
      delayer held list --exchange orders.out --limit 200
      delayer held list --json | jq -r '.messages[].held.reason' | sort | uniq -c
    """
    wanted = filter_of(given)
    url = store_url(request_of(context).settings())
    begin = 0 if after is None else after.id
    page = ask_store(url, "list held messages", lambda connection: held_messages.find(connection, wanted, limit, begin))
    onward = None if page.after is None else str(Token(page.after))
    if as_json:
        print_json({"messages": list(map(for_programs.held, page.messages)), "after": onward, "bounded": page.bounded})
        return
    if not page.messages and page.bounded:
        click.echo("No messages match so far.")
    elif not page.messages:
        click.echo("No messages are held." if wanted.everything else "No held messages match.")
        if not wanted.everything:
            note_no_match("delayer list")
    else:
        print_table(
            ["id", "due", "to", "attempts", "again at", "message_id", "reason"], map(_row, page.messages), right=(3,)
        )
    if onward is not None:
        note(f"There may be more: the same with --after {onward}.")


def _row(one: HeldEntry) -> tuple[object, ...]:
    entry, hold = one
    return (
        str(entry.place.token),
        instant(entry.place.due_ms),
        address(entry.to_exchange, entry.to_key),
        hold.attempts,
        "by hand" if hold.retry_ms is None else instant(hold.retry_ms),
        as_text(reading.message_id(entry.properties) or b""),
        hold.reason,
    )


@held.command()
@kind_option
@stored_change_options
def retry(context: click.Context, /, *, names: Sequence[str], **given: Any) -> None:
    """Try held messages again now, by their ids or by a filter.

    A message that its destination still does not take stays held. Its pauses and the count of its attempts start over.
    After the first attempt, a late message waits for an operator again (late_limit). A message that an import held
    before its due instant is tried at that instant.

    \b
    Examples:
      delayer held retry id:48213
      delayer held retry --exchange orders.out --kind returned
      delayer held retry --all --yes
    """
    change_stored(context, "retry", names, **given)


@held.command()
@kind_option
@stored_change_options
def drop(context: click.Context, /, *, names: Sequence[str], **given: Any) -> None:
    """Drop held messages for good, by their ids or by a filter. They count as cancelled. Only a filter asks first.

    A message without an answer ("no confirm") may have a copy in its queue, which delivers it when it answers.

    \b
    Examples:
      delayer held drop id:48213 id:48214
      delayer held drop --route reminders.in --due-before 2031-01-31T08:00:00Z --dry-run
    """
    change_stored(context, "drop", names, **given)
