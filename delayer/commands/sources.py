"""The sources of `delayer import` that are files and databases, each with its options; and the group made whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from delayer.commands import queue_sources
from delayer.commands.importing import Wanted, import_, rewrites_of, source
from delayer.core.message import Target
from delayer.legacy.delayed_exchange import DelayedExchange, Plan
from delayer.legacy.jsonl import JsonLines
from delayer.legacy.ports import Source
from delayer.legacy.raven import RavenExport
from delayer.settings import Settings
from delayer.store.importing import ImportStore
from delayer.wire.address import Address

__all__ = ["import_"]

file_argument = click.argument("file", type=click.Path(path_type=Path, dir_okay=False, readable=False), metavar="FILE")


def _jsonl(wanted: Wanted, given: dict[str, Any], book: ImportStore) -> Source:
    return JsonLines(given["file"], wanted.meant, wanted.rewrites).noting(book)


def _pairs(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> dict[bytes, Target]:
    pairs = {}
    for text in given:
        name, equals, to = text.partition("=")
        if not equals or not name or not to:
            raise click.BadParameter(f"expected FROM=TO, two exchanges, found {text!r}")
        pairs[name.encode("utf-8", "surrogateescape")] = Target(to.encode("utf-8", "surrogateescape"), b"")
    return pairs


def _by_routes(settings: Settings) -> dict[bytes, Target]:
    """Where the routes would send what came through their exchanges."""
    return {
        route.from_.encode(): Target(route.to.encode(), route.routing_key.encode())
        for route in settings.routes
        if route.from_
    }


def _delayed_exchange(wanted: Wanted, given: dict[str, Any], book: ImportStore) -> Source:
    vhost = given["vhost"]
    if vhost is None:
        vhost = Address.parse(wanted.settings.broker_url).vhost
    plan = Plan(vhost.encode("utf-8", "surrogateescape"), _by_routes(wanted.settings) | given["exchanges"])
    return DelayedExchange(given["file"], plan, wanted.meant, wanted.rewrites).noting(book)


_reply_option = click.option(
    "--rewrite-reply-to", "replies", multiple=True, callback=rewrites_of, metavar="EXPRESSION",
    help="Rename the addresses that answers go to, as --rewrite-destination does. May be repeated.",
)  # fmt: skip
_database_options = (
    click.option(
        "--url", envvar="DELAYER_IMPORT_URL", required=True, metavar="URL",
        help="The database, such as postgresql://user@host/database, mysql://… or mssql://…; others can see it in the "
        "process list, but not $DELAYER_IMPORT_URL.",
    ),
    click.option(
        "--table", "tables", multiple=True, metavar="PATTERN", help="Tables that are meant. May be repeated."
    ),
    click.option("--schema", metavar="NAME", help="Their schema. [default: the connection's]"),
    click.option(
        "--overdue-too", is_flag=True,
        help="Also what is due within a minute or overdue: only where no timeout manager runs any more.",
    ),
    _reply_option,
)  # fmt: skip


def _nservicebus_sql(wanted: Wanted, given: dict[str, Any], _book: ImportStore) -> Source:
    from delayer.legacy.nservicebus_sql import sql_persistence  # noqa: PLC0415 - SQLAlchemy, which no other verb needs

    return sql_persistence(
        given["url"],
        given["tables"],
        wanted.meant,
        schema=given["schema"],
        rewrites=wanted.rewrites,
        replies=given["replies"],
        overdue_too=given["overdue_too"],
    )


def _nservicebus_nhibernate(wanted: Wanted, given: dict[str, Any], _book: ImportStore) -> Source:
    from delayer.legacy.nservicebus_sql import nhibernate  # noqa: PLC0415

    return nhibernate(
        given["url"],
        given["tables"],
        wanted.meant,
        schema=given["schema"],
        endpoint=given["endpoint"],
        rewrites=wanted.rewrites,
        replies=given["replies"],
        overdue_too=given["overdue_too"],
    )


def _nservicebus_raven(wanted: Wanted, given: dict[str, Any], book: ImportStore) -> Source:
    return RavenExport(
        given["file"], wanted.meant, wanted.rewrites, endpoint=given["endpoint"], replies=given["replies"]
    ).noting(book)


def _add() -> None:
    source("jsonl", "A file that `delayer export` wrote.", [file_argument], _jsonl)
    source(
        "delayed-exchange",
        "A dump of what the delayed-message plugin holds. docs/importing.md has the line that makes it, for "
        "RabbitMQ 3.x and 4.0 to 4.2. Each message goes where the route of its exchange leads; without one, "
        "to the exchange of the same name.",
        [
            file_argument,
            click.option(
                "--vhost",
                metavar="NAME",
                help="The virtual host that is meant; the others are left. [default: broker.url's]",
            ),
            click.option(
                "--exchange",
                "exchanges",
                multiple=True,
                callback=_pairs,
                metavar="FROM=TO",
                help="What FROM held is published to TO. May be repeated.",
            ),
        ],
        _delayed_exchange,
    )
    source(
        "nservicebus-sql",
        "Timeouts of NServiceBus SQL Persistence. All tables …TimeoutData of PostgreSQL, MySQL, MariaDB or "
        "SQL Server, or those that --table names. A timeout manager may go on running: what is taken it does "
        "not see any more.",
        _database_options,
        _nservicebus_sql,
    )
    source(
        "nservicebus-nhibernate",
        "Timeouts of NServiceBus's NHibernate persistence. The table TimeoutEntity, of one endpoint or of "
        "all, in the same databases. Destinations of old timeouts name a machine: see --rewrite-destination.",
        [
            *_database_options,
            click.option(
                "--endpoint", metavar="NAME", help="Only the timeouts that this endpoint asked for. [default: all]"
            ),
        ],
        _nservicebus_nhibernate,
    )
    source(
        "nservicebus-raven",
        "An export of RavenDB's TimeoutDatas documents. A JSON object a line; the timeout managers must be "
        "stopped before it is made, and stay so.",
        [
            file_argument,
            click.option(
                "--endpoint", metavar="NAME", help="Only the timeouts that this endpoint owns. [default: all]"
            ),
            _reply_option,
        ],
        _nservicebus_raven,
    )


_add()
queue_sources.add()
