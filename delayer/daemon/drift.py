"""Keeps the topology in force on the broker: restores and logs what was lost, and says what it cannot restore."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple
from urllib.parse import quote

import structlog

from delayer.amqp.errors import BrokerLost
from delayer.broker.connection import ReconnectingConnection
from delayer.broker.errors import MAJORITY, BrokerRefused, BrokerUnreachable, TopologyMismatch
from delayer.broker.management_api import Management
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
KEPT_ROUNDS: Final = 5
"""Rounds in which a verdict of the management API outlives its last answer. Its node may be the one that died, and may
not come back."""
SHOWN: Final = 5
"""Maximum number of parts that a log line names."""
AWAY: Final = (
    "make broker.management_url usable: until then, the daemon restores deleted bindings without logging them, and"
    " notices a lost majority of the intake queue only"
)
SILENT: Final = "see the broker's log and `rabbitmq-diagnostics cluster_status`: a node hangs, or is overloaded"


class Seen(NamedTuple):
    """What a round finds on the broker before it declares the topology.

    ``bindings``: those of the intake queue, whose loss would lose messages. ``minorities``: our queues without a
    majority of their members, each with a description. None if the management API does not tell.
    """

    bindings: Collection[Binding] | None = None
    minorities: Mapping[str, str] | None = None


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
        self._minorities: dict[str, str] = {}  # As in Seen, by the last answers.
        self._untold = 0  # Rounds since the management API told them.
        self._away = ""  # Why the management API did not answer in the last round.
        self._unanswered = False  # Whether the intake queue's members did not answer in the last round.

    async def keep(self, broker: PipelinedAdmin, settings: Settings, seen: Seen | None = None) -> None:
        """Declare what the settings in force need, and note whether that succeeds. ``seen``: in a round. Raises what
        :meth:`declare` does."""
        began = bool(self._declared)
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
            if seen is not None:
                await self._update_minorities(settings, seen.minorities)
            self._note(_some(self._minorities.values(), "; "), MAJORITY, began=began)

    async def _update_minorities(self, settings: Settings, counted: Mapping[str, str] | None) -> None:
        """Query the intake queue itself, which was just declared. Its silence may be an election's, unless it was
        silent or without a majority in the last round. ``counted``: as in Seen. What is unknown stays as it was, except
        that the other queues are forgotten after KEPT_ROUNDS."""
        intake = next(one for one in topology_of(settings).queues if one.name == settings.intake.queue)
        before = self._minorities.get(intake.name, "")
        self._untold = 0 if counted is not None else self._untold + 1
        now = {} if self._untold > KEPT_ROUNDS else dict(self._minorities if counted is None else counted)
        if counted is None or intake.name not in counted:
            silent = await why_silent(settings.broker_url, intake)
            now[intake.name] = before if silent is None else silent if before or self._unanswered else ""
            self._unanswered = self._unanswered if silent is None else bool(silent)
        self._minorities = {name: reason for name, reason in now.items() if reason}

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
                seen = await self.look(live.settings)
                async with PipelinedAdmin(intake, PATIENCE) as broker:
                    await self.keep(broker, live.settings, seen)
            except WrongBroker as wrong:
                for one in opened:
                    one.drop(str(wrong))  # New ones are accepted or not, as at the start.
            except BrokerUnreachable as silent:
                self.note_silence(str(silent))
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
    """The missing bindings of the intake queue, except those that a missing queue or exchange had."""
    ends = {one.name for one in missing if not isinstance(one, Binding)}
    if present is None or intake in ends:
        return []
    ours = (one for one in wanted.bindings if one.destination == intake and one.source not in ends)
    return [one for one in ours if one not in present]


def _names_of(parts: Collection[TopologyPart]) -> str:
    return _some(f"{one.kind} {one if isinstance(one, Binding) else one.name}" for one in parts)


def _some(texts: Iterable[str], between: str = ", ") -> str:
    first = [*texts]
    more = f", and {len(first) - SHOWN} more" if len(first) > SHOWN else ""
    return between.join(first[:SHOWN]) + more
