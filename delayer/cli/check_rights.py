"""The rows of ``delayer check`` about what the broker lets this user do, and lets through."""

from __future__ import annotations

from typing import Final

from delayer.broker.admin import Admin
from delayer.broker.errors import BrokerRefused, BrokerUnreachable
from delayer.cli.check_report import CheckReport
from delayer.cli.output import quoted, some
from delayer.config.model import Settings
from delayer.config.topology import cascade_of, topology_of, uses_cascade
from delayer.core.cascade import LEVELS, Cascade
from delayer.core.topology import Binding

GIVE_RIGHTS: Final = "give the daemon's user the rights that docs/security.md lists, or run this with the daemon's URL"


async def check_rights(report: CheckReport, admin: Admin, settings: Settings) -> None:
    """Check that this user may bind, publish and consume as the daemon does. (_topology checks what it declares.)"""
    sources = [route.from_ for route in settings.routes]
    # Publishing and binding to an exchange need the same right.
    publishes = [Binding(source, to, "exchange", "") for source in sources[:1] for to in _targets(settings)]
    lacking = [str(one) for one in topology_of(settings).bindings if not await admin.may_bind(one)]
    lacking = [f"bind {one}" for one in lacking]
    if not lacking:  # Otherwise the right to read the source may be what is missing.
        lacking += [f"publish to exchange {quoted(b.destination)}" for b in publishes if not await admin.may_bind(b)]
    lacking += [f"consume queue {quoted(name)}" for name in _consumed(settings) if not await admin.may_consume(name)]
    if lacking:
        report.add("rights", "off", f"this user may not {some(lacking)}", GIVE_RIGHTS)


def _targets(settings: Settings) -> list[str]:
    """The exchanges that the daemon publishes to; without the default exchange, to which nothing can be bound."""
    taken_over = [Cascade(table.cascade, owner=table.prefix).delivery for table in settings.takeovers]
    return [name for name in dict.fromkeys([*(route.to for route in settings.routes), *taken_over]) if name]


def _consumed(settings: Settings) -> list[str]:
    levels = [
        Cascade(table.cascade, owner=table.prefix).level(level)
        for table in settings.takeovers
        for level in range(table.levels_from, LEVELS)
    ]
    due = [settings.native.due_queue] if uses_cascade(settings) else []
    return [settings.intake.queue, *due, *levels]


async def check_management(report: CheckReport, admin: Admin, settings: Settings) -> None:
    """Report resource alarms, and bindings of the intake queue that no route of this configuration knows. Only the
    management API shows them; without it a row of the topology says so."""
    try:
        alarms, sources = await admin.alarms(), await admin.sources_of(settings.intake.queue)
    except (BrokerRefused, BrokerUnreachable) as error:
        found = f"resource alarms and the bindings of {quoted(settings.intake.queue)} cannot be seen: {error}"
        report.add("alarms", "note", found, "give the user of broker.management_url the tag `monitoring`")
        return
    for alarm in alarms:
        found = f"{alarm}: the broker takes no publishes, so nothing goes in or out"
        report.add("alarms", "off", found, "free memory or disk on that node (rabbitmq.com/docs/alarms)")
    known = {route.from_ for route in settings.routes} | {cascade_of(settings).delivery, ""}
    if strange := sorted(sources - known):
        found = f"{quoted(settings.intake.queue)} is bound to {some(strange)}, of which this configuration has no route"
        advice = "all daemons of one queue need the same routes; a route that was removed leaves its binding: unbind it"
        report.add("intake", "note", found, advice)
