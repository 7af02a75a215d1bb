"""delayer drain: move what waits to the other side, after the mode was switched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import click

from delayer.commands import drain_in, drain_out
from delayer.commands.errors import DONE, FOUND, Misused
from delayer.commands.options import agreed, dry_run_option, request_of, yes_option
from delayer.commands.output import note, print_table
from delayer.services import draining as rules
from delayer.services.draining import Left
from delayer.settings import Settings
from delayer.wiring import cascade_of


@click.command(short_help="Move what waits into the cascade, or into the store.")
@click.option("--to", "target", type=click.Choice(["native", "store"]), required=True, help="Where to.")
@click.option("--keys-too", is_flag=True, help="To native: also messages with a key; then nobody can cancel them.")
@dry_run_option
@yes_option
@click.pass_context
def drain(context: click.Context, *, target: str, keys_too: bool, dry_run: bool, yes: bool) -> None:
    """Move what waits to where new delays go, so that the other side can be given up. First switch the mode and reload
    the daemon: it goes on releasing what the store holds, and what comes out of the cascade, all the while.

    Nothing gets another due instant, and nothing is lost: each portion is confirmed where it goes before it leaves
    where it was. An interruption may leave one portion on both sides; run it again.

    To native: rows that wait longer than a minute. Messages with a key stay, as the cascade knows no keys, unless
    --keys-too; what is compacted stays until `delayer restore`. To the store: the levels of our own cascade of 32
    seconds and more. What is left is told, with the reason and the next step.
    Exit code 1 if something is left that does not go by itself.

    \b
    Examples:
      delayer --mode native drain --to native --dry-run
      delayer drain --to store --yes
    """
    settings = request_of(context).settings()
    if settings.mode != target:
        raise Misused(
            f'mode is {settings.mode!r}: what comes in would go on taking the other way. Set mode = "{target}" in the '
            "daemon's configuration, reload it, and drain with the same configuration"
        )
    if settings.store_url is None:
        raise Misused("no store is configured")
    if settings.native.cascade != "delayer":
        raise Misused("this cascade is shared with another system: see [[takeover]] in the configuration")
    if keys_too and target == "store":
        raise Misused("--keys-too is for --to native: messages keep their keys on the way into the store")
    url = settings.store_url
    if target == "native":
        _to_native(context, settings, url, keys_too=keys_too, dry_run=dry_run, yes=yes)
    else:
        _to_store(context, settings, url, dry_run=dry_run, yes=yes)


def _to_native(
    context: click.Context, settings: Settings, url: str, *, keys_too: bool, dry_run: bool, yes: bool
) -> None:
    before = asyncio.run(drain_out.standing(url, keys_too=keys_too))
    count = before.rows - before.soon - (0 if keys_too else before.keyed)
    stays = rules.left_in_store(before._replace(rows=before.rows - count), 0, keys_too=keys_too)
    if _asked(context, f"{count:,} messages into the cascade", stays, any_there=count > 0, dry_run=dry_run, yes=yes):
        moved = asyncio.run(drain_out.rows_to_cascade(settings, url, keys_too=keys_too))
        click.echo(f"Moved into the cascade: {moved.messages:,}.")
        after = asyncio.run(drain_out.standing(url, keys_too=keys_too))
        stays = rules.left_in_store(after, moved.unsound, keys_too=keys_too)
    context.exit(_told(stays, "the store", dry_run=dry_run))


def _to_store(context: click.Context, settings: Settings, url: str, *, dry_run: bool, yes: bool) -> None:
    levels = cascade_of(settings)
    before = asyncio.run(drain_in.look_around(settings, levels))
    count = sum(depth for level, depth in before.levels.items() if level >= drain_in.LOWEST)
    stays = drain_in.left_of(before._replace(levels={n: of for n, of in before.levels.items() if n < drain_in.LOWEST}))
    if _asked(context, f"{count:,} messages into the store", stays, any_there=count > 0, dry_run=dry_run, yes=yes):
        click.echo(f"Moved into the store: {asyncio.run(drain_in.levels_to_store(settings, url, levels)):,}.")
        stays = drain_in.left_of(asyncio.run(drain_in.look_around(settings, levels)))
    context.exit(_told(stays, "the cascade", dry_run=dry_run))


def _told(left: Sequence[Left], where: str, *, dry_run: bool) -> int:
    """What stays, with the reasons; the exit code."""
    if not left:
        click.echo(f"Nothing {'would be' if dry_run else 'is'} left in {where}.")
        return DONE
    click.echo(f"{'Would stay' if dry_run else 'Left'}:")
    print_table(
        ["messages", "where", "because", "next step"],
        [(f"{one.messages:,}", one.where, one.why, one.next_step) for one in left],
        right=(0,),
    )
    return DONE if dry_run or all(one.by_itself for one in left) else FOUND


def _asked(
    context: click.Context, what: str, stays: Sequence[Left], *, any_there: bool, dry_run: bool, yes: bool
) -> bool:
    """Whether to move them. Exits where somebody was asked, and said no."""
    if dry_run or not any_there:
        click.echo(f"Would be moved: {what}." if dry_run else "Nothing is there to be moved.")
        return False
    kept = sum(one.messages for one in stays)
    if not agreed(f"Move {what}?" + (f" {kept:,} stay." if kept else ""), yes=yes):
        note("Nothing was done.")
        context.exit(DONE)
    return True
