"""delayer cancel, reschedule: count the messages, ask, then change them in portions, and record it in the audit log."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import click

from delayer.amqp import reading
from delayer.cli.errors import ExitCode
from delayer.cli.list import say_native
from delayer.cli.options import (
    agreed,
    as_json,
    ask_store,
    asked_ids,
    instant,
    messages_of,
    read_as,
    request_of,
    selected,
    store_url,
    stored_change_options,
    whoami,
)
from delayer.cli.output import note, note_no_match, print_json, progress
from delayer.config.texts import duration_text, shift_ms
from delayer.core import readable
from delayer.core.filters import Filter, Token
from delayer.core.readable import counted
from delayer.store import waiting
from delayer.store.admin import actions
from delayer.store.admin.actions import PAST, Do, NewDue
from delayer.store.admin.detail import ABSENT, FoundIn, absent


class Change(NamedTuple):
    """A change of messages. ``new``: the new instant, for the audit log."""

    verb: str
    do: Do
    new: Mapping[str, Any] = {}


@click.command(short_help="Cancel messages: they are not delivered.")
@as_json
@stored_change_options
def cancel(context: click.Context, /, *, names: Sequence[str], as_json: bool, **given: Any) -> None:
    """Cancel messages by their ids, or all that match a filter (--delay-key, --route, --due-before, …; --all for all).

    An ID is what `delayer list` prints, such as id:48213@1795291200000. The part before the @ is enough: id: and the
    value of x-delayer-id. Any other text is a message_id: 5 is the message that its publisher called 5. To find one,
    the command reads every message. --delay-key finds a key at once.

    A cancelled message is not delivered. The command waits for messages that are being delivered at this moment, and
    reports messages that were delivered already. There are three exceptions. After a crash between a delivery and its
    commit, a cancel prevents the second copy only. The daemon parks a message again that a crash left in the intake
    queue. A held message whose queue did not answer ("no confirm") may be in that queue; the command names each one.

    A filter matches waiting messages, in segments too. Cancel a held message by its id, or with `delayer held drop`.
    `delayer audit-log` shows every cancel. With ids --json prints where each was found: "waiting", "held" or
    "segment" means cancelled. Exit code 1 if an id was not found, or if nothing matched the filter.

    \b
    Examples:
      delayer cancel id:48213@1795291200000
      delayer cancel order-4711
      delayer cancel --delay-key order-4711
      delayer cancel --route mail.in --due-after 7d --dry-run
    """
    _act(context, Change("cancel", actions.cancel), names, as_json=as_json, **given)


@click.command(short_help="Give messages another due instant.")
@click.option(
    "--at", "at_ms", callback=instant, metavar="INSTANT", help="The new instant: RFC 3339, or how long from now."
)
@click.option(
    "--by", "by_ms", callback=read_as(shift_ms), metavar="DURATION", help="Later by this, or earlier with a -."
)
@as_json
@stored_change_options
def reschedule(
    context: click.Context,
    /,
    *,
    names: Sequence[str],
    at_ms: int | None,
    by_ms: int | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Give messages another due instant, by their ids or by a filter: --at INSTANT, or --by DURATION.

    An ID is what `delayer list` prints, or its part before the @: id: and the value of x-delayer-id. Any other text is
    a message_id.

    A message keeps its id; the part behind the @ in `delayer list` is the new instant. The daemon tries a held message
    again at that instant. For a held message that waits for an operator (late, unfit), --by counts from now, or from
    its due instant if that is later. Do not repeat --by after exit code 3, because it may move some messages twice.
    --at is safe to repeat. `delayer audit-log` shows every reschedule. With ids --json prints where each message was
    found. Exit code 1 if an id was not found, or if nothing matched the filter.

    \b
    Examples:
      delayer reschedule id:48213@1795291200000 --at 2031-01-31T08:00:00Z
      delayer reschedule --route mail.in --due-before 1h --by 30m
      delayer reschedule --delay-key order-4711 --at 0s
    """
    if (at_ms is None) == (by_ms is None):
        raise click.UsageError("expected a new instant: either --at or --by")
    new: dict[str, Any] = {"at_ms": at_ms} if at_ms is not None else {"by_ms": by_ms}
    change = Change("reschedule", partial(actions.reschedule, when=NewDue(at_ms, by_ms or 0)), new)
    _act(context, change, names, as_json=as_json, **given)


