"""Changes over HTTP: cancel, reschedule, retry, drop. Each needs the token and is written to the audit log.

A form of the page gets its answer as a page, a program (``Accept: application/json``) as JSON.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from delayer.amqp import reading
from delayer.config.topology import unread_delays
from delayer.core.errors import BrokerLost
from delayer.core.filters import Token
from delayer.core.message import as_text
from delayer.core.readable import instant
from delayer.http import forms, render
from delayer.http.forms import FieldError, Search
from delayer.http.pages import Pages
from delayer.http.recent import host_ms
from delayer.http.view import STORE_ERRORS
from delayer.intake.refusals import AS_IT_IS
from delayer.intake.set_aside import Result
from delayer.store import held_messages, waiting
from delayer.store.admin import actions
from delayer.store.admin.actions import PAST, Do, NewDue
from delayer.store.admin.detail import ABSENT, FoundIn, absent
from delayer.store.session import looking
from delayer.store.waiting import CountedMessages, Entry

_RETRIED: Final = {"refused": "Published again", "strays": "On their way again"}
SHOWN: Final = 20
"""Messages that a question names; it counts the others."""
_LOCKED: Final = "This needs the token: give it on the page, or send the header `Authorization: Bearer TOKEN`."
_WRONG: Final = "That is not the token: expected `Authorization: Bearer TOKEN`."


@dataclass(frozen=True, slots=True)
class ActionResult:
    """The result of a change, for a page and for programs."""

    heading: str
    lines: Sequence[str]
    done: int
    back: str
    status: int = 200


ChangeHandler = Callable[[Request, str, Mapping[str, Any]], Awaitable[ActionResult | Response]]
"""A change by a form: the request, the operator, and the fields."""


@dataclass(frozen=True, slots=True)
class Actions:
    """The handlers of all changes."""

    pages: Pages
    turns: asyncio.Semaphore

    async def answer(self, request: Request, *, change: ChangeHandler) -> Response:
        """Answer a request for one of the changes below."""
        as_json = "application/json" in request.headers.get("accept", "")
        form: dict[str, list[str]] = {}
        try:
            who = self.pages.sessions.who(request)
            line = _WRONG if "authorization" in request.headers else _LOCKED
            result: ActionResult | Response = ActionResult("Locked", [line], 0, "/login", 403)
            if who is not None:
                form = await forms.said(request)
                # A change goes on when its client closes the connection.
                result = await asyncio.shield(self._in_turn(change(request, who, form)))
        except FieldError as wrong:
            back = forms.back(form, request.url.path)
            if not as_json and form.get("verb") == ["reschedule"] and {"id", "all", *forms.FIELDS} & form.keys():
                result = await self._mend(request, form, str(wrong), back)
            else:
                result = ActionResult("Not understood", [str(wrong)], 0, back, 400)
        except (BrokerLost, *STORE_ERRORS) as error:
            result = ActionResult("Not done", [str(error)], 0, "/", 503)
        if isinstance(result, Response):
            return result
        # Not after a refused request, because a look at a backlog is expensive.
        if result.done or result.status == 503:
            for part in self.pages.answers.view.parts:
                part.forget()
        if as_json:
            return JSONResponse(
                {"heading": result.heading, "lines": list(result.lines), "done": result.done}, status_code=result.status
            )
        notice = result.heading, result.lines
        if result.status == 200 and not _by_program(request) and self.pages.sessions.leave(request, notice):
            return RedirectResponse(result.back, status_code=303)
        return await self.pages.html(
            request, "done.html", result.status, heading=result.heading, lines=result.lines, back=result.back
        )

    async def _in_turn(self, change: Awaitable[ActionResult | Response]) -> ActionResult | Response:
        async with self.turns:
            return await change

    async def named(self, request: Request, who: str, form: Mapping[str, Any]) -> ActionResult | Response:
        """Messages by their ids: cancel, reschedule, retry."""
        forms.known(form, ("verb", "id", "at", "by", "back", "confirmed"))
        verb, tokens = forms.verb(form, "cancel", "reschedule", "retry"), forms.tokens(form)
        back = forms.back(form, request.url.path)
        if (question := await self._sure(request, verb, form, back)) is not None:
            return question
        if verb == "retry":
            return await self._retry(who, "retry", tokens, back)
        do, new = _do(verb, form)
        asked = {"ids": [str(token) for token in tokens], **new}
        async with actions.recorded(self.pages.answers.view.url, who, verb, asked) as (connection, log_id):
            found = await actions.named(connection, do, tokens, log_id)
        done = actions.met(found)
        lines = [absent(token, where) for token in tokens if (where := found[token.id]) in ABSENT]
        return ActionResult(f"{PAST[verb]}: {done} of {len(found)}", lines, done, back)

    async def held(self, request: Request, who: str, form: Mapping[str, Any]) -> ActionResult | Response:
        """Held messages by their ids: retry, drop."""
        forms.known(form, ("verb", "id", "back", "confirmed"))
        verb, tokens = forms.verb(form, "retry", "drop"), forms.tokens(form)
        if (question := await self._sure(request, verb, form, "/held")) is not None:
            return question
        return await self._retry(who, verb, tokens, "/held")

    async def _retry(self, who: str, verb: str, tokens: Sequence[Token], back: str) -> ActionResult:
        ids = [token.id for token in tokens]
        url, asked = self.pages.answers.view.url, {"ids": list(map(str, tokens))}
        async with actions.recorded(url, who, f"held {verb}", asked) as (connection, log_id):
            dues = held_messages.dues_of(await held_messages.named(connection, ids))
            done = await actions.change_held(connection, verb, dues, log_id)
        lines = [f"{len(ids) - done} are not held any more."] if done < len(ids) else []
        return ActionResult(f"{PAST[verb]}: {done} of {len(ids)}", lines, done, back)

    async def held_filtered(self, request: Request, who: str, form: Mapping[str, Any]) -> ActionResult | Response:
        """All held messages that match a filter: counted first, then retried or dropped once a person confirmed."""
        forms.known(form, ("verb", *forms.HELD_FIELDS, "all", "confirmed", "counted", "typed"))
        verb, url = forms.verb(form, "retry", "drop"), self.pages.answers.view.url
        filter_ = forms.meant(form, host_ms(), forms.HELD_FIELDS)
        test = reading.properties_test(filter_.wanted)
        if not _confirmed(request, form):
            async with looking(url, f"count for {verb}") as connection:
                meant = CountedMessages(len(await held_messages.matching(connection, filter_.wanted, test)), 0)
            return await self._confirm(request, verb, filter_, {"by": "", "wrong": form.get("typed", [""])[0]}, meant)
        async with actions.recorded(url, who, f"held {verb}", filter_.wanted.as_dict()) as (connection, log_id):
            dues = await held_messages.matching(connection, filter_.wanted, test)
            done = await actions.change_held(connection, verb, dues, log_id)
        return ActionResult(f"{PAST[verb]}: {render.number(done)}", [], done, "/held")

    async def set_aside(
        self, request: Request, who: str, form: Mapping[str, Any], *, name: Literal["refused", "strays"]
    ) -> ActionResult | Response:
        """Refused messages or strays by their ids: drop, or retry, refused ones with changes of their headers."""
        forms.known(form, ("verb", "id", "back", "confirmed", *(forms.MENDS if name == "refused" else ())))
        verb, ids, inside = forms.verb(form, "retry", "drop"), forms.ids(form), self.pages.answers.inside
        if (question := await self._sure(request, verb, form, f"/{name}")) is not None:
            return question
        mend = forms.mend(form, unread_delays(inside.settings)) if verb == "retry" else AS_IT_IS
        done, again = await inside.change_aside(name, verb, frozenset(ids), who, mend)
        count, left = len(done.found), [(one.id, why) for one, why in done.left]
        lines = _left(len(ids), count, left + ([("the rest", "too many stand before it")] if done.cut else []))
        lines += [f"Refused again within 2 s: {again}."] if verb == "retry" and name == "refused" and count else []
        past = _RETRIED[name] if verb == "retry" else PAST[verb]
        return ActionResult(f"{past}: {count} of {len(ids)}", lines, count, f"/{name}")

    async def filtered(self, request: Request, who: str, form: Mapping[str, Any]) -> ActionResult | Response:
        """All messages that match a filter: counted first, then changed once a person confirmed."""
        forms.known(form, ("verb", *forms.FIELDS, "all", "at", "by", "confirmed", "counted", "typed"))
        verb = forms.verb(form, "cancel", "reschedule")
        filter_ = forms.meant(form, host_ms())
        do, new = _do(verb, form)
        test = reading.properties_test(filter_.wanted)
        if not _confirmed(request, form):
            async with actions.acting(self.pages.answers.view.url, f"count for {verb}") as connection:
                meant = await waiting.count(connection, filter_.wanted, test)
            new |= {"by": form.get("by", [""])[0], "wrong": form.get("typed", [""])[0]}
            return await self._confirm(request, verb, filter_, new, meant)
        asked = {**filter_.wanted.as_dict(), **new}
        async with actions.recorded(self.pages.answers.view.url, who, verb, asked) as (connection, log_id):
            found: Counter[FoundIn] = await actions.every(
                connection, do, filter_.wanted, test, log_id=log_id, say=lambda _done: None
            )
        lines, done = actions.unmet(found), actions.met(found)
        counted = form.get("counted", [""])[0]
        if counted.isdecimal() and counted != str(done):
            lines.append(f"{render.number(int(counted[:15]))} were counted before: others came or went meanwhile.")
        return ActionResult(f"{PAST[verb]}: {render.number(done)}", lines, done, _waiting(filter_))

    async def _confirm(
        self, request: Request, verb: str, filter_: Search, new: Mapping[str, Any], meant: CountedMessages
    ) -> Response:
        if _by_program(request):
            return JSONResponse({"matched": meant.messages, "broken_segments": meant.broken, "confirmed": False})
        at_ms, by = new.get("at_ms"), new["by"] if "by_ms" in new else ""
        moved = f": {by.lstrip('+-')} {'earlier' if by.startswith('-') else 'later'}" if by else ""
        # "2h" stays the instant that was counted and shown, however late the person confirms.
        given = forms.fixed(filter_)
        fields = [*given.items(), *([] if given else [("all", "yes")])]
        fields += [
            ("at", "" if at_ms is None else instant(at_ms, exact=True)),
            ("by", by),
            ("counted", str(meant.messages)),
        ]
        return await self.pages.html(
            request,
            "confirm.html",
            verb=verb,
            count=meant.messages,
            broken=meant.broken,
            facts=list(given.items()) or [("filter", "none")],
            to=moved if at_ms is None else f" to {instant(at_ms)}",
            path=request.url.path,
            fields=[one for one in fields if one[1] or one[0] in forms.NAMES],
            typed=not given,
            wrong=new["wrong"],
            back=_waiting(filter_) if request.url.path == "/actions/filtered" else "/held",
        )

    async def _mend(self, request: Request, form: Mapping[str, Sequence[str]], wrong: str, back: str) -> Response:
        """The same form again with its texts, because its instant cannot be read."""
        kept = [(name, text) for name, texts in form.items() if name not in ("verb", "at", "by") for text in texts]
        return await self.pages.html(
            request,
            "mend.html",
            400,
            wrong=wrong,
            facts=_first([one for one in kept if one[0] in ("id", *forms.FIELDS)]),
            fields=kept,
            path=request.url.path,
            back=back,
            at=form.get("at", [""])[0],
            by=form.get("by", [""])[0],
        )

    async def _sure(self, request: Request, verb: str, form: Mapping[str, Sequence[str]], back: str) -> Response | None:
        """The question before messages are cancelled or dropped; None once it was answered, and for programs."""
        if verb not in ("cancel", "drop") or form.get("confirmed") == ["yes"] or _by_program(request):
            return None
        ids = forms.ids(form)
        told = await self._told(request.url.path, ids[:SHOWN])
        facts = _first([(one, told.get(one, "not there any more")) for one in ids])
        fields = [("back", back), *(("id", one) for one in ids)]
        more: Any = {"fields": fields, "path": request.url.path, "back": back}
        return await self.pages.html(request, "confirm.html", verb=verb, count=len(ids), facts=facts, **more)

    async def _told(self, path: str, ids: Sequence[str]) -> dict[str, str]:
        """For each message the text of a question: its destination, instant, key and message_id."""
        view = self.pages.answers.view
        if (aside := {"/actions/refused": view.refused, "/actions/strays": view.strays}.get(path)) is not None:
            seen = (await aside.get()).fresh or Result(0)
            return {one.id: f"{one.place}, {one.reason}" for one in seen.found}
        wanted = {forms.token(text): text for text in ids}
        async with looking(view.url, "show") as connection:
            there, _ = await waiting.named(connection, list(wanted))
            there += [one.entry for one in await held_messages.named(connection, [token.id for token in wanted])]
        told = {one.place.id: _in_words(one) for one in there}
        return {text: told[token.id] for token, text in wanted.items() if token.id in told}


def _in_words(entry: Entry) -> str:
    name, key = reading.message_id(entry.properties), entry.key
    parts = [reading.address(entry.to_exchange, entry.to_key), f"due {instant(entry.place.due_ms)}"]
    parts += [f"message_id {as_text(name)}"] if name else []
    return ", ".join([*parts, *([f"key {as_text(key)}"] if key is not None else [])])


def _left(asked: int, done: int, left: Sequence[tuple[str, str]]) -> list[str]:
    """The messages that stay in their queue, and those that are gone."""
    lines = [f"{name or 'One without an id'} stays there: {why}." for name, why in left]
    missing = asked - done - len(left)
    return [*lines, *([f"{missing} are not there any more."] if missing > 0 else [])]


def _first(facts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The messages that a question names, and the number of the others."""
    more = len(facts) - SHOWN
    return [*facts[:SHOWN], *([("and", f"{more} more")] if more > 0 else [])]


