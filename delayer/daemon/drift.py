"""Keeps the topology in force on the broker: restores and logs what was lost, and says what it cannot restore."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final
from urllib.parse import quote

import structlog

from delayer.broker.errors import BrokerRefused, BrokerUnreachable, TopologyMismatch
from delayer.broker.management_api import Management
from delayer.broker.pipelined_admin import PipelinedAdmin
from delayer.config.model import Settings
from delayer.config.topology import topology_of
from delayer.core.topology import Binding, Topology, TopologyPart

log = structlog.get_logger(__name__)

ROUND_SECONDS: Final = 60.0
"""Seconds between two rounds."""
SHOWN: Final = 5
"""Maximum number of parts that a log line names."""
DELETED: Final = "find out what deletes them: an operator, or a policy with `expires` (rabbitmqctl list_policies)"
SILENT: Final = "see the broker's log and `rabbitmq-diagnostics cluster_status`: a node hangs, or is overloaded"


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

    async def keep(
        self, broker: PipelinedAdmin, settings: Settings, present: Collection[Binding] | None = None
    ) -> None:
        """Declare what the settings in force need, and note whether that succeeds. Takes and raises what
        :meth:`declare` does."""
        began = bool(self._declared)
        try:
            again = await self.declare(broker, settings, present)
        except TopologyMismatch as wrong:
            more = f", and {len(wrong.findings) - 1} more" if len(wrong.findings) > 1 else ""
            self._note(f"{wrong.findings[0]}{more}", wrong.advice or "delayer topology verify", began=began)
            raise
        except BrokerRefused as refused:
            self._note(str(refused), refused.advice, began=began)
            raise
        self._note(
            f"lost again after the daemon restored it: {_names_of(again)}" if again else "", DELETED, began=began
        )

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
        that the last call restored already. ``present``: what :func:`intake_bindings` found a moment ago. Raises
        BrokerLost, BrokerRefused, TopologyMismatch."""
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


async def intake_bindings(settings: Settings) -> list[Binding] | None:
    """The bindings of the intake queue, whose loss would lose messages and which AMQP does not show. None without a
    management API that answers: `delayer check` reports it, and the bindings are declared again in any case."""
    try:
        management = Management.beside(settings.broker_url, settings.management_url)
        if management is None:
            return None
        path = f"queues/{management.vhost}/{quote(settings.intake.queue, safe='')}/bindings"
        return [binding for binding, _ in await management.bindings(path)]
    except (BrokerRefused, BrokerUnreachable):
        return None


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
