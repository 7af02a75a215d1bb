"""delayer db: the store's schema."""

from __future__ import annotations

import asyncio

import click

from delayer.cli.errors import ExitCode, Misused
from delayer.cli.options import Request, as_json, request_of, store_url
from delayer.cli.output import json_of_lane, note, print_json, print_lanes
from delayer.store import schema, servers
from delayer.store.admin import setup
from delayer.store.admin.stats import StoreOverview, overview


@click.group(short_help="Make and upgrade the store's tables.")
def db() -> None:
    """Make the store's tables and keep them up to date (schema upgrades)."""


@db.command()
@click.pass_obj
def upgrade(request: Request) -> None:
    """Make the tables, or upgrade them. Also makes the first lanes (store.lanes). Safe to repeat.

    The database has to exist with the encoding UTF8, and the role in store.url has to own it: `createdb -E UTF8 -T
    template0 --locale C -O delayer delayer`. If one role owns the schema and another one runs the daemon
    (docs/security.md), run this as the owner. A store that a newer delayer upgraded is not changed; exit code 1.
    Neither is a schema with other tables of the same names; exit code 2. Give delayer a schema of its own there.

    \b
    Examples:
      delayer db upgrade
      sudo delayer db upgrade           # as the service: its URLs are in files that only root can read
    """
    settings = request.settings()
    url = store_url(settings)

    async def work() -> tuple[str | None, str | None]:
        from delayer.store import upgrades  # noqa: PLC0415 - Alembic and SQLAlchemy, which no other verb needs

        await servers.check(url)
        before = await setup.schema_of(url)
        if (wrong := schema.find_mismatch(before)) is not None and wrong.newer:
            raise wrong
        await upgrades.upgrade(url, lanes=settings.store.lanes)
        return before, await setup.schema_of(url)

    before, after = asyncio.run(work())
    if before == after:
        click.echo(f"The schema is {after} already: nothing to do.")
    else:
        click.echo(f"The schema was {before or 'missing'} and is {after} now.")
    note("Next: `delayer run`.")


@db.command()
@as_json
@click.pass_context
def current(context: click.Context, as_json: bool) -> None:
    """Show the schema of the store, and the schema needed. Exit code 1 if they differ.

    \b
    Examples:
      delayer db current
      delayer db current --json
    """
    url = store_url(request_of(context).settings())

    found, needed = asyncio.run(setup.schema_of(url)), schema.HEAD
    wrong = schema.find_mismatch(found)
    if as_json:
        advice = None if wrong is None else wrong.advice
        print_json({"found": found, "needed": needed, "current": wrong is None, "advice": advice})
    else:
        click.echo(f"The schema is {found or 'missing'}; this program needs {needed}.")
    if wrong is not None:
        note(f"Next: {wrong.advice}.")
        context.exit(ExitCode.FOUND)


@db.command()
@click.argument("number", type=click.IntRange(1, 64), required=False)
@as_json
@click.pass_obj
def lanes(request: Request, number: int | None, as_json: bool) -> None:
    """Show the store's lanes, or raise their number to NUMBER.

    Processes share the lanes evenly, so more processes than lanes need more lanes. Each lane takes two connections to
    Postgres. Running daemons take new lanes within seconds. The number never shrinks. Lanes of routes with max_rate
    come on top; daemons make them.

    \b
    Examples:
      delayer db lanes
      delayer db lanes 8
    """
    url = store_url(request.settings())

    async def work() -> StoreOverview:
        if number is not None:
            await setup.raise_lanes(url, number)
        return await overview(url)

    found = asyncio.run(work())
    rows = list(map(json_of_lane, found.lanes))
    ordinary = sum(lane.route is None for lane in found.lanes)
    if as_json:
        print_json(rows)
        return
    print_lanes(rows, found.store_now_ms)
    if number is not None and number < ordinary:
        raise Misused(f"there are {ordinary} lanes, and their number never shrinks")


@db.command("skip-ids")
@click.option(
    "--by",
    type=click.IntRange(1, 10**15),  # Far below the limit of a bigint, 2^63.
    default=setup.FAR,
    show_default=True,
    metavar="N",
    help="The number of ids to leave out.",
)
@click.pass_obj
def skip_ids(request: Request, by: int) -> None:
    """Skip ids after a restore of an older copy, before a daemon starts. New messages then get ids never used before.

    A backup or a lagging standby lacks the latest messages. It would issue their ids (x-delayer-id) again, to new
    messages. Consumers that recognize copies by the id would drop these. Waiting messages do not change. Needs the role
    that owns the tables; safe to repeat.

    \b
    Examples:
      delayer db skip-ids
      delayer db skip-ids --by 1000000000000000     # a second store for the same consumers: its own range of ids
    """
    first = asyncio.run(setup.skip_ids(store_url(request.settings()), by))
    click.echo(f"The next message gets an id of {first:,} or more.")
    note("Next: `delayer run`.")
