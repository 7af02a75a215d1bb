"""The daemon's side of the HTTP server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from delayer.amqp import reading
from delayer.broker.cascade_depths import cascade_depths
from delayer.broker.errors import BrokerRefused, QueueMissing
from delayer.config.model import Settings
from delayer.config.topology import cascade_of, unread_delays
from delayer.core.errors import BrokerLost
from delayer.daemon.wiring import Daemon
from delayer.http.recent import Recent, host_ms
from delayer.http.server import HttpPart
from delayer.http.view import Depths, RefusedRow, Repair, SetAsideChange, SetAsideList, State, StrayRow
from delayer.intake.refusals import AS_IT_IS, EntryPoints, Mend
from delayer.intake.set_aside import RefusedMessage, Selection, SetAside, Stray, refused_queue, strays_queue
from delayer.store.admin import actions, audit_log

log = structlog.get_logger(__name__)


class DaemonInside:
    """Satisfies http.view.DaemonPort."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.recent = Recent(daemon.counters, host_ms())
        self._started_ms = host_ms()

    @property
    def settings(self) -> Settings:
        return self._daemon.settings

    def state(self) -> State:
        daemon, store = self._daemon, self._daemon.store
        return {
            "mode": daemon.settings.mode,
            "routes": [route.from_ for route in daemon.settings.routes],
            "started_ms": self._started_ms,
            "consuming": daemon.consuming(),
            "intake": daemon.intake,
            "connections": daemon.connections.as_dict(),
            "store": store.configured,
            "lanes": store.numbers,
            "usable": store.usable,
            "stalled": daemon.watchdog.stalled(),
            "recent": list(self.recent.steps),
            "counters": daemon.counters,
        }

    async def depths(self) -> Depths:
        settings = self.settings
        queues = [settings.intake.queue, settings.native.due_queue, settings.refused.queue]
        try:
            seen = await cascade_depths(
                settings.broker_url,
                "delayer look",
                cascade_of(settings),
                queues,
                patience=5.0,
                management_url=settings.management_url,
            )
        except BrokerRefused as refused:
            raise BrokerLost(str(refused)) from refused
        return Depths(seen.queues, {level.level: level.depth for level in seen.levels}, seen.delayed)

    async def refused(self, limit: int) -> SetAsideList[RefusedRow]:
        with _reached():
            seen = await self._refused().look(limit=limit)
        return SetAsideList([_row(one) for one in seen.found], seen.depth, seen.hidden)

    async def act_on_refused(self, verb: str, ids: frozenset[str], who: str, repair: Repair) -> SetAsideChange:
        wanted, url = Selection(ids), self.settings.store_url
        mend = Mend.of(repair.delay_ms, repair.headers, map(reading.raw, repair.dropped), unread_delays(self.settings))
        asked = {**wanted.as_dict(), **mend.asked}
        queue = self._refused(mend)
        with _reached():
            if url is None:

                async def add(messages: int) -> None:
                    if messages:
                        log.warning("refused acted on", verb=verb, messages=messages, ids=sorted(ids), who=who)

                done = await queue.change(verb, wanted, add)
            else:
                async with actions.recorded(url, who, f"refused {verb}", asked) as (connection, log_id):
                    done = await queue.change(
                        verb, wanted, lambda messages: audit_log.add(connection, log_id, messages)
                    )
            again = await queue.returned(done) if verb == "retry" else 0
        left = [(one.refusal.id, why) for one, why in done.left]
        left += [("the rest", "too many stand before it")] if done.cut else []
        return SetAsideChange(len(done.found), left, again)

    async def strays(self, limit: int) -> SetAsideList[StrayRow]:
        with _reached():
            try:
                seen = await self._strays().look(limit=limit)
            except QueueMissing:
                if self.settings.mode != "store":
                    raise
                return SetAsideList()  # The store holds such messages.
        return SetAsideList([_stray_row(one) for one in seen.found], seen.depth, seen.hidden)

    async def act_on_strays(self, verb: str, ids: frozenset[str], who: str) -> SetAsideChange:
        async def add(messages: int) -> None:
            if messages:
                log.warning("strays acted on", verb=verb, messages=messages, ids=sorted(ids), who=who)

        with _reached():
            done = await self._strays().change(verb, Selection(ids), add)
        left = [(one.id, why) for one, why in done.left]
        left += [("the rest", "too many stand before it")] if done.cut else []
        return SetAsideChange(len(done.found), left)

    def _strays(self) -> SetAside[Stray]:
        settings = self.settings
        due_queue = settings.native.due_queue.encode()
        return strays_queue(settings.broker_url, settings.management_url, cascade_of(settings), due_queue)

    def _refused(self, mend: Mend = AS_IT_IS) -> SetAside[RefusedMessage]:
        settings = self.settings
        entries = EntryPoints.of(settings.intake.queue, (route.from_ for route in settings.routes))
        return refused_queue(settings.broker_url, settings.management_url, settings.refused.queue, entries, mend)


@contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except (BrokerRefused, QueueMissing) as error:
        raise BrokerLost(str(error)) from error


def _row(one: RefusedMessage, preview: int = 80, most: int = 40, longest: int = 300) -> RefusedRow:
    """A row with so many bytes of the body, and so many properties and headers of so many characters."""
    refusal = one.refusal
    came_in = "?" if refusal.exchange is None else reading.address(refusal.exchange, refusal.routing_key or b"")
    body = reading.preview(one.head, preview)
    read = reading.read(one.properties)
    said = [*read.properties.items(), *((f"{header.name} ({header.type})", header.value) for header in read.headers)]
    shown = [
        (name, text if len(text := reading.value_text(value)) <= longest else f"{text[:longest]}…")
        for name, value in said[:most]
    ]
    shown += [("…", f"{len(said) - most} more: `delayer refused list --json`")] if len(said) > most else []
    shown += [("not readable", read.broken)] if read.broken else []
    return RefusedRow(refusal.id, came_in, one.size, refusal.message_id, refusal.reason, body, shown, one.as_dict())


def _stray_row(one: Stray, preview: int = 80) -> StrayRow:
    to = reading.address(one.target.exchange, one.target.routing_key)
    body = reading.preview(one.head, preview)
    return StrayRow(one.id, one.due_ms, to, one.attempts, one.message_id, one.reason, body, one.as_dict())


def serve(daemon: Daemon) -> None:
    """Let ``daemon`` serve HTTP at its addresses, as long as it runs."""
    inside, http = DaemonInside(daemon), daemon.settings.http
    daemon.services.add("recent", inside.recent.run)
    if http.listen:
        daemon.services.add("http", HttpPart(inside).run)
    if http.metrics_listen:
        daemon.services.add("http metrics", HttpPart(inside, metrics_only=True).run)
