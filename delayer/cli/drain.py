"""delayer drain: after a mode switch, move the backlog from the store into the cascade or back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import click
from asyncpg import Connection

from delayer.amqp.errors import BrokerLost
from delayer.amqp.values import Confirmed, Outgoing
from delayer.broker.addresses import addresses_of
from delayer.broker.admin import Admin
from delayer.broker.cascade_depths import CascadeDepths, cascade_depths
from delayer.broker.connection import ReconnectingConnection
from delayer.broker.errors import BrokerRefused
from delayer.broker.pipelined_admin import pipelined_admin
from delayer.broker.publisher import AmqpPublisher
from delayer.cli.errors import ExitCode, Misused
from delayer.cli.importing import import_failures
from delayer.cli.options import as_json, confirm, dry_run_option, request_of, whoami, yes_option
from delayer.cli.output import print_json, print_table, progress
from delayer.config.model import Settings
from delayer.config.topology import cascade_of, native_of
from delayer.core.cascade import MAX_SECONDS
from delayer.core.delay_headers import whole_seconds_until
from delayer.core.filters import Filter
from delayer.core.importing import ImportSelection
from delayer.core.message import Due
from delayer.core.readable import Say, counted
from delayer.core.units import MINUTE_MS
from delayer.format.envelope import Endpoints, into_cascade
from delayer.format.headers import ROOM
from delayer.imports import state_machine
from delayer.imports.brokers import Destinations
from delayer.imports.cascade import CascadeLevels
from delayer.store import waiting
from delayer.store.admin import actions, audit_log, draining, setup
from delayer.store.admin.importing import ImportStore
from delayer.store.admin.stats import INBOX_SECONDS
from delayer.store.session import read_connection

NAME: Final = "delayer drain"
PORTION: Final = 500
"""Rows per transaction."""
AGAIN: Final = "run the same command again"


class LeftBehind(NamedTuple):
    """Messages that stay, and why. ``messages``: None if unknown. ``next_step``: how they leave, or ``by_itself``."""

    messages: int | None
    where: str
    why: str
    next_step: str
    by_itself: bool = False


DrainPlan = tuple[int, list[LeftBehind]]
"""The number of messages that a drain would move, and those that it would leave."""


def store_backlog(now: draining.DrainBacklog, *, keys_too: bool) -> DrainPlan:
    """Count what a drain into the cascade would move, and list what it would leave."""
    found = [
        LeftBehind(
            now.keyed, "store", "they belong to schedules, which need the store",
            "pause or remove the schedules: their waiting messages go with them",
        )
        if keys_too
        else LeftBehind(
            now.keyed, "store", "they have a key, and the cascade knows no keys",
            "none: the daemon releases them when due; or --keys-too, and then they cannot be replaced or cancelled",
            by_itself=True,
        ),
        LeftBehind(now.soon, "store", "they are due within a minute", "none: the daemon releases them", by_itself=True),
        LeftBehind(now.inbox, "SQL inbox", "they came in meanwhile", "none: the daemon moves them", by_itself=True)
        if now.inbox is not None
        else LeftBehind(
            None, "SQL inbox", f"it cannot be counted within {INBOX_SECONDS} s",
            'docs/operations.md, "An SQL inbox that is not read"',
        ),
        LeftBehind(now.packed, "segments", "they are compacted", f"delayer restore, and {AGAIN}"),
        LeftBehind(now.broken, "segments", "their segments are unreadable", "docs/backlog.md"),
        LeftBehind(now.held, "held", "their destination did not take them", "delayer held list; retry or drop"),
    ]  # fmt: skip
    return max(0, now.rows - now.soon - now.keyed), [one for one in found if one.messages != 0]


LOWEST: Final = 5
"""The lowest level that a drain empties: 32 seconds. Messages below leave the cascade before the drain ends."""


def cascade_backlog(seen: CascadeDepths, due_queue: str, delayed: Mapping[str, int | None]) -> DrainPlan:
    """Count what a drain into the store would move, and list what it would leave. ``delayed``: by queue, messages that
    the broker itself delays or forwards, which a drain cannot read; None if their number is unknown."""
    below = sum(one.depth or 0 for one in seen.levels if one.level < LOWEST)
    above = sum(one.depth or 0 for one in seen.levels if one.level >= LOWEST)
    strays = sum(depth or 0 for name, depth in seen.queues.items() if name != due_queue)
    found = [
        LeftBehind(
            below, "cascade", "they are due within a minute", "none: they come out by themselves", by_itself=True
        ),
        LeftBehind(
            seen.queues[due_queue], "due queue", "they are due", "none: the daemon delivers them", by_itself=True
        ),
        LeftBehind(strays, "strays", "their destination did not take them", "delayer strays list; retry or drop"),
    ]
    why, step = "the broker itself delays or forwards them", "none: they come out when they are due"
    found += [LeftBehind(count, f"queue {name}", why, step, by_itself=True) for name, count in delayed.items()]
    left = [one for one in found if one.messages]
    if None in delayed.values():
        why = "the broker may delay or forward some itself: broker.management_url is not set, or gives no count"
        left.append(LeftBehind(None, "cascade", why, step, by_itself=True))
    return above, left


def row_into_cascade(due: Due, names: Endpoints, now_ms: int) -> Outgoing:
    """Build the publish that moves a row into the cascade, with its id. A delay beyond the cascade's maximum passes the
    due queue and re-enters the cascade."""
    seconds = min(whole_seconds_until(due.due_ms, now_ms), MAX_SECONDS)
    rest_ms = max(due.due_ms - now_ms, 0) % 1000
    return into_cascade(due.parcel, b"%d" % due.id, seconds, names, rest_ms=rest_ms)


async def levels_to_store(settings: Settings, url: str) -> int:
    """Import the levels into the store. Returns the number of messages, including those of interrupted runs. Another
    publisher's message goes where the cascade ends."""
    levels = cascade_of(settings)
    async with ImportStore.open(url) as book:
        source = CascadeLevels(
            url=settings.broker_url,
            cascade=levels,
            meant=ImportSelection(),
            now=book.now_ms,
            due_queue=settings.native.due_queue.encode(),
            to_exchange=levels.delivery.encode(),
            management_url=settings.management_url,
            lowest=LOWEST,
        )
        judge = Destinations(settings.broker_url, None, verified=False)
        try:
            async with actions.audit_entry(url, whoami(), "drain to store", {}) as (connection, log_id):
                with progress() as say:
                    report = await state_machine.run(source, book, judge, whoami(), say)
                await audit_log.add(connection, log_id, report.run.committed)
        finally:
            await source.close()
    return report.run.committed


