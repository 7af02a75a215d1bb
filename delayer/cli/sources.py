"""The sources of `delayer import`, each with its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from delayer.amqp.address import Address
from delayer.cli.errors import Misused
from delayer.cli.importing import Make, import_, source
from delayer.cli.options import duration, url_of
from delayer.config.model import Settings
from delayer.config.topology import queues_at_work
from delayer.config.values import broker_url, management_url
from delayer.core.cascade import CASCADE_KINDS, Cascade
from delayer.core.message import Target, raw
from delayer.imports.cascade import CascadeLevels
from delayer.imports.files import DelayedExchange, JsonLines
from delayer.imports.hold_queues import HoldQueues
from delayer.imports.raven import RavenExport
from delayer.imports.state_machine import BadSource, ImportSource
from delayer.store.admin.importing import ImportStore

__all__ = ["import_"]

_broker_options = (
    click.option(
        "--from-url", envvar="DELAYER_IMPORT_URL", metavar="URL",
        help="The broker that holds the messages, if it is another one; others can see it in the process list, but not "
        "$DELAYER_IMPORT_URL. [default: broker.url]",
    ),
    click.option(
        "--exchange", "to_exchange", metavar="NAME", help="The exchange for due messages; an empty name: their queue."
    ),
)  # fmt: skip


def _from_url(given: dict[str, Any]) -> str | None:
    return url_of("--from-url", given["from_url"], broker_url).reveal() if given["from_url"] else None


@source(
    "cascade",
    "Messages in the level queues of a cascade. It belongs to NServiceBus, Celery or delayer itself, on this "
    "broker or another. The import reads from the lowest level up, and down again. The cascade itself delivers "
    "messages of the last seconds, and new ones. The import opens delayer's envelopes that are on "
    "their way to native.due_queue.",
    click.option("--kind", type=click.Choice(CASCADE_KINDS), default="delayer", show_default=True, help="Its kind."),
    click.option(
        "--prefix",
        metavar="TEXT",
        help="The prefix of delayer's names, or the one that Celery puts before its names. [default: "
        "native.prefix; none]",
    ),
    *_broker_options,
)
def _cascade(settings: Settings, given: dict[str, Any], book: ImportStore) -> ImportSource:
    kind, prefix = given["kind"], given["prefix"]
    try:
        if kind == "delayer":
            cascade = Cascade(kind, settings.native.prefix if prefix is None else prefix)
        else:
            cascade = Cascade(kind, owner=prefix or "")
    except ValueError as error:
        raise BadSource(str(error)) from None
    to = given["to_exchange"]
    return CascadeLevels(
        url=_from_url(given) or settings.broker_url,
        cascade=cascade,
        meant=given["meant"],
        now=book.now_ms,
        due_queue=raw(settings.native.due_queue),
        to_exchange=None if to is None else raw(to),
        management_url=None if given["from_url"] else settings.management_url,
    )


@source(
    "hold-queues",
    "Queues that hold messages for a time. Symfony, Laravel, enqueue, EasyNetQ and MailerQ make one queue for each "
    "duration; a retry pair has one, too. Their arguments or policies (broker.management_url) give the destination "
    "and the time. The options override these.",
    click.option(
        "--queue",
        "queues",
        multiple=True,
        required=True,
        metavar="PATTERN",
        help="Queues to read: 'delay_*', '*.delay.*'. May be repeated.",
    ),
    click.option("--ttl", "ttl_ms", callback=duration, metavar="DURATION", help="For how long they hold a message."),
    click.option("--routing-key", "to_key", metavar="KEY", help="Its new routing key. [default: as dead-lettered]"),
    click.option(
        "--believe-timestamps",
        is_flag=True,
        help="Treat a message's timestamp as the time of its arrival. Use this only if publishers set it when they "
        "publish, and no one else does. Without this, a message waits its whole time again.",
    ),
    click.option(
        "--management-url",
        envvar="DELAYER_IMPORT_MANAGEMENT_URL",
        metavar="URL",
        help="The management API of --from-url. [default: broker.management_url]",
    ),
    *_broker_options,
)
def _hold_queues(settings: Settings, given: dict[str, Any], book: ImportStore) -> ImportSource:
    own = queues_at_work(settings)
    for name in given["queues"]:
        if name in own:
            raise Misused(f"--queue {name}: expected a queue of another system, found delayer's own ({own[name]})")
    management = given["management_url"]
    if management:
        management = url_of("--management-url", management, management_url).reveal()
    if management is None and given["from_url"] is None:
        management = settings.management_url
    return HoldQueues(
        url=_from_url(given) or settings.broker_url,
        management_url=management,
        patterns=given["queues"],
        now=book.now_ms,
        own=own,
        **{name: given[name] for name in ("meant", "ttl_ms", "to_exchange", "to_key", "believe_timestamps")},
    )


file_argument = click.argument("path", type=click.Path(path_type=Path, dir_okay=False, readable=False), metavar="FILE")


@source("jsonl", "A file that `delayer export` wrote.", file_argument)
def _jsonl(_settings: Settings, given: dict[str, Any], book: ImportStore) -> ImportSource:
    return JsonLines(notes=book, **given)


@source(
    "delayed-exchange",
    "A dump of the delayed-message plugin. docs/importing.md has the command that makes it, for "
    "RabbitMQ 3.x and 4.0 to 4.2. Each message goes where the route of its exchange leads; without one, "
    "to the exchange of the same name.",
    file_argument,
    click.option(
        "--vhost", metavar="NAME", help="The virtual host to import; the others stay. [default: broker.url's]"
    ),
)
def _delayed_exchange(settings: Settings, given: dict[str, Any], book: ImportStore) -> ImportSource:
    vhost = given["vhost"]
    if vhost is None:
        vhost = Address.parse_all(settings.broker_url)[0].vhost
    by_route = {
        one.from_.encode(): Target(one.to.encode(), one.routing_key.encode()) for one in settings.routes if one.from_
    }
    return DelayedExchange(path=given["path"], notes=book, meant=given["meant"], vhost=raw(vhost), exchanges=by_route)


_database_options = (
    click.option(
        "--url", envvar="DELAYER_IMPORT_URL", required=True, metavar="URL",
        help="The database, such as postgresql://user@host/database, mysql://… or mssql://…; others can see it in the "
        "process list, but not $DELAYER_IMPORT_URL.",
    ),
    click.option(
        "--table", "patterns", multiple=True, metavar="PATTERN", help="Tables to import. May be repeated."
    ),
    click.option("--schema", metavar="NAME", help="Their schema. [default: the connection's]"),
    click.option(
        "--overdue-too", is_flag=True,
        help="Include timeouts that are due within a minute or overdue. Use this only if no timeout manager runs any "
        "more.",
    ),
)  # fmt: skip


def _timeouts(name: str) -> Make:
    def make(_settings: Settings, given: dict[str, Any], _book: ImportStore) -> ImportSource:
        from delayer.imports.sql import SqlTimeouts  # noqa: PLC0415 - SQLAlchemy, which no other verb needs

        return SqlTimeouts(name=name, **given)

    return make


source(
    "nservicebus-sql",
    "Timeouts of NServiceBus SQL Persistence. All tables …TimeoutData of PostgreSQL, MySQL, MariaDB or "
    "SQL Server, or those that --table names. A timeout manager may go on running: it does not see staged "
    "timeouts.",
    *_database_options,
)(_timeouts("nservicebus-sql"))
source(
    "nservicebus-nhibernate",
    "Timeouts of NServiceBus's NHibernate persistence. The table TimeoutEntity, of one endpoint or of "
    "all, in the same databases. Destinations of old timeouts name a machine: see --rewrite-destination.",
    *_database_options,
    click.option("--endpoint", metavar="NAME", help="Only the timeouts that this endpoint asked for. [default: all]"),
)(_timeouts("nservicebus-nhibernate"))


@source(
    "nservicebus-raven",
    "An export of RavenDB's TimeoutDatas documents. It has a JSON object in each line. Before you make "
    "it, stop the timeout managers for good.",
    file_argument,
    click.option("--endpoint", metavar="NAME", help="Only the timeouts that this endpoint owns. [default: all]"),
)
def _nservicebus_raven(_settings: Settings, given: dict[str, Any], book: ImportStore) -> ImportSource:
    return RavenExport(notes=book, **given)
