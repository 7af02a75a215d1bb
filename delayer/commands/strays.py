"""delayer strays: messages that wait on the broker because their destination would not take them, or for a person."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import click

from delayer.broker.consumer import RelaySubscription
from delayer.broker.publisher import RelayPublisher
from delayer.commands.errors import FOUND, Misused
from delayer.commands.options import all_option, as_json, dry_run_option, go_on, request_of, yes_option
from delayer.commands.output import address, iso, note, print_json, print_table
from delayer.commands.refused import KEPT, NoQueue, consuming, portions
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import Confirmed, Outgoing, Target
from delayer.policies import policy_of
from delayer.services import envelopes, reading
from delayer.services.strays import Reader, Stray
from delayer.settings import Settings
from delayer.wiring import cascade_of

PAST: Final = {"retry": "To be tried again now", "drop": "Dropped"}
UNKNOWN: Final = Hold(HoldKind.RETURNED, "the broker found no queue for it at the end of the cascade")


class Seen(NamedTuple):
    """A stray as it is shown, and why it is one: without its body, however large, but for the beginning."""

    id: bytes
    due_ms: int
    target: Target
    route: bytes
    attempts: int
    retry_ms: int | None
    hold: Hold
    head: bytes
    size: int

    @classmethod
    def of(cls, stray: Stray) -> Seen:
        parcel = stray.parcel
        hold, attempts, retry_ms = stray.held or envelopes.Held(UNKNOWN, 0, parcel.due_ms)
        # One byte more than anybody shows, so that a cut is seen. A copy: a piece of the body would keep all of it.
        head = bytes(parcel.body[: reading.PREVIEW + 1])
        return cls(
            stray.id, parcel.due_ms, parcel.target, parcel.route, attempts, retry_ms, hold, head, len(parcel.body),
        )  # fmt: skip


class Found(NamedTuple):
    """Those that are meant of the ``looked`` that were looked at; so many stood there."""

    strays: list[Seen]
    looked: int
    depth: int


def wanted_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that select strays."""
    command = click.option("--reason", default="", metavar="TEXT", help="The reason contains this.")(command)
    return click.argument("ids", nargs=-1, metavar="[ID]...")(command)


@click.group(short_help="List, retry or drop what waits among the strays (native mode).")
def strays() -> None:
    """List, retry or drop strays: messages that stand in the strays queue on the broker, as no store holds them. Their
    destination would not take them, and they are tried again by themselves, with growing pauses; those that came too
    late for their route (late_limit) wait until somebody says so.

    Those that a daemon is trying at this moment are not seen. An ID is what `strays list` prints, the x-delayer-id.
    """