MARGIN_MS: Final = MINUTE_MS
"""A drain leaves messages that are due sooner, because the daemon is about to release them."""


async def look(settings: Settings, url: str, *, keys_too: bool) -> DrainPlan:
    """Query the side that is drained. Raises BrokerLost, BrokerRefused, StoreLost."""
    if settings.mode == "native":
        async with read_connection(url, "count the backlog") as connection:
            soon_ms = await connection.fetchval("SELECT now()") + MARGIN_MS
            return store_backlog(await draining.count(connection, soon_ms, keys_too=keys_too), keys_too=keys_too)
    due_queue = settings.native.due_queue
    seen = await cascade_depths(settings.broker_url, NAME, cascade_of(settings), [due_queue])
    if seen.hidden:
        # A hidden queue may contain messages, and the operator removes the cascade next.
        raise BrokerRefused(f"queue {seen.hidden[0]!r} of the cascade is hidden from this user")
    async with await Admin.connect(settings.broker_url, management_url=settings.management_url, name=NAME) as admin:
        levels = [one.name for one in seen.levels if one.depth is not None]
        delayed = await admin.delayed([*levels, *seen.queues], levels)
    return cascade_backlog(seen, due_queue, delayed)


async def rows_to_cascade(settings: Settings, url: str, *, keys_too: bool) -> tuple[int, int]:
    """Move rows into the cascade. Each portion leaves the store only when the broker has confirmed it. Returns the
    numbers of moved rows and of rows that must not be sent. Raises BrokerLost."""
    async with pipelined_admin(settings.broker_url, NAME) as broker:
        await broker.declare(native_of(settings))
    reconnecting = ReconnectingConnection(lambda: addresses_of(settings.broker_url), NAME, heartbeat=20.0)
    reconnecting.start()
    publisher = AmqpPublisher(reconnecting)
    asked = {"keys_too": True} if keys_too else {}
    try:
        await reconnecting.connection(timeout=10.0)  # The broker says how large properties may be.
        async with actions.audit_entry(url, whoami(), "drain to native", asked) as (connection, log_id):
            with progress("draining") as say:
                return await _portions_out(connection, publisher, settings, log_id, say, keys_too=keys_too)
    finally:
        await publisher.close()
        await reconnecting.close()


async def _portions_out(
    connection: Connection, publisher: AmqpPublisher, settings: Settings, log_id: int, say: Say, *, keys_too: bool
) -> tuple[int, int]:
    done = unsound = 0
    longest = publisher.max_properties - ROOM
    now_ms = await connection.fetchval("SELECT now()")
    wanted = Filter(due_from_ms=now_ms + MARGIN_MS)
    async for page in waiting.pages(connection, wanted, PORTION):
        places = [one.place for one in page.messages if one.place.segment is None]
        async with draining.drain_rows(connection, places, log_id, longest, keys_too=keys_too) as rows:
            await _publish(connection, rows.sound, publisher, settings)
        done += len(rows.sound)
        unsound += rows.unsound
        say("draining", done, None)
    return done, unsound


async def _publish(connection: Connection, rows: Sequence[Due], publisher: AmqpPublisher, settings: Settings) -> None:
    now_ms = await connection.fetchval("SELECT clock_timestamp()")
    due_queue = settings.native.due_queue.encode()
    names = Endpoints(cascade_of(settings), due_queue, b"", publisher.max_properties)
    outcomes = await publisher.publish([row_into_cascade(row, names, now_ms) for row in rows])
    refused = [outcome for outcome in outcomes if not isinstance(outcome, Confirmed)]
    if refused:
        raise BrokerLost(f"the cascade did not take {len(refused)} of {len(rows)}, which stay: {refused[0].text}")


