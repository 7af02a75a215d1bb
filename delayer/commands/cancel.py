"""delayer cancel, reschedule: count the messages, ask, then change them in portions, and record it in the audit log."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from delayer.commands.errors import DONE, FOUND
from delayer.commands.list import say_native
from delayer.commands.options import (
    agreed,
    all_option,
    as_json,
    dry_run_option,
    filter_of,
    filter_options,
    instant,
    request_of,
    store_url,
    tokens,
    whoami,
    yes_option,
)
from delayer.commands.output import iso, note, print_json, progress
from delayer.core.filters import Filter, Token
from delayer.services import reading
from delayer.settings import duration_ms, duration_text
from delayer.store import acting, acts, listing
from delayer.store.acting import Counted, Do
from delayer.store.cancelling import Found
from delayer.store.rescheduling import When


@click.command(short_help="Cancel messages: they are not delivered.")
@tokens
@filter_options
@all_option
@dry_run_option
@yes_option
@as_json
@click.pass_context
def cancel(context: click.Context, /, *, tokens: Sequence[Token], as_json: bool, **given: Any) -> None:
    """Cancel messages by their ids, or all that a filter means (--key, --route, --due-before, …; --all for all).

    What is said to be cancelled is not delivered. A message that is being delivered at this moment is waited for; one
    that is delivered already is told; only after a crash between a delivery and its commit it stands there still, and
    a cancel prevents its second copy. A message that a crash left in the intake queue though it was parked is parked
    again, whoever cancelled it before. One that is held for want of an answer ("no confirm") is not tried again, but
    its queue perhaps has it, and delivers it when it answers: that is said of each. By a filter: waiting messages and
    those in segments; a held one by its id, or by `delayer held drop`. Every act is written down (`delayer acts`).
    Exit code 1 if an id was nowhere.

    \b
    Examples:
      delayer cancel 48213@1795291200000
      delayer cancel --key order-4711
      delayer cancel --route mail.in --due-after 7d --dry-run
    """
    _act(context, "cancel", acting.canceller(), tokens, {}, as_json=as_json, **given)


def _by(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return -duration_ms(text[1:]) if text.startswith("-") else duration_ms(text.removeprefix("+"))
    except ValueError as error:
        raise click.BadParameter(f"expected {error}, or the same with a - before it, found {text!r}") from None


@click.command(short_help="Give messages another due instant.")
@tokens
@click.option("--at", "at_ms", callback=instant, metavar="INSTANT", help="Due then: RFC 3339, or how long from now.")
@click.option("--by", "by_ms", callback=_by, metavar="DURATION", help="That much later, or with a - earlier.")
@filter_options
@all_option
@dry_run_option
@yes_option
@as_json
@click.pass_context
def reschedule(
    context: click.Context,
    /,
    *,
    tokens: Sequence[Token],
    at_ms: int | None,
    by_ms: int | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Give messages another due instant, by their ids or by a filter: --at INSTANT, or --by so much.

    Their ids stay; what `delayer list` prints behind the @ is the new instant. A held message is tried again then. One
    that is due at once is delivered at once. Of what waits for a person only (late, unfit) --by counts from now, or
    from when it is due. --by is not safe to repeat: after an exit code of 3 some may have been moved, and would be
    moved twice; --at is. Every act is written down (`delayer acts`).
    Exit code 1 if an id was nowhere.

    \b
    Examples:
      delayer reschedule 48213@1795291200000 --at 2031-01-31T08:00:00Z
      delayer reschedule --route mail.in --due-before 1h --by 30m
      delayer reschedule --key order-4711 --at 0s
    """
    if (at_ms is None) == (by_ms is None):
        raise click.UsageError("say the new instant: either --at or --by")
    new: dict[str, Any] = {"at_ms": at_ms} if at_ms is not None else {"by_ms": by_ms}
    do = acting.rescheduler(When(at_ms, by_ms or 0))
    _act(context, "reschedule", do, tokens, new, as_json=as_json, **given)


def _act(
    context: click.Context,
    verb: str,
    do: Do,
    tokens: Sequence[Token],
    new: Mapping[str, Any],
    *,
    everything: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **given: Any,
) -> None:
    wanted = filter_of(given)
    if tokens and (everything or not wanted.everything):
        raise click.UsageError("give either ids or a filter")
    if not tokens and wanted.everything and not everything:
        raise click.UsageError("say which messages: ids, a filter, or --all")
    settings = request_of(context).settings()
    url = store_url(settings)
    say_native(settings)
    if tokens:
        code = _named(url, verb, do, tokens, new, dry_run=dry_run, as_json=as_json)
    else:
        code = _filtered(url, verb, do, wanted, new, dry_run=dry_run, yes=yes, as_json=as_json)
    context.exit(code)


