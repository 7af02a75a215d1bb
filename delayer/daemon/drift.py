"""Keeps the topology in place: restores and logs what the broker lost, and reports what cannot be restored."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple
from urllib.parse import quote

import structlog

from delayer.amqp.errors import BrokerLost
from delayer.broker.connection import ReconnectingConnection
from delayer.broker.errors import BrokerRefused, BrokerUnreachable, TopologyMismatch
from delayer.broker.management_api import Management
from delayer.broker.pipelined_admin import PATIENCE, PipelinedAdmin, why_silent
from delayer.config.model import Settings
from delayer.config.topology import topology_of
from delayer.core.topology import Binding, Topology, TopologyPart
from delayer.daemon.live_settings import LiveSettings
from delayer.daemon.round import (
    Declared,
    Failed,
    Kept,
    MajorityCount,
    Missing,
    Round,
    RoundEvent,
    Silence,
    after,
    names_of,
)
from delayer.daemon.store_bond import DELETED, StoreBond, WrongBroker
from delayer.retry import first_set

log = structlog.get_logger(__name__)

ROUND_SECONDS: Final = 60.0
"""Seconds between two rounds."""
AWAY: Final = (
    "make broker.management_url usable: until then, the daemon restores deleted bindings without logging them, and"
    " notices a lost majority of the intake queue only"
)


class Seen(NamedTuple):
    """What the management API reports at the beginning of a round; None for what it does not report.

    ``bindings``: the bindings of the intake queue; messages are lost while one is missing. ``minorities``: our queues
    without a majority of their members, each with a description.
    """

    bindings: Collection[Binding] | None = None
    minorities: Mapping[str, str] | None = None


class DeclaredTopology:
    """The topology of the settings in force, as the daemon keeps it on the broker."""

    def __init__(self) -> None:
        self._round = Round()
        self._lock = asyncio.Lock()
        self._away = ""  # Why the management API did not answer in the last round; "" if it did.

    @property
    def reason(self) -> str:
        """Why the topology is not in place; empty if it is, as far as this is known."""
        return self._round.reason

    async def keep(self, broker: PipelinedAdmin, settings: Settings, seen: Seen | None = None) -> None:
        """Declare the topology of the settings in force, and note whether it is in place. ``seen``: what the round has
        found; None outside a round. Raises like :meth:`declare`."""
        try:
            await self.declare(broker, settings, seen and seen.bindings)
        except TopologyMismatch as wrong:
            more = f", and {len(wrong.findings) - 1} more" if len(wrong.findings) > 1 else ""
            self._note(Failed(f"{wrong.findings[0]}{more}", wrong.advice or "delayer topology verify"))
            raise
        except BrokerRefused as refused:
            self._note(Failed(str(refused), refused.advice))
            raise
        if seen is None or self._round.again:
            self._note(Kept())
            return
        intake = next(one for one in topology_of(settings).queues if one.name == settings.intake.queue)
        named = intake.name in (seen.minorities or {})
        answer = None if named else await why_silent(settings.broker_url, intake)
        self._note(MajorityCount(intake.name, seen.minorities, answer))

    def _note(self, found: RoundEvent) -> None:
        """Update the round, and log a new reason."""
        before, self._round = self._round, after(self._round, found)
        reason = self._round.reason
        # Before the first declaration succeeds, the daemon is starting, and logs the failure itself.
        if reason and reason != before.reason and (before.declared or isinstance(found, Silence)):
            log.error("topology not in place", reason=reason, next_step=self._round.advice)
        elif before.reason and not reason:
            log.info("topology in place")

    async def declare(
        self, broker: PipelinedAdmin, settings: Settings, present: Collection[Binding] | None = None
    ) -> None:
        """Declare the topology of these settings, and log the parts that were declared before and are missing.
        ``present``: see :attr:`Seen.bindings`. Raises BrokerLost, BrokerRefused, TopologyMismatch."""
        wanted = topology_of(settings)
        async with self._lock:
            missing: list[TopologyPart] = []
            if self._round.declared:
                missing += await broker.missing([*wanted.exchanges, *wanted.queues])
                missing += _missing_bindings(settings.intake.queue, wanted, missing, present)
            self._note(Missing(missing))
            await broker.declare(wanted)
            if lost := self._round.unlogged:
                log.warning("topology restored", parts=names_of(lost), next_step=DELETED)
            self._note(Declared((*wanted.exchanges, *wanted.queues, *wanted.bindings)))

    async def watch(
        self,
        bond: StoreBond,
        connections: Mapping[str, ReconnectingConnection],
        live: LiveSettings,
        stopping: asyncio.Event,
    ) -> None:
        """Once a minute, check that the broker is still the store's, and declare the topology again."""
        while not await first_set(stopping, seconds=ROUND_SECONDS):
            if (intake := connections["intake"].current) is None:
                continue  # The daemon is not ready anyway, because it does not consume the intake queue.
            opened = [one.current for one in connections.values() if one.current is not None]
            try:
                for one in opened:
                    if not one.blocked:  # The broker does not read it, so it would not answer.
                        await bond.check(one)
                seen = await self.look(live.settings)
                async with PipelinedAdmin(intake, PATIENCE) as broker:
                    await self.keep(broker, live.settings, seen)
            except WrongBroker as wrong:
                for one in opened:
                    one.drop(str(wrong))  # Each new connection is checked, as at the start.
            except BrokerUnreachable as silent:
                self._note(Silence(str(silent)))
            except (BrokerLost, BrokerRefused, TopologyMismatch):
                continue  # The connection is lost, or ``keep`` noted it.

    async def look(self, settings: Settings) -> Seen:
        """Query the management API, if there is one, at the beginning of a round."""
        seen, away, intake = Seen(), "", settings.intake.queue
        # The queues of others do not stop the daemon: it holds their messages.
        ours = [one.name for one in topology_of(settings).queues if not one.shared]
        try:
            if management := Management.beside(settings.broker_url, settings.management_url):
                members = await management.members(ours)
                few = {name: of for name in ours if name in members and (of := members[name].minority)}
                reasons = {name: f"queue {name!r} has no majority: {of} members are online" for name, of in few.items()}
                seen = Seen(minorities=reasons)
                if intake in members:
                    path = f"queues/{management.vhost}/{quote(intake, safe='')}/bindings"
                    seen = seen._replace(bindings=[binding for binding, _ in await management.bindings(path)])
        except (BrokerRefused, BrokerUnreachable) as error:
            away = str(error)
            if away != self._away:
                log.warning("management api away", reason=away, next_step=AWAY)
        self._away = away
        return seen


def _missing_bindings(
    intake: str, wanted: Topology, missing: Collection[TopologyPart], present: Collection[Binding] | None
) -> list[Binding]:
    """Return the missing bindings of the intake queue; none if ``present`` is unknown. Ignores bindings lost along with
    their queue or exchange."""
    ends = {one.name for one in missing if not isinstance(one, Binding)}
    if present is None or intake in ends:
        return []
    ours = (one for one in wanted.bindings if one.destination == intake and one.source not in ends)
    return [one for one in ours if one not in present]
