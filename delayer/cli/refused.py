"""delayer refused: messages that the daemon refused, in their queue on the broker. The page uses them too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import click

from delayer.amqp import reading
from delayer.amqp.address import Address
from delayer.broker.admin import Admin
from delayer.broker.connection import Relay
from delayer.broker.consumer import RelayConsumer, RelaySubscription
from delayer.broker.publisher import RelayPublisher
from delayer.cli.errors import FOUND, Off
from delayer.cli.options import all_option, as_json, dry_run_option, go_on, request_of, whoami, yes_option
from delayer.cli.output import address, note, print_json, print_table, quoted
from delayer.config import Settings
from delayer.core.hold import hold_for
from delayer.core.message import Confirmed, Delivery, Outcome, Outgoing
from delayer.intake.refusals import Doors, Refusal, again, told
from delayer.store.admin import actions, audit_log

AT_ONCE: Final = 100
"""Messages that are published together; each is acknowledged when it is confirmed."""
KEPT: Final = 10_000
"""Most messages that one look holds unacknowledged."""


class Wanted(NamedTuple):
    """A filter of refused messages. Empty: all."""

    ids: frozenset[str]
    reason: str
    exchange: str | None

    def means(self, refusal: Refusal) -> bool:
        named = not self.ids or refusal.id in self.ids or refusal.message_id in self.ids
        from_there = self.exchange is None or refusal.exchange == self.exchange.encode("utf-8", "surrogateescape")
        return named and from_there and self.reason in refusal.reason

    def as_dict(self) -> dict[str, Any]:
        said: dict[str, Any] = {"ids": sorted(self.ids)} if self.ids else {}
        said |= {"reason": self.reason} if self.reason else {}
        return said | ({"exchange": self.exchange} if self.exchange is not None else {})


ANY: Final = Wanted(frozenset(), "", None)


class Seen(NamedTuple):
    """A refused message as it is shown, with the beginning of its body."""

    refusal: Refusal
    properties: bytes
    head: bytes
    size: int

    @classmethod
    def of(cls, delivery: Delivery, refusal: Refusal) -> Seen:
        # One byte more than anybody shows, so that a cut is seen.
        return cls(refusal, delivery.properties, delivery.body[: reading.PREVIEW + 1], len(delivery.body))


class Done(NamedTuple):
    """How many messages were changed. ``left``: id and reason of those that stay. ``cut``: the look ended early, as
    KEPT messages stay before the rest."""

    messages: int
    left: Sequence[tuple[str, str]]
    cut: bool = False


def doors_of(settings: Settings) -> Doors:
    """The exchanges and the queue that messages may have come in by."""
    return Doors(settings.intake.queue.encode(), frozenset(route.from_.encode() for route in settings.routes))


Do = Callable[[RelayPublisher, Sequence[Delivery], Doors], Awaitable[list[str]]]
"""An action on a portion. Its result for each message: "" to acknowledge it, or the reason why it stays."""


async def _taken(_publisher: RelayPublisher, some: Sequence[Delivery], _doors: Doors) -> list[str]:
    return [""] * len(some)


async def _published(publisher: RelayPublisher, some: Sequence[Delivery], doors: Doors) -> list[str]:
    prepared = [again(delivery, doors) for delivery in some]
    outgoing = [one for one in prepared if isinstance(one, Outgoing)]
    outcomes = iter(await publisher.publish(outgoing))
    return [one if isinstance(one, str) else _why(next(outcomes)) for one in prepared]


DEEDS: Final[Mapping[str, Do]] = {"retry": _published, "drop": _taken}


def _why(outcome: Outcome) -> str:
    return "" if isinstance(outcome, Confirmed) else hold_for(outcome).text


class NoQueue(Off):
    """The queue does not exist."""


@asynccontextmanager
async def consuming(
    settings: Settings, prefetch: int = KEPT, queue: str = ""
) -> AsyncIterator[tuple[RelaySubscription, RelayPublisher, int]]:
    """A subscription of the refused queue or of ``queue``, a publisher, and how many messages were ready."""
    queue = queue or settings.refused.queue
    async with await Admin.connect(settings.broker_url, name="delayer refused") as admin:
        depth = (await admin.depths([queue]))[queue]
    if depth is None:
        raise NoQueue(f"queue {quoted(queue)} does not exist. Next: `delayer topology apply`.")
    # Two connections: a paused consumer must not delay the confirms.
    relays = [Relay(Address.parse(settings.broker_url), f"delayer refused {n}", heartbeat=20.0) for n in (1, 2)]
    for relay in relays:
        relay.start()
    publisher = RelayPublisher(relays[1])
    try:
        subscription = await RelayConsumer(relays[0]).subscribe(queue, prefetch)
        try:
            yield subscription, publisher, depth
        finally:
            await subscription.close()  # returns the rest to where it stood
    finally:
        await publisher.close()
        for relay in relays:
            await relay.close()


async def portions(subscription: RelaySubscription, count: int) -> AsyncIterator[list[Delivery]]:
    """The next ``count`` messages, without those that arrive later (a retried message may be refused again)."""
    empty = 0
    while count > 0 and empty < 3:  # seconds; after that, another consumer has the rest
        some = await subscription.next_batch(min(count, AT_ONCE), 0.02)
        empty = 0 if some else empty + 1
        count -= len(some)
        if some:
            yield some


async def look(settings: Settings, wanted: Wanted, limit: int) -> tuple[list[Seen], int]:
    """The messages that match among the first ``limit``, and the depth. Raises BrokerLost, BrokerRefused, Off."""
    found: list[Seen] = []
    doors = doors_of(settings)
    async with consuming(settings, limit) as (subscription, _, depth):
        async for some in portions(subscription, min(depth, limit)):
            found += [Seen.of(one, refusal) for one in some if wanted.means(refusal := told(one, doors))]
    return found, depth


Unwritten = Callable[[int], None]
"""Called with the messages of each portion if there is no store with an audit log."""


async def do(
    settings: Settings, verb: str, wanted: Wanted, who: str, depth: int = KEPT, *, unwritten: Unwritten | None = None
) -> Done:
    """Retry or drop the messages that match among the first ``depth``. ``who``: the operator. Raises as
    :func:`look`, and StoreLost."""
    work, doors = DEEDS[verb], doors_of(settings)
    done = 0
    left: list[tuple[str, str]] = []
    async with (
        _trail(settings, f"refused {verb}", wanted, who, unwritten) as add,
        consuming(settings) as (queue, publisher, ready),
    ):
        kept = 0
        async for some in portions(queue, min(depth, ready)):
            meant = [one for one in some if wanted.means(told(one, doors))]
            whys = await work(publisher, meant, doors) if meant else []
            taken = [one for one, why in zip(meant, whys, strict=True) if not why]
            # In the audit log before it leaves the queue; a lost acknowledgement repeats a message.
            await add(len(taken))
            for one in taken:
                queue.ack(one.tag, multiple=False)
            left += [(told(one, doors).id, why) for one, why in zip(meant, whys, strict=True) if why]
            done += len(taken)
            kept += len(some) - len(taken)
            if kept >= KEPT:
                return Done(done, left, cut=True)
    return Done(done, left)


@asynccontextmanager
async def _trail(
    settings: Settings, verb: str, wanted: Wanted, who: str, unwritten: Unwritten | None
) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """An entry of the audit log, if there is a store."""
    if settings.store_url is None:

        async def told_of(messages: int) -> None:
            if messages and unwritten is not None:
                unwritten(messages)

        if unwritten is None:
            note("There is no store, and so no audit log of this.")
        yield told_of
        return
    async with actions.acting(settings.store_url, verb) as connection:
        act = await audit_log.begin(connection, who, verb, wanted.as_dict())

        async def add(messages: int) -> None:
            await audit_log.add(connection, act, messages)

        yield add


PAST = {"retry": "Published again", "drop": "Dropped"}


def wanted_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that select refused messages."""
    command = click.option("--from", "exchange", metavar="EXCHANGE", help="The exchange that they came through.")(
        command
    )
    command = click.option("--reason", default="", metavar="TEXT", help="The reason contains this.")(command)
    return click.argument("ids", nargs=-1, metavar="[ID]...")(command)


