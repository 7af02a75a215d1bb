"""What every command that changes messages does: count them, prompt, change them, and report the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from delayer.cli.errors import ExitCode
from delayer.cli.list import say_native
from delayer.cli.options import agreed, messages_of, request_of, selected, store_url, whoami
from delayer.cli.output import note, note_no_match, print_json, progress
from delayer.config.texts import target_text
from delayer.store.admin.actions import NewDue
from delayer.store.admin.changes import OF_HELD, ChangeResult, StoredChange

if TYPE_CHECKING:
    from delayer.daemon.set_aside import SetAsideChange


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
    if not agreed(question.format(counted.number), yes=yes):
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
    when: NewDue | None = None,
    *,
    everything: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **filters: Any,
) -> NoReturn:
    """Change messages in the store, by name or by filter."""
    wanted = selected(names, filters, everything=everything)
    settings = request_of(context).settings()
    url = store_url(settings)
    say_native(settings)
    tokens = messages_of(url, names) if names else None
    change = StoredChange(url, verb, wanted, tokens, when)
    noun, target = "held messages" if verb in OF_HELD else "messages", "" if when is None else target_text(*when)
    options = {"everything": everything, "dry_run": dry_run, "yes": yes, "as_json": as_json}
    carry_out(context, change, f"{verb.capitalize()} {{}} {noun}{target}?", named=bool(names), **options)
