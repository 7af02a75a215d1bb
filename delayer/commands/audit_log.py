"""delayer acts: the changes that people made by hand."""

from __future__ import annotations

import asyncio

import click

from delayer.commands.options import as_json, limit_option, request_of, store_url
from delayer.commands.output import iso, print_json, print_table
from delayer.store import acts as trail
from delayer.store import listing


@click.command(short_help="Show what people did to messages: who, when, what, how many.")
@limit_option
@click.option("--before", type=click.IntRange(1), metavar="NUMBER", help="Those before this one.")
@as_json
@click.pass_context
def acts(context: click.Context, *, limit: int, before: int | None, as_json: bool) -> None:
    """Show the audit trail, the latest first: every cancel, reschedule, retry and drop by hand.

    An act that was interrupted stands there with the number that it reached.

    \b
    Examples:
      delayer acts
      delayer acts --limit 5 --json
    """
    url = store_url(request_of(context).settings())
    found = asyncio.run(_acts(url, limit, before))
    if as_json:
        print_json([one._asdict() for one in found])
        return
    rows = [(one.id, iso(one.at_ms), one.who, one.verb, one.messages, one.asked) for one in found]
    if rows:
        print_table(["", "when", "who", "what", "messages", "asked for"], rows, right=(0, 4))
    else:
        click.echo("Nobody did anything by hand.")


async def _acts(url: str, limit: int, before: int | None) -> list[trail.Act]:
    async with listing.looking(url, "acts") as connection:
        return list(await trail.listed(connection, limit, before))
