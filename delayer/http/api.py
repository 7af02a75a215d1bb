"""The API: what /api/… serves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast

from starlette.exceptions import HTTPException
from starlette.routing import Route

from delayer.config.texts import service_of
from delayer.core import horizon
from delayer.core.filters import Token
from delayer.fields import as_json
from delayer.fields.shapes import BacklogJson, HeldMessagesJson, LatenessJson, LiveJson, SetAsideJson
from delayer.http import forms, openapi, recent, render
from delayer.http.api_messages import MOST_BYTES, PATH, Listing, MessagesApi
from delayer.http.api_schedules import SchedulesApi
from delayer.http.endpoints import Api, Call, Endpoint
from delayer.http.pages import Pages
from delayer.http.view import ROWS, no_store
from delayer.set_aside.messages import SetAsideName
from delayer.store import held_messages
from delayer.store.session import read_connection

LARGER: Final = {PATH: MOST_BYTES}


class HeldListing(Listing):
    """A filter of held messages: all given fields match. An empty field means any."""

    kind: str = ""


@dataclass
class WholeApi:
    """All endpoints."""

    pages: Pages
    change_turns: asyncio.Semaphore
    looks: asyncio.Semaphore

    @property
    def routes(self) -> list[Route]:
        return self._api.routes

    @cached_property
    def _api(self) -> Api:
        shared = self.pages, self.change_turns, self.looks
        parts = MessagesApi(*shared), SchedulesApi(*shared)
        endpoints = [
            Endpoint("GET", "/api/openapi.json", self.describe_api, dict[str, Any], role=None),
            Endpoint("GET", "/api/live", self.show_rates, LiveJson, role=None),
            Endpoint("GET", "/api/backlog", self.count_backlog, BacklogJson, role=None, problems=(404,)),
            Endpoint("GET", "/api/held", self.list_held, HeldMessagesJson, query=HeldListing, problems=(404,)),
            Endpoint("GET", "/api/refused", self.list_refused, SetAsideJson),
            Endpoint("GET", "/api/strays", self.list_strays, SetAsideJson),
            *(endpoint for part in parts for endpoint in part.endpoints),
        ]
        return Api(endpoints, self.pages)

    @cached_property
    def _document(self) -> dict[str, Any]:
        return openapi.document(self._api.paths, LARGER)

    async def describe_api(self, _call: Call) -> dict[str, Any]:
        """Describe the API, as OpenAPI 3.1."""
        return self._document

    async def show_rates(self, _call: Call) -> LiveJson:
        """Show the rates and the lateness of the last quarter of an hour, and the mode of this daemon."""
        answers = self.pages.answers
        state = answers.inside.state()
        return {
            "series": recent.series(state.recent),
            "last": {
                str(seconds): cast(LatenessJson, recent.summary(state.recent, seconds)._asdict())
                for seconds in (60, 300, 900)
            },
            "blocked": render.blocked(state),
            "intake": state.intake,
            "service": service_of(answers.settings),
            "mode": answers.settings.mode,
        }

    async def count_backlog(self, _call: Call) -> BacklogJson:
        """Count the waiting messages by due time."""
        answers = self.pages.answers
        if not answers.has_store:
            raise no_store()
        census = await answers.census.get()
        if census.value is None:
            raise HTTPException(503, census.error or "not counted yet")
        counts = census.value.together()
        return {
            "taken_ms": census.value.taken_ms,
            "note": render.backlog_note(census.value, census.error),
            "series": {
                one.name: {"step": one.step, "bars": [round(count) for count in horizon.bars(counts, one)]}
                for one in horizon.SERIES
            },
        }

    async def list_held(self, call: Call) -> HeldMessagesJson:
        """List held messages, 50 at a time, in the order of their arrival."""
        given = {name: text for name, text in call.query.model_dump().items() if text}
        form = forms.searched(given, self.pages.answers.now_ms, forms.HELD_FIELDS)
        after = forms.token(given["after"]).id if "after" in given else 0
        async with self.looks, read_connection(self.pages.answers.url, "list held messages") as connection:
            page = await held_messages.find(connection, form.wanted, ROWS, after)
        onward = "" if page.after is None else f"/api/held?{render.query(form.given, after=str(Token(page.after)))}"
        messages = [as_json.held(one, whole=False) for one in page.messages]
        return {"messages": messages, "bounded": page.bounded, "next": onward}

    async def list_refused(self, _call: Call) -> SetAsideJson:
        """List the first 50 refused messages."""
        return await self._set_aside("refused")

    async def list_strays(self, _call: Call) -> SetAsideJson:
        """List the first 50 strays."""
        return await self._set_aside("strays")

    async def _set_aside(self, name: SetAsideName) -> SetAsideJson:
        seen = await self.pages.answers.aside[name].get(patience=60.0)
        if seen.fresh is None:
            raise HTTPException(503, seen.error or "no answer yet")
        return cast(SetAsideJson, seen.fresh.as_dict(whole=False))
