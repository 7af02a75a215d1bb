"""delayer refused, strays: messages that wait for an operator in a queue on the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Final

import click

from delayer.amqp import reading
from delayer.amqp.reading import address, iso
from delayer.broker.errors import QueueMissing
from delayer.broker.pipelined_admin import pipelined_admin
from delayer.cli.errors import FOUND
from delayer.cli.options import as_json, change_options, go_on, request_of, whoami
from delayer.cli.output import note, print_json, print_table, quoted
from delayer.config.model import Settings
from delayer.config.topology import cascade_of, native_of
from delayer.intake.refusals import EntryPoints
from delayer.intake.set_aside import (
    ANY,
    KEPT,
    RefusedMessage,
    Result,
    Selection,
    SetAside,
    Stray,
    refused_queue,
    strays_queue,
)
from delayer.store.admin import actions, audit_log

PAST: Final[Mapping[str, Mapping[str, str]]] = {
    "refused": {"retry": "Published again", "drop": "Dropped"},
    "strays": {"retry": "On their way again", "drop": "Dropped"},
}
NOUN: Final = {"refused": "refused messages", "strays": "strays"}


def refused_of(settings: Settings) -> SetAside[RefusedMessage]:
    entries = EntryPoints.of(settings.intake.queue, (route.from_ for route in settings.routes))
    return refused_queue(settings.broker_url, settings.refused.queue, entries)


def strays_of(settings: Settings) -> SetAside[Stray]:
    return strays_queue(settings.broker_url, cascade_of(settings), settings.native.due_queue.encode())


ids_argument = click.argument("ids", nargs=-1, metavar="[ID]...")
reason_option = click.option("--reason", default="", metavar="TEXT", help="The reason contains this.")
from_option = click.option("--from", "exchange", metavar="EXCHANGE", help="The exchange that they came through.")


@click.group(short_help="List, retry or drop refused messages.")
def refused() -> None:
    """List, retry or drop refused messages. They could not be delayed, and are in the queue refused.queue.

    An ID is the x-delayer-id that `refused list` prints, or the message's own message_id.
    """


@refused.command("list")
@ids_argument
@reason_option
@from_option
@click.option("--limit", type=click.IntRange(1, KEPT), default=50, show_default=True, help="Messages to look at.")
@as_json
@click.pass_context
def list_refused(
    context: click.Context, /, *, ids: Sequence[str], reason: str, exchange: str | None, limit: int, as_json: bool
) -> None:
    """List refused messages from the head of their queue, with the reason. They stay in the queue.

    \b
    Examples:
      delayer refused list
      delayer refused list --reason x-delay --from orders.in
    """
    settings = request_of(context).settings()
    seen = asyncio.run(refused_of(settings).look(Selection(frozenset(ids), reason, exchange), limit))
    if as_json:
        print_json({"depth": seen.depth, "messages": [_json_of_refused(one) for one in seen.found]})
        return
    if seen.found:
        print_table(["id", "came in at", "bytes", "message_id", "reason"], map(_refused_row, seen.found), right=(2,))
    else:
        click.echo("No messages are refused." if not seen.depth else "No refused messages match.")
    if seen.depth > limit:
        queue = quoted(settings.refused.queue)
        note(f"{queue} has {seen.depth:,} messages; the first {limit:,} were looked at (--limit).")


def _refused_row(one: RefusedMessage) -> tuple[object, ...]:
    refusal = one.refusal
    where = "?" if refusal.exchange is None else address(refusal.exchange, refusal.routing_key or b"")
    return refusal.id, where, one.size, refusal.message_id, refusal.reason


def _json_of_refused(one: RefusedMessage) -> dict[str, Any]:
    refusal, read = one.refusal, reading.read(one.properties)
    return {
        "id": refusal.id,
        "reason": refusal.reason,
        "exchange": None if refusal.exchange is None else reading.text(refusal.exchange),
        "routing_key": None if refusal.routing_key is None else reading.text(refusal.routing_key),
        "message_id": refusal.message_id or None,
        "properties": read.properties,
        "headers": [header._asdict() for header in read.headers],
        "body_bytes": one.size,
        "body": reading.preview(one.head),
    }


@refused.command("retry")
@ids_argument
@reason_option
@from_option
@change_options
def retry_refused(context: click.Context, /, **given: Any) -> None:
    """Publish refused messages again to the exchange that they came in by, without the headers of the refusal.

    Correct the cause first, because the daemon refuses a message again that it still cannot delay. A relative delay
    counts from now. A message leaves the refused queue when the broker has confirmed it elsewhere.

    \b
    Examples:
      delayer refused retry 5f0c9a4be1d24a7c8f3e6b1d2a907c35
      delayer refused retry --from orders.in --dry-run
      delayer refused retry --all --yes
    """
    _change(context, "refused", "retry", **given)


@refused.command("drop")
@ids_argument
@reason_option
@from_option
@change_options
def drop_refused(context: click.Context, /, **given: Any) -> None:
    """Drop refused messages for good.

    \b
    Examples:
      delayer refused drop 5f0c9a4be1d24a7c8f3e6b1d2a907c35
      delayer refused drop --reason 'too long' --yes
    """
    _change(context, "refused", "drop", **given)


@click.group(short_help="List, retry or drop strays (native mode).")
def strays() -> None:
    """List, retry or drop strays: messages in the strays queue on the broker, where no store holds them. Their
    destination did not take them ten times, or they came too late for their route (late_limit).

    An ID is the x-delayer-id, which `strays list` prints.
    """


@strays.command("list")
@ids_argument
@reason_option
@as_json
@click.pass_context
def list_strays(context: click.Context, /, *, ids: Sequence[str], reason: str, as_json: bool) -> None:
    """List strays from the head of their queue, with the reason. They stay in the queue.

    \b
    Examples:
      delayer strays list
      delayer strays list --reason late:
    """
    settings = request_of(context).settings()
    wanted = Selection(frozenset(ids), reason)
    seen = asyncio.run(_unless_missing(settings, strays_of(settings).look(wanted)))
    if as_json:
        print_json({"depth": seen.depth, "messages": [_json_of_stray(one) for one in seen.found]})
        return
    if seen.found:
        print_table(["id", "due", "to", "attempts", "reason"], map(_stray_row, seen.found), right=(3,))
    else:
        click.echo("No strays match." if wanted != ANY else "There are no strays.")
    _say_cut("strays", seen)


def _stray_row(one: Stray) -> tuple[object, ...]:
    due = "?" if one.due_ms is None else iso(one.due_ms)
    return one.id, due, address(one.target.exchange, one.target.routing_key), one.attempts, one.hold.text


def _json_of_stray(one: Stray) -> dict[str, Any]:
    return {
        "id": one.id,
        "due_ms": one.due_ms,
        "to_exchange": reading.text(one.target.exchange),
        "to_key": reading.text(one.target.routing_key),
        "route": reading.text(one.route),
        "attempts": one.attempts,
        "kind": one.hold.kind,
        "reason": one.hold.text,
        "may_be_delivered": one.hold.may_be_delivered,
        "isolated": one.hold.isolated,
        "body_bytes": one.size,
        "body": reading.preview(one.head),
    }


@strays.command("retry")
@ids_argument
@reason_option
@change_options
def retry_strays(context: click.Context, /, **given: Any) -> None:
    """Retry strays: the daemon tries them now, late ones too, and up to ten times more.

    \b
    Examples:
      delayer strays retry 5f0c9a4be1d24a7c8f3e6b1d2a907c35
      delayer strays retry --reason late: --dry-run
    """
    _change(context, "strays", "retry", **given)


@strays.command("drop")
@ids_argument
@reason_option
@change_options
def drop_strays(context: click.Context, /, **given: Any) -> None:
    """Drop strays for good. The audit log does not show this.

    \b
    Examples:
      delayer strays drop 5f0c9a4be1d24a7c8f3e6b1d2a907c35
      delayer strays drop --reason late: --yes
    """
    _change(context, "strays", "drop", **given)


def _change(
    context: click.Context,
    group: str,
    verb: str,
    *,
    ids: Sequence[str],
    reason: str,
    exchange: str | None = None,
    everything: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Look at the messages, ask, then retry or drop exactly these."""
    wanted = Selection(frozenset(ids), reason, exchange)
    if everything == (wanted != ANY):
        options = "--reason, --from," if group == "refused" else "--reason,"
        raise click.UsageError(f"expected the messages: ids, {options} or --all alone")
    settings = request_of(context).settings()
    queue: SetAside[Any] = refused_of(settings) if group == "refused" else strays_of(settings)
    seen = asyncio.run(_unless_missing(settings, queue.look(wanted)))
    cut = _say_cut(group, seen)
    missing = set() if cut else set(ids).difference(*(one.names for one in seen.found))
    question = f"{verb.capitalize()} {len(seen.found):,} of {seen.depth:,} {NOUN[group]}"
    go_on(context, question, missing, some=bool(seen.found), named=bool(ids), cut=cut, dry_run=dry_run, yes=yes)
    done = asyncio.run(_recorded(settings, queue, f"{group} {verb}", wanted, seen.looked))
    click.echo(f"{PAST[group][verb]}: {len(done.found):,}.")
    for one, why in done.left:
        state = "refused" if group == "refused" else "a stray"
        note(f"{one.names[0] or 'a message without an id'} stays {state}: {why}.")
    if cut or missing or len(done.found) < len(seen.found):
        context.exit(FOUND)


