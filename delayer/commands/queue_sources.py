"""The sources of `delayer import` that are queues on a broker, each with its options."""

from __future__ import annotations

from typing import Any

import click

from delayer.broker.publisher import MAX_PROPERTIES
from delayer.commands.errors import Misused
from delayer.commands.importing import Wanted, source
from delayer.commands.options import url_of
from delayer.core.cascade import KINDS, LEVELS, Cascade
from delayer.core.message import Delivery, Parcel
from delayer.legacy.cascade import CascadeLevels
from delayer.legacy.hold_queues import HoldQueues, Said
from delayer.legacy.ports import BadSource, Source
from delayer.services.draining import carried
from delayer.settings import duration_ms
from delayer.settings.values import broker_url, management_url
from delayer.store.importing import ImportStore
from delayer.wiring import queues_at_work

_broker_options = (
    click.option(
        "--from-url", envvar="DELAYER_IMPORT_URL", metavar="URL",
        help="The broker that holds the messages, if it is another one; others can see it in the process list, but not "
        "$DELAYER_IMPORT_URL. [default: broker.url]",
    ),
    click.option(
        "--to-exchange", metavar="NAME", help="Where the messages go when they are due; an empty one: to their queue."
    ),
)  # fmt: skip


def _duration(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    try:
        return None if text is None else duration_ms(text)
    except ValueError as error:
        raise click.BadParameter(f"expected {error}, found {text!r}") from None


def _from_url(given: dict[str, Any]) -> str | None:
    return url_of("--from-url", given["from_url"], broker_url).reveal() if given["from_url"] else None


def _cascade(wanted: Wanted, given: dict[str, Any], book: ImportStore) -> Source:
    kind, prefix = given["kind"], given["prefix"]
    try:
        if kind == "delayer":
            cascade = Cascade(kind, wanted.settings.native.prefix if prefix is None else prefix)
        else:
            cascade = Cascade(kind, owner=prefix or "")
    except ValueError as error:
        raise BadSource(str(error)) from None
    to = given["to_exchange"]
    due_queue = (given["due_queue"] or wanted.settings.native.due_queue).encode("utf-8", "surrogateescape")

    def opened(delivery: Delivery) -> Parcel | None:
        return carried(delivery, due_queue, MAX_PROPERTIES)

    return CascadeLevels(
        _from_url(given) or wanted.settings.broker_url,
        cascade,
        wanted.meant,
        book.now_ms,
        wanted.rewrites,
        open=opened,
        to_exchange=None if to is None else to.encode("utf-8", "surrogateescape"),
        lowest=given["levels_from"],
    )


def _hold_queues(wanted: Wanted, given: dict[str, Any], book: ImportStore) -> Source:
    settings = wanted.settings
    if given["whole_time"] and given["believe_timestamps"]:
        raise Misused("expected --whole-time or --believe-timestamps, found both")
    own = queues_at_work(settings)
    for name in given["queues"]:
        if name in own:
            raise Misused(f"--queue {name}: expected a queue of another system, found delayer's own ({own[name]})")
    url = _from_url(given) or settings.broker_url
    management = given["management_url"]
    if management:
        management = url_of("--management-url", management, management_url).reveal()
    if management is None and given["from_url"] is None:
        management = settings.management_url
    try:
        return HoldQueues(
            url,
            management,
            given["queues"],
            wanted.meant,
            book.now_ms,
            rewrites=wanted.rewrites,
            own=own,
            said=Said(
                given["ttl_ms"], given["to_exchange"], given["to_key"], given["whole_time"], given["believe_timestamps"]
            ),
        )
    except ValueError as error:
        raise BadSource(f"the source's {error}") from None


def add() -> None:
    """Make them verbs."""
    source(
        "cascade",
        "What waits in the level queues of a cascade. Of NServiceBus, Celery or delayer itself, on this "
        "broker or another. From the lowest level up, and down again; what is published into it meanwhile, and "
        "the last seconds, the cascade delivers by itself.",
        [
            click.option("--kind", type=click.Choice(KINDS), default="delayer", show_default=True, help="Whose it is."),
            click.option(
                "--prefix",
                metavar="TEXT",
                help="Of the names of delayer's own, or what Celery is told to put before its own. [default: "
                "native.prefix; none]",
            ),
            click.option(
                "--due-queue",
                metavar="NAME",
                help="The due queue of the delayer whose cascade it is: only what is on its way there is opened. "
                "[default: native.due_queue]",
            ),
            click.option(
                "--levels-from",
                type=click.IntRange(0, LEVELS - 1),
                default=0,
                show_default=True,
                metavar="N",
                help="Only this level and those above: below it, messages wait for less than 2^N seconds.",
            ),
            *_broker_options,
        ],
        _cascade,
    )
    source(
        "hold-queues",
        "Queues that hold messages for a time. One queue a duration, as Symfony, Laravel, enqueue, EasyNetQ "
        "and MailerQ make them, and the queue of a retry pair. Where to and for how long their arguments or "
        "policies say (broker.management_url), or the options.",
        [
            click.option(
                "--queue",
                "queues",
                multiple=True,
                required=True,
                metavar="PATTERN",
                help="Queues that are meant: 'delay_*', '*.delay.*'. May be repeated.",
            ),
            click.option(
                "--ttl", "ttl_ms", callback=_duration, metavar="DURATION", help="For how long they hold a message."
            ),
            click.option(
                "--to-key", metavar="KEY", help="The routing key it goes out with. [default: as dead-lettered]"
            ),
            click.option(
                "--whole-time",
                is_flag=True,
                help="Each message waits its whole time again, whatever it and the broker's notes tell: for those that "
                "publishers sent again as they got them.",
            ),
            click.option(
                "--believe-timestamps",
                is_flag=True,
                help="The timestamp of a message is when it came into its queue: where publishers set it as they "
                "publish, and only they. Else it waits its whole time again, unless the broker noted when it came.",
            ),
            click.option(
                "--management-url",
                envvar="DELAYER_IMPORT_MANAGEMENT_URL",
                metavar="URL",
                help="The management API of --from-url. [default: broker.management_url]",
            ),
            *_broker_options,
        ],
        _hold_queues,
    )
