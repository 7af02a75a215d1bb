"""The verbs for refused messages and strays, for the page and for the command line."""

from __future__ import annotations

from functools import partial
from typing import Literal

import structlog

from delayer.broker.errors import QueueMissing
from delayer.config.model import Settings
from delayer.config.topology import cascade_of
from delayer.intake.refusals import AS_IT_IS, EntryPoints, Mend
from delayer.intake.set_aside import ANY, Result, Selection, SetAside, refused_queue, strays_queue
from delayer.store.admin import actions, audit_log

log = structlog.get_logger(__name__)

SetAsideName = Literal["refused", "strays"]


def queue_of(settings: Settings, name: SetAsideName, mend: Mend = AS_IT_IS) -> SetAside:
    """The queue of refused messages or of strays. ``mend``: the changes of refused messages that are retried."""
    where = settings.broker_url, settings.management_url
    if name == "strays":
        return strays_queue(*where, cascade_of(settings), settings.native.due_queue.encode())
    entries = EntryPoints.of(settings.intake.queue, (route.from_ for route in settings.routes))
    return refused_queue(*where, settings.refused.queue, entries, mend)


async def look(settings: Settings, name: SetAsideName, wanted: Selection = ANY, limit: int | None = None) -> Result:
    """The messages that match. There are none without a strays queue in store mode: the store holds such messages.
    Raises BrokerLost, BrokerRefused, QueueMissing."""
    try:
        return await queue_of(settings, name).look(wanted, limit)
    except QueueMissing:
        if name == "refused" or settings.mode != "store":
            raise
        return Result(0)


async def change(
    settings: Settings,
    name: SetAsideName,
    verb: str,
    wanted: Selection,
    *,
    who: str,
    mend: Mend = AS_IT_IS,
    limit: int | None = None,
) -> tuple[Result, int]:
    """Retry or drop the messages that match. Returns the result, and how many the daemon refused again.

    With a store, a change of refused messages gets an entry in the audit log; any other change is logged. Raises as
    :func:`look`, and StoreLost, BadStoreUrl, SchemaOutdated.
    """
    queue = queue_of(settings, name, mend)
    if name == "refused" and settings.store_url is not None:
        asked = {**wanted.as_dict(), **mend.asked}
        async with actions.recorded(settings.store_url, who, f"refused {verb}", asked) as (connection, log_id):
            done = await queue.change(verb, wanted, partial(audit_log.add, connection, log_id), limit)
    else:

        async def add(messages: int) -> None:
            if messages:
                ids = sorted(wanted.ids)
                log.warning("set aside acted on", queue=name, verb=verb, messages=messages, ids=ids, who=who)

        done = await queue.change(verb, wanted, add, limit)
    return done, await queue.returned(done) if name == "refused" and verb == "retry" else 0