def _named(
    url: str, verb: str, do: Do, tokens: Sequence[Token], new: Mapping[str, Any], *, dry_run: bool, as_json: bool
) -> int:
    async def work() -> dict[int, Found]:
        async with acting.acting(url, verb) as connection:
            if dry_run:
                return await acting.whereabouts(connection, tokens)
            asked = {"ids": [str(token) for token in tokens], **new}
            act = await acts.begin(connection, whoami(), verb, asked)
            return await acting.named(connection, do, tokens, act)

    found = asyncio.run(work())
    if as_json:
        print_json({str(token): found[token.id].value for token in tokens})
    else:
        _say_named(verb, tokens, found, dry_run=dry_run)
        if new and not dry_run and len(tokens) <= MOST_TOLD:
            _say_moved(url, tokens, found, new)
    return FOUND if any(where in (Found.NOWHERE, Found.UNREADABLE) for where in found.values()) else DONE


def _say_named(verb: str, tokens: Sequence[Token], found: Mapping[int, Found], *, dry_run: bool) -> None:
    there = sum(where not in (Found.NOWHERE, Found.UNREADABLE) for where in found.values())
    done = f"{PAST[verb]}: {there} of {len(found)}."
    click.echo(f"{there} of {len(found)} would be {PAST[verb].lower()}." if dry_run else done)
    for token in tokens:
        if found[token.id] is Found.NOWHERE:
            moved = ", or rescheduled: try the id without @…" if token.due_ms is not None else ""
            note(f"{token} is not in the store: delivered or cancelled already{moved}; or it never was there.")
        elif found[token.id] is Found.UNREADABLE:
            note(f"{token} may stand in a segment that does not read back: see docs/backlog.md.")
        elif found[token.id] is Found.UNSURE:
            note(f"{token} was held for want of an answer: its queue perhaps has it, and delivers it all the same.")


def _say_moved(url: str, tokens: Sequence[Token], found: Mapping[int, Found], new: Mapping[str, Any]) -> None:
    """Their new instants, and with those their new names; what was due at once may be delivered by now."""
    waiting = [one for one in tokens if found[one.id] in (Found.WAITING, Found.SEGMENT)]

    def named(token: Token) -> Token:
        by_ms = new.get("by_ms")
        due_ms = new["at_ms"] if by_ms is None else None if token.due_ms is None else token.due_ms + by_ms
        return Token(token.id, due_ms)

    async def look() -> list[Token]:
        async with acting.acting(url, "look") as connection:
            entries, _ = await listing.named(connection, list(map(named, waiting)))
            return [entry.place.token for entry in entries]

    for token in asyncio.run(look()) if waiting else []:
        click.echo(f"{token.id} is due {iso(token.due_ms or 0)}, and is {token} from now on.")


MOST_TOLD: Final = 10
PAST = {"cancel": "Cancelled", "reschedule": "Rescheduled"}


def _filtered(
    url: str,
    verb: str,
    do: Do,
    wanted: Filter,
    new: Mapping[str, Any],
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    test = reading.header_test(wanted)

    async def counted() -> Counted:
        async with acting.acting(url, f"count for {verb}") as connection:
            return await acting.count(connection, wanted, test)

    meant = asyncio.run(counted())
    if meant.broken:
        note(f"{meant.broken} segments do not read back and may hold more: they are left alone, see docs/backlog.md.")
    about = f"{meant.messages:,} messages"
    target = f" to {iso(new['at_ms'])}" if "at_ms" in new else f" by {_shift(new['by_ms'])}" if "by_ms" in new else ""
    if dry_run or not meant.messages:
        if as_json:
            print_json({"meant": meant.messages, "done": 0, "broken_segments": meant.broken})
        else:
            click.echo(f"{about} would be {PAST[verb].lower()}{target}." if dry_run else "Nothing that waits is meant.")
        return DONE
    note(f"{about} are meant.")
    if not agreed(f"{verb.capitalize()} {about}{target}?", yes=yes):
        note("Nothing was done.")
        return DONE

    async def work() -> Counter[Found]:
        async with acting.acting(url, verb) as connection:
            act = await acts.begin(connection, whoami(), verb, {**wanted.as_dict(), **new})
            with progress() as say:
                step = f"{verb.capitalize()} messages"

                def done_so_far(done: int) -> None:
                    say(step, done, meant.messages)

                return await acting.every(connection, do, wanted, test, act=act, say=done_so_far)

    done = asyncio.run(work())
    late = done[Found.NOWHERE]
    if as_json:
        print_json({"meant": meant.messages, "done": done.total() - late, "too_late": late})
    else:
        others = f"; {late:,} were delivered or moved meanwhile" if late else ""
        click.echo(f"{PAST[verb]}: {done.total() - late:,}{target}{others}.")
    return DONE


def _shift(by_ms: int) -> str:
    return f"{'-' if by_ms < 0 else ''}{duration_text(abs(by_ms))}"
