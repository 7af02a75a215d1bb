"""The daemon's side of the HTTP server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from delayer.amqp.errors import BrokerLost
from delayer.amqp.values import Delivery, Outgoing
from delayer.broker.cascade_depths import cascade_depths
from delayer.broker.errors import BrokerRefused, QueueMissing, TopologyMismatch
from delayer.broker.publisher import LONGEST_PUBLISH
from delayer.config.model import Settings
from delayer.config.topology import cascade_of
from delayer.core.errors import StoreLost
from delayer.core.hold import Outcome
from delayer.core.message import as_text, raw
from delayer.core.plan import Plan, Refuse
from delayer.daemon.wiring import Daemon
from delayer.format.refusal import RetryEdits
from delayer.http.recent import Recent, host_ms, measure_lag
from delayer.http.server import HttpPart
from delayer.http.view import ConnectionState, DaemonState, Depths
from delayer.intake.handle import classify
from delayer.set_aside.change import SetAsideChange, find_messages
from delayer.set_aside.messages import Result, Selection, SetAsideName
from delayer.store.admin.changes import ChangeResult


class DaemonInside:
    """Satisfies http.view.DaemonPort."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._publisher = daemon.new_publisher()
        self.recent = Recent(daemon.counters, host_ms())
        self._started_ms = host_ms()
        self._route_names()  # Before any message: configured routes have priority over invented ones.

    def _route_names(self) -> list[str]:
        """The names that metrics count the configured routes under."""
        name_of = self._daemon.counters.name_of
        return list(dict.fromkeys(as_text(name_of(raw(route.from_))) for route in self.settings.routes))

    @property
    def settings(self) -> Settings:
        return self._daemon.settings

    def state(self) -> DaemonState:
        daemon, store = self._daemon, self._daemon.store
        return DaemonState(
            mode=daemon.settings.mode,
            routes=self._route_names(),
            started_ms=self._started_ms,
            consuming=daemon.consuming(),
            intake=daemon.intake,
            connections={
                use: ConnectionState(one.current is not None, one.blocked, one.connects)
                for use, one in daemon.connections.items()
            },
            store=store.configured,
            lanes=store.numbers,
            usable=store.usable,
            refusal=store.refusal,
            stalled=daemon.watchdog.stalled(),
            stuck=store.stuck,
            unsettled=daemon.unsettled(),
            unsteady=daemon.unsteady(),
            topology=daemon.topology.reason,
            restart_needed=daemon.restart_needed,
            recent=list(self.recent.steps),
            counters=daemon.counters,
        )

    def now_upper_ms(self) -> int:
        return self._daemon.live.now_upper_ms()

    def plan(self, message: Outgoing) -> Plan:
        live, (exchange, key, properties, body, *_) = self._daemon.live, message
        delivery = Delivery(0, False, exchange, key, properties, body)
        policy, now_ms, most = live.policy(), self.now_upper_ms(), live.names().max_properties
        plan = classify(delivery, policy, now_ms, most)[2]
        if isinstance(plan, Refuse) and not policy.has_store and live.settings.store_url is not None:
            with_store = classify(delivery, replace(policy, has_store=True), now_ms, most)[2]
            if not isinstance(with_store, Refuse):
                raise StoreLost("keys and cancels need the store, which is out of reach", "run `delayer check`")
        return plan

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]:
        return await self._publisher.publish(batch)

    @property
    def publish_seconds(self) -> float:
        return LONGEST_PUBLISH

    async def depths(self) -> Depths:
        settings = self.settings
        queues = [settings.intake.queue, settings.native.due_queue, settings.refused.queue]
        with _reached():
            seen = await cascade_depths(
                settings.broker_url,
                "delayer look",
                cascade_of(settings),
                queues,
                patience=5.0,
                management_url=settings.management_url,
            )
        return Depths(seen.queues, {level.level: level.depth for level in seen.levels}, seen.delayed)

    async def look_aside(self, name: SetAsideName, limit: int) -> Result:
        with _reached():
            return await find_messages(self.settings, name, limit=limit)

    async def change_aside(
        self, name: SetAsideName, verb: str, ids: frozenset[str], who: str, edits: RetryEdits
    ) -> ChangeResult:
        with _reached():
            return await SetAsideChange(self.settings, name, verb, Selection(ids), edits).carry_out(who)


@contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except (BrokerRefused, QueueMissing, TopologyMismatch) as error:
        raise BrokerLost(str(error)) from error


def serve(daemon: Daemon) -> None:
    """Serve HTTP at ``daemon``'s addresses while it runs."""
    inside, http = DaemonInside(daemon), daemon.settings.http
    daemon.services.add("recent", inside.recent.run)
    daemon.services.add("loop lag", partial(measure_lag, daemon.counters))
    if http.listen:
        daemon.services.add("http", HttpPart(inside).run)
    if http.metrics_listen:
        daemon.services.add("http metrics", HttpPart(inside, metrics_only=True).run)
