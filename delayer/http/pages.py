"""The page: overview, waiting, held and refused messages, one message, schedules. Only actions.py makes changes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from delayer.amqp.errors import BrokerLost
from delayer.config.errors import format_found
from delayer.config.texts import is_loopback, names_of
from delayer.config.tokens import Role
from delayer.core.errors import StoreLost
from delayer.core.filters import OWN, Filter, Token, place_text, read_token
from delayer.core.message import raw
from delayer.core.readable import delayed_rows
from delayer.fields import as_json
from delayer.format import reading
from delayer.http import forms, recent, render
from delayer.http.absence import why_absent
from delayer.http.access import Sessions, cookie_of, name_of
from delayer.http.forms import FieldError, parse_form
from delayer.http.health import Answers
from delayer.http.problems import CORRECT_FORM, HttpProblem, by_program, problem_response
from delayer.http.view import ROWS, STORE_ERRORS
from delayer.schedule.schedule import ScheduleState
from delayer.set_aside.messages import SetAsideName
from delayer.store import held_messages, waiting
from delayer.store.admin import audit_log, detail
from delayer.store.admin.detail import FoundIn, FullMessage
from delayer.store.schedules import reading as schedules
from delayer.store.session import read_connection

MOST_COUNTED: Final = 1_000
"""Maximum number of a filter's messages that a page counts."""
MOST_BODY: Final = 1 << 20
"""Maximum bytes of a body that the page reads, because 128 clients may request one at a time."""
_FAILURES: Final = {
    400: "Not understood", 403: "Locked", 404: "There is nothing here", 413: "Too large for the page", 503: "Not done",
}  # fmt: skip


class Unnamed(HttpProblem):
    """No message has this message_id, or several have. A page lists them instead."""


def _list_of(request: Request) -> Response:
    name = request.path_params["name"]
    return RedirectResponse("/waiting?" + render.query({}, message_id=name), status_code=303)


async def _named(connection: Any, text: str) -> list[Token]:
    """Find the waiting or held messages called ``text`` (see OWN)."""
    with suppress(ValueError):
        return [read_token(text)]
    (tokens,) = (await waiting.find_by_name(connection, [raw(text)], packed=False)).values()
    return tokens


def _around(request: Request, form: forms.Search, trail: forms.Trail, rows: int, onward: str) -> dict[str, Any]:
    """Build the links to the first, the previous and the next page, and the range of row numbers. ``onward``: where the
    next page begins, empty on the last one."""
    path, back, here = request.url.path, trail.previous, trail.numbers(rows, ROWS)
    after = trail.next(onward, full=rows == ROWS)
    return {
        "previous": "" if back is None else f"{path}?{render.query(form.given, **back)}".rstrip("?"),
        "first": path + (f"?{render.query(form.given)}" if form.given else "") if trail.after else "",
        "next": f"{path}?{render.query(form.given, **after)}" if onward else "",
        "numbers": f"{render.number(here[0])}–{render.number(here[1])}" if here else "",
        "given": form.given,
    }


