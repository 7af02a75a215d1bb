"""Changes over HTTP: of messages and of schedules. Each needs a token and is written to the audit log.

The page's forms get pages as answers, after a confirmation if the change cannot be undone or does not list ids.
Programs (with a token in a header, or ``Accept: application/json``) get JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from delayer.amqp.errors import BrokerLost
from delayer.config.texts import target_text
from delayer.config.tokens import Role
from delayer.config.topology import unread_delays
from delayer.core.filters import Filter, Token
from delayer.core.message import as_text
from delayer.core.readable import instant
from delayer.format import reading
from delayer.format.refusal import NO_EDITS
from delayer.http import forms
from delayer.http.forms import FieldError, Search
from delayer.http.pages import Pages
from delayer.http.problems import by_program
from delayer.http.view import STORE_ERRORS
from delayer.set_aside.messages import Result, SetAsideName
from delayer.store import held_messages, waiting
from delayer.store.admin.actions import change_connection
from delayer.store.admin.changes import MATCHED, OF_HELD, ChangeResult, StoredChange
from delayer.store.errors import ScheduleRefused
from delayer.store.schedules import changes as schedules
from delayer.store.session import clock_ms, read_connection
from delayer.store.waiting import Entry

SHOWN: Final = 20
"""Messages that a confirmation lists; it counts the rest."""
UNCONFIRMED: Final = "nothing was changed; repeat with confirmed=yes"
_ANSWERS: Final = ("back", "confirmed", "counted", "typed")
"""The fields of every form, in addition to the change itself."""

_OF_SCHEDULES: Final = {
    "pause": ("Paused", schedules.pause),
    "resume": ("Resumed", schedules.resume),
    "run": ("Sent now", schedules.run_now),
}
"""The verbs for schedules: the first words of the answer, and the change."""

Form = Mapping[str, Sequence[str]]
ChangeHandler = Callable[[Request, str, Form], Awaitable[ChangeResult | Response]]
"""Makes a change by a form: the request, the operator, and the fields. Returns a response if the form is incomplete."""


@dataclass(frozen=True, slots=True)
class Actions:
    """The handlers of all changes."""

    pages: Pages
    change_turns: asyncio.Semaphore

    async def answer(self, request: Request, *, change: ChangeHandler) -> Response:
        answers, sessions = self.pages.answers, self.pages.sessions
        client = sessions.client(request)
        if client is None or not client.role.allows(Role.ACT):
            request.state.back = "/login"
            problem = sessions.locked(request, Role.ACT, "A change needs a token.")
            raise problem if by_program(request) else HTTPException(403, problem.detail)
        form = await forms.parse_form(request)
        try:
            # A change continues if its client closes the connection.
            result = await asyncio.shield(self._in_turn(change(request, client.who, form)))
        except (BrokerLost, *STORE_ERRORS):
            answers.forget()
            raise
        if isinstance(result, Response):
            return result
        # Only if something changed, because querying a backlog is expensive.
        if result.messages:
            answers.forget()
        if by_program(request):
            return JSONResponse(result.as_dict())
        heading, lines, back = result.heading, result.lines, request.state.back
        if sessions.leave(request, (heading, lines)):
            return RedirectResponse(back, status_code=303)
        return await self.pages.html(request, "done.html", heading=heading, lines=lines, back=back)

    async def _in_turn(self, change: Awaitable[ChangeResult | Response]) -> ChangeResult | Response:
        async with self.change_turns:
            return await change

    async def stored(self, request: Request, who: str, form: Form) -> ChangeResult | Response:
        """Cancel or reschedule messages in the store, by their ids or by a filter; retry or drop held messages."""
        verb = forms.verb(form, "cancel", "reschedule", *OF_HELD)
        fields = forms.HELD_FIELDS if verb in OF_HELD else forms.FIELDS
        forms.reject_unknown(form, ("verb", "id", "all", "at", "by", *fields, *_ANSWERS))
        request.state.back = forms.back(form, "/held" if verb in OF_HELD else "/waiting")
        url, when = self.pages.answers.url, None
        if verb == "reschedule":
            try:
                when = forms.new_due(form, await clock_ms(url, verb))
            except FieldError as wrong:
                if by_program(request):
                    raise
                return await self._instant_again(request, form, str(wrong))
        if "id" in form:
            if form.keys() & {"all", *fields}:
                raise FieldError("id: expected either ids or a filter, found both")
            names = {str(token): token for token in map(forms.token, forms.ids(form))}
            if _needs_question(request, verb, form):
                return await self._ask_about_ids(request, verb, form, await self._told(list(names.values())[:SHOWN]))
            return await StoredChange(url, verb, Filter(), names=names, when=when).carry_out(who)
        search = forms.meant(form, self.pages.answers.now_ms, fields)
        change = StoredChange(url, verb, search.wanted, when=when)
        if _confirmed(request, form):
            shown = form.get("counted", [""])[0].strip()
            known = shown.isdecimal() and len(shown) < 19
            return await change.carry_out(who, ChangeResult(MATCHED, int(shown)) if known else None)
        return await self._ask_about_all(request, form, search, change)

    async def set_aside(self, request: Request, who: str, form: Form, *, name: SetAsideName) -> ChangeResult | Response:
        """Drop or retry refused messages or strays by their ids, with fixes to the headers of refused messages."""
        forms.reject_unknown(form, ("verb", "id", *_ANSWERS, *(forms.RETRY_FIELDS if name == "refused" else ())))
        verb, ids, inside = forms.verb(form, "retry", "drop"), forms.ids(form), self.pages.answers.inside
        request.state.back = f"/{name}"
        if _needs_question(request, verb, form):
            seen = (await self.pages.answers.aside[name].get()).fresh or Result(0)
            told = {one.id: f"{one.place}, {one.reason}" for one in seen.found}
            return await self._ask_about_ids(request, verb, form, told)
        edits = forms.read_retry_edits(form, unread_delays(inside.settings)) if verb == "retry" else NO_EDITS
        return await inside.change_aside(name, verb, frozenset(ids), who, edits)

    async def schedules(self, request: Request, who: str, form: Form) -> ChangeResult:
        """Pause or resume schedules, or send one more message of each now. One transaction for each schedule."""
        forms.reject_unknown(form, ("verb", "name", *_ANSWERS))
        verb, names = forms.verb(form, *_OF_SCHEDULES), forms.schedule_names(form)
        request.state.back = forms.back(form, "/schedules")
        past, change = _OF_SCHEDULES[verb]
        done, lines = 0, list[str]()
        try:
            async with change_connection(self.pages.answers.url, f"schedule {verb}") as connection:
                for name in names:
                    try:
                        await change(connection, name, who=who)
                        done += 1
                    except ScheduleRefused as error:
                        lines.append(f"{name[:100]}: {error}")
        except STORE_ERRORS as lost:
            # An error would make the client send again what is sent.
            if not done:
                raise
            at = done + len(lines)
            lines.append(f"Stopped at {names[at]}, after {at:,}: {lost}. It may be changed; the rest is not.")
        return ChangeResult(past, done, len(names), lines, complete=not lines)

    async def _told(self, tokens: Sequence[Token]) -> dict[str, str]:
        """Describe each message in the store: its destination, instant, key and message_id."""
        async with read_connection(self.pages.answers.url, "show") as connection:
            there, _ = await waiting.find_by_id(connection, tokens)
            there += [one.entry for one in await held_messages.find_by_id(connection, [token.id for token in tokens])]
        told = {one.place.id: _in_words(one) for one in there}
        return {str(token): told[token.id] for token in tokens if token.id in told}

    async def _ask_about_ids(self, request: Request, verb: str, form: Form, told: Mapping[str, str]) -> Response:
        """Confirm before cancelling or dropping messages by their ids. ``told``: the description of each."""
        ids = forms.ids(form)
        facts = [(one, told.get(one, "not there any more")) for one in ids]
        return await self._ask(request, verb, form, facts, count=len(ids))

    async def _ask_about_all(self, request: Request, form: Form, search: Search, change: StoredChange) -> Response:
        counted = await change.count()
        if by_program(request):
            return JSONResponse({**counted.as_dict(), "confirmed": False, "next": UNCONFIRMED})
        # "2h" stays the instant that was counted and shown, however late the operator confirms.
        given, when = forms.with_absolute_times(search), change.when
        fixed = {**given, "counted": str(counted.messages)}
        if when is not None and when.at_ms is not None:
            fixed["at"] = instant(when.at_ms, exact=True)
        return await self._ask(
            request,
            change.verb,
            {**form, **{name: [text] for name, text in fixed.items()}},
            list(given.items()) or [("filter", "none")],
            count=counted.messages,
            lines=counted.lines,
            to="" if when is None else target_text(*when),
            typed=not given,
            wrong=form.get("typed", [""])[0],
        )

    async def _instant_again(self, request: Request, form: Form, wrong: str) -> Response:
        """Show the form again with its values, because its instant is unreadable."""
        facts = [one for one in _fields(form) if one[0] in ("id", *forms.FIELDS)]
        at, by = (form.get(name, [""])[0] for name in ("at", "by"))
        again = {name: texts for name, texts in form.items() if name not in ("at", "by")}
        return await self._ask(request, "reschedule", again, facts, status=400, wrong=wrong, at=at, by=by)

    async def _ask(
        self, request: Request, verb: str, form: Form, facts: Sequence[tuple[str, str]], status: int = 200, **shown: Any
    ) -> Response:
        """Render a form with the fields of ``form``, to be submitted again."""
        more = len(facts) - SHOWN
        facts = [*facts[:SHOWN], *([("and", f"{more} more")] if more > 0 else [])]
        fields = [one for one in _fields(form) if one[0] not in ("verb", "confirmed", "typed")]
        shown |= {"verb": verb, "facts": facts, "fields": fields, "back": request.state.back}
        return await self.pages.html(request, "confirm.html", status, path=request.url.path, **shown)


def _fields(form: Form) -> list[tuple[str, str]]:
    return [(name, text) for name, texts in form.items() for text in texts]


def _in_words(entry: Entry) -> str:
    name, key = reading.message_id(entry.properties), entry.key
    parts = [reading.address(entry.to_exchange, entry.to_key), f"due {instant(entry.place.due_ms)}"]
    parts += [f"message_id {as_text(name)}"] if name else []
    return ", ".join([*parts, *([f"key {as_text(key)}"] if key is not None else [])])


def _needs_question(request: Request, verb: str, form: Form) -> bool:
    """Whether an operator must still confirm a change by ids that cannot be undone."""
    return verb in ("cancel", "drop") and form.get("confirmed") != ["yes"] and not by_program(request)


def _confirmed(request: Request, form: Form) -> bool:
    """Whether a change of all was confirmed; if nothing narrows it, an operator must also type the number."""
    confirmed, typed, counted = (form.get(name, [""])[0].strip() for name in ("confirmed", "typed", "counted"))
    narrowed = "all" not in form or by_program(request)
    return confirmed == "yes" and (narrowed or (typed == counted and counted.isdecimal()))
