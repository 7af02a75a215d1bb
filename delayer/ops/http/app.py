"""Where answers come from, and those for programs: health and metrics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from delayer.ops.http import health, metrics
from delayer.ops.http.metrics import Sight
from delayer.ops.http.ports import Inside
from delayer.ops.http.view import View


@dataclass(frozen=True, slots=True)
class Answers:
    """Where answers come from."""

    inside: Inside
    view: View

    async def not_ready(self) -> list[str]:
        """Why the daemon is not ready."""
        state, intake = self.inside.state(), self.inside.settings.intake.queue
        if not self.view.has_store:
            return health.not_ready(state, intake, None, "")
        seen = await self.view.store.get()
        overview = None if seen.fresh is None else seen.fresh.overview
        return health.not_ready(state, intake, overview, seen.error)

    async def live(self, _request: Request) -> Response:
        """Whether this process moves."""
        reasons = health.not_alive(self.inside.state())
        return JSONResponse({"alive": not reasons, "reasons": reasons}, status_code=503 if reasons else 200)

    async def ready(self, _request: Request) -> Response:
        """Whether the daemon does its work."""
        reasons = await self.not_ready()
        return JSONResponse(
            {"ready": not reasons, "reasons": reasons, "mode": self.inside.settings.mode},
            status_code=503 if reasons else 200,
        )

    async def metrics(self, _request: Request) -> Response:
        """For Prometheus."""
        depths = await self.view.depths.get()
        store = census = None
        if self.view.has_store:
            store, census = await asyncio.gather(self.view.store.get(), self.view.census.get())
        sight = Sight(
            self.inside.state(),
            store,
            census,
            depths,
            ready=not await self.not_ready(),
            roles=metrics.roles(self.inside.settings),
        )
        return Response(metrics.text(sight), headers={"Content-Type": CONTENT_TYPE_LATEST})
