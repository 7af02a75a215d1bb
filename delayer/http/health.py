"""Answers for programs: health and metrics."""

from __future__ import annotations

import asyncio

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from delayer.config.texts import service_of
from delayer.core.heartbeat import STUCK_SECONDS
from delayer.core.readable import duration
from delayer.http import metrics
from delayer.http.metrics import MetricSources
from delayer.http.view import DaemonState, View
from delayer.store.admin.stats import StoreOverview


def not_alive(state: DaemonState) -> list[str]:
    """List the reasons to kill and restart this process; empty while it is alive."""
    return [f"loop {loop!r} stands still" for loop in state.stalled]


def not_ready(state: DaemonState, intake: str, store: StoreOverview | None, error: str) -> list[str]:
    """List the reasons why messages do not go in or come out; empty while the daemon is ready.

    ``intake``: the queue that the daemon always consumes; ``state`` names its other queues. ``store``: the last query's
    result; None if it failed, for the reason ``error``.
    """
    found = [f"queue {queue!r} is not consumed" for queue, is_ in {intake: False, **state.consuming}.items() if not is_]
    publishing = state.connections["publish"]
    if not publishing.connected:
        found.append("nothing is delivered: no connection to publish by")
    elif publishing.blocked:
        found.append("nothing is delivered: the broker accepts no publishes (a resource alarm)")
    if state.mode == "store" and not state.usable:
        found.append("no lane of the store is owned")
    if state.refusal:
        found.append(f"nothing leaves the store: {state.refusal}")
    if state.topology:
        found.append(state.topology)
    found += not_alive(state)
    found += [
        f"queue {queue!r}: nothing that was read from it was settled for {duration(seconds)}"
        for queue, seconds in state.unsettled.items()
    ]
    found += [f"queue {queue!r}: some messages cannot go on: {reason}" for queue, reason in state.unsteady.items()]
    required = state.mode == "store"  # In native mode only messages with keys need it, and those parked earlier.
    if store is None:
        if required:
            found.append(f"the store is out of reach, or refuses us: {error or 'it was not looked at yet'}")
    elif store.upgrade_pending:
        if required:
            found.append(f"the store's schema is {store.schema_found or 'missing'}, expected {store.schema_expected}")
    else:
        # The daemon also knows of a lane whose claims wait for a lock, although no row of it may be due yet.
        stuck = dict.fromkeys(state.stuck, f"settled no claim for {duration(STUCK_SECONDS)}") | {
            lane.number: f"had due messages for {duration(lane.stuck_ms / 1000)}, and releases none"
            for lane in store.lanes
            if lane.stuck_ms and (lane.number in state.lanes or not lane.alive)
        }
        found += [f"lane {number} has {what}" for number, what in stuck.items()]
        found += map(str, store.foreign)
        if store.inbox is not None and store.inbox.unread_ms:
            waited = duration(store.inbox.unread_ms / 1000)
            found.append(f"the SQL inbox is not read: a message in it was sent {waited} ago")
        if store.late.messages and (store.late.first_due_ms or 0) < store.store_now_ms:
            found.append("compacted messages are due, and not restored: see `restoring interrupted` in the log")
    return found


class Answers(View):
    """The sources of all answers, and the handlers of health and metrics."""

    async def not_ready(self) -> list[str]:
        """List the reasons from a fresh query."""
        state, intake = self.inside.state(), self.settings.intake.queue
        if not self.has_store:
            return not_ready(state, intake, None, "")
        seen = await self.store.get()
        return not_ready(state, intake, seen.fresh, seen.error)

    async def live(self, _request: Request) -> Response:
        """/health/live: every loop makes progress."""
        reasons = not_alive(self.inside.state())
        return JSONResponse({"alive": not reasons, "reasons": reasons}, status_code=503 if reasons else 200)

    async def ready(self, _request: Request) -> Response:
        """/health/ready: messages go in and come out."""
        reasons = await self.not_ready()
        state = self.inside.state()
        role = {"service": service_of(self.settings), "mode": self.settings.mode, "intake": state.intake}
        found = {"ready": not reasons, "reasons": reasons, **role, "restart_needed": state.restart_needed}
        return JSONResponse(found, status_code=503 if reasons else 200)

    async def metrics(self, _request: Request) -> Response:
        """/metrics, for Prometheus."""
        depths = await self.depths.get()
        store = census = schedules = None
        if self.has_store:
            store, census, schedules = await asyncio.gather(self.store.get(), self.census.get(), self.schedules.get())
        ready, roles = not await self.not_ready(), metrics.roles(self.settings)
        sources = MetricSources(
            self.inside.state(), store, census, depths, ready=ready, roles=roles, schedules=schedules
        )
        return Response(generate_latest(sources), headers={"Content-Type": CONTENT_TYPE_LATEST})