@dataclass(frozen=True, slots=True)
class Pages:
    """The handlers of all read-only pages."""

    answers: Answers
    sessions: Sessions

    async def html(self, request: Request, template: str, status: int = 200, **values: Any) -> Response:
        """Render a page with the parts common to every page."""
        readable = self.readable(request)
        return render.html(
            template,
            status,
            here="/" + request.url.path.strip("/").partition("/")[0],
            session=self.sessions.session(request),
            acts=self.sessions.allows(request, Role.ACT),
            can_open=self.sessions.can_open,
            names=names_of(self.answers.settings) if readable else {},
            counts=await self.answers.set_aside() if readable else {},
            has_store=self.answers.has_store,
            notice=self.sessions.take_notice(request),
            **values,
        )

    async def failed(self, request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            advice = error.advice if isinstance(error, BrokerLost | StoreLost) else ""
            status = 400 if isinstance(error, FieldError) else 503
            text = str(error) or type(error).__name__
            if not isinstance(error, (FieldError, BrokerLost, *STORE_ERRORS)):
                status, text = 500, "A bug. The daemon's log has it."
            errors = [error.wrong] if isinstance(error, FieldError) and error.wrong else []
            if errors and not request.url.path.startswith("/api/"):
                advice = CORRECT_FORM
            error = HttpProblem(status, text, next_step=advice, errors=errors)
        if by_program(request):
            return problem_response(request, error)
        status, text = error.status_code, error.detail
        heading, back = _FAILURES.get(status, text), getattr(request.state, "back", "/")
        return await self.html(request, "done.html", status, heading=heading, lines=[text], back=back)

    def readable(self, request: Request) -> bool:
        """Whether this client may read: on loopback, if the page is open, or with a token."""
        http = self.answers.settings.http
        local = is_loopback(http.listen.rpartition(":")[0])
        return local or http.open or self.sessions.allows(request, Role.READ)

    async def overview(self, request: Request) -> Response:
        census = await self.answers.census.get() if self.answers.has_store else None
        value, settings = None if census is None else census.value, self.answers.settings
        rates = recent.sent_rates(self.answers.inside.state().recent, 60.0)
        largest = [] if value is None else render.destinations(value, rates)
        return await self.html(
            request,
            "overview.html",
            **await self._live(),
            series=render.series(value),
            routes=[] if value is None else render.routes(value, [raw(one.from_) for one in settings.routes]),
            destinations=largest,
            destinations_note="" if value is None else render.destinations_note(value, largest),
            census_note="" if census is None else render.backlog_note(value, census.error),
        )

    async def part(self, _request: Request) -> Response:
        return render.html("parts_overview.html", **await self._live())

    async def _live(self) -> dict[str, Any]:
        state, depths = self.answers.inside.state(), await self.answers.depths.get()
        store = await self.answers.store.get() if self.answers.has_store else None
        overview, seen = None if store is None else store.fresh, depths.fresh
        return {
            "reasons": await self.answers.not_ready(),
            "blocked": render.blocked(state),
            "store": None if overview is None or overview.upgrade_pending else overview,
            "store_error": "" if store is None else store.error,
            "broker_error": depths.error,
            "cascade": None if seen is None else sum(depth or 0 for depth in seen.levels.values()),
            "depths": seen,
            "delayed": [] if seen is None else delayed_rows(seen.delayed),
            "state": state,
            "settings": self.answers.settings,
            "now": recent.summary(state.recent, 60.0),
        }

    async def find(self, request: Request) -> Response:
        """Redirect from a typed name to its message's page."""
        name = quote(request.query_params.get("id", "").strip(), safe="")
        return RedirectResponse(f"/message/{name}" if name else "/waiting", status_code=303)

    async def waiting(self, request: Request) -> Response:
        """List waiting messages. A filter's messages are counted during the search, up to MOST_COUNTED."""
        query = request.query_params
        forms.reject_duplicates([name for name, _ in query.multi_items()])
        form, trail = forms.searched(query, self.answers.now_ms), forms.Trail.of(query)
        wanted, after = form.wanted, forms.place(trail.after) or waiting.BEGINNING
        async with read_connection(self.answers.url, "list") as connection:
            found = await waiting.find(connection, wanted, ROWS if wanted.everything else MOST_COUNTED, after)
        rows = found.messages[:ROWS]
        end = rows[-1].place[:2] if len(found.messages) > ROWS else found.after
        whole = render.number(len(found.messages) + ROWS * len(trail.before or ()))
        total = whole if found.after is None else f"more than {whole}"
        return await self.html(
            request,
            "waiting.html",
            rows=rows,
            total=await self._total("waiting") if wanted.everything else total,
            back="/waiting" + (f"?{request.url.query}" if request.url.query else ""),
            bounded=found.bounded and len(rows) < ROWS,
            broken=len(found.broken),
            **_around(request, form, trail, len(rows), "" if end is None else place_text(end)),
        )

    async def _total(self, of: str) -> str:
        """Read the number of all "held" messages, or of "waiting" messages including segments, from the counters."""
        seen = (await self.answers.store.get()).fresh
        if seen is None:
            return ""
        return render.number(seen.held if of == "held" else seen.waiting + seen.segments.messages)

    async def message(self, request: Request) -> Response:
        try:
            found = await self.one(request, request.path_params["name"])
        except Unnamed:
            return _list_of(request)
        shown = found.entry.body[:16_384]
        return await self.html(
            request,
            "message.html",
            token=str(found.entry.place.token),
            found=found,
            fate=render.name(detail.predict(found)),
            where=render.name(as_json.standing(found)),
            said=reading.decode_properties(found.entry.properties, whole=False),
            body=reading.preview(shown, len(shown)),
            shown=len(shown),
        )

    async def body(self, request: Request) -> Response:
        """Send a message's body as a file."""
        try:
            found = await self.one(request, request.path_params["name"])
        except Unnamed:
            return _list_of(request)
        place, body = found.entry.place, found.entry.body
        if len(body) < found.entry.size:
            raise HTTPException(413, f"Expected at most {MOST_BODY} bytes. Next: `delayer show {place.token} --body`.")
        # Stops browsers from rendering or running it.
        headers = {"Content-Disposition": f'attachment; filename="{place.id}.bin"'}
        return Response(body, headers=headers, media_type="application/octet-stream")

    async def one(self, request: Request, text: str) -> FullMessage:
        """Find the message of this id or unique message_id. Raises HTTPException if there is none."""
        found: FullMessage | FoundIn = FoundIn.NOWHERE
        async with read_connection(self.answers.url, "show") as connection:
            tokens = await _named(connection, text)
            if len(tokens) == 1:
                found = await detail.find_message(connection, tokens[0], most=MOST_BODY)
        if len(tokens) != 1 and not text.startswith(OWN):
            raise self._unnamed(text, len(tokens))
        if isinstance(found, FoundIn):
            why = detail.describe_absence(tokens[0] if len(tokens) == 1 else text[:80], found)
            raise HttpProblem(404, why, next_step="look at GET /api/messages, /api/held and /api/refused")
        return found

    def _unnamed(self, name: str, found: int) -> Unnamed:
        which = f"with the message_id {format_found(name)}"
        listed = f"GET /api/messages?message_id={quote(name, safe='')}"
        if found:
            several = f"Expected one message {which}, found {found}."
            return Unnamed(404, several, next_step=f"list them with {listed}, and ask for one by its id")
        why, step = why_absent(which, self.answers.settings, self.answers.inside.state())
        by_key = f"GET /api/messages?key={quote(name, safe='')}"
        return Unnamed(404, why, next_step=f"{step}; {listed} finds compacted messages too, and {by_key} finds a key")

    async def held(self, request: Request) -> Response:
        query = request.query_params
        forms.reject_duplicates([name for name, _ in query.multi_items() if name != "id"])
        form, trail = forms.searched(query, self.answers.now_ms, forms.HELD_FIELDS), forms.Trail.of(query)
        after = forms.token(trail.after).id if trail.after else 0
        async with read_connection(self.answers.url, "list held messages") as connection:
            page = await held_messages.find(connection, form.wanted, ROWS, after)
            groups = [] if form.given or after else await held_messages.count_groups(connection)
        around = _around(request, form, trail, len(page.messages), "" if page.after is None else str(Token(page.after)))
        total = "" if form.given else await self._total("held")
        return await self.html(request, "held.html", page=page, groups=groups, total=total, **around)

    async def set_aside(self, request: Request, *, name: SetAsideName) -> Response:
        """List the first refused messages or strays."""
        seen = await self.answers.aside[name].get(patience=60.0)
        if (there := seen.fresh) is None:
            raise HTTPException(503, seen.error or "no answer yet")
        return await self.html(request, f"{name}.html", there=there, queue=self.answers.settings.refused.queue)

    async def schedules(self, request: Request) -> Response:
        """List schedules in the order of their names, of one state if the query names it."""
        query = request.query_params
        forms.reject_duplicates([name for name, _ in query.multi_items()])
        forms.reject_unknown(query, ("state", "after", "trail"))
        state, trail = forms.schedule_state(query.get("state", "")), forms.Trail.of(query)
        async with read_connection(self.answers.url, "list schedules") as connection:
            page = await schedules.find(connection, ROWS, forms.schedule_name(trail.after), state)
            held = await held_messages.count_by_schedule(connection)
        form = forms.Search(Filter(), {} if state is None else {"state": state.value})
        around = _around(request, form, trail, len(page.schedules), page.after or "")
        rows = [as_json.schedule(one, held, whole=False) for one in page.schedules]
        back = "/schedules" + (f"?{request.url.query}" if request.url.query else "")
        return await self.html(
            request,
            "schedules.html",
            rows=rows,
            states=list(ScheduleState),
            total=around["numbers"].partition("–")[2] if page.after is None else "",
            bounded=False,
            back=back,
            **around,
        )

    async def audit_log(self, request: Request) -> Response:
        before = forms.number(request.query_params.get("before", ""))
        async with read_connection(self.answers.url, "audit-log") as connection:
            rows = await audit_log.list_entries(connection, ROWS, before)
        more = f"/audit-log?before={rows[-1].id}" if len(rows) == ROWS else ""
        part = bool(more or before)
        return await self.html(request, "audit_log.html", rows=rows, next=more, part=part)

    async def login(self, request: Request) -> Response:
        """Show the form for a token, or open a session with it."""
        if request.method == "GET":
            return await self.html(request, "login.html", wrong="", who="")
        try:
            form = await parse_form(request)
        except FieldError as wrong:
            return await self.html(request, "login.html", 400, wrong=str(wrong), who="")
        who, token = (form.get(name, [""])[0].strip() for name in ("who", "token"))
        who = name_of(who)
        if not who:
            return await self.html(request, "login.html", 400, wrong="Say who you are.", who=who)
        host = request.client.host if request.client else "?"
        session = self.sessions.open(token, who, host)
        if session is None:
            return await self.html(request, "login.html", 403, wrong="No token with the role read or act.", who=who)
        answer = RedirectResponse("/", status_code=303)
        # Not "secure", because the daemon serves HTTP without TLS. A proxy may add TLS.
        answer.set_cookie(cookie_of(request), session, httponly=True, samesite="strict", path="/")
        return answer

    async def locked(self, request: Request) -> Response:
        """Answer a client that needs a token to read."""
        wrong = "Reading needs a token, unless [http] open is set."
        return await self.html(request, "login.html", 403, wrong=wrong, who="")

    async def logout(self, request: Request) -> Response:
        self.sessions.close(request)
        answer = RedirectResponse("/", status_code=303)
        answer.delete_cookie(cookie_of(request), httponly=True, samesite="strict", path="/")
        return answer
