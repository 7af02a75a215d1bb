"""Where answers come from, and those for programs: health and metrics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from delayer.ops.http import health, metrics, siblings
from delayer.ops.http.metrics import Sight
from delayer.ops.http.ports import Inside, State
from delayer.ops.http.view import View


@dataclass(frozen=True, slots=True)
class Answers:
    """Where answers come from."""

    inside: Inside
    view: View

    async def states(self) -> list[State | None]:
        """Of every worker, we first."""
        settings = self.inside.settings
        others = (siblings.ask(settings, number) for number in range(2, settings.workers + 1))
        return [self.inside.state(), *await asyncio.gather(*others)]

    async def not_ready(self, states: list[State | None]) -> list[str]:
        """Why the service is not ready."""
        settings = self.inside.settings
        if not self.view.has_store:
            return health.not_ready(states, settings.intake.queue, None, "")
        seen = await self.view.store.get()
        overview = None if seen.fresh is None else seen.fresh.overview
        return health.not_ready(states, settings.intake.queue, overview, seen.error)

    async def live(self, _request: Request) -> Response:
        """Whether this process moves."""
        reasons = health.not_alive(self.inside.state())
        return JSONResponse({"alive": not reasons, "reasons": reasons}, status_code=503 if reasons else 200)

    async def ready(self, _request: Request) -> Response:
        """Whether the service does its work."""
        reasons = await self.not_ready(await self.states())
        return JSONResponse(
            {"ready": not reasons, "reasons": reasons, "mode": self.inside.settings.mode},
            status_code=503 if reasons else 200,
        )

    async def metrics(self, _request: Request) -> Response:
        """For Prometheus."""
        states, depths = await asyncio.gather(self.states(), self.view.depths.get())
        store = census = None
        if self.view.has_store:
            store, census = await asyncio.gather(self.view.store.get(), self.view.census.get())
        sight = Sight(
            states,
            store,
            census,
            depths,
            ready=not await self.not_ready(states),
            roles=metrics.roles(self.inside.settings),
        )
        return Response(metrics.text(sight), headers={"Content-Type": CONTENT_TYPE_LATEST})
