"""delayer strays: messages in the strays queue that wait for an operator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import click

from delayer.amqp import reading
from delayer.amqp.envelopes import Envelope, Held, enveloped, stray
from delayer.broker.admin import Admin
from delayer.broker.publisher import RelayPublisher
from delayer.cli.errors import FOUND
from delayer.cli.options import all_option, as_json, dry_run_option, go_on, request_of, yes_option
from delayer.cli.output import address, iso, note, print_json, print_table
from delayer.cli.refused import KEPT, NoQueue, consuming, portions
from delayer.config import Settings
from delayer.config.topology import cascade_of, native_of
from delayer.core.cascade import routing_key
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import Confirmed, Delivery, Outgoing, Target

PAST: Final = {"retry": "On their way again", "drop": "Dropped"}
UNKNOWN: Final = Hold(HoldKind.RETURNED, "the broker found no queue for it at the end of the cascade")


class Seen(NamedTuple):
    """A stray as it is shown, with the beginning of its body. ``due_ms`` is None if its envelope cannot be read."""

    id: bytes
    due_ms: int | None
    target: Target
    route: bytes
    attempts: int
    hold: Hold
    head: bytes
    size: int

    @classmethod
    def of(cls, delivery: Delivery, read: Envelope | str) -> Seen:
        # One byte more than anybody shows, so that a cut is seen. A copy: a piece of the body would keep all of it.
        head, size = bytes(delivery.body[: reading.PREVIEW + 1]), len(delivery.body)
        if isinstance(read, str):
            return cls(b"", None, Target(b"", b""), b"", 0, Hold(HoldKind.UNFIT, read), head, size)
        parcel, held = read.parcel, read.held or Held(UNKNOWN, 0, None)
        return cls(read.id, parcel.due_ms, parcel.target, parcel.route, held.attempts, held.hold, head, size)


class Found(NamedTuple):
    """The strays that match, how many were looked at, and how many are in the queue."""

    strays: list[Seen]
    looked: int
    depth: int


def wanted_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that select strays."""
    command = click.option("--reason", default="", metavar="TEXT", help="The reason contains this.")(command)
    return click.argument("ids", nargs=-1, metavar="[ID]...")(command)


@click.group(short_help="List, retry or drop strays (native mode).")
def strays() -> None:
    """List, retry or drop strays: messages in the strays queue on the broker, where no store holds them. Their
    destination did not take them ten times, or they came too late for their route (late_limit).

    An ID is the x-delayer-id, which `strays list` prints.
    """


@strays.command("list")
@wanted_options
@as_json
@click.pass_context
def list_(context: click.Context, /, *, ids: Sequence[str], reason: str, as_json: bool) -> None:
    """List strays from the head of their queue, with the reason. They stay in the queue.

    \b
    Examples:
      delayer strays list
      delayer strays list --reason late:
    """
    found = asyncio.run(_work(request_of(context).settings(), _means(ids, reason)))
    if as_json:
        print_json({"depth": found.depth, "messages": [_json_of(one) for one in found.strays]})
        return
    if found.strays:
        print_table(["id", "due", "to", "attempts", "reason"], map(_row, found.strays), right=(3,))
    else:
        click.echo("No strays match." if ids or reason else "There are no strays.")
    _say_cut(found)


@strays.command()
@wanted_options
@all_option
@dry_run_option
@yes_option
@click.pass_context
def retry(context: click.Context, /, **given: Any) -> None:
    """Put strays back on their way: the daemon tries them now, late ones too, and ten times more if need be.

    \b
    Examples:
      delayer strays retry 5f0c9a4be1d24a7c8f3e6b1d2a907c35
      delayer strays retry --reason late: --dry-run
    """
    _act(context, "retry", **given)


@strays.command()
@wanted_options
@all_option
@dry_run_option
@yes_option
@click.pass_context
def drop(context: click.Context, /, **given: Any) -> None:
    """Drop strays for good. The audit log does not show this.

    \b
    Examples:
      delayer strays drop 5f0c9a4be1d24a7c8f3e6b1d2a907c35
      delayer strays drop --reason late: --yes
    """
    _act(context, "drop", **given)


