"""delayer audit-log: the changes that operators made."""

from __future__ import annotations

import click

from delayer.amqp.reading import iso
from delayer.cli.options import as_json, ask_store, limit_option, request_of, store_url
from delayer.cli.output import print_json, print_table
from delayer.store.admin import audit_log as trail


@click.command("audit-log", short_help="Show the changes that operators made: who, when, what, how many.")
@limit_option
@click.option("--before", type=click.IntRange(1), metavar="NUMBER", help="Entries before this one.")
@as_json
@click.pass_context
def audit_log(context: click.Context, *, limit: int, before: int | None, as_json: bool) -> None:
    """Show the audit log, the latest entry first: every cancel, reschedule, retry, drop, drain and import.

    An interrupted command is in the log with the number of messages that it reached.

    \b
    Examples:
      delayer audit-log
      delayer audit-log --limit 5 --json
    """
    url = store_url(request_of(context).settings())
    found = ask_store(url, "audit-log", lambda connection: trail.listed(connection, limit, before))
    if as_json:
        print_json([one._asdict() for one in found])
        return
    rows = [(one.id, iso(one.at_ms), one.who, one.verb, one.messages, one.asked) for one in found]
    if rows:
        print_table(["", "when", "who", "command", "messages", "arguments"], rows, right=(0, 4))
    else:
        click.echo("The audit log is empty.")