@click.group(short_help="List, retry or drop refused messages.")
def refused() -> None:
    """List, retry or drop refused messages. They could not be delayed, and are in the queue refused.queue.

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
    """List refused messages from the head of their queue, with the reason. They stay in the queue.

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
        click.echo("No messages are refused." if not depth else "No refused messages match.")
    if depth > limit:
        note(f"{quoted(settings.refused.queue)} has {depth:,} messages; the first {limit:,} were looked at (--limit).")


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
    """Publish refused messages again to the exchange that they came in by, without the headers of the refusal.

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
        raise click.UsageError("expected the messages: ids, --reason, --from, or --all alone")
    settings = request_of(context).settings()
    found, depth = asyncio.run(look(settings, wanted, KEPT))
    about = f"{len(found):,} of {depth:,} refused messages"
    seen_all = depth <= KEPT
    missing = set(ids).difference(*((one.refusal.id, one.refusal.message_id) for one in found)) if seen_all else set()
    question = f"{verb.capitalize()} {about}"
    if not found and not seen_all:
        note(f"The queue has {depth:,} messages; only the first {KEPT:,} were looked at.")
    cut = not seen_all
    go_on(context, question, missing, some=bool(found), named=bool(ids), cut=cut, dry_run=dry_run, yes=yes)
    done = asyncio.run(do(settings, verb, wanted, whoami(), depth))
    click.echo(f"{PAST[verb]}: {done.messages:,}.")
    if done.cut:
        note(f"The look ended at {KEPT:,} messages that stay; those behind them were not looked at.")
    for name, why in done.left:
        note(f"{name or 'a message without an id'} stays refused: {why}.")
    if done.left or done.cut or missing:
        context.exit(FOUND)
