"""The application: what is answered at which path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from delayer.ops.http.app import Answers
from delayer.ops.http.deeds import Deeds
from delayer.ops.http.guard import Doors, Guard
from delayer.ops.http.pages import Pages
from delayer.ops.http.turns import Busy, Turns

LOOKS: Final = 4
"""Looks at messages of the store at once, and as many deeds."""
Handler = Callable[[Request], Awaitable[Response]]
STATIC: Final = Path(__file__).parent / "static"


class Files(StaticFiles):
    """Style, scripts and their licences: asked for again only after an upgrade."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = await super().get_response(path, scope)
        answer.headers["Cache-Control"] = "public, max-age=300"
        return answer


def application(answers: Answers) -> Starlette:
    """What uvicorn serves."""
    settings = answers.inside
    doors = Doors(lambda: settings.settings.http.token)
    pages = Pages(answers, doors)
    deeds = Deeds(pages, Turns(LOOKS))

    async def nowhere(request: Request, _error: Exception) -> Response:
        line = "No page of delayer has this address."
        return pages.html(request, "done.html", 404, heading="There is nothing here", lines=[line], back="/")

    looks, queues = Turns(LOOKS), Turns(1)  # two who look into the refused queue would see half of it each

    def in_turn(turns: Turns, answer: Handler) -> Handler:
        async def answered(request: Request) -> Response:
            try:
                async with turns.one():
                    return await answer(request)
            except Busy as busy:
                return pages.html(request, "done.html", 503, heading="Busy", lines=[str(busy)], back=request.url.path)

        return answered

    return Starlette(
        routes=[
            Route("/health/live", answers.live),
            Route("/health/ready", answers.ready),
            Route("/metrics", answers.metrics),
            Route("/", pages.overview),
            Route("/parts/overview", pages.part),
            Route("/api/live", pages.live_json),
            Route("/api/backlog", pages.backlog_json),
            Route("/waiting", in_turn(looks, pages.waiting)),
            Route("/find", in_turn(looks, pages.find)),
            Route("/message/{token}", in_turn(looks, pages.message)),
            Route("/held", in_turn(looks, pages.held)),
            Route("/refused", in_turn(queues, pages.refused)),
            Route("/acts", in_turn(looks, pages.acts)),
            Route("/login", pages.login, methods=["GET", "POST"]),
            Route("/logout", pages.logout, methods=["POST"]),
            Route("/deeds/messages", deeds.messages, methods=["POST"]),
            Route("/deeds/held", deeds.held, methods=["POST"]),
            Route("/deeds/refused", deeds.refused, methods=["POST"]),
            Route("/deeds/filtered", deeds.filtered, methods=["POST"]),
            Mount("/static", Files(directory=STATIC)),
        ],
        middleware=[Middleware(Guard, listen=lambda: settings.settings.http.listen)],
        exception_handlers={404: nowhere},
    )