@strays.command("list")
@wanted_options
@as_json
@click.pass_context
def list_(context: click.Context, /, *, ids: Sequence[str], reason: str, as_json: bool) -> None:
    """List strays from the head of their queue, with the reason, and when each is tried again. They stay there.

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
        print_table(["id", "due", "to", "attempts", "again at", "reason"], map(_row, found.strays), right=(3,))
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
    """Have strays tried again now, by the daemon, within some ten seconds; those that were too late are delivered.

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
    """Drop strays for good. Without a store this is written down nowhere.

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
        raise click.UsageError("say which messages: ids, --reason, or --all alone")
    settings = request_of(context).settings()
    found = asyncio.run(_work(settings, _means(ids, reason)))
    meant = frozenset(one.id for one in found.strays)
    cut = _say_cut(found)
    missing = set() if cut else set(ids) - {reading.text(id) for id in meant}
    question = f"{verb.capitalize()} {len(meant):,} of {found.depth:,} strays"
    go_on(context, question, missing, some=bool(meant), named=bool(ids), cut=cut, dry_run=dry_run, yes=yes)
    done = asyncio.run(_work(settings, lambda one: one.id in meant, verb)).strays
    click.echo(f"{PAST[verb]}: {len(done):,}.")
    if cut or missing or len(done) < len(meant):
        context.exit(FOUND)


def _say_cut(found: Found) -> bool:
    """Whether there are more than were looked at; then it is said."""
    if found.looked < KEPT or found.depth <= found.looked:
        return False
    note(f"{found.depth:,} stand there; the first {found.looked:,} were looked at, and the rest was not.")
    return True


def _means(ids: Sequence[str], reason: str) -> Callable[[Seen], bool]:
    named = frozenset(ids)
    return lambda one: (not named or reading.text(one.id) in named) and reason in one.hold.text


async def _work(settings: Settings, means: Callable[[Seen], bool], verb: str = "") -> Found:
    """Those that are meant among the first KEPT; with ``verb``, what it was done to. Raises BrokerLost, Off."""
    try:
        return await _looked(settings, means, verb)
    except NoQueue:
        if settings.mode != "store":
            raise
        # Store mode makes no strays, and no queue for them: what is not taken is held.
        return Found([], 0, 0)


async def _looked(settings: Settings, means: Callable[[Seen], bool], verb: str) -> Found:
    found: list[Seen] = []
    moved: set[bytes] = set()
    async with _opened(settings) as (subscription, publisher, reader, queue, depth):
        looked = 0
        async for some in portions(subscription, min(depth, KEPT)):
            looked += len(some)
            read = [reader.stray(delivery) for delivery in some]
            # What was moved to the end of the queue comes again, and stays; a copy of what was dropped goes as well.
            seen = [(one, Seen.of(one)) for one in read if isinstance(one, Stray) and one.id not in moved]
            meant = [(one, shown) for one, shown in seen if means(shown)]
            if verb == "retry":
                meant = await _moved(meant, publisher, queue)
                moved.update(one.id for one, _ in meant)
            if verb:
                for one, _ in meant:
                    subscription.ack(one.delivery.tag, multiple=False)
            found += [shown for _, shown in meant]
    return Found(found, looked, depth)


async def _moved(some: Sequence[tuple[Stray, Seen]], publisher: RelayPublisher, queue: str) -> list[tuple[Stray, Seen]]:
    """Put these behind the others, to be tried at once: those that the queue took. What it did not stays as it was."""
    now_ms = time.time_ns() // 1_000_000
    batch = []
    for stray, shown in some:
        note_ = envelopes.Held(shown.hold, max(stray.attempts, 1), now_ms)
        properties = envelopes.enveloped(stray.parcel, stray.id, note_)
        batch.append(Outgoing(queue.encode(), stray.parcel.target.routing_key, properties, stray.parcel.body, stray.id))
    outcomes = await publisher.publish(batch) if batch else []
    return [one for one, outcome in zip(some, outcomes, strict=True) if isinstance(outcome, Confirmed)]


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[tuple[RelaySubscription, RelayPublisher, Reader, str, int]]:
    cascade = cascade_of(settings)
    if cascade.strays is None:
        raise Misused("a shared cascade has no strays queue: what its destination does not take is refused or held")
    policy = policy_of(settings, has_store=settings.store_url is not None)
    by_queue = any(not route.to and route.retry is None for route in policy.routes.values())
    async with consuming(settings, KEPT, cascade.strays) as (subscription, publisher, depth):
        reader = Reader(
            cascade.delivery.encode(),
            settings.native.due_queue.encode(),
            lambda queue: by_queue and queue not in policy.own_queues,
            lambda: publisher.max_properties,
        )
        yield subscription, publisher, reader, cascade.strays, depth


def _row(one: Seen) -> tuple[object, ...]:
    to = address(one.target.exchange, one.target.routing_key)
    again = "by hand" if one.retry_ms is None else iso(one.retry_ms)
    return reading.text(one.id), iso(one.due_ms), to, one.attempts, again, one.hold.text


def _json_of(one: Seen) -> dict[str, Any]:
    return {
        "id": reading.text(one.id),
        "due_ms": one.due_ms,
        "to_exchange": reading.text(one.target.exchange),
        "to_key": reading.text(one.target.routing_key),
        "route": reading.text(one.route),
        "attempts": one.attempts,
        "retry_ms": one.retry_ms,
        "kind": one.hold.kind,
        "reason": one.hold.text,
        "may_be_delivered": one.hold.may_be_delivered,
        "isolated": one.hold.isolated,
        "body_bytes": one.size,
        "body": reading.preview(one.head),
    }