def _waiting(filter_: Search) -> str:
    return "/waiting" + (f"?{render.query(filter_.given)}" if filter_.given else "")


def _by_program(request: Request) -> bool:
    """Whether a program sent the request, with the token in a header or for JSON. Programs are asked no question."""
    return "authorization" in request.headers or "application/json" in request.headers.get("accept", "")


def _confirmed(request: Request, form: Mapping[str, Sequence[str]]) -> bool:
    """Whether the change was confirmed: by a person, where nothing narrows it, with the number typed in."""
    confirmed, typed, counted = (form.get(name, [""])[0].strip() for name in ("confirmed", "typed", "counted"))
    narrowed = "all" not in form or _by_program(request)
    return confirmed == "yes" and (narrowed or (typed == counted and counted.isdecimal()))


def _do(verb: str, form: Mapping[str, Sequence[str]]) -> tuple[Do, dict[str, int]]:
    """The change of each message, and the new instant for the audit log."""
    if verb == "cancel":
        return actions.cancel, {}
    at, by = (form.get(name, [""])[0].strip() for name in ("at", "by"))
    if bool(at) == bool(by):
        raise FieldError("Say the new instant: either when it is due, or by how much later.")
    if at:
        at_ms = forms.instant(at, host_ms(), "Due at")
        return partial(actions.reschedule, when=NewDue(at_ms)), {"at_ms": at_ms}
    by_ms = forms.later(by)
    return partial(actions.reschedule, when=NewDue(None, by_ms)), {"by_ms": by_ms}