def _act(
    context: click.Context,
    change: Change,
    names: Sequence[str],
    *,
    everything: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **given: Any,
) -> None:
    wanted = selected(names, given, everything=everything)
    settings = request_of(context).settings()
    url = store_url(settings)
    say_native(settings)
    if names:
        code = _named(url, change, messages_of(url, names), dry_run=dry_run, as_json=as_json)
    else:
        code = _filtered(url, change, wanted, dry_run=dry_run, yes=yes, as_json=as_json)
    context.exit(code)


def _named(url: str, change: Change, names: Mapping[str, Token | None], *, dry_run: bool, as_json: bool) -> int:
    verb, do, new = change
    tokens = [token for token in names.values() if token is not None]

    async def work() -> dict[int, FoundIn]:
        asked = {"ids": asked_ids(names), **new}
        async with actions.recorded(url, whoami(), verb, asked) as (connection, log_id):
            return await actions.named(connection, do, tokens, log_id)

    found = ask_store(url, verb, lambda one: actions.whereabouts(one, tokens)) if dry_run else asyncio.run(work())
    places = {name: FoundIn.NOWHERE if token is None else found[token.id] for name, token in names.items()}
    if as_json:
        print_json({name: where.value for name, where in places.items()})
    else:
        there = f"{actions.met(found)} of {len(places)}"
        click.echo(f"{there} would be {PAST[verb].lower()}." if dry_run else f"{PAST[verb]}: {there}.")
        for name, where in places.items():
            if where in ABSENT:
                note(absent(names[name] or name, where))
        if new and not dry_run and len(tokens) <= 10:
            _say_moved(url, tokens, found, new)
    return ExitCode.DONE if set(places.values()).isdisjoint(ABSENT) else ExitCode.FOUND


def _say_moved(url: str, tokens: Sequence[Token], found: Mapping[int, FoundIn], new: Mapping[str, Any]) -> None:
    """Print the new instants and the new names. A message that was due at once may be delivered by now."""
    moved = [one for one in tokens if found[one.id] in (FoundIn.WAITING, FoundIn.SEGMENT)]

    def named(token: Token) -> Token:
        by_ms = new.get("by_ms")
        due_ms = new["at_ms"] if by_ms is None else None if token.due_ms is None else token.due_ms + by_ms
        return Token(token.id, due_ms)

    if moved:
        entries, _ = ask_store(url, "look", lambda connection: waiting.named(connection, map(named, moved)))
        for token in (entry.place.token for entry in entries):
            click.echo(f"{Token(token.id)} is due {readable.instant(token.due_ms or 0)}; its id is {token} now.")


def _filtered(url: str, change: Change, wanted: Filter, *, dry_run: bool, yes: bool, as_json: bool) -> int:
    verb, do, new = change
    test = reading.properties_test(wanted)
    matched = ask_store(url, f"count for {verb}", lambda connection: waiting.count(connection, wanted, test))
    if matched.broken:
        note(f"{matched.broken} segments cannot be read and may hold more messages: see docs/backlog.md.")
    about = counted(matched.messages, "message")
    target = f" to {readable.instant(new['at_ms'])}" if "at_ms" in new else ""
    if "by_ms" in new:
        target = f" by {'-' if new['by_ms'] < 0 else ''}{duration_text(abs(new['by_ms']))}"
    if dry_run or not matched.messages:
        if as_json:
            print_json({"matched": matched.messages, "done": 0, "broken_segments": matched.broken})
        else:
            click.echo(f"{about} would be {PAST[verb].lower()}{target}." if dry_run else "No messages match.")
        if not matched.messages and not wanted.everything:
            note_no_match("delayer held list")
        return ExitCode.DONE if matched.messages or wanted.everything else ExitCode.FOUND
    note(f"{about} {'matches' if matched.messages == 1 else 'match'}.")
    if not agreed(f"{verb.capitalize()} {about}{target}?", yes=yes):
        return ExitCode.DONE

    async def work() -> Counter[FoundIn]:
        async with actions.recorded(url, whoami(), verb, {**wanted.as_dict(), **new}) as (connection, log_id):
            with progress() as say:
                step = f"{verb.capitalize()} messages"
                return await actions.every(
                    connection, do, wanted, test, log_id=log_id, say=lambda done: say(step, done, matched.messages)
                )

    done = asyncio.run(work())
    if as_json:
        doubtful = {"unreadable": done[FoundIn.UNREADABLE]} if done[FoundIn.UNREADABLE] else {}
        figures = {"matched": matched.messages, "done": actions.met(done), "too_late": done[FoundIn.NOWHERE]}
        print_json(figures | doubtful)
    else:
        click.echo(" ".join([f"{PAST[verb]}: {actions.met(done):,}{target}.", *actions.unmet(done)]))
    return ExitCode.DONE
