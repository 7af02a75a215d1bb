"""delayer refused: messages that could not be delayed, in their queue on the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import click

from delayer.commands.acting import all_option, dry_run_option, go_on, whoami, yes_option
from delayer.commands.common import FOUND, note, print_json, print_table, quoted, request_of
from delayer.commands.filters import address
from delayer.commands.looking import as_json
from delayer.commands.refusing import ANY, KEPT, Seen, Wanted, do, look
from delayer.services import reading

PAST = {"retry": "Published again", "drop": "Dropped"}


def wanted_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a Wanted."""
    command = click.option("--from", "exchange", metavar="EXCHANGE", help="The exchange that they came through.")(
        command
    )
    command = click.option("--reason", default="", metavar="TEXT", help="The reason contains this.")(command)
    return click.argument("ids", nargs=-1, metavar="[ID]...")(command)


@click.group(short_help="List, retry or drop what could not be delayed.")
def refused() -> None:
    """List, retry or drop refused messages: what could not be delayed, in the queue refused.queue.

    An ID is the x-delayer-id that `refused list` prints, or the message's own message_id.
    """


@refused.command("list")
@wanted_options
@click.option("--limit", type=click.IntRange(1, KEPT), default=50, show_default=True, help="Messages to look at.")
@as_json
@click.pass_context
def list_(
    context: click.Context, /, *, ids: Sequence[str], reason: str, exchange: str | None, limit: int, as_json: bool
) -> None:
    """List refused messages from the head of their queue, with the reason. They stay where they are.

    \b
    Examples:
      delayer refused list
      delayer refused list --reason x-delay --from orders.in
    """
    settings = request_of(context).settings()
    wanted = Wanted(frozenset(ids), reason, exchange)
    found, depth = asyncio.run(look(settings, wanted, limit))
    if as_json:
        print_json({"depth": depth, "messages": [_json_of(one) for one in found]})
        return
    if found:
        print_table(["id", "came in at", "bytes", "message_id", "reason"], map(_row, found), right=(2,))
    else:
        click.echo("Nothing is refused." if not depth else "Nothing that was looked at is meant.")
    if depth > limit:
        note(f"{depth:,} stand in {quoted(settings.refused.queue)}; the first {limit:,} were looked at (--limit).")


def _row(one: Seen) -> tuple[object, ...]:
    refusal = one.refusal
    where = "?" if refusal.exchange is None else address(refusal.exchange, refusal.routing_key or b"")
    return refusal.id, where, one.size, refusal.message_id, refusal.reason


def _json_of(one: Seen) -> dict[str, Any]:
    refusal = one.refusal
    said = reading.read(one.properties)
    return {
        "id": refusal.id,
        "reason": refusal.reason,
        "exchange": None if refusal.exchange is None else reading.text(refusal.exchange),
        "routing_key": None if refusal.routing_key is None else reading.text(refusal.routing_key),
        "message_id": refusal.message_id or None,
        "properties": said.properties,
        "headers": [header._asdict() for header in said.headers],
        "body_bytes": one.size,
        "body": reading.preview(one.head),
    }


@refused.command()
@wanted_options
@all_option
@dry_run_option
@yes_option
@click.pass_context
def retry(context: click.Context, /, **given: Any) -> None:
    """Publish refused messages once more to where they came in, without the headers that the refusal added.

    Mend the cause first: what still cannot be delayed is refused again. A relative delay counts from now. Each is
    acknowledged in the refused queue only when the broker has confirmed it elsewhere.

    \b
    Examples:
      delayer refused retry 5f0c9a4be1d24a7c8f3e6b1d2a907c35
      delayer refused retry --from orders.in --dry-run
      delayer refused retry --all --yes
    """
    _act(context, "retry", **given)


@refused.command()
@wanted_options
@all_option
@dry_run_option
@yes_option
@click.pass_context
def drop(context: click.Context, /, **given: Any) -> None:
    """Drop refused messages for good.

    \b
    Examples:
      delayer refused drop 5f0c9a4be1d24a7c8f3e6b1d2a907c35
      delayer refused drop --reason 'too long' --yes
    """
    _act(context, "drop", **given)


def _act(
    context: click.Context,
    verb: str,
    *,
    ids: Sequence[str],
    reason: str,
    exchange: str | None,
    everything: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    wanted = Wanted(frozenset(ids), reason, exchange)
    if everything == (wanted != ANY):
        raise click.UsageError("say which messages: ids, --reason, --from, or --all alone")
    settings = request_of(context).settings()
    found, depth = asyncio.run(look(settings, wanted, KEPT))
    about = f"{len(found):,} of {depth:,} refused messages"
    seen_all = depth <= KEPT
    missing = set(ids).difference(*((one.refusal.id, one.refusal.message_id) for one in found)) if seen_all else set()
    question = f"{verb.capitalize()} {about}"
    if not found and not seen_all:
        note(f"{depth:,} stand there; the first {KEPT:,} were looked at, and the rest was not.")
    cut = not seen_all
    go_on(context, question, missing, some=bool(found), named=bool(ids), cut=cut, dry_run=dry_run, yes=yes)
    done = asyncio.run(do(settings, verb, wanted, whoami(), depth))
    click.echo(f"{PAST[verb]}: {done.messages:,}.")
    if done.cut:
        note(f"{KEPT:,} messages that stay stand before the rest, which was not looked at.")
    for name, why in done.left:
        note(f"{name or 'one without an id'} stays refused: {why}.")
    if done.left or done.cut or missing:
        context.exit(FOUND)