def _say_cut(group: str, seen: Result[Any]) -> bool:
    """Whether the look ended before the last message. If so, report it."""
    if seen.cut:
        note(f"The queue has {seen.depth:,} {NOUN[group]}; only the first {seen.looked:,} were looked at.")
    return seen.cut


async def _unless_missing(settings: Settings, look: Awaitable[Result[Any]]) -> Result[Any]:
    """In store mode there may be no strays queue: the store holds such messages."""
    try:
        return await look
    except QueueMissing:
        if settings.mode != "store":
            raise
        return Result(0)


async def _recorded(
    settings: Settings, queue: SetAside[Any], command: str, wanted: Selection, limit: int
) -> Result[Any]:
    """Make the change. With a store, a change of refused messages gets an entry in the audit log."""
    group, _, verb = command.partition(" ")
    if group == "refused" and settings.store_url is not None:
        async with actions.recorded(settings.store_url, whoami(), command, wanted.as_dict()) as (connection, act):
            return await queue.change(verb, wanted, lambda messages: audit_log.add(connection, act, messages), limit)
    if group == "refused":
        note("There is no store, and so no audit log of this.")
    elif verb == "retry":
        async with pipelined_admin(settings.broker_url, "delayer strays") as broker:
            await broker.declare(native_of(settings))
    return await queue.change(verb, wanted, _not_recorded, limit)


async def _not_recorded(_messages: int) -> None:
    return
