"""Keeps the topology in place: restores and logs what the broker lost, and reports what cannot be restored."""

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
"""For how many rounds without an answer of the management API its last answer about majorities stays valid. The API may
be on the node that died, and never return."""
SHOWN: Final = 5
"""Maximum number of parts that a log line names."""
AWAY: Final = (
    "make broker.management_url usable: until then, the daemon restores deleted bindings without logging them, and"
    " notices a lost majority of the intake queue only"
)
SILENT: Final = "see the broker's log and `rabbitmq-diagnostics cluster_status`: a node hangs, or is overloaded"


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
        self.reason = ""
        """Why the topology is not in place; empty if it is, as far as this is known."""
        self._declared: frozenset[TopologyPart] = frozenset()
        self._lost: dict[TopologyPart, None] = {}  # The parts that the last declaration found lost, and restored.
        self._unlogged: dict[TopologyPart, None] = {}  # Lost, and not logged yet, because a declaration failed.
        self._lock = asyncio.Lock()
        self._silent = False  # Whether the broker left the last round unanswered.
        self._minorities: dict[str, str] = {}  # As in Seen, by the last known answers.
        self._untold = 0  # Rounds since the management API last reported minorities.
        self._away = ""  # Why the management API did not answer in the last round; "" if it did.
        self._unanswered = False  # Whether the intake queue was silent when it was last queried itself.

    async def keep(self, broker: PipelinedAdmin, settings: Settings, seen: Seen | None = None) -> None:
        """Declare the topology of the settings in force, and note whether it is in place. ``seen``: what the round has
        found; None outside a round. Raises like :meth:`declare`."""
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
        """Update the queues without a majority. ``counted``: see :attr:`Seen.minorities`. If that is None, the last
        answer stays valid for KEPT_ROUNDS. If it does not name the intake queue, query this queue itself, which was
        just declared."""
        intake = next(one for one in topology_of(settings).queues if one.name == settings.intake.queue)
        before = self._minorities.get(intake.name, "")
        self._untold = 0 if counted is not None else self._untold + 1
        now = {} if self._untold > KEPT_ROUNDS else dict(self._minorities if counted is None else counted)
        if counted is None or intake.name not in counted:
            silent = await why_silent(settings.broker_url, intake)
            if silent is None:  # The broker could not be queried, so the last result stays.
                now[intake.name] = before
            else:
                # A first silence may be due to an election.
                now[intake.name] = silent if before or self._unanswered else ""
                self._unanswered = bool(silent)
        self._minorities = {name: reason for name, reason in now.items() if reason}

    def note_silence(self, reason: str) -> None:
        """Note that the broker left a round unanswered on an open connection. One such round may be due to an election,
        so only a second one in a row is a reason."""
        if self._silent:
            self._note(f"not known, because two rounds got no answer: {reason}", SILENT, began=True)
        self._silent = True

    def _note(self, reason: str, advice: str, *, began: bool) -> None:
        """Set the reason, and log it if it is new. ``began``: whether the topology was declared before. If it was not,
        the daemon is starting, and logs the failure itself."""
        reason = reason and f"the topology is not in place: {reason}"
        if reason and reason != self.reason and began:
            log.error("topology not in place", reason=reason, next_step=advice)
        elif self.reason and not reason:
            log.info("topology in place")
        self.reason, self._silent = reason, False

    async def declare(
        self, broker: PipelinedAdmin, settings: Settings, present: Collection[Binding] | None = None
    ) -> list[TopologyPart]:
        """Declare the topology of these settings. Log the parts that were declared before and are missing. Return those
        that were missing at the last call, too. ``present``: see :attr:`Seen.bindings`. Raises BrokerLost,
        BrokerRefused, TopologyMismatch."""
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
    """Return the missing bindings of the intake queue; none if ``present`` is unknown. Ignores bindings lost along with
    their queue or exchange."""
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