@click.command(short_help="Move waiting messages into the cascade, or into the store.")
@click.option("--to", "target", type=click.Choice(["native", "store"]), required=True, help="The new side.")
@click.option("--keys-too", is_flag=True, help="To native: also messages with a key, which then cannot be cancelled.")
@dry_run_option
@yes_option
@as_json
@click.pass_context
def drain(context: click.Context, *, target: str, keys_too: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Move the backlog to the side where new delays go, so that the other side can be given up. First switch the
    mode and reload the daemon. It keeps releasing messages of both sides.

    Messages keep their due instants. Each portion is confirmed on its new side before it leaves the old side. An
    interruption may leave one portion on both sides; run the command again.

    To native: rows that wait longer than a minute. Messages with a key stay unless --keys-too, because the cascade
    knows no keys. Messages in segments stay until `delayer restore`. To the store: levels of 32 seconds and more of our
    own cascade. The command names everything that stays, with the reason and the next step.
    Exit code 1 if messages stay that do not leave by themselves.

    \b
    Examples:
      delayer --mode native drain --to native --dry-run
      delayer drain --to store --yes
    """
    settings = request_of(context).settings()
    if settings.mode != target:
        raise Misused(
            f'mode is {settings.mode!r}: new messages would go on taking the other way. Set mode = "{target}" in the '
            "daemon's configuration, reload it, and drain with the same configuration"
        )
    if settings.store_url is None:
        raise Misused("no store is configured")
    if keys_too and target == "store":
        raise Misused("--keys-too is for --to native: messages keep their keys on the way into the store")
    url = settings.store_url
    count, left = asyncio.run(_planned(settings, url, keys_too=keys_too))
    done = 0
    if count and not dry_run:
        kept = sum(one.messages or 0 for one in left)
        into = "cascade" if target == "native" else "store"
        if not confirm(
            f"Move {counted(count, 'message')} into the {into}?" + (f" {kept:,} stay." if kept else ""), yes=yes
        ):
            context.exit(ExitCode.DONE)
        with import_failures():
            done, left = asyncio.run(_moved(settings, url, keys_too=keys_too))
    context.exit(_tell(target, count, done, left, dry_run=dry_run, as_json=as_json))


async def _planned(settings: Settings, url: str, *, keys_too: bool) -> DrainPlan:
    """Query the backlog. Raises StoreLost if the broker is not the store's: messages would change the broker."""
    async with pipelined_admin(settings.broker_url, NAME) as broker:
        await (await setup.identity(url)).check_broker(broker.exchange_exists)
    return await look(settings, url, keys_too=keys_too)


async def _moved(settings: Settings, url: str, *, keys_too: bool) -> DrainPlan:
    """Move the messages. Returns the number moved, and the messages that stay."""
    unsound = 0
    if settings.mode == "native":
        done, unsound = await rows_to_cascade(settings, url, keys_too=keys_too)
    else:
        done = await levels_to_store(settings, url)
    more, left = await look(settings, url, keys_too=keys_too)
    return done, [*not_moved(settings.mode, more, unsound), *left]


def not_moved(target: str, more: int, unsound: int) -> list[LeftBehind]:
    """List what a drain should have moved, but did not. ``more``: messages that it would move now, among them the
    ``unsound`` rows, which must not be sent."""
    side, why = {
        "native": ("store", "they came in meanwhile, or another session had them locked"),
        "store": ("cascade", "they came in, or down a level, meanwhile"),
    }[target]
    wrong = "their checksum is wrong, or their properties are too long"
    found = [LeftBehind(unsound, "store", wrong, "delayer audit --deep"), LeftBehind(more - unsound, side, why, AGAIN)]
    return [one for one in found if (one.messages or 0) > 0]


def _tell(target: str, count: int, done: int, left: Sequence[LeftBehind], *, dry_run: bool, as_json: bool) -> int:
    """Print the number moved, and the messages that stay with their reasons. Returns the exit code."""
    into, other = ("cascade", "store") if target == "native" else ("store", "cascade")
    if as_json:
        rows = [{"messages": one.messages, "where": one.where, "why": one.why, "next": one.next_step} for one in left]
        print_json({"moved": done, "would_be_moved": count if dry_run else 0, "left": rows})
    else:
        if dry_run:
            click.echo(f"Would be moved: {counted(count, 'message')} into the {into}.")
        else:
            click.echo(f"Moved into the {into}: {done:,}." if count else "There are no messages to move.")
        if left:
            click.echo(f"{'Would stay' if dry_run else 'Left'}:")
            cells = [("?" if (n := one.messages) is None else f"{n:,}", *one[1:4]) for one in left]
            print_table(["messages", "where", "because", "next step"], cells, right=(0,))
        else:
            click.echo(f"Nothing {'would be' if dry_run else 'is'} left in the {other}.")
    return ExitCode.DONE if dry_run or all(one.by_itself for one in left) else ExitCode.FOUND
