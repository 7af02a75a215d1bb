"""Keeps the topology in force on the broker: restores and logs what was lost, and says what it cannot restore."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Final, NamedTuple
from urllib.parse import quote

import structlog

from delayer.amqp.errors import BrokerLost
from delayer.broker.connection import ReconnectingConnection
from delayer.broker.errors import MAJORITY, BrokerRefused, BrokerUnreachable, TopologyMismatch
from delayer.broker.management_api import Management, Members
from delayer.broker.pipelined_admin import PATIENCE, PipelinedAdmin, why_silent
from delayer.config.model import Settings
from delayer.config.topology import topology_of
from delayer.core.topology import Binding, Topology, TopologyPart
from delayer.daemon.live_settings import LiveSettings
from delayer.daemon.store_bond import DELETED, StoreBond, WrongBroker
from delayer.retry import first_set

log = structlog.get_logger(__name__)

ROUND_SECONDS: Final = 60.0
"""Seconds between two rounds."""
SHOWN: Final = 5
"""Maximum number of parts that a log line names."""
SILENT: Final = "see the broker's log and `rabbitmq-diagnostics cluster_status`: a node hangs, or is overloaded"


class Seen(NamedTuple):
    """What a round finds on the broker before it declares the topology.

    ``bindings``: those of the intake queue, whose loss would lose messages; None if unknown. ``minority``: our queues
    without a majority, by the management API. ``silent``: the intake queue, if its members do not answer;
    None if that could not be asked.
    """

    bindings: Collection[Binding] | None = None
    minority: str = ""
    silent: str | None = ""


class DeclaredTopology:
    """The topology of the settings in force, as the daemon keeps it on the broker."""

    def __init__(self) -> None:
        self.reason = ""
        """Why the topology is not in place; empty if it is, as far as this is known."""
        self._declared: frozenset[TopologyPart] = frozenset()
        self._lost: dict[TopologyPart, None] = {}  # In the last round.
        self._unlogged: dict[TopologyPart, None] = {}  # Lost, and not all restored yet.
        self._lock = asyncio.Lock()
        self._silent = False  # In the last round.
        self._lacking = ""  # What lacked a majority in the last round.
        self._unanswered = False  # Whether the intake queue's members did not answer in the last round.

    async def keep(self, broker: PipelinedAdmin, settings: Settings, seen: Seen | None = None) -> None:
        """Declare what the settings in force need, and note whether that succeeds. ``seen``: in a round. Raises what
        :meth:`declare` does."""
        began = bool(self._declared)
        if seen is not None and (seen.minority or seen.silent is not None):
            self._lacking = seen.minority or ((seen.silent or "") if self._unanswered else "")
            self._unanswered = bool(seen.silent)
        try:
            again = await self.declare(broker, settings, seen and seen.bindings)
        except TopologyMismatch as wrong:
            more = f", and {len(wrong.findings) - 1} more" if len(wrong.findings) > 1 else ""
            self._note(f"{wrong.findings[0]}{more}", wrong.advice or "delayer topology verify", began=began)
            raise
        except BrokerRefused as refused:
            self._note(str(refused), refused.advice, began=began)
            raise
        if again:
            self._note(f"lost again after the daemon restored it: {_names_of(again)}", DELETED, began=began)
        else:
            self._note(self._lacking, MAJORITY, began=began)

    def note_silence(self, reason: str) -> None:
        """Note that a round got no answer on an open connection. One round may meet an election; two are a reason."""
        if self._silent:
            self._note(f"not known, because two rounds got no answer: {reason}", SILENT, began=True)
        self._silent = True

    def _note(self, reason: str, advice: str, *, began: bool) -> None:
        """``began``: the topology was in place before. Otherwise the start logs the reason itself."""
        reason = reason and f"the topology is not in place: {reason}"
        if reason and reason != self.reason and began:
            log.error("topology not in place", reason=reason, next_step=advice)
        elif self.reason and not reason:
            log.info("topology in place")
        self.reason, self._silent = reason, False

    async def declare(
        self, broker: PipelinedAdmin, settings: Settings, present: Collection[Binding] | None = None
    ) -> list[TopologyPart]:
        """Declare what these settings need. Log the parts that were there before and were lost; return those of them
        that the last call restored already. ``present``: see Seen. Raises BrokerLost, BrokerRefused,
        TopologyMismatch."""
        wanted = topology_of(settings)
        async with self._lock:
            missing: list[TopologyPart] = []
            if self._declared:
                missing += await broker.missing([*wanted.exchanges, *wanted.queues])
                missing += _missing_bindings(settings.intake.queue, wanted, missing, present)
            lost = dict.fromkeys(one for one in missing if one in self._declared)
            self._unlogged |= lost
            await broker.declare(wanted)
            if self._unlogged:
                log.warning("topology restored", parts=_names_of(self._unlogged), next_step=DELETED)
            again = [one for one in lost if one in self._lost]
            self._lost, self._unlogged = lost, {}
            self._declared = frozenset((*wanted.exchanges, *wanted.queues, *wanted.bindings))
            return again

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
                continue  # Then it is not consumed.
            opened = [one.current for one in connections.values() if one.current is not None]
            try:
                for one in opened:
                    if not one.blocked:  # The broker does not read it, so it would not answer.
                        await bond.check(one)
                seen = await look(live.settings)
                async with PipelinedAdmin(intake, PATIENCE) as broker:
                    await self.keep(broker, live.settings, seen)
            except WrongBroker as wrong:
                for one in opened:
                    one.drop(str(wrong))  # New ones are accepted or not, as at the start.
            except BrokerUnreachable as silent:
                self.note_silence(str(silent))
            except (BrokerLost, BrokerRefused, TopologyMismatch):
                continue  # The connection is lost, or ``keep`` noted it.


async def look(settings: Settings) -> Seen:
    """Look at the broker at the beginning of a round. Without a management API that answers, bindings and minorities
    are unknown: `delayer check` reports it, and the bindings are declared again in any case."""
    seen, wanted = Seen(), topology_of(settings)
    with suppress(BrokerRefused, BrokerUnreachable):
        if management := Management.beside(settings.broker_url, settings.management_url):
            path = f"queues/{management.vhost}/{quote(settings.intake.queue, safe='')}/bindings"
            members = await management.members()
            bindings = [binding for binding, _ in await management.bindings(path)]
            seen = Seen(bindings, _minority(wanted, members))
    if seen.minority:
        return seen
    intake = next(one for one in wanted.queues if one.name == settings.intake.queue)
    return seen._replace(silent=await why_silent(settings.broker_url, intake))


def _minority(wanted: Topology, members: Mapping[str, Members]) -> str:
    """Describe our queues without a majority. Queues of others do not stop the daemon: it holds their messages."""
    few = {one.name: members[one.name].minority for one in wanted.queues if not one.shared and one.name in members}
    found = [f"queue {name!r} has no majority: {of} members are online" for name, of in few.items() if of]
    more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more


def _missing_bindings(
    intake: str, wanted: Topology, missing: Collection[TopologyPart], present: Collection[Binding] | None
) -> list[Binding]:
    """The missing bindings of the intake queue, except those that a missing queue or exchange had."""
    ends = {one.name for one in missing if not isinstance(one, Binding)}
    if present is None or intake in ends:
        return []
    ours = (one for one in wanted.bindings if one.destination == intake and one.source not in ends)
    return [one for one in ours if one not in present]


def _names_of(parts: Collection[TopologyPart]) -> str:
    names = [f"{one.kind} {one if isinstance(one, Binding) else one.name}" for one in parts]
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