def _act(
    context: click.Context, verb: str, *, ids: Sequence[str], reason: str, everything: bool, dry_run: bool, yes: bool
) -> None:
    if bool(ids) + bool(reason) + everything != 1:
        raise click.UsageError("expected the messages: ids, --reason, or --all alone")
    settings = request_of(context).settings()
    wanted = _means(ids, reason)
    found = asyncio.run(_work(settings, wanted))
    known = frozenset(one.id for one in found.strays)
    cut = _say_cut(found)
    missing = set() if cut else set(ids) - {reading.text(id) for id in known}
    question = f"{verb.capitalize()} {len(found.strays):,} of {found.depth:,} strays"
    go_on(context, question, missing, some=bool(known), named=bool(ids), cut=cut, dry_run=dry_run, yes=yes)
    # All unreadable strays have the same empty id: the reason tells them apart.
    done = asyncio.run(_work(settings, lambda one: one.id in known and wanted(one), verb)).strays
    click.echo(f"{PAST[verb]}: {len(done):,}.")
    if cut or missing or len(done) < len(found.strays):
        context.exit(FOUND)


def _say_cut(found: Found) -> bool:
    """Whether the look ended before the last stray. If so, report it."""
    if found.looked < KEPT or found.depth <= found.looked:
        return False
    note(f"The queue has {found.depth:,} strays; only the first {found.looked:,} were looked at.")
    return True


def _means(ids: Sequence[str], reason: str) -> Callable[[Seen], bool]:
    named = frozenset(ids)
    return lambda one: (not named or reading.text(one.id) in named) and reason in one.hold.text


async def _work(settings: Settings, means: Callable[[Seen], bool], verb: str = "") -> Found:
    """The strays that match among the first KEPT; with ``verb``, those that it changed. Raises BrokerLost, Off."""
    try:
        return await _looked(settings, means, verb)
    except NoQueue:
        if settings.mode != "store":
            raise
        # Store mode has no strays queue: it holds such messages in the store.
        return Found([], 0, 0)


async def _looked(settings: Settings, means: Callable[[Seen], bool], verb: str) -> Found:
    found: list[Seen] = []
    looked = 0
    cascade, due_queue = cascade_of(settings), settings.native.due_queue.encode()
    if verb == "retry":
        async with await Admin.connect(settings.broker_url, name="delayer strays") as admin:
            await admin.declare(native_of(settings))
    async with consuming(settings, KEPT, cascade.strays) as (subscription, publisher, depth):
        async for some in portions(subscription, min(depth, KEPT)):
            looked += len(some)
            most = publisher.max_properties
            read = [(one, stray(one, cascade.delivery.encode(), due_queue, most)) for one in some]
            meant = [(one, seen) for one in read if means(seen := Seen.of(*one))]
            if verb == "retry":
                taken = await _taken([one for (_, one), _ in meant], publisher, cascade.delivery, due_queue)
                meant = [one for one, went in zip(meant, taken, strict=True) if went]
            if verb:
                for (delivery, _), _ in meant:
                    subscription.ack(delivery.tag, multiple=False)
            found += [seen for _, seen in meant]
    return Found(found, looked, depth)


async def _taken(
    some: Sequence[Envelope | str], publisher: RelayPublisher, exchange: str, due_queue: bytes
) -> list[bool]:
    """Publish strays to the due queue, to be tried at once. For each, whether it was confirmed."""
    now_ms, key = time.time_ns() // 1_000_000, routing_key(0, due_queue)
    batch = []
    for one in some:
        if isinstance(one, Envelope):
            note_ = one.held and Held(one.held.hold, 0, now_ms)
            properties = enveloped(one.parcel, one.id, note_)
            batch.append(Outgoing(exchange.encode(), key, properties, one.parcel.body, one.id))
    outcomes = iter(await publisher.publish(batch) if batch else [])
    return [isinstance(one, Envelope) and isinstance(next(outcomes), Confirmed) for one in some]


def _row(one: Seen) -> tuple[object, ...]:
    to = address(one.target.exchange, one.target.routing_key)
    due = "?" if one.due_ms is None else iso(one.due_ms)
    return reading.text(one.id), due, to, one.attempts, one.hold.text


def _json_of(one: Seen) -> dict[str, Any]:
    return {
        "id": reading.text(one.id),
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
